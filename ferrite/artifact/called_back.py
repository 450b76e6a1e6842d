"""What the machine calls in Python while a host program runs: steps without a door of their own, and what raises.

Each is called with the address of a frame, whose words are handles of tensors, addresses and numbers
(`native_host.py` says which).
"""

from __future__ import annotations

import ctypes
import errno
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from ferrite.artifact.check_inputs import Keeper
from ferrite.artifact.doors import last_error, libraries
from ferrite.artifact.host_values import filled
from ferrite.artifact.kernels import NativeKernel
from ferrite.errors import ToolFailed
from ferrite.graph.names import OF_TORCH, resolve
from ferrite.host.nodes import Call, Launch
from ferrite.host.python import describe
from ferrite.host.text import show_step
from ferrite.loops.index import Index
from ferrite.native import machine

BEHIND_HEADER = object.__basicsize__


@dataclass
class PythonCall:
    """Called with the address of a frame: does a call on the tensors whose handles lie there, or on copies of them, and
    leaves handles of its results."""

    function: Callable[..., Any]
    step: Call | Launch
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Mapping[str, int]
    numbers: Mapping[str, int]
    results: Sequence[int | None]
    copied: Sequence[str]
    counted: Mapping[int, int]

    def __call__(self, frame: int) -> None:
        known: dict[str, Any] = {name: tensor_of(word_at(frame, slot)) for name, slot in self.tensors.items()}
        known |= {name: known[name].clone() for name in self.copied}
        known |= {name: word_at(frame, slot) for name, slot in self.numbers.items()}
        args, kwargs = filled((self.args, self.kwargs), known.__getitem__)
        try:
            made = self.function(*args, **kwargs)
        except Exception as error:
            # Python 3.10 has no notes; a kernel of a function that this operator called has one already.
            if hasattr(error, "add_note") and not getattr(error, "__notes__", ()):
                error.add_note(
                    describe(self.step, str(error))
                    if isinstance(self.step, Launch)
                    else f"raised in {show_step(self.step)}"
                )
            raise
        # Of a list whose length depends on sizes, there are slots for those that are read.
        given = made if isinstance(made, (tuple, list)) else (made,)
        if any(slot is not None for slot in self.results[len(given) :]):
            raise IndexError(f"list index out of range: {show_step(self.step)} gave {len(given)} results")
        for place, counted in self.counted.items():
            ctypes.c_int64.from_address(frame + 8 * counted).value = operator.index(given[place])
        for place, (slot, result) in enumerate(zip(self.results, given, strict=False)):
            if slot is None or (result is None and self._may_leave_out(place)):
                continue
            if not isinstance(result, torch.Tensor):
                raise RuntimeError(f"{show_step(self.step)} gave a {type(result).__name__} in the place of a tensor")
            if result.is_neg() and not self._is_of_torch:  # kernels read what is in memory
                result = result.resolve_neg()
            new_handle(id(result) + BEHIND_HEADER, frame + 8 * slot)

    @property
    def _is_of_torch(self) -> bool:
        return not isinstance(self.step, Call) or self.step.target.startswith(OF_TORCH)

    def _may_leave_out(self, place: int) -> bool:
        """Whether a result may be None: operators of PyTorch leave out what nobody asked for, whatever their schemas
        say."""
        op = None if self._is_of_torch or isinstance(self.step, Launch) else resolve(self.step.target)
        kinds = [str(each.type) for each in op._schema.returns] if isinstance(op, OpOverload) else []
        return kinds[place : place + 1] != ["Tensor"]


@dataclass(frozen=True)
class Argument:
    """Called with the address of a frame whose argument at a position is not as promised: puts it in order, or raises.
    `row`: the first slot of the sizes and, behind them, the strides."""

    keeper: Keeper
    position: int
    row: int
    rank: int

    def __call__(self, frame: int) -> None:
        args = ctypes.cast(word_at(frame, machine.LIST), ctypes.py_object).value
        words = [word_at(frame, self.row + n) for n in range(2 * self.rank)]
        args[self.position] = self.keeper.keep(args[self.position], words[: self.rank], words[self.rank :])


def tensor_of(handle: int) -> torch.Tensor | None:
    """The Python tensor behind a handle; None for one that was left out."""
    if not handle:
        return None
    own = ctypes.c_void_p()
    new_handle(handle, ctypes.addressof(own))
    wrap, delete = _wrapping()
    try:
        return wrap(own)
    finally:
        delete(own)


def new_handle(handle: int, to: int) -> None:
    new = libraries()[0].aoti_torch_new_tensor_handle
    if new(ctypes.c_void_p(handle), ctypes.c_void_p(to)):
        raise RuntimeError(last_error())


