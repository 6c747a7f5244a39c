"""What HTTP allows a client to send, on the routes of every port, and what no answer may hold."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import zlib
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from penstock.serving.protocols.oip_messages import encode_arrays

SOURCE = """
    import numpy as np
    import penstock

    def show(items):
        return [f"{len(i)} bytes" if isinstance(i, (bytes, memoryview)) else repr(i) for i in items]

    def tensors(items):
        return [{"sum": item["x"].sum(axis=1)} for item in items]

    @penstock.model(task="text-generation")
    def text(items):
        return [item.prompt for item in items]

    HALF = chr(0xD83D)

    def half(items):
        return [HALF if item == "text" else {"a": [HALF]} for item in items]

    def half_response(items):
        return [penstock.Response(HALF, "text/plain") for _ in items]

    def half_stream(items):
        yield ["a" for _ in items]
        yield [HALF for _ in items]

    def half_tensors(items):
        return [{"x": np.array([HALF], object)} for _ in items]

    @penstock.model(task="text-generation")
    def half_text(items):
        return [HALF for _ in items]

    @penstock.model(task="text-generation")
    def half_parts(items):
        yield ["a" for _ in items]
        yield [HALF for _ in items]

    def sound(items):
        for part in (b"RIFF\\x00\\r\\n\\xff", b"\\n", b"\\xf0\\x9f"):
            yield [part for _ in items]
"""
NAMES = (
    "show", "tensors", "text", "sound",
    "half", "half_response", "half_stream", "half_tensors", "half_text", "half_parts",
)  # fmt: skip
OFFERS = [
    {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAA"},
    {"Connection": "upgrade", "Upgrade": "TLS/1.0"},
    {"Connection": "keep-alive, Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"},
]
JSON = "application/json"
BLOB = "application/octet-stream"
TENSORS = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, *NAMES, "--set", "server.management=true")


class Asker:
    """Asks a server on one connection."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=30)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, kind: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        named = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
        self._connection.request(method, path, body, named)
        response = self._connection.getresponse()
        return response.status, response.read()


def test_an_offer_is_ignored_on_torchserves_routes(torchserve: Any) -> None:
    handler = "def handle(data, context):\n    return [repr(r.get('body', r.get('data'))) for r in data or ()]\n"
    torchserve.add_model(handler)
    torchserve.configure()
    torchserve.start("--ncs", "--models", "m=m.mar", "--disable-token-auth")
    paths = ["/predictions/m", "/invocations", "/models/m/invoke", "/v1/models/m:predict", "/m/predict"]
    with Asker(torchserve.url()) as asker:
        for path in paths:
            plain = asker.ask("POST", path, "text/plain", b"hello")
            assert plain[0] == 200
            assert b"hello" in plain[1]
            for offer in OFFERS:
                assert asker.ask("POST", path, "text/plain", b"hello", **offer) == plain
        packed = gzip.compress(b"hello")  # as TorchServe: its handlers unpack
        found = asker.ask("POST", paths[0], BLOB, packed, content_encoding="gzip")
        assert found == (200, repr(bytearray(packed)).encode())
    torchserve.run("torchserve", "--stop")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("size", [5, 200_000])
def test_curl_that_offers_http2_is_answered(server: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "body").write_bytes(bytes(size))
    command = ["curl", "-sS", "--http2", "-H", f"content-type: {BLOB}", "--data-binary", f"@{tmp_path / 'body'}"]
    done = subprocess.run([*command, f"{server.url}/predictions/show"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{size} bytes", "")


ASKED = {**TENSORS, "parameters": {"binary_data_output": True}}
HALF = b"half a surrogate pair"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predictions/half", b'"text"'),
        ("/predictions/half", b"1"),
        ("/predictions/half_response", b"1"),
        ("/v1/models/half:predict", b'{"instances": [1]}'),
        ("/v2/models/half_tensors/infer", json.dumps(TENSORS).encode()),
        ("/v2/models/half_tensors/infer", json.dumps(ASKED).encode()),
        ("/v1/completions", b'{"model": "half_text", "prompt": "a"}'),
        ("/v1/chat/completions", b'{"model": "half_text", "messages": [{"role": "user", "content": "a"}]}'),
    ],
)
def test_half_a_character_in_an_answer_is_a_clear_500(server: Any, path: str, body: bytes) -> None:
    status, found = server.post(path, body)
    assert (status, HALF in found) == (500, True), found
    json.loads(found)


