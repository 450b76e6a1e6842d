"""Random programs for the passes before autograd: splits and joins of their parts, the same op on many values, linear
layers and convolutions with their norms, views, writes in between, regions of other modes, sizes that vary.

`edited` is a backend that runs the passes and nothing else, so a difference is theirs: against eager, with what torch's
capture does by itself (`OFF`) taken off. `held` does so on a graph that holds its parameters and calls a module, which
some passes ask for. `generate` draws as `generate.py` does: what eager does not take is forgotten.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.proxy import TraceError

from ferrite.graph.arguments import bind, find
from ferrite.graph.pre_grad import PASSES
from ferrite.graph.snapshot import copy_module
from ferrite.graph.values import fake_mode_of, value_of
from ferrite.options import Options, resolve
from ferrite.pipeline import edit_pre_grad
from ferrite.report.record import GraphRecord
from tests.ops.check import ONLY_ZEROS, Difference
from tests.pre_grad.harness import ValueCheck, trace

from .generate import ATTEMPTS, Draw
from .judge import Engine, Judge, Verdict
from .programs import Input, Program, Rejected, Step, Trace, function_of, make_inputs

# ---- engines


def _asked(*, backwards: bool = False) -> dict[str, dict[str, Any]]:
    """Every pass by name, willing to act on two nodes."""
    asked: dict[str, dict[str, Any]] = {}
    for entry in PASSES[::-1] if backwards else PASSES:
        takes = inspect.signature(entry.run).parameters
        small = {"least": 2, "depth": 6, "same_users": False}
        asked[entry.name] = {name: value for name, value in small.items() if name in takes}
    return asked


def edited(module: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A backend of torch.compile: the passes, which add no guard, a check of the values they wrote down, and then as
    eager would."""
    known = {id(value_of(node)) for node in module.graph.nodes}
    record = GraphRecord("main", "pre_grad")
    sizes = fake_mode_of(module.graph).shape_env
    guards = 0 if sizes is None else len(sizes.guards)
    edit_pre_grad(module, resolve(Options(), None, options), record)
    assert sizes is None or len(sizes.guards) == guards, f"new guards: {sizes.guards[guards:]}"
    REWRITES.update(run.name for run in record.passes for _ in run.rewrites)
    given = [value.node.hint if isinstance(value, torch.SymInt) else _plain(value) for value in inputs]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        ValueCheck(module, known).run(*copy.deepcopy(given))
    return module.forward


REWRITES: Counter[str] = Counter()  # that `edited` has made, by pass
LAYERS = ("linear", "conv2d", "batch_norm", "layer_norm")


