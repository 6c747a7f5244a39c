"""The choice between threads and processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline import auto
from penstock.pipeline.auto import chosen, measure
from penstock.pipeline.describe import graph_text
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import placed

OPS = """
def spin(data):
    total = 0
    for i in range(40_000):
        total += i
    return data


def pair(data):
    return [data, data]
"""


@pytest.fixture
def parse(tmp_path: Path) -> Any:
    (tmp_path / "ops.py").write_text(OPS)
    return lambda tables: parse_graph(tables, name="t", folder=str(tmp_path))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """What the measurements of ops say, in order."""
    given: list[tuple[float, float]] = []

    def measured(run: Any) -> tuple[float, float]:
        run()
        return given.pop(0)

    monkeypatch.setattr(auto, "measure", measured)
    monkeypatch.setattr(auto, "cores", lambda: 4)
    return given


def spin() -> None:
    total = 0
    for i in range(60_000):
        total += i


def shares(run: Any) -> Iterator[float]:
    """The shares of measurements that hold the interpreter. A busy machine spoils some, so they go on for a minute."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        alone_s, held_s = measure(run)
        yield held_s / alone_s


def test_python_code_holds_the_interpreter_and_native_code_does_not() -> None:
    data = bytes(4 * 2**20)
    assert any(share > 0.6 for share in shares(spin))
    assert any(share < 0.4 for share in shares(lambda: hashlib.sha256(data)))
    assert any(share < 0.4 for share in shares(lambda: time.sleep(0.002)))


CHAIN: dict[str, Any] = {
    "decode": {"backend": "DecodeMat", "processes": "auto", "next": "spin"},
    "spin": {"backend": "Python[ops.py:spin]", "processes": "auto"},
}


def test_nodes_that_hold_the_interpreter_become_processes(parse: Any, held: list[tuple[float, float]]) -> None:
    graph = parse(CHAIN)
    held += [(0.004, 0.0001), (0.005, 0.004)]
    found = placed(graph).nodes
    assert [(node.processes, node.instances) for node in found.values()] == [(0, 1), (4, 4)]
    held += [(0.004, 0.0001), (0.005, 0.004)]
    text = graph_text(graph)
    assert "[decode] runs in threads: an item takes 4.00 ms and holds the interpreter for 0.10 ms of it" in text
    assert "[spin] runs in 4 processes: an item takes 5.00 ms and holds the interpreter for 4.00 ms of it" in text
    held += [(0.0004, 0.0004), (0.0004, 0.0004)]
    assert chosen(graph)["spin"].processes == 0, "a hand-over takes as long"


def test_instances_are_the_number_of_processes(parse: Any, held: list[tuple[float, float]]) -> None:
    held += [(0.004, 0.004)]
    graph = parse({"a": {"backend": "DecodeMat", "processes": "auto", "instances": 3, "next": "b"}, "b": {}})
    assert chosen(graph)["a"].processes == 3


def test_before_a_gpu_node_processes_need_more_than_two_cores(parse: Any, held: Any, monkeypatch: Any) -> None:
    tables = {**CHAIN, "spin": {"backend": "OnnxTensor", "model": "net.onnx", "device": "cuda:0"}}
    tables["decode"] = {**CHAIN["decode"], "backend": "S[DecodeMat,Mat2Tensor]"}
    held += [(0.004, 0.0), (0.004, 0.0)]
    assert chosen(parse(tables))["decode"] == auto.Choice(3, "[spin] after it launches on a GPU")
    monkeypatch.setattr(auto, "cores", lambda: 2)
    assert chosen(parse(tables))["decode"].processes == 0


def test_what_no_warm_up_item_reaches_runs_in_threads(parse: Any, held: Any) -> None:
    graph = parse({"a": {"backend": "Python[ops.py:spin]", "processes": "auto"}})
    assert chosen(graph)["a"] == auto.Choice(0, "no warm-up item reaches it, so it was not measured")
    declared = {
        "pipeline": {"inputs": {"x": "FP32[-1,3]"}},
        "a": {"backend": "Python[ops.py:spin]", "processes": "auto"},
    }
    held += [(0.004, 0.004)]
    assert chosen(parse(declared))["a"].processes == 4


def test_elements_of_a_fan_out_are_measured_too(parse: Any, held: Any) -> None:
    body = {"each": "result", "body": "one", "backend": "Python[ops.py:pair]", "next": "join"}
    tables = {
        "decode": {"backend": "DecodeMat", "next": "pair"},
        "pair": body,
        "one": {"backend": "Python[ops.py:spin]", "processes": "auto"},
        "join": {"inputs": {"data": "decode.result", "many": "pair.result"}, "processes": "auto"},
    }
    graph: Graph = parse(tables)
    held += [(0.004, 0.004), (0.004, 0.0)]
    assert {name: choice.processes for name, choice in chosen(graph).items()} == {"one": 4, "join": 0}
