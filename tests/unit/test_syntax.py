"""Values print as Python and read back as themselves."""

from __future__ import annotations

import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrite.errors import Malformed
from ferrite.syntax import Named, Ref, read, refs, show

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.sampled_from(
        [Ref("x"), Ref("y_1"), Named("torch.float32"), Named("aten.add.Tensor"), Named("torch.device('cpu')")]
    )
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers())
    ),
    max_leaves=12,
)


def round_trip(value: object) -> object:
    return read(ast.parse(show(value), mode="eval").body, {"x", "y_1"}.__contains__)


def same(left: object, right: object) -> bool:
    """Equal in value and kind: `True` is not 1, 0.0 is not -0.0."""
    return repr(left) == repr(right)


@given(values)
def test_value_reads_back(value: object) -> None:
    assert same(round_trip(value), value)


def test_nan_reads_back() -> None:
    assert math.isnan(round_trip(math.nan))  # type: ignore[arg-type]
    assert math.isnan(round_trip(complex(1.0, math.nan)).imag)  # type: ignore[attr-defined]


def test_signed_zero_reads_back() -> None:
    assert math.copysign(1.0, round_trip(-0.0)) == -1.0  # type: ignore[arg-type]


def test_refs_in_order_with_repeats() -> None:
    value = (Ref("b"), [Ref("a"), {"k": Ref("b")}], slice(Ref("c"), None, 2), Named("aten.x"))
    assert list(refs(value)) == ["b", "a", "b", "c"]


def test_objects_without_text_are_refused() -> None:
    with pytest.raises(Malformed, match="has no text"):
        show(object())


def test_expressions_are_not_values() -> None:
    with pytest.raises(Malformed, match="not a value"):
        read(ast.parse("x + 1", mode="eval").body, lambda name: True)
