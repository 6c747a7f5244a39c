"""Ladder: the sizes that the batches of a model have. Any other batch is padded to the next size."""

# What is prepared for one size of batch pays for each new size: cuDNN's benchmark measures algorithms, `torch.compile`
# and TensorRT compile, CUDA graphs are captured. A batching server meets every size from one row to the largest batch.
# With a ladder it meets a few sizes, and the warm-up has run all of them before the first request.

from bisect import bisect_left, bisect_right
from collections.abc import Callable
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

    def next_batch(self, rows: int, waiting: int, t: Callable[[int], float]) -> int:
        """How many of the `waiting` rows run next, if `rows` of them would: all that fit into the padded batch, or the
        next lower size. `t`: seconds of a batch.

        The rest then waits for the next batch, which arrivals may fill. That pays if the lower size runs more rows per
        second. The rows are then answered earlier in the mean, also if no others arrive. The last of them must not be
        answered later than from one padded batch by more than the step between the two sizes.
        """
        return self._next(min(waiting, self.up(rows)), t)[0]

    def _next(self, rows: int, t: Callable[[int], float]) -> tuple[int, float]:
        """(rows of the next batch, seconds until all are answered if no others arrive)."""
        lower, padded_s = self.down(rows), t(self.up(rows))
        lower_s = t(lower) if 0 < lower < rows else 0.0
        if lower_s and lower * padded_s > rows * lower_s:
            times, rest = divmod(rows, lower)
            last_s = times * lower_s + (self._next(rest, t)[1] if rest else 0.0)
            if last_s <= padded_s + (padded_s - lower_s):
                return lower, last_s
        return rows, padded_s

    def chunks(self, rows: int) -> list[tuple[int, int, int]]:
        """(start, stop, size) of each call for so many rows: one, unless they are more than the last size."""
        top = self.top
        return [(k, stop := min(rows, k + top), self.up(stop - k)) for k in range(0, rows, top)]


def powers(most: int) -> tuple[int, ...]:
    """The powers of two below `most`, and `most`."""
    return (*(2**k for k in range((most - 1).bit_length())), most)


def ladder_of(sizes: Sizes, most: int | None) -> Ladder | None:
    """The ladder of the key `sizes`, up to `most` rows; None for any size, and for "auto" while `most` is not known."""
    if sizes is None or sizes == "any" or (sizes == "auto" and most is None):
        return None
    if isinstance(sizes, str):
        return Ladder(powers(most or DEFAULT_BATCH))
    return Ladder(tuple(size for size in sizes if most is None or size <= most))
