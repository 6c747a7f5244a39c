"""Workers that die, hang and crash, seen from their transport: every caller is told, and nothing is left behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.errors import RunTimeout, WorkerDied
from penstock.plugins import resolve
from penstock.types import Item
from support.scripted import CRASHING
from support.transports import TransportHarness, values
from support.waiting import until


def process(spec, pool):
    return resolve("transport", "process")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**20)


def thread(spec, pool):
    return resolve("transport", "thread")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**20)


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


async def pid_of(harness: TransportHarness) -> int:
    (pid,) = await harness.values(("pid", 0))
    return pid


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_kill_9_in_the_middle_of_a_batch_is_told_within_50_ms():
    delays = []
    async with TransportHarness(process, CRASHING) as harness:
        for _ in range(5):
            pid = await pid_of(harness)
            running, ahead = harness.post([Item(("hang", 0))]), harness.post([Item(1)])
            await asyncio.sleep(0.02)
            started = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            parts = await harness.final(running), await harness.final(ahead)
            delays.append(time.perf_counter() - started)
            assert all(type(part.error) is WorkerDied for part in parts)
            assert "SIGKILL" in parts[0].error.message
            assert [part.started for part in parts] == [True, False]
            await harness.up()
        assert [wait for _, wait in harness.downs] == [0] * 5  # the slot has answered a batch (the pid)
    assert min(delays) < 0.05  # the others may have shared the machine with other tests


async def test_what_a_dead_worker_looked_at_is_given_back():
    async with TransportHarness(process, "support.transports:KeepingModel") as harness:
        await harness.up()
        slab = harness.pool.allocate(100_000)
        assert values(await harness.final(harness.post([Item(slab, "native")]))) == [b"kept"]
        slab.release()
        assert harness.pool.in_use_bytes > 0
        os.kill(harness.ready.pid, signal.SIGKILL)
        await harness.until(lambda: harness.downs)
        assert harness.pool.in_use_bytes == 0


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (("segfault", 0), "SIGSEGV"),
        (("exit", 3), "code 3"),
        (("vanish", 0), "code 0"),
        (("signal", signal.SIGTERM), None),  # ignored: the parent decides
    ],
)
async def test_a_crash_is_named_and_the_next_worker_answers(item, found, capfd):
    async with TransportHarness(process, CRASHING) as harness:
        part = await harness.run(item)
        if found is None:
            assert part.error is None
        else:
            assert type(part.error) is WorkerDied
            assert found in part.error.message
        assert await harness.values(5) == [5]
    if found == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in capfd.readouterr().err


async def test_a_worker_that_is_stopped_by_a_signal_is_killed_at_its_limit():
    async with TransportHarness(process, CRASHING, run_timeout_s=0.2) as harness:
        pid = await pid_of(harness)
        os.kill(pid, signal.SIGSTOP)
        part = await harness.final(harness.post([Item(1)]))
        assert type(part.error) is RunTimeout
        assert not alive(pid)


async def test_a_run_ahead_has_its_own_time():
    async with TransportHarness(process, run_timeout_s=1.0) as harness:
        await harness.up()
        numbers = [harness.post([Item(("sleep", 0.6))]) for _ in range(2)]
        assert [values(await harness.final(n)) for n in numbers] == [[0.6], [0.6]]
        assert not harness.downs


async def test_a_thread_that_hangs_is_abandoned_and_replaced():
    async with TransportHarness(thread, run_timeout_s=0.2) as harness:
        await harness.up()
        running, ahead = harness.post([Item(("sleep", 0.6))]), harness.post([Item(1)])
        part = await harness.final(running)
        assert type(part.error) is RunTimeout
        assert not (await harness.final(ahead)).started
        assert await harness.values(5) == [5]
        parts = len(harness.parts[running])
        await asyncio.sleep(0.5)  # the abandoned thread comes back: nobody listens
        assert len(harness.parts[running]) == parts


async def test_no_descriptor_and_no_process_is_left():
    async with TransportHarness(process, CRASHING) as harness:  # what is opened once and for all
        await harness.up()
    gc.collect()
    before, others = descriptors(), psutil.Process().children()  # other tests may keep helpers
    for _ in range(3):
        async with TransportHarness(process, CRASHING) as harness:
            pid = await pid_of(harness)
            await harness.run(b"x" * 200_000)
            os.kill(pid, signal.SIGKILL)
            await harness.until(lambda: harness.downs)
            await harness.up()
            second = await pid_of(harness)
        assert not alive(pid)
        assert not alive(second)
    gc.collect()
    assert len(descriptors()) == len(before)
    assert set(psutil.Process().children()) <= set(others)


@pytest.mark.parametrize("end", ["kill", "close"])
async def test_what_a_worker_has_started_ends_with_it(end):
    async with TransportHarness(process, CRASHING) as harness:
        worker, started = await harness.values(("pid", 0), ("start", ["sleep", "60"]))
        assert alive(started)
        if end == "kill":
            os.kill(worker, signal.SIGKILL)
            await harness.until(lambda: harness.downs)
        else:
            await harness.transport.close(1.0)
    await until(lambda: not alive(started))


async def test_close_kills_what_does_not_end():
    async with TransportHarness(process, CRASHING) as harness:
        pid = await pid_of(harness)
        running = harness.post([Item(("hold_the_gil", 60))])
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        await harness.transport.close(0.1)
        assert time.perf_counter() - started < 3.0  # not the 60 s that the model holds on
        assert type(harness.parts[running][-1].error) is WorkerDied
        assert not alive(pid)


def test_a_forked_child_forgets_its_parents_workers(tmp_path: Path):
    script = tmp_path / "forks.py"
    script.write_text(
        """
import asyncio, os
from support.transports import TransportHarness
from penstock.plugins import resolve

async def main():
    def make(spec, pool):
        return resolve("transport", "process")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**20)

    async with TransportHarness(make) as harness:
        await harness.values(1)
        pid = os.fork()
        if pid == 0:
            harness.transport.forget()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert await harness.values(2) == [2]
        assert not harness.downs
        print("fine")

asyncio.run(main())
"""
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, env=env)
    assert done.stdout == "fine\n", done.stderr
