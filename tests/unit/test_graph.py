"""Graph helpers: names both ways, text both ways, checks, values, strides, decompositions."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from functorch.experimental import control_flow
from torch._higher_order_ops.scan import scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from ferrite.errors import Malformed
from ferrite.graph.check import check_graph
from ferrite.graph.decompose import decomposition_table
from ferrite.graph.describe import device_types, mutated_inputs, output_strides
from ferrite.graph.names import name_of, resolve
from ferrite.graph.order import sort_nodes
from ferrite.graph.query import attribute, family, source_line
from ferrite.graph.snapshot import copy_module, take
from ferrite.graph.strides import note_output_strides, restore_output_strides
from ferrite.graph.text import parse_graph, show_graph, show_type
from ferrite.graph.values import fake_mode_of, refresh

aten = torch.ops.aten


@pytest.mark.parametrize(
    "thing",
    [
        aten.add.Tensor,
        aten.sin.default,
        aten.sym_size.int,
        torch.ops.prims.convert_element_type.default,
        torch.ops.higher_order.cond,
        torch.ops.higher_order.while_loop,
        operator.getitem,
        operator.floordiv,
        torch.sym_max,
        torch.float16,
        torch.strided,
        torch.channels_last,
        torch.device("cpu"),
        torch.device("meta"),
        max,
    ],
    ids=lambda thing: getattr(thing, "__name__", str(thing)),
)
def test_names_resolve_to_the_same_object(thing: object) -> None:
    name = name_of(thing)
    assert name is not None
    assert resolve(name) == thing


def test_objects_without_a_name() -> None:
    assert name_of(lambda x: x) is None
    assert name_of(object()) is None


def test_every_aten_operator_has_a_name() -> None:
    missing = []
    for packet in list(dir(aten)):
        opened = getattr(aten, packet, None)
        if not isinstance(opened, torch._ops.OpOverloadPacket):
            continue
        for overload in opened.overloads():
            op = getattr(opened, overload)
            if resolve(name_of(op) or "") is not op:
                missing.append(op)
    assert missing == []


def test_graph_text_reads_back() -> None:
    text = """def graph(x: f32[8, 4], y: bf16[4, 8].stride(1, 4), n: i64):
    t = aten.t.default(x)
    cast = aten._to_copy.default(t, dtype=torch.bfloat16)
    add = aten.add.Tensor(cast, y, alpha=2)
    return (add, None, n)
"""
    module = parse_graph(text)
    assert show_graph(module.graph) == text
    check_graph(module, "test", after_autograd=True)


def test_graph_text_reads_what_the_module_holds() -> None:
    text = """def graph(x: f32[2, 4]):
    w = self.w
    linear = torch._C._nn.linear(x, w)
    last = self.inner.last(linear)
    return (last,)
