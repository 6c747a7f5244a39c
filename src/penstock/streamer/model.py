"""What a streamer's worker holds: the user's function, or a ManagedModel that is made in the worker alone."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.errors import BadOutput


class ManagedModel:
    """A model that the workers make, so that the program itself never holds it. Override `init_model` and `predict`.

    `gpu_id` is the number of the worker's device, None without `cuda_devices`.
    """

    def __init__(self, gpu_id: int | None = None) -> None:
        self.model: Any = None
        self.gpu_id = gpu_id
        self.set_gpu_id(gpu_id)

    @staticmethod
    def set_gpu_id(gpu_id: int | None = None) -> None:
        """Shows this process no other device. In a worker that is so before the module of the model is imported."""
        if gpu_id is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu_id)

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, in general into `self.model`. Gets `model_init_args` and `model_init_kwargs`."""
        raise NotImplementedError(f"{type(self).__name__} has no init_model")

    def predict(self, batch: list[Any]) -> Sequence[Any]:
        """The results of `batch`: as many, in its order."""
        raise NotImplementedError(f"{type(self).__name__} has no predict")


class StreamerModel:
    """The model of a worker, made of what the streamer was given: a function of a list, or a class of models."""

    def __init__(
        self,
        given: Any,
        model_init_args: Sequence[Any] = (),
        model_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = given
        self._args, self._kwargs = model_init_args, model_init_kwargs or {}
        self._predict: Callable[[list[Any]], Any] = given

    def load(self, device: str) -> None:
        """Makes the model, if it is to be made here. Raises what `init_model` raises."""
        given = self._given
        if isinstance(given, type):
            made: Any = given(_gpu_id(device))
            made.init_model(*self._args, **self._kwargs)
            self._predict = made.predict

    def predict(self, items: list[Any]) -> Any:
        """The results as the engine takes them. Raises BadOutput, and what the model raises."""
        found = self._predict(items)
        return _awaited(found) if inspect.iscoroutine(found) else _indexable(found)


def served(given: Any) -> Any:
    """What `penstock worker` serves of a target: a class like ManagedModel as a streamer does, all else as it is."""
    return StreamerModel(given) if isinstance(given, type) and hasattr(given, "init_model") else given


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _indexable(await coroutine)


def _indexable(found: Any) -> Any:
    """`found`, if the engine can judge it; other sequences as a list. Raises BadOutput for one that is to be iterated,
    which the engine would take for a stream."""
    if hasattr(found, "__next__") or hasattr(found, "__anext__"):
        raise BadOutput(
            f"predict returned a {type(found).__name__}, expected a list of results: write return list(...)"
        )
    if hasattr(found, "__array__") or isinstance(found, (list, tuple, str, bytes, Mapping)):
        return found
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        return [found[i] for i in range(len(found))]
    return found


def _gpu_id(device: str) -> Any:
    """The number of a worker's device: the only one that its process sees."""
    if not device.startswith("cuda"):
        return None
    number = os.environ.get("CUDA_VISIBLE_DEVICES", device.rpartition(":")[2])
    return int(number) if number.isdecimal() else number
