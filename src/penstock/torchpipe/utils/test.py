# ruff: noqa: PT028 - TorchPipe's names of functions begin with test_
"""torchpipe.utils.test: a closed-loop load generator with client threads."""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from penstock.torchpipe.pipes import pipe
from penstock.torchpipe.utils.models import infer_shape

WARM_UP = 20  # calls of each client before the measured ones
JPEGS = (".jpg", ".JPG", ".jpeg", ".JPEG")

Results = dict[str, Any]


class Sampler:
    """A client of `test`, which calls it with the number of items that the clients have taken before."""

    def __call__(self, start_index: int) -> None:
        raise NotImplementedError

    def batchsize(self) -> int:
        """The number of items of a call."""
        return 1


class SequentialSampler(Sampler):
    """A client that passes its items in order, `batch_size` at a time, to `forward`. Raises ValueError for too few."""

    def __init__(self, data: Sequence[Any], batch_size: int = 1) -> None:
        if not 1 <= batch_size <= len(data):
            raise ValueError(f"found {len(data)} items for batches of {batch_size}, expected 1 or more batches")
        self.data = data
        self.batch_size = batch_size

    def __call__(self, start_index: int) -> None:
        self.forward(self.data[start_index : start_index + self.batch_size])

    def forward(self, data: Sequence[Any]) -> None:
        """What a call does. Programs override it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method forward(self, data)")

    def batchsize(self) -> int:
        return self.batch_size


class RandomSampler(SequentialSampler):
    """A client that passes `batch_size` random items to `forward`; one item may occur twice."""

    def __init__(self, data_source: Sequence[Any], batch_size: int = 1) -> None:
        super().__init__([*data_source] * batch_size, batch_size)

    def __call__(self, start_index: int) -> None:
        self.forward(random.choices(self.data, k=self.batch_size))


class FileSampler(SequentialSampler):
    """A client that reads the files of its paths, and passes (path, bytes) of each to `handle_data`."""

    def forward(self, data: Sequence[Any]) -> None:
        self.handle_data([(str(path), Path(path).read_bytes()) for path in data])

    def handle_data(self, raw_bytes: list[tuple[str, bytes]]) -> None:
        """What a call does. Programs override it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method handle_data(self, raw_bytes)")


class _Calls(Sampler):
    """A client that calls a function."""

    def __init__(self, function: Callable[[], Any], batch_size: int) -> None:
        self._function, self._batch_size = function, batch_size

    def __call__(self, start_index: int) -> None:
        self._function()

    def batchsize(self) -> int:
        return self._batch_size


