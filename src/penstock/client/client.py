"""AsyncClient: calls of a model server from asyncio programs. `penstock.Client` is the same for other programs."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, Unpack

from penstock.client.calls import (
    ApiCall,
    Call,
    CallOptions,
    CallWindow,
    PenstockApi,
    RetryPolicy,
    find_api,
    read_options,
)
from penstock.client.endpoint import parse_url, tls_context
from penstock.client.http import ConnectionPool
from penstock.client.transport import Attempt, HttpTransport, Listener
from penstock.errors import BadRequest, ConfigError, LoadFailed, PenstockError
from penstock.plugins import optional_module

if TYPE_CHECKING:
    from penstock.client.grpc import GrpcTransport
    from penstock.serving.protocols.oip_messages import InferResponse

T = TypeVar("T")
ApiName = Literal["penstock", "torchserve", "triton"]

GRPC_SCHEMES: Final = ("grpc://", "grpcs://")
CLOSED: Final = "the client is closed"


class ManyOptions(CallOptions, total=False):
    """Options of `predict_many` and `infer_many`, and of each call.

    - `concurrency`: requests at the same time, 16 by default.
    - `ordered`: False yields (position of the value, result) as the requests complete.
    - `return_exceptions`: an error takes the place of its result, and the other requests continue.
    """

    concurrency: int
    ordered: bool
    return_exceptions: bool


class AsyncClient:
    """A client of a model server, on one asyncio event loop.

    - `url`: `http://HOST:PORT`, `https://...`, `unix:/PATH`, or `grpc://HOST:PORT` and `grpcs://` (extra `grpc`).
    - `protocol`: "penstock" for `penstock serve`; "torchserve" for TorchServe and `penstock torchserve`; "triton" for
      any server of the Open Inference Protocol.
    - `token`: sent as `Authorization: Bearer`. `management_token` replaces it on the management listener.
    - `ca`, `cert`, `key`: PEM files: who signed the server's certificate, and the client's own certificate and key.
    - `timeout_s`: the longest wait for a result, retries included.
    - `connect_timeout_s`: the longest wait for a connection, which is part of it.
    - `retries`: further attempts after a failure that is safe to repeat. A request that the server may have run is sent
      again only with an idempotency key.
    - `idempotency_keys`: give every `predict` and `infer` a random key.
    - `connections`: the most at the same time; further requests wait.
    - `max_response_bytes`: of a response, or of one part of a stream.
    - `management_url`: of the management listener, for `load`, `scale` and the like.

    Raises the server's errors, by their code: `QueueFull`, `ModelNotFound`, `DeadlineExceeded`, ... with `status`
    and `retry_after_s`. Errors on the way are in `penstock.client.endpoint`: `Unreachable`, `ConnectionLost`,
    `ResponseTimeout` (a DeadlineExceeded), and others. Redirects are not followed, and no proxy is used.

    Raises ConfigError. Use it as an asynchronous context manager, or call `close`.
    """

    def __init__(
        self,
        url: str,
        *,
        protocol: ApiName = "penstock",
        token: str | None = None,
        management_token: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        retries: int = 2,
        idempotency_keys: bool = False,
        connections: int = 64,
        max_response_bytes: int = 256 * 2**20,
        management_url: str | None = None,
    ) -> None:
        if connections < 1 or retries < 0:
            raise ConfigError(f"connections is {connections} and retries {retries}, expected at least 1 and 0")
        tls = tls_context(ca, cert, key) if ca or cert else None
        self._policy = RetryPolicy(retries)
        self._timeout_s = timeout_s
        self._keyed = idempotency_keys
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._transport: HttpTransport | GrpcTransport
        if url.startswith(GRPC_SCHEMES):
            if protocol == "torchserve" or management_url is not None:
                raise ConfigError("gRPC has the Open Inference Protocol only; use http:// for other calls")
            module = optional_module("penstock.client.grpc", "gRPC cannot be imported", "grpc-client", LoadFailed)
            self._transport = module.GrpcTransport(url, token, (ca, cert, key), tls, max_response_bytes)
            return

        def listener(url: str, token: str | None) -> Listener:
            return Listener(ConnectionPool(parse_url(url, tls), connections, connect_timeout_s), token)

        management = None if management_url is None else listener(management_url, management_token or token)
        self._transport = HttpTransport(find_api(protocol), listener(url, token), management, max_response_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; requests in progress fail. Idempotent."""
        self._closed = True
        if self._pid == os.getpid():
            await self._transport.close()

    # ---- requests

    async def predict(
        self, model: str, value: Any, *, content_type: str | None = None, **options: Unpack[CallOptions]
    ) -> Any:
        """The model's result for one value.

        Bytes and text are sent as they are, other values as JSON; `content_type` replaces the default type. A JSON
        response becomes a Python value, text `str`, and any other type `bytes`.
        """
        call = self._call(options, self._keyed)
        return await self._run(call, self._transport.predict(call, model, value, content_type))

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> InferResponse:
        """The outputs for named arrays `[rows, ...]`, in the binary form of the Open Inference Protocol.

        `inputs` are NumPy arrays or torch tensors, which are sent without a copy if they are contiguous and on the CPU:
        do not change them meanwhile. `outputs` selects outputs, by default all. The result's `outputs` is a dict of
        arrays, which are read-only views of the response.
        """
        call = self._call(options, self._keyed)
        return await self._run(call, self._transport.infer(call, model, inputs, outputs))

    async def stream(
        self,
        model: str,
        value: Any,
        *,
        content_type: str | None = None,
        events: bool = True,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[Any, None]:
        """The parts of a model's result, as they arrive. Leaving the loop cancels the request.

        JSON parts become Python values, text `str`, and others `bytes`. With `events=False` parts of text and bytes are
        chunks, and an error after the first part is a ConnectionLost. Over gRPC `value` is a dict of arrays, and
        each part is a response as of `infer`.
        """
        call = self._call(options)
        parts = await self._run(call, self._transport.stream(call, model, value, content_type, events))
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()

    def predict_many(
        self, model: str, values: Iterable[Any] | AsyncIterable[Any], **options: Unpack[ManyOptions]
    ) -> AsyncGenerator[Any, None]:
        """The results of `predict` for each value, with bounded concurrency and memory: `values` may be endless."""
        return _drain(self.open_window(self.predict, model, options), values)

    def infer_many(
        self, model: str, inputs: Iterable[Any] | AsyncIterable[Any], **options: Unpack[ManyOptions]
    ) -> AsyncGenerator[Any, None]:
        """The results of `infer` for each dict of arrays, as of `predict_many`."""
        return _drain(self.open_window(self.infer, model, options), inputs)

    def open_window(self, method: Callable[..., Any], model: str, options: ManyOptions) -> CallWindow:
        """The window of `predict_many` and `infer_many`."""
        given: dict[str, Any] = dict(options)
        window = {name: given.pop(name) for name in ManyOptions.__annotations__.keys() & given.keys() - CALL_OPTIONS}
        self._call(given)  # type: ignore[arg-type]  # an unknown option fails here
        if isinstance(given.get("idempotency_key"), str):
            raise BadRequest("one idempotency_key belongs to one request; pass True for a random one each")
        return CallWindow(lambda value: method(model, value, **given), **window)

    # ---- health and metadata

    async def live(self, **options: Unpack[CallOptions]) -> bool:
        """True while the server is alive. Raises Unreachable and the like if it is not."""
        call = self._call(options)
        return await self._run(call, self._transport.check_health(call, False, None), True)

    async def ready(self, model: str | None = None, **options: Unpack[CallOptions]) -> bool:
        """Whether the server, or one model, can answer requests. Raises ModelNotFound."""
        call = self._call(options)
        return await self._run(call, self._transport.check_health(call, True, model), True)

    async def metadata(self, model: str, **options: Unpack[CallOptions]) -> Any:
        """Versions, inputs and outputs of a model, as the server describes them; TorchServe: a list of versions."""
        call = self._call(options)
        return await self._run(call, self._transport.metadata(call, model), True)

    async def models(self, **options: Unpack[CallOptions]) -> list[dict[str, Any]]:
        """The versions of all models, as the server lists them."""
        found: list[dict[str, Any]] = await self._ask(options, lambda api, call: api.models())
        return found

    async def statistics(self, model: str, **options: Unpack[CallOptions]) -> Any:
        """What the server has counted for a model, in its own form."""
        return await self._ask(options, lambda api, call: api.statistics(model, call.version))

    # ---- management

    async def load(
        self, model: str, /, *, version: str | None = None, timeout_s: float | None = None, **keys: Any
    ) -> Any:
        """Loads or replaces a version of a model, and returns when it can answer. Raises LoadFailed.

        `keys` come from `[models.NAME]` (`target`, `instances`, ...), TorchServe's parameters (`url`, ...), or
        Triton's (`config`).
        """
        return await self._ask({"timeout_s": timeout_s}, lambda api, call: api.load(model, version, keys))

    async def unload(self, model: str, **options: Unpack[CallOptions]) -> Any:
        """Unloads a version, or all versions; accepted requests are answered."""
        return await self._ask(options, lambda api, call: api.unload(model, call.version))

    async def scale(self, model: str, instances: int, **options: Unpack[CallOptions]) -> Any:
        """Changes the number of instances of a version."""
        return await self._ask(options, lambda api, call: api.scale(model, call.version, instances))

    async def set_default(self, model: str, version: str | int, /, **options: Unpack[CallOptions]) -> Any:
        """Sends requests without a version to this one."""
        return await self._ask(options, lambda api, call: api.set_default(model, str(version)))

    async def set_traffic(self, model: str, weights: Mapping[str, float], **options: Unpack[CallOptions]) -> Any:
        """Splits the requests without a version between versions: `{"1": 0.9, "2": 0.1}`."""
        return await self._ask(options, lambda api, call: api.set_traffic(model, weights))

    # ---- attempts

    def _call(self, options: CallOptions, keyed: bool = False) -> Call:
        return read_options(options, self._timeout_s, keyed)

    async def _ask(self, options: CallOptions, prepare: Callable[[PenstockApi, Call], ApiCall]) -> Any:
        call = self._call(options)
        repeatable, attempt = self._transport.ask(call, lambda api: prepare(api, call))
        return await self._run(call, attempt, repeatable)

    async def _run(self, call: Call, attempt: Attempt[T], repeatable: bool = False) -> T:
        """The result of an attempt, or of a later one if that is safe. Raises the error of the last."""
        now = self._check_loop().time
        call.begin(now())
        failures = 0
        while True:
            try:
                return await attempt(now())
            except PenstockError as error:
                failures += 1
                pause_s = self._policy.pause_s(
                    error, failures, call.left_s(now()), repeatable=repeatable or bool(call.key), chance=random.random()
                )
                if pause_s is None or self._closed:
                    raise
            await asyncio.sleep(pause_s)

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Raises PenstockError after `close`, on another loop, and after a fork."""
        if self._closed:
            raise PenstockError(CLOSED)
        check_process(self._pid)
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise PenstockError("the client was used on another event loop before; create one for each loop")
        return loop


CALL_OPTIONS: Final = CallOptions.__annotations__.keys()


def check_process(pid: int) -> None:
    """Raises PenstockError in a forked child: its copies of the connections belong to the parent."""
    if pid != os.getpid():
        raise PenstockError(f"the client belongs to process {pid}; create one in each process, after the fork")


async def _drain(window: CallWindow, values: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    try:
        async for value in _asynchronous(values):
            for result in await window.put(value):
                yield result
        while results := await window.take():
            for result in results:
                yield result
    finally:
        await window.close()


async def _asynchronous(values: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value