"""
    held = torch.nn.Module()
    held.w = torch.nn.Parameter(torch.ones(3, 4))
    held.inner = torch.nn.Module()
    held.inner.last = torch.nn.Linear(3, 5)
    module = parse_graph(text, held=held)
    assert show_graph(module.graph) == text
    assert [show_type(node.meta["val"]) for node in module.graph.nodes if node.op != "output"] == [
        "f32[2, 4]", "f32[3, 4]", "f32[2, 3]", "f32[2, 5]",
    ]  # fmt: skip
    torch.testing.assert_close(module(torch.ones(2, 4)), (held.inner.last(torch.full((2, 3), 4.0)),))


def test_a_copy_has_graphs_of_its_own_and_shares_what_they_hold() -> None:
    text = "def graph(x: f32[4]):\n    w = self.w\n    mul = aten.mul.Tensor(x, w)\n    return (mul,)\n"
    held = torch.nn.Module()
    held.w = torch.nn.Parameter(torch.ones(4))
    module = parse_graph(text, held=held)
    module.child = parse_graph(text, held=held)
    module.graph.get_attr("child")
    made = copy_module(module)
    for one in (made, made.child):
        for node in one.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            node.target = aten.add.Tensor
    assert "mul.Tensor" in show_graph(module.graph)
    assert "mul.Tensor" in show_graph(module.child.graph)
    assert "add.Tensor" in show_graph(made.child.graph)
    assert made.w is module.w is held.w
    values = [{node.name: id(node.meta.get("val")) for node in one.graph.nodes} for one in (module, made)]
    assert values[0] == values[1]


def test_missing_attribute_says_how_far_the_path_goes() -> None:
    module = torch.nn.Module()
    module.inner = torch.nn.Module()
    with pytest.raises(RuntimeError, match=r"nonexistent target inner\.weight: inner has no attribute 'weight'"):
        attribute(module, "inner.weight")


def test_source_line_is_the_last_frame() -> None:
    node = parse_graph("def graph(x: f32[2]):\n    sin = aten.sin.default(x)\n    return (sin,)\n").graph.find_nodes(
        op="placeholder"
    )[0]
    node.meta["stack_trace"] = (
        'File "/a/b.py", line 3, in f\n    return g(x)\n  File "/a/model.py", line 41, in g\n    y = x @ w\n'
    )
    assert source_line(node) == "model.py:41  y = x @ w"


def test_check_refuses_calls_without_value() -> None:
    module = parse_graph("def graph(x: f32[2]):\n    sin = aten.sin.default(x)\n    return (sin,)\n")
    del module.graph.find_nodes(op="call_function", target=aten.sin.default)[0].meta["val"]
    check_graph(module, "between passes", after_autograd=True)
    with pytest.raises(Malformed, match="sin has no fake value"):
        check_graph(module, "before lowering", after_autograd=True, values=True)


def test_refresh_recomputes_what_an_edit_made_stale() -> None:
    module = parse_graph(
        "def graph(x: f32[4, 2]):\n    t = aten.t.default(x)\n    sin = aten.sin.default(t)\n    return (sin,)\n"
    )
    snapshot = take(module.graph)
    t, sin = (node for node in module.graph.nodes if node.op == "call_function")
    t.target = aten.clone.default
    assert refresh(module, snapshot) == 2
    assert sin.meta["val"].shape == (4, 2)
    assert refresh(module, take(module.graph)) == 0


@pytest.mark.parametrize("strides", [(1, 4), (2, 1), (7, 1)])
def test_output_strides_are_put_back(strides: tuple[int, int]) -> None:
    module = parse_graph(
        f"def graph(x: f32[4, 2].stride{strides}):\n    sin = aten.add.Tensor(x, 1)\n    return (sin,)\n"
    )
    note_output_strides(module.graph)
    sin = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    wanted = sin.meta["val"].stride()
    snapshot = take(module.graph)
    with module.graph.inserting_after(sin):
        flipped = module.graph.call_function(aten.permute.default, (sin, [1, 0]))
    with module.graph.inserting_after(flipped):
        dense = module.graph.call_function(aten.clone.default, (flipped,), {"memory_format": torch.contiguous_format})
    with module.graph.inserting_after(dense):
        back = module.graph.call_function(aten.permute.default, (dense, [1, 0]))
    module.graph.output_node().args = ((back,),)
    refresh(module, snapshot)
    changed = back.meta["val"].stride() != wanted
    assert restore_output_strides(module.graph) == int(changed)
    check_graph(module, "test", after_autograd=True)
    module.recompile()
    x = torch.empty_strided((4, 2), strides).normal_()
    (result,) = module(x)
    assert result.stride() == wanted
    assert torch.equal(result, x + 1)


def test_facts_of_a_graph() -> None:
    module = parse_graph(
        "def graph(x: f32[4, 2], y: f32[4, 2]):\n"
        "    t = aten.t.default(x)\n"
        "    copy_ = aten.copy_.default(y, x)\n"
        "    return (t, 3)\n"
    )
    assert mutated_inputs(module.graph) == (1,)
    assert device_types(module.graph) == ("cpu",)
    assert output_strides(module.graph) == (("1", "2"), None)


def test_decompositions_by_name() -> None:
    assert aten.gelu.default in decomposition_table(("aten.gelu.default",))
    with pytest.raises(RuntimeError, match=r"there is no op 'aten\.nothing\.default'"):
        decomposition_table(("aten.nothing.default",))
    with pytest.raises(RuntimeError, match=r"no decomposition of 'aten\.mm\.default'"):
        decomposition_table(("aten.mm.default",))


def assert_as_run_anew(module: GraphModule) -> None:
    """Every value in the graph is what a run of the whole graph on fake tensors gives: kind, place, and who shares
    memory with whom."""
    made: dict[Node, Any] = {}

    class Noted(Interpreter):
        def run_node(self, node: Node) -> Any:
            made[node] = super().run_node(node)
            return made[node]

    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fake_mode_of(module.graph):
        Noted(module).run(*given)
    nodes = [node for node in module.graph.nodes if "val" in node.meta]
    assert nodes
    kept = [value for node in nodes for value in tree_leaves(node.meta["val"])]
    anew = [value for node in nodes for value in tree_leaves(made[node])]
    assert list(map(_facts, kept)) == list(map(_facts, anew))
    assert _shared(kept) == _shared(anew)


def _facts(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device, value.storage_offset()


def _shared(values: list[torch.Tensor]) -> list[int]:
    """For each value the first one in the same memory."""
    memory = [value.untyped_storage()._cdata for value in values]
    return list(map(memory.index, memory))


EDITS: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (aten.sin.default, (), {}),
    (aten.cos.default, (), {}),
    (aten.t.default, (), {}),
    (aten.alias.default, (), {}),
    (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    (aten._to_copy.default, (), {"dtype": torch.float64}),
    (aten._to_copy.default, (), {"dtype": torch.float32}),
    (aten.slice.Tensor, (0, 0, 2), {}),
    (aten.slice.Tensor, (0, 2, 4), {}),
    (aten.slice.Tensor, (1, 1), {}),
    (aten.unsqueeze.default, (0,), {}),
    (aten.select.int, (0, 0), {}),
    (aten.select.int, (0, 1), {}),
)


@pytest.mark.parametrize("seed", range(4))
def test_refresh_after_any_edits_gives_what_a_run_anew_gives(seed: int) -> None:
    """One or two nodes get another op or read another node, many times."""
    draw = random.Random(seed)
    text = "".join(f"    n{i} = aten.sin.default({f'n{i - 1}' if i else 'x'})\n" for i in range(12))
    module = parse_graph(f"def graph(x: f32[4, 4], y: f32[4, 4].stride(1, 4)):\n{text}    return (n11, n5)\n")
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    taken = 0
    for _ in range(60):
        snapshot = take(module.graph)
        for node in draw.sample(calls, draw.randint(1, 2)):
            target, args, kwargs = draw.choice(EDITS)
            before = nodes[: nodes.index(node)]
            source = draw.choice([before[-1], before[-1], draw.choice(before)])
            node.target, node.args, node.kwargs = target, (source, *args), kwargs
        try:
            refresh(module, snapshot)
        except (IndexError, RuntimeError):  # a dimension that is not there, and the like
            for node in calls:
                entry = snapshot[node]
                node.target, node.args, node.kwargs, node.meta = entry.target, entry.args, entry.kwargs, entry.meta
            continue
        assert_as_run_anew(module)
        taken += 1
    assert taken >= 20


def test_refresh_of_one_edit_in_a_long_chain_stops_where_nothing_changes() -> None:
    """One op of a thousand is changed: its value is made again, and nobody else's unless the metadata changed."""
    lines = ["n0 = aten.sin.default(x)", *(f"n{i} = aten.sin.default(n{i - 1})" for i in range(1, 1000))]
    module = parse_graph("def graph(x: f32[4]):\n    " + "\n    ".join([*lines, "return (n999,)"]) + "\n")
    snapshot = take(module.graph)
    nodes = list(module.graph.nodes)
    nodes[500].target = aten.cos.default
    assert refresh(module, snapshot) == 1
    assert_as_run_anew(module)
    snapshot = take(module.graph)
    nodes[990].target, nodes[990].args = aten._to_copy.default, nodes[990].args
    nodes[990].kwargs = {"dtype": torch.float64}
    assert refresh(module, snapshot) == 11  # the edited one and all below it: dtypes are compared
    assert nodes[-2].meta["val"].dtype == torch.float64
    assert_as_run_anew(module)


