"""A Graph from TOML: `load_graph` from a file, `parse_graph` from its tables. Native keys and TorchPipe's alike."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.config import toml
from penstock.config.toml import ONE_NODE_KEYS, SERVER_TABLES, found
from penstock.errors import ConfigError, nearest
from penstock.pipeline.check import check_structure, entry_of, linked
from penstock.pipeline.dialect import native_table
from penstock.pipeline.graph import Each, Graph, Input, Node
from penstock.pipeline.keys import (
    NODE,
    OF_AN_ALIAS,
    ONLY_IN_NODES,
    ONLY_WITH_A_MODEL,
    PIPELINE,
    Source,
    torchpipe_key,
    torchpipe_keys,
)
from penstock.pipeline.lower import (
    FAN_OUT,
    Draft,
    drafts_of,
    filter_name,
    has_model,
    op_class,
    parameter_name,
    rooted,
    steps_of,
    takes_size,
)
from penstock.pipeline.ops.parameters import parameters_of
from penstock.pipeline.placement import AUTO

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
_OF_THE_GRAPH = {"in_flight": "in_flight", "trace": "trace", "inputs": "takes", "outputs": "answers"}
_GLOBAL = "global"  # where TorchPipe's parse_toml puts what stands above all tables
NO_NODES = (*SERVER_TABLES, _GLOBAL)  # names that no node may have


def load_graph(path: str | Path, *, compat: bool = False) -> Graph:
    """The graph that a TOML file tells. `compat`: TorchPipe's dialect, whose unknown keys are warned of.

    Raises ConfigError: file, line, node, key, what was found and expected.
    """
    file = Path(path).expanduser()
    tables, text = toml.read(file)
    folder = str(file.resolve().parent)
    return _graph(tables, Source(str(path), text), name=file.stem, folder=folder, compat=compat)


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError: it is not there, or no TOML."""
    return toml.read(Path(path).expanduser())[0]


def parse_graph(tables: Mapping[str, Any], *, name: str, folder: str, compat: bool = False) -> Graph:
    """The graph of tables that are read already. Relative paths start at `folder`. Raises ConfigError."""
    return _graph(tables, Source(name), name=name, folder=folder, compat=compat)


def _graph(tables: Mapping[str, Any], source: Source, *, name: str, folder: str, compat: bool) -> Graph:
    settings = _settings(tables.get("pipeline", {}), source)
    compat = compat or bool(settings.get("compat"))
    folder = os.path.abspath(folder)
    name = settings.get("name", name)
    nodes = _tables_of_nodes(tables, re.sub(r"[^A-Za-z0-9_-]", "_", name), source)
    given = tables[_GLOBAL] if isinstance(tables.get(_GLOBAL), dict) else {}
    plain = {k: v for k, v in tables.items() if not isinstance(v, dict)} | given
    alone = not nodes.keys() & tables.keys()
    defaults = {} if alone else native_table(plain, "", source)
    reading = Reading(source, defaults, folder, compat, set())
    _check_defaults(reading)
    read = {
        node: _alias(node, table, nodes, source) or read_node(node, native_table(table, node, source), reading)
        for node, table in nodes.items()
    }
    _check_unused(reading)
    made = linked(read, source)
    entry = entry_of(made, settings.get("entry"), source, compat=compat)
    kept = {field: settings[key] for key, field in _OF_THE_GRAPH.items() if key in settings}
    graph = Graph(name, made, entry, compat=compat, folder=folder, **kept)
    check_structure(graph, source)
    return graph


def _settings(table: Any, source: Source) -> dict[str, Any]:
    """The values of `[pipeline]`."""
    if not isinstance(table, dict):
        raise source.error("", "pipeline", f"found {found(table)}, expected a table")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in PIPELINE:
            raise source.error("pipeline", key, f"unknown key{nearest(key, PIPELINE)}; known are {', '.join(PIPELINE)}")
        try:
            settings[key] = PIPELINE[key].read(value)
        except ConfigError as e:
            raise source.error("pipeline", key, e.message) from None
    return settings


def _tables_of_nodes(tables: Mapping[str, Any], name: str, source: Source) -> dict[str, dict[str, Any]]:
    """The table of each node and alias, in the file's order. Without any table the whole file may be one node."""
    nodes: dict[str, dict[str, Any]] = {}
    for node, table in tables.items():
        if isinstance(table, dict) and node not in NO_NODES:
            aliases = {k: v for k, v in table.items() if k not in NODE and _is_alias(v)}
            nodes[node] = {k: v for k, v in table.items() if k not in aliases}
            nodes |= {f"{node}.{k}": v for k, v in aliases.items()}
    if "models" in tables:
        raise source.error(
            "models",
            "",
            "this is a configuration of `penstock serve`; a pipeline has a table for each"
            " of its nodes, such as [decode]",
        )
    if "metrics" in tables:
        raise source.error("metrics", "", "is no table of a pipeline; metrics_host and metrics_port stand in [server]")
    if not nodes and ONE_NODE_KEYS & tables.keys():
        nodes = {name: {k: v for k, v in tables.items() if not isinstance(v, dict)}}
    if not nodes:
        raise source.error("", "", 'found no node; expected a table such as [decode] with backend = "DecodeMat"')
    for node in nodes:
        plain = node in tables or node == name  # an alias has a dot
        if not all(_NAME.fullmatch(part) for part in ([node] if plain else node.split(".", 1))):
            raise source.error(node, "", "cannot be a node's name; expected letters, digits, '_' and '-'")
    return nodes


