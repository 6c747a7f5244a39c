"""Whether a graph can run: its shape, its ops and their parameters, the fields of its edges, what is only held."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.pipeline.fields import fields_of
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.lower import checked
from penstock.pipeline.routes import FILTERS as FILTERS
from penstock.pipeline.routes import STEP_FILTERS, held
from penstock.pipeline.source import Source
from penstock.pipeline.structure import check_structure, entry_of, linked


def check(graph: Graph) -> None:
    """Returns if the graph can run. Raises ConfigError: node, what was found, what was expected."""
    source = Source(graph.name)
    linked(graph.nodes, source)
    entry_of(graph.nodes, graph.entry, source, compat=graph.compat)
    check_structure(graph, source)
    for node in graph.nodes.values():
        _check_steps(node, source)
    fields_of(graph)
    if held := cannot_run(graph):
        raise ConfigError(f"{graph.name}: {'; '.join(held)}")


def cannot_run(graph: Graph) -> tuple[str, ...]:
    """What a graph holds that no runner runs yet, in words; empty for most."""
    found = [(node, text) for node in graph.nodes.values() for text in (*held(node), *_filters(node))]
    return tuple(f"[{node.name}] {text} cannot be run yet" for node, text in found)


def _filters(node: Node) -> list[str]:
    return [f"filter '{step.filter}'" for step in node.steps if step.filter not in STEP_FILTERS]


def _check_steps(node: Node, source: Source) -> None:
    if not node.steps and node.alias_of is None and node.each is None:
        raise source.error(node.name, "ops", "found no step; expected one or more, such as Identity")
    for step in node.steps:
        try:
            checked(step.op, step.params)
        except ConfigError as e:
            raise source.error(node.name, "", e.message) from None