def test_refresh_of_what_was_changed_back_reaches_its_users() -> None:
    """Each time the values are those of running the whole graph."""
    module = parse_graph(
        "def graph(x: f32[4, 2]):\n    a = aten.t.default(x)\n    b = aten.sin.default(a)\n"
        "    c = aten.sum.dim_IntList(b, [0])\n    return (c,)\n"
    )
    _, a, b, c, _ = module.graph.nodes
    for target, shapes in ((aten.clone.default, ((4, 2), (4, 2), (2,))), (aten.t.default, ((2, 4), (2, 4), (4,)))):
        snapshot = take(module.graph)
        a.target = target
        assert refresh(module, snapshot) == 3
        assert tuple(tuple(node.meta["val"].shape) for node in (a, b, c)) == shapes
        assert_as_run_anew(module)


@pytest.mark.parametrize(("target", "args", "offset"), [(aten.alias.default, (), 0), (aten.slice.Tensor, (0, 4, 8), 8)])
def test_refresh_of_what_stands_elsewhere_reaches_its_views(target: Any, args: tuple[int, ...], offset: int) -> None:
    """A copy becomes a view of the input, or another part of it: of the same sizes and strides, in other memory."""
    rows = 4 if args else 8
    module = parse_graph(
        f"def graph(x: f32[8, 2]):\n    part = aten.slice.Tensor(x, 0, 0, {rows})\n"
        "    copy = aten.clone.default(part)\n    turned = aten.t.default(copy)\n"
        "    row = aten.select.int(turned, 0, 1)\n    sin = aten.sin.default(row)\n    return (sin,)\n"
    )
    x, _, copy, turned, row, *_ = module.graph.nodes
    snapshot = take(module.graph)
    copy.target, copy.args = target, (x, *args)
    assert refresh(module, snapshot) == 3  # the copy and both views; who computes from them sees the same sizes
    memory = {node.meta["val"].untyped_storage()._cdata for node in (x, copy, turned, row)}
    assert len(memory) == 1
    assert [node.meta["val"].storage_offset() for node in (copy, turned, row)] == [offset, offset, offset + 1]
    assert_as_run_anew(module)


