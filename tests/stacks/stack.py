"""A random stack of modules as data: layers, input, how it is called; its text is Python that runs as it stands.

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.m1 = nn.Conv2d(4, 6, 3, padding=1)

        def forward(self, x):
            v1 = self.m1(x)
            v2 = v1.relu_()
            return v2

A stack is made of a recipe: lists of numbers, one for the setting and one for each layer. Any recipe gives the same
stack again, and one without some of its lists, or with smaller numbers, gives a simpler stack (`shrink`).
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.fuzz.choices import Choices
from tests.fuzz.programs import layout_of

from .layers import Draw, Layer, Shape, draw_embedding, draw_layer

LARGEST = 20000  # elements of a value
FARTHEST = 1e4  # magnitude of a value
MOST_LAYERS = 7
ATTEMPTS = 12  # draws for one layer, after which the stack is left as it is
LAYOUTS = ("contiguous", "channels_last", "transposed", "gaps", "expanded")
TOKENS = 10


@dataclass(frozen=True)
class Recipe:
    setting: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Setting:
    """How a stack is called.

    second:     sizes of the second call
    cotangent:  how the gradients of outputs lie: like the outputs, channels last, or expanded from one number
    layout:     Ferrite's option
    """

    sizes: Shape
    second: Shape
    layout_of_input: str = "contiguous"
    is_channels_last: bool = False
    holds_tokens: bool = False
    is_training: bool = True
    wants_gradients: bool = True
    dynamic: bool | None = False
    cotangent: str = "like"
    layout: str = "auto"
    taps: int = 0
    may_raise: bool = False


@dataclass(frozen=True)
class Stack:
    """`outputs`: places of the values that are returned. `raises`: eager raises an error in the first call."""

    setting: Setting
    layers: tuple[Layer, ...]
    recipe: Recipe
    raises: bool = False

    @property
    def outputs(self) -> tuple[int, ...]:
        last, taps = len(self.layers), self.setting.taps
        return (last, *(place for place in range(1, last) if taps >> place & 1))


# ---- drawing


def draw_setting(choices: Choices) -> Setting:
    draw = Draw(choices, [(1, 1)])
    rank = draw.choose((4, 4, 4, 4, 3, 3, 5, 2))
    batch = draw.choose((1, 2, 3))
    channels = draw.choose((4, 3, 6, 8, 1, 5, 12))
    extents = {3: (9, 1, 7, 16, 17, 12), 4: (7, 5, 8, 9, 11, 13, 1), 5: (5, 4, 3, 6, 7)}.get(rank, (3,))
    sizes = (batch, channels, *(draw.choose(extents) for _ in range(rank - 2)))
    dynamic = draw.choose((False, False, True, None))
    second = sizes
    if dynamic is not False:
        kind = draw.choose(("all", "batch", "extents"))
        grown = tuple(n + draw.choose((1, 2, 3)) for n in sizes[2:]) if kind != "batch" else sizes[2:]
        second = (batch if kind == "extents" else draw.choose((2, 1, 3, 4)), channels, *grown)
    layout = draw.choose(("contiguous", "contiguous", *LAYOUTS))
    wants_gradients = draw.choose((True, True, True, False))
    return Setting(
        sizes,
        second,
        layout_of_input=layout,
        is_channels_last=draw.choose((False, False, True)),
        holds_tokens=rank == 2 and draw.flag(),
        is_training=draw.choose((True, True, True, False)) if wants_gradients else draw.flag(),
        wants_gradients=wants_gradients,
        dynamic=dynamic,
        cotangent=draw.choose(("like", "like", "like", "channels_last", "expanded")),
        layout=draw.choose(("auto", "auto", "on")),
        taps=draw.choose((0, 0, draw.choices.number(0, 2**MOST_LAYERS))),
        may_raise=draw.choose((False,) * 12 + (True,)),
    )


def generate(seed: int, number: int) -> Stack:
    """Stack `number` of a seed. Eager takes it, forwards and backwards, or raises in its last layer."""
    rng = random.Random(f"{seed}:{number}")
    while True:
        choices = Choices(rng)
        draw_setting(choices)
        stack = made_of(Recipe(tuple(choices.made)))
        assert stack is not None
        for _ in range(rng.randint(2, MOST_LAYERS)):
            stack = longer(stack, rng)
            if stack.raises:
                break
        if stack.layers:
            return stack


def longer(stack: Stack, rng: random.Random) -> Stack:
    """With one layer more that eager takes, or as it is."""
    shapes = shapes_of(stack)
    for _ in range(ATTEMPTS):
        choices = Choices(rng)
        layer = next_layer(stack, choices, shapes)
        if layer is None:
            continue
        recipe = replace(stack.recipe, layers=(*stack.recipe.layers, tuple(choices.made)))
        found = checked(replace(stack, layers=(*stack.layers, layer), recipe=recipe))
        if found is not None:
            return found
    return stack


def next_layer(stack: Stack, choices: Choices, shapes: list[Shape]) -> Layer | None:
    if stack.setting.holds_tokens and not stack.layers:
        return draw_embedding(choices, shapes[0])
    return draw_layer(choices, shapes)


def made_of(recipe: Recipe) -> Stack | None:
    """The stack of a recipe, if eager takes it."""
    stack = Stack(draw_setting(Choices(given=recipe.setting)), (), Recipe(recipe.setting))
    for numbers in recipe.layers:
        layer = next_layer(stack, Choices(given=numbers), shapes_of(stack))
        if layer is None or stack.raises:
            return None
        longer = replace(
            stack, layers=(*stack.layers, layer), recipe=replace(recipe, layers=(*stack.recipe.layers, numbers))
        )
        found = checked(longer)
        if found is None:
            return None
        stack = found
    return stack


class Unfit(Exception):
    """A stack that would show nothing: a value is too large, empty, not finite, or no tensor of floats."""


def checked(stack: Stack) -> Stack | None:
    """The stack, if eager takes it; with the sizes of the first call twice, if those of the second call do not fit."""
    try:
        values_of(stack, 0)
    except Unfit:
        return None
    except Exception as error:
        is_fit = stack.setting.may_raise and type(error) in (RuntimeError, ValueError)
        return replace(stack, raises=True) if is_fit else None
    if stack.setting.second != stack.setting.sizes:
        try:
            values_of(stack, 1)
        except Exception:
            stack = replace(stack, setting=replace(stack.setting, second=stack.setting.sizes))
    return stack


def shapes_of(stack: Stack) -> list[Shape]:
    return [stack.setting.sizes, *(tuple(value.shape) for value in values_of(stack, 0))]


def values_of(stack: Stack, call: int) -> list[torch.Tensor]:
    """What every layer gives in eager, in a call that is the first of its model; with a backward pass."""
    if not stack.layers:
        return []
    values: list[torch.Tensor] = []

    def noted(value: Any) -> None:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not 0 < value.numel() <= LARGEST:
            raise Unfit
        if not bool((value.detach().abs() <= FARTHEST).all()):
            raise Unfit
        values.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = build(stack, noted)
        given = input_of(stack, call)
        with torch.set_grad_enabled(stack.setting.wants_gradients):
            result = model(given)
        if stack.setting.wants_gradients:
            outputs = [each for each in outputs_of(result) if each.requires_grad]
            leaves = leaves_of(given, model.parameters())
            if not outputs or not leaves:
                raise Unfit
            gradients = torch.autograd.grad([each.sum() for each in outputs], leaves, allow_unused=True)
            if any(each is not None and not bool(each.isfinite().all()) for each in gradients):
                raise Unfit
    return values


def outputs_of(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def leaves_of(given: torch.Tensor, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in (given, *parameters) if each.requires_grad]


# ---- text


def source(stack: Stack, disturbed: bool = False) -> str:
    """The class. If disturbed, what every layer gives goes through `noted`."""
    names = ["x", *(f"v{place}" for place in range(1, len(stack.layers) + 1))]
    lines = ["class Stack(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        self.m{n} = {layer.module}" for n, layer in enumerate(stack.layers, 1) if layer.module]
    lines += ["", "    def forward(self, x):"]
    for n, layer in enumerate(stack.layers, 1):
        text = layer.text.format(*(names[place] for place in layer.operands), m=f"self.m{n}")
        lines.append(f"        v{n} = {text}")
        if disturbed:
            lines.append(f"        noted(v{n})")
    return "\n".join([*lines, f"        return {', '.join(names[place] for place in stack.outputs)}", ""])


def prepare(model: nn.Module, is_channels_last: bool) -> None:
    """Weights of norms that are not one, statistics that are not zero, and weights of images as they are to lie."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.2 * torch.randn(value.shape, generator=generator)
        for name, value in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value += torch.rand(value.shape, generator=generator)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if is_channels_last else {}
    for value in model.parameters():
        if value.dim() in formats:
            value.data = value.data.contiguous(memory_format=formats[value.dim()])


