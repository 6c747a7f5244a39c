"""Graph: the order of nodes, and routes through it."""

from __future__ import annotations

import time

import pytest

from penstock.errors import BadRequest
from penstock.pipeline.graph import Graph, Node, NodeInput, join_sources, route


def graph(**edges: str) -> Graph:
    nodes = {name: Node(name, next=tuple(after.split())) for name, after in edges.items()}
    return Graph("g", nodes, next(iter(nodes)))


def test_nodes_are_ordered_behind_their_producers_and_else_as_they_were_defined() -> None:
    found = graph(end="", join="end", left="join", start="left right", right="join", alone="")
    assert found.order() == ("start", "alone", "left", "right", "join", "end")
    assert found.outputs == ("end", "alone")
    assert found.producers("join") == ("left", "right")


def test_upstream_and_downstream_nodes_are_found() -> None:
    found = graph(start="left right", left="join", right="join", join="end", end="", alone="")
    assert found.upstream("join") == {"left", "right", "start"}
    assert found.downstream("left") == {"join", "end"}
    assert found.upstream("start") == found.downstream("end") == frozenset()


def test_a_cycle_has_no_order_but_terminates() -> None:
    found = graph(start="a", a="b", b="a end", end="")
    with pytest.raises(ValueError, match="the nodes a -> b -> a are in a cycle"):
        found.order()
    assert found.upstream("end") == {"start", "a", "b"}
    assert found.downstream("a") == {"a", "b", "end"}


def test_a_thousand_nodes_are_ordered_in_linear_time() -> None:
    count = 1000
    nodes = {f"n{i}": Node(f"n{i}", next=(f"n{i + 1}",) if i < count - 1 else ()) for i in range(count)}
    chain = Graph("g", dict(reversed(nodes.items())), "n0")
    begin_s = time.thread_time()
    assert chain.order() == tuple(nodes)
    assert time.thread_time() - begin_s < 0.5, "linear takes 2 ms, square over a second"


def joined(**nodes: tuple[str, tuple[NodeInput, ...]]) -> Graph:
    made = {name: Node(name, next=tuple(after.split()), inputs=inputs) for name, (after, inputs) in nodes.items()}
    return Graph("g", made, next(iter(made)))


FORK = joined(
    a=("b c e", ()),
    b=("d", ()),
    c=("d", ()),
    d=("", (NodeInput("b", "result", "data"), NodeInput("a", "x", "y"))),
    e=("", ()),
)


def test_a_join_waits_for_its_producers_and_the_nodes_whose_fields_it_takes() -> None:
    assert join_sources(FORK, "d") == {"a", "b", "c"}
    assert join_sources(FORK, "b") == frozenset()


def test_a_route_has_its_outputs_and_joins() -> None:
    way = route(FORK, "a")
    assert (way.outputs, dict(way.waits)) == (("d", "e"), {"d": 3})
    assert (route(FORK, "d").outputs, dict(route(FORK, "d").waits)) == (("d",), {})
    assert route(FORK, "e").outputs == ("e",)


def test_a_route_on_which_a_join_would_wait_forever_is_rejected() -> None:
    with pytest.raises(BadRequest, match="cannot begin at node 'c': node 'd' needs a field of node 'a'"):
        route(FORK, "c")
