"""Batches that are padded to the sizes of a ladder: what models receive, which models refuse it, and what is warmed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.batching.ladder import Ladder
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.core.worker.python_model import PythonModel
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.tensor_model import ANY_ROWS, Input, ProgramSettings, TensorModel
from penstock.errors import ConfigError, ItemFailed, LoadFailed, WrongRowCount
from penstock.types import BatchPart, Item, Ready, TensorSpec


def opened(target: Any, device: str = "cpu", **batching: Any) -> tuple[BatchRunner, Ready]:
    config = ModelConfig(target="m:m", batching=BatchingConfig(**batching))
    return open_model(WorkerSpec("m", "1", config, target), device)


def answers(runner: BatchRunner, items: Sequence[Any]) -> list[Any]:
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([item if isinstance(item, Item) else Item(item) for item in items]), parts.append)
    return [None if r is None else r.error or r.body for r in parts[-1].results]


class Doubling:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def warmup(self) -> list[int]:
        return [1, 2]

    def predict(self, items: list[int]) -> list[int]:
        self.sizes.append(len(items))
        return [2 * item for item in items]


def test_every_size_runs_at_load_and_nothing_else_runs_later() -> None:
    model = Doubling()
    runner, ready = opened(model, sizes=(3, 10, 30))
    assert ready.sizes == (3, 10, 30)
    assert set(model.sizes) == {3, 10, 30}
    assert {size for size, _ in ready.profile} == {3, 10, 30}
    del model.sizes[:]
    for rows in (1, 3, 4, 10, 11, 30, 65):
        assert answers(runner, range(rows)) == [2 * k for k in range(rows)]
    assert answers(runner, [Item([5, 6], many=True, rows=2), Item([7], many=True)]) == [[10, 12], [14]]
    assert model.sizes == [3, 3, 10, 10, 30, 30, 30, 30, 10, 3]


def test_automatic_sizes_follow_the_largest_batch_or_the_best_of_the_warm_up() -> None:
    assert opened(Doubling(), sizes="auto", max_batch_size=12)[1].sizes == (1, 2, 4, 8, 12)
    runner, ready = opened(Doubling(), sizes="auto")
    assert ready.max_batch_size is not None
    assert ready.sizes[-1] == ready.max_batch_size
    assert runner.model.ladder is not None
    assert opened(Doubling())[1].sizes == opened(Doubling(), sizes="any")[1].sizes == ()
    assert opened(Doubling(), sizes="auto", rows="none")[1].sizes == ()


def test_without_samples_the_first_batches_are_slow_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _, ready = opened(lambda items: items, sizes="auto")
    assert ready.sizes == (1, 2, 4, 8, 16, 32, 64)
    assert [r.message.split()[0] for r in caplog.records if r.levelno == logging.WARNING] == ["sizes_not_warmed"]


def test_sizes_beyond_the_memory_leave_the_ladder(caplog: pytest.LogCaptureFixture) -> None:
    class Small(Doubling):
        def predict(self, items: list[int]) -> list[int]:
            if len(items) > 10:
                raise MemoryError
            return super().predict(items)

    assert opened(Small(), sizes=(1, 8, 16, 64))[1].sizes == (1, 8)
    assert "sizes_out_of_memory model=m size=16: batches are at most 8 rows" in caplog.text


def test_a_size_that_compiles_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiling(Doubling):
        def predict(self, items: list[int]) -> list[int]:
            Clock.now += 0.001 if len(items) in self.sizes else 60.0
            return super().predict(items)

    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            return cls.now

        monotonic = perf_counter

    monkeypatch.setattr("penstock.core.worker.loop.time", Clock)
    monkeypatch.setattr("penstock.core.worker.profile.time", Clock)
    model = Compiling()
    model_, batching = PythonModel(model), BatchingConfig(sizes=(1, 2, 4, 8))
    model_.load("cpu")
    model_.pad(Ladder((1, 2, 4, 8)))
    from penstock.core.worker.profile import warm_up

    profile, _ = warm_up(BatchRunner(model_, model_.metadata("m", "1"), batching), batching)
    assert set(model.sizes) == {1, 2, 4, 8}, "every size runs, however long the first ones took"
    assert profile
    assert all(seconds == pytest.approx(0.001) for _, seconds in profile)


def test_out_of_memory_is_repeated_with_the_next_lower_size_and_learned_in_padded_rows() -> None:
    class Small(Doubling):
        def predict(self, items: list[int]) -> list[int]:
            super().predict(items)
            if len(items) > 4:
                raise MemoryError
            return items

    model = Small()
    runner, _ = opened(model, sizes=(4, 16), rows="axis0")
    assert runner.model.ladder is not None
    runner.model.pad(Ladder((4, 16)))  # as if memory was short only later
    del model.sizes[:]
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([Item(k) for k in range(9)]), parts.append)
    assert model.sizes == [16, 4, 4, 4]
    assert parts[-1].oom == (16, 4)


def test_a_bad_item_and_an_error_in_an_items_place_fail_alone() -> None:
    def predict(items: list[int]) -> list[Any]:
        assert len(items) in (4, 8)
        if 3 in items:
            raise ValueError
        return [ValueError() if item == 5 else item for item in items]

    runner, _ = opened(predict, sizes=(4, 8))
    found = answers(runner, [1, 2, 3, 4, 5])
    assert [found[k] for k in (0, 1, 3)] == [1, 2, 4]
    assert [type(found[k]) for k in (2, 4)] == [ItemFailed, ItemFailed]


async def _async(items: list[int]) -> list[int]:
    return items


def test_a_coroutine_is_padded_if_its_batches_run_one_after_the_other() -> None:
    runner, _ = opened(_async, sizes=(4,), concurrency=1)
    assert answers(runner, [1, 2]) == [1, 2]
    runner.close()
    with pytest.raises(LoadFailed, match=r"batching\.sizes: batches of an async predict run side by side"):
        opened(_async, sizes=(4,))


def test_parameters_are_copied_with_their_items() -> None:
    def predict(items: list[Any], parameters: list[dict[str, Any]]) -> list[Any]:
        return [given.pop("k", None) for given in parameters]

    runner, _ = opened(predict, sizes=(4,))
    assert answers(runner, [Item(1, parameters={"k": 7}), Item(2, parameters={"k": 8})]) == [7, 8]


def test_another_number_of_results_names_the_padding() -> None:
    runner, _ = opened(lambda items: sorted(set(items)), sizes=(4,))
    (found,) = answers(runner, [1])
    assert type(found) is WrongRowCount
    assert "1 results for 4 items, expected one for each item (batching.sizes has padded 1 to 4)" in found.message


class _Steps:
    def admit(self, item: Any) -> Any:
        return item

    def step(self, states: list[Any]) -> list[Any]:
        return states


def _stream(items: list[int]) -> Iterator[list[int]]:
    yield items


class _Own:
    def predict(self, items: list[int]) -> list[int]:
        return items

    def __penstock_send_parts_to__(self, send: Any) -> None: ...


@pytest.mark.parametrize(
    ("target", "said"),
    [(_Steps, "a step model has"), (_stream, "a streaming model has"), (_Own, "_Own arranges its batches itself")],
)
def test_models_without_whole_batches_refuse_the_key_by_name(target: Any, said: str) -> None:
    with pytest.raises(LoadFailed, match=rf"^batching\.sizes: .*{said}.*leave the key out"):
        opened(target, sizes=(1, 4))
    opened(target, sizes="any")


def test_rows_that_depend_on_each_other_cannot_be_padded() -> None:
    class Coupled(Doubling):
        def warmup(self) -> list[Any]:
            return [np.ones(2), np.zeros(2)]

        def predict(self, items: list[Any]) -> list[Any]:
            return list(np.array(items) - np.mean(items, 0))

    with pytest.raises(LoadFailed, match=r"batching\.sizes: a row has other results beside another, so batches cannot"):
        opened(Coupled(), sizes=(1, 4))
    assert opened(Coupled(), sizes="auto")[1].sizes == ()


class _Program:
    platform = "sums"
    unbatched = False
    outputs = (TensorSpec("y", "FP32", (-1,)),)
    inputs = (Input("x", "FP32", (-1, 2)),)

    def __init__(self, rows: tuple[int, int] = ANY_ROWS, lost: int = 0) -> None:
        self.rows, self.lost, self.calls = rows, lost, list[int]()

    def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(len(arrays["x"]))
        return {"y": arrays["x"].sum(1)[self.lost :]}


def tensors(device: str = "cpu", takes: tuple[int, int] = ANY_ROWS, lost: int = 0, **batching: Any) -> Any:
    program = _Program(takes, lost)
    runner, ready = opened(TensorModel(lambda settings: program, ProgramSettings()), device, **batching)
    return program, runner, ready


def test_arrays_are_padded_once_and_split_at_the_largest_size() -> None:
    program, runner, ready = tensors(sizes=(2, 8))
    assert set(program.calls) == {2, 8} == set(ready.sizes)
    del program.calls[:]
    x = np.arange(42, dtype=np.float32).reshape(21, 2)
    found = answers(runner, [{"x": x[:1]}, {"x": x[1:3]}, {"x": x[3:3]}])
    assert [f["y"].tolist() for f in found] == [[1.0], [5.0, 9.0], []]
    assert answers(runner, [{"x": x}])[0]["y"].tolist() == x.sum(1).tolist()
    assert program.calls == [8, 8, 8, 8]
    program, runner, _ = tensors(takes=(4, 4), sizes=(1, 4))  # a graph for a fixed number of rows
    answers(runner, [{"x": x[:1]}])
    assert set(program.calls) == {4}


def test_model_files_on_cuda_have_automatic_sizes_unless_the_configuration_says_otherwise() -> None:
    assert tensors("cuda:0", max_batch_size=8)[2].sizes == (1, 2, 4, 8)
    assert tensors("cuda:0", max_batch_size=8, sizes="any")[2].sizes == ()
    assert tensors("cuda:0", rows="none")[2].sizes == ()
    assert tensors("cpu")[2].sizes == ()


def test_outputs_without_the_padded_rows_name_both_numbers() -> None:
    with pytest.raises(LoadFailed, match=r"batching\.sizes: 1 rows gave another number of rows"):
        tensors(lost=1, sizes=(4,))
    program, runner, _ = tensors(sizes=(4,))
    program.lost = 1
    (found,) = answers(runner, [{"x": np.zeros((2, 2), np.float32)}])
    assert type(found) is WrongRowCount
    assert "output 'y' has the shape [3] for 4 rows (2 of a request, padded to 4)" in found.message


def test_a_decorators_sizes_are_checked_when_they_are_written() -> None:
    import penstock

    with pytest.raises(ConfigError, match=r"batching\.sizes: found \[4, 2\], expected ascending"):
        penstock.model(sizes=[4, 2])(lambda items: items)

    @penstock.model(sizes=[1, 4])
    class Declared(Doubling): ...

    assert opened(Declared)[1].sizes == (1, 4)
