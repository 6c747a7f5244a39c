"""Streamer failures: workers killed, threads abandoned and forks under load, a program that ends, a million calls."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock import DeadlineExceeded, Streamer, ThreadedStreamer, WorkerDied
from penstock.errors import RunTimeout
from support.waiting import wait_for

PATIENCE_S = 60.0

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


class Callers:
    """Threads and an event loop that call a streamer until `stop`, each with items of its own."""

    def __init__(self, streamer: ThreadedStreamer) -> None:
        self.right = self.late = 0
        self.wrong: list[object] = []
        self._streamer, self._going = streamer, True
        calls = (self._predict, self._submit) * 8 + (lambda: asyncio.run(self._loop()),)
        self._threads = [threading.Thread(target=call, daemon=True) for call in calls]
        for thread in self._threads:
            thread.start()

    def _predict(self) -> None:
        self._call(lambda batch: self._streamer.predict(batch))

    def _submit(self) -> None:
        self._call(lambda batch: self._streamer.submit(batch).result(PATIENCE_S))

    def _call(self, ask: Callable[[list[Any]], list[Any]]) -> None:
        while self._going:
            batch = [object()]
            with self._noted():
                self._note(ask(batch) == batch)

    async def _loop(self) -> None:
        await asyncio.gather(*(self._coroutine(i) for i in range(16)))

    async def _coroutine(self, number: int) -> None:
        while self._going:
            batch = [object()]
            with self._noted():
                call = asyncio.ensure_future(self._streamer.apredict(batch))
                if number % 4 == 0:
                    await asyncio.sleep(0.001)
                    if call.cancel():
                        continue
                self._note(await call == batch)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except DeadlineExceeded:
            self.late += 1
        except Exception as e:
            self.wrong.append(e)

    def _note(self, right: bool) -> None:
        self.right += right
        if not right:
            self.wrong.append("another caller's response")

    def answered(self, more: int) -> None:
        """Returns when about so many more calls are answered."""
        target = self.right + more
        wait_for(lambda: self.right >= target, said=lambda: f"{self.right} calls were answered, expected {target}")

    def stop(self) -> None:
        self._going = False
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a caller was forgotten"
        assert not self.wrong


def test_a_thread_that_is_abandoned_under_load_costs_its_own_item(chaos: SimpleNamespace) -> None:
    over = threading.Event()

    def model(batch: list[Any]) -> list[Any]:
        if "hang" in batch:
            over.wait(PATIENCE_S)
        return batch

    with ThreadedStreamer(model, 8, worker_timeout=0.3) as streamer:
        streamer._wait_for_worker_ready(PATIENCE_S)
        callers = Callers(streamer)
        for _ in range(chaos.count(3, 30)):
            hanging = [streamer.submit(["hang"]) for _ in range(2)]
            assert {type(future.exception(PATIENCE_S)) for future in hanging} == {RunTimeout}
            callers.answered(100)
        over.set()  # the abandoned threads come back
        callers.answered(100)
        callers.stop()
        assert callers.late


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*its own workers:RuntimeWarning")
def test_processes_that_are_forked_under_load_answer_with_their_own_model(chaos: SimpleNamespace) -> None:
    with ThreadedStreamer(lambda batch: batch, 8) as streamer:
        callers = Callers(streamer)
        for _ in range(chaos.count(10, 300)):
            callers.answered(20)
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE_S))
                code = 1
                try:
                    with ThreadPoolExecutor(8) as pool:
                        found = list(pool.map(streamer.predict, ([i] for i in range(32))))
                    code = 0 if found == [[i] for i in range(32)] else 2
                    streamer.destroy_workers()
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        callers.stop()


def test_greenlets_outlive_a_model_that_hangs_and_greenlets_that_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("gevent")
    program = """
        from gevent import monkey
        sleep = monkey.get_original("time", "sleep")
        monkey.patch_all()
        import gevent
        import penstock

        ran, gate = [], monkey.get_original("_thread", "allocate_lock")()

        def model(batch):
            ran.extend(batch)
            if "gate" in batch:
                gate.acquire()
            sleep(3.0 if "hang" in batch else 0.001)
            return batch

        def call(number):
            for i in range(20):
                try:
                    one = streamer.submit([(number, i)]).result(20) if number % 2 else streamer.predict([(number, i)])
                    assert one == [(number, i)]
                except TimeoutError:  # behind the batch that hangs
                    late.append(number)

        late, killed = [], []
        with penstock.ThreadedStreamer(model, 4, worker_timeout=0.3) as streamer:
            streamer._wait_for_worker_ready(20)
            calls = [gevent.spawn(call, number) for number in range(8)]
            for _ in range(2):
                print(type(streamer.submit(["hang"]).exception(20)).__name__)
            gevent.joinall(calls, timeout=20, raise_error=True)
            assert all(call.ready() for call in calls)
        with penstock.ThreadedStreamer(model, 4) as streamer:
            gate.acquire()
            running = gevent.spawn(streamer.predict, ["gate"])
            while "gate" not in ran:
                gevent.sleep(0.001)
            waiting = [gevent.spawn(streamer.predict, [f"w{i}"]) for i in range(8)]
            futures = [streamer.submit([f"f{i}"]) for i in range(8)]
            gevent.sleep(0)
            gevent.killall(waiting[::2])
            assert all(future.cancel() for future in futures[::2])
            gate.release()
            assert [call.get(timeout=20) for call in waiting[1::2]] == [[f"w{i}"] for i in (1, 3, 5, 7)]
            assert [future.result(20) for future in futures[1::2]] == [[f"f{i}"] for i in (1, 3, 5, 7)]
            assert running.get() == ["gate"] and not {"w0", "w2", "w4", "w6", "f0", "f2", "f4", "f6"} & set(ran)
            assert gevent.wait(timeout=20), "something is still expected"
        streamer = penstock.ThreadedStreamer(lambda batch: sleep(60), 4)
        streamer._wait_for_worker_ready(20)
        calls = [gevent.spawn(streamer.predict, [i]) for i in range(8)]
        future = streamer.submit([1])
        gevent.sleep(0.01)
        print("end", flush=True)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout == "RunTimeout\nRunTimeout\nend\n", done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


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
        import asyncio, threading
        import penstock
        from streamed_in_trouble import five_seconds

        if __name__ == "__main__":
            streamer = penstock.{kind}(five_seconds, 4)
            streamer._wait_for_worker_ready()
            futures = [streamer.submit([i]) for i in range(100)]
            futures[0].add_done_callback(lambda future: print("error:", type(future.exception()).__name__))
            for call in (streamer.predict, lambda batch: asyncio.run(streamer.apredict(batch))) * 8:
                threading.Thread(target=call, args=[[1]], daemon=True).start()
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
