"""The dashboard: a page on the metrics listener that shows what the server does, as it happens."""

# The page is static, and reads one stream of server-sent events: first all that it needs, then once a second what
# changed. A stream shows all models, or one of them in detail. Everything is encoded once for all viewers of a stream.
# A viewer that stops reading is dropped by its connection like the reader of any stream, and there are at most VIEWERS.
# Without viewers, a second costs one reading of the models. A browser without scripts gets a table.

from __future__ import annotations

import asyncio
import html
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from penstock._version import __version__
from penstock.core.contracts import Backend, ModelSnapshot, ServerSnapshot
from penstock.core.readings import resident_bytes
from penstock.errors import BadRequest, ModelNotFound, QueueFull
from penstock.runs import running
from penstock.serving.http.responses import SSE, sse_event
from penstock.serving.observe.batches import batches
from penstock.serving.observe.causes import Effect, Finding, Scenario, findings
from penstock.serving.observe.history import KEPT, OVERVIEW, STEP, Event, History, Key, Second, Totals
from penstock.serving.observe.readings import Machine, Readings, Work
from penstock.serving.observe.recorders import BatchReport
from penstock.serving.observe.system import MachineReader
from penstock.serving.observe.verdict import LOOKED_S, Verdict, verdict
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.route import PAGE_HEADERS, HttpRequest, Route, Template, methods_route
from penstock.types import ItemResult, Sink

log = logging.getLogger("penstock.serving")

VIEWERS: Final = 100
SHOWN_S: Final = 60  # of the small charts
EFFECTS: Final = 200  # kept
FRESH_S: Final = 30.0  # for which a simulated effect is right: a choice
MEMORY_EVERY: Final = 5  # seconds: reading it costs more than all else
MODELS: Final = 500  # in one view, the busiest first
_STATIC: Final = Path(__file__).parent / "static"
_SCRIPTS: Final = ("uplot.js", "charts.js", "model.js", "pipeline.js", "actions.js", "dashboard.js")
_TYPES: Final = dict.fromkeys(_SCRIPTS, "text/javascript") | {"dashboard.css": "text/css"}
_HTML: Final = "text/html; charset=utf-8"
_STREAMS: Final = {
    "": "What the dashboard shows, as server-sent events once a second",
    "/{model}/{version}": "The same for one model version, in detail",
}
_COST: Final = ("a_s", "b_s", "ready", "fitted", "upper_ratio", "points", "sizes_s", "max_batch_size", "ceiling")


