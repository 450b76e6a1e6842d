"""Host programs as words for the machine of `native/machine.py`: a call runs no Python between its kernels.

`assemble` first gives every value its sizes and strides, by running the ops on tensors without memory, and refuses a
program that has other values than plain tensors of known sizes. Then memory is planned: what kernels and products make
for themselves lies in one block that is kept between calls, what the caller gets is a tensor of its own. Then
instructions are written, and beside them those that clean up if one fails. A step without a door of its own is called
in Python, from the machine.

What the code relies on:
- a handle is the address of a word that points to a tensor; that of a Python tensor lies behind its object header;
- handles that the program owns are null before they are made and after they are given back, so that the clean-up may
  give back all of them, whatever failed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ferrite.artifact.kernels import Kernels, NativeKernel, is_forked
from ferrite.errors import ToolFailed, Unsupported
from ferrite.graph.names import resolve
from ferrite.graph.text import read_type
from ferrite.host.memory import Life, place
from ferrite.host.nodes import Call, Free, HostProgram, Launch, Return
from ferrite.host.python import describe
from ferrite.host.text import show_step
from ferrite.native import machine
from ferrite.syntax import Named, Ref, refs

BEHIND_HEADER = object.__basicsize__
CPU = 0
_DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip

# Products that write into memory they are given: their shim, and the names of trailing floats with what they are if
# they are not given.
_PRODUCTS: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "aten.mm.default": ("aoti_torch_cpu_mm_out", ()),
    "aten.bmm.default": ("aoti_torch_cpu_bmm_out", ()),
    "aten.addmm.default": ("aoti_torch_cpu_addmm_out", (("beta", 1.0), ("alpha", 1.0))),
    "aten.baddbmm.default": ("aoti_torch_cpu_baddbmm_out", (("beta", 1.0), ("alpha", 1.0))),
}
_VIEWS = frozenset({
    "aten.t.default", "aten.permute.default", "aten.transpose.int", "aten.slice.Tensor", "aten.select.int",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.expand.default", "aten.detach.default",
    "aten.alias.default", "aten.reshape.default", "aten.view.default",
})  # fmt: skip
_ALLOCATE = "aten.empty_strided.default"
_HOLD = "ferrite.host.calls.with_strides"
_PART = "operator.getitem"


@dataclass
class _Value:
    """A tensor of the program: `meta` has its sizes and strides, `root` is the value whose memory it shares. Slots: of
    its handle, of the address of its data; None while nobody has asked for them."""

    meta: torch.Tensor
    root: str
    offset: int = 0  # in elements, from where the root starts
    handle: int | None = None
    is_owned: bool = False
    pointer: int | None = None
    is_promised: bool = False  # an op in eager made it: it may lie otherwise than `meta` says


@dataclass(frozen=True)
class _Several:
    """What a call gives that gives several tensors, or None in the place of one."""

    parts: tuple[_Value | None, ...]


def assemble(
    program: HostProgram, constants: Mapping[str, Any], kernels: Kernels
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The program as a function of Python. Raises `Unsupported` if a step has no door."""
    return _Assembler(program, constants, kernels).function()


