"""Does `penstock doctor` name what is wrong? Injects each cause into a real server and asks it, three times each.

    python benchmarks/doctor.py [--rounds 3] [--gains] [CAUSE ...]

Prints for each cause how often it was named first. With `--gains` the change of a cause is also made, and the rate of
answers after it is compared with the predicted one. Most models sleep in place of a device, so that the results do not
depend on the cores of the machine; models of causes about cores compute.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import uvloop

RAMP_S = 3.0  # in which the connections come, so that the server sees small batches as well
GAIN_ROUNDS = 3  # of a server before and after the change, of which the median counts
MEASURED_S = 6.0  # of answers, before and after a change
JSON = "application/json"
BYTES = "application/octet-stream"


@dataclass(frozen=True)
class Load:
    """Closed loops of `connections`: each sends `pipelined` requests at once, reads the answers and pauses. With
    `burst_s` all of them begin at the same time, again and again. With `reads` false nothing is read."""

    connections: int = 64
    body: bytes = b"1"
    content_type: str = JSON
    pipelined: int = 1
    pause_s: float = 0.0
    burst_s: float = 0.0
    reads: bool = True
    path: str = "/predictions/m"


@dataclass(frozen=True)
class Case:
    """A server with a cause, "" for none, and the load that shows it. `change` replaces settings, and `changed` the
    load; without either there is no gain to measure."""

    cause: str
    source: str
    load: Load = Load()
    settings: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    changed: Load | None = None
    also: Load | None = None  # beside `load`
    files: Mapping[str, str] = field(
        default_factory=dict
    )  # of the server's folder, where it finds programs and modules
    warm_s: float = 6.0  # until the doctor is asked, which looks for five seconds more
    broker_s: float = 0.0  # a worker behind a broker that is so far away, in place of a server


SLEEPS = """
    import time

    def m(items):
        time.sleep({fixed} + {row} * len(items))
        return items
"""


GPU = """
    # a driver that finds its GPU idle for most of the time
    from types import SimpleNamespace

    def nvmlInit(): pass
    def nvmlDeviceGetCount(): return 1
    def nvmlDeviceGetHandleByIndex(i): return i
    def nvmlDeviceGetName(handle): return "a"
    def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(used=1, total=2)
    def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=20)
