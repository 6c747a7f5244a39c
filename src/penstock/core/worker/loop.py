"""Runs batches on one model: decode, preprocess, predict, postprocess, encode. The same for every transport."""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock import metrics
from penstock.config.schema import BatchingConfig
from penstock.core.codecs import ModelCodecs
from penstock.core.columns import Stack, TensorRequest
from penstock.core.wire.messages import Pickled, Unsent
from penstock.core.wire.objects import OwnException
from penstock.core.worker import logs
from penstock.core.worker.batch import BatchRun, Collated, Decoded, Emit, LogLimiter
from penstock.core.worker.phases import Launched, launch
from penstock.core.worker.predict import aligned, copied
from penstock.core.worker.python_model import PythonModel
from penstock.errors import (
    ENDS,
    BadOutput,
    BadRequest,
    DeviceLost,
    ItemFailed,
    NotSupported,
    OutOfMemory,
    PenstockError,
    describe,
    out_of_memory,
)
from penstock.types import BatchPart, Headed, Item, ItemResult, Many, ModelMetadata

if TYPE_CHECKING:
    import asyncio

    from penstock.core.batching.ladder import Ladder

log = logging.getLogger("penstock.worker")

_NO_UNIT = (PenstockError, Pickled, Unsent, Many)  # payloads that stand for another value, for several, or for none
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")  # all of their fields are text


