"""A model as an application of a real Ray Serve: over HTTP through its proxy, and through handles."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.ray import deployment
from support.urls import fetch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Ray Serve uses of pydantic
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that Ray leaves open
]

ROOT = Path(__file__).parents[2]
SOURCE = """
import os
import time

def sizes(items):
    if -1 in items:
        os._exit(3)
    time.sleep(0.02)
    return [[x / x, len(items)] for x in items]

def count(items):
    for step in range(max(items)):
        yield [step if step < item else None for item in items]

def turn(items):
    return [bytes(item[::-1]) for item in items]

class NeverLoads:
    def load(self, device):
        raise RuntimeError("no weights here")

    def predict(self, items):
        return items
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def post(url: str, body: bytes, content_type: str = "application/json", **headers: str) -> tuple[int, bytes]:
    return fetch(urllib.request.Request(url, body, {"content-type": content_type, **headers}))


@pytest.fixture(scope="module")
def served(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Ray Serve; `run(name, ...)` deploys a model of SOURCE and returns its handle and its URL."""
    from ray import serve

    port = free_port()
    serve.start(http_options={"port": port, "host": "127.0.0.1"})
    file = tmp_path_factory.mktemp("served") / "app.py"
    file.write_text(SOURCE)

    def run(name: str, serve_options: dict[str, Any] | None = None, **keys: Any) -> SimpleNamespace:
        options = {"ray_actor_options": {"num_cpus": 0.1}, **(serve_options or {})}
        app = deployment(f"{file}:{name}", serve=options, **keys)
        handle = serve.run(app, name=name, route_prefix=f"/{name}")
        return SimpleNamespace(handle=handle, url=f"http://127.0.0.1:{port}/{name}/predictions/{name.lower()}")

    yield SimpleNamespace(run=run, serve=serve)
    serve.shutdown()


@pytest.fixture(scope="module")
def sizes(served: SimpleNamespace) -> SimpleNamespace:
    found: SimpleNamespace = served.run("sizes", {"num_replicas": 2}, batching={"max_batch_size": 16})
    return found


def test_requests_of_handles_share_batches_and_a_bad_one_fails_alone(sizes: SimpleNamespace) -> None:
    calls = [sizes.handle.predict.remote(x) for x in range(64)]
    with pytest.raises(penstock.ItemFailed, match="the model raised ZeroDivisionError") as caught:
        calls[0].result()
    assert caught.value.code == "item_failed"
    found = [call.result() for call in calls[1:]]
    assert {value for value, _ in found} == {1.0}
    assert max(size for _, size in found) > 1
    many = sizes.handle.predict_many.remote([1, 0, 2]).result()
    assert [many[0][0], many[2][0]] == [1.0, 1.0]
    assert isinstance(many[1], penstock.ItemFailed)


def test_http_requests_share_batches_and_a_bad_one_fails_alone(sizes: SimpleNamespace) -> None:
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda x: post(sizes.url, b"%d" % x), range(64)))
    assert [status for status, _ in answers] == [500, *[200] * 63]
    assert json.loads(answers[0][1])["error"]["code"] == "item_failed"
    assert max(json.loads(body)[1] for _, body in answers[1:]) > 1


def test_parts_stream_through_the_proxy_and_through_a_handle(served: SimpleNamespace) -> None:
    count = served.run("count")
    assert post(count.url, b"3") == (200, b"0\n1\n2\n")
    assert list(count.handle.options(stream=True).stream.remote(3)) == [0, 1, 2]


def test_a_binary_body_returns_and_a_token_guards_the_routes(served: SimpleNamespace) -> None:
    turn = served.run("turn", tokens=["secret"])
    body = bytes(range(250)) * 4000
    kind = "application/octet-stream"
    assert post(turn.url, body, kind, authorization="Bearer secret") == (200, body[::-1])
    assert post(turn.url, body, kind)[0] == 401


def test_the_death_of_a_replica_answers_each_caller_once_and_it_returns(sizes: SimpleNamespace) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda x: post(sizes.url, b"%d" % x), [1] * 30 + [-1] + [1] * 30))
    statuses = Counter(status for status, _ in answers)
    assert statuses.total() == 61
    assert statuses[200] >= 30
    assert set(statuses) <= {200, 500, 503}
    while (answer := post(sizes.url, b"1"))[0] != 200:
        pass
    assert json.loads(answer[1])[0] == 1.0


def test_a_model_that_does_not_load_is_reported_with_its_reason(served: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="neverloads"):
        served.run("NeverLoads", {"max_constructor_retry_count": 1})
    application = served.serve.status().applications["NeverLoads"]
    assert "RuntimeError: no weights here" in application.deployments["neverloads"].message


@pytest.mark.parametrize(
    ("target", "keys", "words"),
    [
        ("app.py:sizes", {"transport": "ray"}, "transport: found 'ray', but the replicas are on the cluster"),
        ("app.py:sizes", {"bathing": {}}, "unknown key 'bathing'; did you mean 'batching'"),
        ("app.py:sizes", {"max_memory_bytes": 1}, "models.sizes.max_memory_bytes: found 1, but the thread transport"),
        ("penstock.toml", {}, "target 'penstock.toml' is a configuration: a deployment has one model"),
    ],
)
def test_a_wrong_deployment_is_refused(target: str, keys: dict[str, Any], words: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=words):
        deployment(target, **keys)


@pytest.mark.usefixtures("served")  # whose Serve the program finds: one of its own would have port 8000 ever after
def test_the_program_of_the_page_runs(ray_cluster: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs/ray.md").read_text()
    for name, block in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```$", page, re.S | re.M):
        (tmp_path / name).write_text(block)
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    command = [sys.executable, "deploy.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.stdout.splitlines()[-2:] == ["42.0", "[2.0, 4.0]"], done.stderr
