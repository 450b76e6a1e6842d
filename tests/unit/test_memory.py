"""Buffers that are alive at once never share memory, and others do where that saves some."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.host.memory import LINE, Life, place

lives = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 30)).map(
        lambda drawn: (drawn[0], min(drawn[1:]), max(drawn[1:]))
    ),
    max_size=40,
).map(lambda drawn: [Life(f"b{n}", *each) for n, each in enumerate(drawn)])


@settings(max_examples=300, deadline=None)
@given(lives)
def test_nothing_that_is_alive_at_once_overlaps(buffers: list[Life]) -> None:
    offsets, length = place(buffers)
    assert offsets.keys() == {life.name for life in buffers}
    for one in buffers:
        assert offsets[one.name] % LINE == 0
        assert offsets[one.name] + one.bytes <= length
        for other in buffers:
            if one.name < other.name and one.first <= other.last and other.first <= one.last:
                apart = offsets[one.name] + max(one.bytes, 1) <= offsets[other.name]
                assert apart or offsets[other.name] + max(other.bytes, 1) <= offsets[one.name]


@settings(max_examples=300, deadline=None)
@given(lives)
def test_no_more_than_all_of_them_side_by_side_and_no_less_than_what_is_alive(buffers: list[Life]) -> None:
    def rounded(life: Life) -> int:
        return -(-max(life.bytes, 1) // LINE) * LINE

    _, length = place(buffers)
    assert length <= sum(map(rounded, buffers))
    for step in range(31):
        assert length >= sum(rounded(life) for life in buffers if life.first <= step <= life.last)


def test_a_chain_needs_two_places() -> None:
    chain = [Life(f"b{n}", 1000, n, n + 1) for n in range(50)]
    assert place(chain)[1] == 2 * 1024


def test_gaps_that_touch_become_one_and_the_last_one_grows() -> None:
    offsets, length = place([Life("a", 64, 0, 1), Life("b", 64, 0, 1), Life("c", 128, 2, 3), Life("d", 192, 4, 5)])
    assert (offsets["c"], offsets["d"], length) == (0, 0, 192)
