"""Planted faults: a check that is dropped, an operand swapped, an option forgotten. Each is seen as a difference from
eager on a small program, and `ferrite.bisect` names the pass and the number of the rewrite that has it.

Most programs hold the pattern twice: the first rewrite does no harm in spite of the fault, the second does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch.nn import functional

import ferrite
from ferrite import pipeline
from ferrite.extension import register_pattern
from ferrite.graph.build import Builder
from ferrite.graph.pre_grad import PASSES
from ferrite.graph.soundness import Soundness
from ferrite.options import Options, resolve
from ferrite.report.record import GraphRecord
from tests.pre_grad.harness import capture, run_passes, trace

A, B, C, D = (torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
EYE = torch.eye(3)
BIAS = torch.tensor([1.0, 2.0, 3.0])
CUBES = (torch.arange(16.0).reshape(2, 2, 4), torch.arange(64.0).reshape(2, 2, 4, 4), torch.ones(4))

Real = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """`where` and `name`: what is replaced by `wrong(the real one)`. `rewrite`: the number of the one to blame.
    `pattern`: search and replacement of a user, in whose pass the fault shows."""

    title: str
    culprit: str
    where: str | type
    name: str
    wrong: Callable[[Any], Any]
    program: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    rewrite: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    pattern: tuple[Real, Real] | None = None


def pass_file(name: str) -> str:
    return f"ferrite.graph.pre_grad.{name}"


# ---- faults


def never(real: Real) -> Real:
    """A question that is not asked."""
    return lambda *args, **kwargs: None


def turned(real: Real) -> Real:
    """A cat whose operands are read from the end."""

    def read(node: Any) -> Any:
        join = real(node)
        return None if join is None else replace(join, parts=join.parts[::-1])

    return read


def along_the_first(real: Real) -> Real:
    def read(node: Any) -> Any:
        join = real(node)
        return None if join is None else replace(join, dim=0)

    return read


def one_earlier(real: Real) -> Real:
    """Runs of items that begin one item too early, if there is one."""

    def shifted(run: Any) -> Any:
        early = hasattr(run, "start") and run.start > 0
        return replace(run, start=run.start - 1, stop=run.stop - 1) if early else run

    return lambda *args: [shifted(run) for run in real(*args)]


def backwards(real: Real) -> Real:
    """The items of a split, under the wrong indices."""

    def read(node: Any) -> Any:
        found = real(node)
        return None if found is None else dict(zip(found, reversed(found.values()), strict=True))

    return read


def the_first_slice(real: Real) -> Real:
    return lambda new, run: real(new, replace(run, start=0, stop=run.count))


def without_bias(real: Real) -> Real:
    return lambda new, left, right, bias: real(new, left, right, None)


def not_transposed(real: Real) -> Real:
    return lambda new, source: source


def rule(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A rule for many ops, with other `fuse` or `read`."""
    return lambda real: replace(real, **{name: change(getattr(real, name)) for name, change in changes.items()})


def of_members(change: Callable[[Any], Any]) -> Callable[[Real], Real]:
    return lambda real: lambda new, members: real(new, [change(member) for member in members])


def results_turned(real: Real) -> Real:
    return lambda new, members: list(real(new, members))[::-1]


def key_without_options(real: Real) -> Real:
    """Members with other options are taken for alike."""

    def read(sound: Any, node: Any) -> Any:
        member = real(sound, node)
        return replace(member, key=member.key[:2]) if hasattr(member, "key") else member

    return read


def without(*options: str) -> Callable[[Any], Any]:
    return lambda member: replace(member, options={k: v for k, v in member.options.items() if k not in options})


def built(target: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[Real], Real]:
    """New calls of `target` get other arguments."""
    return lambda real: (
        lambda self, called, *args, **kwargs: real(
            self, called, *(change(args) if called == target else args), **kwargs
        )
    )


def lost(**arguments: Any) -> Callable[[Real], Real]:
    """Calls are read as if they said this, where they have such an argument."""

    def of(real: Real) -> Real:
        def read(node: Any, *kinds: str) -> Any:
            call = real(node, *kinds)
            if call is None:
                return None
            return replace(call, arguments={name: arguments.get(name, value) for name, value in call.arguments.items()})

        return read

    return of


def without_gain(real: Real) -> Real:
    """A batch norm that is read without what it multiplies by."""

    def read(node: Any) -> Any:
        norm = real(node)
        return None if norm is None else replace(norm, weight=None)

    return read


