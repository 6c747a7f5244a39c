"""Tensors of a request that are in shared memory: read once into the batch, written once from the result.

Source: Triton's extension "system_shared_memory".
"""

import math
from typing import TypeGuard

from penstock.core.wire.regions import read_region, write_region
from penstock.errors import BadRequest
from penstock.serving.protocols.oip_messages import NO_DATA, SharedTensor, Tensor
from penstock.serving.protocols.oip_tensors import check_form
from penstock.types import SIZES, Item


def is_shared(place: SharedTensor | None, what: str) -> TypeGuard[SharedTensor]:
    """Whether a tensor is in shared memory. Raises BadRequest for a place without a region."""
    if place is None or place.shared_memory_region is not None:
        return place is not None
    if place.shared_memory_byte_size is not None or place.shared_memory_offset:
        raise BadRequest(f"{what}: found a place in shared memory without the parameter shared_memory_region")
    return False


def shared_input(tensor: Tensor, place: SharedTensor) -> memoryview:
    """The bytes of an input in shared memory. Raises BadRequest."""
    what, size = f"input '{tensor.name[:100]}'", place.shared_memory_byte_size
    if tensor.data is not NO_DATA or tensor.binary_bytes is not None:
        raise BadRequest(f"{what}: found data and parameters.shared_memory_region; send one of them")
    check_form(what, tensor.datatype, tensor.shape, BadRequest)
    needed = None if tensor.datatype == "BYTES" else math.prod(tensor.shape) * SIZES[tensor.datatype]
    if size is None or needed not in (None, size):
        raise BadRequest(f"{what}: shared_memory_byte_size is {size}, but shape and datatype need {needed or 'it'}")
    return read_region(what, place.shared_memory_region or "", place.shared_memory_offset, size)


def shared_output(name: str, data: bytes | memoryview, place: SharedTensor, item: Item) -> None:
    """Writes an output to shared memory. Raises BadRequest."""
    what, size = f"output '{name[:100]}'", place.shared_memory_byte_size
    if item.stop >= 0:
        raise BadRequest(f"{what}: it goes to shared memory, so the request may have max_batch_size rows at most")
    if size is None or len(data) > size:
        raise BadRequest(f"{what}: it has {len(data)} bytes, but shared_memory_byte_size is {size}")
    write_region(what, place.shared_memory_region or "", place.shared_memory_offset, data)
