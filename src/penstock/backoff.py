"""Backoff: the pauses between attempts that fail. Pure: callers sleep, and know the time."""


def doubled_s(first_s: float, failures: int, most_s: float) -> float:
    """The pause after so many failures: `first_s` after one, twice as long after each further one, up to `most_s`."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, 30))  # more doublings could overflow


class Backoff:
    """Pauses that double from `first_s` up to `most_s`, until an attempt succeeds and `reset` is called."""

    __slots__ = ("_next_s", "first_s", "most_s")

    def __init__(self, first_s: float, most_s: float) -> None:
        self.first_s, self.most_s = first_s, most_s
        self._next_s = first_s

    def next_s(self, most_s: float | None = None) -> float:
        """The pause after another failure; with `most_s`, this one and the next one are no longer than that."""
        most_s = self.most_s if most_s is None else most_s
        pause_s = min(self._next_s, most_s)
        self._next_s = min(2 * self._next_s, max(most_s, self.first_s))
        return pause_s

    def reset(self) -> None:
        self._next_s = self.first_s
