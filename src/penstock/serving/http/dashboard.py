"""The dashboard: a page on the metrics listener that shows what the server does, as it happens."""

# The page is static, and reads one stream of server-sent events: first all that it needs, then once a second what
# changed. Everything is encoded once for all viewers. A viewer that stops reading is dropped by its connection like the
# reader of any stream, and there are at most VIEWERS.
# Without viewers, a second costs one reading of the models. A browser without scripts gets a table.

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock._version import __version__
from penstock.core.contracts import Backend, ModelSnapshot, ServerSnapshot
from penstock.core.readings import resident_bytes
from penstock.errors import QueueFull
from penstock.serving.http.responses import SSE, sse_event
from penstock.serving.observe.history import History, Key, Second, Totals
from penstock.serving.observe.verdict import LOOKED_S, verdict
from penstock.serving.protocols.route import PAGE_HEADERS, Route, Template
from penstock.types import ItemResult, Sink

log = logging.getLogger("penstock.serving")

VIEWERS: Final = 100
SHOWN_S: Final = 60  # of the small charts
SHOWN_EVENTS: Final = 50
MEMORY_EVERY: Final = 5  # seconds: reading it costs more than all else
MODELS: Final = 500  # in one view, the busiest first
_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {"dashboard.js": "text/javascript", "dashboard.css": "text/css"}
_HTML: Final = "text/html; charset=utf-8"


