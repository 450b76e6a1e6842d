"""What one step of a graph costs. `schedule/cost.py` counts; the record keeps it."""

from __future__ import annotations

from dataclasses import dataclass

# Of one core, to compare steps and not to predict a time: memory past the caches (`native/stream.py` has the
# measurement), and large products in f32.
BYTES_PER_NANOSECOND = 20.0
FLOPS_PER_NANOSECOND = 165.0


@dataclass(frozen=True)
class StepCost:
    """`step`: the kernel or the op, and what it makes. `flops`: of library calls, where torch can count them."""

    step: str
    bytes: int
    flops: int | None = None

    @property
    def elements(self) -> int:
        """As if all were of four bytes."""
        return self.bytes // 4

    @property
    def nanoseconds(self) -> float:
        """It waits for memory or computes, whichever takes longer."""
        return max(self.bytes / BYTES_PER_NANOSECOND, (self.flops or 0) / FLOPS_PER_NANOSECOND)
