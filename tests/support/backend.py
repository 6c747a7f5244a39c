"""FakeBackend: a backend without models, for tests and benchmarks of listeners; it answers in the next loop pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.errors import DeadlineExceeded, ModelNotFound, PayloadTooLarge, PenstockError
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, Sink, TensorSpec


class FakeBuffer:
    """Memory of a `FakeBackend`'s pool."""

    def __init__(self, backend: FakeBackend, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))
        self.nbytes = nbytes
        self._backend = backend

    def shrink(self, length: int) -> None:
        """Shortens the view; the pool still counts the whole buffer."""
        self.view = self.view[:length]

    def skip(self, count: int) -> None:
        """Drops the first bytes."""
        self.view = self.view[count:]

    def release(self) -> None:
        """Returns the memory once, and wakes waiting callers."""
        self._backend.used_bytes -= self.nbytes
        self.nbytes = 0
        waiting, self._backend.waiting = self._backend.waiting, []
        for wake in waiting:
            wake()


class Call:
    """One submitted request. `reply` answers it."""

    def __init__(self, item: Item, sink: Sink) -> None:
        self.item = item
        self.sink = sink
        self.budget_s, self.wait_s, self.priority = item.budget_s, item.wait_s, item.priority
        self.cancelled = False

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self.cancelled = True

    def body(self) -> bytes:
        """The payload as bytes."""
        payload = self.item.payload
        return bytes(payload.view) if isinstance(payload, FakeBuffer) else bytes(payload)

    def reply(self, body: bytes | None = None, content_type: str = "application/octet-stream", **more: object) -> None:
        """Passes a result to the sink, by default an echo, unless the call was cancelled."""
        result = ItemResult(body=self.body() if body is None else body, content_type=content_type, **more)  # type: ignore[arg-type]
        payload = self.item.payload
        if result.final and isinstance(payload, FakeBuffer):
            payload.release()
        if not self.cancelled:
            self.sink(result)


class FakeBackend:
    """`models` maps names to functions of a Call; by default one model echoes. `submit` raises `refuse`."""

    def __init__(self, models: dict[str, Callable[[Call], None]] | None = None, pool_bytes: int = 64 * 2**20) -> None:
        self.models = models if models is not None else {"echo": Call.reply}
        self.pool_bytes = pool_bytes
        self.used_bytes = 0
        self.calls: list[Call] = []
        self.waiting: list[Callable[[], None]] = []
        self.refuse: PenstockError | None = None
        self.is_ready = True

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Call:
        """Runs the model's function in the loop's next pass."""
        try:
            self._find(model, version)
            if self.refuse is not None:
                raise self.refuse
            if item.budget_s is not None and item.budget_s <= 0:
                raise DeadlineExceeded("the deadline had passed")
        except PenstockError:
            if isinstance(item.payload, FakeBuffer):
                item.payload.release()
            raise
        call = Call(item, sink)
        self.calls.append(call)
        asyncio.get_running_loop().call_soon(self.models[model], call)
        return call

    def _find(self, model: str, version: str | None) -> None:
        if model not in self.models:
            raise ModelNotFound(f"no model '{model}' is loaded")
        if version not in (None, "1"):
            raise ModelNotFound(f"model '{model}' has no version '{version}'")

    def ready(self) -> bool:
        """Returns `is_ready`."""
        return self.is_ready

    def model_ready(self, model: str, version: str | None) -> bool:
        """Returns `is_ready`. Raises ModelNotFound."""
        self._find(model, version)
        return self.is_ready

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        """One FP32 input. Raises ModelNotFound."""
        self._find(model, version)
        return ModelMetadata(model, "1", inputs=(TensorSpec("x", "FP32", (-1, 4)),)), ["1"]

    def statuses(self) -> list[ModelStatus]:
        """Every model with one instance."""
        state = "READY" if self.is_ready else "LOADING"
        return [ModelStatus(name, "1", state, 1, int(self.is_ready), 8, ("cpu",)) for name in self.models]

    def allocate(self, nbytes: int) -> FakeBuffer | None:
        """Memory, or None while the pool is full. Raises PayloadTooLarge."""
        if nbytes > self.pool_bytes:
            raise PayloadTooLarge(f"{nbytes} bytes never fit into a pool of {self.pool_bytes}")
        if self.used_bytes + nbytes > self.pool_bytes:
            return None
        self.used_bytes += nbytes
        return FakeBuffer(self, nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once, when a buffer is released."""
        self.waiting.append(wake)
