"""Draws layers: each row gives one that fits the shapes of the values before it, or None.

All numbers come from `Choices`, so a layer is a short list of numbers that fits behind any other layers: what a row
draws is an index into the choices that a shape leaves. The first choice is the plainest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.fuzz.choices import Choices

T = TypeVar("T")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One line of `forward`. `text` has {0}, {1}, ... for operands and {m} for the module; `module` constructs it.

    operands: places of values; 0 is the input, n is what layer n gives
    """

    text: str
    operands: tuple[int, ...]
    module: str = ""


class Draw:
    """The choices for one layer behind values of these shapes."""

    def __init__(self, choices: Choices, shapes: Sequence[Shape]) -> None:
        self.choices, self.shapes = choices, shapes
        self.last = len(shapes) - 1
        self.shape = shapes[-1]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def spatial(self) -> int:
        """How many dimensions stand behind batch and channels."""
        return len(self.shape) - 2

    def choose(self, options: Sequence[T]) -> T:
        return options[self.choices.number(0, len(options) - 1)]

    def flag(self) -> bool:
        return self.choose((False, True))

    def each(self, options: Sequence[int], count: int) -> Any:
        """One number for all dimensions, or one for each of them."""
        first = self.choose(options)
        return tuple(self.choose(options) for _ in range(count)) if count > 1 and self.choose((0, 0, 0, 1)) else first

    def dim(self) -> int:
        return self.choose((*range(1, self.rank), -1, 0))

    def like(self) -> int | None:
        """An earlier value of the same shape."""
        alike = [place for place, shape in enumerate(self.shapes[:-1]) if shape == self.shape]
        return self.choose(alike[::-1]) if alike else None

    def module(self, constructor: str, text: str = "{m}({0})", operands: tuple[int, ...] | None = None) -> Layer:
        return Layer(text, operands or (self.last,), constructor)

    def function(self, text: str, *others: int) -> Layer:
        return Layer(text, (self.last, *others))


_DEFAULTS: dict[str, Any] = {
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "dilation": 1,
    "groups": 1,
    "bias": True,
    "padding_mode": "zeros",
    "ceil_mode": False,
    "inplace": False,
    "bidirectional": False,
    "num_layers": 1,
    "elementwise_affine": True,
    "align_corners": None,
}


def spelled(name: str, *positional: Any, **named: Any) -> str:
    """A call as text, without arguments that are as they are by default."""
    words = [repr(value) for value in positional]
    words += [f"{key}={value!r}" for key, value in named.items() if key not in _DEFAULTS or _DEFAULTS[key] != value]
    return f"{name}({', '.join(words)})"


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# ---- what learns


def convolution(draw: Draw) -> Layer | None:
    if not 1 <= draw.spatial <= 3:
        return None
    channels, count = draw.shape[1], draw.spatial
    groups = draw.choose((1, 1, channels, draw.choose(divisors(channels))))
    out = groups * draw.choose((1, 2, 3)) if groups > 1 else draw.choose((4, 1, 3, 6, 8, 12))
    kernel = draw.each((3, 1, 2, 5), count)
    bias = draw.choose((True, False))
    if draw.choose((0, 0, 0, 1)):
        transposed = spelled(
            f"nn.ConvTranspose{count}d",
            channels,
            out,
            kernel,
            stride=draw.each((1, 2, 3), count),
            padding=draw.each((0, 1), count),
            output_padding=draw.choose((0, 0, 1)),
            groups=groups,
            bias=bias,
            dilation=draw.choose((1, 1, 2)),
        )
        return draw.module(transposed)
    padding = draw.choose((1, 0, 2, "same", "valid"))
    plain = spelled(
        f"nn.Conv{count}d",
        channels,
        out,
        kernel,
        stride=1 if padding == "same" else draw.each((1, 2), count),
        padding=padding,
        dilation=draw.choose((1, 1, 2)),
        groups=groups,
        bias=bias,
        padding_mode=draw.choose(("zeros", "zeros", "zeros", "reflect", "replicate", "circular")),
    )
    return draw.module(_parametrized(draw, plain))


