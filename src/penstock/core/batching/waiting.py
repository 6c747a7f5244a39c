"""WaitingQueue: all waiting requests, as buckets, pieces of split requests, re-runs and expiry times.

A request larger than the batch, or than the room left in it, is cut into pieces. A piece is an Entry with the request's
id, `parent` the request and `start` its first row. A split request ends when all its rows are answered. Once a piece
has failed or expired, or the caller has left, it ends as soon as no piece runs, because a worker may still read its
payload; its waiting pieces are purged at once. Every request leaves the queue exactly once.
"""

from heapq import heapify, heappop, heappush
from math import isqrt

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.batching.entry import INF, SOURCES, Entry, EntryState, Event, Expire, Fail, move
from penstock.core.batching.lengths import LengthClasses
from penstock.core.batching.queues import Bucket, Expiries
from penstock.core.batching.sequences import SequenceTable

MIN_FILL = 8  # a choice: cut a request if more than 1/MIN_FILL of a batch would stay empty; each piece costs a decoding

STALE_HEADS = 64  # as many entries of the heap may be out of date, and as many again as there are buckets

_WAITING, _RUNNING, _DONE = int(EntryState.WAITING), int(EntryState.RUNNING), int(EntryState.DONE)
_RUNNABLE = SOURCES[EntryState.RUNNING]


class SplitRequest(Struct, eq=False):
    """A split request: its waiting pieces, the number of running pieces, and the rows without a response. `over`: no
    more pieces will run; `verdict` is then the event that ends it, None if the batch that ends it reports it."""

    root: Entry
    waiting: list[Entry]
    running: int = 0
    rows_left: int = 0
    over: bool = False
    verdict: Event | None = None


def cut(entry: Entry, rows: int) -> list[Entry]:
    """Pieces of at most `rows` rows, in row order, of a request or of a piece that has become too large."""
    return [_piece(entry, k, min(rows, entry.rows - k)) for k in range(0, entry.rows, rows)]


def _piece(entry: Entry, start: int, rows: int) -> Entry:
    return replace(
        entry, rows=rows, nbytes=0, parent=entry.parent or entry, start=entry.start + start, state=int(EntryState.NEW)
    )


