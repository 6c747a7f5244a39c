from __future__ import annotations

import json
import logging
import pickle

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.batching.ladder import Ladder
from penstock.core.contracts import Codec
from penstock.core.wire.messages import Pickled, Unsent
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import (
    BadOutput,
    BadRequest,
    Cancelled,
    ConfigError,
    ItemFailed,
    LoadFailed,
    OutOfMemory,
    WrongRowCount,
)
from penstock.types import Item, ItemResult, Many, ModelMetadata


class Upper(Codec):
    """A codec: text in, text out; refuses an empty body, cannot send a number."""

    def __init__(self, model, version):
        pass

    def decode(self, item):
        if not item.payload:
            raise BadRequest("empty")
        return item.payload.decode(), "context"

    def encode(self, value, item, context):
        assert context == "context"
        if value == "cannot":
            raise BadOutput("this value cannot be sent")
        return ItemResult(value.upper().encode(), "text/plain")


CODEC = f"{__name__}:Upper"


def runner(target, **batching):
    model = PythonModel(target)
    model.load("cpu")
    made = BatchRunner(model, ModelMetadata("m", "1"), BatchingConfig(**batching))
    made.codecs._made["upper"] = Upper("m", "1")
    return made


def run(target, items, **batching):
    """All parts of one batch."""
    parts = []
    made = runner(target, **batching)
    made.run(7, made.decode([i if isinstance(i, Item) else Item(i) for i in items]), parts.append)
    assert [p.final for p in parts] == [False] * (len(parts) - 1) + [True]
    assert {p.batch_id for p in parts} == {7}
    made.close()
    return parts


def values(part):
    return [None if r is None else (r.error or r.body) for r in part.results]


def kinds(part):
    return [BadOutput if isinstance(v, BadOutput) else type(v) for v in values(part)]


def counting(fails):
    """A model that raises when `fails(items)`, and notes the sizes of its calls."""
    sizes = []

    def predict(items):
        sizes.append(len(items))
        if fails(items):
            raise ValueError("secret\nmore")
        return [i * 10 for i in items]

    return predict, sizes


def when(guilty, wrong):
    """A model that returns its items, or raises or returns `wrong(items)` if `guilty(items)`."""

    def predict(items):
        found = wrong(items) if guilty(items) else items
        if isinstance(found, BaseException):
            raise found
        return found

    return predict


def five(items):
    return 5 in items


def above_two(items):
    return len(items) > 2


def no_memory(items):
    return MemoryError()


