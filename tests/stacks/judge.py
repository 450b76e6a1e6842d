"""Runs a stack in eager and compiled, and says how they differ.

Everything that `tests/ops/check.py` compares for one op is compared here for a stack: errors, outputs and their
strides, the gradients of the input and of every parameter, parameters and buffers afterwards, and where the random
stream ends. The stack is called twice, and keeps its statistics between the calls.

Note [Judging stacks]
A tensor is judged by its largest error against float64, because what a stack computes for one place sums over many.
It may be SLACK times eager's error, but no more than SANE of the largest element: eager's kernels can be wrong
(`native_batch_norm_backward`, for a batch of one, a contiguous input and a gradient that lies channels last), so in the
reference every norm is its formula. Random layers draw there what they drew in eager, which `Draws` writes down.
A stack may subtract nearly equal numbers, or decide by a rounded value (a maximum, the sign of an activation's input).
So if this rule does not accept a tensor, eager runs NOISY_RUNS times more, with every parameter, every layer's result
and every gradient on its way back moved by a few units in the last place. An error of SLACK times the largest change
that noise makes is none.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.fuzz.judge import SECOND, Promised, Verdict, nudged
from tests.ops.cases import seed_everything
from tests.ops.check import Difference, Observation, compiling, walk

from .stack import Stack, build, input_of, leaves_of, outputs_of

SLACK = 4.0
SANE = 1e-4
FLOOR = 16  # units in the last place of the largest element
NOISY_RUNS = 12
CALLS = 2
Compile = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Engine:
    """A way to compile a stack: a backend and its options, beside those that the stack itself asks for."""

    name: str
    backend: str = "ferrite"
    options: Mapping[str, Any] | None = None

    def options_for(self, stack: Stack) -> dict[str, Any] | None:
        if self.backend != "ferrite":
            return None
        common = {"fallback_random": True, "strict": True, "cache": "off", "layout": stack.setting.layout}
        return {**common, **(self.options or {})}

    def compiled(self, stack: Stack, model: nn.Module) -> Callable[..., Any]:
        """Nothing compiled or traced before is kept."""
        torch._dynamo.reset()
        FakeTensorMode.cache_clear()
        options = self.options_for(stack)
        return torch.compile(model, backend=self.backend, dynamic=stack.setting.dynamic, options=options)


FERRITE = Engine("ferrite")
TORCH = Engine("aot_eager", backend="aot_eager")
LENIENT = Engine("not strict", options={"strict": False})
# Asked who is to blame.
OTHERS = (
    TORCH,
    Engine("layout off", options={"layout": "off"}),
    Engine("unlowered", options={"executor": "eager"}),
    Engine("oracle", options={"executor": "oracle"}),
    Engine("python host", options={"host": "python"}),
)


# ---- running


def observe(
    stack: Stack, engine: Engine | None = None, noise: int | None = None, draws: Draws | None = None, wide: bool = False
) -> list[Observation]:
    """Both calls of a new model: in eager, with noise of a seed, in float64, or compiled."""
    model = build(stack, None if noise is None else _disturb(noise))
    if wide:
        model.double()
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        for parameter in model.parameters():
            parameter.data.copy_(nudged(parameter.data, generator))
    run = engine.compiled(stack, model) if engine else model
    seen = []
    for call in range(CALLS):
        given = input_of(stack, call)
        if wide and given.is_floating_point():
            given = _widened(given.detach()).requires_grad_(given.requires_grad)
        seed_everything(call)
        with draws.of_call(call, wide) if draws else contextlib.nullcontext():
            seen.append(_observe(stack, run, given, [*model.parameters()], [*model.buffers()]))
        seen[-1].inputs.append(torch.get_rng_state())
        if seen[-1].error is not None:
            break
    return seen


def _widened(given: torch.Tensor) -> torch.Tensor:
    """In float64, with the same strides."""
    memory = given.as_strided((given.untyped_storage().nbytes() // given.itemsize,), (1,), 0)
    return memory.double().as_strided(given.shape, given.stride(), given.storage_offset())


def _observe(
    stack: Stack,
    run: Callable[..., Any],
    given: torch.Tensor,
    parameters: list[torch.Tensor],
    buffers: list[torch.Tensor],
) -> Observation:
    seen = Observation(inputs=[given])
    try:
        with torch.set_grad_enabled(stack.setting.wants_gradients):
            seen.result = run(given)
    except Exception as error:
        seen.error = error
        return seen
    outputs = [each for each in outputs_of(seen.result) if each.requires_grad]
    if stack.setting.wants_gradients and outputs:
        seen.cotangents = [_cotangent(each, place, stack.setting.cotangent) for place, each in enumerate(outputs)]
        try:
            # AccumulateGrad copies strange strides away in .grad; asked for directly they stay visible.
            leaves = leaves_of(given, parameters)
            seen.gradients = list(torch.autograd.grad(outputs, leaves, seen.cotangents, allow_unused=True))
        except Exception as error:
            seen.backward_error = error
    with torch.no_grad():
        seen.inputs += [value.clone() for value in (*parameters, *buffers)]
    return seen


def _cotangent(output: torch.Tensor, place: int, layout: str) -> torch.Tensor:
    """Random numbers, the same for outputs of one shape."""
    if layout == "expanded":
        return torch.ones((), dtype=output.dtype).expand(output.shape)
    made = torch.randn(output.shape, generator=torch.Generator().manual_seed(place)).to(output.dtype)
    if layout == "channels_last":
        return made.movedim(1, -1).contiguous().movedim(-1, 1) if made.dim() > 2 else made
    return torch.empty_like(output.detach()).copy_(made)


def _disturb(seed: int) -> Callable[[torch.Tensor], None]:
    generator = torch.Generator().manual_seed(1000 + seed)

    def noted(value: torch.Tensor) -> None:
        # `.data`: autograd is not told, so it differentiates the layer as if its result were the noisy one.
        value.data.copy_(nudged(value.data, generator))
        if value.requires_grad:
            value.register_hook(lambda gradient: None if gradient is None else nudged(gradient, generator))

    return noted


# ---- the reference


def _normalised(value: torch.Tensor, dims: list[int], eps: float | None) -> torch.Tensor:
    mean = value.mean(dims, keepdim=True)
    variance = (value - mean).square().mean(dims, keepdim=True)
    return (value - mean) / (variance + eps).sqrt()


def _by_channel(given: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
    return None if given is None else given.reshape(1, -1, *(1,) * (value.dim() - 2))


def _scaled(value: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


def _update(running: torch.Tensor | None, found: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(found.detach(), alpha=momentum)


def _batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    weight, bias = _by_channel(weight, input), _by_channel(bias, input)
    if not training:
        mean, variance = _by_channel(running_mean, input), _by_channel(running_var, input)
        return _scaled((input - mean) / (variance + eps).sqrt(), weight, bias)
    dims = [0, *range(2, input.dim())]
    _update(running_mean, input.mean(dims), momentum)
    _update(running_var, input.var(dims), momentum)
    return _scaled(_normalised(input, dims, eps), weight, bias)


def _instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = [*range(2, input.dim())]
    _update(running_mean, input.mean(dims).mean(0), momentum)
    _update(running_var, input.var(dims).mean(0), momentum)
    return _scaled(_normalised(input, dims, eps), _by_channel(weight, input), _by_channel(bias, input))


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> torch.Tensor:  # fmt: skip
    found = _normalised(input.reshape(input.shape[0], num_groups, -1), [2], eps).reshape(input.shape)
    return _scaled(found, _by_channel(weight, input), _by_channel(bias, input))


def _layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return _scaled(_normalised(input, [*range(-len(normalized_shape), 0)], eps), weight, bias)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
    # The default is the precision of the type that is judged, not of the reference's.
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    mean = input.square().mean([*range(-len(normalized_shape), 0)], keepdim=True)
    return _scaled(input / (mean + eps).sqrt(), weight, None)


FORMULAS: dict[Any, Callable[..., torch.Tensor]] = {
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    functional.group_norm: _group_norm,
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
}
RANDOM = frozenset(
    {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        functional.rrelu,
    }
)


@dataclass(frozen=True)
class Drawn:
    """A random layer, which is linear once it has drawn: `base + slope * value`; `state` of the generator, after it."""

    base: torch.Tensor
    slope: torch.Tensor
    state: torch.Tensor

    @property
    def changes_something(self) -> bool:
        return bool((self.base != 0).any() or (self.slope != 1).any())


class Draws:
    """What random layers drew in eager, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[Drawn]] = [[] for _ in range(CALLS)]

    def of_call(self, call: int, wide: bool) -> TorchFunctionMode:
        return Formulas(self.calls[call]) if wide else Recording(self.calls[call])