def _parametrized(draw: Draw, constructor: str) -> str:
    """Now and then with a norm of the weight."""
    norm = draw.choose(("",) * 10 + ("weight_norm", "spectral_norm"))
    return f"nn.utils.parametrizations.{norm}({constructor})" if norm else constructor


def linear(draw: Draw) -> Layer | None:
    wide = spelled("nn.Linear", draw.shape[-1], draw.choose((4, 1, 3, 8, 10)), bias=draw.choose((True, False)))
    return draw.module(_parametrized(draw, wide))


def bilinear(draw: Draw) -> Layer | None:
    other = draw.like()
    other = draw.last if other is None else other
    size = draw.shape[-1]
    module = spelled("nn.Bilinear", size, size, draw.choose((3, 1, 4)), bias=draw.choose((True, False)))
    return draw.module(module, "{m}({0}, {1})", (draw.last, other))


def attention(draw: Draw) -> Layer | None:
    if draw.rank != 3:
        return None
    size = draw.shape[-1]
    heads = draw.choose(divisors(size))
    kind = draw.choose(("module", "function", "encoder"))
    causal = draw.flag()
    if kind == "function":
        head = f"{{0}}.unflatten(-1, ({heads}, {size // heads})).transpose(1, 2)"
        call = f"F.scaled_dot_product_attention({head}, {head}, {head}, is_causal={causal})"
        return draw.function(call + draw.choose((".transpose(1, 2).flatten(2)", "", ".flatten(1, 2)")))
    first = draw.choose((True, False))
    if kind == "encoder":
        encoder = spelled(
            "nn.TransformerEncoderLayer",
            size,
            heads,
            draw.choose((8, 5)),
            dropout=0.0,
            activation=draw.choose(("relu", "gelu")),
            batch_first=first,
            norm_first=draw.flag(),
        )
        return draw.module(encoder)
    length = draw.shape[1 if first else 0]
    mask = f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool).triu(1)" if causal else ""
    weights = draw.flag()
    module = spelled("nn.MultiheadAttention", size, heads, batch_first=first, bias=draw.choose((True, False)))
    return draw.module(
        module, f"{{m}}({{0}}, {{0}}, {{0}}, need_weights={weights}{mask})[{int(draw.flag() & weights)}]"
    )


def recurrent(draw: Draw) -> Layer | None:
    first = draw.choose((True, False))
    if draw.rank != 3 or draw.shape[1 if first else 0] > 9:
        return None
    kind = draw.choose(("LSTM", "GRU", "RNN"))
    hidden = draw.choose((4, 3, 6))
    more = {"proj_size": 2} if kind == "LSTM" and draw.choose((0, 0, 0, 1)) else {}
    if kind == "RNN":
        more = {"nonlinearity": draw.choose(("tanh", "relu"))}
    module = spelled(
        f"nn.{kind}",
        draw.shape[-1],
        hidden,
        num_layers=draw.choose((1, 1, 2)),
        bias=draw.choose((True, True, False)),
        batch_first=first,
        bidirectional=draw.flag(),
        **more,
    )
    state = "[1][0]" if kind == "LSTM" else "[1]"
    return draw.module(module, "{m}({0})" + draw.choose(("[0]", "[0]", "[0][:, -1]", state)))


# ---- norms


