"""Text for people: graphs for `penstock pipeline check`, ops for `penstock pipeline ops`."""

import inspect
import os
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.pipeline.engine import GPU_WAIT_S
from penstock.pipeline.fields import OPEN, Kinds, edges_of, fields_of
from penstock.pipeline.graph import Graph, Node, NodeStep
from penstock.pipeline.keys import NODE
from penstock.pipeline.lower import builtin_op, files_of, op_class
from penstock.pipeline.ops.catalog import canonical, find, names
from penstock.pipeline.ops.parameters import OpParameter, parameters_of
from penstock.pipeline.placement import placed
from penstock.values import expected, found

_HEAD = ("node", "ops", "instances", "batch", "wait", "device")
_LONGEST, _WIDTH = 60, 76


# ---- a graph


def graph_text(graph: Graph) -> str:
    """The nodes of a graph, and the fields on its edges. Raises ConfigError: the edges do not fit."""
    here = placed(graph).nodes
    nodes = [replace(graph.nodes[name], device=here[name].device) for name in graph.order()]
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    head = f"pipeline {graph.name}: {count}, from {graph.entry} to {', '.join(graph.outputs)}"
    notes = [f"[{node.name}] {note}" for node in nodes for note in _notes(node)]
    parts = [head, *_columns([_HEAD, *(row for node in nodes for row in _rows(node))]), "", *_edges(graph)]
    return "\n".join([*parts, *(["", *notes] if notes else [])]) + "\n"


def step_text(step: NodeStep) -> str:
    """One step with its parameters: `ResizeMat(resize_h=224, resize_w=224)`."""
    guard = "" if step.filter in ("run", "swap") else f"({step.filter})"
    params = ", ".join(f"{key}={_short(value)}" for key, value in step.params.items() if key not in NODE)
    return f"{guard}{step.op}{f'({params})' if params else ''}"


def _rows(node: Node) -> Iterator[tuple[str, ...]]:
    """A line for each step. The first also shows the node's own values."""
    ops = [f"alias of {node.alias_of}"] if node.alias_of is not None else []
    ops = ops or [line for step in node.steps for line in wrap(step_text(step), _WIDTH, subsequent_indent="    ")]
    if (each := node.each) is not None:
        ops.append(f"each of {each.split} through {each.body}" if each.split else f"through {each.body}")
    wait_s = node.wait_s if node.wait_s is not None else 0.0 if node.device == "cpu" else GPU_WAIT_S
    yield node.name, ops[0], str(node.instances), _batch(node), f"{wait_s * 1000:g} ms", node.device
    yield from (("", op, "", "", "", "") for op in ops[1:])


def _batch(node: Node) -> str:
    if node.max_batch is None:
        return "any"
    if node.sizes:
        return f"{', '.join(map(str, node.sizes))} (at most {node.max_batch})"
    return f"{node.min_batch}-{node.max_batch}"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["", lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _edges(graph: Graph) -> Iterator[str]:
    first = graph.nodes[graph.entry].steps[:1]
    takes = op_class(first[0].op, first[0].params).takes if first else "any"
    given: Kinds = {name: takes if name == "data" else "any" for name in graph.takes}
    yield f"caller -> {graph.entry}: {_fields(given)}"
    for producer, consumer, fields in edges_of(graph):
        yield f"{producer} -> {consumer}: {_fields(fields)}"
    left = fields_of(graph)
    for name in graph.outputs:
        answered = {field: left[name].get(field, "any") for field in graph.answers}
        missing = [field for field in answered if field not in left[name] and OPEN not in left[name]]
        yield f"{name} -> caller: {_fields(answered)}" + (f" (never set: {', '.join(missing)})" if missing else "")


def _fields(fields: Kinds) -> str:
    ordered = sorted(fields, key=lambda name: (name != "data", name == OPEN))
    listed = ", ".join(name if fields[name] == "any" else f"{name} ({fields[name]})" for name in ordered)
    return listed or "no field, only a signal"


def _notes(node: Node) -> Iterator[str]:
    if node.when is not None:
        yield f"runs items with {node.when}; else: {node.otherwise}"
    if node.alias_of is not None:
        yield f"alias of {node.alias_of}: shares its queue and instances"
        return
    for step in node.steps:
        for file in (file for file in files_of(step.params) if not os.path.isfile(file)):
            yield f"{step.op}: there is no file {file}: without it the pipeline does not start"
        if (op := builtin_op(step.op, step.params)) is not None and (note := op.note()):
            yield note


def _short(value: Any) -> str:
    text = ", ".join(map(_short, value)) if isinstance(value, list | tuple) else str(value)
    text = f"[{text}]" if isinstance(value, list | tuple) else text
    return text if len(text) <= _LONGEST else found(value) if not isinstance(value, str) else f"...{text[-_LONGEST:]}"


# ---- ops


def ops_text() -> str:
    """All ops, one per line."""
    width = max(map(len, names()))
    return "\n".join(f"{name.ljust(width)}  {first_line(name)}" for name in names())


def op_text(name: str) -> str:
    """An op with its docstring and its parameters. Raises ConfigError: no such op."""
    name = canonical(name)
    cls = find(name)
    text = (inspect.getdoc(cls) or "").partition("\n\n- `")[0]
    rows = [f"  {p.name} = {default_of(p)}   {expected(p.type)}: {p.doc}" for p in parameters_of(cls).values()]
    return "\n".join([f"{name}: {cls.takes} -> {cls.gives}", "", text, "", *rows])


def first_line(name: str) -> str:
    try:
        return (inspect.getdoc(find(name)) or "").split("\n\n")[0].replace("\n", " ")
    except ConfigError as e:
        return f"({e.message})"


def default_of(parameter: OpParameter) -> str:
    if parameter.required:
        return "(must be set)"
    value = parameter.default
    return '""' if value == "" else "none" if value is None or value == () else str(value)
