import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.waiting import wait_for

SERVE = [sys.executable, "-m", "penstock.cli.main", "serve"]

MODELS = """
    import time
    import numpy as np
    import penstock
    from penstock import metrics

    def echo(items):
        return items

    def sizes(items):
        time.sleep(0.02)
        return [len(items)] * len(items)

    def picky(items):
        for item in items:
            if item == {"bad": 1}:
                raise ValueError("secret path /etc/passwd")
        return items

    def stream(items):
        for i in range(3):
            yield [f"{i};" for _ in items]

    def counted(items):
        metrics.counter("things", len(items), kind="x")
        return [len(x) for x in items]

    def custom(items):
        return [penstock.Response(b"GIF8", "image/gif", 201, {"x-own": "1"}) for _ in items]

    def slow(items):
        time.sleep(1.0)
        return items

    class Sums:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]
        outputs = [penstock.TensorSpec("sum", "FP32", (-1,))]

        def load(self, device):
            self.device = device

        def predict(self, items):
            return [{"sum": item["x"].sum(axis=1)} for item in items]
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    """One server with most of the models, for the tests that need no other one. What it counts, it counts for all."""
    names = ("echo", "sizes", "picky", "stream", "counted", "custom", "Sums")
    kept = ("models.sums.batching.max_batch_size=4", "models.picky.batching.max_hold_s=0.05")
    return serve_all(MODELS, *names, *(word for setting in kept for word in ("--set", setting)))


def infer_body(rows: int) -> bytes:
    data = [float(i) for i in range(rows * 2)]
    return json.dumps(
        {"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 2], "data": data}]}
    ).encode()


def test_a_model_answers_json_text_bytes_and_forms(server: Any) -> None:
    assert server.post("/predictions/echo", b'{"a": [1, 2]}') == (200, b'{"a":[1,2]}')
    assert server.post("/predictions/echo/1", b"hello", "text/plain") == (200, b"hello")
    assert server.post("/predictions/echo", b"\x00\xff", "image/png") == (200, b"\x00\xff")
    form = b'--B\r\ncontent-disposition: form-data; name="f"; filename="a.bin"\r\n\r\nabc\r\n--B--\r\n'
    assert server.post("/predictions/counted", form, "multipart/form-data; boundary=B") == (200, b"1")
    assert server.post("/predictions/custom", b"{}") == (201, b"GIF8")
    assert server.metric("things_total", kind="x", model="counted") == 1


def test_open_inference_routes_answer(server: Any) -> None:
    status, body = server.post("/v2/models/sums/infer", infer_body(3))
    answer = json.loads(body)
    assert status == 200
    assert answer["id"] == "7"
    assert answer["outputs"] == [{"name": "sum", "datatype": "FP32", "shape": [3], "data": [1.0, 5.0, 9.0]}]
    status, body = server.get("/v2/models/sums")
    assert json.loads(body)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/sums/ready", "/ping", "/healthz", "/readyz"):
        assert server.get(path)[0] == 200, path
    paths = json.loads(server.get("/openapi.json")[1])["paths"]
    for path in ("/predictions/sums", "/v2/models/sums/infer"):  # `curl -T` sends PUT
        assert set(paths[path]) == {"post", "put"}
        post, put = ({k: v for k, v in paths[path][m].items() if k != "operationId"} for m in ("post", "put"))
        assert put == post


def test_a_request_of_more_rows_than_the_batch_is_split_and_joined(server: Any) -> None:
    before = server.metric("penstock_batches_total", model="sums")
    status, body = server.post("/v2/models/sums/infer", infer_body(10))
    assert status == 200
    output = json.loads(body)["outputs"][0]
    assert output["shape"] == [10]
    assert output["data"] == [4.0 * i + 1 for i in range(10)]
    assert server.metric("penstock_batches_total", model="sums") - before == 3


def test_concurrent_requests_share_batches(server: Any) -> None:
    def counted() -> list[float]:
        return [server.metric(f"penstock_{what}_total", model="sizes") for what in ("answers", "batches")]

    before = counted()
    with ThreadPoolExecutor(16) as pool:
        answers = [json.loads(b) for _, b in pool.map(lambda _: server.post("/predictions/sizes", b"{}"), range(64))]
    assert max(answers) > 4
    answered, batches = (now - then for now, then in zip(counted(), before, strict=True))
    assert answered == 64
    assert batches < 40


def test_one_bad_item_of_64_fails_alone_and_tells_nothing_private(server: Any) -> None:
    bodies = [b'{"bad": 1}' if i == 17 else b'{"n": %d}' % i for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda b: server.post("/predictions/picky", b), bodies))
    assert [s for s, _ in answers].count(200) == 63
    status, body = answers[17]
    assert status == 500
    assert b"passwd" not in body
    assert b"ValueError" in body


def test_a_stream_comes_in_parts_or_as_events(server: Any) -> None:
    assert server.post("/predictions/stream", b"{}") == (200, b"0;1;2;")
    status, body = server.post("/predictions/stream", b"{}", accept="text/event-stream")
    assert status == 200
    assert re.findall(rb"data: (.*)", body) == [b"0;", b"1;", b"2;"]


def test_a_full_queue_is_429_with_retry_after(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "slow", "--max-batch-size", "1", "--set", "models.slow.batching.max_queue=1")
    with ThreadPoolExecutor(8) as pool:
        answers = [f.result()[0] for f in [pool.submit(server.post, "/predictions/slow", b"{}") for _ in range(8)]]
    assert 429 in answers
    assert 200 in answers
    assert set(answers) == {200, 429}


def test_a_body_over_64_kib_crosses_in_a_slab_which_is_given_back(server: Any) -> None:
    body = os.urandom(6_000_000)
    for _ in range(60):  # more than the pool holds at once
        assert server.post("/predictions/echo", body, "application/octet-stream") == (200, body)


def test_a_body_of_500_mb_passes_with_flat_front_end_memory(serve: Callable[..., Any]) -> None:
    limit = 600 * 2**20
    server = serve(MODELS, "counted", "--set", f"limits.max_body_bytes={limit}", "--set", f"limits.pool_bytes={limit}")
    process = psutil.Process(server.process.pid)

    def anonymous() -> int:
        with open(f"/proc/{process.pid}/smaps_rollup") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("Anonymous:")) * 1024

    before = anonymous()
    host, port = server.url.removeprefix("http://").split(":")
    size = 500 * 10**6
    with socket.create_connection((host, int(port))) as s:
        head = f"POST /predictions/counted HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        s.sendall(head.encode())
        block = bytes(10**6)
        for _ in range(500):
            s.sendall(block)
        answer = s.recv(4096)
    assert answer.endswith(b"\r\n\r\n500000000")
    assert anonymous() - before < 30 * 2**20


def test_sigterm_drains_and_exits_0_and_leaves_no_process(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "slow", "--instances", "2")
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/predictions/slow", b"[1]")
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result() == (200, b"[1]")
    status, out, _ = server.stop(0)  # no second signal: it ends by itself
    assert status == 0
    assert len(out.splitlines()) <= 12
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_a_second_signal_stops_at_once_and_leaves_no_process(serve: Callable[..., Any]) -> None:
    server = serve("import time\ndef stuck(items):\n    time.sleep(60)\n", "stuck")
    children = psutil.Process(server.process.pid).children(recursive=True)

    def hung_up_on() -> None:
        with pytest.raises(OSError):  # noqa: PT011 - reset or closed, as the system likes
            server.post("/predictions/stuck", b"{}")

    thread = threading.Thread(target=hung_up_on)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    status, _, _ = server.stop(signal.SIGINT)
    assert status == 1
    assert time.monotonic() - start < 5
    assert not psutil.wait_procs(children, timeout=5)[1]
    thread.join()


def test_the_curl_line_of_the_banner_works_when_pasted(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "Sums")
    line = ""
    for _ in range(12):
        line = server.process.stdout.readline()
        if "curl" in line:
            break
    done = subprocess.run(["bash", "-c", line.strip() + " -s -f"], capture_output=True, check=False)
    assert done.returncode == 0, (line, done.stderr)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [0.0]


def refused(*arguments: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [*SERVE, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr


def test_wrong_starts_are_told_clearly(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def predict_one(items):\n    return items\n")
    assert "predict_one" in refused("app.py:predict", "--port", "0", cwd=tmp_path)
    assert "nowhere.py" in refused("nowhere.py:f", "--port", "0", cwd=tmp_path)
    assert "token" in refused("app.py:predict_one", "--host", "0.0.0.0", "--port", "0", cwd=tmp_path)
    assert "app.py:Model" in refused("app.py", cwd=tmp_path)
    (tmp_path / "p.toml").write_text('[server]\nprot = 1\n[models.m]\ntarget = "app.py:predict_one"\n')
    message = refused("p.toml", cwd=tmp_path)
    assert "prot" in message
    assert "'port'" in message
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused("app.py:predict_one", "--port", str(port), cwd=tmp_path)
    assert str(port) in message


def test_a_server_that_starts_never_says_that_a_model_of_its_own_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import time\ntime.sleep(0.5)\ndef echo(items):\n    return items\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ports = ["--port", str(port), "--set=server.management_port=0", "--set=server.metrics_port=0"]
    statuses: list[int] = []
    with subprocess.Popen([*SERVE, "app.py:echo", *ports], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 60
            while 200 not in statuses and time.monotonic() < end:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/predictions/echo", b"x")
                try:
                    with urllib.request.urlopen(request, timeout=10) as response:
                        statuses.append(response.status)
                except urllib.error.HTTPError as e:
                    with e:
                        statuses.append(e.code)
                except OSError:  # it does not listen yet
                    time.sleep(0.001)
        finally:
            process.terminate()
    assert set(statuses) == {503, 200}


def test_a_second_server_finds_a_free_port_for_management_and_is_told_of_the_one_for_metrics(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    """Metrics at the default port would be the first server's."""
    with ExitStack() as stack:
        for port in (8081, 8082):
            with contextlib.suppress(OSError):  # taken already
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        server = serve(MODELS, "echo", ports=["--port", "0", "--set", "server.metrics_port=0"])
        said, output = server.said(), refused("app.py:echo", "--port", "0", cwd=tmp_path)
    told = "127.0.0.1:8082: the port is in use; choose another with server.metrics_port (0 takes a free one)"
    assert told in output
    port = int(server.urls["management"].rpartition(":")[2])
    assert port != 8081
    assert f"event=port_in_use listener=management port=8081 consequence=listens_on_{port}" in said
    assert server.get("/ping", "management")[0] == server.get("/metrics", "metrics")[0] == 200
    assert server.urls["management"] in server.stop()[1]  # the banner


