"""Random programs that assume something of what only a run knows, called with data that may break it.

Sizes come from data (`nonzero`, `masked_select`, `unique`, `item`, custom operators); a check, a view or a broadcast
holds for them in the first call. An operator may give something else than its fake kernel says. Numbers are small and
whole, so all values are exact: whatever a compiled call gives is eager's, bit by bit, or it raises what eager raises,
or what PyTorch's own capture (`aot_eager`) does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "python": {"host": "python"},
    "oracle": {"executor": "oracle"},
    "eager": {"executor": "eager"},
    "plain": {"disable": ("schedule", "loops")},
}
COMMON = {"strict": True, "cache": "off"}
LIES = ("honest", "rows", "dtype", "strides", "rank", "more", "nothing")  # freed memory crashes eager
LENGTHS = (4, 6, 8, 9, 12)
MOST_STATEMENTS = 7
CALLS = 4

# ---- operators of the user


@torch.library.custom_op("ferrite_fuzz::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("ferrite_fuzz::apart", mutates_args=())
def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[x > 0], x[x <= 0]


@apart.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.library.get_ctx().new_dynamic_size
    return x.new_empty(new()), x.new_empty(new())


@torch.library.custom_op("ferrite_fuzz::lies", mutates_args=())
def lies(x: Tensor, how: Tensor) -> Tensor:
    """Two rows of the elements, if it is honest."""
    made = torch.stack([x, x + 1])
    match LIES[int(how)]:
        case "rows":
            return made[:1].clone()
        case "dtype":
            return made.to(torch.int32)
        case "strides":
            return made.t().contiguous().t()
        case "rank":
            return made[None].clone()
        case "more":
            return torch.cat([made, made])
        case "nothing":
            return made[:0].clone()
    return made


@lies.register_fake
def _(x: Tensor, how: Tensor) -> Tensor:
    return x.new_empty((2, *x.shape))


ENVIRONMENT = {"torch": torch, "positive": positive, "apart": apart, "lies": lies}


# ---- programs


@dataclass(frozen=True)
class Assumed:
    """`calls`: for each, the elements of `x` and how `lies` lies. The first call is that with which it is compiled."""

    statements: tuple[str, ...]
    calls: tuple[tuple[tuple[float, ...], int], ...]
    dynamic: bool
    training: bool
    way: str

    @property
    def source(self) -> str:
        return "\n    ".join(["def program(x, how):", *self.statements]) + "\n"

    def function(self) -> Callable[..., Any]:
        environment = dict(ENVIRONMENT)
        exec(compile(self.source, "<program>", "exec"), environment)
        return environment["program"]  # type: ignore[return-value]

    def script(self) -> str:
        return (
            f"import torch\nfrom tests.fuzz.assumed import *\n\n\n{self.source}\n\n"
            f"made = {self!r}\nfor n, call in enumerate(made.calls):\n"
            "    print(n, [outcomes(made, backend)[n] for backend in ('eager', 'aot_eager', 'ferrite')])\n"
        )


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.made: list[str] = []
        self.vectors = ["x"]  # values of one dimension
        self.sizes: dict[str, str] = {}  # of them that only the run knows, by the value
        self.kept: list[str] = []

    def name(self) -> str:
        return f"v{len(self.made)}"

    def data(self, length: int) -> tuple[float, ...]:
        return tuple(float(self.rng.choice((-2, -1, 0, 1, 2, 3, 4))) for _ in range(length))

    def program(self) -> Assumed | None:
        rng = self.rng
        length = rng.choice(LENGTHS)
        self.x = torch.tensor(self.data(length))
        self.how = torch.tensor(0)
        self.values: dict[str, Any] = {**ENVIRONMENT, "x": self.x, "how": self.how}
        self.add(rng.choice(SOURCES))
        for _ in range(rng.randint(1, MOST_STATEMENTS)):
            forms = rng.choices((SOURCES, CHECKS, READERS, LIARS), (2, 5, 5, 1))[0]
            self.add(rng.choice(forms))
        results = [name for name in self.kept if isinstance(self.values[name], Tensor)] or ["x * 2"]
        self.made.append(f"return {', '.join(results)},")
        calls = [(tuple(self.x.tolist()), 0)]
        calls += [(self.data(length), rng.choice((0, 0, rng.randrange(len(LIES))))) for _ in range(CALLS - 2)]
        training = rng.random() < 0.35
        return Assumed(
            tuple(self.made), (*calls, calls[0]), rng.random() < 0.4, training, rng.choice([*WAYS, "native"])
        )

    def add(self, form: str) -> None:
        """A statement, if eager takes it with the first data. {r} is its result, {v} a value with a run-time size, {w}
        one of any size, {k}, {n} and {a}, {b} the size of {v}, of x, and two factors of {k}."""
        rng = self.rng
        chosen = rng.choice([*self.sizes] or ["x"])
        count = int(self.values[chosen]) if form.startswith("#") else len(self.values[chosen])
        first = rng.choice([n for n in range(1, max(count, 1) + 1) if count % n == 0])
        words = {
            "r": self.name(), "v": chosen, "w": rng.choice(self.vectors), "k": count, "n": len(self.x), "a": first,
            "b": count // first, "more": count + len(self.x), "below": max(count - rng.randint(0, 2), 0),
            "above": count + rng.randint(0, 2), "c": rng.choice((2, 3)),
        }  # fmt: skip
        text = form.format(**words)
        values = dict(self.values)
        try:
            exec(text, values)
        except Exception:
            return
        self.made.append(text)
        new = values.keys() - self.values.keys() - {"__builtins__"}
        self.values = values
        for name in sorted(new):
            value = values[name]
            if isinstance(value, Tensor):
                if value.dim() == 1 and value.dtype == torch.float32:
                    self.vectors.append(name)
                    if form in SOURCES:
                        self.sizes[name] = name
                self.kept.append(name)


SOURCES = (
    "{r} = torch.masked_select({w}, {w} > 0)",
    "{r} = {w}[{w} < 2]",
    "{r} = torch.nonzero({w}.detach() > 0)[:, 0].float()",
    "{r} = torch.unique({w}.detach())",
    "{r} = positive({w}.detach())",
    "{r}, {r}o = apart({w}.detach())",
    "{r} = torch.ones(({w}.detach() > 0).sum().item()) * {w}.sum()",
    "{r} = torch.cat([{w}, torch.ones(({w}.detach() > 1).sum().item())])",
    "{r} = torch.repeat_interleave({w}.detach(), ({w}.detach() > 0).long())",
)
CHECKS = (
    "torch._check({v}.size(0) == {k})",
    "torch._check({v}.size(0) % {a} == 0)",
    "torch._check({c} * {v}.size(0) == {c} * {k})",
    "torch._check({v}.size(0) + x.size(0) == {more})",
    "torch._check({v}.size(0) >= {below})",
    "torch._check({v}.size(0) <= {above})",
    "torch._check({v}.size(0) == {w}.size(0))",
    "torch._check(({v}.detach() > 0).sum().item() == (({v}.detach() > 0).sum().item() // {a}) * {a})",
)
READERS = (
    "{r} = {v}.view({a}, {b}) + 1",
    "{r} = {v}.view(-1, {b}) * 2",
    "{r} = {v}.view({a}, -1).sum(1)",
    "{r} = {v} + torch.arange({k}.0)",
    "{r} = {v} * {w}",
    "{r} = torch.mm({v}.view({a}, {b}), torch.ones({b}, 3)) + 1",
    "{r} = torch.cat([x, {v}]) + torch.ones({more})",
    "{r} = {v}.expand({c}, {k}).sum(0)",
    "{r} = {v}.flip(0) + {v}",
    "{r} = ({v} * 2).relu()",
    "{r} = torch.cond(x.sum() > -1, lambda y: y + 1, lambda y: y * 2, ({v}.clone(),))",
    "{r} = torch.cond(x.sum() > -1, lambda y: y[y > 0].view({a}, -1).sum(), lambda y: y.sum(), ({v}.clone(),))",
)
LIARS = (
    "{r} = lies({w}.detach(), how) * 2",
    "{r} = lies({w}.detach(), how).t().sum(0)",
    "{r} = torch.mm(lies(x.detach(), how), torch.ones({n}, 2)) + 1",
)


def generate(seed: int, number: int) -> Assumed:
    """Program `number` of a seed."""
    attempt = 0
    while True:
        made = _Draw(random.Random(f"assumed:{seed}:{number}:{attempt}")).program()
        if made is not None:
            return made
        attempt += 1


# ---- judge


@dataclass(frozen=True)
class Outcome:
    """Of one call: an exception's type and words, or everything that it gives."""

    error: str = ""
    said: str = ""
    given: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.error}: {self.said}" if self.error else str([each.tolist() for each in self.given])[:300]


