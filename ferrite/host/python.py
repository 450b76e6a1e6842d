"""A host program as a Python function: readable, debuggable, and what runs until the native form exists.

`emit` gives the source, `load` the functions. The source is never read from a file: where one is written, it is for
people. It has a name that holds a digest of it, so two sources never have one name, and under that name tracebacks,
debuggers and `inspect` find its lines for as long as the function lives. Each line ends with the user's own line, which
`lines` has as data. Operators are named by identifiers that `load` binds to the operators themselves, so a call costs
one global lookup. An error that a kernel raises is given a note with the op and the user's line: the words of the error
itself are eager's.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

from ferrite.errors import Malformed, ToolFailed, within
from ferrite.host.nodes import Call, HostProgram, Launch, Origin, Return, Step, place_of_step
from ferrite.host.ranges import range_of
from ferrite.host.text import show_step
from ferrite.syntax import Named, Ref, show, show_call

UNKNOWN = "an unknown line"


@dataclass(frozen=True)
class PythonCode:
    """Source text, and which outside object each of its global names stands for."""

    name: str  # of the program
    source: str
    called: dict[str, str]  # identifier of something that is only called -> its name
    passed: dict[str, str]  # identifier of an object that is passed along -> its name
    steps: dict[int, Call | Launch] = field(default_factory=dict)  # line of the source -> what it does

    @cached_property
    def filename(self) -> str:
        """`graph_0_forward_1f6c2b0a94de3377.py`: by content, so another source has another name."""
        return f"{self.name}_{hashlib.sha256(self.source.encode()).hexdigest()[:16]}.py"

    @property
    def lines(self) -> dict[int, tuple[str, ...]]:
        """Line of the source -> the user's lines behind it (`model.py:41`), for each that has some."""
        return {line: tuple(step.source.split(", ")) for line, step in self.steps.items() if step.source}

    @property
    def fallible(self) -> dict[int, Launch]:
        """Line of the source -> the launch there, if its kernel can raise."""
        return {line: step for line, step in self.steps.items() if isinstance(step, Launch) and step.origins}


def emit(program: HostProgram, ranges: str = "") -> PythonCode:
    """The source of a program. It takes one list and empties it; its functions take arguments as usual. `ranges`: the
    path of what makes a range for a profiler of a name; each step that has one then runs in it, on the same line."""
    names = _Names(program)
    lines: list[str] = []
    steps: dict[int, Call | Launch] = {}
    for function in (*program.functions, program):
        lines += ["", ""] if lines else []
        lines += _header(function, boxed=function is program)
        for step in function.steps:
            label = range_of(step) if ranges else None
            profiled = f"with {names.of_target(ranges)}({label!r}): " if label else ""
            with within(place_of_step, step):
                lines.append(f"    {profiled}{_line(step, names)}")
            if isinstance(step, (Call, Launch)):
                steps[len(lines)] = step
    return PythonCode(program.name, "\n".join(lines) + "\n", names.called, names.passed, steps)


def load(
    program: HostProgram,
    code: PythonCode,
    constants: Mapping[str, Any],
    kernels: Mapping[str, Callable[..., None]],
    resolve: Callable[[str], Any],
    resolve_call: Callable[[str], Any],
    folder: str,
) -> dict[str, Callable[..., Any]]:
    """Run the source once, with every outside object and kernel bound, and give the program's function and those that
    its operators call, by name.

    `resolve_call` may give something that is quicker to call than the object itself; `folder`: where a debugger will
    look for a file with the source, which need not be there.
    """
    filename = os.path.join(folder, code.filename)
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
    made = {part.name: namespace[part.name] for part in (*program.functions, program)}
    _serve_lines(filename, namespace, made[program.name])
    fallible = code.fallible
    return {name: _noting(function, fallible) for name, function in made.items()} if fallible else made


def _serve_lines(filename: str, namespace: dict[str, Any], function: Callable[..., Any]) -> None:
    """Who has the namespace finds the source by its loader; who has a file's name only (`inspect`, the debugger's list
    of a whole function) finds it so, until the function goes."""
    _served[filename] += 1
    linecache.lazycache(filename, namespace)
    weakref.finalize(function, _forget_lines, filename).atexit = False


_served: Counter[str] = Counter()  # functions that live, by the name of their source: equal ones share it


def _forget_lines(filename: str) -> None:
    _served[filename] -= 1
    if not _served[filename]:
        del _served[filename]
        linecache.cache.pop(filename, None)


# ---- errors of kernels


def _noting(function: Callable[..., Any], fallible: Mapping[int, Launch]) -> Callable[..., Any]:
    """The function, which adds to an error where in the user's program it comes from."""
    module = function.__globals__

    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            line = _innermost_line(error.__traceback__, module)
            if line in fallible and hasattr(error, "add_note"):  # Python 3.10 has no notes
                error.add_note(describe(fallible[line], str(error)))
            raise

    return run


def _innermost_line(trace: TracebackType | None, module: Mapping[str, Any]) -> int:
    """Of the module's own code, the line from which an error came; 0 if it did not come from there."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_globals is module:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def describe(launch: Launch, message: str) -> str:
    """Which op of a kernel raised `message`, and from which line; all that may have if several would say the same."""
    origins = [origin for origin in launch.origins if _may_say(origin, message)]
    match [*dict.fromkeys((origin.op, origin.line.replace("  ", ": ", 1)) for origin in origins)]:
        case []:
            return f"raised in the compiled {launch.kernel}, from {launch.source or UNKNOWN}"
        case [(op, line)]:
            return f"raised by {op} in the compiled {launch.kernel}, from {line or UNKNOWN}"
        case several:
            lines = [f"  {op}, from {line or UNKNOWN}" for op, line in several]
            return "\n".join([f"raised in the compiled {launch.kernel}, by one of", *lines])


def _may_say(origin: Origin, message: str) -> bool:
    """Whether a message is the one of the origin, with numbers in the place of `{index}` and `{size}`."""
    words = re.sub(r"\\{(index|size)\\}", r"-?\\d+", re.escape(origin.message))
    return re.fullmatch(words, message) is not None


# ---- source


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
    names += [step.kernel for step in program.steps if isinstance(step, Launch)]
    for function in program.functions:
        names += _own_names(function)
    return names


def _header(program: HostProgram, *, boxed: bool) -> list[str]:
    arguments = [entry.name for entry in program.inputs]
    if not boxed:
        return [f"def {program.name}({', '.join(arguments)}):"]
    lines = [f"def {program.name}(args):"]
    if arguments:
        lines.append(f"    {', '.join(arguments)}{',' if len(arguments) == 1 else ''} = args")
    return [*lines, "    args.clear()"]


def _line(step: Step, names: _Names) -> str:
    match step:
        case Call():
            return _call(step, names)
        case Return(value=value):
            return f"return {show(value, names)}"
    return show_step(step)


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
