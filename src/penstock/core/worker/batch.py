"""One batch in a model: which units are alive, their outcomes, and which parts were sent.

One bad item fails alone. A result may be an exception; a call that raises, returns a wrong number of results or runs
out of memory is repeated in halves until the guilty item is alone. A repeated stream continues where its caller is. The
scheduler isolates items too, but only after a death: then no worker is left to do it here.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct, field

from penstock.config.schema import BatchingConfig
from penstock.core.codecs import ModelCodecs
from penstock.core.wire.messages import Unsent
from penstock.core.wire.objects import dumps
from penstock.core.worker.predict import Unit, aligned, asked_of
from penstock.core.worker.python_model import PythonModel
from penstock.errors import (
    ENDS,
    HALF_PAIR,
    BadOutput,
    Cancelled,
    ItemFailed,
    OutOfMemory,
    PenstockError,
    SequenceLost,
    WrongRowCount,
    out_of_memory,
)
from penstock.types import BatchPart, Headed, Item, ItemResult, Parts

Emit = Callable[[BatchPart], None]

LOG_AGAIN_S = 60.0
MAX_LOGGED = 100

MAX_MARKS = 10_000  # a call with longer streams is not repeated
_NOTHING = object()  # no outcome yet
STREAMED = object()  # the parts were sent
_DIFFERS = (
    "another item of the batch failed in the middle of the stream, and when the model ran again its parts differed: set"
    " idempotent = false for a model whose results are random"
)


class LogLimiter:
    """Admits each distinct error at most once a minute."""

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}

    def admits(self, error: str) -> bool:
        now = time.monotonic()
        if now - self._logged_s.get(error, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return False
        if len(self._logged_s) >= MAX_LOGGED:
            self._logged_s.clear()
        self._logged_s[error] = now
        return True


class Runner(Protocol):
    """What a batch needs of the loaded model; see `loop.BatchRunner`."""

    model: PythonModel
    batching: BatchingConfig
    codecs: ModelCodecs

    def call(self, values: list[Any], explain: bool = ...) -> Any: ...

    def decode(self, items: list[Item], early: bool = ...) -> "Decoded": ...

    def preprocessed(self, values: list[Any], items: list[Item]) -> list[Any]: ...

    def error_of(self, error: BaseException, doing: str = ...) -> PenstockError: ...


class Collated(Struct):
    """What `predict` receives for these units: a batch of `size` items with padding, as `collate` made it."""

    units: list[int]
    batch: Any
    size: int


class Decoded(Struct):
    """A decoded batch. A *unit* is what `predict` sees as one item: an Item, or one element of a `many` or `Many`."""

    items: list[Item]
    values: list[Any] = field(default_factory=list)  # of each unit
    owners: list[int] = field(default_factory=list)  # the item of each unit
    contexts: list[Any] = field(default_factory=list)  # of each item, for its codec
    errors: dict[int, PenstockError] = field(default_factory=dict)  # items that cannot be decoded
    many: set[int] = field(default_factory=set)  # items whose codec decoded `Many`
    explained: set[int] = field(default_factory=set)  # items for `explain`
    checked: bool = False  # `preprocess` has nothing to do
    preprocessed: bool = False  # in the thread that received the batch
    collated: Collated | None = None  # in that thread, of the units that live
    plain: bool = False  # objects, or lists of them, for a model that only predicts
    staged: Any = None  # the batch on its way to the device, of a model with phases
    seconds: float = 0.0  # time that decoding took
    hooks_s: tuple[float, float] | None = None  # of the model's preprocess and postprocess

    def took(self, preprocess_s: float, postprocess_s: float) -> None:
        """Adds seconds of the model's own functions."""
        before = self.hooks_s or (0.0, 0.0)
        self.hooks_s = before[0] + preprocess_s, before[1] + postprocess_s


