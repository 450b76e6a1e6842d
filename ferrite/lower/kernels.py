"""Loop nests become kernels: programs whose names depend on their structure only, so that equal ones are one."""

from __future__ import annotations

from typing import Any

from ferrite.loops.index import Size, free_sizes
from ferrite.loops.nodes import Accumulate, Buffer, Load, Nest, Parameter, Program, Reduce, Scan, Statement, Store
from ferrite.loops.rewrite import replace_buffers, walk


def kernel_of(
    nests: tuple[Nest, ...], written: tuple[Buffer, ...], *, in_place: bool = False
) -> tuple[Program, tuple[Buffer, ...]]:
    """A program, and the buffers in the order of its parameters: those that it only reads, then those that it writes.
    `in_place`: the written ones hold values already. What nests write beside them is memory of the kernel's own."""
    own = {buffer: None for nest in nests for statement in nest.body for buffer in _targets(statement)}
    local = [buffer for buffer in own if buffer not in written]
    read: dict[Buffer, None] = {}
    sizes: dict[Size, None] = {}
    for nest in nests:
        sizes |= dict.fromkeys(sorted(free_sizes(nest), key=lambda size: size.name))
        for node in walk(nest):
            if isinstance(node, Load) and node.buffer not in written and node.buffer not in own:
                read[node.buffer] = None
            sizes |= dict.fromkeys(_sizes_in(node))
    buffers = (*read, *written)
    for buffer in (*buffers, *local):
        for extent in (*buffer.sizes, *buffer.strides):
            sizes |= dict.fromkeys(free_sizes(extent))
    renamed = {b: Buffer(f"x{n}", b.dtype, b.sizes, b.strides) for n, b in enumerate(read)}
    renamed |= {b: Buffer(f"y{n}", b.dtype, b.sizes, b.strides) for n, b in enumerate(written)}
    renamed |= {b: Buffer(f"t{n}", b.dtype, b.sizes, b.strides) for n, b in enumerate(local)}
    role = "inout" if in_place else "out"
    parameters = tuple(Parameter(renamed[b], role if b in written else "in") for b in buffers)
    moved = tuple(replace_buffers(nest, renamed) for nest in nests)
    ordered = tuple(sorted(sizes, key=lambda size: size.name))
    return Program("kernel", ordered, parameters, tuple(renamed[b] for b in local), moved), buffers


def _sizes_in(node: Any) -> list[Size]:
    """The sizes that loop extents of a node name: nodes do not count them as their own."""
    axes = node.axes if isinstance(node, (Nest, Reduce)) else (node.axis,) if isinstance(node, Scan) else ()
    return [size for axis in axes for size in free_sizes(axis.extent)]


def _targets(statement: Statement) -> tuple[Buffer, ...]:
    match statement:
        case Store(buffer=buffer) | Accumulate(buffer=buffer):
            return (buffer,)
        case Scan(targets=targets):
            return tuple(target[0] for target in targets if target is not None)
    return ()
