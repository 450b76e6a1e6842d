"""Host programs as words for the machine of `native/machine.py`: a call runs no Python between its kernels.

`assemble` first asks what every value is (`host_values.py`), which refuses a program that has others than plain tensors
and whole numbers, unless an earlier process kept that (`layout.py`). Then memory is planned, or was: what kernels and
products make for themselves lies in one block that is kept between calls, what the caller gets is a tensor of its own.
Then instructions are written, and beside them those that clean up if one fails. A step without a door of its own is
called in Python, from the machine: so are kernels without machine code or that may have to put back what they wrote,
and operators that call functions, with these functions.

Sizes that change are polynomials over the numbers that the program is given; instructions compute them where they are
first needed, each once.

What the code relies on:
- a handle is the address of a word that points to a tensor; that of a Python tensor lies behind its object header;
- handles that the program owns are null before they are made and after they are given back, so that the clean-up may
  give back all of them, whatever failed;
- words that are made for the dispatcher are its own from the call on; if something fails before that, `Raiser`, which
  knows what was made by then, gives them back.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from ferrite.artifact.called_back import BEHIND_HEADER, Argument, Buffer, Launched, Made, PythonCall, Raiser, Settle
from ferrite.artifact.check_inputs import Keeper, check_memory, keepers_of
from ferrite.artifact.dispatch import (
    CPU,
    DTYPES,
    Form,
    Handle,
    Item,
    Items,
    Size,
    Some,
    Text,
    Word,
    bits_of,
    form_of,
    may_move_memory,
)
from ferrite.artifact.doors import addresses, host_machine
from ferrite.artifact.host_values import PART, Shape, Value, Values, filled, infer, may_share
from ferrite.artifact.kernels import Kernels, NativeKernel
from ferrite.artifact.layout import Layout, layout_of, plan_in, values_in
from ferrite.artifact.lend import can_lend
from ferrite.artifact.plan_memory import Need, Plan, locals_of, plan
from ferrite.errors import Unsupported, within
from ferrite.graph.eager_strides import is_dense, strides_anew
from ferrite.graph.names import resolve
from ferrite.host.memory import in_lines
from ferrite.host.nodes import HOLD, Call, Free, HostProgram, Launch, Return, place_of_step
from ferrite.host.ranges import range_of
from ferrite.host.text import show_step
from ferrite.loops.index import (
    ZERO,
    Atom,
    FloorDiv,
    Index,
    Least,
    Mod,
    Most,
    of_atom,
    show_atom,
    substitute,
)  # fmt: skip
from ferrite.native import machine
from ferrite.syntax import Ref, refs

# Products that write into memory they are given: their shim, and the names of trailing floats with what they are if
# they are not given.
_PRODUCTS: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "aten.mm.default": ("aoti_torch_cpu_mm_out", ()),
    "aten.bmm.default": ("aoti_torch_cpu_bmm_out", ()),
    "aten.addmm.default": ("aoti_torch_cpu_addmm_out", (("beta", 1.0), ("alpha", 1.0))),
    "aten.baddbmm.default": ("aoti_torch_cpu_baddbmm_out", (("beta", 1.0), ("alpha", 1.0))),
}

SETTLES_ALL = False  # `assemble` says what it switches on; tests do


@dataclass(frozen=True)
class Assembled:
    """A program as a function of Python. `block`: bytes of memory for inner buffers; `peak`: bytes that a call needs at
    most beside its arguments, without what ops in eager need for themselves. None if sizes change: then `need` says
    it. `passed`: what calls have learned that are lent memory, by their results."""

    function: Callable[[list[Any]], tuple[Any, ...]]
    alive: Sequence[Any]  # what the words point to: to be kept for as long as the function is
    block: int | None
    peak: int | None
    layout: Layout | None  # for a process that assembles the same program again
    passed: dict[str, ctypes.c_int64]
    need: Need | None = None


def assemble(
    program: HostProgram,
    constants: Mapping[str, Any],
    kernels: Kernels,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    layout: Layout | None = None,
    *,
    ranges: bool = False,
    settles: bool = False,
    passed: dict[str, ctypes.c_int64] | None = None,
    backward: bool = False,
) -> Assembled:
    """`functions`: those that operators call; `layout` and `passed`: if the program was assembled before; `ranges`:
    whether steps are marked for a profiler; `settles`: whether each call is followed by a check that it left no Python
    error behind (always, if `SETTLES_ALL`); `backward`: whether autograd adds results to other gradients. Raises
    `Unsupported` if a step has no door, `ValueError` if the layout is that of another program."""
    passed = {} if passed is None else passed
    assembler = _Assembler(program, constants, kernels, functions or {}, layout, ranges, settles, passed, backward)
    function = assembler.function()
    if assembler.plan.outside is None:
        return Assembled(function, assembler.alive, None, None, None, passed, assembler.plan.need)
    block = assembler.plan.length.constant
    return Assembled(function, assembler.alive, block, block + assembler.plan.outside, assembler.layout, passed)


class _Assembler:
    def __init__(
        self,
        program: HostProgram,
        constants: Mapping[str, Any],
        kernels: Kernels,
        functions: Mapping[str, Callable[..., Any]],
        layout: Layout | None,
        ranges: bool,
        settles: bool,
        passed: dict[str, ctypes.c_int64],
        backward: bool,
    ) -> None:
        self.layout = layout
        self.settles = settles or SETTLES_ALL
        self.settled: dict[Settle, Settle] = {}
        self.moved: set[str] = set()  # roots that a call may have given other memory
        self.step = ""  # the one whose instructions are written
        self.passed = passed
        self.ranges = ranges
        self.program = program
        self.constants = constants
        self.kernels = kernels
        self.functions = functions
        self.all = infer(program, constants) if layout is None else values_in(layout, program, constants)
        self.values, self.several, self.numbers = self.all.tensors, self.all.several, self.all.numbers
        self.shown = _shown_views(program, self.all, backward)
        self.template = [0] * len((machine.LIST, machine.FRAME, machine.FAILED, machine.THREAD))
        self.known: dict[Any, int] = {}  # constants and shapes -> slot
        self.computed: dict[Index, int] = {}  # sizes -> slot
        self.code: list[int] = []
        self.owned: list[int] = []  # slots of handles to give back
        self.launches: dict[int, Launched] = {}  # by place in the code
        self.again: dict[int, PythonCall] = {}  # by place in the code: the same call in Python
        self.words: list[Made] = []  # for the dispatcher
        self.divisions: set[int] = set()  # places in the code
        self.sizes: dict[int, Index] = {}  # by place in the code: the size that is computed there
        self.read: dict[int, str] = {}  # by place in the code: the value whose address is asked for there
        self.take: tuple[int, int] = (-1, -1)  # place in the code, slot of the length
        self.alive: list[Any] = [constants, kernels]  # what the words point to
        self.own: dict[int, list[Index]] = {}  # memory for locals, by the identity of the launch
        self.scratch = self.slot()
        self.range = self.slot()  # the one that is open, for a profiler

    # ---- memory

    def _code_of(self, launch: Launch) -> NativeKernel | None:
        """Machine code that can be run as it is."""
        kernel = self.kernels.native.get(launch.kernel)
        return None if kernel is None or kernel.put_back else kernel

    def _own_memory(self, launch: Launch) -> list[Index]:
        """Where each local of a kernel starts in memory of its own, and how long that is."""
        if id(launch) not in self.own:
            self.own[id(launch)] = self._find_own_memory(launch)
        return self.own[id(launch)]

    def _find_own_memory(self, launch: Launch) -> list[Index]:
        kernel = self._code_of(launch)
        if kernel is None or kernel.facts.locals == ():
            return [ZERO]
        known: dict[Atom, Index] = dict(zip(kernel.symbols, map(self.all.term, launch.sizes), strict=True))
        found = [ZERO]
        for length in kernel.lengths:
            found.append(found[-1] + in_lines(substitute(length, known)))
        return found

    def _plan(self) -> Plan:
        def own_memory(launch: Launch) -> Index:
            return self._own_memory(launch)[-1]

        if self.layout is not None:
            return plan_in(self.layout, self.program, self.all, own_memory)
        found = plan(self.program, self.all, own_memory)
        self.layout = layout_of(self.all, found)
        return found

    # ---- second walk: instructions

    def function(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        self.plan = self._plan()
        self.places = self.plan.places
        self.block = self.slot()
        self._take_inputs()
        if self.places:
            length = self.number(self.plan.length)
            self.take = len(self.code), length
            self.call("ferrite_take", length, _address(self.block), checked=True)
        self.call("PyEval_SaveThread", result=machine.THREAD)
        self.threads = self.slot()
        self.call("ferrite_threads", result=self.threads)
        result = self.slot()
        for position, step in enumerate(self.program.steps):
            label = range_of(step) if self.ranges else None
            if label is not None:
                no = self.constant(0)
                self.call("aoti_record_function_start", self._text(label), no, no, no, _address(self.range))
            self.step = show_step(step) if self.settles else ""
            with within(place_of_step, step):
                match step:
                    case Call():
                        self._write_call(step)
                    case Launch():
                        self._write_launch(step, position)
                    case Free():
                        self._free(step.names)
                    case Return():
                        self._write_return(step, result)
            if label is not None:
                self._end_range()
        self.code.append(0)
        cleaner = len(self.code)
        self._write_cleaner(result)
        return self._link(cleaner, result)

    def _end_range(self) -> None:
        self.call("aoti_record_function_end", self.range)
        self.move(self.range, self.constant(0))

    def _take_inputs(self) -> None:
        """Handles of all inputs that are read. Those that may die here are owned, and are no longer in the list."""
        read = {name for step in self.program.steps for name in _names_in(step)}
        for name in read - self.values.keys() - self.several.keys() - self.numbers.keys() - self.functions.keys():
            raise Unsupported(f"{name}, which is no tensor")
        self.count = len(self.code)
        self.call("ferrite_count", machine.LIST, self.constant(len(self.program.inputs)), checked=True)
        for index, entry in enumerate(self.program.inputs):
            if entry.name in self.all.given:
                self._take_number(index, self.all.given[entry.name])
        keepers = keepers_of(self.program, self._read_by_address(), self.kernels.in_place)
        for index, entry in enumerate(self.program.inputs):
            if entry.name in self.all.given:
                continue
            if entry.name not in read:
                if entry.saved or entry.donated:  # only the list has it
                    self._take_out(index)
                continue
            value = self.values[entry.name]
            value.handle = self.slot()
            self._take_tensor(index, value, keepers[entry.name])
            if not entry.static:
                borrowed, value.handle = value.handle, self.owned_slot()
                value.is_owned = True
                self.call("aoti_torch_new_tensor_handle", borrowed, _address(value.handle), checked=True)
                self._take_out(index)
        for name, tensor in self.constants.items():
            self.values[name].handle = self.constant(id(tensor) + BEHIND_HEADER)

    def _read_by_address(self) -> frozenset[str]:
        """Inputs of which a kernel, a product or a view of ours takes for granted how they lie in memory."""
        found: set[str] = set()
        for step in self.program.steps:
            match step:
                case Launch():
                    found.update(self.values[name].root for name in step.buffers)
                case Call() if step.result in self.all.views - self.shown or self.all.is_own(step):
                    found.update(
                        self.values[name].root for name in refs((step.args, step.kwargs)) if name in self.values
                    )
        return frozenset(found)

    def _take_tensor(self, index: int, value: Value, keeper: Keeper) -> None:
        """Where the handle of an argument is. One that is read by its address is as promised from here on."""
        row, rank, kind = self.scratch, -1, 0
        if keeper.dtype is not None:
            assert value.sizes is not None
            assert value.strides is not None
            row, rank = self._row((*value.sizes, *value.strides)), len(value.sizes)
            kind = self._promised_kind(value, has_memory=keeper.has_memory)
        argument = Argument(keeper, index, row, max(rank, 0))
        self.alive.append(argument)
        self.call(
            "ferrite_argument", machine.LIST, self.constant(index), _address(row), self.constant(rank),
            self.constant(kind), _address(value.handle or 0), self.constant(id(argument)), machine.FRAME, checked=True,
        )  # fmt: skip

    def _take_out(self, index: int) -> None:
        """The caller's list no longer has this argument."""
        none = self.constant(id(None))
        self.call("Py_IncRef", none)
        self.call("PyList_SetItem", machine.LIST, self.constant(index), none)

    def _take_number(self, index: int, number: Index) -> None:
        if number in self.computed or not number.terms:
            return
        self.computed[number] = self.slot()
        self.call("ferrite_number", machine.LIST, self.constant(index), _address(self.computed[number]), checked=True)

    def _write_call(self, call: Call) -> None:
        if call.target == PART or call.result in self.numbers:
            return
        if call.result in self.all.views - self.shown:
            self._write_view(self.values[call.result], self.values[call.args[0].name])
        elif self.all.is_own(call):
            self._write_own(call)
        elif call.target == HOLD:
            value, source = self.values[call.result], self._handle(call.args[0].name)
            value.handle, value.is_owned = self.owned_slot(), True
            python = self.constant(id(self._python_call(call, [value])))
            shape, _, rank = self._shape(value)
            self.call(
                "ferrite_hold", source, _address(value.handle), shape, rank, self.constant(self._promised_kind(value)),
                _address(machine.THREAD), python, machine.FRAME, checked=True,
            )  # fmt: skip
        else:
            several = self.several.get(call.result)
            results = (self.values[call.result],) if several is None else several.parts
            for result in results:
                if result is not None:
                    result.handle, result.is_owned = self.owned_slot(), True
            form = form_of(call)
            if form is None:
                numbers = {} if several is None else several.numbers
                for number in numbers.values():
                    self.computed[number] = self.slot()
                counted = {place: self.computed[number] for place, number in numbers.items()}
                python = self.constant(id(self._python_call(call, results, counted=counted)))
                self.call("ferrite_python", _address(machine.THREAD), python, machine.FRAME, checked=True)
            else:
                self._write_dispatch(call, form, results)
            if may_move_memory(call):
                # Nothing says which inputs share memory.
                self._forget_pointers([*refs((call.args, call.kwargs)), *(entry.name for entry in self.program.inputs)])
            for result in results:
                if result is not None and result.asked is not None:
                    self._ask_sizes(result.handle, result.asked)

    def _ask_sizes(self, handle: int | None, asked: Shape) -> None:
        """Sizes of what eager made, which nobody knew before."""
        assert handle is not None
        for dim, size in enumerate(asked):
            slot = self.computed[size] = self.slot()
            self.call("aoti_torch_get_size", handle, self.constant(dim), _address(slot), checked=True)

    def _python_call(
        self,
        call: Call,
        results: Sequence[Value | None],
        copied: Sequence[str] = (),
        counted: Mapping[int, int] | None = None,
    ) -> PythonCall:
        """An object that does a call in Python, on copies of some tensors; `counted`: slots of results that are
        numbers, by position."""
        target = resolve(call.target)
        function = target._op if isinstance(target, OpOverload) else target
        handles = [None if value is None else value.handle for value in results]
        return self._in_python(function, call, handles, copied, counted or {})

    def _in_python(
        self,
        function: Callable[..., Any],
        step: Call | Launch,
        results: Sequence[int | None],
        copied: Sequence[str],
        counted: Mapping[int, int],
    ) -> PythonCall:
        if isinstance(step, Call):
            given: Any = (step.args, step.kwargs)
        else:
            given = ((*map(Ref, step.buffers), *step.sizes), {})
        names = list(dict.fromkeys(refs(given)))
        tensors = {name: self._handle(name) for name in names if name in self.values}
        numbers = {name: self.number(self.numbers[name]) for name in names if name in self.numbers}
        # Objects in the place of their paths now, tensors in the place of names in each call.
        args, kwargs = filled(given, lambda name: self.functions.get(name, Ref(name)))
        made = PythonCall(function, step, args, kwargs, tensors, numbers, results, copied, counted)
        self.alive.append(made)
        return made

    def _write_dispatch(self, call: Call, form: Form, results: Sequence[Value | None]) -> None:
        """An operator through the dispatcher. If it fails, Python calls it again and raises what eager would."""
        again = self._python_call(call, results, form.written)
        stack, first = self.array([0] * form.length), len(self.words)
        for place, item in enumerate(form.words, stack):
            self._put(place, item)
        name, overload = self._text(form.name), self._text(form.overload)
        door, operands = "aoti_torch_call_dispatcher", [name, overload, _address(stack)]
        if call.result in self.places.keys() | self.plan.hosted.keys() and can_lend():
            door, place = "ferrite_call_into", self.slot()
            self._point(place, call.result, ZERO)
            passed = self.passed.setdefault(call.result, ctypes.c_int64(0))
            self.alive.append(passed)
            operands += [place, self.number(self.values[call.result].bytes), self.constant(ctypes.addressof(passed))]
        for made in self.words[first:]:
            made.until = len(self.code)
        self.again[len(self.code)] = again
        self.call(door, *operands, checked=True)
        given = list(range(stack, stack + len(results)))
        if form.gives_list:
            given = [self.slot() for _ in results]
            for number, place in enumerate(given):
                self.call("torch_list_get_item", stack, self.constant(number), _address(place), checked=True)
            self.call("torch_delete_list", stack)
        for place, result in zip(given, results, strict=True):
            if result is None or result.handle is None:
                self.call("aoti_torch_delete_tensor_object", place)
            else:
                self.call("ferrite_given", place, _address(result.handle), checked=True)

    def _put(self, slot: int, item: Item) -> None:
        """The word of an argument, as the dispatcher takes it, in a slot that no other call uses."""
        match item:
            case Word(value=value):
                self.template[slot] = value
            case Handle(name=name):
                self.call("ferrite_same", self._handle(name), _address(slot), checked=True)
                self._note_word(slot, "aoti_torch_delete_tensor_object")
            case Size(name=name):
                self.move(slot, self.number(self.numbers[name]))
            case Text(content=content):
                length = self.constant(len(content.encode()))
                self.call("torch_new_string_handle", self._text(content), length, _address(slot), checked=True)
                self._note_word(slot, "torch_delete_string")
            case Items(items=items):
                words = self.array([0] * max(len(items), 1))
                for place, inner in enumerate(items, words):
                    self._put(place, inner)
                self.call("ferrite_list", self.constant(len(items)), _address(words), _address(slot), checked=True)
                self._note_word(slot, "torch_delete_list")
            case Some(item=inner):
                word = self.array([0])
                self._put(word, inner)
                self.call("ferrite_some", word, _address(slot), checked=True)
                self._note_word(slot, "torch_delete_stable_ivalue")

    def _note_word(self, slot: int, delete: str) -> None:
        self.words.append(Made(slot, delete, len(self.code)))

    def _text(self, content: str) -> int:
        """The slot of the address of a text that ends in a zero."""
        key = ("text", content)
        if key not in self.known:
            held = ctypes.create_string_buffer(content.encode())
            self.alive.append(held)
            self.known[key] = self.constant(ctypes.addressof(held))
        return self.known[key]

    def _write_own(self, call: Call) -> None:
        """Memory in the block or a tensor, and what writes there."""
        value = self.values[call.result]
        if value.root not in self.places and value.root not in self.plan.hosted:
            self._allocate(value)
        if call.target in _PRODUCTS:
            self._check_memory(refs(call.args))
            name, words = _PRODUCTS[call.target]
            operands = [self._handle(arg.name) for arg in call.args if isinstance(arg, Ref)]
            floats = [self.constant(bits_of(float(call.kwargs.get(word, default)))) for word, default in words]
            self.again[len(self.code)] = self._python_call(call, [None])
            self.call(name, self._handle(call.result), *operands, floats=floats, checked=True)

    def _allocate(self, value: Value) -> None:
        """A tensor of its own, unless something else lay in it before."""
        if value.handle is not None:
            return
        value.handle, value.is_owned = self.owned_slot(), True
        sizes, strides, dims = self._shape(value)
        self.call(
            "aoti_torch_empty_strided", dims, sizes, strides, *self._kind(value), _address(value.handle), checked=True
        )

    def _write_view(self, value: Value, source: Value) -> None:
        """A view of a tensor that has a handle gets one too; of a buffer in the block when it is asked for."""
        if source.handle is None:
            return
        sizes, strides, dims = self._shape(value)
        step = self.number(value.offset - source.offset)
        value.handle, value.is_owned = self.owned_slot(), True
        self.call(
            "aoti_torch__reinterpret_tensor", source.handle, dims, sizes, strides, step, _address(value.handle),
            checked=True,
        )  # fmt: skip

    def _write_launch(self, launch: Launch, position: int) -> None:
        kernel = self._code_of(launch)
        if kernel is None:
            function = self.kernels.functions[launch.kernel]
            if self.moved:
                function = check_memory(launch.kernel, self.program.name, function)
            python = self.constant(id(self._in_python(function, launch, (), (), {})))
            self.call("ferrite_python", _address(machine.THREAD), python, machine.FRAME, checked=True)
            return
        *starts, own = self._own_memory(launch)
        array = self.array([0] * (len(launch.buffers) + len(starts)))
        for index, name in enumerate(launch.buffers):
            value = self.values[name]
            if value.handle is None:
                self._point(array + index, value.root, self._start(value))
            else:
                self.move(array + index, self._pointer(value))
        for index, start in enumerate(starts, len(launch.buffers)):
            if own is not ZERO:
                self._point(array + index, locals_of(position), start)
        sizes = self._row([self.all.term(size) for size in launch.sizes])
        buffers = [self._described(self.values[name]) for name in launch.buffers if launch.origins]
        numbers = [self.number(self.all.term(size)) for size in launch.sizes]
        self.launches[len(self.code)] = Launched(launch, kernel, array, buffers, numbers)
        table = self.constant(kernel.address)
        self.call(kernel.launch, table, _address(array), _address(sizes), self.threads, checked=True)

    def _described(self, value: Value) -> Buffer:
        """How to find a buffer of a kernel when it has failed."""
        if value.handle is not None:
            return Buffer(value.handle, 0, 0, None)
        sizes, _, _ = self._shape(value)
        return Buffer(0, int(sizes), len(value.sizes or ()), value.dtype)

    def _free(self, names: Iterable[str]) -> None:
        """These values are not read again. A part of several is freed by its own name, or with them if it has none."""
        named = [self.values[name] for name in names if name in self.values]
        parts = [part for name in names if name in self.several for part in self.several[name].parts]
        for value in (*named, *(part for part in parts if part is not None and id(part) not in self.all.taken)):
            if value.is_owned and value.handle is not None:
                self._delete(value.handle)
                value.is_owned = False

    def _write_return(self, final: Return, result: int) -> None:
        self.call("ferrite_resume", _address(machine.THREAD))
        self.call("PyTuple_New", self.constant(len(final.value)), result=result)
        made = self.slot()
        for index, value in enumerate(final.value):
            if isinstance(value, Ref) and value.name in self.numbers:
                self.call("PyLong_FromLongLong", self.number(self.numbers[value.name]), result=made)
            elif isinstance(value, Ref):
                handle = self.owned_slot()
                known = self.values[value.name].handle
                assert known is not None
                self.call("ferrite_same", known, _address(handle), checked=True)
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

    def _write_cleaner(self, result: int) -> None:
        """Python's lock, then the error, while all that it speaks of is there; then everything goes back."""
        self.settles = False  # an error is what brings us here
        if self.ranges:
            self._end_range()
        self.call("ferrite_resume", _address(machine.THREAD))
        self.handler = self.slot()
        self.call("ferrite_raise", self.handler, machine.FRAME)
        self.call("Py_DecRef", result)
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
        raiser = Raiser(
            self.launches, self.again, self.words, self.divisions, self.sizes, self.read, self.take, self.count,
            self.program.name,
        )  # fmt: skip
        self.alive.append(raiser)
        self.template[self.handler] = id(raiser)
        start = machine.HEADER + len(self.template)
        header = [len(self.template), start, start + cleaner, result]
        words = [*header, *self.template, *self.code]
        data = struct.pack(f"{len(words)}q", *words)
        return machine.python_function(self.program.name, host_machine().address("ferrite_enter"), data)

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

    def number(self, value: Index) -> int:
        """The slot of a size, which is computed here if it is not known yet."""
        if not value.terms:
            return self.constant(value.constant)
        if value not in self.computed:
            self.computed[value] = self._compute(value)
        return self.computed[value]

    def _compute(self, value: Index) -> int:
        total = None
        for coefficient, monomial in value.terms:
            part = self._atom(monomial[0])
            for atom in monomial[1:]:
                part = self._checked(machine.MULTIPLY, part, self._atom(atom), value)
            if coefficient != 1:
                part = self._checked(machine.MULTIPLY, part, self.constant(coefficient), value)
            total = part if total is None else self._checked(machine.ADD, total, part, value)
        assert total is not None
        return self._checked(machine.ADD, total, self.constant(value.constant), value) if value.constant else total

    def _checked(self, kind: int, one: int, other: int, size: Index) -> int:
        """What two numbers make for a size, which an error names if 64 bits do not hold it."""
        self.sizes[len(self.code)] = size
        return self.combine(kind, one, other)

    def _atom(self, atom: Atom) -> int:
        match atom:
            case FloorDiv(dividend=one, divisor=other):
                kind = machine.DIVIDE
            case Mod(dividend=one, divisor=other):
                kind = machine.REMAINDER
            case Least(left=one, right=other):
                kind = machine.LEAST
            case Most(left=one, right=other):
                kind = machine.MOST
            case _:
                if of_atom(atom) not in self.computed:
                    raise Unsupported(f"the size {show_atom(atom)}, which nobody knows yet")
                return self.computed[of_atom(atom)]
        left, right = self.number(one), self.number(other)
        if kind in (machine.DIVIDE, machine.REMAINDER):
            self.divisions.add(len(self.code))
        return self.combine(kind, left, right)

    def _row(self, sizes: Sequence[Index]) -> int:
        """Sizes in slots in a row, for a call that reads them there."""
        key = ("row", *sizes)
        if key not in self.known:
            numbers = [self.number(size) for size in sizes]
            start = self.known[key] = self.array([size.constant for size in sizes] or [0])
            for place, (size, number) in enumerate(zip(sizes, numbers, strict=True), start):
                if size.terms:
                    self.move(place, number)
        return self.known[key]

    def _shape(self, value: Value) -> tuple[int, int, int]:
        """Operands: the addresses of the sizes and of the strides, and how many there are of each."""
        assert value.sizes is not None
        assert value.strides is not None
        start = self._row((*value.sizes, *value.strides))
        return _address(start), _address(start + len(value.sizes)), self.constant(len(value.sizes))

    def _kind(self, value: Value) -> tuple[int, int, int]:
        """Operands: type and device."""
        if value.dtype not in DTYPES:
            raise Unsupported(f"tensors of {value.dtype}")
        return self.constant(DTYPES[value.dtype]), self.constant(CPU), self.constant(0)

    def _promised_kind(self, value: Value, *, has_memory: bool = True) -> int:
        """The dtype and the bytes of an element, as the machine compares them: none if memory need not be there."""
        if value.dtype is None or value.dtype not in DTYPES:
            raise Unsupported(f"tensors of {value.dtype}")
        return DTYPES[value.dtype] | (value.dtype.itemsize << 32 if has_memory else 0)

    def _handle(self, name: str) -> int:
        """The slot of a value's handle, which is made here if the value lies in the block."""
        value = self.values[name]
        if value.handle is None:
            pointer = self.slot()
            self._point(pointer, value.root, self._start(value))
            sizes, strides, dims = self._shape(value)
            value.handle, value.is_owned = self.owned_slot(), True
            self.call(
                "aoti_torch_create_tensor_from_blob", pointer, dims, sizes, strides, self.constant(0),
                *self._kind(value), _address(value.handle), checked=True,
            )  # fmt: skip
        return value.handle

    def _pointer(self, value: Value) -> int:
        if value.pointer is None:
            assert value.handle is not None
            assert value.dtype is not None
            value.pointer = self.slot()
            self.read[len(self.code)] = value.root
            itemsize = self.constant(value.dtype.itemsize)
            self.call("ferrite_pointer", value.handle, itemsize, _address(value.pointer), checked=True)
        return value.pointer

    def _check_memory(self, names: Iterable[str]) -> None:
        """Products read what they are given without a look at where it ends."""
        for value in (self.values[name] for name in names):
            if value.root in self.moved:
                self._pointer(value)

    def _forget_pointers(self, names: Iterable[str]) -> None:
        """These may have other memory than before: whoever reads them asks again where it is."""
        roots = {self.values[name].root for name in names if name in self.values}
        self.moved |= roots
        for value in self.values.values():
            if value.root in roots:
                value.pointer = None

    def _start(self, value: Value) -> Index:
        """Where a value starts in the memory of its root, in bytes."""
        assert value.dtype is not None
        return value.offset * value.dtype.itemsize

    def _point(self, slot: int, name: str, start: Index) -> None:
        """The address of planned memory: in the block, or in a tensor whose own content comes later."""
        if name in self.places:
            self.add(slot, self.block, self.number(self.places[name] + start))
            return
        host, offset = self.plan.hosted[name]
        self._allocate(self.values[host])
        self.add(slot, self._pointer(self.values[host]), self.number(start + offset))

    def _delete(self, handle: int) -> None:
        self.call("aoti_torch_delete_tensor_object", handle)
        self.move(handle, self.constant(0))

    def call(
        self, function: str | int, *operands: int, result: int | None = None, floats: Sequence[int] = (),
        checked: bool = False,
    ) -> None:  # fmt: skip
        """`operands`: slots whose content is passed, or `_address` of one."""
        self._write_words(function, operands, result, floats, checked)
        if self.settles:
            told = Settle(str(function), self.program.name, self.step)
            settle = self.settled.setdefault(told, told)
            self.alive.append(settle)
            self._write_words("ferrite_settle", (_address(machine.THREAD), self.constant(id(settle))), None, (), True)

    def _write_words(
        self, function: str | int, operands: Sequence[int], result: int | None, floats: Sequence[int], checked: bool
    ) -> None:
        assert len(operands) <= machine.MOST_INTEGERS
        address = function if isinstance(function, int) else addresses()[function]
        words = [2 * operand + (type(operand) is _address) for operand in operands]
        head = machine.CALL | len(operands) << 8 | len(floats) << 16 | int(checked) << 24
        self.code += [head, address, self.scratch if result is None else result, *words]
        self.code += [2 * slot for slot in floats]

    def move(self, to: int, source: int) -> None:
        self.code += [machine.MOVE, to, source]

    def add(self, to: int, one: int, other: int) -> None:
        self.code += [machine.ADD, to, one, other]

    def combine(self, kind: int, one: int, other: int) -> int:
        """The slot of what two numbers make."""
        slot = self.slot()
        self.code += [kind, slot, one, other]
        return slot


