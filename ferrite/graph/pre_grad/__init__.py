"""Passes over the graph that Dynamo captured, before autograd; the order is the tuple."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

PRE_GRAD: tuple[Callable[[Graph], int], ...] = ()
