"""A fake captioner over HTTP that captions by frame number and fails in every way that a test scripts."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Answerer: TypeAlias = "Callable[[Incoming, FakeCaptioner], None]"


class Gone(Exception):
    """The client closed the connection."""


class Incoming:
    """A request whose head was read; `body` reads the rest on first use."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        head = self._until(b"\r\n\r\n").decode("latin-1")
        first, *lines = head.split("\r\n")
        self.method, self.path, _ = first.split(" ")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._body: bytes | None = None

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._rest:
            self._more()
        found, _, self._rest = self._rest.partition(mark)
        return found

    def _more(self) -> None:
        data = self.connection.recv(1 << 18)
        if not data:
            raise Gone
        self._rest += data

    @property
    def body(self) -> bytes:
        if self._body is None:
            length = int(self.headers.get("content-length", "0"))
            data = bytearray(self._rest)
            while len(data) < length:
                piece = self.connection.recv(1 << 18)
                if not piece:
                    raise Gone
                data += piece
            self._body, self._rest = bytes(data[:length]), bytes(data[length:])
        return self._body

    @property
    def frames(self) -> list[int]:
        """The frame numbers: the last input."""
        head = json.loads(self.body[: int(self.headers["inference-header-content-length"])])
        index = head["inputs"][-1]
        assert (index["name"], index["datatype"]) == ("frame_index", "INT64"), index
        return list(struct.unpack(f"<{index['shape'][0]}q", self.body[-8 * index["shape"][0] :]))

    def respond(self, status: int, body: bytes, *headers: str, kind: str = "application/json") -> None:
        """Sends a complete response."""
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


class FakeCaptioner:
    """Listens on a port of 127.0.0.1 between `start` and `stop`, which may repeat; one thread per connection.

    Each inference request uses up the first entry of `script`; afterwards the server answers properly. `seen` collects
    these requests. `parameters` and `revision` may change while it runs.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, token: str | None = None, **parameters: Any) -> None:
        self.revision = "r1"
        self.parameters: dict[str, Any] = {
            "task": "image-to-text", "model": "fake", "height": 8, "width": 8, "layout": "NHWC", "kernel": "bicubic",
            "prompt": "", "max_new_tokens": 8, "precision": "fp32", "instances": 1, "max_batch_size": 4, **parameters,
        }  # fmt: skip
        self.tls = tls
        self.token = token
        self.script: deque[Answerer] = deque()
        self.metadata: deque[Answerer] = deque()  # the same for requests with GET
        self.seen: list[Incoming] = []
        self.asked = 0  # requests with GET
        self.connections = 0
        self.most_at_once = 0
        self.port = 0
        self._busy = 0
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"{'https://localhost' if self.tls else 'http://127.0.0.1'}:{self.port}"

    def script_next(self, *answers: Answerer) -> None:
        """Scripts the next inference requests."""
        self.script.extend(answers)

    def start(self) -> None:
        """Listens, on the same port as the last time."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._run(self._accept, self._listener)

    def stop(self) -> None:
        """Like a killed process: the port refuses connections, and open ones are reset."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            reset(connection)
        threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> FakeCaptioner:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
                self.connections += 1
            self._run(self._serve, connection)

    def _serve(self, plain: socket.socket) -> None:
        connection = plain
        try:
            if self.tls is not None:
                connection = self.tls.wrap_socket(plain, server_side=True)
                with self._lock:
                    self._open.discard(plain)
                    self._open.add(connection)
            while True:
                self._answer(Incoming(connection))
        except (OSError, Gone):
            pass
        finally:
            with self._lock:
                self._open -= {plain, connection}
            connection.close()

    def _answer(self, request: Incoming) -> None:
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return request.respond(401, b'{"error": "no"}')
        if request.method == "GET":
            with self._lock:
                self.asked += 1
                how = self.metadata.popleft() if self.metadata else describe
            return how(request, self)
        with self._lock:
            self.seen.append(request)
            how = self.script.popleft() if self.script else caption
            self._busy += 1
            self.most_at_once = max(self.most_at_once, self._busy)
        try:
            how(request, self)
        finally:
            with self._lock:
                self._busy -= 1


def reset(connection: socket.socket) -> None:
    """Resets a connection: the other side reads an error, not an end of file."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads
    except OSError:
        pass
    connection.close()


