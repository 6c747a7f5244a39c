"""Models for the tests of streamers, in a module that worker processes can import."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from penstock import ManagedModel, model


def double(batch: list[Any]) -> list[Any]:
    return [2 * x for x in batch]


def sizes(batch: list[Any]) -> list[int]:
    """The size of each item's batch."""
    time.sleep(0.02)
    return [len(batch)] * len(batch)


def as_array(batch: list[Any]) -> Any:
    return np.asarray(batch) * 2


def echo(batch: list[Any]) -> list[Any]:
    return batch


@model(inputs={"x": "FP32[-1,2]"}, outputs={"y": "FP32[-1,2]"})
def doubled_rows(x: Any) -> Any:
    """The rows of a batch as one array."""
    assert isinstance(x, np.ndarray)
    return [ValueError("negative") if row[0] < 0 else 2 * row for row in x]


@model(sizes=[4, 8])
def whole_sizes(batch: list[Any]) -> list[int]:
    return [len(batch)] * len(batch)


@model(sizes=[4, 8], inputs={"x": "FP32[-1,2]"}, outputs={"y": "FP32[-1]"})
def whole_sizes_of_rows(x: Any) -> Any:
    return np.full(len(x), len(x), np.float32)


def slow(batch: list[Any]) -> list[Any]:
    time.sleep(0.05)
    return batch


def inverse(batch: list[Any]) -> list[Any]:
    return [1 / x for x in batch]


@dataclasses.dataclass
class Box:
    size: float
    days: set[Any]


class Point(NamedTuple):
    x: int
    y: int


class Odd:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


class Moody:
    """Cannot be compared, and is neither true nor false."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __bool__(self) -> bool:
        raise RuntimeError("true or false?")


def moody(batch: list[Any]) -> list[Any]:
    return [np.zeros(3) if item == "array" else Moody() for item in batch]


def exit_at_zero(batch: list[Any]) -> list[Any]:
    if 0 in batch:
        raise SystemExit(1)
    return batch


class Refused(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


def refuse_zero(batch: list[Any]) -> list[Any]:
    try:
        return [1 / x for x in batch]
    except ZeroDivisionError as e:
        raise Refused(3, "zero") from e


def nothing(batch: list[Any]) -> None: ...


def too_few(batch: list[Any]) -> list[Any]:
    return batch[1:]


def by_mistake(batch: list[Any]) -> Any:
    yield from batch


def a_lock(batch: list[Any]) -> list[Any]:
    return [threading.Lock() if x == "lock" else x for x in batch]


def pids(batch: list[Any]) -> list[int]:
    time.sleep(0.02)
    return [os.getpid()] * len(batch)


def hang_at_zero(batch: list[Any]) -> list[Any]:
    if 0 in batch:
        threading.Event().wait()
    return batch


def die_at_zero(batch: list[Any]) -> list[Any]:
    if 0 in batch:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


async def later(batch: list[Any]) -> list[Any]:
    return [2 * x for x in batch]


def noted(batch: list[Any]) -> list[Any]:
    """Appends the text of each (path, text) item to its file."""
    for path, text in batch:
        with open(path, "a") as file:
            file.write(text)
    time.sleep(0.1)
    return batch


def gated(batch: list[Any]) -> list[Any]:
    """Appends the text of each (path, text) item to its file once `path`.open exists."""
    for path, text in batch:
        while not os.path.exists(f"{path}.open"):
            time.sleep(0.002)
        with open(path, "a") as file:
            file.write(text)
    return batch


class Times(ManagedModel):
    """Multiplies by its init argument."""

    def init_model(self, factor: int, offset: int = 0) -> None:
        self.model = lambda x: factor * x + offset

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.model(x) for x in batch]


VISIBLE_AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")


class Device(ManagedModel):
    """Returns its device: `gpu_id`, and CUDA_VISIBLE_DEVICES at import and at init."""

    def init_model(self) -> None:
        self.model = os.environ.get("CUDA_VISIBLE_DEVICES")

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.02)
        return [(self.gpu_id, VISIBLE_AT_IMPORT, self.model)] * len(batch)


class Made(ManagedModel):
    """Counts its instances in this process."""

    made = 0

    def init_model(self) -> None:
        type(self).made += 1

    def predict(self, batch: list[Any]) -> list[int]:
        return [type(self).made] * len(batch)


class Broken(ManagedModel):
    """Cannot be loaded until a file exists."""

    def init_model(self, path: str) -> None:
        if not os.path.exists(path):
            raise ValueError("the weights are missing")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class SlowToLoad(ManagedModel):
    def init_model(self) -> None:
        time.sleep(2)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch
