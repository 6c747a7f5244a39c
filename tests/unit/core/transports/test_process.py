"""Workers in a process of their own: what both ends do that no caller of the engine sees."""

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core.transports import process as parent
from penstock.core.transports.process import MAX_FREE, ActiveWait, Channel
from penstock.core.wire import messages as frames
from penstock.plugins import resolve
from penstock.types import Item
from support.concurrent_batches import TARGET as CONCURRENT
from support.transports import TransportHarness, values


def process(spec, pool):
    return resolve("transport", "process")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**22)


async def pid_of(harness: TransportHarness) -> int:
    await harness.up()
    return harness.ready.pid


async def test_answers_before_a_worker_death_count():
    async with TransportHarness(process) as harness:
        pid = await pid_of(harness)
        number = harness.post([Item(1)])
        time.sleep(0.2)  # noqa: ASYNC251 - the answer arrives, and the loop does not see it
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)  # noqa: ASYNC251
        harness.transport._places[0]._on_exit()  # of the two events, that of the process comes first
        assert values(harness.parts[number][-1]) == [1]


async def test_a_buffered_batch_is_sent_even_if_the_next_one_is_unsendable():
    async with TransportHarness(process) as harness:
        await harness.up()
        first = harness.post([Item(1)], more=True)
        second = harness.post([Item(2, content_type=object())])
        part = await harness.final(second)
        assert part.results[0].error.code == "item_failed"
        assert values(await harness.final(first)) == [1]


class Marks:
    """Makes a directory when it is unpickled: that is, decoded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


async def test_a_batch_sent_ahead_is_decoded_during_the_current_one(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(
        """
import os, time

def predict(items):
    for _ in range(500):
        if items[0] is None or os.path.exists(items[0]):
            return [True]
        time.sleep(0.01)
    return [False]
"""
    )
    async with TransportHarness(process, f"{file}:predict") as harness:
        await harness.up()
        path = str(tmp_path / "decoded")
        running, ahead = harness.post([Item(path)]), harness.post([Item(Marks(path))])
        assert values(await harness.final(running)) == [True]
        assert values(await harness.final(ahead)) == [True]


async def test_a_batch_sent_ahead_is_collated_during_the_current_one(tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(
        """
import threading

class Model:
    def load(self, device):
        self.ahead = threading.Event()

    def collate(self, items):
        if items == ["second"]:
            self.ahead.set()
        return items, threading.get_ident()

    def predict(self, batch):
        items, thread = batch
        return [self.ahead.wait(30) and thread != threading.get_ident()] * len(items)
"""
    )
    async with TransportHarness(process, f"{file}:Model") as harness:
        await harness.up()
        running, ahead = harness.post([Item("first")]), harness.post([Item("second")])
        assert values(await harness.final(running)) == [True]
        assert values(await harness.final(ahead)) == [True]


APART = """
import os, time

class Model:
    __penstock_finishes_apart__ = True

    def predict(self, items):
        for item in items:
            open(item, "x").close()
        return [(item, items[0]) for item in items]

    def postprocess(self, result):
        path, first = result
        if path.endswith("bad"):
            raise ValueError("bad")
        after = os.path.join(os.path.dirname(path), "after")
        for _ in range(500):
            if not path.endswith("before") or os.path.exists(after):
                return path
            time.sleep(0.01)
        raise TimeoutError(path)
"""


async def test_the_next_batch_is_predicted_while_answers_are_finished_apart(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(APART)
    async with TransportHarness(process, f"{file}:Model") as harness:
        await harness.up()
        before, bad, after = (str(tmp_path / name) for name in ("before", "bad", "after"))
        first, second = harness.post([Item(before), Item(bad)]), harness.post([Item(after)])
        found = (await harness.final(first)).results
        assert found[0].body == before
        assert found[1].error.message == "postprocess raised ValueError"
        assert values(await harness.final(second)) == [after]


async def test_a_model_that_exits_during_postprocessing_counts_as_dead(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(APART + "\n    postprocess = lambda self, result: exit(3)\n")
    async with TransportHarness(process, f"{file}:Model") as harness:
        await harness.up()
        part = await harness.final(harness.post([Item(str(tmp_path / "a"))]))
        assert part.error.code == "worker_died"
        assert part.error.message == "the worker exited with code 3"


@pytest.mark.parametrize("step", ["predict", "postprocess"])
async def test_the_reason_that_a_model_gives_for_its_exit_is_printed(
    tmp_path: Path, step: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "app.py"
    file.write_text(APART + f"\n    {step} = lambda self, given: exit('the model says no')\n")
    async with TransportHarness(process, f"{file}:Model") as harness:
        await harness.up()
        part = await harness.final(harness.post([Item(str(tmp_path / "a"))]))
        assert part.error.message == "the worker exited with code 1"
    assert "the model called sys.exit(the model says no)\n" in capfd.readouterr().err


async def test_a_death_is_attributed_to_the_predicted_batch(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(
        APART.replace("for item in items:", "for item in items:\n            if item == 'kill': os._exit(3)")
    )
    async with TransportHarness(process, f"{file}:Model") as harness:
        await harness.up()
        finished, predicted = harness.post([Item(str(tmp_path / "before"))]), harness.post([Item("kill")])
        behind = harness.post([Item(str(tmp_path / "behind"))])
        parts = [await harness.final(number) for number in (finished, predicted, behind)]
        assert [part.started for part in parts] == [False, True, False]


async def test_parts_of_a_stream_wait_for_the_answers_before_them_that_are_finished_apart(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(
        """
