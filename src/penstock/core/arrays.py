"""Sizes of values, and nested lists as NumPy arrays of a tensor datatype, with errors that name the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadRequest, PenstockError
from penstock.types import DTYPES

if TYPE_CHECKING:
    import numpy as np

_KINDS: Final = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}  # NumPy kinds of parsed JSON that each kind accepts

MOST_PARTS: Final = 64  # elements of a list that a loop inspects: models have fewer inputs, and JSON may have millions

Error = type[PenstockError]


def nbytes_of(value: Any) -> int:
    """Approximate bytes of a field's value: an array, bytes, or a list of those."""
    if isinstance(value, (list, tuple)):
        if len(value) == 1:
            return _nbytes_of(value[0])
        return sum(map(_nbytes_of, value[:MOST_PARTS])) * len(value) // max(1, min(len(value), MOST_PARTS))
    return _nbytes_of(value)


def _nbytes_of(value: Any) -> int:
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    return len(value) if isinstance(value, (bytes, bytearray, str)) else 0


def plain_array(value: Any) -> Any:
    """A PyTorch tensor as an array on the CPU, bfloat16 and 8-bit floats as float32; any other value unchanged."""
    if not (hasattr(value, "detach") and hasattr(value, "cpu")):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype).startswith(("torch.bfloat16", "torch.float8")) else tensor).numpy()


def array_of(name: str, data: Any, datatype: str) -> np.ndarray[Any, Any]:
    """Nested lists of an input `name` as an array of `datatype`. Raises BadRequest."""
    return as_array(f"input '{name}'", data, datatype, BadRequest, has_text(data))


def has_text(data: Any, depth: int = 64) -> bool:
    """Whether nested lists, up to NumPy's maximum depth, contain a string.

    Check this before calling NumPy: it allocates the size of the longest string for every element (gigabytes for 200 kB
    of JSON), converts numbers to strings, and strips trailing NULs.
    """
    if not isinstance(data, list | tuple):
        return isinstance(data, str | bytes)
    kinds = set(map(type, data))
    if str in kinds or bytes in kinds:
        return True
    return depth > 0 and not kinds.isdisjoint((list, tuple)) and any(has_text(each, depth - 1) for each in data)


def as_array(what: str, data: Any, datatype: str, error: Error, holds_text: bool) -> np.ndarray[Any, Any]:
    import numpy as np

    dtype = np.dtype(DTYPES[datatype])
    if holds_text and datatype != "BYTES":
        raise error(f"{what}: {datatype} data holds strings")
    try:
        found = np.asarray(data, object if holds_text else None)
    except (ValueError, OverflowError):
        raise error(f"{what}: data is a ragged array, or holds a number that is too large") from None
    if found.size == 0:
        return np.empty(found.shape, dtype)
    if datatype == "UINT64" and found.dtype.kind == "f":
        found = _large_integers(data, found)
    if holds_text:
        return _as_bytes(what, found, error)
    if found.dtype.kind not in _KINDS.get(dtype.kind, ""):
        raise error(f"{what}: {datatype} data holds {_found(found)}")
    beyond = f"{what}: data holds a number outside the range of {datatype}"
    if dtype.kind in "ui":
        limits = np.iinfo(dtype)
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            raise error(beyond)
    with np.errstate(over="ignore"):
        array = found.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise error(beyond)
    return array


def _as_bytes(what: str, found: np.ndarray[Any, Any], error: Error) -> np.ndarray[Any, Any]:
    """An object array of bytes, from an object array with at least one string."""
    cells = found.ravel().tolist()
    if any(isinstance(cell, list | tuple) for cell in cells):
        raise error(f"{what}: data is a ragged array")
    if not all(isinstance(cell, str | bytes) for cell in cells):
        raise error(f"{what}: BYTES data holds null or mixed values")
    return objects([c if isinstance(c, bytes) else c.encode("utf-8", "surrogatepass") for c in cells], found.shape)


def _large_integers(data: Any, found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Unsigned integers: NumPy converts a list with values below and above 2**63 to floats."""
    import numpy as np

    cells = np.asarray(data, object)
    whole = all(type(cell) is int and 0 <= cell < 2**64 for cell in cells.ravel().tolist())
    return cells.astype(np.uint64) if whole else found


def _found(array: np.ndarray[Any, Any]) -> str:
    kinds = {"b": "booleans", "i": "integers", "u": "integers", "f": "fractions"}
    return kinds.get(array.dtype.kind, "null or mixed values")


def objects(cells: list[bytes], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    import numpy as np

    array = np.empty(len(cells), object)
    array[:] = cells
    return array.reshape(shape)
