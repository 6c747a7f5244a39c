"""Measures a server of the service with closed-loop clients: request rate, latencies, CPU usage.

    python client_qps.py --img_dir images --port 8888 --request_client 10 --request_batch 1

A latency covers `request_batch` consecutive calls. The server's CPU and memory include the process that listens on the
port and all its children.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from service import HERE, PORT, InferenceParams, InferenceService
from thriftpy2.protocol import TCyBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TCyBufferedTransportFactory, TTransportException

START_S = 120.0
SAMPLE_S = 0.5
Client = object


def connect(host: str, port: int) -> Client:
    """A new connection, buffered and binary, the default of Thrift's libraries."""
    return make_client(
        InferenceService,
        host,
        port,
        proto_factory=TCyBinaryProtocolFactory(),
        trans_factory=TCyBufferedTransportFactory(),
        timeout=60_000,
    )


def wait_for(host: str, port: int) -> None:
    """Returns when the server answers a ping."""
    end = time.monotonic() + START_S
    while True:
        try:
            client = connect(host, port)
            client.ping()
            client.close()
            return
        except (TTransportException, TApplicationException, OSError) as error:
            if time.monotonic() > end:
                raise SystemExit(f"no server answers at {host}:{port}: {error}") from None
            time.sleep(0.2)


