"""What a host program calls that is no kernel of its own, as JSON: for whoever reads it outside of Python.

    [{"op": "aten.sort.default", "arguments": [["ref", "mm"]], "keywords": {"dim": 1}, "outputs": ["getitem", null],
      "program": "graph_0_inference", "source": "model.py:41"}]

In order, the functions of cond and its like first. Arguments are as `packed` writes them; a number that JSON does not
have is ["float", "inf"]. Outputs are the names that the program knows them by, null for one that nobody reads, up to
the last that somebody does. Memory, views and arithmetic on sizes are no calls here, as they do no work (`ranges`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from ferrite.host.nodes import PART, Call, HostProgram
from ferrite.host.packed import pack_value
from ferrite.host.ranges import range_of


def show_calls(program: HostProgram) -> str:
    """A JSON list, one call in a line."""
    lines = [json.dumps(call, allow_nan=False) for call in eager_calls(program)]
    return "[" + ",\n ".join(lines) + "]\n"


def eager_calls(program: HostProgram) -> Iterator[dict[str, Any]]:
    """Each as lists, dicts, texts, numbers and None."""
    for function in program.functions:
        yield from eager_calls(function)
    parts = _parts(program)
    for step in program.steps:
        if isinstance(step, Call) and range_of(step) is not None:
            yield {
                "op": step.target,
                "arguments": [_finite(pack_value(value)) for value in step.args],
                "keywords": {name: _finite(pack_value(value)) for name, value in step.kwargs.items()},
                "outputs": parts.get(step.result, [step.result]),
                "program": program.name,
                "source": step.source,
            }


def _parts(program: HostProgram) -> dict[str, list[str | None]]:
    """Of results that are tuples, the name of each part, as far as one is read."""
    found: dict[str, list[str | None]] = {}
    for step in program.steps:
        match step:
            case Call(result=name, target=target, args=(whole, int(place))) if target == PART:
                named = found.setdefault(whole.name, [])
                named += [None] * (place + 1 - len(named))
                named[place] = name
    return found


def _finite(packed: Any) -> Any:
    match packed:
        case list():
            return [_finite(item) for item in packed]
        case float() if not math.isfinite(packed):
            return ["float", str(packed)]
    return packed
