"""Draws random programs from the table. Number n of a seed is always the same program.

A step is drawn (family, row, operands, literals) and tried in eager; what eager does not take, or what would not be
honest, is forgotten and another one drawn. So a program only has steps that run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import torch

from .programs import LAYOUTS, VALUES, Input, Program, Rejected, Step, Trace, traced
from .table import FAMILIES, RAISES, Row

DTYPES = {
    "float32": 36,
    "float64": 8,
    "bfloat16": 12,
    "float16": 8,
    "int64": 12,
    "int32": 6,
    "int16": 2,
    "int8": 3,
    "uint8": 4,
    "bool": 6,
}
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 70)
KINDS: dict[str, Callable[[torch.Tensor], bool]] = {
    "a": lambda value: True,
    "f": lambda value: value.is_floating_point(),
    "b": lambda value: value.dtype is torch.bool,
    "n": lambda value: value.dtype is not torch.bool,
    "i": lambda value: not value.is_floating_point() and value.dtype is not torch.bool,
}
ATTEMPTS = 30  # draws for one step, after which the program is left as it is
MOST_RESULTS = 4
_WORD = re.compile(r"<([a-z]+)>")


def generate(seed: int, number: int) -> Program:
    """Program `number` of a seed. It runs in eager."""
    attempt = 0
    while True:
        made = Draw(random.Random(f"{seed}:{number}:{attempt}")).program()
        if made is not None:
            return made
        attempt += 1


class Draw:
    """One program in the making."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0

    def chance(self, percent: float) -> bool:
        return self.rng.random() * 100 < percent

    def program(self) -> Program | None:
        dynamic, training, mutates = self.chance(30), self.chance(40), self.chance(35)
        inputs = self.inputs(training)
        try:
            self.trace = Trace(inputs)
        except (Rejected, RuntimeError, IndexError, TypeError):
            return None
        families = {name: entry for name, entry in FAMILIES.items() if mutates or name != "mutate"}
        steps: list[Step] = []
        for _ in range(self.rng.randint(2, 10)):
            step = self.step(families)
            if step is not None:
                steps.append(step)
        if not steps:
            return None
        made = Program(tuple(inputs), tuple(steps), self.outputs(inputs, steps), dynamic)
        if self.chance(4):
            made = self.raising(made)
        return self.resized(made) if dynamic else made

    # ---- inputs

    def inputs(self, training: bool) -> list[Input]:
        pool = [0] if self.chance(3) else []
        pool += [self.rng.choice(EXTENTS) for _ in range(3)]
        shape = tuple(self.rng.choice(pool) for _ in range(self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))))
        while len(shape) > 1 and _count(shape) > 4000:
            shape = shape[1:]
        leading = self.dtype()
        made = [self.input(0, shape, leading, training)]
        for place in range(1, self.rng.choice((1, 2, 2, 3, 3, 4))):
            if self.chance(4):
                view = self.rng.choice(("x0[1:]", "x0.t()", "x0[..., ::2]", "x0.flatten()[1:]", "x0"))
                made.append(Input(f"x{place}", leading, (), view=view))
                continue
            dtype = leading if self.chance(50) else self.dtype()
            made.append(self.input(place, self.related(shape, pool), dtype, training))
        return made

    def input(self, place: int, shape: tuple[int, ...], dtype: str, training: bool) -> Input:
        layout = "contiguous" if self.chance(45) else self.rng.choice(LAYOUTS)
        values = self.rng.choice(VALUES) if not self.chance(40) else "normal"
        wants = training and getattr(torch, dtype).is_floating_point and self.chance(75)
        return Input(f"x{place}", dtype, shape, layout, values, self.rng.randrange(1000), wants)

    def dtype(self) -> str:
        return self.rng.choices(list(DTYPES), list(DTYPES.values()))[0]

    def related(self, shape: tuple[int, ...], pool: list[int]) -> tuple[int, ...]:
        """The same shape, or one that broadcasts with it, or its reverse, or one of its own."""
        kind = self.rng.randrange(6)
        if kind < 2:
            return shape
        if kind == 2:
            return tuple(n if self.chance(60) else 1 for n in shape)
        if kind == 3:
            return shape[self.rng.randint(0, len(shape)) :]
        if kind == 4:
            return shape[::-1]
        return tuple(self.rng.choice(pool) for _ in range(self.rng.randint(0, 2)))

    # ---- steps

    def step(self, families: dict[str, tuple[int, tuple[Row, ...]]]) -> Step | None:
        weights = [weight for weight, _ in families.values()]
        for _ in range(ATTEMPTS):
            _, rows = self.rng.choices(list(families.values()), weights)[0]
            step = self.attempt(self.rng.choice(rows))
            if step is not None:
                return step
        return None

    def attempt(self, row: Row) -> Step | None:
        """A step of this row that eager takes, or None."""
        operands = [self.operand(kind) for kind in row.operands]
        if None in operands:
            return None
        names = tuple(name for name in operands if name is not None)
        text = self.literals(row.text, self.trace.values[names[0]])
        for results in (0,) if row.is_statement or row.rounding == "raises" else (1, 2, 3, MOST_RESULTS):
            step = Step(text, names, tuple(f"v{self.count + n}" for n in range(results)), row.rounding)
            try:
                self.trace.add(step)
            except Rejected as rejected:
                if "number of results" in str(rejected):
                    continue
                return None
            self.count += results
            return step
        return None

    def operand(self, kind: str) -> str | None:
        """A value of this kind, rather a late one."""
        able = [name for name, value in self.trace.values.items() if KINDS[kind](value)]
        if not able:
            return None
        return self.rng.choice(able[-3:] if self.chance(60) else able)

    def raising(self, made: Program) -> Program:
        """With a last step that raises."""
        for _ in range(ATTEMPTS):
            step = self.attempt(self.rng.choice(RAISES))
            if step is not None:
                # A result that nobody wants may be left out by who compiles, and its error with it.
                step = replace(step, results=("error",))
                return replace(made, steps=(*made.steps, step), outputs=(*made.outputs[:-1], "error"))
        return made

    def literals(self, text: str, value: torch.Tensor) -> str:
        """The text with a literal in the place of every word in <>."""
        drawn: list[str] = []
        for word in _WORD.findall(text):
            drawn.append(drawn[-1] if word == "same" else self.literal(word, value))
        return _WORD.sub(lambda _: drawn.pop(0), text)

    def literal(self, word: str, value: torch.Tensor) -> str:
        rng, rank = self.rng, value.dim()
        match word:
            case "dim":
                return str(rng.randrange(-rank, rank)) if rank else "0"
            case "dims":
                return str(tuple(rng.sample(range(rank), rng.randint(1, rank)))) if rank else "()"
            case "permutation":
                return str(tuple(rng.sample(range(rank), rank)))
            case "keep":
                return str(rng.random() < 0.5)
            case "bit":
                return rng.choice("01")
            case "scalar":
                return rng.choice(("2", "-1", "0.5", "3", "0", "1.5", "-2.25", "True", "0.0", "1e-3"))
            case "float":
                return rng.choice(("0.5", "1.5", "-0.25", "2.5"))
            case "nonzero":
                return rng.choice(("2", "3", "-2", "7", "1.5", "-0.75"))
            case "int":
                return rng.choice(("0", "1", "-1", "2", "3"))
            case "diagonal":
                return rng.choice(("0", "1", "-1", "2"))
            case "slice":
                return rng.choice(("1:", ":-1", "::2", "1:3", "-2:", ":1", "1::3", "2:2"))
            case "dtype":
                return f"torch.{self.dtype()}"
            case "shape":
                return self.shape(value)
        raise ValueError(f"no literal is called {word!r}")

    def shape(self, value: torch.Tensor) -> str:
        """Sizes for a reshape: in terms of the value's own, or as numbers."""
        form = self.rng.randrange(5)
        if form == 0:
            return "-1"
        if form == 1:
            return "-1, {0}.shape[-1]"
        if form == 2:
            return "{0}.shape[0], -1"
        if form == 3:
            return "{0}.shape[-1], -1"
        count, sizes = value.numel(), []
        while count > 1 and len(sizes) < 3:
            factors = [n for n in range(2, count + 1) if count % n == 0]
            sizes.append(self.rng.choice(factors))
            count //= sizes[-1]
        sizes.append(count)
        self.rng.shuffle(sizes)
        return ", ".join(map(str, sizes))

    # ---- the end

    def outputs(self, inputs: list[Input], steps: list[Step]) -> tuple[str, ...]:
        """What no step uses, and a few more: values on the way, inputs."""
        used = {name for step in steps for name in step.operands}
        made = [name for step in steps for name in step.results]
        chosen = [name for name in made if name not in used or self.chance(15)]
        chosen += [each.name for each in inputs if self.chance(4)]
        return tuple(chosen[-6:]) or (inputs[0].name,)

    def resized(self, made: Program) -> Program:
        """With other sizes in a second call, if the program takes any."""
        extents = sorted({n for each in made.inputs for n in each.sizes if n > 1})
        for _ in range(3):
            if not extents:
                break
            old, new = self.rng.choice(extents), self.rng.choice(EXTENTS)
            other = replace(made, resized=((old, new),))
            if old != new and traced(other):
                return other
        return made


def _count(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