class Recording(TorchFunctionMode):
    """Around eager: writes down what random layers draw. The order in which they draw is that of memory, so what is
    asked to draw the same again has the strides of what was given."""

    def __init__(self, drawn: list[Drawn]) -> None:
        self.drawn = drawn

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in RANDOM:
            return function(*args, **kwargs)
        value, before = args[0].detach().clone(), torch.get_rng_state()
        made = function(*args, **kwargs)
        after = torch.get_rng_state()
        again = []
        plain = {**kwargs, "inplace": False}
        if function is functional.rrelu:
            points = (torch.zeros_like(value), value)
        else:
            points = (torch.zeros_like(value), torch.ones_like(value))
        for point in points:
            torch.set_rng_state(before)
            again.append(function(point.double(), *args[1:], **plain).detach())
        torch.set_rng_state(after)
        base, wide = again[0], points[1].double()
        slope = torch.where(wide == 0, 1.0, (again[1] - base) / torch.where(wide == 0, 1.0, wide))
        self.drawn.append(Drawn(base, slope, after))
        return made


class Formulas(TorchFunctionMode):
    """Around the reference: norms are their formulas, and random layers do what they did in eager."""

    def __init__(self, drawn: list[Drawn]) -> None:
        self.drawn = iter(drawn)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in FORMULAS:
            return FORMULAS[function](*args, **kwargs)
        if function not in RANDOM:
            return function(*args, **kwargs)
        drawn, value = next(self.drawn), args[0]
        torch.set_rng_state(drawn.state)
        if kwargs.get("inplace") or args[-1] is True:
            if not drawn.changes_something:
                return value  # as eager does without writing: a leaf is allowed
            return value.mul_(drawn.slope).add_(drawn.base)
        return value * drawn.slope + drawn.base


