"""Workers on a real Ray cluster, behind a real server and behind a streamer."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import ConfigError
from support.collector import Collector, linked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that Ray leaves open
]

ROOT = Path(__file__).parents[2]
SOURCE = """
    import argparse
    import os
    import time

    argparse.ArgumentParser().parse_args()  # an actor has no arguments, whatever Ray's process has

    def halves(items):
        time.sleep(0.02)
        return [x / x / 2 for x in items]

    def count(items):
        for step in range(max(items)):
            yield [step if step < item else None for item in items]

    def turn(items):
        return [bytes(item[::-1]) for item in items]

    def where(items):
        return [os.environ["OMP_NUM_THREADS"]] * len(items)

    class Device:
        def load(self, device):
            self.found = [device, os.environ["CUDA_VISIBLE_DEVICES"]]

        def predict(self, items):
            time.sleep(0.05)  # so that each instance gets an item
            return [self.found] * len(items)
"""


def on(cluster: Any, model: str, *keys: str) -> list[str]:
    """The options of a server that put a model on the cluster."""
    given = ['transport="ray"', f'ray.address="{cluster.address}"', "ray.num_cpus=0.1", *keys]
    return [each for key in given for each in ("--set", f"models.{model}.{key}")]


@pytest.fixture(scope="module")
def server(ray_cluster: Any, serve_all: Callable[..., Any]) -> Any:
    models = ("halves", "count", "turn", "where")
    keys = {"halves": ["instances=2"], "where": ["ray.num_cpus=2"]}
    options = [each for model in models for each in on(ray_cluster, model, *keys.get(model, ()))]
    return serve_all(SOURCE, *models, *options)


def test_one_bad_item_of_a_batch_fails_alone(server: Any) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda x: server.post("/predictions/halves", b"%d" % x), range(64)))
    assert [status for status, _ in answers] == [500, *[200] * 63]
    assert [json.loads(body) for _, body in answers[1:]] == [0.5] * 63
    assert server.metric("penstock_batches_total", model="halves") < 64


def test_the_parts_of_a_stream_arrive(server: Any) -> None:
    assert server.post("/predictions/count", b"3") == (200, b"0\n1\n2\n")


def test_a_large_body_returns(server: Any) -> None:
    body = bytes(range(250)) * 10_000
    assert server.post("/predictions/turn", body, "application/octet-stream") == (200, body[::-1])


def test_a_worker_has_the_threads_that_ray_reserved_for_it(server: Any) -> None:
    assert server.post("/predictions/where", b"1") == (200, b"2")


def test_requests_are_linked_to_their_batches_on_the_cluster(ray_cluster: Any, serve: Callable[..., Any]) -> None:
    with Collector() as collector:
        traced = ["--set", f"tracing.endpoint={collector.url}", "--set", "tracing.ratio=1"]
        server = serve(SOURCE, "halves", *on(ray_cluster, "halves"), *traced)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda x: server.post("/predictions/halves", b"%d" % x), range(8)))
        assert [status for status, _ in answers] == [500, *[200] * 7]
        assert server.stop()[0] == 0
        spans = collector.spans
    requests = [s for s in spans if s.name == "request halves"]
    assert [s.error for s in sorted(requests, key=lambda s: s.error)] == [""] * 7 + ["failed"]
    for request in requests:
        batch = linked(spans, request)
        assert "predict halves" in {s.name for s in spans if s.parent == batch.span}


@pytest.mark.parametrize(("share", "gpus"), [(1, {"0", "1"}), (0.5, {"0"})])
def test_each_instance_sees_the_gpu_that_ray_chose(
    share: float, gpus: set[str], ray_cluster: Any, serve: Callable[..., Any]
) -> None:
    node = ray_cluster.add_node(num_cpus=1, num_gpus=len(gpus), resources={"gpus": 2})  # Ray takes our word for it
    try:
        keys = ['devices=["cuda"]', "instances=2", "batching.max_batch_size=1", "ray.resources={gpus = 1}"]
        server = serve(
            SOURCE, "Device", *on(ray_cluster, "device", *keys, *([] if share == 1 else ["ray.num_gpus=0.5"]))
        )
        with ThreadPoolExecutor(8) as pool:
            answers = [
                json.loads(body) for _, body in pool.map(lambda _: server.post("/predictions/device", b"1"), range(16))
            ]
        assert {device for device, _ in answers} == {"cuda:0"}
        assert {visible for _, visible in answers} == gpus
    finally:
        ray_cluster.remove_node(node)


def test_a_server_without_a_place_for_its_model_says_what_the_nodes_have(
    ray_cluster: Any, serve: Callable[..., Any]
) -> None:
    keys = on(ray_cluster, "turn", "ray.resources={nowhere = 1}", "ray.placement_timeout_s=1")
    with pytest.raises(RuntimeError, match=r"placed no instance with CPU 0\.1, nowhere 1 within .*no node has as much"):
        serve(SOURCE, "turn", *keys)


def test_a_streamer_runs_on_the_cluster(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "contracts"))
    import streamed

    with penstock.Streamer(streamed.double, 8, worker_num=2, ray={"num_cpus": 0.1}) as streamer:
        assert streamer.predict(range(100)) == [2 * x for x in range(100)]
        found = streamer.predict([1, None, 3], return_exceptions=True)
        assert [found[0], found[2]] == [2, 6]
        assert isinstance(found[1], TypeError)
        array = np.ones((300, 300))
        (twice,) = streamer.predict([array])
        assert (twice == 2).all()
        twice += 1  # it is the caller's own


def test_wrong_keys_of_a_streamer_are_named() -> None:
    with pytest.raises(ConfigError, match=r"streamer\.ray: unknown key 'num_gpu'; did you mean 'num_gpus'"):
        penstock.Streamer(print, 8, ray={"num_gpu": 1})
    with pytest.raises(ValueError, match="ray: found with shared"):
        penstock.Streamer(print, 8, ray={}, shared="name")


def test_a_forked_process_is_refused_the_connection_of_its_parent(ray_cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys\n"
        "from penstock.ray.transport import connect\n"
        "from penstock.errors import LoadFailed\n"
        "connect(sys.argv[1])\n"
        "if os.fork() == 0:\n"
        "    try:\n        connect(sys.argv[1])\n"
        "    except LoadFailed as e:\n        print(e, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run([sys.executable, script, ray_cluster.address], capture_output=True, text=True, timeout=100)
    assert "this process was forked from one that is connected to Ray" in done.stdout, done.stderr


def test_the_programs_of_the_page_run(ray_cluster: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    page = (ROOT / "docs/ray.md").read_text()
    for name, block in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```$", page, re.S | re.M):
        (tmp_path / name).write_text(block)
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.stdout.splitlines()[-1:] == ["[3, 5]"], done.stderr
    server = serve(None, "scale.toml", env={"RAY_ADDRESS": ray_cluster.address})
    assert server.post("/predictions/scale", b"21") == (200, b"42.0")
