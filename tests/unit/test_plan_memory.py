"""Where the values of a host program lie, and what the plan says of the peak."""

from __future__ import annotations

from ferrite.artifact.host_values import infer
from ferrite.artifact.plan_memory import Plan, plan
from ferrite.host.text import parse_program
from ferrite.loops.index import ZERO


def planned(text: str) -> Plan:
    program = parse_program(text)
    return plan(program, infer(program, {}), lambda launch: ZERO)


def test_a_chain_alternates_between_the_block_and_its_result() -> None:
    """Four products of a kilobyte each: two are alive at once, one of them in the memory of the last."""
    found = planned("""
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    b = aten.mm.default(a, w)
    del a
    c = aten.mm.default(b, w)
    del b
    y = aten.mm.default(c, w)
    del c
    return (y,)
""")
    assert found.places.keys() == {"a", "c"}
    assert found.hosted == {"b": ("y", 0)}
    assert (found.length.constant, found.outside) == (1024, 1024)


def test_what_the_caller_gets_is_no_place_for_what_it_is_made_from() -> None:
    found = planned("""
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    y = aten.mm.default(a, w)
    del a
    return (y,)
""")
    assert found.places.keys() == {"a"}
    assert not found.hosted


def test_buffers_are_outside_where_that_costs_nothing() -> None:
    """At the end three results are alive; before, there is room for a product that is no result."""
    found = planned("""
def program(x: f32[16, 16], w: static(f32[16, 32])):
    a = aten.mm.default(x, w)
    b = aten.sum.dim_IntList(a, [0])
    del a
    y = aten.mm.default(x, x)
    z = aten.mm.default(x, x)
    return (b, y, z)
""")
    assert not found.places
    assert not found.hosted
    assert found.length is ZERO
    assert found.outside == 128 + 2 * 1024


def test_what_dies_on_the_way_makes_room() -> None:
    text = """
def program(s: {mark}, w: static(f32[16, 16])):
    a = aten.mm.default(s, w)
    del s
    b = aten.mm.default(a, w)
    del a
    c = aten.mm.default(w, w)
    y = aten.mm.default(c, w)
    del c
    z = aten.mm.default(b, w)
    del b
    return (y, z)
"""
    kept, dying = (planned(text.format(mark=mark)) for mark in ("f32[16, 16]", "saved(f32[16, 16])"))
    assert kept.outside == 2 * 1024
    assert dying.outside == 1024


def test_more_is_outside_if_the_block_becomes_shorter_by_it() -> None:
    """Two wide buffers are alive at once in the middle, one wide result at the end: never three of them."""
    found = planned("""
def program(x: f32[16, 16], w: static(f32[16, 64])):
    a = aten.mm.default(x, w)
    b = aten.mm.default(x, w)
    c = aten.mul.Tensor(a, b)
    del a, b
    d = aten.sum.dim_IntList(c, [0])
    del c
    y = aten.mm.default(x, w)
    return (d, y)
""")
    assert found.outside is not None
    assert found.length.constant + found.outside == 3 * 4096


def test_a_convolution_needs_room_while_it_runs() -> None:
    """Behind it no more is alive than it takes for itself: nothing is in the block then."""
    found = planned("""
def program(x: f32[1, 3, 16, 16], w: static(f32[4, 3, 3, 3]), v: static(f32[4, 4])):
    c = aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    r = aten.amax.default(c, [0, 2])
    del c
    a = aten.mm.default(v, r)
    del r
    y = aten.mm.default(v, a)
    del a
    return (y,)
""")
    assert found.length is ZERO


def test_what_is_made_later_is_not_there_while_an_op_in_eager_runs() -> None:
    """`y` would have room for `a`, but nobody knows what the sum needs for itself where both are alive."""
    found = planned("""
def program(x: f32[16, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    b = aten.cumsum.default(a, 0)
    del a
    y = aten.mm.default(x, x)
    return (b, y)
""")
    assert not found.hosted
    assert not found.places
    assert found.outside == 2 * 1024


def test_of_several_tensors_each_goes_by_itself() -> None:
    """Values and positions of a sort, of which the positions go before the next tensor is made."""
    found = planned("""
def program(x: f32[16, 16]):
    s = aten.sort.default(x)
    v = operator.getitem(s, 0)
    n = operator.getitem(s, 1)
    del s
    y = aten.amax.default(n, [0])
    del n
    z = aten.cumsum.default(v, 0)
    w = aten.cumsum.default(z, 0)
    del z
    return (v, y, w)
""")
    assert found.outside == 1024 + 128 + 2 * 1024


def test_of_several_views_each_keeps_what_it_is_a_view_of() -> None:
    found = planned("""
def program(x: f32[16, 16]):
    s = aten.cumsum.default(x, 0)
    p = aten.unbind.int(s, 0)
    v = operator.getitem(p, 0)
    del s, p
    y = aten.cumsum.default(x, 0)
    z = aten.cumsum.default(v, 0)
    del v
    return (y, z)
""")
    assert found.outside == 1024 + 1024 + 64


def test_what_a_call_needs_where_sizes_change() -> None:
    """Two products are alive at once, one of them in the block; the sum is made when the first has gone."""
    found = planned("""
def program(n: Sym(s0), x: f32[s0, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    y = aten.mm.default(a, w)
    del a
    z = aten.empty_strided.default([n, 4], [4, 1], dtype=torch.float32, device=torch.device('cpu'))
    return (y, z)
""")
    assert found.outside is None
    assert found.need is not None
    assert found.need.at({"s0": 8}) == (8 * 16 + 8 * 16 + 8 * 4) * 4
    assert found.need.at({"s0": 1, "s1": 5}) == 64 + 64 + 16


def test_what_an_op_in_eager_makes_where_sizes_change_is_not_known() -> None:
    found = planned("""
def program(n: Sym(s0), x: f32[s0, 16], w: static(f32[16, 16])):
    a = aten.mm.default(x, w)
    y = aten.cumsum.default(a, 0)
    del a
    return (y,)
""")
    assert found.need is not None
    assert found.need.at({"s0": 8}) is None
