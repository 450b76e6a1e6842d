"""The machine that runs host programs without Python: a few functions, made once in a process.

A program for it is data, words of 64 bits, so that a graph needs no code of its own for what stands between its
kernels. It works on a frame, which each call has for itself: slots of one word that hold sizes, addresses and handles
of tensors, the constants of the program among them. These are the instructions.

    call   head, address, result, operands ...   result := address(operands); fails if `checked` and it is not 0
    move   head, to, from
    add    head, to, one, other                  so too: multiply, divide, remainder, least, most

A division is that of Python, rounded down, and fails if the divisor is 0. A sum or product that 64 bits do not hold
fails too: nothing gets less memory than it will write to.

An operand names a slot: `2 * slot` stands for what is in it, `2 * slot + 1` for its address. The head of a call says
how many operands are integers (or addresses) and how many, behind them, floating; a call passes `MOST_INTEGERS` words
and `MOST_FLOATS` numbers always, of which the callee reads as many as it has parameters: integers and floats travel in
registers and stack places of their own, and the caller clears the stack.

    ferrite_enter(self, list)              what Python calls: `self` is a bytes object that holds a program
    ferrite_take(size, to)                 memory for one call: what an earlier call gave back, if it is large enough;
                                           fails if there is not as much
    ferrite_give(block)                    back, to be kept for the next call; null is no block
    ferrite_drop()                         frees what is kept
    ferrite_resume(thread)                 takes Python's lock again if the slot says that it was released
    ferrite_python(thread, object, frame)  calls a Python object with the address of the frame; fails if it raises
    ferrite_raise(object, frame)           the same, to find words for a failure, unless it has an exception already
    ferrite_settle(thread, object)         fails if a Python error is set, which the object then tells of: behind every
                                           call of a program that is checked, as what works leaves none
    ferrite_count(list, count)             fails if a list has another length
    ferrite_number(list, index, to)        a whole number of the list; fails if it is none
    ferrite_argument(list, index, shape, rank, kind, to, object, frame)
                                           a tensor of the list: where its handle is. One that is not as promised, with
                                           these sizes, strides and elements in plain memory, is put in order by the
                                           object, or the object raises; a rank of -1 promises only a tensor
    ferrite_pointer(handle, bytes, to)     where the elements of a plain tensor are; fails if they lie outside of its
                                           storage, which somebody may have freed; `bytes`: of one
    ferrite_same(handle, to)               a handle of the same tensor; of none, as the operator that was to give one
                                           left it out, if that is null: Python makes None of it
    ferrite_hold(handle, to, shape, rank, kind, thread, object, frame)
                                           a handle of what an operator gave if it is as promised in the same way, else
                                           as the object does it
    ferrite_list(count, words, to)         a list for the dispatcher
    ferrite_some(word, to)                 an optional for the dispatcher that is there
    ferrite_given(handle, to)              what the dispatcher gave; null if that is no tensor
    ferrite_call_into(name, overload, words, place, bytes, passed)
                                           calls the dispatcher; see Note [Lent memory]
    A convolution has no form that writes where it is told to: it asks torch's allocator for its result. C's library
    gives fresh pages for something that large, and the system fills them with zeros, in each call: half of the time of
    MobileNetV2. So that allocator is replaced by one (`artifact/lend.py`) which does what it did, but for one thing:
    while a program of ours calls an operator by `ferrite_call_into`, one memory of exactly so many bytes that this
    thread asks for is a place that we chose, and giving it back does nothing. If it becomes the result, the result lies
    there. If something else takes it, that is gone before the operator returns, and the result lies elsewhere: whoever
    reads it asks the tensor where it is. The next call then passes by one more that would fit (`passed`, a word that
    every call in a program has), until it is the result's turn, or nothing fits. One thread lends at a time; others
    meanwhile call without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ferrite.native import support
from ferrite.native.build import Library, build, load
from ferrite.native.target import host

CALL, MOVE, ADD, MULTIPLY, DIVIDE, REMAINDER, LEAST, MOST = range(1, 9)
MOST_INTEGERS, MOST_FLOATS = 24, 4
IN_REGISTERS = 6  # integers that a call passes without the stack

# Slots that every frame has.
LIST, FRAME, FAILED, THREAD = range(4)
HEADER = 4  # words in front of a program: slots, where the program starts, where the clean-up does, slot of the result
BLOCK_HEADER = 64  # bytes in front of a block, which hold its length
MOST_BYTES = 1 << 62  # of a block: more than any machine has, and adding to it does not overflow
MOST_ON_STACK = 2048  # slots: a longer frame is taken from the heap, as threads may have small stacks

EXPORTS = (
    "ferrite_enter", "ferrite_take", "ferrite_give", "ferrite_drop", "ferrite_resume", "ferrite_python",
    "ferrite_raise", "ferrite_hold", "ferrite_list", "ferrite_some", "ferrite_given", "ferrite_threads",
    "ferrite_alone", "ferrite_kept", "ferrite_call_into", "ferrite_allocate", "ferrite_deleter",
    "ferrite_ask_allocator", "ferrite_allocator", "ferrite_lender", "ferrite_count", "ferrite_number",
    "ferrite_argument", "ferrite_pointer", "ferrite_types", "ferrite_keys", "ferrite_settle", "ferrite_same",
)  # fmt: skip


@dataclass(frozen=True)
class TensorWords:
    """Where a tensor of PyTorch keeps what is asked of it: the places of its words, and of those of its storage
    (`address`, `length`). Of at most `inline` dimensions, sizes and strides lie in the tensor itself, of more of them
    one behind the other where the word of the sizes points to."""

    rank: int
    sizes: int
    strides: int
    offset: int
    count: int
    kind: int
    keys: int
    storage: int
    address: int
    length: int
    inline: int


@cache
def machine(imports: tuple[tuple[str, int], ...], words: TensorWords) -> Library:
    """The functions above, with what they call from outside, by address."""
    target = host()
    return support.loaded(
        support.MACHINE,
        lambda: build(machine_text(target.triple, words), target),
        lambda made: load([made], EXPORTS, dict(imports), lasting=True),
    )


def address_in_bytes() -> int:
    """Where the content of a bytes object starts."""
    return bytes.__basicsize__ - 1


def python_function(name: str, address: int, program: bytes) -> Callable[[Any], Any]:
    """A built-in function of one argument, which hands a bytes object that starts with `program` to the code at
    `address` as its `self`. Python reads the definition of a function until that is gone, and lets go of its `self`
    after that: so the definition lies behind the program, where nothing that is collected earlier can own it."""
    at, label = len(program), name.encode() + b"\0"
    owner = program + bytes(ctypes.sizeof(_MethodDefinition)) + label
    content = id(owner) + address_in_bytes()  # nobody else has seen these bytes yet: they may be written
    definition = _MethodDefinition.from_address(content + at)
    definition.name = content + at + ctypes.sizeof(_MethodDefinition)
    definition.address, definition.flags = address, METH_O
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return make(content + at, owner, None)


METH_O = 8


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_void_p),
    )


def outside(names: Mapping[str, ctypes.CDLL]) -> tuple[tuple[str, int], ...]:
    """Addresses by name, each from its library."""
    return tuple((name, address_of(library, name)) for name, library in names.items())


def address_of(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


# ---- the text

GET_THREADS = "_ZN2at15get_num_threadsEv"


def machine_text(triple: str, words: TensorWords) -> str:
    return "\n".join(
        [
            f'target triple = "{triple}"',
            _DECLARATIONS,
            _ENTER,
            _run_text(),
            _MEMORY,
            _PYTHON,
            _arguments_text(words),
            _DISPATCH,
            _LENDING,
            _THREADS,
        ]
    )


_DECLARATIONS = f"""
@ferrite_kept = global ptr null, align 8
@ferrite_alone = global i32 0, align 4
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyEval_SaveThread()
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyObject_CallOneArg(ptr, ptr)
declare ptr @PyErr_Occurred()
declare ptr @PyErr_NoMemory()
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @PyErr_NormalizeException(ptr, ptr, ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare i64 @PyList_Size(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare i32 @PyType_IsSubtype(ptr, ptr)
declare void @Py_DecRef(ptr)
declare i32 @aoti_torch_new_tensor_handle(ptr, ptr)
declare i32 @aoti_torch_new_uninitialized_tensor(ptr)
declare i32 @aoti_torch_is_defined(ptr, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @torch_new_stable_ivalue(ptr)
declare i32 @torch_new_list_reserve_size(i64, ptr)
declare i32 @torch_list_push_back(ptr, i64)
declare i32 @aoti_torch_call_dispatcher(ptr, ptr, ptr)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i64 @pthread_self()
declare i32 @{GET_THREADS}()
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare {{ i64, i1 }} @llvm.sadd.with.overflow.i64(i64, i64)
declare {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64, i64)
"""

_ENTER = f"""
define ptr @ferrite_enter(ptr %self, ptr %list) {{
  %data = getelementptr i8, ptr %self, i64 {address_in_bytes()}
  %slots = load i64, ptr %data, align 1
  %start_at = getelementptr i64, ptr %data, i64 1
  %start = load i64, ptr %start_at, align 1
  %clean_at = getelementptr i64, ptr %data, i64 2
  %clean = load i64, ptr %clean_at, align 1
  %result_at = getelementptr i64, ptr %data, i64 3
  %result = load i64, ptr %result_at, align 1
  %template = getelementptr i64, ptr %data, i64 {HEADER}
  %bytes = shl i64 %slots, 3
  %is_short = icmp ule i64 %slots, {MOST_ON_STACK}
  br i1 %is_short, label %on_stack, label %on_heap
on_stack:
  %near = alloca i64, i64 %slots, align 64
  br label %begin
on_heap:
  %padded = add i64 %bytes, 63
  %rounded = and i64 %padded, -64
  %far = call ptr @aligned_alloc(i64 64, i64 %rounded)
  %no_memory = icmp eq ptr %far, null
  br i1 %no_memory, label %out_of_memory, label %begin
out_of_memory:
  %told = call ptr @PyErr_NoMemory()
  ret ptr null
begin:
  %frame = phi ptr [ %near, %on_stack ], [ %far, %on_heap ]
  %owned = phi ptr [ null, %on_stack ], [ %far, %on_heap ]
  call void @llvm.memcpy.p0.p0.i64(ptr align 64 %frame, ptr align 1 %template, i64 %bytes, i1 false)
  store ptr %list, ptr %frame, align 8
  %own = getelementptr i64, ptr %frame, i64 {FRAME}
  store ptr %frame, ptr %own, align 8
  %program = getelementptr i64, ptr %data, i64 %start
  %failed = call i64 @ferrite_run(ptr %program, ptr %frame)
  %good = icmp eq i64 %failed, 0
  br i1 %good, label %done, label %bad
done:
  %made_at = getelementptr i64, ptr %frame, i64 %result
  %made = load ptr, ptr %made_at, align 8
  call void @free(ptr %owned)
  ret ptr %made
bad:
  %where = getelementptr i64, ptr %frame, i64 {FAILED}
  store i64 %failed, ptr %where, align 8
  %cleaner = getelementptr i64, ptr %data, i64 %clean
  %ignored = call i64 @ferrite_run(ptr %cleaner, ptr %frame)
  call void @free(ptr %owned)
  ret ptr null
}}
"""


def _run_text() -> str:
    """One after the other, until a word that is no instruction; gives 0, or one more than the place of what failed."""
    few = ", ".join(f"i64 %few{n}" for n in range(IN_REGISTERS))
    many = ", ".join([f"i64 %many{n}" for n in range(MOST_INTEGERS)] + [f"double %f{n}" for n in range(MOST_FLOATS)])
    return f"""
define internal i64 @ferrite_run(ptr %program, ptr %frame) {{
  %integers = alloca i64, i64 {MOST_INTEGERS}, align 16
  %floats = alloca double, i64 {MOST_FLOATS}, align 16
  br label %next
next:
  %at = phi ptr [ %program, %0 ], [ %behind_move, %move ], [ %behind_pair, %paired ], [ %behind_call, %called ]
  %head = load i64, ptr %at, align 1
  %kind = and i64 %head, 255
  switch i64 %kind, label %end [
    i64 {CALL}, label %call i64 {MOVE}, label %move i64 {ADD}, label %pair i64 {MULTIPLY}, label %pair
    i64 {DIVIDE}, label %pair i64 {REMAINDER}, label %pair i64 {LEAST}, label %pair i64 {MOST}, label %pair
  ]
end:
  ret i64 0
move:
  {_word("to", 1)}
  {_word("from", 2)}
  {_slot("from")}
  %moved = load i64, ptr %from_slot, align 8
  {_slot("to")}
  store i64 %moved, ptr %to_slot, align 8
  %behind_move = getelementptr i64, ptr %at, i64 3
  br label %next
pair:
  {_word("target", 1)}
  {_word("one", 2)}
  {_word("other", 3)}
  {_slot("one")}
  {_slot("other")}
  %left = load i64, ptr %one_slot, align 8
  %right = load i64, ptr %other_slot, align 8
  switch i64 %kind, label %add [
    i64 {MULTIPLY}, label %multiply i64 {DIVIDE}, label %divide i64 {REMAINDER}, label %divide
    i64 {LEAST}, label %least i64 {MOST}, label %most
  ]
add:
  %added = call {{ i64, i1 }} @llvm.sadd.with.overflow.i64(i64 %left, i64 %right)
  %sum = extractvalue {{ i64, i1 }} %added, 0
  %sum_is_wrong = extractvalue {{ i64, i1 }} %added, 1
  br i1 %sum_is_wrong, label %failed, label %paired
multiply:
  %multiplied = call {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64 %left, i64 %right)
  %product = extractvalue {{ i64, i1 }} %multiplied, 0
  %product_is_wrong = extractvalue {{ i64, i1 }} %multiplied, 1
  br i1 %product_is_wrong, label %failed, label %paired
least:
  %is_less = icmp slt i64 %left, %right
  %smaller = select i1 %is_less, i64 %left, i64 %right
  br label %paired
most:
  %is_more = icmp sgt i64 %left, %right
  %larger = select i1 %is_more, i64 %left, i64 %right
  br label %paired
divide:
  %by_nothing = icmp eq i64 %right, 0
  br i1 %by_nothing, label %failed, label %divided
divided:
  %quotient = sdiv i64 %left, %right
  %back = mul i64 %quotient, %right
  %rest = sub i64 %left, %back
  %has_rest = icmp ne i64 %rest, 0
  %signs = xor i64 %rest, %right
  %differ = icmp slt i64 %signs, 0
  %is_down = and i1 %has_rest, %differ
  %one_less = sext i1 %is_down to i64
  %floor = add i64 %quotient, %one_less
  %correction = select i1 %is_down, i64 %right, i64 0
  %remainder = add i64 %rest, %correction
  %wants_quotient = icmp eq i64 %kind, {DIVIDE}
  %division = select i1 %wants_quotient, i64 %floor, i64 %remainder
  br label %paired
paired:
  %made = phi i64 [ %sum, %add ], [ %product, %multiply ], [ %smaller, %least ], [ %larger, %most ],
                  [ %division, %divided ]
  {_slot("target")}
  store i64 %made, ptr %target_slot, align 8
  %behind_pair = getelementptr i64, ptr %at, i64 4
  br label %next
call:
  {_word("address", 1)}
  {_word("result", 2)}
  %function = inttoptr i64 %address to ptr
  %integer_bits = lshr i64 %head, 8
  %integer_count = and i64 %integer_bits, 255
  %float_bits = lshr i64 %head, 16
  %float_count = and i64 %float_bits, 255
  %checked_bits = lshr i64 %head, 24
  %checked = and i64 %checked_bits, 255
  %operands = getelementptr i64, ptr %at, i64 3
  %no_integers = icmp eq i64 %integer_count, 0
  br i1 %no_integers, label %floating, label %integer
integer:
  %i = phi i64 [ 0, %call ], [ %i_next, %integer ]
  %operand_at = getelementptr i64, ptr %operands, i64 %i
  %operand = load i64, ptr %operand_at, align 1
  %operand_number = lshr i64 %operand, 1
  %operand_slot = getelementptr i64, ptr %frame, i64 %operand_number
  %is_address = trunc i64 %operand to i1
  %content = load i64, ptr %operand_slot, align 8
  %place = ptrtoint ptr %operand_slot to i64
  %passed = select i1 %is_address, i64 %place, i64 %content
  %passed_at = getelementptr i64, ptr %integers, i64 %i
  store i64 %passed, ptr %passed_at, align 8
  %i_next = add i64 %i, 1
  %integers_done = icmp eq i64 %i_next, %integer_count
  br i1 %integers_done, label %floating, label %integer
floating:
  %float_operands = getelementptr i64, ptr %operands, i64 %integer_count
  %behind_call = getelementptr i64, ptr %float_operands, i64 %float_count
  %no_floats = icmp eq i64 %float_count, 0
  br i1 %no_floats, label %choose, label %float
float:
  %j = phi i64 [ 0, %floating ], [ %j_next, %float ]
  %float_at = getelementptr i64, ptr %float_operands, i64 %j
  %float_operand = load i64, ptr %float_at, align 1
  %float_number = lshr i64 %float_operand, 1
  %float_slot = getelementptr double, ptr %frame, i64 %float_number
  %number = load double, ptr %float_slot, align 8
  %number_at = getelementptr double, ptr %floats, i64 %j
  store double %number, ptr %number_at, align 8
  %j_next = add i64 %j, 1
  %floats_done = icmp eq i64 %j_next, %float_count
  br i1 %floats_done, label %choose, label %float
choose:
  %is_few = icmp ule i64 %integer_count, {IN_REGISTERS}
  %is_plain = and i1 %is_few, %no_floats
  br i1 %is_plain, label %few, label %many
few:
  {_loads("few", "integers", "i64", IN_REGISTERS)}
  %few_result = call i64 %function({few})
  br label %called
many:
  {_loads("many", "integers", "i64", MOST_INTEGERS)}
  {_loads("f", "floats", "double", MOST_FLOATS)}
  %many_result = call i64 %function({many})
  br label %called
called:
  %given = phi i64 [ %few_result, %few ], [ %many_result, %many ]
  {_slot("result")}
  store i64 %given, ptr %result_slot, align 8
  %status = trunc i64 %given to i32
  %is_bad = icmp ne i32 %status, 0
  %is_checked = icmp ne i64 %checked, 0
  %has_failed = and i1 %is_bad, %is_checked
  br i1 %has_failed, label %failed, label %next
failed:
  %here = ptrtoint ptr %at to i64
  %begin = ptrtoint ptr %program to i64
  %bytes_in = sub i64 %here, %begin
  %words_in = lshr i64 %bytes_in, 3
  %place_of_failure = add i64 %words_in, 1
  ret i64 %place_of_failure
}}
"""


def _word(name: str, place: int) -> str:
    return f"%{name}_at = getelementptr i64, ptr %at, i64 {place}\n  %{name} = load i64, ptr %{name}_at, align 1"


def _slot(name: str) -> str:
    return f"%{name}_slot = getelementptr i64, ptr %frame, i64 %{name}"


def _loads(name: str, array: str, kind: str, count: int) -> str:
    return "\n  ".join(
        f"%{name}_at{n} = getelementptr {kind}, ptr %{array}, i64 {n}\n  %{name}{n} = load {kind}, ptr %{name}_at{n}"
        for n in range(count)
    )


_MEMORY = f"""
define i32 @ferrite_take(i64 %size, ptr %to) {{
  %too_much = icmp ugt i64 %size, {MOST_BYTES}
  br i1 %too_much, label %bad, label %ask
ask:
  %kept = atomicrmw xchg ptr @ferrite_kept, ptr null acq_rel
  %none = icmp eq ptr %kept, null
  br i1 %none, label %fresh, label %look
look:
  %length = load i64, ptr %kept, align 8
  %fits = icmp uge i64 %length, %size
  br i1 %fits, label %found, label %small
small:
  call void @free(ptr %kept)
  br label %fresh
fresh:
  %padded = add i64 %size, {BLOCK_HEADER + 63}
  %rounded = and i64 %padded, -64
  %made = call ptr @aligned_alloc(i64 64, i64 %rounded)
  %failed = icmp eq ptr %made, null
  br i1 %failed, label %bad, label %note
note:
  store i64 %size, ptr %made, align 8
  br label %found
found:
  %block = phi ptr [ %kept, %look ], [ %made, %note ]
  %start = getelementptr i8, ptr %block, i64 {BLOCK_HEADER}
  store ptr %start, ptr %to, align 8
  ret i32 0
bad:
  ret i32 1
}}
define i64 @ferrite_give(ptr %start) {{
  %nothing = icmp eq ptr %start, null
  br i1 %nothing, label %end, label %keep
keep:
  %block = getelementptr i8, ptr %start, i64 -{BLOCK_HEADER}
  %before = atomicrmw xchg ptr @ferrite_kept, ptr %block acq_rel
  call void @free(ptr %before)
  br label %end
end:
  ret i64 0
}}
define i64 @ferrite_drop() {{
  %before = atomicrmw xchg ptr @ferrite_kept, ptr null acq_rel
  call void @free(ptr %before)
  ret i64 0
}}
"""

_PYTHON = """
define i64 @ferrite_resume(ptr %slot) {
  %thread = load ptr, ptr %slot, align 8
  %has_lock = icmp eq ptr %thread, null
  br i1 %has_lock, label %end, label %resume
resume:
  call void @PyEval_RestoreThread(ptr %thread)
  store ptr null, ptr %slot, align 8
  br label %end
end:
  ret i64 0
}
define internal ptr @call_with_frame(ptr %object, ptr %frame) {
  %address = ptrtoint ptr %frame to i64
  %number = call ptr @PyLong_FromLongLong(i64 %address)
  %given = call ptr @PyObject_CallOneArg(ptr %object, ptr %number)
  call void @Py_DecRef(ptr %number)
  ret ptr %given
}
define i32 @ferrite_python(ptr %slot, ptr %object, ptr %frame) {
  %locked = call i64 @ferrite_resume(ptr %slot)
  %given = call ptr @call_with_frame(ptr %object, ptr %frame)
  %raised = icmp eq ptr %given, null
  br i1 %raised, label %bad, label %good
good:
  call void @Py_DecRef(ptr %given)
  %thread = call ptr @PyEval_SaveThread()
  store ptr %thread, ptr %slot, align 8
  ret i32 0
bad:
  ret i32 1
}
define i32 @ferrite_settle(ptr %slot, ptr %object) {
  %released = load ptr, ptr %slot, align 8
  %locked = call i64 @ferrite_resume(ptr %slot)
  %exception = call ptr @PyErr_Occurred()
  %is_settled = icmp eq ptr %exception, null
  br i1 %is_settled, label %good, label %bad
good:
  %had_lock = icmp eq ptr %released, null
  br i1 %had_lock, label %end, label %release
release:
  %thread = call ptr @PyEval_SaveThread()
  store ptr %thread, ptr %slot, align 8
  br label %end
end:
  ret i32 0
bad:
  %type = alloca ptr, align 8
  %error = alloca ptr, align 8
  %trace = alloca ptr, align 8
  call void @PyErr_Fetch(ptr %type, ptr %error, ptr %trace)
  call void @PyErr_NormalizeException(ptr %type, ptr %error, ptr %trace)
  %left = load ptr, ptr %error, align 8
  %given = call ptr @PyObject_CallOneArg(ptr %object, ptr %left)
  %left_type = load ptr, ptr %type, align 8
  %left_trace = load ptr, ptr %trace, align 8
  call void @Py_DecRef(ptr %left_type)
  call void @Py_DecRef(ptr %left)
  call void @Py_DecRef(ptr %left_trace)
  ret i32 1
}
define i64 @ferrite_raise(ptr %object, ptr %frame) {
  %exception = call ptr @PyErr_Occurred()
  %raised = icmp ne ptr %exception, null
  br i1 %raised, label %end, label %find
find:
  %given = call ptr @call_with_frame(ptr %object, ptr %frame)
  br label %end
end:
  ret i64 0
}
"""


def _arguments_text(words: TensorWords) -> str:
    def at(name: str, owner: str, place: int, kind: str = "i64") -> str:
        return (
            f"%{name}_at = getelementptr i64, ptr %{owner}, i64 {place}\n  "
            f"%{name} = load {kind}, ptr %{name}_at, align 8"
        )

    rows = f"""{at("rank", "tensor", words.rank)}
  %near_sizes = getelementptr i64, ptr %tensor, i64 {words.sizes}
  %near_strides = getelementptr i64, ptr %tensor, i64 {words.strides}
  %far_sizes = load ptr, ptr %near_sizes, align 8
  %far_strides = getelementptr i64, ptr %far_sizes, i64 %rank
  %is_near = icmp ule i64 %rank, {words.inline}
  %sizes = select i1 %is_near, ptr %near_sizes, ptr %far_sizes
  %strides = select i1 %is_near, ptr %near_strides, ptr %far_strides"""
    return f"""
@ferrite_types = global [3 x ptr] zeroinitializer, align 8 ; Tensor, Parameter, what all tensors are
@ferrite_keys = global [2 x i64] zeroinitializer, align 8 ; of a plain tensor: those that it has, those that it has not
define internal i1 @is_tensor(ptr %thing) {{
  %nothing = icmp eq ptr %thing, null
  br i1 %nothing, label %no, label %look
look:
  %type_at = getelementptr i8, ptr %thing, i64 8
  %type = load ptr, ptr %type_at, align 8
  %usual = load ptr, ptr @ferrite_types, align 8
  %is_usual = icmp eq ptr %type, %usual
  br i1 %is_usual, label %yes, label %other
other:
  %parameter_at = getelementptr ptr, ptr @ferrite_types, i64 1
  %parameter = load ptr, ptr %parameter_at, align 8
  %is_parameter = icmp eq ptr %type, %parameter
  br i1 %is_parameter, label %yes, label %ask
ask:
  %base_at = getelementptr ptr, ptr @ferrite_types, i64 2
  %base = load ptr, ptr %base_at, align 8
  %answer = call i32 @PyType_IsSubtype(ptr %type, ptr %base)
  %is_some = icmp ne i32 %answer, 0
  ret i1 %is_some
yes:
  ret i1 true
no:
  ret i1 false
}}
define internal i1 @has_memory(ptr %tensor, i64 %bytes) {{
  {at("count", "tensor", words.count)}
  %is_empty = icmp eq i64 %count, 0
  br i1 %is_empty, label %yes, label %look
look:
  {at("storage", "tensor", words.storage, "ptr")}
  %no_storage = icmp eq ptr %storage, null
  br i1 %no_storage, label %no, label %open
open:
  {at("address", "storage", words.address, "ptr")}
  %is_freed = icmp eq ptr %address, null
  br i1 %is_freed, label %no, label %measure
measure:
  {at("length", "storage", words.length)}
  {at("offset", "tensor", words.offset)}
  {rows}
  br label %next
next:
  %n = phi i64 [ 0, %measure ], [ %n_next, %step ]
  %last = phi i64 [ %offset, %measure ], [ %farther, %step ]
  %done = icmp eq i64 %n, %rank
  br i1 %done, label %compare, label %step
step:
  %size_at = getelementptr i64, ptr %sizes, i64 %n
  %size = load i64, ptr %size_at, align 8
  %stride_at = getelementptr i64, ptr %strides, i64 %n
  %stride = load i64, ptr %stride_at, align 8
  %steps = sub i64 %size, 1
  %way = mul i64 %steps, %stride
  %farther = add i64 %last, %way
  %n_next = add i64 %n, 1
  br label %next
compare:
  %elements = add i64 %last, 1
  %needed = mul i64 %elements, %bytes
  %fits = icmp sle i64 %needed, %length
  ret i1 %fits
yes:
  ret i1 true
no:
  ret i1 false
}}
define internal i1 @is_plain(ptr %tensor) {{
  {at("keys", "tensor", words.keys)}
  %wanted = load i64, ptr @ferrite_keys, align 8
  %unwanted_at = getelementptr i64, ptr @ferrite_keys, i64 1
  %unwanted = load i64, ptr %unwanted_at, align 8
  %good = and i64 %keys, %wanted
  %bad = and i64 %keys, %unwanted
  %has_all = icmp eq i64 %good, %wanted
  %has_none = icmp eq i64 %bad, 0
  %is_plain = and i1 %has_all, %has_none
  ret i1 %is_plain
}}
; `kind`: the dtype, and in its upper half the bytes of an element, none if memory need not be there
define internal i1 @is_promised(ptr %tensor, ptr %shape, i64 %promised_rank, i64 %kind) {{
  %is_plain = call i1 @is_plain(ptr %tensor)
  br i1 %is_plain, label %start, label %no
start:
  %has_kind_at = getelementptr i64, ptr %tensor, i64 {words.kind}
  %has_kind = load i16, ptr %has_kind_at, align 8
  %promised_kind = trunc i64 %kind to i16
  %same_kind = icmp eq i16 %has_kind, %promised_kind
  {rows}
  %same_rank = icmp eq i64 %rank, %promised_rank
  %may_fit = and i1 %same_kind, %same_rank
  br i1 %may_fit, label %measure, label %no
measure:
  {at("count", "tensor", words.count)}
  %is_empty = icmp eq i64 %count, 0
  br label %next
next:
  %n = phi i64 [ 0, %measure ], [ %n_next, %fits ]
  %done = icmp eq i64 %n, %rank
  br i1 %done, label %same, label %look
look:
  %size_at = getelementptr i64, ptr %sizes, i64 %n
  %size = load i64, ptr %size_at, align 8
  %promised_size_at = getelementptr i64, ptr %shape, i64 %n
  %promised_size = load i64, ptr %promised_size_at, align 8
  %same_size = icmp eq i64 %size, %promised_size
  %stride_at = getelementptr i64, ptr %strides, i64 %n
  %stride = load i64, ptr %stride_at, align 8
  %behind = add i64 %n, %rank
  %promised_at = getelementptr i64, ptr %shape, i64 %behind
  %promised = load i64, ptr %promised_at, align 8
  %is_kept = icmp eq i64 %stride, %promised
  %is_one = icmp eq i64 %size, 1
  %is_free = or i1 %is_one, %is_empty
  %is_fine = or i1 %is_kept, %is_free
  %both = and i1 %same_size, %is_fine
  br i1 %both, label %fits, label %no
fits:
  %n_next = add i64 %n, 1
  br label %next
same:
  %bytes = lshr i64 %kind, 32
  %may_be_gone = icmp eq i64 %bytes, 0
  br i1 %may_be_gone, label %yes, label %measure_memory
measure_memory:
  %has_memory = call i1 @has_memory(ptr %tensor, i64 %bytes)
  ret i1 %has_memory
yes:
  ret i1 true
no:
  ret i1 false
}}
define i32 @ferrite_count(ptr %list, i64 %count) {{
  %found = call i64 @PyList_Size(ptr %list)
  %differs = icmp ne i64 %found, %count
  %failed = zext i1 %differs to i32
  ret i32 %failed
}}
define i32 @ferrite_number(ptr %list, i64 %index, ptr %to) {{
  %thing = call ptr @PyList_GetItem(ptr %list, i64 %index)
  %number = call i64 @PyLong_AsLongLong(ptr %thing)
  store i64 %number, ptr %to, align 8
  %may_be_wrong = icmp eq i64 %number, -1
  br i1 %may_be_wrong, label %ask, label %good
ask:
  %exception = call ptr @PyErr_Occurred()
  %raised = icmp ne ptr %exception, null
  br i1 %raised, label %bad, label %good
good:
  ret i32 0
bad:
  ret i32 1
}}
define i32 @ferrite_argument(ptr %list, i64 %index, ptr %shape, i64 %rank, i64 %kind, ptr %to, ptr %object,
                             ptr %frame) {{
  %thing = call ptr @PyList_GetItem(ptr %list, i64 %index)
  %is_tensor = call i1 @is_tensor(ptr %thing)
  br i1 %is_tensor, label %look, label %ask
look:
  %is_any = icmp eq i64 %rank, -1
  br i1 %is_any, label %good, label %compare
compare:
  %handle = getelementptr i8, ptr %thing, i64 {object.__basicsize__}
  %tensor = load ptr, ptr %handle, align 8
  %fits = call i1 @is_promised(ptr %tensor, ptr %shape, i64 %rank, i64 %kind)
  br i1 %fits, label %good, label %ask
ask:
  %given = call ptr @call_with_frame(ptr %object, ptr %frame)
  %raised = icmp eq ptr %given, null
  br i1 %raised, label %bad, label %again
again:
  call void @Py_DecRef(ptr %given)
  %other = call ptr @PyList_GetItem(ptr %list, i64 %index)
  br label %good
good:
  %taken = phi ptr [ %thing, %look ], [ %thing, %compare ], [ %other, %again ]
  %place = getelementptr i8, ptr %taken, i64 {object.__basicsize__}
  store ptr %place, ptr %to, align 8
  ret i32 0
bad:
  ret i32 1
}}
define i32 @ferrite_hold(ptr %handle, ptr %to, ptr %shape, i64 %rank, i64 %kind, ptr %slot, ptr %object, ptr %frame) {{
  %left_out = icmp eq ptr %handle, null
  br i1 %left_out, label %other, label %look
look:
  %tensor = load ptr, ptr %handle, align 8
  %fits = call i1 @is_promised(ptr %tensor, ptr %shape, i64 %rank, i64 %kind)
  br i1 %fits, label %same, label %other
same:
  %made = call i32 @aoti_torch_new_tensor_handle(ptr %handle, ptr %to)
  ret i32 %made
other:
  %copied = call i32 @ferrite_python(ptr %slot, ptr %object, ptr %frame)
  ret i32 %copied
}}
define i32 @ferrite_same(ptr %handle, ptr %to) {{
  %left_out = icmp eq ptr %handle, null
  br i1 %left_out, label %none, label %some
none:
  %undefined = call i32 @aoti_torch_new_uninitialized_tensor(ptr %to)
  ret i32 %undefined
some:
  %made = call i32 @aoti_torch_new_tensor_handle(ptr %handle, ptr %to)
  ret i32 %made
}}
define i32 @ferrite_pointer(ptr %handle, i64 %bytes, ptr %to) {{
  %tensor = load ptr, ptr %handle, align 8
  %is_plain = call i1 @is_plain(ptr %tensor)
  br i1 %is_plain, label %look, label %bad
look:
  %has_memory = call i1 @has_memory(ptr %tensor, i64 %bytes)
  br i1 %has_memory, label %good, label %bad
good:
  %status = call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %to)
  ret i32 %status
bad:
  ret i32 1
}}
"""


_DISPATCH = """
define i32 @ferrite_list(i64 %count, ptr %words, ptr %to) {
  %status = call i32 @torch_new_list_reserve_size(i64 %count, ptr %to)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %end, label %start
start:
  %list = load ptr, ptr %to, align 8
  br label %next
next:
  %n = phi i64 [ 0, %start ], [ %n_next, %push ]
  %done = icmp eq i64 %n, %count
  br i1 %done, label %end, label %push
push:
  %word_at = getelementptr i64, ptr %words, i64 %n
  %word = load i64, ptr %word_at, align 8
  %ignored = call i32 @torch_list_push_back(ptr %list, i64 %word)
  %n_next = add i64 %n, 1
  br label %next
end:
  ret i32 %status
}
define i32 @ferrite_some(i64 %word, ptr %to) {
  %status = call i32 @torch_new_stable_ivalue(ptr %to)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %end, label %fill
fill:
  %cell = load ptr, ptr %to, align 8
  store i64 %word, ptr %cell, align 8
  br label %end
end:
  ret i32 %status
}
define i32 @ferrite_given(ptr %handle, ptr %to) {
  %answer = alloca i8, align 1
  store i8 0, ptr %answer, align 1
  %status = call i32 @aoti_torch_is_defined(ptr %handle, ptr %answer)
  %flag = load i8, ptr %answer, align 1
  %defined = icmp ne i8 %flag, 0
  br i1 %defined, label %keep, label %drop
keep:
  store ptr %handle, ptr %to, align 8
  ret i32 %status
drop:
  %ignored = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  store ptr null, ptr %to, align 8
  ret i32 %status
}
"""

# What torch's allocator gives is four words: the address, then in the order of the C++ library what is freed and the
# function that does it, then the device.
_LENDING = """
; what gives memory, what frees it, the allocator, where what is freed and what frees it stand in what is given, device
%allocator = type { ptr, ptr, ptr, i64, i64, i64 }
@ferrite_allocator = global %allocator zeroinitializer, align 8
@ferrite_lender = global i64 0, align 8 ; the thread that lends, or 0
@ferrite_lent = internal global { i64, ptr, i64 } zeroinitializer, align 8 ; bytes, place, how many to pass by
define internal void @ferrite_leave(ptr %place) {
  ret void
}
define void @ferrite_allocate(ptr sret([4 x i64]) %to, ptr %self, i64 %bytes) {
  %lender = load atomic i64, ptr @ferrite_lender monotonic, align 8
  %nobody = icmp eq i64 %lender, 0
  br i1 %nobody, label %plain, label %ask
ask:
  %me = call i64 @pthread_self()
  %is_mine = icmp eq i64 %lender, %me
  %lent = load i64, ptr @ferrite_lent, align 8
  %is_this = icmp eq i64 %lent, %bytes
  %is_wanted = and i1 %is_mine, %is_this
  br i1 %is_wanted, label %count, label %plain
count:
  %left_at = getelementptr { i64, ptr, i64 }, ptr @ferrite_lent, i64 0, i32 2
  %left = load i64, ptr %left_at, align 8
  %is_turn = icmp eq i64 %left, 0
  br i1 %is_turn, label %lend, label %pass
pass:
  %less = sub i64 %left, 1
  store i64 %less, ptr %left_at, align 8
  br label %plain
lend:
  store i64 -1, ptr @ferrite_lent, align 8
  %place_at = getelementptr { i64, ptr, i64 }, ptr @ferrite_lent, i64 0, i32 1
  %place = load ptr, ptr %place_at, align 8
  store ptr %place, ptr %to, align 8
  %freed_at = getelementptr %allocator, ptr @ferrite_allocator, i64 0, i32 3
  %freed = load i64, ptr %freed_at, align 8
  %freed_word = getelementptr i64, ptr %to, i64 %freed
  store ptr %place, ptr %freed_word, align 8
  %frees_at = getelementptr %allocator, ptr @ferrite_allocator, i64 0, i32 4
  %frees = load i64, ptr %frees_at, align 8
  %frees_word = getelementptr i64, ptr %to, i64 %frees
  store ptr @ferrite_leave, ptr %frees_word, align 8
  %device_at = getelementptr %allocator, ptr @ferrite_allocator, i64 0, i32 5
  %device = load i64, ptr %device_at, align 8
  %device_word = getelementptr i64, ptr %to, i64 3
  store i64 %device, ptr %device_word, align 8
  ret void
plain: ; no frame of ours stays, as it may throw
  %function = load ptr, ptr @ferrite_allocator, align 8
  %real_at = getelementptr %allocator, ptr @ferrite_allocator, i64 0, i32 2
  %real = load ptr, ptr %real_at, align 8
  musttail call void %function(ptr sret([4 x i64]) %to, ptr %real, i64 %bytes)
  ret void
}
define void @ferrite_delete(ptr %place) { ; what somebody allocated without a word on how to free it
  %lender = load atomic i64, ptr @ferrite_lender monotonic, align 8
  %nobody = icmp eq i64 %lender, 0
  br i1 %nobody, label %plain, label %ask
ask:
  %me = call i64 @pthread_self()
  %is_mine = icmp eq i64 %lender, %me
  %lent_at = getelementptr { i64, ptr, i64 }, ptr @ferrite_lent, i64 0, i32 1
  %lent = load ptr, ptr %lent_at, align 8
  %is_this = icmp eq ptr %lent, %place
  %is_lent = and i1 %is_mine, %is_this
  br i1 %is_lent, label %leave, label %plain
leave:
  ret void
plain:
  %function_at = getelementptr %allocator, ptr @ferrite_allocator, i64 0, i32 1
  %function = load ptr, ptr %function_at, align 8
  musttail call void %function(ptr %place)
  ret void
}
define ptr @ferrite_deleter(ptr %self) {
  ret ptr @ferrite_delete
}
define i64 @ferrite_ask_allocator(ptr %to, i64 %bytes) {
  %function = load ptr, ptr @ferrite_allocator, align 8
  %real_at = getelementptr %allocator, ptr @ferrite_allocator, i64 0, i32 2
  %real = load ptr, ptr %real_at, align 8
  call void %function(ptr sret([4 x i64]) %to, ptr %real, i64 %bytes)
  ret i64 0
}
define i32 @ferrite_call_into(ptr %name, ptr %overload, ptr %words, ptr %place, i64 %bytes, ptr %passed) {
  %found = alloca ptr, align 8
  %me = call i64 @pthread_self()
  %asked = cmpxchg ptr @ferrite_lender, i64 0, i64 %me acq_rel monotonic
  %may_lend = extractvalue { i64, i1 } %asked, 1
  br i1 %may_lend, label %lend, label %plain
lend:
  %place_at = getelementptr { i64, ptr, i64 }, ptr @ferrite_lent, i64 0, i32 1
  store ptr %place, ptr %place_at, align 8
  %left_at = getelementptr { i64, ptr, i64 }, ptr @ferrite_lent, i64 0, i32 2
  %left = load i64, ptr %passed, align 8
  store i64 %left, ptr %left_at, align 8
  store i64 %bytes, ptr @ferrite_lent, align 8
  %status = call i32 @aoti_torch_call_dispatcher(ptr %name, ptr %overload, ptr %words)
  %rest = load i64, ptr @ferrite_lent, align 8
  %is_taken = icmp eq i64 %rest, -1
  %is_good = icmp eq i32 %status, 0
  %may_look = and i1 %is_taken, %is_good
  br i1 %may_look, label %look, label %end
look:
  %result = load ptr, ptr %words, align 8
  store ptr %place, ptr %found, align 8
  %ignored = call i32 @aoti_torch_get_data_ptr(ptr %result, ptr %found)
  %is_at = load ptr, ptr %found, align 8
  %is_there = icmp eq ptr %is_at, %place
  br i1 %is_there, label %end, label %learn
learn:
  %more = add i64 %left, 1
  store i64 %more, ptr %passed, align 8
  br label %end
end:
  store atomic i64 0, ptr @ferrite_lender release, align 8
  ret i32 %status
plain:
  %other_status = call i32 @aoti_torch_call_dispatcher(ptr %name, ptr %overload, ptr %words)
  ret i32 %other_status
}
"""

_THREADS = f"""
define i64 @ferrite_threads() {{
  %flag = load i32, ptr @ferrite_alone, align 4
  %alone = icmp ne i32 %flag, 0
  br i1 %alone, label %one, label %ask
one:
  ret i64 1
ask:
  %count = call i32 @{GET_THREADS}()
  %wide = sext i32 %count to i64
  ret i64 %wide
}}
"""