def outcomes(made: Assumed, backend: str) -> list[Outcome]:
    """Of every call, in order, through one compiled function."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    function = made.function()
    if backend != "eager":
        options = {"options": COMMON | WAYS[made.way]} if backend == "ferrite" else {}
        function = torch.compile(function, backend=backend, dynamic=made.dynamic, **options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        return [_outcome(function, made, data, how) for data, how in made.calls]


def _outcome(function: Callable[..., Any], made: Assumed, data: Sequence[float], how: int) -> Outcome:
    x = torch.tensor(data, requires_grad=made.training)
    try:
        given = function(x, torch.tensor(how))
        differentiable = [each.sum() for each in given if each.requires_grad]
        if differentiable:
            torch.stack(differentiable).sum().backward()
        gradient = () if x.grad is None else (x.grad,)
        return Outcome(given=tuple(each.detach().clone() for each in (*given, *gradient)))
    except Exception as error:
        return Outcome(type(error).__name__, str(error).partition("\n")[0])


def difference(made: Assumed) -> str:
    """What a compiled call does that neither eager nor PyTorch's own capture does; nothing if all is well."""
    eager = outcomes(made, "eager")
    if eager[0].error:
        return ""
    found = outcomes(made, "ferrite")
    if all(map(_agree, found, eager)):
        return ""
    captured = outcomes(made, "aot_eager")
    if captured[0].error:
        return ""  # PyTorch does not capture it
    for n, (have, wanted) in enumerate(zip(found, eager, strict=True)):
        if _agree(have, wanted) or _agree(have, captured[n]):
            continue
        if have.error == "RuntimeError" and LIES[made.calls[n][1]] != "honest" and "lies" in made.source:
            continue  # eager goes on with what a lying operator gives, a kernel cannot
        if have.said.startswith(("Runtime assertion failed", "Eq(")) and any(1 in each.shape for each in wanted.given):
            continue  # tracing assumes that no size from data is one, and asserts it; eager broadcasts
        return f"call {n} gives {have}; eager {wanted}; aot_eager {captured[n]}"
    return ""


