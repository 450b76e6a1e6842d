"""What every value of a program is, and where its memory lies, as plain data: what `host_values.infer` and
`plan_memory.plan` found when the graph was compiled, so that a later process need not find it again.

Only of programs whose sizes are known: where sizes change, both go by rules without running anything, and are asked
again. What is read back is checked as far as a number can be wrong by itself: memory that is planned lies inside of
what it is planned into. That the numbers are those of this program says the digest of the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import torch

from ferrite.artifact.host_values import PART, Several, Value, Values, take_part
from ferrite.artifact.plan_memory import Plan, locals_of
from ferrite.errors import Unsupported
from ferrite.host.nodes import Call, HostProgram, Launch
from ferrite.loops.index import Index, constant


class StoredValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """As `host_values.Value`, with numbers for sizes."""

    root: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_promised: bool


class StoredPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `plan_memory.Plan`, with numbers for offsets."""

    places: dict[str, int]
    hosted: dict[str, tuple[str, int]]
    length: int
    outside: int


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tensors`: those that are no part of several."""

    tensors: dict[str, StoredValue]
    several: dict[str, tuple[StoredValue | None, ...]]
    views: tuple[str, ...]
    escaped: tuple[str, ...]
    plan: StoredPlan


def layout_of(values: Values, plan: Plan) -> Layout | None:
    """None where sizes change. To be asked before values get slots."""
    if values.changing or plan.outside is None:
        return None
    return Layout(
        {name: _stored(value) for name, value in values.tensors.items() if id(value) not in values.taken},
        {
            name: tuple(part if part is None else _stored(part) for part in several.parts)
            for name, several in values.several.items()
        },
        tuple(sorted(values.views)),
        tuple(sorted(values.escaped)),
        StoredPlan(
            {name: offset.constant for name, offset in plan.places.items()},
            plan.hosted,
            plan.length.constant,
            plan.outside,
        ),
    )


def values_in(layout: Layout, program: HostProgram, constants: Mapping[str, Any]) -> Values:
    """In the order in which `infer` finds them. Raises `ValueError` if they cannot be those of the program."""
    values = Values(views=set(layout.views), escaped=set(layout.escaped))
    names = [*(entry.name for entry in program.inputs if not entry.is_nested_int), *constants]
    try:
        for name in names:
            values.tensors[name] = _value(layout.tensors[name])
        for step in program.steps:
            if isinstance(step, Call):
                if step.target == PART:
                    take_part(step, values)
                elif step.result in layout.several:
                    parts = layout.several[step.result]
                    values.several[step.result] = Several(tuple(map(_part, parts)))
                else:
                    values.tensors[step.result] = _value(layout.tensors[step.result])
    except LookupError as error:
        raise ValueError(f"its layout says nothing of {error}") from error
    except Unsupported as error:  # which the program was not when it was assembled
        raise ValueError(f"its layout has {error.title}") from error
    known = values.tensors.keys() | values.several.keys()
    strangers = {value.root for value in values.tensors.values()} | values.escaped | values.views
    if not strangers <= known:
        raise ValueError(f"its layout speaks of {', '.join(sorted(strangers - known))}, which the program has not")
    return values


def plan_in(layout: Layout, program: HostProgram, values: Values, own_memory: Callable[[Launch], Index]) -> Plan:
    """`own_memory`: how much a kernel needs for its locals. Raises `ValueError` if something does not fit."""
    stored = layout.plan
    own = {
        locals_of(position): own_memory(step).constant
        for position, step in enumerate(program.steps)
        if isinstance(step, Launch)
    }

    def check(name: str, offset: int, length: int) -> None:
        needed = own[name] if name in own else values.tensors[name].bytes.constant
        if offset < 0 or offset + needed > length:
            raise ValueError(f"its layout has {needed} bytes of {name} at {offset} of {length}")

    try:
        for name, offset in stored.places.items():
            check(name, offset, stored.length)
        for name, (host, offset) in stored.hosted.items():
            check(name, offset, values.tensors[host].bytes.constant)
    except LookupError as error:
        raise ValueError(f"its layout has memory for {error}, which the program has not") from error
    places = {name: constant(offset) for name, offset in stored.places.items()}
    return Plan(places, stored.hosted, constant(stored.length), stored.outside)


def _stored(value: Value) -> StoredValue:
    assert value.dtype is not None
    assert value.sizes is not None
    assert value.strides is not None
    return StoredValue(
        value.root,
        str(value.dtype).removeprefix("torch."),
        tuple(size.constant for size in value.sizes),
        tuple(stride.constant for stride in value.strides),
        value.offset.constant,
        value.is_promised,
    )


def _part(stored: StoredValue | None) -> Value | None:
    return None if stored is None else _value(stored)


def _value(stored: StoredValue) -> Value:
    dtype, sizes, strides = _form(stored.dtype, stored.sizes, stored.strides)
    if stored.offset < 0:
        raise ValueError("a tensor that starts before its memory")
    return Value(stored.root, dtype, sizes, strides, constant(stored.offset), stored.is_promised)


@lru_cache(maxsize=1024)
def _form(
    name: str, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[torch.dtype, tuple[Index, ...], tuple[Index, ...]]:
    """Few tensors of a program differ in all of it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or len(sizes) != len(strides) or min((*sizes, *strides), default=0) < 0:
        raise ValueError(f"no tensor is a {name} of sizes {sizes} and strides {strides}")
    return dtype, tuple(map(constant, sizes)), tuple(map(constant, strides))
