import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadOutput
from penstock.streamer.model import ManagedModel, StreamerModel


def returned(value: Any) -> Any:
    return StreamerModel(lambda batch: value).predict([1, 2])


def test_other_sequences_become_lists_and_any_other_result_is_left_to_the_engine() -> None:
    assert returned(deque([1, 2])) == [1, 2]
    assert returned(range(2)) == [0, 1]
    array = np.zeros(2)
    for value in ([1, 2], (1, 2), array, None, {"a": 1, "b": 2}, "ab", {1, 2}):
        assert returned(value) is value


def test_an_iterator_is_refused_as_result() -> None:
    async def steps() -> Any:
        yield [1]

    def fails() -> Iterator[int]:
        yield 1

    for value in (fails(), steps(), iter([1])):
        with pytest.raises(BadOutput, match=r"expected a list of results: write return list\(\.\.\.\)"):
            returned(value)


def test_the_result_of_an_async_function_is_checked_too() -> None:
    async def predict(batch: list[Any]) -> Any:
        return deque(batch)

    assert asyncio.run(StreamerModel(predict).predict([1, 2])) == [1, 2]


def test_a_class_is_instantiated_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(ManagedModel):
        def init_model(self, factor: int, *, offset: int = 0) -> None:
            self.model = (factor, offset)

        def predict(self, batch: list[Any]) -> list[Any]:
            return [self.model, self.gpu_id]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    model = StreamerModel(Model, (2,), {"offset": 1})
    model.load("cuda:0")
    assert model.predict([]) == [(2, 1), 3]
    model.load("cpu")
    assert model.predict([]) == [(2, 1), None]


@pytest.mark.parametrize(("visible", "number"), [("GPU-1a", "GPU-1a"), ("7", 7)])
def test_a_model_gets_the_device_that_its_process_sees(
    visible: str, number: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Model(ManagedModel):
        def init_model(self) -> None:
            seen.append(self.gpu_id)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    StreamerModel(Model).load("cuda:0")
    assert seen == [number]


def test_a_method_that_a_managed_model_lacks_is_named() -> None:
    for call in (ManagedModel().init_model, lambda: ManagedModel().predict([1])):
        with pytest.raises(NotImplementedError, match="ManagedModel has no"):
            call()