import time

class Model:
    __penstock_finishes_apart__ = True

    def predict(self, items):
        return [1] if items == [1] else iter([items, items])

    def postprocess(self, result):
        if result == 1:
            time.sleep(0.1)
        return result
"""
    )
    async with TransportHarness(process, f"{file}:Model") as harness:
        await harness.up()
        first, second = harness.post([Item(1)]), harness.post([Item(2)])
        assert values(await harness.final(first)) == [1]
        await harness.final(second)
        assert [values(part) for part in harness.parts[second]] == [[2], [2], [None]]


def unnamed(pid: int, folder: Path) -> set[str]:
    """The files of `folder` without a name that a process has open."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return {link for link in links if link.startswith(str(folder)) and link.endswith("(deleted)")}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_without_memfd_large_payloads_cross_in_an_unlinked_file(tmp_path: Path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with TransportHarness(process) as harness:
        large = b"x" * 200_000
        assert await harness.values(large, ("repeat", 200_000)) == [large, b"r" * 200_000]
        assert len(unnamed(await pid_of(harness), tmp_path)) == 2  # the pool, and the reply region
    assert os.listdir(tmp_path) == []


def test_script_definitions_can_be_targets_and_payloads(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import asyncio
from dataclasses import dataclass
from support.transports import TransportHarness
from penstock.plugins import resolve

@dataclass
class Point:
    x: int

def double(points):
    return [Point(2 * p.x) for p in points]

async def main():
    def make(spec, pool):
        return resolve("transport", "process")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**20)

    async with TransportHarness(make, double) as harness:
        assert await harness.values(Point(2), Point(3)) == [Point(4), Point(6)]
        print("fine")

if __name__ == "__main__":
    asyncio.run(main())
"""
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, env=env)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept by glibc's own settings")
async def test_a_worker_keeps_the_memory_of_a_batch_for_the_next_one(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(
        """
import resource

def predict(items):
    for item in items:
        bytearray(item)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for item in items:
        bytearray(item)
    return [resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before] * len(items)
"""
    )
    async with TransportHarness(process, f"{file}:predict") as harness:
        faults, *_ = await harness.values(*[4 * 2**20] * 20)
    assert faults < 1000  # 20,480 pages are written


async def test_a_worker_side_by_side_has_its_places_for_answers_back_before_it_is_idle():
    async with TransportHarness(process, CONCURRENT) as harness:
        await harness.up()
        waits = harness.post([Item(("gate", "a"))])
        await harness.final(harness.post([Item(bytes(70_000))] * 40))
        assert len(harness.transport._places[0]._free) <= MAX_FREE
        await harness.final(harness.post([Item(("open", "a"))]))
        await harness.final(waits)


TURNS = """
import time

def predict(items):
    if items[0] == "stream":
        return endless(items)
    time.sleep(items[0])
    return items

def endless(items):
    while True:
        time.sleep(0.005)
        yield items
"""


async def test_batches_of_any_length_follow_each_other_and_streams_among_them_can_be_abandoned(tmp_path: Path):
    file = tmp_path / "app.py"
    file.write_text(TURNS)
    async with TransportHarness(process, f"{file}:predict") as harness:
        await harness.up()
        for _ in range(3):
            for seconds in (0, 0, 0, 0.01, 0, 0.01, 0.01, 0, 0):
                assert await harness.values(seconds) == [seconds]
            sent = [harness.post([Item(seconds)], more=not seconds) for seconds in (0, 0, 0, 0.01)]
            assert [values(await harness.final(number)) for number in sent] == [[0], [0], [0], [0.01]]
            assert await harness.values(0) == [0]
            stream = harness.post([Item("stream")])
            await harness.until(lambda number=stream: harness.parts[number])
            harness.transport.abandon(0, stream)
            await harness.final(stream)
        assert not harness.downs


async def test_a_worker_that_waits_after_short_batches_ends_with_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.core.transports.process.END_GRACE_S", 10.0)  # then it would be killed
    marker = tmp_path / "unloaded"
    file = tmp_path / "app.py"
    file.write_text(
        f"""
