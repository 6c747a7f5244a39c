"""Every device keeps the contract of `runtimes/device.py`, and a program on it gives what it gives on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.worker.tensor_model import ProgramSettings
from penstock.errors import BadOutput, DeviceLost
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.onnx_device import in_phases
from penstock.runtimes.torch import TorchProgram, of_module
from penstock.types import TensorSpec
from support.simulated_device import SimulatedDevice

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

    def make(
        module: torch.nn.Module, precision: str = "fp32", specs: tuple[TensorSpec, ...] = (), graphs: bool = False
    ) -> DeviceProgram:
        device, name = request.param()
        inputs = of_module(module, ProgramSettings(inputs=specs)).inputs
        module = module.to(name, torch.float16 if precision == "fp16" else None)
        program = TorchProgram(module, name, inputs, platform="pytorch_eager", precision=precision)
        return DeviceProgram(program, device, graphs=graphs)

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


def test_memory_is_not_used_again_while_a_copy_reads_it(on):
    program = on(Net())
    staged = [program.stage({"x": pinned(program, {"x": np.full((999, 4), k, np.float32)})["x"]}) for k in range(20)]
    for one in staged:
        one.arrays = {}
    for k, one in enumerate(staged):
        assert (program.fetch(program.launch(one))[0]["c"] == 4 * k).all()


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


def test_a_graph_gives_what_it_gives_alone(model_files):
    loaders = pytest.importorskip("penstock.runtimes.onnx")
    session = loaders.open_session(str(model_files / "net.onnx"))
    device, name = simulated()
    program = in_phases(session, name, device)
    x = batch(5)
    expected = loaders.OnnxProgram(session).run({"x": x["x"]})
    staged = [program.stage(pinned(program, {"x": x["x"][k : k + 1]}), 2) for k in range(5)]
    for k, launched in enumerate([program.launch(s) for s in staged]):
        found = program.fetch(launched)[0]
        check(found, {name: array[[k, k]] for name, array in expected.items()})
    with pytest.raises(RuntimeError, match="invalid dimensions"):
        program.run({"x": np.zeros((1, 3), np.float32)})


def test_a_graph_with_texts_runs_alone(tmp_path):
    onnx = pytest.importorskip("onnx")
    loaders = pytest.importorskip("penstock.runtimes.onnx")
    texts = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["n"]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", texts[:1], texts[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "texts.onnx")
    program = in_phases(loaders.open_session(str(tmp_path / "texts.onnx")), "cpu", simulated()[0])
    assert program.run({"x": np.array([b"a"], object)})["y"].tolist() == ["a"]
    assert not hasattr(program, "stage")


def test_a_model_may_fill_the_same_output_again(on):
    class Filling(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("out", torch.zeros(3, 4))

        def forward(self, x):
            return self.out.copy_(x)

    program = on(Filling())
    given = [batch(3, seed=seed)["x"] for seed in range(4)]
    launched = [program.launch(program.stage(pinned(program, {"x": x}))) for x in given]
    for x, one in zip(given, launched, strict=True):
        assert np.array_equal(program.fetch(one)[0]["OUTPUT__0"], x)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_may_give_tensors_of_another_device():
    class Moving(torch.nn.Module):
        def forward(self, x):
            return (x.to("cuda:1") * 2).t()

    device, _ = cuda()
    program = DeviceProgram(of_module(Moving(), ProgramSettings()), device)
    x = batch(3)["x"]
    assert np.allclose(program.run({"x": x})["OUTPUT__0"], 2 * x.T)


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
    x = pinned(program, {"x": x})
    for phase in (lambda: program.fetch(launched), lambda: program.launch(staged), lambda: program.stage(x)):
        with pytest.raises(DeviceLost, match=text):
            phase()


def test_out_of_memory_of_the_device_is_no_loss():
    device, _ = simulated()
    program = DeviceProgram(of_module(Picky(), ProgramSettings()), device)
    staged = program.stage(pinned(program, {"x": batch(1)["x"]}))
    device.fails = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        program.launch(staged)


# ---- graphs


SPECS = (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("k", "INT64", (-1, 2)))


class Chain(torch.nn.Module):
    """One output is its input, and one counts the rows of a call. It changes an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, k=None):
        y = self.linear(x).softmax(1)
        x += 1
        found = {"y": y, "x": x, "t": x.reshape(-1, 2, 2).transpose(1, 2), "rows": y.new_full((len(x),), len(x))}
        return found if k is None else {**found, "k": k * 2}


def launched(program, arrays, size):
    return program.launch(program.stage(pinned(program, arrays), size))


def test_a_graph_gives_what_the_kernels_give_with_padding(on):
    net = Chain()
    plain, program = on(net, specs=SPECS), on(net, specs=SPECS, graphs=True)
    found = program.capture((3, 8))
    assert found.sizes == (3, 8)
    assert found.memory_bytes > 0
    assert (found.short, found.failed) == ((), "")
    for rows, size in ((1, 3), (3, 3), (4, 8), (7, 8), (8, 8)):
        outputs = program.fetch(launched(program, batch(rows), size))[0]
        check(outputs, plain.fetch(launched(plain, batch(rows), size))[0])
        assert outputs["rows"].tolist() == [size] * size


