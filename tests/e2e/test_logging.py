"""The log of a real server: prints and log records of workers, request ids, failures, formats and levels."""

import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCE = """
import logging, os, sys
from penstock import model

log = logging.getLogger("my.model")

@model(max_batch_size=1)
def talk(items):
    for n in range(3):
        print("print", n)
        log.info("info %d", n)
    log.warning("two\\nlines")
    log.debug("unseen")
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("caught")
    sys.stdout.write("no newline")
    log.error("after it")
    return items

@model(max_batch_size=8)
def fails(items):
    found = []
    for item in items:
        if item == "raise":
            raise ValueError("secret cause")
        found.append({"returned": KeyError("gone"), "object": object(), "long": item}[item])
    return found + [1] * (items == ["long"])

def dies(items):
    os._exit(3)

def slow(items):
    import time
    time.sleep(60)
"""
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) ([\w.]+) (.*)")


def test_prints_and_records_of_a_worker_arrive_in_order_with_level_logger_and_request_id(
    serve: Callable[..., Any],
) -> None:
    server = serve(SOURCE, "talk")
    assert server.post("/predictions/talk", b"1", x_request_id="r-1")[0] == 200
    _, _, said = server.stop()
    lines = [LINE.fullmatch(line) for line in said.splitlines()]
    assert all(lines), said
    prefix, ids = "model=talk version=1 slot=0 ", "request_id=r-1 model=talk version=1 slot=0 "
    found = [(m[1], m[2], m[3]) for m in lines if m and m[2] in ("my.model", "penstock.model")]
    wanted = []
    for n in range(3):
        wanted += [("INFO", "penstock.model", f"{prefix}print {n}"), ("INFO", "my.model", f"{ids}info {n}")]
    wanted += [("WARNING", "my.model", ids + "two"), ("WARNING", "my.model", ids + "lines")]
    assert found[:8] == wanted
    assert found[8] == ("ERROR", "my.model", ids + "caught")
    assert found[-3][2].endswith("ZeroDivisionError: division by zero")
    assert found[-2:] == [("INFO", "penstock.model", prefix + "no newline"), ("ERROR", "my.model", ids + "after it")]


def test_a_model_in_a_thread_of_the_server_logs_each_record_once(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "talk", "--set", "models.talk.transport=thread")
    assert server.post("/predictions/talk", b"1")[0] == 200
    _, _, said = server.stop()
    assert [line.rpartition(" ")[2] for line in said.splitlines() if "info" in line] == ["0", "1", "2"], said
    assert "\x1e" not in said


def test_every_5xx_leaves_one_line_with_model_request_id_and_cause(serve: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    logging = ["--set", "logging.format=json", "--set", f"logging.file={file}"]
    server = serve(SOURCE, "fails", "dies", "slow", *logging)
    wanted = {}
    for name, cause in (
        ("raise", "ValueError: secret cause"),
        ("returned", "KeyError: 'gone'"),
        ("object", "the model returned"),
        ("long", "results"),
    ):
        assert server.post("/predictions/fails", json.dumps(name).encode(), x_request_id=name)[0] == 500
        wanted[name] = ("fails", "ERROR", "status=500", cause)
    assert server.post("/predictions/dies", b"1", x_request_id="d")[0] == 503
    wanted["d"] = ("dies", "WARNING", "status=503", "worker")
    assert server.post("/predictions/slow", b"1", x_request_id="s", x_deadline_ms="0.001")[0] == 504
    wanted["s"] = ("slow", "WARNING", "status=504", "deadline")
    assert server.post("/predictions/none", b"1", x_request_id="n")[0] == 404
    assert server.get("/v2/models/slow/ready")[0] == 200
    server.stop()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(record.keys() >= {"time", "level", "logger", "message"} for record in records)
    failed = [record for record in records if "event=request_failed" in record["message"]]
    assert {record["request_id"] for record in failed} == wanted.keys()
    assert len(failed) == len(wanted)
    for record in failed:
        model, level, status, cause = wanted[record["request_id"]]
        assert (record["event"], record["model"]) == ("request_failed", model)
        assert f"status={record['status']}" == status
        assert record["level"] == level
        assert status in record["message"]
        assert cause in record["message"], record


def test_a_log_that_is_not_read_stops_neither_serving_nor_the_end(serve: Callable[..., Any], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        server = serve(SOURCE, "fails", "--set", f"logging.file={pipe}")
        for _ in range(500):  # each leaves a line
            assert server.post("/predictions/fails", b'"raise"')[0] == 500
        began = time.monotonic()
        assert server.stop()[0] == 0
        assert time.monotonic() - began < 15
        assert len(os.read(reader, 2**20)) > 60_000, "the pipe was full"
    finally:
        os.close(reader)


def test_refusals_and_threads_above_the_cores_leave_a_line(serve: Callable[..., Any]) -> None:
    settings = ("--set", "models.slow.batching.max_queue=1", "--set", "models.slow.threads=4096")
    server = serve(SOURCE, "slow", *settings)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: server.post("/predictions/slow", b"1", x_deadline_ms="300")[0], range(8)))
    assert 429 in found
    _, _, said = server.stop()
    assert "event=requests_refused model=slow version=1 reason=queue_full count=1 hint='add instances" in said
    (line,) = (line for line in said.splitlines() if "event=threads_above_cores" in line)
    assert "instances=1 threads=4096" in line