@cache
def _wrapping() -> tuple[Callable[[Any], torch.Tensor], Callable[[Any], Any]]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    wrap = ctypes.PyDLL(os.path.join(folder, "libtorch_python.so"))["_Z16THPVariable_WrapON2at10TensorBaseE"]
    wrap.restype = ctypes.py_object
    return wrap, libraries()[0].aoti_torch_delete_tensor_object


@dataclass(frozen=True)
class Buffer:
    """A buffer of a launch: the slot of its handle, or of its sizes and, behind them, its strides."""

    handle: int
    shape: int
    dims: int
    dtype: torch.dtype | None

    def tensor(self, frame: int, address: int) -> torch.Tensor | None:
        """The memory at an address as a tensor, for as long as the memory is there."""
        if self.dtype is None:
            return tensor_of(word_at(frame, self.handle))
        words = [word_at(frame, self.shape + n) for n in range(2 * self.dims)]
        sizes, strides = words[: self.dims], words[self.dims :]
        if 0 in sizes:
            return torch.empty_strided(sizes, strides, dtype=self.dtype)
        length = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        memory = (ctypes.c_char * (length * self.dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(sizes, strides)


@dataclass
class Made:
    """A word for the dispatcher: its slot, what gives it back, and between which places in the code that has to be."""

    slot: int
    delete: str
    since: int
    until: int = 0


@dataclass(frozen=True)
class Launched:
    """A launch in the code: the first slot of the addresses of its buffers, what those are, and the slots of sizes."""

    launch: Launch
    kernel: NativeKernel
    array: int
    buffers: Sequence[Buffer]
    numbers: Sequence[int]


@dataclass(frozen=True)
class Settle:
    """Called with an error that a call left behind although it worked: raised now, it is not taken for that of
    something else later."""

    function: str
    program: str
    step: str

    def __call__(self, error: BaseException) -> None:
        title = f"{self.function} worked in {self.program}, and left a Python error behind: {error!r}"
        raise SystemError(f"{title} (in {self.step})" if self.step else title) from error


@dataclass(frozen=True)
class Raiser:
    """Called with the address of a frame whose program failed: raises what eager would. What it knows stands by places
    in the code: launches, calls that can be done again in Python, words to give back, divisions, sizes, values whose
    address is read; `take` is where memory is taken, and the slot of its length; `count`, where arguments are counted.
    """

    launches: Mapping[int, Launched]
    again: Mapping[int, PythonCall]
    words: Sequence[Made]
    divisions: Collection[int]
    sizes: Mapping[int, Index]
    read: Mapping[int, str]
    take: tuple[int, int]
    count: int
    name: str

    def __call__(self, frame: int) -> None:
        place = word_at(frame, machine.FAILED) - 1
        for word in self.words:
            if word.since <= place < word.until:
                getattr(libraries()[0], word.delete)(ctypes.c_void_p(word_at(frame, word.slot)))
        if place in self.divisions:
            raise ZeroDivisionError("integer division or modulo by zero")
        if place in self.sizes:
            raise RuntimeError(f"Storage size calculation overflowed with {self.sizes[place]} in {self.name}")
        if place in self.read:
            tensor = f"{self.read[place]} in {self.name}"
            raise RuntimeError(f"The memory of {tensor} is gone: its storage was freed or made smaller, or it has none")
        if place == self.count:
            args = ctypes.cast(word_at(frame, machine.LIST), ctypes.py_object).value
            raise TypeError(f"{self.name} was given {len(args)} arguments, and takes another number of them")
        if place == self.take[0]:
            asked = word_at(frame, self.take[1])
            raise RuntimeError(
                f"[enforce fail at {self.name}] the inner buffers. DefaultCPUAllocator: can't allocate memory: you "
                f"tried to allocate {asked} bytes. Error code {errno.ENOMEM} ({os.strerror(errno.ENOMEM)})"
            )
        if place in self.again:
            self._call_again(self.again[place], frame)
        if place not in self.launches:
            raise RuntimeError(last_error() or f"a call of {self.name} failed")
        launched = self.launches[place]
        tensors = [
            buffer.tensor(frame, word_at(frame, launched.array + n)) for n, buffer in enumerate(launched.buffers)
        ]
        try:
            launched.kernel.explain(*tensors, *(word_at(frame, slot) for slot in launched.numbers))
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.10 has no notes
                error.add_note(describe(launched.launch, str(error)))
            raise
        why = "a check failed that the oracle does not see"
        raise ToolFailed("a kernel stopped", ran=launched.launch.kernel, why=why)

    @staticmethod
    def _call_again(call: PythonCall, frame: int) -> None:
        """Raises what the call raises. On copies that may be something else, or nothing: then the words are there that
        the first call left."""
        said = last_error()
        try:
            call(frame)
        except Exception as error:
            if not call.copied or said.partition("\n")[0] in str(error):
                raise
        raise RuntimeError(said)


def word_at(frame: int, slot: int) -> int:
    return ctypes.c_int64.from_address(frame + 8 * slot).value
