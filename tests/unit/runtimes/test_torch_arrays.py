"""A Python model with `arrays = "torch"` receives tensors, on a device in three phases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import BadOutput, ConfigError, ItemFailed, LoadFailed
from penstock.runtimes import torch_arrays
from penstock.runtimes.device import DeviceProgram
from penstock.types import BatchPart, Item
from support.simulated_device import SimulatedDevice

torch = pytest.importorskip("torch")


class Doubles:
    inputs, outputs, arrays = {"x": "FP32[-1,2]"}, {"y": "FP32[-1,2]"}, "torch"

    def predict(self, x: Any) -> Any:
        return x * 2


def returning(result: Callable[[Any], Any], **members: Any) -> Any:
    return type("Returning", (Doubles,), {"predict": lambda self, x: result(x), **members})


def opened(target: Any, device: str = "cpu") -> BatchRunner:
    loaded = PythonModel(target)
    loaded.load(device)
    options = BatchingConfig(**loaded.declared_options())
    loaded.begin_loop(options)
    return BatchRunner(loaded, loaded.metadata("m", "1"), options)


def run(runner: BatchRunner, *values: Any) -> list[Any]:
    parts: list[BatchPart] = []
    runner.run(1, runner.decode([Item(value) for value in values]), parts.append)
    return [r.error or r.body for r in parts[-1].results if r is not None]


@pytest.fixture(params=["no device", "simulated"])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[SimulatedDevice]:
    """The devices that programs have opened."""
    found: list[SimulatedDevice] = []

    def on_device(program: Any, device: str) -> Any:
        found.append(SimulatedDevice(copy_s=0.0, launch_s=0.0, kernels_s=lambda rows: 0.0))
        return DeviceProgram(program, found[-1])

    if request.param == "simulated":
        monkeypatch.setattr(torch_arrays, "on_device", on_device)
    return found


def test_predict_receives_the_tensors_of_a_batch_and_returns_some(devices: list[SimulatedDevice]) -> None:
    calls: list[Any] = []

    def noted(x: Any) -> Any:
        calls.append((type(x), x.dtype, tuple(x.shape), torch.is_grad_enabled()))
        return {"y": x.half() * 2, "n": x.sum(1).long()}

    runner = opened(returning(noted, outputs={"y": "FP32[-1,2]", "n": "INT64[-1]"}))
    assert (runner.model.phases is not None) == bool(devices)
    assert runner.batching.sizes in (None, "any")
    first, second = run(runner, {"x": np.ones((1, 2), np.float32)}, {"x": np.full((2, 2), 3, np.float32)})
    assert calls == [(torch.Tensor, torch.float32, (3, 2), False)]
    assert (first["y"].tolist(), second["y"].tolist(), second["n"].tolist()) == ([[2, 2]], [[6, 6], [6, 6]], [6, 6])
    assert (first["y"].dtype, first["n"].dtype) == (np.float32, np.int64), "half precision is answered as FP32"
    runner.close()


def test_a_bad_row_fails_alone(devices: list[SimulatedDevice]) -> None:
    def picky(x: Any) -> Any:
        if (x < 0).any():
            raise ValueError
        return x.T.contiguous().T  # not in C order

    failed, found = run(opened(returning(picky)), [-1.0, 2.0], [3.0, 4.0])
    assert type(failed) is ItemFailed
    assert found.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x.numpy(), "returned a ndarray, expected a tensor on cpu"),
        (lambda x: x.to("meta"), "returned a tensor on meta, expected one on cpu: return it without a copy"),
        (lambda x: x.double(), r"returned FP64 \[1, 2\], but the model declares FP32 \[-1, 2\]"),
        (lambda x: x[:, :1], r"returned FP32 \[1, 1\], but"),
        (lambda x: {"z": x}, "returned z, but the model declares the outputs y"),
    ],
)
def test_a_wrong_result_is_told_from_the_declared_one(result: Any, message: str) -> None:
    (error,) = run(opened(returning(result)), [1.0, 2.0])
    assert type(error) is BadOutput
    with pytest.raises(BadOutput, match=message):
        raise error


async def _async(self: Any, x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ({"arrays": "tensorflow"}, ConfigError, "arrays: found 'tensorflow', expected 'numpy' or 'torch'"),
        ({"predict": lambda self, items: items}, LoadFailed, "needs declared inputs, and a predict with a parameter"),
        ({"predict": _async}, LoadFailed, "predict is async"),
        ({"inputs": {"x": "BYTES[-1]"}}, LoadFailed, "input 'x' is BYTES"),
        ({"outputs": {"y": "FP16[-1,2]"}}, LoadFailed, "output 'y' is FP16; declare FP32"),
    ],
)
def test_models_that_cannot_take_tensors_are_refused(members: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opened(type("Model", (Doubles,), members))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_tensors_are_on_the_gpu() -> None:
    devices: list[str] = []

    def noted(x: Any) -> Any:
        devices.append(str(x.device))
        return x * 2

    runner = opened(returning(noted), "cuda:0")
    assert runner.model.phases is not None
    assert [found.tolist() for found in run(runner, [1.0, 2.0], [3.0, 4.0])] == [[2, 4], [6, 8]]
    assert devices == ["cuda:0"]
    (error,) = run(opened(returning(lambda x: x.cpu()), "cuda:0"), [1.0, 2.0])
    assert "returned a tensor on cpu, expected one on cuda:0" in str(error)
