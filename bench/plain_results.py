"""Models as PyTorch's own store of traced functions can hold them: see docs/cache.md, "Without Dynamo"."""

from __future__ import annotations

from typing import Any

import torch


class PlainResults(torch.nn.Module):
    """A model that gives tensors only: its own loss in training if it has one, else all of its tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        if isinstance(output, torch.Tensor):
            return output
        if self.training and output.get("loss") is not None:
            return (output["loss"],)
        return tuple(value for value in output.values() if isinstance(value, torch.Tensor))


def without_defaults(guards: Any) -> list[bool]:
    """Which guards are kept: not those on the defaults of functions behind decorators."""
    return ["__defaults__" not in guard.name for guard in guards]
