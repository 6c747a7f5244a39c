"""Wrong input that reaches a real worker: refused precisely, and batch mates are answered."""

import io
import json
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
PAIRED = [f"models.short.batching.{key}" for key in ("policy=fixed", "max_batch_size=2", "max_hold_s=20")]


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(MODELS, "echo", "short", "Sums", "joined", *(word for key in PAIRED for word in ("--set", key)))


@pytest.fixture(autouse=True)
def lives_on(server: Any) -> Iterator[None]:
    """Whatever a test did to it: the server answers the next one."""
    yield
    assert server.post("/predictions/echo", b'{"a":1}') == (200, b'{"a":1}')
    assert server.get("/readyz")[0] == 200


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
