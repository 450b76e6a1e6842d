"""How many bytes of tensors a call has at its peak, by torch's own count.

The profiler of torch notes what the CPU allocator gives and takes back; the running sum has a maximum. It sees every
tensor, also those that compiled code makes through torch's C functions. It does not see memory that comes from C's
library directly: what libraries need for themselves, and the block that Ferrite keeps for inner buffers, which
`kept_memory` knows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.profiler import profile


def peak_of_tensors(call: Callable[[], object]) -> int:
    """Bytes beyond those that were there before `call`."""
    with profile(use_cpu=True, profile_memory=True) as events:
        call()
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(changes, key=lambda event: int(event.start_ns())):
        alive += event.nbytes()
        most = max(most, alive)
    return most