class Usage:
    """The resource usage of a process and its children during a block. GPU usage is that of the first GPU."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.gpu: list[float] = []
        self.memory_mb = self.cpu_s = 0.0
        try:
            import pynvml

            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._gpu_share: Callable[[], float] | None = lambda: pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu
        except Exception:  # no package, no driver, no GPU
            self._gpu_share = None

    def __enter__(self) -> Usage:
        self._before = self._seconds()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cpu_s = self._seconds() - self._before
        self._end.set()
        self._thread.join()

    def _processes(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def _seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(t.user + t.system for t in times)

    def _watch(self) -> None:
        while True:
            total = 0.0
            for process in self._processes():
                try:
                    total += process.memory_info().rss - process.memory_info().shared
                except psutil.Error:
                    continue
            self.memory_mb = max(self.memory_mb, total / 1e6)
            if self._gpu_share is not None:
                self.gpu.append(self._gpu_share())
            if self._end.wait(SAMPLE_S):
                return


def listener(port: int) -> int | None:
    """The process that listens on the port of this machine, if this user can see it."""
    for process in psutil.process_iter():
        try:
            for found in process.net_connections("tcp"):
                if found.status == psutil.CONN_LISTEN and found.laddr.port == port:
                    return process.pid
        except psutil.Error:
            continue
    return None


class Load:
    """Clients that start together, each with its own connection, and their measurements."""

    def __init__(self, given: argparse.Namespace, images: list[tuple[str, bytes]]) -> None:
        self._given = given
        self._images = images
        self._lock = threading.Lock()
        self._left = given.total_number or len(images)
        self._end = float("inf")
        self._all_ready = threading.Barrier(given.request_client + 1)
        self.latencies_s: list[float] = []
        self.errors: dict[str, int] = {}
        self.seconds = self.own_cpu_s = 0.0

    def run(self, usage: Usage | None) -> None:
        """Warms up, and measures until the images or the seconds run out."""
        clients = [connect(self._given.host, self._given.port) for _ in range(self._given.request_client)]
        threads = [threading.Thread(target=self._client, args=(n, client)) for n, client in enumerate(clients)]
        for thread in threads:
            thread.start()
        self._all_ready.wait()  # all have warmed up
        if usage is not None:
            usage.__enter__()
        cpu, begun = time.process_time(), time.perf_counter()
        if self._given.seconds:
            self._left, self._end = sys.maxsize, begun + self._given.seconds
        self._all_ready.wait()
        for thread in threads:
            thread.join()
        self.seconds = time.perf_counter() - begun
        self.own_cpu_s = time.process_time() - cpu
        if usage is not None:
            usage.__exit__()
        for client in clients:
            client.close()

    def _client(self, number: int, client: Client) -> None:
        choose = random.Random(number)
        try:
            for _ in range(self._given.warm_up):
                self._call(client, [choose.choice(self._images)])
        finally:
            self._all_ready.wait()
        self._all_ready.wait()
        while images := self._take(choose):
            begun = time.perf_counter()
            errors = self._call(client, images)
            seconds = time.perf_counter() - begun
            with self._lock:
                self.latencies_s += [seconds] * (len(images) - len(errors))
                for error in errors:
                    self.errors[error] = self.errors.get(error, 0) + 1

    def _take(self, choose: random.Random) -> list[tuple[str, bytes]]:
        """The images of the next request; empty when all are sent."""
        with self._lock:
            if time.perf_counter() >= self._end:
                return []
            first, self._left = self._left, self._left - self._given.request_batch
        count = max(0, min(self._given.request_batch, first))
        if self._given.total_number == 0 and not self._given.seconds:  # each image once
            return self._images[first - count : first]
        return choose.choices(self._images, k=count)

    def _call(self, client: Client, images: list[tuple[str, bytes]]) -> list[str]:
        """Sends the images one after the other, and returns their errors."""
        errors = []
        for name, data in images:
            try:
                if not client.infer_batch(InferenceParams(uuid=name, data=data)).label:
                    errors.append("no label")
            except TApplicationException as error:
                errors.append(str(error.message)[:100])
        return errors


def summary(load: Load, usage: Usage | None) -> dict[str, float | dict[str, int]]:
    """The figures: QPS, latencies in ms, CPU in % of one core, CPU ms per request, memory in MB."""
    found = sorted(load.latencies_s)
    if not found:
        raise SystemExit(f"no call was answered: {load.errors}")
    at = {f"tp{p}_ms": found[min(len(found) - 1, int(len(found) * p / 100))] * 1e3 for p in (50, 90, 99)}
    figures = {
        "requests": len(found),
        "qps": len(found) / load.seconds,
        **at,
        "worst_ms": found[-1] * 1e3,
        "mean_ms": statistics.fmean(found) * 1e3,
        "client_cpu": 100 * load.own_cpu_s / load.seconds,
    }
    if usage is not None:
        figures["cpu"] = 100 * usage.cpu_s / load.seconds
        figures["cpu_ms_a_request"] = 1e3 * usage.cpu_s / len(found)
        figures["memory_mb"] = usage.memory_mb
        if usage.gpu:
            figures["gpu"] = statistics.fmean(usage.gpu)
    figures["errors"] = sum(load.errors.values())
    return figures


def lines(figures: dict[str, float], errors: dict[str, int]) -> Iterator[str]:
    """The figures as text."""
    yield f"requests   {figures['requests']:.0f}, {figures['errors']:.0f} failed"
    yield f"QPS        {figures['qps']:.1f}"
    yield "TP50/90/99 {tp50_ms:.2f} / {tp90_ms:.2f} / {tp99_ms:.2f} ms, worst {worst_ms:.2f} ms".format(**figures)
    if "cpu" in figures:
        yield "server     {cpu:.0f} % CPU, {cpu_ms_a_request:.2f} ms a request, {memory_mb:.0f} MB".format(**figures)
    if "gpu" in figures:
        yield f"GPU        {figures['gpu']:.0f} % busy"
    yield f"client     {figures['client_cpu']:.0f} % CPU"
    for text, count in errors.items():
        yield f"error      {count} x {text}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--img_dir", type=Path, default=HERE / "images", help="JPEGs; made if there is no folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--request_client", type=int, default=10, help="clients at a time")
    parser.add_argument("--request_batch", type=int, default=1, help="consecutive calls of one request")
    parser.add_argument("--total_number", type=int, default=500, help="images sent, 0: each one once")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long, instead of how many")
    parser.add_argument("--warm_up", type=int, default=5, help="calls of each client that are not counted")
    parser.add_argument("--pid", type=int, default=0, help="the server's process, if it cannot be found by its port")
    parser.add_argument("--json", action="store_true", help="the figures as one line of JSON")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if not given.img_dir.is_dir():
        import make_images  # imports OpenCV, which only this needs

        make_images.make(given.img_dir, 300)
    images = [(file.name, file.read_bytes()) for file in sorted(given.img_dir.glob("*.jp*g"))]
    if not images:
        raise SystemExit(f"no JPEG in {given.img_dir}")
    wait_for(given.host, given.port)
    pid = given.pid or listener(given.port)
    usage = Usage(pid) if pid else None
    load = Load(given, images)
    load.run(usage)
    figures = summary(load, usage)
    print(json.dumps(figures) if given.json else "\n".join(lines(figures, load.errors)))


if __name__ == "__main__":
    main()
