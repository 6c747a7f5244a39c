"""A Graph from TOML: `load_graph` from a file, `parse_graph` from its tables. Native keys and TorchPipe's alike."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from penstock.config import toml
from penstock.config.words import found
from penstock.errors import ConfigError, nearest
from penstock.pipeline.dialect import native_table
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.keys import NODE, OF_AN_ALIAS, ONLY_IN_NODES, PIPELINE, RESERVED, torchpipe_key
from penstock.pipeline.native import Reading, read_node
from penstock.pipeline.source import Source
from penstock.pipeline.structure import check_structure, entry_of, linked

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
_ALONE = {"backend", "ops", "model"}  # one of these above all tables, and no node: the file is one node
_OF_THE_GRAPH = {"in_flight": "in_flight", "trace": "trace", "inputs": "takes", "outputs": "answers"}
_GLOBAL = "global"  # where TorchPipe's parse_toml puts what stands above all tables
NO_NODES = (*RESERVED, _GLOBAL)  # names that no node may have


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


def is_pipeline(tables: Mapping[str, Any]) -> bool:
    """Whether tables tell a pipeline, and not a configuration of `penstock serve`."""
    nodes = any(isinstance(value, dict) and name not in RESERVED for name, value in tables.items())
    return "models" not in tables and (nodes or "pipeline" in tables or bool(_ALONE & tables.keys()))


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
    if not nodes and _ALONE & tables.keys():
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