@pytest.mark.parametrize(
    ("path", "body", "before"),
    [
        ("/predictions/half_stream", b"1", b"data: a\n\n"),
        ("/v1/completions", b'{"model": "half_parts", "prompt": "a", "stream": true}', b'"text":"a"'),
    ],
)
def test_half_a_character_in_a_stream_is_an_event_of_its_own(
    server: Any, path: str, body: bytes, before: bytes
) -> None:
    status, found = server.post(path, body, accept="text/event-stream")
    good, bad = found.decode().split("\n\n")[:2]
    assert status == 200
    assert before.strip() in good.encode()
    assert HALF.decode() in bad


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predictions/show", rb'{"a":"\ud83d"}'),
        ("/v1/models/show:predict", rb'{"instances": ["\ude00"]}'),
        ("/v2/models/tensors/infer", rb'{"inputs": [{"name": "\ud83d"}]}'),
        ("/v1/completions", rb'{"model": "text", "prompt": "\ud83d!"}'),
    ],
)
def test_half_a_character_in_a_request_is_named(server: Any, path: str, body: bytes) -> None:
    status, found = server.post(path, body)
    assert (status, b"holds half a surrogate pair (byte %d)" % body.index(b"\\") in found) == (400, True), found


def test_bytes_are_events_in_base64(server: Any) -> None:
    with Asker(server.url) as asker:
        status, body = asker.ask("POST", "/predictions/sound", JSON, b"1", accept="text/event-stream")
    found = [event.split("\n") for event in body.decode().split("\n\n")[:-1]]
    assert status == 200
    assert {event[0] for event in found} == {"event: base64"}
    assert [b64decode(event[1].removeprefix("data: ")) for event in found] == [b"RIFF\0\r\n\xff", b"\n", b"\xf0\x9f"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_in_a_coding_is_unpacked_on_the_routes_of_every_port(server: Any, coding: str) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[coding]
    large = json.dumps(list(range(100_000))).encode()
    head, buffers = encode_arrays({"x": np.ones((1, 40_000), np.float32)})
    length = {"inference_header_content_length": str(len(head))}
    requests: dict[str, list[tuple[str, str, str, bytes, dict[str, str]]]] = {
        "inference": [
            ("POST", "/predictions/show", JSON, b'{"a": 1}', {}),
            ("POST", "/predictions/show", JSON, large, {}),
            ("POST", "/predictions/show", "text/plain", b"hello", {}),
            ("POST", "/predictions/show", BLOB, bytes(300_000), {}),
            ("POST", "/v2/models/tensors/infer", JSON, json.dumps(TENSORS).encode(), {}),
            ("POST", "/v2/models/tensors/infer", BLOB, b"".join([head, *buffers]), length),
            ("POST", "/v1/models/show:predict", JSON, b'{"instances": [1]}', {}),
        ],
        "management": [("PUT", "/models/show/scale", JSON, b'{"instances": 1}', {})],
    }
    for port, rows in requests.items():
        with Asker(server.urls[port]) as asker:
            for method, path, kind, body, headers in rows:
                plain = asker.ask(method, path, kind, body, **headers)
                packed = asker.ask(method, path, kind, pack(body), content_encoding=coding + " ", **headers)
                assert plain[0] == 200, plain
                assert packed == plain, path
            for coded in (b"x", pack(b"1")[:-1], pack(b"1") + b"x"):
                assert asker.ask(method, path, kind, coded, content_encoding=coding)[0] == 400
            status, text = asker.ask(method, path, kind, b"1", content_encoding="br")
            assert (status, b"found Content-Encoding 'br', expected gzip, deflate or identity" in text) == (415, True)
    completion = b'{"model": "text", "prompt": "hello"}'
    assert server.post("/v1/completions", pack(completion), content_encoding=coding)[0] == 200


def test_bombs_reach_no_worker_and_others_are_answered(server: Any) -> None:
    bomb = gzip.compress(b'{"inputs": [' + b" " * (60 * 2**20))
    assert len(bomb) < 64 * 1024
    with ThreadPoolExecutor(21) as pool:
        paths = ["/v2/models/tensors/infer", "/predictions/show"] * 10
        bombs = [pool.submit(server.post, path, bomb, content_encoding="gzip") for path in paths]
        good = [server.post("/v2/models/tensors/infer", json.dumps(TENSORS).encode())[0] for _ in range(20)]
        found = [each.result() for each in bombs]
    assert good == [200] * 20
    assert {status for status, _ in found} == {413}
    assert all(b"more than 200 times its size" in text for _, text in found)