class _address(int):
    """A slot that is passed by its address."""


# ---- small things


def _shown_views(program: HostProgram, values: Values, backward: bool) -> frozenset[str]:
    """Views of which the dispatcher has to know, because AOTAutograd asks a result for its base.

    Views that lead from an input to a result, where sizes change: AOTAutograd makes them again for the caller. It would
    come to `as_strided`, whose gradient has other strides, and other values where elements of the input share their
    memory. (Of known sizes it has kept the views itself.)

    Views that lead to results with one memory, if the dispatcher makes some of them: a later graph that is given such
    results, and writes to one, must find the same base in all of them, or none in any.

    Views that lead to a gradient that lies otherwise than a sum: autograd adds another gradient in place to one that
    has no base, and the sum would lie like the view, in memory that may be larger.
    """
    given = {entry.name for entry in program.inputs}
    calls = {step.result: step for step in program.steps if isinstance(step, Call)}

    def memory(name: str) -> tuple[set[str], set[str]]:
        """The views that lead to a result, and the values that own the memory it may lie in."""
        views: set[str] = set()
        roots: set[str] = set()
        left = [name]
        while left:
            name = left.pop()
            if name in views:
                continue
            if sources := _sources(name, calls, values):
                views.add(name)
                left += sources
            else:
                roots.add(name)
        return views, roots

    results = [name for name in _names_in(program.steps[-1]) if name in values.tensors]
    groups: list[tuple[set[str], set[str], int]] = []  # views, roots, number of results
    shown: set[str] = set()
    for name in results:
        views, roots = memory(name)
        if backward and name in values.views and _sum_would_show(values, name):
            shown |= views & values.views
        count = 1
        for group in [each for each in groups if not each[1].isdisjoint(roots)]:
            views, roots, count = views | group[0], roots | group[1], count + group[2]
            groups.remove(group)
        groups.append((views, roots, count))
    for views, roots, count in groups:
        if (values.changing and not roots.isdisjoint(given)) or (count > 1 and not views <= values.views):
            shown |= views & values.views
    return frozenset(shown)


