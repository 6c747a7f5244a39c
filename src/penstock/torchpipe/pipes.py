"""pipe: a pipeline that is called with dicts and fills them in place."""

from __future__ import annotations

import logging
import os
import time
import weakref
from pathlib import Path
from typing import Any

from penstock.core import os_threads
from penstock.errors import ConfigError, DecodeError, PenstockError, describe, nearest
from penstock.pipeline.check import check
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph, read_tables
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.notation import NODE
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, EVENT, NODE_NAME, RESULT, Fields
from penstock.pipeline.traversal import ItemOutcome
from penstock.torchpipe import boundary

log = logging.getLogger("penstock.torchpipe")

EXCEPTION = "exception"
"""The field with the error of an item that failed while its call succeeded."""

ANY_NUMBER = 2**32 - 1
WARN_AGAIN_S = 60.0

ONLY = "pipe"  # the name of a pipeline, and of its node, without one
GLOBAL = "global"  # the table with the defaults of all nodes

Item = dict[str, Any]


class pipe:
    """A pipeline in this process: `pipe("x.toml")`, `pipe(parse_toml("x.toml"))`, `pipe({"backend": ...})`.

    Threads, greenlets and executors of event loops may call it concurrently. `close()` or `del` ends it. Raises
    ConfigError, LoadFailed. All its errors are also RuntimeErrors.
    """

    def __init__(self, config: str | os.PathLike[str] | dict[str, Any]) -> None:
        self.config = config
        try:
            self._graph = graph_of(config)
            self._pipeline = LocalPipeline(self._graph)
        except PenstockError as e:
            raise boundary.as_runtime_error(e) from None
        self._warned_s = -WARN_AGAIN_S
        self._mats = {name: _gives_mat(self._graph, name) for name in self._graph.nodes}
        # in a thread of its own, because any thread may drop the last reference to a pipe at any point
        close = self._pipeline.close
        self._finalizer = weakref.finalize(self, os_threads.start_thread, close, name="penstock-close")
        self._finalizer.atexit = False  # the pipeline closes itself at exit

    def __call__(self, data: Item | list[Item] | None = None, /, **fields: Any) -> Any:
        """Writes `result` and other new fields into each dict. Without a dict, returns the result.

        The call does not wait for a dict with an Event as `event`; the event reports its error. A dict whose bytes
        cannot be decoded receives its error as `exception` instead of a `result`, and so does each failed dict of a
        list. Any other failure of a single dict raises.
        """
        if data is None and isinstance(fields.get(DATA), dict | list):
            data = fields.pop(DATA)
        if data is None:
            self._one(fields)
            return fields.get(RESULT)
        many = data if isinstance(data, list) else [data]
        for item in many:
            if not isinstance(item, dict):
                raise TypeError(f"pipe was called with a {type(item).__name__}, expected a dict, or a list of dicts")
            item.update(fields)
        if isinstance(data, list):
            self._many(many)
        else:
            self._one(data)
        return None

    def max(self) -> int:
        """The most items of one call: any number."""
        return ANY_NUMBER

    def min(self) -> int:
        """The fewest items of one call."""
        return 1

    def close(self, drain_s: float = 30.0) -> None:
        """Answers accepted items, and stops the nodes. Idempotent."""
        self._finalizer.detach()
        self._pipeline.close(drain_s)

    def __enter__(self) -> pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- calls

    def _one(self, item: Item) -> None:
        if (event := _event_of(item)) is not None:
            self._begin(item, event)
            return
        try:
            fields, node = self._prepare(item)
            outcome = self._pipeline.infer(fields, node)
        except PenstockError as e:
            raise boundary.as_runtime_error(e) from None
        if outcome.error is not None and not isinstance(outcome.error, DecodeError):
            raise boundary.as_runtime_error(outcome.error) from None
        self._fill(item, fields, outcome)

    def _many(self, data: list[Item]) -> None:
        """Begins all items, then waits for them."""
        events = _events_of(data)
        waiting = []
        for item, event in zip(data, events, strict=True):
            if event is not None:
                self._begin(item, event)
                continue
            try:
                waiting.append((item, *self._prepare(item)))
            except PenstockError as e:
                self._fail(item, e)
        try:
            outcomes = self._pipeline.infer_many([(fields, node) for _, fields, node in waiting])
        except PenstockError as e:  # the pipeline is closed
            raise boundary.as_runtime_error(e) from None
        for (item, fields, _), outcome in zip(waiting, outcomes, strict=True):
            self._fill(item, fields, outcome)

    def _begin(self, item: Item, event: boundary.Event) -> None:
        """Begins an item without waiting for it. The event is settled when the dict is filled."""

        def end(outcome: ItemOutcome) -> None:
            with boundary.answering():
                self._fill(item, fields, outcome)
                error = None if isinstance(outcome.error, DecodeError) else item.get(EXCEPTION)
                event.settle(error)

        fields: Fields = {}
        try:
            fields, node = self._prepare(item)
            self._pipeline.start(fields, end, node)
        except PenstockError as e:
            self._fail(item, e)
            event.settle(item[EXCEPTION])

    def _prepare(self, item: Item) -> tuple[Fields, str | None]:
        """The fields of an item, and its first node (None: the entry). Removes the results of an earlier call.

        Raises NoData, NoSuchNode.
        """
        item.pop(RESULT, None)
        item.pop(EXCEPTION, None)
        if DATA not in item:
            names = ", ".join(map(repr, item)) or "nothing"
            raise boundary.NoData(f"found {names}, expected '{DATA}' among the fields of an item")
        fields = {name: boundary.to_array(value) for name, value in item.items() if name != EVENT}
        node, nodes = fields.get(NODE_NAME), self._graph.nodes
        if len(nodes) == 1:
            return fields, None  # whatever its name
        if isinstance(node, str) and node not in nodes:
            node = node.removeprefix("node.")  # TorchPipe registers the node a as node.a
        if node is not None and node not in nodes:
            known = ", ".join(nodes)
            raise boundary.NoSuchNode(
                f"{NODE_NAME} is {fields[NODE_NAME]!r}, expected one of {known}{nearest(str(node), nodes)}"
            )
        return fields, node

    def _fill(self, item: Item, fields: Fields, outcome: ItemOutcome) -> None:
        """Writes the new fields into the caller's dict, or only the error of a failed item."""
        if outcome.error is not None:
            self._fail(item, outcome.error)
            return
        for name, value in outcome.fields.items():
            if name == RESULT:
                item[RESULT] = value if self._mats.get(outcome.node) else boundary.to_tensor(value)
            elif name not in (DATA, NODE_NAME) and fields.get(name) is not value:
                item[name] = boundary.to_tensor(value) if boundary.is_rows(value) else value

    def _fail(self, item: Item, error: PenstockError) -> None:
        """Writes an item's error into its dict. Also warns once a minute, for programs that only look for `result`."""
        item[EXCEPTION] = boundary.as_runtime_error(error)
        now = time.monotonic()
        level = logging.DEBUG if now - self._warned_s < WARN_AGAIN_S else logging.WARNING
        if level == logging.WARNING:
            self._warned_s = now
        log.log(level, "item_failed error=%s: it has no result, but its error as %r", describe(error), EXCEPTION)


