"""Nests share loops where they may, and stay apart where sharing would be wrong or slow."""

from __future__ import annotations

import pytest

from ferrite.loops.text import parse_program
from ferrite.native.emit import emit
from ferrite.schedule.arrange import Loop, arrange, join
from tests.unit.targets import TARGETS


def arranged(text: str) -> str:
    return arrange(parse_program(text)).text()


LAYER_NORM = """
def program(x: f32[512, 768], w: f32[768], y: out(f32[512, 768])):
    t = local(f32[512, 768])
    m = local(f32[512])
    v = local(f32[512])
    for i, j in box(512, 768):
        t[i, j] = x[i, j] + f32(1.0)
    for i in box(512):
        m[i] = welford(t[i, k] for k in box(768))
        v[i] = rsqrt(welford(t[i, k] for k in box(768)).m2)
    for a, b in box(512, 768):
        y[a, b] = (t[a, b] - m[a]) * v[a] * w[b]
"""


def test_a_row_is_finished_before_the_next_and_its_statistics_stay_in_registers() -> None:
    assert arranged(LAYER_NORM) == "\n".join([
        "m = register(f32)",
        "v = register(f32)",
        "t = row(768)",
        "for i in box(512):",
        "    for j in box(768):",
        "        t[i, j] = x[i, j] + f32(1.0)",
        "    m[i] = welford(t[i, k] for k in box(768))",
        "    v[i] = rsqrt(welford(t[i, k] for k in box(768)).m2)",
        "    for b in box(768):",
        "        y[i, b] = (t[i, b] - m[i]) * v[i] * w[b]",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("t[i, j] = x", "t[i, j] = w[j] + x", ""),
        ("768", "7680", "a row is too long for the stack of a thread"),
        ("(t[a, b] - m[a])", "(t[511 - a, b] - m[a])", "another row is read"),
        ("v[i] = rsqrt(welford(t[i, k]", "v[i] = rsqrt(welford(t[0, k]", "all read one row"),
    ],
)
def test_a_local_is_a_row_only_if_every_point_keeps_to_its_own(old: str, new: str, reason: str) -> None:
    assert old in LAYER_NORM
    assert ("t = row(768)" in arranged(LAYER_NORM.replace(old, new))) == (not reason), reason


def test_pointwise_neighbours_share_every_loop_and_merge_them() -> None:
    text = """
def program(x: f32[8, 64], y: out(f32[8, 64]), z: out(f32[8, 64])):
    t = local(f32[8, 64])
    for i, j in box(8, 64):
        t[i, j] = exp(x[i, j])
    for a, b in box(8, 64):
        y[a, b] = t[a, b] * t[a, b]
    for i, j in box(8, 64):
        z[i, j] = y[i, j] + t[i, j]
"""
    lines = arranged(text).splitlines()
    assert lines[:2] == ["t = register(f32)", "for i_j in box(512):"]
    assert len(lines) == 5


def test_loops_change_places_for_the_statistics_of_channels() -> None:
    text = """
def program(x: f32[32, 64, 7, 7], y: out(f32[32, 64, 7, 7])):
    m = local(f32[64])
    for c in box(64):
        m[c] = sum(x[n, c, h, w] for n, h, w in box(32, 7, 7))
    for n, c, h, w in box(32, 64, 7, 7):
        y[n, c, h, w] = x[n, c, h, w] - m[c]
"""
    assert arranged(text).splitlines() == [
        "m = register(f32)",
        "for c in box(64):",
        "    m[c] = sum(x[n, c, (h_w // 7), (h_w % 7)] for n, h_w in box(32, 49))",
        "    for n, h_w in box(32, 49):",
        "        y[n, c, (h_w // 7), (h_w % 7)] = x[n, c, (h_w // 7), (h_w % 7)] - m[c]",
    ]


