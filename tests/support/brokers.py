"""Programs around a Redis broker: `penstock worker` processes, and a crowd of callers."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from penstock.errors import PenstockError
from penstock.streamer.redis.client import RedisStreamer
from support.waiting import wait_for

QUEUE = "{penstock:}:queue"
APP = """
    import os, time

    def echo(items):
        time.sleep(0.005)
        return items

    def slow(items):
        time.sleep(0.5)
        return items

    def poison(items):
        for item in items:
            if item == "poison":
                os.kill(os.getppid(), 9)
                os.kill(os.getpid(), 9)
        return items
"""


class WorkerProcess:
    """A real `penstock worker`."""

    def __init__(self, folder: Path, target: str, broker: str, *options: str, wait: bool = True) -> None:
        self._log = (folder / f"worker-{time.monotonic_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "worker", f"app.py:{target}", "--redis", broker, *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if wait:
            assert "serves" in self.process.stdout.readline(), self.log_text()

    def log_text(self) -> str:
        return os.pread(self._log.fileno(), 2**20, 0).decode()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status when the process and its children have ended."""
        children = []
        if self._log.closed:
            return self.process.returncode
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(number)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.communicate()
            self._log.close()
        assert not psutil.wait_procs(children, timeout=10)[1]
        return self.process.returncode


def runs(redis: Any) -> None:
    """Waits until a worker has taken a request."""
    from redis.exceptions import ResponseError

    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            if redis.ask.xpending(QUEUE, "workers")["pending"]:
                return
        except ResponseError:
            pass  # there is no queue yet
        time.sleep(0.01)
    raise AssertionError("waited in vain")


class Crowd:
    """Threads that send `item(number)` in a loop; each result must be `right(number)`, or an error."""

    def __init__(
        self,
        streamer: RedisStreamer,
        threads: int = 8,
        *,
        item: Callable[[int], Any] = lambda n: n,
        right: Callable[[int], Any] = lambda n: n,
    ) -> None:
        self.right, self.wrong, self.errors = 0, [], []
        self._item, self._expected = item, right
        self._streamer, self._going, self._lock = streamer, True, threading.Lock()
        self._pool = ThreadPoolExecutor(threads)
        self._work = [self._pool.submit(self._ask, n * 10**6) for n in range(threads)]

    def _ask(self, number: int) -> None:
        while self._going:
            number += 1
            try:
                answer = self._streamer.predict([self._item(number)])
            except PenstockError as e:
                with self._lock:
                    self.errors.append(e)
                time.sleep(0.05)
                continue
            with self._lock:
                if answer == [self._expected(number)]:
                    self.right += 1
                else:
                    self.wrong.append((number, answer))

    def answered(self, more: int = 50) -> None:
        """Waits for a number of further correct results."""
        target = self.right + more
        wait_for(lambda: self.right >= target, said=lambda: (self.right, target, self.errors[-3:]))

    def stop(self) -> None:
        self._going = False
        for work in self._work:
            work.result(60)
        self._pool.shutdown()
        assert not self.wrong