"""


def sleeps(fixed: float, row: float) -> str:
    """A model whose batches take fixed + row * n seconds, on a device of its own."""
    return SLEEPS.format(fixed=fixed, row=row)


def tensor() -> bytes:
    """An Open Inference request of 20,000 numbers."""
    values = [i / 7 for i in range(20_000)]
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(values)], "data": values}]}
    ).encode()


def number(key: str) -> Callable[[Mapping[str, Any]], Mapping[str, str]]:
    """Reads the value that the doctor proposes for a key."""

    def read(found: Mapping[str, Any]) -> Mapping[str, str]:
        match = re.search(rf"{re.escape(key)} = (\d+)", found["change"])
        assert match, found
        return {key: match[1]}

    return read


CASES = (
    Case("", sleeps(0.004, 0.0005), Load(8, pause_s=0.05)),
    Case(
        "crashing worker",
        """
        import os, time

        def m(items):
            time.sleep(0.002)
            if 13 in items:
                os._exit(1)
            return items
        """,
        Load(8, pause_s=0.02),
        {"restart.quarantine_s": "0", "batching.idempotent": "false"},
        also=Load(1, b"13", pause_s=1.0),
    ),
    Case(
        "leaking worker",
        """
        import time

        kept = []

        def m(items):
            time.sleep(0.002)
            if len(kept) < 600:  # 2.4 GiB: enough to be noticed
                kept.append(b"x" * 2**22)
            return items
        """,
        Load(4, pause_s=0.05),
    ),
    Case(
        "out of memory",
        """
        import time

        def m(items):
            time.sleep(0.005)
            if len(items) > 6:
                raise MemoryError("out of memory")
            return items
        """,
        Load(32),
    ),
    Case("broker lag", sleeps(0.004, 0.0005), Load(8), broker_s=0.02),
    Case(
        "slow clients",
        """
        import time

        def m(items):
            time.sleep(0.002)
            return [b"x" * (2**24 if item else 1) for item in items]
        """,
        Load(6, b"1", reads=False),
        also=Load(4, b"0", pause_s=0.05),
    ),
    Case(
        "big bodies",
        """
        def m(items):
            return [len(item) for item in items]
        """,
        Load(16, bytes(2**20), BYTES),
        changed=Load(16, bytes(2**19), BYTES),
    ),
    Case(
        "small bodies",
        """
        def m(items):
            return items
        """,
        Load(16, pipelined=32),
    ),
    Case(
        "too many threads",
        """
        import numpy as np

        a = np.ones((700, 700))

        def m(items):
            a @ a
            return items
        """,
        Load(32),
        {"instances": "2", "threads": "4", "batching.max_batch_size": "4"},
        change=number("threads"),
    ),
    Case(
        "too many instances",
        """
        import time

        def m(items):
            end = time.thread_time() + 0.008 + 0.0001 * len(items)
            while time.thread_time() < end:
                pass
            return items
        """,
        Load(64),
        {"instances": "8", "threads": "1"},
        change=number("instances"),
    ),
    Case(
        "padding",
        sleeps(0.0, 0.001),
        Load(8),
        {"batching.sizes": "[32]"},
        change=lambda found: {"batching.sizes": f"[{found['change'].split()[1]}, 32]"},
    ),
    Case(
        "slow decode",
        """
        import time

        class m:
            inputs = {"x": "FP32[-1,20000]"}
            outputs = {"y": "FP32[-1]"}
            def load(self, device): pass
            def predict(self, x):
                time.sleep(0.003)
                return x[:, 0]
        """,
        Load(16, tensor(), path="/v2/models/m/infer"),
        {"batching.max_batch_size": "8"},
        change=number("instances"),
    ),
    Case(
        "slow preprocess",
        """
        import time

        class m:
            def load(self, device): pass
            def preprocess(self, item):
                end = time.thread_time() + 0.002
                while time.thread_time() < end:
                    pass
                return item
            def predict(self, items):
                time.sleep(0.002 + 0.001 * len(items))
                return items
        """,
        Load(32),
        {"batching.max_batch_size": "8"},
        change=number("preprocess_processes"),
    ),
    Case(
        "GPU starved",
        sleeps(0.02, 0.0),
        Load(32),
        {"devices": '["cuda:0"]', "batching.max_batch_size": "8"},
        files={"nvidia-smi": "#!/bin/sh\necho 'GPU 0: a'\n", "pynvml.py": GPU},
    ),
    Case(
        "queue bound",
        sleeps(0.004, 0.0005),
        Load(48, burst_s=0.4),
        {"batching.max_queue": "8", "batching.max_batch_size": "8"},
        change=number("batching.max_queue"),
    ),
    Case(
        "batch limit",
        sleeps(0.02, 0.0005),
        Load(64),
        {"batching.max_batch_size": "4"},
        number("batching.max_batch_size"),
    ),
    Case("too few instances", sleeps(0.0, 0.01), Load(64), {"batching.max_batch_size": "8"}, number("instances")),
)


# ---- the load


async def _send(url: str, load: Load, count: list[int], begin_s: float) -> None:
    """One connection, until it is cancelled."""
    await asyncio.sleep(begin_s)
    parts = urlsplit(url)
    head = f"POST {load.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: {load.content_type}\r\n"
    request = (f"{head}content-length: {len(load.body)}\r\n\r\n".encode() + load.body) * load.pipelined
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**16)
            try:
                while True:
                    if load.burst_s:
                        now = time.time()
                        await asyncio.sleep(load.burst_s - now % load.burst_s)
                    writer.write(request)
                    if not load.reads:
                        writer.transport.pause_reading()
                        await asyncio.sleep(1000)
                    answer = await reader.readuntil(b"\r\n\r\n")
                    length = re.search(rb"content-length: (\d+)", answer)
                    await reader.readexactly(int(length[1]) if length else 0)
                    if load.pipelined > 1:  # the others are equal, and parsing them would cost more than serving them
                        await reader.readexactly((load.pipelined - 1) * (len(answer) + int(length[1] if length else 0)))
                    count[0] += load.pipelined * answer.startswith(b"HTTP/1.1 200")
                    if load.pause_s:
                        await asyncio.sleep(load.pause_s)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.05)


def _run_load(url: str, loads: Sequence[Load], answered: Any) -> None:
    async def main() -> None:
        count = [0]
        tasks = [
            asyncio.create_task(_send(url, load, count, RAMP_S * i / load.connections))
            for load in loads
            for i in range(load.connections)
        ]
        while tasks:
            await asyncio.sleep(0.1)
            answered.value = count[0]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(main())  # the client must not be the limit


@contextlib.contextmanager
def loaded(url: str, loads: Sequence[Load]) -> Iterator[Any]:
    """Sends the loads from another process; `value` counts the answers with status 200."""
    context = get_context("fork")
    answered = context.Value("q", 0, lock=False)
    process = context.Process(target=_run_load, args=(url, loads, answered), daemon=True)
    process.start()
    try:
        yield answered
    finally:
        process.kill()
        process.join()


# ---- the server


@contextlib.contextmanager
def serving(case: Case, settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The URLs of a server with the case's model and these settings."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        for name, text in {"app.py": case.source, **case.files}.items():
            Path(folder, name).write_text(textwrap.dedent(text))
            Path(folder, name).chmod(0o755)
        given = [word for key, value in settings.items() for word in ("--set", f"models.m.{key}={value}")]
        free = [word for name in ("port", "management_port", "metrics_port") for word in ("--set", f"server.{name}=0")]
        read, write = os.pipe()
        server = subprocess.Popen(
            [sys.executable, "-m", "penstock", "serve", "app.py:m", *given, *free, "--set", "server.grpc_port=0"],
            cwd=folder,
            pass_fds=[write],
            env={
                **os.environ,
                "PENSTOCK_READY_FD": str(write),
                "PYTHONPATH": folder,
                "PATH": f"{folder}:{os.environ['PATH']}",
            },
            stdout=log,
            stderr=log,
        )
        os.close(write)
        try:
            with os.fdopen(read) as pipe:
                line = pipe.readline()
            if not line:
                raise RuntimeError(f"the server did not start:\n{os.pread(log.fileno(), 2**16, 0).decode()}")
            yield json.loads(line)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextlib.contextmanager
def far_worker(case: Case) -> Iterator[str]:
    """The metrics listener of a `penstock worker` under load, whose broker is `broker_s` away."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        Path(folder, "app.py").write_text(textwrap.dedent(case.source))
        near, far = (running.enter_context(contextlib.closing(socket.socket())) for _ in range(2))
        ports = []
        for each in (near, far):
            each.bind(("127.0.0.1", 0))
            ports.append(each.getsockname()[1])
        near.close()
        far.listen()
        redis = subprocess.Popen(["redis-server", "--port", str(ports[0]), "--save", ""], stdout=subprocess.DEVNULL)
        running.callback(redis.wait)
        running.callback(redis.kill)
        _fork(running, _delay, far, ports[0], case.broker_s)
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock",
                "worker",
                "app.py:m",
                f"--redis=127.0.0.1:{ports[1]}",
                "--metrics-port=0",
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        running.enter_context(worker)
        running.callback(worker.terminate)
        assert worker.stdout is not None
        metrics = re.search(r"http://\S+(?=/metrics)", worker.stdout.readline())
        assert metrics
        assert "serves" in worker.stdout.readline()
        _fork(running, _call, f"127.0.0.1:{ports[0]}", case.load.connections)
        yield metrics[0]


