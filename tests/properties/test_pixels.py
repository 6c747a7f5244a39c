"""An image sent as pixels gives what the same image gives as floats that the client has normalised."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.inputs import input_texts
from penstock.config.schema import InputConfig
from penstock.core.batching.ladder import Ladder
from penstock.core.worker.tensor_model import ANY_ROWS, Input, ProgramSettings, TensorModel
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.onnx_device import ImageModel
from penstock.runtimes.pixels import ImageProgram
from penstock.runtimes.torch import TorchProgram, of_module
from penstock.types import DTYPES, TensorSpec
from penstock.values import tensor_specs
from support.simulated_device import SimulatedDevice

torch = pytest.importorskip("torch")
DATATYPES = ("UINT8", "INT8", "UINT16", "INT32", "FP16", "FP32", "FP64")


class Net(torch.nn.Module):
    """The image as it is, and a sum that needs `view`, so contiguous memory."""

    def forward(self, x):
        return {"image": x, "sum": x.view(len(x), x[0].numel()).double().sum(1)}


class ArrayNet:
    """The same on the CPU without PyTorch, as an ONNX graph is."""

    platform, outputs, rows, unbatched = "python", (), ANY_ROWS, False
    inputs = (Input("x", "FP32", (-1, -1, -1, -1)),)

    def run(self, arrays):
        x = arrays["x"]
        assert x.flags.c_contiguous
        assert x.dtype == np.float32
        return {"image": x, "sum": x.sum((1, 2, 3), dtype=np.float64)}


def settings_of(table):
    return ProgramSettings(
        inputs=tensor_specs(input_texts({"x": table}, "inputs"), "inputs"), images={"x": table}, most_rows=8
    )


def module(settings):
    return of_module(Net(), settings)


def staged(settings):
    """On a device, where copies are measured."""
    device = SimulatedDevice(copy_s=0.0, launch_s=0.0, kernels_s=lambda rows: 0.0)
    program = of_module(Net(), settings)
    assert isinstance(program, TorchProgram)
    return DeviceProgram(program, device)


def arrays(settings):
    return ImageProgram(ArrayNet(), settings.images)


def bound(settings):
    """As an ONNX graph on a device, whose inputs are bound to tensors of PyTorch."""
    device = SimulatedDevice(copy_s=0.0, launch_s=0.0, kernels_s=lambda rows: 0.0)
    network = of_module(Net(), ProgramSettings())
    return DeviceProgram(ImageModel(network, settings.images, "cpu"), device)


numbers = st.floats(-300, 300, width=32)
divisors = st.floats(0.0625, 300, width=32).flatmap(lambda n: st.sampled_from([n, -n]))


@st.composite
def images(draw):
    """(table, requests): each request is an array in the layout of the table."""
    channels, height, width = draw(st.tuples(*[st.integers(1, 4)] * 3))
    layout, datatype = draw(st.sampled_from(["NHWC", "NCHW"])), draw(st.sampled_from(DATATYPES))

    def per_channel(each):
        return draw(st.one_of(each, st.lists(each, min_size=channels, max_size=channels).map(tuple)))

    table = InputConfig(datatype=datatype, layout=layout, mean=per_channel(numbers), std=per_channel(divisors))
    shape = (height, width, channels) if layout == "NHWC" else (channels, height, width)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = 127 if datatype == "INT8" else 255
    requests = [
        random.integers(0, most, (rows, *shape), endpoint=True).astype(DTYPES[datatype])
        for rows in draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    ]
    return table, requests


@pytest.mark.parametrize("opened", [module, staged, arrays, bound])
@settings(max_examples=60, deadline=None)
@given(given_images=images(), ladder=st.sampled_from([None, Ladder((1, 2, 8))]))
def test_pixels_give_what_normalised_floats_give(opened, given_images, ladder):
    table, requests = given_images
    model = TensorModel(opened, settings_of(table))
    model.load("cpu")
    model.__penstock_pad__(ladder)
    before = [request.copy() for request in requests]
    found = model.predict([model.preprocess({"x": request}) for request in requests])
    for request, kept, result in zip(requests, before, found, strict=True):
        assert np.array_equal(request, kept), "the client's pixels are not changed"
        x = request.astype(np.float64)
        x = x.transpose(0, 3, 1, 2) if table.layout == "NHWC" else x
        mean, std = (np.reshape(np.float64(n), (-1, 1, 1)) for n in (table.mean, table.std))
        expected = (x - mean) / std
        assert result["image"].dtype == np.float32
        near = 4e-7 * (np.abs(x) + np.abs(mean)) / np.abs(std) + 1e-30
        assert (np.abs(result["image"] - expected) <= near).all()
        assert np.allclose(result["sum"], result["image"].sum((1, 2, 3), dtype=np.float64))


@given(given_images=images())
@settings(deadline=None)
def test_the_metadata_and_the_copies_are_those_of_the_pixels(given_images):
    table, requests = given_images
    model = TensorModel(staged, settings_of(table))
    model.load("cpu")
    request = max(requests, key=len)
    channels = (request.shape[-1] if table.layout == "NHWC" else request.shape[1]) if _several(table) else -1
    shape = (-1, -1, -1, channels) if table.layout == "NHWC" else (-1, channels, -1, -1)
    assert model.inputs == (TensorSpec("x", table.datatype, shape),)
    if len(request):
        phases = model.__penstock_phases__
        *_, call = phases.stage([model.preprocess({"x": request})])
        assert call.arrays["x"].nbytes == call.tensors["x"].nbytes == request.nbytes
        assert np.array_equal(call.tensors["x"].numpy(), request)


def _several(table):
    return any(isinstance(n, tuple) and len(n) > 1 for n in (table.mean, table.std))