class Model:
    def predict(self, items):
        return items

    def unload(self):
        open({str(marker)!r}, "w").close()
"""
    )
    async with TransportHarness(process, f"{file}:Model") as harness:
        for n in range(5):
            assert await harness.values(n) == [n]
        harness.transport._places[0]._child.sock.shutdown(socket.SHUT_WR)
        await harness.until(lambda: harness.downs)
        assert marker.exists()


# ---- the channel


@pytest.fixture
async def pair():
    """(channel, the peer's socket, received frames, an event that is set at the end)."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    heard, ended = [], asyncio.Event()
    channel = Channel(asyncio.get_running_loop(), ours, heard.append, ended.set)
    yield channel, theirs, heard, ended
    channel.close()
    ours.close()
    theirs.close()


async def test_unsent_bytes_are_sent_later_in_order(pair):
    channel, peer, _, _ = pair
    sent = [(b"%d" % i, [bytes([i]) * 300_000]) for i in range(20)]
    for head, buffers in sent:
        channel.send(frames.frame_of(head, buffers))
    decoder, received = frames.FrameDecoder(), []
    loop = asyncio.get_running_loop()
    while len(received) < len(sent):
        received += decoder.feed(await loop.sock_recv(peer, 2**20))
    assert [(f.head, [bytes(b) for b in f.buffers]) for f in received] == sent


async def test_a_frame_with_more_to_come_leaves_with_the_next_or_when_it_must(pair):
    channel, peer, _, _ = pair
    channel.send(frames.frame_of(b"one"), more=True)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    channel.send(frames.frame_of(b"two"))
    channel.send(frames.frame_of(b"three"), more=True)
    channel.flush()
    assert [f.head for f in frames.FrameDecoder().feed(peer.recv(2**20))] == [b"one", b"two", b"three"]


async def test_buffered_frames_stay_behind_unsent_bytes(pair):
    channel, peer, _, _ = pair
    channel.send(frames.frame_of(b"large", [b"x" * 3_000_000]))
    channel.send(frames.frame_of(b"one"), more=True)
    channel.send(frames.frame_of(b"two"))
    decoder, received = frames.FrameDecoder(), []
    while len(received) < 3:
        received += decoder.feed(await asyncio.get_running_loop().sock_recv(peer, 2**20))
    assert [f.head for f in received] == [b"large", b"one", b"two"]


async def test_frames_are_received_and_the_end_is_reported_once(pair):
    channel, peer, heard, ended = pair
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, b"".join(map(bytes, frames.frame_of(b"one") + frames.frame_of(b"two", [b"x" * 10]))))
    peer.close()
    await ended.wait()
    assert [f.head for f in heard] == [b"one", b"two"]
    channel.send(frames.frame_of(b"into the void"))  # not an error: who sends hears of the death soon


async def test_draining_reads_received_frames_without_a_loop_iteration(pair):
    channel, peer, heard, ended = pair
    for i in range(100):
        peer.send(frames.frame_of(b"%d" % i)[0])
    peer.close()
    channel.drain()
    assert len(heard) == 100
    assert ended.is_set()


async def test_a_peer_that_is_gone_does_not_raise(pair):
    channel, peer, _, _ = pair
    peer.close()
    channel.send(frames.frame_of(b"late"))


# ---- the response to a lone request


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that ActiveWait sees."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(parent, "time", SimpleNamespace(perf_counter=lambda: now.s))
    monkeypatch.setattr(parent, "usable_cores", lambda: 2)
    return now


def test_a_loop_waits_actively_while_rounds_are_short(clock):
    def rounds(sleeping_s: float, count: int = 5) -> list[bool]:
        waited = []
        for _ in range(count):
            waited.append(wait.begin())
            clock.s += 0.0001 if waited[-1] else sleeping_s
            wait.end()
            assert clock.s > wait.end_s  # the loop, which may look only now, does not wait for what has come
        return waited

    wait = ActiveWait()
    assert all(rounds(sleeping_s=0.0005))
    wait.begin()
    clock.s += 0.01  # a neighbour took the core
    wait.end()
    assert rounds(sleeping_s=0.0005) == [False, True, True, True, True]  # although sleep makes each round long


def test_a_loop_seldom_waits_actively_for_a_slow_model(clock):
    wait = ActiveWait()
    waited = 0
    for _ in range(1000):
        waited += wait.begin()
        clock.s += 0.005
        wait.end()
    assert 1000 / 64 <= waited <= 25


def test_a_loop_never_waits_actively_where_others_need_the_core(clock, monkeypatch):
    def waits() -> bool:
        wait = ActiveWait()
        wait.begin()
        wait.end()
        return wait.begin()

    assert waits()
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(waits).result()
    monkeypatch.setattr(parent, "usable_cores", lambda: 1)
    assert not waits()
