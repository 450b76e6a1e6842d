"""Host programs as nested lists and back: what a file holds, since reading text takes Python's parser.

A step starts with what it is, a value that is no number or text with what it is made of:

    ["call", "mm", "aten.mm.default", [["ref", "x"], ["ref", "w"]], {}, "model.py:41", ""]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrite.errors import Malformed
from ferrite.host.nodes import Call, Constant, Free, HostProgram, Input, Launch, Origin, Return, Step
from ferrite.syntax import Named, Ref

Packed = Any  # lists, dicts, numbers, texts and None


def pack(program: HostProgram) -> Packed:
    """The program without the kernels that it launches."""
    return [
        program.name,
        [_pack_input(entry) for entry in program.inputs],
        [_pack_step(step) for step in program.steps],
        [pack(function) for function in program.functions],
        [[constant.name, constant.type] for constant in program.constants],
    ]


def unpack(packed: Packed, lines: Mapping[str, str] | None = None) -> HostProgram:
    """The inverse of `pack`; `lines`: the user's that are others now. Raises `ValueError` for what it did not make."""
    lines = lines or {}
    try:
        name, inputs, steps, functions, constants = packed
        return HostProgram(
            name,
            tuple(_unpack_input(*entry) for entry in inputs),
            tuple(_unpack_step(step, lines) for step in steps),
            tuple(unpack(function, lines) for function in functions),
            tuple(Constant(*entry) for entry in constants),
        )
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a host program: {error}") from error


def _pack_input(entry: Input) -> Packed:
    return [entry.name, entry.type, entry.static, entry.donated, entry.saved, entry.part and list(entry.part)]


def _unpack_input(name: str, kind: str, static: bool, donated: bool, saved: bool, part: list[Any] | None) -> Input:
    return Input(name, kind, static, donated, saved, None if part is None else (part[0], part[1]))


def _pack_step(step: Step) -> Packed:
    match step:
        case Call():
            kwargs = {name: pack_value(value) for name, value in step.kwargs.items()}
            args = [pack_value(value) for value in step.args]
            return ["call", step.result, step.target, args, kwargs, step.source, step.gives]
        case Launch():
            origins = [[origin.op, origin.line, origin.message] for origin in step.origins]
            sizes = [pack_value(size) for size in step.sizes]
            return ["launch", step.kernel, list(step.buffers), sizes, step.source, origins, list(step.ops)]
        case Free():
            return ["free", list(step.names)]
        case Return():
            return ["return", pack_value(step.value)]


def _unpack_step(packed: Packed, lines: Mapping[str, str]) -> Step:
    match packed:
        case ["call", result, target, args, kwargs, source, gives]:
            named = {name: unpack_value(value) for name, value in kwargs.items()}
            return Call(result, target, tuple(map(unpack_value, args)), named, _now(source, lines), gives)
        case ["launch", kernel, buffers, sizes, source, origins, ops]:
            known = tuple(Origin(op, lines.get(line, line), message) for op, line, message in origins)
            given = tuple(map(unpack_value, sizes))
            return Launch(kernel, tuple(buffers), given, _now(source, lines), known, tuple(ops))
        case ["free", names]:
            return Free(tuple(names))
        case ["return", value]:
            return Return(unpack_value(value))
    raise ValueError("not a step of a host program")


def _now(source: str, lines: Mapping[str, str]) -> str:
    """Places of a step, as the scheduler joins them."""
    return ", ".join(lines.get(place, place) for place in source.split(", ")) if lines else source


def pack_value(value: Any) -> Packed:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Ref():
            return ["ref", value.name]
        case Named():
            return ["named", value.path]
        case tuple():
            return ["tuple", *map(pack_value, value)]
        case list():
            return ["list", *map(pack_value, value)]
        case dict():
            return ["dict", *([pack_value(key), pack_value(item)] for key, item in value.items())]
        case slice():
            return ["slice", pack_value(value.start), pack_value(value.stop), pack_value(value.step)]
        case complex():
            return ["complex", value.real, value.imag]
    raise Malformed(f"a {type(value).__name__} cannot be packed", where="host.packed", program=repr(value))


def unpack_value(packed: Packed) -> Any:
    if not isinstance(packed, list):
        return packed
    match packed:
        case ["ref", str(name)]:
            return Ref(name)
        case ["named", str(path)]:
            return Named(path)
        case ["tuple", *items]:
            return tuple(map(unpack_value, items))
        case ["list", *items]:
            return [unpack_value(item) for item in items]
        case ["dict", *items]:
            return {unpack_value(key): unpack_value(item) for key, item in items}
        case ["slice", start, stop, step]:
            return slice(unpack_value(start), unpack_value(stop), unpack_value(step))
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
    raise ValueError("not a value of a host program")
