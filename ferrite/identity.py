"""What a function of the user's does, as text that is the same in every process: part of the key of a cached graph.

    a function, a class      its code, with all that it holds and reads: constants, defaults, closures, globals, bases
    an object                its class, and what it holds; or its `uuid()`
    a module                 the sources of the package that it is part of
    an operator              its schema, and the functions that `torch.library.custom_op` was given (Note [Operators])
    of torch, Ferrite, Python        the name, as their versions are parts of the key

What has no such text is `Unsupported`: whoever registers it must give it a `uuid()`, an operator a version.

Note [Operators]
    A trace takes in what an operator's fake kernel, gradient formula and rules do, so they must be read; kernels run by
    the operator's name, whatever they are by then, and are read too: another body is another operator. Only what went
    through `torch.library.custom_op` can be read. If the dispatcher has a kernel from elsewhere (C++, `Library.impl`),
    nobody knows what is behind it, and `register_op_version` must say when it changes; it then stands for all the code.
    Closures and globals are read as they are at the time of the look-up. Functions reach operators by
    `torch.ops.namespace.name`, which is no global of theirs: the names that stand in code are looked up as such.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import os
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._library import custom_ops
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.simple_registry import singleton as rules_of_operators
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ferrite.errors import Unsupported
from ferrite.graph.names import name_of
from ferrite.process import TICK, start_of_interpreter

BUILT_IN_OPERATORS = frozenset({"aten", "prims", "prim", "_c10d_functional", "mkldnn", "quantized"})
_REGISTERED_BY = f"registered at {custom_ops.__file__}:"  # what `torch.library.custom_op` made, to the dispatcher
_VERSIONED = frozenset({"torch", "ferrite"}) | sys.stdlib_module_names
VERSIONED_PACKAGES = ("einops", "numpy", "scipy", "torchvision")  # to read their files takes up to a second
_WEAK = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)  # what they lead to may be gone at any time
versions: dict[str, str] = {}  # of operators, by "namespace::name", or of all in a "namespace": `register_op_version`

# What a class has beside its behaviour, or in another form elsewhere: what its instances hold is written down there.
_NOT_BEHAVIOUR = frozenset({
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__dataclass_fields__",
    "__dataclass_params__", "__match_args__", "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl",
})  # fmt: skip


def identity_of(function: Any) -> str:
    """A digest. Raises `Unsupported` if there is nothing to make it of."""
    if function is None:
        return ""
    return hashlib.sha256(f"{sys.version} {_Description().of(function)}".encode()).hexdigest()


def identity_of_operator(operator: OpOverload | OpOverloadPacket) -> str:
    """A digest of one that is not PyTorch's own. Raises `Unsupported` if a part of it cannot be read."""
    return hashlib.sha256(f"{sys.version} {_Description().of(operator)}".encode()).hexdigest()


def namespace_of(operator: OpOverload | OpOverloadPacket) -> str:
    return str(operator).partition(".")[0]


def like(example: Any) -> str:
    """What of an example input a trace may depend on."""
    if isinstance(example, torch.Tensor):
        return f"{example.dtype} {tuple(example.shape)} {example.stride()} {example.requires_grad}"
    return repr(example)


