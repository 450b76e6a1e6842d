"""What a process finds of values and memory is what the next one reads; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from ferrite.artifact.host_values import Values, infer
from ferrite.artifact.kernels import Kernels
from ferrite.artifact.layout import Layout, layout_of, plan_in, values_in
from ferrite.artifact.native_host import assemble
from ferrite.artifact.plan_memory import plan
from ferrite.host.nodes import HostProgram
from ferrite.host.text import parse_program
from ferrite.loops.index import ZERO

PARTS = """
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    t = aten.t.default(a)
    b = aten.mm.default(t, w)
    del a, t
    parts = aten.split.Tensor(b, 8)
    p = operator.getitem(parts, 1)
    s = aten.sort.default(p)
    values = operator.getitem(s, 0)
    c = aten.mm.default(values, w)
    return (c, values)
"""
CHAIN = """
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    b = aten.mm.default(a, w)
    del a
    c = aten.mm.default(b, w)
    del b
    d = aten.mm.default(c, w)
    del c
    return (d,)
"""


def laid_out(text: str) -> tuple[HostProgram, Values, Layout]:
    program = parse_program(text)
    values = infer(program, {})
    found = layout_of(values, plan(program, values, lambda launch: ZERO))
    assert found is not None
    return program, values, found


@pytest.mark.parametrize(("text", "parts"), [(PARTS, 2), (CHAIN, 0)])
def test_what_is_read_is_what_was_found(text: str, parts: int) -> None:
    program, values, found = laid_out(text)
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Layout)
    read = values_in(carried, program, {})
    assert list(read.tensors.items()) == list(values.tensors.items())  # in one order: words of a program follow it
    assert (read.several, read.views, read.escaped) == (values.several, values.views, values.escaped)
    assert len(read.taken) == len(values.taken) == parts
    assert plan_in(carried, program, read, lambda launch: ZERO) == plan(program, values, lambda launch: ZERO)


@pytest.mark.parametrize("text", [PARTS, CHAIN])
def test_an_assembled_program_runs_from_its_layout(text: str) -> None:
    program = parse_program(text)
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    first = assemble(program, {}, Kernels({}))
    assert first.layout is not None
    again = assemble(program, {}, Kernels({}), layout=first.layout)
    assert (again.block, again.peak) == (first.block, first.peak)
    for one, other in zip(first.function([x, w]), again.function([x, w]), strict=True):
        assert torch.equal(one, other)


def test_sizes_that_change_have_none() -> None:
    program = parse_program("""
def program(s0: Sym(s0), x: f32[s0, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    return (a,)
""")
    assert assemble(program, {}, Kernels({})).layout is None


def changed_value(layout: Layout, name: str, **fields: Any) -> Layout:
    other = msgspec.structs.replace(layout.tensors[name], **fields)
    return msgspec.structs.replace(layout, tensors={**layout.tensors, name: other})


def changed_plan(layout: Layout, **fields: Any) -> Layout:
    return msgspec.structs.replace(layout, plan=msgspec.structs.replace(layout.plan, **fields))


def wrong_layouts() -> dict[str, tuple[str, Layout]]:
    _, _, parts = laid_out(PARTS)
    _, _, good = laid_out(CHAIN)
    places, length = good.plan.places, good.plan.length
    wrong = {
        "a value is missing": msgspec.structs.replace(good, tensors={"x": good.tensors["x"]}),
        "a root that is not there": changed_value(good, "a", root="nobody"),
        "a view that is not there": msgspec.structs.replace(good, views=("nobody",)),
        "no type": changed_value(good, "a", dtype="save"),
        "a size below zero": changed_value(good, "a", sizes=(-16, 16)),
        "a size too many": changed_value(good, "a", sizes=(16, 16, 1)),
        "before its memory": changed_value(good, "a", offset=-1),
        "behind the block": changed_plan(good, places=places | {"a": length}),
        "before the block": changed_plan(good, places=places | {"a": -64}),
        "a block that is too short": changed_plan(good, length=length - 1),
        "memory for nobody": changed_plan(good, places=places | {"nobody": 0}),
        "behind its host": changed_plan(good, hosted={"b": ("d", 64)}),
        "in nobody's memory": changed_plan(good, hosted={"b": ("nobody", 0)}),
    }
    no_part = msgspec.structs.replace(parts, several={**parts.several, "s": (None, None)})
    return {what: (CHAIN, layout) for what, layout in wrong.items()} | {"no part": (PARTS, no_part)}


@pytest.mark.parametrize("what", wrong_layouts())
def test_what_cannot_be_is_refused(what: str) -> None:
    text, layout = wrong_layouts()[what]
    with pytest.raises(ValueError, match=r"layout|no tensor|its memory"):
        assemble(parse_program(text), {}, Kernels({}), layout=layout)
