"""Inputs of `infer` as tensors: arrays and torch tensors, the latter recognised without an import of torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from penstock.client.http import Buffer
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.oip_tensors import output_array, to_bytes

RawInput = tuple[str, str, tuple[int, ...], Buffer]  # name, datatype, shape, little-endian elements in C order


def raw_inputs(inputs: Mapping[str, Any]) -> list[RawInput]:
    """The inputs of a request. Values are NumPy arrays, torch tensors, or what `numpy.asarray` takes.

    Contiguous arrays and CPU tensors are not copied. A tensor of bfloat16 becomes BF16. Raises BadRequest for a dtype
    that the Open Inference Protocol lacks.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise BadRequest(f"inputs is a {type(inputs).__name__}, expected a dict of at least one name and array")
    return [_raw_input(str(name), value) for name, value in inputs.items()]


def _raw_input(name: str, value: Any) -> RawInput:
    datatype = ""
    try:
        if type(value).__module__.partition(".")[0] == "torch":
            datatype, value = _of_torch(value)
        found, array = output_array(name, value, None)
        datatype = datatype or found
        # a view of the 16 bits of BF16 is sent as it is
        return name, datatype, array.shape, to_bytes(name, found, array)
    except BadOutput as error:
        raise BadRequest(error.message.replace("output", "input", 1)) from None


def _of_torch(tensor: Any) -> tuple[str, Any]:
    """("BF16", its bits as int16), or ("", array): NumPy has no bfloat16. Raises BadOutput."""
    torch = sys.modules["torch"]
    try:
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            return "BF16", tensor.view(torch.int16).numpy(force=True)
        return "", tensor.numpy(force=True)
    except (TypeError, RuntimeError, AttributeError) as exc:
        raise BadOutput(f"output of type {type(tensor).__name__} is not an array: {exc}") from None
