"""Routes: where items go, what joins wait for, and what no runner can run."""

from __future__ import annotations

import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.graph import Graph, Input, Node
from penstock.pipeline.routes import check_runnable, needs, route


def graph(**nodes: tuple[str, tuple[Input, ...]]) -> Graph:
    made = {name: Node(name, next=tuple(after.split()), inputs=inputs) for name, (after, inputs) in nodes.items()}
    return Graph("g", made, next(iter(made)))


FORK = graph(
    a=("b c e", ()), b=("d", ()), c=("d", ()), d=("", (Input("b", "result", "data"), Input("a", "x", "y"))), e=("", ())
)


def test_a_join_needs_its_producers_and_whose_fields_it_takes() -> None:
    assert needs(FORK, "d") == {"a", "b", "c"}
    assert needs(FORK, "b") == frozenset()


def test_a_way_has_its_outputs_and_joins() -> None:
    way = route(FORK, "a")
    assert (way.outputs, dict(way.waits)) == (("d", "e"), {"d": 3})
    assert (route(FORK, "d").outputs, dict(route(FORK, "d").waits)) == (("d",), {})
    assert route(FORK, "e").outputs == ("e",)


def test_a_way_that_a_join_would_wait_on_for_ever_is_refused() -> None:
    with pytest.raises(BadRequest, match="cannot begin at node 'c': node 'd' takes what node 'a' gives"):
        route(FORK, "c")


def test_fields_of_a_node_that_does_not_come_before_are_refused() -> None:
    with pytest.raises(ConfigError, match="node 'b': inputs name 'c', which does not come before it"):
        check_runnable(graph(a=("b c", ()), b=("", (Input("c", "x", "data"),)), c=("", ())))
    check_runnable(FORK)
