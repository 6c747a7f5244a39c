"""The orders of waiting entries: a `Bucket` in the order of service, `Expiries` in the order of expiry.

Both are plain sorted lists with an append as the fast path. Arrivals are nearly always in order, and moving 16k
pointers costs about as much as two attribute look-ups: a cleverer structure does not pay at the sizes of `max_queue`.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from heapq import heappop, heappush

from penstock.core.batching.entry import INF, Entry

MAX_BYPASSES = 8
"""How often later entries may pass an entry that does not fit, and how many entries one batch may pass."""
COMPACT_AT = 1024


class Bucket:
    """The waiting entries that may share a batch, ordered by (virtual deadline, arrival).

    `finite` counts entries with a real deadline, `loose` entries whose virtual deadline is earlier than the real one
    (no deadline, or a distant one); if none is loose, `keys` are the deadlines. `low` counts priority classes > 0.
    `length`: the class of its rows, 0 without lengths. `parts`: the names of the buckets that it was made of.
    """

    __slots__ = ("entries", "finite", "keys", "length", "loose", "low", "name", "parts", "rows", "slot")

    def __init__(self, name: str, slot: int = -1, length: int = 0, parts: tuple[str, ...] = ()) -> None:
        self.name, self.slot = name, slot  # the only slot for its entries, or -1
        self.length, self.parts = length, parts or (name,)
        self.keys: list[float] = []  # virtual deadlines, aligned with `entries`
        self.entries: list[Entry] = []
        self.rows = self.finite = self.loose = self.low = 0

    def push(self, entry: Entry) -> bool:
        """Adds an entry after its equals; True if it is the new head."""
        v = entry.vdeadline_s
        keys = self.keys
        if not keys or v >= keys[-1]:
            keys.append(v)
            self.entries.append(entry)
            head = len(keys) == 1
        else:
            i = bisect_right(keys, v)
            keys.insert(i, v)
            self.entries.insert(i, entry)
            head = i == 0
        self.rows += entry.rows  # as `_count` does
        if entry.deadline_s != INF:
            self.finite += 1
        if v < entry.deadline_s:
            self.loose += 1
        if entry.priority:
            self.low += 1
        return head

    def push_back(self, entry: Entry) -> bool:
        """Puts a taken entry back into its old place; True if it is the new head."""
        keys, v = self.keys, entry.vdeadline_s
        i = bisect_left(keys, v)
        while i < len(keys) and keys[i] == v and self.entries[i].seq < entry.seq:
            i += 1
        keys.insert(i, v)
        self.entries.insert(i, entry)
        self._count(entry, 1)
        return i == 0

    def fill(self, entries: list[Entry]) -> None:
        """Makes these entries, which are in order, the content of an empty bucket."""
        self.entries, self.keys = entries, [e.vdeadline_s for e in entries]
        for entry in entries:
            self._count(entry, 1)

    def remove(self, entry: Entry) -> None:
        i = self.entries.index(entry, bisect_left(self.keys, entry.vdeadline_s))
        del self.keys[i], self.entries[i]
        self._count(entry, -1)

    def _count(self, entry: Entry, sign: int) -> None:
        self.rows += sign * entry.rows
        if entry.deadline_s != INF:
            self.finite += sign
        if entry.vdeadline_s < entry.deadline_s:
            self.loose += sign
        if entry.priority:
            self.low += sign

    def tight(self, before_s: float) -> list[Entry]:
        """Entries whose deadline is before `before_s`, in order. Only the prefix due by then can contain any."""
        prefix = self.entries[: bisect_left(self.keys, before_s)]
        return prefix if not self.loose else [e for e in prefix if e.deadline_s < before_s]

    def rows_tolerating(self, until_s: float) -> int:
        """Rows of the entries whose deadline is not before `until_s`."""
        if not self.loose and self.rows == len(self.keys):
            return self.rows - bisect_left(self.keys, until_s)
        return self.rows - sum(e.rows for e in self.tight(until_s))

    def take(self, rows: int, until_s: float) -> list[Entry]:
        """Removes and returns the earliest entries whose deadline is not before `until_s`: up to `rows` rows, but at
        least one entry if any qualifies. Entries that do not fit are passed over, see `MAX_BYPASSES`."""
        entries = self.entries
        if self.rows == len(entries) and (until_s == -INF or not self.loose):
            i = 0 if until_s == -INF else bisect_left(self.keys, until_s)
            taken = entries[i : i + rows]
            del self.keys[i : i + rows], entries[i : i + rows]
            self._uncount(taken)
            return taken
        taken = []
        passed: list[Entry] = []
        places: list[int] = []
        room, counted = rows, 0
        for i, e in enumerate(entries):
            if e.deadline_s < until_s:
                continue
            if e.rows <= room or not taken:
                taken.append(e)
                places.append(i)
                counted = len(passed)  # the entries before it have now been passed over
                room -= e.rows
                if room <= 0:
                    break
            elif e.passed >= MAX_BYPASSES or len(passed) >= MAX_BYPASSES:
                break
            else:
                passed.append(e)
        for e in passed[:counted]:
            e.passed += 1
        for i in reversed(places):
            del self.keys[i], entries[i]
        self._uncount(taken)
        return taken

    def first(self, until_s: float) -> Entry | None:
        """The earliest entry whose deadline is not before `until_s`."""
        return next((e for e in self.entries if e.deadline_s >= until_s), None)

    def _uncount(self, taken: list[Entry]) -> None:
        if not self.finite and not self.low:  # without deadlines no entry needs a look
            self.loose -= len(taken)
            self.rows -= len(taken) if self.rows == len(self.entries) + len(taken) else sum(e.rows for e in taken)
            return
        for e in taken:
            self._count(e, -1)


class Expiries:
    """When each waiting entry expires: min(deadline, timeout). Entries that left the queue are removed lazily.

    Most expiry times arrive in order (arrival + a constant) and go into a deque; the others into a heap. Nothing
    expires before `earliest_s`.
    """

    __slots__ = ("_count", "_heap", "_limit", "_line", "_waiting", "earliest_s")

    def __init__(self, waiting: int) -> None:
        self.earliest_s = INF
        self._line: deque[tuple[float, int, Entry]] = deque()
        self._heap: list[tuple[float, int, Entry]] = []
        self._count = 0
        self._limit = COMPACT_AT  # count at which entries that left are removed
        self._waiting = waiting  # the state of a waiting entry

    def add(self, entry: Entry) -> None:
        end = entry.deadline_s if entry.deadline_s < entry.expires_s else entry.expires_s
        if end == INF:
            return
        line = self._line
        count = self._count = self._count + 1
        if end < self.earliest_s:
            self.earliest_s = end
        if not line or end >= line[-1][0]:
            line.append((end, count, entry))
        else:
            heappush(self._heap, (end, count, entry))
        if count > self._limit:
            self._line = deque(x for x in line if x[2].state == self._waiting)
            self._heap = sorted(x for x in self._heap if x[2].state == self._waiting)
            self._limit = count + 4 * (len(self._line) + len(self._heap)) + COMPACT_AT

    def next(self) -> float:
        """The earliest expiry of a waiting entry, or INF."""
        line, heap, waiting = self._line, self._heap, self._waiting
        while line and line[0][2].state != waiting:
            line.popleft()
        while heap and heap[0][2].state != waiting:
            heappop(heap)
        end = line[0][0] if line else INF
        self.earliest_s = heap[0][0] if heap and heap[0][0] < end else end
        return self.earliest_s

    def due(self, now: float) -> list[Entry]:
        """Removes and returns the waiting entries that have expired."""
        late = []
        while self.next() <= now:
            line, heap = self._line, self._heap
            in_line = bool(line) and (not heap or line[0][:2] <= heap[0][:2])
            late.append((line.popleft() if in_line else heappop(heap))[2])
        return late