def norm(draw: Draw) -> Layer | None:
    channels, count = draw.shape[1], max(draw.spatial, 1)
    kind = draw.choose(("batch", "instance", "group", "layer", "layer over channels", "rms", "response", "normalize"))
    affine = draw.choose((True, False))
    if kind == "batch" and count <= 3:
        more = draw.choose(({}, {}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1}))
        return draw.module(spelled(f"nn.BatchNorm{count}d", channels, affine=affine, **more))
    if kind == "instance" and 1 <= draw.spatial <= 3:
        more = draw.choose(({}, {}, {"track_running_stats": True}))
        return draw.module(spelled(f"nn.InstanceNorm{count}d", channels, affine=affine, **more))
    if kind == "group":
        return draw.module(spelled("nn.GroupNorm", draw.choose(divisors(channels)), channels, affine=affine))
    if kind in ("layer", "rms"):
        sizes = list(draw.shape[-draw.choose(range(1, min(draw.rank, 4))) :])
        more = {"bias": draw.choose((True, True, False))} if kind == "layer" and affine else {}
        name = "nn.LayerNorm" if kind == "layer" else "nn.RMSNorm"
        return draw.module(spelled(name, sizes, elementwise_affine=affine, **more))
    if kind == "layer over channels" and draw.rank > 2:
        there, back = draw.choose((("movedim(1, -1)", "movedim(-1, 1)"), ("transpose(1, -1)", "transpose(1, -1)")))
        text = f"{{m}}({{0}}.{there}).{back}"
        return draw.module(spelled("nn.LayerNorm", channels, elementwise_affine=affine), text)
    if kind == "response" and draw.rank > 2:
        return draw.module(spelled("nn.LocalResponseNorm", draw.choose((3, 2, 5))))
    if kind == "normalize":
        return draw.function(f"F.normalize({{0}}, dim={draw.dim()})")
    return None


# ---- activations and dropout

INPLACE = ("ReLU", "LeakyReLU", "ELU", "SELU", "CELU", "Hardtanh", "ReLU6", "SiLU", "Mish", "Hardswish", "Hardsigmoid")
PLAIN = ("Tanh", "Sigmoid", "Softplus", "Softsign", "Tanhshrink", "Softshrink", "Hardshrink", "LogSigmoid", "GELU")
METHODS = ("relu_()", "mul_(0.5)", "add_(0.25)", "clamp_(min=-0.5)", "tanh_()", "sigmoid_()", "neg_()")


def activation(draw: Draw) -> Layer | None:
    kind = draw.choose(("in place", "in place", "plain", "method", "other"))
    if kind == "in place":
        return draw.module(spelled(f"nn.{draw.choose(INPLACE)}", inplace=draw.choose((True, True, False))))
    if kind == "plain":
        return draw.module(f"nn.{draw.choose(PLAIN)}()")
    if kind == "method":
        return draw.function("{0}." + draw.choose(METHODS))
    channels = draw.shape[1]
    others = [
        f"nn.PReLU({channels})",
        "nn.PReLU()",
        "nn.GELU('tanh')",
        f"nn.Softmax({draw.dim()})",
        f"nn.LogSoftmax({draw.dim()})",
        "nn.Threshold(0.1, -0.5, inplace=True)",
        "nn.RReLU(inplace=True)",
        f"nn.GLU({draw.dim()})",
    ]
    return draw.module(draw.choose(others))


def dropout(draw: Draw) -> Layer | None:
    count = draw.spatial
    kinds = ["Dropout", "Dropout", "AlphaDropout", "FeatureAlphaDropout"]
    if 1 <= count <= 3:
        kinds.append(f"Dropout{count}d")
    kind, inplace = draw.choose(kinds), draw.choose((False, False, True))
    return draw.module(spelled(f"nn.{kind}", draw.choose((0.5, 0.25)), inplace=inplace))


# ---- sizes of images


