"""Models whose `preprocess` runs in helper processes: what it does depends on the item."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from penstock import Step, metrics
from penstock.errors import BadRequest


class Preprocessing:
    """Items are `(verb, argument)`; any other item is echoed."""

    def __init__(self, path: str = "", prefix: str = "") -> None:
        """A helper that finds the file `path` ends where its content says: "init", "load" or "item"."""
        self.path, self.prefix = Path(path) if path else None, prefix
        self.loaded: list[str] = []
        self._maybe_end("init")

    def _maybe_end(self, stage: str) -> None:
        with suppress(FileNotFoundError):  # another helper was faster
            if self.path is not None and self.path.read_text() == stage:
                self.path.unlink()
                os._exit(3)

    def load_preprocess(self) -> None:
        self.loaded.append("preprocess")
        metrics.counter("prepared")
        self._maybe_end("load")

    def load(self, device: str) -> None:
        self.loaded.append(device)

    def preprocess(self, item: Any) -> Any:
        if not isinstance(item, tuple):
            return item
        verb, argument = item
        self._maybe_end("item")
        if verb == "raise":
            raise ValueError(argument)
        if verb == "refuse":
            raise BadRequest(argument)
        if verb == "die":
            os._exit(argument)
        if verb == "sleep":
            time.sleep(argument)
        if verb == "object":
            return threading.Lock()
        if verb == "array":
            return np.full(argument, 7, np.uint8)
        if verb == "count":
            metrics.counter("counted", argument)
        if verb == "kind":
            return type(argument).__name__
        if verb == "who":
            visible, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]
            return os.getpid(), self.loaded, self.prefix, visible, threads
        return argument

    def predict(self, items: list[Any]) -> list[Any]:
        return [(os.getpid(), self.loaded, item) if isinstance(item, tuple) else item for item in items]


class Ending(Preprocessing):
    """`predict` ends its worker for the item "end"."""

    def predict(self, items: list[Any]) -> list[Any]:
        if "end" in items:
            raise SystemExit(3)
        return super().predict(items)


class Streaming(Preprocessing):
    def predict(self, items: list[Any]) -> Iterator[list[Any]]:  # type: ignore[override]
        yield items
        yield [2 * item for item in items]


class Awaiting(Preprocessing):
    async def predict(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().predict(items)


class Stepping:
    """Gives the preprocessed number, then 0."""

    def preprocess(self, item: Any) -> Any:
        if item == "die":
            os._exit(3)
        if item < 0:
            raise ValueError("negative")
        return item, os.getpid()

    def admit(self, item: Any) -> list[int]:
        assert item[1] != os.getpid()
        return [item[0], 0]

    def step(self, states: list[list[int]]) -> list[Step]:
        return [Step(state.pop(0), done=not state) for state in states]


class Collating(Preprocessing):
    def collate(self, items: list[Any]) -> Any:
        return np.array(items)

    def predict(self, batch: Any) -> list[Any]:
        return list((2 * batch).tolist())


class NoPreprocess:
    def predict(self, items: list[Any]) -> list[Any]:
        return items


def without_preprocess(items: list[Any]) -> list[Any]:
    return items


def preprocessing(target: Any) -> Any:
    """Wrapper (`worker.spec.Wrapped`) that gives any target a `preprocess` that changes nothing."""
    target.preprocess = _same
    return target


class _Same:
    def __call__(self, item: Any) -> Any:
        return item


_same = _Same()  # no function, which would become a method
