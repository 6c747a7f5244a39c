"""An ASGI app on uvicorn inside the event loop of a test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leaves the signals of the process alone."""
        yield


@contextlib.asynccontextmanager
async def serving_app(app: Any) -> AsyncIterator[str]:
    """The URL of `app`."""
    server = _Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=2))
    running = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
