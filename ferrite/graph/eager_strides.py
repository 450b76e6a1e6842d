"""Strides of results as eager's CPU kernels give them, promised while a graph is traced.

Users see strides, and so does code that runs on them (`.stride()`, `.view`). Tracing promises strides by rules of its
own, made for other devices and for symbols, and in places they are not those of the kernels: x of sizes (6, 1) and
strides (1, 6) plus a number has strides (1, 6) in eager and (1, 1) in the trace. `promised_as_in_eager` corrects every
promise as it is made, so that whatever is derived from one (views, layouts of gradients, what is saved) is right too.

`RULES` is the one place for differences: for each op whose promise may be wrong, how each of its results lies. What a
rule says was found by running the kernels; `python -m tests.strides` compares. The rules look at sizes and strides of
operands. A size that is a symbol counts as what it was when the graph was traced; where that is unknown, the promise of
the trace stands.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ferrite.graph.query import CHANGING_STORAGE

Extents: TypeAlias = "tuple[Any, ...]"  # of integers, or symbols
Operand: TypeAlias = "tuple[Extents, Extents]"  # sizes and strides

# ---- how a kernel lays out a result: a function of the op, its arguments and the sizes of the result


class Call:
    """A call whose results are looked at."""

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: Any, dtype: torch.dtype | None = None) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.dtype = dtype  # of its only result

    def given(self, name: str) -> Any:
        """An argument by its name; what the schema has, where it is not given."""
        for place, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                return self.args[place] if place < len(self.args) else self.kwargs.get(name, argument.default_value)
        return None

    def operand(self, name: str) -> Operand | None:
        value = self.given(name)
        return _operand(value) if isinstance(value, torch.Tensor) else None


Rule: TypeAlias = Callable[[Call, Extents], "Extents | None"]  # None: the promise of the trace stands


def pointwise(call: Call, sizes: Extents) -> Extents | None:
    """As TensorIterator allocates: see `strides_in_eager`. An operand of another dtype than it computes in is first
    copied."""
    given = list(zip(call.op._schema.arguments, call.args, strict=False))
    computed = _computed_in([value for schema, value in given if isinstance(value, torch.Tensor)], call.dtype)
    operands: list[Operand] = []
    for schema, value in given:
        if isinstance(value, torch.Tensor):
            is_copied = computed not in (None, value.dtype) and schema.name != "condition"
            sizes_of, strides_of = _operand(value)
            operands.append((sizes_of, strides_like(sizes_of, strides_of) if is_copied else strides_of))
        elif isinstance(value, (bool, int, float, complex)) and _takes_a_tensor(call.op, schema):
            operands.append(((), ()))
    return strides_in_eager(sizes, operands) if operands else None


def _computed_in(operands: Sequence[torch.Tensor], made: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a pointwise computation; None if all operands have it. A result that is floating tells of operands
    that are not, or of a number that is; numbers tell nothing else that matters to strides."""
    dtypes = {operand.dtype for operand in operands if operand.dim()}
    if made is not None and made.is_floating_point:
        dtypes.add(made)
    return functools.reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None


def of(*names: str) -> Rule:
    """As TensorIterator allocates for these operands."""

    def rule(call: Call, sizes: Extents) -> Extents | None:
        operands = [operand for name in names if (operand := call.operand(name)) is not None]
        return strides_in_eager(sizes, operands) if operands else None

    return rule


def like(name: str) -> Rule:
    """As `empty_like` of an operand: see `strides_like`."""

    def rule(call: Call, sizes: Extents) -> Extents | None:
        operand = call.operand(name)
        if operand is None or call.given("memory_format") not in (None, torch.preserve_format):
            return None
        return strides_like(*operand)

    return rule


def contiguous(call: Call, sizes: Extents) -> Extents | None:
    return _contiguous(sizes)


def suggested_by(name: str) -> Rule:
    """Channels-last if an operand suggests it, or else contiguous."""

    def rule(call: Call, sizes: Extents) -> Extents | None:
        operand = call.operand(name)
        if operand is None:
            return None
        return _in_channels_last(sizes) if suggests_channels_last(*operand) else _contiguous(sizes)

    return rule


