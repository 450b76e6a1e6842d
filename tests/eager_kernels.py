"""The kernels of PyTorch in layouts that eager seldom has, against the same kernels on contiguous float64.

    python -m tests.eager_kernels [--ops PATTERN] [--details]

Calls are those that PyTorch's own samples of ops and modules make, forward and backward, and those of `of_own`. Each is
made again for every way to lay its images (tensors of rank 3 and more): contiguous, channels last, and, where a
dimension has the size one, channels last with another stride there. What is found and not in `KNOWN`, or the other way
round, is an error: `ferrite/lower/layouts.py` says which ops in eager are given which layouts, and has to know.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

aten = torch.ops.aten

WRONG, RAISES = "gives another answer", "raises"
ONE_LAYOUT = "is given one layout"
AS_TRACED = "is given operands as the trace had them, which are those of eager"


@dataclass(frozen=True)
class Known:
    """What is known of a kernel: what it does in some layouts, why, and how Ferrite keeps clear of it."""

    does: str
    why: str
    so: str


KNOWN: dict[str, Known] = {
    "aten.native_batch_norm_backward.default": Known(
        WRONG,
        "chooses a loop by the layout that the strides of the image suggest, and asks of the gradient only whether it "
        "is channels last, which does not look at strides of dimensions of one",
        ONE_LAYOUT,
    ),
    "aten.native_group_norm.default": Known(
        RAISES, "demands the layout that the strides of the image suggest", ONE_LAYOUT
    ),
    "aten.native_group_norm_backward.default": Known(
        WRONG, "reads the gradient by the layout of the image, and images of rank 3 as if contiguous", ONE_LAYOUT
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": Known(
        WRONG, "takes the last dimension of query, key and value for one that lies in a row", AS_TRACED
    ),
    "aten._linalg_det.default": Known(
        WRONG, "factorises the transposed matrix if that is the one that lies in columns; its backward knows", AS_TRACED
    ),
    "aten._linalg_slogdet.default": Known(WRONG, "as `_linalg_det`", AS_TRACED),
    "aten.nll_loss2d_backward.default": Known(
        RAISES, "makes a gradient like the scores, and demands that it is contiguous", AS_TRACED
    ),
    "aten._unsafe_view.default": Known(RAISES, "is a view, which some layouts do not have", AS_TRACED),
}

MOST_CALLS = 6  # of one op that are looked at, of those that are not our own
MOST_SAMPLES = 40  # of one op of the database that are run
MOST_IMAGES = 3  # of one call whose layouts are varied
REFUSALS = (RuntimeError, ValueError, NotImplementedError)
_NO_VALUES = ("empty", "new_empty", "rand", "as_strided", "set_", "resize", "detach", "lift", "_local_scalar", "item")


@dataclass
class Call:
    """One call of an op: copies of its arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Found:
    """What became of an op: in how many layouts it was run, and where it raised or gave another answer."""

    runs: int = 0
    raised: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Keeps the first few calls of each op that reads an image."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: defaultdict[Any, list[Call]] = defaultdict(list)
        self.seen: set[Any] = set()
        self.most = MOST_CALLS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_judged(func) and len(self.calls[func]) < self.most:
            images = [leaf for leaf in tree_leaves((args, kwargs)) if is_image(leaf)]
            key = (func, tuple((tuple(image.shape), image.dtype) for image in images))
            if images and key not in self.seen and max(image.numel() for image in images) < 1 << 16:
                self.seen.add(key)
                copies = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
                self.calls[func].append(Call(func, *copies))
        return func(*args, **kwargs)


def is_judged(op: Any) -> bool:
    """Whether layouts can be told from its values: it draws nothing, writes to nothing and makes no view."""
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    if op.namespace != "aten" or schema.is_mutable or name.startswith(_NO_VALUES):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags or any(entry.alias_info for entry in schema.returns):
        return False
    return name not in ("reshape", "view_as_real", "_reshape_alias", "contiguous")


