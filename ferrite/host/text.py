"""Host programs as text and back. The text is Python: functions that operators call come first, the program last."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferrite.errors import Malformed
from ferrite.host.nodes import Call, Constant, Free, HostProgram, Input, Launch, Origin, Return, Step
from ferrite.syntax import dotted, read, show, show_call

if TYPE_CHECKING:
    from ferrite.loops.nodes import Program

MARKS = ("saved", "donated", "static")  # of an input, as they stand around its type: the last one outside


def show_program(program: HostProgram) -> str:
    parts = [f"@kernel\n{_loop_text().show(kernel)}" for kernel in program.kernels]
    parts += [show_program(function) for function in program.functions]
    if program.constants:
        parts.append("".join(f"{constant.name} = constant({constant.type})\n" for constant in program.constants))
    lines = [f"def {program.name}({', '.join(show_input(entry) for entry in program.inputs)}):"]
    lines += [f"    {show_step(step)}" for step in program.steps]
    return "\n".join([*parts, "\n".join(lines) + "\n"])


def _loop_text() -> Any:
    """Steps are printed by processes that find their kernels compiled and read none."""
    from ferrite.loops import text

    return text


def show_input(entry: Input) -> str:
    kind = entry.type if entry.part is None else f"part({entry.type}, {entry.part[0]}, {entry.part[1]})"
    for mark in MARKS:
        kind = f"{mark}({kind})" if getattr(entry, mark) else kind
    return f"{entry.name}: {kind}"


def show_step(step: Step) -> str:
    match step:
        case Call():
            result = f"{step.result}: {step.gives}" if step.gives else step.result
            text = f"{result} = {show_call(step.target, step.args, step.kwargs, lambda named: named.path)}"
            return f"{text}  # {step.source}" if step.source else text
        case Launch():
            text = f"{step.kernel}({', '.join((*step.buffers, *map(show, step.sizes)))})"
            origins = f"raises {[(o.op, o.line, o.message) for o in step.origins]}" if step.origins else ""
            place = " at ".join(filter(None, (", ".join(step.ops), step.source)))
            remark = ", ".join(filter(None, (place, origins)))
            return f"{text}  # {remark}" if remark else text
        case Free():
            return f"del {', '.join(step.names)}"
        case Return():
            return f"return {show(step.value)}"


def parse_program(text: str) -> HostProgram:
    """The program that prints as `text`. Raises `Malformed` with the statement that does not fit."""
    functions: list[HostProgram] = []
    constants: list[Constant] = []
    kernels: dict[str, Program] = {}
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        match statement:
            case ast.FunctionDef(decorator_list=[ast.Name(id="kernel")]):
                own = "\n".join(lines[statement.lineno - 1 : statement.end_lineno]) + "\n"
                kernels[statement.name] = _loop_text().parse_program(own)
            case ast.FunctionDef():
                outer = {function.name for function in functions} | {constant.name for constant in constants}
                functions.append(_parse_function(statement, lines, outer, tuple(constants), kernels))
                constants = []
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="constant"), args=[kind])):
                constants.append(Constant(name, _source(kind, lines)))
            case _:
                raise Malformed("expected a function or a constant", where="host.text", program=ast.unparse(statement))
    *inner, main = functions
    return HostProgram(main.name, main.inputs, main.steps, tuple(inner), main.constants, tuple(kernels.values()))


def _parse_function(
    function: ast.FunctionDef,
    lines: list[str],
    outer: set[str],
    constants: tuple[Constant, ...],
    kernels: Mapping[str, Program],
) -> HostProgram:
    inputs = tuple(_parse_input(argument, lines) for argument in function.args.args)
    known = outer | {entry.name for entry in inputs}
    steps: list[Step] = []
    for statement in function.body:
        step = _parse_step(statement, lines, known, kernels)
        if isinstance(step, Call):
            known.add(step.result)
        steps.append(step)
    return HostProgram(function.name, inputs, tuple(steps), (), constants)


def _parse_input(argument: ast.arg, lines: list[str]) -> Input:
    kind, marks, part = argument.annotation, set(), None
    while isinstance(kind, ast.Call) and isinstance(kind.func, ast.Name) and kind.func.id in MARKS:
        marks.add(kind.func.id)
        (kind,) = kind.args
    match kind:
        case ast.Call(func=ast.Name(id="part"), args=[whole, ast.Name(id=name), ast.Constant(value=int(length))]):
            kind, part = whole, (name, length)
    if kind is None:
        raise Malformed(f"input {argument.arg} has no type", where="host.text")
    return Input(argument.arg, _source(kind, lines), **{mark: mark in marks for mark in MARKS}, part=part)


def _parse_step(statement: ast.stmt, lines: list[str], known: set[str], kernels: Mapping[str, Program]) -> Step:
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id=result)], value=ast.Call(func=func, args=args, keywords=words))
            | ast.AnnAssign(target=ast.Name(id=result), value=ast.Call(func=func, args=args, keywords=words))
        ):
            gives = _source(statement.annotation, lines) if isinstance(statement, ast.AnnAssign) else ""
            values = tuple(read(arg, known.__contains__) for arg in args)
            named: dict[str, Any] = {str(word.arg): read(word.value, known.__contains__) for word in words}
            return Call(result, dotted(func), values, named, _remark(statement, lines), gives)
        case ast.Expr(value=ast.Call(func=ast.Name(id=kernel), args=args)) if kernel in kernels:
            split = len(kernels[kernel].parameters)
            sizes = tuple(read(arg, known.__contains__) for arg in args[split:])
            place, _, origins = _remark(statement, lines).partition("raises [")
            ops, _, source = place.removesuffix(", ").rpartition(" at ")
            if not ops and ":" not in source:  # there are ops alone: a place has a line
                ops, source = source, ""
            known_origins = tuple(Origin(*parts) for parts in ast.literal_eval(f"[{origins}")) if origins else ()
            buffers = tuple(dotted(arg) for arg in args[:split])
            return Launch(kernel, buffers, sizes, source, known_origins, tuple(ops.split(", ")) if ops else ())
        case ast.Delete(targets=targets):
            return Free(tuple(dotted(target) for target in targets))
        case ast.Return(value=ast.expr() as value):
            return Return(read(value, known.__contains__))
    raise Malformed("expected a call, a del or a return", where="host.text", program=ast.unparse(statement))


def _source(node: ast.expr, lines: list[str]) -> str:
    """The text of a type exactly as written; it stands on one line."""
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()


def _remark(statement: ast.stmt, lines: list[str]) -> str:
    rest = lines[statement.lineno - 1].encode()[statement.end_col_offset :].decode().strip()
    return rest.removeprefix("#").strip()
