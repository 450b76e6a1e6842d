"""Nodes that are read close together and do not wait for each other (PRE-12): sets on random graphs, and what joining
some of them does to the others."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from ferrite.graph.groups import Groups
from ferrite.graph.pre_grad.batch_tanh import batch_tanh


def random_graph(seed: int, size: int = 60) -> tuple[Graph, list[Node]]:
    """A graph of `size` calls, each of up to three earlier ones, and half of them as candidates."""
    chance = random.Random(seed)
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(size):
        sources = chance.sample(nodes[-12:], min(len(nodes), chance.randint(1, 3)))
        nodes.append(graph.call_function(torch.add, tuple(sources)))
    graph.output(tuple(nodes[-6:]))
    return graph, [node for node in nodes[1:] if chance.random() < 0.5]


def everything(groups: Groups) -> int:
    return groups.of(groups.nodes)


def reaches(node: Node, target: Node) -> bool:
    """Plainly, node by node."""
    seen, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source is target:
                return True
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return False


@pytest.mark.parametrize("seed", range(24))
def test_no_member_of_a_set_needs_another_and_order_and_limits_are_kept(seed: int) -> None:
    graph, nodes = random_graph(seed)
    groups = Groups(graph, nodes, depth=5)
    found = list(groups.independent(everything(groups), least=2, most=4))
    assert found
    for chosen in found:
        assert 2 <= len(chosen) <= 4
        assert chosen == sorted(chosen)
        assert not any(reaches(one, other) for one in chosen for other in chosen)
    flat = [node for chosen in found for node in chosen]
    assert len(flat) == len(set(flat))


@pytest.mark.parametrize("seed", range(24))
def test_sets_stay_independent_when_earlier_sets_become_one_node(seed: int) -> None:
    """Joining is done for real: every reader of a member reads a node that reads all that the members read."""
    graph, nodes = random_graph(seed)
    groups = Groups(graph, nodes, depth=5)
    for chosen in groups.independent(everything(groups), least=2, most=4):
        assert not any(reaches(one, other) for one in chosen for other in chosen)
        groups.join(chosen)
        with graph.inserting_before(graph.output_node()):
            whole = graph.call_function(torch.stack, ([source for node in chosen for source in node.all_input_nodes],))
        for node in chosen:
            node.replace_all_uses_with(whole)


def test_joining_two_nodes_makes_others_wait() -> None:
    """n1 -> n2 and n3 -> n4: once n2 and n3 are one, n4 waits for n1."""
    graph = Graph()
    x = graph.placeholder("x")
    n1 = graph.call_function(torch.relu, (x,))
    n2 = graph.call_function(torch.relu, (n1,))
    n3 = graph.call_function(torch.relu, (x,))
    n4 = graph.call_function(torch.relu, (n3,))
    graph.output((n2, n4))
    groups = Groups(graph, [n1, n2, n3, n4], depth=5)
    assert list(groups.independent(groups.of([n1, n4]), 2, 9)) == [[n1, n4]]
    groups.join([n2, n3])
    assert list(groups.independent(groups.of([n1, n4]), 2, 9)) == []


def test_an_earlier_node_may_wait_for_a_later_one() -> None:
    """After joining {a, d}, b waits for c, which stands below it."""
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    b = graph.call_function(torch.relu, (a,))
    c = graph.call_function(torch.relu, (x,))
    d = graph.call_function(torch.relu, (c,))
    graph.output((b, d))
    groups = Groups(graph, [a, b, c, d], depth=5)
    assert list(groups.independent(groups.of([b, c]), 2, 9)) == [[b, c]]
    groups.join([a, d])
    assert list(groups.independent(groups.of([b, c]), 2, 9)) == []


@pytest.mark.parametrize(("least", "most", "sizes"), [(2, 300, [10]), (2, 4, [4, 4, 2]), (3, 4, [4, 4]), (11, 300, [])])
def test_sets_are_no_smaller_and_no_larger_than_asked(least: int, most: int, sizes: list[int]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.relu, (x,)) for _ in range(10)]
    graph.output(tuple(nodes))
    groups = Groups(graph, nodes, depth=5)
    assert [len(chosen) for chosen in groups.independent(everything(groups), least, most)] == sizes


def test_close_means_read_by_one_node_at_most_depth_steps_up_and_not_past_a_candidate() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    far = graph.call_function(torch.tanh, (x,))
    below = graph.call_function(torch.neg, (graph.call_function(torch.neg, (far,)),))
    hidden = graph.call_function(torch.tanh, (x,))
    near = graph.call_function(torch.tanh, (hidden,))
    graph.output(graph.call_function(torch.add, (below, near)))
    nodes = [far, hidden, near]
    for depth, expected in [(1, [near]), (2, [near]), (3, [far, near]), (5, [far, near])]:
        groups = Groups(graph, nodes, depth)
        reads = [near for near in groups.close() if near]
        assert groups.of(expected) in reads
        assert all(found & ~groups.of(expected) == 0 for found in reads[:1])


def test_what_a_new_node_reads_is_close() -> None:
    """The readers of the second layer read two members each; once they are one, it reads all of the first layer."""
    graph = Graph()
    x = graph.placeholder("x")
    first = [graph.call_function(torch.tanh, (x,)) for _ in range(4)]
    second = [graph.call_function(torch.tanh, (node,)) for node in first]
    graph.output(tuple(second))
    groups = Groups(graph, [*first, *second], depth=5)
    found = groups.close()
    assert next(found) == groups.of(second)
    groups.join(second)
    assert next(found) == groups.of(first)


def test_a_chain_of_thousands_is_given_up_soon() -> None:
    """No two of them are independent, and all are read by one node."""
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(5000):
        nodes.append(graph.call_function(torch.tanh, (nodes[-1],)))
    graph.output(tuple(nodes))
    start = time.process_time()
    groups = Groups(graph, nodes[1:], depth=5)
    assert list(groups.independent(everything(groups), least=5, most=300)) == []
    assert time.process_time() - start < 5


def test_a_graph_of_five_thousand_nodes_takes_seconds() -> None:
    """Five layers of 200 members, four other ops between one and the next."""
    graph = Graph()

    def call(function: object, value: object, *args: object) -> Node:
        node = graph.create_node("call_function", function, args)
        node.meta["example_value"] = value
        return node

    with FakeTensorMode():
        x = graph.placeholder("x")
        between = x.meta["example_value"] = torch.empty(2, 2)
        layer = [x] * 200
        for _ in range(5):
            for _ in range(4):
                layer = [call(torch.add, between, node, 1) for node in layer]
            layer = [call(torch.tanh, torch.empty(2, 2), node) for node in layer]
        graph.output(call(torch.stack, torch.empty(200, 2, 2), layer))
    assert len(graph.nodes) > 5000
    start = time.process_time()
    assert batch_tanh(graph) == 5
    assert time.process_time() - start < 10
    graph.lint()
