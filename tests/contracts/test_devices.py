"""Every device keeps the contract of `runtimes/device.py`, and a program on it gives what it gives on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.worker.tensor_model import ProgramSettings
from penstock.errors import BadOutput, DeviceLost
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.torch import TorchProgram, of_module
from penstock.testing.devices import SimulatedDevice

torch = pytest.importorskip("torch")


def simulated():
    return SimulatedDevice(copy_s=2e-4, launch_s=0.0, kernels_s=lambda rows: 2e-4), "cpu"


def cuda():
    from penstock.runtimes.cuda import CudaDevice

    return CudaDevice("cuda:0"), "cuda:0"


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[simulated, pytest.param(cuda, marks=[pytest.mark.gpu, no_gpu])])
def on(request):
    """Makes the program of a module on the device."""

    def make(module: torch.nn.Module, precision: str = "fp32") -> DeviceProgram:
        device, name = request.param()
        inputs = of_module(module, ProgramSettings()).inputs
        module = module.to(name, torch.float16 if precision == "fp16" else None)
        program = TorchProgram(module, name, inputs, platform="pytorch_eager", precision=precision)
        return DeviceProgram(program, device)

    return make


class Net(torch.nn.Module):
    """Outputs of several dtypes; `t` is not contiguous, and `c` is on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, k=None):
        y = self.linear(x)
        found = {"y": y, "big": y > 0, "t": x.reshape(-1, 2, 2).transpose(1, 2), "c": x.sum(1).cpu()}
        return found if k is None else {**found, "k": k * 2}


def batch(rows, seed=0):
    random = np.random.default_rng(seed)
    return {"x": random.random((rows, 4), np.float32), "k": random.integers(0, 9, (rows, 2))}


def pinned(program, arrays):
    found = {name: program.empty(array.shape, array.dtype) for name, array in arrays.items()}
    for name, array in arrays.items():
        found[name][...] = array
    return found


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        assert array.flags.c_contiguous
        assert np.allclose(array, expected[name], atol=1e-4), name


def test_a_program_gives_what_it_gives_on_the_cpu(on):
    net = Net()
    plain = of_module(net, ProgramSettings())
    expected = [plain.run(batch(rows)) for rows in (1, 5)]
    program = on(net)
    for rows, outputs in zip((1, 5), expected, strict=True):
        check(program.run(batch(rows)), outputs)


def test_batches_overlap_and_their_results_stay(on):
    net = Net()
    plain = of_module(net, ProgramSettings())
    given = [batch(rows, seed=rows) for rows in (3, 1, 4, 2, 5)]
    expected = [plain.run(arrays) for arrays in given]
    program = on(net)
    staged = [program.stage(pinned(program, arrays)) for arrays in given]
    launched = [program.launch(s) for s in staged]
    seconds = [program.fetch(batch)[1] for batch in reversed(launched)]
    assert all(s >= 0 for s in seconds)
    again = [program.fetch(batch)[0] for batch in launched]
    for outputs, wanted in zip(again, expected, strict=True):
        check(outputs, wanted)


def test_rows_are_padded_on_the_device(on):
    class Counting(torch.nn.Module):
        def forward(self, x):
            return x.new_full((len(x), 1), len(x)), x

    program = on(Counting())
    launched = program.launch(program.stage(pinned(program, {"x": batch(3)["x"]}), 8))
    counts, x = program.fetch(launched)[0].values()
    assert counts.ravel().tolist() == [8] * 8
    assert np.array_equal(x, batch(3)["x"][[0, 1, 2, 2, 2, 2, 2, 2]])


def test_floats_are_cast_on_the_device_and_back(on):
    found = on(Net(), "fp16").run(batch(2))
    assert found["y"].dtype == found["t"].dtype == np.float32
    assert np.array_equal(found["t"][:, 0, 0], batch(2)["x"][:, 0].astype(np.float16))


class Picky(torch.nn.Module):
    def forward(self, x):
        if len(x) == 3:
            raise ValueError("three rows")
        return [x, "text"] if len(x) == 2 else x


def test_an_error_of_a_batch_leaves_the_others_alone(on):
    program = on(Picky())
    x = batch(4)["x"]
    for rows, error in ((3, ValueError), (2, BadOutput)):
        before = program.launch(program.stage(pinned(program, {"x": x[:1]})))
        with pytest.raises(error):
            program.launch(program.stage(pinned(program, {"x": x[:rows]})))
        assert np.array_equal(program.fetch(before)[0]["OUTPUT__0"], x[:1])
    assert np.array_equal(program.run({"x": x})["OUTPUT__0"], x)


def test_after_the_loss_of_the_device_the_worker_ends():
    device, _ = simulated()
    net = Picky()
    program = DeviceProgram(of_module(net, ProgramSettings()), device)
    x = batch(1)["x"]
    launched = program.launch(staged := program.stage(pinned(program, {"x": x})))
    device.fails = RuntimeError("CUDA error: unspecified launch failure")
    text = "device simulated:0 is lost to this process: RuntimeError: CUDA error: unspecified launch failure"
    for phase in (lambda: program.fetch(launched), lambda: program.launch(staged)):
        with pytest.raises(DeviceLost, match=text):
            phase()


def test_out_of_memory_of_the_device_is_no_loss():
    device, _ = simulated()
    program = DeviceProgram(of_module(Picky(), ProgramSettings()), device)
    staged = program.stage(pinned(program, {"x": batch(1)["x"]}))
    device.fails = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        program.launch(staged)