def test_refresh_of_new_memory_that_no_view_shows_stops() -> None:
    module = parse_graph(
        "def graph(x: f32[4]):\n    sin = aten.sin.default(x)\n    cos = aten.cos.default(sin)\n    return (cos,)\n"
    )
    snapshot = take(module.graph)
    _, sin, *_ = module.graph.nodes
    sin.target = aten.alias.default
    assert refresh(module, snapshot) == 1
    assert_as_run_anew(module)


def _with_a_branch() -> GraphModule:
    """cond of one graph that runs `t` and `sin` on its input, either way."""
    branch = "def graph(x: f32[4, 2]):\n    t = aten.t.default(x)\n    sin = aten.sin.default(t)\n    return (sin,)\n"
    module = parse_graph(
        "def graph(p: b8, x: f32[4, 2]):\n    cos = aten.cos.default(x)\n    y = aten.sin.default(x)\n    return (y,)\n"
    )
    module.one, module.two = parse_graph(branch), parse_graph(branch)
    flag, _, cos, y, _ = module.graph.nodes
    with module.graph.inserting_before(y):
        graphs = (module.graph.get_attr("one"), module.graph.get_attr("two"))
        cond = module.graph.call_function(torch.ops.higher_order.cond, (flag, *graphs, (cos,)))
        item = module.graph.call_function(operator.getitem, (cond, 0))
    y.args = (item,)
    assert refresh(module, take(module.graph)) == 3
    assert y.meta["val"].shape == (2, 4)
    assert y.meta["val"].stride() == (1, 2)
    return module


def test_refresh_after_an_edit_inside_a_branch_reaches_those_who_read_the_branch() -> None:
    module = _with_a_branch()
    before = {member: take(member.graph) for _, member in family(module)}
    for child in (module.one, module.two):
        _, _, sin, _ = child.graph.nodes
        sin.target, sin.kwargs = aten.clone.default, {"memory_format": torch.contiguous_format}
    assert refresh(module, before[module], before) == 5  # two clones, cond, its item and the reader of it
    y = next(node for node in module.graph.nodes if node.name == "y")
    assert y.meta["val"].stride() == (4, 1)
    assert_as_run_anew(module)
    assert refresh(module, take(module.graph)) == 0


def test_refresh_hands_strides_into_branches() -> None:
    module = _with_a_branch()
    before = {member: take(member.graph) for _, member in family(module)}
    cos = next(node for node in module.graph.nodes if node.name == "cos")
    with module.graph.inserting_before(cos):
        turned = module.graph.call_function(aten.t.default, (cos.args[0],))
        dense = module.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        back = module.graph.call_function(aten.t.default, (dense,))
    cos.args = (back,)
    refresh(module, before[module], before)
    for child in (module.one, module.two):
        assert [node.meta["val"].stride() for node in child.graph.nodes if "val" in node.meta] == [
            (1, 4),
            (4, 1),
            (4, 1),
        ]
    assert next(node for node in module.graph.nodes if node.name == "y").meta["val"].stride() == (4, 1)


def _summed_up(init: torch.Tensor, rows: torch.Tensor) -> Any:
    return scan(lambda total, row: (total + row.t(), total * row.t()), init, rows.cos())


def _each_turned(scale: torch.Tensor, rows: torch.Tensor) -> Any:
    return control_flow.map(lambda row, scale: row.t().clone() * scale, rows.cos(), scale)


