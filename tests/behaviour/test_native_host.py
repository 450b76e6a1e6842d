"""What runs between kernels, without Python: the same bits, strides, sharing and errors as when Python does it."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import ferrite
from ferrite.artifact import doors, kernels, native_host
from ferrite.artifact.dispatch import DTYPES
from ferrite.artifact.doors import kept_memory
from ferrite.artifact.kernels import Kernels
from ferrite.host.nodes import Call, HostProgram, Input, Return
from ferrite.native import machine
from ferrite.syntax import Ref
from tests.behaviour.compare import STRICT, sharing
from tests.behaviour.compare import compare as compare_with
from tests.behaviour.test_direct_calls import compiled_graphs
from tests.both_hosts import both_hosts

X, W, IDS = torch.randn(6, 8), torch.randn(8, 8), torch.tensor([3, 1, 5])
LIBRARY = {**STRICT, "products": "library"}  # products so small would be loops


def compare(function: Callable[..., Any], *inputs: Any, **how: Any) -> None:
    compare_with(function, *inputs, options=LIBRARY, **how)


class Kept:
    """What a custom op was given."""

    tensors: list[Tensor] = []  # noqa: RUF012


@torch.library.custom_op("behaviour_native_host::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    Kept.tensors.append(x)
    return x.clone()


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Watched:
    """What a custom op looks at, and whether it was alive."""

    references: list[Any] = []  # noqa: RUF012
    alive: list[bool] = []  # noqa: RUF012


@torch.library.custom_op("behaviour_native_host::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    Watched.alive += [reference() is not None for reference in Watched.references]
    return x.clone()


@look.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("behaviour_native_host::halve", mutates_args=())
def halve(x: Tensor, dims: int) -> Tensor:
    return x.half() if dims == 2 else x[None].clone()


@halve.register_fake
def _(x: Tensor, dims: int) -> Tensor:
    return torch.empty_like(x)


def kernels_only(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = x.softmax(-1).t().contiguous()
    return x


def products(x: Tensor, w: Tensor) -> Tensor:
    y = torch.addmm(x[0], x @ w, w, beta=0.5, alpha=2.0).relu()
    batch = torch.bmm(y.view(2, 3, 8), w.expand(2, 8, 8)).tanh()
    return torch.baddbmm(batch, batch, w.expand(2, 8, 8)).sum(-1)


def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = (x @ w).relu()
    return y, y.t()[:2], y.view(-1)[3:], x[1:], w.t()


def the_same_again(x: Tensor, w: Tensor) -> tuple[Any, ...]:
    y = x.sin() * 2
    return y, x, y, None, w, 7


def several_parts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    values, order = (x @ w).sort(dim=1)
    first, second = (values * 2).split([3, 5], dim=1)
    left, _, right = torch.linalg.svd(x @ w).S.split(2)[:3]
    return first.exp() + 1, second.sum(), order * 2, left @ right


def fourier(x: Tensor, w: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x.sin()).abs() + 0j).cos()


def kept_by_somebody(x: Tensor, w: Tensor) -> Tensor:
    y = keep(x.sin() + 1)
    for _ in range(3):
        y = y.softmax(-1).t().contiguous()
    return y


def in_place(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    w[1:3] = x[:2].cos()
    return (x @ w).sigmoid()


def pictures(x: Tensor, w: Tensor) -> Tensor:
    image = (x.view(1, 2, 4, 6) + 1).relu()
    return F.conv2d(image, w.view(2, 2, 4, 4)[:, :, :3, :3].contiguous(), padding=1).sigmoid() * 2


def heads(x: Tensor, w: Tensor) -> Tensor:
    parts = (x @ w).view(1, 2, 6, 4)
    return F.scaled_dot_product_attention(parts, parts.cos(), parts + 1).exp()


def bags(x: Tensor, w: Tensor) -> Tensor:
    return F.embedding_bag(IDS, x.sin(), torch.tensor([0, 2]), mode="mean", per_sample_weights=None) * 2


def strings_and_lists(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    solution = torch.linalg.solve_triangular(w.triu() + 9 * torch.eye(8), x.t(), upper=True)
    return torch.linalg.qr(x.t(), mode="complete").R + 1, solution, torch.bucketize(x, w[0].sort().values)


DOORS = (several_parts, pictures, heads, bags, strings_and_lists)
FUNCTIONS = (kernels_only, products, views, the_same_again, fourier, kept_by_somebody, in_place, *DOORS)


def refusals() -> list[str]:
    record = ferrite.last_record()
    assert record is not None
    return [choice.reason for graph in record.graphs for choice in graph.decisions if choice.what == "native host"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_as_eager_and_bit_for_bit_as_python(function: Callable[..., Any]) -> None:
    outcomes = []
    for host in ("python", "native"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="ferrite", options={**LIBRARY, "host": host})
        with torch.no_grad():
            for _ in range(3):
                inputs = [X.clone(), W.clone()]
                result = compiled(*inputs)
        outcomes.append((result, inputs))
        assert refusals() == []
    python, native = (pytree.tree_leaves(outcome) for outcome in outcomes)
    for one, other in zip(python, native, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
            assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
    compare(function, X, W)


WIDE = torch.randn(256, 256)


@pytest.mark.parametrize(
    ("function", "peak"),
    [
        (lambda x: torch.mm(x, x), 4 * 256 * 256),
        (lambda x: F.conv2d(x.view(1, 4, 128, 128), x.view(-1)[:144].view(4, 4, 3, 3)), 4 * 4 * 126 * 126),
        (lambda x: F.scaled_dot_product_attention(*(x.view(1, 8, 128, 64),) * 3), None),
    ],
    ids=["product", "convolution", "attention"],
)
def test_graphs_without_kernels(
    function: Callable[[Tensor], Tensor], peak: int | None, called_in_python: list[str]
) -> None:
    compiled = torch.compile(function, backend="ferrite", options=STRICT)
    with torch.no_grad():
        torch.testing.assert_close(compiled(WIDE), function(WIDE), rtol=1e-4, atol=1e-4)
    record = ferrite.last_record()
    assert record is not None
    assert refusals() == []
    assert called_in_python == []
    found = record.graphs[-1].peak_memory
    assert found is not None
    assert peak is None or found == peak


def test_why_python_runs_between_kernels_is_always_said() -> None:
    torch.compile(lambda x: x.sin(), backend="ferrite", options={**STRICT, "executor": "oracle"})(X)
    assert refusals() == ["the executor is oracle"]
    torch.compile(lambda x: x.sin() + 1, backend="ferrite", options=STRICT)(X.to("meta"))
    assert refusals() == ["tensors that are not on the CPU"]


@pytest.fixture
def called_in_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that programs call in Python."""
    calls: list[str] = []

    class Seen(native_host.PythonCall):
        def __call__(self, frame: int) -> None:
            calls.append(self.step.target if isinstance(self.step, Call) else self.step.kernel)
            super().__call__(frame)

    monkeypatch.setattr(native_host, "PythonCall", Seen)
    return calls


