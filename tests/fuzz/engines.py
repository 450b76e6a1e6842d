"""The ways in which a program is run: options of torch.compile, and a number of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrite.lower import padding
from tests.both_hosts import both_hosts

from .programs import Program, function_of


@dataclass(frozen=True)
class Engine:
    """A way to run a program.

    Native code starts a team of threads, splits and tiles for large loops only. With `in_small` it does for small ones.
    With `both` every graph also runs in the other execution of its host program, and has to give the same bits.
    With the option `padding`, short rows have gaps too.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    in_small: bool = False
    both: bool = False
    backend: Any = "ferrite"

    def compiled(self, program: Program) -> Callable[..., Any]:
        """The program as this engine runs it; nothing compiled or traced before is kept."""
        torch._dynamo.reset()
        FakeTensorMode.cache_clear()
        options = {"options": dict(self.options)} if self.options else {}
        return torch.compile(function_of(program), backend=self.backend, dynamic=program.dynamic, **options)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Around whatever makes code."""
        from .loops import small_limits

        with contextlib.ExitStack() as stack:
            if self.in_small:
                stack.enter_context(small_limits(0))
            if self.options.get("padding") == "on":
                stack.enter_context(mock.patch.object(padding, "SHARE", 0))
            if self.both:
                stack.enter_context(both_hosts())
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


# Without the cache on disk: it knows nothing of small parts, and would give one engine the code of another.
NATIVE = {"executor": "native", "strict": True, "cache": "off"}
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("native", NATIVE),
        Engine("oracle", NATIVE | {"executor": "oracle"}),
        Engine("plain", NATIVE | {"disable": ("schedule", "loops")}),
        Engine("threads", NATIVE, threads=2, in_small=True),
        Engine("hosts", NATIVE, both=True),
        Engine("padding", NATIVE | {"padding": "on"}, both=True),
    )
}
# Not tested, but asked who is to blame: torch's own capture, and ours without any lowering.
TORCH = Engine("aot_eager", backend="aot_eager")
UNLOWERED = Engine("unlowered", NATIVE | {"executor": "eager"})
