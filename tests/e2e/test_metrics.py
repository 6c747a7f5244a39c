"""The metrics and the records of a real server, against a load that is known to the last request."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.dashboards import Dashboards
from support.waiting import wait_for

APP = """
    import os, time

    class Sums:
        def predict(self, items):
            out = []
            for item in items:
                if item.get("sleep"):
                    time.sleep(item["sleep"])
                out.append(ValueError("no") if item.get("bad") else {"pid": os.getpid()})
            return out
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    settings = ("--set", "models.sums.batching.max_batch_size=4", "--set", "models.sums.batching.max_queue=8")
    return serve_all(APP, "Sums", *settings)


def post(server: Any, body: dict[str, Any], **headers: str) -> int:
    status: int = server.post("/predictions/sums", json.dumps(body).encode(), **headers)[0]
    return status


def test_every_request_of_a_known_load_is_counted(server: Any) -> None:
    counters = {
        "requests": ("penstock_requests_total", {}),
        "answers": ("penstock_answers_total", {}),
        "errors": ("penstock_answers_total", {"outcome": "failed"}),
        "latencies": ("penstock_request_seconds_count", {}),
        "rows": ("penstock_batch_rows_sum", {}),
        "failed": ("penstock_item_failures_total", {"code": "item_failed"}),
        "late": ("penstock_rejections_total", {"reason": "expired"}),
        "full": ("penstock_rejections_total", {"reason": "queue_full"}),
        "2xx": ("penstock_http_requests_total", {"status": "2xx"}),
        "4xx": ("penstock_http_requests_total", {"status": "4xx"}),
        "5xx": ("penstock_http_requests_total", {"status": "5xx"}),
    }

    def read() -> dict[str, float]:
        return {key: server.metric(name, **labels) for key, (name, labels) in counters.items()}

    before = read()
    good = [post(server, {}) for _ in range(20)]
    bad = [post(server, {"bad": True}) for _ in range(3)]
    with ThreadPoolExecutor(2) as two:
        slow = []
        for in_flight in (1, 2):  # one runs, and one may have been sent ahead: the next can only wait
            slow.append(two.submit(post, server, {"sleep": 1.0}))
            wait_for(lambda number=in_flight: server.metric("penstock_requests_in_flight") == number)
        late = post(server, {}, x_deadline_ms="20")
        assert [s.result() for s in slow] == [200, 200]
    with ThreadPoolExecutor(40) as many:
        crowd = list(many.map(lambda _: post(server, {"sleep": 0.05}), range(40)))
    missing = server.get("/v2/models/nobody")[0]

    wait_for(lambda: not server.metric("penstock_requests_in_flight"))  # a response precedes its count
    after = read()
    grown = {key: after[key] - before[key] for key in counters}
    statuses = [*good, *bad, late, 200, 200, *crowd, missing]
    full = len([s for s in crowd if s != 200])
    run = 20 + 3 + 2 + 40 - full
    assert full > 0, "the crowd was to be more than the queue may hold"
    assert grown["requests"] == run + full + 1  # the one that was late, too
    assert grown["answers"] == grown["latencies"] == run
    assert grown["rows"] - run in (0, 1)  # the late one was sent ahead if a slow one ended meanwhile
    assert grown["failed"] == grown["errors"] == 3
    assert grown["late"] == 1
    assert grown["full"] == full
    for kind in ("2xx", "4xx", "5xx"):
        assert grown[kind] == len([s for s in statuses if s // 100 == int(kind[0])]), kind
    assert server.metric("penstock_requests_in_flight") == 0
    assert server.metric("penstock_queue_rows") == 0
    assert server.metric("penstock_pool_used_bytes") == 0


def test_the_page_is_read_by_prometheus_own_parser_and_shows_the_worker(server: Any) -> None:
    worker = json.loads(server.post("/predictions/sums", b"{}")[1])["pid"]
    page = server.get("/metrics", "metrics")[1].decode()
    families = {f.name: f for f in text_string_to_metric_families(page)}
    states = {s.labels["state"]: s.value for s in families["penstock_model_state"].samples}
    assert states == {"LOADING": 0, "READY": 1, "IDLE": 0, "FAILED": 0, "DRAINED": 0, "DRAINING": 0}
    (resident,) = families["penstock_worker_resident_bytes"].samples
    with open(f"/proc/{worker}/statm") as f:
        pages = int(f.read().split()[1])
    assert resident.value == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.2)
    assert families["penstock_http_connections"].samples[0].value >= 0
    assert "process_resident_memory_bytes" in families


def test_the_last_batches_tell_why_they_had_their_size(server: Any) -> None:
    start = time.time()
    for _ in range(3):
        assert post(server, {}) == 200
    told = json.loads(server.get("/debug/batches?model=sums&limit=3", "metrics")[1])["batches"]
    assert [b["reason"] for b in told] == ["all that waits"] * 3
    assert [(b["model"], b["rows"], b["requests"], b["max_batch_size"]) for b in told] == [("sums", 1, 1, 4)] * 3
    times = [b["time_s"] for b in told]
    assert times == sorted(times, reverse=True)
    assert start - 1 < times[-1] <= times[0] <= time.time()
    assert json.loads(server.get("/debug/batches?model=nobody", "metrics")[1]) == {"batches": []}
    newest = json.loads(server.get("/debug/batches", "metrics")[1])["batches"]
    assert len(newest) >= 3


def test_a_worker_that_was_killed_is_a_restart(server: Any) -> None:
    before = server.metric("penstock_worker_restarts_total")
    worker = json.loads(server.post("/predictions/sums", b"{}")[1])["pid"]
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: server.metric("penstock_worker_restarts_total") == before + 1)
    assert server.metric("penstock_workers_up") == 1
    assert server.metric("penstock_worker_events_total", state="died") >= 1


def test_a_batch_under_which_the_worker_died_is_told_of(server: Any) -> None:
    before = server.metric("penstock_batches_total", outcome="died")
    worker = json.loads(server.post("/predictions/sums", b"{}")[1])["pid"]
    with ThreadPoolExecutor(1) as one:
        asked = one.submit(post, server, {"sleep": 0.5})
        wait_for(lambda: server.metric("penstock_requests_in_flight") == 1)
        time.sleep(0.1)
        os.kill(worker, signal.SIGKILL)
        assert asked.result() == 200  # run again
    assert server.metric("penstock_batches_total", outcome="died") == before + 1
    again, died = json.loads(server.get("/debug/batches?limit=2", "metrics")[1])["batches"]
    assert (again["outcome"], died["outcome"]) == ("ok", "died")
    assert 0.09 < died["run_s"] < again["run_s"]


def test_every_expression_of_dashboard_and_alerts_is_answered(server: Any) -> None:
    assert post(server, {}) == 200
    assert post(server, {"bad": True}) == 500
    page = server.get("/metrics", "metrics")[1].decode()
    assert Dashboards("penstock").unanswered(page) == []
