"""Small kernels of every pair of dtypes, where what is left for the last lanes is followed by memory that matters.

LLVM knows the lanes that count where sizes are known, and makes other instructions of what it knows. So these are sizes
around every number of lanes, each with code of its own, many programs to a module. Memory lies as in
`test_native_memory.py`, against a page that nobody may touch; on the other side of it there are bytes that must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ferrite.loops import oracle
from ferrite.loops.dtypes import DTYPES, DType
from ferrite.loops.text import parse_program, show
from ferrite.native import build
from ferrite.native.emit import emit
from ferrite.native.target import Target
from tests.unit.fences import Fences
from tests.unit.targets import TARGETS
from tests.unit.test_native_kernels import Code, agrees
from tests.unit.test_native_memory import in_child, laid_out, reach, values

MARGIN, UNTOUCHED = 64, 0xA5  # bytes beside memory, and what they hold
PAIRS = [(wide, narrow) for wide in DTYPES.values() for narrow in DTYPES.values() if wide.bytes >= narrow.bytes]

Parts = tuple[str, str, str]  # parameters, loop, statement


def cast(value: str, source: DType, to: DType) -> str:
    return value if source is to else f"{to}({value})"


def casts() -> Iterator[Parts]:
    """One lane is left after a vector of 64 bytes, and so after those of 32 and 16; all but one are, before a next row.
    What is not in a loop is where LLVM knows most."""
    for wide, narrow in PAIRS:
        lanes = 64 // max(wide.bytes, 4 if wide.is_half or narrow.is_half else 1)
        n, value = lanes + 1, cast("x[j]", wide, narrow)
        yield f"x: {wide}[{n}], y: out({narrow}[{n}])", f"j in box({n})", f"y[j] = {value}"
        n, value = 2 * lanes - 1, cast("x[i, j]", wide, narrow)
        yield f"x: {wide}[2, {n}], y: out({narrow}[2, {n}])", f"i, j in box(2, {n})", f"y[i, j] = {value}"


def updates() -> Iterator[Parts]:
    """All stays but one lane, which is known: one before the last, or the last, behind which a page may end."""
    for number, (wide, narrow) in enumerate(PAIRS):
        for n in (8, 16, 32):
            value, spot = cast("x[j]", wide, narrow), n - 1 if number % 2 else n // 2
            kept = f"where(value(j) == i64({spot}), {value}, y[j])"
            if n == 16:
                kept = f"where(value(j) < i64({n - 1}), y[j], {value})"
            yield f"x: {wide}[{n}], y: inout({narrow}[{n}])", f"j in box({n})", f"y[j] = {kept}"


def guards() -> Iterator[Parts]:
    """Loads of lanes that are known, or known in part."""
    for number, (wide, narrow) in enumerate(PAIRS):
        n = (9, 17, 33)[number % 3]
        only = (0, n // 2, n - 1)[number // 3 % 3]
        condition = f"{'c[j] & ' if number % 2 else ''}(value(j) == i64({only}))"
        nothing = f"{wide}({False if wide.is_bool else 0.0 if wide.is_float else 0})"
        value = cast(f"guarded({condition}, x[j - {only}], {nothing})", wide, narrow)
        yield f"c: b8[{n}], x: {wide}[1], y: out({narrow}[{n}])", f"j in box({n})", f"y[j] = {value}"


def results() -> Iterator[Parts]:
    """Reductions across rows and along them."""
    for number, (wide, narrow) in enumerate(PAIRS):
        n = (9, 17, 33, 65)[number % 4]
        across, along = "max(x[k, j] for k in box(3))", f"min(x[i, k] for k in box({n}))"
        yield f"x: {wide}[3, {n}], y: out({narrow}[{n}])", f"j in box({n})", f"y[j] = {cast(across, wide, narrow)}"
        yield f"x: {wide}[3, {n}], y: out({narrow}[3])", "i in box(3)", f"y[i] = {cast(along, wide, narrow)}"


FAMILIES = (casts, updates, guards, results)


def run_all(codes: list[Code]) -> Iterator[str]:
    """Says what it is about to do, before it does it; raises where the answer is not the oracle's."""
    fences = [Fences(1 << 12) for _ in range(3)]
    rng = np.random.default_rng(0)
    for code in codes:
        buffers = [parameter.buffer for parameter in code.program.parameters]
        given = [values(buffer, reach(buffer, {}), rng).view(np.uint8) for buffer in buffers]
        expected = {buffer.name: laid_out(buffer, {}, each.copy()) for buffer, each in zip(buffers, given, strict=True)}
        oracle.run(code.program, {}, expected)
        for at_end in (True, False):
            yield f"{show(code.program)}, at the {'end' if at_end else 'start'}".replace("\n", " ")
            arrays, margins = {}, []
            for buffer, fence, each in zip(buffers, fences, given, strict=False):
                memory = fence.bytes(each.size + MARGIN, at_end=at_end)
                memory[...] = UNTOUCHED
                margin, inside = (
                    (memory[:MARGIN], memory[MARGIN:]) if at_end else (memory[each.size :], memory[: each.size])
                )
                inside[...] = each
                arrays[buffer.name] = laid_out(buffer, {}, inside)
                margins.append(margin)
            assert code({}, arrays) == 0
            for buffer in buffers:
                assert agrees(arrays[buffer.name], expected[buffer.name], buffer.dtype), buffer.name
            assert all((margin == UNTOUCHED).all() for margin in margins)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_lanes_that_are_known_touch_their_elements_alone(family: Callable[[], Iterator[Parts]], target: Target) -> None:
    programs = [
        parse_program(f"def kernel{n}({parameters}):\n    for {loop}:\n        {statement}\n")
        for n, (parameters, loop, statement) in enumerate(family())
    ]
    emitted = emit(programs, target)
    assert not emitted.refused
    outside = build.library_addresses(emitted.externals)
    library = build.load([build.build(emitted.text, target)], emitted.names, outside)
    assert in_child(run_all([Code.of(program, library) for program in programs])) is None
