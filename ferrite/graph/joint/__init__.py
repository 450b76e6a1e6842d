"""Passes over forward and backward in one graph, before it is partitioned; the order is the tuple."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

JOINT: tuple[Callable[[Graph], int], ...] = ()
