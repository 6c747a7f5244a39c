"""Workers that are groups of processes: torchrun and parallelType, with torch.distributed on the CPU."""

import json
import os
import signal
import threading
from typing import Any

import psutil
import pytest

from support.waiting import wait_for

HANDLER = """
import os
import torch
import torch.distributed as dist


class Handler:
    def initialize(self, context):
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def handle(self, data, context):
        body = bytes(data[0]["body"])
        if body == b"die" and self.rank == 1:
            os._exit(3)
        total = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(total)
        pids = [None] * self.size
        dist.all_gather_object(pids, os.getpid())
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
        return [{
            "rank": self.rank, "size": self.size, "sum": total.item(), "rows": len(data), "pids": pids,
            "body": body.decode(), "env": {name: os.environ[name] for name in names},
        }] * len(data)
"""
WITHOUT_TORCH = """
import argparse
import os


class Handler:
    def initialize(self, context):
        argparse.ArgumentParser().parse_args()  # every rank sees a program without arguments
        if os.environ.get("FAIL_RANK") == os.environ["RANK"]:
            raise RuntimeError("this rank does not load")
        taken = os.environ.get("TAKE_PORT")     # another program takes the port of the first try
        if taken and os.environ["RANK"] == "0" and not os.path.exists(taken):
            open(taken, "w").close()
            raise RuntimeError("EADDRINUSE: address already in use")

    def handle(self, data, context):
        return [os.environ["RANK"]] * len(data)
"""
CONFIG = "minWorkers: 1\nmaxWorkers: 1\nparallelType: tp\ntorchrun:\n  nproc-per-node: 2\n  OMP_NUMBER_THREADS: 2\n"


@pytest.fixture
def server(torchserve: Any) -> Any:
    torchserve.add_model(WITHOUT_TORCH, config=CONFIG)
    torchserve.configure(default_response_timeout="20", enable_model_api="true")
    return torchserve


def start(server: Any) -> None:
    server.start("--models", "m.mar", "--disable-token-auth")


def ask(server: Any, body: bytes) -> tuple[int, Any]:
    status, found = server.fetch(f"{server.url()}/predictions/m", body, content_type="application/octet-stream")
    return status, json.loads(found)


def test_a_group_answers_as_one_worker_and_ends_as_one(server: Any) -> None:
    pytest.importorskip("torch")
    server.add_model(HANDLER, config=CONFIG)
    start(server)
    status, found = ask(server, b"x")
    pids = found.pop("pids")
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    expected = {"rank": 0, "size": 2, "sum": 3.0, "rows": 1, "body": "x", "env": {**env, "OMP_NUM_THREADS": "2"}}
    assert (status, found, len(set(pids))) == (200, expected, 2)
    description = json.loads(server.fetch(f"{server.url('Management')}/models/m")[1])[0]
    assert (description["parallelType"], description["parallelLevel"]) == ("tp", 2)
    assert [worker["pid"] for worker in description["workers"]] == pids[:1]

    statuses: list[int] = []
    going = threading.Event()

    def client() -> None:
        while not going.is_set():
            statuses.append(ask(server, b"x")[0])

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    # 500: the worker died with rank 1; 503: before that, its own handler failed, because gloo had lost rank 1
    assert ask(server, b"die")[0] in (500, 503)
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))  # no rank is left
    wait_for(lambda: statuses and statuses[-1] == 200)
    going.set()
    for thread in clients:
        thread.join()
    assert {200} <= set(statuses) <= {200, 500, 503}, "the group came back, and nobody waited in vain"
    pids = ask(server, b"z")[1]["pids"]

    os.kill(server.pids()[0], signal.SIGKILL)
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))  # the end of the server ends every rank


def test_a_rank_that_does_not_load_is_named(server: Any) -> None:
    server.env["FAIL_RANK"] = "1"
    server.run("torchserve", "--start", "--models", "m.mar", "--disable-token-auth")
    server.wait_for("rank 1 of 2 ended with exit code 1 while the model was loaded")
    assert "rank 1 did not load: RuntimeError: this rank does not load" in server.said() + "".join(
        path.read_text() for path in (server.folder / "logs").glob("model_log.log")
    )


def test_another_port_is_tried_when_one_is_taken(server: Any) -> None:
    server.env["TAKE_PORT"] = str(server.folder / "taken")
    start(server)
    assert ask(server, b"x")[0] == 200


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("torchrun:\n  nproc-per-node: 2\n  nnodes: 2\n", "more than one node"),
        ("torchrun:\n  nproc-per-node: 2\ncontinuousBatching: true\n", "several processes per worker"),
    ],
)
def test_groups_that_cannot_run_are_refused(server: Any, config: str, text: str) -> None:
    server.add_model(HANDLER, file="bad.mar", config=config)
    (server.folder / "store" / "m.mar").unlink()
    server.start("--disable-token-auth")
    status, body = server.fetch(f"{server.url('Management')}/models?url=bad.mar", b"", "POST")
    assert (status, text in body.decode()) == (400, True), body