@pytest.mark.parametrize("function", DOORS, ids=lambda function: function.__name__)
def test_library_ops_run_without_python(function: Callable[..., Any], called_in_python: list[str]) -> None:
    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
    with torch.no_grad():
        compiled(X, W)
    assert [op for op in called_in_python if op != "ferrite.artifact.host_calls.as_promised"] == []


def copied_into(cache: Tensor, at: Tensor, new: Tensor, query: Tensor) -> Tensor:
    cache.index_copy_(1, at, new.tanh() @ W)
    return (query @ cache.transpose(1, 2)).softmax(-1) @ cache


def put_into(cache: Tensor, at: Tensor, new: Tensor, query: Tensor) -> Tensor:
    cache[:, at] = new.tanh() @ W
    return (query @ cache.transpose(1, 2)).softmax(-1) @ cache


def scattered_into(cache: Tensor, at: Tensor, new: Tensor, query: Tensor) -> Tensor:
    cache.scatter_(1, at[None, :, None].expand(2, 1, 8), new.tanh() @ W)
    return (query @ cache.transpose(1, 2)).softmax(-1) @ cache


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [copied_into, put_into, scattered_into], ids=lambda function: function.__name__)
def test_caches_are_written_without_python(
    function: Callable[..., Tensor], dynamic: bool, called_in_python: list[str]
) -> None:
    """What a step of decoding does; a place that is not there is eager's error."""
    compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options=LIBRARY)
    ours, theirs = torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)
    with torch.no_grad():
        for step in range(4):
            new, query = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
            found = compiled(ours, torch.tensor([step]), new, query)
            torch.testing.assert_close(found, function(theirs, torch.tensor([step]), new, query))
            torch.testing.assert_close(ours, theirs)
        assert refusals() == []
        assert [op for op in called_in_python if op.endswith("_.default") or "scatter" in op] == []
        with pytest.raises(Exception) as expected:  # noqa: PT011
            function(theirs, torch.tensor([9]), new, query)
        with pytest.raises(type(expected.value)) as error:
            compiled(ours, torch.tensor([9]), new, query)
    assert str(error.value) == str(expected.value)
    torch.testing.assert_close(ours, theirs)