def _fork(running: contextlib.ExitStack, target: Callable[..., None], *arguments: Any) -> None:
    process = get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    running.callback(process.join)
    running.callback(process.kill)


def _delay(listening: socket.socket, port: int, seconds: float) -> None:
    """Forwards connections to a port; everything arrives `seconds` late."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            asyncio.get_running_loop().call_later(seconds, writer.write, data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    async def main() -> None:
        async with await asyncio.start_server(forward, sock=listening) as server:
            await server.serve_forever()

    asyncio.run(main())


def _call(broker: str, callers: int) -> None:
    """Calls a model over a broker, for ever."""
    from penstock import RedisStreamer

    streamer = RedisStreamer(redis_broker=broker)

    def call() -> None:
        while True:
            streamer.predict([1])

    threads = [threading.Thread(target=call, daemon=True) for _ in range(callers)]
    for thread in threads:
        thread.start()
    threads[0].join()


def doctor(url: str) -> dict[str, Any]:
    """The view that `penstock doctor --json` prints."""
    command = [sys.executable, "-m", "penstock", "doctor", url, "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode in (0, 3), found.stderr
    view: dict[str, Any] = json.loads(found.stdout)
    return view


@contextlib.contextmanager
def injected(case: Case) -> Iterator[str]:
    """The metrics listener of a server with this cause, under load."""
    if case.broker_s:
        with far_worker(case) as metrics:
            yield metrics
        return
    with serving(case, case.settings) as urls, loaded(urls["inference"], _loads(case)):
        yield urls["metrics"]


def _loads(case: Case) -> list[Load]:
    return [case.load] if case.also is None else [case.load, case.also]


def rate(case: Case, settings: Mapping[str, str]) -> float:
    """Answers per second."""
    with serving(case, settings) as urls, loaded(urls["inference"], _loads(case)) as answered:
        time.sleep(3.0)
        before, began = answered.value, time.monotonic()
        time.sleep(MEASURED_S)
        return float((answered.value - before) / (time.monotonic() - began))


def gain(case: Case, found: Mapping[str, Any]) -> float:
    """How many times as many answers a second the change brings."""
    settings = {**case.settings, **(case.change(found) if case.change else {})}
    after = replace(case, load=case.changed or case.load)
    return median(rate(after, settings) / rate(case, case.settings) for _ in range(GAIN_ROUNDS))


def named(view: Mapping[str, Any]) -> str:
    """The cause that the doctor names first, "" for none."""
    causes = view["verdict"]["causes"]
    return causes[0]["cause"] if causes else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("causes", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gains", action="store_true")
    options = parser.parse_args()
    right = total = 0
    for case in CASES:
        if options.causes and (case.cause or "healthy") not in options.causes:
            continue
        for _ in range(options.rounds):
            with injected(case) as url:
                time.sleep(case.warm_s)
                view = doctor(url)
            first = named(view)
            right, total = right + (first == case.cause), total + 1
            print(f"{case.cause or 'healthy':20} {first or 'healthy':20} {view['verdict']['text']}", flush=True)
        causes = view["verdict"]["causes"]
        if options.gains and (case.change or case.changed) and first == case.cause and causes[0]["gain"]:
            print(f"{'':20} gain: predicted {causes[0]['gain']:.2f}, measured {gain(case, causes[0]):.2f}", flush=True)
    print(f"named first: {right} of {total}")


if __name__ == "__main__":
    main()
