"""With `overlap = true`: the next batch is preprocessed while this one is inferred.

Only for a class whose `handle` is BaseHandler's own: then its three steps are known. `preprocess` runs in the thread
that receives batches, and each batch has a copy of the Context.
"""

from __future__ import annotations

import os
import time
from typing import Any

from penstock.plugins import load_object
from penstock.torchserve.protocol.codec import HandlerRequest


class Prepared(list[HandlerRequest]):
    """A batch whose `preprocess` has run, or has raised."""

    context: Any
    data: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class Steps:
    """The steps of a handler, each with the context of its own batch; before the first one that of `load`."""

    def __init__(self, service: Any, context: Any) -> None:
        self._service = service
        proxy: Any = load_object("penstock.torchserve.ts.context:ThreadsContext")
        self._proxy = service.context = proxy(context)

    def prepare(self, requests: list[HandlerRequest], context: Any) -> Prepared:
        """The first step. Raises only what ends a worker."""
        prepared = Prepared(requests)
        prepared.context = context
        started = time.perf_counter()
        self._proxy.become(context)
        try:
            prepared.data = self._service.preprocess([request.inputs for request in requests])
        except Exception as e:
            prepared.error = e
        prepared.seconds = time.perf_counter() - started
        return prepared

    def finish(self, prepared: Prepared) -> Any:
        """The other two. Raises what any of them raised."""
        if prepared.error is not None:
            raise prepared.error
        started = time.perf_counter()
        context = prepared.context
        self._proxy.become(context)
        data, prepared.data = prepared.data, None
        returned = self._service.postprocess(self._service.inference(data))
        took_s = prepared.seconds + time.perf_counter() - started
        context.metrics.add_time("HandlerTime", round(took_s * 1000, 2), None, "ms")
        return returned

    def whole(self, data: Any, context: Any) -> Any:
        """All of `handle`, for what is not prepared."""
        self._proxy.become(context)
        return self._service.handle(data, self._proxy)


def steps_of(handle: Any, context: Any) -> Steps | None:
    """The steps of the handler whose method `handle` is; None where they cannot be told apart."""
    service = getattr(handle, "__self__", None)
    if service is None or os.environ.get("ENABLE_TORCH_PROFILER"):
        return None
    base = next((cls for cls in type(service).__mro__ if _is_base(cls)), None)
    if base is None or handle.__func__ is not vars(base)["handle"]:
        return None
    return Steps(service, context)


def _is_base(cls: type) -> bool:
    return cls.__name__ == "BaseHandler" and cls.__module__.endswith("ts.torch_handler.base_handler")
