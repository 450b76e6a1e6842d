"""Random programs against eager and random loop programs against the oracle; and that the fuzzer can fail at all.

`python -m tests.fuzz` runs many more. Here a fixed seed and a number of programs that fits into a test run.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional

from ferrite.artifact import host_calls
from ferrite.loops.text import parse_program
from ferrite.lower import table as lowerings
from ferrite.lower.rows import row_of
from tests.fuzz import assumed, loops, pre_grad
from tests.fuzz.engines import ENGINES, NATIVE, Engine
from tests.fuzz.generate import generate
from tests.fuzz.judge import NOISY_RUNS, Eager, Judge, Verdict, blamed, in_range, is_within_noise, judge
from tests.fuzz.programs import (
    ENVIRONMENT,
    LAYOUTS,
    Input,
    Program,
    Rejected,
    Step,
    Trace,
    layout_of,
    make_inputs,
    reproducer,
    source,
    traced,
)
from tests.fuzz.run import ENOUGH, LOOP_BATCH, Outcome, Plan, idle_passes, run_loops, run_pre_grad
from tests.fuzz.shrink import shrink
from tests.fuzz.table import UNARY

SEED = 2026


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    """Random programs divide by zero, and use what torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- the programs of a test run

TORCH_PROGRAMS, PRE_GRAD_PROGRAMS, LOOP_PROGRAMS, ASSUMED_PROGRAMS = 64, 200, 240, 16


