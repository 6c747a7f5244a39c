"""What every caption backend promises: one answer for each row, known errors, and the same after a pickle.

The example of docs/caption-backends.md is one of them.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.bulk.chat import ChatBackend
from penstock.bulk.sender import ChunkSender
from penstock.bulk.servers import Asked, Backend, PenstockBackend, ask
from penstock.bulk.types import Answer, Chunk, SendOptions, Video
from penstock.errors import BadRequest, PenstockError
from support.captioner import FakeCaptioner
from support.chat import ChatServer, answered

PAGE = Path(__file__).parents[2] / "docs" / "caption-backends.md"


class NoBlock:
    def release(self) -> None:
        pass


class Generate(BaseHTTPRequestHandler):
    """The server of the page's example."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
        right = text.startswith("![](data:image/jpeg;base64,aW1hZ2U=)")
        body = json.dumps({"generated_text": "a caption"} if right else {"error": text}).encode()
        self.send_response(200 if right else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """The module of the page's example."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    module = sys.modules["backend_of_the_page"] = ModuleType("backend_of_the_page")
    exec(source, vars(module))
    yield module
    del sys.modules["backend_of_the_page"]


@pytest.fixture(params=["penstock", "openai", "example"])
def served(request: pytest.FixtureRequest, example: ModuleType) -> Iterator[tuple[Backend, str, str]]:
    """A backend, the URL of its server, and the name of the model."""
    if request.param == "penstock":
        with FakeCaptioner() as captioner:
            yield PenstockBackend(Asked()), captioner.url, "captioner"
    elif request.param == "openai":
        with ChatServer(lambda _: answered("a caption")) as chat:
            yield ChatBackend(Asked()), chat.url, ""
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Generate)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield example.GenerateBackend(Asked()), f"http://127.0.0.1:{server.server_address[1]}", ""
        server.shutdown()
        server.server_close()


def chunk(number: int) -> Chunk:
    video = Video("a.mp4", "a.mp4", 1, 1)
    return Chunk(video, number, [b"aW1hZ2U="], [number], [number / 10], [None], NoBlock())


def sent(backend: Backend, url: str, model: str, chunks: list[Chunk]) -> dict[int, Any]:
    """The result of each chunk."""
    results: dict[int, Any] = {}
    done = threading.Event()

    def keep(chunk: Chunk, result: Any) -> None:
        assert chunk.number not in results
        results[chunk.number] = result
        if len(results) == len(chunks):
            done.set()

    sender = ChunkSender([ask(url, model, backend=backend)], SendOptions(backoff_s=0.01, attempts=2), keep)
    sender.start()
    for one in chunks:
        sender.send(one)
    assert done.wait(30)
    sender.close(0.0)
    return results


def test_each_row_gets_one_answer(served: tuple[Backend, str, str]) -> None:
    backend, url, model = served
    for found in (backend, pickle.loads(pickle.dumps(backend))):
        results = sent(found, url, model, [chunk(n) for n in range(20)])
        for number, result in results.items():
            (answer,) = result
            caption = answer.caption if isinstance(answer, Answer) else answer
            assert caption in ("a caption", f"frame {number}")


def test_a_model_is_described_alike_each_time(served: tuple[Backend, str, str]) -> None:
    backend, url, model = served
    first, again = (ask(url, model, backend=backend) for _ in range(2))
    assert (first.revision, first.parameters, first.inputs) == (again.revision, again.parameters, again.inputs)
    assert bool(first.max_pixels) != bool(first.height and first.width)
    assert first.backend is backend


def test_a_request_that_is_refused_is_an_error_and_not_a_caption(served: tuple[Backend, str, str]) -> None:
    backend, url, model = served
    broken = chunk(0)
    broken.pixels = [b"eA=="]
    if isinstance(backend, PenstockBackend):
        pytest.skip("the fake captioner reads no pixels")
    if isinstance(backend, ChatBackend):
        with ChatServer(lambda _: (400, {"error": {"message": "no image"}}, ())) as server:
            ((answer,),) = sent(backend, server.url, "", [broken]).values()
        assert "no image" in answer.error
        with ChatServer(lambda _: (500, {"error": {"message": "this image kills me"}}, ())) as server:
            ((answer,),) = sent(backend, server.url, "", [broken]).values()
            assert len(server.requests) == 2
        assert answer.error == "answered 500: this image kills me (2 attempts)"
    else:
        (result,) = sent(backend, url, model, [broken]).values()
        assert isinstance(result, PenstockError)
        assert isinstance(result.__cause__, BadRequest)
