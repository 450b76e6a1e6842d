"""Doors out of a host program: functions of libtorch, of Python and of the machine, by address, and the memory that the
machine keeps between calls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ferrite.artifact.kernels import is_forked
from ferrite.artifact.tensor_words import WORDS, check_words
from ferrite.graph import plain
from ferrite.native import machine


@cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    return tuple(ctypes.CDLL(os.path.join(folder, name)) for name in ("libtorch_cpu.so", "libtorch_python.so"))  # type: ignore[return-value]


@cache
def host_machine() -> Any:
    torch_library, _ = libraries()
    of_python = ("PyEval_RestoreThread", "PyEval_SaveThread", "PyLong_FromLongLong", "PyObject_CallOneArg",
                 "PyErr_Occurred", "PyErr_NoMemory", "Py_DecRef", "PyList_GetItem", "PyList_Size",
                 "PyErr_Fetch", "PyErr_NormalizeException", "PyLong_AsLongLong", "PyType_IsSubtype")  # fmt: skip
    of_torch = (machine.GET_THREADS, "aoti_torch_new_tensor_handle", "aoti_torch_new_uninitialized_tensor",
                "aoti_torch_is_defined", "aoti_torch_delete_tensor_object", "torch_new_stable_ivalue",
                "torch_new_list_reserve_size", "torch_list_push_back", "aoti_torch_call_dispatcher",
                "aoti_torch_get_data_ptr")  # fmt: skip
    imports = machine.outside(dict.fromkeys(of_python, ctypes.pythonapi) | dict.fromkeys(of_torch, torch_library))
    check_words()
    made = machine.machine(imports, WORDS)
    kinds = (torch.Tensor, torch.nn.Parameter, torch._C.TensorBase)
    (ctypes.c_int64 * 3).from_address(made.address("ferrite_types"))[:] = [id(kind) for kind in kinds]
    (ctypes.c_uint64 * 2).from_address(made.address("ferrite_keys"))[:] = [plain.REQUIRED, plain.FORBIDDEN]
    alone = ctypes.c_int32.from_address(made.address("ferrite_alone"))
    lender = ctypes.c_int64.from_address(made.address("ferrite_lender"))
    alone.value = is_forked()

    def start_child() -> None:
        alone.value = 1
        lender.value = 0  # another thread, which the child has not

    os.register_at_fork(after_in_child=start_child)
    return made


@cache
def addresses() -> Mapping[str, int]:
    return _Addresses()


class _Addresses(dict[str, int]):
    """The address of a function by name, of the machine, of Python or of torch; found when it is asked for."""

    def __missing__(self, name: str) -> int:
        if name.startswith("ferrite_"):
            found = host_machine().address(name)
        else:
            torch_library, python_library = libraries()
            by_name = {"Py": ctypes.pythonapi, "_Z": python_library}
            found = machine.address_of(by_name.get(name[:2], torch_library), name)
        self[name] = found
        return found


def kept_memory() -> int:
    """The bytes of memory that are kept for the next call."""
    block = ctypes.c_void_p.from_address(host_machine().address("ferrite_kept")).value
    return 0 if block is None else ctypes.c_int64.from_address(block).value


def release_memory() -> None:
    """Give back the memory that is kept between calls."""
    drop = ctypes.CFUNCTYPE(ctypes.c_int64)(host_machine().address("ferrite_drop"))
    drop()


def last_error() -> str:
    torch_library, _ = libraries()
    what = torch_library.torch_exception_get_what_without_backtrace
    what.restype = ctypes.c_char_p
    return (what() or b"").decode(errors="replace")
