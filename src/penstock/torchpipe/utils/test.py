# ruff: noqa: PT028 - TorchPipe's names of functions begin with test_
"""torchpipe.utils.test: a closed-loop load generator with client threads."""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.torchpipe.naming import unavailable

Sampler = unavailable("utils.test.Sampler")
test = unavailable("utils.test.test")
throughput = unavailable("utils.test.throughput")

WARM_UP = 20  # calls of each client before the measured ones
JPEGS = (".jpg", ".JPG", ".jpeg", ".JPEG")

Results = dict[str, float]


def test_function(
    forward_function: Callable[[], Any] | Sequence[Callable[[], Any]],
    num_clients: int = 10,
    batch_size: int = 1,
    total_number: int = 10000,
) -> Results:
    """Measures `num_clients` threads that call a function, or one function each, for `total_number` items in all.

    A call counts as `batch_size` items. Prints and returns items per second and the latencies of calls in ms. An
    exception in a call ends the measurement.
    """
    return _measure(_for_each(forward_function, num_clients), batch_size, total_number)


def test_from_raw_file(
    forward_function: Callable[[list[tuple[str, bytes]]], Any] | Sequence[Callable[[list[tuple[str, bytes]]], Any]],
    file_dir: str,
    num_clients: int = 10,
    batch_size: int = 1,
    total_number: int = 10000,
    num_preload: int = 1000,
    recursive: bool = True,
    ext: Sequence[str] = JPEGS,
) -> Results:
    """As `test_function`, for a function of `batch_size` files of a folder: (path, bytes) each.

    Draws at random from up to `num_preload` files read in advance. With 0, clients read each file once. The parameters
    are TorchPipe's.
    """
    found = sorted(Path(file_dir).rglob("*") if recursive else Path(file_dir).iterdir())
    paths = [path for path in found if path.suffix in ext and path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{file_dir} has no files that end in {', '.join(ext)}")
    functions = _for_each(forward_function, num_clients)
    if num_preload > 0:
        loaded = [(str(path), path.read_bytes()) for path in paths[:num_preload]]
        calls = [partial(_with, f, lambda: random.choices(loaded, k=batch_size)) for f in functions]
        return _measure(calls, batch_size, total_number)
    left = iter(paths)
    lock = threading.Lock()

    def next_files() -> list[tuple[str, bytes]]:
        with lock:
            taken = list(islice(left, batch_size))
        return [(str(path), path.read_bytes()) for path in taken]

    return _measure([partial(_with, f, next_files) for f in functions], batch_size, len(paths), warm_up=0)


def _with(function: Callable[[Any], Any], argument: Callable[[], Any]) -> None:
    function(argument())


def _for_each(function: Any, num_clients: int) -> list[Any]:
    functions = list(function) if isinstance(function, list | tuple) else [function] * num_clients
    if len(functions) != num_clients or not functions:
        raise ValueError(f"{len(functions)} functions for {num_clients} clients, expected one, or one for each client")
    return functions


def _measure(calls: Sequence[Callable[[], Any]], batch_size: int, total: int, warm_up: int = WARM_UP) -> Results:
    """Runs each call in its own thread until `total` items are done."""
    turns = iter(range(-(-total // batch_size)))
    lock = threading.Lock()

    def warm(call: Callable[[], Any]) -> None:
        for _ in range(warm_up):
            call()

    def client(call: Callable[[], Any]) -> list[float]:
        took: list[float] = []
        while True:
            with lock:
                if next(turns, None) is None:
                    return took
            began_s = time.perf_counter()
            call()
            took.append(time.perf_counter() - began_s)

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(warm, calls))
        began_s, cpu_s = time.perf_counter(), _cpu_s()
        took = sorted(1000 * s for found in pool.map(client, calls) for s in found)
        wall_s = time.perf_counter() - began_s
    return _report(len(calls), len(took) * batch_size, took, wall_s, (_cpu_s() - cpu_s) / wall_s)


def _cpu_s() -> float:
    return sum(os.times()[:2])


def _report(clients: int, items: int, took_ms: Sequence[float], wall_s: float, cores: float) -> Results:
    def at(share: float) -> float:
        return round(took_ms[min(int(share * len(took_ms)), len(took_ms) - 1)], 2)

    results = {
        "num_clients": clients,
        "total_number": items,
        "throughput::qps": round(items / wall_s, 2),
        "throughput::avg": round(1000 * clients * wall_s / items, 2),
        "latency::TP50": at(0.5),
        "latency::TP90": at(0.9),
        "latency::TP99": at(0.99),
        "latency::avg": round(sum(took_ms) / len(took_ms), 2),
        "cpu_usage": round(100 * cores, 1),
    }
    for name, value in results.items():
        print(f"{name:<16} {value:g}", flush=True)
    return results