def test_an_op_that_failed_in_the_middle_of_a_write_is_not_run_on_it_again() -> None:
    """Eager has added the first number when it finds that there is no place for the second."""
    write = Call("y", "aten.index_put_.default", (Ref("x"), [Ref("n")], Ref("v"), True), {})
    inputs = (Input("x", "f32[4]"), Input("n", "i64[2]"), Input("v", "f32[2]"))
    program = HostProgram("writes", inputs, (write, Return((Ref("y"),))))
    made = native_host.assemble(program, {}, Kernels({}))  # what its words point to lives as long as it does
    ours, theirs, places, values = torch.zeros(4), torch.zeros(4), torch.tensor([1, 9]), torch.ones(2)
    with pytest.raises(IndexError) as expected:
        theirs.index_put_((places,), values, accumulate=True)
    with pytest.raises(IndexError) as found:
        made.function([ours, places, values])
    assert str(found.value) == str(expected.value)
    assert theirs.tolist() == [0, 1, 0, 0]
    assert torch.equal(ours, theirs)
    (result,) = made.function([ours, torch.tensor([0, 1]), values])
    assert result is ours
    assert ours.tolist() == [1, 2, 0, 0]


def test_gradients_of_library_ops_run_without_python(called_in_python: list[str]) -> None:
    """Attention wants other strides than convolutions like. Nobody wants the gradient of the first convolution's input:
    the op gives no tensor in its place."""
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, groups=2))

    def function(x: Tensor) -> Tensor:
        made = module(x).flatten(2).unsqueeze(1)
        return F.scaled_dot_product_attention(made, made * 2, made).sum()

    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
    gradients = []
    for called in (function, compiled):
        module.zero_grad()
        called(torch.arange(800.0).remainder(7).view(8, 1, 10, 10) / 7).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert refusals() == []
    assert [op for op in called_in_python if op != "ferrite.artifact.host_calls.as_promised"] == []
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize(("dims", "found"), [(2, r"float16\[6, 8\]"), (3, r"float32\[1, 6, 8\]")])
def test_an_op_that_breaks_its_promise_is_refused_before_a_kernel_reads(host: str, dims: int, found: str) -> None:
    compiled = torch.compile(lambda x: halve(x, dims).exp(), backend="ferrite", options={**LIBRARY, "host": host})
    with pytest.raises(RuntimeError, match=rf"halve.default gave {found} where tracing promised float32\[6, 8\]"):
        compiled(X)


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_arguments_die_where_they_are_read_for_the_last_time(host: str, dynamic: bool) -> None:
    """The list owns its tensors alone: the op in the middle finds the first one gone, and the second one alive."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return look((x @ w).sin()) @ w + 1

    graphs = compiled_graphs(function, X, W, host=host, dynamic=dynamic, products="library")
    assert refusals() == []
    (graph,) = graphs
    sizes, tensors = iter((6, 8)), iter((X.clone(), W.clone()))
    args = [next(sizes if entry.type.startswith("Sym(") else tensors) for entry in graph.program.inputs]
    first, second = (arg for arg in args if isinstance(arg, Tensor))
    seen = (first, first.untyped_storage(), second, second.untyped_storage())
    Watched.references, Watched.alive = [*map(weakref.ref, seen)], []
    del tensors, seen, first, second
    (result,) = graph.load()(args)
    assert Watched.alive == [False, False, True, True]
    assert args == []
    assert [reference() for reference in Watched.references] == [None] * 4
    torch.testing.assert_close(result, (X @ W).sin() @ W + 1)


def test_what_a_custom_op_keeps_is_not_written_again() -> None:
    Kept.tensors.clear()
    compiled = torch.compile(kept_by_somebody, backend="ferrite", options=LIBRARY)
    for _ in range(2):
        compiled(X, W)
    assert len(Kept.tensors) == 2
    assert all(torch.allclose(kept, X.sin() + 1, atol=1e-6) for kept in Kept.tensors)  # near -1 the sum is rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_products_of_other_types(dtype: torch.dtype) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w + 1) @ w

    compare(function, (X * 3).to(dtype), (W * 3).to(dtype), exact=dtype != torch.bfloat16)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one(rows: int) -> None:
    compare(products if rows == 6 else lambda x, w: (x @ w).relu() @ w + 1, X[:rows], W)


def test_training_runs_so_too() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2)
    )
    compare(module, X, training=True)
    assert refusals() == []


def test_an_error_in_eager_is_eagers() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.linalg.cholesky((x @ x.t()).neg() - 1).sin() + 1

    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
    for _ in range(3):
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite") as expected:
            function(X)
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite") as found:
            compiled(X)
        assert str(found.value) == str(expected.value)
    assert refusals() == []


def test_views_of_what_eager_made_lie_as_it_does() -> None:
    """The op gives other strides than its trace says; a view of its result goes by what is there."""

    def function(x: Tensor) -> Tensor:
        made = torch.fft.fft2(x.to(torch.complex64)).real
        return (made.t() @ made + 1) @ x.t()

    compare(function, X, exact=False)


def test_a_bad_index_is_an_error_and_the_next_call_works() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return (x[n] * 2).softmax(-1) @ x.t()

    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
    torch.testing.assert_close(compiled(X, IDS), function(X, IDS))
    with pytest.raises(IndexError) as expected:
        function(X, IDS + 3)
    with pytest.raises(IndexError) as found:
        compiled(X, IDS + 3)
    assert str(found.value) == str(expected.value)
    torch.testing.assert_close(compiled(X, IDS), function(X, IDS))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("why", ["no machine code", "may have to put back what it wrote"])
def test_kernels_that_are_called_in_python(
    why: str, dynamic: bool, called_in_python: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program around them stays native, and their errors are eager's."""

    def function(x: Tensor, n: Tensor) -> Tensor:
        return (x.sin()[n] * 2).softmax(-1) @ x.t()

    if why == "no machine code":
        monkeypatch.setattr(
            kernels, "link", lambda sources, code: Kernels({each.name: kernels.oracle_kernel(each) for each in sources})
        )
    else:
        monkeypatch.setattr(kernels, "_to_put_back", lambda program: (0,))
    compiled = torch.compile(function, backend="ferrite", dynamic=dynamic, options=LIBRARY)
    torch.testing.assert_close(compiled(X, IDS), function(X, IDS))
    assert refusals() == []
    assert any(step.startswith("kernel_") for step in called_in_python)
    with pytest.raises(IndexError) as expected:
        function(X, IDS + 3)
    with pytest.raises(IndexError) as found:
        compiled(X, IDS + 3)
    assert str(found.value) == str(expected.value)
    if sys.version_info >= (3, 11):
        assert "aten.index.Tensor" in found.value.__notes__[0]
    torch.testing.assert_close(compiled(X, IDS), function(X, IDS))


