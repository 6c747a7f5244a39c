from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.backoff import Backoff
from penstock.bulk import engine as module
from penstock.bulk.engine import Engine, EngineFailed, engine_url
from support.pages import free_ports


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def program(path: Path, body: str) -> str:
    """The command of a program that records its process id."""
    record = f"open({f'{path}.pids'!r}, 'a').write(f'{{os.getpid()}}\\n')"
    path.write_text(f"import os, sys, time\n{record}\n{body}\n")
    return f"{sys.executable} {path}"


def pids(path: Path) -> list[int]:
    record = Path(f"{path}.pids")
    return [int(line) for line in record.read_text().split()] if record.exists() else []


def test_the_address_follows_the_command() -> None:
    assert engine_url("vllm serve m") == "http://127.0.0.1:8000"
    assert engine_url("python -m sglang.launch_server --port 30000 --model m") == "http://127.0.0.1:30000"
    assert engine_url("vllm serve m --port=9000") == "http://127.0.0.1:9000"
    with pytest.raises(EngineFailed, match="is not a command"):
        engine_url("vllm 'serve")


def test_an_engine_that_dies_starts_again_and_ends_with_the_job(tmp_path: Path) -> None:
    path = tmp_path / "app.py"
    engine = Engine(program(path, "os.fork(); time.sleep(600)"), tmp_path / "log", lambda _: None)
    engine.start()
    wait_for(lambda: len(pids(path)) == 1)
    os.kill(pids(path)[0], signal.SIGKILL)
    wait_for(lambda: len(pids(path)) == 2)
    engine.check()
    engine.close()
    for pid in pids(path):
        wait_for(lambda: not alive(pid))  # noqa: B023 - called here


def test_an_engine_that_is_silent_for_too_long_is_killed_and_one_that_loads_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    path, (port,) = tmp_path / "app.py", free_ports(1)
    silent = f"""
import socket
loading = socket.socket()
loading.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
loading.bind(("127.0.0.1", {port}))
time.sleep(1.5)
loading.listen(1)
open({str(tmp_path / "listens")!r}, "w").write(str(time.monotonic()))
time.sleep(600)
"""
    engine = Engine(program(path, silent) + f" --port {port}", tmp_path / "log", lambda _: None, hang_s=0.5)
    engine.start()
    engine.restart("http://another:8000", "it is not this one")
    wait_for(lambda: "it has not responded for 0.5 s" in caplog.text)
    assert (tmp_path / "listens").exists()
    wait_for(lambda: len(pids(path)) == 2)
    engine.close()
    assert not any(map(alive, pids(path)))


def alive(group: int) -> bool:
    """Whether a process of the group runs; one that only its new parent has not collected does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(found) == group and state != "Z":
            return True
    return False


def test_an_engine_that_never_runs_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Backoff", lambda *_: Backoff(0.0, 0.0))
    failures: queue.Queue[EngineFailed] = queue.Queue()
    engine = Engine(program(tmp_path / "app.py", "sys.exit('no such model')"), tmp_path / "log", failures.put)
    engine.start()
    assert "was started 5 times" in failures.get(timeout=20).message
    with pytest.raises(EngineFailed, match=r"status 1; .*: no such model"):
        engine.check()
    engine.close()
    missing = Engine("no-such-program serve", tmp_path / "log", failures.put)
    with pytest.raises(EngineFailed, match="cannot start no-such-program"):
        missing.start()
    missing.close()
