"""One call of a client: its options, headers and retries; `CallWindow` for many calls at once; and the HTTP APIs of the
servers that calls go to: Penstock, TorchServe, and Triton.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypedDict
from urllib.parse import quote, urlencode
from uuid import uuid4

from msgspec import Struct

from penstock.backoff import doubled_s
from penstock.client.endpoint import ConnectionLost, Unreachable
from penstock.errors import (
    BadRequest,
    ConfigError,
    ModelNotReady,
    NotSupported,
    PenstockError,
    QueueFull,
    RunTimeout,
    WorkerDied,
    nearest,
)
from penstock.tracing import current_traceparent
from penstock.types import SequenceRequest

GRACE_S: Final = 0.25  # after a deadline, for the server's own response about it to arrive


class CallOptions(TypedDict, total=False):
    """Options of one request; all are optional.

    - `version`: of the model, by default its default version.
    - `timeout_s`: the longest wait of this client, retries included, instead of the client's `timeout_s`. For a
      stream: until its first part, and then until each next one.
    - `deadline_s`: seconds in which the server must answer. It drops the request afterwards, also in its queue.
    - `priority`: class from 0, the most urgent.
    - `request_id`: appears in the server's log and in the response.
    - `sequence`: the sequence that the request belongs to, or its id.
    - `idempotency_key`: names this request; sent again with the same key, it runs once. True makes a random key.
    - `headers`: further HTTP headers, or gRPC metadata.
    """

    version: str | int | None
    timeout_s: float | None
    deadline_s: float | None
    priority: int
    request_id: str
    sequence: SequenceRequest | str | int
    idempotency_key: str | bool
    headers: Mapping[str, str]


class Call(Struct):
    """The checked options of a call. `key` is "" without an idempotency key."""

    timeout_s: float
    version: str | None = None
    deadline_s: float | None = None
    priority: int = 0
    request_id: str = ""
    sequence: SequenceRequest | None = None
    key: str = ""
    headers: list[tuple[str, str]] = []
    deadline_at: float = math.inf  # on the loop's clock
    ends_at: float = math.inf

    def begin(self, now: float) -> None:
        """Starts the time-out and the deadline."""
        self.ends_at = now + self.timeout_s
        if self.deadline_s is not None:
            self.deadline_at = now + self.deadline_s
            self.ends_at = min(self.ends_at, self.deadline_at + GRACE_S)

    def left_s(self, now: float) -> float:
        """The time for further attempts."""
        return min(self.ends_at, self.deadline_at) - now

    def native_headers(self, now: float) -> list[tuple[str, str]]:
        """The headers of Penstock's own server."""
        found = []
        if self.deadline_s is not None:
            found.append(("x-deadline-ms", f"{max(0.0, self.deadline_at - now) * 1000:.3f}"))
        if self.priority:
            found.append(("x-priority", str(self.priority)))
        if self.request_id:
            found.append(("x-request-id", self.request_id))
        if self.key:
            found.append(("Idempotency-Key", self.key))
        if self.sequence is not None:
            found.append(("x-sequence-id", self.sequence.id))
            found += [("x-sequence-start", "true")] * bool(self.sequence.start)
            found += [("x-sequence-end", "true")] * self.sequence.end
        return found

    def triton_parameters(self) -> dict[str, Any]:
        """The parameters of Triton's extensions. Triton's priorities begin at 1, and its time-out is in
        microseconds."""
        found: dict[str, Any] = {}
        if self.deadline_s is not None:
            found["timeout"] = round(self.deadline_s * 1e6)
        if self.priority:
            found["priority"] = self.priority + 1
        if self.sequence is not None:
            id = self.sequence.id
            found["sequence_id"] = int(id) if id.isdecimal() else id
            found |= {"sequence_start": bool(self.sequence.start), "sequence_end": self.sequence.end}
        return found


