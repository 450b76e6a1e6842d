"""Host programs: text both ways, frees, generated names, and what a program does with its list of arguments."""

from __future__ import annotations

import gc
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ferrite
from ferrite.artifact.compiled import CompiledGraph, Facts
from ferrite.errors import Malformed, Unsupported
from ferrite.host.nodes import Call, Constant, Free, HostProgram, Input, Launch, Origin, Return
from ferrite.host.plan import plan
from ferrite.host.python import describe, emit
from ferrite.host.text import parse_program, show_program
from ferrite.loops.text import parse_program as parse_loops
from ferrite.syntax import Named, Ref, refs

FACTS = Facts(0, "inference", (), (), ("cpu",), {}, 0.0, "oracle", "python")
TARGETS = ["aten.add.Tensor", "operator.getitem", "higher_order.cond", "torch.sym_max", "my_ops.thing.default"]
TYPES = ["f32[2, s0]", "f32[3, 4].stride(1, 3)", "i64", "Sym(2*s0 + 1)", "NestedInt(s0)", "None", "Generator"]


@st.composite
def programs(draw: Any) -> HostProgram:
    """Straight-line programs over earlier values, with constants and functions."""
    inputs = tuple(
        Input(
            f"x{index}",
            draw(st.sampled_from(TYPES)),
            *(draw(st.booleans()) for _ in range(3)),
            part=draw(st.sampled_from([None, ("x0", 128)])),
        )
        for index in range(draw(st.integers(0, 3)))
    )
    constants = tuple(Constant(f"c{index}", draw(st.sampled_from(TYPES))) for index in range(draw(st.integers(0, 2))))
    names = [entry.name for entry in inputs] + [constant.name for constant in constants]
    calls = []
    for index in range(draw(st.integers(0, 6))):
        pool = [Ref(name) for name in names] + [Named("torch.float32"), 1, -2.5, None, "text # not a remark", [1, 2]]
        args = tuple(draw(st.lists(st.sampled_from(pool), max_size=3)))
        kwargs = draw(st.dictionaries(st.sampled_from(["dim", "dtype"]), st.sampled_from(pool), max_size=2))
        source = draw(st.sampled_from(["", "model.py:41", "übung.py:7"]))
        calls.append(Call(f"v{index}", draw(st.sampled_from(TARGETS)), args, kwargs, source))
        names.append(f"v{index}")
    result = tuple(Ref(name) for name in draw(st.lists(st.sampled_from(names), max_size=3))) if names else ()
    function = plan("body", (Input("a", "f32"),), [Call("b", "aten.sin.default", (Ref("a"),), {})], Ref("b"))
    functions = (function,) if draw(st.booleans()) else ()
    return plan("program", inputs, calls, result, functions, constants)


@given(programs())
def test_text_reads_back(program: HostProgram) -> None:
    text = show_program(program)
    again = parse_program(text)
    assert again == program
    assert show_program(again) == text


@given(programs())
def test_values_are_freed_once_after_their_last_reader(program: HostProgram) -> None:
    returned = set(refs(program.steps[-1].value))  # type: ignore[union-attr]
    constants = {constant.name for constant in program.constants}
    alive = {entry.name for entry in program.inputs}
    for position, step in enumerate(program.steps):
        match step:
            case Call():
                assert set(refs((step.args, step.kwargs))) <= alive | constants
                alive.add(step.result)
            case Free(names=names):
                assert set(names) <= alive
                alive -= set(names)
                before = program.steps[position - 1] if position else None
                if isinstance(before, Call):  # each name was just read or just made
                    assert set(names) <= {before.result, *refs((before.args, before.kwargs))}
            case Return():
                assert position == len(program.steps) - 1
    assert alive == returned - constants


def sine_program(*calls: Call) -> HostProgram:
    calls = calls or (Call("y", "aten.sin.default", (Ref("x"),), {}, "model.py:3"),)
    return plan("program", (Input("x", "f32[3]"),), calls, (Ref("y"),))


def test_arguments_are_taken_out_of_the_list() -> None:
    args = [torch.ones(3)]
    (result,) = CompiledGraph(sine_program(), {}, FACTS)(args)
    assert args == []
    assert torch.equal(result, torch.ones(3).sin())


