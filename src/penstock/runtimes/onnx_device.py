"""ONNX Runtime on a device with three phases: a session reads and writes PyTorch's tensors, without a copy.

On CUDA this takes PyTorch, whose streams and pinned memory the phases use. Without it, a session copies by itself.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.config.schema import InputConfig
from penstock.core.worker.tensor_model import Program
from penstock.errors import describe
from penstock.runtimes.device import Device, DeviceModel, DeviceProgram
from penstock.runtimes.graphs import Tensors
from penstock.runtimes.onnx import OnnxProgram, import_onnxruntime, lacked_memory
from penstock.runtimes.pixels import ImageProgram, images_of
from penstock.runtimes.torch import normaliser
from penstock.runtimes.torch_files import import_torch
from penstock.types import DTYPES


def device_of(name: str) -> Any:
    """The CudaDevice of this name; None for another device, or without a PyTorch for CUDA."""
    if not name.startswith("cuda") or importlib.util.find_spec("torch") is None:
        return None
    if not import_torch().cuda.is_available():
        return None
    from penstock.runtimes.cuda import CudaDevice

    return CudaDevice(name)


def in_phases(
    session: Any, name: str, device: Device | None, images: Mapping[str, InputConfig] | None = None
) -> Program:
    """The program of a session on the device of this name, in three phases if `device` is given.

    On CUDA the session must run on the stream of the device. Texts have no place on a device, so a graph that takes or
    gives any is run by the session alone, and so is any graph by a version whose values PyTorch cannot read. `images`:
    the inputs for which clients send pixels. Raises LoadFailed, ConfigError.
    """
    program = OnnxProgram(session)
    datatypes = [*(i.datatype for i in program.inputs), *(o.datatype for o in program.outputs)]
    readable = hasattr(import_onnxruntime().OrtValue, "__dlpack__")
    if device is None or "BYTES" in datatypes or not readable:
        return ImageProgram(program, images) if images else program
    model = BoundSession(program, session, name)
    return DeviceProgram(ImageModel(model, images, name) if images else model, device)


class BoundSession:
    """A session as a `DeviceModel`."""

    def __init__(self, program: OnnxProgram, session: Any, name: str) -> None:
        self.platform, self.inputs, self.outputs = program.platform, program.inputs, program.outputs
        self.rows, self.unbatched = program.rows, program.unbatched
        self._session, self._torch = session, import_torch()
        kind, _, index = name.partition(":")
        self._place = (kind, int(index or 0))
        self._options = import_onnxruntime().RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")  # `fetch` waits

    def forward(self, tensors: Tensors) -> Tensors:
        """See `DeviceModel`. Raises as `OnnxProgram.run`."""
        binding = self._session.io_binding()
        for spec in self.inputs:
            tensor, dtype = tensors[spec.name], np.dtype(DTYPES[str(spec.datatype)])
            binding.bind_input(spec.name, *self._place, dtype, tuple(tensor.shape), tensor.data_ptr())
        for output in self.outputs:
            binding.bind_output(output.name, *self._place)
        try:
            self._session.run_with_iobinding(binding, self._options)
        except Exception as e:
            if lacked_memory(e):
                raise MemoryError(describe(e)) from e
            raise
        values = binding.get_outputs()
        return {spec.name: self._torch.from_dlpack(value) for spec, value in zip(self.outputs, values, strict=True)}


class ImageModel:
    """A model that receives floats, for clients that send pixels. They are normalised on its device."""

    def __init__(self, model: DeviceModel, tables: Mapping[str, InputConfig], device: str) -> None:
        """Raises ConfigError."""
        self._model = model
        self.platform, self.outputs = model.platform, model.outputs
        self.rows, self.unbatched = model.rows, model.unbatched
        self.inputs, images = images_of(model.inputs, tables)
        self._normalise = {name: normaliser(image, device) for name, image in images.items()}

    def forward(self, tensors: Tensors) -> Tensors:
        """See `DeviceModel`. Raises what the model raises."""
        floats = {name: normalise(tensors[name]) for name, normalise in self._normalise.items()}
        return self._model.forward(tensors | floats)
