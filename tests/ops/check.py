"""Run one case in eager and compiled, compare everything a user can see, and return a verdict.

Compared: the exception's type; the structure and types of what is returned; for every tensor its type, dtype, shape,
strides, layout, device, `requires_grad`, conjugate and negative bits and values; which outputs share memory with which
inputs and outputs, at which offset, and which *are* an input; the inputs afterwards; every input's gradient. The
compiled function is called twice, and the first result is read only after the second call, so that memory reused
between calls shows.

Note [Judging values]
Equal bits (NaN equals NaN, zeros by sign) is the first question. If the answer is no:
- Eager is run again from the same seed. If it does not repeat itself, values are not compared.
- Eager is run from another seed. If the result is not even near, the op is random, and its stream has to be eager's:
  the result is near to eager's, by the tolerance below. A reference of another dtype may have drawn other numbers, and
  counts only if no element is farther from eager's than ALIKE of the largest.
- The case is run in eager in float64 or complex128. It passes, as `close`, if no element is farther from
  that reference than SLACK times eager's worst element, plus one unit in the last place of the reference.
  Gradients have such a reference too: its backward starts from the very cotangents that eager's started from. They
  are long chains, in which either side may be the luckier one (over 30 seeds of a householder product the two errors
  stood at 0.07 to 4.1 to 1, with 0.9 as their mean), so in f32 and f64 they may be NORMWISE units of the largest
  element away.
- Or if it is within PyTorch's own tolerance of the dtype from eager. NaN and infinity must stand in the same places.
Integers and booleans are equal or wrong.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import torch
import torch._dynamo.guards
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._comparison import default_tolerances

from ferrite.failure import FerriteError
from tests.both_hosts import both_hosts
from tests.copies import WIDE, Copier, dense_parts, is_plain

from .cases import LAYOUTS, UNDEFINED_VALUES, Case, Group, Sample, function_of, op_table, seed_everything

SLACK = 2.0
NORMWISE = 16  # units in the last place of the largest element
ALIKE = 1e-3  # of the largest element: other random numbers are farther apart
MANY = 1 << 20
SECOND = "second call: "
ONLY_ZEROS = "only the sign of zeros differs"
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as in eager: its kind (what the summary counts), where, and both sides."""

    kind: str
    where: str
    detail: str


class Verdict(msgspec.Struct, frozen=True):
    """What became of a case.

    status:   equal (to the bit), close (see Note [Judging values]), different, crash, hang
    entered:  whole (graphs, no break), partly (graphs and breaks), reused (graphs of an earlier sample), none (nothing
              reached the backend), raised (eager raises, so there may be nothing to enter)
    bits:     the digest of all values that the compiled function gave, to compare two runs of it; empty if it raised,
              or if they are not defined
    """

    id: str
    status: str
    differences: tuple[Difference, ...] = ()
    entered: str = "none"
    note: str = ""
    seconds: float = 0.0
    bits: str = ""

    @property
    def passed(self) -> bool:
        return self.status in ("equal", "close")

    @property
    def kind(self) -> str:
        return self.differences[0].kind if self.differences else self.status


# Options of Ferrite: random numbers are eager's, and nothing that fails to compile passes by running as captured.
FERRITE = {"fallback_random": True, "strict": True}


class Engine(msgspec.Struct, frozen=True):
    """The backend under test, as given to torch.compile. `both_hosts`: every graph of Ferrite runs in both executions
    of its host program, which have to give the same bits."""

    backend: Any = "ferrite"
    options: dict[str, Any] | None = None
    both_hosts: bool = False


