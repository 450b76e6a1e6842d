"""Which values may have gaps between their rows, and which gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ferrite.artifact.compiled import CompiledGraph, Facts
from ferrite.artifact.kernels import _lengths_of_locals
from ferrite.graph.query import calls
from ferrite.graph.strides import REALISED
from ferrite.graph.text import parse_graph
from ferrite.host.nodes import ALLOCATE, Call
from ferrite.host.plan import plan_all
from ferrite.loops.dtypes import f32
from ferrite.loops.index import Index, constant, size
from ferrite.loops.nodes import Buffer, Program
from ferrite.lower.graph import Rules, lower
from ferrite.lower.padding import padded_strides, refusals, tears_rows
from ferrite.lower.rows import row_of
from ferrite.lower.sizes import Sizes

aten = torch.ops.aten

RULES = Rules(use_rows=True, padding=True)


def refused(module: GraphModule) -> dict[str, str]:
    """By name, the calls that have to lie as traced, and why."""
    found = refusals(module.graph, lambda op: row_of(op) is not None)
    return {node.name: why for (node, _), why in found.items() if node.op == "call_function"}


def decided(module: GraphModule) -> dict[str, tuple[bool, str]]:
    choices = [choice for choice in lower(module, rules=RULES).decisions if choice.what == "padding"]
    return {choice.subjects[0]: (choice.taken, choice.reason) for choice in choices}


# ---- the walk


def test_what_a_convolution_reads_is_dense_and_so_is_what_leads_there() -> None:
    found = refused(
        parse_graph("""def graph(x: f32[2, 3, 9, 63], w: f32[4, 3, 3, 3]):
    exp = aten.exp.default(x)
    permute = aten.permute.default(exp, [0, 1, 3, 2])
    sin = aten.sin.default(permute)
    convolution = aten.convolution.default(sin, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    neg = aten.neg.default(convolution)
    cos = aten.cos.default(neg)
    return (cos,)
""")
    )
    assert found == {
        "cos": "it is a result of the graph",
        "sin": "convolution reads it: a library kernel: convolution",
        "permute": "it leads to convolution, which reads dense values",
        "exp": "it leads to convolution, which reads dense values",
    }


@pytest.mark.parametrize(
    "reduction",
    ["aten.sum.dim_IntList(exp, [0], True)", "aten.amax.default(exp, [0], True)", "aten.bmm.default(exp, exp)"],
)
def test_the_walk_ends_at_reductions(reduction: str) -> None:
    """But what the convolution itself reads is dense, whatever makes it."""
    text = f"""def graph(x: f32[3, 9, 9], w: f32[4, 9, 3]):
    exp = aten.exp.default(x)
    reduced = {reduction}
    last = BETWEEN
    convolution = aten.convolution.default(last, w, None, [1], [0], [1], False, [0], 1)
    return (convolution,)
"""
    apart = refused(parse_graph(text.replace("BETWEEN", "aten.sin.default(reduced)")))
    assert apart.keys() == {"last", "convolution"}
    at_once = refused(parse_graph(text.replace("BETWEEN", "aten.alias.default(reduced)")))
    assert at_once.keys() == {"last", "reduced", "convolution"}


def test_results_and_what_they_are_views_of_are_dense_but_not_what_they_are_made_of() -> None:
    found = refused(
        parse_graph("""def graph(x: f32[4, 63]):
    exp = aten.exp.default(x)
    sin = aten.sin.default(exp)
    t = aten.t.default(sin)
    parts = aten.split.Tensor(exp, 2)
    first = operator.getitem(parts, 0)
    cos = aten.cos.default(exp)
    return (t, cos)
""")
    )
    assert found.keys() == {"t", "sin", "cos"}


def test_one_of_several_results() -> None:
    module = parse_graph("""def graph(x: f32[4, 63]):
    norm = aten.native_layer_norm.default(x, [63], None, None, 1e-05)
    first = operator.getitem(norm, 0)
    rstd = operator.getitem(norm, 2)
    neg = aten.neg.default(first)
    return (rstd,)
""")
    found = refusals(module.graph, lambda op: row_of(op) is not None)
    assert [(node.name, part) for node, part in found] == [("norm", 2)]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("aten.sort.default(sin)", "reads it: a library kernel: sorting and selection"),
        ("aten.as_strided.default(sin, [2, 2], [3, 1])", "reads it: it may look at strides"),
        ("aten.sym_stride.int(sin, 0)", "reads it: it may look at strides"),
        ("aten._local_scalar_dense.default(sin)", "reads it: it may look at strides"),
        ("aten.add_.Tensor(sin, 1)", "writes to it"),
        ("aten._cdist_forward.default(sin, sin, 1.0, None)", "reads it: a library kernel: linear algebra"),
    ],
)
def test_who_reads_dense_values(call: str, why: str) -> None:
    module = parse_graph(f"""def graph(x: f32[4, 63]):
    sin = aten.sin.default(x)
    made = {call}
    return (x,)
""")
    assert refused(module)["sin"] == f"made {why}"


@pytest.mark.parametrize("call", ["aten.mm.default(sin, w)", "aten.sum.default(sin)", "aten.sym_size.int(sin, 0)"])
def test_who_does_not_mind(call: str) -> None:
    module = parse_graph(f"""def graph(x: f32[4, 63], w: f32[63, 2]):
    sin = aten.sin.default(x)
    made = {call}
    return (x,)
""")
    assert refused(module) == {}


def test_products_of_halves_are_dense() -> None:
    module = parse_graph("""def graph(x: bf16[4, 63], w: bf16[63, 2]):
    sin = aten.sin.default(x)
    mm = aten.mm.default(sin, w)
    return (mm,)
""")
    assert refused(module)["sin"] == "mm reads it: a product of halves"


def test_what_a_pass_marks_lies_as_its_fake_value() -> None:
    module = parse_graph("""def graph(x: f32[4, 63], w: f32[63, 2]):
    sin = aten.sin.default(x)
    mm = aten.mm.default(sin, w)
    return (mm,)
""")
    assert decided(module)["sin"][0]
    calls(module.graph, aten.sin.default)[0].meta[REALISED] = True
    assert decided(module)["sin"] == (False, "a pass asks for its strides")


# ---- the rule


S = size("s0", None)


@pytest.mark.parametrize(
    ("sizes", "bytes", "expected"),
    [
        ((64, 1000), 4, (1008, 1)),
        ((2, 64, 1000), 4, (64 * 1008, 1008, 1)),
        ((64, 1000), 8, (1000, 1)),  # whole lines
        ((64, 1000), 2, (1024, 1)),
        ((64, 1000), 1, (1024, 1)),
        ((64, 100), 4, (100, 1)),  # gaps of 48 bytes after 400
        ((64, 240 - 1), 4, (240, 1)),
        ((64, 4090), 4, (4112, 1)),  # 4096 would be whole pages
        ((64, 1020), 4, (1040, 1)),
        ((64, 255), 4, (256, 1)),
        ((1, 1000), 4, (1000, 1)),
        ((1000,), 4, (1,)),
        ((64, 1000, 1), 4, (1000, 1, 1)),
        ((S, 1000), 4, (1008, 1)),
        ((2, S, 1000), 4, (S * 1008, 1008, 1)),
        ((64, S), 4, (S, 1)),
    ],
)
def test_gaps(sizes: tuple[Any, ...], bytes: int, expected: tuple[Any, ...]) -> None:
    extents = [extent if isinstance(extent, Index) else constant(extent) for extent in sizes]
    dense: list[Index] = [constant(1)]
    for extent in reversed(extents[1:]):
        dense.insert(0, dense[0] * extent)
    found, why = padded_strides(extents, dense, bytes)
    assert [str(stride) for stride in found or dense] == [str(stride) for stride in expected], why


def test_no_gaps_where_rows_do_not_follow_one_another() -> None:
    sizes, strides = (constant(64), constant(1000)), (constant(1), constant(64))
    assert padded_strides(sizes, strides, 4) == (None, "it does not lie row after row")


@pytest.mark.parametrize(
    ("view", "keeps"),
    [
        ("aten.t.default(exp)", True),
        ("aten.permute.default(exp, [1, 0])", True),
        ("aten.unsqueeze.default(exp, 0)", True),
        ("aten.slice.Tensor(exp, 1, 5, 30)", True),
        ("aten.slice.Tensor(exp, 1, 5, 62, 3)", True),
        ("aten.slice.Tensor(exp, 0, 1, 4)", True),
        ("aten.select.int(exp, 1, 7)", True),
        ("aten.reshape.default(exp, [2, 2, 63])", True),
        ("aten.reshape.default(exp, [4, 9, 7])", True),
        ("aten.reshape.default(exp, [2, 2, 7, 9])", True),
        ("aten.split.Tensor(exp, 2)", True),
        ("aten.unfold.default(exp, 1, 5, 2)", True),
        ("aten.reshape.default(exp, [252])", False),
        ("aten.reshape.default(exp, [2, 126])", False),
        ("aten.reshape.default(exp, [28, 9])", False),
        ("aten.diagonal.default(exp)", False),
    ],
)
def test_views_that_keep_rows(view: str, keeps: bool) -> None:
    module = parse_graph(f"""def graph(x: f32[4, 63]):
    exp = aten.exp.default(x)
    seen = {view}
    return (x,)
""")
    (exp,) = calls(module.graph, aten.exp.default)
    found = tears_rows((exp, None), 63, Sizes())
    assert (found is None) is keeps


def test_views_of_views() -> None:
    module = parse_graph("""def graph(x: f32[2, 4, 63]):
    exp = aten.exp.default(x)
    first = aten.select.int(exp, 0, 1)
    flat = aten.reshape.default(first, [252])
    turned = aten.permute.default(exp, [0, 2, 1])
    copy = aten.reshape.default(turned, [504])
    return (x,)
""")
    (exp,) = calls(module.graph, aten.exp.default)
    found = tears_rows((exp, None), 63, Sizes())
    assert found is not None
    assert found.name == "flat"
    (flat,) = (node for node in module.graph.nodes if node.name == "flat")
    module.graph.erase_node(flat)
    assert tears_rows((exp, None), 63, Sizes()) is None  # what is copied anyway may be read from anywhere


# ---- lowering


class Watch(TorchDispatchMode):
    """Notes whether what a convolution is given is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.dense: list[bool] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op is aten.convolution.default:
            self.dense.append(aten.is_non_overlapping_and_dense.default(args[0]))
        return op(*args, **(kwargs or {}))


def test_a_convolution_is_given_dense_images_between_padded_buffers() -> None:
    module = parse_graph("""def graph(x: f32[1, 9, 63], w: f32[9, 9, 1], v: f32[1, 63, 63]):
    exp = aten.exp.default(x)
    bmm = aten.bmm.default(exp, v)
    sigmoid = aten.sigmoid.default(bmm)
    convolution = aten.convolution.default(sigmoid, w, None, [1], [0], [1], False, [0], 1)
    sum_1 = aten.sum.dim_IntList(convolution, [0], True)
    convolution_1 = aten.convolution.default(sum_1, w, None, [1], [0], [1], False, [0], 1)
    sin = aten.sin.default(convolution_1)
    bmm_1 = aten.bmm.default(sin, v)
    return (bmm_1,)
""")
    lowered = lower(module, rules=RULES)
    padded = {choice.subjects[0] for choice in lowered.decisions if choice.what == "padding" and choice.taken}
    assert padded == {"exp", "sin"}
    program = plan_all(lowered, "program", ())
    facts = Facts(0, "inference", (), (), ("cpu",), {}, 0.0, "native", "python")
    x, w, v = torch.randn(1, 9, 63), torch.randn(9, 9, 1) / 9, torch.randn(1, 63, 63) / 8
    with Watch() as watch:
        (found,) = CompiledGraph(program, {}, facts)([x, w, v])
    assert watch.dense == [True, True]
    image = functional.conv1d((x.exp() @ v).sigmoid(), w)
    torch.testing.assert_close(found, functional.conv1d(image, w).sin() @ v, check_stride=True)


def test_only_with_the_option() -> None:
    text = """def graph(x: f32[4, 63], w: f32[63, 2]):
    sin = aten.sin.default(x)
    mm = aten.mm.default(sin, w)
    return (mm,)
"""
    made = {}
    for padding in (False, True):
        lowered = lower(parse_graph(text), rules=Rules(use_rows=True, padding=padding))
        (made[padding],) = (s.args for s in lowered.main.steps if isinstance(s, Call) and s.target == ALLOCATE)
        assert any(choice.what == "padding" for choice in lowered.decisions) is padding
        assert lowered.main.bytes["sin"] == 4 * (64 if padding else 63) * 4
    assert made == {False: ([4, 63], [63, 1]), True: ([4, 63], [64, 1])}


def test_every_buffer_is_a_decision() -> None:
    module = parse_graph("""def graph(x: f32[4, 63], w: f32[63, 63]):
    exp = aten.exp.default(x)
    mm = aten.mm.default(exp, w)
    sigmoid = aten.sigmoid.default(mm)
    reshape = aten.reshape.default(sigmoid, [252])
    total = aten.sum.default(reshape)
    mm_1 = aten.mm.default(sigmoid, w)
    amax = aten.amax.default(mm_1, [1])
    neg = aten.neg.default(mm_1)
    return (total, neg, amax)
""")
    assert decided(module) == {
        "exp": (True, "gaps of 4 bytes after rows of 252"),
        "sigmoid": (False, "reshape reads it across the ends of rows"),
        "total": (False, "it is one row"),
        "amax": (False, "it is one row"),
        "neg": (False, "it is a result of the graph"),
    }


def test_memory_for_a_local_with_gaps_reaches_its_last_element() -> None:
    rows = constant(31), constant(3)
    dense, padded = (Buffer(f"t{step}", f32, rows, (constant(step), constant(1))) for step in (3, 16))
    program = Program("kernel", (), (), (dense, padded), ())
    assert [length.constant for length in _lengths_of_locals(program, ())] == [4 * 93, 4 * (30 * 16 + 3)]
