"""What AOTAutograd knows about a compiled function, as plain data and back.

Around compiled graphs stand wrappers that write to inputs, rebuild aliases, and connect forward and backward; PyTorch
makes them from a `ViewAndMutationMeta`, a tree of inert dataclasses. Here such a tree becomes nested lists, and nested
lists become such a tree again, made of the classes named here and of no others. What has no place in it (a subclass of
Tensor, an effect token, a symbolic size) is `Unsupported`: such a function is not cached.
"""

from __future__ import annotations

import dataclasses
import enum
from functools import cache
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors, schemas
from torch._functorch._aot_autograd.functional_utils import ViewMetaSequence
from torch._subclasses.functional_tensor import FunctionalTensor

from ferrite.errors import Unsupported

_SCHEMAS = ("ViewAndMutationMeta", "InputAliasInfo", "OutputAliasInfo", "PlainTensorMeta", "MemoryFormatMeta")
_ENUMS = {"OutputType": schemas.OutputType, "InverseReturnMode": torch._C._functionalization.InverseReturnMode}
_TYPES: dict[str, type] = {
    "Tensor": torch.Tensor, "FunctionalTensor": FunctionalTensor, "Parameter": torch.nn.Parameter,
    "SymInt": torch.SymInt, "SymFloat": torch.SymFloat, "SymBool": torch.SymBool,
    "int": int, "float": float, "bool": bool, "NoneType": type(None),
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items()}
_FORMATS = {
    str(kept): kept
    for kept in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def pack(value: Any) -> Any:
    """None, numbers and texts as they are; everything else as a list that starts with what it is."""
    match value:
        case None | str():
            return value
        case enum.Enum():
            return ["enum", type(value).__name__, value.name]
        case bool() | int() | float():
            return value
        case tuple():  # torch.Size too
            return ["tuple", *map(pack, value)]
        case list():
            return ["list", *map(pack, value)]
        case set() | frozenset():
            return ["set", *map(pack, sorted(value))]
        case dict() if not value:
            return ["dict"]
        case type() if value in _NAMES:
            return ["type", _NAMES[value]]
        case torch.memory_format():
            return ["format", str(value)]
        case ViewMetaSequence():
            return ["views", *([type(view).__name__, pack(view.as_tuple())] for view in value.sequence)]
    kind: Any = type(value)
    name = kind.__name__
    if kind.__module__ == torch._C._functionalization.__name__ and name in _ENUMS:
        return ["enum", name, getattr(value, "name", "")]
    if _classes().get(name) is kind:
        return ["data", name, {field.name: pack(getattr(value, field.name)) for field in _fields(kind)}]
    raise Unsupported(f"a {name} in what AOTAutograd knows", why="only plain tensors and sizes can be stored")


def unpack(packed: Any) -> Any:
    """The inverse of `pack`. Raises `ValueError` for whatever it did not make."""
    if not isinstance(packed, list):
        return packed
    try:
        match packed:
            case ["enum", name, member]:
                return getattr(_ENUMS[name], member)
            case ["tuple", *items]:
                return tuple(map(unpack, items))
            case ["list", *items]:
                return [unpack(item) for item in items]
            case ["set", *items]:
                return set(map(unpack, items))
            case ["dict"]:
                return {}
            case ["type", name]:
                return _TYPES[name]
            case ["format", name]:
                return _FORMATS[name]
            case ["views", *views]:
                return _unpack_views(views)
            case ["data", name, dict(fields)]:
                return _classes()[name](**{key: unpack(item) for key, item in fields.items()})
    except (AttributeError, KeyError, TypeError, AssertionError) as error:  # the last is PyTorch's own
        raise ValueError(f"not what AOTAutograd knows: {error}") from error
    raise ValueError(f"not what AOTAutograd knows: a {packed[:1]}")


def unpack_whole(packed: Any) -> schemas.ViewAndMutationMeta:
    """All that AOTAutograd knows of a function. Raises `ValueError` if it is something else, or if a list in it holds
    what PyTorch would stumble over in a call."""
    facts = unpack(packed)
    if not isinstance(facts, schemas.ViewAndMutationMeta):
        raise ValueError("not what AOTAutograd knows of a function")
    kinds = {"input_info": schemas.InputAliasInfo, "output_info": schemas.OutputAliasInfo}
    for field in _fields(schemas.ViewAndMutationMeta):
        name, value = field.name, getattr(facts, field.name)
        if name in kinds:
            fits = isinstance(value, list) and all(isinstance(item, kinds[name]) for item in value)
        elif name.endswith("_stream_indices"):  # a CPU has none: nothing stands for each input
            fits = value is None or (isinstance(value, list) and all(item is None for item in value))
        elif name.endswith(("_indices", "_idxs")) or name.startswith("indices_of_"):
            fits = value is None or (isinstance(value, list) and all(type(item) is int for item in value))
        elif name.startswith("num_"):
            fits = value is None or type(value) is int
        else:
            continue
        if not fits:
            raise ValueError(f"not what AOTAutograd knows: {name} is {value!r}")
    return facts


def _unpack_views(views: list[Any]) -> ViewMetaSequence:
    made = object.__new__(ViewMetaSequence)
    made.sequence = []
    for name, arguments in views:
        if not name.endswith("_ViewMeta"):
            raise ValueError(f"{name} is no view")
        made.sequence.append(getattr(torch._C._functionalization, name)(unpack(arguments)))
    made.metadata = None  # only compared while tracing
    return made


@cache
def _classes() -> dict[str, type]:
    found = {name: getattr(schemas, name) for name in _SCHEMAS}
    return found | {
        name: kind
        for name, kind in vars(descriptors).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == descriptors.__name__
    }


@cache
def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(kind) if field.init)
