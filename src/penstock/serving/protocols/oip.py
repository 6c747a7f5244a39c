"""The Open Inference Protocol v2, with the extension for binary tensors: what requests and answers say.

Tensors stand in the JSON, or in the bytes behind it: `parameters.binary_data_size` of a tensor says how many are its
own. A request asks for binary outputs one by one (`parameters.binary_data` of an output) or for all of them
(`parameters.binary_data_output`); whether its own inputs are binary has nothing to do with it.

Source: the Open Inference Protocol's REST API, and Triton's binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.errors import BadRequest
from penstock.serving.protocols.oip_tensors import Error, check_form, from_bytes, from_json
from penstock.types import Headers

if TYPE_CHECKING:
    import numpy as np

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
NPY: Final = "application/x-npy"
HEADER_BYTES: Final = 64 * 1024  # most of the JSON before binary tensors: the front process reads it for the rows
ALIGNMENT: Final = 64  # the first binary tensor of what we write begins at a multiple of it: the JSON ends in spaces
_HEADER_NAME: Final = HEADER_LENGTH.lower().encode()
_NO_DATA: Final = Raw(b"")


class TensorParameters(Struct, omit_defaults=True):
    """Of a tensor: how many bytes behind the JSON are its own; None: its data stand in the JSON."""

    binary_data_size: Annotated[int, Meta(ge=0)] | None = None


class Tensor(Struct, omit_defaults=True):
    """An input of a request, or an output of an answer."""

    name: str
    shape: list[int]
    datatype: str
    data: Raw = _NO_DATA
    parameters: TensorParameters | None = None

    @property
    def binary_bytes(self) -> int | None:
        """Its size behind the JSON; None where it stands in it."""
        return None if self.parameters is None else self.parameters.binary_data_size


class OutputParameters(Struct, omit_defaults=True):
    """Of an output that is asked for."""

    binary_data: bool | None = None


class RequestedOutput(Struct, omit_defaults=True):
    """An output that is asked for."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(Struct, omit_defaults=True):
    """Of a request. `binary_data_output`: of all outputs that do not say otherwise."""

    binary_data_output: bool | None = None


class OipRequest(Struct, omit_defaults=True):
    """The JSON of a request; what else is in it is ignored."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: RequestParameters | None = None


class OipResponse(Struct, omit_defaults=True):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None


def header_length(headers: Headers | None) -> int | None:
    """Bytes of the JSON at the start of a body, as its header says; None without one. Raises BadRequest."""
    for name, value in headers or ():
        if len(name) == len(_HEADER_NAME) and name.lower() == _HEADER_NAME:
            return parse_length(value)
    return None


def parse_length(value: bytes) -> int:
    """The value of the header. Raises BadRequest."""
    if value.isdigit() and len(value) < 10 and 1 <= (length := int(value)) <= HEADER_BYTES:
        return length
    raise BadRequest(
        f"header {HEADER_LENGTH} must be a whole number from 1 to {HEADER_BYTES}, the bytes of the JSON before the"
        f" tensors, found '{value[:40].decode('latin-1')}'"
    )


def cut(tensors: Sequence[Tensor], rest: memoryview, kind: str, error: Error) -> list[memoryview | None]:
    """The bytes of each tensor, None where it stands in the JSON: slices that exactly fill `rest`. Raises `error`."""
    found: list[memoryview | None] = []
    at = 0
    for tensor in tensors:
        size = tensor.binary_bytes
        if size is None:
            found.append(None)
            continue
        if size > len(rest) - at:
            raise error(
                f"{kind} '{tensor.name[:100]}': binary_data_size is {size}, and {len(rest) - at} bytes are left behind"
                " the JSON"
            )
        found.append(rest[at : at + size])
        at += size
    if at != len(rest):
        raise error(f"{len(rest)} bytes stand behind the JSON, and the binary_data_size of every {kind} sum up to {at}")
    return found


def array_of_tensor(
    tensor: Tensor, data: memoryview | None, kind: str, least_rows: int, error: Error
) -> np.ndarray[Any, Any]:
    """The tensor as an array, from the JSON or from its bytes. Raises `error`."""
    what = f"{kind} '{tensor.name[:100]}'"
    check_form(what, tensor.datatype, tensor.shape, least_rows, error)
    if data is None:
        if tensor.data is _NO_DATA:
            raise error(f"{what}: missing required field `data`, and no parameters.binary_data_size is given")
        return from_json(what, tensor.datatype, tensor.shape, tensor.data, error)
    if tensor.data is not _NO_DATA:
        raise error(f"{what}: both `data` and parameters.binary_data_size are given")
    return from_bytes(what, tensor.datatype, tensor.shape, data, error)


def write_head(message: OipRequest | OipResponse) -> bytes:
    """The JSON before binary tensors, as long as a multiple of `ALIGNMENT`."""
    head = msgspec.json.encode(message)
    return head + b" " * (-len(head) % ALIGNMENT)
