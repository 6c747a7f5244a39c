"""Graphs as text: for people in `penstock pipeline check`, as pictures in Mermaid and SVG, and as TOML again.

Also the ops with their parameters, and an item's path as a tree.
"""

import inspect
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.pipeline.check import OPEN, Kinds, edges_of, fields_of
from penstock.pipeline.engine import GPU_WAIT_S
from penstock.pipeline.filters import is_target
from penstock.pipeline.graph import AUTO, Each, Graph, Node, NodeInput, NodeStep, alternatives, part_name
from penstock.pipeline.lower import PATHS, TARGET, builtin_op, each_path, files_of, may_use_gpu, op_class
from penstock.pipeline.node import placed
from penstock.pipeline.notation import EACH, FIELDS, GRAPH_FIELDS, NODE, PIPELINE, PLACE, OpDraft
from penstock.pipeline.ops.base import OpParameter, parameters_of
from penstock.pipeline.ops.catalog import canonical, find, names
from penstock.pipeline.traversal import Hop
from penstock.serving.observe.text import samples
from penstock.types import TensorSpec
from penstock.values import columns, expected, found, shorten

_HEAD = ("node", "ops", "instances", "batch", "wait", "device")
_LONGEST, _WIDTH = 60, 76


# ---- a graph


def graph_text(graph: Graph) -> str:
    """The nodes of a graph, and the fields on its edges. Raises ConfigError: the edges do not fit."""
    reasons: dict[str, str] = {}
    here = placed(graph, reasons).nodes
    nodes = [
        replace(n, device=here[n.name].device, processes=here[n.name].processes)
        for n in (graph.nodes[name] for name in graph.order())
    ]
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    head = f"pipeline {graph.name}: {count}, from {graph.entry} to {', '.join(graph.outputs)}"
    notes = [f"[{node.name}] {note}" for node in nodes for note in _notes(node)]
    notes += [f"[{name}] runs in {why}" for name, why in reasons.items()]
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
    copies = f"{node.processes} processes" if node.processes else str(node.instances)
    yield node.name, ops[0], copies, _batch(node), f"{wait_s * 1000:g} ms", node.device
    yield from (("", op, "", "", "", "") for op in ops[1:])


def _batch(node: Node) -> str:
    if node.max_batch is None:
        return "any"
    if node.sizes:
        return f"{', '.join(map(str, node.sizes))} (at most {node.max_batch})"
    return f"{node.min_batch}-{node.max_batch}"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    head, *lines = columns([*rows, tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True))])
    return ["", head, lines.pop(), *lines]


def _edges(graph: Graph) -> Iterator[str]:
    first = graph.nodes[graph.entry].steps[:1]
    takes = op_class(first[0].op, first[0].params).takes if first else "any"
    given: Kinds = {name: takes if name == "data" else "any" for name in graph.takes} | _tensors(graph.tensors)
    yield f"caller -> {', '.join(graph.starts)}: {_fields(given)}"
    for producer, consumer, fields in edges_of(graph):
        yield f"{producer} -> {consumer}: {_fields(fields)}"
    left = fields_of(graph)
    for name in graph.outputs:
        declared = _tensors(graph.results)
        returned = {field: left[name].get(field, "any") for field in graph.gives} | declared
        missing = [field for field in returned if field not in {*left[name], *declared} and OPEN not in left[name]]
        yield f"{name} -> caller: {_fields(returned)}" + (f" (never set: {', '.join(missing)})" if missing else "")


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


# ---- pictures

_PREFIX = re.compile(r"^\w+?_(?=pipeline_)")
_BOX, _LINE, _GAP_X, _GAP_Y = 240, 18, 40, 50  # pixels of a box, of a line of text, and between boxes


class NodeLoad(Struct, frozen=True):
    """What a node of a running server does: items that wait, mean items of a batch, and its busy instances among
    those that are up."""

    queue: float
    batch: float | None
    busy: float
    instances: float = 0.0


# ---- numbers of a server