# ---- responses for the script


def describe(request: Incoming, server: FakeCaptioner) -> None:
    """The metadata, or readiness."""
    if request.path.endswith("/ready"):
        return request.respond(200, b'{"ready": true}')
    specs = {"inputs": [("frames", "UINT8", [-1, -1, -1, 3]), ("jpeg", "BYTES", [-1]), ("frame_index", "INT64", [-1])],
             "outputs": [("caption", "BYTES", [-1]), ("frame_index", "INT64", [-1])]}  # fmt: skip
    tensors = {
        side: [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in those]
        for side, those in specs.items()
    }
    parameters = {**server.parameters, "revision": server.revision}
    metadata = {"name": "captioner", "versions": ["1"], "platform": "python", **tensors, "parameters": parameters}
    request.respond(200, json.dumps(metadata).encode())


def answer_of(frames: Iterable[int], revision: str | None, model: str = "captioner") -> bytes:
    """The response body for these frames, with caption "frame 7" for frame 7."""
    numbers = list(frames)
    body: dict[str, Any] = {
        "model_name": model,
        "model_version": "1",
        "outputs": [
            {"name": "caption", "shape": [len(numbers)], "datatype": "BYTES", "data": [f"frame {n}" for n in numbers]},
            {"name": "frame_index", "shape": [len(numbers)], "datatype": "INT64", "data": numbers},
        ],
    }
    return json.dumps(body | ({"parameters": {"revision": revision}} if revision else {})).encode()


def caption(request: Incoming, server: FakeCaptioner) -> None:
    """Answers properly."""
    request.respond(200, answer_of(request.frames, server.revision))


def with_status(status: int, *headers: str, early: bool = False) -> Answerer:
    """An error status; `early` sends it before reading the body, and closes the connection."""

    def answer(request: Incoming, server: FakeCaptioner) -> None:
        if not early:
            _ = request.body
        request.respond(status, json.dumps({"error": f"it is a {status}"}).encode(), *headers)
        if early:  # the response must arrive before the reset that unread bytes cause
            request.connection.shutdown(socket.SHUT_WR)
            while request.connection.recv(1 << 18):
                pass
            raise Gone

    return answer


def with_body(body: Callable[[list[int], FakeCaptioner], bytes], kind: str = "application/json") -> Answerer:
    """Status 200 with a body made from the frames."""
    return lambda request, server: request.respond(200, body(request.frames, server), kind=kind)


def too_few(request: Incoming, server: FakeCaptioner) -> None:
    """Omits one row."""
    request.respond(200, answer_of(request.frames[:-1], server.revision))


def shuffled(request: Incoming, server: FakeCaptioner) -> None:
    """Sends all rows in another order."""
    request.respond(200, answer_of(request.frames[::-1], server.revision))


def with_reset(after: bytes = b"") -> Answerer:
    """Resets the connection after reading the request and sending `after`."""

    def answer(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        request.connection.sendall(after)
        reset(request.connection)
        raise Gone

    return answer


def with_raw(*pieces: bytes, forever: bytes = b"") -> Answerer:
    """Sends raw bytes, then `forever` until the client closes the connection."""

    def answer(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        for piece in pieces:
            request.connection.sendall(piece)
        while forever:
            request.connection.sendall(forever)

    return answer


def hang_up(request: Incoming, server: FakeCaptioner) -> None:
    """Answers properly, then closes the connection without announcing it."""
    caption(request, server)
    raise Gone


def with_wait(event: threading.Event, then: Answerer = caption) -> Answerer:
    """Waits for the event before answering."""

    def answer(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        event.wait(30)
        then(request, server)

    return answer