def _agree(one: Outcome, other: Outcome) -> bool:
    if one.error or other.error:
        return one.error == other.error
    return len(one.given) == len(other.given) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one.given, other.given, strict=True)
    )


def shrunk(made: Assumed) -> Assumed:
    """With as few statements and calls as still differ."""
    progress = True
    while progress:
        progress = False
        fewer = [
            replace(made, statements=made.statements[:n] + made.statements[n + 1 :])
            for n in range(len(made.statements) - 1)
        ]
        fewer += [replace(made, calls=made.calls[:n] + made.calls[n + 1 :]) for n in range(1, len(made.calls))]
        for candidate in fewer:
            if _differs(candidate):
                made, progress = candidate, True
                break
    return made


def _differs(made: Assumed) -> bool:
    try:
        return bool(difference(made))
    except Exception:
        return False


def check(seed: int, number: int, shrink: bool) -> tuple[Counter[str], tuple[str, ...]]:
    """What became of a program, and a report if it differs."""
    made = generate(seed, number)
    said = difference(made)
    if not said:
        return Counter({"equal": 1}), ()
    small = shrunk(made) if shrink else made
    report = f"program {number} of seed {seed}, {made.way}: {difference(small) or said}\n\n{small.script()}"
    return Counter({"different": 1}), (report,)