EIGHT = list(range(8))
BATCHES = {  # name: target, items, options, (values or classes of errors, oom, miscounted)
    "results are aligned": (lambda items: [i + 1 for i in items], [1, 2, 3], {}, ([2, 3, 4], None, False)),
    "a tuple is results": (lambda items: (1, 2), [0, 0], {}, ([1, 2], None, False)),
    "an array is results": (lambda items: np.array([1, 2]), [0, 0], {}, ([1, 2], None, False)),
    "one result too many": (when(five, lambda items: [1] * (len(items) + 1)), EIGHT, {},
                            ([0, 1, 2, 3, 4, WrongRowCount, 6, 7], None, False)),
    "no list": (when(five, lambda items: None), EIGHT, {}, ([0, 1, 2, 3, 4, BadOutput, 6, 7], None, False)),
    "a bad output of its own": (when(five, lambda items: BadOutput("no list")), EIGHT, {},
                                ([0, 1, 2, 3, 4, BadOutput, 6, 7], None, False)),
    "an item that is lost alone says nothing about the size": (
        lambda items: [i for i in items if i != 3], EIGHT, {}, ([0, 1, 2, WrongRowCount, 4, 5, 6, 7], None, False)),
    "a batch of another number of rows is halved and its size reported": (
        when(above_two, lambda items: items[:1]), EIGHT, {}, (EIGHT, (4, 2), True)),
    "... without leave to retry it fails": (
        when(above_two, lambda items: items[:1]), EIGHT, {"retry_split": False}, ([WrongRowCount] * 8, None, False)),
    "out of memory halves even without retry_split": (
        when(above_two, lambda items: type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")), EIGHT,
        {"retry_split": False}, (EIGHT, (4, 2), False)),
    "one item too large for memory is named": (
        when(lambda items: 3 in items, no_memory), [0, 1, 2, 3], {}, ([0, 1, 2, OutOfMemory], (1, 2), False)),
    "rows are counted when memory ends": (
        when(bool, no_memory), [Item(1, rows=5)], {}, ([OutOfMemory], (5, 0), False)),
    "out of memory fails the whole batch of a model that is not idempotent": (
        when(bool, no_memory), [1, 2], {"idempotent": False}, ([OutOfMemory] * 2, (2, 0), False)),
    "predict is not called without items": (
        len, [Item(b"", "upper")], {}, ([BadRequest], None, False)),
    "an unknown codec fails its item": (
        lambda items: items, [Item(b"", "no_such_codec"), 1], {}, ([ConfigError, 1], None, False)),
    "many without items are answered": (lambda items: items, [Item([], many=True)], {}, ([[]], None, False)),
    "many that are no list are refused": (lambda items: items, [Item(5, many=True)], {}, ([BadRequest], None, False)),
    "without rows each item is a call": (
        when(lambda items: len(items) > 1, no_memory), [1, Item([2, 3], rows=2, many=True)], {"rows": "none"},
        ([1, [2, 3]], None, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_has_one_outcome_for_each_item(name):
    target, items, options, (expected, oom, miscounted) = BATCHES[name]
    (part,) = run(target, items, **options)
    kinds_of = [type(v) if isinstance(v, Exception) else v for v in values(part)]
    assert (kinds_of, part.oom, part.miscounted) == (expected, oom, miscounted)
    assert 0 <= part.run_s < 1


def test_the_guilty_item_is_found_by_halves():
    predict, sizes = counting(lambda items: 5 in items)
    (part,) = run(predict, range(8))
    assert [v for v in values(part) if not isinstance(v, Exception)] == [i * 10 for i in range(8) if i != 5]
    bad = values(part)[5]
    assert type(bad) is ItemFailed
    assert bad.message == "the model raised ValueError"  # what the exception says stays inside
    assert "secret" in bad.detail
    assert len(sizes) <= 1 + 2 * 3


@pytest.mark.parametrize("off", [{"retry_split": False}, {"idempotent": False}])
def test_without_retries_the_whole_batch_fails(off):
    predict, sizes = counting(lambda items: 5 in items)
    (part,) = run(predict, range(8), **off)
    assert kinds(part) == [ItemFailed] * 8
    assert sizes == [8]


def test_the_memory_of_a_failed_call_is_freed_before_the_retry():
    import weakref

    class Tensor:
        pass

    made, freed = [], []

    def predict(items):
        tensor = Tensor()
        freed.append(all(ref() is None for ref in made))
        made.append(weakref.ref(tensor))
        if len(items) > 1:
            raise MemoryError
        return items

    run(predict, [1, 2, 3, 4])
    assert freed == [True] * 7


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([], "returned 0 results for 1 items"),
        ([1, 2, 3], "returned 3 results for 1 items"),
        (None, "returned a NoneType"),
        ("ab", "returned a str"),
        ({1: 1, 2: 2}, "returned a dict"),
        (np.float32(1), "returned a float32"),
    ],
)
def test_wrong_results_fail_with_both_lengths_or_the_type(found, told):
    (part,) = run(lambda items: found, [0, 0])
    assert kinds(part) == [BadOutput] * 2
    assert all(told in v.message for v in values(part))


def test_hooks_run_once_an_item_and_fail_it_alone():
    class Hooked:
        def preprocess(self, item):
            return 100 // item

        def predict(self, items):
            assert len(items) == 3
            return items

        def postprocess(self, result):
            return {"r": 100 // (result - 50)}

    (part,) = run(Hooked, [1, 0, 2, 4])
    assert kinds(part) == [dict, ItemFailed, ItemFailed, dict]
    assert values(part)[0] == {"r": 2}
    assert [values(part)[i].message for i in (1, 2)] == [
        "preprocess raised ZeroDivisionError",
        "postprocess raised ZeroDivisionError",
    ]


def test_codecs_decode_and_encode_each_item_by_itself():
    (part,) = run(lambda items: items, [Item(b, "upper") for b in (b"a", b"", b"cannot", b"b")])
    assert [r.body for r in part.results if r.error is None] == [b"A", b"B"]
    assert kinds(part) == [bytes, BadRequest, BadOutput, bytes]
    (part,) = run(lambda items: [5], [Item(b"a", "upper")])
    assert kinds(part) == [BadOutput]
    assert "a int that cannot be sent" in values(part)[0].message


def test_pickled_objects_reach_a_model_in_one_call_and_one_that_cannot_be_loaded_fails_alone():
    predict, sizes = counting(lambda items: False)
    good, bad = (Item(Pickled(data, [])) for data in (pickle.dumps(4), b"broken"))
    assert values(run(predict, [good, 5])[0]) == [40, 50]
    assert kinds(run(predict, [good, bad, 6])[0]) == [int, BadRequest, int]
    assert sizes == [2, 2]


def test_many_is_flattened_and_put_together_again():
    def predict(items):
        assert len(items) == 5
        return [ValueError() if i == 3 else i for i in items]

    whole, piece = Item([3, 4], many=True, rows=2), Item([0, 3, 4, 5], many=True, rows=2, start=1, stop=3)
    for last in (whole, piece):
        (part,) = run(predict, [Item([1, 2], many=True, rows=2), 9, last])
        first, single, second = values(part)
        assert (first, single, second[1]) == ([1, 2], 9, 4)
        assert type(second[0]) is ItemFailed


def stream(items):
    yield [i for i in items]
    yield [None if i == 1 else i * 10 for i in items]


async def stream_async(items):
    for step in stream(items):
        yield step


@pytest.mark.parametrize("target", [stream, stream_async])
def test_a_generator_gives_parts_and_an_empty_final(target):
    parts = run(target, [1, Item(b"x", "upper")] if target is None else [1, 2])
    assert [values(p) for p in parts] == [[1, 2], [None, 20], [None, None]]
    assert all(r is None or r.final is (p is parts[-1]) for p in parts for r in p.results)


def test_streamed_parts_are_encoded():
    def words(items):
        yield ["a"]
        yield ["b"]

    parts = run(words, [Item(b"x", "upper")])
    assert [p.results[0].body for p in parts] == [b"A", b"B", b""]


def test_a_stream_that_raises_before_its_first_part_is_split():
    def picky(items):
        if 0 in items:
            raise ValueError
        yield items

    parts = run(picky, [1, 0, 2])
    assert kinds(parts[-1]) == [type(None), ItemFailed, type(None)]
    assert [[v for v in values(p) if v is not None] for p in parts[:-1]] == [[1], [2]]


def test_a_broken_stream_is_split_and_the_others_continue_where_their_callers_are():
    def breaks(items):
        yield [ValueError() if i == "bad" else f"{i}1" for i in items]
        if "worse" in items:
            raise RuntimeError
        yield [f"{i}2" for i in items]

    parts = run(breaks, [1, "bad", 2, "worse", 3])
    assert kinds(parts[-1]) == [type(None), ItemFailed, type(None), ItemFailed, type(None)]
    assert [v.message for v in values(parts[-1]) if v] == [
        "the model returned ValueError",
        "the model raised RuntimeError",
    ]
    streams = [[v for p in parts[:-1] if (v := values(p)[i]) is not None] for i in (0, 2, 3, 4)]
    assert streams == [["11", "12"], ["21", "22"], ["worse1"], ["31", "32"]]


@pytest.mark.parametrize("off", [{"retry_split": False}, {"idempotent": False}])
def test_without_retries_a_broken_stream_fails_its_unfinished_items(off):
    def breaks(items):
        yield [ValueError(), 1]
        raise RuntimeError

    parts = run(breaks, [1, 2], **off)
    assert [v.message for v in values(parts[-1])] == ["the model returned ValueError", "the model raised RuntimeError"]


@pytest.mark.parametrize("second", [["c"], []])
def test_a_stream_that_differs_when_it_runs_again_ends_with_an_error(second):
    calls = []

    def random(items):
        calls.append(items)
        for part in ["a", "b"] if len(calls) == 1 else ["a", *second]:
            yield [part] * len(items)
        if "bad" in items:
            raise RuntimeError

    parts = run(random, [1, "bad"])
    assert [values(p)[0] for p in parts[:-1]] == ["a", "b"]
    assert kinds(parts[-1]) == [ItemFailed] * 2
    assert "its parts differed" in values(parts[-1])[0].message


def test_a_stream_that_is_too_long_to_compare_is_not_repeated(monkeypatch):
    monkeypatch.setattr("penstock.core.worker.batch.MAX_MARKS", 2)

    def breaks(items):
        for step in range(3):
            yield [step] * len(items)
        if "bad" in items:
            raise RuntimeError

    parts = run(breaks, [1, "bad"])
    assert [values(p)[0] for p in parts[:-1]] == [0, 1, 2]
    assert kinds(parts[-1]) == [ItemFailed] * 2


def test_a_step_of_wrong_length_is_split_and_closes_the_stream():
    closed = []

    def wrong(items):
        try:
            yield items
            yield items if 2 not in items else []
            yield items
        finally:
            closed.append(True)

    parts = run(wrong, [1, 2])
    assert kinds(parts[-1]) == [type(None), BadOutput]
    assert [[v for p in parts[:-1] if (v := values(p)[i]) is not None] for i in (0, 1)] == [[1, 1, 1], [2]]
    assert closed == [True] * 3


def test_many_items_stream_as_lists():
    parts = run(stream, [Item([1, 2], many=True, rows=2)])
    assert [values(p)[0] for p in parts] == [[1, 2], [None, 20], [None, None]]


def test_coroutines_share_one_loop():
    loops = set()

    async def predict(items):
        import asyncio

        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return items

    made = runner(predict)
    for _ in range(2):
        parts = []
        made.run(1, made.decode([Item(1)]), parts.append)
        assert values(parts[0]) == [1]
    made.close()
    assert len(loops) == 1


def test_a_coroutine_that_is_cancelled_from_inside_fails_its_items():
    async def predict(items):
        import asyncio

        raise asyncio.CancelledError

    assert kinds(run(predict, [1])[0]) == [ItemFailed]


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_worker_exit_is_not_an_item_error(end):
    def predict(items):
        raise end

    with pytest.raises(end):
        run(predict, [1, 2])


def test_a_repeated_error_is_logged_once_a_minute(caplog):
    made = runner(lambda items: [ValueError("same") for _ in items])
    with caplog.at_level(logging.WARNING, "penstock.worker"):
        for _ in range(3):
            made.run(1, made.decode([Item(1), Item(2)]), lambda part: None)
    assert len(caplog.records) == 1
    assert "ValueError: same" in caplog.text


def test_a_finished_batch_leaves_no_references():
    import weakref

    class Payload:
        pass

    made = runner(lambda items: [ValueError("x") for _ in items])
    payload = Payload()
    alive = weakref.ref(payload)
    made.run(1, made.decode([Item(payload)]), lambda part: None)
    del payload
    assert alive() is None


class Telling:
    """Sends parts of results while a call runs: those in the items' lists; the last of each is its result."""

    def __init__(self) -> None:
        self.calls: list[list[list]] = []

    def __penstock_send_parts_to__(self, send) -> None:
        self.send = send

    def predict(self, items):
        self.calls.append(items)
        for step in range(max(map(len, items)) - 1):
            self.send([item[step] if step < len(item) - 1 else None for item in items])
        if "raise" in [item[-1] for item in items]:
            raise ValueError
        return [item[-1] for item in items]


def test_parts_that_a_model_sends_leave_before_its_call_ends():
    parts = run(Telling(), [["a", "b"], ["c"]])
    assert [values(p) for p in parts] == [["a", None], ["b", "c"]]
    assert parts[0].results[0].final is False


def test_a_part_that_cannot_be_sent_ends_its_item_alone():
    items = [Item([1, "b"]), Item(["c", "d", "e"])]
    parts = run(Telling(), items)
    assert [values(p) for p in parts] == [[1, "c"], [None, "d"], ["b", "e"]]
    refusing = [Item(b"x", "upper"), Item(b"y", "upper")]

    class Refused(Telling):
        def predict(self, items):
            self.send(["cannot", "part"])
            self.send(["more", "part"])
            return ["end", "end"]

    parts = run(Refused(), refusing)
    assert values(parts[0]) == [None, b"PART"]
    assert values(parts[1]) == [None, b"PART"]
    assert kinds(parts[2]) == [BadOutput, bytes]


def test_a_call_that_raises_after_sent_parts_is_split_and_sends_no_part_twice():
    model = Telling()
    parts = run(model, [["a", "raise"], ["b", "c"]])
    assert [values(p) for p in parts[:-1]] == [["a", "b"]]
    assert kinds(parts[-1]) == [ItemFailed, str]
    assert [len(items) for items in model.calls] == [2, 1, 1]


def test_a_call_continues_without_readers_of_its_parts():
    model = Telling()
    made = runner(model)
    found = []

    def emit(part):
        if not part.final:
            raise Cancelled("all have left")
        found.append(part)

    made.run(7, made.decode([Item(["a", "b", "c"])]), emit)
    assert [values(p) for p in found] == [["c"]]


class Summing:
    """`predict` receives a tuple that `collate` makes of the items; `calls` are what both received."""

    def __init__(self, refused=None):
        self.refused, self.calls = refused, []

    def preprocess(self, item):
        return item + 1

    def collate(self, items):
        self.calls.append(("collate", list(items)))
        if self.refused in items:
            raise ValueError(f"{self.refused} does not fit")
        return tuple(items), sum(items)

    def predict(self, batch):
        self.calls.append(("predict", batch))
        items, total = batch
        if -1 in items:
            raise RuntimeError
        return [total] * len(items)


def test_a_batch_is_collated_when_it_is_decoded():
    model = Summing()
    made, parts = runner(model), []
    decoded = made.decode([Item(1), Item(2)])
    assert model.calls == [("collate", [2, 3])], "preprocessed"
    made.run(7, decoded, parts.append)
    assert model.calls[1:] == [("predict", ((2, 3), 5))]
    assert values(parts[-1]) == [5, 5]
    assert values(run(Summing(), [])[-1]) == []
    items = [Item([1, 2], many=True), Item(3)]
    assert values(run(Summing(), items)[-1]) == [[9, 9], 9]


def test_an_item_that_cannot_be_collated_or_predicted_fails_alone():
    for model, wrong in ((Summing(refused=4), 3), (Summing(), -2)):
        failed, *others = values(run(model, [wrong, 1, 1])[-1])
        assert type(failed) is ItemFailed
        assert others in ([4, 4], [2, 2]), "as in a part of the batch"
    model = Summing(refused=4)
    assert type(values(run(model, [3, 1], retry_split=False)[-1])[1]) is ItemFailed
    assert model.calls == [("collate", [4, 2])] * 2, "in both threads"


def test_a_preprocess_that_raises_takes_its_item_out_of_the_batch():
    class Checked(Summing):
        def preprocess(self, item):
            if item < 0:
                raise BadRequest("negative")
            return item

    model = Checked()
    failed, found = values(run(model, [-5, 2])[-1])
    assert type(failed) is BadRequest
    assert found == 2
    assert model.calls[0] == ("collate", [2])


class Helpers:
    """In place of processes: adds 1, and refuses negative values."""

    closed = 0

    def __call__(self, values):
        return [Unsent(BadRequest("negative")) if value < 0 else value + 1 for value in values]

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("rows", ["axis0", "none"])
def test_helpers_preprocess_a_batch_when_it_is_decoded(rows):
    class Apart:
        def preprocess(self, item):
            raise AssertionError("a helper does it")

        def predict(self, items):
            return [10 * item for item in items]

    made, parts = runner(Apart, rows=rows), []
    helpers = made.model.helpers = Helpers()
    decoded = made.decode([Item(1), Item(-1), Item([2, -2, 3], many=True), Item(b"", "upper"), Item(4)])
    made.run(7, decoded, parts.append)
    one, negative, many, empty, last = values(parts[-1])
    assert (one, last) == (20, 50)
    assert (many[0], many[2]) == (30, 40)
    assert [error.message for error in (negative, many[1], empty)] == ["negative", "negative", "empty"]
    made.close()
    assert helpers.closed == 1


def test_a_batch_from_helpers_is_collated_without_what_they_refused():
    made, parts = runner(model := Summing()), []
    made.model.helpers = Helpers()
    made.run(7, made.decode([Item(1), Item(-1), Item(2)]), parts.append)
    assert [v if type(v) is int else type(v) for v in values(parts[-1])] == [5, BadRequest, 5]
    assert model.calls == [("collate", [2, 3]), ("predict", ((2, 3), 5))]


def test_a_collate_that_returns_nothing_is_told_what_is_expected():
    class Forgetful:
        def collate(self, items):
            np.stack(items)

        def predict(self, batch):
            return batch

    (found,) = values(run(Forgetful(), [1.0])[-1])
    assert type(found) is BadOutput
    assert str(found) == "collate returned None, expected the batch that predict receives: return it"


def test_a_collated_batch_has_a_size_of_the_ladder():
    model = Summing()
    made, parts = runner(model), []
    made.model.pad(Ladder((4,)))
    made.run(7, made.decode([Item(1), Item(2)]), parts.append)
    assert model.calls == [("collate", [2, 3, 3, 3]), ("predict", ((2, 3, 3, 3), 11))]
    assert values(parts[-1]) == [11, 11]


def test_explained_items_are_not_collated():
    class Explaining(Summing):
        def explain(self, items):
            return [f"because of {item}" for item in items]

    model = Explaining()
    made = runner(model)
    assert made.call([1], explain=True) == ["because of 1"]
    assert model.calls == []


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"predict": lambda self, batch, parameters: batch}, "predict has an argument parameters"),
        ({"admit": lambda self, item: item, "step": lambda self, states: states}, "admit and step has no whole"),
        ({"collate": lambda self: 1}, r"write collate\(items\)"),
    ],
)
def test_models_that_cannot_be_collated_are_refused(members, said):
    with pytest.raises(LoadFailed, match=said):
        runner(type("Model", (Summing,), members))