def is_image(value: Any) -> bool:
    """A dense tensor of floats whose layout can be varied."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.dim() >= 3
        and value.is_floating_point()
        and value.numel() > 1
        and 0 not in value.stride()
    )


def first(image: torch.Tensor) -> torch.Tensor:
    """Contiguous."""
    return image.clone(memory_format=torch.contiguous_format)


def last(image: torch.Tensor) -> torch.Tensor:
    """The second dimension is the fastest, wherever that can be told from strides and where not."""
    rank = image.dim()
    order = [0, *range(2, rank), 1]
    return image.permute(order).contiguous().permute([0, rank - 1, *range(1, rank - 1)])


def loose(image: torch.Tensor) -> torch.Tensor:
    """As `last`, but dimensions of one have the strides that a view of fewer dimensions gives them."""
    strides = list(last(image).stride())
    for dim in reversed(range(image.dim())):
        if image.shape[dim] == 1:
            strides[dim] = strides[dim + 1] * image.shape[dim + 1] if dim + 1 < image.dim() else 1
    return torch.empty_strided(image.shape, strides, dtype=image.dtype).copy_(image)


def layouts(image: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    """The ways to lay an image that differ in strides."""
    return (first, last, loose) if loose(image).stride() != last(image).stride() else (first, last)


def judge(call: Call, found: Found) -> None:
    """Run a call in every mixture of layouts."""
    leaves, shape = tree_flatten((call.args, call.kwargs))
    images = [place for place, leaf in enumerate(leaves) if is_image(leaf)][:MOST_IMAGES]
    plain = [first(leaf) if is_image(leaf) else leaf for leaf in leaves]
    wide = [leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf for leaf in plain]
    try:
        ours = run(call.op, *tree_unflatten(plain, shape))
        again = run(call.op, *tree_unflatten(plain, shape))
    except REFUSALS:
        return  # it takes none of them
    try:
        exact = run(call.op, *tree_unflatten(wide, shape))
    except REFUSALS:
        exact = ours
    # What is ill-conditioned, or has no single answer, is held to what contiguous operands give; a result that differs
    # between two equal calls is in part memory that the kernel has not written.
    expected = exact if alike(ours, exact) else ours
    defined = [alike([one], [other]) for one, other in zip(ours, again, strict=True)]
    for mixture in itertools.product(*(layouts(plain[place]) for place in images)):
        laid = [*plain]
        for place, lay in zip(images, mixture, strict=True):
            laid[place] = lay(plain[place])
        name = ", ".join(f"{tuple(plain[at].shape)} {lay.__name__}" for at, lay in zip(images, mixture, strict=True))
        found.runs += 1
        try:
            made = run(call.op, *tree_unflatten(laid, shape))
        except REFUSALS as error:
            found.raised.append(f"{name}: {str(error).splitlines()[0][:80]}")
            continue
        if not alike(list(itertools.compress(made, defined)), list(itertools.compress(expected, defined))):
            found.wrong.append(name)


def run(op: Any, args: Any, kwargs: Any) -> list[Any]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tree_leaves(op(*args, **kwargs))


def alike(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists of results are the same but for rounding."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if a.shape != b.shape:
            return False
        if a.is_floating_point() and a.numel():
            scale = b.double().abs().nan_to_num(posinf=0.0).max().item()
            if not torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3 * max(scale, 1e-3), equal_nan=True):
                return False
        elif not a.is_complex() and not torch.equal(a, b.to(a.dtype)):
            return False
    return True


# ---- where calls come from


def of_samples(draw: Callable[[list[Any]], list[Any]] = list) -> Iterator[Callable[[], Any]]:
    """Functions that run the samples of PyTorch's op database, forward and backward; `draw` chooses ops."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in draw(op_db):
        if torch.float32 not in info.supported_dtypes("cpu") or info.name.startswith(("ops.", "_refs.")):
            continue

        def samples(info: Any = info) -> None:
            grad = info.supports_autograd
            made = info.sample_inputs("cpu", torch.float32, requires_grad=grad)
            for sample in itertools.islice(made, MOST_SAMPLES):
                backward(info(sample.input, *sample.args, **sample.kwargs))

        yield samples


