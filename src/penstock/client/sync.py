"""Client: AsyncClient for programs without an event loop. Its calls run on a loop in a background thread."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from penstock.client.calls import CallWindow
from penstock.client.client import CLOSED, AsyncClient, ManyOptions, check_process
from penstock.core.portal.loop_thread import LoopThread
from penstock.errors import PenstockError

P = ParamSpec("P")
T = TypeVar("T")


def _same_options(
    method: Callable[Concatenate[AsyncClient, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Client, P], None]]:
    return lambda function: functools.wraps(method)(function)


async def _end_of(parts: AsyncGenerator[Any, None]) -> None:
    await parts.aclose()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """The method for threads: runs it on the client's loop and waits."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return self.run(method(self.asynchronous, *args, **options))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    """The method for threads: each step of the iteration waits for the next value."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **options: P.kwargs) -> Generator[T, None, None]:
        parts = method(self.asynchronous, *args, **options)

        async def step() -> list[T]:
            async for part in parts:
                return [part]
            return []

        try:
            while found := self.run(step()):
                yield found[0]
        finally:
            self.post(_end_of(parts))

    return call


class Client:
    """A client of a model server, for any number of threads. `AsyncClient` describes the options and the errors.

    Works inside a running event loop too, as in a notebook, but then blocks it. A forked child needs a client of its
    own. Use it as a context manager, or call `close`.
    """

    @_same_options(AsyncClient.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.asynchronous = AsyncClient(*args, **options)
        self._pid = os.getpid()
        self._thread = LoopThread("penstock-client")
        self._finalizer = weakref.finalize(self, _end, self._thread, self.asynchronous, self._pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and ends the thread; requests in progress fail. Idempotent."""
        self._finalizer()

    predict = _blocking(AsyncClient.predict)
    infer = _blocking(AsyncClient.infer)
    stream = _iterating(AsyncClient.stream)
    live = _blocking(AsyncClient.live)
    ready = _blocking(AsyncClient.ready)
    metadata = _blocking(AsyncClient.metadata)
    models = _blocking(AsyncClient.models)
    statistics = _blocking(AsyncClient.statistics)
    load = _blocking(AsyncClient.load)
    unload = _blocking(AsyncClient.unload)
    scale = _blocking(AsyncClient.scale)
    set_default = _blocking(AsyncClient.set_default)
    set_traffic = _blocking(AsyncClient.set_traffic)

    def predict_many(
        self, model: str, values: Iterable[Any], **options: Unpack[ManyOptions]
    ) -> Generator[Any, None, None]:
        """The results of `predict` for each value, with bounded concurrency and memory: `values` may be endless.

        The calling thread iterates over `values`.
        """
        return self._drain(self.asynchronous.open_window(self.asynchronous.predict, model, options), values)

    def infer_many(
        self, model: str, inputs: Iterable[Any], **options: Unpack[ManyOptions]
    ) -> Generator[Any, None, None]:
        """The results of `infer` for each dict of arrays, as of `predict_many`."""
        return self._drain(self.asynchronous.open_window(self.asynchronous.infer, model, options), inputs)

    def _drain(self, window: CallWindow, values: Iterable[Any]) -> Generator[Any, None, None]:
        try:
            for value in values:
                yield from self.run(window.put(value))
            while results := self.run(window.take()):
                yield from results
        finally:
            self.post(window.close())

    # ---- the loop's thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the client's loop. Raises PenstockError after `close` and after a fork."""
        try:
            check_process(self._pid)
            if not self._finalizer.alive:
                raise PenstockError(CLOSED)
        except BaseException:
            coroutine.close()
            raise
        try:
            return self._thread.run(coroutine)
        except asyncio.CancelledError:
            raise PenstockError("the client was closed meanwhile") from None

    def post(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine on the client's loop without waiting for it: a garbage collection may end an iteration on
        any thread."""
        if self._finalizer.alive and self._pid == os.getpid():
            self._thread.begin(coroutine)
        else:
            coroutine.close()


def _end(thread: LoopThread, client: AsyncClient, pid: int) -> None:
    """Ends the client's thread; called once, at the latest when the interpreter exits."""
    if pid != os.getpid():
        return
    if thread.on_loop():  # a garbage collection there
        thread.begin(_close_and_end(thread, client))
    else:
        thread.run(client.close())
        thread.stop()


async def _close_and_end(thread: LoopThread, client: AsyncClient) -> None:
    await client.close()
    thread.end()