def build(stack: Stack, noted: Callable[[torch.Tensor], None] | None = None) -> nn.Module:
    environment: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "noted": noted}
    exec(compile(source(stack, noted is not None), "<stack>", "exec"), environment)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = environment["Stack"]()
    prepare(model, stack.setting.is_channels_last)
    return model.train(stack.setting.is_training)


def input_of(stack: Stack, call: int) -> torch.Tensor:
    setting = stack.setting
    sizes = setting.second if call else setting.sizes
    generator = torch.Generator().manual_seed(100 + call)
    if setting.holds_tokens:
        return torch.randint(TOKENS, sizes, generator=generator)
    if setting.layout_of_input == "channels_last":
        made = torch.randn(sizes[0], *sizes[2:], sizes[1], generator=generator).movedim(-1, 1)
    else:
        strides, offset, count = layout_of(sizes, setting.layout_of_input)
        made = torch.randn(count, generator=generator).as_strided(sizes, strides, offset)
    return made.requires_grad_(setting.wants_gradients)


# ---- smaller ones


def simpler(stack: Stack) -> Iterator[Recipe]:
    """Recipes of simpler stacks: fewer layers, a plainer setting, plainer layers."""
    recipe, setting = stack.recipe, list(stack.recipe.setting)
    for length in range(1, len(recipe.layers)):
        yield replace(recipe, layers=recipe.layers[:length])
    for place in range(len(recipe.layers)):
        yield replace(recipe, layers=recipe.layers[:place] + recipe.layers[place + 1 :])
    for place in reversed(range(len(setting))):
        if setting[place]:
            yield replace(recipe, setting=(*setting[:place], 0, *setting[place + 1 :]))
    for place, numbers in enumerate(recipe.layers):
        for which in range(1, len(numbers)):  # the first one is the row
            if numbers[which]:
                plainer = (*numbers[:which], 0, *numbers[which + 1 :])
                yield replace(recipe, layers=(*recipe.layers[:place], plainer, *recipe.layers[place + 1 :]))


