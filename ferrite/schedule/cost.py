"""What things cost, in bytes moved and operations: the steps of a graph, a join of two kernels, a value computed again.

**Steps.** A kernel moves its parameters, each as often as it is an operand and a result; a call moves its operands and
results. Views, allocations and arithmetic on sizes move nothing. A size that is a symbol counts as what it was in the
trace, one that only the data knows as nothing. What functions of the program do (branches, bodies of loops) is not
counted: nobody knows how often they run.

**Joins.** Two kernels that become one touch what both touch once. What the second one reads is not read again; what the
first one wrote for nobody else is not written either (`saved_by_joining`).

**Values.** To compute something again takes operations, each weighed by the time of one addition (`weight_of`). To keep
it takes bytes of the first cache, one written and one read back for each of its own (`kept_bytes`). A byte there costs
as much as an operation on f32: 16 lanes are written and read back in the time of eight additions of 16 lanes. One
thread, 64 rows of 768 of f32 that a reduction and its nest use, by how often and how many additions, products and
maxima:

    once more, 6    0.23 ns an element if computed again, 0.25 if kept       twice more, 2    0.24 and 0.29
    once more, 8    0.29 and 0.26                                            twice more, 4    0.30 and 0.29
    once more, 16   0.78 and 0.45                                            twice more, 8    0.47 and 0.33
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ferrite.host.lowered import Body, Lowered
from ferrite.host.nodes import ALLOCATE, HOLD, PART, Call, Launch
from ferrite.loops.dtypes import DType
from ferrite.loops.index import Axis, Index, free_axes
from ferrite.loops.nodes import Apply, Expr, Program, Random
from ferrite.loops.rewrite import walk
from ferrite.schedule.shape import RANDOM_WEIGHT, is_quick
from ferrite.step_cost import StepCost
from ferrite.syntax import refs

# Operations by the time of a plain one on as many lanes: 16 of f32 take at most 0.2 ns (of 64 Ki in the second cache,
# one thread, a chain of eight less one of two; a product and a sum together take 0.16). What is quick (`shape.QUICK`)
# weighs 1; of functions, exp and exp2 weigh 40, sin 44, tanh 54, erf and log 65, pow 320: all count as the least of
# them, enough to tell them from what is quick.
WEIGHTS = {"div": 8, "sqrt": 15, "rsqrt": 25}
FUNCTION_WEIGHT = 40
OPERATIONS_PER_BYTE = 1  # of f32, in the time in which a byte is written to the first cache or read from it
LONG_ROW = 512  # elements, for what is quick: the norm of a sum of five took 6.9 us kept and 3.7 not in rows of 32 ...
# ... and 170 us kept and 197 not in rows of 768.
LANE = 4  # bytes: halves are computed with as f32; an operation on wider elements counts as several


# ---- steps


def costs_of(lowered: Lowered) -> tuple[StepCost, ...]:
    """Of each step of the graph itself, in order."""
    kernels = {program.name: program for program in lowered.kernels}
    body = lowered.main
    parts: dict[str, list[str]] = {}  # what is taken out of the result of a call that gives several
    for step in body.steps:
        if isinstance(step, Call) and step.target == PART:
            parts.setdefault(next(iter(refs(step.args))), []).append(step.result)
    return tuple(_cost(step, body, kernels, parts) for step in body.steps)


def _cost(step: Call | Launch, body: Body, kernels: Mapping[str, Program], parts: Mapping[str, list[str]]) -> StepCost:
    if isinstance(step, Launch):
        roles = [parameter.role for parameter in kernels[step.kernel].parameters]
        return StepCost(f"{step.kernel}({', '.join(step.buffers)})", moved(body, zip(step.buffers, roles, strict=True)))
    name = f"{step.result} = {step.target}"
    operands = list(dict.fromkeys(refs((step.args, step.kwargs))))
    written = list(body.writes.get(step.result, ()))
    if step.target in (ALLOCATE, HOLD, PART) or (not written and _is_view(step.result, operands, body)):
        return StepCost(name, 0)
    results = written or [step.result, *parts.get(step.result, ())]
    return StepCost(name, sum(body.about.get(each, 0) for each in (*operands, *results)), body.flops.get(step.result))


def _is_view(result: str, operands: list[str], body: Body) -> bool:
    memory = body.memory.get(result)
    return memory is not None and any(body.memory.get(operand) == memory for operand in operands)


def moved(body: Body, parameters: Iterable[tuple[str, str]]) -> int:
    """Bytes that a kernel reads and writes, by the names and roles of its parameters."""
    return sum(body.about.get(name, 0) * (2 if role == "inout" else 1) for name, role in parameters)


# ---- joins


def saved_by_joining(body: Body, read: Iterable[str], gone: Iterable[str]) -> int:
    """Bytes that are not moved if a kernel joins another one. `read`: what it reads of what the other one has touched;
    `gone`: tensors that nobody but the two knows."""
    return moved(body, [(name, "in") for name in read]) + moved(body, [(name, "out") for name in gone])


# ---- values


def weight_of(part: Apply | Random) -> int:
    """Operations that are as long."""
    if isinstance(part, Random):
        return RANDOM_WEIGHT
    lanes = max(part.dtype.bytes // LANE, 1)
    return lanes * (1 if is_quick(part) else WEIGHTS.get(part.operation, FUNCTION_WEIGHT))


def operations_in(value: Expr, axes: Collection[Axis]) -> int:
    """Of each step along axes. What is quick and the same at all of them is computed before. What is used twice counts
    once, a reduction inside as one of its steps."""
    parts = (part for part in dict.fromkeys(walk(value)) if isinstance(part, (Apply, Random)))
    return sum(weight_of(part) for part in parts if not is_quick(part) or not free_axes(part).isdisjoint(axes))


def element_bytes(dtype: DType) -> int:
    """To move it in the cache; halves are widened, which takes as long as the other half."""
    return max(dtype.bytes, LANE)


def kept_bytes(value: Expr) -> int:
    """Moved for each element if it is kept: it is written and read back."""
    return 2 * element_bytes(value.dtype)


def pays_to_keep(value: Expr, operations: int, times: int, row: Index) -> bool:
    """Whether to compute a value so many times more, of so many operations, costs as much as to keep a row of it."""
    if operations * times < OPERATIONS_PER_BYTE * kept_bytes(value):
        return False
    is_long = not row.terms and row.constant >= LONG_ROW
    return is_long or not all(is_quick(part) for part in walk(value) if isinstance(part, (Apply, Random)))