def blind_to_items(real: Real) -> Real:
    """`x[0] = 1` is not seen as a write."""
    return lambda node: () if node.target is operator.setitem else real(node)


# ---- programs


def two_cats(a: Any, b: Any) -> Any:
    return torch.cat([torch.cat([a, a], 1), a], 1).sin(), torch.cat([torch.cat([a, b], 1), b], 1).sin()


def cats_around_a_write(a: Any, b: Any) -> Any:
    a, b = a + 1, b + 1
    first = torch.cat([torch.cat([a, b], 1), b], 1).sin()
    inner = torch.cat([a, b], 1)
    a.mul_(2)
    return first, torch.cat([inner, b], 1).sin()


def cats_around_an_item(a: Any, b: Any) -> Any:
    a, b = a + 1, b + 1
    first = torch.cat([torch.cat([a, b], 1), b], 1).sin()
    inner = torch.cat([a, b], 1)
    a[0] = 5.0
    return first, torch.cat([inner, b], 1).sin()


def cats_around_no_grad(a: Any, b: Any) -> Any:
    first = torch.cat([torch.cat([a, b], 1), b], 1).sin()
    with torch.no_grad():
        inner = torch.cat([a, b], 1)
    return first, torch.cat([inner, b], 1).sin()


def stack_that_is_written(a: Any, b: Any) -> Any:
    a, b = a + 1, b + 1
    first = torch.stack(torch.unbind(b)).sin()
    second = torch.stack(torch.unbind(a))
    second.mul_(2)
    return first, second.sin(), a.sin()


def cats_of_sections(a: Any) -> Any:
    p, q, r = a.split(1, 1)
    s, t, u = a.sin().split(1, 1)
    return torch.cat([p, q], 1).sin(), torch.cat([t, u], 1).sin(), r.sin(), s.sin()


def one_section_each(a: Any, b: Any) -> Any:
    return a.split(1, 1)[0].sin(), b.split(1, 1)[1].sin()


def nested_splits(a: Any, b: Any) -> Any:
    p, q = torch.cat([a, a[:1]]).split(2)
    p0, p1 = p.split(1)
    q0, q1 = q.split(1)
    return p0.sin(), p1.cos(), q0.tan(), q1.exp()


def two_norms(x: Any, w: Any, mean: Any, var: Any, gain: Any) -> Any:
    plain = functional.batch_norm(functional.conv1d(x, w), mean, var)
    return plain.sin(), functional.batch_norm(functional.conv1d(x, w), mean, var, gain).sin()


QUANTISE = torch.ops.quantized_decomposed.quantize_per_tensor.default


def two_quantised(a: Any, b: Any) -> Any:
    first = QUANTISE((a + 1).view(9), 0.1, 0, -128, 127, torch.int8)
    return first, QUANTISE((b + 1).view(9), 0.1, 3, -128, 127, torch.int8)