class WaitingQueue:
    """The waiting entries of one Scheduler. No entry has more than `max_rows` rows: larger ones wait as pieces.

    `events` collects the events of the next poll. `waiting` holds the requests that wait, at least in part. `dirty`
    names the buckets that got an entry with a deadline since the last look. `reruns` holds the entries that were in a
    worker's death, in the order in which they run again.
    """

    def __init__(
        self, max_rows: int, sequences: SequenceTable | None = None, lengths: LengthClasses | None = None
    ) -> None:
        self.max_rows, self._lengths = max_rows, lengths
        self._sequences = sequences
        self.waiting: dict[int, Entry] = {}
        self.rows = 0
        self.nbytes = 0
        self.reruns: list[Entry] = []
        self._most_reruns = 0  # since there were none
        self.expiries = Expiries(_WAITING)
        self.events: list[Event] = []
        self.dirty: dict[str, None] = {}
        self.buckets: dict[str, Bucket] = {}  # never empty
        self._heads: list[tuple[float, int, str]] = []  # heap of bucket heads; stale ones are skipped
        self._splits: dict[int, SplitRequest] = {}
        self._seq = 0

    def most(self, length: int) -> int:
        """The most rows of a batch, and so of an entry, of this length."""
        return self.max_rows if self._lengths is None else self._lengths.most(self._lengths.up(length), self.max_rows)

    # ---- in

    def add(self, entry: Entry) -> None:
        """Queues a new request, whose virtual deadline is set."""
        self._seq += 1
        entry.seq = self._seq
        self.waiting[entry.id] = entry
        self.rows += entry.rows
        self.nbytes += entry.nbytes
        most = self.max_rows if self._lengths is None else self.most(entry.length)
        if entry.rows > most:
            for piece in self._cut(entry, cut(entry, most)):
                self._push(piece)
        else:
            assert entry.state == 0, f"request {entry.id} was offered before"
            entry.state = _WAITING
            self.expiries.add(entry)
            bucket = self.buckets.get(entry.bucket)
            if bucket is None or entry.held or entry.deadline_s != INF:
                self._put(entry)
            elif bucket.push(entry):
                self._new_head(bucket)

    def _push(self, entry: Entry) -> None:
        self.expiries.add(entry)
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        if entry.held:
            return
        name = entry.bucket
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self._bucket(entry)
        if bucket.push(entry):
            self._new_head(bucket)
        if entry.deadline_s != INF:
            self.dirty[name] = None

    def _bucket(self, entry: Entry) -> Bucket:
        """The bucket of an entry, a new one if there is none."""
        bucket = self.buckets.get(entry.bucket)
        if bucket is None:
            length = 0 if self._lengths is None else self._lengths.up(entry.length)
            bucket = self.buckets[entry.bucket] = Bucket(entry.bucket, entry.slot, length)
        return bucket

    def _cut(self, entry: Entry, pieces: list[Entry]) -> list[Entry]:
        """Returns `pieces`, which replace `entry`; they are in no bucket yet."""
        root = entry.parent or entry
        split = self._splits.get(root.id)
        if split is None:
            split = self._splits[root.id] = SplitRequest(root, [], rows_left=root.rows)
        if entry.parent is not None:
            split.waiting.remove(entry)
        move([entry], EntryState.SPLIT)
        move(pieces, EntryState.WAITING)
        split.waiting += pieces
        return pieces

    def resize(self, max_rows: int) -> None:
        """Sets the maximum rows of an entry, or learns that fewer tokens are allowed; cuts larger entries in place."""
        smaller, self.max_rows = max_rows < self.max_rows or self._lengths is not None, max_rows
        if not smaller:
            return
        for bucket in list(self.buckets.values()):
            most = self.most(bucket.length)
            for entry in [e for e in bucket.entries if e.rows > most]:
                bucket.remove(entry)
                for piece in reversed(self._cut(entry, cut(entry, most))):
                    bucket.push_back(piece)
                    self.expiries.add(piece)
            self._touch(bucket)
        self.reruns = [piece for entry in self.reruns for piece in self._fitted(entry, self.most(entry.length))]

    def _fitted(self, entry: Entry, rows: int) -> list[Entry]:
        """A waiting entry that is in no bucket, or its pieces of at most `rows` rows, with their expiry recorded."""
        pieces = [entry] if entry.rows <= rows else self._cut(entry, cut(entry, rows))
        for piece in pieces:
            self.expiries.add(piece)
        return pieces

    def put_back(self, entries: list[Entry], exact: bool, rows: int) -> None:
        """Requeues running entries: as `exact` re-runs, or else in their old places. Cuts separate ones into pieces of
        at most `rows` rows."""
        move(entries, EntryState.WAITING)
        fitting: list[Entry] = []
        for e in entries:
            root = e.parent or e
            if root.id not in self.waiting:
                self.waiting[root.id] = root
                self.nbytes += root.nbytes
            if e.parent is not None:
                self._splits[e.id].waiting.append(e)
            self.rows += e.rows
            most = self.most(e.length)  # the ceiling may have sunk while it ran
            fitting += self._fitted(e, min(rows, most) if e.separate else most)
        if exact:
            most = self._most_reruns if self.reruns else 0
            # a second death first: once its guilty item is known, others with the same payload need not run
            self.reruns = [*fitting, *self.reruns] if fitting[0].deaths > 1 else [*self.reruns, *fitting]
            self._most_reruns = max(most, len(self.reruns))
        else:
            for e in reversed(fitting):
                bucket = self._bucket(e)
                if bucket.push_back(e):
                    self._new_head(bucket)

    # ---- next

    def head(self) -> Bucket | None:
        """The bucket whose head has the smallest virtual deadline."""
        heads = self._heads
        while heads:
            v, seq, name = heads[0]
            bucket = self.buckets.get(name)
            if bucket is not None and bucket.keys[0] == v and bucket.entries[0].seq == seq:
                return bucket
            heappop(heads)
        return None

    def _touch(self, bucket: Bucket) -> None:
        """Records a possibly changed head; removes an empty bucket."""
        if bucket.keys:
            self._new_head(bucket)
        else:
            del self.buckets[bucket.name]

    def _new_head(self, bucket: Bucket) -> None:
        heads = self._heads
        heappush(heads, (bucket.keys[0], bucket.entries[0].seq, bucket.name))
        # `head` removes stale entries, but is not called while there is one bucket
        if len(heads) > STALE_HEADS + 2 * len(self.buckets):
            heads[:] = [(b.keys[0], b.entries[0].seq, b.name) for b in self.buckets.values() if b.keys]
            heapify(heads)

    # ---- out, to a slot

    def take(self, bucket: Bucket, rows: int, until_s: float, fill: bool) -> list[Entry]:
        """Removes and returns entries of a bucket, or of several that it was made of, see `Bucket.take`; they run now.
        `fill`: if more than 1/MIN_FILL of the rows stay empty, cuts a divisible entry that is too large."""
        most = min(rows, self.most(bucket.length))
        entries = bucket.take(most, until_s)
        for e in entries if len(bucket.parts) > 1 else ():
            self.buckets[e.bucket].remove(e)
        left = most - sum([e.rows for e in entries]) if fill else 0
        if left * MIN_FILL > rows and (large := bucket.first(until_s)) is not None and large.divisible:
            home = self.buckets[large.bucket]
            home.remove(large)
            piece, rest = self._cut(large, [_piece(large, 0, left), _piece(large, left, large.rows - left)])
            entries.append(piece)
            home.push_back(rest)
            self.expiries.add(rest)
        for name in bucket.parts:
            self._touch(self.buckets[name])
        return self._run(entries)

    def take_rerun(self, rows: int) -> list[Entry]:
        """Removes and returns the next entries to run again, of at most `rows` rows: alone after a second death, else
        the square root of all, because restarts cost more than batches: n entries with a killer end three workers."""
        first = self.reruns[0]
        rows = min(rows, self.most(first.length))
        size = isqrt(self._most_reruns) if first.deaths == 1 else 1
        taken: list[Entry] = []
        for e in self.reruns[:size]:
            rows -= e.rows
            if taken and (e.deaths > 1 or e.bucket != first.bucket or rows < 0):
                break
            taken.append(e)
        del self.reruns[: len(taken)]
        return self._run(taken)

    def _run(self, entries: list[Entry]) -> list[Entry]:
        waiting, rows, nbytes = self.waiting, 0, 0
        for e in entries:
            assert e.state in _RUNNABLE
            e.state = _RUNNING
            rows += e.rows
            if e.parent is None:
                del waiting[e.id]
                nbytes += e.nbytes
            else:
                split = self._splits[e.id]
                split.waiting.remove(e)
                split.running += 1
                if not split.waiting:
                    self._left(split.root)
        self.rows -= rows
        self.nbytes -= nbytes
        return entries

    def answered(self, entries: list[Entry], failed: frozenset[int]) -> list[int]:
        """Ends entries that ran. Returns the ids of the split requests that ended with them."""
        ended = []
        for entry in entries:
            assert entry.state == _RUNNING, f"entry {entry!r} cannot become DONE"
            entry.state = _DONE
            if entry.parent is None:
                if entry.slot >= 0:
                    self._next(entry, answered=entry.id not in failed)
                continue
            split = self._splits[entry.id]
            split.running -= 1
            split.rows_left -= entry.rows
            if entry.id in failed and not split.over:
                self._purge(split, None)
            if not split.running and (split.over or not split.rows_left):
                if split.verdict is None:
                    ended.append(entry.id)
                self._close(split)
        return ended

    # ---- out, without a response

    def expire(self, now: float) -> None:
        """Ends requests that have waited past their deadline or timeout."""
        for e in self.expiries.due(now):
            if e.state == _WAITING:  # else purged a moment ago, with another piece of its request
                self.drop(e, Expire(e.id, "timeout" if e.expires_s < e.deadline_s else "expired"))

    def drop(self, entry: Entry, verdict: Event) -> None:
        """Ends the request of a waiting `entry` with an event."""
        if entry.parent is not None:
            split = self._splits[entry.id]
            self._purge(split, verdict)
            if not split.running:
                self._close(split)
        else:
            self._remove(entry)
            self._left(entry)
            self._emit(verdict)
            self._next(entry)

    def cancel(self, id: int) -> bool:
        """True: the request waited and is removed. False: a piece of it runs and ends later, or it does not wait."""
        entry = self.waiting.get(id)
        if entry is None:
            return False
        if entry.state == _WAITING:
            self._remove(entry)
            self._left(entry)
            self._next(entry)
            return True
        split = self._splits[id]
        self._purge(split, None)
        if split.running:
            return False
        self._close(split)
        return True

    def lose(self, entries: list[Entry], died: bool, retry: bool) -> tuple[list[Entry], list[int]]:
        """(the entries of an unanswered batch that run again, the ids of the split requests that ended).

        If the worker `died` while running them, an entry fails that was alone and in an earlier death; without `retry`
        all of them fail. If its rows are separate items, it counts as answered instead: the death is their response."""
        again: list[tuple[Entry, SplitRequest | None]] = []
        ended: list[int] = []
        alone = sum([e.rows if e.separate else 1 for e in entries]) == 1
        for e in entries:
            split = self._splits[e.id] if e.parent is not None else None
            fails = died and (not retry or e.slot >= 0 or (alone and e.deaths > 0))
            if fails and e.separate and not (split is not None and split.over):
                ended += self.answered([e], frozenset())
                continue
            if split is not None:
                split.running -= 1
            if not fails and (split is None or not split.over):
                e.deaths += died
                again.append((e, split))
                continue
            move([e], EntryState.DROPPED)
            fail = Fail(e.id, "worker_died")
            if split is None:
                self._emit(fail)
                continue
            if not split.over:
                self._purge(split, fail)
            if not split.running:
                split.verdict = split.verdict or fail  # after a failed piece or a cancel this batch reports nothing
                self._close(split)
        move([e for e, split in again if split is not None and split.over], EntryState.DROPPED)
        return [e for e, split in again if split is None or not split.over], ended

    def _remove(self, entry: Entry) -> None:
        """Removes a waiting entry from its bucket or the re-runs."""
        if entry.held:
            pass
        elif entry.deaths:
            self.reruns.remove(entry)
        else:
            bucket = self.buckets[entry.bucket]
            bucket.remove(entry)
            self._touch(bucket)
        self.rows -= entry.rows
        move([entry], EntryState.DROPPED)

    def _left(self, request: Entry) -> None:
        """Records that no piece of a request waits."""
        if self.waiting.pop(request.id, None) is not None:
            self.nbytes -= request.nbytes

    def _purge(self, split: SplitRequest, verdict: Event | None) -> None:
        """Removes all waiting pieces. The request closes as soon as no piece of it runs."""
        for piece in split.waiting:
            self._remove(piece)
        split.waiting = []
        self._left(split.root)
        split.over, split.verdict = True, verdict

    def _close(self, split: SplitRequest) -> None:
        del self._splits[split.root.id]
        move([split.root], EntryState.DROPPED if split.over else EntryState.DONE)
        if split.verdict is not None:
            self._emit(split.verdict)
        self._next(split.root, answered=not split.over)

    def _next(self, ended: Entry, answered: bool = False) -> None:
        """Lets the next request of the sequence wait in a bucket."""
        if self._sequences is not None:
            head, lost = self._sequences.ended(ended, answered)
            if head is not None:
                self._put(head)
            self.lose_sequences(lost)

    def place_sequences(self, now: float) -> None:
        """Lets the first requests of sequences that waited for a place wait in buckets."""
        for head in [] if self._sequences is None else self._sequences.placed(now):
            self._put(head)

    def streams(self, entry: Entry) -> None:
        """Lets the next request of the sequence wait in a bucket while the response to this one is streamed."""
        head = None if self._sequences is None else self._sequences.streams(entry)
        if head is not None:
            self._put(head)

    def lose_sequences(self, entries: list[Entry]) -> None:
        """Ends the requests among `entries` that still wait: their sequences are lost."""
        for e in entries:
            if e.state == _WAITING:
                self.drop(e, Fail(e.id, "sequence_lost"))

    def _emit(self, verdict: Event) -> None:
        self.events.append(verdict)