def preload(
    file_dir: str, num_preload: int = 1000, recursive: bool = True, ext: Sequence[str] = JPEGS
) -> list[tuple[str, bytes | None]]:
    """Path and bytes of up to `num_preload` files of a folder. With 0, all paths, without bytes.

    Raises FileNotFoundError without such files.
    """
    found = sorted(Path(file_dir).rglob("*") if recursive else Path(file_dir).iterdir())
    paths = [path for path in found if path.suffix in ext and path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{file_dir} has no files that end in {', '.join(ext)}")
    if num_preload <= 0:
        return [(str(path), None) for path in paths]
    return [(str(path), path.read_bytes()) for path in paths[:num_preload]]


def test(sample: Sampler | Sequence[Sampler], total_number: int = 10000) -> Results:
    """Measures clients, each in its own thread, until `total_number` items are done.

    Prints and returns items per second and the latencies of calls in ms. An exception in a call ends the measurement.
    """
    return _measure([sample] if isinstance(sample, Sampler) else [*sample], total_number)


def test_function(
    forward_function: Callable[[], Any] | Sequence[Callable[[], Any]],
    num_clients: int = 10,
    batch_size: int = 1,
    total_number: int = 10000,
) -> Results:
    """As `test`, for `num_clients` threads that call a function, or one function each. A call is `batch_size` items."""
    calls = [_Calls(function, batch_size) for function in _for_each(forward_function, num_clients)]
    return _measure(calls, total_number)


test_functions = test_function


def test_from_raw_file(
    forward_function: Callable[[list[tuple[str, bytes]]], Any] | Sequence[Callable[[list[tuple[str, bytes]]], Any]],
    file_dir: str,
    num_clients: int = 10,
    batch_size: int = 1,
    total_number: int = 10000,
    num_preload: int = 1000,
    recursive: bool = True,
    ext: Sequence[str] = JPEGS,
    request_batch: int | None = None,
) -> Results:
    """As `test_function`, for a function of `batch_size` files of a folder: (path, bytes) each.

    Draws at random from up to `num_preload` files read in advance. With 0, clients read each file once. The parameters
    are TorchPipe's; `request_batch` is the older name of `batch_size`.
    """
    size = batch_size if request_batch is None else request_batch
    files = preload(file_dir, num_preload, recursive, ext)
    clients: list[Any] = []
    for function in _for_each(forward_function, num_clients):
        if num_preload > 0:
            clients.append(RandomSampler(files, size))
            clients[-1].forward = function
        else:
            clients.append(FileSampler([path for path, _ in files], min(size, len(files))))
            clients[-1].handle_data = function
    if num_preload > 0:
        return _measure(clients, total_number)
    return _measure(clients, len(files), warm_up=0)


def throughput(model_or_args_dict: str | dict[str, Any], num_clients: int = 10, total_number: int = 10000) -> Results:
    """As `test_function`, for a pipe of one model, by its path or its keys, and random input of one row.

    Raises ValueError without a model, or for one whose shapes are not fixed.
    """
    given = {"model": model_or_args_dict} if isinstance(model_or_args_dict, str) else model_or_args_dict
    if not given.get("model"):
        raise ValueError(f"found the keys {', '.join(given) or 'none'}, expected 'model' among them")
    config = {"instance_num": 2, "max": 4, "batching_timeout": 5, "backend": "SyncTensor[TensorrtTensor]"} | given
    shapes = [(1, *shape[1:]) for shape in infer_shape(given["model"])]
    if any(side < 0 for shape in shapes for side in shape):
        raise ValueError(f"{given['model']} takes inputs of any shape; export it with fixed shapes to measure it")
    random_rows = np.random.default_rng()
    tensors = [random_rows.standard_normal(shape, np.float32) for shape in shapes]
    with pipe(config) as model:
        data = tensors if len(tensors) > 1 else tensors[0]
        return test_function(lambda: model({"data": data}), num_clients, total_number=total_number) | config


def _for_each(function: Any, num_clients: int) -> list[Any]:
    functions = list(function) if isinstance(function, list | tuple) else [function] * num_clients
    if len(functions) != num_clients or not functions:
        raise ValueError(f"{len(functions)} functions for {num_clients} clients, expected one, or one for each client")
    return functions


def _measure(samplers: Sequence[Sampler], total: int, warm_up: int = WARM_UP) -> Results:
    """Runs each client in its own thread until `total` items are done."""
    done = 0
    lock = threading.Lock()

    def warm(sampler: Sampler) -> None:
        for i in range(warm_up):
            sampler(i % total)

    def client(sampler: Sampler) -> list[float]:
        nonlocal done
        took: list[float] = []
        while True:
            with lock:
                start = done
                if start >= total:
                    return took
                done += sampler.batchsize()
            began_s = time.perf_counter()
            sampler(start)
            took.append(time.perf_counter() - began_s)

    if total < 1 or not samplers:
        raise ValueError(f"found {len(samplers)} clients for {total} items, expected 1 or more of both")
    with ThreadPoolExecutor(len(samplers)) as pool:
        list(pool.map(warm, samplers))
        began_s, cpu_s = time.perf_counter(), _cpu_s()
        took = sorted(1000 * s for found in pool.map(client, samplers) for s in found)
        wall_s = time.perf_counter() - began_s
    return _report(len(samplers), done, took, wall_s, (_cpu_s() - cpu_s) / wall_s)


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
