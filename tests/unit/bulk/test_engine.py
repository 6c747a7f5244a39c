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
