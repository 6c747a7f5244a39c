"""What a model returns."""

from typing import Any

from penstock.errors import BadOutput, WrongRowCount, describe


def aligned(found: Any, expected: int, did: str = "returned") -> list[Any]:
    """The results as a list, one per item. Raises BadOutput; WrongRowCount if it has another length. `did`: what
    predict did with them."""
    array = hasattr(found, "__array__") and getattr(found, "ndim", 0) > 0
    if not isinstance(found, (list, tuple)) and (
        not array or hasattr(found, "columns")
    ):  # a table would give its columns
        whole = "" if did == "returned" else "; a generator yields all parts of a step together, or return list(...)"
        raise BadOutput(
            f"predict {did} a {type(found).__name__}, expected a list, a tuple or an array of {expected} results{whole}"
        )
    try:
        results = list(found)
    except Exception as e:
        raise BadOutput(f"predict {did} a {type(found).__name__} that cannot be read: {describe(e)}") from None
    if len(results) != expected:
        raise WrongRowCount(f"predict {did} {len(results)} results for {expected} items, expected one for each item")
    return results