# ---- a script

_SCRIPT = """
def inputs():
{inputs}


def run(call, model, dtype):
    \"\"\"Outputs, gradients and buffers of both calls.\"\"\"
    found = {{}}
    for number, x in enumerate(inputs()):
        torch.manual_seed(number)
        if x.is_floating_point():
            x = x.detach().to(dtype).requires_grad_({gradients})
        with torch.set_grad_enabled({gradients}):
            made = call(x)
        made = [made] if isinstance(made, torch.Tensor) else list(made)
        names = {{f"output {{n}}": each.detach().clone() for n, each in enumerate(made)}}
        leaves = {{"x": x, **dict(model.named_parameters())}}
        leaves = {{name: each for name, each in leaves.items() if each.requires_grad}}
        made = [each for each in made if each.requires_grad]
        starts = [torch.randn(each.shape, generator=torch.Generator().manual_seed(n)) for n, each in enumerate(made)]
        starts = [start(each, like) for each, like in zip(starts, made)]
        gradients = torch.autograd.grad(made, list(leaves.values()), starts, allow_unused=True) if made else ()
        names |= {{f"gradient of {{name}}": each for name, each in zip(leaves, gradients) if each is not None}}
        names |= {{name: each.detach().clone() for name, each in model.named_buffers()}}
        found |= {{f"call {{number}}, {{name}}": each for name, each in names.items()}}
    return found


def start(cotangent, output):
{start}


def off(one, two):
    one, two = one.detach().double(), two.detach().double()
    return f"{{((one - two).abs().max() / two.abs().max().clamp(min=1e-30)).item():.1e}}"


def made(dtype=torch.float32):
    torch.manual_seed(0)
    model = Stack()
    prepare(model, {is_channels_last})
    return model.train({training}).to(dtype)


backend = sys.argv[1] if len(sys.argv) > 1 else "ferrite"
options = {options!r} if backend == "ferrite" else None
torch._dynamo.config.allow_rnn = True
model = made()
eager = run(model, model, torch.float32)
model = made(torch.float64)
wide = run(model, model, torch.float64)
model = made()
found = run(torch.compile(model, backend=backend, dynamic={dynamic}, options=options), model, torch.float32)
for name in eager:
    one, two, three = found[name], eager[name], wide[name]
    print(f"{{name:40}} off eager {{off(one, two)}}, off float64 {{off(one, three)}};"
          f" eager off float64 {{off(two, three)}}; strides {{tuple(one.stride())}}, eager's {{tuple(two.stride())}}")
"""