def test_input_dies_inside_the_call_when_the_list_is_its_only_owner() -> None:
    seen: list[bool] = []
    tensor = torch.ones(3)
    watch = weakref.ref(tensor)

    def probe(value: Any) -> Any:
        gc.collect()
        seen.append(watch() is None)
        return value

    call = Call("z", "ferrite.artifact.host_calls.call", (Ref("probe"), Ref("y")), {})
    program = plan(
        "program",
        (Input("x", "f32[3]"),),
        [Call("y", "aten.sin.default", (Ref("x"),), {}), call],
        (Ref("z"),),
        (),
        (Constant("probe", "function"),),
    )
    args = [tensor]
    del tensor
    CompiledGraph(program, {"probe": probe}, FACTS)(args)
    assert seen == [True]


def test_errors_show_the_generated_line() -> None:
    compiled = CompiledGraph(
        sine_program(Call("y", "aten.mm.default", (Ref("x"), Ref("x")), {}, "model.py:3")), {}, FACTS
    )
    with pytest.raises(RuntimeError) as caught:
        compiled([torch.ones(3)])
    text = "".join(traceback.format_exception(caught.value))
    assert "y = aten_mm_default(x, x)  # model.py:3" in text


INDEX = Origin("aten.index.Tensor", "model.py:12  y = x[n]", "index {index} is outside of {size}")
EMBEDDING = Origin("aten.embedding.default", "model.py:14  h = self.embed('a # b')", "index out of range\n[in self]")
KERNELS = (
    parse_loops("""
def kernel_0(x: f32[3], n: i64[2], y: out(f32[2])):
    for i in box(2):
        y[i] = x[at(checked(n[i], 3, True, 'IndexError', 'index {index} is outside of {size}'), 0, 2)]
"""),
    parse_loops("""
def kernel_1(x: f32[2], y: out(f32[2])):
    for i in box(2):
        y[i] = x[i] + f32(1.0)
"""),
)


def index_program(*origins: Origin, source: str = "model.py:41") -> HostProgram:
    """A kernel that can raise, behind a function and before a kernel that cannot."""
    function = plan("body", (Input("a", "f32"),), [Call("b", "aten.sin.default", (Ref("a"),), {})], Ref("b"))
    kind = {"dtype": Named("torch.float32")}
    steps = [
        Call("y", "aten.empty_strided.default", ([2], [1]), kind),
        Launch("kernel_0", ("x", "n", "y"), (), source, origins),
        Call("z", "aten.empty_strided.default", ([2], [1]), kind),
        Launch("kernel_1", ("y", "z"), (), source, (), ("exp", "prims.iota")),
    ]
    inputs = (Input("x", "f32[3]"), Input("n", "i64[2]"))
    return plan("program", inputs, steps, (Ref("z"),), (function,), (), KERNELS)


@pytest.mark.parametrize("origins", [(), (INDEX,), (INDEX, EMBEDDING)], ids=len)
@pytest.mark.parametrize("source", ["", "model.py:41, übung.py:7"])
def test_launches_read_back(origins: tuple[Origin, ...], source: str) -> None:
    program = index_program(*origins, source=source)
    text = show_program(program)
    assert parse_program(text) == program
    assert show_program(parse_program(text)) == text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
def test_errors_of_a_kernel_get_a_note() -> None:
    compiled = CompiledGraph(index_program(INDEX), {}, FACTS)
    (result,) = compiled([torch.arange(3.0), torch.tensor([2, -3])])
    assert result.tolist() == [3.0, 1.0]
    with pytest.raises(IndexError) as caught:
        compiled([torch.arange(3.0), torch.tensor([2, 3])])
    assert str(caught.value) == "index 3 is outside of 3"
    assert caught.value.__notes__ == [
        "raised by aten.index.Tensor in the compiled kernel_0, from model.py:12: y = x[n]"
    ]


