"""A Graph in plain text, as `penstock pipeline check` prints it: its nodes, and what travels over each edge."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from msgspec.structs import replace

from penstock.config.toml import found
from penstock.errors import ConfigError
from penstock.pipeline.check import OPEN, Kinds, edges_of, fields_of
from penstock.pipeline.graph import Graph, Node, Step
from penstock.pipeline.host import GPU_WAIT_S
from penstock.pipeline.keys import NODE, PIPELINE, Key, torchpipe_keys
from penstock.pipeline.lower import made_of, op_class
from penstock.pipeline.ops.base import Op
from penstock.pipeline.ops.catalog import ALIASES, BUILTIN, NOT_HERE, canonical, find, names
from penstock.pipeline.ops.parameters import Parameter, describe_type, parameters_of
from penstock.pipeline.placement import placed

_HEAD = ("node", "ops", "instances", "batch", "wait", "device")
_LONGEST, _WIDTH = 60, 76


def shown(graph: Graph) -> str:
    """The graph as text; lines end in "\\n". Raises ConfigError: its edges do not fit."""
    here = placed(graph).nodes
    nodes = [replace(graph.nodes[name], device=here[name].device) for name in graph.order()]
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    head = f"pipeline {graph.name}: {count}, from {graph.entry} to {', '.join(graph.outputs)}"
    notes = [f"[{node.name}] {note}" for node in nodes for note in _notes(node)]
    parts = [head, *_table([_HEAD, *(row for node in nodes for row in _rows(node))]), "", *_edges(graph)]
    return "\n".join([*parts, *(["", *notes] if notes else [])]) + "\n"


def told(step: Step) -> str:
    """One step with its parameters: `ResizeMat(resize_h=224, resize_w=224)`."""
    guard = "" if step.filter in ("run", "swap") else f"({step.filter})"
    params = ", ".join(f"{key}={_short(value)}" for key, value in step.params.items() if key not in NODE)
    return f"{guard}{step.op}{f'({params})' if params else ''}"


def _rows(node: Node) -> Iterator[tuple[str, ...]]:
    """A line for each step, the first with what is the node's own."""
    ops = [line for step in node.steps for line in wrap(told(step), _WIDTH, subsequent_indent="    ")] or [_held(node)]
    wait_s = node.wait_s if node.wait_s is not None else 0.0 if node.device == "cpu" else GPU_WAIT_S
    wait = f"{wait_s * 1000:g} ms"
    yield node.name, ops[0], str(node.instances), _batch(node), wait, node.device
    yield from (("", op, "", "", "", "") for op in ops[1:])


def _held(node: Node) -> str:
    if node.each is not None:
        return f"each of {node.each.split} through {node.each.body}"
    return f"alias of {node.alias_of}"


def _batch(node: Node) -> str:
    if node.max_batch is None:
        return "any"
    if node.sizes:
        return f"{', '.join(map(str, node.sizes))} (at most {node.max_batch})"
    return f"{node.min_batch}-{node.max_batch}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["", lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _edges(graph: Graph) -> Iterator[str]:
    takes = op_class(step.op, step.params).takes if (step := _first(graph.nodes[graph.entry])) else "any"
    given: Kinds = {name: takes if name == "data" else "any" for name in graph.takes}
    yield f"caller -> {graph.entry}: {_fields(given)}"
    for producer, consumer, fields in edges_of(graph):
        yield f"{producer} -> {consumer}: {_fields(fields)}"
    left = fields_of(graph)
    for name in graph.outputs:
        answered = {field: left[name].get(field, "any") for field in graph.answers}
        missing = [field for field in answered if field not in left[name] and OPEN not in left[name]]
        yield f"{name} -> caller: {_fields(answered)}" + (f" (never there: {', '.join(missing)})" if missing else "")


def _first(node: Node) -> Step | None:
    return node.steps[0] if node.steps else None


