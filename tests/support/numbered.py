"""An HTTP server whose responses are a function of the request's number."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Thread

Answer = Callable[[int], tuple[int, bytes]]


class NumberedServer:
    """Answers each POST with the (status, body) for its number, and 404 to a GET: there is no metrics page."""

    def __init__(self, answer: Answer, takes_s: float) -> None:
        self.answer, self.takes_s = answer, takes_s
        self.asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0.01)  # aborted connections end

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
                    continue
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                status, body = self.answer(self.asked)
                self.asked += 1
                await asyncio.sleep(self.takes_s)
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


@asynccontextmanager
async def numbered(answer: Answer = lambda number: (200, b"ok"), takes_s: float = 0.0) -> AsyncIterator[NumberedServer]:
    """A server on the running loop."""
    server = NumberedServer(answer, takes_s)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@contextmanager
def numbered_elsewhere(takes_s: float) -> Iterator[NumberedServer]:
    """A server on a loop in a thread of its own; set its `answer`."""
    up, servers = Event(), list[NumberedServer]()

    async def serve() -> None:
        nonlocal loop, over
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        async with numbered(takes_s=takes_s) as server:
            servers.append(server)
            up.set()
            await over.wait()

    loop: asyncio.AbstractEventLoop
    over: asyncio.Event
    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    up.wait()
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