def of_modules() -> Iterator[Callable[[], Any]]:
    """Functions that run the samples of PyTorch's modules, forward and backward."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:

        def samples(info: Any = info) -> None:
            for training in (True, False):
                made = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                )
                for entry in made:
                    module = info.module_cls(*entry.constructor_input.args, **entry.constructor_input.kwargs)
                    module.train(training)
                    forward = entry.forward_input
                    if forward is not None:
                        backward(module(*forward.args, **forward.kwargs))

        yield samples


def of_own(batches: tuple[int, ...] = (1, 2), channels: tuple[int, ...] = (1, 4, 32)) -> Iterator[Callable[[], Any]]:
    """Modules that work on images, with few and many channels."""
    for batch, many, size, rank in itertools.product(batches, channels, (1, 7), (1, 2, 3)):
        x = torch.randn(batch, many, *(size + n for n in range(rank)), requires_grad=True)
        for make in _of_rank(rank, many):
            yield lambda make=make, x=x: backward(make()(x))


def of_attention() -> Iterator[Callable[[], Any]]:
    q, k, v = (torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(3))
    yield lambda: backward(functional.scaled_dot_product_attention(q, k, v))


def _of_rank(rank: int, channels: int) -> tuple[Callable[[], nn.Module], ...]:
    """Makers of modules for images of a rank."""
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
    same = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1]
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1]
    mean = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[rank - 1]
    return (
        lambda: norm(channels), lambda: norm(channels).eval(), lambda: norm(channels, affine=False),
        lambda: same(channels), lambda: same(channels, affine=True), lambda: nn.GroupNorm(1, channels),
        lambda: convolution(channels, 3, 3, padding=1), lambda: convolution(channels, 3, 1, bias=False),
        lambda: convolution(channels, 2 * channels, 3, padding=1, groups=channels),
        lambda: up(channels, 3, 3, padding=1), lambda: pool(2, ceil_mode=True), lambda: mean(2, ceil_mode=True),
        lambda: nn.Upsample(scale_factor=2), lambda: nn.PReLU(channels), lambda: nn.Softmax(1),
    )  # fmt: skip


def backward(made: Any) -> None:
    """Run the backward of whatever a sample gave, with a gradient that is no constant."""
    results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if results and all(result.is_floating_point() and result.layout == torch.strided for result in results):
        torch.autograd.backward(results, [torch.randn_like(result) for result in results])


def recorded(*sources: Iterator[Callable[[], Any]]) -> dict[Any, list[Call]]:
    """The calls that functions make: all that those of the first source make, and a few of each op by the others."""
    torch.manual_seed(0)
    recorder = Recorder()
    own, *others = sources
    for source, most in ((own, 1 << 20), *((each, MOST_CALLS) for each in others)):
        recorder.most = most
        _record(recorder, source)
    return recorder.calls


def _record(recorder: Recorder, source: Iterator[Callable[[], Any]]) -> None:
    for run_samples in source:
        try:
            with recorder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_samples()
        except Exception:  # a sample of another machine: its other calls are recorded
            continue


def judged(calls: dict[Any, list[Call]], pattern: str = "*") -> dict[str, Found]:
    """What became of every op, by name."""
    result: dict[str, Found] = {}
    for op, made in sorted(calls.items(), key=lambda item: str(item[0])):
        if fnmatch(str(op), pattern):
            found = result.setdefault(str(op), Found())
            for call in made:
                judge(call, found)
    return result


def unexpected(result: dict[str, Found], is_whole: bool = True) -> list[str]:
    """What was found and is not known, and, if `is_whole`, what is known and was not found."""
    said = []
    for name, found in result.items():
        known = KNOWN.get(name)
        for does, where in ((WRONG, found.wrong), (RAISES, found.raised)):
            if where and (known is None or known.does != does):
                said.append(f"{name} {does}, which is not in KNOWN: {where[0]}")
    for name, known in KNOWN.items() if is_whole else ():
        if name not in result or not (result[name].wrong if known.does == WRONG else result[name].raised):
            said.append(f"{name} is in KNOWN, and was not found")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.eager_kernels")
    parser.add_argument("--ops", default="*", help="only ops with such a name, as 'aten.native_*'")
    parser.add_argument("--details", action="store_true", help="name every layout")
    arguments = parser.parse_args()
    result = judged(recorded(of_own(), of_attention(), of_modules(), of_samples()), arguments.ops)
    for name, found in result.items():
        if found.raised or found.wrong:
            print(f"{name}: wrong {len(found.wrong)}, raised {len(found.raised)}, of {found.runs}")
            for line in [*found.wrong, *found.raised] if arguments.details else ():
                print(f"    {line}")
    print(f"{len(result)} ops, {sum(found.runs for found in result.values()):,} calls")
    said = unexpected(result, is_whole=arguments.ops == "*")
    print(*said, sep="\n", end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