def pool(draw: Draw) -> Layer | None:
    count = draw.spatial
    if not 1 <= count <= 3:
        return None
    kernel, stride = draw.each((2, 3), count), draw.each((2, 1, 3), count)
    padding, ceil = draw.choose((0, 0, 1)), draw.flag()
    kind = draw.choose(("Max", "Avg", "AdaptiveAvg", "AdaptiveMax", "LP", "unpooled"))
    if kind.startswith("Adaptive"):
        return draw.module(f"nn.{kind}Pool{count}d({draw.each((1, 2, 3, 4, 5), count)!r})")
    if kind == "Max":
        more = {"dilation": draw.choose((1, 1, 2))}
        return draw.module(
            spelled(f"nn.MaxPool{count}d", kernel, stride=stride, padding=padding, ceil_mode=ceil, **more)
        )
    if kind == "Avg":
        more = draw.choose(({}, {"count_include_pad": False}))
        return draw.module(
            spelled(f"nn.AvgPool{count}d", kernel, stride=stride, padding=padding, ceil_mode=ceil, **more)
        )
    if kind == "LP":
        return draw.module(spelled(f"nn.LPPool{count}d", 2.0, kernel, stride=stride, ceil_mode=ceil))
    pooled = f"F.max_pool{count}d({{0}}, 2, return_indices=True)"
    return draw.function(f"F.max_unpool{count}d(*{pooled}, 2, output_size={{0}}.shape[2:])")


def resample(draw: Draw) -> Layer | None:
    count = draw.spatial
    if not 1 <= count <= 3:
        return None
    smooth = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[count]
    mode = draw.choose(("nearest", "nearest-exact", "area", *smooth, *smooth))
    corners = draw.choose((None, True, False)) if mode in smooth else None
    kind = draw.choose(("scale", "size", "antialias", "shuffle", "sample", "unfold"))
    if kind == "shuffle" and count == 2:
        channels = draw.shape[1]
        groups = draw.choose(divisors(channels))
        return draw.module(draw.choose(("nn.PixelShuffle(2)", "nn.PixelUnshuffle(2)", f"nn.ChannelShuffle({groups})")))
    if kind == "sample" and count == 2:
        grid = "F.affine_grid(torch.tensor([[[0.8, 0.2, 0.1], [-0.1, 0.7, 0.0]]]).to({0}).expand({0}.shape[0], 2, 3)"
        padding = draw.choose(("zeros", "border", "reflection"))
        corner = draw.flag()
        return draw.function(
            f"F.grid_sample({{0}}, {grid}, {{0}}.shape, align_corners={corner}), "
            f"padding_mode={padding!r}, align_corners={corner})"
        )
    if kind == "unfold" and count == 2:
        return draw.function("F.unfold({0}, 2, stride=2)")
    more: dict[str, Any] = {"mode": mode, "align_corners": corners}
    if kind == "antialias" and mode in ("bilinear", "bicubic"):
        more["antialias"] = True
    if kind == "size":
        more = {"size": tuple(draw.choose((7, 4, 5, 1, 3)) for _ in range(count)), **more}
    else:
        more = {"scale_factor": draw.choose((2, 0.5, 1.5, 3)), **more}
    return draw.function("F.interpolate({0}, " + spelled("", **more)[1:])


def pad(draw: Draw) -> Layer | None:
    if not 1 <= draw.spatial <= 3:
        return None
    count = draw.spatial
    widths = tuple(draw.choose((1, 0, 2, -1)) for _ in range(2 * count))
    kind = draw.choose(("Reflection", "Replication", "Zero", "Constant", "Circular"))
    if kind == "Circular":  # with a negative width, eager leaves elements that nothing fills
        widths = tuple(max(0, width) for width in widths)
    value = (0.5,) if kind == "Constant" else ()
    return draw.module(spelled(f"nn.{kind}Pad{count}d", widths, *value))


# ---- views and joins


