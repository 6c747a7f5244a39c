"""A server whose model runs on a device in three phases: answers under load, bad rows, and the loss of the device."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.devices import LOSES, RAISES

pytest.importorskip("torch")

SOURCE = f"""
    import sys

    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from support.devices import model as doubling
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    ports = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
    return serve_all(SOURCE, "doubling", ports=[*ports, "--max-batch-size", "6"])


def ask(server: Any, rows: list[list[float]]) -> tuple[int, Any]:
    """By the Open Inference Protocol, or as plain JSON if there is one row."""
    if len(rows) == 1:
        status, body = server.post("/predictions/doubling", json.dumps(rows[0]).encode())
        return status, [json.loads(body)] if status == 200 else body
    data = [value for row in rows for value in row]
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(rows), 2], "data": data}]}
    status, body = server.post("/v2/models/doubling/infer", json.dumps(request).encode())
    if status != 200:
        return status, body
    found = json.loads(body)["outputs"][0]["data"]
    return status, [found[k : k + 2] for k in range(0, len(found), 2)]


def test_every_client_gets_its_rows_and_a_bad_one_fails_alone(server: Any) -> None:
    asked = [[[float(RAISES if n % 37 == 5 else n), float(k)] for k in range(1 + n % 4)] for n in range(400)]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda rows: ask(server, rows), asked))
    for rows, (status, answer) in zip(asked, found, strict=True):
        if rows[0][0] == RAISES:
            assert status == 500
        else:
            assert (status, answer) == (200, [[2 * value for value in row] for row in rows])


def test_the_loss_of_the_device_costs_the_guilty_client_alone(server: Any) -> None:
    asked = [[[float(LOSES if n == 20 else n), 1.0]] for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rows: ask(server, rows), asked))
    assert [status for status, _ in found] == [503 if n == 20 else 200 for n in range(40)]
    assert [answer for status, answer in found if status == 200] == [[[2.0 * n, 2.0]] for n in range(40) if n != 20]