# ---- comparing


class StackComparison(Promised):
    """As for one op, but values by Note [Judging stacks]."""

    def __init__(self, judge: Judge, call: int) -> None:
        self.judge, self.call = judge, call
        self.eager = judge.eager[call]
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.errors: dict[tuple[str, str], float] = {}  # by kind and place of a difference: how large it is
        self.close = False
        self.values_defined = True

    @property
    def promised(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return self.judge.promised[self.call]

    def differs(self, kind: str, where: str, eager: Any, compiled: Any) -> None:
        if kind.endswith("strides") and compiled == self.judge.by_autograd[self.call].get(where.removeprefix(SECOND)):
            self.as_promised = True
        else:
            super().differs(kind, where, eager, compiled)

    def _complaint(
        self, place: tuple[str, str], eager: torch.Tensor, compiled: torch.Tensor, read: Callable[[Observation], Any]
    ) -> str:
        if not eager.is_floating_point():
            differing = int((eager != compiled).sum())
            self.errors[place] = differing
            return f"{differing} of {eager.numel()} elements differ"
        reference = read(self.judge.reference[self.call]).detach()
        size = float(reference.abs().max())
        distance = lambda value: float((value.double() - reference).abs().max())
        error, usual = distance(compiled), distance(eager)
        floor = FLOOR * torch.finfo(eager.dtype).eps * size
        if error <= max(SLACK * min(usual, SANE * size), floor):
            return ""
        noisy = [read(run[self.call]).detach() for run in self.judge.noisy]
        spread = max(float((run - eager).abs().max()) for run in noisy)
        if error <= SLACK * spread + floor:
            return ""
        self.errors[place] = math.inf if math.isnan(error) else error
        return f"error {error:.2g}, eager's {usual:.2g}, by noise {spread:.2g}, largest element {size:.2g}"


def _whole(seen: list[Observation]) -> list[Observation]:
    """Of a stack that eager takes, every other run in eager is one as well."""
    for each in seen:
        if error := each.error or each.backward_error:
            raise error
    return seen


def _strides(seen: Observation) -> dict[str, tuple[int, ...]]:
    """The strides of outputs and gradients, by the names that a comparison has for them."""
    found = {f"output{path}": each for path, each in walk(seen.result)}
    found |= {f"gradient {place}": each for place, each in enumerate(seen.gradients or ())}
    return {where: tuple(each.stride()) for where, each in found.items() if isinstance(each, torch.Tensor)}


class Judge:
    """Judges one stack, by one engine after the other. `excused`: the kinds of differences that were torch's, in the
    verdict given last."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.draws = stack, Draws()
        self.eager = observe(stack, draws=self.draws)
        self.excused: set[str] = set()
        self._torch: dict[tuple[str, str], float] | None = None

    @functools.cached_property
    def reference(self) -> list[Observation]:
        return _whole(observe(self.stack, draws=self.draws, wide=True))

    @functools.cached_property
    def noisy(self) -> list[list[Observation]]:
        return [_whole(observe(self.stack, noise=seed)) for seed in range(NOISY_RUNS)]

    @functools.cached_property
    def promised(self) -> list[dict[str, tuple[int, ...]]]:
        """Strides of outputs and gradients, call by call, by torch's fake kernels."""
        model = build(self.stack)
        with FakeTensorMode() as fake:
            held = {name: fake.from_tensor(each) for name, each in model.named_parameters()}
            buffers = {name: fake.from_tensor(each) for name, each in model.named_buffers()}
            run = lambda given: functional_call(model, {**held, **buffers}, (given,))
            values = [*held.values()], [*buffers.values()]
            return [_strides(_observe(self.stack, run, input_of(self.stack, call), *values)) for call in range(CALLS)]

    @functools.cached_property
    def by_autograd(self) -> list[dict[str, tuple[int, ...]]]:
        """Strides as AOTAutograd makes them of eager's, call by call. It gives results through a view in the same
        sizes, which sets strides of dimensions of one anew; and its backward is handed gradients of results that lie as
        the results do."""
        found = []
        alike = replace(self.stack, setting=replace(self.stack.setting, cotangent="like"))
        for seen in observe(alike):
            plain = {f"output{path}": each for path, each in walk(seen.result) if isinstance(each, torch.Tensor)}
            viewed = {where: torch.ops.aten._unsafe_view(each, each.shape) for where, each in plain.items()}
            gradients = {where: strides for where, strides in _strides(seen).items() if where not in plain}
            found.append(gradients | {where: tuple(each.stride()) for where, each in viewed.items()})
        return found

    def verdict(self, engine: Engine) -> Verdict:
        began = time.perf_counter()
        with settings():
            compiled = observe(self.stack, engine)
            comparisons = self._compare(compiled)
        differences = [each for comparison in comparisons for each in comparison.differences]
        self.excused = {"promised strides"} if any(comparison.as_promised for comparison in comparisons) else set()
        if differences and engine is not TORCH:
            known = self._differences_of_torch()
            errors = {key: error for comparison in comparisons for key, error in comparison.errors.items()}
            new = [each for each in differences if not _is_known((each.kind, each.where), errors, known)]
            if {each.kind for each in new} == {"error"} and self._nobody_compiles(compiled[-1].error):
                new = []
            self.excused |= {each.kind for each in differences if each not in new}
            differences = new
        close = any(comparison.close for comparison in comparisons)
        status = "different" if differences else "torch" if self.excused else "close" if close else "equal"
        return Verdict(status, tuple(differences), time.perf_counter() - began)

    def _nobody_compiles(self, error: Exception | None) -> bool:
        """Whether Dynamo refuses a stack before it calls anybody; or `aot_eager` does not get it right either, and
        without `strict` we leave it to eager."""
        if isinstance(error, torch._dynamo.exc.TorchRuntimeError):
            return True
        with settings():
            torch_differs = any(each.differences for each in self._compare(observe(self.stack, TORCH)))
            return torch_differs and not any(each.differences for each in self._compare(observe(self.stack, LENIENT)))

    def _differences_of_torch(self) -> dict[tuple[str, str], float]:
        """By kind and place; of values also how large, 0.0 of all else."""
        if self._torch is None:
            with settings():
                comparisons = self._compare(observe(self.stack, TORCH))
            # Not an error where eager has none: a user whom it hits has no other way to run the stack.
            self._torch = {
                (each.kind, each.where): comparison.errors.get((each.kind, each.where), 0.0)
                for comparison in comparisons
                for each in comparison.differences
                if each.kind not in ("error", "backward error")
            }
        return self._torch

    def _compare(self, compiled: list[Observation]) -> list[StackComparison]:
        comparisons = []
        for call, found in enumerate(compiled):
            comparison = StackComparison(self, call)
            comparison.compare(found, SECOND if call else "")
            comparisons.append(comparison)
            if comparison.differences:
                break
        else:
            if len(compiled) > 1:
                comparisons[-1].kept_apart(*compiled)
        return comparisons


def _is_known(
    key: tuple[str, str], errors: Mapping[tuple[str, str], float], known: Mapping[tuple[str, str], float]
) -> bool:
    """Whether a difference is torch's own: of values, one that is not much larger."""
    return key in known and errors.get(key, 0.0) <= SLACK * known[key]


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Recurrent layers are captured, as everything else is; nothing is run in eager unseen."""
    with compiling("static"), torch._dynamo.config.patch(allow_rnn=True):
        yield


def judge(stack: Stack, engine: Engine = FERRITE) -> Verdict:
    return Judge(stack).verdict(engine)


def blamed(stack: Stack, kind: str) -> str:
    """Which other ways to compile have a difference of this kind, and which have not."""
    asked = Judge(stack)
    alike = {engine.name: asked.verdict(engine).kind == kind for engine in OTHERS}
    have = ", ".join(name for name, differs in alike.items() if differs) or "none"
    return f"also with: {have}; not with: {', '.join(name for name, differs in alike.items() if not differs) or 'none'}"
