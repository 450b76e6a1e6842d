"""Loop nests become kernels: programs whose names depend on their structure only, so that equal ones are one."""

from __future__ import annotations

from collections.abc import Collection

from ferrite.loops.access import written_by
from ferrite.loops.index import Size, free_sizes
from ferrite.loops.nodes import Buffer, Fold, FoldScan, Load, Nest, Parameter, Program, Reduce, Scan
from ferrite.loops.rewrite import Tree, replace_buffers, walk


def kernel_of(
    nests: tuple[Nest, ...], written: tuple[Buffer, ...], *, in_place: Collection[Buffer] = ()
) -> tuple[Program, tuple[Buffer, ...]]:
    """A program, and the buffers in the order of its parameters: those that it only reads, then those that it writes.
    `in_place`: written ones that hold values already. What nests write beside them is memory of the kernel's own."""
    own = {buffer: None for nest in nests for statement in nest.body for buffer in written_by(statement)}
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
    roles = {buffer: "inout" if buffer in in_place else "out" for buffer in written}
    parameters = tuple(Parameter(renamed[b], roles.get(b, "in")) for b in buffers)
    moved = tuple(replace_buffers(nest, renamed) for nest in nests)
    ordered = tuple(sorted(sizes, key=lambda size: size.name))
    return Program("kernel", ordered, parameters, tuple(renamed[b] for b in local), moved), buffers


def _sizes_in(node: Tree) -> list[Size]:
    """The sizes that loop extents of a node name: nodes do not count them as their own."""
    match node:
        case Nest(axes=axes) | Reduce(axes=axes) | Fold(axes=axes):
            pass
        case Scan(axis=axis) | FoldScan(axis=axis):
            axes = (axis,)
        case _:
            return []
    return [size for axis in axes for size in free_sizes(axis.extent)]
