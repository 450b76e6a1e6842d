"""Functions of square roots."""

from __future__ import annotations

from ferrite.loops.dtypes import f32, f64
from ferrite.native.builder import Builder, Operand, Value
from ferrite.native.math.pieces import fast_two_sum


def rsqrt(b: Builder, x: Value) -> Value:
    """1 / sqrt(x), both rounded, as eager. The processor's estimate is no help: it is NaN at 0 and infinity."""
    return b.div(b.like(x, 1.0), b.sqrt(x))


def hypot(b: Builder, x: Operand, y: Operand) -> Value:
    """sqrt(x**2 + y**2) without overflow; infinite if one side is, even if the other one is NaN."""
    left, right = (b.abs(side) for side in b.match(x, y))
    result = _hypot_32(b, left, right) if left.dtype is f32 else _hypot_64(b, left, right)
    infinite = b.or_(b.eq(left, float("inf")), b.eq(right, float("inf")))
    return b.select(infinite, float("inf"), result)


def _hypot_32(b: Builder, x: Value, y: Value) -> Value:
    """In f64 nothing overflows, and squares are exact."""
    left, right = b.convert(x, f64), b.convert(y, f64)
    return b.convert(b.sqrt(b.mad(left, left, b.mul(right, right))), f32)


def _hypot_64(b: Builder, x: Value, y: Value) -> Value:
    """Scaled by a power of two where squares leave the range; the root is corrected by what rounding took from them."""
    swap = b.lt(x, y)
    large, small = b.select(swap, y, x), b.select(swap, x, y)
    high, low = b.gt(large, 2.0**500), b.lt(large, 2.0**-450)
    factor = b.select(high, 2.0**-600, b.select(low, b.like(x, 2.0**600), b.like(x, 1.0)))
    back = b.select(high, 2.0**600, b.select(low, b.like(x, 2.0**-600), b.like(x, 1.0)))
    large, small = b.mul(large, factor), b.mul(small, factor)
    first, first_low = b.two_product(large, large)
    second, second_low = b.two_product(small, small)
    total, rest = fast_two_sum(b, first, second)
    rest = b.add(rest, b.add(first_low, second_low))
    root = b.sqrt(total)
    square, lost = b.two_product(root, root)
    correction = b.div(b.add(b.sub(b.sub(total, square), lost), rest), b.add(root, root))
    corrected = b.select(b.gt(root, 0.0), b.add(root, correction), b.add(large, small))
    return b.mul(corrected, back)
