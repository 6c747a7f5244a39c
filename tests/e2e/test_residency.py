"""`[devices]` and `[models.NAME.residency]` on a real server: models come with their requests and leave for others."""

import json
import re
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.waiting import wait_for

SOURCE = """
    import os
    import time
    from pathlib import Path

    class Large:
        def load(self, device):
            Path("loads").open("a").write("x")
            self.memory = b"x" * 40_000_000
            time.sleep(0.1)

        def predict(self, items):
            return [os.getpid()] * len(items)

    class Broken(Large):
        def load(self, device):
            raise RuntimeError("no weights")

    class Greedy(Large):
        def load(self, device):
            super().load(device)
            if not Path("enough").exists():
                Path("enough").touch()
                raise MemoryError
"""
DECLARED = 100_000_000


def config(budget: str, models: dict[str, dict[str, Any]], **server: Any) -> str:
    """The text of a penstock.toml with models of `app.py`."""
    lines = [
        "[server]",
        *(f"{key} = {json.dumps(value)}" for key, value in server.items()),
        "[devices]",
        f"cpu = {budget!r}",
    ]
    for name, keys in models.items():
        lines += [f"[models.{name}]", f'target = "app.py:{keys.pop("target", "Large")}"', f"[models.{name}.residency]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in {"memory_bytes": DECLARED, **keys}.items()]
    return "\n".join(lines)


@pytest.fixture
def start(serve: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    def begin(budget: str, models: dict[str, dict[str, Any]], **server: Any) -> Any:
        (tmp_path / "penstock.toml").write_text(config(budget, models, **server))
        return serve(SOURCE, "penstock.toml")

    return begin


def ask(server: Any, model: str) -> int:
    status, body = server.post(f"/predictions/{model}", b"1")
    assert status == 200, body
    return int(body)


def test_models_load_with_their_first_request_and_leave_for_others(start: Callable[..., Any], tmp_path: Path) -> None:
    server = start("310MB", {f"m{k}": {} for k in range(6)}, management=True)
    assert server.get("/readyz")[0] == 200
    assert not (tmp_path / "loads").exists()
    assert server.metric("penstock_model_state", state="IDLE") == 6
    most = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            most.append(len(psutil.Process(server.process.pid).children()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda k: ask(server, f"m{k % 6}"), range(120)))
    ended.set()
    watcher.join()
    assert len(answers) == 120
    assert server.metric("penstock_device_budget_bytes", device="cpu") == 310_000_000
    assert 0 < server.metric("penstock_device_resident_bytes", device="cpu") <= 310_000_000
    assert server.metric("penstock_evictions_total") >= 3
    assert server.metric("penstock_workers_up") <= 3
    seen = [json.loads(server.get(f"/models/m{k}/1", "management")[1]) for k in range(6)]
    places = [one["batching"]["residency"]["place"] for one in seen]
    assert places.count("in") <= 3, seen
    assert max(most) <= 3 + 1  # three models, and the process that starts workers


def test_the_metadata_of_a_model_that_is_not_loaded_come_with_it(start: Callable[..., Any]) -> None:
    server = start("310MB", {"m": {}}, management=True)
    assert server.get("/v2/models/m/ready")[0] == 200
    assert server.get("/v2/models/m")[0] == 503
    wait_for(lambda: server.get("/v2/models/m")[0] == 200)
    url, headers = server.urls["management"] + "/models/m/scale", {"content-type": "application/json"}
    status, body = server.fetch(urllib.request.Request(url, b'{"instances": 2}', headers, method="PUT"))
    assert (status, b"residency" in body) == (409, True), body


def test_a_model_that_nobody_uses_leaves_and_a_pinned_one_stays(start: Callable[..., Any]) -> None:
    server = start("1GB", {"often": {"pinned": True}, "rare": {"keep_alive_s": 0.5}})
    assert server.metric("penstock_workers_up", model="often") == 1
    first = ask(server, "rare")
    wait_for(lambda: server.metric("penstock_device_resident_bytes", device="cpu") <= DECLARED)
    assert server.metric("penstock_workers_up", model="often") == 1
    assert server.metric("penstock_workers_up", model="rare") == 0
    assert ask(server, "rare") != first


def test_a_load_that_fails_is_told_to_all_that_wait_for_it(start: Callable[..., Any]) -> None:
    server = start("310MB", {"broken": {"target": "Broken"}, "good": {}})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: server.post("/predictions/broken", b"1"), range(8)))
    assert {status for status, _ in found} == {503}
    assert "no weights" in server.said()
    assert "no weights" not in str(found)
    assert ask(server, "good")
    assert server.metric("penstock_device_resident_bytes", device="cpu") == DECLARED


def test_a_load_without_memory_is_repeated_with_more_room(start: Callable[..., Any]) -> None:
    server = start("250MB", {"one": {}, "two": {}, "greedy": {"target": "Greedy"}})
    ask(server, "one")
    ask(server, "two")
    ask(server, "greedy")
    assert server.metric("penstock_device_resident_bytes", device="cpu") > DECLARED * 1.2
    assert "more_memory" in server.said()


def test_a_model_that_takes_more_than_the_budget_leaves_and_says_so(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[devices]\ncpu = "30MB"\n[models.m]\ntarget = "app.py:Large"')
    server = serve(SOURCE, "penstock.toml")
    server.post("/predictions/m", b"1")  # its batch may run before the memory is measured
    wait_for(lambda: not server.metric("penstock_device_resident_bytes", device="cpu"))
    status, body = server.post("/predictions/m", b"1")
    assert status == 503
    assert re.search(
        r"'m' took \d\d,\d+,\d+ bytes of cpu when it was loaded, and its budget is 30,000,000 bytes", body.decode()
    )
    assert (tmp_path / "loads").read_text() == "x"


@pytest.mark.parametrize(
    ("budget", "keys", "words"),
    [
        ("50MB", {}, "needs 100,000,000 bytes of cpu, and its budget is 50,000,000 bytes"),
        ("many", {}, "devices.cpu: found 'many', expected bytes above 0"),
        ("-1GB", {}, "devices.cpu: found '-1GB', expected bytes above 0"),
    ],
)
def test_a_budget_that_holds_no_model_is_refused_at_the_start(
    start: Callable[..., Any], budget: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        start(budget, {"m": keys})
