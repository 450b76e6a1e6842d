"""How the machine calls an operator through PyTorch's dispatcher: one word for each argument of the operator's schema.

    form_of(call)     what the words are; None if an argument has no word, and the operator is called in Python

A form is data; `native_host.py` writes the instructions that make its words. The dispatcher takes what it is given: a
handle, a list, an optional and a text are made anew for each call. It gives handles, the first in the first
word, or one list of them.

What has no form: numbers of unknown type (`Scalar`), generators, operators that give anything but tensors, and custom
operators, which belong to Python.

An operator that failed is called again, for its exception: the dispatcher only tells its words. One that writes to its
arguments is then given copies of these (`written`), so that what the failed call left of them stays. One that does so
with random numbers is called in Python.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ferrite.errors import Unsupported
from ferrite.graph.names import OF_TORCH, resolve
from ferrite.graph.query import CHANGING_STORAGE
from ferrite.host.nodes import HOLD, Call
from ferrite.syntax import Named, Ref, refs

DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex32: 8, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.float8_e5m2fnuz: 25, torch.float8_e4m3fnuz: 26,
    torch.uint16: 27, torch.uint32: 28, torch.uint64: 29, torch.float8_e8m0fnu: 44,
}  # fmt: skip
CPU = 0
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}
_LIST = ("List[Tensor]",)
_NAMESPACES = ("aten.", "mkldnn.")


@dataclass(frozen=True)
class Word:
    """A number, as bits; 0 stands for None too."""

    value: int


@dataclass(frozen=True)
class Handle:
    """A tensor of the program."""

    name: str


@dataclass(frozen=True)
class Size:
    """A whole number of the program."""

    name: str


@dataclass(frozen=True)
class Text:
    content: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Item, ...]


@dataclass(frozen=True)
class Some:
    """What is optional and there."""

    item: Item


Item = Word | Handle | Size | Text | Items | Some


@dataclass(frozen=True)
class Form:
    """A call as the dispatcher takes it."""

    name: str
    overload: str
    words: tuple[Item, ...]
    results: int  # how many words it gives
    gives_list: bool  # one word, a list of tensors
    written: tuple[str, ...] = ()  # tensors that it writes to

    @property
    def length(self) -> int:
        return max(len(self.words), self.results, 1)


def form_of(call: Call) -> Form | None:
    if not call.target.startswith(_NAMESPACES):
        return None
    op = resolve(call.target)
    if not isinstance(op, OpOverload) or not _is_plain(op):
        return None
    try:
        arguments = _arguments(call, op)
        words = [_word(kind, value) for kind, value in zip(_kinds(op), arguments, strict=True)]
    except Unsupported:
        return None
    kinds = _given(op)
    written = refs([value for value, is_written in zip(arguments, _writes(op), strict=True) if is_written])
    return Form(op._schema.name, op._schema.overload_name, tuple(words), len(kinds), kinds == _LIST, tuple(written))


@cache
def _is_plain(op: OpOverload) -> bool:
    """Whether it gives tensors only, and what it writes depends on nothing but its arguments."""
    is_random_write = any(_writes(op)) and torch.Tag.nondeterministic_seeded in op.tags
    return not is_random_write and (_given(op) == _LIST or all(kind == "Tensor" for kind in _given(op)))


def may_move_memory(call: Call) -> bool:
    """Whether a call may leave a tensor that it was given with another storage, or a storage with other memory. What no
    schema of PyTorch's own describes may do anything."""
    return changes_storage(call) or not (call.target == HOLD or call.target.startswith(OF_TORCH))


def changes_storage(call: Call) -> bool:
    """Whether a call is known to do that."""
    return call.target.rpartition(".")[0].replace(".", "::") in CHANGING_STORAGE


@cache
def _writes(op: OpOverload) -> tuple[bool, ...]:
    return tuple(each.alias_info is not None and each.alias_info.is_write for each in op._schema.arguments)


def _given(op: OpOverload) -> tuple[str, ...]:
    return tuple(str(each.type) for each in op._schema.returns)


@cache
def _kinds(op: OpOverload) -> tuple[str, ...]:
    return tuple(str(each.real_type) for each in op._schema.arguments)


def _arguments(call: Call, op: OpOverload) -> Sequence[Any]:
    """Values in the order of the schema. Raises `Unsupported` if they are not those of the schema."""
    expected = op._schema.arguments
    positional = sum(not each.kwarg_only for each in expected)
    if len(call.args) > positional or not call.kwargs.keys() <= {each.name for each in expected}:
        raise Unsupported("arguments that are not those of the schema")
    found: list[Any] = list(call.args)
    for each in expected[len(call.args) :]:
        if each.name in call.kwargs:
            found.append(call.kwargs[each.name])
        elif each.has_default_value():
            found.append(each.default_value)
        else:
            raise Unsupported(f"no argument {each.name}")
    return found


def _word(kind: str, value: Any) -> Item:
    """`kind`: as the schema has it, `List[int]`. Raises `Unsupported` for what has no word."""
    value = resolve(value.path) if isinstance(value, Named) else value
    outer, _, inner = kind.removesuffix("]").partition("[")
    match outer, value:
        case "Optional", None:
            return Word(0)
        case "Optional", _:
            return Some(_word(inner, value))
        case "List", list() | tuple():
            return Items(tuple(_word(inner, item) for item in value))
        case "Tensor", Ref(name=name):
            return Handle(name)
        case "int", Ref(name=name):
            return Size(name)
        case (("int" | "bool"), bool() | int()):
            return Word(int(value))
        case "float", bool() | int() | float():
            return Word(bits_of(float(value)))
        case "str", str():
            return Text(value)
        case "ScalarType", torch.dtype() if value in DTYPES:
            return Word(DTYPES[value])
        case "ScalarType", int():  # a default
            return Word(value)
        case "MemoryFormat", torch.memory_format():
            return Word(_FORMATS[value])
        case "Device", torch.device(type="cpu", index=index):
            return Word(CPU << 32 | (0xFFFFFFFF if index is None else index))
        case "Layout", torch.layout() if value is torch.strided:
            return Word(0)
    raise Unsupported(f"a {kind} that is {value!r}")


def bits_of(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
