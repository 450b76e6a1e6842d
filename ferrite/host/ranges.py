"""What a profile shows of a host program: a range for each kernel and for each operator that does work.

    kernel_3 (gelu, add) model.py:41, model.py:42
    aten.mm.default model.py:40

Memory, views, parts of results and arithmetic on sizes have none: they take less time than a range would. Both
executions of a program have the same ranges in the same order.
"""

from __future__ import annotations

from ferrite.host.nodes import ALLOCATE, HOLD, PART, VIEWS, Call, Launch, Step

_QUICK = frozenset({ALLOCATE, HOLD, PART, "aten.sym_size.int"}) | VIEWS
_ON_NUMBERS = ("operator.", "builtins.", "math.", "torch.sym_")


def range_of(step: Step) -> str | None:
    """The name of a step's range, if it has one."""
    match step:
        case Launch():
            ops = f"({', '.join(step.ops)})" if step.ops else ""
            return " ".join(filter(None, (step.kernel, ops, step.source)))
        case Call(target=target) if target not in _QUICK and not target.startswith(_ON_NUMBERS):
            return " ".join(filter(None, (target, step.source)))
    return None