def _is_alias(value: Any) -> bool:
    return isinstance(value, dict) and all(key in OF_AN_ALIAS or key in ("map", "backend") for key in value)


def _alias(name: str, table: Mapping[str, Any], nodes: Mapping[str, Any], source: Source) -> Node | None:
    """A node that stands for another, with its own place in the graph; None for other nodes."""
    of = name.rpartition(".")[0]
    if of not in nodes or not _is_alias(table):
        return None
    keys = native_table({k: v for k, v in table.items() if k != "backend"}, name, source)
    return replace(read_node(name, keys, Reading(source, {}, ".", False, set())), steps=(), alias_of=of)


def _check_defaults(reading: Reading) -> None:
    """Raises ConfigError for a key above all tables that is a node's own, or does not fit."""
    for key, value in reading.defaults.items():
        if key in ONLY_IN_NODES:
            raise reading.source.error("", key, "is a key of one node, but stands above all tables; write it in a node")
        try:
            if key in NODE:
                NODE[key].read(value)
        except ConfigError as e:
            raise reading.source.error("", key, e.message) from None


def _check_unused(reading: Reading) -> None:
    """Raises ConfigError for a key above all tables that nobody has; in TorchPipe's dialect it warns."""
    for key in reading.defaults:
        if key in reading.used or key in NODE or torchpipe_key(key) is not None:
            continue
        message = f"unknown key: no op of this file has it{nearest(key, NODE)}"
        if not reading.compat:
            raise reading.source.error("", key, message)
        reading.source.warn("", key, f"{message}; passed over")


MAX_BATCH, MAX_BATCH_COMPAT, MAX_BATCH_OF_USERS = 8, 1, 64

_DEVICE = re.compile(rf"{AUTO}|cpu|cuda(:\d{{1,2}})?")
_STEPS = {"ops", "backend"}
_AS_THEY_ARE = {
    "instances", "max_batch", "min_batch", "sizes", "bucket", "pad_to", "device", "queue", "queue_bytes",
    "run_timeout_s", "retry_split", "idempotent", "on_error", "filter", "when", "require", "next",
}  # fmt: skip
_RENAMED = {"else": "otherwise"}
_IN_SECONDS = {"wait_ms": "wait_s", "deadline_ms": "deadline_s"}
_OF_EACH = {"each": "split", "body": "body", "gather": "gather"}
_OF_EACH_TOO = {"max_fanout", "on_item_error"}


class Reading(Struct):
    """What all nodes of a file are read with. `used` gathers the defaults that some node took."""

    source: Source
    defaults: Mapping[str, Any]
    folder: str
    compat: bool
    used: set[str]


def read_node(name: str, table: Mapping[str, Any], reading: Reading) -> Node:
    """The node of a table with native keys. Raises ConfigError, which names the key."""
    keys = _with_defaults(table, reading)
    values = {key: _value(name, key, keys[key], reading.source) for key in NODE if key in keys}
    with _blaming(name, keys, table, reading.source):
        drafts = _drafts(keys, values, reading.folder)
        model = has_model(drafts)
        if model:
            _settle_model(keys, values, drafts, reading)
    for key in () if model else ONLY_WITH_A_MODEL - table.keys():
        values.pop(key, None), keys.pop(key, None)
    _check_sizes(name, values, reading.source)
    free = (keys if reading.compat else table).keys() - NODE.keys()
    with _blaming(name, keys, table, reading.source):
        steps, taken = steps_of(drafts, keys, sorted(free), reading.folder)
    if values.get("pad_to") and not model:
        raise reading.source.error(name, "pad_to", "is for what a model is given, but the node has none")
    reading.used |= taken
    for key in [key for key in table if key not in NODE and key not in taken]:
        _unknown(name, key, drafts, reading)
    _check_device(name, values, reading.source)
    values["filter"] = filter_name(values.get("filter", "swap"))
    fields = {_RENAMED.get(key, key): values[key] for key in (*_AS_THEY_ARE, *_RENAMED) if key in values}
    fields |= {_IN_SECONDS[key]: values[key] / 1000 for key in _IN_SECONDS if key in values}
    inputs = tuple(_input(name, k, v, reading.source) for k, v in values.get("inputs", {}).items())
    return Node(name=name, steps=steps, inputs=inputs, each=_each(name, values, reading.source), **fields)


