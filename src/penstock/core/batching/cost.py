"""Cost: the run time of a batch of n rows, learned from finished batches."""

from bisect import bisect_left
from collections.abc import Iterable

from penstock.core.batching.ladder import Ladder

# Chosen by simulating models with jitter, steps, stragglers and drift; `MAX_SECONDS` only guards the sums.
MAX_SECONDS = 1e6  # longer claims are not measurements, and their sums would overflow
SKIPPED_SAMPLES = 2  # the first ones include lazy initialization
READY_SAMPLES = 6  # after the skipped ones: fewer samples predict noise
_FORGET = 0.995  # share of its weight that a size keeps per sample of any size
_MAX_WEIGHT = 30.0
_STRAGGLER = 3.0  # times the mean of its size: counts in `ratio`, is clipped in the mean
_SPREAD = 0.2  # variance of the sizes from which on a line through their times separates a from b
_UPPER = 0.97  # the quantile of measured / predicted that `ratio` follows


class Cost:
    """Binned, forgetting least squares for t(n) = a + b*n seconds.

    One bin per power of two keeps what was learned about other sizes while the load stays at one size. While sizes do
    not vary (`fitted` is false), a = 0 is no knowledge, and without a set-up cost nothing is held. t is then the least
    that is possible, in proportion up to the most rows that were seen (`max_seen`) and no more above, so that no batch
    is smaller because others were. a >= 0 and b > 0 always. `ratio` is a running upper quantile of measured /
    predicted, from 1 to 2.
    """

    __slots__ = ("_bins", "_seen", "a", "b", "fitted", "max_seen", "ratio", "ready")

    def __init__(self) -> None:
        self._bins: dict[int, list[float]] = {}  # bit length of n -> [mean n, mean seconds, weight]
        self._seen = 0
        self.a = 0.0
        self.b = 1e-9
        self.ratio = 1.15
        self.ready = False
        self.fitted = False
        self.max_seen = _ANY  # while not fitted, the mean rows of a batch

    def t(self, n: float) -> float:
        """Predicted mean seconds of a batch of n rows."""
        return self.a + self.b * (n if n < self.max_seen else self.max_seen)

    def high(self, n: float) -> float:
        """Seconds that about 97 % of the batches of n rows stay under."""
        return self.t(n) * self.ratio

    @property
    def points(self) -> list[tuple[float, float, float]]:
        """What the prediction rests on: (mean rows, mean seconds, weight) of each size that was seen."""
        return [(v[0], v[1], v[2]) for _, v in sorted(self._bins.items())]

    @property
    def knee(self) -> float:
        """Rows at which the set-up cost is half of the batch: a / b."""
        return self.a / self.b

    def add(self, n: int, seconds: float, bin: int = 0) -> None:
        """Learns from one batch; ignores impossible values. `bin`: that of the size, by default of its power of two."""
        if n < 1 or not 0 <= seconds < MAX_SECONDS:  # false for NaN, too
            return
        self._seen += 1
        if self._seen <= SKIPPED_SAMPLES:
            return
        predicted = self.a + self.b * n
        seconds = self._learn(n, seconds, bin or n.bit_length())
        if self.ready:
            self.ratio += 0.02 * (_UPPER if seconds > self.ratio * predicted else _UPPER - 1)
            self.ratio = min(2.0, max(1.0, self.ratio))
        self.ready = self._seen >= SKIPPED_SAMPLES + READY_SAMPLES

    def _learn(self, n: int, sample: float, place: int) -> float:
        """Moves the bin of n, at its place, towards the sample, ages the others, and returns the clipped sample."""
        bins = self._bins
        own = bins.get(place)
        if own is None:
            own = bins[place] = [n, sample, 0.0]
        weight = x = y = xx = xy = 0.0
        for v in bins.values():  # weighted means and co-variances in one pass
            size, seconds, w = v
            w *= _FORGET
            if v is not own:
                v[2] = w = w if w > 1.0 else 1.0
            elif not w:
                v[2] = w = 1.0
            else:
                w = w if w > 1.0 else 1.0
                if w >= 4 and sample > _STRAGGLER * seconds:
                    sample = _STRAGGLER / 2 * seconds
                gain = 1 / (w + 1)
                gain = gain if gain > 0.08 else 0.08
                v[0] = size = size + gain * (n - size)
                v[1] = seconds = seconds + gain * (sample - seconds)
                v[2] = w = w + 1 if w + 1 < _MAX_WEIGHT else _MAX_WEIGHT
            share = w / (weight := weight + w)
            dx = size - x
            x += share * dx
            y += share * (seconds - y)
            w *= dx
            xx += w * (size - x)
            xy += w * (seconds - y)
        per_row = max(y / x, 1e-12)
        self.fitted = xx > _SPREAD * weight
        self.max_seen = _ANY if self.fitted else x
        if self.fitted:
            self.b = max(1e-6 * per_row, xy / xx)
            self.a = y - self.b * x
        if not self.fitted or self.a < 0:
            self.a, self.b = 0.0, per_row
        return sample


class StairCost(Cost):
    """The cost of batches that are padded to the sizes of a ladder: a staircase, flat up to each size.

    Each size has a bin, whose mean is its step; noise must not make a larger size faster. A size without samples has
    its place on the line through the others, which also tells a set-up cost from a cost per row.
    """

    __slots__ = ("_ladder", "_steps")

    def __init__(self, ladder: Ladder) -> None:
        super().__init__()
        self._ladder = ladder
        self._steps = [self.b * size for size in ladder.sizes]

    def t(self, n: float) -> float:
        at = bisect_left(self._ladder.sizes, n)
        return self._steps[at] if at < len(self._steps) else super().t(n)

    def add(self, n: int, seconds: float, bin: int = 0) -> None:
        size = self._ladder.up(n)
        super().add(size, seconds, size)
        means = [v[1] if (v := self._bins.get(s)) else super(StairCost, self).t(s) for s in self._ladder.sizes]
        self._steps = rising(means)


def rising(values: Iterable[float]) -> list[float]:
    """The values, with means in place of those that fall (isotonic regression)."""
    levels: list[list[float]] = []  # (mean, number of values)
    for value in values:
        levels.append([value, 1])
        while len(levels) > 1 and levels[-2][0] > levels[-1][0]:
            (late, n), (early, m) = levels.pop(), levels.pop()
            levels.append([(late * n + early * m) / (n + m), n + m])
    return [level for level, count in levels for _ in range(int(count))]


_ANY = float("inf")