def test_what_a_note_says() -> None:
    said = "index -4 is outside of 3"
    other = Origin("aten.index.Tensor", "model.py:13  z = w[n]", INDEX.message)
    launch = lambda *origins: Launch("kernel_0", (), (), "model.py:41", origins)
    one = "raised by aten.index.Tensor in the compiled kernel_0, from model.py:12: y = x[n]"
    assert describe(launch(INDEX), said) == one
    assert describe(launch(EMBEDDING, INDEX), said) == one, "the op that has these words"
    assert describe(launch(INDEX, INDEX), said) == one
    assert describe(launch(), said) == "raised in the compiled kernel_0, from model.py:41"
    assert describe(launch(INDEX, EMBEDDING, other), said).splitlines() == [
        "raised in the compiled kernel_0, by one of",
        "  aten.index.Tensor, from model.py:12: y = x[n]",
        "  aten.index.Tensor, from model.py:13: z = w[n]",
    ]
    assert describe(launch(EMBEDDING), "no memory left") == "raised in the compiled kernel_0, from model.py:41"


def test_only_kernels_that_can_raise_are_watched() -> None:
    code = emit(index_program(INDEX))
    ((line, launch),) = code.fallible.items()
    assert launch.kernel == "kernel_0"
    assert code.source.splitlines()[line - 1].startswith("    kernel_0(x, n, y)  # model.py:41")
    assert emit(sine_program()).fallible == {}


def test_operator_names_do_not_clash_with_values() -> None:
    first = Call("aten_sin_default", "aten.sin.default", (Ref("x"),), {})
    second = Call("y", "aten.sin.default", (Ref("aten_sin_default"),), {})
    code = emit(sine_program(first, second))
    assert code.called == {"aten_sin_default_": "aten.sin.default"}
    (result,) = CompiledGraph(sine_program(first, second), {}, FACTS)([torch.ones(3)])
    assert torch.equal(result, torch.ones(3).sin().sin())


def test_names_that_are_no_identifiers_are_refused() -> None:
    hostile = Call("y; import os", "aten.sin.default", (Ref("x"),), {})
    with pytest.raises(Malformed, match="no identifier"):
        CompiledGraph(sine_program(hostile), {}, FACTS).load()


def test_pickled_graph_gives_the_same_bits() -> None:
    constant = torch.randn(3)
    add = Call("y", "aten.add.Tensor", (Ref("x"), Ref("c")), {})
    program = plan("program", (Input("x", "f32[3]"),), [add], (Ref("y"),), (), (Constant("c", "f32[3]"),))
    compiled = CompiledGraph(program, {"c": constant}, FACTS)
    x = torch.randn(3)
    expected = compiled([x])
    again = pickle.loads(pickle.dumps(compiled))
    assert again.run is None
    assert again.program == program
    assert again.facts == FACTS
    assert again.key == compiled.key
    assert torch.equal(again([x])[0], expected[0])
    assert compiled.run is not None, "pickling must not disturb the live object"


def test_live_objects_cannot_leave_the_process() -> None:
    compiled = CompiledGraph(sine_program(), {"probe": print}, FACTS)
    with pytest.raises(Unsupported, match="probe cannot leave the process"):
        compiled.to_bytes()


def test_profiler_sees_a_scope_with_the_key() -> None:
    compiled = CompiledGraph(sine_program(), {}, FACTS)
    with torch.profiler.profile() as profile:
        compiled([torch.ones(3)])
    assert any(f"ferrite program {compiled.key[:12]}" in event.name for event in profile.events())


def test_a_traceback_shows_the_program_of_now_not_one_that_had_its_name() -> None:
    def shown(function: Callable[..., Any]) -> str:
        ferrite.reset()
        compiled = torch.compile(function, backend="ferrite", options={"executor": "eager"})
        with pytest.raises(IndexError) as caught:
            compiled(torch.ones(3), torch.tensor([7]))
        return "".join(traceback.format_exception(caught.value))

    # Not in one line with what is looked for: a traceback shows the line of a lambda.
    by_index, by_select = lambda x, i: x[i], lambda x, i: x.index_select(0, i)
    assert "aten_index_Tensor(" in shown(by_index)
    assert "aten_index_select_default(" in shown(by_select)
