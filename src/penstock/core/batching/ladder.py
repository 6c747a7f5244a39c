"""Ladder: the sizes that the batches of a model have. Any other batch is padded to the next size."""

# What is prepared for one size of batch pays for each new size: cuDNN's benchmark measures algorithms, `torch.compile`
# and TensorRT compile, CUDA graphs are captured. A batching server meets every size from one row to the largest batch.
# With a ladder it meets a few sizes, and the warm-up has run all of them before the first request.

from bisect import bisect_left, bisect_right
from typing import Literal

DEFAULT_BATCH = 64  # a choice: most rows of a batch whose best size is not known

Sizes = tuple[int, ...] | Literal["any", "auto"] | None


class Ladder:
    """The sizes, ascending. The last one is the largest batch."""

    __slots__ = ("sizes", "top")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        assert list(sizes) == sorted(set(sizes)), f"no ladder: {sizes}"
        self.sizes = sizes
        self.top = sizes[-1]

    def up(self, rows: int) -> int:
        """The size that a batch of so many rows is padded to; `rows` itself above the last size."""
        return rows if rows > self.top else self.sizes[bisect_left(self.sizes, rows)]

    def down(self, rows: int) -> int:
        """The largest size of at most so many rows; 0 if there is none."""
        at = bisect_right(self.sizes, rows)
        return self.sizes[at - 1] if at else 0

    def chunks(self, rows: int) -> list[tuple[int, int, int]]:
        """(start, stop, size) of each call for so many rows: one, unless they are more than the last size."""
        top = self.top
        return [(k, stop := min(rows, k + top), self.up(stop - k)) for k in range(0, rows, top)]


def powers(most: int) -> tuple[int, ...]:
    """The powers of two below `most`, and `most`."""
    return (*(2**k for k in range((most - 1).bit_length())), most)


def ladder_of(sizes: Sizes, most: int | None) -> Ladder | None:
    """The ladder of the key `sizes` for batches of at most `most` rows; None for any size, and for "auto" while `most`
    is not known."""
    if sizes is None or sizes == "any" or (sizes == "auto" and most is None):
        return None
    return Ladder(powers(most) if isinstance(sizes, str) and most is not None else tuple(sizes))  # type: ignore[arg-type]
