"""A host program as a Python function: readable, debuggable, and what runs until the native form exists.

`emit` gives the source, `load` the callable. The source is found by tracebacks and debuggers (a loader in the
module's globals serves it), each line ends with the user's own line, and it names operators by identifiers that
`load` binds to the operators themselves, so a call costs one global lookup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ferrite.errors import Malformed, ToolFailed
from ferrite.host.nodes import Call, HostProgram
from ferrite.host.text import show_step
from ferrite.syntax import Named, Ref, show, show_call


@dataclass(frozen=True)
class PythonCode:
    """Source text, and which outside object each of its global names stands for."""

    source: str
    called: dict[str, str]  # identifier of something that is only called -> its name
    passed: dict[str, str]  # identifier of an object that is passed along -> its name


def emit(program: HostProgram) -> PythonCode:
    """The source of a program. It takes one list and empties it; its functions take arguments as usual."""
    names = _Names(program)
    parts = [_function(function, names, boxed=False) for function in program.functions]
    parts.append(_function(program, names, boxed=True))
    return PythonCode("\n\n".join(parts), names.called, names.passed)


def load(
    program: HostProgram,
    code: PythonCode,
    constants: Mapping[str, Any],
    kernels: Mapping[str, Callable[..., None]],
    resolve: Callable[[str], Any],
    resolve_call: Callable[[str], Any],
) -> Callable[[list[Any]], Any]:
    """Run the source once, with every outside object and kernel bound, and give the program's function.

    `resolve_call` may give something that is quicker to call than the object itself.
    """
    filename = f"ferrite/{program.name}.py"
    namespace: dict[str, Any] = {"__name__": f"ferrite.{program.name}", "__loader__": _Source(code.source)}
    namespace |= {"inf": float("inf"), "nan": float("nan")}
    namespace |= {identifier: resolve_call(path) for identifier, path in code.called.items()}
    namespace |= {identifier: resolve(path) for identifier, path in code.passed.items()}
    namespace |= constants
    namespace |= kernels
    try:
        exec(compile(code.source, filename, "exec"), namespace)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ToolFailed("Python did not compile a host program", ran=filename, why=str(error)) from error
    function: Callable[[list[Any]], Any] = namespace[program.name]
    return function


class _Names:
    """Identifiers for outside objects: the dotted name with underscores, never one that the program uses itself."""

    def __init__(self, program: HostProgram) -> None:
        self.called: dict[str, str] = {}
        self.passed: dict[str, str] = {}
        self._identifiers: dict[tuple[str, bool], str] = {}
        self._taken = set(_own_names(program))
        for name in self._taken:
            if not name.isidentifier():
                raise Malformed(f"{name!r} is no identifier", where="host.python")

    def __call__(self, named: Named) -> str:
        return self._identifier(named.path, self.passed)

    def of_target(self, path: str) -> str:
        return self._identifier(path, self.called)

    def _identifier(self, path: str, bound: dict[str, str]) -> str:
        known = self._identifiers.get((path, bound is self.called))
        if known is not None:
            return known
        identifier = re.sub(r"\W+", "_", path).strip("_")
        while identifier in self._taken:
            identifier += "_"
        self._taken.add(identifier)
        self._identifiers[path, bound is self.called] = identifier
        bound[identifier] = path
        return identifier


def _own_names(program: HostProgram) -> list[str]:
    names = ["args", "inf", "nan", "slice", "complex", program.name]
    names += [entry.name for entry in program.inputs] + [constant.name for constant in program.constants]
    names += [step.result for step in program.steps if isinstance(step, Call)]
    names += [kernel.name for kernel in program.kernels]
    for function in program.functions:
        names += _own_names(function)
    return names


def _function(program: HostProgram, names: _Names, *, boxed: bool) -> str:
    arguments = [entry.name for entry in program.inputs]
    lines: list[str] = []
    if boxed:
        lines.append(f"def {program.name}(args):")
        if arguments:
            lines.append(f"    {', '.join(arguments)}{',' if len(arguments) == 1 else ''} = args")
        lines.append("    args.clear()")
    else:
        lines.append(f"def {program.name}({', '.join(arguments)}):")
    lines += [f"    {_call(step, names) if isinstance(step, Call) else show_step(step)}" for step in program.steps[:-1]]
    lines.append(f"    return {show(program.steps[-1].value, names)}")  # type: ignore[union-attr]
    return "\n".join(lines) + "\n"


def _call(call: Call, names: _Names) -> str:
    remark = f"  # {call.source}" if call.source else ""
    match call:
        case Call(target="operator.getitem", args=(Ref(name=name), int() | str() as index)):
            return f"{call.result} = {name}[{index!r}]{remark}"
    return f"{call.result} = {show_call(names.of_target(call.target), call.args, call.kwargs, names)}{remark}"


@dataclass(frozen=True)
class _Source:
    """Serves the source of a generated module to `linecache`, and so to tracebacks, for as long as the module lives."""

    text: str

    def get_source(self, name: str) -> str:
        return self.text
