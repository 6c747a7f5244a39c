"""Journey: one item on its way through a graph, from `submit` to its one outcome. Everything runs on the event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.core.engine.batcher import Call
from penstock.errors import PenstockError, describe
from penstock.pipeline.node import Stamp, Visit
from penstock.pipeline.ops.base import Fields
from penstock.pipeline.outcome import Hop, Outcome
from penstock.pipeline.routes import Route
from penstock.types import ItemResult

if TYPE_CHECKING:
    from penstock.pipeline.host import Host

log = logging.getLogger("penstock.pipeline")

Done = Callable[[Outcome], None]
Fill = Callable[[tuple[int, ...]], tuple[int, ...]]

MOST_PARTS = 64  # of a list that are looked at on the loop: models have fewer inputs, and JSON may have millions


class Journey:
    """One accepted item. `cancel` is what its caller may do with it.

    `waits`: how many of what a join needs have not ended yet. `kept`: the fields of nodes that joins ahead take some
    of. `outputs`: the fields that reached an output. The first two are of graphs with branches, and empty in others.
    """

    __slots__ = (
        "deadline_s",
        "done",
        "hops",
        "kept",
        "on_end",
        "outputs",
        "priority",
        "route",
        "visits",
        "waits",
    )

    def __init__(
        self,
        route: Route,
        done: Done,
        on_end: Callable[[Journey], None],
        deadline_s: float | None,
        priority: int,
        trace: bool,
    ) -> None:
        self.route = route
        self.done: Done | None = done
        self.on_end = on_end
        self.deadline_s = deadline_s
        self.priority = priority
        self.hops: list[Hop] | None = [] if trace else None
        self.visits: set[Stop] = set()
        self.waits: dict[str, int] = dict(route.waits) if route.waits else {}
        self.kept: dict[str, Fields] = {}
        self.outputs: dict[str, Fields] = {}

    def end(self, fields: Fields, error: PenstockError | None, node: str) -> None:
        """Hands over the outcome, once; what of the item is still under way elsewhere is taken back."""
        done, self.done = self.done, None
        if done is None:
            return
        self._leave()
        try:
            done(Outcome(fields, error, node, tuple(self.hops) if self.hops else ()))
        except Exception:
            log.exception("done_failed node=%s", node)

    def cancel(self) -> None:
        """The caller is gone: what waits is not run, what runs is not answered, and `done` is not called."""
        if self.done is not None:
            self.done = None
            self._leave()

    def _leave(self) -> None:
        visits, self.visits = self.visits, set()
        for visit in visits:
            call, visit.call = visit.call, None
            if call is not None:
                call.cancel()
        self.on_end(self)


class Stop(Visit):
    """A Visit as the loop knows it: whose it is, where, and the call that runs it. It is the sink of its answer."""

    __slots__ = ("call", "host", "journey")

    def __init__(self, host: Host, journey: Journey, fields: Fields, swap: bool) -> None:
        self.fields = fields
        self.swap = swap
        self.place = -1
        self.host = host
        self.journey = journey
        self.call: Call | None = None

    def __call__(self, result: ItemResult) -> None:
        """Takes the answer of the node; whatever that leads to, the item ends or goes on."""
        self.journey.visits.discard(self)
        try:
            self._answered(result)
        except Exception as e:  # a value that cannot be looked at, say
            log.exception("hand_over_failed node=%s", self.host.name)
            error = self.host.told(PenstockError(f"internal error: {describe(e)}"))
            self.journey.end(dict(self.fields), error, self.host.name)

    def _answered(self, result: ItemResult) -> None:
        call, self.call = self.call, None  # they hold each other
        journey, host = self.journey, self.host
        if result.error is not None:
            host.failed(self, result.error)
            return
        fields: Fields
        stamp: Stamp
        fields, stamp, *further = result.body
        if journey.hops is not None and call is not None:
            self._hop(journey.hops, host, stamp, call.entry.arrival_s)
        if further:
            self._ran_on(journey, host, fields, stamp, further)
        else:
            host.passed(journey, fields)

    def _ran_on(self, journey: Journey, host: Host, fields: Fields, stamp: Stamp, further: list[Any]) -> None:
        """The item was also at nodes that run in the call of the first: fields and stamp of each, or the last error."""
        rest = iter(further)
        for found in rest:
            assert host.then is not None
            host, given = host.then, fields
            if isinstance(found, PenstockError):
                host.meter.inlined(None)
                self.fields, self.swap = given, True
                host.failed(self, found)
                return
            end_s, fields, stamp = stamp.start_s + stamp.run_s, found, next(rest)
            host.meter.inlined(stamp)
            if journey.hops is not None:
                self._hop(journey.hops, host, stamp, end_s)
        host.passed(journey, fields)

    @staticmethod
    def _hop(hops: list[Hop], host: Host, stamp: Stamp, arrival_s: float) -> None:
        wait_s = max(0.0, stamp.start_s - arrival_s)
        hops.append(Hop(host.name, stamp.batch_id, stamp.size, wait_s, stamp.run_s))


def budget_of(journey: Journey, limit_s: float | None) -> float | None:
    """Seconds that an item has at a node: until its deadline, and no more than the node gives."""
    if journey.deadline_s is None:
        return limit_s
    left = journey.deadline_s - time.monotonic()
    return left if limit_s is None else min(left, limit_s)


def shape_of(value: Any, fill: Fill | None = None) -> str:
    """What an array must have in common with others of its batch, axis 0 left out, once it is filled up, and so each of
    a list of them; the text of a plain value."""
    if isinstance(value, (list, tuple)):
        return " ".join(_shape_of(each, fill) for each in value[:MOST_PARTS])
    return _shape_of(value, fill)


def _shape_of(value: Any, fill: Fill | None) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        dtype = getattr(value.dtype, "str", value.dtype)  # NumPy makes its name in Python, in 7 us
        return f"{dtype}{(tuple(shape) if fill is None else fill(tuple(shape)))[1:]}"
    return str(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__


def nbytes_of(value: Any) -> int:
    """Bytes that a field's value holds, as far as it tells: an array, bytes, a list of those."""
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes_of, value[:MOST_PARTS])) * len(value) // max(1, min(len(value), MOST_PARTS))
    return _nbytes_of(value)


def _nbytes_of(value: Any) -> int:
    found = getattr(value, "nbytes", None)
    if isinstance(found, int):
        return found
    return len(value) if isinstance(value, (bytes, bytearray, str)) else 0