def attention(x: Tensor, w: Tensor) -> Any:
    """Without weights asked for, the operator gives nothing in their place, and tracing a tensor without elements."""
    weights, bias = w.expand(3, 8, 8).reshape(24, 8), w.flatten()[:24]
    return torch._native_multi_head_attention(x[None], x[None], x[None], 8, 2, weights, bias, w, w[0], None, False)


def attention_in_order(x: Tensor, w: Tensor) -> Any:
    return torch.sort(attention(x, w)[1])


@pytest.mark.parametrize("host", ["native", "python"])
def test_a_result_that_an_operator_leaves_out(host: str) -> None:
    """The caller is given None. An operator that is given it says so."""
    options = {**LIBRARY, "host": host}
    compiled = torch.compile(attention, backend="ferrite", options=options)
    ordered = torch.compile(attention_in_order, backend="ferrite", options=options)
    with torch.no_grad():
        (expected, left_out), error = attention(X, W), "Expected a proper Tensor but got None"
        assert left_out is None
        for _ in range(2):
            found, left_out = compiled(X, W)
            torch.testing.assert_close(found, expected)
            assert left_out is None
            with pytest.raises(RuntimeError, match=error):
                ordered(X, W)
    assert host == "python" or refusals() == []


def complex_numbers(x: Tensor) -> tuple[Tensor, ...]:
    y = x.to(torch.complex64)
    return (y * 2 + 1j).conj() @ y.t(), torch.view_as_real(y).sum(), torch.fft.fft(x).t(), y.conj()[1:]