class Dashboard:
    """The views of one server. `read` returns its state, and `totals` its counters by model.

    `run` ticks once a second until it is cancelled; `close` ends the streams of all viewers.
    """

    def __init__(
        self,
        history: History,
        read: Callable[[], ServerSnapshot],
        totals: Callable[[], dict[Key, Totals]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history, self._read, self._totals, self._clock = history, read, totals, clock
        self._began_s = time.time()
        self._viewers: dict[object, Sink] = {}
        self._ticked_s = clock()
        self._ticks = 0
        self._sent_events = 0
        self._snapshot = ServerSnapshot()
        self._memory: dict[int, int] = {}

    # ---- seconds

    async def run(self) -> None:
        """Ticks once a second."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self.tick()
            except Exception:
                log.exception("event=bug where=dashboard consequence=second_not_shown")

    def tick(self) -> None:
        """Adds the last second to the history, and sends it to the viewers."""
        now = self._clock()
        self._snapshot = snapshot = self._read()
        self._history.tick(snapshot, self._totals(), max(now - self._ticked_s, 1e-3))
        self._ticked_s = now
        if self._viewers:
            if self._ticks % MEMORY_EVERY == 0:
                self._read_memory()
            self._ticks += 1
            count = min(self._history.event_count - self._sent_events, SHOWN_EVENTS)
            self._publish(self._event(self._view(seconds=1, events=count)))
        self._sent_events = self._history.event_count

    def _read_memory(self) -> None:
        self._memory = {pid: resident_bytes(pid) for m in self._snapshot.models for pid in m.pids.values()}

    def _publish(self, event: bytes) -> None:
        part = ItemResult(event, SSE, final=False)
        for sink in list(self._viewers.values()):
            sink(part)

    # ---- views

    def _view(self, seconds: int, events: int) -> dict[str, Any]:
        """What the page shows, with the last `seconds` of each model and the last `events`."""
        models = self._snapshot.models
        last = {m.key: self._history.last(m.key, LOOKED_S) for m in models}
        found = verdict(models, last)
        if len(models) > MODELS:
            models = sorted(models, key=lambda m: -self._now(m.key).requests)[:MODELS]
        recent = list(self._history.events)[len(self._history.events) - events :]
        return {
            "now_s": time.time(),
            "verdict": found,
            "models": [self._model(m, seconds) for m in sorted(models, key=lambda m: m.key)],
            "model_count": len(self._snapshot.models),
            "events": [event._asdict() for event in recent],
            "connections": self._snapshot.http.connections if self._snapshot.http else 0,
        }

    def _now(self, key: Key) -> Second:
        return self._history.now.get(key, Second())

    def _model(self, model: ModelSnapshot, seconds: int) -> dict[str, Any]:
        status, key = model.status, model.key
        rows = self._history.last(key, seconds) if seconds > 1 else [self._now(key)]
        return {
            "name": status.name,
            "version": status.version,
            "state": status.state,
            "up": status.ready_instances,
            "instances": status.instances,
            "devices": sorted({*status.devices, *status.model_devices}),
            "batch": status.model_batch_size or status.max_batch_size,
            "slo_s": model.slo_s,
            "memory_bytes": sum(self._memory.get(pid, 0) for pid in model.pids.values()),
            "seconds": [[round(value, 5) for value in row] for row in rows],
        }

    def _event(self, view: dict[str, Any]) -> bytes:
        return sse_event(msgspec.json.encode(view))

    # ---- viewers

    def subscribe(self, sink: Sink) -> _Viewer:
        """Sends the whole view now, and each second from now on. Raises QueueFull for too many viewers."""
        if len(self._viewers) >= VIEWERS:
            raise QueueFull(f"the dashboard has {VIEWERS} viewers, and takes no more", retry_after_s=10.0)
        viewer = _Viewer(self._viewers)
        self._snapshot = self._read()
        self._read_memory()
        view = self._view(SHOWN_S, SHOWN_EVENTS)
        view |= {"penstock": __version__, "began_s": self._began_s, "fields": Second._fields}
        sink(ItemResult(self._event(view), SSE, final=False))
        self._viewers[viewer] = sink
        return viewer

    def close(self) -> None:
        """Ends the streams."""
        viewers, self._viewers = list(self._viewers.values()), {}
        for sink in viewers:
            sink(ItemResult(b"", SSE))

    # ---- routes

    def routes(self, guarded: Callable[[], bool]) -> tuple[Template, ...]:
        """The page at `/`, its files, and the stream. `guarded`: the listener requires a token, which the page asks."""

        def page(backend: Backend, route: Route) -> ItemResult:
            table = "" if guarded() else self._table()
            body = _file("dashboard.html").replace(b"<!-- models -->", table.encode())
            return ItemResult(body, _HTML, headers=[*PAGE_HEADERS, ("cache-control", "no-store")])

        def file(backend: Backend, route: Route) -> ItemResult:
            name = route.template.path.rpartition("/")[2]
            return ItemResult(_file(name), _TYPES[name], headers=[*PAGE_HEADERS, ("cache-control", "no-cache")])

        files = (Template(f"/dashboard/{name}", "A file of the dashboard", answer=file, open=True) for name in _TYPES)
        return (
            Template("/", "The dashboard", answer=page, open=True),
            *files,
            Template(
                "/dashboard/events",
                "What the dashboard shows, as server-sent events once a second",
                subscribe=self.subscribe,
                own_events=True,
            ),
        )

    def _table(self) -> str:
        """The models as a table in HTML, for browsers without scripts."""
        self._snapshot = self._read()
        last = {m.key: self._history.last(m.key, LOOKED_S) for m in self._snapshot.models}
        heads = ("Model", "Version", "State", "Instances", "Requests/s", "p99 ms", "Queue")
        lines = ["".join(f"<th>{head}</th>" for head in heads)]
        for model in self._snapshot.models[:MODELS]:
            status, now = model.status, self._now(model.key)
            cells = (status.name, status.version, status.state, f"{status.ready_instances} of {status.instances}")
            numbers = (f"{now.requests:.0f}", f"{now.p99_s * 1000:.1f}", str(status.queue))
            lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in (*cells, *numbers)))
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<p>{html.escape(verdict(self._snapshot.models, last).text)}</p><table>{rows}</table>"


class _Viewer:
    """The ticket of a viewer."""

    def __init__(self, viewers: dict[object, Sink]) -> None:
        self._viewers = viewers

    def cancel(self) -> None:
        self._viewers.pop(self, None)


@cache
def _file(name: str) -> bytes:
    return (_STATIC / name).read_bytes()
