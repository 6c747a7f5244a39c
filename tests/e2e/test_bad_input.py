"""Wrong, slow and hostile input to a real server with real workers: refused precisely, and others are answered."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.serving.protocols.oip_messages import encode_arrays

MODELS = """
    import os
    import time
    import penstock
    from penstock import metrics

    def echo(items):
        metrics.counter("echoed", len(items))
        return items

    def gated(items):
        while not os.path.exists("gate"):
            time.sleep(0.005)
        return items

    def short(items):
        return [item for item in items if item != "lost"]

    class Sums:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]
        outputs = [penstock.TensorSpec("sum", "FP32", (-1,))]

        def predict(self, items):
            return [{"sum": item["x"].sum(axis=1)} for item in items]

    def joined(items: list[list[str]]):
        return ["".join(item) for item in items]

    def unfit(item: str) -> str:
        return item
"""
LIMIT = 300_000
FLAGS = [
    *("--set", f"limits.max_body_bytes={LIMIT}"),
    *("--set", "limits.header_timeout_s=0.4"),
    *("--set", "limits.body_timeout_s=0.4"),
    *("--set", "models.short.batching.policy=fixed"),
    *("--set", "models.short.batching.max_batch_size=2"),
    *("--set", "models.short.batching.max_hold_s=20"),
]
CHUNKED = (
    b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(MODELS, "echo", "gated", "short", "Sums", "joined", *FLAGS)


@pytest.fixture(autouse=True)
def lives_on(server: Any) -> Iterator[None]:
    """Whatever a test did to it: the server answers the next one."""
    yield
    assert server.post("/predictions/echo", b'{"a":1}') == (200, b'{"a":1}')
    assert server.get("/readyz")[0] == 200


class Raw:
    """A connection for bytes that no HTTP library would send."""

    def __init__(self, server: Any) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def flood(self, data: bytes, times: int) -> None:
        """Sends until it is all gone or the server has had enough."""
        try:
            for _ in range(times):
                self.socket.sendall(data)
        except OSError:
            pass

    def rest(self) -> bytes:
        """All that comes until the server closes; a reset ends it too."""
        found = b""
        try:
            while data := self.socket.recv(65536):
                found += data
        except ConnectionResetError:
            pass
        return found

    def until(self, end: bytes) -> bytes:
        found = b""
        while not found.endswith(end):
            data = self.socket.recv(65536)
            assert data, found
            found += data
        return found


def head(path: str, length: int, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *lines, "", ""]).encode()


def anonymous_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"Anonymous: +(\d+)", text)[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/predictions/eco", 404),
        ("POST", "/predictions/echo/9", 404),
        ("POST", "/v2/models/echo/versions/9/infer", 404),
        ("GET", "/v2/models/nobody/ready", 404),
        ("POST", "/predictions/%C3%A9cho", 404),
        ("POST", "/predictions/../../etc/passwd", 404),
        ("POST", "/predictions/%2e%2e%2fetc", 404),
        ("POST", "/predictions/%00", 404),
        ("POST", "/predictions/%ff", 400),
        ("POST", "/nothing", 404),
        ("GET", "/predictions/echo", 405),
        ("DELETE", "/v2/models/echo", 405),
    ],
)
def test_unknown_names_and_methods(server: Any, method: str, path: str, status: int) -> None:
    with Raw(server) as raw:
        raw.send(f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_a_name_may_come_percent_encoded(server: Any) -> None:
    assert server.post("/predictions/%65cho?x=1", b"[1]") == (200, b"[1]")


@pytest.mark.parametrize("start", [head("/predictions/echo", 10**9), CHUNKED], ids=["length", "endless-chunked"])
def test_a_body_over_the_limit_is_413_and_closed_and_memory_stays_flat(server: Any, start: bytes) -> None:
    before = anonymous_bytes(server.process.pid)
    with Raw(server) as raw:
        raw.send(start)
        raw.flood(b"10000\r\n" + b"x" * 65536 + b"\r\n", 600)  # 40 MB; as a body of known length the framing is data
        raw.rest()  # the answer, or a reset: this client did not care to read it in time
    with Raw(server) as raw:  # again, and this one does
        raw.send(start)
        if start is CHUNKED:
            raw.send(b"%x\r\n" % (LIMIT + 1) + b"x" * (LIMIT + 1))
        answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"limits.max_body_bytes" in answer
    assert b"connection: close" in answer
    assert anonymous_bytes(server.process.pid) - before < 8 * 2**20


def test_a_silent_connection_is_closed_without_a_word(server: Any) -> None:
    with Raw(server) as raw:
        assert raw.rest() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /predictions/echo HTTP/1.1\r\nHo",
        head("/predictions/echo", 100) + b"half",
        head("/predictions/echo", 200_000) + b"x" * 100_000,
        CHUNKED + b"5\r\nab",
    ],
    ids=["half-a-head", "half-a-body", "half-a-large-body", "half-a-chunk"],
)
def test_what_comes_by_half_is_timed_out(server: Any, sent: bytes) -> None:
    with Raw(server) as raw:
        raw.send(sent)
        answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer


def test_ninety_megabytes_of_headers_are_431_with_flat_memory(server: Any) -> None:
    before = anonymous_bytes(server.process.pid)
    with Raw(server) as raw:
        raw.send(b"GET /ping HTTP/1.1\r\n")
        raw.send((b"X-Header: " + b"h" * 8000 + b"\r\n") * 18)
        assert raw.until(b"}}").startswith(b"HTTP/1.1 431 ")
        raw.flood((b"X-Header: " + b"h" * 8000 + b"\r\n") * 100, 112)
    assert anonymous_bytes(server.process.pid) - before < 8 * 2**20


def test_pipelined_requests_of_several_models_are_answered_in_order(server: Any, tmp_path: Path) -> None:
    gate = Path(f"/proc/{server.process.pid}/cwd/gate")
    try:
        with Raw(server) as raw:
            raw.send(head("/predictions/gated", 3) + b"[1]" + head("/predictions/echo", 3) + b"[2]")
            last = head("/predictions/echo", 1, "Content-Type: application/json", "Connection: close")
            raw.send(b"GET /healthz HTTP/1.1\r\n\r\n" + last + b"{")
            while server.metric("echoed_total", model="echo") == 0:
                pass  # the second is answered, and waits for the first
            gate.touch()
            answer = raw.rest()
    finally:
        gate.unlink(missing_ok=True)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert bodies[:3] == [b"[1]", b"[2]", b'{"live":true}']
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"200", b"400"]


def test_expect_100_continue(server: Any) -> None:
    with Raw(server) as raw:
        raw.send(head("/predictions/echo", 3, "Expect: 100-continue", "Connection: close"))
        assert raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(b"[7]")
        assert raw.rest().endswith(b"\r\n\r\n[7]")
    with Raw(server) as raw:
        raw.send(head("/predictions/echo", LIMIT + 1, "Expect: 100-continue"))
        assert raw.rest().startswith(b"HTTP/1.1 413 ")


def test_a_body_in_chunks_of_one_byte_arrives_whole(server: Any) -> None:
    body = bytes(range(97, 123)) * 100
    with Raw(server) as raw:
        raw.send(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert raw.until(body).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", [20, 200_000])
def test_truncated_json_is_400_with_its_byte_and_batch_mates_are_answered(server: Any, size: int) -> None:
    body = b'["' + b"x" * size
    with ThreadPoolExecutor(8) as pool:
        bad = pool.submit(server.post, "/predictions/echo", body)
        good = [pool.submit(server.post, "/predictions/echo", b"[%d]" % i) for i in range(7)]
        assert [g.result() for g in good] == [(200, b"[%d]" % i) for i in range(7)]
    assert bad.result()[0] == 400
    assert b"byte %d" % len(body) in bad.result()[1]


def tensor(**changed: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2], **changed}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (tensor(datatype="INT64"), "FP32"),
        (tensor(datatype="FLOAT"), "FLOAT"),
        (tensor(shape=[1, 3], data=[1, 2, 3]), "[-1, 2]"),
        (tensor(shape=[2]), "[-1, 2]"),
        (tensor(shape=[3, 2]), "6 elements"),
        (tensor(shape=[0, 2]), "0 elements"),
        (tensor(shape=[-1, 2]), "negative"),
        (tensor(shape=[10**18, 2]), "elements"),
        (tensor(data=["a", "b"]), "strings"),
        (tensor(data=[[1], [2, 3]]), "ragged"),
        (tensor(data=[1, None]), "null"),
        (tensor(name="y"), "unknown input"),
        ({"name": "x"}, "shape"),
    ],
)
def test_a_wrong_tensor_is_400_and_says_what_was_expected(server: Any, wrong: dict[str, Any], word: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(server.post, "/v2/models/sums/infer", json.dumps({"inputs": [wrong]}).encode())
        good = pool.submit(server.post, "/v2/models/sums/infer", json.dumps({"inputs": [tensor()]}).encode())
    assert good.result()[0] == 200
    status, body = bad.result()
    assert (status, word in json.loads(body)["error"]) == (400, True), body


def test_a_tensor_without_rows_gets_an_answer_without_rows(server: Any) -> None:
    empty, npy = {"inputs": [tensor(shape=[0, 2], data=[])]}, io.BytesIO()
    np.save(npy, np.zeros((0, 2), np.float32))
    head, buffers = encode_arrays({"x": np.zeros((0, 2), np.float32)})
    for body, headers in (
        (json.dumps(empty).encode(), {}),
        (npy.getvalue(), {"content_type": "application/x-npy"}),
        (b"".join([head, *buffers]), {"inference_header_content_length": str(len(head))}),
    ):
        status, answer = server.post("/v2/models/sums/infer", body, **headers)
        assert status == 200, answer
        [output] = json.loads(answer)["outputs"]
        assert (output["name"], output["shape"], output["data"]) == ("sum", [0], [])


@pytest.mark.parametrize("budget", ["0", "-5"])
def test_a_deadline_already_past_is_504_and_never_run(server: Any, budget: str) -> None:
    server.post("/predictions/echo", b"[]")
    before = server.metric("echoed_total", model="echo")
    assert server.post("/predictions/echo", b"[]", x_deadline_ms=budget)[0] == 504
    assert server.metric("echoed_total", model="echo") == before


def test_a_deadline_that_passes_in_the_queue_is_504_and_never_run(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "gated", "--max-batch-size", "1")
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.post, "/predictions/gated", b"[%d]" % i) for i in range(2)]  # one runs, one ahead
        while server.metric("penstock_requests_total", model="gated") < 2:
            pass
        late = server.post("/predictions/gated", b"[9]", x_deadline_ms="30")
        Path(f"/proc/{server.process.pid}/cwd/gate").touch()
        assert [r.result()[0] for r in running] == [200, 200]
    assert late[0] == 504
    assert server.metric("penstock_answers_total", model="gated") == 2


def test_a_deadline_that_passes_during_the_run_is_504_on_time(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "gated", "--set", "models.gated.batching.run_timeout_s=20")
    status, body = server.post("/predictions/gated", b"[1]", x_deadline_ms="200")  # the gate is shut
    assert (status, b"during the run" in body) == (504, True)
    Path(f"/proc/{server.process.pid}/cwd/gate").touch()
    assert server.post("/predictions/gated", b"[2]", x_deadline_ms="15000") == (200, b"[2]")


@pytest.mark.parametrize("priority", ["0", "2", "77", "999999999"])
def test_a_priority_beyond_the_classes_is_the_last_class(server: Any, priority: str) -> None:
    assert server.post("/predictions/echo", b"[1]", x_priority=priority) == (200, b"[1]")


@pytest.mark.parametrize("priority", ["-1", "1.5", "high", "9999999999"])
def test_a_priority_that_is_no_class_is_400(server: Any, priority: str) -> None:
    assert server.post("/predictions/echo", b"[1]", x_priority=priority)[0] == 400


def test_an_item_without_a_result_fails_alone(server: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        lost, kept = pool.map(lambda body: server.post("/predictions/short", body), (b'"lost"', b'"kept"'))
    assert kept == (200, b"kept")
    assert lost[0] == 500
    assert b"0 results for 1 item" in lost[1]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'["a","b"]', 200, b"ab"),
        (b'["a",1]', 400, b"the item does not fit: Expected `str`, got `int` - at `$[1]`"),
        (b'{"a":1}', 400, b"the item does not fit: Expected `array`, got `object`"),
        (b"null", 400, b"the item does not fit: Expected `array`, got `null`"),
        (b'\xef\xbb\xbf["a"]', 200, b"a"),
    ],
)
def test_an_item_of_another_type_never_reaches_predict(server: Any, body: bytes, status: int, told: bytes) -> None:
    found, answer = server.post("/predictions/joined", body, content_type="application/json")
    assert (found, told in answer) == (status, True), answer


def test_a_predict_of_one_item_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(MODELS))
    command = [sys.executable, "-m", "penstock", "serve", "app.py:unfit", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "predict takes one str, but it gets all items of a batch: write predict(items: list[str])" in done.stderr
