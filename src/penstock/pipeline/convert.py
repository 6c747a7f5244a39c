"""A Graph as TOML with native keys in a fixed order. Loading the text gives the same graph, without `compat`."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import UNSET

from penstock.pipeline.conditions import is_target
from penstock.pipeline.dialect import OpDraft
from penstock.pipeline.graph import AUTO, Each, Graph, Node, NodeInput, NodeStep, alternatives
from penstock.pipeline.keys import EACH, FIELDS, GRAPH_FIELDS, PLACE
from penstock.pipeline.lower import PATHS, TARGET, each_path, takes_size

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH = 100
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
    for key, field in GRAPH_FIELDS.items():
        if (value := getattr(graph, field)) != getattr(_DEFAULT_GRAPH, field):
            yield key, value


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
        yield "inputs", {name: _input(choices) for name, choices in alternatives(node).items()}
    has_size = node.alias_of is None and takes_size([OpDraft(step.op, step.params) for step in node.steps])
    usual = {"device": AUTO} if has_size else {}
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
    if isinstance(value, list | tuple) and len(text) > _WIDTH:
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
