"""The operations that random programs are made of, by family.

A row is the text of a call. {0}, {1}, ... are operands, words in <> are literals that `generate.py` draws to fit the
first operand. `operands` says of each operand what it may be: f a float, i an integer, n a number that is not bool,
b bool, a anything. `rounding` is explained at `programs.Step`.

Indices from data are any integers, brought into range by a remainder: `{1} % {0}.shape[0]`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    text: str
    operands: str
    rounding: str = "exact"
    is_statement: bool = False


def _rows(operands: str, rounding: str, *texts: str, is_statement: bool = False) -> tuple[Row, ...]:
    return tuple(Row(text, operands, rounding, is_statement) for text in texts)


def _calls(operands: str, rounding: str, names: str) -> tuple[Row, ...]:
    """Functions of torch that take just these operands."""
    places = ", ".join(f"{{{n}}}" for n in range(len(operands)))
    return _rows(operands, rounding, *(f"{name}({places})" for name in _named(names)))


def _named(names: str) -> list[str]:
    return [name if name.startswith("functional.") else f"torch.{name}" for name in names.split()]


UNARY = (
    *_calls("a", "inexact", "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh"),
    *_calls("a", "inexact", "acosh atanh sigmoid erf erfc rsqrt lgamma digamma erfinv i0 sinc logit deg2rad"),
    *_calls("a", "inexact", "special.i0e special.i1 special.i1e special.ndtri special.log_ndtr special.entr"),
    *_calls("f", "inexact", "functional.gelu functional.silu functional.softplus functional.mish"),
    # Of NaN, what eager's gradient is depends on whether the element is in a whole vector or in the rest; so for all
    # that `nan_to_num` stands in.
    *_rows("f", "inexact", *(f"functional.{name}({{0}}.nan_to_num())" for name in ("elu", "selu", "celu"))),
    *_calls("f", "inexact", "functional.logsigmoid"),
    *_rows("f", "inexact", "functional.hardswish({0}.nan_to_num())"),
    *_calls("f", "inexact", "functional.hardsigmoid functional.tanhshrink functional.softsign"),
    *_rows("f", "inexact", "functional.gelu({0}, approximate='tanh')", "torch.log({0}.abs() + 0.5)"),
    *_calls("a", "exact", "sqrt reciprocal square relu"),
    *_calls("n", "exact", "abs neg"),
    *_rows("n", "exact", "functional.relu6({0}.nan_to_num())"),
    *_calls("n", "exact", "functional.leaky_relu"),
    *_rows("n", "exact", "functional.hardtanh({0}.nan_to_num())", "functional.softshrink({0}.nan_to_num())"),
    *_calls("n", "jumps", "sign floor ceil round trunc nan_to_num sgn"),
    *_rows("n", "jumps", "functional.hardshrink({0}.nan_to_num())"),
    *_rows(
        "f", "jumps", "torch.frac({0})", "functional.threshold({0}, <float>, <float>)", "torch.round({0}, decimals=1)"
    ),
    *_calls("a", "exact", "isnan isinf isfinite signbit logical_not"),
    *_calls("i", "exact", "bitwise_not"),
)
BINARY = (
    *_rows("aa", "exact", "{0} + {1}", "{0} * {1}", "{0} / {1}", "torch.add({0}, {1}, alpha=2)"),
    *_rows("nn", "exact", "{0} - {1}", "torch.sub({0}, {1}, alpha=2)", "torch.rsub({0}, {1})"),
    *_rows("a", "exact", "{0} + <scalar>", "<scalar> - {0}", "{0} * <scalar>", "{0} / <scalar>", "<scalar> / {0}"),
    *_calls("aa", "either", "maximum minimum fmax fmin"),
    *_calls("aa", "jumps", "copysign"),
    *_calls("ff", "jumps", "nextafter heaviside"),
    *_rows("nn", "jumps", "{0} // {1}", "{0} % {1}", "torch.fmod({0}, {1})", "torch.floor_divide({0}, {1})"),
    *_rows("nn", "jumps", "torch.div({0}, {1}, rounding_mode='trunc')", "torch.div({0}, {1}, rounding_mode='floor')"),
    *_rows(
        "n", "jumps", "{0} // <nonzero>", "{0} % <nonzero>", "torch.fmod({0}, <nonzero>)", "<nonzero> % ({0} * 2 + 1)"
    ),
    *_calls("aa", "inexact", "atan2 pow xlogy"),
    *_calls("ff", "inexact", "hypot logaddexp logaddexp2 ldexp special.xlog1py"),
    *_rows("n", "inexact", "{0} ** 2", "{0} ** 3", "2 ** {0}", "{0} ** 0.5", "{0} ** <float>"),
    *_rows("f", "inexact", "{0} ** -1", "{0} ** -2"),
    *_rows("fff", "inexact", "torch.lerp({0}, {1}, {2})", "torch.addcdiv({0}, {1}, {2}, value=0.5)"),
    *_rows("ff", "inexact", "torch.lerp({0}, {1}, <float>)"),
    *_rows("nnn", "inexact", "torch.addcmul({0}, {1}, {2}, value=3)"),
    *_rows("nn", "inexact", "torch.add({0}, {1}, alpha=3)"),
    *_calls("ii", "exact", "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd"),
    *_rows("i", "exact", "{0} & <int>", "{0} ^ <int>", "{0} << 2", "{0} >> 1"),
    *_calls("aa", "exact", "logical_and logical_or logical_xor"),
)
COMPARE = (
    *_rows("aa", "exact", "{0} == {1}", "{0} != {1}"),
    *_rows("aa", "exact", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}"),
    *_rows("a", "exact", "{0} > <scalar>", "{0} == <scalar>", "{0} <= <scalar>", "{0}.bool()"),
    *_rows("bb", "exact", "{0} & {1}", "{0} | ~{1}", "{0} ^ {1}"),
    *_rows("baa", "exact", "torch.where({0}, {1}, {2})"),
    *_rows("ba", "exact", "torch.where({0}, {1}, <scalar>)", "torch.where({0}, <scalar>, {1})"),
    *_rows("ab", "exact", "{0}.masked_fill({1}, <int>)"),
    *_rows("n", "exact", "{0}.clamp(-1, 2)", "{0}.clamp(min=<int>)", "{0}.clamp(max=<scalar>)"),
    *_rows("nnn", "either", "torch.clamp({0}, {1}, {2})"),
    *_rows("nn", "either", "torch.clamp({0}, min={1})"),
    *_rows("a", "exact", "{0}.to(<dtype>)", "{0}.to(<dtype>)", "{0}.to(torch.float32)", "{0}.to(torch.bfloat16)"),
    *_rows("aa", "exact", "{0}.type_as({1})"),
    *_rows("aa", "jumps", "torch.isclose({0}, {1})"),
)
VIEW = (
    *_rows("a", "exact", "{0}.transpose(<dim>, <dim>)", "{0}.permute(<permutation>)", "{0}.reshape(<shape>)"),
    *_rows("a", "exact", "{0}.reshape(<shape>)", "{0}.flatten()", "{0}.view(<shape>)", "{0}.t()", "{0}.mT"),
    *_rows("a", "exact", "{0}[<slice>]", "{0}[..., <slice>]", "{0}[:, <slice>]", "{0}[<slice>, <slice>]"),
    *_rows("a", "exact", "{0}[0]", "{0}[-1]", "{0}[..., 1]", "{0}[None]", "{0}.select(<dim>, <int>)"),
    *_rows("a", "exact", "{0}.narrow(<dim>, 1, 2)", "{0}.unsqueeze(<dim>)", "{0}.squeeze()", "{0}.squeeze(<dim>)"),
    *_rows("a", "exact", "{0}.expand(3, *{0}.shape)", "{0}.flip(<dims>)", "{0}.roll(<int>, <dim>)", "{0}.roll(<int>)"),
    *_rows("aa", "exact", "{0}.expand_as({1})", "{0}.reshape({1}.shape)"),
    *_rows(
        "a", "exact", "{0}.unfold(<dim>, 2, 1)", "{0}.unfold(<dim>, 3, 2)", "{0}.diagonal(<diagonal>, <dim>, <dim>)"
    ),
    *_rows("a", "exact", "{0}.movedim(<dim>, <dim>)", "{0}.swapaxes(0, -1)", "{0}.as_strided((2, 2), (1, 2), 1)"),
    *_rows("a", "exact", "{0}.contiguous()", "{0}.clone()", "{0}.detach()", "{0}.rot90()"),
)
JOIN = (
    *_rows("aa", "exact", "torch.cat([{0}, {1}], <dim>)", "torch.cat([{0}, {1}])", "torch.stack([{0}, {1}], <dim>)"),
    *_rows("aaa", "exact", "torch.cat([{0}, {1}, {2}], <dim>)"),
    *_rows("a", "exact", "torch.cat([{0}, {0}.flip(0)], <dim>)", "{0}.split(2, <dim>)", "{0}.chunk(2, <dim>)"),
    *_rows("a", "exact", "{0}.unbind(<dim>)", "torch.tensor_split({0}, 2, <dim>)"),
    *_rows("a", "exact", "functional.pad({0}, (1, 2))", "functional.pad({0}, (0, 1, 2, 0), value=<int>)"),
    *_rows("n", "exact", "functional.pad({0}, (-1, 1))", "functional.pad({0}[None], (1, 1), 'replicate')"),
    *_rows(
        "f", "exact", "functional.pad({0}[None], (1, 1), 'reflect')", "functional.pad({0}[None], (1, 2), 'circular')"
    ),
    *_rows("a", "exact", "{0}.tril(<diagonal>)", "{0}.triu(<diagonal>)", "torch.diag_embed({0})"),
    *_rows("a", "exact", "{0}.repeat(2, *[1] * {0}.dim())", "{0}.repeat_interleave(2, <dim>)", "{0}.tile(2)"),
)
REDUCE = (
    *_rows(
        "a", "sum", "{0}.sum(<dims>, keepdim=<keep>)", "{0}.sum(<dims>, keepdim=<keep>)", "{0}.sum()", "{0}.sum(<dim>)"
    ),
    *_rows("a", "sum", "{0}.sum(<dim>, dtype=<dtype>)", "torch.nansum({0}, <dim>)"),
    *_rows("f", "inexact", "{0}.mean(<dims>, keepdim=<keep>)", "{0}.mean()", "torch.nanmean({0}, <dim>)"),
    *_rows("a", "inexact", "{0}.prod(<dim>)", "{0}.prod()"),
    *_rows(
        "a", "exact", "{0}.amax(<dims>, keepdim=<keep>)", "{0}.amin(<dims>, keepdim=<keep>)", "{0}.max()", "{0}.min()"
    ),
    *_rows("a", "exact", "{0}.max(<dim>)", "{0}.min(<dim>, keepdim=<keep>)", "{0}.argmax(<dim>)", "{0}.argmin()"),
    *_rows("n", "exact", "{0}.argmax(<dim>, keepdim=<keep>)", "{0}.argmin(<dim>)", "{0}.aminmax(dim=<dim>)"),
    *_rows("a", "exact", "{0}.any(<dim>)", "{0}.all(<dim>, keepdim=<keep>)", "{0}.any()", "{0}.count_nonzero(<dim>)"),
    *_rows("f", "inexact", "{0}.var(<dims>, correction=<bit>, keepdim=<keep>)", "{0}.std(<dim>)", "{0}.var()"),
    *_rows("f", "inexact", "torch.var_mean({0}, <dims>, correction=<bit>)", "torch.std_mean({0}, <dim>)"),
    *_rows("f", "inexact", "{0}.logsumexp(<dims>)", "{0}.norm()", "torch.linalg.vector_norm({0}, 1, <dim>)"),
    *_rows("f", "inexact", "torch.linalg.vector_norm({0}, 3, <dim>)"),
    *_rows("f", "exact", "torch.linalg.vector_norm({0}, float('inf'), <dim>)"),
    *_rows("a", "sum", "{0}.cumsum(<dim>)"),
    *_rows("a", "inexact", "{0}.cumprod(<dim>)"),
    *_rows("a", "exact", "{0}.cummax(<dim>)", "{0}.cummin(<dim>)"),
    *_rows("n", "exact", "{0}.diff()", "{0}.sort(dim=<dim>, stable=True)"),
    *_rows("f", "inexact", "{0}.logcumsumexp(<dim>)"),
)
NORM = (
    *_rows(
        "f", "inexact", "{0}.softmax(<dim>)", "{0}.log_softmax(<dim>)", "{0}.softmax(-1)", "functional.softmin({0}, -1)"
    ),
    *_rows("f", "inexact", "functional.layer_norm({0}, {0}.shape[-1:])", "functional.layer_norm({0}, {0}.shape[-2:])"),
    *_rows("ff", "inexact", "functional.layer_norm({0}, {0}.shape[-1:], {1}, {1})"),
    *_rows("ff", "inexact", "functional.rms_norm({0}, {0}.shape[-1:], {1})"),
    *_rows("f", "inexact", "functional.rms_norm({0}, {0}.shape[-1:])", "functional.normalize({0}, dim=<dim>)"),
    *_rows("f", "inexact", "functional.batch_norm({0}, None, None, training=True)", "functional.group_norm({0}, 1)"),
    *_rows("f", "inexact", "functional.instance_norm({0})"),
)
INDEX = (
    *_rows("ai", "exact", "{0}.index_select(0, {1}.flatten() % {0}.shape[0])", "{0}[{1}.long() % {0}.shape[0]]"),
    *_rows("ai", "exact", "{0}[{1}.long().clamp(-{0}.shape[0], {0}.shape[0] - 1)]"),
    *_rows("ai", "exact", "{0}[:, {1}.long() % {0}.shape[1]]", "{0}[..., {1}.long() % {0}.shape[-1]]"),
    *_rows("aii", "exact", "{0}[{1}.long() % {0}.shape[0], {2}.long() % {0}.shape[1]]"),
    *_rows("ai", "exact", "{0}.index_select(-1, {1}.flatten() % {0}.shape[-1])"),
    *_rows("ai", "exact", "{0}.gather(<dim>, {1}.long() % {0}.shape[<same>])"),
    *_rows("ai", "exact", "torch.take_along_dim({0}, {1}.long() % {0}.shape[<dim>], <same>)"),
    *_rows("ai", "exact", "torch.take({0}, {1}.long() % {0}.numel())"),
    *_rows("ai", "exact", "{0}.scatter(<dim>, {1}.long() % {0}.shape[<same>], <int>)"),
    *_rows("aia", "exact", "{0}.scatter(<dim>, {1}.long() % {0}.shape[<same>], {2}.to({0}.dtype))"),
    *_rows("nia", "sum", "{0}.scatter_add(<dim>, {1}.long() % {0}.shape[<same>], {2}.to({0}.dtype))"),
    *_rows("nin", "exact", "{0}.scatter_reduce(<dim>, {1}.long() % {0}.shape[<same>], {2}.to({0}.dtype), 'amax')"),
    *_rows("nin", "inexact", "{0}.scatter_reduce(<dim>, {1}.long() % {0}.shape[<same>], {2}.to({0}.dtype), 'mean')"),
    *_rows("ai", "exact", "{0}.index_put(({1}.long() % {0}.shape[0],), torch.ones((), dtype={0}.dtype))"),
    *_rows("aia", "sum", "{0}.index_put(({1}.long() % {0}.shape[0],), {2}.to({0}.dtype), accumulate=True)"),
    *_rows("ai", "sum", "{0}.index_add(0, {1}.flatten() % {0}.shape[0], {0}[:1].expand({1}.numel(), *{0}.shape[1:]))"),
    *_rows("ai", "exact", "{0}.index_fill(<dim>, {1}.flatten().long() % {0}.shape[<same>], <int>)"),
    *_rows("fi", "exact", "functional.embedding({1}.long() % {0}.shape[0], {0})"),
    *_rows("i", "exact", "functional.one_hot({0}.long() % 5, 5)"),
    *_rows("nn", "exact", "torch.bucketize({0}, {1}.flatten().sort().values)"),
    *_rows("aba", "exact", "{0}.masked_scatter({1}, {2}.to({0}.dtype).expand(6, *{2}.shape))"),
)
PRODUCT = (
    *_rows("ff", "inexact", "{0} @ {1}", "{0} @ {1}.mT", "{0}.mT @ {1}", "torch.matmul({0}, {1})"),
    *_rows("ff", "inexact", "functional.linear({0}, {1})", "torch.outer({0}.flatten()[:9], {1}.flatten()[:9])"),
    *_rows("f", "inexact", "{0} @ {0}.mT"),
)
CREATE = (
    *_rows("a", "exact", "torch.zeros_like({0})", "torch.full_like({0}, <int>)", "{0}.new_ones({0}.shape[:1])"),
    *_rows(
        "a", "exact", "torch.full({0}.shape, <scalar>)", "torch.arange({0}.shape[0])", "torch.arange({0}.numel()) * 2"
    ),
    *_rows("a", "exact", "torch.eye({0}.shape[-1])", "torch.arange(3, dtype=<dtype>)", "torch.zeros(())"),
    *_rows("a", "inexact", "torch.linspace(0, 1, {0}.shape[-1])"),
)
LOSS = (
    *_rows("ff", "inexact", "functional.mse_loss({0}, {1})", "functional.l1_loss({0}, {1})"),
    *_rows("ff", "inexact", "functional.smooth_l1_loss({0}, {1})", "functional.huber_loss({0}, {1}, reduction='none')"),
    *_rows("ff", "inexact", "functional.binary_cross_entropy_with_logits({0}, {1})", "functional.kl_div({0}, {1})"),
    *_rows("ff", "inexact", "functional.cosine_similarity({0}, {1}, -1)", "functional.soft_margin_loss({0}, {1})"),
    *_rows(
        "fi", "inexact", "functional.cross_entropy({0}, ({1}.long().sum() + torch.arange({0}.shape[0])) % {0}.shape[1])"
    ),
    *_rows("f", "inexact", "functional.nll_loss({0}, torch.arange({0}.shape[0]) % {0}.shape[1], reduction='none')"),
    *_rows("f", "inexact", "functional.multi_margin_loss({0}, torch.arange({0}.shape[0]) % {0}.shape[1])"),
)
WINDOW = (
    *_rows("f", "inexact", "functional.avg_pool1d({0}, 2)", "functional.avg_pool2d({0}, 2, 1, 1)"),
    *_rows("f", "exact", "functional.max_pool1d({0}, 2)", "functional.max_pool2d({0}, 2, 1)"),
    *_rows("f", "inexact", "functional.adaptive_avg_pool1d({0}, 3)"),
    *_rows(
        "f", "exact", "functional.interpolate({0}, scale_factor=2, mode='nearest')", "functional.glu({0} * 2).clone()"
    ),
    *_rows("f", "inexact", "functional.interpolate({0}, scale_factor=2, mode='linear')"),
)
MUTATE = (
    *_rows("nn", "exact", "{0}.mul_({1})", "{0}.add_({1})", "{0}.sub_({1})", is_statement=True),
    *_rows(
        "aa",
        "exact",
        "{0}.copy_({1})",
        "{0}[1:] = {1}[1:]",
        "{0}[0] = {1}",
        "{0}[..., ::2] = {1}[..., ::2]",
        is_statement=True,
    ),
    *_rows(
        "a", "exact", "{0}[1:] = <int>", "{0}[..., 0] = <int>", "{0}.zero_()", "{0}.fill_(<int>)", is_statement=True
    ),
    *_rows(
        "n", "exact", "{0}.mul_(<scalar>)", "{0}.add_(1)", "{0}[:1].add_(1)", "{0}.clamp_(min=0)", is_statement=True
    ),
    *_rows("n", "exact", "{0}.neg_()", "{0}.abs_()", "{0}.relu_()", "{0}.t().add_(1)", is_statement=True),
    *_rows("f", "inexact", "{0}.exp_()", "{0}.sigmoid_()", "{0}.tanh_()", is_statement=True),
    *_rows("n", "jumps", "{0}.floor_()", "{0}.masked_fill_({0} > <int>, 2)", "{0}[{0} < 0] = <int>", is_statement=True),
    *_rows("ab", "exact", "{0}.masked_fill_({1}, <int>)", "{0}[{1}] = <int>", is_statement=True),
    *_rows("ai", "exact", "{0}[{1}.long() % {0}.shape[0]] = <int>", is_statement=True),
    *_rows("ai", "exact", "{0}.index_fill_(0, {1}.flatten().long() % {0}.shape[0], <int>)", is_statement=True),
    *_rows("aia", "sum", "{0}.index_put_(({1}.long() % {0}.shape[0],), {2}.to({0}.dtype), True)", is_statement=True),
    *_rows("nia", "sum", "{0}.scatter_add_(0, {1}.long() % {0}.shape[0], {2}.to({0}.dtype))", is_statement=True),
)
RAISES = (
    *_rows("ai", "raises", "{0}.index_select(0, {1}.flatten().long() * 0 + {0}.shape[0])"),
    *_rows("ai", "raises", "{0}[{1}.long() * 0 - {0}.shape[0] - 1] * 2"),
    *_rows("ai", "raises", "{0}.gather(0, {1}.long() * 0 + {0}.shape[0])"),
    *_rows("fi", "raises", "functional.embedding({1}.long() * 0 + {0}.shape[0], {0}) + 1"),
    *_rows("i", "raises", "{0} // ({0} * 0)", "{0} % ({0} ^ {0})"),
)

# How often a family is drawn from.
FAMILIES: dict[str, tuple[int, tuple[Row, ...]]] = {
    "unary": (14, UNARY),
    "binary": (20, BINARY),
    "compare": (12, COMPARE),
    "view": (18, VIEW),
    "join": (8, JOIN),
    "reduce": (12, REDUCE),
    "norm": (4, NORM),
    "index": (10, INDEX),
    "product": (2, PRODUCT),
    "create": (3, CREATE),
    "loss": (2, LOSS),
    "window": (2, WINDOW),
    "mutate": (16, MUTATE),
}