class Interpreter:
    """The class under TorchPipe's pipe: `init(config)` once, then calls with a dict or a list of dicts."""

    def __init__(self, config: str | os.PathLike[str] | dict[str, Any] | None = None) -> None:
        self._pipe = None if config is None else pipe(config)

    def init(self, config: str | os.PathLike[str] | dict[str, Any]) -> bool:
        """Loads the pipeline, and returns True. Raises ConfigError, LoadFailed, which are also RuntimeErrors."""
        self._pipe = pipe(config)
        return True

    def forward(self, data: Item | list[Item]) -> None:
        """As a call of `pipe`. Raises RuntimeError before `init`."""
        self._loaded()(data)

    __call__ = forward

    def max(self) -> int:
        """The most items of one call."""
        return self._loaded().max()

    def min(self) -> int:
        """The fewest items of one call."""
        return self._loaded().min()

    def _loaded(self) -> pipe:
        if self._pipe is None:
            raise RuntimeError("the interpreter has no pipeline yet: call init(config) first")
        return self._pipe


def _event_of(item: Item) -> boundary.Event | None:
    """The event of an item, which counts the item. Raises TypeError, ValueError."""
    event = item.get(EVENT)
    if event is None:
        return None
    if not isinstance(event, boundary.Event):
        raise TypeError(f"found a {type(event).__name__} as '{EVENT}', expected an Event")
    event.begin()
    return event


def _events_of(data: list[Item]) -> list[boundary.Event | None]:
    """The events of a list of items. Raises TypeError, ValueError, which the counted events also report."""
    events: list[boundary.Event | None] = []
    try:
        for item in data:
            events.append(_event_of(item))
    except (TypeError, ValueError) as e:
        for event in filter(None, events):
            event.settle(e)
        raise
    return events


def _gives_mat(graph: Graph, name: str) -> bool:
    """Whether a node's results are mats, which TorchPipe also returns as arrays."""
    seen = {name}
    while True:
        for step in reversed(graph.nodes[name].steps):
            if (gives := catalog.find(step.op).gives) != "any":
                return gives == "mat"
        before = [p for p in graph.producers(name) if p not in seen]
        if not before:
            return False
        name = before[0]
        seen.add(name)


# ---- configurations


def parse_toml(path_toml: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a file for `pipe`, to be changed first: texts by node and key, with defaults in `global`.

    An alias `[rec.2]` is the table "rec.2". Arrays and inline tables stay unchanged. Raises ConfigError.
    """
    tables = read_tables(Path(path_toml))
    top = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    nodes: dict[str, dict[str, Any]] = {}
    for node, table in tables.items():
        if isinstance(table, dict):
            inner = {key for key, value in table.items() if isinstance(value, dict) and key not in NODE}
            nodes[node] = {key: value for key, value in table.items() if key not in inner}
            nodes |= {f"{node}.{key}": table[key] for key in table if key in inner}
    nodes[GLOBAL] = {**top, **nodes.get(GLOBAL, {})}
    return {name: {key: _text(value) for key, value in table.items()} for name, table in nodes.items()}


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


def _with_aliases(config: dict[str, Any]) -> dict[str, Any]:
    """The tables, with "rec.2" as the table "2" in "rec", as TOML reads it."""
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in config.items()}
    for name in config:
        node, dot, alias = name.partition(".")
        if dot and isinstance(tables.get(node), dict):
            tables[node] = (tables[node] or {"backend": "Identity"}) | {alias: tables.pop(name)}
    return tables


def graph_of(config: str | os.PathLike[str] | dict[str, Any]) -> Graph:
    """The graph of a pipe's configuration. Relative paths start at the working directory, as in TorchPipe.

    Raises ConfigError.
    """
    if isinstance(config, str | os.PathLike):
        name, tables = Path(config).stem, read_tables(Path(config))
    elif isinstance(config, dict) and config:
        single = not any(isinstance(value, dict) for value in config.values())
        name, tables = ONLY, {ONLY: config} if single else _with_aliases(config)
    else:
        raise ConfigError(f"pipe received {config!r}, expected a path to a TOML file, or a dict of its tables or keys")
    graph = parse_graph(tables, name=name, folder=os.getcwd(), compat=True)
    check(graph)
    return graph
