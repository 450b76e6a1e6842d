"""A compiled function that leaves the process: what `torch.compile(...).aot_compile(...)` saves and loads.

A package is an entry of the cache with its machine code in one piece of bytes. Dynamo stores it beside its guards and
the function's own code; loaded in another process it runs without any compile, on a machine that has the instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.aot_compile_types import SerializableCallable

from ferrite import caching
from ferrite.artifact.entry import bundle, decode, encode, unbundle
from ferrite.artifact.key import fields_of_machine

_MUST_AGREE = ("cpu", "torch")  # machine code and PyTorch's own records mean nothing elsewhere


class Package(SerializableCallable):
    """A callable, and the bytes that make it again."""

    def __init__(self, function: Callable[..., Any], data: bytes) -> None:
        self.function = function
        self.data = data

    @classmethod
    def of(cls, function: Callable[..., Any], lookup: caching.Lookup) -> Package:
        """What was just compiled. Raises `RuntimeError` if a part of it cannot leave the process."""
        if lookup.entry is None:
            raise RuntimeError(f"Ferrite cannot save this function{lookup.reason}")
        return cls(function, bundle("package", *encode(lookup.entry)))

    @classmethod
    def serialize_compile_artifacts(cls, fn: Package) -> bytes:
        return fn.data

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Package:
        """Raises `RuntimeError` if the package is damaged, or made for another machine or another PyTorch."""
        try:
            found = unbundle(data)
            entry = decode(found.entry, found.objects.get)
        except (ValueError, LookupError) as error:
            raise RuntimeError(f"this is no package of Ferrite: {error}") from error
        here = fields_of_machine()
        for name in _MUST_AGREE:
            made_for = entry.fields.get(name)
            if made_for != here[name]:
                raise RuntimeError(f"this package cannot run here: {name} is {here[name]}, it was made for {made_for}")
        return cls(caching.wrapped(entry), data)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