@pytest.mark.parametrize("part", range(8))
def test_programs_through_torch_compile(part: int) -> None:
    """Every part by another engine."""
    engine = [*ENGINES.values()][part % len(ENGINES)]
    for number in range(part * TORCH_PROGRAMS // 8, (part + 1) * TORCH_PROGRAMS // 8):
        program = generate(SEED, number)
        verdict = judge(program, engine)
        assert verdict.status != "different", f"{verdict.text}\n{reproducer(program, engine.options, engine.threads)}"


@pytest.mark.parametrize("part", range(4))
def test_programs_that_assume_something_of_their_data(part: int) -> None:
    for number in range(part * ASSUMED_PROGRAMS // 4, (part + 1) * ASSUMED_PROGRAMS // 4):
        made = assumed.generate(SEED, number)
        assert assumed.difference(made) == "", made.script()


def test_a_call_that_goes_on_after_a_broken_assumption_is_a_difference() -> None:
    """The judge sees code that does not look: asserts and checks of what eager gives are taken out of the compiler."""
    made = assumed.Assumed(
        ("v = torch.masked_select(x, x > 0)", "return v.view(2, 2) + 1, lies(x, how) * 2,"),
        (((1.0, 2.0, 3.0, 4.0, -1.0), 0), ((1.0, 2.0, 3.0, -4.0, -1.0), 0), ((1.0, 2.0, 3.0, 4.0, -1.0), 5)),
        dynamic=False, training=False, way="python",
    )  # fmt: skip
    assert assumed.difference(made) == ""
    with (
        mock.patch.dict(assumed.WAYS, python={"host": "python", "runtime_asserts": False}),
        mock.patch.object(host_calls, "_differs", return_value=""),
    ):
        assert assumed.difference(made).startswith("call 1 gives [[[2.0, 3.0], [4.0, ")


@pytest.mark.parametrize("part", range(8))
def test_loop_programs(part: int) -> None:
    batch = loops.run_batch(SEED, part, LOOP_PROGRAMS // 8, shrink=0)
    assert not batch.reports, batch.reports[0]


# Programs that differ today, and why. Whoever mends it takes the number out: one that no longer differs fails.
KNOWN: dict[int, str] = {}
ENGINES_BEFORE_AUTOGRAD = ("all", "backwards", "held", "default", "all", "backwards", "dynamo", "default")


@pytest.mark.parametrize("part", range(8))
def test_programs_through_the_passes_before_autograd(part: int) -> None:
    """Every part by another engine."""
    engine = pre_grad.ENGINES[ENGINES_BEFORE_AUTOGRAD[part]]
    found = {}
    for number in range(part * PRE_GRAD_PROGRAMS // 8, (part + 1) * PRE_GRAD_PROGRAMS // 8):
        program = pre_grad.generate(SEED, number)
        verdict = pre_grad.judge(program, engine)
        if verdict.status == "different":
            script = reproducer(program, engine.options, backend=engine.backend)
            found[number] = f"program {number} of seed {SEED}, {engine.name}: {verdict.text}\n{script}"
    known = {number for number in KNOWN if number * 8 // PRE_GRAD_PROGRAMS == part}
    assert found.keys() == known, "\n".join(text for number, text in found.items() if number not in known)


RARE = (
    "remove_identity",
    "fold_conv_bn",
    "batch_detach",
    "batch_dropout",
    "einsum_to_pointwise",
    "chunk_reshape_cat",
    "chunk_reshape_unsqueeze_cat",
)


def test_programs_that_are_aimed_at_passes_hit_them() -> None:
    """By themselves the others hardly ever do: constants of the graph, and modules that it calls, do not come from
    Dynamo."""
    pre_grad.REWRITES.clear()
    for number in range(pre_grad.EVERY_AIMED - 1, 16 * pre_grad.EVERY_AIMED, pre_grad.EVERY_AIMED):
        program = pre_grad.generate(SEED, number)
        verdicts = pre_grad.judge_all(program, [pre_grad.ENGINES[name] for name in ("all", "held")])
        found = {name: verdict.text for name, verdict in verdicts.items() if verdict.status == "different"}
        assert not found, f"{found}\n{source(program)}"
    assert [name for name in RARE if not pre_grad.REWRITES[name]] == []


def test_a_pass_that_never_fires_is_named() -> None:
    every = Counter({entry.name: 3 for entry in pre_grad.PASSES})
    plan = Plan("pre_grad", 0, tuple(pre_grad.ENGINES), 0.0)
    many = Counter({"tasks": ENOUGH})
    assert idle_passes(plan, Outcome(many, (), every)) == []
    assert idle_passes(plan, Outcome(many, (), every - Counter({"merge_cats": 3}))) == ["merge_cats"]
    assert idle_passes(replace(plan, engines=("default",)), Outcome(many)) == []
    assert idle_passes(plan, Outcome(Counter({"tasks": ENOUGH - 1}))) == []


def test_a_pass_over_kernels_that_never_fires_is_named() -> None:
    every = Counter(dict.fromkeys(loops.COUNTED, 3))
    plan = Plan("loops", 0, (), 0.0)
    many = Counter({"tasks": -(-ENOUGH // LOOP_BATCH)})
    assert idle_passes(plan, Outcome(many, (), every)) == []
    assert idle_passes(plan, Outcome(many, (), every - Counter({"sums_across": 3}))) == ["sums_across"]
    assert idle_passes(plan, Outcome(many - Counter({"tasks": 1}))) == []


def test_loop_programs_are_for_every_pass_and_every_path() -> None:
    """With limits that are small; what a program computes is of no interest here."""
    loops.TAKEN.clear()
    for number in range(300):
        way = loops.Way(loops.TARGETS[0], number % loops.SETTINGS, True)
        for form, _ in loops.subject_of(loops.choices_of(SEED, number)).forms((way, way)):
            loops.emitted([form], way)
    assert [name for name in loops.COUNTED if not loops.TAKEN[name]] == []


def test_a_worker_tells_what_the_passes_rewrote() -> None:
    number = pre_grad.EVERY_AIMED - 1
    assert run_pre_grad(Plan("pre_grad", SEED, ("all",), 0.0), number).rewrites["normalise_ops"]
    assert not run_pre_grad(Plan("pre_grad", SEED, ("default",), 0.0), number).rewrites["normalise_ops"]
    assert run_loops(Plan("loops", SEED, (), 0.0), 1).rewrites["split_reductions"]


def test_held_parameters_are_those_that_layers_read() -> None:
    """Not what a layer is applied to, nor what is written, returned, or asks for a gradient."""
    names = ("x0", "w0", "w1", "w2", "w3")
    inputs = [Input(name, "float32", (4, 4), seed=place) for place, name in enumerate(names)]
    inputs[4] = replace(inputs[4], wants_gradient=True)
    steps = [
        Step("functional.linear({0}, {1})", (("x0", "v0", "v1", "v2")[place], f"w{place}"), (f"v{place}",), "inexact")
        for place in range(4)
    ]
    program = Program(tuple(inputs), (*steps, Step("{0}.add_(1)", ("w1",))), ("v3", "w2"))
    seen: list[GraphModule] = []

    def keep(module: GraphModule, given: Any, options: Any) -> Callable[..., Any]:
        seen.append(module)
        return pre_grad.held(module, given, options)

    engine = replace(pre_grad.ENGINES["held"], backend=keep, options={"disable": ("remove_identity",)})
    assert pre_grad.judge(program, engine).status == "equal"
    (module,) = seen
    assert [node.target for node in module.graph.find_nodes(op="placeholder")] == ["x0", "w1", "w2", "w3"]
    assert [node.target for node in module.graph.find_nodes(op="get_attr")] == ["held_w0"]
    assert len(module.graph.find_nodes(op="call_module", target="skip")) == 4


def test_the_sign_of_a_zero_gradient_is_autograds() -> None:
    """Of 0.0 and -0.0 padded with zeros and added, only the first is left; the rewritten program adds elsewhere."""
    halves = Input("x0", "bfloat16", (3, 4, 4), values="whole", seed=1, wants_gradient=True)
    apart = Step("torch.unbind({0}.chunk(2, 2)[1], dim=-3)", ("x0",), ("v0", "v1", "v2"), "exact")
    tanhs = [Step("torch.tanh({0})", (f"v{place}",), (f"v{place + 2}",), "inexact") for place in (1, 2)]
    program = Program((halves,), (apart, *tanhs), ("v1", "v3", "v4"))
    assert pre_grad.judge(program, pre_grad.ENGINES["all"]).status in ("equal", "close")


# ---- programs as data


def one_input(*steps: Step, outputs: tuple[str, ...] = ("v0",), **changes: Any) -> Program:
    given = Input("x0", "float32", (3, 5))
    return Program((replace(given, **changes),), steps, outputs)


def test_a_seed_gives_the_same_programs_again() -> None:
    assert [generate(3, number) for number in range(5)] == [generate(3, number) for number in range(5)]
    assert len({source(generate(3, number)) for number in range(5)}) == 5


def test_generated_programs_run_in_eager() -> None:
    made = [generate(5, number) for number in range(40)]
    assert all(traced(program) for program in made)
    statements = [step for program in made for step in program.steps if not step.results]
    assert statements
    assert any(program.is_training for program in made)
    assert any(program.resized for program in made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_stay_inside_their_storage(layout: str) -> None:
    for sizes in ((), (1,), (0, 3), (4, 5), (2, 3, 4)):
        made = make_inputs([Input("x0", "float32", sizes, layout)])["x0"]
        assert made.shape == sizes
        if layout in ("transposed", "gaps", "stepped", "expanded") and sizes == (4, 5):
            assert not made.is_contiguous()
        assert made.untyped_storage().nbytes() == 4 * layout_of(sizes, layout)[2]


def test_a_decision_about_rounded_values_is_rejected() -> None:
    rounded = Step("torch.exp({0})", ("x0",), ("v0",), "inexact")
    for text, rounding in (("{0} > 1", "exact"), ("{0}.argmax()", "exact"), ("torch.floor({0})", "jumps")):
        decision = Step(text, ("v0",), ("v1",), rounding)
        assert not traced(one_input(rounded, decision, outputs=("v1",)))
        assert traced(one_input(replace(decision, operands=("x0",)), outputs=("v1",)))


def test_a_program_reads_only_what_it_has_written() -> None:
    """In eager the mean of losses lies in the memory of the losses, which torch.compile need not know."""
    loss = Step("torch.nn.functional.smooth_l1_loss({0}, {0})", ("x0",), ("v1",), "inexact")
    steps = {name: Step("{0}.as_strided((2, 2), (1, 2), 1)", (name,), ("v0",)) for name in ("x0", "v1")}
    assert traced(one_input(steps["x0"]))
    assert not traced(one_input(loss, steps["v1"]))


def test_a_write_makes_all_views_as_inexact_as_what_is_written() -> None:
    trace = Trace([Input("x0", "float32", (4,)), Input("x1", "float32", (2,))])
    trace.add(Step("{0}[:2]", ("x0",), ("v0",)))
    trace.add(Step("torch.sin({0})", ("x1",), ("v1",), "inexact"))
    trace.add(Step("{0}.copy_({1})", ("v0", "v1")))
    assert not trace.exact["x0"]
    assert trace.exact["x1"]
    with pytest.raises(Rejected):
        trace.add(Step("{0} > 0", ("x0",), ("v2",)))


def test_sums_of_whole_numbers_are_exact() -> None:
    for values, exact in (("whole", True), ("normal", False)):
        trace = Trace([Input("x0", "float32", (9,), values=values)])
        trace.add(Step("{0}.sum()", ("x0",), ("v0",), "sum"))
        assert trace.exact["v0"] is exact


def test_a_reproducer_is_a_script_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [generate(6, number) for number in range(200)]
    program = next(each for each in programs if each.is_training and any(not step.results for step in each.steps))
    script = reproducer(program, NATIVE).replace("backend='ferrite'", "backend='eager'")
    script = script.replace(f", options={NATIVE!r}", "")
    exec(compile(script, "<reproducer>", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_the_gradient_of_nan_is_one_for_all_elements() -> None:
    """Eager has others in whole vectors than in the rest for a few functions, whose rows know no NaN."""
    texts = [row.text.format("given") for row in UNARY if row.operands != "i" and "<" not in row.text]
    mixed = []
    for text, dtype in itertools.product(texts, (torch.float32, torch.float64)):
        given = torch.full((75,), torch.nan, dtype=dtype, requires_grad=True)
        made = eval(text, {**ENVIRONMENT, "given": given})
        if made.requires_grad:
            (gradient,) = torch.autograd.grad(made, given, torch.ones_like(made))
            if gradient.isnan().any() != gradient.isnan().all() or len(gradient.nan_to_num().unique()) > 1:
                mixed.append((text, dtype))
    assert mixed == []


# ---- engines that are wrong


def replaced(**functions: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that calls something else for functions of torch with these names."""

    def backend(module: GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target.__name__ in functions:
                node.target = functions[node.target.__name__]
        module.recompile()
        return module.forward

    return backend


def changed(around: Callable[[Callable[..., Any], Any], Any]) -> Callable[..., Any]:
    """A backend that does something else around the graph."""
    return lambda module, inputs: lambda *given: around(module.forward, given)


WRONG: dict[str, tuple[str, Callable[..., Any], Program]] = {
    "value": (
        "value",
        replaced(sqrt=lambda x: torch.sqrt(x) * 1.001),
        one_input(Step("torch.sqrt({0})", ("x0",), ("v0",)), values="positive"),
    ),
    "sign of zero": (
        "value",
        replaced(zeros_like=lambda x: -torch.zeros_like(x)),
        one_input(Step("torch.zeros_like({0})", ("x0",), ("v0",))),
    ),
    "integer": (
        "value",
        replaced(bitwise_not=torch.neg),
        one_input(Step("torch.bitwise_not({0})", ("x0",), ("v0",)), dtype="int64"),
    ),
    "dtype": (
        "dtype",
        replaced(sqrt=lambda x: torch.sqrt(x).double()),
        one_input(Step("torch.sqrt({0})", ("x0",), ("v0",))),
    ),
    "strides": (
        "strides",
        changed(lambda run, given: tuple(each.contiguous() for each in run(*given))),
        one_input(Step("{0}.t()", ("x0",), ("v1",)), Step("torch.sqrt({0})", ("v1",), ("v0",))),
    ),
    "alias": (
        "alias",
        changed(lambda run, given: tuple(each.clone() for each in run(*given))),
        one_input(Step("{0}.t()", ("x0",), ("v0",))),
    ),
    "forgotten write": (
        "mutation: value",
        changed(lambda run, given: run(*(each.clone() for each in given))),
        one_input(Step("{0}.add_(1)", ("x0",)), Step("{0} * 2", ("x0",), ("v0",))),
    ),
    "gradient": (
        "gradient value",
        replaced(sin=lambda x: torch.sin(x).detach() + 2 * x - 2 * x.detach()),
        one_input(Step("torch.sin({0})", ("x0",), ("v0",), "inexact"), wants_gradient=True),
    ),
    "error": (
        "error",
        replaced(index_select=lambda x, dim, index: x.clone()),
        one_input(
            Step("torch.index_select({0}, 0, {0}.long() * 0 + 3)", ("x0",), ("v0",), "raises"),
            dtype="int64",
            sizes=(3,),
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_is_caught(name: str) -> None:
    kind, backend, program = WRONG[name]
    assert traced(program)
    assert judge(program, Engine("right", backend="eager")).status == "equal"
    assert judge(program, Engine("wrong", backend=backend)).kind == kind


@dataclass(frozen=True)
class Broken(Engine):
    """One that cannot compile."""

    def compiling(self) -> Any:
        raise ValueError("no code")


def test_engines_that_share_a_trace_are_judged_each_by_its_own_code() -> None:
    program = one_input(Step("torch.sin({0}) * 2", ("x0",), ("v0",), "inexact"), wants_gradient=True)
    engines = [ENGINES["native"], Broken("broken", NATIVE), ENGINES["oracle"]]
    with mock.patch.object(Judge, "verdict", return_value=Verdict("equal")):  # of each alone
        found = Judge(program).verdicts(engines)
    assert {name: verdict.status for name, verdict in found.items() if name != "broken"} == {
        "native": "close",
        "oracle": "close",
    }
    assert found["broken"].kind == "error"
    assert found["broken"].shared


def test_a_wrong_lowering_is_blamed() -> None:
    """Where nothing is lowered the difference is gone."""
    sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default
    program = one_input(Step("torch.sin({0})", ("x0",), ("v0",), "inexact"))
    with mock.patch.dict(lowerings._rows, {sin: row_of(cos)}):
        verdict = judge(program, ENGINES["native"])
        assert verdict.kind == "value"
        assert blamed(program, verdict) == "not without lowering"


def test_the_last_bit_of_an_inexact_step_may_differ() -> None:
    ends = replaced(exp=lambda x: torch.nextafter(torch.exp(x), torch.tensor(torch.inf)))
    program = one_input(Step("torch.exp({0})", ("x0",), ("v0",), "inexact"))
    assert judge(program, Engine("last bit", backend=ends)).status == "close"


def test_cancellation_is_judged_by_noise() -> None:
    """exp(x + 9) - exp(9) * exp(x) is about nothing but rounding; a large error in it is one all the same."""
    steps = (
        Step("torch.exp({0} + 9)", ("x0",), ("v1",), "inexact"),
        Step("torch.exp({0} * 0 + 9) * torch.exp({0})", ("x0",), ("v2",), "inexact"),
        Step("{0} - {1}", ("v1", "v2"), ("v0",)),
    )
    for factor, status in ((1 + 2.0**-23, "close"), (1.001, "different")):
        backend = replaced(exp=lambda x, factor=factor: torch.exp(x) * factor)
        assert judge(one_input(*steps), Engine("cancels", backend=backend)).status == status


def test_either_of_two_zeros_may_be_the_greater_one() -> None:
    """Eager takes the second in whole vectors, the first in what is left. Of two with one sign there is no choice."""
    steps = (
        Step("{0} * 0", ("x0",), ("v1",)),
        Step("torch.abs({0}) * 0", ("x0",), ("v2",)),
        Step("torch.maximum({0}, {1})", ("v1", "v2"), ("v0",), "either"),
    )
    for other, status in (
        (lambda x, y: torch.maximum(y, x), "close"),
        (lambda x, y: -torch.maximum(y, y), "different"),
    ):
        assert judge(one_input(*steps), Engine("other", backend=replaced(maximum=other))).status == status


def test_clamp_takes_either_of_two_zeros() -> None:
    """Here the lower bound is 0.0, and the upper one -0.0 in places."""
    steps = (
        Step("torch.abs({0}) * 0", ("x0",), ("v1",)),
        Step("{0} * 0", ("x0",), ("v2",)),
        Step("torch.clamp({0}, {1}, {2})", ("v1", "v1", "v2"), ("v0",), "either"),
    )
    for signs_differ, status in ((True, "close"), (False, "different")):

        def clamp(x: Any, low: Any, high: Any, signs_differ: bool = signs_differ) -> Any:
            made = torch.clamp(x, low, high)
            return torch.where((low.signbit() != high.signbit()) == signs_differ, -made, made)

        assert judge(one_input(*steps), Engine("other", backend=replaced(clamp=clamp))).status == status


SIGNS: dict[str, tuple[Step, Callable[..., Any]]] = {
    "sinh": (Step("torch.sinh({0})", ("v1",), ("v0",), "inexact"), lambda x: torch.sinh(x) + 0.0),
    "layer_norm": (
        Step("functional.layer_norm({0}, {0}.shape[-1:])", ("v1",), ("v0",), "inexact"),
        lambda x, sizes: functional.layer_norm(x, sizes).copysign(x),
    ),
}


@pytest.mark.parametrize("name", SIGNS)
def test_the_sign_of_a_zero_that_no_noise_moves_is_eagers(name: str) -> None:
    """sinh(-0.0) is -0.0; a layer norm without a bias adds 0.0, and has no -0.0."""
    step, other = SIGNS[name]
    program = one_input(Step("{0} * 0", ("x0",), ("v1",)), step)
    assert judge(program, Engine("right", backend="eager")).status == "equal"
    assert judge(program, Engine("wrong", backend=replaced(**{name: other}))).kind == "value"


def test_a_zero_that_noise_moves_has_no_sign() -> None:
    """Even if noise happens to move it to one side only."""
    zero = torch.tensor([-0.0, 1.0])
    moved = [torch.tensor([-1e-8 * (n % 2), 1.0]) for n in range(NOISY_RUNS)]
    assert is_within_noise(zero, zero.abs(), moved)
    assert not is_within_noise(zero, zero.abs(), [zero] * NOISY_RUNS)


def test_integers_are_promoted_to_float64_for_the_reference() -> None:
    """Eager's Bessel function of f32 is off by 8 units in the last place, which `+ 3 * x * x` makes more of."""
    steps = (
        Step("torch.special.i1({0})", ("x0",), ("v1",), "inexact"),
        Step("torch.addcmul({0}, {1}, {1}, value=3)", ("v1", "x0"), ("v0",), "inexact"),
    )
    program = one_input(*steps, dtype="int64", sizes=(33, 7))
    assert Eager(program, program.inputs).reference.result[0].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    for factor, status in ((1.0, "close"), (1.0001, "different")):
        backend = replaced(special_i1=lambda x, factor=factor: (torch.special.i1(x.double()) * factor).float())
        assert judge(program, Engine("better", backend=backend)).status == status


def test_noise_keeps_whole_exponents_whole() -> None:
    """Any other power of a negative number is NaN, and so undecided."""
    steps = (
        Step("torch.tanh({0})", ("x0",), ("v1",), "inexact"),
        Step("{0} * 0 + 3", ("x0",), ("v2",)),
        Step("torch.pow({0}, {1})", ("v1", "v2"), ("v0",), "inexact"),
    )
    power = torch.pow
    for other, status in (
        (lambda x, y: x * x * x, "close"),
        (lambda x, y: power(x, y * (1 + 1e-6)), "different"),
    ):
        assert judge(one_input(*steps), Engine("other", backend=replaced(pow=other))).status == status


def test_any_of_several_equal_numbers_may_be_the_greatest() -> None:
    """Of numbers so large that one unit in the last place is a decision, noise makes each the greatest once."""
    steps = (
        Step("torch.exp({0} * 0 + 60)", ("x0",), ("v1",), "inexact"),
        Step("{0} * (1 + 2.0**-23 * (torch.arange(5) // 4))", ("v1",), ("v2",)),
        Step("torch.softmax({0}, -1)", ("v2",), ("v0",), "inexact"),
    )
    one = torch.eye(5)[:1].expand(3, 5)
    for found, status in ((one.flip(-1), "equal"), (one, "close"), (one * 100, "different")):
        backend = replaced(softmax=lambda x, dim, found=found: found.clone())
        assert judge(one_input(*steps), Engine("other", backend=backend)).status == status


def test_products_of_halves_that_eager_leaves_the_range_for() -> None:
    """In parts, products of 300 and of 0.004 are inf and 0, and of both NaN; in float64 they are 121 thousand. The
    result has another type, so that it does not tell that it was one of halves."""
    for numbers, found, statuses in (
        ("300, 0.004", torch.inf, ("close", "equal")),
        ("1, 2**0.2", torch.nan, ("different",)),
    ):
        steps = (
            Step(f"torch.tensor([{numbers}]).repeat(64).half() + {{0}}[0, 0] * 0", ("x0",), ("v1",)),
            Step("torch.prod({0})", ("v1",), ("v2",), "inexact"),
            Step("{0}.to(torch.float64)", ("v2",), ("v0",)),
        )
        backend = replaced(prod=lambda x, found=found: x.new_full((), found))
        program = one_input(*steps, dtype="float16")
        assert judge(program, Engine("other", backend=backend)).status in statuses


def test_integers_that_a_float_does_not_hold_are_rounded_while_they_are_added() -> None:
    steps = (
        Step("torch.tensor([2**62, 7, -(2**62)]) + {0}.long()[0, 0] * 0", ("x0",), ("v1",)),
        Step("torch.sum({0}, dtype=torch.float32)", ("v1",), ("v0",), "sum"),
    )
    for far, status in ((3.0, "close"), (2.0**62, "different")):
        backend = replaced(sum=lambda x, dtype, far=far: torch.sum(x, dtype=dtype) + far)
        assert judge(one_input(*steps), Engine("other", backend=backend)).status == status


def test_noise_does_not_explain_what_is_far_away() -> None:
    eager = torch.tensor([1.0, 2.0])
    noisy = [eager * (1 + (n % 5 - 2) * 1e-6) for n in range(NOISY_RUNS)]
    assert is_within_noise(eager, eager * (1 + 3e-6), noisy)
    assert not is_within_noise(eager, eager * (1 + 3e-4), noisy)
    assert not is_within_noise(eager, torch.tensor([1.0, torch.nan]), noisy)


def test_results_that_eager_leaves_the_range_for() -> None:
    """300 * 300 * 0 is NaN in eager, in halves, and 0 in float64; what is infinite in both stays so. In f32 nobody is
    right where eager is not, unless who is judged is not finite either."""
    inf, nan = torch.inf, torch.nan
    eager = torch.tensor([nan, inf, 2.0, nan])
    reference = torch.tensor([0.0, 1e39, 2.0, 1.0], dtype=torch.float64)
    compiled = torch.tensor([0.5, inf, 5.0, nan])
    for dtype, first in ((torch.float16, 0.0), (torch.float32, 0.5)):
        found = in_range(eager.to(dtype), compiled.to(dtype), reference)
        torch.testing.assert_close(found, torch.tensor([first, inf, 2.0, nan], dtype=dtype), equal_nan=True)
    whole = torch.tensor([1, 2])
    assert in_range(whole, whole, reference[:2]) is whole


def test_infinities_that_eager_has_nan_for() -> None:
    """Only the one that float64 has will do."""
    inf, nan = torch.inf, torch.nan
    eager = torch.tensor([nan, nan, nan, 1.0])
    reference = torch.tensor([inf, inf, nan, inf], dtype=torch.float64)
    found = in_range(eager, torch.tensor([inf, -inf, inf, inf]), reference)
    torch.testing.assert_close(found, torch.tensor([inf, nan, nan, 1.0]), equal_nan=True)


def test_noise_passes_parts_that_nobody_reads() -> None:
    """Their gradient is None; the noisy runs used to raise, and rounding counted as a difference."""
    parts = Step("torch.unbind({0}, dim=0)", ("x0",), ("v0", "v1", "v2"), "exact")
    program = one_input(parts, outputs=("v1",), wants_gradient=True)
    eager = Eager(program, program.inputs)
    assert len(eager.noisy) == NOISY_RUNS
    assert [run.backward_error for run in eager.noisy] == [None] * NOISY_RUNS
    assert all(run.gradients for run in eager.noisy)


def test_a_failure_shrinks_to_the_step_that_fails() -> None:
    backend = replaced(maximum=torch.minimum)
    wrong = Engine("wrong", backend=backend)
    plain = (each for number in range(10_000) if not (each := generate(1, number)).dynamic and not each.is_training)
    program = next(each for each in plain if len(each.steps) > 4 and any("maximum" in s.text for s in each.steps))
    long = judge(program, wrong)
    if long.status != "different":
        pytest.fail(f"the program does not show it: {source(program)}")
    small = shrink(program, lambda other: judge(other, wrong).kind == long.kind, seconds=20)
    assert judge(small, wrong).status == "different"
    assert len(small.steps) <= 3, source(small)
    assert any("maximum" in step.text for step in small.steps)


# ---- loops

LOOP = """
def program(x: f32[4, 5], n: i64[5], y: out(f32[4]), c: out(b8[5])):
    for i in box(4):
        y[i] = sum(x[i, j] for j in box(5))
    for j in box(5):
        c[j] = {condition}
"""


def loop_reference(condition: str) -> loops.Reference:
    return loops.Reference(parse_program(LOOP.format(condition=condition)), {}, 3)


def test_what_noise_does_not_move_must_be_equal() -> None:
    reference = loop_reference("n[j] > i64(0)")
    right = {name: np.array(value) for name, value in reference.plain.items()}
    assert reference.complaint(right) == ""
    right["c"][2] = not right["c"][2]
    assert "c[2]" in reference.complaint(right)


def test_a_sum_may_be_rounded_otherwise_but_not_be_wrong() -> None:
    reference = loop_reference("n[j] > i64(0)")
    reference.arrays["x"][...] = np.linspace(-1, 1, 20).reshape(4, 5)
    reference.plain = loops.run_oracle(reference.program, {}, reference.arrays)
    for factor, is_right in ((1 + 1e-7, True), (1.01, False)):
        found = {name: np.array(value) for name, value in reference.plain.items()}
        found["y"] *= np.float32(factor)
        assert (reference.complaint(found) == "") is is_right


def test_a_comparison_of_rounded_values_is_undecided() -> None:
    reference = loop_reference("sin(f32(n[j])) * sin(f32(n[j])) + cos(f32(n[j])) * cos(f32(n[j])) > f32(1.0)")
    reference.arrays["n"][...] = np.arange(5)
    found = {name: np.array(value) for name, value in reference.plain.items()}
    found["c"][2] = not found["c"][2]
    assert reference.complaint(found) == ""


@pytest.mark.parametrize(
    ("formula", "given", "right", "wrong"),
    [
        ("log_ndtr", 8.0, -6.220960574271786e-16, -6.2209605743e-16),
        ("lgamma", 1.8912344723046974, -0.042079936474344576, -0.0420799364743),
        ("ndtr", -16.0, 6.388754400538087e-58, 6.3887544e-58),
    ],
)
def test_code_may_be_better_than_a_formula_of_the_oracle(
    formula: str, given: float, right: float, wrong: float
) -> None:
    """In 16 digits the oracle is off by 27, 53 and 103 units in the last place, by what it rounds on the way."""
    text = f"def program(x: f64[()], y: out(f64[()])):\n    for _ in box():\n        y[()] = {formula}(x[()])\n"
    reference = loops.Reference(parse_program(text), {}, 3)
    reference.arrays["x"][...] = given
    reference.plain = loops.run_oracle(reference.program, {}, reference.arrays)
    for found, is_right in ((right, True), (wrong, False)):
        arrays = {**reference.plain, "y": np.array(found)}
        assert (reference.complaint(arrays) == "") is is_right


@pytest.mark.parametrize(("found", "is_right"), [(0.0, True), (1e-20, True), (1e-8, True), (1e-5, False)])
def test_ndtr_of_f32_is_exact_beside_1_only(found: float, is_right: bool) -> None:
    text = "def program(x: f32[()], y: out(f32[()])):\n    for _ in box():\n        y[()] = ndtr(x[()])\n"
    reference = loops.Reference(parse_program(text), {}, 3)
    reference.arrays["x"][...] = -8.0
    reference.plain = loops.run_oracle(reference.program, {}, reference.arrays)
    assert (reference.complaint({**reference.plain, "y": np.array(found, np.float32)}) == "") is is_right


def test_nan_of_both_signs_may_all_have_one() -> None:
    text = "def program(x: f64[16], y: out(i64[1])):\n    for i in box(1):\n        y[i] = "
    text += "min(bits(x[k], i64) for k in box(16))\n"
    reference = loops.Reference(parse_program(text), {}, 3)
    reference.arrays["x"][...] = np.where(np.arange(16) % 2, np.nan, -np.nan)
    reference.plain = loops.run_oracle(reference.program, {}, reference.arrays)
    positive = np.float64(np.nan).view(np.int64) & np.int64(2**63 - 1)
    assert reference.plain["y"][0] < 0
    assert reference.complaint({**reference.plain, "y": np.array([positive])}) == ""


def test_the_sign_of_nan_is_undecided_everywhere() -> None:
    text = "def program(x: f64[64], y: out(i64[64])):\n    for i in box(64):\n        y[i] = bits(x[i], i64)\n"
    reference = loops.Reference(parse_program(text), {}, 3)
    reference.arrays["x"][...] = np.nan
    reference.arrays["x"][0] = 1.0
    reference.plain = loops.run_oracle(reference.program, {}, reference.arrays)
    turned = {**reference.plain, "y": reference.plain["y"] ^ np.int64(-(2**63))}
    assert "y[0]" in reference.complaint(turned)
    turned["y"][0] = reference.plain["y"][0]
    assert reference.complaint(turned) == ""