def test_the_results_of_a_graph_outlive_its_next_replays(on):
    net = Chain()
    plain, program = on(net, specs=SPECS), on(net, specs=SPECS, graphs=True)
    program.capture((4,))
    given = [batch(1 + seed % 4, seed) for seed in range(20)]
    begun = [launched(program, arrays, 4) for arrays in given]
    for one, arrays in zip(reversed(begun), reversed(given), strict=True):
        check(program.fetch(one)[0], plain.fetch(launched(plain, arrays, 4))[0])


def test_calls_that_no_graph_takes_run_without_one(on):
    net = Chain()
    plain, program = on(net, specs=SPECS), on(net, specs=SPECS, graphs=True)
    program.capture((4,))
    for arrays in (batch(5), {"x": batch(4)["x"]}, {"x": batch(4)["x"], "k": batch(4)["k"].astype(np.int32)}):
        check(program.run(arrays), plain.run(arrays))


def test_only_the_sizes_of_the_last_capture_have_graphs(on):
    program = on(Chain(), specs=SPECS, graphs=True)
    assert program.capture((2, 4, 8)).sizes == (2, 4, 8)
    assert program.capture((1, 4)).sizes == (1, 4)
    assert program.capture(()).memory_bytes == 0
    assert on(Chain(), specs=SPECS).capture((2,)) is None


def test_inputs_without_a_fixed_shape_have_no_graphs(on):
    program = on(Chain(), specs=(TensorSpec("x", "FP32", (-1, -1)),), graphs=True)
    found = program.capture((2, 4))
    assert (found.sizes, found.failed) == ((), "")


class Random(Chain):
    def forward(self, x, k=None):
        return {"r": torch.rand_like(x)}


def test_a_network_with_random_results_has_no_graph(on):
    program = on(Random(), specs=SPECS, graphs=True)
    found = program.capture((2, 4))
    assert (found.sizes, found.failed) == ((), "its results are random: the same input gives others each time")
    assert program.run(batch(4))["r"].shape == (4, 4)


class Waits(Chain):
    def forward(self, x, k=None):
        return {"y": x * x.sum().item()}


class Shrinks(Chain):
    def forward(self, x, k=None):
        return {"y": torch.zeros_like(x).masked_scatter(x > 0.5, x[x > 0.5])}


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("network", [Waits, Shrinks, Net])
def test_a_network_that_waits_for_the_device_runs_without_a_graph(network):
    device, name = cuda()
    inputs = of_module(network(), ProgramSettings(inputs=SPECS)).inputs
    module = network().to(name)
    program = DeviceProgram(TorchProgram(module, name, inputs, platform="pytorch_eager"), device, graphs=True)
    expected = program.run(batch(4))
    found = program.capture((2, 4))
    assert found.sizes == ()
    assert "captur" in found.failed
    check(program.run(batch(4)), expected)


def on_simulated(net=None):
    device = SimulatedDevice(copy_s=0.0, launch_s=0.0, kernels_s=lambda rows: 0.0)
    program = of_module(Chain() if net is None else net, ProgramSettings(inputs=SPECS))
    return device, DeviceProgram(program, device, graphs=True)


def test_sizes_for_which_memory_is_short_run_without_a_graph():
    device, program = on_simulated()
    device.capture_fails = {1: MemoryError("full"), 3: RuntimeError("CUDA error: out of memory")}
    found = program.capture((1, 2, 4, 8))
    assert (found.sizes, found.short, found.failed) == ((1, 4), (2, 8), "")
    assert found.memory_bytes == device.held_bytes() > 0
    for size in (1, 2, 4, 8):
        before = device.replays
        assert program.run(batch(size))["rows"].tolist() == [size] * size
        assert device.replays == before + (size in (1, 4))


def test_a_failed_capture_ends_all_graphs_and_names_its_error():
    device, program = on_simulated()
    device.capture_fails = {2: RuntimeError("CUDA error: operation not permitted when stream is capturing")}
    found = program.capture((1, 2, 4))
    assert device.captures == 2
    assert (found.sizes, found.memory_bytes) == ((), 0)
    assert found.failed == "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert device.held_bytes() == 0
    before = device.replays
    assert program.run(batch(4))["rows"].tolist() == [4] * 4
    assert device.replays == before


def test_a_graph_with_other_results_is_not_used():
    device, program = on_simulated()
    device.drift = 0.5
    found = program.capture((1, 4))
    assert found.sizes == ()
    assert found.failed.startswith("output '")
    assert "of its graph for 4 rows differs from what it computes without" in found.failed
    device.drift = 1e-4  # as between two orders of a sum
    assert program.capture((1, 4)).sizes == (1, 4)


def test_a_device_that_a_capture_loses_ends_the_worker():
    class Faulty(Chain):
        def forward(self, x, k=None):
            device.fails = RuntimeError("CUDA error: device-side assert triggered")
            return super().forward(x, k)

    device, program = on_simulated(Faulty())
    with pytest.raises(DeviceLost, match="device-side assert triggered"):
        program.capture((1,))