def _sum_would_show(values: Values, name: str) -> bool:
    """Whether what is added to a tensor in place may lie otherwise than a new sum: it is dense, and does not fill its
    memory, or the stride of a dimension is not what the faster ones come to. What is unknown may."""
    value = values.tensors[name]
    root = values.tensors.get(value.root)
    if value.sizes is None or value.strides is None or root is None or root.sizes is None or root.strides is None:
        return True
    if (
        value.dtype is None
        or value.dtype != root.dtype
        or any(extent.terms for extent in (*value.sizes, *value.strides, value.offset))
    ):
        return True
    sizes, strides = (tuple(extent.constant for extent in extents) for extents in (value.sizes, value.strides))
    if not is_dense(sizes, strides):
        return False
    return value.offset != ZERO or value.bytes != root.bytes or strides != strides_anew(sizes, strides)


def _sources(name: str, calls: Mapping[str, Call], values: Values) -> list[str]:
    """The tensors whose memory a tensor lies in, or may lie in: none of one that has memory of its own."""
    call = calls.get(name)
    if call is not None and call.target == PART:
        call = calls.get(call.args[0].name)
    if call is None or values.is_own(call):
        return []
    op = None if call.target == HOLD else resolve(call.target)
    if op is not None and not (isinstance(op, OpOverload) and may_share(op)):
        return []
    operands = [each for each in refs((call.args, call.kwargs)) if each in values.tensors]
    return operands[:1] if op is None else operands


def _names_in(step: Any) -> list[str]:
    match step:
        case Call():
            return list(refs((step.args, step.kwargs)))
        case Launch():
            return [*step.buffers, *refs(step.sizes)]
        case Return():
            return list(refs(step.value))
    return []
