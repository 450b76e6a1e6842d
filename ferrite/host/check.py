"""What a host program satisfies before it is assembled: asked of programs that come from a file.

Names end up in generated Python and values as addresses in words of the machine, so a program that does not hold
together must not get that far. Whether the numbers in it are right cannot be told here: that is what the digest of the
file is for.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ferrite.errors import Malformed
from ferrite.host.nodes import Call, Constant, Free, HostProgram, Input, Launch, Origin, Return
from ferrite.syntax import Named, Ref, refs

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)+|torch\.device\('[a-z]+(:\d+)?'\)")

# How many buffers and sizes a kernel takes; None where nobody knows.
Taken = Mapping[str, tuple[int, int] | None]


def check_program(program: HostProgram, kernels: Taken) -> None:
    """Raises `Malformed` with what does not hold."""
    for constant in program.constants:
        _expect(isinstance(constant, Constant) and _is_name(constant.name), "a constant without a name", program)
        _expect(isinstance(constant.type, str), f"the type of {constant.name} is no text", program)
    outer = {constant.name for constant in program.constants}
    for function in program.functions:
        _expect(not function.functions and not function.constants, "a function within a function", program)
        _check_steps(function, kernels, outer)
        outer.add(function.name)
    _check_steps(program, kernels, outer)
    _expect(isinstance(_last(program).value, tuple), "the result is no tuple", program)


def _check_steps(program: HostProgram, kernels: Taken, outer: Iterable[str]) -> None:
    _expect(_is_name(program.name), "a program without a name", program)
    alive = {*outer}
    known = {*outer}
    for entry in program.inputs:
        fits = isinstance(entry, Input) and _is_name(entry.name) and isinstance(entry.type, str)
        _expect(fits and type(entry.static) is bool and type(entry.donated) is bool, "an input is not one", program)
        _expect(entry.name not in known, f"{entry.name} is there twice", program)
        known.add(entry.name)
        alive.add(entry.name)
    last = _last(program)
    for step in program.steps:
        match step:
            case Call():
                _expect(_is_path(step.target), f"{step.target!r} cannot be called", program)
                _expect(all(map(_is_name, step.kwargs)), f"keywords of {step.target}", program)
                _expect(_is_line(step.source), f"the source of {step.target}", program)
                _check_values((step.args, step.kwargs), alive, program)
                _expect(_is_name(step.result) and step.result not in known, f"{step.result!r} is made twice", program)
                known.add(step.result)
                alive.add(step.result)
            case Launch():
                _check_launch(step, kernels, alive, program)
            case Free():
                _expect(len(set(step.names)) == len(step.names), "a value is freed twice", program)
                _expect(alive.issuperset(step.names), f"one of {step.names} is not there", program)
                alive.difference_update(step.names)
            case Return():
                _expect(step is last, "a return before the end", program)
                _check_values(step.value, alive, program)


def _check_launch(launch: Launch, kernels: Taken, alive: set[str], program: HostProgram) -> None:
    known = isinstance(launch.kernel, str) and _is_name(launch.kernel) and launch.kernel in kernels
    _expect(known, f"there is no kernel {launch.kernel!r}", program)
    _expect(alive.issuperset(launch.buffers), f"{launch.kernel} is given what is not there", program)
    _expect(_is_line(launch.source), f"the source of {launch.kernel}", program)
    for origin in launch.origins:
        texts = (origin.op, origin.line, origin.message) if isinstance(origin, Origin) else (None,)
        _expect(all(isinstance(text, str) for text in texts), f"the origins of {launch.kernel}", program)
    _check_values(launch.sizes, alive, program)
    taken = kernels[launch.kernel]
    if taken is not None:
        given = (len(launch.buffers), len(launch.sizes))
        _expect(given == taken, f"{launch.kernel} takes {taken} buffers and sizes, given {given}", program)


def _check_values(value: Any, alive: set[str], program: HostProgram) -> None:
    missing = [name for name in refs(value) if name not in alive]
    _expect(not missing, f"{missing} is read and not there", program)
    waiting = [value]
    while waiting:
        match waiting.pop():
            case Named(path=path):
                _expect(_is_path(path), f"{path!r} is no name of an object", program)
            case tuple(items) | list(items):
                waiting += items
            case dict(items):
                waiting += [*items, *items.values()]
            case slice() as part:
                waiting += [part.start, part.stop, part.step]
            case Ref() | None | bool() | int() | float() | complex() | str():
                pass
            case other:
                _expect(False, f"a {type(other).__name__} is no value", program)


def _last(program: HostProgram) -> Return:
    last = program.steps[-1] if program.steps else None
    if not isinstance(last, Return):
        raise Malformed("a host program does not end with a return", where="host.check")
    return last


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _is_path(path: Any) -> bool:
    return isinstance(path, str) and _PATH.fullmatch(path) is not None


def _is_line(text: Any) -> bool:
    """A remark at the end of a line of generated Python."""
    return isinstance(text, str) and not any(end in text for end in "\n\r\0\f")


def _expect(holds: bool, title: str, program: HostProgram) -> None:
    if not holds:
        raise Malformed(f"a host program that cannot be: {title}", where=f"host.check of {program.name}")