def as_batch_norm(call: Call, sizes: Extents) -> Extents | None:
    """Of a batch norm: a dense input decides by how it lies, contiguous before channels-last, others by what they
    suggest. In the backward that is so only if the gradient is dense too, and suggests the same."""
    operand, gradient = call.operand("input"), call.operand("grad_out")
    if operand is None:
        return None
    is_suggested = suggests_channels_last(*operand)
    operands = [operand] if gradient is None else [operand, gradient]
    is_last = is_suggested
    if all(_is_image(*each) and suggests_channels_last(*each) == is_suggested for each in operands):
        is_last = not _is_contiguous(*operand)
    return _in_channels_last(sizes) if is_last else _contiguous(sizes)


def expanded(call: Call, sizes: Extents) -> Extents | None:
    """What has no dimension is expanded with strides of 0 only; a new dimension goes on from the one behind it."""
    operand = call.operand("self")
    if not operand or not operand[0]:
        return (0,) * len(sizes)
    strides: list[Any] = [*_stretched(sizes, operand)]
    new = len(sizes) - len(operand[0])
    for dim in reversed(range(new)):
        strides[dim] = sizes[dim + 1] * strides[dim + 1] if _hint(sizes[dim]) == 1 else 0
    return tuple(strides)


def viewed(call: Call, sizes: Extents) -> Extents | None:
    """A view in the same sizes is left as it was: AOTAutograd makes one of each result, for the gradient's layout."""
    operand = call.operand("self")
    if operand is None or _equal(operand[0], sizes):
        return None
    return strides_of_view(*operand, sizes)


def pointwise_or(complex_rule: Rule) -> Rule:
    """As TensorIterator allocates, but for complex numbers."""

    def rule(call: Call, sizes: Extents) -> Extents | None:
        return (complex_rule if call.given("self").is_complex() else pointwise)(call, sizes)

    return rule


def outer(call: Call, sizes: Extents) -> Extents | None:
    """Of a tensor, a column and a row."""
    tensor, column, row = (call.operand(name) for name in ("self", "vec1", "vec2"))
    if tensor is None or column is None or row is None:
        return None
    return strides_in_eager(sizes, [tensor, ((*column[0], 1), (*column[1], 1)), row])


def stacked(call: Call, sizes: Extents) -> Extents | None:
    """What is joined along a dimension, channels-last if all operands suggest it, and then viewed with one more; a new
    last dimension is there before they are joined."""
    operands = [_operand(tensor) for tensor in call.given("tensors")]
    dim = call.given("dim") % len(sizes)
    if dim == len(sizes) - 1:
        is_last = all(suggests_channels_last((*of, 1), (*strides, 1)) for of, strides in operands)
        return _in_channels_last(sizes) if is_last else _contiguous(sizes)
    if not all(suggests_channels_last(*operand) for operand in operands):
        return _contiguous(sizes)
    joined = (*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :])
    return strides_of_view(joined, _in_channels_last(joined), sizes)


def rolled(call: Call, sizes: Extents) -> Extents | None:
    """Dimension by dimension, two pieces are joined: channels-last if both suggest it, which an empty one does not."""
    operand, dims = call.operand("self"), call.given("dims")
    pieces = [(_hint(sizes[dim]), _hint(shift)) for shift, dim in zip(call.given("shifts"), dims, strict=False)]
    if operand is None or not pieces or any(not size or shift % size == 0 for size, shift in pieces):
        return _contiguous(sizes)
    return _in_channels_last(sizes) if suggests_channels_last(*operand) else _contiguous(sizes)


def halved(call: Call, sizes: Extents) -> Extents | None:
    """As TensorIterator allocates for the two halves of an operand."""
    operand = call.operand("self")
    return strides_in_eager(sizes, [(sizes, operand[1])] * 2) if operand else None


def turned(call: Call, sizes: Extents) -> Extents | None:
    """As `rot90` flips and transposes, or copies what is turned all around."""
    operand, times = call.operand("self"), call.given("k") % 4
    if operand is None or not times:
        return _contiguous(sizes)
    strides = list(strides_like(*operand))
    if times != 2:
        one, other = call.given("dims")
        strides[one], strides[other] = strides[other], strides[one]
    return tuple(strides)