def read_options(options: CallOptions, timeout_s: float, keyed: bool = False) -> Call:
    """Raises TypeError for an unknown option, and BadRequest for a value that has no meaning."""
    for name in options.keys() - CallOptions.__annotations__.keys():
        raise TypeError(f"unknown option '{name}'{nearest(name, CallOptions.__annotations__)}")
    version, sequence = options.get("version"), options.get("sequence")
    if isinstance(sequence, (str, int)):
        sequence = SequenceRequest(str(sequence))
    key = options.get("idempotency_key", keyed)
    headers = list(options.get("headers", {}).items())
    if (traceparent := current_traceparent()) and "traceparent" not in {name.lower() for name, _ in headers}:
        headers.append(("traceparent", traceparent))
    given_s = options.get("timeout_s")
    call = Call(
        timeout_s=timeout_s if given_s is None else given_s,
        version=None if version is None else str(version),
        deadline_s=options.get("deadline_s"),
        priority=options.get("priority", 0),
        request_id=options.get("request_id", ""),
        sequence=sequence,
        key=uuid4().hex if key is True else key or "",
        headers=headers,
    )
    for name, seconds in (("timeout_s", call.timeout_s), ("deadline_s", call.deadline_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise BadRequest(f"{name} is {seconds}, expected seconds above 0")
    if not isinstance(call.priority, int) or call.priority < 0:
        raise BadRequest(f"priority is {call.priority!r}, expected a whole number from 0")
    return call


NOT_RUN: Final = (Unreachable, QueueFull, ModelNotReady)  # the server refused the request, or never received it
PERHAPS_RUN: Final = (ConnectionLost, WorkerDied)


class RetryPolicy(Struct, frozen=True):
    """At most `retries` further attempts, with pauses that double from `backoff_s` up to `longest_pause_s`.

    A server's Retry-After is honoured up to `longest_pause_s`.
    """

    retries: int = 2
    backoff_s: float = 0.1
    longest_pause_s: float = 10.0

    def pause_s(
        self, error: PenstockError, failures: int, left_s: float, *, repeatable: bool, chance: float
    ) -> float | None:
        """Seconds before the next attempt; None: the error is final.

        `failures` counts the failed attempts, from 1. `left_s` is the time that the caller still has. `repeatable`:
        running the request twice is harmless. `chance` is a random number from 0 to 1.
        """
        if failures > self.retries or not is_safe(error, repeatable):
            return None
        jitter_s = chance * doubled_s(self.backoff_s, failures, self.longest_pause_s)
        pause_s = min(error.retry_after_s or 0.0, self.longest_pause_s) + jitter_s
        return pause_s if pause_s < left_s else None


def is_safe(error: PenstockError, repeatable: bool) -> bool:
    """Whether another attempt may help and harms nothing. A run that timed out would time out again."""
    if isinstance(error, PERHAPS_RUN):
        return repeatable and not isinstance(error, RunTimeout)
    return isinstance(error, NOT_RUN)


MAX_CONCURRENCY: Final = 10_000


class CallWindow:
    """At most `concurrency` calls run, or have a result that was not taken. Used on one event loop.

    With `ordered`, results come in the order of the values; otherwise each is (position of its value, result), as they
    complete. An error takes the place of a result if `return_exceptions`; otherwise it is raised, and ends the window.
    """

    def __init__(
        self,
        send: Callable[[Any], Awaitable[Any]],
        concurrency: int = 16,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> None:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise BadRequest(f"concurrency is {concurrency}, expected a whole number from 1 to {MAX_CONCURRENCY}")
        self._send = send
        self._concurrency = concurrency
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._running: dict[asyncio.Task[Any], int] = {}  # in the order of their values
        self._count = 0

    async def put(self, value: Any) -> list[Any]:
        """Starts a call, and returns the results that are due. Waits for one if the window is full."""
        self._running[asyncio.ensure_future(self._call(value))] = self._count
        self._count += 1
        await asyncio.sleep(0)  # the call begins even if the next value takes long
        return await self.take() if len(self._running) >= self._concurrency else self._due()

    async def take(self) -> list[Any]:
        """The next results, at least one; none if no call is left."""
        if self._running:
            waited = [next(iter(self._running))] if self._ordered else self._running
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return self._due()

    async def close(self) -> None:
        """Cancels what runs."""
        running = list(self._running)
        self._running.clear()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _call(self, value: Any) -> Any:
        try:
            return await self._send(value)
        except PenstockError as error:
            if self._return_exceptions:
                return error
            raise

    def _due(self) -> list[Any]:
        found = []
        for task, position in list(self._running.items()):
            if not task.done():
                if self._ordered:
                    break
                continue
            del self._running[task]
            found.append(task.result() if self._ordered else (position, task.result()))
        return found


# ---- the HTTP APIs of servers. Pure


class ApiCall(Struct, frozen=True):
    """A request of the management or metadata APIs: its response is JSON. `body` is JSON too; None: no body.

    `management`: it goes to the management listener. `key`: the part of the response to return; "" for all of it.
    """

    method: str
    path: str
    body: Any = None
    management: bool = False
    key: str = ""


def path_of(*segments: str | None) -> str:
    """The quoted segments; None is left out. Raises BadRequest for an empty one."""
    if "" in segments:
        raise BadRequest("found an empty name or version of a model, expected text")
    return "".join(f"/{quote(segment, safe='')}" for segment in segments if segment is not None)


class PenstockApi:
    """The API of `penstock serve`, and what the others share with it."""

    name = "penstock"
    server = "Penstock"
    events = True  # streams can be server-sent events
    live, ready = "/healthz", "/readyz"

    def predict(self, model: str, version: str | None) -> str:
        """The path of `predict` and `stream`."""
        return path_of("predictions", model, version)

    def infer(self, model: str, version: str | None) -> str:
        """The path of `infer`."""
        return self.tensors(model, version) + "/infer"

    def tensors(self, model: str, version: str | None) -> str:
        return "/v2" + path_of("models", model, None if version is None else "versions", version)

    def headers(self, call: Call, now: float) -> list[tuple[str, str]]:
        """The headers for the options of a call."""
        return call.native_headers(now)

    def parameters(self, call: Call) -> dict[str, Any]:
        """The parameters of `infer` for the options of a call."""
        return {}

    def model_ready(self, model: str, version: str | None) -> str:
        return self.tensors(model, version) + "/ready"

    def metadata(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", self.tensors(model, version))

    def models(self) -> ApiCall:
        return ApiCall("GET", "/v2/models", key="versions")

    # ---- management

    def load(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, version), dict(keys), True)

    def unload(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("DELETE", path_of("models", model, version), None, True)

    def scale(self, model: str, version: str | None, instances: int) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, version, "scale"), {"instances": instances}, True)

    def set_default(self, model: str, version: str) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, "default"), {"version": version}, True)

    def set_traffic(self, model: str, weights: Mapping[str, float]) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, "traffic"), dict(weights), True)

    def statistics(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", path_of("models", model, version), None, True)

    def lacks(self, operation: str, advice: str) -> NotSupported:
        return NotSupported(f"{self.server} has no {operation}; {advice}")


class TorchServeApi(PenstockApi):
    """The API of TorchServe, and of `penstock torchserve`."""

    name = "torchserve"
    server = "TorchServe"
    events = False
    live = ready = "/ping"

    def tensors(self, model: str, version: str | None) -> str:
        raise self.lacks("binary tensors", "call predict")

    def model_ready(self, model: str, version: str | None) -> str:
        raise self.lacks("readiness of one model", "call metadata, which lists its workers")

    def metadata(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", path_of("models", model, version), None, True)

    def models(self) -> ApiCall:
        return ApiCall("GET", "/models?limit=100", None, True, "models")

    def load(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ApiCall:
        """`POST /models`: `url` is the archive; `initial_workers` is 1 unless given. The archive has the version."""
        given = {"model_name": model, "initial_workers": 1, "synchronous": True, **keys}
        if "url" not in given:
            raise BadRequest("found no url, expected the archive to load, such as url='model.mar'")
        return ApiCall("POST", "/models" + _query(given), None, True)

    def scale(self, model: str, version: str | None, instances: int) -> ApiCall:
        wanted = {"min_worker": instances, "max_worker": instances, "synchronous": True}
        return ApiCall("PUT", path_of("models", model, version) + _query(wanted), None, True)

    def set_default(self, model: str, version: str) -> ApiCall:
        return ApiCall("PUT", path_of("models", model, version, "set-default"), None, True)

    def set_traffic(self, model: str, weights: Mapping[str, float]) -> ApiCall:
        raise self.lacks("split of traffic", "call set_default")

    def statistics(self, model: str, version: str | None) -> ApiCall:
        raise self.lacks("statistics of a model", "read its metrics API")


class TritonApi(PenstockApi):
    """The Open Inference Protocol with Triton's extensions, on one listener."""

    name = "triton"
    server = "The Open Inference Protocol"
    live, ready = "/v2/health/live", "/v2/health/ready"

    def predict(self, model: str, version: str | None) -> str:
        raise self.lacks("predict", "call infer with a dict of arrays")

    def headers(self, call: Call, now: float) -> list[tuple[str, str]]:
        return [("triton-request-id", call.request_id)] if call.request_id else []

    def parameters(self, call: Call) -> dict[str, Any]:
        return call.triton_parameters()

    def models(self) -> ApiCall:
        return ApiCall("POST", "/v2/repository/index", {})

    def load(self, model: str, version: str | None, keys: Mapping[str, Any]) -> ApiCall:
        """`keys` are parameters of the load request, such as `config`."""
        return ApiCall("POST", "/v2/repository" + path_of("models", model, "load"), _parameters(keys))

    def unload(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("POST", "/v2/repository" + path_of("models", model, "unload"), {})

    def scale(self, model: str, version: str | None, instances: int) -> ApiCall:
        raise self.lacks("scaling of a model", "load it with another instance_group")

    def set_default(self, model: str, version: str) -> ApiCall:
        raise self.lacks("default version", "load the model with another version_policy")

    def set_traffic(self, model: str, weights: Mapping[str, float]) -> ApiCall:
        raise self.lacks("split of traffic", "name the version in each request")

    def statistics(self, model: str, version: str | None) -> ApiCall:
        return ApiCall("GET", self.tensors(model, version) + "/stats", key="model_stats")


def _parameters(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": dict(keys)} if keys else {}


def _query(values: Mapping[str, Any]) -> str:
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return "?" + urlencode(shown)


APIS: Final = {api.name: api for api in (PenstockApi(), TorchServeApi(), TritonApi())}


def find_api(protocol: str) -> PenstockApi:
    """Raises ConfigError."""
    if protocol not in APIS:
        raise ConfigError(f"protocol is '{protocol}', expected one of {', '.join(APIS)}{nearest(protocol, APIS)}")
    return APIS[protocol]
