"""The programs of `streamer.py`: applications with a streamer, started, measured and ended.

service_streamer waits forever after the death of a worker: a program that takes too long has failed and is not used
again.
"""

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from closed_loop import Sample, percentiles, wrk
from processes import Processes
from servers import HERE, free_ports, python_of

START_S = 90.0
ANSWER_S = 40.0  # most that an answer may take longer than the run that was asked for

MOST_LEFT_S = 2.0


class Failed(Exception):
    """A program that did not start or answer, with its last output."""


class Program(Processes):
    """`streamer_app.py`, run as `mode` for one spec: library, kind, model; optional workers, devices, max_latency.

    Paused unless inside `awake()`. Raises Failed if it does not come up.
    """

    def __init__(self, mode: str, spec: dict[str, Any], **more: Any) -> None:
        super().__init__()
        self.failure: str | None = None
        self.spec = spec
        self._mode = mode
        try:
            self._start(**more)
            self.stop()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        raise NotImplementedError

    def _launch(self, port: int, pass_fds: tuple[int, ...] = (), **env: str) -> None:
        library = self.spec["library"]
        python = sys.executable if library == "penstock" else python_of(library)
        spec = {**self.spec, "port": port, "redis_port": free_ports(1)[0]}
        # a peer's venv has no torch: it borrows the one that Penstock runs with, and so has the very same model
        borrowed = [] if python == sys.executable else [path for path in sys.path if path.endswith("site-packages")]
        env |= {"BENCH_SPEC": json.dumps(spec), "BENCH_PACKAGES": json.dumps(borrowed), **self.spec.get("env", {})}
        self._spawn([python, str(HERE / "streamer_app.py"), self._mode], pass_fds, **env)

    def _failed(self, why: object) -> Failed:
        what = ", ".join(f"{v}" for k, v in self.spec.items() if k != "env")
        self.failure = f"{what}: {why}"
        return Failed(f"{self.failure}\n{self._log.read_text()[-2000:]}")

    def memory_bytes(self) -> int:
        """The memory of all its processes, including those of Redis."""
        return sum(process.memory_info().rss for process in self.members())


class Web(Program):
    """A web server, on Flask's own server (`flask`) or on gevent's."""

    def _start(self, *, body: bytes, content_type: str) -> None:
        self._body, self._content_type = body, content_type
        port = free_ports(1)[0]
        self._url = f"http://127.0.0.1:{port}/predict"
        self._launch(port)
        request = urllib.request.Request(self._url, body, {"content-type": content_type})
        last: object = "no answer"
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    if not isinstance(json.load(response)[0], int | str):
                        raise self._failed("a wrong answer")
                    self._loop(8, 1)  # nobody is measured cold
                    return
            except (OSError, ValueError, urllib.error.URLError) as e:
                last = e
                time.sleep(0.1)
        raise self._failed(last)

    def _loop(self, connections: int, seconds: int) -> Sample:
        found = wrk(self._url, self._body, self._content_type, connections, seconds)
        # nobody waits any more for what is under way, but it would be in the way of the next run
        time.sleep(min(MOST_LEFT_S, 1.5 * found.get("p99_ms", 0.0) / 1e3))
        return found

    def run(self, connections: int, seconds: int) -> Sample:
        """One run of `wrk`."""
        with self.awake():
            return self._loop(connections, seconds)

    def run_anew(self, connections: int, seconds: int) -> Sample:
        """The same in a new program, if the old one takes too long to finish an earlier run."""
        with type(self)(self._mode, self.spec, body=self._body, content_type=self._content_type) as program:
            return program.run(connections, seconds)


class Calls(Program):
    """A program that makes the requested calls."""

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._launch(0, (theirs.fileno(),), BENCH_FD=str(theirs.fileno()))
        self._answer(START_S)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        self._socket.settimeout(limit_s)
        line = b""
        try:
            while not line.endswith(b"\n"):
                part = self._socket.recv(1 << 20)
                if not part:
                    raise self._failed("it ended")
                line += part
        except TimeoutError:
            raise self._failed(f"no answer after {limit_s:.0f} s") from None
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, what: str, limit_s: float, **arguments: Any) -> Sample:
        """The sample of one run of a function of `streamer_app.py`; nothing once the program has failed."""
        if self.failure:
            return {}
        with self.awake():
            self._socket.sendall(json.dumps([what, arguments]).encode() + b"\n")
            try:
                found = self._answer(limit_s + ANSWER_S)
            except Failed as e:
                print(e, flush=True)
                return {}
        return {**percentiles(found.pop("latencies", ())), **found}