FAULTS = (
    Fault("operands of a cat swapped", "merge_cats", pass_file("merge_cats"), "read_join", turned, two_cats, (A, B)),
    Fault("a write is overlooked", "merge_cats", Soundness, "written_between", never, cats_around_a_write, (A, B)),
    Fault(
        "a write by index is overlooked",
        "merge_cats",
        "ferrite.graph.soundness",
        "written_by",
        blind_to_items,
        cats_around_an_item,
        (A, B),
    ),
    Fault(
        "the grad mode is forgotten",
        "merge_cats",
        Soundness,
        "one_mode",
        never,
        cats_around_no_grad,
        (A.clone().requires_grad_(), B),
    ),
    Fault(
        "a view for a copy that is written",
        "drop_unbind_joins",
        Soundness,
        "written_after",
        never,
        stack_that_is_written,
        (A, B),
    ),
    Fault(
        "operands of the cat below an op swapped",
        "sink_cat",
        pass_file("sink_cat"),
        "read_join",
        turned,
        lambda a, b: (torch.tanh(torch.cat([a, a])), torch.tanh(torch.cat([a, b]))),
        (A, B),
    ),
    Fault(
        "a lost bias",
        "transpose_linear_output",
        pass_file("transpose_linear_output"),
        "product",
        without_bias,
        lambda a, w, b: (functional.linear(a, w).mT.sum(0), functional.linear(a, w, b).mT.sum(0)),
        (A, B, BIAS),
    ),
    Fault(
        "a lost transpose of a weight",
        "transpose_linear_input",
        pass_file("transpose_linear_input"),
        "transpose",
        not_transposed,
        lambda e, a, w: (functional.linear(e.mT, e).sin(), functional.linear(a.mT, w).sin()),
        (EYE, A, B),
    ),
    Fault(
        "operands of a product swapped",
        "transpose_matmul",
        Builder,
        "__call__",
        built(torch.matmul, lambda args: args[::-1]),
        lambda e, a, b: (torch.mm(e.t(), a).sin(), torch.mm(a.t(), b).sin()),
        (EYE, A, B),
    ),
    Fault(
        "a wrong dimension",
        "drop_unbind_joins",
        pass_file("drop_unbind_joins"),
        "read_join",
        along_the_first,
        lambda a, b: (torch.stack(torch.unbind(a)).sin(), torch.stack(torch.unbind(b), 1).sin()),
        (A, B),
    ),
    Fault(
        "a slice that begins too early",
        "cat_of_items_to_slice",
        pass_file("cat_of_items_to_slice"),
        "read_runs",
        one_earlier,
        cats_of_sections,
        (A,),
    ),
    Fault(
        "always the first section",
        "remove_splits",
        pass_file("remove_splits"),
        "slice_of",
        the_first_slice,
        one_section_each,
        (A, B),
    ),
    Fault(
        "sections of sections in the wrong order",
        "merge_nested_splits",
        pass_file("merge_nested_splits"),
        "items",
        backwards,
        nested_splits,
        (A, B),
        rewrite=1,
    ),
    Fault(
        "items of an unbind in the wrong order",
        "split_squeeze_to_unbind",
        pass_file("split_squeeze_to_unbind"),
        "items",
        backwards,
        lambda a, b: [
            t.squeeze(0).sin() * (n + 1) for source in (a, b) for n, t in enumerate(torch.split(source, 1, 0))
        ],
        (torch.ones(3, 3), A),
    ),
    Fault(
        "a lost bound",
        "batch_clamp",
        pass_file("batch_clamp"),
        "CLAMP",
        rule(fuse=of_members(without("max"))),
        lambda a, b: (
            torch.stack([a.clamp(-1, 99), b.clamp(-1, 99)]).sum(),
            torch.stack([a.clamp(-1, 0), b.clamp(-1, 0)]).sum(),
        ),
        (A, B),
        settings={"least": 2},
    ),
    Fault(
        "bounds that are not alike",
        "batch_clamp",
        pass_file("batch_clamp"),
        "CLAMP",
        rule(read=key_without_options),
        lambda a, b: torch.stack([a.clamp(-1, 1), b.clamp(-1, 0)]).sum(),
        (A, B),
        rewrite=1,
        settings={"least": 2},
    ),
    Fault(
        "lost biases",
        "batch_linear",
        pass_file("batch_linear"),
        "LINEAR",
        rule(fuse=of_members(lambda member: replace(member, operands=member.operands[:2]))),
        lambda a, b, w, v: (
            torch.stack([functional.linear(a, w), functional.linear(b, w)]).sum(),
            torch.stack([functional.linear(a, w, v), functional.linear(b, w, v)]).sum(),
        ),
        (A, B, C, BIAS),
        settings={"least": 2},
    ),
    Fault(
        "queries for keys",
        "batch_linear_lhs",
        pass_file("batch_linear_lhs"),
        "PARALLEL",
        rule(fuse=results_turned),
        lambda a, b, w, v: (
            functional.linear(a, w) - 2 * functional.linear(a, w),
            functional.linear(b, w) - 2 * functional.linear(b, v),
        ),
        (A, B, C, D),
    ),
    Fault(
        "an ignored eps",
        "batch_layernorm",
        pass_file("batch_layernorm"),
        "LAYER_NORM",
        rule(fuse=of_members(lambda member: replace(member, options={**member.options, "eps": 1e-5}))),
        lambda a, b: (
            torch.stack([functional.layer_norm(a, (3,)), functional.layer_norm(b, (3,))]).sin(),
            torch.stack([functional.layer_norm(a, (3,), eps=0.5), functional.layer_norm(b, (3,), eps=0.5)]).sin(),
        ),
        (A, B),
        settings={"least": 2},
    ),
    Fault(
        "a sum over the wrong dimension",
        "einsum_to_pointwise",
        Builder,
        "__call__",
        built("sum", lambda args: (args[0], -1)),
        lambda x, w, c: (torch.einsum("bni,bnio->bno", x, w) + c).sum(0),
        CUBES,
        rewrite=1,
    ),
    Fault(
        "an ignored alpha",
        "add_of_mm",
        "ferrite.graph.pattern.match",
        "bind",
        lost(alpha=1),
        # The last in the graph is the first to be replaced.
        lambda a, b, c: (torch.add(torch.mm(a, b), c, alpha=3).sin(), (torch.mm(b, a) + c).sin()),
        (A, B, C),
        pattern=(lambda a, b, c: torch.mm(a, b) + c, lambda a, b, c: torch.addmm(c, a, b)),
    ),
    Fault(
        "a scale without the gain",
        "scale_conv_by_bn",
        pass_file("scale_conv_by_bn"),
        "read_norm",
        without_gain,
        two_norms,
        (A.reshape(1, 3, 3), B.reshape(3, 3, 1), C[0], D[0].abs() + 1, BIAS),
    ),
    Fault(
        "a lost zero point",
        "lift_quantise",
        Builder,
        "__call__",
        built(QUANTISE, lambda args: (*args[:2], 0, *args[3:])),
        two_quantised,
        (A, B),
    ),
)


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.title.replace(" ", "_"))
def fault(request: pytest.FixtureRequest) -> Fault:
    return request.param  # type: ignore[no-any-return]


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = import_module(fault.where) if isinstance(fault.where, str) else fault.where
    monkeypatch.setattr(owner, fault.name, fault.wrong(getattr(owner, fault.name)))