def powered(call: Call, sizes: Extents) -> Extents | None:
    """Of an operand, and of two to the power of the other, which is contiguous."""
    operand, power = call.operand("self"), call.operand("other")
    if operand is None or power is None:
        return None
    return strides_in_eager(sizes, [operand, (power[0], _contiguous(power[0]))])


def as_isinf(call: Call, sizes: Extents) -> Extents | None:
    """Of a number, and of what TensorIterator allocates for the absolute value; of both parts of a complex number. What
    has no fraction is not looked at."""
    operand, dtype = call.operand("self"), call.given("self").dtype
    if operand is None or not (dtype.is_floating_point or dtype.is_complex):
        return like("self")(call, sizes)
    part = tuple(2 * stride for stride in operand[1]) if dtype.is_complex else operand[1]
    return strides_in_eager(sizes, [(sizes, strides_in_eager(sizes, [(sizes, part)])), ((), ())])


def as_soft_margin_loss_backward(call: Call, sizes: Extents) -> Extents | None:
    """Of the negative target, and of its product with the input; the gradient of the result comes last, in place."""
    operand, target = call.operand("self"), call.operand("target")
    if operand is None or target is None:
        return None
    negative = (target[0], strides_in_eager(target[0], [target]))
    return strides_in_eager(sizes, [negative, (sizes, strides_in_eager(sizes, [negative, operand]))])


def as_rrelu_backward(call: Call, sizes: Extents) -> Extents | None:
    """In training, of the noise and the gradient; or as of a leaky one."""
    is_noisy = call.given("training") and call.given("upper") - call.given("lower") > 1e-6
    return (of("noise", "grad_output") if is_noisy else of("self", "grad_output"))(call, sizes)


def indexed(call: Call, sizes: Extents) -> Extents | None:
    """Of the operand, repeated along what the indices ask for, and of the indices, which are put among its dimensions:
    in place of the first one they index if these are neighbours, or else in front."""
    operand, indices = call.operand("self"), call.given("indices")
    if operand is None or any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None  # sizes by values
    where = [dim for dim, index in enumerate(indices) if index is not None]
    before = list(range(where[0])) if where[-1] - where[0] == len(where) - 1 else []
    after = [dim for dim in range(len(operand[0])) if dim not in where and dim not in before]
    wide = len(sizes) - len(before) - len(after)
    if wide != max(indices[dim].dim() for dim in where):  # the trace forgets dimensions where an index has none
        return None
    of = sizes[len(before) : len(before) + wide]
    put = (*(1,) * len(before), *of, *(1,) * len(after))
    source = (*(operand[1][dim] for dim in before), *(0,) * wide, *(operand[1][dim] for dim in after))
    operands: list[Operand] = [(sizes, source)]
    for dim in where:
        strides = strides_of_view(of, _stretched(of, _operand(indices[dim])), put)
        if strides is None:
            return None
        operands.append((put, strides))
    return strides_in_eager(sizes, operands)


def exponential(call: Call, sizes: Extents) -> Extents | None:
    """Of matrices of one element, as of numbers."""
    return of("self")(call, sizes) if _hint(sizes[-1]) == 1 else None


def as_cdist_backward(call: Call, sizes: Extents) -> Extents | None:
    """Like the operand, where there is no distance to it."""
    gradient = call.operand("grad")
    return like("x1")(call, sizes) if gradient and any(_hint(size) == 0 for size in gradient[0]) else None


def transformed(call: Call, sizes: Extents) -> Extents | None:
    """Of a Fourier transform by MKL: its dimensions are the fastest, the others are in the order of the operand."""
    operand, dims = call.operand("self"), list(call.given("dim"))
    if operand is None or not dims or not torch.backends.mkl.is_available():
        return None
    strides = operand[1]
    match call.op._schema.name:
        case "aten::_fft_c2c":
            dims = _slowest_first(dims, strides)
        case "aten::_fft_r2c":
            dims[:-1] = _slowest_first(dims[:-1], strides)
        case "aten::_fft_c2r" if dims[1:]:  # all but the last one, in a transform before
            strides = _dense(operand[0], _order_of_transform(strides, _slowest_first(dims[:-1], strides)))
            dims = dims[-1:]
    return _dense(sizes, _order_of_transform(strides, dims))


