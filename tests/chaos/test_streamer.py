"""Streamer failures: workers killed under load, a program that ends with work in flight, a million calls."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock import DeadlineExceeded, Streamer, ThreadedStreamer, WorkerDied

MODELS = """
    import os, signal, time

    def echo(batch):
        time.sleep(0.002)
        return batch

    def five_seconds(batch):
        time.sleep(5)
        return batch

    def crashes(batch):
        if "crash" in batch:
            os.kill(os.getpid(), signal.SIGSEGV)
        return batch
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The functions above, in a module that workers can import."""
    (tmp_path / "streamed_in_trouble.py").write_text(textwrap.dedent(MODELS))
    monkeypatch.syspath_prepend(str(tmp_path))
    import streamed_in_trouble

    yield streamed_in_trouble
    del sys.modules["streamed_in_trouble"]


def workers(parent: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.Error):  # it has just ended
            if "penstock.core.transports.child" in child.cmdline():
                found.append(child)
    return found


def test_workers_killed_under_load_cost_no_result(models: SimpleNamespace, chaos: SimpleNamespace) -> None:
    chance = random.Random(0)
    over = threading.Event()
    answered, died, wrong = [0], [0], []

    def call(number: int) -> None:
        while not over.is_set():
            answered[0] += 1
            batch = [number, answered[0]]
            try:
                if streamer.predict(batch) != batch:
                    wrong.append(batch)
            except WorkerDied:  # in two deaths one after the other
                died[0] += 1
            except Exception as e:
                wrong.append(e)

    with Streamer(models.echo, 4, worker_num=2, wait_for_worker_ready=True) as streamer:
        before = {w.pid for w in workers(os.getpid())}
        callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
        for caller in callers:
            caller.start()
        kills = chaos.count(5, 50)
        for _ in range(kills):
            while len(running := workers(os.getpid())) < 2:
                time.sleep(0.005)
            chance.choice(running).kill()
            count = answered[0]
            while answered[0] < count + 20:
                time.sleep(0.001)
        over.set()
        for caller in callers:
            caller.join(30)
            assert not caller.is_alive(), "a caller was forgotten"
        assert streamer.predict(list(range(100))) == list(range(100))
        assert not before & {w.pid for w in workers(os.getpid())} or kills < 2
    assert not wrong
    assert died[0] <= kills
    assert workers(os.getpid()) == []


def test_items_that_crash_their_worker_fail_alone(models: SimpleNamespace) -> None:
    items = ["crash" if i in (17, 80) else i for i in range(120)]
    with Streamer(models.crashes, 16, worker_num=2, worker_timeout=60) as streamer:
        results = streamer.predict(items, return_exceptions=True)
        assert [i for i, result in enumerate(results) if type(result) is WorkerDied] == [17, 80]
        assert [result for result in results if type(result) is not WorkerDied] == [i for i in items if i != "crash"]
        with pytest.raises(WorkerDied, match="SIGSEGV"):
            streamer.predict(["crash"])
        assert streamer.predict([1, 2]) == [1, 2]


@pytest.mark.parametrize("kind", ["Streamer", "ThreadedStreamer"])
def test_a_program_that_ends_with_work_in_flight_ends(kind: str, models: SimpleNamespace, tmp_path: Path) -> None:
    program = f"""
        import penstock
        from streamed_in_trouble import five_seconds

        if __name__ == "__main__":
            streamer = penstock.{kind}(five_seconds, 4)
            streamer._wait_for_worker_ready()
            futures = [streamer.submit([i]) for i in range(100)]
            futures[0].add_done_callback(lambda future: print("error:", type(future.exception()).__name__))
            print("end", flush=True)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "end\n"
    children = workers(process.pid)
    began = time.monotonic()
    out, _ = process.communicate(timeout=20)
    assert time.monotonic() - began < 4, "it waited for abandoned work"
    assert process.returncode == 0
    assert out == "error: ModelNotReady\n" or out == "error: WorkerDied\n"
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)


def test_a_program_that_is_killed_leaves_no_worker(models: SimpleNamespace, tmp_path: Path) -> None:
    program = """
        import time
        import penstock
        from streamed_in_trouble import five_seconds

        if __name__ == "__main__":
            streamer = penstock.Streamer(five_seconds, 4, worker_num=2, wait_for_worker_ready=True)
            streamer.submit([1])
            print("up", flush=True)
            time.sleep(60)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    children = workers(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert len(gone) == 2
    assert not alive


def test_submits_that_time_out_leak_no_memory(chaos: SimpleNamespace) -> None:
    rounds = chaos.count(30, 900)
    with ThreadedStreamer(lambda batch: batch, 64) as streamer:
        for done in range(rounds + rounds // 9):
            futures = [streamer.submit([i], deadline=1e-4 if i % 100 == 0 else None) for i in range(1000)]
            errors = [future.exception(30) for future in futures]
            assert all(error is None or isinstance(error, DeadlineExceeded) for error in errors)
            if done == rounds // 9:
                before = psutil.Process().memory_info().rss
        after = psutil.Process().memory_info().rss
    assert after - before < 20 * 2**20


EXITS = """
    import sys, threading, time
    import torch
    from penstock import ThreadedStreamer

    started = threading.Event()

    def busy(items):
        left = torch.rand(200, 200)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            left = torch.tanh(left @ left)  # releases the interpreter in C++ code
            started.set()
        return items

    streamer = ThreadedStreamer(busy, batch_size=4)
    streamer.submit(["an item"])
    assert started.wait(20)
    if sys.argv[1] == "closing":
        threading.Thread(target=streamer.destroy_workers, daemon=True).start()
    sys.exit(3)
"""


@pytest.mark.parametrize("state", ["running", "closing"])
def test_a_program_may_exit_while_its_model_is_in_c_code(state: str) -> None:
    pytest.importorskip("torch")
    code = textwrap.dedent(EXITS)
    done = subprocess.run([sys.executable, "-c", code, state], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "terminate" not in done.stderr
