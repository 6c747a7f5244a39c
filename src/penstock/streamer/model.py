"""StreamerModel: the model in a streamer's worker, a function or a ManagedModel that only the worker instantiates."""

import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.core.worker.python_model import array_model, options_of
from penstock.core.worker.spec import Wrapped
from penstock.errors import BadOutput


class ManagedModel:
    """A model that only the workers instantiate and load. Override `init_model` and `predict`.

    `gpu_id` is the number of the worker's device; None without `cuda_devices`.
    """

    def __init__(self, gpu_id: int | None = None) -> None:
        self.model: Any = None
        self.gpu_id = gpu_id
        self.set_gpu_id(gpu_id)

    @staticmethod
    def set_gpu_id(gpu_id: int | None = None) -> None:
        """Hides all other devices from this process. A worker does so before it imports the model's module."""
        if gpu_id is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu_id)

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, usually into `self.model`. Receives `model_init_args` and `model_init_kwargs`."""
        raise NotImplementedError(f"{type(self).__name__} has no init_model")

    def predict(self, batch: list[Any]) -> Sequence[Any]:
        """One result per item of `batch`, in order."""
        raise NotImplementedError(f"{type(self).__name__} has no predict")


class StreamerModel:
    """The model that a worker loads: wraps a function of a list, or a class like ManagedModel."""

    def __init__(
        self, given: Any, model_init_args: Sequence[Any] = (), model_init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._given, self._args, self._kwargs = given, model_init_args, model_init_kwargs or {}
        self._predict: Callable[[list[Any]], Any] = given

    def load(self, device: str) -> None:
        """Instantiates a class and calls its `init_model`. Raises what that raises."""
        model: Any = self._given
        if isinstance(model, type):
            model = model(_gpu_id(device))
            model.init_model(*self._args, **self._kwargs)
            self._predict = model.predict
        declared = isinstance(getattr(model, "inputs", None), Mapping)  # other libraries' models have other `inputs`
        arrays = array_model(model, self._predict, {}, device) if declared else None
        self.__penstock_options__ = options_of(arrays or model)
        if arrays is not None:
            self.__penstock_pad__ = arrays.__penstock_pad__
            opened = getattr(self, "preprocess", _same)  # of a subclass
            self.preprocess = lambda item: arrays.preprocess(opened(item))
            self._predict = arrays.predict

    def predict(self, items: list[Any]) -> Any:
        """The results in a type that the engine accepts. Raises BadOutput, and what the model raises."""
        results = self._predict(items)
        return _await(results) if inspect.iscoroutine(results) else _indexable(results)


def _same(item: Any) -> Any:
    return item


def wrapped(given: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None) -> Wrapped:
    """The target whose worker loads `StreamerModel(given, args, kwargs)`."""
    arguments = {"model_init_args": tuple(args or ()), "model_init_kwargs": dict(kwargs or {})}
    return Wrapped(given, f"{__name__}:StreamerModel", arguments)


def served(given: Any) -> Any:
    """The model that `penstock worker` serves: a class like ManagedModel as a StreamerModel, any other unchanged."""
    return StreamerModel(given) if isinstance(given, type) and hasattr(given, "init_model") else given


async def _await(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _indexable(await coroutine)


def _indexable(results: Any) -> Any:
    """`results`, with unusual sequences copied to a list. Raises BadOutput for an iterator, which the engine would
    treat as a stream of partial results."""
    if hasattr(results, "__next__") or hasattr(results, "__anext__"):
        raise BadOutput(
            f"predict returned a {type(results).__name__}, expected a list of results: write return list(...)"
        )
    if hasattr(results, "__array__") or isinstance(results, (list, tuple, str, bytes, Mapping)):
        return results
    if hasattr(results, "__getitem__") and hasattr(results, "__len__"):
        return [results[i] for i in range(len(results))]
    return results


def _gpu_id(device: str) -> Any:
    """The number of the worker's device, the only one that its process sees."""
    if not device.startswith("cuda"):
        return None
    number = os.environ.get("CUDA_VISIBLE_DEVICES", device.rpartition(":")[2])
    return int(number) if number.isdecimal() else number