def _order_of_transform(strides: Extents, dims: Sequence[int]) -> list[int]:
    """Dimensions from the fastest to the slowest: the kernel parts them as `std::partition` does, then sorts those that
    are not transformed."""
    others = list(range(len(strides)))
    first, last = 0, len(strides)
    while True:
        while first != last and others[first] not in dims:
            first += 1
        if first == last:
            break
        last -= 1
        while first != last and others[last] in dims:
            last -= 1
        if first == last:
            break
        others[first], others[last] = others[last], others[first]
        first += 1
    return [*reversed(dims), *reversed(_slowest_first(others[:first], strides))]


def _slowest_first(dims: Sequence[int], strides: Extents) -> list[int]:
    return sorted(dims, key=lambda dim: -_hint(strides[dim]))


def as_transposed_weight(call: Call, sizes: Extents) -> Extents | None:
    """The gradient of a weight that lies both ways at once, of a transposed convolution."""
    weight, last = call.operand("weight"), _CHANNELS_LAST.get(len(sizes))
    if not call.given("transposed") or weight is None or last is None:
        return None
    return _contiguous(sizes) if _is_contiguous(*weight) and _is_packed(*weight, last) else None


def if_empty(rule: Rule) -> Rule:
    """For a result without elements."""

    def checked(call: Call, sizes: Extents) -> Extents | None:
        return rule(call, sizes) if any(_hint(size) == 0 for size in sizes) else None

    return checked


def if_whole(rule: Rule) -> Rule:
    """For a loss of each element; a mean or a sum has no dimension anyway, or is one the rule does not know."""

    def checked(call: Call, sizes: Extents) -> Extents | None:
        return rule(call, sizes) if call.given("reduction") == 0 else None

    return checked


