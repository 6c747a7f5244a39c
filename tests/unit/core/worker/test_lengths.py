"""Rows of different lengths share a call: inputs are padded to the longest, and results are cut back."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import penstock
from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.batching.ladder import Ladder
from penstock.core.columns import Block, TensorRequest
from penstock.core.worker.main import open_model
from penstock.core.worker.python_model import PythonModel
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.tensor_model import ANY_ROWS, Input, ProgramSettings, TensorModel
from penstock.errors import BadOutput, BadRequest, ConfigError, LoadFailed
from penstock.types import BatchPart, Item, TensorSpec

IDS = Input("ids", "INT64", (-1, -1))
MASK = Input("mask", "BOOL", (-1, -1))
PADS = (TensorSpec("ids", "INT64", (-1, -1), pad=7), TensorSpec("mask", "BOOL", (-1, -1), pad=False))


class Echo:
    """Gives the ids as floats, their sum under the mask, and their outer product; records its calls."""

    platform, rows, unbatched = "echo", ANY_ROWS, False

    def __init__(self, *inputs: Input, outputs: tuple[TensorSpec, ...] = (), stride: int = 1) -> None:
        self.inputs, self.outputs, self.stride = inputs or (IDS, MASK), outputs, stride
        self.calls: list[dict[str, Any]] = []

    def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(arrays)
        ids = arrays["ids"]
        mask = arrays.get("mask", np.ones_like(ids, bool))
        pairs = ids[:, :, None] * ids[:, None]
        return {"same": ids[:, :: self.stride] * 1.0, "sum": (ids * mask).sum(1), "pairs": pairs}


def model(program: Any, *given: TensorSpec) -> TensorModel:
    made = TensorModel(lambda _: program, ProgramSettings(inputs=given or PADS))
    made.load("cpu")
    program.calls.clear()
    return made


def request(*rows: list[int]) -> dict[str, Any]:
    ids = np.array(rows)
    return {"ids": ids, "mask": np.ones(ids.shape, bool)}


def answers(made: TensorModel, *items: Any) -> list[Any]:
    return made.predict([made.preprocess(item) for item in items])


def test_rows_of_any_length_share_a_call_and_each_gets_its_own_length_back() -> None:
    made = model(program := Echo())
    assert made.__penstock_options__["bucket"] == "length"
    first, second, third = answers(made, request([1, 2, 3]), request([4]), request([5, 6], [8, 9]))
    (call,) = program.calls
    assert call["ids"].tolist() == [[1, 2, 3], [4, 7, 7], [5, 6, 7], [8, 9, 7]]
    assert call["mask"].tolist() == [[True] * 3, [True, False, False], [True, True, False], [True, True, False]]
    assert (first["same"].tolist(), second["same"].tolist(), third["same"].tolist()) == (
        [[1, 2, 3]],
        [[4]],
        [[5, 6], [8, 9]],
    )
    assert second["pairs"].tolist() == [[[16]]]
    assert third["pairs"].tolist() == [[[25, 30], [30, 36]], [[64, 72], [72, 81]]]
    assert [found["sum"].tolist() for found in (first, second, third)] == [[6], [4], [11, 17]]
    assert second["pairs"].flags.c_contiguous


def test_one_length_needs_no_copy_and_lists_are_single_rows() -> None:
    made = model(program := Echo(IDS), PADS[0])
    assert [found["same"].tolist() for found in answers(made, [1, 2], {"ids": [3, 4]})] == [[1, 2], [3, 4]]
    block = Block({"ids": np.array([[1, 2], [3, 4]])}, 2)
    made.predict([TensorRequest(block, at, 1, False, True) for at in (0, 1)])
    assert program.calls[-1]["ids"] is block.arrays["ids"]


def test_other_axes_and_datatypes_of_a_call_stay_equal() -> None:
    given = TensorSpec("x", "FP32", (-1, 3, -1), pad=-1.5)

    class Means(Echo):
        def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
            self.calls.append(arrays)
            return {"y": arrays["x"].max(1) + arrays["by"].sum()}

    made = model(program := Means(Input("x", "FP32", (-1, 3, -1)), Input("by", "FP32", (-1, 1))), given)
    items = [{"x": np.full((1, 3, n), n, np.float32), "by": np.zeros((1, 1), np.float32)} for n in (2, 4)]
    assert [found["y"].tolist() for found in answers(made, *items)] == [[[2, 2]], [[4, 4, 4, 4]]]
    assert program.calls[0]["x"][0, :, 2:].tolist() == [[-1.5, -1.5]] * 3


def test_an_output_of_the_padded_length_by_chance_is_not_cut() -> None:
    class Pooled(Echo):
        def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
            return {"pooled": np.zeros((len(arrays["ids"]), 4))}

    made = model(Pooled())
    assert [found["pooled"].shape for found in answers(made, request([1] * 4), request([1] * 3))] == [(1, 4)] * 2


def test_without_a_trial_the_declared_shapes_tell_what_is_cut() -> None:
    class Picky(Echo):
        def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
            if not arrays["ids"].any():
                raise ValueError("zeros")
            return {name: a for name, a in super().run(arrays).items() if name != "pairs"}

    outputs = (TensorSpec("same", "FP64", (-1, -1)), TensorSpec("sum", "INT64", (-1,)))
    found = answers(model(Picky(outputs=outputs)), request([1, 2, 3]), request([4]))
    assert [each["same"].tolist() for each in found] == [[[1, 2, 3]], [[4]]]
    with pytest.raises(BadOutput, match=r"'same' has the shape \[2, 2\] .* length 3, expected this length on axis 1"):
        answers(model(Picky(outputs=outputs, stride=2)), request([1, 2, 3]), request([4]))
    by_size = answers(model(Picky()), request([1, 2, 3]), request([4]))
    assert [each["same"].tolist() for each in by_size] == [[[1, 2, 3]], [[4]]]


def test_bad_models_and_requests_get_clear_errors() -> None:
    with pytest.raises(LoadFailed, match=r"'same' has the size 4 on axis 1 for inputs of length 8, and 5 for 9"):
        model(Echo(stride=2))
    with pytest.raises(ConfigError, match=r"inputs.id: the model has no such input; it has ids, mask; did you mean"):
        model(Echo(), TensorSpec("id", "INT64", (-1, -1), pad=0))
    with pytest.raises(ConfigError, match=r"inputs.ids.pad: found for INT32 \[-1, -1\], but .* takes INT64 \[-1, -1\]"):
        model(Echo(), TensorSpec("ids", "INT32", (-1, -1), pad=0))
    whole = Echo()
    whole.unbatched = True
    with pytest.raises(ConfigError, match=r"inputs.ids.pad: the model takes one request at a time"):
        model(whole)
    made = model(Echo())
    with pytest.raises(BadRequest, match=r"same length, found 'ids' 2 \(axis 1\), 'mask' 3 \(axis 1\)"):
        made.preprocess({"ids": [1, 2], "mask": [True] * 3})


def test_rows_and_lengths_are_padded_together() -> None:
    made = model(program := Echo())
    made.__penstock_pad__(Ladder((1, 4)))
    found = answers(made, request([1, 2, 3]), request([4]))
    assert program.calls[0]["ids"].shape[0] == 4
    assert [each["same"].tolist() for each in found] == [[[1, 2, 3]], [[4]]]


def test_a_call_has_at_most_max_tokens_also_if_the_server_could_not_tell_the_lengths() -> None:
    made = model(program := Echo())
    made.__penstock_bound__(6)
    found = answers(made, request([1]), request([1, 2, 3, 4]), request([2, 3]), request([4, 5], [6, 7]))
    assert [call["ids"].shape for call in program.calls] == [(2, 2), (2, 2), (1, 4)]
    assert [each["same"].shape for each in found] == [(1, 1), (1, 4), (1, 2), (2, 2)]
    with pytest.raises(BadRequest, match=r"has a length of 7, more than batching.max_tokens \(6\)"):
        made.preprocess(request([0] * 7))


def test_with_sizes_a_call_has_the_length_of_a_class() -> None:
    made = model(program := Echo())
    made.__penstock_pad__(Ladder((1, 2)))
    assert answers(made, request([1] * 10))[0]["same"].shape == (1, 10)
    assert program.calls[0]["ids"].shape == (1, 11)


def test_a_python_model_declares_pads_as_tensor_specs() -> None:
    class Sums:
        inputs = (TensorSpec("ids", "INT64", (-1, -1), pad=0),)
        outputs = (TensorSpec("y", "INT64", (-1, -1)),)

        def predict(self, ids: Any) -> Any:
            return ids.cumsum(1)

    made = PythonModel(Sums())
    made.load("cpu")
    assert made.metadata("m", "1").inputs[0].pad == 0
    assert made.preprocess is not None
    items = [made.preprocess(item) for item in ([1, 2, 3], [4])]
    assert [found.tolist() for found in made.predict(items)] == [[1, 3, 6], [4]]


def test_pad_makes_one_array_of_the_items() -> None:
    assert penstock.pad([[1, 2, 3], [4], []], 9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert penstock.pad([np.ones((1, 2), np.float32), np.zeros((2, 2))]).shape == (2, 2, 2)
    assert penstock.pad([np.ones(1, np.float32), np.ones(2, np.float32)], np.nan).dtype == np.float32
    assert penstock.pad([]).shape == (0, 0)
    for items, value, told in (
        ([[1], 5], 0, "item 1 is a int, which has no length"),
        ([[[1]], [[1, 2]]], 0, r"item 1 has the shape \[1, 2\], the first \[1, 1\]"),
        ([[1]], 0.5, "the value 0.5 is none of the items' type, int64"),
        ([np.ones(1, np.int8)], 300, "the value 300 is none of the items' type, int8"),
    ):
        with pytest.raises(ValueError, match=told):
            penstock.pad(items, value)


def test_max_tokens_need_lengths() -> None:
    def predict(items: list[Any]) -> list[Any]:
        return items

    spec = WorkerSpec("m", "1", ModelConfig(target="m:m", batching=BatchingConfig(max_tokens=100)), predict)
    with pytest.raises(ConfigError, match=r"max_tokens: found 100 with bucket = .none., .* leave max_tok"):
        open_model(spec, "cpu")
    for wrong in (0, -4):
        with pytest.raises(ConfigError, match=r">= 1 - at `\$.max_tokens`"):
            penstock.model(max_tokens=wrong)


def test_items_are_padded_by_their_model() -> None:
    class Items:
        inputs = (TensorSpec("ids", "INT64", (-1, -1), pad=0),)

        def predict(self, items: list[Any]) -> list[Any]:
            return items

    with pytest.raises(LoadFailed, match=r"inputs.ids.pad: found for a model that receives items; set bucket"):
        PythonModel(Items()).load("cpu")


def test_out_of_memory_is_learned_in_tokens() -> None:
    @penstock.model(bucket="length")
    def predict(items: list[Any]) -> list[Any]:
        if penstock.pad(items).size > 20:
            raise MemoryError
        return list(map(len, items))

    runner, _ = open_model(WorkerSpec("m", "1", ModelConfig(target="m:m"), predict), "cpu")
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([Item([0] * n, length=n) for n in (10, 10, 4, 4)]), parts.append)
    assert [result.body for result in parts[-1].results if result] == [10, 10, 4, 4]
    assert parts[-1].oom == (40, 20)


def test_a_batch_on_a_device_is_padded_in_its_own_memory() -> None:
    class Staged(Echo):
        memory: ClassVar[list[Any]] = []

        def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
            self.memory.append(np.empty(shape, dtype))
            return self.memory[-1]

        def stage(self, arrays: dict[str, Any], rows: int) -> Any:
            assert all(any(array is mine for mine in self.memory) for array in arrays.values())
            return arrays

        def launch(self, staged: Any) -> Any:
            return staged

        def fetch(self, launched: Any) -> tuple[dict[str, Any], float]:
            return self.run(launched), 0.5

    made = model(program := Staged())
    phases = made.__penstock_phases__
    requests = [made.preprocess(request([1, 2, 3])), made.preprocess(request([4]))]
    found, seconds = phases.fetch(phases.launch(phases.stage(requests)))
    assert [each["same"].tolist() for each in found] == [[[1, 2, 3]], [[4]]]
    assert (program.calls[0]["ids"].tolist(), seconds) == ([[1, 2, 3], [4, 7, 7]], 0.5)