class _Assembler:
    def __init__(self, program: HostProgram, constants: Mapping[str, Any], kernels: Kernels) -> None:
        if program.functions:
            raise Unsupported("functions that operators call")
        self.program = program
        self.constants = constants
        self.kernels = kernels
        self.values: dict[str, _Value] = {}
        self.several: dict[str, _Several] = {}
        self.taken: set[int] = set()  # parts of several that have a name of their own
        self.escaped: set[str] = set()  # roots that an op of somebody else may keep
        self.template = [0] * len((machine.LIST, machine.FRAME, machine.FAILED, machine.THREAD))
        self.known: dict[Any, int] = {}  # constants and arrays of them -> slot
        self.code: list[int] = []
        self.owned: list[int] = []  # slots of handles to give back
        self.launches: dict[int, _Launched] = {}  # by place in the code
        self.alive: list[Any] = [constants, kernels]  # what the words point to
        self.scratch = self.slot()

    # ---- first walk: what every value is

    def infer(self) -> None:
        for entry in self.program.inputs:
            self.values[entry.name] = _Value(read_type(entry.type), entry.name)
        for name, tensor in self.constants.items():
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported("a constant that is no tensor")
            self.values[name] = _Value(tensor.to("meta"), name)
        for step in self.program.steps:
            match step:
                case Call():
                    self._infer_call(step)
                case Launch():
                    if step.kernel not in self.kernels.native:
                        raise Unsupported("a kernel without machine code")
                    if not all(isinstance(size, int) for size in step.sizes):
                        raise Unsupported("sizes that change")
                    if self.kernels.native[step.kernel].put_back:
                        raise Unsupported("a kernel that may have to put back what it wrote")

    def _infer_call(self, call: Call) -> None:
        names = list(refs((call.args, call.kwargs)))
        if call.target == _PART:
            source, index = call.args
            part = self.several[source.name].parts[index] if source.name in self.several else None
            if part is None or id(part) in self.taken:
                raise Unsupported("a part that is no tensor, or is taken twice")
            self.taken.add(id(part))
            self.values[call.result] = part
            return
        if not all(name in self.values for name in names):
            raise Unsupported("values that are no tensors")
        if call.target == _HOLD:
            tensor, strides = call.args
            source = self.values[tensor.name]
            meta = torch.empty_strided(source.meta.shape, strides, dtype=source.meta.dtype, device="meta")
            self.values[call.result] = _Value(meta, source.root, source.offset)
            return
        args, kwargs = _filled((call.args, call.kwargs), lambda name: self.values[name].meta)
        if kwargs.get("device") is not None:
            if torch.device(kwargs["device"]).type != "cpu":
                raise Unsupported(f"a tensor on {kwargs['device']}")
            kwargs["device"] = torch.device("meta")
        try:
            made = resolve(call.target)(*args, **kwargs)
        except Exception as error:
            raise Unsupported(f"{call.target}, which does not say what it gives") from error
        if not call.target.startswith("aten."):
            self.escaped |= {self.values[name].root for name in names}
        made = () if made is None else made
        if isinstance(made, torch.Tensor):
            self.values[call.result] = self._shared(call.result, made, names)
        elif isinstance(made, (tuple, list)) and all(part is None or isinstance(part, torch.Tensor) for part in made):
            parts = [part if part is None else self._shared(call.result, part, names) for part in made]
            self.several[call.result] = _Several(tuple(parts))
        else:
            raise Unsupported(f"{call.target}, which gives no tensor")

    def _shared(self, name: str, made: torch.Tensor, names: Sequence[str]) -> _Value:
        """A result as a value: with memory of its own, or sharing that of one of its operands."""
        if made.layout != torch.strided:
            raise Unsupported(f"a tensor that is {made.layout}")
        for source in (self.values[other] for other in names):
            if torch._C._is_alias_of(made, source.meta):
                step = made.storage_offset() - source.meta.storage_offset()
                return _Value(made, source.root, source.offset + step)
        return _Value(made, name)

    # ---- memory

    def plan(self) -> tuple[dict[str, int], int]:
        """Where buffers lie that nobody outside sees, and the memory of kernels' own locals, by name."""
        made = {
            step.result
            for step in self.program.steps
            if isinstance(step, Call) and (step.target in _PRODUCTS or step.target == _ALLOCATE)
        }
        (final,) = (step for step in self.program.steps if isinstance(step, Return))
        if not isinstance(final.value, tuple) or not all(name in self.values for name in refs(final.value)):
            raise Unsupported("results that are no tensors")
        seen = {self.values[value.name].root for value in final.value if isinstance(value, Ref)} | self.escaped
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        lives: list[Life] = []
        for position, step in enumerate(self.program.steps):
            match step:
                case Call():
                    names = [step.result, *refs((step.args, step.kwargs))]
                case Launch():
                    names = list(step.buffers)
                    own = self.kernels.native[step.kernel].places(step.sizes)[-1]
                    if own:
                        lives.append(Life(_locals_of(position), own, position, position))
                case _:
                    continue
            for root in (self.values[name].root for name in names if name in self.values):
                first.setdefault(root, position)
                last[root] = position
        inner = [root for root in first if root in made and root not in seen]
        lives += [Life(root, _bytes(self.values[root].meta), first[root], last[root]) for root in inner]
        return place(lives)

    # ---- second walk: instructions

    def function(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        self.infer()
        self.places, length = self.plan()
        self.block = self.slot()
        self._take_inputs()
        if length:
            self.call("ferrite_take", self.constant(length), _address(self.block), checked=True)
        self.call("PyEval_SaveThread", result=machine.THREAD)
        self.threads = self.slot()
        self.call("ferrite_threads", result=self.threads)
        result = self.slot()
        for position, step in enumerate(self.program.steps):
            match step:
                case Call():
                    self._write_call(step)
                case Launch():
                    self._write_launch(step, position)
                case Free():
                    self._free(step.names)
                case Return():
                    self._write_return(step, result)
        self.code.append(0)
        cleaner = len(self.code)
        self._write_cleaner()
        return self._link(cleaner, result)

    def _take_inputs(self) -> None:
        """Handles of all inputs that are read. Those that may die here are owned, and are no longer in the list."""
        read = {name for step in self.program.steps for name in _names_in(step)}
        for name in read - self.values.keys() - self.several.keys():
            raise Unsupported(f"{name}, which is no tensor")
        none = self.constant(id(None))
        for index, entry in enumerate(self.program.inputs):
            if entry.name not in read:
                continue
            value = self.values[entry.name]
            thing, value.handle = self.slot(), self.slot()
            self.call("PyList_GetItem", machine.LIST, self.constant(index), result=thing)
            self.add(value.handle, thing, self.constant(BEHIND_HEADER))
            if not entry.static:
                borrowed, value.handle = value.handle, self.owned_slot()
                value.is_owned = True
                self.call("aoti_torch_new_tensor_handle", borrowed, _address(value.handle), checked=True)
                self.call("Py_IncRef", none)
                self.call("PyList_SetItem", machine.LIST, self.constant(index), none)
        for name, tensor in self.constants.items():
            self.values[name].handle = self.constant(id(tensor) + BEHIND_HEADER)

    def _write_call(self, call: Call) -> None:
        if call.target == _PART:
            return
        if call.target in _VIEWS and self._is_view(call):
            self._write_view(self.values[call.result], self.values[call.args[0].name])
        elif call.target in _PRODUCTS or call.target == _ALLOCATE:
            self._write_own(call)
        elif call.target == _HOLD:
            value, source = self.values[call.result], self._handle(call.args[0].name)
            value.handle, value.is_owned = self.owned_slot(), True
            python = self._python_object(call, [value])
            sizes, _ = self._shape(value.meta)
            self.call(
                "ferrite_hold", source, _address(value.handle), sizes, self.constant(value.meta.dim()),
                _address(machine.THREAD), python, machine.FRAME, checked=True,
            )  # fmt: skip
        else:
            several = self.several.get(call.result)
            results = (self.values[call.result],) if several is None else several.parts
            for name in refs((call.args, call.kwargs)):
                self._handle(name)
            for result in results:
                if result is not None:
                    result.handle, result.is_owned, result.is_promised = self.owned_slot(), True, True
            python = self._python_object(call, results)
            self.call("ferrite_python", _address(machine.THREAD), python, machine.FRAME, checked=True)

    def _is_view(self, call: Call) -> bool:
        """Whether a call gives a view whose place in memory is known for sure."""
        source = self.values[call.args[0].name]
        return self.values[call.result].root == source.root and not source.is_promised

    def _python_object(self, call: Call, results: Sequence[_Value | None]) -> int:
        """The slot of an object that does a call in Python."""
        slots = {name: self.values[name].handle for name in refs((call.args, call.kwargs))}
        made = _PythonCall(call, slots, [None if value is None else value.handle for value in results])
        self.alive.append(made)
        return self.constant(id(made))

    def _write_own(self, call: Call) -> None:
        """Memory in the block or a tensor, and what writes there."""
        value = self.values[call.result]
        if value.root not in self.places:
            value.handle, value.is_owned = self.owned_slot(), True
            sizes, strides = self._shape(value.meta)
            kind = (self.constant(_dtype(value.meta)), self.constant(CPU), self.constant(0))
            self.call(
                "aoti_torch_empty_strided", self.constant(value.meta.dim()), sizes, strides, *kind,
                _address(value.handle), checked=True,
            )  # fmt: skip
        if call.target in _PRODUCTS:
            name, words = _PRODUCTS[call.target]
            operands = [self._handle(arg.name) for arg in call.args if isinstance(arg, Ref)]
            floats = [self.constant(_bits(float(call.kwargs.get(word, default)))) for word, default in words]
            self.call(name, self._handle(call.result), *operands, floats=floats, checked=True)

    def _write_view(self, value: _Value, source: _Value) -> None:
        """A view of a tensor that has a handle gets one too; of a buffer in the block when it is asked for."""
        if source.handle is None:
            return
        sizes, strides = self._shape(value.meta)
        step = value.offset - source.offset
        value.handle, value.is_owned = self.owned_slot(), True
        self.call(
            "aoti_torch__reinterpret_tensor", source.handle, self.constant(value.meta.dim()), sizes, strides,
            self.constant(step), _address(value.handle), checked=True,
        )  # fmt: skip

    def _write_launch(self, launch: Launch, position: int) -> None:
        kernel = self.kernels.native[launch.kernel]
        *starts, own = kernel.places(launch.sizes)
        array = self.array([0] * (len(launch.buffers) + len(starts)))
        for index, name in enumerate(launch.buffers):
            value = self.values[name]
            if value.handle is None:
                self._point(array + index, self._place(value))
            else:
                self.move(array + index, self._pointer(value))
        for index, start in enumerate(starts, len(launch.buffers)):
            if own:
                self._point(array + index, self.places[_locals_of(position)] + start)
        sizes = self.array([int(size) for size in launch.sizes] or [0])
        metas = [self.values[name].meta for name in launch.buffers]
        self.launches[len(self.code)] = _Launched(launch, kernel, array, metas)
        self.call(kernel.address, _address(array), _address(sizes), self.threads, checked=True)

    def _free(self, names: Iterable[str]) -> None:
        """These values are not read again. A part of several is freed by its own name, or with them if it has none."""
        named = [self.values[name] for name in names if name in self.values]
        parts = [part for name in names if name in self.several for part in self.several[name].parts]
        for value in (*named, *(part for part in parts if part is not None and id(part) not in self.taken)):
            if value.is_owned and value.handle is not None:
                self._delete(value.handle)
                value.is_owned = False

    def _write_return(self, final: Return, result: int) -> None:
        self.call("ferrite_resume", _address(machine.THREAD))
        self.call("PyTuple_New", self.constant(len(final.value)), result=result)
        made = self.slot()
        for index, value in enumerate(final.value):
            if isinstance(value, Ref):
                handle = self.owned_slot()
                known = self.values[value.name].handle
                assert known is not None
                self.call("aoti_torch_new_tensor_handle", known, _address(handle), checked=True)
                self.call("_Z16THPVariable_WrapON2at10TensorBaseE", handle, result=made)
                self._delete(handle)
            elif value is None or isinstance(value, (bool, int, float)):
                self.alive.append(value)
                self.move(made, self.constant(id(value)))
                self.call("Py_IncRef", made)
            else:
                raise Unsupported("a result that is neither a tensor nor a number")
            self.call("PyTuple_SetItem", result, self.constant(index), made)
        self._free([*self.values, *self.several])
        self.call("ferrite_give", self.block)
        self._empty_list()

    def _write_cleaner(self) -> None:
        """Python's lock, then the error, while all that it speaks of is there; then everything goes back."""
        self.call("ferrite_resume", _address(machine.THREAD))
        self.handler = self.slot()
        self.call("ferrite_raise", self.handler, machine.FRAME)
        for slot in self.owned:
            self.call("aoti_torch_delete_tensor_object", slot)
        self.call("ferrite_give", self.block)
        self._empty_list()
        self.code.append(0)

    def _empty_list(self) -> None:
        """Whoever calls may keep the list, but not what was in it."""
        self.call(
            "PyList_SetSlice", machine.LIST, self.constant(0), self.constant(len(self.program.inputs)), self.constant(0)
        )

    def _link(self, cleaner: int, result: int) -> Callable[[list[Any]], tuple[Any, ...]]:
        raiser = _Raiser(self.launches, self.program)
        self.alive.append(raiser)
        self.template[self.handler] = id(raiser)
        start = machine.HEADER + len(self.template)
        header = [len(self.template), start, start + cleaner, result]
        words = [*header, *self.template, *self.code]
        data = struct.pack(f"{len(words)}Q", *(word & 0xFFFFFFFFFFFFFFFF for word in words))
        enter = _machine().address("ferrite_enter")
        body, definition = machine.python_function(self.program.name, enter, data)
        alive = (*self.alive, definition)

        def run(args: list[Any]) -> Any:
            return body(args)

        run.alive = alive  # type: ignore[attr-defined]
        return run

    # ---- pieces

    def slot(self) -> int:
        self.template.append(0)
        return len(self.template) - 1

    def owned_slot(self) -> int:
        slot = self.slot()
        self.owned.append(slot)
        return slot

    def constant(self, value: int) -> int:
        if value not in self.known:
            self.known[value] = self.slot()
            self.template[self.known[value]] = value
        return self.known[value]

    def array(self, values: Sequence[int]) -> int:
        """Slots in a row; not shared, as a call may write to them."""
        start = len(self.template)
        self.template += values
        return start

    def _shape(self, meta: torch.Tensor) -> tuple[int, int]:
        """Operands: the addresses of the sizes and of the strides."""
        key = tuple(meta.shape), tuple(meta.stride())
        if key not in self.known:
            self.known[key] = self.array([*meta.shape, *meta.stride()] or [0])
        start = self.known[key]
        return _address(start), _address(start + meta.dim())

    def _handle(self, name: str) -> int:
        """The slot of a value's handle, which is made here if the value lies in the block."""
        value = self.values[name]
        if value.handle is None:
            pointer = self.slot()
            self._point(pointer, self._place(value))
            sizes, strides = self._shape(value.meta)
            value.handle, value.is_owned = self.owned_slot(), True
            kind = (self.constant(_dtype(value.meta)), self.constant(CPU), self.constant(0))
            self.call(
                "aoti_torch_create_tensor_from_blob", pointer, self.constant(value.meta.dim()), sizes, strides,
                self.constant(0), *kind, _address(value.handle), checked=True,
            )  # fmt: skip
        return value.handle

    def _pointer(self, value: _Value) -> int:
        if value.pointer is None:
            assert value.handle is not None
            value.pointer = self.slot()
            self.call("aoti_torch_get_data_ptr", value.handle, _address(value.pointer), checked=True)
        return value.pointer

    def _place(self, value: _Value) -> int:
        """Where a value lies in the block, in bytes."""
        return self.places[value.root] + value.offset * value.meta.element_size()

    def _point(self, slot: int, offset: int) -> None:
        self.add(slot, self.block, self.constant(offset))

    def _delete(self, handle: int) -> None:
        self.call("aoti_torch_delete_tensor_object", handle)
        self.move(handle, self.constant(0))

    def call(
        self, function: str | int, *operands: int, result: int | None = None, floats: Sequence[int] = (),
        checked: bool = False,
    ) -> None:  # fmt: skip
        """`operands`: slots whose content is passed, or `_address` of one."""
        assert len(operands) <= machine.MOST_INTEGERS
        address = function if isinstance(function, int) else _addresses()[function]
        words = [operand.word if isinstance(operand, _address) else 2 * operand for operand in operands]
        head = machine.CALL | len(operands) << 8 | len(floats) << 16 | int(checked) << 24
        self.code += [head, address, self.scratch if result is None else result, *words]
        self.code += [2 * slot for slot in floats]

    def move(self, to: int, source: int) -> None:
        self.code += [machine.MOVE, to, source]

    def add(self, to: int, one: int, other: int) -> None:
        self.code += [machine.ADD, to, one, other]


class _address(int):
    """A slot that is passed by its address."""

    @property
    def word(self) -> int:
        return 2 * int(self) + 1


class _PythonCall:
    """Called with the address of a frame: does a call on the tensors whose handles lie there, and leaves handles of its
    results."""

    def __init__(self, call: Call, operands: Mapping[str, int | None], results: Sequence[int | None]) -> None:
        target = resolve(call.target)
        self.function = target._op if isinstance(target, OpOverload) else target
        self.call = call
        self.operands = operands
        self.results = results
        # Objects in the place of their paths now, tensors in the place of names in each call.
        self.args, self.kwargs = _filled((call.args, call.kwargs), Ref)

    def __call__(self, frame: int) -> None:
        tensors = {name: _tensor_of(_word_at(frame, slot)) for name, slot in self.operands.items() if slot is not None}
        args, kwargs = _filled((self.args, self.kwargs), tensors.__getitem__)
        try:
            made = self.function(*args, **kwargs)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.10 has no notes
                error.add_note(f"raised in {show_step(self.call)}")
            raise
        if made is None:
            return
        for slot, result in zip(self.results, made if isinstance(made, (tuple, list)) else (made,), strict=True):
            if slot is None or result is None:  # an op may leave out what it need not give
                continue
            if not isinstance(result, torch.Tensor):
                raise ToolFailed(f"{self.call.target} gave no tensor", ran=self.call.result, why=type(result).__name__)
            _new_handle(id(result) + BEHIND_HEADER, frame + 8 * slot)


def _tensor_of(handle: int) -> torch.Tensor | None:
    """The Python tensor behind a handle; None for one that was left out."""
    if not handle:
        return None
    own = ctypes.c_void_p()
    _new_handle(handle, ctypes.addressof(own))
    wrap, delete = _wrapping()
    try:
        return wrap(own)
    finally:
        delete(own)


def _new_handle(handle: int, to: int) -> None:
    new = _libraries()[0].aoti_torch_new_tensor_handle
    if new(ctypes.c_void_p(handle), ctypes.c_void_p(to)):
        raise RuntimeError(_last_error())


@cache
def _wrapping() -> tuple[Callable[[Any], torch.Tensor], Callable[[Any], Any]]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    wrap = ctypes.PyDLL(os.path.join(folder, "libtorch_python.so"))["_Z16THPVariable_WrapON2at10TensorBaseE"]
    wrap.restype = ctypes.py_object
    return wrap, _libraries()[0].aoti_torch_delete_tensor_object


@dataclass(frozen=True)
class _Launched:
    """A launch in the code: the first slot of the addresses of its buffers, and what those are."""

    launch: Launch
    kernel: NativeKernel
    array: int
    metas: Sequence[torch.Tensor]


class _Raiser:
    """Called with the address of a frame whose program failed: raises what eager would."""

    def __init__(self, launches: Mapping[int, _Launched], program: HostProgram) -> None:
        self.launches = launches
        self.name = program.name

    def __call__(self, frame: int) -> None:
        place = _word_at(frame, machine.FAILED) - 1
        if place not in self.launches:
            raise RuntimeError(_last_error() or f"a call of {self.name} failed")
        launched = self.launches[place]
        addresses = [_word_at(frame, launched.array + n) for n in range(len(launched.metas))]
        tensors = [_tensor_at(address, meta) for address, meta in zip(addresses, launched.metas, strict=True)]
        try:
            launched.kernel.explain(*tensors, *launched.launch.sizes)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.10 has no notes
                error.add_note(describe(launched.launch, str(error)))
            raise
        why = "a check failed that the oracle does not see"
        raise ToolFailed("a kernel stopped", ran=launched.launch.kernel, why=why)


def _word_at(frame: int, slot: int) -> int:
    return ctypes.c_int64.from_address(frame + 8 * slot).value


def _tensor_at(address: int, meta: torch.Tensor) -> torch.Tensor:
    """The memory at an address as a tensor, for as long as the memory is there."""
    if meta.numel() == 0:
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    memory = (ctypes.c_char * _bytes(meta)).from_address(address)
    return torch.frombuffer(memory, dtype=meta.dtype).as_strided(meta.shape, meta.stride())


# ---- doors


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    return tuple(ctypes.CDLL(os.path.join(folder, name)) for name in ("libtorch_cpu.so", "libtorch_python.so"))  # type: ignore[return-value]


@cache
def _machine() -> Any:
    torch_library, _ = _libraries()
    of_python = ("PyEval_RestoreThread", "PyEval_SaveThread", "PyLong_FromLongLong", "PyObject_CallOneArg",
                 "PyErr_Occurred", "Py_DecRef")  # fmt: skip
    of_torch = (machine.GET_THREADS, "aoti_torch_get_strides", "aoti_torch_new_tensor_handle")
    imports = machine.outside(dict.fromkeys(of_python, ctypes.pythonapi) | dict.fromkeys(of_torch, torch_library))
    made = machine.machine(imports)
    alone = ctypes.c_int32.from_address(made.address("ferrite_alone"))
    alone.value = is_forked()
    os.register_at_fork(after_in_child=lambda: setattr(alone, "value", 1))
    return made


@cache
def _addresses() -> Mapping[str, int]:
    return _Addresses()


class _Addresses(dict[str, int]):
    """The address of a function by name, of the machine, of Python or of torch; found when it is asked for."""

    def __missing__(self, name: str) -> int:
        if name.startswith("ferrite_"):
            found = _machine().address(name)
        else:
            torch_library, python_library = _libraries()
            libraries = {"Py": ctypes.pythonapi, "_Z": python_library}
            found = machine.address_of(libraries.get(name[:2], torch_library), name)
        self[name] = found
        return found


def kept_memory() -> int:
    """The bytes of memory that are kept for the next call."""
    block = ctypes.c_void_p.from_address(_machine().address("ferrite_kept")).value
    return 0 if block is None else ctypes.c_int64.from_address(block).value


def release_memory() -> None:
    """Give back the memory that is kept between calls."""
    drop = ctypes.CFUNCTYPE(ctypes.c_int64)(_machine().address("ferrite_drop"))
    drop()


def _last_error() -> str:
    torch_library, _ = _libraries()
    what = torch_library.torch_exception_get_what_without_backtrace
    what.restype = ctypes.c_char_p
    return (what() or b"").decode(errors="replace")


# ---- small things


def _names_in(step: Any) -> list[str]:
    match step:
        case Call():
            return list(refs((step.args, step.kwargs)))
        case Launch():
            return list(step.buffers)
        case Return():
            return list(refs(step.value))
    return []


def _filled(value: Any, of_name: Callable[[str], Any]) -> Any:
    """A value of the program with tensors in the place of names, and objects in the place of their paths."""
    match value:
        case Ref():
            return of_name(value.name)
        case Named():
            return resolve(value.path)
        case tuple() | list():
            return type(value)(_filled(item, of_name) for item in value)
        case dict():
            return {key: _filled(item, of_name) for key, item in value.items()}
    return value


def _locals_of(position: int) -> str:
    return f"locals of step {position}"


def _bytes(meta: torch.Tensor) -> int:
    length = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True)) + 1
    return length * meta.element_size() if meta.numel() else 0


def _dtype(meta: torch.Tensor) -> int:
    if meta.dtype not in _DTYPES:
        raise Unsupported(f"tensors of {meta.dtype}")
    return _DTYPES[meta.dtype]


def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