def held(module: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """As `edited`, on a graph that holds the parameters of its layers and calls an nn.Identity in front of each; where
    no input asks for a gradient, without gradients."""
    kept = _hold_parameters(module, inputs)
    _put_identities(module)
    gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    with torch.set_grad_enabled(gradients):
        run = edited(module, [inputs[place] for place in kept], options)

    def called(*given: Any) -> Any:
        with torch.set_grad_enabled(gradients):
            return run(*(given[place] for place in kept))

    return called


def _hold_parameters(module: GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Inputs that layers read, but not as what they are applied to, become constants; gives the places of the others.
    Nobody writes or returns these, and each call brings the same values."""
    kept = []
    for place, (node, value) in enumerate(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        fixed = isinstance(value, torch.Tensor) and all(type(size) is int for size in value_of(node).shape)
        if not fixed or value.requires_grad or not node.users or not all(_is_parameter(node, u) for u in node.users):
            kept.append(place)
            continue
        name = f"held_{node.name}"
        setattr(module, name, nn.Parameter(value.detach(), requires_grad=False) if value.dim() > 1 else value.detach())
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    module.recompile()
    return kept


def _is_parameter(node: Node, user: Node) -> bool:
    call = bind(user, *LAYERS)
    return call is not None and call["input"] is not node


def _put_identities(module: GraphModule) -> None:
    module.add_module("skip", nn.Identity())
    for node in find(module.graph, *LAYERS):
        call = bind(node)
        if call is None or call["input"] is not node.args[0]:
            continue
        with module.graph.inserting_before(node):
            same = module.graph.call_module("skip", (call["input"],))
        same.meta = dict(call["input"].meta)
        node.update_arg(0, same)
    module.recompile()


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Passes(Engine):
    """The passes with these options, on the calls as they are written or as Dynamo gives them."""

    written: bool = True
    backend: Any = edited
    captured: Captured | None = None  # with other engines; otherwise for this one alone

    def compiled(self, program: Program) -> Callable[..., Any]:
        return (self.captured or Captured(program, [self])).by(self)


_ASKS = re.compile(r"\.(shape|stride|dim|squeeze_|unsqueeze_)\b")


class Captured:
    """A program, captured once for all engines that want it so, and edited by each.

    Its calls as they are written, which takes a tenth of Dynamo's time, where Dynamo gives the same: without regions of
    other modes, with fixed sizes that nobody asks for. What goes wrong goes wrong in the call, as with torch.compile.
    """

    def __init__(self, program: Program, engines: Sequence[Passes]) -> None:
        self._program, self._engines = program, engines
        self._written = self._trace() if any(engine.written for engine in engines) else None
        self._running = ""
        torch._dynamo.reset()
        self._compiled = torch.compile(function_of(program), backend=self._edit, dynamic=program.dynamic)

    def by(self, engine: Passes) -> Callable[..., Any]:
        """The program as the engine runs it."""
        if self._written is not None and engine.written:
            return self._edited(*self._written, engine)

        def run(*given: Any) -> Any:
            self._running = engine.name
            return self._compiled(*given)

        return run

    def _trace(self) -> tuple[GraphModule, list[torch.Tensor]] | None:
        program = self._program
        if program.dynamic or any(step.inside or _ASKS.search(step.text) for step in program.steps):
            return None
        given = list(make_inputs(program.inputs).values())
        with contextlib.suppress(TraceError, TypeError):
            return trace(function_of(program), given, gradients=True).module, given
        return None

    def _edit(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A backend: one edited graph for each engine; the call goes to that of the engine that runs."""
        wanted = [engine for engine in self._engines if self._written is None or not engine.written]
        made = {engine.name: self._edited(module, inputs, engine) for engine in wanted}
        return lambda *given: made[self._running](*given)

    def _edited(self, module: GraphModule, inputs: Sequence[Any], engine: Passes) -> Callable[..., Any]:
        try:
            return engine.backend(copy_module(module), inputs, engine.options)
        except Exception as error:
            failure = error

        def fails(*_: Any) -> Any:
            raise failure

        return fails


OFF = Engine("off", backend="eager")
ENGINES: dict[str, Passes] = {
    engine.name: engine
    for engine in (
        Passes("all", {"pre_grad": _asked(), "strict": True}),
        Passes("backwards", {"pre_grad": _asked(backwards=True), "strict": True}),
        Passes("dynamo", {"pre_grad": _asked(), "strict": True}, written=False),
        Passes("default", {"strict": True}),
        # Idle dropouts stay in this one: batched there is nothing else of them.
        Passes("held", {"pre_grad": _asked(), "strict": True, "disable": ("drop_idle_dropout",)}, backend=held),
    )
}


EVERY = 4  # program goes through Dynamo even if its calls as they are written would do: half of the time is Dynamo's
EVERY_HELD = 16  # program holds its parameters; so does each with a batch norm that may be folded, and each aimed one


def engines_for(number: int, names: Sequence[str], program: Program) -> list[Passes]:
    """The engines of these names that run program `number`. Where Dynamo must capture, it does for all of them."""
    foldable = not program.is_training and any("batch_norm" in step.text for step in program.steps)
    may_hold = foldable or is_aimed(number) or number % EVERY_HELD == 0
    others = {"dynamo": number % EVERY != 0, "held": not may_hold}
    sampled = [name for name in names if not others.get(name)]
    return [ENGINES[name] for name in sampled or names]


PRODUCT = re.compile(r"linear|conv2d|matmul|bmm|einsum|@")  # a step with a product of matrices


def judge(program: Program, engine: Passes) -> Verdict:
    return judge_all(program, [engine])[engine.name]


def judge_all(program: Program, engines: Sequence[Passes]) -> dict[str, Verdict]:
    """By name. As for compiled programs, but of gradients the strides and the signs of zeros are autograd's own (the
    gradient of a slice is padded with zeros and added, where that of a split is put together, and -0.0 + 0.0 is 0.0);
    and a zero that comes of a product of matrices has the sign that its library gives it, which a batch of them does
    not share."""
    judged = Judge(program, OFF)
    captured = Captured(program, engines)
    has_product = any(PRODUCT.search(step.text) for step in program.steps)

    def counts(each: Difference) -> bool:
        free = has_product or each.kind.startswith("gradient")
        return each.kind != "gradient strides" and not (free and each.detail == ONLY_ZEROS)

    verdicts = {}
    for engine in engines:
        found = judged.verdict(replace(engine, captured=captured))
        left = tuple(each for each in found.differences if counts(each))
        status = "close" if found.differences and not left else found.status
        verdicts[engine.name] = replace(found, status=status, differences=left)
    return verdicts


def blamed(program: Program, engine: Passes, verdict: Verdict) -> str:
    """The passes each of which alone makes the difference."""
    settings = dict(engine.options.get("pre_grad", {}))
    alone = []
    for entry in PASSES:
        others = tuple(other.name for other in PASSES if other is not entry)
        chosen = {"pre_grad": {entry.name: settings.get(entry.name, {})}, "disable": others, "strict": True}
        if judge(program, replace(engine, options=chosen)).kind == verdict.kind:
            alone.append(entry.name)
    return f"by {' or '.join(alone)} alone" if alone else "by several passes together"


# ---- programs

SHAPES = ((4, 6), (4, 6), (4, 4), (2, 4, 6), (2, 6, 4), (3, 4, 4), (1, 6), (2, 2, 3, 4))
MODES = ("torch.autocast('cpu', torch.bfloat16)", "torch.no_grad()", "torch.autocast('cpu', enabled=False)")
MOST_PARTS = 6

# {0} is the value, <dim> one of its dimensions.
PARTS = (
    "{0}.split(1, <dim>)",
    "{0}.split(2, <dim>)",
    "torch.split({0}, 2, dim=<dim>)",
    "torch.functional.split({0}, 3, <dim>)",
    "torch.split({0}, [1, 3], <dim>)",
    "{0}.split([2, 1, 3], <dim>)",
    "{0}.split((1, 1, 2), <dim>)",
    "{0}.chunk(2, <dim>)",
    "torch.chunk({0}, 3, dim=<dim>)",
    "{0}.unbind(<dim>)",
    "torch.unbind({0}, dim=<dim>)",
    "{0}.tensor_split(2, <dim>)",
)
JOINS = (
    "torch.cat([{}], <dim>)",
    "torch.cat(({}), dim=<dim>)",
    "torch.cat([{}], axis=<dim>)",
    "torch.concat([{}], -1)",
    "torch.stack([{}], <dim>)",
    "torch.stack([{}], dim=<dim>)",
    "torch.stack([{}])",
)
# How a value is parted, what is done to each part, how they are joined.
RECIPES = (
    ("{0}.split(1, <dim>)", "{0}.squeeze(<dim>)", "torch.stack([{}], <dim>)"),
    ("{0}.split(1, -1)", "{0}.squeeze(-1)", "torch.cat([{}], <dim>)"),
    ("torch.split({0}, 1, 0)", "torch.squeeze({0}, 0)", "torch.stack([{}], dim=<dim>)"),
    ("{0}.chunk(2, <dim>)", "{0}.reshape(-1, 2)", "torch.cat([{}], <dim>)"),
    ("torch.chunk({0}, 2, 0)", "{0}.reshape(2, -1)", "torch.cat([{}], 0)"),
    ("torch.chunk({0}, 2, 0)", "{0}.reshape(2, -1).unsqueeze(0)", "torch.cat([{}], 0)"),
    ("{0}.split(1, 1)", "{0}.reshape(2, -1)", "torch.stack([{}], <dim>)"),
    ("{0}.split(2, <dim>)", "", "torch.cat([{}], <dim>)"),
    ("{0}.split([1, 1, 2], 1)", "", "torch.cat([{}, {0}], 1)"),
    ("{0}.unbind(<dim>)", "", "torch.stack([{}], <dim>)"),
    ("{0}.unbind(<dim>)", "", "torch.cat([{}], <dim>)"),
    ("{0}.unbind(0)", "{0}.relu()", "torch.stack([{}])"),
    ("{0}.split(2, 1)", "{0}.clamp(-1, 1)", "functional.relu(torch.cat([{}], 1))"),
    ("{0}.chunk(2, <dim>)", "{0}.split(1, <dim>)[0]", "torch.tanh(torch.cat([{}], -1).view(-1))"),
)
# As in RECIPES, for passes that nothing above is for.
AIMED = (
    ("{0}.split(2, -1)", "{0}.detach()", "torch.cat([{}], <dim>)"),
    ("{0}.chunk(2, <dim>)", "{0}.detach()", "torch.stack([{}])"),
    ("{0}.split(2, -1)", "functional.dropout({0}, 0.5, False)", "torch.cat([{}], <dim>)"),
    ("{0}.chunk(2, <dim>)", "functional.dropout({0}, 0.25, training=False)", "torch.stack([{}])"),
    ("{0}.chunk(2, <dim>)", "{0}.reshape(2, -1)", "torch.cat([{}], 0) * 2"),
    ("torch.chunk({0}, 2, 0)", "{0}.reshape(-1)", "torch.cat([{}], 0) + 1"),
    ("{0}.chunk(2, <dim>)", "{0}.reshape(2, -1).unsqueeze(0)", "torch.cat([{}], 0) * 2"),
    ("{0}.chunk(2, <dim>)", "{0}.reshape(-1).unsqueeze(1)", "torch.cat([{}], 1).neg()"),
)
# On several values, one after the other.
MANY = (
    ("torch.tanh({0})", "inexact"),
    ("{0}.tanh()", "inexact"),
    ("torch.sigmoid({0})", "inexact"),
    ("functional.relu({0})", "exact"),
    ("{0}.relu()", "exact"),
    ("{0}.clamp(-1, 1)", "exact"),
    ("torch.clamp({0}, min=-0.5)", "exact"),
    ("torch.nan_to_num({0})", "exact"),
    ("{0}.detach()", "exact"),
    ("functional.dropout({0}, 0.5, False)", "exact"),
    ("functional.linear({0}, {w})", "inexact"),
    ("functional.linear({0}, {w}, {b})", "inexact"),
    ("functional.linear({0}, {ws})", "inexact"),
    ("functional.linear({0}, {ws}, {bs})", "inexact"),
    ("functional.layer_norm({0}, {0}.shape[-1:])", "inexact"),
    ("functional.layer_norm({0}, {0}.shape[-1:], {b}, {b}, 1e-3)", "inexact"),
    ("{0}.squeeze(<dim>)", "exact"),
    ("torch.squeeze({0}, dim=<dim>)", "exact"),
    ("{0}.unsqueeze(<dim>)", "exact"),
    ("{0}.reshape(-1, 2)", "exact"),
    ("torch.reshape({0}, (2, -1))", "exact"),
    ("{0}.transpose(0, -1)", "exact"),
)
ONE = {
    "exact": (
        *("{0}.permute(<permutation>)", "{0}.transpose(<dim>, <dim>)", "{0}.mT", "{0}.t()", "{0}[0]", "{0}[:]"),
        *("{0}.reshape(<shape>)", "{0}.view(<shape>)", "{0}.view({0}.shape)", "{0}.flatten()", "{0}.squeeze(<dim>)"),
        *("{0}[<slice>]", "{0}[..., <slice>]", "{0}[:, <slice>]", "{0}.contiguous()", "{0}.clone()", "{0} * 1"),
        *("{0}.expand({0}.shape)", "{0}.unsqueeze(<dim>)", "{0}.to(torch.bfloat16)", "{0}.to(torch.float64)"),
        *("{0}.float()", "{0}.to({0}.dtype)", "torch.cat([{0}])", "torch.cat([{0}], <dim>)", "{0} * 2", "{0} + 1"),
        *("{0}.split(9, <dim>)[0]", "{0}.chunk(1, <dim>)[0]", "{0}.split(2, <dim>)[1]", "functional.relu({0})"),
        *("functional.dropout({0}, 0.5)", "{0}.as_strided((2, 2), (2, 1))", "{0} + {0}.stride(0)"),
    ),
    "sum": ("{0}.sum(<dim>)", "torch.sum({0}, axis=<dim>, keepdims=True)", "{0}.sum(axis=0)"),
    "inexact": (
        *("{0}.tanh()", "torch.tanh({0})", "{0}.sigmoid()", "{0}.mean(<dim>)", "functional.linear({0}, {w}, {b})"),
        *("functional.linear({0}, {w}).transpose(-2, -1)", "functional.linear({0}, {w}, {b}).mT"),
        *("functional.linear({0}.transpose(-2, -1), {w})", "functional.linear({0}.mT.contiguous(), {w}, {b})"),
        *("torch.bmm({0}.permute(0, 2, 1), {0})", "torch.matmul({0}.transpose(-1, -2), {0})"),
        "torch.matmul({0}, {0}.mT.contiguous())",
    ),
    "jumps": (
        "torch.ops.quantized_decomposed.quantize_per_tensor.default({0}.mT, 0.1, 3, -128, 127, torch.int8)",
        "torch.ops.quantized_decomposed.quantize_per_tensor.default({0}.reshape(-1), 0.1, 3, -128, 127, torch.int8)",
    ),
}
EINSUM = "torch.einsum('bni, bnio -> bno', {0}, {0}[..., None].expand(-1, -1, -1, 2)) + {1}[..., :1]"
TWO = (
    ("exact", "{0} + {1}"),
    ("exact", "{0} - {1}"),
    ("inexact", "torch.add({0}, {1}, alpha=3)"),
    ("exact", "{0} * {1}"),
    ("inexact", "{0} @ {1}"),
    ("inexact", EINSUM),
    ("inexact", "torch.matmul({0}.mT, {1})"),
)
WRITES = (
    *("{0}.add_(1)", "{0}.mul_(2)", "{0}[0] = 1.5", "{0}[..., 0] = 2", "{0}.zero_()", "functional.relu({0}, True)"),
    *("{0}[:1].mul_(3)", "{0}.t().add_(1)", "{0}.squeeze_(0)", "{0}.unsqueeze_(0)"),
)
WRITES_OF_TWO = ("{0}.copy_({1})", "{0}.add_({1})", "{0}[..., :1] = {1}[..., :1]", "{0}.mul_({1})")
LAYER = "functional.conv2d({0}, {cw}, <bias>, padding=<bit>)"
NORM = "functional.batch_norm({0}, {m}, {s}, <affine>, training=False, eps=1e-3)"


EVERY_AIMED = 16  # program is made of what passes look for that the others seldom meet


def is_aimed(number: int) -> bool:
    return number % EVERY_AIMED == EVERY_AIMED - 1


def generate(seed: int, number: int) -> Program:
    """Program `number` of a seed. It runs in eager."""
    attempt = 0
    while True:
        made = _Draw(random.Random(f"pre_grad:{seed}:{number}:{attempt}"), is_aimed(number)).program()
        if made is not None:
            return made
        attempt += 1


class _Draw(Draw):
    """One program in the making."""

    def __init__(self, rng: random.Random, aimed: bool) -> None:
        super().__init__(rng)
        self.aimed = aimed

    def program(self) -> Program | None:
        dynamic, training, writes = self.chance(12), self.chance(50), self.chance(45)
        inputs = self.inputs(training)
        self.held = {each.name for each in inputs if each.name[0] != "x"}
        self.inside = ""
        self.together: list[list[str]] = []
        try:
            self.trace = Trace(inputs)
        except (Rejected, RuntimeError, IndexError, TypeError):
            return None
        kinds = [
            self.part,
            self.part,
            self.join,
            self.join,
            self.join,
            self.many,
            self.many,
            self.one,
            self.one,
            self.two,
        ]
        kinds += [self.recipe, self.recipe, self.layers]
        kinds += [self.write] if writes else []
        kinds += [self.layer] if "cw" in self.trace.values else []
        if self.aimed:
            kinds = [*kinds, *[self.layer, self.aim, self.aim] * (len(kinds) // 3)]
        moded = self.chance(15)
        steps: list[Step] = []
        for _ in range(self.rng.randint(3, 9)):
            if moded and self.chance(40):
                self.inside = "" if self.inside else self.rng.choice(MODES)
            steps += self.rng.choice(kinds)()
        if not steps:
            return None
        made = Program(tuple(inputs), tuple(steps), self.outputs(inputs, steps), dynamic)
        return self.resized(made) if dynamic else made

    # ---- inputs

    def inputs(self, training: bool) -> list[Input]:
        leading = self.rng.choice(("float32", "float32", "float32", "float64", "bfloat16"))
        made = []
        for place in range(self.rng.randint(1, 3)):
            dtype = leading if self.chance(85) else self.rng.choice(("float32", "bfloat16", "float64", "int64"))
            made.append(self.tensor(f"x{place}", self.rng.choice(SHAPES), dtype, training))
        width = made[0].sizes[-1]
        made += [self.tensor(name, (width, width), leading, training) for name in ("w0", "w1", "w2")]
        made += [self.tensor(name, (width,), leading, training) for name in ("b0", "b1", "b2")]
        if self.chance(15) or self.aimed:
            made.append(self.tensor("x3", (2, 3, 4, 4), leading, training))
            made.append(self.tensor("cw", (4, 3, 3, 3), leading, training))
            made += [self.tensor(name, (4,), leading, training) for name in ("cb", "g", "h")]
            made += [self.tensor("m", (4,), leading, False), Input("s", leading, (4,), values="positive", seed=7)]
        return made

    def tensor(self, name: str, sizes: tuple[int, ...], dtype: str, training: bool) -> Input:
        layout = "contiguous" if self.chance(75) else self.rng.choice(("transposed", "gaps", "offset"))
        values = "whole" if self.chance(50) else "normal"
        wants = training and getattr(torch, dtype).is_floating_point and self.chance(75)
        return Input(name, dtype, sizes, layout, values, self.rng.randrange(1000), wants)

    # ---- steps; each gives those that eager took

    def part(self) -> list[Step]:
        """The parts of a value: all, under names of their own."""
        made = self.tried(lambda: (self.rng.choice(PARTS), [self.value()], range(2, MOST_PARTS + 1), "exact"))
        self.together += [list(step.results) for step in made]
        return made

    def join(self) -> list[Step]:
        """Values that were made one after the other, as they come or not."""

        def draw() -> tuple[str, list[str], range, str]:
            names = self.run(self.rng.randint(1, 5))
            if self.chance(20):
                self.rng.shuffle(names)
            if self.chance(15):
                names.insert(self.rng.randint(0, len(names)), self.value())
            places = ", ".join(f"{{{place}}}" for place in range(len(names)))
            text = self.rng.choice(JOINS).replace("({})", f"({places},)").replace("{}", places)
            return text, names, range(1, 2), "exact"

        return self.tried(draw)

    def many(self) -> list[Step]:
        """One op on several values."""
        text, rounding = self.rng.choice(MANY)
        made: list[Step] = []
        drawn = self.filled(text)
        for name in self.run(self.rng.randint(2, 5)):
            if "s}" in text:
                drawn = self.filled(text)
            made += self.taken(drawn, [name], range(1, 2), rounding)
        if len(made) > 1:
            self.together.append([name for step in made for name in step.results])
        return made

    def one(self) -> list[Step]:
        def draw() -> tuple[str, list[str], range, str]:
            rounding = self.rng.choices(("exact", "sum", "inexact", "jumps"), (12, 2, 5, 1))[0]
            text = self.rng.choice(ONE[rounding])
            return self.filled(text), [self.value()], range(1, 2), rounding

        return self.tried(draw)

    def two(self) -> list[Step]:
        def draw() -> tuple[str, list[str], range, str]:
            rounding, text = self.rng.choice(TWO)
            return text, [self.value(), self.value()], range(1, 2), rounding

        return self.tried(draw)

    def write(self) -> list[Step]:
        def draw() -> tuple[str, list[str], range, str]:
            if self.chance(35):
                return self.rng.choice(WRITES_OF_TWO), [self.value(), self.value()], range(1), "exact"
            return self.rng.choice(WRITES), [self.value()], range(1), "exact"

        return self.tried(draw)

    def layer(self) -> list[Step]:
        """A convolution, and mostly the norm behind it."""
        bias, affine = self.rng.choice(("{cb}", "None")), self.rng.choice(("{g}, {h}", "None, None", "{g}"))
        text = LAYER.replace("<bias>", bias)
        made = self.taken(self.filled(text), [self.rng.choice(("x3", self.value()))], range(1, 2), "inexact")
        if made and self.chance(85):
            norm = NORM.replace("<affine>", affine)
            made += self.taken(self.filled(norm), [made[0].results[0]], range(1, 2), "inexact")
        return made

    def recipe(self) -> list[Step]:
        """What passes look for: parts of a value that go through the same op and are joined again."""
        return self.recipe_of(RECIPES)

    def aim(self) -> list[Step]:
        """What one of a few passes looks for."""
        if self.chance(20):
            return self.tried(lambda: (EINSUM, [self.value(), self.value()], range(1, 2), "inexact"))
        made = self.recipe_of(AIMED)
        # Nobody else reads what is on the way: most passes leave it alone then.
        hidden = {name for step in made[:-1] for name in step.results}
        self.held |= hidden
        self.together = [names for names in self.together if hidden.isdisjoint(names)]
        return made

    def recipe_of(self, recipes: Sequence[tuple[str, str, str]]) -> list[Step]:
        parts, op, join = self.rng.choice(recipes)
        made = self.tried(lambda: (parts, [self.value()], range(2, MOST_PARTS + 1), "exact"))
        if made and op:
            drawn = self.literals(op, self.trace.values[made[0].results[0]])
            made += [step for name in made[0].results for step in self.taken(drawn, [name], range(1, 2), "exact")]
        names = [name for step in (made[1:] or made) for name in step.results]
        if len(names) > 1:
            self.together.append(names)
            places = ", ".join(f"{{{place}}}" for place in range(len(names)))
            made += self.taken(join.replace("{}", places), names, range(1, 2), "exact")
        return made

    def layers(self) -> list[Step]:
        """Several layers on one value."""
        name, bias = self.value(), self.rng.choice(("", ", {b}"))
        texts = [f"functional.linear({{0}}, {{w{place}}}{bias})" for place in range(self.rng.randint(2, 3))]
        made = [step for text in texts for step in self.taken(self.filled(text), [name], range(1, 2), "inexact")]
        if made:
            self.together.append([step.results[0] for step in made])
        return made

    # ---- how they are drawn

    def value(self) -> str:
        """A value, rather a late one."""
        able = [name for name in self.trace.values if name not in self.held]
        return self.rng.choice(able[-4:] if self.chance(60) else able)

    def run(self, count: int) -> list[str]:
        """Values of one rank that were made together, or one after the other."""
        if self.together and self.chance(75):
            names = self.together[-1] if self.chance(60) else self.rng.choice(self.together)
            return list(names) if self.chance(75) else list(names[self.rng.randrange(len(names)) :])
        able = [name for name in self.trace.values if name not in self.held]
        first = self.rng.randrange(max(1, len(able) - count + 1))
        names = able[first : first + count]
        rank = self.trace.values[names[0]].dim()
        return [name for name in names if self.trace.values[name].dim() == rank]

    def filled(self, text: str) -> str:
        """With layers in their places: a weight and a bias, the same for all or each its own."""
        for word, names in {"{w}": "w", "{ws}": "w", "{b}": "b", "{bs}": "b"}.items():
            text = text.replace(word, f"{{{names}{self.rng.randrange(3)}}}")
        return text

    def tried(self, draw: Callable[[], tuple[str, list[str], range, str]]) -> list[Step]:
        for _ in range(ATTEMPTS):
            made = self.taken(*draw())
            if made:
                return made
        return []

    def taken(self, text: str, names: list[str], counts: range, rounding: str) -> list[Step]:
        """The step, if eager takes it with one of these numbers of results."""
        for held in sorted(self.held):
            if f"{{{held}}}" in text:
                text = text.replace(f"{{{held}}}", f"{{{len(names)}}}")
                names = [*names, held]
        text = self.literals(text, self.trace.values[names[0]])
        for count in counts:
            results = tuple(f"v{self.count + place}" for place in range(count))
            step = Step(text, tuple(names), results, rounding, self.inside)
            try:
                self.trace.add(step)
            except Rejected as rejected:
                if "number of results" in str(rejected):
                    continue
                return []
            self.count += count
            return [step]
        return []