class _Description:
    """Writes down a value with all that it leads to; what was met before is a number."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}
        self.alive: list[Any] = []  # as numbers of objects that are gone would be used again

    def of(self, value: Any) -> str:
        if issubclass(type(value), _WEAK):  # a proxy whose object is gone does not even tell its class
            raise Unsupported("what you registered holds a weak reference", why="give it a uuid() method")
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
                return f"{type(value).__name__} {value!r}"
            case types.ModuleType():
                return f"module {value.__name__} {_sources_behind(value.__name__)}"
        if id(value) in self.met:
            return f"met {self.met[id(value)]}"
        self.met[id(value)] = len(self.met)
        self.alive.append(value)
        if callable(getattr(value, "uuid", None)) and not isinstance(value, type):
            told = value.uuid()
            if told is None:
                raise Unsupported("what you registered says by its uuid(), None, that it is not to be cached")
            return f"uuid {told}"
        match value:
            case tuple() | list():
                return f"{self._kind(value)} [{', '.join(map(self.of, value))}]"
            case set() | frozenset():
                return f"{self._kind(value)} [{', '.join(sorted(_Description().of(item) for item in value))}]"
            case dict() | types.MappingProxyType():
                items = ", ".join(f"{self.of(key)}: {self.of(item)}" for key, item in value.items())
                return f"{self._kind(value)} [{items}]"
            case types.CodeType():
                parts = (value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_flags)
                return f"code {self.of(parts)}"
            case type():
                return self._class(value)
            case types.FunctionType():
                return self._function(value)
            case types.MethodType() | types.BuiltinMethodType() if not _is_free(value):
                return f"method {value.__name__} {self.of(getattr(value, '__func__', None))} {self.of(value.__self__)}"
            case functools.partial():
                return f"partial {self.of((value.func, value.args, value.keywords))}"
            case staticmethod() | classmethod():
                return f"{type(value).__name__} {self.of(value.__func__)}"
            case property():
                return f"property {self.of((value.fget, value.fset, value.fdel))}"
            case functools.cached_property():  # which has a lock beside it
                return f"cached property {self.of(value.func)}"
            case types.MemberDescriptorType() | types.GetSetDescriptorType():
                return f"slot {value.__name__}"
            case OpOverload() | OpOverloadPacket():
                return self._operator(value)
            case CustomOpDef():
                return self._operator(value._opoverload)
            case torch.Tensor():
                raise Unsupported("what you registered holds a tensor", why="give it a uuid() method")
        return self._object(value)

    def _kind(self, value: Any) -> str:
        """Of a container: what it is, and what it holds beside its items."""
        kind = type(value)
        plain = (tuple, list, set, frozenset, dict, types.MappingProxyType)
        return kind.__name__ if kind in plain else f"{self.of(kind)} {self.of(_held(value))}"

    def _class(self, kind: type) -> str:
        known = name_of(kind)
        if known is not None and _is_versioned(known):
            return f"class {known}"
        if not kind.__flags__ & _MADE_BY_PYTHON:
            return f"class {known} {_sources_behind(kind.__module__)}"
        held = [f"{name} = {self.of(item)}" for name, item in vars(kind).items() if name not in _NOT_BEHAVIOUR]
        bases = [self.of(base) for base in (*kind.__mro__[1:], type(kind))]
        return f"class {kind.__qualname__} [{', '.join(bases)}] [{', '.join(held)}]"

    def _function(self, function: types.FunctionType) -> str:
        known = name_of(function)
        if known is not None and _is_versioned(known):
            return f"function {known}"
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # not filled yet
                cells.append("empty")
        names = sorted(_names_of(function.__code__) & function.__globals__.keys())
        if _is_versioned(str(function.__globals__.get("__name__"))):
            names = []
        read = [f"{name} = {self.of(function.__globals__[name])}" for name in names]
        read += [self.of(operator) for operator in _operators_named_in(function.__code__)]
        held = self.of((function.__code__, function.__defaults__, function.__kwdefaults__))
        return f"function {function.__qualname__} {held} [{', '.join(cells)}] [{', '.join(read)}]"

    def _operator(self, operator: OpOverload | OpOverloadPacket) -> str:
        """See Note [Operators]."""
        if namespace_of(operator) in BUILT_IN_OPERATORS:
            return f"operator {operator}"
        if isinstance(operator, OpOverloadPacket):
            return f"operators {', '.join(self.of(getattr(operator, name)) for name in operator.overloads())}"
        name = operator._name
        declared = (str(operator._schema), sorted(map(str, operator.tags)))
        version = _version_of(name)
        if version is not None:
            return f"operator {self.of((*declared, version))}"
        made, rules = OPDEFS.get(name), rules_of_operators.get(name)
        if made is None or not _is_made_by_custom_op(operator, made):
            raise Unsupported(f"{operator} has code that cannot be read", why="ferrite.register_op_version may help")
        parts = (
            made._init_fn, {device: _kernel_in(wrapped) for device, wrapped in made._backend_fns.items()},
            made._abstract_fn, made._setup_context_fn, made._backward_fn, made._vmap_fn, made._autocast_dtype,
            made._torch_dispatch_fns, sorted(made._disabled_kernel), rules and str(rules.effect.effect),
        )  # fmt: skip
        return f"operator {self.of((*declared, parts))}"

    def _object(self, value: Any) -> str:
        known = name_of(value)
        if known is not None and (isinstance(value, HigherOrderOperator) or _is_versioned(known)):
            return f"named {known}"
        held = _held(value)
        if held is not None and not type(value).__module__.startswith("torch") and _holds_nothing_else(type(value)):
            return f"object {self.of(type(value))} {self.of(held)}"
        if known is None or held is not None or type(value).__module__.startswith("torch"):
            title = f"what you registered holds a {type(value).__name__}, which has no text"
            raise Unsupported(title, why="give it a uuid() method")
        return f"named {known} {_sources_behind(known.rpartition('.')[0])}"  # written in C


def _version_of(name: str) -> str | None:
    """`name` with or without an overload."""
    whole = name.partition(".")[0]
    return versions.get(whole, versions.get(whole.partition("::")[0]))


def _is_made_by_custom_op(operator: OpOverload, made: CustomOpDef) -> bool:
    """Whether nothing but `torch.library.custom_op` registered something for it."""
    said = torch._C._dispatch_dump(operator._name).splitlines()
    rules = rules_of_operators.get(operator._name)
    return (
        operator._overloadname == "default"
        and all(_REGISTERED_BY in line for line in said if "registered at" in line)
        and not (operator.py_kernels or operator.python_key_table or operator.functorch_table)
        and (rules is None or rules.torch_dispatch_rules._data.keys() == made._torch_dispatch_fns.keys())
        and (rules is None or len(rules.fake_impl.kernels) == 1)
    )


def _kernel_in(wrapped: Any) -> Any:
    """The function that was registered; PyTorch has put another one around it."""
    inner = inspect.unwrap(wrapped)
    held = inspect.getclosurevars(inner).nonlocals
    return held["fn"] if inner.__module__ == custom_ops.__name__ and "fn" in held else wrapped


def _operators_named_in(code: types.CodeType) -> list[OpOverloadPacket]:
    """Those of users whose namespace and name both stand in the code, as in `torch.ops.mine.twice`."""
    names = _names_of(code)
    if "ops" not in names:
        return []
    found = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet = name.partition(".")[0]
        if namespace in names and packet in names and namespace not in BUILT_IN_OPERATORS:
            found.add((namespace, packet))
    return [getattr(getattr(torch.ops, namespace), packet) for namespace, packet in sorted(found)]


_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _is_free(function: Any) -> bool:
    """Whether a function of C is one of a module, not of an object."""
    return isinstance(function.__self__, (types.ModuleType, types.NoneType))


def _held(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, in its dictionary or in slots; None if it has no place for any."""
    names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    if not hasattr(value, "__dict__") and not names:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})


