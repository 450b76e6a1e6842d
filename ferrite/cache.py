"""The cache on disk, for people: why a graph was compiled again, what is stored, is it sound, make it smaller.

    print(ferrite.cache.explain())      # after a compile: hit, bypass and why, or which part of the key was another
    ferrite.cache.entries()             # what is stored, latest use first
    ferrite.cache.verify()              # reads every file; what is damaged, incomplete or of no use goes
    ferrite.cache.prune(500)            # keeps what was used last, up to so many megabytes
    ferrite.cache.clear()

`folder`: another one than that of the options. Nothing here loads torch but `explain` and `stats`, which speak of this
process; `ferrite cache` on the command line (`command.py`) shows the rest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ferrite.artifact.outline import Outline
from ferrite.artifact.store import GRAPHS, OBJECTS, File, Store, default_folder
from ferrite.errors import BrokenCache
from ferrite.options import from_environment

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Entry:
    """One captured graph that was compiled. `size`: in bytes, with the machine code that other entries may share;
    `phases`: of its graphs, "inference", or "forward" and "backward"; `hint`: the first line of the user's in it;
    `seconds`: that the compile took; `guards`: what sizes must satisfy."""

    name: str
    made: float
    used: float
    hits: int
    size: int
    phases: tuple[str, ...]
    kernels: int
    seconds: float
    hint: str
    guards: str
    fields: Mapping[str, str]

    @property
    def key(self) -> str:
        return self.name.rpartition("-")[0]


@dataclass(frozen=True)
class Stats:
    """What happened to the lookups of this process; `stored` and `unstored`: compiled graphs that were written, and
    those that cannot be."""

    hits: int
    misses: int
    bypasses: int
    stored: int
    unstored: int


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. Each file that went as "kind/name", with why."""

    files: int
    bytes: int
    damaged: dict[str, str]
    incomplete: dict[str, str]  # entries without some of their machine code
    unused: dict[str, str]  # machine code that no entry names, and what a process that died left behind

    @property
    def is_sound(self) -> bool:
        return not (self.damaged or self.incomplete)


def folder_of(folder: Folder = None) -> Path:
    """Where the cache is. Raises `BrokenCache` if this user has none."""
    chosen = os.fspath(folder) if folder else from_environment(os.environ).cache_dir or default_folder()
    if not chosen:
        raise BrokenCache("there is no cache", ran="a look for the home of this user", why="this user has no home")
    return Path(chosen)


def entries(folder: Folder = None) -> list[Entry]:
    """What is stored, latest use first. Files that are no entries are left out: `verify` tells of them."""
    store = _open(folder, writable=False)
    files = list(store.files())
    sizes = {file.name: file.size for file in files if file.kind == OBJECTS}
    found = []
    for file in sorted((file for file in files if file.kind == GRAPHS), key=lambda file: (-file.used, file.name)):
        try:
            found.append(_entry(file, store.outline(file.name), sizes))
        except (OSError, ValueError):
            continue
    return found


def stats() -> Stats:
    from torch._dynamo.utils import counters

    count = counters["ferrite"]
    words = ("hit", "miss", "bypass", "saved", "unstored")
    return Stats(*(count[f"graph_cache_{word}"] for word in words))


def verify(folder: Folder = None) -> Verdict:
    """Reads every file, and removes what cannot be used or is of no use."""
    store = _open(folder, writable=True)
    damaged: dict[str, str] = {}
    incomplete: dict[str, str] = {}
    unused: dict[str, str] = {}
    if not store.folder.exists():
        return Verdict(0, 0, damaged, incomplete, unused)
    files = list(store.files())
    sound = [file for file in files if not _damage(store, file, damaged)]
    objects = {file.name for file in sound if file.kind == OBJECTS}
    named: set[str] = set()
    for file in (file for file in sound if file.kind == GRAPHS):
        wanted = store.outline(file.name).object_names
        if not wanted <= objects:
            incomplete[file.place] = f"without {len(wanted - objects)} of its {len(wanted)} objects"
            store.remove(GRAPHS, file.name)
        else:
            named |= wanted
    for file in (file for file in sound if file.kind == OBJECTS and file.name not in named):
        unused[file.place] = "no entry names it"
        store.remove(OBJECTS, file.name)
    left = store.remove_left_behind()
    if left:
        unused["left aside"] = f"{left} files of processes that died"
    return Verdict(len(files), sum(file.size for file in files), damaged, incomplete, unused)


