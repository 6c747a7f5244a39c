"""A server whose model has helper processes: its configuration, description, metrics and log."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SOURCE = """
    import os

    from penstock import metrics

    class Model:
        def __init__(self, word):
            self.word = word

        def load_preprocess(self):
            print("a helper prepares", self.word)

        def load(self, device):
            print("the worker loads")

        def preprocess(self, item, request):
            if item == "bad":
                raise ValueError("a bad item")
            metrics.counter("words")
            return f"{self.word} {item} {request.headers.get('x-tag')} {os.getpid()}"

        def predict(self, items):
            return [f"{item} {os.getpid()}" for item in items]

        def explain(self, items):
            return items

        def warmup(self):
            return ["sample"]
"""
CONFIG = """
    [models.m]
    target = "app.py:Model"
    options = { word = "hello" }
    preprocess_processes = 2
    instances = 2
"""


def test_a_model_with_helpers_is_served_and_described(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("\n".join(line.strip() for line in CONFIG.splitlines()))
    server = serve(SOURCE, "penstock.toml")
    workers = psutil.Process(server.process.pid).children()
    helpers = [helper for worker in workers for helper in worker.children()]
    assert (len(workers), len(helpers)) == (2, 4)
    status, body = server.post("/predictions/m", b'"world"', x_tag="tagged")
    word, item, tag, helper, worker = body.decode().split()
    assert (status, word, item, tag) == (200, "hello", "world", "tagged")
    assert int(worker) in {each.pid for each in workers}
    assert int(helper) in {each.pid for each in helpers}
    status, body = server.post("/predictions/m", b'"bad"')
    assert (status, json.loads(body)["error"]["message"]) == (500, "preprocess raised ValueError")
    assert server.post("/v1/models/m:explain", b'{"instances": ["x"]}')[0] == 200
    described = json.loads(server.get("/v2/models/m")[1])["parameters"]
    assert (described["instances"], described["preprocess_processes"]) == (2, 2)
    assert server.metric("penstock_preprocess_processes", model="m") == 4
    assert server.metric("words_total", model="m") >= 2
    _, _, said = server.stop()
    assert not psutil.wait_procs([*workers, *helpers], 5)[1]
    lines = said.splitlines()
    prepared = [line for line in lines if "a helper prepares hello" in line]
    assert len(prepared) == 4
    loaded = [line for line in lines if "the worker loads" in line]
    assert len(loaded) == 2
    heads = [line.partition("the worker")[0].split()[1:] for line in loaded]  # which of both loads first is open
    assert all(line.partition("a helper")[0].split()[1:] in heads for line in prepared)
    assert any("item_failed model=m.preprocess error='preprocess raised ValueError: a bad item'" in x for x in lines)


def test_a_number_of_helpers_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("class Model:\n    def predict(self, items):\n        return items\n")
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "app.py:Model", "--port", "0", "--set"]
    for number, words in (
        ("-1", "models.model.preprocess_processes"),
        ("1025", "models.model.preprocess_processes"),
        ("1", "app.py:Model' is no Python class with preprocess(item)"),
    ):
        done = subprocess.run(
            [*command, f"models.model.preprocess_processes={number}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode != 0
        assert words in done.stdout + done.stderr, done.stderr
