"""What the cache keeps of one captured graph: its compiled graphs, and what PyTorch needs to wrap them.

An entry is msgpack of the types below, decoded strictly: a field that is missing, unknown or of another type makes it
no entry. Machine code stands beside it under its own digest, so that entries share it.

Note [Lines]
    Errors name the user's line, so host programs hold lines. A graph whose code moved in its file has the same key: on
    a hit each line becomes that of the same node in the graph that is compiled now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ferrite.artifact.compiled import Parcel

FORMAT = 4


class Wrapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What AOTAutograd keeps about the graphs; `facts` as `autograd_facts.pack` writes them. `backward`: the graph, as
    `backward_graph.pack_graph` writes it, if there is one."""

    facts: Any
    saved: int | None  # how many results of the forward graph are there for the backward graph
    detached: tuple[int, ...]  # inputs that the forward graph takes without their history
    saved_sizes: int | None
    backward: bytes


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fields`: of the key. `sources`: the user's lines when it was compiled (Note [Lines]). `guards`: what the sizes
    of a call must satisfy, over its symbolic inputs in order. `records`: what the compile said, for the record of
    whoever finds this."""

    fields: dict[str, str]
    sources: tuple[str, ...]
    guards: str
    wrapping: Wrapping
    graphs: dict[str, Parcel]  # by phase: "inference", or "forward" and "backward"
    objects: dict[str, tuple[str, ...]]  # by phase: the digests of what `Code.objects` holds; and of `Parcel.support`
    operators: dict[str, str]  # of users, that the graphs call: digests of what they did
    records: bytes
    format: int = FORMAT


def encode(entry: Entry) -> tuple[bytes, dict[str, bytes]]:
    """The bytes of an entry, and its objects by digest."""
    objects: dict[str, bytes] = {}
    named: dict[str, tuple[str, ...]] = {}
    graphs: dict[str, Parcel] = {}
    for phase, parcel in entry.graphs.items():
        made = {hashlib.sha256(data).hexdigest(): data for data in parcel.code.objects} if parcel.code else {}
        objects |= made
        named[phase] = tuple(made)
        for name, data in parcel.support.items():
            named[name] = (hashlib.sha256(data).hexdigest(),)
            objects[named[name][0]] = data
        graphs[phase] = _with_objects(parcel, (), dict.fromkeys(parcel.support, b""))
    return msgspec.msgpack.encode(msgspec.structs.replace(entry, graphs=graphs, objects=named)), objects


def decode(data: bytes, read_object: Callable[[str], bytes | None]) -> Entry:
    """The entry with its objects. Raises `ValueError` if the bytes are none, `LookupError` if an object is missing."""
    try:
        entry = msgspec.msgpack.decode(data, type=Entry)
    except (ValueError, RecursionError) as error:  # msgspec's errors are of the first kind
        raise ValueError(f"it is no entry: {error}") from error
    if entry.format != FORMAT:
        raise ValueError(f"it is an entry of format {entry.format}, and this is {FORMAT}")
    read = {name: tuple(_read(digest, read_object) for digest in digests) for name, digests in entry.objects.items()}
    graphs = {}
    for phase, parcel in entry.graphs.items():
        support = {name: _only(read.get(name, ())) for name in parcel.support}
        graphs[phase] = _with_objects(parcel, read.get(phase, ()), support)
    return msgspec.structs.replace(entry, graphs=graphs)


def _read(digest: str, read_object: Callable[[str], bytes | None]) -> bytes:
    found = read_object(digest)
    if found is None:
        raise LookupError(f"its object {digest} is gone")
    if hashlib.sha256(found).hexdigest() != digest:
        raise ValueError(f"object {digest} is another one")
    return found


def _only(objects: tuple[bytes, ...]) -> bytes:
    if len(objects) != 1:
        raise ValueError("it is no entry: what graphs share is one object each")
    return objects[0]


def moved_lines(then: Sequence[str], now: Sequence[str]) -> dict[str, str] | None:
    """Each line, and each place alone, with what it is now; None if one is now two, or nodes do not pair up."""
    if tuple(then) == tuple(now):
        return {}
    if len(then) != len(now):
        return None
    moved: dict[str, str] = {}
    for was, became in zip(then, now, strict=True):
        for old, new in ((was, became), (was.partition("  ")[0], became.partition("  ")[0])):
            if old and moved.setdefault(old, new) != new:
                return None
    return moved


def objects_of(entry: Entry) -> dict[str, bytes]:
    """Those of a decoded entry, by digest."""
    found: dict[str, bytes] = {}
    for phase, parcel in entry.graphs.items():
        if parcel.code:
            found |= zip(entry.objects[phase], parcel.code.objects, strict=True)
        for name, data in parcel.support.items():
            found |= zip(entry.objects[name], (data,), strict=True)
    return found


def _with_objects(parcel: Parcel, objects: tuple[bytes, ...], support: dict[str, bytes]) -> Parcel:
    code = parcel.code and msgspec.structs.replace(parcel.code, objects=objects)
    return msgspec.structs.replace(parcel, code=code, support=support)


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry with its objects in one piece, for those who carry it elsewhere."""

    name: str
    entry: bytes
    objects: dict[str, bytes]


def bundle(name: str, entry: bytes, objects: dict[str, bytes]) -> bytes:
    return msgspec.msgpack.encode(Bundle(name, entry, objects))


def unbundle(data: bytes) -> Bundle:
    """Raises `ValueError` if the bytes are no bundle."""
    try:
        return msgspec.msgpack.decode(data, type=Bundle)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is no bundle: {error}") from error