def test_an_async_predict_cannot_be_collated():
    class Async(Summing):
        async def predict(self, batch):
            return batch

    with pytest.raises(LoadFailed, match="an async predict runs its batches side by side"):
        runner(Async)


def test_a_users_own_names_are_no_hooks():
    class Own:
        def prepare(self, items):
            raise AssertionError

        send_parts_to = prepare

        def predict(self, items):
            return items

    assert values(run(Own(), [1])[-1]) == [1]


class Slow:
    """Each of its stages takes so many seconds of the clock that it is given, for each item."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def monotonic(self):
        return self.now

    def preprocess(self, value):
        self.now += 1
        return value

    def predict(self, items):
        self.now += 10 * len(items)
        return items

    def postprocess(self, value):
        self.now += 100
        return value


class SlowCodec(Upper):
    def __init__(self, clock):
        self.clock = clock

    def decode(self, item):
        self.clock.now += 1000
        return super().decode(item)

    def encode(self, value, item, context):
        self.clock.now += 10_000
        return super().encode(value, item, context)


@pytest.mark.parametrize("apart", [False, True])
def test_stage_times_are_reported_with_separate_postprocessing(monkeypatch, apart):
    slow = Slow()
    for module in ("loop", "batch"):
        monkeypatch.setattr(f"penstock.core.worker.{module}.time", slow)
    made = runner(slow)
    made.codecs._made["upper"] = SlowCodec(slow)
    decoded = made.decode([Item(b"a", codec="upper"), Item(b"b", codec="upper")])
    parts = []
    if apart:
        finish = made.begin(1, decoded, parts.append)
        slow.now += 7  # another batch is predicted meanwhile
        parts.append(finish())
    else:
        made.run(1, decoded, parts.append)
    (part,) = parts
    assert part.stages_s == (2002, 20, 20_200)
    assert part.hooks_s == (2, 200), "the rest of the first stage is decoding, of the last one encoding"
    assert part.prepare_s == 2000
    assert part.run_s == (22 if apart else 20_222)


def test_the_time_of_a_failed_call_counts_as_predict_time(monkeypatch):
    slow = Slow()
    monkeypatch.setattr("penstock.core.worker.loop.time", slow)
    monkeypatch.setattr(slow, "predict", lambda items: slow.__setattr__("now", slow.now + 10) or 1 / 0)
    made = runner(slow, retry_split=True)
    parts = []
    made.run(1, made.decode([Item(1), Item(2)]), parts.append)
    assert parts[0].stages_s == (2, 32, 0)  # the batch, a new decoding, and its halves


def test_the_list_that_a_model_gets_is_its_own():
    def greedy(items):
        taken = [items.pop() for _ in range(len(items))]
        if taken == ["b", "a"]:
            raise ValueError
        return taken

    assert values(run(greedy, ["a", "b"])[-1]) == ["a", "b"]


@pytest.mark.parametrize("form", ["codec", "pickled", "preprocessed", "many"])
def test_a_model_that_changes_its_items_gets_new_ones_when_it_runs_again(form):
    class Changes:
        def predict(self, items):
            for item in items:
                item["n"] += 1
            if any(item["n"] == 5 for item in items):
                raise ValueError
            return items

        if form == "preprocessed":

            def preprocess(self, item):
                item["n"] *= 1
                return item

    class Parsed(Codec):
        def decode(self, item):
            found = json.loads(item.payload)
            return Many(found) if form == "many" else found, None

        def encode(self, value, item, context):
            return ItemResult(value)

    numbers = [{"n": n} for n in range(8)]
    if form == "codec":
        items = [Item(json.dumps(n).encode(), "parsed") for n in numbers]
    elif form == "many":
        items = [
            Item(json.dumps(pair).encode(), "parsed", rows=2) for pair in zip(numbers[::2], numbers[1::2], strict=True)
        ]
    else:
        items = [Item(Pickled(pickle.dumps(n), [])) for n in numbers]
    made, parts = runner(Changes, retry_split=True), []
    made.codecs._made["parsed"] = Parsed()
    made.run(1, made.decode(items), parts.append)
    found = [v for v in values(parts[0]) if not isinstance(v, Exception)]
    found = [v for pair in found for v in pair] if form == "many" else found
    assert [v["n"] for v in found] == [n + 1 for n in range(8) if n != 4 and (form, n) != ("many", 5)]
