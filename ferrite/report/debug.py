"""Debug files: every stage of every graph as text, and a script that runs a graph alone.

Written below `debug_dir` when the option `debug` is on:

    graph_0_forward/  captured.txt  transformed.txt  host.txt  record.txt  run.py  constants.pt
                      graph_0_forward_1f6c2b0a94de3377.py       (the host program in Python, by its content)
                      eager_calls.json                          (what it calls that is no kernel)
                      kernel_0.txt  kernel_0.ll  kernel_0.s     (its loops as they run, LLVM's text, assembly)
                      inputs.pt                                 (with the option `debug_inputs`)

The script makes inputs of the captured sizes and strides: random numbers, and whole numbers between the least and the
greatest of the first call, because they may be positions. It compiles with the options of this compile.

The Python is for people and for debuggers: what runs names that file, and is never read from it. A file that cannot be
written is reported once and never fails a compile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ferrite.artifact.compiled import CompiledGraph
from ferrite.artifact.kernels import listing
from ferrite.graph.query import attribute, children, family
from ferrite.graph.text import show_graph
from ferrite.options import Options
from ferrite.report import trace
from ferrite.report.record import Record

log = logging.getLogger(__name__)

_SCRIPT = '''"""Runs {name} alone, as captured: `python run.py`, or `python run.py ferrite` to compile it first."""

import sys
from pathlib import Path

import torch
from torch import device, inf, nan  # names that the code below uses

constants = torch.load(Path(__file__).with_name("constants.pt"), weights_only=True)

{classes}

module = Captured()
torch.manual_seed(0)
{inputs}
if __name__ == "__main__":
    if sys.argv[1:] == ["ferrite"]:
        module = torch.compile(module, backend="ferrite", options={options})
    print(module(*inputs))
'''

_CLASS = """
class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
{attributes}

{code}
"""


class DebugFolder:
    """The folder of one graph. Say what happens before and after; the files follow."""

    def __init__(self, options: Options, name: str) -> None:
        self._options = options
        self._folder = options.debug_folder(name)
        self._script: Script | None = None

    def captured(self, module: GraphModule, name: str) -> None:
        if self._folder is None:
            return
        self._write("captured.txt", show_graph(module.graph, types=True, sources=True))
        self._guarded("run.py", lambda path: self._write_script(path, module, name))
        self._guarded("constants.pt", lambda path: torch.save(constants_of(module), path))

    def compiled(self, module: GraphModule, compiled: CompiledGraph, record: Record) -> None:
        if self._folder is None:
            return
        self._write("transformed.txt", show_graph(module.graph, types=True, sources=True))
        self._write("host.txt", str(compiled))
        if self._write(compiled.code.filename, compiled.code.source):
            trace.code_is_in(compiled, self._folder / compiled.code.filename)
        self._write("eager_calls.json", compiled.eager_calls)
        self._write("record.txt", str(record))
        for kernel in compiled.kernels if compiled.facts.executor == "native" else ():
            if kernel.name not in compiled.refused:
                shown = listing(kernel)
                self._write(f"{kernel.name}.txt", shown.loops)
                self._write(f"{kernel.name}.ll", shown.llvm)
                self._write(f"{kernel.name}.s", shown.assembly)
        log.warning("Ferrite wrote debug files to %s", self._folder)

    def _write_script(self, path: Path, module: GraphModule, name: str) -> None:
        self._script = Script(module, name, self._options)
        path.write_text(self._script.text())

    def watch_first_call(self, compiled: CompiledGraph) -> None:
        """The arguments of the first call say what whole numbers the script may take; or they are saved."""
        if self._folder is None or self._script is None:
            return
        compiled.load()
        assert compiled.run is not None
        waiting, script, saves = [True], self._script, self._options.debug_inputs

        def noting(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
            @functools.wraps(function)
            def call(args: list[Any]) -> Any:
                if waiting and waiting.pop():
                    if saves and self._guarded("inputs.pt", lambda path: _save(args, path)):
                        self._guarded("run.py", lambda path: path.write_text(script.text(saved=True)))
                    else:
                        self._guarded("run.py", lambda path: path.write_text(script.text([*map(_bounds, args)])))
                return function(args)

            return call

        compiled.run, compiled.body = noting(compiled.run), noting(compiled.body)

    def _write(self, name: str, text: str) -> bool:
        return self._guarded(name, lambda path: path.write_text(text))

    def _guarded(self, name: str, write: Callable[[Path], Any]) -> bool:
        """Whether that worked."""
        assert self._folder is not None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder / name)
        except Exception as error:
            log.warning("Ferrite could not write %s: %s", self._folder / name, error)
            return False
        return True


Bounds = tuple[int, int] | None


class Script:
    """A Python file that rebuilds a graph and its children and runs it. The graph is read when this is made."""

    def __init__(self, module: GraphModule, name: str, options: Options) -> None:
        self._name, self._options = name, repr(options.of_a_script())
        self._classes = "\n".join(_class_text(path, member) for path, member in family(module))
        values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        self._inputs = [functools.partial(_input_text, *_described(value)) for value in values]

    def text(self, bounds: Sequence[Bounds] = (), *, saved: bool = False) -> str:
        """`bounds`: of the whole numbers in each input, as far as they are known; `saved`: inputs are in a file."""
        known = [*bounds, *[None] * (len(self._inputs) - len(bounds))]
        made = "\n".join(f"    {text(bound)}," for text, bound in zip(self._inputs, known, strict=True))
        inputs = _SAVED if saved else f"inputs = [\n{made}\n]"
        return _SCRIPT.format(name=self._name, classes=self._classes, inputs=inputs, options=self._options)


_SAVED = 'inputs = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True)'


def _save(args: Sequence[Any], path: Path) -> None:
    """Tensors as they lie in memory, and those that share memory so that they share it again."""
    torch.save([value.detach() if isinstance(value, torch.Tensor) else value for value in args], path)


def _bounds(value: Any) -> Bounds:
    """The least and the greatest of whole numbers; None for anything else."""
    is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    if not is_whole or value.layout != torch.strided or value.is_quantized or not value.numel():
        return None
    try:
        return int(value.min()), int(value.max())
    except RuntimeError:  # of a dtype that PyTorch does not compare, or no real tensor
        return None


def constants_of(module: GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a graph and its children own, by where they stand."""
    return {
        f"{path}.{node.target}": value
        for path, member in family(module)
        for node in member.graph.find_nodes(op="get_attr")
        if isinstance(value := attribute(member, str(node.target)), torch.Tensor)
    }