def view(draw: Draw) -> Layer | None:
    rank, channels = draw.rank, draw.shape[1]
    parts = draw.choose(divisors(channels))
    dims = list(range(1, rank))
    permuted = [dims.pop(draw.choose(range(len(dims)))) for _ in range(rank - 1)]
    start = draw.choose(range(1, rank))
    dim = draw.dim()
    others = [
        f"flatten({start})",
        "transpose(1, -1)",
        f"unflatten(1, ({parts}, {channels // parts}))",
        f"permute(0, {', '.join(map(str, permuted))})",
        f"flatten({max(start - 1, 1)}, {start})",
        f"reshape({{0}}.shape[0], {parts}, -1)",
        "contiguous()",
        "movedim(1, -1)",
        "transpose(0, 1)",
        f"unsqueeze({start})",
        f"flip({dim})",
        f"roll(1, {dim})",
        f"chunk(2, {dim})[0]",
        f"narrow({dim}, 0, {max(draw.shape[dim] - 1, 1)})",
        f"select({start}, 0)",
        "clone()",
        f"squeeze({start})",
        f"repeat_interleave(2, {start})",
    ]
    if rank == 4:
        others += ["contiguous(memory_format=torch.channels_last)", "[:, :, ::2, 1:]", "mT"]
    text = draw.choose(others)
    return draw.function("{0}" + text if text.startswith("[") else "{0}." + text)


def join(draw: Draw) -> Layer | None:
    """A residual, a product or a concatenation with an earlier value, or with itself."""
    other = draw.like()
    kind = draw.choose(("{0} + {1}", "torch.cat([{0}, {1}], 1)", "{0} * {1}", "{0}.add_({1})", "swapped", "{1} - {0}"))
    dim = draw.dim()
    if other is None:
        alone = (
            f"torch.cat([{{0}}, {{0}}], {dim})",
            "{0} * {0}.mean(-1, keepdim=True).sigmoid()",
            f"torch.cat({{0}}.split(2, {dim})[::-1], {dim})",
            f"torch.stack([{{0}}, {{0}}.neg()], {dim})",
        )
        return draw.function(draw.choose(alone))
    if kind == "swapped":
        return draw.function(f"torch.cat([{{1}}, {{0}}.relu()], {dim})", other)
    return draw.function(kind, other)


def reduce(draw: Draw) -> Layer | None:
    dim, keep = draw.dim(), draw.choose((True, False))
    name = draw.choose(("mean", "sum", "amax", "logsumexp", "var", "std"))
    kind = draw.choose(("reduced", "scaled", "running", "gram"))
    if kind == "scaled":
        return draw.function(f"{{0}} - {{0}}.{name}({dim}, keepdim=True)")
    if kind == "running":
        return draw.function(f"{{0}}.cumsum({dim})")
    if kind == "gram" and draw.rank == 3:
        return draw.function("{0} @ {0}.mT")
    return draw.function(f"{{0}}.{name}({dim}, keepdim={keep})")


ROWS: tuple[Callable[[Draw], Layer | None], ...] = (
    *(activation,) * 5,
    *(convolution,) * 6,
    *(norm,) * 6,
    *(view,) * 4,
    *(join,) * 3,
    *(pool,) * 2,
    *(resample,) * 2,
    *(attention,) * 2,
    *(linear,) * 2,
    recurrent,
    pad,
    dropout,
    bilinear,
    reduce,
)


def draw_layer(choices: Choices, shapes: Sequence[Shape]) -> Layer | None:
    """A layer behind these values, which have batch and channels at least."""
    row = ROWS[choices.number(0, len(ROWS) - 1)]
    draw = Draw(choices, shapes)
    return row(draw) if draw.rank >= 2 and math.prod(draw.shape) else None


def draw_embedding(choices: Choices, shape: Shape) -> Layer:
    """The first layer of a stack over whole numbers from 0 to 9."""
    draw = Draw(choices, [shape])
    size = draw.choose((4, 6, 3))
    if draw.choose((0, 0, 0, 1)):
        return draw.module(spelled("nn.EmbeddingBag", 10, size, mode=draw.choose(("mean", "sum", "max"))))
    more = draw.choose(({}, {"padding_idx": 0}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}))
    return draw.module(spelled("nn.Embedding", 10, size, **more))
