"""Models keep the contract of models, and check_model detects a model that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.config.schema import ModelConfig
from penstock.core.worker.python_model import model
from penstock.runtimes.files import file_model
from penstock.testing.models import check_model
from support import scripted
from support.scripted import echo_async, stream_async


@pytest.mark.parametrize(
    ("target", "items"),
    [
        (scripted.ScriptedModel, [1, "two", (None, 3)]),
        (scripted.ScriptedModel(), [("raise_nothing", 1)]),
        (echo_async, [1, 2, 3]),
        (scripted.stream, [1, 4, 2]),
        (stream_async, [3, 1]),
    ],
    ids=["class", "instance", "coroutine", "generator", "async generator"],
)
def test_model(target, items):
    check_model(target, items)


def equal_arrays(a, b):
    pairs = [(a[name], b[name]) for name in a] if isinstance(a, dict) else [(a, b)]
    return all(np.array_equal(m, n) and m.dtype == n.dtype for m, n in pairs)


@pytest.mark.parametrize(
    "target",
    [
        model(inputs={"x": "FP32[-1,2]"}, outputs={"y": "FP32[-1,2]"})(lambda items: [i["x"] * 2 for i in items]),
        model(inputs={"x": "FP32[-1,2]"}, outputs={"y": "FP32[-1,2]"})(lambda x: x * 2),
        scripted.doubled_rows,
        model(inputs={"x": "FP32[-1,2]"}, outputs={"y": "FP32[-1,2]"})(lambda **arrays: {"y": arrays["x"] * 2}),
    ],
    ids=["list of items", "arrays", "coroutine of arrays", "keywords"],
)
def test_a_model_with_declared_tensors(target):
    items = [{"x": np.full((rows, 2), rows, np.float32)} for rows in (1, 3, 2)]
    check_model(target, items, same=equal_arrays)


@pytest.mark.parametrize("name", ["net.onnx", "net.ts", "net.pt", "net.pt2"])
def test_model_file(model_files: Path, name: str) -> None:
    rows = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 0.0], [4.0, 3.0, 2.0, 1.5]]
    found = file_model(str(model_files / name), ModelConfig(target=name), threads=1)
    check_model(found, rows, same=lambda a, b: np.allclose(a, b, atol=1e-6))


def test_a_result_that_depends_on_the_batch_is_detected():
    with pytest.raises(AssertionError, match="in a batch of 2"):
        check_model(lambda items: [len(items) for _ in items], [1, 2])


def test_a_model_that_raises_is_detected():
    with pytest.raises(AssertionError, match="the model raised ValueError"):
        check_model(scripted.ScriptedModel, [("raise", "no")])