REFUSALS = {
    "they have no memory in common": """
def program(x: f32[8], y: f32[8], a: out(f32[8]), b: out(f32[8])):
    for i in box(8):
        a[i] = exp(x[i])
    for i in box(8):
        b[i] = exp(y[i])
""",
    "no loop of theirs touches the same places at the same time": """
def program(x: f32[8], a: out(f32[8]), b: out(f32[8])):
    for i in box(8):
        a[i] = exp(x[i])
    for i in box(8):
        b[i] = a[7 - i]
""",
    "the loop that they could share is the one that runs along memory": """
def program(x: f32[512, 64], a: out(f32[512, 64]), s: out(f32[64])):
    for i, j in box(512, 64):
        a[i, j] = exp(x[i, j])
    for j in box(64):
        s[j] = sum(a[k, j] for k in box(512))
""",
    "too few outer points for the threads": """
def program(x: f32[2, 100000], a: out(f32[2, 100000]), s: out(f32[2])):
    for i, j in box(2, 100000):
        a[i, j] = exp(x[i, j])
    for i in box(2):
        s[i] = sum(a[i, k] for k in box(100000))
""",
    "loops would change places for a few elements in common": """
def program(n: f32[64], x: f32[2, 64, 256], m: out(f32[64]), y: out(f32[2, 64, 256])):
    for j in box(64):
        m[j] = exp(n[j])
    for i, j, k in box(2, 64, 256):
        y[i, j, k] = x[i, j, k] * m[j]
""",
    "it would be computed number by number, behind sums that run along memory": """
def program(x: f32[32, 16], w: f32[32, 16], a: out(f32[32, 32]), y: out(f32[32, 32])):
    for i, j in box(32, 32):
        a[i, j] = sum(x[i, k] * w[j, k] for k in box(16))
    for i, j in box(32, 32):
        y[i, j] = erf(a[i, j])
""",
    "the sums of a small product would run row by row": """
def program(x: f32[32, 16], w: f32[32, 16], a: out(f32[32, 16]), y: out(f32[32, 32])):
    for i, j in box(32, 16):
        a[i, j] = exp(x[i, j])
    for i, j in box(32, 32):
        y[i, j] = sum(a[i, k] * w[j, k] for k in box(16))
""",
    "its sums run across the rows that they could share": """
def program(x: f32[512, 64], z: f32[64, 32], s: out(f32[64]), y: out(f32[64, 32])):
    for i in box(64):
        s[i] = sum(x[k, i] for k in box(512))
    for i, j in box(64, 32):
        y[i, j] = z[i, j] * s[i]
""",
    "it would change the order of a loop that combines": """
def program(n: i64[64], x: f32[64, 8], y: inout(f32[64, 16]), s: out(f32[64])):
    for i, j in box(64, 8):
        y[i, at(checked(n[j], 16, False, 'IndexError', 'bad'), 0, 15)] += x[i, j]
    for i in box(64):
        s[i] = sum(y[i, k] for k in box(16))
""",
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_nests_stay_apart(reason: str) -> None:
    program = parse_program(REFUSALS[reason])
    first, second = program.nests
    assert join(Loop(first.axes, first.body), second) == reason
    assert len(arrange(program).loops) == 2


def test_a_local_that_is_read_at_another_place_has_memory() -> None:
    text = """
def program(x: f32[64, 8], y: out(f32[64, 8])):
    t = local(f32[64, 8])
    for i, j in box(64, 8):
        t[i, j] = exp(x[i, j])
    for i, j in box(64, 8):
        y[i, j] = t[i, 7 - j]
"""
    arrangement = arrange(parse_program(text))
    assert len(arrangement.loops) == 1
    assert not arrangement.registers


def test_axes_with_one_name_are_not_confused() -> None:
    """The second nest calls `j` what the first calls `i`."""
    text = """
def program(x: f32[64, 32], y: out(f32[64, 32])):
    s = local(f32[64])
    for i in box(64):
        s[i] = sum(x[i, j] for j in box(32))
    for j, i in box(64, 32):
        y[j, i] = x[j, i] * s[j]
"""
    assert arranged(text).splitlines() == [
        "s = register(f32)",
        "for i in box(64):",
        "    s[i] = sum(x[i, j] for j in box(32))",
        "    for i_1 in box(32):",
        "        y[i, i_1] = x[i, i_1] * s[i]",
    ]


def decided(text: str, number: int = 0) -> list[str]:
    """What is decided on the loops, lanes and threads of a kernel when its code is written."""
    program = parse_program(text)
    told = emit([program], TARGETS[number]).decisions
    assert all(decision.subjects[0] == program.name for decision in told)
    return [f"{each.what} {each.subjects[1]}: {'yes' if each.taken else 'no'}, {each.reason}" for each in told]


def test_what_is_decided_when_code_is_written() -> None:
    width = TARGETS[0].vector_bytes // 4
    assert decided("""
def program(x: f32[512, 768], y: out(f32[512, 768])):
    m = local(f32[512])
    for i in box(512):
        m[i] = sum(x[i, k] for k in box(768))
    for i, j in box(512, 768):
        y[i, j] = x[i, j] - m[i]
""") == [
        "share loops y: yes, with what stands before it, over box(512)",
        f"lanes y: yes, {width} along j, 2 vectors at once",
        "threads y: yes, 512 units of work, and enough of it for 12",
    ]


def test_why_there_are_no_lanes_and_no_threads() -> None:
    assert decided("""
def program(x: f32[8, 64], t: i64[8], y: out(f32[8]), z: inout(f32[4])):
    for i in box(8):
        y[i] = sum(x[i, k] for k in box(64))
    for i in box(8):
        z[at(t[i], 0, 3)] += x[i, 0]
""") == [
        "share loops z: no, no loop of theirs touches the same places at the same time",
        "lanes y: no, what is combined in it goes along memory by itself",
        "threads y: no, less work than 32,768 elements",
        "lanes z: no, points of every loop may meet",
        "threads z: no, one unit of work",
    ]


def test_sizes_of_a_call_decide_on_threads() -> None:
    told = decided("""
def program(s0: size(1, 100000), x: f32[s0], y: out(f32[s0])):
    for i in box(s0):
        y[i] = exp(x[i])
""")
    assert told[-1] == "threads y: yes, the sizes of a call say how many have enough to do"