def complex_numbers_of_64_bits(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.complex(x.double(), x.double().exp())
    return (
        (y @ y.t() + 1j).abs() * 2,
        (y.conj() @ y.t()).angle().sin(),
        torch.view_as_complex(torch.view_as_real(y) * 2),
    )


def wide_integers(x: Tensor) -> tuple[Tensor, ...]:
    y = x.abs().mul(9).to(torch.uint16)
    return y.t(), y.to(torch.uint32), y.to(torch.uint64), y.float() + 1


def narrow_floats(x: Tensor) -> tuple[Tensor, ...]:
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    return tuple(x.sin().to(kind).float() * 2 for kind in kinds) + tuple(x.to(kind) for kind in kinds)


RARE = (complex_numbers, complex_numbers_of_64_bits, wide_integers, narrow_floats)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", RARE, ids=lambda function: function.__name__)
def test_rare_types(function: Callable[..., Any], dynamic: bool) -> None:
    with both_hosts() as compared:
        torch.compile(function, backend="ferrite", dynamic=dynamic, options=LIBRARY)(X)
    assert refusals() == []
    assert len(compared) == 1


def test_numbers_of_types_are_those_of_the_library() -> None:
    library, _ = doors.libraries()
    for dtype, number in DTYPES.items():
        name = str(dtype).removeprefix("torch.")
        assert getattr(library, f"aoti_torch_dtype_{name}")() == number


def test_many_threads_each_with_memory_of_its_own() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.softmax(-1).t().contiguous()
        return x

    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
    inputs = [torch.randn(40, 60) for _ in range(4)]
    answers = [compiled(each).clone() for each in inputs]
    wrong = []

    def work(n: int) -> None:
        wrong.extend(n for _ in range(200) if not torch.equal(compiled(inputs[n]), answers[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_program_in_a_thread_with_a_small_stack() -> None:
    """10 000 views and an op that takes all of them: more slots than the stack holds."""
    count = 10_000
    views = [Call(f"v{n}", "aten.slice.Tensor", (Ref("x"), 0, n, n + 1), {}) for n in reversed(range(count))]
    joined = Call("joined", "aten.cat.default", ([Ref(view.result) for view in views],), {})
    program = HostProgram("long", (Input("x", f"f32[{count}]"),), (*views, joined, Return((Ref("joined"),))))
    made = native_host.assemble(program, {}, Kernels({}))  # what its words point to lives as long as it does
    x, found = torch.arange(float(count)), []
    before = threading.stack_size(128 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.append(made.function([x])))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert torch.equal(found[0][0], x.flip(0))


def test_memory_is_kept_between_calls_and_given_back() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.softmax(-1).t().contiguous()
        return x.sum()

    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)
    x = torch.randn(1500, 1000)
    expected = compiled(x)
    faults = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert torch.equal(compiled(x), expected)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < 100  # 6 MB are 1500 pages
    assert kept_memory() >= 2 * 6_000_000
    ferrite.release_memory()
    assert kept_memory() == 0
    assert torch.equal(compiled(x), expected)
    ferrite.release_memory()


def test_a_function_owns_its_definition() -> None:
    """Whatever the collector takes first: Python reads the definition of a built-in function until that is gone."""
    names = [f"graph_{number}_forward" for number in range(200)]
    functions = [machine.python_function(name, 0, bytes(8)) for name in names]
    gc.collect()
    noise = [b"#" * size for size in range(16, 400) for _ in range(20)]
    assert [function.__name__ for function in functions] == names
    assert len(noise) == 384 * 20


def test_nothing_grows_with_calls() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values, order = (x @ w).sort(dim=1)
        return values.exp(), order + 1, x[1:], (x @ w).t()

    compiled = torch.compile(function, backend="ferrite", options=LIBRARY)

    def run(times: int) -> int:
        for _ in range(times):
            compiled(X, W)
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1])

    run(500)
    before = run(500)
    assert run(4000) - before < 200  # pages; a leak of one small tensor in a call would be thousands
    assert X.untyped_storage().nbytes() == 6 * 8 * 4
    assert refusals() == []


class Block(torch.nn.Module):
    """A layer of a transformer: products, attention, norms, and views in between."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.second(x))


def sliced(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin() + 1
    return y[1:-1] * 2, y[:, ::2].sum(0), y[-2:].t(), y.narrow(0, 1, 2)


def cut_and_joined(x: Tensor) -> tuple[Tensor, ...]:
    y = (x @ x.t()).relu()
    pairs = torch.cat([y, y + 1]).view(2, x.shape[0], x.shape[0])
    wide = x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, x.shape[1])
    return pairs.transpose(0, 1).reshape(x.shape[0], -1).exp(), wide + 1, pairs.permute(2, 0, 1)[1:]


def sizes_computed(x: Tensor) -> tuple[Any, ...]:
    half, most = x.shape[0] // 2, max(x.shape[0], x.shape[1])
    padded = F.pad(x, (1, half)) * 2
    return padded, torch.ones(most, half) + x.sum(), half, most % 3, x.shape[0] * x.shape[1] - 1


def eager_in_between(x: Tensor) -> tuple[Tensor, ...]:
    values, order = (x * 2).sort(dim=0)
    first, second = (values + 1).split([1, x.shape[0] - 1])
    return torch.cumsum(first.exp() + second, 0) @ x.t(), order + 1, (values @ x.t()).relu()


def written(x: Tensor) -> Tensor:
    x.mul_(2)
    x[1:] += x[:-1].cos()
    return x.softmax(-1) @ x.t()


CHANGING = (sliced, cut_and_joined, sizes_computed, eager_in_between, written)


@pytest.mark.parametrize("function", CHANGING, ids=lambda function: function.__name__)
def test_sizes_that_change_are_bit_for_bit_as_python(function: Callable[..., Any]) -> None:
    outcomes: dict[str, list[Any]] = {}
    for host in ("python", "native"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="ferrite", dynamic=True, options={**LIBRARY, "host": host})
        outcomes[host] = []
        for rows, columns in ((6, 8), (3, 5), (40, 9), (7, 30), (6, 8), (129, 64)):
            x = torch.arange(rows * columns).view(rows, columns).remainder(17) / 4 - 2
            outcomes[host].append((compiled(x), x))
        assert refusals() == []
    python, native = pytree.tree_leaves(outcomes["python"]), pytree.tree_leaves(outcomes["native"])
    for one, other in zip(python, native, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
            assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
        else:
            assert one == other


def test_a_transformer_whose_batch_and_length_change() -> None:
    """Forward and backward, bit for bit as Python does it, in one compile for all sizes."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(Block(), Block())
    outcomes: dict[str, list[Tensor]] = {}
    for host in ("python", "native"):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="ferrite", options={**LIBRARY, "host": host})
        outcomes[host] = []
        for batch, length in ((3, 5), (2, 9), (7, 33), (4, 2)):
            module.zero_grad()
            x = torch.linspace(-2, 2, batch * length * 16).view(batch, length, 16)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            result = compiled(x)
            result.square().mean().backward()
            outcomes[host] += [
                result.detach(),
                *(each.grad.clone() for each in module.parameters() if each.grad is not None),
            ]
            torch.testing.assert_close(result, module(x))
        assert refusals() == []
    for one, other in zip(*outcomes.values(), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_a_bad_index_where_sizes_change() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return (x.sin()[n] * 2).softmax(-1) @ x.t()

    compiled = torch.compile(function, backend="ferrite", dynamic=True, options=LIBRARY)
    for _ in range(2):
        torch.testing.assert_close(compiled(X, IDS), function(X, IDS))
        with pytest.raises(IndexError) as expected:
            function(X, IDS + 3)
        with pytest.raises(IndexError) as found:
            compiled(X, IDS + 3)
        assert str(found.value) == str(expected.value)
    assert refusals() == []


def test_values_that_are_no_sizes_run_in_python_and_the_record_says_so() -> None:
    compare(lambda x: x.softmax(-1) * (x.shape[0] / 3), X, dynamic=True)
    assert refusals()


def test_sharing_is_that_of_python() -> None:
    """Results that are views of one another are so without Python too; `compare` has looked, this names the pairs."""
    from tests.behaviour.compare import Outcome

    compiled = torch.compile(views, backend="ferrite", options=LIBRARY)
    with torch.no_grad():
        outcome = Outcome(compiled(X, W), [X, W], None, torch.get_rng_state(), [])
    assert sharing(outcome)[0] == [0, 1, 2, 2, 2, 0, 1]


# ---- every library op that has a door, forward and backward

CONVOLUTIONS = {
    f"{kind}_convolution_{dims}d": (kind, dims) for kind in ("plain", "grouped", "transposed") for dims in (1, 2, 3)
}


def convolution(kind: str, dims: int) -> torch.nn.Module:
    """Between kernels, so that the program has some."""
    ops: tuple[Any, ...] = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    if kind == "transposed":
        ops = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
    op = ops[dims - 1](4, 4, 3, stride=2, padding=1, groups=2 if kind == "grouped" else 1)
    return torch.nn.Sequential(torch.nn.Tanh(), op, torch.nn.Sigmoid())


@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_all_kinds_run_without_python(name: str, training: bool, called_in_python: list[str]) -> None:
    kind, dims = CONVOLUTIONS[name]
    module, x = convolution(kind, dims), torch.randn(2, 4, *(7, 6, 5)[:dims])
    both_as_eager(module, x, training=training)
    assert [op for op in called_in_python if op != "ferrite.artifact.host_calls.as_promised"] == []


def both_as_eager(function: Callable[..., Any], x: Tensor, *, training: bool) -> None:
    """In both executions, bit for bit; results and gradients of inputs and parameters as in eager."""
    outcomes = []
    with both_hosts() as compared:
        for run in (function, torch.compile(function, backend="ferrite", options=LIBRARY)):
            given = x.clone().requires_grad_(training)
            parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
            with torch.set_grad_enabled(training):
                result = run(given)
            gradients = torch.autograd.grad(result.square().sum(), [given, *parameters]) if training else ()
            outcomes.append([result.detach(), *gradients])
    assert len(compared) == (2 if training else 1)
    assert refusals() == []
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-4, check_stride=True)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_bags_run_without_python(mode: str, called_in_python: list[str]) -> None:
    def function(table: Tensor) -> Tensor:
        return F.embedding_bag(IDS, table.sin(), torch.tensor([0, 2]), mode=mode).exp()

    both_as_eager(function, X, training=True)
    assert called_in_python == []