class Observation(msgspec.Struct):
    """All a user can see of one call."""

    inputs: list[torch.Tensor]
    result: Any = None
    error: BaseException | None = None
    cotangents: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] | None = None
    backward_error: BaseException | None = None


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tuples, lists and dicts, each with its path."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for place, item in enumerate(value):
            yield from walk(item, f"{path}[{place}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}[{key!r}]")
    else:
        yield path, value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The distinct tensor objects among the leaves, in order."""
    found: dict[int, torch.Tensor] = {}
    for _, leaf in walk(value):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuild(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_rebuild(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _rebuild(item, change) for key, item in value.items()}
    return change(value)


class _Detour(torch.autograd.Function):
    """A copy with the same strides that gradients pass through: an input that in-place ops may change."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return Copier()(value.detach()) if is_plain(value) else value.detach().clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def caller(function: Callable[..., Any]) -> Call:
    """The function that is compiled: all arguments arrive as inputs, so that dynamic shapes make numbers symbolic."""

    def call(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(value, *args, **kwargs)

    return call


def observe(
    call: Call, case: Case, sample: Sample, seed: int, widen: bool = False, cotangents: list[torch.Tensor] | None = None
) -> Observation:
    """One call on fresh copies of the sample's arguments, with its backward in training.

    The backward starts from random cotangents, or from these, which another observation started from.
    """
    copy = Copier(widen)
    value, args, kwargs = (_rebuild(part, copy) for part in (sample.input, sample.args, sample.kwargs))
    leaves = [tensor for tensor in tensors_of((value, args, kwargs)) if tensor.requires_grad]
    if case.form == "inplace" and isinstance(value, torch.Tensor) and value.requires_grad:
        value = _Detour.apply(value)
    seen = Observation(inputs=tensors_of((value, args, kwargs)))
    seed_everything(seed)
    try:
        seen.result = call(value, args, kwargs)
    except Exception as error:
        seen.error = error
        return seen
    if case.mode == "train":
        _differentiate(seen, leaves, sample, seed, cotangents or [])
    return seen


def _differentiate(
    seen: Observation, leaves: list[torch.Tensor], sample: Sample, seed: int, given: list[torch.Tensor]
) -> None:
    try:
        processed = tensors_of(sample.process(seen.result))
        outputs = [out for out in processed if out.requires_grad and (out.is_floating_point() or out.is_complex())]
        if not outputs or not leaves:
            return
        if [_shape(out) for out in outputs] == [_shape(cotangent) for cotangent in given]:
            seen.cotangents = [_laid_out_like(out, cotangent) for out, cotangent in zip(outputs, given, strict=True)]
        else:
            seen.cotangents = [_cotangent(out, seed + place) for place, out in enumerate(outputs)]
        seed_everything(seed)
        # AccumulateGrad copies strange strides away in .grad; asked for directly they stay visible.
        seen.gradients = list(torch.autograd.grad(outputs, leaves, seen.cotangents, allow_unused=True))
    except Exception as error:
        seen.backward_error = error


def _cotangent(out: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if out.is_nested or out.layout is not torch.strided:
        return torch.ones_like(out)
    return _laid_out_like(out, torch.randn(out.shape, dtype=WIDE.get(out.dtype, out.dtype), generator=generator))


def _laid_out_like(out: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """AOTAutograd compiles the backward for cotangents laid out like the outputs and copies others into that form."""
    if out.is_nested or out.layout is not torch.strided:
        return cotangent.to(out.dtype)
    return torch.empty_like(out.detach()).copy_(cotangent)


# ---- comparing ----------------------------------------------------------------------------------------------------


class Comparison:
    """Collects the differences between what eager and the compiled function showed for one case."""

    def __init__(self, case: Case, sample: Sample, seed: int, eager: Observation) -> None:
        self.case, self.sample, self.seed, self.eager = case, sample, seed, eager
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.close = False
        self.values_defined = op_table()[case.op].name not in UNDEFINED_VALUES
        self._runs: dict[str, Observation] = {}

    def differs(self, kind: str, where: str, eager: Any, compiled: Any) -> None:
        self.differences.append(Difference(kind, where, f"eager {_short(eager)}, compiled {_short(compiled)}"))

    def compare(self, compiled: Observation, round: str = "") -> None:
        eager = self.eager
        if eager.error is not None or compiled.error is not None:
            self._errors("error", round or "call", eager.error, compiled.error)
            return
        self._structure(eager.result, compiled.result, f"{round}output")
        for (path, left), (_, right) in zip(walk(eager.result), walk(compiled.result), strict=False):
            self._leaf(left, right, f"{round}output{path}", lambda run, path=path: dict(walk(run.result)).get(path))
        if self.values_defined:
            for place, (left, right) in enumerate(zip(eager.inputs, compiled.inputs, strict=True)):
                read = lambda run, place=place: run.inputs[place]
                self._tensor(left, right, f"{round}input {place} afterwards", read, "mutation: ")
        self._aliases(compiled, round)
        self._gradients(compiled, round)

    def _errors(self, kind: str, where: str, eager: BaseException | None, compiled: BaseException | None) -> None:
        if eager is None or compiled is None:
            self.differs(kind, where, _error_text(eager), _error_text(compiled))
        elif not same_error_type(eager, compiled):
            self.differs(f"{kind} type", where, _error_text(eager), _error_text(compiled))
        elif str(eager).split("\n")[0] not in str(compiled):
            self.notes.append(f"message differs: eager {_error_text(eager)}, compiled {_error_text(compiled)}")

    def _structure(self, eager: Any, compiled: Any, where: str) -> None:
        left, right = shape_of_nest(eager), shape_of_nest(compiled)
        if left != right:
            self.differs("structure", where, left, right)

    def _leaf(self, eager: Any, compiled: Any, where: str, read: Callable[[Observation], Any]) -> None:
        if isinstance(eager, torch.Tensor) and isinstance(compiled, torch.Tensor):
            self._tensor(eager, compiled, where, read, "")
        elif isinstance(eager, float | complex) and type(eager) is type(compiled):
            left, right = torch.tensor(eager), torch.tensor(compiled)
            if not same_bits(left, right):
                self.differs("value", where, eager, compiled)
        elif type(eager) is type(compiled) and not isinstance(eager, torch.Generator) and eager != compiled:
            self.differs("value", where, eager, compiled)

    def _tensor(
        self, eager: torch.Tensor, compiled: torch.Tensor, where: str, read: Callable[[Observation], Any], prefix: str
    ) -> None:
        for kind, ask in _METADATA:
            left, right = ask(eager), ask(compiled)
            if left != right:
                self.differs(prefix + kind, where, left, right)
                if kind in ("layout", "dtype", "shape"):
                    return
        if self.values_defined:
            with torch.no_grad():
                self._values(eager, compiled, where, read, prefix)

    def _values(
        self, eager: torch.Tensor, compiled: torch.Tensor, where: str, read: Callable[[Observation], Any], prefix: str
    ) -> None:
        parts = list(zip(dense_parts(eager), dense_parts(compiled), strict=False))
        if all(left.shape == right.shape and same_bits(left, right) for left, right in parts):
            return
        again = read(self._run("again"))
        if isinstance(again, torch.Tensor) and not _same_tensor(eager, again):
            self.notes.append(f"{where}: eager does not repeat itself")
            return
        other = read(self._run("other seed"))
        is_random = isinstance(other, torch.Tensor) and not _near_tensor(eager, other)
        reference = read(self._run("reference"))
        if is_random and not (isinstance(reference, torch.Tensor) and _has_drawn_alike(eager, reference)):
            reference = None
        wide = dense_parts(reference) if isinstance(reference, torch.Tensor) else []
        for place, (left, right) in enumerate(parts):
            complaint = judge_values(left, right, wide[place] if place < len(wide) else None, bool(prefix))
            if complaint:
                kind = "random" if is_random else "value"
                self.differences.append(Difference(f"{prefix}{kind}", where, complaint))
                return
        self.close = True

    def _run(self, which: str) -> Observation:
        """Eager once more. With gradients, though comparing needs none; from the same cotangents whatever the seed,
        or every gradient would look random."""
        if which not in self._runs:
            call = caller(function_of(self.case))
            seed = self.seed + 1 if which == "other seed" else self.seed
            with torch.enable_grad():
                self._runs[which] = observe(
                    call, self.case, self.sample, seed, which == "reference", self.eager.cotangents
                )
        return self._runs[which]

    def _aliases(self, compiled: Observation, round: str) -> None:
        left = aliases(self.eager.inputs, self.eager.result)
        right = aliases(compiled.inputs, compiled.result)
        if left != right:
            self.differs("alias", f"{round}output", left, right)

    def kept_apart(self, first: Observation, second: Observation) -> None:
        """Two calls on different inputs give results in different memory."""
        for path, old in walk(first.result):
            for _, new in walk(second.result):
                if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and share_memory(old, new):
                    self.differs("alias", f"second call: output{path}", "new memory", "the memory of the first result")
                    return

    def _gradients(self, compiled: Observation, round: str) -> None:
        eager = self.eager
        if eager.backward_error is not None or compiled.backward_error is not None:
            self._errors("backward error", f"{round}backward", eager.backward_error, compiled.backward_error)
            return
        left, right = eager.gradients, compiled.gradients
        if left is None or right is None:
            if left is not right:
                self.differs("gradient missing", f"{round}backward", left and len(left), right and len(right))
            return
        for place, (one, two) in enumerate(zip(left, right, strict=True)):
            where = f"{round}gradient {place}"
            if one is None or two is None:
                if one is not two:
                    self.differs("gradient missing", where, one, two)
                continue
            read = lambda run, place=place: run.gradients[place] if run.gradients else None
            self._tensor(one, two, where, read, "gradient ")


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    parts = list(zip(dense_parts(left), dense_parts(right), strict=False))
    return all(one.shape == two.shape and same_bits(one, two) for one, two in parts)


def _near_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    parts = list(zip(dense_parts(left), dense_parts(right), strict=False))
    return all(one.shape == two.shape and judge_values(one, two, None) == "" for one, two in parts)


def _has_drawn_alike(eager: torch.Tensor, reference: torch.Tensor) -> bool:
    parts = list(zip(dense_parts(eager), dense_parts(reference), strict=False))
    return all(
        one.shape == two.shape and bool(((one.to(two.dtype) - two).abs() <= ALIKE * two.abs().max()).all())
        for one, two in parts
        if one.numel()
    )


def same_error_type(eager: BaseException, compiled: BaseException) -> bool:
    """The same class, or an error of Dynamo's or Ferrite's own if a handler for eager's class catches it."""
    if type(eager) is type(compiled):
        return True
    return type(compiled).__module__ in ("torch._dynamo.exc", "ferrite.failure") and isinstance(compiled, type(eager))


def shape_of_nest(value: Any) -> Any:
    """Containers and leaves by type, with the values left out."""
    if isinstance(value, torch.Size):
        return "Size"
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(shape_of_nest(item) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, shape_of_nest(item)) for key, item in value.items()))
    return type(value).__name__


def _strides(tensor: torch.Tensor) -> Any:
    return tuple(tensor.stride()) if tensor.layout is torch.strided and not tensor.is_nested else None


def _shape(tensor: torch.Tensor) -> Any:
    return "nested" if tensor.is_nested else tuple(tensor.shape)


_METADATA: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = (
    ("type", type),
    ("layout", lambda tensor: tensor.layout),
    ("dtype", lambda tensor: tensor.dtype),
    ("shape", _shape),
    ("strides", _strides),
    ("device", lambda tensor: tensor.device),
    ("requires_grad", lambda tensor: tensor.requires_grad),
    ("conjugate bit", lambda tensor: tensor.is_conj() or tensor.is_neg()),
    ("coalesced", lambda tensor: tensor.layout is torch.sparse_coo and tensor.is_coalesced()),
)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal everywhere; NaN equals NaN of any payload, zero does not equal minus zero."""
    if left.is_quantized:
        return torch.equal(left, right)
    if left.is_complex():
        return same_bits(torch.view_as_real(left), torch.view_as_real(right))
    if not left.is_floating_point():
        return torch.equal(left, right)
    if left.dtype.itemsize == 1:
        left, right = left.to(torch.float32), right.to(torch.float32)
    same = ((left == right) & (torch.signbit(left) == torch.signbit(right))) | (left.isnan() & right.isnan())
    return bool(same.all())


def judge_values(
    eager: torch.Tensor, compiled: torch.Tensor, reference: torch.Tensor | None, is_gradient: bool = False
) -> str:
    """Empty if the compiled values may stand for eager's, else the complaint. See Note [Judging values]."""
    if not eager.is_floating_point() and not eager.is_complex():
        if torch.equal(eager, compiled):
            return ""
        wrong = int((eager != compiled).sum())
        return f"{wrong} of {eager.numel()} elements differ: eager {_short(eager)}, compiled {_short(compiled)}"
    if eager.is_complex():
        eager, compiled = torch.view_as_real(eager), torch.view_as_real(compiled)
        if reference is not None and reference.is_complex():
            reference = torch.view_as_real(reference.resolve_conj())
    dtype = eager.dtype
    left, right = eager.to(torch.float64), compiled.to(torch.float64)
    finite = left.isfinite()
    if not same_bits(torch.where(finite, 0.0, left), torch.where(right.isfinite(), 0.0, right)):
        return f"NaN or infinity elsewhere: eager {_short(eager)}, compiled {_short(compiled)}"
    zeros = finite & (left == 0) & (right == 0)
    if bool(((left.signbit() != right.signbit()) & zeros).any()) and bool((zeros | (left == right) | ~finite).all()):
        return ONLY_ZEROS
    error = torch.where(finite, (left - right).abs(), 0.0)
    relative, absolute = default_tolerances(dtype)
    if bool((error <= absolute + relative * torch.where(finite, left.abs(), 0.0)).all()):
        return ""
    if reference is not None and reference.shape == left.shape and bool(reference.isfinite()[finite].all()):
        exact = torch.where(finite, reference.to(torch.float64), 0.0)
        eager_error = (torch.where(finite, left, 0.0) - exact).abs().max()
        ulp = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
        if is_gradient and dtype.itemsize > 2 and exact.numel():
            ulp = ulp.clamp(min=NORMWISE * torch.finfo(dtype).eps * exact.abs().max().item())
        if bool(((torch.where(finite, right, 0.0) - exact).abs() <= SLACK * eager_error + ulp).all()):
            return ""
    return f"largest error {error.max().item():.3g}: eager {_short(eager)}, compiled {_short(compiled)}"


def aliases(inputs: list[torch.Tensor], result: Any) -> list[str]:
    """For every output tensor: which input or earlier output it is, or shares memory with and at which offset."""
    known = [(f"input {place}", tensor) for place, tensor in enumerate(inputs)]
    found = []
    for path, leaf in walk(result):
        if not isinstance(leaf, torch.Tensor):
            continue
        relation = "new"
        for label, tensor in known:
            if tensor is leaf:
                relation = f"is {label}"
                break
            if relation == "new" and share_memory(tensor, leaf):
                relation = f"shares {label} at {leaf.storage_offset() - tensor.storage_offset():+d}"
        found.append(f"output{path} {relation}")
        known.append((f"output{path}", leaf))
    return found


def share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors stand on one storage. Empty storages have no address, only an identity."""
    if not (is_plain(left) and is_plain(right)):
        return False
    one, two = left.untyped_storage(), right.untyped_storage()
    return one._cdata == two._cdata or (one.data_ptr() == two.data_ptr() != 0)


def _short(value: Any) -> str:
    text = repr(value.detach().cpu() if isinstance(value, torch.Tensor) and not value.is_nested else value)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:300] + "…"


def _error_text(error: BaseException | None) -> str:
    return "raises nothing" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class InOtherLayouts(Comparison):
    """Results and gradients may have the strides that aot_eager gives them, too: what is split or derived while it is
    traced comes out otherwise than eager's here and there. For samples in their own layouts such cases are few, and
    known_failures.json names them; tests/strides looks at the strides of each op."""

    def differs(self, kind: str, where: str, eager: Any, compiled: Any) -> None:
        if kind.endswith("strides") and self._traced.get(where.removeprefix(SECOND)) == compiled:
            self.notes.append(f"{where}: strides are those of aot_eager")
        else:
            super().differs(kind, where, eager, compiled)

    @functools.cached_property
    def _traced(self) -> dict[str, Any]:
        seen = observe(compile_call(self.case, Engine("aot_eager")), self.case, self.sample, self.seed)
        made = [(f"output{path}", leaf) for path, leaf in walk(seen.result)]
        made += [(f"gradient {place}", gradient) for place, gradient in enumerate(seen.gradients or ())]
        return {where: _strides(value) for where, value in made if isinstance(value, torch.Tensor)}


# ---- running ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiling(shapes: str) -> Iterator[None]:
    """Dynamo set up so that nothing runs in eager unseen: no limits on recompiling, no suppressed errors.

    With dynamic shapes, sizes and numbers that depend on data are captured as well, so that the backend meets them.
    """
    limits: dict[str, Any] = {"recompile_limit": MANY, "accumulated_recompile_limit": MANY}
    if shapes == "dynamic":
        limits |= {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with (
        torch._dynamo.config.patch(suppress_errors=False, fail_on_recompile_limit_hit=True, **limits),
        # Dynamo times its guards after a flush of all caches, only to log it: 27 of the 150 ms a case takes.
        mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def compile_call(case: Case, engine: Engine) -> Call:
    """A freshly compiled function for a case; nothing compiled or traced before is kept: order cannot matter."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    options = {"options": engine.options} if engine.options else {}
    call = caller(function_of(case))
    return torch.compile(call, backend=engine.backend, dynamic=case.shapes == "dynamic", **options)


def _graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


class Shared(msgspec.Struct):
    """A compiled function that several samples go through, whether any of them left a graph in it, and how the two
    executions of its host programs differed since somebody looked."""

    call: Call
    has_graphs: bool = False
    hosts: list[str] = msgspec.field(default_factory=list)


def run_case(case: Case, sample: Sample, engine: Engine, seed: int = 0, shared: Shared | None = None) -> Verdict:
    """Compare one case, through a function of its own or one that other samples already went through."""
    shared = shared or Shared(compile_call(case, engine))
    with compiling(case.shapes), both_hosts(shared.hosts) if engine.both_hosts else contextlib.nullcontext():
        return _run_case(case, sample, engine, seed, shared)


def _run_case(case: Case, sample: Sample, engine: Engine, seed: int, shared: Shared) -> Verdict:
    began = time.perf_counter()
    kind = InOtherLayouts if sample.label[0].lower() in LAYOUTS else Comparison
    comparison = kind(case, sample, seed, observe(caller(function_of(case)), case, sample, seed))
    graphs, breaks = _graphs()
    first = observe(shared.call, case, sample, seed)
    if _is_refused_by_torch(first.error, case, sample, seed):
        comparison.notes.append("torch does not capture it")
        shared = Shared(compile_call(case, Engine(engine.backend, {**(engine.options or {}), "strict": False})))
        first = observe(shared.call, case, sample, seed)
    new_graphs, new_breaks = (after - before for after, before in zip(_graphs(), (graphs, breaks), strict=True))
    second = observe(shared.call, case, sample, seed) if first.error is None else None
    comparison.compare(first)
    if second is not None and not comparison.differences:
        comparison.compare(second, SECOND)
        comparison.kept_apart(first, second)
    hosts, shared.hosts[:] = [Difference("hosts", "", text) for text in shared.hosts], []
    if comparison.values_defined and not any("repeat itself" in note for note in comparison.notes):
        comparison.differences += hosts
    status = "different" if comparison.differences else "close" if comparison.close else "equal"
    entered = _entered(comparison.eager, new_graphs, new_breaks, shared.has_graphs)
    shared.has_graphs |= new_graphs > 0
    seconds = time.perf_counter() - began
    note = "; ".join(dict.fromkeys(comparison.notes))
    bits = _bits(first) if comparison.values_defined and first.error is None else ""
    return Verdict(case.id, status, tuple(comparison.differences), entered, note, round(seconds, 4), bits)


def _is_refused_by_torch(error: BaseException | None, case: Case, sample: Sample, seed: int) -> bool:
    """Whether the capture fails before a backend sees a graph: any other backend's does so too, with the same words.
    Ferrite leaves such a function to eager, unless it is told to be strict."""
    if not isinstance(error, FerriteError):
        return False
    theirs = observe(compile_call(case, Engine("aot_eager")), case, sample, seed).error
    if not isinstance(theirs, BackendCompilerFailed):
        return False
    ours, other = error.inner_exception, theirs.inner_exception
    return type(ours) is type(other) and str(ours) == str(other)


def _bits(seen: Observation) -> str:
    whole = hashlib.sha256()
    for _, leaf in walk([seen.result, seen.inputs, seen.gradients]):
        for part in dense_parts(leaf) if isinstance(leaf, torch.Tensor) else ():
            plain = part.int_repr() if part.is_quantized else part
            whole.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            # One element with any stride is contiguous, and is not a view of bytes: only a copy has a stride of one.
            flat = plain.reshape(-1).clone(memory_format=torch.contiguous_format)
            whole.update(flat.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _entered(eager: Observation, graphs: int, breaks: int, reusable: bool) -> str:
    if eager.error is not None:
        return "raised"
    if graphs:
        return "partly" if breaks else "whole"
    return "reused" if reusable and not breaks else "none"


def run_group(
    group: Group,
    engine: Engine,
    seed: int = 0,
    skip: frozenset[str] = frozenset(),
    starting: Callable[[Case], object] = id,
) -> Iterator[Verdict]:
    """Every case of a group. Dynamic samples go through one compiled function; what fails there is run alone, too.

    A case that passes alone but not after the others is a failure of its own kind, `reuse`.
    """
    shared: Shared | None = None
    before: list[str] = []
    for case, sample in group.members:
        if case.id in skip:
            continue
        starting(case)
        if case.shapes == "static":
            yield run_case(case, sample, engine, seed)
            continue
        if shared is None:
            shared = Shared(compile_call(case, engine))
        verdict = run_case(case, sample, engine, seed, shared)
        if not verdict.passed and before:
            alone = run_case(case, sample, engine, seed)
            shared = None
            verdict = alone if not alone.passed else _failed_after(verdict, before)
            before = []
        else:
            before.append(case.id)
        yield verdict


def _failed_after(verdict: Verdict, before: list[str]) -> Verdict:
    changed = [Difference("reuse", one.where, f"{one.kind}: {one.detail}") for one in verdict.differences]
    note = "passes alone; compiled function had seen " + " ".join(before)
    return msgspec.structs.replace(verdict, differences=tuple(changed), note=note)