class Dashboard:
    """The views of one server. `read` returns its state, `totals` and `work` its counters by model, `newest` the last
    batches of a model version, the newest first, `pipeline` the graph and the metrics of its nodes (None for other
    models), and `broker` the seconds of the last write to a broker. `simulate` takes up to a second and runs on another
    thread; without it the gain of a change is estimated.

    `run` ticks once a second until it is cancelled; `close` ends the streams of all viewers.
    """

    def __init__(
        self,
        history: History,
        read: Callable[[], ServerSnapshot],
        totals: Callable[[], dict[Key, Totals]],
        newest: Callable[[str, str], list[BatchReport]] = lambda model, version: [],
        work: Callable[[], Mapping[Key, Work]] = dict,
        pipeline: Callable[[str, str], dict[str, Any] | None] = lambda model, version: None,
        clock: Callable[[], float] = time.monotonic,
        broker: Callable[[], float] = float,
        simulate: Callable[[Scenario], Effect] | None = None,
    ) -> None:
        self._history, self._read, self._newest, self._clock = history, read, newest, clock
        self._pipeline = pipeline
        self._manages = False
        self._simulate = simulate
        self._effects: dict[tuple[Key, int, int], tuple[float, Effect]] = {}  # by instances and batch limit
        self._simulating = asyncio.Lock()
        self._asking = 0
        self._read_totals, self._totals = totals, dict[Key, Totals]()
        self._work, self._broker, self._readings = work, broker, Readings()
        self._machine: Machine | None = None  # read while somebody looks
        self._began_s = time.time()
        self._viewers: dict[_Viewer, Sink] = {}
        self._ticked_s = clock()
        self._ticks = 0
        self._sent_events = 0
        self._snapshot = ServerSnapshot()
        self._memory: dict[int, int] = {}

    # ---- seconds

    async def run(self) -> None:
        """Ticks once a second."""
        machine = MachineReader()
        while True:
            await asyncio.sleep(1.0)
            try:
                self._machine = await self._read_machine(machine) if self._viewers else None
                self.tick()
                if self._viewers:
                    await self._simulate_findings()
            except Exception:
                log.exception("event=bug where=dashboard consequence=second_not_shown")

    async def _simulate_findings(self) -> None:
        """Simulates one of the found changes."""
        for found in findings(self._readings.read()):
            if found.scenario is not None and self._known((found.model, found.version), found.scenario)[0] <= 0:
                await self._effect((found.model, found.version), found.scenario)
                return

    def _known(self, key: Key, scenario: Scenario) -> tuple[float, Effect | None]:
        """(seconds for which the effect of a change is still right, the effect that was simulated last)."""
        until_s, effect = self._effects.get((key, scenario.then.instances, scenario.then.max_batch_size), (0.0, None))
        return until_s - self._clock() if effect else 0.0, effect

    async def _effect(self, key: Key, scenario: Scenario) -> Effect | None:
        """What a change brings, None if it cannot be simulated. One simulation runs at a time."""
        if self._simulate is None:
            return None
        async with self._simulating:
            if self._known(key, scenario)[0] <= 0:
                effect = await asyncio.get_running_loop().run_in_executor(None, self._simulate, scenario)
                place = (key, scenario.then.instances, scenario.then.max_batch_size)
                self._effects.pop(place, None)
                self._effects[place] = self._clock() + FRESH_S, effect
                if len(self._effects) > EFFECTS:
                    del self._effects[next(iter(self._effects))]
            return self._known(key, scenario)[1]

    async def _show_effect(self, request: HttpRequest) -> ItemResult:
        """The effect of another number of instances as JSON, null if the cost of a batch is not known."""
        names, instances = request.names, request.names["instances"]
        if not re.fullmatch("[1-9][0-9]{0,2}", instances):
            raise BadRequest(f"instances is {instances[:100]!r}, expected a whole number from 1 to 999")
        if self._asking >= VIEWERS:
            raise QueueFull(f"{VIEWERS} simulations wait already", retry_after_s=10.0)
        key, found = (names["model"], names["version"]), None
        self._asking += 1
        try:
            for reading in self._readings.read():
                if (reading.name, reading.version) == key:
                    scenario = reading.changed(int(instances), reading.max_batch_size)
                    found = scenario and await self._effect(key, scenario)
        finally:
            self._asking -= 1
        return ItemResult(msgspec.json.encode(found), JSON)

    async def _read_machine(self, reader: MachineReader) -> Machine:
        models = self._snapshot.models
        pids = {pid for m in models for pid in m.pids.values()}
        gpus = any(d.startswith("cuda") for m in models for d in (*m.status.devices, *m.status.model_devices))
        found = await asyncio.get_running_loop().run_in_executor(None, reader.read, pids, gpus)
        return found._replace(broker_s=self._broker())

    def tick(self) -> None:
        """Adds the last second to the history, and sends it to the viewers."""
        now = self._clock()
        self._snapshot = snapshot = self._read()
        self._totals = self._read_totals()
        self._history.tick(snapshot, self._totals, max(now - self._ticked_s, 1e-3))
        self._readings.add(now, snapshot, self._work(), self._machine)
        self._ticked_s = now
        if self._viewers:
            if self._ticks % MEMORY_EVERY == 0:
                self._read_memory()
            self._ticks += 1
            events = self._events()[1]
            for key in {viewer.key for viewer in self._viewers}:
                self._publish(key, self._event(self._view(key, 1, events)))
        self._sent_events = self._history.event_count

    def _read_memory(self) -> None:
        self._memory = {pid: resident_bytes(pid) for m in self._snapshot.models for pid in m.pids.values()}

    def _publish(self, key: Key | None, event: bytes) -> None:
        part = ItemResult(event, SSE, final=False)
        for sink in [sink for viewer, sink in self._viewers.items() if viewer.key == key]:
            sink(part)

    # ---- views

    def _view(self, key: Key | None, seconds: int, events: Sequence[Event]) -> dict[str, Any]:
        """What a page shows, of all models or of one, with the last `seconds` of each and these events."""
        models = self._snapshot.models
        found = self._verdict()
        detail: dict[str, Any] = {} if key is not None else {"runs": running()}
        if key is not None:
            models = [m for m in models if m.key == key]
            detail = {"detail": self._detail(models[0], seconds) if models else None}
        elif len(models) > MODELS:
            models = sorted(models, key=lambda m: -self._now(m.key).requests)[:MODELS]
        return {
            "now_s": time.time(),
            "up_s": self._history.up_s,
            "verdict": found,
            "models": [self._model(m, seconds, key is not None) for m in sorted(models, key=lambda m: m.key)],
            "model_count": len(self._snapshot.models),
            "events": [event._asdict() for event in events],
            "connections": self._snapshot.http.connections if self._snapshot.http else 0,
            "unsent_bytes": sum(listener.unsent_bytes for listener in self._snapshot.listeners.values()),
            **detail,
        }

    def _verdict(self) -> Verdict:
        last = {m.key: self._history.last(m.key, LOOKED_S) for m in self._snapshot.models}
        return verdict(self._snapshot.models, last, [self._with_gain(f) for f in findings(self._readings.read())])

    def _with_gain(self, found: Finding) -> Finding:
        """A finding with the simulated gain, None until it is known."""
        if found.scenario is None or self._simulate is None:
            return found
        effect = self._known((found.model, found.version), found.scenario)[1]
        return replace(found, gain=effect and effect.gain)

    def _events(self) -> tuple[Sequence[Event], Sequence[Event]]:
        """The events that were sent in an earlier second, and the new ones."""
        events = list(self._history.events)
        new = len(events) - min(self._history.event_count - self._sent_events, len(events))
        return events[:new], events[new:]

    def _now(self, key: Key) -> Second:
        return self._history.now.get(key, Second())

    def _model(self, model: ModelSnapshot, seconds: int, whole: bool) -> dict[str, Any]:
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
            "seconds": _rounded(rows, len(Second._fields) if whole else OVERVIEW),
        }

    def _detail(self, model: ModelSnapshot, seconds: int) -> dict[str, Any]:
        """What the page of one model shows besides."""
        key, learned = model.key, model.scheduler
        steps = self._history.hour(key) if seconds > 1 or not self._history.step_age else []
        now_s = time.time()
        return {
            "steps": _rounded(steps[-1:] if seconds == 1 else steps, len(Second._fields)),
            "step_age": self._history.step_age,
            "queue_rows": model.queue_rows,
            "max_queue_rows": model.max_queue_rows,
            "in_flight": model.in_flight,
            "oldest_s": model.oldest_s,
            "restarts": self._totals[key].restarts if key in self._totals else 0,
            "processes": [(slot, pid, self._memory.get(pid, 0)) for slot, pid in sorted(model.pids.items())],
            "cost": {name: learned[name] for name in _COST if name in learned},
            "pipeline": self._pipeline(*key),
            "versions": [
                (m.key[1], m.status.default, m.status.traffic) for m in self._snapshot.models if m.key[0] == key[0]
            ],
            **batches(self._newest(*key), now_s),
        }

    def _event(self, view: dict[str, Any]) -> bytes:
        return sse_event(msgspec.json.encode(view))

    # ---- viewers

    def subscribe(self, route: Route, sink: Sink) -> _Viewer:
        """Sends the whole view now, and each second from now on. Raises QueueFull for too many viewers, and
        ModelNotFound."""
        if len(self._viewers) >= VIEWERS:
            raise QueueFull(f"the dashboard has {VIEWERS} viewers, and takes no more", retry_after_s=10.0)
        self._snapshot = self._read()
        key = (route.model, route.version) if route.version else None
        if key is not None and all(m.key != key for m in self._snapshot.models):
            raise ModelNotFound(f"no version '{key[1][:100]}' of a model '{key[0][:100]}' is loaded")
        viewer = _Viewer(self._viewers, key)
        self._read_memory()
        fields = Second._fields[: OVERVIEW if key is None else None]
        view = self._view(key, SHOWN_S if key is None else KEPT, self._events()[0])
        view |= {"penstock": __version__, "began_s": self._began_s, "fields": fields, "step_s": STEP}
        view["manages"] = self._manages
        sink(ItemResult(self._event(view), SSE, final=False))
        self._viewers[viewer] = sink
        return viewer

    def close(self) -> None:
        """Ends the streams."""
        viewers, self._viewers = list(self._viewers.values()), {}
        for sink in viewers:
            sink(ItemResult(b"", SSE))

    # ---- routes

    def routes(self, guarded: Callable[[], bool], changes: Sequence[Template] = ()) -> tuple[Template, ...]:
        """The page at `/`, its files, and the stream. `guarded`: the listener requires a token, which the page asks.

        `changes` are the routes of the management API that the page may use, below /dashboard, with its tokens.
        """
        self._manages = bool(changes)

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
            *(
                Template(f"/dashboard/events{path}", summary, subscribe=self.subscribe, own_events=True)
                for path, summary in _STREAMS.items()
            ),
            methods_route(
                "/dashboard/effects/{model}/{version}/{instances}", "What more instances bring", GET=self._show_effect
            ),
            *(replace(each, path=f"/dashboard{each.path}", guard="management") for each in changes),
        )

    def _table(self) -> str:
        """The models as a table in HTML, for browsers without scripts."""
        self._snapshot = self._read()
        heads = ("Model", "Version", "State", "Instances", "Requests/s", "p99 ms", "Queue")
        lines = []
        for model in self._snapshot.models[:MODELS]:
            status, now = model.status, self._now(model.key)
            cells = (status.name, status.version, status.state, f"{status.ready_instances} of {status.instances}")
            numbers = (f"{now.requests:.0f}", f"{now.p99_s * 1000:.1f}", str(status.queue))
            labels = ("", *(f' data-label="{head}"' for head in heads[1:]))
            row = zip(labels, (*cells, *numbers), strict=True)
            lines.append("".join(f"<td{label}>{html.escape(cell)}</td>" for label, cell in row))
        head = "".join(f"<th>{head}</th>" for head in heads)
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<p>{html.escape(self._verdict().text)}</p>{table}"


class _Viewer:
    """The ticket of a viewer of one model, or of all (None)."""

    def __init__(self, viewers: dict[_Viewer, Sink], key: Key | None) -> None:
        self._viewers, self.key = viewers, key

    def cancel(self) -> None:
        self._viewers.pop(self, None)


def _rounded(rows: Sequence[Second], fields: int) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row[:fields]] for row in rows]


@cache
def _file(name: str) -> bytes:
    return (_STATIC / name).read_bytes()
