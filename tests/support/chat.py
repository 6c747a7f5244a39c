"""The stand-in of examples/vlm_captions in a thread of the test, with scripted faults and a caption of one's own."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "examples" / "vlm_captions" / "stand_in.py"


def load() -> Any:
    """The module of the stand-in."""
    if "stand_in" not in sys.modules:
        spec = importlib.util.spec_from_file_location("stand_in", FILE)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["stand_in"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["stand_in"]


class ChatServer:
    """Listens between `start` and `stop`, which may repeat on the same port; `options` are those of the program.

    `respond`, if given, sees each request to complete first; what it returns other than None is the response.
    """

    def __init__(self, respond: Callable[[dict[str, Any]], Any] | None = None, **options: Any) -> None:
        self.module = load()
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.args = self.module.parser().parse_args(["--rate=2000", "--latency=0.002", *flags])
        self.requests: list[dict[str, Any]] = []
        self.port = 0
        self._respond = respond

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ChatServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(up)), daemon=True)
        self._thread.start()
        assert up.wait(10)

    def stop(self) -> None:
        """Ends the connections, as a killed process does."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self, up: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self.stand_in = self.module.StandIn(self.args)
        complete = self.stand_in.complete

        async def scripted(request: dict[str, Any]) -> Any:
            self.requests.append(request)
            found = self._respond(request) if self._respond is not None else None
            return await complete(request) if found is None else found

        self.stand_in.complete = scripted
        server = await asyncio.start_server(self.stand_in.serve, "127.0.0.1", self.port, limit=1 << 22)
        self.port = server.sockets[0].getsockname()[1]
        up.set()
        await self._end.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def images_of(request: dict[str, Any]) -> list[str]:
    """The URLs of a request's images."""
    content = next(m["content"] for m in request["messages"] if m["role"] == "user")
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


def answered(text: str, reason: str = "stop", **message: Any) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    """A response with this text."""
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}, ()