def _fields(fields: Kinds) -> str:
    ordered = sorted(fields, key=lambda name: (name != "data", name == OPEN))
    told = ", ".join(name if fields[name] == "any" else f"{name} ({fields[name]})" for name in ordered)
    return told or "no field, it is only waited for"


def _notes(node: Node) -> Iterator[str]:
    for step in node.steps:
        file = step.params.get("model")
        if isinstance(file, str) and not os.path.isfile(file):
            yield f"{step.op}: there is no file {file}: without it the pipeline does not start"
        if (op := made_of(step.op, step.params)) is not None and (note := op.note()):
            yield note


def _short(value: Any) -> str:
    text = ", ".join(map(_short, value)) if isinstance(value, list | tuple) else str(value)
    text = f"[{text}]" if isinstance(value, list | tuple) else text
    return text if len(text) <= _LONGEST else found(value) if not isinstance(value, str) else f"...{text[-_LONGEST:]}"


BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"
"""Between these lines of the page stands a table of this module."""


def tables() -> dict[str, str]:
    """The tables of the page, by the name that stands in its marks."""
    return {
        "keys of a node": _keys(NODE),
        "keys of the pipeline": _keys(PIPELINE),
        "ops": _ops(),
        "keys of TorchPipe": _torchpipe(),
    }


def filled(page: str) -> str:
    """The page with those tables as they are now whose marks stand in it."""
    for name, table in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in page or end not in page:
            continue
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def listed() -> str:
    """All ops, a line each."""
    width = max(map(len, names()))
    return "\n".join(f"{name.ljust(width)}  {_first_line(name)}" for name in names())


def described(name: str) -> str:
    """An op with its docstring and its parameters. Raises ConfigError: there is none of that name."""
    name = canonical(name)
    cls = find(name)
    lines = [f"{name}: {cls.takes} -> {cls.gives}", "", inspect.getdoc(cls) or ""]
    rows = [f"  {p.name} = {_default(p)}   {describe_type(p.type)}" for p in parameters_of(cls).values()]
    return "\n".join([*lines, "", *rows])


def _first_line(name: str) -> str:
    try:
        return (inspect.getdoc(find(name)) or "").split("\n\n")[0].replace("\n", " ")
    except ConfigError as e:
        return f"({e.message})"


def _keys(keys: Mapping[str, Key]) -> str:
    rows = [(f"`{name}`", key.expected, key.default, key.doc) for name, key in keys.items()]
    return _markdown(("key", "takes", "default", "meaning"), rows)


def _ops() -> str:
    rows = []
    known: dict[type[Op], str] = {}
    for name in (name for name in BUILTIN if name not in ALIASES):
        cls = find(name)
        first = known.setdefault(cls, name)
        params = ", ".join(_parameter(p) for p in parameters_of(cls).values()) if first == name else ""
        does = _first_line(name) if first == name else f"as `{first}`"
        rows.append((f"`{name}`", f"{cls.takes} -> {cls.gives}", params, does))
    rows.sort(key=lambda row: row[0].lower())
    others = ", ".join(f"`{name}` is `{of}`" for name, of in ALIASES.items())
    absent = _markdown(("TorchPipe's", "here"), [(f"`{name}`", why) for name, why in NOT_HERE.items()])
    return f"{_markdown(('op', 'data', 'parameters', 'gives'), rows)}\n\nOther names: {others}. Not here:\n\n{absent}"


def _parameter(parameter: Parameter) -> str:
    return f"`{parameter.name}`" if parameter.required else f"`{parameter.name}` = {_default(parameter)}"


def _default(parameter: Parameter) -> str:
    if parameter.required:
        return "(must be set)"
    value = parameter.default
    return '""' if value == "" else "none" if value is None or value == () else str(value)


def _torchpipe() -> str:
    rows = [(f"`{k.name}`", k.state, f"`{k.native}`" if k.native else "", k.means) for k in torchpipe_keys()]
    return _markdown(("TorchPipe's key", "state", "native key", "here"), rows)


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(filled(page.read_text()))