def _with_defaults(table: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    said = _STEPS & table.keys()
    return {k: v for k, v in reading.defaults.items() if not (said and k in _STEPS)} | dict(table)


def _value(node: str, key: str, value: Any, source: Source) -> Any:
    try:
        return NODE[key].read(value)
    except ConfigError as e:
        raise source.error(node, key, e.message) from None


@contextmanager
def _blaming(node: str, keys: Mapping[str, Any], table: Mapping[str, Any], source: Source) -> Iterator[None]:
    """Errors within are told at the key that they are about: a parameter that they name, else where the ops stand."""
    try:
        yield
    except ConfigError as e:
        named = (key for key in keys if re.search(rf"(^|: ){re.escape(parameter_name(key))}( is| =| and)", e.message))
        key = next(named, next((key for key in _STEPS if key in table), ""))
        raise source.error(node, key, e.message) from None


def _drafts(keys: Mapping[str, Any], values: dict[str, Any], folder: str) -> list[Draft]:
    """The node's ops; a fan-out has none of its own."""
    drafts = drafts_of(keys)
    for draft in drafts:
        draft.params = rooted(draft.params, folder)
    if FAN_OUT.lower() in (draft.op.lower() for draft in drafts):
        values.setdefault("each", "data")
    if "each" in values:
        return [draft for draft in drafts if draft.op.lower() not in (FAN_OUT.lower(), "identity")]
    return drafts


def _settle_model(keys: dict[str, Any], values: dict[str, Any], drafts: list[Draft], reading: Reading) -> None:
    """A model's node has a `max_batch`, whatever the dialect leaves unsaid, and goes where it can."""
    if "max_batch" not in values:
        usual = MAX_BATCH
        if reading.compat:  # there an op of a user says itself how many it takes
            usual = MAX_BATCH_COMPAT if takes_size(drafts) else MAX_BATCH_OF_USERS
        most = max(values["sizes"]) if values.get("sizes") else usual
        keys["max_batch"] = values["max_batch"] = max(most, values.get("min_batch", 1))
    if takes_size(drafts):
        values.setdefault("device", AUTO)


def _check_sizes(node: str, values: Mapping[str, Any], source: Source) -> None:
    least, most = values.get("min_batch", 1), values.get("max_batch")
    if most is not None and least > most:
        raise source.error(node, "min_batch", f"found {least}, expected at most max_batch, which is {most}")
    for key in ("sizes", "pad_to"):
        sizes = values.get(key, ())
        if list(sizes) != sorted(set(sizes)):
            raise source.error(node, key, f"found {', '.join(map(str, sizes))}, expected sizes from small to large")
    sizes = values.get("sizes", ())
    if sizes and most is not None and sizes[-1] < most:
        raise source.error(node, "sizes", f"the largest is {sizes[-1]}, expected at least max_batch, which is {most}")


def _check_device(node: str, values: dict[str, Any], source: Source) -> None:
    device = values.get("device", "cpu")
    if not _DEVICE.fullmatch(device):
        raise source.error(node, "device", f"found {found(device)}, expected auto, cpu, cuda, or one such as cuda:0")
    values["device"] = "cuda:0" if device == "cuda" else device


def _input(node: str, name: str, value: Any, source: Source) -> Input:
    """`"prep.image"`: the field image of prep; `"prep"`: its result. Nodes with dots are told apart by `link`."""
    if not isinstance(value, str) or not value.strip("."):
        raise source.error(node, "inputs", f'{name}: found {found(value)}, expected a field such as "prep.result"')
    producer, dot, field = value.rpartition(".")
    return Input(producer, field, name) if dot else Input(value, "result", name)


def _each(node: str, values: Mapping[str, Any], source: Source) -> Each | None:
    if "each" not in values:
        for key in (*_OF_EACH, *_OF_EACH_TOO):
            if key in values:
                raise source.error(node, key, "is part of a fan-out, but found no 'each': the field to split")
        return None
    if "body" not in values:
        raise source.error(node, "each", "is a fan-out, but found no 'body' (TorchPipe's jump): where its items begin")
    given = {_OF_EACH[key]: values[key] for key in _OF_EACH if key in values}
    return Each(**{"gather": ("result",), **given, **{key: values[key] for key in _OF_EACH_TOO if key in values}})


def _unknown(node: str, key: str, drafts: list[Draft], reading: Reading) -> None:
    """Raises ConfigError for a key that nobody takes, or warns of it in TorchPipe's dialect."""
    of_ops = [name for draft in drafts for name in parameters_of(op_class(draft.op, draft.params))]
    known = [*NODE, *of_ops, *(k.name for k in torchpipe_keys() if k.state in ("used", "held"))]
    ops = ", ".join(dict.fromkeys(draft.op for draft in drafts)) or "none"
    hint = nearest(key, known) or f" (ops of this node: {ops})"
    if not reading.compat:
        raise reading.source.error(node, key, f"unknown key: neither the node nor its ops have it{hint}")
    reading.source.warn(node, key, f"unknown key, passed over{hint}")