def _holds_nothing_else(kind: type) -> bool:
    """Whether objects of a class have room for attributes only, none for what a type written in C keeps where nobody
    sees it, as a generator of random numbers does."""
    attributes = sum(len(_slots_of(each)) for each in kind.__mro__)
    pointers = attributes + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ - object.__basicsize__ <= pointers * ctypes.sizeof(ctypes.c_void_p)


def _slots_of(kind: type) -> list[str]:
    return [name for name, item in vars(kind).items() if isinstance(item, types.MemberDescriptorType)]


def _names_of(code: types.CodeType) -> set[str]:
    """What code and the functions in it may read from outside."""
    inner = (_names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _is_versioned(name: str) -> bool:
    return name.partition(".")[0] in _VERSIONED


def _sources_behind(module: str) -> str:
    """A digest of the package that a module belongs to, with all that is in it: what a module calls stands in others.
    Nothing for those of Python, torch and Ferrite."""
    if _is_versioned(module):
        return ""
    package = module.partition(".")[0]
    if package in VERSIONED_PACKAGES and (version := getattr(sys.modules.get(package), "__version__", None)):
        return f"version {version}"
    changed = _changed_since_loaded(package)
    if changed is not None:
        title = f"what you registered reads from {changed}, whose file has changed since Python was started"
        raise Unsupported(title, why="what was loaded may not be what stands there now")
    found = _digest_of_package(package)
    if not found:
        title = f"what you registered reads from {module or 'a module'}, which has no file"
        raise Unsupported(title, why="give it a uuid() method")
    return found


def _changed_since_loaded(package: str) -> str | None:
    """The first loaded module of a package whose file may have been written after it was loaded. The time of a change
    is looked at, as that of the contents can be set: what installs a package sets it to that of the release."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if name.partition(".")[0] == package else None
        with suppress(OSError, TypeError):
            if file is not None and os.stat(file).st_ctime > start_of_interpreter() + TICK:  # it loads nothing so soon
                return name
    return None


@functools.cache
def _digest_of_package(name: str) -> str:
    package = sys.modules.get(name)
    whole, read = hashlib.sha256(), 0
    for folder, path in _files_of(package):
        try:
            data = path.read_bytes()
        except OSError:
            return ""
        whole.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + hashlib.sha256(data).digest())
        read += 1
    return whole.hexdigest() if read else ""


def _files_of(package: types.ModuleType | None) -> Iterator[tuple[Path, Path]]:
    folders = [Path(folder) for folder in getattr(package, "__path__", ())]
    for folder in folders:
        yield from ((folder, path) for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".so"))
    file = getattr(package, "__file__", None)
    if not folders and file:
        yield Path(file).parent, Path(file)
