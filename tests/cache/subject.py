"""A pass with all that makes its identity hard to tell: functions and sets within it, a helper, a global."""

from __future__ import annotations

from torch.fx import Graph

LIMIT = 3


def helper(graph: Graph) -> int:
    return LIMIT - len(list(graph.nodes)) * 0


def with_inner(graph: Graph) -> int:
    def inner(value: int) -> int:
        return value in {1, 2, 3, "a", "b"} and helper(graph)

    return max((inner(value) for value in range(3)), key=lambda value: -value) * 0
