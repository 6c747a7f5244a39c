"""Servers started for a measurement and servers found, as real processes, until their end."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.client.endpoint import parse_url
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import ServerStats
from penstock.perf.bench.probe import ServerProbe
from penstock.perf.bench.server import ServerProcess, fetch
from penstock.perf.bench.target import Target, open_target
from penstock.perf.bench.workload import payloads
from support.waiting import wait_for

APP = """
import sys
import time

from penstock import TensorSpec


class Sum:
    inputs = (TensorSpec("x", "FP32", (-1, 3)),)
    parameters = {"example": {"x": [[1, 2, 3]]}}

    def predict(self, items):
        print("predicting", len(items), file=sys.stderr, flush=True)
        time.sleep(0.01)
        return [float(sum(item["x"][0])) for item in items]


class Talks:
    def predict(self, items):
        for item in items:
            for _ in range(100):
                print(item * 5_000)
        return items


class Endless:
    def load(self, device):
        time.sleep(600)

    def predict(self, items):
        return items
"""
HANDLER = """
def handle(data, context):
    return None if data is None else [bytes(row["body"]).decode().upper() for row in data]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("app")
    (found / "app.py").write_text(APP)
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Target]:
    with open_target(f"{folder}/app.py:Sum", management=True) as target:
        yield target


def post(target: Target, count: int) -> None:
    payload = payloads(None, target)[0]
    for _ in range(count):
        response = fetch(target.endpoint, "POST", target.path, payload.body, content_type=payload.content_type)
        assert (response.status, response.json()) == (200, 6.0)


def test_an_app_is_served_for_the_run_and_responds_to_its_example(served: Target) -> None:
    assert (served.model, served.path) == ("sum", "/predictions/sum")
    assert served.server is not None
    assert served.server.alive
    assert served.pids == (served.server.pid,)
    post(served, 1)
    chance = payloads("random", served)[0]
    response = fetch(served.endpoint, "POST", chance.path, chance.body, content_type=chance.content_type)
    assert response.status == 200
    assert "predicting 1" in served.server.output()


def test_models_of_a_server_that_was_started_to_be_changed_can_be(served: Target) -> None:
    assert served.management is not None
    response = fetch(served.management, "PUT", "/models/sum/scale", b'{"instances": 1}')
    assert response.ok, response.text


def test_a_server_that_runs_is_found_with_its_process_and_its_other_listeners(served: Target) -> None:
    with open_target(served.endpoint.url) as found:
        assert (found.model, found.path, found.inputs) == (served.model, served.path, served.inputs)
        assert (found.pids, found.metrics, found.management) == (served.pids, served.metrics, served.management)
        assert found.server is None
    assert served.server is not None
    assert served.server.alive  # a found server is not stopped


def test_the_servers_side_of_a_run_is_reported(served: Target) -> None:
    async def watch() -> ServerStats | None:
        probe = ServerProbe(served)
        await probe.start()
        await asyncio.to_thread(post, served, 5)
        return await probe.stop()

    side = asyncio.run(watch())
    assert side is not None
    assert (side.batches, side.mean_batch) == ({"1": 5}, 1.0)
    assert side.run_s is not None
    assert 0.01 <= side.run_s < 1
    assert side.preprocess_s is not None
    assert side.postprocess_s is not None
    assert side.queue_s is not None
    assert side.memory_bytes is not None
    assert side.memory_bytes > 2 * 10**7  # at least two processes
    assert side.cpu is not None


def test_an_archive_is_served_as_torchserve_does(tmp_path: Path) -> None:
    (tmp_path / "upper.py").write_text(HANDLER)
    packed = [sys.executable, "-m", "penstock.cli.main", "archive", "--model-name", "upper", "--version", "1.0"]
    subprocess.run([*packed, "--handler", "upper.py", "--export-path", "."], cwd=tmp_path, check=True)
    with open_target(str(tmp_path / "upper.mar")) as target:
        assert (target.model, target.path, target.protocol) == ("upper", "/predictions/upper", "torchserve")
        response = fetch(target.endpoint, "POST", target.path, b"abc", content_type="application/octet-stream")
        assert (response.status, response.body) == (200, b"ABC")
        with open_target(f"{target.endpoint.url}/predictions/upper") as found:
            assert (found.protocol, found.metrics) == ("torchserve", target.metrics)


def test_a_name_missing_from_the_app_is_wrong_usage_in_one_line(folder: Path) -> None:
    server = ServerProcess(["app.py:Summ"], cwd=folder)
    with pytest.raises(ConfigError, match=r"^'.*/app\.py' has no 'Summ'; did you mean 'Sum'\? \(it has: .*\)$"):
        server.start()
    assert not server.alive
    server.stop()


def test_only_the_end_of_long_output_is_kept(folder: Path) -> None:
    with open_target(f"{folder}/app.py:Talks") as target:
        for letter in (b'"a"', b'"b"', b'"c"'):
            assert fetch(target.endpoint, "POST", target.path, letter).ok
        assert target.server is not None
        read = target.server.output  # a worker's output passes through the server's log
        output = wait_for(lambda: (said := read()).count("c" * 5_000 + "\n") >= 100 and said)
    assert output.endswith("c" * 5_000 + "\n")
    assert len(output) == 2**20


def test_a_server_that_is_not_ready_in_time_is_stopped(folder: Path) -> None:
    server = ServerProcess(["app.py:Endless"], cwd=folder, start_s=1.0)
    with pytest.raises(PenstockError, match="not ready after 1 s"):
        server.start()
    assert not server.alive


def test_stop_from_another_thread_ends_the_start_of_a_server(folder: Path) -> None:
    server = ServerProcess(["app.py:Endless"], cwd=folder)
    errors: list[PenstockError] = []

    def start() -> None:
        try:
            server.start()
        except PenstockError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while not server.alive:
        time.sleep(0.01)
    server.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert "did not start" in str(errors[0])
    assert not server.alive


PARENT = """
import sys, time
from penstock.perf.bench.server import ServerProcess

server = ServerProcess(["app.py:Sum"]).start()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_stops_when_its_parent_ends_in_any_way(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    workers = server.children()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert not psutil.wait_procs([server, *workers], timeout=30)[1]
    assert workers


def test_the_environment_does_not_configure_a_measured_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVER__HOST", "no such host")
    trace = tmp_path / "arrivals.jsonl"
    with ServerProcess(["app.py:Sum", "--record", str(trace)], cwd=folder) as server:
        endpoint = parse_url(server.urls["inference"])
        for _ in range(3):
            assert fetch(endpoint, "POST", "/predictions/sum", b'{"x": [[1, 2, 3]]}').ok
    lines = trace.read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith(',"rows":1,"bytes":18,"model":"sum"}')
