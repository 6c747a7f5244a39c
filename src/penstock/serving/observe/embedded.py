"""The metrics page of models inside another program; see `penstock.metrics.page`."""

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from penstock.core.contracts import ServerSnapshot
from penstock.core.engine.engine import Engine
from penstock.core.portal.portal import Portal
from penstock.serving.observe.prometheus import METRICS_TYPE, PrometheusObserver


class EmbeddedObserver(PrometheusObserver):
    """The observer of an engine whose hooks may run on threads of its models."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.reading)
        self._guard = engine.guard

    def _page(self, now: ServerSnapshot, openmetrics: bool = False) -> bytes:
        with self._guard:
            return super()._page(now, openmetrics)


_observers: WeakKeyDictionary[Engine, EmbeddedObserver] = WeakKeyDictionary()


def _observer_of(backend: object) -> EmbeddedObserver:
    """The observer of a backend's engine, which it gets with the first call. Raises TypeError."""
    engine = backend if isinstance(backend, Engine) else getattr(backend, "_engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"found a backend {type(backend).__name__}, whose models run in other processes: they have no metrics here;"
            " see `penstock worker --metrics-port` for Redis"
        )
    if engine not in _observers:
        with engine.guard:
            _observers[engine] = observer = EmbeddedObserver(engine)
            engine.observe(observer)
    return _observers[engine]


def _portal_of(target: object) -> Portal | None:
    """The portal of a streamer; None for what runs on an event loop of the caller. Raises TypeError."""
    portal = target if isinstance(target, Portal) else getattr(target, "_portal", None)
    if portal is None and not isinstance(getattr(target, "backend", target), Engine):
        raise TypeError(f"expected a Streamer, an Engine, a Portal or an InferenceApp, found {type(target).__name__}")
    return portal


async def _scrape(backend: object) -> bytes:
    return (await _observer_of(backend).scrape())[0]


def page(target: object) -> bytes:
    """See `penstock.metrics.page`."""
    if (portal := _portal_of(target)) is not None:
        return portal.call(_scrape)
    return _observer_of(getattr(target, "backend", target)).render()


class MetricsApp:
    """See `penstock.metrics.asgi`."""

    def __init__(self, target: object) -> None:
        self._target = target
        if _portal_of(target) is None:
            _observer_of(getattr(target, "backend", target))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the metrics speak http, found a {scope['type']} connection")
        if _portal_of(self._target) is not None:
            body = await asyncio.to_thread(page, self._target)
        else:
            body = await _scrape(getattr(self._target, "backend", self._target))
        headers = [(b"content-type", METRICS_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