class BatchRun:
    """The state of one batch while it runs."""

    def __init__(self, runner: Runner, batch_id: int, decoded: Decoded, emit: Emit) -> None:
        self.runner = runner
        self.batch_id = batch_id
        self.d = decoded
        self.emit = emit
        # per unit: a result, or a PenstockError
        self.outcomes: list[Any] = [v.error if type(v) is Unsent else _NOTHING for v in decoded.values]
        self.live = [u for u, outcome in enumerate(self.outcomes) if outcome is _NOTHING]
        self.failed_rows: int | None = None  # fewest rows that ran out of memory, or came back as another number
        self.miscounted = False
        self.ran_rows = 0  # most rows that ran
        self._repeats = len(self.live) > 1 and runner.batching.idempotent
        self._marks: dict[int, list[int]] = {}  # of the parts that the caller of a unit has
        self._place: dict[int, int] = {}  # of the unit's next part, in the current call
        self._unmarked: set[int] = set()  # units that have parts without a mark
        self._gathered: dict[int, Parts] = {}  # parts of units that are answered as a whole
        self._begun: set[int] = set()  # items with a part in the current call

    def find_states(self) -> None:
        """Drops the states of ended sequences; a unit without the state that it needs fails."""
        states = self.runner.model.states
        if states is None:
            return
        for item in self.d.items:
            states.drop(item.ended)
        for u in self.live:
            try:
                states.check(self.d.items[self.d.owners[u]].sequence)
            except SequenceLost as e:
                self.outcomes[u] = e
        self.live = [u for u in self.live if self.outcomes[u] is _NOTHING]

    def preprocess(self) -> None:
        """Replaces values by the results of `preprocess`; a unit on which it raises fails."""
        if self.runner.model.preprocess is not None and not (self.d.checked or self.d.preprocessed):
            d, owners = self.d, self.d.owners
            items = [d.items[owners[u]] for u in self.live]
            began = time.perf_counter()
            self.replace(self.runner.preprocessed([d.values[u] for u in self.live], items))
            d.took(time.perf_counter() - began, 0.0)

    def replace(self, preprocessed: list[Any]) -> None:
        """Replaces the values of the units that live; see `preprocess`."""
        for u, value in zip(self.live, preprocessed, strict=True):
            if type(value) is Unsent:
                self.outcomes[u] = value.error
            else:
                self.d.values[u] = value
        self.live = [u for u in self.live if self.outcomes[u] is _NOTHING]

    def attempt(self, units: list[int], first: Callable[[], Any] | None = None) -> None:
        """Predicts these units; after an error in halves, if the configuration allows it. `first` gives what a call
        for them gave, or raises."""
        error: BaseException
        partial = PartialResults(self, units)
        self._place.update(dict.fromkeys(units, 0))
        self._begun.clear()
        for u in units:
            self._gathered.pop(u, None)
        try:
            if self.runner.model.send_parts_to is not None:
                self.runner.model.send_parts_to(partial)
            values = self.arguments(units)
            found = first() if first else self.runner.call(values, self.d.owners[units[0]] in self.d.explained)
            if hasattr(found, "__next__"):
                self._stream(units, found)
                self._keep(values)
                return
            results = aligned(found, len(units))
            self._keep(values)
        except ENDS:
            raise
        except BaseException as e:
            error = e
        else:
            self.ran_rows = max(self.ran_rows, self._size(units))
            for u, result in zip(units, results, strict=True):
                if u in partial.alive:
                    self.outcomes[u] = self.whole(u, result)
            return
        self._failed(units, error)  # outside of `except`: the next error must not refer to this one

    def _failed(self, units: list[int], error: BaseException) -> None:
        """Repeats a call in halves, or fails the units that have no outcome yet."""
        memory, wrong = out_of_memory(error), isinstance(error, WrongRowCount)
        self.miscounted |= wrong
        if memory or wrong:
            rows = self._size(units)
            self.failed_rows = rows if self.failed_rows is None else min(rows, self.failed_rows)
        batching = self.runner.batching
        split = len(units) > 1 and batching.idempotent and (memory or batching.retry_split)
        units = [u for u in units if self.outcomes[u] is _NOTHING]
        if split and self._unmarked.isdisjoint(units) and not isinstance(error, Cancelled):
            traceback.clear_frames(error.__traceback__)  # they hold the memory of the failed call
            self._renew(units)
            units = [u for u in units if self.outcomes[u] is _NOTHING]
            step = (len(units) + 1) // 2
            if memory and (ladder := self.runner.model.ladder) is not None:  # a half may be padded to the same size
                step = min(step, ladder.down(self._padded_rows(units) - 1) or step)
            for start in range(0, len(units), step):
                self.attempt(units[start : start + step])
        elif memory and len(units) > 1:
            text = f"the device ran out of memory on a batch of {len(units)} items"
            self._fail(units, OutOfMemory(text, detail=self.runner.error_of(error).detail))
        else:
            self._fail(units, self.runner.error_of(error))

    def _renew(self, units: list[int]) -> None:
        """Decodes these units again: the model may have changed their values in the call that failed."""
        d, runner = self.d, self.runner
        if runner.model.phases is not None:  # it received copies
            return
        places = dict.fromkeys(d.owners[u] for u in units)
        again = BatchRun(runner, self.batch_id, runner.decode([d.items[i] for i in places], early=False), self.emit)
        if again.d.errors:  # without memory, for instance
            self._fail(units, next(iter(again.d.errors.values())))
            return
        again.preprocess()
        both = zip(again.d.values, again.outcomes, strict=True)
        found = dict(zip([u for u, i in enumerate(d.owners) if i in places], both, strict=True))
        for u in units:
            d.values[u], self.outcomes[u] = found[u]
        for i, context in zip(places, again.d.contexts, strict=False):  # objects have none
            d.contexts[i] = context

    def _stream(self, units: list[int], steps: Iterator[Any]) -> None:
        """Sends every step as a part. Raises the model's error."""
        alive = set(units)
        try:
            for step in steps:
                self.emit_step(units, aligned(step, len(units), "yielded"), alive)
        finally:
            close = getattr(steps, "close", None)
            if close is not None:
                close()
        self.ran_rows = max(self.ran_rows, self._size(units))
        for u in alive:
            complete = self._place[u] >= len(self._marks.get(u, ()))
            self.outcomes[u] = self.whole(u, STREAMED) if complete else ItemFailed(_DIFFERS)

    def _unsent(self, u: int, body: Any) -> Any:
        """The next part of a unit; None if the caller has it from an earlier call, an error if that one differed."""
        if not self._repeats:
            return body
        marks, place = self._marks.setdefault(u, []), self._place[u]
        self._place[u] = place + 1
        try:
            mark = hash(body if type(body) is bytes else dumps(body, lambda _: True))
        except Exception:
            self._unmarked.add(u)
            return body
        if place < len(marks):
            return None if marks[place] == mark else ItemFailed(_DIFFERS)
        if place < MAX_MARKS:
            marks.append(mark)
        else:
            self._unmarked.add(u)
        return body

    def emit_step(self, units: list[int], results: list[Any], alive: set[int]) -> None:
        """Sends a part of the results of these units; failed ones leave `alive`."""
        parts: list[ItemResult | None] = [None] * len(self.d.items)
        position = _positions(self.d.owners)
        gathers = False
        for u, value in zip(units, results, strict=True):
            if value is None or u not in alive:
                continue
            if not isinstance(value, Exception) and self.gathers(u, value):
                gathers = True
                continue
            result = value if isinstance(value, Exception) else self._postprocessed(value)
            i = self.d.owners[u]
            item = self.d.items[i]
            encoded = None
            if not item.many and not isinstance(result, Exception):
                encoded = self.encoded(i, result, part=True)
                result = encoded.error or encoded.body
            if not isinstance(result, Exception):
                result = self._unsent(u, result)
            if isinstance(result, Exception):
                self.outcomes[u] = self.runner.error_of(result, "the model returned")
                alive.discard(u)
            elif encoded is not None and result is not None:
                encoded.final = False
                parts[i] = encoded
            elif result is not None:
                part = parts[i] = parts[i] or ItemResult([None] * self.d.owners.count(i), final=False)
                part.body[position[u]] = result
        if any(parts) or gathers:  # a part without results notices that the callers have left
            self.emit(BatchPart(self.batch_id, parts, final=False))

    def final(self) -> BatchPart:
        """The response of every item."""
        results: list[ItemResult | None]
        if self.d.checked:
            results = [self.answer(i, [self.finished(i, outcome)]) for i, outcome in enumerate(self.outcomes)]
        else:
            outcomes: list[list[Any]] = [[] for _ in self.d.items]
            for u, outcome in enumerate(self.outcomes):
                outcomes[self.d.owners[u]].append(self.finished(u, outcome))
            results = [self.answer(i, found) for i, found in enumerate(outcomes)]
        oom = None if self.failed_rows is None else (self.failed_rows, self.ran_rows)
        if oom and any(isinstance(outcome, WrongRowCount) for outcome in self.outcomes):
            oom = None  # a wrong count remains in the smallest call: an item is at fault, and not the size
        miscounted = self.miscounted and oom is not None
        return BatchPart(self.batch_id, results, oom=oom, miscounted=miscounted, hooks_s=self.d.hooks_s)

    def answer(self, i: int, outcomes: list[Any]) -> ItemResult:
        """The response of item `i` from the finished outcomes of its units."""
        item = self.d.items[i]
        error = self.d.errors.get(i)
        if error is not None:
            return ItemResult(error=error)
        if item.many:
            return ItemResult([bare(outcome) for outcome in outcomes])
        if i in self.d.many:
            failed = next((outcome for outcome in outcomes if isinstance(outcome, PenstockError)), None)
            return (
                self.encoded(i, [bare(outcome) for outcome in outcomes]) if failed is None else ItemResult(error=failed)
            )
        (outcome,) = outcomes
        if isinstance(outcome, PenstockError):
            return ItemResult(error=outcome)
        if outcome is STREAMED and item.codec == "object":
            return ItemResult(None)
        return self.encoded(i, outcome)

    def part(self, u: int, value: Any) -> ItemResult:
        """One streamed part of a unit of a model that runs batches concurrently; an error if it cannot be sent."""
        i, result = self.d.owners[u], self._postprocessed(value)
        item = self.d.items[i]
        if item.many:
            body: list[Any] = [None] * self.d.owners.count(i)
            body[u - self.d.owners.index(i)] = result
            return ItemResult(body, final=False)
        part = ItemResult(error=result) if isinstance(result, PenstockError) else self.encoded(i, result, part=True)
        part.final = part.error is not None
        return part

    def gathers(self, u: int, part: Any) -> bool:
        """Keeps a streamed part of a unit that is answered as a whole; False for other units."""
        if self.d.owners[u] not in self.d.many:
            return False
        self._gathered.setdefault(u, Parts()).append(part)
        return True

    def whole(self, u: int, result: Any) -> Any:
        """The outcome of a unit from its result, or STREAMED, and the parts that were kept before."""
        parts = self._gathered.pop(u, None)
        if result is STREAMED and self.d.owners[u] in self.d.many:
            return parts or Parts()
        return result if parts is None or isinstance(result, Exception) else Parts([*parts, result])

    def finished(self, u: int, outcome: Any) -> Any:
        """The outcome after `postprocess`; exceptions as the errors that callers receive."""
        if type(outcome) is Parts:
            outcome = Parts(map(self._postprocessed, outcome))
            return next((part for part in outcome if isinstance(part, PenstockError)), outcome)
        if outcome is STREAMED:
            return outcome
        if not isinstance(outcome, Exception) and self.d.owners[u] not in self.d.explained:
            outcome = self._postprocessed(outcome)
        if isinstance(outcome, Exception):
            return self.runner.error_of(outcome, "the model returned")
        return outcome

    def _postprocessed(self, value: Any) -> Any:
        hook = self.runner.model.postprocess
        if hook is None:
            return value
        began = time.perf_counter()
        try:
            return hook(value)
        except ENDS:
            raise
        except BaseException as e:
            return self.runner.error_of(e, "postprocess raised")
        finally:
            self.d.took(0.0, time.perf_counter() - began)

    def encoded(self, i: int, value: Any, part: bool = False) -> ItemResult:
        """The response of item `i`, one streamed part of it, or its end; an error if the value cannot be serialised."""
        item = self.d.items[i]
        if type(value) is Headed:
            result = self.encoded(i, value.value, part)
            if result.error is None:
                result.headers = [*(result.headers or ()), *value.headers]
            return result
        if item.codec == "object":
            return ItemResult(value)
        try:
            codec, context = self.runner.codecs.get(item.codec), self.d.contexts[i]
            if part:
                first = i not in self._begun
                self._begun.add(i)
                return codec.encode_part(value, item, context, first)
            return codec.encode_end(item, context) if value is STREAMED else codec.encode(value, item, context)
        except PenstockError as e:
            return ItemResult(error=self.runner.error_of(e))
        except Exception as e:
            half = isinstance(e, UnicodeEncodeError)
            why = HALF_PAIR if half else f"the result is a {type(value).__name__} that cannot be sent"
            return ItemResult(error=BadOutput(why, detail=self.runner.error_of(e).detail))

    def _fail(self, units: list[int], error: PenstockError) -> None:
        for u in units:
            self.outcomes[u] = error

    def arguments(self, units: list[int]) -> list[Any]:
        """The values of these units, with what the model asks of their requests."""
        values, model, items = [self.d.values[u] for u in units], self.runner.model, self.d.items
        if not (model.asked or model.states is not None) or self.d.owners[units[0]] in self.d.explained:
            return values
        asked = [items[self.d.owners[u]] for u in units]
        if model.asked:
            values = [Unit(value, asked_of(item, model.asked)) for value, item in zip(values, asked, strict=True)]
        return values if model.states is None else model.states.units(values, [item.sequence for item in asked])

    def _keep(self, values: list[Any]) -> None:
        if self.runner.model.states is not None:
            self.runner.model.states.keep(values)

    def _size(self, units: list[int]) -> int:
        """Rows of a call for these units, with padding, or tokens: what the memory of a device must hold."""
        rows = self._padded_rows(units)
        if self.runner.batching.bucket != "length":
            return rows
        return rows * max([1, *(self.d.items[self.d.owners[u]].length for u in units)])

    def _padded_rows(self, units: list[int]) -> int:
        ladder = self.runner.model.ladder
        return self._rows(units) if ladder is None else ladder.up(self._rows(units))

    def _rows(self, units: list[int]) -> int:
        items, owners, many = self.d.items, self.d.owners, self.d.many
        return sum(1 if items[owners[u]].many or owners[u] in many else items[owners[u]].rows for u in units)


class PartialResults:
    """Sends parts of the results of one call. `alive` are the units without a final result."""

    def __init__(self, run: BatchRun, units: list[int]) -> None:
        self._run = run
        self._units = units
        self._abandoned = False
        self.alive = set(units)

    def __call__(self, results: list[Any]) -> None:
        """Sends the results; None where a unit has none yet."""
        if self._abandoned:
            return
        try:
            self._run.emit_step(self._units, results, self.alive)
        except Cancelled:
            self._abandoned = True  # the call goes on: it may not be interruptible


def bare(value: Any) -> Any:
    """The value for callers that take no headers; None if its parts were sent."""
    return value.value if type(value) is Headed else None if value is STREAMED else value


def _positions(owners: list[int]) -> list[int]:
    """The index of each unit within its item."""
    seen: dict[int, int] = {}
    places = []
    for i in owners:
        places.append(seen.get(i, 0))
        seen[i] = places[-1] + 1
    return places
