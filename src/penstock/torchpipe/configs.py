"""What `pipe` is made of: a TOML file, its tables, or the keys of a single node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.pipeline.check import check
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph, read_tables
from penstock.torchpipe.registry import is_filter

ONLY = "pipe"
"""The name of a pipeline, and of its node, that was given without one."""

GLOBAL = "global"
"""The table that `parse_toml` and programs keep the defaults of all nodes in."""


def parse_toml(path_toml: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a file as `pipe` takes them, to be changed before: texts by key, by node; defaults in `global`.

    Arrays and tables within tables stay what they are. Raises ConfigError.
    """
    tables = read_tables(Path(path_toml))
    top = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    nodes = {key: value for key, value in tables.items() if isinstance(value, dict)}
    nodes[GLOBAL] = {**top, **nodes.get(GLOBAL, {})}
    return {name: {key: _text(value) for key, value in table.items()} for name, table in nodes.items()}


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


def graph_of(config: str | os.PathLike[str] | dict[str, Any]) -> Graph:
    """The graph of what a pipe is made of. Relative paths start from the working directory, as TorchPipe's do.

    Raises ConfigError.
    """
    if isinstance(config, str | os.PathLike):
        name, tables = Path(config).stem, read_tables(Path(config))
    elif isinstance(config, dict) and config:
        alone = not any(isinstance(value, dict) for value in config.values())
        name, tables = ONLY, {ONLY: config} if alone else config
    else:
        raise ConfigError(f"pipe was given {config!r}, expected a path to a TOML file, or a dict of its tables or keys")
    graph = parse_graph(tables, name=name, folder=os.getcwd(), compat=True)
    for node in graph.nodes.values():
        for guard in (node.filter, *(step.filter for step in node.steps)):
            if is_filter(guard):
                raise ConfigError(
                    f"node '{node.name}' names the filter '{guard}' of this program; only 'swap' and 'or' are run yet:"
                    " let a backend leave 'result' out, or set it, where the filter decided"
                )
    check(graph)
    return graph
