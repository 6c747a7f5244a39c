"""pipe: a pipeline that is called with dicts, which it fills in place."""

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
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, EVENT, NODE_NAME, RESULT, Fields
from penstock.pipeline.traversal import ItemOutcome
from penstock.torchpipe.boundary import NoData, NoSuchNode, as_runtime_error, is_rows, to_array, to_tensor
from penstock.torchpipe.events import Event, answering
from penstock.torchpipe.registry import is_filter

log = logging.getLogger("penstock.compat")

EXCEPTION = "exception"
"""The field of an item that failed without the call failing: its error."""

ANY_NUMBER = 2**32 - 1
WARN_AGAIN_S = 60.0

Given = dict[str, Any]


class pipe:
    """A pipeline in this process: `pipe("x.toml")`, `pipe(parse_toml("x.toml"))`, `pipe({"backend": ...})`.

    Threads, greenlets and event loops' executors call it at once; that is what it is for. `close()` or `del` ends it.
    Raises ConfigError, LoadFailed; like all its errors they are RuntimeErrors too.
    """

    def __init__(self, config: str | os.PathLike[str] | dict[str, Any]) -> None:
        self.config = config
        try:
            self._graph = graph_of(config)
            self._pipeline = LocalPipeline(self._graph)
        except PenstockError as e:
            raise as_runtime_error(e) from None
        self._warned_s = -WARN_AGAIN_S
        self._mats = {name: _gives_mat(self._graph, name) for name in self._graph.nodes}
        self._finalizer = weakref.finalize(self, _close_aside, self._pipeline)
        self._finalizer.atexit = False  # it closes itself then

    def __call__(self, data: Given | list[Given] | None = None, /, **fields: Any) -> Any:
        """Fills each dict: `result` and other fields that the nodes wrote; without a dict, returns the result.

        A dict with an Event as `event` is not waited for, and its failure is the event's to tell. One whose bytes
        cannot be decoded gets no `result`, but its error as `exception`, and so does each that fails in a list; any
        other failure of a single dict raises.
        """
        if data is None and isinstance(fields.get(DATA), dict | list):
            data = fields.pop(DATA)
        if data is None:
            self._one(fields)
            return fields.get(RESULT)
        many = data if isinstance(data, list) else [data]
        for given in many:
            if not isinstance(given, dict):
                raise TypeError(f"pipe was called with a {type(given).__name__}, expected a dict, or a list of dicts")
            given.update(fields)
        if isinstance(data, list):
            self._many(many)
        else:
            self._one(data)
        return None

    def max(self) -> int:
        """The most items one call takes: any number."""
        return ANY_NUMBER

    def min(self) -> int:
        """The fewest items one call takes."""
        return 1

    def close(self, drain_s: float = 30.0) -> None:
        """Answers what was begun, and ends the nodes. Idempotent."""
        self._finalizer.detach()
        self._pipeline.close(drain_s)

    def __enter__(self) -> pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- calls

    def _one(self, given: Given) -> None:
        if (event := _event_of(given)) is not None:
            self._begin(given, event)
            return
        try:
            fields, node = self._taken(given)
            outcome = self._pipeline.infer(fields, node)
        except PenstockError as e:
            raise as_runtime_error(e) from None
        if outcome.error is not None and not isinstance(outcome.error, DecodeError):
            raise as_runtime_error(outcome.error) from None
        self._fill(given, fields, outcome)

    def _many(self, data: list[Given]) -> None:
        """Begins all before it waits for any."""
        events = _events_of(data)
        waited = []
        for given, event in zip(data, events, strict=True):
            if event is not None:
                self._begin(given, event)
                continue
            try:
                waited.append((given, *self._taken(given)))
            except PenstockError as e:
                self._fail(given, e)
        try:
            outcomes = self._pipeline.infer_many([(fields, node) for _, fields, node in waited])
        except PenstockError as e:  # it is closed
            raise as_runtime_error(e) from None
        for (given, fields, _), outcome in zip(waited, outcomes, strict=True):
            self._fill(given, fields, outcome)

    def _begin(self, given: Given, event: Event) -> None:
        """Begins an item that nobody waits for. Its event is told when its dict is filled."""

        def end(outcome: ItemOutcome) -> None:
            with answering():
                self._fill(given, fields, outcome)
                error = None if isinstance(outcome.error, DecodeError) else given.get(EXCEPTION)
                event.settle(error)

        fields: Fields = {}
        try:
            fields, node = self._taken(given)
            self._pipeline.start(fields, end, node)
        except PenstockError as e:
            self._fail(given, e)
            event.settle(given[EXCEPTION])

    def _taken(self, given: Given) -> tuple[Fields, str | None]:
        """The fields of an item, and the node it begins at (None: the entry). Removes what a call before left.

        Raises NoData, NoSuchNode.
        """
        given.pop(RESULT, None)
        given.pop(EXCEPTION, None)
        if DATA not in given:
            names = ", ".join(map(repr, given)) or "nothing"
            raise NoData(f"found {names}, expected '{DATA}' among the fields of an item")
        fields = {name: to_array(value) for name, value in given.items() if name != EVENT}
        node, nodes = fields.get(NODE_NAME), self._graph.nodes
        if len(nodes) == 1:
            return fields, None  # whatever it is called
        if node is not None and node not in nodes:
            known = ", ".join(nodes)
            raise NoSuchNode(f"{NODE_NAME} is {node!r}, expected one of {known}{nearest(str(node), nodes)}")
        return fields, node

    def _fill(self, given: Given, fields: Fields, outcome: ItemOutcome) -> None:
        """Writes into the caller's dict what the nodes wrote; or, of an item that failed, its error and no more."""
        if outcome.error is not None:
            self._fail(given, outcome.error)
            return
        for name, value in outcome.fields.items():
            if name == RESULT:
                given[RESULT] = value if self._mats.get(outcome.node) else to_tensor(value)
            elif name not in (DATA, NODE_NAME) and fields.get(name) is not value:
                given[name] = to_tensor(value) if is_rows(value) else value

    def _fail(self, given: Given, error: PenstockError) -> None:
        """Puts an item's error into its dict; the log tells programs that only look for `result`, once a minute."""
        given[EXCEPTION] = as_runtime_error(error)
        now = time.monotonic()
        level = logging.DEBUG if now - self._warned_s < WARN_AGAIN_S else logging.WARNING
        if level == logging.WARNING:
            self._warned_s = now
        log.log(level, "item_failed error=%s: it has no result, but its error as %r", describe(error), EXCEPTION)


def _event_of(given: Given) -> Event | None:
    """The event of an item, of which it is one. Raises TypeError, ValueError."""
    event = given.get(EVENT)
    if event is None:
        return None
    if not isinstance(event, Event):
        raise TypeError(f"found a {type(event).__name__} as '{EVENT}', expected an Event")
    event.begin()
    return event


def _events_of(data: list[Given]) -> list[Event | None]:
    """The events of the items of a list. Raises TypeError, ValueError; then those that were taken tell it, too."""
    events: list[Event | None] = []
    try:
        for given in data:
            events.append(_event_of(given))
    except (TypeError, ValueError) as e:
        for event in filter(None, events):
            event.settle(e)
        raise
    return events


def _gives_mat(graph: Graph, name: str) -> bool:
    """Whether the results of a node are mats, which TorchPipe gives as arrays, too."""
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


def _close_aside(pipeline: LocalPipeline) -> None:
    """Closes it on a thread of its own: what drops the last reference to a pipe may be any thread, at any point."""
    os_threads.start_thread(pipeline.close, name="penstock-close")


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