class BatchRunner:
    """Drives one loaded model. `decode` is pure and may run ahead in another thread; `run` needs the worker's own."""

    def __init__(self, model: PythonModel, metadata: ModelMetadata, batching: BatchingConfig) -> None:
        self.model = model
        self._item_type = model.types.item_type()
        self._extras = {"item_type": self._item_type, "clock": lambda: time.time()}
        self.describe(metadata, batching)
        # created by the first coroutine; an async model uses it in its warm-up too
        self._loop: asyncio.AbstractEventLoop | None = getattr(model.loop, "loop", None)
        self._log_limiter = LogLimiter()

    def describe(self, metadata: ModelMetadata, batching: BatchingConfig) -> None:
        """Sets the metadata and the options of the model; codecs are made from them."""
        self.metadata, self.batching = metadata, batching
        self.codecs = ModelCodecs(metadata, **self._extras)
        model = self.model
        self._empty = None if model.phases is None else model.phases.empty
        hooks = (model.collate, model.preprocess, model.postprocess, model.send_parts_to, model.submit, model.states)
        beside = any(hook is not None for hook in hooks) or model.asked or model.overlaps  # states may be none yet
        self._only_predicts = not beside and batching.rows != "none"

    def decode(self, items: list[Item], early: bool = True) -> Decoded:
        """The values of the items; an item that cannot be decoded becomes an error. `early`: also does what may go
        before `run`."""
        started = time.perf_counter()
        decoded = Decoded(items)
        if self._only_predicts and (values := _objects(items)) is not None:
            decoded.plain = True
            decoded.values = values
            decoded.seconds = time.perf_counter() - started
            return decoded
        values, contexts = self._planned(items)
        if None not in values:
            decoded.values, decoded.contexts, decoded.owners = values, contexts, list(range(len(items)))
            decoded.checked = True
            if early and self._empty is not None:
                decoded.staged = self._staged(values)
        else:
            for i, item in enumerate(items):
                units, context = (
                    ([values[i]], contexts[i]) if values[i] is not None else self._decoded(decoded, i, item)
                )
                decoded.contexts.append(context)
                decoded.values += units
                decoded.owners += [i] * len(units)
        if early and self.model.helpers is not None and self.model.submit is None:
            self._preprocess_early(decoded)
        if early and self.model.collate is not None and self.batching.rows != "none":
            self._collate_early(decoded)
        decoded.seconds = time.perf_counter() - started
        return decoded

    def _preprocess_early(self, decoded: Decoded) -> None:
        items = [decoded.items[i] for i in decoded.owners]
        began = time.perf_counter()
        decoded.values, decoded.preprocessed = self.preprocessed(decoded.values, items), True
        decoded.took(time.perf_counter() - began, 0.0)

    def _collate_early(self, decoded: Decoded) -> None:
        """Preprocesses and collates the batch. `run` repeats a call that raises, and finds the items that make it."""
        try:
            if not decoded.preprocessed:
                self._preprocess_early(decoded)
            values, owners, explained = decoded.values, decoded.owners, decoded.explained
            units = [u for u, v in enumerate(values) if type(v) is not Unsent and owners[u] not in explained]
            ladder, rows = self.model.item_ladder, len(units)
            chunks = [(0, rows, rows)] if ladder is None else list(ladder.chunks(rows))
            if units and len(chunks) == 1:
                size = chunks[0][2]
                decoded.collated = Collated(units, self._batch([values[u] for u in units], size), size)
        except BaseException as e:
            traceback.clear_frames(e.__traceback__)  # they hold the memory of the failed call

    def preprocessed(self, values: list[Any], items: list[Item]) -> list[Any]:
        """The results of `preprocess` for the values of these items; Unsent in place of a value on which it raises, and
        of one that was Unsent. Raises exceptions in `ENDS`."""
        model, pairs = self.model, zip(values, items, strict=True)
        if model.preprocess is None:
            return list(values)
        if model.helpers is None:
            return [value if type(value) is Unsent else self._preprocessed(value, item) for value, item in pairs]
        sent = [model.for_helper(value, item) for value, item in pairs if type(value) is not Unsent]
        found = iter(model.helpers(sent))
        return [value if type(value) is Unsent else next(found) for value in values]

    def _preprocessed(self, value: Any, item: Item) -> Any:
        try:
            return self.model.preprocessed(value, item)
        except ENDS:
            raise
        except BaseException as e:
            return Unsent(self.error_of(e, "preprocess raised"))

    def _staged(self, values: list[Any]) -> Any:
        """The batch on its way to the device; None without one, or after an error, which `run` meets again."""
        phases = self.model.phases
        if phases is not None and values:
            with suppress(Exception, DeviceLost):
                return phases.stage(values)
        return None

    def _decoded(self, decoded: Decoded, i: int, item: Item) -> tuple[list[Any], Any]:
        """The units of an item that is decoded alone, and its context; no units after an error."""
        context = None
        value = item.payload
        try:
            if isinstance(value, PenstockError):
                raise value  # it could not be sent to this worker
            if item.codec != "object":
                codec = self.codecs.get(item.codec)
                if getattr(codec, "explains", False):  # a codec need not inherit from Codec
                    self._check_explain()
                    decoded.explained.add(i)
                value, context = codec.decode(item)
                if self.model.in_columns and (learn := getattr(codec, "learn", None)) is not None:
                    learn(item, value, context, self.model.preprocess)
            elif type(value) is Pickled:
                value = value.load()
            units = _units(item, value)
            if self._item_type is not None and item.codec != "object":
                units = self._converted(item, units)
            if type(value) is Many:
                decoded.many.add(i)
        except Exception as e:
            decoded.errors[i] = _decode_error(e)
            return [], context
        return units, context

    def _planned(self, items: list[Item]) -> tuple[list[Any], list[Any]]:
        """The value and the context of each item whose plan is known and whose values are regular; None for others."""
        values: list[Any] = [None] * len(items)
        contexts: list[Any] = [None] * len(items)
        if not self.model.in_columns:
            return values, contexts
        stacks: dict[Stack, list[int]] = {}
        for codec, places in _places(items).items():
            recognize = None if codec == "object" else getattr(self.codecs.get(codec), "recognize", None)
            if recognize is None:
                continue
            for i, found in zip(places, recognize([items[i] for i in places]), strict=True):
                if found is not None:
                    contexts[i] = found
                    stacks.setdefault(found.plan.stack, []).append(i)
        for stack, places in stacks.items():
            requests = [contexts[i] for i in places]
            rows = sum([request.rows for request in requests])
            try:
                block = stack.block(requests, rows, self._empty)
            except Exception:
                continue  # decoded one by one, which finds the irregular one
            start = 0
            for i, request in zip(places, requests, strict=True):
                plan = request.plan
                values[i] = TensorRequest(block, start, request.rows, plan.single, plan.named, True)
                start += request.rows
        return values, contexts

    def _converted(self, item: Item, units: list[Any]) -> list[Any]:
        """The units as the model's annotated type. Raises BadRequest."""
        assert self._item_type is not None
        lax = item.content_type.startswith(FORMS)
        return [self._item_type.convert(unit, lax) for unit in units]

    def _check_explain(self) -> None:
        """Raises NotSupported."""
        model = self.model
        if model.explain is None:
            raise NotSupported(f"model '{self.metadata.name}' has no method explain(items)")
        if model.submit is not None or model.states is not None:
            raise NotSupported(
                f"model '{self.metadata.name}' runs requests concurrently or in sequences: it cannot explain"
            )

    def run(self, batch_id: int, decoded: Decoded, emit: Emit) -> None:
        """Calls `emit` with any number of parts and one final one. Raises only exceptions in `ENDS`."""
        if self.model.phases is not None:
            emit(self.begin(batch_id, decoded, emit)())
            return
        started = ready = time.perf_counter()
        logs.running.items = decoded.items
        if decoded.checked:
            part, predicted = self._in_columns(batch_id, decoded, emit, self.model.predict)
        elif decoded.plain:
            part, predicted = self._plainly(batch_id, decoded, emit)
        else:
            run = self._prepared(batch_id, decoded, emit)
            ready = time.perf_counter()
            self._predict(run)
            predicted = time.perf_counter()
            part = run.final()
        logs.running.items = ()
        ended = time.perf_counter()
        part.run_s = ended - started
        _record_times(part, decoded, (ready - started, predicted - ready, ended - predicted))
        part.metrics = metrics.drain()
        emit(part)

    def _in_columns(
        self, batch_id: int, decoded: Decoded, emit: Emit, predict: Callable[[list[Any]], Any]
    ) -> tuple[BatchPart, float]:
        """(the final part of a batch of which every plan is known, the time after `predict`). A BatchRun takes over
        where something fails."""
        found, error = self._called(predict, decoded.values)
        predicted = time.perf_counter()
        if error is None:
            items = decoded.items
            try:
                results: list[ItemResult | None] = [None] * len(found)
                for name, places in _places(items).items():
                    codec: Any = self.codecs.get(name)
                    batch = [[each[i] for i in places] for each in (found, items, decoded.contexts)]
                    for i, result in zip(places, codec.encode_all(*batch), strict=True):
                        results[i] = result
                if len(found) == len(items):
                    return BatchPart(batch_id, results), predicted
            except Exception:
                pass  # encoded one by one, which finds the irregular one
        return self._taken_over(batch_id, decoded, emit, found, error), predicted

    def _plainly(self, batch_id: int, decoded: Decoded, emit: Emit) -> tuple[BatchPart, float]:
        """Like `_in_columns`, for objects."""
        predict = self.model.predict if self.model.item_ladder is None else self.call
        found, error = self._called(predict, list(decoded.values))
        if error is None and type(found) is not list:
            found, error = self._called(self._found, found)
        predicted = time.perf_counter()
        if error is None and type(found) is list and len(found) == len(decoded.values) and _are_plain(found):
            results: list[ItemResult | None] = []
            start = 0
            for item in decoded.items:
                end = start + (len(item.payload) if item.many else 1)
                results.append(ItemResult(found[start:end] if item.many else found[start]))
                start = end
            return BatchPart(batch_id, results), predicted
        return self._taken_over(batch_id, decoded, emit, found, error), predicted

    @staticmethod
    def _called(predict: Callable[[list[Any]], Any], values: list[Any]) -> tuple[Any, BaseException | None]:
        """What `predict` gave, or its error. Raises exceptions in `ENDS`."""
        try:
            return predict(values), None
        except ENDS:
            raise
        except BaseException as e:
            return None, e

    def _taken_over(
        self, batch_id: int, decoded: Decoded, emit: Emit, found: Any, error: BaseException | None
    ) -> BatchPart:
        """The final part of a batch, after a first call for all units gave `found` or `error`."""

        def first() -> Any:
            if error is not None:
                raise error
            return found

        if decoded.plain:
            counts = [len(item.payload) if item.many else 1 for item in decoded.items]
            decoded.owners = [i for i, count in enumerate(counts) for _ in range(count)]
            decoded.contexts = [None] * len(decoded.items)
        run = BatchRun(self, batch_id, decoded, emit)
        run.attempt(run.live, first)
        return run.final()

    def begin(self, batch_id: int, decoded: Decoded, emit: Emit) -> Callable[[], BatchPart]:
        """Launches the batch or predicts it, and returns a function that makes the final part, in one other thread."""
        started = time.perf_counter()
        logs.running.items = decoded.items
        phases, launched = self.model.phases, None
        run = None if decoded.checked and phases is not None else self._prepared(batch_id, decoded, emit)
        ready = time.perf_counter()
        values = decoded.values if run is None else [decoded.values[u] for u in run.live]
        if phases is not None and values and not decoded.explained:
            launched = launch(phases, decoded.staged, values)
        if launched is None:
            run = run or self._prepared(batch_id, decoded, emit)
            self._predict(run)
        logs.running.items = ()
        predicted = time.perf_counter()

        def finish() -> BatchPart:
            logs.running.items = decoded.items
            if launched is None:
                assert run is not None
                began, run_s = time.perf_counter(), predicted - started
                part = run.final()
            else:
                part, began = self._fetched(batch_id, decoded, emit, run, launched)
                run_s = launched.seconds or began - started
                part.on_device = launched.seconds > 0
            logs.running.items = ()
            part.run_s, part.metrics = run_s, metrics.drain()
            preprocess_s = ready - started
            predict_s = run_s - (0.0 if part.on_device else preprocess_s)
            _record_times(part, decoded, (preprocess_s, predict_s, time.perf_counter() - began))
            return part

        return finish

    def _fetched(
        self, batch_id: int, decoded: Decoded, emit: Emit, run: BatchRun | None, launched: Launched
    ) -> tuple[BatchPart, float]:
        """(the final part of a launched batch, the time when its results were there)."""
        if run is None:
            return self._in_columns(batch_id, decoded, emit, launched)
        run.attempt(run.live, partial(launched, run.live))
        fetched = time.perf_counter()
        return run.final(), fetched

    def _prepared(self, batch_id: int, decoded: Decoded, emit: Emit) -> BatchRun:
        """The batch, ready for `predict`."""
        run = BatchRun(self, batch_id, decoded, emit)
        run.find_states()
        run.preprocess()
        return run

    def _predict(self, run: BatchRun) -> None:
        decoded = run.d
        explained = [u for u in run.live if decoded.owners[u] in decoded.explained]
        predicted = [u for u in run.live if decoded.owners[u] not in decoded.explained] if explained else run.live
        for units in (predicted, explained):
            alone = self.batching.rows == "none"
            for call in [[u] for u in units] if alone else [units] if units else []:
                early, decoded.collated = decoded.collated, None
                first = partial(self._results, early.batch, len(call), early.size) if early else None
                run.attempt(call, first if early and early.units == call else None)

    def close(self) -> None:
        try:
            self.model.unload()
        finally:
            if self._loop is not None:
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()

    def call(self, values: list[Any], explain: bool = False) -> Any:
        """The result of `predict`, or of `explain`: a sequence, or an iterator of sequences if the model streams.

        Raises the model's errors.
        """
        model = self.model
        if model.item_ladder is not None and not explain:
            return self._in_sizes(values, model.item_ladder)
        if explain and model.explain:
            return self._found(model.explain(values))
        return self._results(self._batch(values, len(values)), len(values), len(values))

    def _in_sizes(self, values: list[Any], ladder: Ladder) -> list[Any]:
        """The results of calls with sizes of the ladder: copies of the last value follow, their results are dropped."""
        results: list[Any] = []
        for start, stop, size in ladder.chunks(len(values)):
            batch = self._batch(values[start:stop], size)
            results += aligned(self._results(batch, stop - start, size), stop - start)
        return results

    def _batch(self, values: list[Any], size: int) -> Any:
        """What `predict` receives for these values, padded to `size` of them. Raises what `collate` raises."""
        if len(values) < size:
            # not the value itself: a model that changes its items would change it more than once
            values = [*values, *[copied(values[-1]) for _ in range(size - len(values))]]
        if self.model.collate is None:
            return values
        batch = self.model.collate(values)
        if batch is None:
            raise BadOutput("collate returned None, expected the batch that predict receives: return it")
        return batch

    def _results(self, batch: Any, rows: int, size: int) -> Any:
        """What `predict` gives for a batch, without the results of padding."""
        found = self._found(self.model.predict(batch))
        if rows == size:
            return found
        return aligned(found, size, padded=f" (batching.sizes has padded {rows} to {size})")[:rows]

    def _found(self, found: Any) -> Any:
        if type(found) is list:
            return found
        if inspect.iscoroutine(found):
            found = self._await(found)
        if inspect.isasyncgen(found):
            return self._steps(found)
        return found

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        import asyncio  # only async models need it

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(coroutine)
        except asyncio.CancelledError:
            raise RuntimeError("the model's coroutine was cancelled from inside") from None

    def _steps(self, parts: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    step = self._await(parts.__anext__())
                except StopAsyncIteration:
                    return
                yield step
        finally:
            self._await(parts.aclose())

    def error_of(self, error: BaseException, doing: str = "the model raised") -> PenstockError:
        """The item's error. Its message may leave the process; text and traceback stay in `detail`."""
        text = "".join(traceback.format_exception(error))
        if isinstance(error, PenstockError):
            ours = next(c for c in type(error).__mro__ if c.__module__.startswith("penstock."))
            if ours is not type(error):  # callers may lack a user's class
                failed = ours(error.message, retry_after_s=error.retry_after_s, detail=error.detail or text)
                return _with_original(failed, error)
            error.detail = error.detail or text
            return _without_frames(error)
        kind = type(error).__name__
        key = f"{doing} {describe(error)}"
        if self._log_limiter.admits(key):
            model = self.metadata.name
            log.warning("item_failed model=%s error=%r: its callers get an error\n%s", model, key, text)
        if out_of_memory(error):
            return OutOfMemory("the device ran out of memory on this item alone", detail=text)
        return _with_original(ItemFailed(f"{doing} {kind}", detail=text), error)


def _objects(items: list[Item]) -> list[Any] | None:
    """The units of a batch of whole objects and lists of objects that arrived; None for another batch."""
    values: list[Any] = []
    for item in items:
        value = item.payload
        if item.codec != "object" or item.stop >= 0:
            return None
        if not item.many:
            if type(value) is Pickled:
                try:
                    value = value.load()
                except Exception:
                    return None  # loaded again alone, so that it fails alone
            if issubclass(type(value), _NO_UNIT):
                return None
            values.append(value)
        elif type(value) is not list or Unsent in map(type, value):
            return None
        else:
            values += value
    return values


def _places(items: list[Item]) -> dict[str, Sequence[int]]:
    """The places of the items of each codec."""
    codecs = {item.codec for item in items}
    if len(codecs) == 1:
        return {codecs.pop(): range(len(items))}
    return {codec: [i for i, item in enumerate(items) if item.codec == codec] for codec in codecs}


def _are_plain(results: list[Any]) -> bool:
    """Whether all of them are responses as they are."""
    return not any([kind is Headed or issubclass(kind, Exception) for kind in set(map(type, results))])


def _without_frames(error: PenstockError) -> PenstockError:
    """The error without its traceback and causes, whose frames keep payloads alive."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _with_original(failed: PenstockError, error: BaseException) -> PenstockError:
    """`failed` with the model's exception, for callers in Python."""
    # a StopIteration cannot be raised in a coroutine
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        failed.original = OwnException(error)
    return failed


def _record_times(part: BatchPart, decoded: Decoded, stages_s: tuple[float, float, float]) -> None:
    part.prepare_s = decoded.seconds
    part.stages_s = (decoded.seconds + stages_s[0], stages_s[1], stages_s[2])


def _units(item: Item, value: Any) -> list[Any]:
    if type(value) is Many:
        if item.sequence is not None and len(value) != 1:
            raise BadRequest(f"a request of a sequence has one item, found {len(value)}")
        return value
    if not item.many:
        return [value]
    if not isinstance(value, (list, tuple)):
        raise BadRequest(f"an item of many must be a list of items, found {type(value).__name__}")
    return list(value[item.start : item.stop] if item.stop >= 0 else value)


def _decode_error(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return _without_frames(error)
    text = "".join(traceback.format_exception(error))
    return BadRequest(f"the payload cannot be decoded: {type(error).__name__}", detail=text)