def read_loads(before: str, after: str, seconds: float, model: str) -> dict[str, NodeLoad]:
    """The load of each node between two metrics pages, `seconds` apart. `model` "" means all models."""
    old, new = _sums(before, model), _sums(after, model)
    loads = {}
    for node in {labels[0] for name, labels in new if name == "pipeline_run_seconds_sum"}:
        sizes = {size: new[n, (node, size)] - old[n, (node, size)] for n, (at, size) in new
                 if n == "pipeline_batches_total" and at == node}  # fmt: skip
        batches = sum(sizes.values())
        ran_s = new["pipeline_run_seconds_sum", (node, "")] - old["pipeline_run_seconds_sum", (node, "")]
        loads[node] = NodeLoad(
            new["pipeline_queue_items", (node, "")],
            sum(int(size) * count for size, count in sizes.items()) / batches if batches > 0 else None,
            max(0.0, ran_s / seconds),
            new["pipeline_instances", (node, "")],
        )
    return loads


def _sums(page: str, model: str) -> dict[tuple[str, tuple[str, str]], float]:
    """Values by name, node and size of the batch, added over the workers."""
    sums: dict[tuple[str, tuple[str, str]], float] = defaultdict(float)
    for name, labels, value in samples(page, model):
        if "node" in labels:
            sums[_PREFIX.sub("", name), (labels["node"], labels.get("size", ""))] += value
    return sums


# ---- the graph


def _lines(graph: Graph, name: str, loads: Mapping[str, NodeLoad]) -> list[str]:
    """The text in a node's box."""
    node = graph.nodes[name]
    ops = f"alias of {node.alias_of}" if node.alias_of else ", ".join(step.op for step in node.steps)
    lines = [name, shorten(ops or f"each of {node.each.split if node.each else 'nothing'}", 36)]
    if node.when:
        lines.append(shorten(f"when {node.when}", 36))
    if (load := loads.get(node.alias_of or name)) is not None:
        batch = "no batch" if load.batch is None else f"batch {load.batch:.1f}"
        lines.append(f"queue {load.queue:g}, {batch}, busy {load.busy:.2f} of {load.instances or node.instances:g}")
    return lines


def mermaid(graph: Graph, loads: Mapping[str, NodeLoad]) -> str:
    """The graph as a Mermaid flowchart."""
    ids = {name: f"n{i}" for i, name in enumerate(graph.nodes)}
    boxes = [f'  {ids[name]}["{"<br/>".join(map(escape, _lines(graph, name, loads)))}"]' for name in graph.nodes]
    arrows = [f"  {ids[a]} {'-. each .->' if each else '-->'} {ids[b]}" for a, b, each in graph.edges()]
    return "\n".join(["flowchart TD", *boxes, *arrows]) + "\n"


