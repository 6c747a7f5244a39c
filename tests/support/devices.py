"""A model on a simulated device: doubles rows of two numbers. Some rows make it fail."""

from typing import Any

from penstock.core.worker.tensor_model import Input, ProgramSettings, TensorModel
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.torch import TorchProgram
from penstock.runtimes.torch_files import import_torch
from penstock.types import TensorSpec
from support.simulated_device import SimulatedDevice

RAISES, LOSES = -1, -2  # the first number of a row
MOST_ROWS = 6
KERNELS_S = 0.002
made: list[SimulatedDevice] = []  # in this process


def _program() -> DeviceProgram:
    torch = import_torch()
    device = SimulatedDevice(copy_s=5e-4, launch_s=0.0, kernels_s=lambda _: KERNELS_S, most_bytes=MOST_ROWS * 8)
    made.append(device)

    class Doubling(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def forward(self, x: Any) -> Any:
            if (x[:, 0] == RAISES).any():
                raise ValueError("a row that raises")
            if (x[:, 0] == LOSES).any():
                device.fails = RuntimeError("CUDA error: an illegal memory access was encountered")
            return x * 2

    inputs, outputs = (Input("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),)
    return DeviceProgram(TorchProgram(Doubling(), "cpu", inputs, platform="simulated", outputs=outputs), device)


model = TensorModel(lambda _: _program(), ProgramSettings())