# Their backward is pointwise, and not tagged so.
_POINTWISE_BACKWARD = (
    "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "logit", "mish", "sigmoid",
    "silu", "softplus", "softshrink", "tanh",
)  # fmt: skip
_CONTIGUOUS = (
    "_unsafe_masked_index", "diag_embed", "index_add", "index_copy", "isin", "masked_fill", "mvlgamma", "normal",
    "pow.Scalar", "renorm", "tril", "triu",
)  # fmt: skip
# Ops by name, with an overload if others differ, and the rule of each of their results; an op that is not here and is
# tagged as pointwise: `pointwise`.
RULES: dict[str, tuple[Rule | None, ...]] = {
    # copies, and what is like an operand
    **dict.fromkeys(("clone", "index_put", "_unsafe_index_put", "index_fill", "flip", "fill"), (like("self"),)),
    **dict.fromkeys(
        ("empty_like", "ones_like", "zeros_like", "full_like", "rand_like", "randn_like", "randint_like"),
        (like("self"),),
    ),
    # views
    "expand": (expanded,),
    "view": (viewed,),
    "_unsafe_view": (viewed,),
    "stack": (stacked,),
    **dict.fromkeys(("sort", "frexp"), (like("self"), like("self"))),
    "rot90": (turned,),
    "addr": (outer,),
    **dict.fromkeys(_CONTIGUOUS, (contiguous,)),
    "sum.dim_IntList": (if_empty(contiguous),),
    **dict.fromkeys(("index", "_unsafe_index"), (indexed,)),
    "_conj_physical": (like("self"),),
    **dict.fromkeys(("complex", "polar"), (pointwise,)),
    "abs": (pointwise_or(like("self")),),
    "angle": (pointwise_or(contiguous),),
    "rsub.Tensor": (of("other", "self"),),
    "linalg_matrix_exp": (exponential,),
    "_cdist_backward": (as_cdist_backward,),
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), (transformed,)),
    # images
    "channel_shuffle": (suggested_by("self"),),
    "roll": (rolled,),
    "col2im": (if_empty(contiguous),),
    "convolution_backward": (None, as_transposed_weight),
    "grid_sampler_2d": (contiguous,),
    "max_unpool2d": (suggested_by("self"),),
    **dict.fromkeys(("reflection_pad3d", "reflection_pad3d_backward"), (suggested_by("self"),)),
    **dict.fromkeys(("replication_pad3d", "replication_pad3d_backward"), (suggested_by("self"),)),
    **dict.fromkeys(("reflection_pad2d_backward", "replication_pad2d_backward"), (suggested_by("self"),)),
    # norms and softmax
    "native_layer_norm": (contiguous, contiguous, contiguous),
    "native_layer_norm_backward": (contiguous, contiguous, contiguous),
    "native_group_norm": (suggested_by("input"), contiguous, contiguous),
    "native_group_norm_backward": (suggested_by("input"),),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update",
            "_batch_norm_with_update_functional",
            "_batch_norm_no_update",
            "native_batch_norm_backward",
            "batch_norm_backward",
        ),
        (as_batch_norm,),
    ),
    "_softmax": (contiguous,),
    "_log_softmax": (contiguous,),
    "_softmax_backward_data": (contiguous,),
    "_log_softmax_backward_data": (contiguous,),
    "linalg_vector_norm": (contiguous,),
    "_scaled_dot_product_flash_attention_for_cpu": (like("query"),),
    # activations, and others that fill a tensor like their operand
    **dict.fromkeys(("deg2rad", "rad2deg", "nan_to_num"), (like("self"),)),
    "log_sigmoid_forward": (contiguous, contiguous),
    "hardtanh": (like("self"),),
    "isnan": (pointwise,),
    "glu": (halved,),
    "glu_backward": (contiguous,),
    **dict.fromkeys((f"{name}_backward" for name in _POINTWISE_BACKWARD), (pointwise,)),
    **dict.fromkeys(("threshold_backward", "leaky_relu_backward"), (of("self", "grad_output"),)),
    "log_sigmoid_backward": (like("grad_output"),),
    "rrelu_with_noise_functional": (contiguous, contiguous),
    "rrelu_with_noise_backward": (as_rrelu_backward,),
    "_prelu_kernel": (like("self"),),
    "_prelu_kernel_backward": (of("self", "weight", "grad_output"), of("self", "weight", "grad_output")),
    # losses
    "binary_cross_entropy": (if_whole(like("self")),),
    "binary_cross_entropy_backward": (like("self"),),
    "binary_cross_entropy_with_logits": (if_whole(like("target")),),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), (if_whole(of("self", "target")),)),
    "huber_loss": (if_whole(like("self")),),
    "huber_loss_backward": (contiguous,),
    "mse_loss_backward": (contiguous,),
    "smooth_l1_loss_backward": (contiguous,),
    "soft_margin_loss_backward": (as_soft_margin_loss_backward,),
    "nll_loss2d_forward": (contiguous,),
    "nll_loss2d_backward": (like("self"),),
    # tagged as pointwise, and computed in several steps; the trace makes the same steps where there is no rule
    "ldexp": (powered,),
    "isinf": (as_isinf,),
    **dict.fromkeys(("isfinite", "relu6", "_to_copy", "copy"), ()),
}

# Overloads that make a tensor of the number before they compute, and ops with such a name that do not.
_WRAPS = frozenset({"Scalar", "Scalar_Tensor", "Scalar_Self", "Scalar_Other", "self_scalar", "other_scalar"})
_KEEPS_NUMBERS = frozenset({"aten::pow", "aten::lerp"})


