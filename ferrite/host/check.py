"""What a host program satisfies before it is assembled: asked of programs that come from a file.

Names end up in generated Python and values as addresses in words of the machine, so a program that does not hold
together must not get that far. Whether the numbers in it are right cannot be told here: that is what the digest of the
file is for.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ferrite.errors import Malformed
from ferrite.host.nodes import ALLOCATE, Call, Constant, Free, HostProgram, Input, Launch, Return
from ferrite.syntax import Named, Ref

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)+|torch\.device\('[a-z]+(:\d+)?'\)")

# How many buffers and sizes a kernel takes; None where nobody knows.
Taken = Mapping[str, tuple[int, int] | None]


def check_program(program: HostProgram, kernels: Taken) -> None:
    """Raises `Malformed` with what does not hold."""
    try:
        _check_whole(program, kernels)
    except (TypeError, AttributeError) as error:  # something stands where it cannot
        raise _refusal(program, str(error)) from error


def _check_whole(program: HostProgram, kernels: Taken) -> None:
    outer: set[str] = set()
    for constant in program.constants:
        if not isinstance(constant, Constant) or not _is_name(constant.name) or not isinstance(constant.type, str):
            raise _refusal(program, "a constant is not one")
        outer.add(constant.name)
    for function in program.functions:
        if function.functions or function.constants:
            raise _refusal(program, "a function within a function")
        _check_steps(function, kernels, outer)
        outer.add(function.name)
    _check_steps(program, kernels, outer)
    if not isinstance(_last(program).value, tuple):
        raise _refusal(program, "the result is no tuple")


def _check_steps(program: HostProgram, kernels: Taken, outer: set[str]) -> None:
    if not _is_name(program.name):
        raise _refusal(program, "a program without a name")
    alive, known = {*outer}, {*outer}
    for entry in program.inputs:
        if not isinstance(entry, Input) or not _is_name(entry.name) or not isinstance(entry.type, str):
            raise _refusal(program, "an input is not one")
        marks = {type(entry.static), type(entry.donated), type(entry.saved)}
        if marks != {bool} or entry.name in known:
            raise _refusal(program, f"the input {entry.name}")
        known.add(entry.name)
        if entry.part is not None and not _is_part(entry.part, known):
            raise _refusal(program, f"the input {entry.name}, which is a part")
        alive.add(entry.name)
    last = _last(program)
    for step in program.steps:
        match step:
            case Call():
                if (
                    not _is_path(step.target)
                    or not all(map(_is_line, (step.source, step.gives)))
                    or not all(map(_is_name, step.kwargs))
                ):
                    raise _refusal(program, f"a call of {step.target!r}")
                if not _is_name(step.result) or step.result in known:
                    raise _refusal(program, f"{step.result!r} is made twice")
                _check_values([*step.args, *step.kwargs.values()], alive, program)
                if step.target == ALLOCATE and not _is_extent(*step.args):
                    raise _refusal(program, f"the sizes of {step.result}")
                known.add(step.result)
                alive.add(step.result)
            case Launch():
                _check_launch(step, kernels, alive, program)
            case Free():
                if len(set(step.names)) != len(step.names) or not alive.issuperset(step.names):
                    raise _refusal(program, f"one of {step.names} is not there")
                alive.difference_update(step.names)
            case Return():
                if step is not last:
                    raise _refusal(program, "a return before the end")
                _check_values([step.value], alive, program)


def _check_launch(launch: Launch, kernels: Taken, alive: set[str], program: HostProgram) -> None:
    if not _is_name(launch.kernel) or launch.kernel not in kernels or not _is_line(launch.source):
        raise _refusal(program, f"there is no kernel {launch.kernel!r}")
    if not alive.issuperset(launch.buffers):
        raise _refusal(program, f"{launch.kernel} is given what is not there")
    for origin in launch.origins:
        if not all(isinstance(text, str) for text in (origin.op, origin.line, origin.message)):
            raise _refusal(program, f"the origins of {launch.kernel}")
    if not all(map(_is_line, launch.ops)):
        raise _refusal(program, f"the ops of {launch.kernel}")
    _check_values(list(launch.sizes), alive, program)
    taken, given = kernels[launch.kernel], (len(launch.buffers), len(launch.sizes))
    if taken is not None and given != taken:
        raise _refusal(program, f"{launch.kernel} takes {taken} buffers and sizes, given {given}")


def _check_values(waiting: list[Any], alive: set[str], program: HostProgram) -> None:
    while waiting:
        value = waiting.pop()
        match value:
            case None | int() | float() | str() | complex():
                pass
            case Ref(name=name):
                if name not in alive:
                    raise _refusal(program, f"{name} is read and not there")
            case Named(path=path):
                if not _is_path(path):
                    raise _refusal(program, f"{path!r} is no name of an object")
            case tuple() | list():
                waiting += value
            case dict():
                waiting += [*value, *value.values()]
            case slice():
                waiting += [value.start, value.stop, value.step]
            case _:
                raise _refusal(program, f"a {type(value).__name__} is no value")


def _last(program: HostProgram) -> Return:
    last = program.steps[-1] if program.steps else None
    if not isinstance(last, Return):
        raise Malformed("a host program does not end with a return", where="host.check")
    return last


def _is_part(part: Any, known: set[str]) -> bool:
    match part:
        case (str(name), length):
            return name in known and type(length) is int and length >= 0
    return False


def _is_extent(sizes: Any, strides: Any) -> bool:
    numbers = [*sizes, *strides] if isinstance(sizes, list) and isinstance(strides, list) else [None]
    return len(sizes) == len(strides) and all(
        isinstance(number, Ref) or (type(number) is int and number >= 0) for number in numbers
    )


@lru_cache(maxsize=4096)
def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


@lru_cache(maxsize=4096)
def _is_path(path: Any) -> bool:
    return isinstance(path, str) and _PATH.fullmatch(path) is not None


def _is_line(text: Any) -> bool:
    """A remark at the end of a line of generated Python."""
    return isinstance(text, str) and (text.isprintable() or not any(end in text for end in "\n\r\0\f"))


def _refusal(program: HostProgram, title: str) -> Malformed:
    return Malformed(f"a host program that cannot be: {title}", where=f"host.check of {program.name}")
