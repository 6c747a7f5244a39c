"""A model on a simulated device, which copies and computes for known times."""

import sys
from pathlib import Path
from typing import Any

from penstock.core.worker.tensor_model import Input, ProgramSettings, TensorModel
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.torch import TorchProgram
from penstock.runtimes.torch_files import import_torch
from penstock.types import TensorSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.simulated_device import SimulatedDevice

WIDTH = 16
MOST_ROWS = 64
COPY_S = 1e-3
LAUNCH_S = 1e-4


def kernels_s(rows: int) -> float:
    """Seconds of the kernels for a batch."""
    return 2e-3 + 5e-5 * rows


def doubling(device: SimulatedDevice) -> DeviceProgram:
    """The program of a module that doubles its rows."""
    torch = import_torch()

    class Doubling(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def forward(self, x: Any) -> Any:
            return x * 2

    inputs, outputs = (Input("x", "FP32", (-1, WIDTH)),), (TensorSpec("y", "FP32", (-1, WIDTH)),)
    torch.set_num_threads(1)
    return DeviceProgram(TorchProgram(Doubling(), "cpu", inputs, platform="simulated", outputs=outputs), device)


def simulated() -> SimulatedDevice:
    """The device of the benchmark."""
    return SimulatedDevice(copy_s=COPY_S, launch_s=LAUNCH_S, kernels_s=kernels_s)


device = TensorModel(lambda _: doubling(simulated()), ProgramSettings())
