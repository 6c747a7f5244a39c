"""What stands now: queues, workers, learned costs, memory, connections. Read when the page is asked for."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock._version import __version__
from penstock.core.contracts import ModelSnapshot, ServerSnapshot
from penstock.serving.observe.text import Family, Page

STATES = ("LOADING", "READY", "FAILED", "DRAINING")
_MODEL = ("model", "version")


def _gauge(name: str, help: str, *labels: str) -> Family:
    return Family(name, "gauge", (*_MODEL, *labels), help)


def _counter(name: str, help: str, *labels: str) -> Family:
    return Family(name, "counter", (*_MODEL, *labels), help)


_STANDING: tuple[tuple[Family, Callable[[ModelSnapshot], float]], ...] = (
    (_gauge("penstock_requests_in_flight", "Requests queued or running."), lambda m: m.in_flight),
    (_gauge("penstock_queue_requests", "Requests queued."), lambda m: m.status.queue),
    (_gauge("penstock_queue_rows", "Rows of the queued requests."), lambda m: m.queue_rows),
    (_gauge("penstock_queue_bytes", "Bytes of the queued requests."), lambda m: m.queue_bytes),
    (_gauge("penstock_queue_limit_rows", "Maximum rows in the queue."), lambda m: m.max_queue_rows),
    (_gauge("penstock_batch_limit_rows", "max_batch_size."), lambda m: m.status.max_batch_size),
    (_gauge("penstock_workers", "Desired number of workers."), lambda m: m.status.instances),
    (_gauge("penstock_workers_up", "Workers that are up."), lambda m: m.status.ready_instances),
)
_STATE = _gauge("penstock_model_state", "1 for the current state of a model version, 0 for the others.", "state")
_COST_A = _gauge("penstock_cost_fixed_seconds", "Learned: a of a + b*n seconds for a batch of n rows.")
_COST_B = _gauge("penstock_cost_row_seconds", "Learned: b of a + b*n seconds for a batch of n rows.")
_HOLDS = _counter("penstock_holds_total", "Holds of an idle worker that waited for more requests.", "kind")
_HELD = _counter("penstock_held_seconds_total", "Time for which idle workers were held for more requests.")
_POOL_USED = Family("penstock_pool_used_bytes", "gauge", (), "Shared memory in use for large payloads.")
_POOL = Family("penstock_pool_capacity_bytes", "gauge", (), "Shared memory reserved for large payloads.")
_CONNECTIONS = Family("penstock_http_connections", "gauge", (), "Open connections of the inference listener.")
_REFUSED = Family(
    "penstock_http_connections_refused_total", "counter", (), "Connections refused because of limits.max_connections."
)
_ANSWERS = Family(
    "penstock_http_requests_total", "counter", ("status",), "Responses of the inference listener by status class."
)
_BUILD = Family("penstock_build_info", "gauge", ("version", "python"), "1, with the versions as labels.")


def write_gauges(page: Page, now: ServerSnapshot) -> None:
    """All of it. Models that have not learned a cost yet have none."""
    for family, value in _STANDING:
        page.write(family, ((_key(m), value(m)) for m in now.models))
    page.write(_STATE, (((*_key(m), s), int(m.status.state == s)) for m in now.models for s in STATES))
    learned = [m for m in now.models if m.scheduler.get("ready")]
    page.write(_COST_A, ((_key(m), _number(m.scheduler, "a_s")) for m in learned))
    page.write(_COST_B, ((_key(m), _number(m.scheduler, "b_s")) for m in learned))
    page.write(_HOLDS, _by(now, "holds_by_kind"))
    page.write(_HELD, ((_key(m), _number(m.scheduler, "held_s")) for m in now.models))
    page.write(_POOL_USED, [((), now.pool_used_bytes)])
    page.write(_POOL, [((), now.pool_capacity_bytes)])
    if now.http is not None:
        page.write(_CONNECTIONS, [((), now.http.connections)])
        page.write(_REFUSED, [((), now.http.refused)])
        page.write(_ANSWERS, (((f"{status}xx",), n) for status, n in sorted(now.http.answers.items())))
    page.write(_BUILD, [((__version__, platform.python_version()), 1)])


def _key(m: ModelSnapshot) -> tuple[str, str]:
    return m.status.name, m.status.version


def _number(told: Mapping[str, Any], name: str) -> float:
    return float(told.get(name, 0.0))


def _by(now: ServerSnapshot, name: str) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Samples of a table that the scheduler or its policy keeps; a policy of the user's own need not have it."""
    for m in now.models:
        table = m.scheduler.get(name)
        if isinstance(table, Mapping):
            yield from (((*_key(m), str(label)), float(count)) for label, count in table.items())