@functools.cache
def rules_of(op: Any) -> tuple[Rule | None, ...]:
    """The rule of each result of an op; nothing if tracing is right about them all."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return ()
    name = op._schema.name.removeprefix("aten::")
    for known in (f"{name}.{op._overloadname}", name):
        if known in RULES:
            return RULES[known]
    return (pointwise,) if torch.Tag.pointwise in op.tags else ()


def _takes_a_tensor(target: OpOverload, schema: Any) -> bool:
    if isinstance(schema.type, torch.TensorType):
        return True
    wraps = target._overloadname in _WRAPS and target._schema.name not in _KEEPS_NUMBERS
    return wraps and schema.name in ("self", "other")


# ---- while a graph is traced

_changing = threading.Lock()
_depth = [0]  # how many are inside `promised_as_in_eager`
_untouched = FakeTensorMode.dispatch
_untouched_functional = FunctionalTensorMode.__torch_dispatch__


class _Here(threading.local):
    """Of this thread, how often it is inside."""

    depth = 0


_here = _Here()


@contextmanager
def promised_as_in_eager() -> Iterator[None]:
    """While this is active, fake tensors that this thread makes have the strides that eager gives. Calls may be inside
    one another."""
    with _changing:
        _depth[0] += 1
        FakeTensorMode.dispatch = _dispatch
        FunctionalTensorMode.__torch_dispatch__ = _dispatch_functional
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _changing:
            _depth[0] -= 1
            if not _depth[0]:
                FakeTensorMode.dispatch = _untouched
                FunctionalTensorMode.__torch_dispatch__ = _untouched_functional


def _dispatch_functional(mode: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What an op writes to stays as it lies. New tensors stand in for it and for what it is a view of, made by other
    ops, which may give other strides."""
    made = _untouched_functional(mode, func, types, args, kwargs)
    if _here.depth and _writes(func):
        call = Call(func, args, kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for each in tree_leaves(call.given(argument.name)):
                    if isinstance(each, FunctionalTensor):
                        bases = (base for base in (each._base, each._inference_mode_base) if base is not None)
                        _keep_strides(next(bases, each))
    return made


@functools.cache
def _writes(op: Any) -> bool:
    if not isinstance(op, OpOverload) or torch.Tag.inplace_view in op.tags:
        return False
    return op._schema.is_mutable and op._schema.name not in CHANGING_STORAGE


def _keep_strides(base: Any) -> None:
    """Let what stands in for a tensor that is no view lie as the tensor does, or dense in the same order."""
    if not isinstance(base, FunctionalTensor) or base.layout != torch.strided or base.device.type != "cpu":
        return
    elem = base.elem
    torch._sync(base)
    value = torch._from_functional_tensor(elem)
    (sizes, wanted), (found_sizes, found) = _operand(base), _operand(value)
    if len(sizes) != len(found_sizes) or all(map(_is_same, wanted, found)):
        return
    try:
        strides = strides_like(sizes, wanted)
    except UnknownSize:
        return
    if all(map(_is_same, strides, found)):
        return
    memory = torch.empty_strided(found_sizes, strides, dtype=value.dtype, device=value.device)
    copied = torch.ops.aten.copy.default(memory, value)
    # Replacing it counts as one more write, which is to be of the same kind as those before.
    is_hidden = torch._functionalize_are_all_mutations_hidden_from_autograd(elem)
    with torch.set_grad_enabled(not torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(elem)):
        torch._functionalize_replace(elem, copied)
    if is_hidden:
        torch._functionalize_mark_mutation_hidden_from_autograd(elem)
    torch._functionalize_commit_update(elem)
    torch._sync(base)


def _dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    made = _untouched(mode, func, types, args, kwargs or {})
    rules = rules_of(func) if _here.depth else ()
    if not rules:
        return made
    if isinstance(made, FakeTensor):
        return _corrected(mode, made, rules[0], Call(func, args, kwargs or {}, made.dtype))
    call = Call(func, args, kwargs or {})
    leaves, shape = tree_flatten(made)
    for place, (leaf, rule) in enumerate(zip(leaves, rules, strict=False)):
        leaves[place] = _corrected(mode, leaf, rule, call)
    return tree_unflatten(leaves, shape)


def _corrected(mode: FakeTensorMode, made: Any, rule: Rule | None, call: Call) -> Any:
    """What was made, in memory of its own with the strides that the rule says, if it has others."""
    if rule is None or not isinstance(made, FakeTensor) or made.layout != torch.strided or not made.dim():
        return made
    if made.fake_device.type != "cpu" or made.constant is not None:
        return made
    sizes, promised = _operand(made)
    try:
        wanted = rule(call, sizes)
    except UnknownSize:
        return made
    if wanted is None or all(map(_is_same, wanted, promised)):
        return made
    viewed = call.args[0] if call.args else None
    if isinstance(viewed, FakeTensor) and viewed.untyped_storage()._cdata == made.untyped_storage()._cdata:
        again = (viewed, sizes, wanted, made.storage_offset())
        return _untouched(mode, torch.ops.aten.as_strided.default, (FakeTensor,), again, {})
    plain = torch.empty_strided(sizes, wanted, dtype=made.dtype, device="meta")
    return FakeTensor(mode, plain, made.fake_device)


def _is_same(one: Any, other: Any) -> bool:
    """Symbols by their text: to compare them would add a guard."""
    return one is other or (one == other if type(one) is type(other) is int else str(one) == str(other))


# ---- strides of results, by those of operands


class UnknownSize(Exception):
    """A size or stride that only a run knows decides."""


def strides_in_eager(sizes: Extents, operands: Sequence[Operand]) -> Extents:
    """The strides of a pointwise result of these sizes.

    If all operands have the result's sizes, and all are contiguous, or all are channels-last of four dimensions, so is
    the result; or all are dense with the same strides, then the result has them too. Otherwise dimensions are sorted by
    the strides of the first operand that tells two of them apart, and the result is dense in that order. A number
    counts as an operand without dimensions wherever an op takes a tensor.
    """
    if all(_equal(of, sizes) for of, _ in operands):
        if all(_is_contiguous(*operand) for operand in operands):
            return _contiguous(sizes)
        if len(sizes) == 4 and all(_is_packed(*operand, _CHANNELS_LAST[4]) for operand in operands):
            return _in_channels_last(sizes)
        if all(_equal(a[1], b[1]) for a, b in pairwise(operands)) and is_dense(*operands[0]):
            return operands[0][1]
    order = _order(sizes, [_stretched(sizes, operand) for operand in operands])
    return _contiguous(sizes) if order == sorted(order, reverse=True) else _dense(sizes, order)


def strides_like(sizes: Extents, strides: Extents) -> Extents:
    """Those that `empty_like` gives: the same if they are dense, or else dense in the same order."""
    return strides if is_dense(sizes, strides) else strides_anew(sizes, strides)


def strides_anew(sizes: Extents, strides: Extents) -> Extents:
    """Those of a new tensor that is dense in the same order."""
    return _dense(sizes, _order(sizes, [strides]))


def strides_of_view(old: Extents, strides: Extents, sizes: Extents) -> Extents | None:
    """Those of a tensor that is viewed in other sizes; None if that is no view, or has no elements.

    Dimensions that lie without gaps form chunks, each of which dimensions of the view share out; one of size one goes
    on from the faster one next to it.
    """
    if not old:
        return (1,) * len(sizes)
    if any(_hint(size) == 0 for size in old):
        return None
    found: list[Any] = [None] * len(sizes)
    at = len(sizes) - 1
    base, chunk, made, step = strides[-1], 1, 1, strides[-1]  # `step` is the symbol for base * made
    for dim in reversed(range(len(old))):
        chunk *= _hint(old[dim])
        if dim and (_hint(old[dim - 1]) == 1 or _hint(strides[dim - 1]) == chunk * _hint(base)):
            continue
        while at >= 0 and (made < chunk or _hint(sizes[at]) == 1):
            found[at] = step
            made, step = made * _hint(sizes[at]), step * sizes[at]
            at -= 1
        if made != chunk:
            return None
        if dim:
            base = step = strides[dim - 1]
            chunk = made = 1
    return tuple(found) if at == -1 else None


_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}  # by rank: dimensions from the fastest to the slowest


