"""Passes over the graph that Dynamo captured, before autograd; the order is the tuple."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

from ferrite.graph.pre_grad.drop_idle_dropout import drop_idle_dropout

PRE_GRAD: tuple[Callable[[Graph], int], ...] = (drop_idle_dropout,)