@pytest.mark.parametrize("program", [_summed_up, _each_turned])
def test_refresh_hands_the_strides_of_rows_into_what_runs_for_each(program: Any) -> None:
    module = make_fx(program, tracing_mode="fake")(torch.randn(3, 2), torch.randn(5, 2, 3))
    before = {member: take(member.graph) for _, member in family(module)}
    (cos,) = module.graph.find_nodes(op="call_function", target=aten.cos.default)
    with module.graph.inserting_before(cos):
        turned = module.graph.call_function(aten.permute.default, (cos.args[0], [0, 2, 1]))
        dense = module.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        back = module.graph.call_function(aten.permute.default, (dense, [0, 2, 1]))
    cos.args = (back,)
    refresh(module, before[module], before)
    (child,) = (member for name, member in family(module) if name != "main")
    values = [node.meta["val"] for node in child.graph.nodes if "val" in node.meta]
    assert {value.stride() for value in values if value.shape == (2, 3)} == {(1, 2)}
    assert {value.stride() for value in values if value.shape == (3, 2)} == {(2, 1)}
    assert refresh(module, take(module.graph)) == 0


def test_refresh_refuses_other_sizes_for_a_branch() -> None:
    module = _with_a_branch()
    before = take(module.graph)
    cos = next(node for node in module.graph.nodes if node.name == "cos")
    cos.target, cos.args = aten.slice.Tensor, (cos.args[0], 0, 0, 3)
    with pytest.raises(Malformed, match="cond hands cos to a graph traced for other sizes"):
        refresh(module, before)


def test_refresh_keeps_the_symbols_of_sizes_that_only_running_tells() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = Graph()
    x = graph.placeholder("x")
    found = graph.call_function(aten.nonzero.default, (x,))
    twice = graph.call_function(aten.mul.Tensor, (found, 2))
    graph.output((twice,))
    module = GraphModule(torch.nn.Module(), graph)
    x.meta["val"] = mode.from_tensor(torch.randn(4))
    assert refresh(module, take(graph)) == 2
    (symbol,) = found.meta["unbacked_bindings"]
    assert str(twice.meta["val"].shape[0]) == str(symbol)
    with graph.inserting_before(found):
        copy = graph.call_function(aten.sin.default, (x,))
    snapshot = take(graph)
    found.args = (copy,)
    assert refresh(module, snapshot) == 2  # the nonzero and its new input; the product sees the same sizes
    assert list(found.meta["unbacked_bindings"]) == [symbol]
    assert str(found.meta["val"].shape[0]) == str(twice.meta["val"].shape[0]) == str(symbol)
    assert not mode.shape_env.pending_fresh_unbacked_symbols
    snapshot = take(graph)
    found.target, found.args = aten.view.default, (x, [4, 1])
    assert refresh(module, snapshot) == 2
    assert "unbacked_bindings" not in found.meta
    assert twice.meta["val"].shape == (4, 1)


# ---- order


def _disordered(count: int, *, late: bool) -> tuple[Graph, Node, list[Node]]:
    """A cat in front of all that it reads, last first; if `late`, each of these stands in front of what it reads too,
    so that they are placed one by one and from the last to the first."""
    graph = Graph()
    x = graph.placeholder("x")
    parts = [graph.call_function(torch.sin, (x,)) for _ in range(count)]
    with graph.inserting_before(parts[0]):
        cat = graph.call_function(torch.cat, (parts[::-1],))
    if late:
        sources = [graph.call_function(torch.cos, (x,)) for _ in range(count)]
        for part, source in zip(parts, sources[::-1], strict=True):
            part.args = (source,)
    graph.output(cat)
    return graph, cat, parts


@pytest.mark.parametrize("late", [False, True])
def test_sorting_looks_at_each_edge_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cat, parts = _disordered(5000, late=late)
    looked = 0
    real = Node.all_input_nodes.fget  # type: ignore[attr-defined]

    def counted(node: Node) -> list[Node]:
        nonlocal looked
        found = real(node)
        looked += len(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Node, "all_input_nodes", property(counted))
        assert sort_nodes(graph) == (5001 if late else 1)
    assert looked <= len(graph.nodes) + 2 * 5000  # the nodes, and what the cat and its parts read
    graph.lint()
    assert list(graph.nodes)[-2] is cat
    if not late:
        assert [node for node in graph.nodes if node.target is torch.sin] == parts


def test_sorting_nodes_that_wait_for_several_keeps_their_order() -> None:
    """Both wait for a and b; which argument comes last in their calls does not matter."""
    graph = Graph()
    x = graph.placeholder("x")
    a, b = (graph.call_function(torch.sin, (x,)) for _ in range(2))
    with graph.inserting_before(a):
        one = graph.call_function(torch.add, (b, a))
        two = graph.call_function(torch.add, (a, b))
    graph.output((one, two))
    assert sort_nodes(graph) == 2
    assert list(graph.nodes)[1:-1] == [a, b, one, two]