def suggests_channels_last(sizes: Extents, strides: Extents) -> bool:
    """Whether a kernel that asks a tensor for its format hears channels-last: strides of dimensions of one count, and
    where they leave it open the answer is no."""
    order = _CHANNELS_LAST.get(len(sizes))
    if order is None or _hint(strides[1]) == 0:
        return False
    least = 0
    for dim in order:
        size, stride = _hint(sizes[dim]), _hint(strides[dim])
        if size == 0 or stride < least or (dim == 0 and least == _hint(strides[1])):
            return False
        least = stride * max(size, 1)
    return True


def is_dense(sizes: Extents, strides: Extents) -> bool:
    """Whether elements lie without gaps, each at a place of its own."""
    wide = [dim for dim, size in enumerate(sizes) if _hint(size) > 1]
    if any(_hint(size) == 0 for size in sizes):
        return True
    return _is_packed(sizes, strides, sorted(wide, key=lambda dim: _hint(strides[dim])))


def _hint(extent: Any) -> int:
    """An extent, or what it was in the trace."""
    if isinstance(extent, int):
        return extent
    known = extent.node.hint
    if not isinstance(known, int):
        raise UnknownSize
    return known


def _equal(one: Extents, other: Extents) -> bool:
    return len(one) == len(other) and all(_hint(a) == _hint(b) for a, b in zip(one, other, strict=True))


