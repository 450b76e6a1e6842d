"""Every node of a host program. Values inside are those of `syntax`; nothing here knows torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a process that finds its kernels compiled reads none
    from ferrite.loops.nodes import Program

# Calls that others look for.
ALLOCATE = "aten.empty_strided.default"
HOLD = "ferrite.artifact.host_calls.as_promised"  # what an eager op made, for a kernel to read
PART = "operator.getitem"
VIEWS = frozenset({
    "aten.t.default", "aten.permute.default", "aten.transpose.int", "aten.slice.Tensor", "aten.select.int",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.expand.default", "aten.detach.default",
    "aten.alias.default", "aten.reshape.default", "aten.view.default",
})  # fmt: skip


@dataclass(frozen=True)
class Input:
    """One argument, by position.

    text:   x: f32[8, 4]        w: static(f32[4, 2])        y: saved(f32[8, 4])        z: donated(f32[8, 4])
            u: saved(part(f32[8], u, 128))                  v: saved(part(f32[8], u, 128))
            s0: Sym(s0)                                     s1: NestedInt(s1)
    """

    name: str
    type: str
    static: bool = False  # the same tensor in every call: a parameter or a buffer
    donated: bool = False  # dead after this program: its memory may be written
    saved: bool = False  # nobody else has it, unless the caller calls again: its memory goes where it is freed
    part: tuple[str, int] | None = None  # of memory of that many bytes, which goes with all inputs that name it so

    @property
    def is_number(self) -> bool:
        return self.type.startswith("Sym(")

    @property
    def is_nested_int(self) -> bool:
        """The ragged size of a jagged tensor. It is no number, and only Python can compute with it."""
        return self.type.startswith("NestedInt(")


@dataclass(frozen=True)
class Constant:
    """A live object that belongs to the program; the object itself is kept beside it.

    text:   _tensor_constant0 = constant(f32[3])
    """

    name: str
    type: str


@dataclass(frozen=True)
class Call:
    """Call an operator or a Python function in eager. `gives`: the type of its result in the trace, if the operator is
    none of PyTorch's own.

    text:   mm = aten.mm.default(x, w)  # model.py:41
            pieces: [f32[8, 4], None] = library.pieces.default(x)  # model.py:42
    """

    result: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str = ""
    gives: str = ""


@dataclass(frozen=True)
class Origin:
    """An op whose check in a kernel can fail, the user's line behind it, and what the error then says.

    text:   ('aten.index.Tensor', 'model.py:12  y = x[n]', 'index {index} is out of bounds for ...')
    """

    op: str
    line: str
    message: str


@dataclass(frozen=True)
class Launch:
    """Run a kernel on buffers, in the order of its parameters, with the sizes that it asks for.

    text:   kernel_0(x, y, s0)  # model.py:41
            kernel_1(x, n, y)  # index, exp at m.py:12, raises [('aten.index.Tensor', 'm.py:12  y = x[n]', '...')]
    """

    kernel: str
    buffers: tuple[str, ...]
    sizes: tuple[Any, ...]
    source: str = ""
    origins: tuple[Origin, ...] = ()
    ops: tuple[str, ...] = ()  # what it computes, for people to read


def join_places(places: Iterable[str]) -> str:
    """The `source` of a step that has several, each once."""
    return ", ".join(dict.fromkeys(place for several in places if several for place in several.split(", ")))


@dataclass(frozen=True)
class Free:
    """These values are not read again.

    text:   del x, w
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Return:
    """The result: a tuple in a main program, any value in a function that an operator calls.

    text:   return (mm,)
    """

    value: Any


Step = Call | Launch | Free | Return


def place_of_step(step: Step) -> dict[str, str]:
    """What a step computes and for which lines of the user, for an error."""
    match step:
        case Call():
            return {"op": step.target, "line": step.source}
        case Launch():
            return {"kernel": step.kernel, "op": ", ".join(step.ops), "line": step.source}
    return {}


def place_of_kernel(name: str, steps: Iterable[Step]) -> dict[str, str]:
    """The same for the first step that launches a kernel."""
    launches = (step for step in steps if isinstance(step, Launch) and step.kernel == name)
    return {"kernel": name} | next(map(place_of_step, launches), {})


@dataclass(frozen=True)
class HostProgram:
    """One callable. `functions` are the bodies of cond, while_loop, scan, map and invoke_subgraph, called by name;
    `kernels` are loop programs that it and its functions launch.

    check:  every name is an identifier, assigned once, read only while alive; the last step is the only Return
    """

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    functions: tuple[HostProgram, ...] = ()
    constants: tuple[Constant, ...] = ()
    kernels: tuple[Program, ...] = ()
