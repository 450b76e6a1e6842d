"""When a lowered value gets memory of its own, and when it stays an expression. The policy of G11.

Pointwise values and views stay expressions and are computed again by each reader. A value is stored
  - when an eager call, an output or a mutation needs it as a tensor;
  - when it holds a reduction: readers would repeat the whole sum;
  - when it is long (over MAX_OPERATIONS) or reads much (over MAX_READS);
  - when it has several readers and is dear: it reads more than MAX_SHARED_READS elements, or holds a function over
    the reals or a random number;
  - when two tensors as large as it wait for it alone, and a library is called before it is read for the last time:
    gradients of a weight that is used many times are added up as they come, and so is what goes past layers;
  - when a product reads it: each element is read for every row or column of the other operand;
  - when it can raise and is read by an op that may not read every element of it: eager checks them all;
  - when a pass has marked its node (`meta["realise_to_strides"]`);
  - before anything writes to memory that it reads, if something still reads it afterwards.
A view of a stored tensor that is needed as a tensor is made by running the view op itself, which keeps aliasing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.loops.nodes import Apply, Const, Expr, Load, Random, Reduce
from ferrite.loops.rewrite import can_raise, walk

MAX_OPERATIONS = 50
MAX_READS = 12
MAX_SHARED_READS = 4
DEAR = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "sin", "cos", "tan", "asin", "acos", "atan",
    "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma",
    "i0", "i0e", "i1", "i1e", "ndtr", "ndtri", "log_ndtr", "div", "sqrt", "rsqrt", "truncmod", "floordiv", "floormod",
})  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What reading one element of an expression costs, and which memory it reads."""

    operations: int
    reads: int
    holds_dear: bool
    holds_reduction: bool
    can_raise: bool
    buffers: frozenset[str]

    @property
    def store_at_once(self) -> bool:
        return self.holds_reduction or self.operations > MAX_OPERATIONS or self.reads > MAX_READS

    @property
    def store_if_shared(self) -> bool:
        return self.holds_dear or self.reads > MAX_SHARED_READS


def cost_of(body: Expr) -> Cost:
    """Count what an expression is made of; what occurs twice in it counts once."""
    operations = reads = 0
    holds_dear = holds_reduction = False
    buffers: set[str] = set()
    for node in walk(body):
        if isinstance(node, Apply):
            operations += 1
            holds_dear = holds_dear or _is_dear(node)
        elif isinstance(node, Load):
            reads += 1
            buffers.add(node.buffer.name)
        elif isinstance(node, Reduce):
            holds_reduction = True
        elif isinstance(node, Random):
            holds_dear = True
    return Cost(operations, reads, holds_dear, holds_reduction, can_raise(body), frozenset(buffers))


def _is_dear(node: Apply) -> bool:
    """A division by a number is not: it takes less time than a store and a load."""
    return node.operation in DEAR and not (node.operation == "div" and isinstance(node.operands[1], Const))