def _class_text(path: str, member: GraphModule) -> str:
    attributes = [f"self.{name} = {_class_name(path, name)}()" for name, _ in children(member)]
    attributes += [
        f"self.{node.target} = constants[{f'{path}.{node.target}'!r}]"
        for node in member.graph.find_nodes(op="get_attr")
        if isinstance(attribute(member, str(node.target)), torch.Tensor)
    ]
    code = member.graph.python_code("self").src.strip()
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    lines = "\n".join(f"        {line}" for line in attributes)
    name = "Captured" if path == "main" else _identifier(path)
    return _CLASS.format(name=name, attributes=lines, code=indented)


def _class_name(path: str, child: str) -> str:
    return _identifier(child if path == "main" else f"{path}.{child}")


def _identifier(path: str) -> str:
    return "Captured_" + "".join(letter if letter.isalnum() else "_" for letter in path)


def _described(value: Any) -> tuple[Any, str]:
    """A fake input as a text in which the numbers of a tensor are missing, and how a tensor of it is filled."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(value.node.hint), ""
    if not isinstance(value, torch.Tensor):
        return repr(value), ""
    sizes, place = [_hint(extent) for extent in value.shape], f"dtype={value.dtype}, device='{value.device}'"
    if value.layout != torch.strided:
        return f"torch.zeros({sizes}, {place})", ""
    strides = [_hint(stride) for stride in value.stride()]
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(sizes, strides, strict=True))
    fill = "normal_()" if value.dtype.is_floating_point or value.dtype.is_complex else "whole"
    # Memory is filled before it is laid out: elements may lie on one another.
    return f"torch.empty({reach if 0 not in sizes else 0}, {place}).{{}}.as_strided({sizes}, {strides})", fill


def _input_text(text: str, fill: str, bounds: Bounds) -> str:
    if fill == "whole":
        least, greatest = bounds or (0, 0)
        fill = f"random_({least}, {min(greatest + 1, 2**63 - 1)})" if greatest > least else f"fill_({least})"
    return text.format(fill) if fill else text


def _hint(extent: Any) -> Any:
    return extent if isinstance(extent, int) else extent.node.hint