def eights(x: Tensor) -> Tensor:
    return torch._int_mm((x * 9).to(torch.int8), torch.ones(8, 16, dtype=torch.int8)).float().tanh()


def weights_of_eight_bits(x: Tensor) -> Tensor:
    """In rows of 64: of shorter ones than a vector holds, torch's kernel for AVX-512 reads past the end."""
    weight, scales = torch.arange(1024).to(torch.int8).view(16, 64), torch.ones(16, dtype=torch.bfloat16)
    return torch.ops.aten._weight_int8pack_mm((x.repeat(1, 8) + 1).bfloat16(), weight, scales).float() * 2


PACKED = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.arange(2048).remainder(16).int().view(32, 64), 2)


def weights_of_four_bits(x: Tensor) -> Tensor:
    scales = torch.ones(2, 32, 2, dtype=torch.bfloat16)
    wide = (x.repeat(1, 8) + 1).bfloat16()
    return torch.ops.aten._weight_int4pack_mm_for_cpu(wide, PACKED, 32, scales).float() * 2


@pytest.mark.parametrize(
    "function", [eights, weights_of_eight_bits, weights_of_four_bits], ids=lambda function: function.__name__
)
def test_products_of_packed_weights_run_without_python(
    function: Callable[..., Any], called_in_python: list[str]
) -> None:
    both_as_eager(function, torch.randn(32, 8), training=False)
    assert called_in_python == []