def prune(megabytes: float, folder: Folder = None) -> int:
    """Keeps what was used last; gives how many files went."""
    store = _open(folder, writable=True)
    return store.prune(int(megabytes * (1 << 20))) if store.folder.exists() else 0


def clear(folder: Folder = None) -> int:
    """Removes everything; gives how many files went."""
    store = _open(folder, writable=True)
    return store.clear() if store.folder.exists() else 0


def explain(folder: Folder = None) -> str:
    """What the cache said of the graph that was looked up last in this process; after a miss, how its key differs from
    that of the nearest entry: the one with the fewest other fields, then with the most equal lines of the graph."""
    from ferrite import caching  # with it comes torch

    lookup = caching.latest()
    if lookup is None:
        return "No graph was looked up in this process."
    if lookup.outcome != "miss" or lookup.fields is None:
        return f"{lookup.outcome}: {lookup.reason}"
    told = [f"miss: {lookup.reason}"]
    stored = entries(folder or (lookup.store.folder if lookup.store is not None else None))
    same = [entry for entry in stored if entry.fields == lookup.fields]
    others = [entry for entry in stored if entry.fields != lookup.fields]
    told += [f"  an entry with this key asks for {entry.guards}" for entry in same if entry.guards]
    if others:
        wanted = lookup.fields
        nearest = min(others, key=lambda entry: (_other_fields(wanted, entry.fields), -_equal_lines(wanted, entry)))
        told.append(f"The nearest entry is {nearest.name[:12]} ({nearest.hint or 'of no known source'}). It differs in")
        told += [f"  {line}" for line in difference(wanted, nearest.fields)]
    elif not same:
        told.append("The cache is empty.")
    else:
        told.append("No other entry is stored.")
    return "\n".join(told)


def difference(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What differs between two keys: each field with the first line that is another one."""
    told = []
    for name in sorted({*wanted, *found}):
        here, there = wanted.get(name, "").splitlines(), found.get(name, "").splitlines()
        length = max(len(here), len(there))
        here, there = here + [""] * (length - len(here)), there + [""] * (length - len(there))
        pairs = [(now.strip(), then.strip()) for now, then in zip(here, there, strict=True) if now != then]
        if pairs:
            now, then = pairs[0]
            rest = f" (and {len(pairs) - 1} lines more)" if len(pairs) > 1 else ""
            told.append(f"{name}: now {now or 'nothing'}; it was made for {then or 'nothing'}{rest}")
    return told


# ---- pieces


def _open(folder: Folder, *, writable: bool) -> Store:
    return Store(folder_of(folder), writable=writable, strict=True)


def _damage(store: Store, file: File, damaged: dict[str, str]) -> bool:
    """Whether a file is damaged; then it is removed and noted."""
    try:
        if file.kind == GRAPHS:
            store.outline(file.name)
        else:
            store.check(file.kind, file.name)
    except FileNotFoundError:
        return True  # somebody removed it meanwhile
    except (OSError, ValueError) as error:
        damaged[file.place] = str(error)
        store.remove(file.kind, file.name)
        return True
    return False


def _entry(file: File, outline: Outline, sizes: Mapping[str, int]) -> Entry:
    return Entry(
        name=file.name,
        made=file.made,
        used=file.used,
        hits=file.hits,
        size=file.size + sum(sizes.get(name, 0) for name in outline.object_names),
        phases=tuple(sorted(outline.graphs, key=["inference", "forward", "backward"].index)),
        kernels=sum(len(graph.kernels) for graph in outline.graphs.values()),
        seconds=sum(graph.facts.seconds for graph in outline.graphs.values()),
        hint=next(filter(None, outline.sources), ""),
        guards=outline.guards,
        fields=outline.fields,
    )


def _other_fields(wanted: Mapping[str, str], found: Mapping[str, str]) -> int:
    return sum(wanted.get(name) != found.get(name) for name in {*wanted, *found})


def _equal_lines(wanted: Mapping[str, str], entry: Entry) -> int:
    here, there = (Counter(fields.get("graph", "").splitlines()) for fields in (wanted, entry.fields))
    return (here & there).total()