def _operand(tensor: torch.Tensor) -> Operand:
    return (tuple(tensor.shape), tuple(tensor.stride())) if tensor.layout == torch.strided else ((), ())


def _is_contiguous(sizes: Extents, strides: Extents) -> bool:
    return _is_packed(sizes, strides, range(len(sizes) - 1, -1, -1))


def _is_image(sizes: Extents, strides: Extents) -> bool:
    """Whether a tensor is contiguous or channels-last."""
    last = _CHANNELS_LAST.get(len(sizes))
    return _is_contiguous(sizes, strides) or (last is not None and _is_packed(sizes, strides, last))


def _is_packed(sizes: Extents, strides: Extents, order: Sequence[int]) -> bool:
    """Whether a tensor is dense in this order of dimensions, from the fastest to the slowest; those of one aside."""
    step = 1
    if any(_hint(size) == 0 for size in sizes):
        return True
    for dim in order:
        size = _hint(sizes[dim])
        if size != 1 and _hint(strides[dim]) != step:
            return False
        step *= size
    return True


def _stretched(sizes: Extents, operand: Operand) -> Extents:
    """The strides of an operand along the result's dimensions: 0 where it is repeated."""
    of, strides = operand
    missing = len(sizes) - len(of)
    there = zip(of, strides, sizes[missing:], strict=True)
    return (0,) * missing + tuple(0 if _hint(of) == 1 != _hint(wanted) else step for of, step, wanted in there)


def _order(sizes: Extents, operands: Sequence[Extents]) -> list[int]:
    """Dimensions from the fastest to the slowest: from the last one on, each goes down past those that are slower."""
    extents = [_hint(size) for size in sizes]
    hinted = [[_hint(stride) for stride in strides] for strides in operands]
    order = list(range(len(sizes) - 1, -1, -1))
    for start in range(1, len(order)):
        place = start
        for below in range(start - 1, -1, -1):
            faster = _compared(extents, hinted, order[below], order[place])
            if faster < 0:
                break
            if faster > 0:
                order[below], order[place] = order[place], order[below]
                place = below
    return order


def _compared(sizes: Sequence[int], operands: Sequence[Sequence[int]], one: int, other: int) -> int:
    """Below 0 if the one dimension is faster than the other, above if slower, 0 if no operand tells."""
    for strides in operands:
        if strides[one] == 0 or strides[other] == 0:
            continue
        if strides[one] != strides[other]:
            return -1 if strides[one] < strides[other] else 1
        if sizes[one] > sizes[other]:
            return 1
    return 0


def _contiguous(sizes: Extents) -> Extents:
    """What has no elements is laid out as if it had one in such a dimension."""
    return _dense([1 if _hint(size) == 0 else size for size in sizes], range(len(sizes) - 1, -1, -1))


def _in_channels_last(sizes: Extents) -> Extents:
    return _dense(sizes, _CHANNELS_LAST[len(sizes)])


def _dense(sizes: Sequence[Any], order: Sequence[int]) -> Extents:
    strides: list[Any] = [0] * len(sizes)
    step: Any = 1
    for dimension in order:
        strides[dimension] = step
        step = step * sizes[dimension]
    return tuple(strides)
