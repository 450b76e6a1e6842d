"""Convolutions write into memory that the plan gives them, and nobody else ever gets it."""

from __future__ import annotations

import ctypes
import threading
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrite
from bench.allocated import peak_of_tensors
from ferrite.artifact.doors import addresses, host_machine
from ferrite.artifact.host_values import LEAST_LENT
from ferrite.artifact.lend import can_lend
from tests.behaviour.child import run_python
from tests.behaviour.compare import STRICT

SIDE, CHANNELS, IMAGES = 32, 32, 2
BYTES = 4 * IMAGES * CHANNELS * SIDE * SIDE  # of each result but the last


def layers() -> nn.Module:
    torch.manual_seed(0)
    one, two, three = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
    return nn.Sequential(one, nn.ReLU(), two, nn.Tanh(), three, nn.GELU(), nn.Conv2d(CHANNELS, 4, 1)).eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(IMAGES, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def compiled_layers(**options: Any) -> tuple[nn.Module, Any]:
    model = layers()
    return model, torch.compile(model, backend="ferrite", options={**STRICT, **options})


def inference_graph() -> Any:
    record = ferrite.last_record()
    assert record is not None
    return next(graph for graph in record.graphs if graph.phase == "inference")


@torch.no_grad()
def test_results_of_convolutions_lie_in_the_block() -> None:
    assert BYTES >= LEAST_LENT
    model, compiled = compiled_layers(layout="on")
    x = images()
    torch.testing.assert_close(compiled(x), model(x))
    assert inference_graph().block_memory >= BYTES
    compiled(x)
    assert peak_of_tensors(lambda: compiled(x)) < BYTES  # nobody asked torch's allocator for that much


@torch.no_grad()
@pytest.mark.parametrize("layout", ["on", "off"])
def test_both_layouts_again_and_again(layout: str) -> None:
    """Images that do not lie channels last are copied by oneDNN, into memory of that size, which it frees itself."""
    model, compiled = compiled_layers(layout=layout)
    for seed in range(4):
        x = images(seed)
        torch.testing.assert_close(compiled(x), model(x))
    copies = 2 * BYTES if layout == "off" else 0  # of the images and of the result, which are oneDNN's own
    assert copies <= peak_of_tensors(lambda: compiled(x)) < copies + BYTES


@torch.no_grad()
def test_what_the_caller_gets_is_its_own() -> None:
    weight = torch.randn(CHANNELS, CHANNELS, 1, 1)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = torch.conv2d(x, weight)
        seen = torch.conv2d(inner.relu(), weight)
        return seen, torch.conv2d(seen.sigmoid(), weight).sum((2, 3)), inner.amax(1)

    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    kept = [(compiled(images(seed)), function(images(seed))) for seed in range(3)]
    ferrite.release_memory()
    fresh = [torch.full((IMAGES, CHANNELS, SIDE, SIDE), 7.0) for _ in range(4)]
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted)
    assert all((tensor == 7).all() for tensor in fresh)


@torch.no_grad()
def test_threads_at_the_same_time() -> None:
    model, compiled = compiled_layers()
    inputs = [images(seed) for seed in range(4)]
    wanted = [model(x) for x in inputs]
    compiled(inputs[0])
    wrong: list[str] = []

    def work(x: Tensor, expected: Tensor) -> None:
        with torch.no_grad():
            for _ in range(20):
                found = compiled(x)
                own = torch.full((IMAGES, CHANNELS, SIDE, SIDE), 3.0)  # as large as what others lend
                if not torch.allclose(found, expected, atol=1e-5) or not (own == 3).all():
                    wrong.append("values of another thread")

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_training_is_as_in_eager() -> None:
    model, compiled = compiled_layers()
    x = images().requires_grad_()
    compiled(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_an_operator_that_fails_lends_no_longer() -> None:
    """What the thread asks for afterwards is memory as ever."""
    assert can_lend()
    into = ctypes.CFUNCTYPE(
        ctypes.c_int32, *[ctypes.c_char_p] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p
    )
    place, words = ctypes.create_string_buffer(LEAST_LENT + 64), (ctypes.c_int64 * 1)()
    passed = ctypes.c_int64(0)
    status = into(addresses()["ferrite_call_into"])(
        b"aten::no_such_operator", b"", words, place, LEAST_LENT, ctypes.addressof(passed)
    )
    assert status != 0
    assert ctypes.c_int64.from_address(host_machine().address("ferrite_lender")).value == 0
    start = ctypes.addressof(place)
    assert not start <= torch.empty(LEAST_LENT // 4).data_ptr() < start + LEAST_LENT


def test_an_allocator_of_somebody_else_stays() -> None:
    run_python(
        dedent("""
        import ctypes, os, torch
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        current = library["_ZN3c1015GetCPUAllocatorEv"]
        current.restype = ctypes.c_int64
        other = ctypes.c_int64.from_buffer_copy(ctypes.string_at(current(), 8))  # it has no members
        set_allocator = library["_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh"]
        set_allocator.argtypes = (ctypes.c_int64, ctypes.c_uint8)
        set_allocator(ctypes.addressof(other), 0)
        from ferrite.artifact.lend import can_lend
        model = torch.nn.Sequential(torch.nn.Conv2d(32, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 4, 3)).eval()
        x = torch.randn(2, 32, 48, 48)
        with torch.no_grad():
            found = torch.compile(model, backend="ferrite")(x)
            torch.testing.assert_close(found, model(x))
        assert not can_lend()
        assert current() == ctypes.addressof(other)
        """)
    )
