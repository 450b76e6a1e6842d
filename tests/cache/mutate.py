"""Entries that are almost right: values of a msgpack text that are replaced, dropped, doubled or moved."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import msgspec

ODD = (None, True, -1, 0, 1 << 62, 1.5, float("nan"), "", "x", "a b", "__import__('os')", "../../x", b"", [], {}, [[]],
       ["ref", "nowhere"], ["named", "os.system"], ["tuple"], ["data", "ViewAndMutationMeta", {}])  # fmt: skip

DEEP = ("graphs", "wrapping", "inference", "program")


def mutations(body: bytes, *, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """What was changed, and the bytes of that. Two of three changes are in the program and in what wraps it."""
    chance = random.Random(seed)
    whole = msgspec.msgpack.decode(body)
    for _ in range(count):
        changed = copy.deepcopy(whole)
        yield _change(changed, chance), msgspec.msgpack.encode(changed)


def _change(whole: Any, chance: random.Random) -> str:
    """Changes one value in place, near the leaves or near the root."""
    path, place = [], whole
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        deeper = [key for key in DEEP if isinstance(place, dict) and key in place]
        key = chance.choice(deeper if deeper and chance.random() < 0.67 else keys)
        path.append(str(key))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or chance.random() < 0.15:
            break
        place = inner
    match chance.randrange(4):
        case 0:
            del place[key]
            what = "dropped"
        case 1 if isinstance(place, list):
            place.insert(key, copy.deepcopy(inner))
            what = "doubled"
        case 2 if isinstance(place, list) and len(place) > 1:
            place[key], place[key - 1] = place[key - 1], place[key]
            what = "moved"
        case _:
            place[key] = chance.choice(ODD)
            what = f"now {place[key]!r}"
    return f"{'.'.join(path)} {what}"
