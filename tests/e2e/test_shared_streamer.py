"""One batcher for several processes: who starts it, what they share, how it ends, and servers that fork."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.shared_batchers import Batchers, batchers

MODEL = """
import os, time

def where(batch):
    time.sleep(0.02)
    return [(os.getpid(), len(batch), item) for item in batch]
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Batchers]:
    (tmp_path / "model.py").write_text(MODEL)
    with batchers(tmp_path / "run") as found:
        yield found


def test_two_processes_share_one_worker_and_one_queue(shared: Batchers, tmp_path: Path) -> None:
    program = """
        import sys, threading
        from penstock import Streamer
        from model import where

        def call(i):
            found.extend(streamer.predict([i]))

        with Streamer(where, 64, shared="one", linger_s=0.2) as streamer:
            streamer.predict([0])
            print("ready", flush=True)
            sys.stdin.readline()
            found = []
            threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            assert sorted(item for _, _, item in found) == list(range(16))
            print(len({pid for pid, _, _ in found}), found[0][0], max(size for _, size, _ in found), flush=True)
            sys.stdin.readline()
    """
    programs = [shared.start(program, cwd=tmp_path) for _ in range(2)]
    for one in programs:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    assert len(shared.running()) == 1
    for one in programs:
        assert one.stdin is not None
        print(file=one.stdin, flush=True)
    found = [one.stdout.readline().split() for one in programs if one.stdout]
    assert [count for count, _, _ in found] == ["1", "1"]
    assert found[0][1] == found[1][1], "each process has its own worker"
    assert max(int(size) for _, _, size in found) > 16 or len({s for _, _, s in found}) == 1
    for one in programs:
        one.communicate("\n")
        assert one.returncode == 0
