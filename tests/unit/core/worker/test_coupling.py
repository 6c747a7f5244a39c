"""The warm-up tells models whose rows depend on each other from those whose results vary for other reasons."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.profile import RowsCoupled, warm_up
from penstock.core.worker.python_model import PythonModel
from penstock.types import ModelMetadata, Response

RANDOM = np.random.default_rng(5)
ROWS = RANDOM.normal(np.array([[0.0], [2.0]]), size=(2, 256)).astype(np.float32)
WEIGHTS = RANDOM.standard_normal((256, 64)).astype(np.float32)
COUNT = itertools.count()


def warmed(predict: Any, samples: Any = ROWS, **batching: Any) -> int:
    """The number of calls of the warm-up. Raises RowsCoupled."""
    calls = []

    def noted(items: list[Any]) -> Any:
        calls.append(len(items))
        return predict(np.array(items) if samples is ROWS else items)

    model = PythonModel(SimpleNamespace(predict=noted, warmup=lambda: samples))
    model.load("cpu")
    config = BatchingConfig(**{"max_batch_size": 4, **batching})
    warm_up(BatchRunner(model, ModelMetadata("m", "1"), config), config)
    return len(calls)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(0))
    return e / e.sum(0)


COUPLED = {
    "softmax over axis 0": softmax,
    "batch norm in training mode": lambda x: (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5),
    "running sum": lambda x: np.cumsum(x, 0),
    "running sum from the end": lambda x: np.cumsum(x[::-1], 0)[::-1],
    "layer norm over the whole batch": lambda x: (x - x.mean()) / x.std(),
    "rows in another order": lambda x: x[::-1],
    "the largest of the batch": lambda x: np.maximum(x, x.max(0)),
    "in half precision": lambda x: softmax(x).astype(np.float16),
    "lists in objects": lambda x: [{"scores": row.tolist(), "name": "a"} for row in softmax(x)],
    "tuples of ragged lists": lambda x: [([1.0], row.tolist()) for row in softmax(x)],
    "one number for each row": lambda x: [float(row) for row in (x - x.mean(0))[:, 0] + 1],
}
INDEPENDENT = {
    "a matrix product": lambda x: x @ WEIGHTS,
    "other sums in batches": lambda x: x + (len(x) > 1) * 2e-2 * RANDOM.standard_normal(256),
    "in half precision": lambda x: ((x + (len(x) > 1) * 5e-2) @ WEIGHTS).astype(np.float16),
    "zeros with noise": lambda x: x * (1e-8 if len(x) > 1 else 0),
    "dropout": lambda x: x * (RANDOM.random(x.shape) > 0.5),
    "a sampler": lambda x: RANDOM.standard_normal(x.shape),
    "a counter": lambda x: [float(next(COUNT)) for _ in x],
    "ties in another order": lambda x: [np.roll(np.sort(row), len(x)) for row in x],
    "texts": lambda x: [f"a text of {len(x)} words" for _ in x],
    "whole numbers": lambda x: [len(x)] * len(x),
    "padding to the longest": lambda x: [np.zeros(len(x)) for _ in x],
    "no numbers": lambda x: [np.full(3, np.nan) for _ in x],
    "infinities": lambda x: [np.array([-np.inf, 1.0, np.inf])] * len(x),
    "responses": lambda x: [Response(b"x" * len(x)) for _ in x],
    "nothing": lambda x: [None] * len(x),
    "objects": lambda x: [object() for _ in x],
    "streams": lambda x: iter([list(softmax(x))]),
}


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_depend_on_each_other_are_noticed(name: str) -> None:
    with pytest.raises(RowsCoupled, match="a row has other results beside another"):
        warmed(COUPLED[name])
    for rows in ("axis0", "none", "header:x-rows"):
        warmed(COUPLED[name], rows=rows)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_results_that_vary_for_other_reasons_are_no_coupling(name: str) -> None:
    for _ in range(20):
        assert warmed(INDEPENDENT[name]) == 9, "no run more than the profile needs"


def test_a_model_may_change_the_samples_of_its_warm_up() -> None:
    samples = [{"x": ROWS[0].copy()}]

    def predict(items: list[Any]) -> Any:
        for item in items:
            item["x"] *= 2
        return [item.pop("x") for item in items]

    warmed(predict, samples)
    assert (samples[0]["x"] == ROWS[0]).all()


def test_tensors_of_pytorch_are_compared() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RowsCoupled):
            warmed(lambda x, dtype=dtype: list(torch.softmax(torch.from_numpy(x).to(dtype).requires_grad_(), 0)))
        warmed(lambda x, dtype=dtype: list(torch.softmax(torch.from_numpy(x).to(dtype), 1)))


@pytest.mark.parametrize("found", [lambda x: x[:1], lambda x: np.concatenate([x, x])[: len(x) + (len(x) > 1)]])
def test_a_batch_with_another_number_of_rows_is_noticed(found: Any) -> None:
    with pytest.raises(RowsCoupled, match="2 rows gave another number of rows"):
        warmed(found)
    assert warmed(found, rows="axis0") > 0