@contextmanager
def culprit_of(fault: Fault) -> Iterator[Real]:
    """The pass that has the fault; a pattern's is only there inside."""
    if fault.pattern is None:
        yield partial(getattr(import_module(pass_file(fault.culprit)), fault.culprit), **fault.settings)
        return
    with register_pattern(*fault.pattern, fault.inputs, stage="pre_grad", name=fault.culprit) as entry:
        yield entry.function


def test_enough_are_planted() -> None:
    assert len(FAULTS) >= 15
    assert len({fault.title for fault in FAULTS}) == len(FAULTS)


def test_without_the_fault_all_is_well_and_with_it_eager_differs(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what every test of a pass compares."""
    captured = capture(fault.program, fault.inputs)
    with culprit_of(fault) as run:

        def apply(graph: Any) -> int:
            return run(graph)  # type: ignore[no-any-return]

        run_passes(captured, apply)
        plant(fault, monkeypatch)
        with pytest.raises(AssertionError):
            run_passes(captured, apply)


def test_bisection_names_pass_and_rewrite(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    others = [entry.name for entry in PASSES if entry.group == "patterns" and entry.name != fault.culprit]
    options = {
        "pre_grad": {} if fault.pattern else {fault.culprit: dict(fault.settings)},
        "disable": tuple(others),  # some of which would be there first
        "executor": "eager",
        "strict": True,
    }
    with culprit_of(fault):
        verdict = ferrite.bisect(fault.program, fault.inputs, options=options)
    assert not verdict.equal
    assert verdict.culprit is not None, str(verdict)
    assert (verdict.culprit.name, verdict.rewrite) == (fault.culprit, fault.rewrite), str(verdict)


def test_a_wrong_scale_of_folded_constants_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of Dynamo's hold no constants, so that bisection never meets a fold; the numeric check does."""
    layers = [nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)]
    nn.init.constant_(layers[3].weight, 2.0)  # the first norm multiplies by one
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 2, 2, 2)
    asked = {"pre_grad": {"fold_conv_bn": {}}, "numeric_check": {"pre_grad": {}}}

    def said() -> list[tuple[tuple[str, ...], bool, str]]:
        with torch.no_grad():
            captured, record = trace(model, [x]), GraphRecord("test", "pre_grad")
            pipeline.edit_pre_grad(captured.module, resolve(Options(), None, asked), record, [x])
        assert [run.changed for run in record.passes if run.name == "fold_conv_bn"] == [2]
        return [(one.subjects, one.taken, one.reason) for one in record.decisions if one.what == "numeric_check"]

    assert said() == [(("pre_grad",), True, "equal within 0.0001 over 2 steps")]
    file = import_module(pass_file("fold_conv_bn"))
    real = file._scaled
    monkeypatch.setattr(file, "_scaled", lambda *tensors, eps: real(*tensors[:4], None, tensors[5], eps=eps))
    ((name, equal, reason),) = said()
    assert (name, equal) == (("fold_conv_bn",), False)
    assert "with its rewrite 2 of 2" in reason
