"""A compiled function that leaves the process, in the two ways that PyTorch has for it. Both carry an entry of the
cache with its machine code in one piece of bytes; loaded in another process it runs without any compile, on a machine
that has the instructions.

    Package         what `torch.compile(...).aot_compile(...)` saves and loads
    Precompiled     what Dynamo keeps in a store of its own under `torch._dynamo.config.caching_precompile`, with its
                    guards and the code that it made: the next process does not even trace

Note [Whose function]
    Dynamo finds what it stored by the name and the first line of the function, and asks no backend before it uses it.
    So whatever else a result depends on is compared here, while the store is read: another backend, another option,
    pass, setting or machine is an error then, after which Dynamo traces as if nothing were stored. After that it would
    be too late: PyTorch 2.13 cannot go on when a function fails to load. What was asked of `torch.compile` is known to
    the object that reads the store, further up in the call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.eval_frame import OptimizeContext, innermost_backend
from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext

from ferrite import caching, registry
from ferrite.artifact.entry import Entry, bundle, decode, encode, unbundle
from ferrite.artifact.key import fields_of_machine, settings_lines, show_options
from ferrite.errors import Unsupported
from ferrite.options import Options, from_environment, resolve

# Machine code, how objects of Python lie in memory, and PyTorch's own records mean nothing elsewhere, and host programs
# call what their own version has.
_MUST_AGREE = ("cpu", "torch", "python", "ferrite")


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
        """Raises `RuntimeError` if the package is damaged, or made for another machine, PyTorch or Ferrite."""
        entry = _entry_in(data)
        here = fields_of_machine()
        _compare(entry.fields, {name: here[name] for name in _MUST_AGREE})
        return cls(caching.wrapped(entry, from_environment(os.environ)), data)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Precompiled(BackendCacheArtifact[Callable[..., Any]]):
    """The part of a function in Dynamo's store that Ferrite made. See Note [Whose function]."""

    def __init__(self, key: str, content: bytes, function: Callable[..., Any] | None = None) -> None:
        super().__init__(key, content)
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return _precompiled, (self.key, self.content)

    def __deepcopy__(self, seen: Any) -> Precompiled:
        return self  # PyTorch copies what it is given; nothing here changes

    def after_deserialization(self) -> Callable[..., Any]:
        return self.function or caching.wrapped(_entry_in(self.content), from_environment(os.environ))


def offer(identity: str, content: bytes) -> None:
    """Gives Dynamo an entry for its store; `identity`: its name for the graph."""
    PrecompileContext.record_artifact(Precompiled(identity, content))


def _precompiled(key: str, content: bytes) -> Precompiled:
    """Raises `RuntimeError` if it is damaged, or if `torch.compile` was asked for something else."""
    options = _asked_for()
    if options.cache == "off":
        raise RuntimeError("Ferrite's cache is off")
    entry = _entry_in(content)
    try:
        wanted = {"options": show_options(caching.options_text(options)), "passes": registry.digest()}
    except Unsupported as error:
        raise RuntimeError(f"a stored function cannot be used: {error.title}") from error
    _compare(entry.fields, wanted | fields_of_machine())
    stored = entry.fields["state"].splitlines()
    for line in settings_lines():
        if line not in stored:
            raise RuntimeError(f"this function cannot run here: it was made without {line}")
    if other := caching.redefined(entry):
        raise RuntimeError(f"this function cannot be used: {other} does something else now")
    return Precompiled(key, content, caching.wrapped(entry, options))


def _asked_for() -> Options:
    """The options of the `torch.compile` that is reading Dynamo's store. Raises `RuntimeError` if there is none, or
    if it names another backend."""
    frame = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), OptimizeContext):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        raise RuntimeError("nobody asked for this function")
    backend: Any = innermost_backend(frame.f_locals["self"].callback)
    given = getattr(backend, "kwargs", {})
    if getattr(getattr(backend, "compiler_fn", backend), "__module__", "") != "ferrite.backend":
        raise RuntimeError("this function was compiled by Ferrite, and another backend is asked for")
    return resolve(from_environment(os.environ), given.get("mode"), given.get("options"))


def _entry_in(data: bytes) -> Entry:
    try:
        found = unbundle(data)
        return decode(found.entry, found.objects.get)
    except (ValueError, LookupError) as error:
        raise RuntimeError(f"this is no package of Ferrite: {error}") from error


def _compare(made_for: Mapping[str, str], here: Mapping[str, str]) -> None:
    for name, value in here.items():
        if made_for.get(name) != value:
            raise RuntimeError(f"this package cannot run here: {name} is {value}, it was made for {made_for.get(name)}")