def test_a_toml_environment_and_set_are_read_together(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[models.m]\ntarget = "app.py:sizes"\n[models.m.batching]\nmax_batch_size = 8\n')
    server = serve(MODELS, "p.toml", "--set", "models.m.instances=2", env={"PENSTOCK_LIMITS__MAX_BODY_BYTES": "1000"})
    model = json.loads(server.get("/models/m", "management")[1])
    text = json.dumps(model)
    assert '"instances": 2' in text
    assert '"max_batch_size": 8' in text
    assert server.post("/predictions/m", b"x" * 1001)[0] == 413


def test_tokens_are_asked_for_on_every_listener(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("# ours\nopen-sesame-0123456789\n")
    server = serve(MODELS, "echo", "--token-file", "tokens")
    good = {"authorization": "Bearer open-sesame-0123456789"}
    assert server.post("/predictions/echo", b"{}")[0] == 401
    assert server.post("/predictions/echo", b"{}", authorization="Bearer wrong")[0] == 401
    assert server.post("/predictions/echo", b"{}", **good)[0] == 200
    for path, listener in (("/models", "management"), ("/metrics", "metrics")):
        assert server.get(path, listener)[0] == 401
        assert server.get(path, listener, **good)[0] == 200
    assert server.get("/ping")[0] == 200


def test_an_idle_server_uses_no_cpu(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "echo")
    server.post("/predictions/echo", b"{}")
    tree = [psutil.Process(server.process.pid)]
    tree += tree[0].children(recursive=True)

    def cpu() -> float:
        return sum(t.user + t.system for t in (p.cpu_times() for p in tree))

    time.sleep(1.0)
    before = cpu()
    time.sleep(3.0)
    assert cpu() - before <= 0.03


def test_a_killed_worker_costs_no_request(serve: Callable[..., Any]) -> None:
    server = serve(MODELS, "sizes", "--instances", "2")
    worker = psutil.Process(server.process.pid).children()[0]
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(server.post, "/predictions/sizes", b"{}") for _ in range(100)]
        time.sleep(0.05)
        worker.kill()
        statuses = [a.result()[0] for a in answers]
    assert statuses == [200] * 100
    assert server.get("/readyz")[0] == 200
    wait_for(lambda: server.metric("penstock_workers_up") == 2)


def test_with_keep_going_the_other_models_serve_while_one_does_not_load(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    source = """
    import os

    class Broken:
        def __init__(self):
            if not os.path.exists("weights"):
                raise RuntimeError("no weights in /some/folder/weights.bin")

        def predict(self, items):
            return items

    def works(items):
        return items
    """
    server = serve(source, "Broken", "works", "--keep-going")
    assert server.post("/predictions/works", b"[1]")[0] == 200
    assert server.post("/predictions/broken", b"[1]")[0] == 503
    assert server.get("/readyz")[0] == 503
    index = json.loads(server.post("/v2/repository/index", b"")[1])
    broken, works = sorted(index, key=lambda model: model["name"])
    assert (broken["state"], works["state"]) == ("UNAVAILABLE", "READY")
    assert "no weights in weights.bin" in broken["reason"]
    (tmp_path / "weights").touch()
    wait_for(lambda: server.get("/readyz")[0] == 200)  # until the next attempt to load
    assert server.post("/predictions/broken", b"[1]")[0] == 200