def script(stack: Stack, options: Mapping[str, Any]) -> str:
    """A script that shows a difference: argv[1] is the backend. Float64 is eager's, not formulas of norms."""
    setting = stack.setting
    head = ["import sys", "", "import torch", "import torch.nn.functional as F", "from torch import nn", "", ""]
    start = {
        "like": "    return torch.empty_like(output.detach()).copy_(cotangent)",
        "channels_last": "    cotangent = cotangent.to(output.dtype)\n"
        "    return cotangent.movedim(1, -1).contiguous().movedim(-1, 1) if cotangent.dim() > 2 else cotangent",
        "expanded": "    return torch.ones((), dtype=output.dtype).expand(output.shape)",
    }[setting.cotangent]
    return (
        "\n".join(head)
        + source(stack)
        + "\n\n"
        + inspect.getsource(prepare)
        + "\n"
        + _SCRIPT.format(
            inputs="\n".join(_input_text(stack)),
            gradients=setting.wants_gradients,
            start=start,
            is_channels_last=setting.is_channels_last,
            training=setting.is_training,
            options=dict(options),
            dynamic=setting.dynamic,
        )
    )


def _input_text(stack: Stack) -> list[str]:
    setting, lines = stack.setting, []
    for call, sizes in enumerate((setting.sizes, setting.second)):
        generator = f"generator=torch.Generator().manual_seed({100 + call})"
        if setting.holds_tokens:
            lines.append(f"    yield torch.randint({TOKENS}, {sizes}, {generator})")
        elif setting.layout_of_input == "channels_last":
            last = (sizes[0], *sizes[2:], sizes[1])
            lines.append(f"    yield torch.randn({last}, {generator}).movedim(-1, 1)")
        else:
            strides, offset, count = layout_of(sizes, setting.layout_of_input)
            made = f"torch.randn({count}, {generator})"
            lines.append(f"    yield {made}.as_strided({sizes}, {strides}, {offset})")
    return lines