def svg(graph: Graph, loads: Mapping[str, NodeLoad]) -> str:
    """The graph as an SVG: each node below the nodes before it."""
    texts = {name: _lines(graph, name, loads) for name in graph.nodes}
    height = _LINE * max(map(len, texts.values())) + 14
    places = _places(graph, height)
    size = [max(place[axis] for place in places.values()) + side + 20 for axis, side in enumerate((_BOX, height))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}"'
        f' height="{size[1]}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 8,4 0,8z"/></marker></defs>',
    ]
    for start, end, each in graph.edges():
        (x1, y1), (x2, y2) = places[start], places[end]
        x1, y1, x2 = x1 + _BOX // 2, y1 + height, x2 + _BOX // 2
        dashes = ' stroke-dasharray="5,4"' if each else ""
        path = f"M{x1},{y1} C{x1},{y1 + _GAP_Y // 2} {x2},{y2 - _GAP_Y // 2} {x2},{y2}"
        parts.append(f'<path d="{path}" fill="none" stroke="black" marker-end="url(#end)"{dashes}/>')
    for name, (x, y) in places.items():
        parts.append(f'<rect x="{x}" y="{y}" width="{_BOX}" height="{height}" rx="6" fill="white" stroke="black"/>')
        for i, line in enumerate(texts[name]):
            bold = ' font-weight="bold"' if not i else ""
            parts.append(f'<text x="{x + 10}" y="{y + 20 + i * _LINE}"{bold}>{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _places(graph: Graph, height: int) -> dict[str, tuple[int, int]]:
    """The upper left corner of each box. A row has the nodes with equally long ways from a first node."""
    before: dict[str, list[str]] = defaultdict(list)
    for start, end, _ in graph.edges():
        before[end].append(start)
    rows: dict[str, int] = {}
    while len(rows) < len(graph.nodes):
        ready = [n for n in graph.nodes if n not in rows and all(b in rows for b in before[n])]
        for name in ready or [n for n in graph.nodes if n not in rows][:1]:  # a body may lead back
            rows[name] = max((rows[b] + 1 for b in before[name] if b in rows), default=0)
    columns: dict[str, int] = {}
    for row in range(max(rows.values()) + 1):
        members = [name for name, at in rows.items() if at == row]
        middle = {n: [columns[b] for b in before[n] if b in columns] for n in members}
        members.sort(key=lambda n: sum(middle[n]) / len(middle[n]) if middle[n] else 0)
        columns |= {name: place for place, name in enumerate(members)}
    return {n: (20 + columns[n] * (_BOX + _GAP_X), 20 + row * (height + _GAP_Y)) for n, row in rows.items()}


# ---- one item


def trace_text(graph: Graph, hops: Sequence[Hop]) -> str:
    """The path of an item: each node below the last one before it, with the times of its batch.

    Below a fan-out are the paths of its children, with the place of the element in front.
    """
    children: dict[int, list[int]] = defaultdict(list)
    upstream = {name: graph.upstream(name) for name in {hop.node for hop in hops}}
    paths: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by the element
    for i, hop in enumerate(hops):
        path = paths[hop.element]
        before = [j for j in path if hop.node in graph.nodes[hops[j].node].next]
        before = before or [j for j in path if hops[j].node in upstream[hop.node]]  # nodes between them were skipped
        before = before or [j for j in paths.get(hop.element[:-1], ()) if hops[j].node in upstream[hop.node]]
        children[before[-1] if before else -1].append(i)
        path.append(i)
    lines: list[str] = []

    def write(parent: int, indent: str) -> None:
        for i in children[parent]:
            last = i == children[parent][-1]
            hop = hops[i]
            place = "" if hop.element == (hops[parent].element if parent >= 0 else ()) else f"{hop.element[-1]}: "
            lines.append(
                f"{indent}{'└─ ' if last else '├─ '}{place}{hop.node}  ran {hop.run_s * 1000:.3f} ms,"
                f" waited {hop.wait_s * 1000:.3f} ms, batch {hop.batch_id} of {hop.size}"
            )
            write(i, indent + ("   " if last else "│  "))

    write(-1, "")
    return "\n".join(lines)


# ---- TOML: native keys in a fixed order; loading the text gives the same graph, without `compat`

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TOML_WIDTH = 100
_DEFAULTS, _DEFAULT_GRAPH = Node(""), Graph("", {}, "")


def to_toml(graph: Graph, *, folder: str | None = None, tables: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The text of a file in `folder`, the base of its relative paths (default: the graph's folder).

    `tables`, such as those for the server, are written unchanged before it.
    """
    folder = os.path.abspath(graph.folder if folder is None else folder)
    parts = [_table(name, table.items()) for name, table in (tables or {}).items()]
    parts.append(_table("pipeline", _settings(graph)))
    parts += [_table(node.name, _keys(node, folder)) for node in graph.nodes.values()]
    return "\n".join(parts)


def _table(name: str, keys: Any) -> str:
    head = ".".join(map(_key, name.split(".")))
    return f"[{head}]\n" + "".join(f"{_key(key)} = {_top(value)}\n" for key, value in keys)


def _settings(graph: Graph) -> Iterator[tuple[str, Any]]:
    yield "name", graph.name
    yield "entry", graph.entry
    sources = {i.name: f"{i.producer}.{i.source}" for i in graph.sources}
    results = _tensors(graph.results)
    outputs = {n: {"tensor": text, "from": sources[n]} if n in sources else text for n, text in results.items()}
    tables = {"inputs": _tensors(graph.tensors), "outputs": outputs}
    for key, field in GRAPH_FIELDS.items():
        if key in PIPELINE and (value := getattr(graph, field)) != getattr(_DEFAULT_GRAPH, field):
            yield key, tables.get(key) or value


def _tensors(specs: Sequence[TensorSpec]) -> dict[str, str]:
    return {spec.name: f"{spec.datatype}{[*spec.shape]}" for spec in specs}


def _keys(node: Node, folder: str) -> Iterator[tuple[str, Any]]:
    """The keys of a node's table: values other than the default, and values that its ops received."""
    fields = {key: getattr(node, field) for key, field in FIELDS.items()}
    if node.when is not None and is_target(node.when):
        fields["when"] = _relative(TARGET, node.when, folder)
    if node.alias_of is not None:
        fields = {key: value for key, value in fields.items() if FIELDS[key] in PLACE}
    given = {name for step in node.steps for name, value in step.params.items() if fields.get(name) == value}
    if node.steps and node.alias_of is None:
        known = {key: fields[key] for key in given}
        yield "ops", [_op(step, known, folder, first=not i) for i, step in enumerate(node.steps)]
    if node.inputs:
        inputs = {name: _input(choices) for name, choices in alternatives(node).items()}
        yield "inputs", list(inputs.values()) if part_name(0) in inputs else inputs
    on_gpu = node.alias_of is None and may_use_gpu([OpDraft(step.op, step.params) for step in node.steps])
    usual = {"device": "cpu" if node.processes else AUTO} if on_gpu else {}
    for key, value in fields.items():
        if key in usual and value == usual[key] and key not in given:
            continue
        if key in usual or value != getattr(_DEFAULTS, FIELDS[key]) or key in given:
            yield key, _milliseconds(value) if key.endswith("_ms") else value
    if node.each is not None:
        usual_each = Each(node.each.body)
        for key, name in EACH.items():
            if name == "body" or (value := getattr(node.each, name)) != getattr(usual_each, name):
                yield key, getattr(node.each, name)


def _input(choices: list[NodeInput]) -> Any:
    """The value of one input: a field, alternatives, or a table with the default."""
    fields = [f"{each.producer}.{each.source}" for each in choices]
    value: Any = fields if len(fields) > 1 else fields[0]
    return value if choices[-1].default is UNSET else {"from": value, "default": choices[-1].default}


def _op(step: NodeStep, given: Mapping[str, Any], folder: str, *, first: bool) -> Any:
    """A step without the parameters that it inherits from its node."""
    own = {key: value for key, value in step.params.items() if key not in given or given[key] != value}
    params = {key: _relative(key, value, folder) for key, value in own.items()}
    usual = "run" if first else "swap"
    guard = {} if step.filter == usual else {"filter": step.filter}
    return {"op": step.op, **guard, **params} if params or guard else step.op


def _relative(key: str, value: Any, folder: str) -> Any:
    """A path below the folder, relative to it."""
    if key not in PATHS and not (key == TARGET and ".py:" in str(value)):
        return value
    below = os.path.join(folder, "")
    return each_path(value, lambda path: os.path.relpath(path, folder) if path.startswith(below) else path)


def _milliseconds(seconds: float) -> float:
    """The shortest number of milliseconds that equals `seconds` exactly when divided by 1000."""
    exact = seconds * 1000
    shorter = [round(exact, digits) for digits in range(16)]
    around = [exact, math.nextafter(exact, math.inf), math.nextafter(exact, 0.0)]
    return next((ms for ms in (*shorter, *around) if ms / 1000 == seconds), exact)


def _top(value: Any) -> str:
    """A value after its key. A long list takes one line per entry."""
    text = _value(value)
    if isinstance(value, list | tuple) and len(text) > _TOML_WIDTH:
        return "[\n" + "".join(f"    {_value(each)},\n" for each in value) + "]"
    return text


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return "nan" if math.isnan(value) else repr(value)
        case int():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)  # a date: Python writes it as TOML does


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)
