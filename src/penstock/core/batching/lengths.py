"""Lengths: which waiting rows of different lengths, such as texts, share a batch, which is padded to the longest."""

# 1. What such a batch costs are its tokens: rows x the longest row, padding included. The learned cost a + b*n counts
#    them as n, `max_tokens` bounds them, and out-of-memory lowers that bound.
# 2. A length class holds the rows between two steps of a growing ladder. It is a bucket of the queue, as a shape is.
# 3. The steps grow by an eighth, so within a class about a twentieth of a batch is padding.
# 4. The class of the request that is served next is always in the next batch, so no length starves.
# 5. If the queue is long that class fills a batch, and none joins it: padding stays what a class has.
# 6. If it is short, each class alone would give a batch of a few rows, and each batch has the set-up cost a.
# 7. So the rows of a neighbour join if padding costs less than 0.3 of the set-up cost that is saved, and not than all
#    of it: rows that wait would share their own batch with rows that arrive meanwhile.
# 8. A neighbour with more rows than there is room for saves only their share of a full batch.
# 9. Of the next shorter and the next longer class the one that saves more joins first, until none saves anything.
# 10. Before the cost is known all classes join: the sizes of batches must vary for the set-up cost to be learned.

from collections.abc import Callable, Iterable
from math import ceil
from operator import attrgetter
from typing import Any, Final

from penstock.core.batching.cost import Cost
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.queues import Bucket
from penstock.errors import BadRequest

FIRST_CLASS: Final = 8  # a choice: below, a row costs about as much whatever its length
# Both are simulated, with log-normal lengths from 8 to 256, 8 to 512 clients in closed loops, and set-up costs of a few
# to 10,000 tokens. Steps of 1.25 gave the same throughput (-3 to +2 %) with twice the padding. With a price of 1, the
# throughput of 32 clients was 9 % lower where a row costs an eighth of the set-up.
GROWTH: Final = 1.12
PRICE: Final = 0.3
LONGEST: Final = 2**31 - 1


def _classes() -> Iterable[int]:
    length = FIRST_CLASS
    while length < LONGEST:
        yield length
        length = ceil(length * GROWTH)
    yield LONGEST


CLASSES: Final = Ladder(tuple(_classes()))


class LengthClasses:
    """The length classes of one Scheduler, and the most tokens of its batches. `tokens` is lower than `max_tokens` for
    a while after out-of-memory. `ladder`: the sizes to which batches are padded."""

    __slots__ = ("_ladder", "max_tokens", "tokens")

    def __init__(self, max_tokens: int | None, ladder: Ladder | None = None) -> None:
        """Raises ValueError."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {max_tokens}")
        self.max_tokens = self.tokens = max_tokens or LONGEST
        self._ladder = ladder

    def check(self, length: int) -> None:
        """Raises BadRequest for a row that no batch may hold."""
        if length > self.max_tokens:
            raise BadRequest(
                f"the request has a length of {length}, more than batching.max_tokens ({self.max_tokens}): send it in"
                " pieces, or raise max_tokens"
            )

    def up(self, length: int) -> int:
        """The longest row of the class of this length."""
        return min(CLASSES.up(max(1, length)), self.max_tokens)

    def most(self, length: int, rows: int) -> int:
        """The most rows of a batch of this length, up to `rows`."""
        rows = max(1, min(rows, self.tokens // length))
        return rows if self._ladder is None else self._ladder.down(rows) or 1


class RowCost(Cost):
    """The cost of batches of rows of one length, whose tokens `cost` counts. `ladder`: the sizes of batches."""

    __slots__ = ("_ladder", "_length", "_tokens")

    def __init__(self, cost: Cost, length: int, ladder: Ladder | None) -> None:
        self._tokens, self._length, self._ladder = cost, length, ladder
        self.a, self.b, self.ratio = cost.a, cost.b * length, cost.ratio
        self.max_seen, self.ready, self.fitted = cost.max_seen / length, cost.ready, cost.fitted

    def t(self, n: float) -> float:
        return self._tokens.t((n if self._ladder is None else self._ladder.up(ceil(n))) * self._length)


def length_of(value: Any) -> int:
    """The length of an item: of a text, a list or an array, or the longest of those in a dictionary. Raises TypeError
    for an item without one."""
    if isinstance(value, dict):
        return max(map(len, value.values()), default=0)
    return len(value)


def name_of(kind: str, length: int) -> str:
    """The name of the bucket of a class. Only rows of the same `kind` share a batch."""
    return f"{kind}@{length}"


def kind_of(name: str) -> str:
    """See `name_of`."""
    return name.rpartition("@")[0]


def mixed(head: Bucket, buckets: Iterable[Bucket], cost: Cost, most: Callable[[int], int]) -> Bucket:
    """The rows of the next batch: the class `head`, and its neighbours that join.

    `buckets` are all classes; `most`: the most rows of a batch of this length.
    """
    if head.rows >= most(head.length):
        return head
    kind = kind_of(head.name)
    order = sorted((b for b in buckets if kind_of(b.name) == kind), key=lambda b: b.length)
    low = high = order.index(head)
    rows, length = head.rows, head.length
    while True:
        best, gain = 0, 0.0
        for step, at in ((-1, low - 1), (1, high + 1)):
            if not 0 <= at < len(order):
                continue
            other = order[at]
            room = most(max(length, other.length)) - rows
            if room > 0 and (saved := _saving(other, room, rows, length, cost, most)) > gain:
                best, gain = step, saved
        if not best:
            break
        low, high = min(low, low + best), max(high, high + best)
        rows += order[low if best < 0 else high].rows
        length = order[high].length
    return head if low == high else _union(order[low : high + 1], most(length))


def _saving(other: Bucket, room: int, rows: int, length: int, cost: Cost, most: Callable[[int], int]) -> float:
    """The seconds that a batch of `rows` rows of this length saves if as many of another class join as have room."""
    if not cost.fitted:
        return 1.0
    joining, longer = min(other.rows, room), other.length - length
    padded = rows * longer if longer > 0 else joining * -longer
    batches = 1.0 if joining == other.rows else joining / most(other.length)
    return PRICE * cost.a * batches - cost.b * padded


def _union(parts: list[Bucket], most: int) -> Bucket:
    """One bucket with the first entries of each, in the order of service: enough for two batches."""
    found = Bucket("", length=parts[-1].length, parts=tuple([part.name for part in parts]))
    found.fill(sorted([e for part in parts for e in part.entries[: 2 * most]], key=_ORDER))
    return found


_ORDER: Final = attrgetter("vdeadline_s", "seq")
