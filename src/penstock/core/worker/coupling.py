"""Whether the results of a model's rows depend on the other rows of a batch, as of a softmax over axis 0.

Such rows must not share a batch: a caller would get values of other callers. The same row runs alone and with others.
Results that already differ between equal runs are random (dropout, a sampler), which proves nothing. Only floats are
compared: the last bit of a float may turn a whole number or a text into another one. The order of sums in a batched
matrix product, TF32 and quantization by the range of a batch change floats a little, which the tolerance allows; a
coupling changes them by about their own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

TOLERANCE: Final = 0.1
"""Share of the largest value by which results may differ. Dynamic int8 quantization, whose steps follow the range of a
batch, changed those of 24 layers by 6 %; BF16 and TF32 change them less, and the order of sums in FP32 far less."""
STEADY: Final = TOLERANCE / 10  # the same between equal runs: what drifts from run to run stays within it in all runs
NEGLIGIBLE: Final = 1e-6  # zero, for sums that cancel out


def coupled(alone: Sequence[Any], together: Sequence[Any]) -> bool:
    """Whether the results of one row differ between its runs alone and its runs in batches.

    The first and last of `together` are runs of equal batches.
    """
    runs = [*pairwise(alone), (together[0], together[-1])]
    return all(_agree(*run, STEADY) for run in runs) and not all(_agree(alone[0], t, TOLERANCE) for t in together)


def _agree(a: Any, b: Any, share: float) -> bool:
    """Whether all floats in two results are about equal; results that cannot be compared are."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_agree(a[name], b[name], share) for name in a.keys() & b.keys())
    try:
        x, y = _floats(a), _floats(b)
    except Exception:  # ragged lists, objects of the user
        x = y = None
    if x is None or y is None:
        lists = isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b)
        return not lists or all(_agree(m, n, share) for m, n in zip(a, b, strict=True))
    if x.shape != y.shape:
        return True
    import numpy as np

    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    limit = NEGLIGIBLE + share * max(float(np.abs(v).max(initial=0)) for v in (x, y))
    # equal values in another order are ties that were broken otherwise, as in a list of the best boxes
    return any(float(np.abs(m - n).max(initial=0)) <= limit for m, n in ((x, y), (np.sort(x), np.sort(y))))


def _floats(value: Any) -> np.ndarray[Any, Any] | None:
    """The floats of an array, a PyTorch tensor or nested lists, flat; None for anything else."""
    import numpy as np

    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    array = np.asarray(value)
    return array.ravel().astype(np.float64) if array.dtype.kind == "f" else None
