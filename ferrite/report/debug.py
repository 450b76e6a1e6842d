"""Debug files: every stage of every graph as text, and a script that runs a graph alone.

Written below `debug_dir` when the option `debug` is on:

    graph_0_forward/  captured.txt  transformed.txt  host.txt  record.txt  run.py  constants.pt
                      graph_0_forward_1f6c2b0a94de3377.py       (the host program in Python, by its content)
                      eager_calls.json                          (what it calls that is no kernel)
                      kernel_0.txt  kernel_0.ll  kernel_0.s     (its loops as they run, LLVM's text, assembly)

The Python is for people and for debuggers: what runs names that file, and is never read from it. A file that cannot be
written is reported once and never fails a compile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
inputs = [
{inputs}
]
if __name__ == "__main__":
    if sys.argv[1:] == ["ferrite"]:
        module = torch.compile(module, backend="ferrite", options={{"strict": True}})
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
        self._folder = options.debug_folder(name)

    def captured(self, module: GraphModule, name: str) -> None:
        if self._folder is None:
            return
        self._write("captured.txt", show_graph(module.graph, types=True, sources=True))
        self._write("run.py", script(module, name))
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


def script(module: GraphModule, name: str) -> str:
    """A Python file that rebuilds the graph and its children and runs it on random inputs of the captured sizes."""
    classes = "\n".join(_class_text(path, member) for path, member in family(module))
    inputs = "\n".join(f"    {_input_text(node)}," for node in module.graph.find_nodes(op="placeholder"))
    return _SCRIPT.format(name=name, classes=classes, inputs=inputs)


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


def _input_text(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(value.node.hint)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = [_hint(extent) for extent in value.shape]
    strides = [_hint(stride) for stride in value.stride()] if value.layout == torch.strided else []
    fill = "normal_()" if value.dtype.is_floating_point or value.dtype.is_complex else "zero_()"
    return f"torch.empty_strided({sizes}, {strides}, dtype={value.dtype}, device='{value.device}').{fill}"


def _hint(extent: object) -> object:
    return extent if isinstance(extent, int) else extent.node.hint  # type: ignore[attr-defined]
