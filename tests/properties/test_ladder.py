"""A ladder pads every batch to the nearest size that holds it, and loses and repeats no row."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.schema import BatchingConfig
from penstock.core.batching.ladder import Ladder, ladder_of, powers
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import ItemFailed
from penstock.types import BatchPart, Item, ModelMetadata

ladders = st.sets(st.integers(1, 100), min_size=1, max_size=8).map(lambda sizes: Ladder(tuple(sorted(sizes))))


@given(ladder=ladders, rows=st.integers(1, 250))
def test_a_batch_gets_the_nearest_size_that_holds_it(ladder: Ladder, rows: int) -> None:
    up, down = ladder.up(rows), ladder.down(rows)
    assert up == min((size for size in ladder.sizes if size >= rows), default=rows)
    assert down == max((size for size in ladder.sizes if size <= rows), default=0)
    chunks = ladder.chunks(rows)
    assert [k for start, stop, _ in chunks for k in range(start, stop)] == list(range(rows))
    assert all(size in ladder.sizes and stop - start <= size for start, stop, size in chunks)


@given(most=st.integers(1, 5000))
def test_powers_of_two_end_with_the_largest_batch_and_at_most_double_a_batch(most: int) -> None:
    sizes = powers(most)
    assert sizes[-1] == most
    found = ladder_of("auto", most)
    assert found is not None
    assert all(found.up(rows) < 2 * rows for rows in range(1, most + 1))
    assert ladder_of("auto", None) is ladder_of("any", most) is ladder_of(None, most) is None


@settings(max_examples=200, deadline=None)
@given(
    ladder=ladders,
    items=st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1, max_size=120),
    memory=st.integers(1, 120),
)
def test_padded_batches_answer_as_others_do(ladder: Ladder, items: list[tuple[int, bool]], memory: int) -> None:
    """Also with items that fail, a model that changes its items, and a device whose memory ends at some size."""
    memory = max(memory, ladder.sizes[0])
    sizes: list[int] = []

    def predict(values: list[list[Any]]) -> list[Any]:
        sizes.append(len(values))
        if len(values) > memory:
            raise MemoryError
        for value in values:
            value[0] += 1
            if value[1]:
                raise ValueError
        return [value[0] for value in values]

    model = PythonModel(predict)
    model.load("cpu")
    model.pad(ladder)
    runner = BatchRunner(model, ModelMetadata("m", "1"), BatchingConfig())
    parts: list[BatchPart] = []
    batch = [Item([number, bad]) for number, bad in items]
    # a call that raises has changed its items: they come from the wire anew only if nothing fails
    changes = any(bad for _, bad in items) or len(items) > memory or ladder.up(len(items)) > memory
    runner.run(0, runner.decode(batch), parts.append)
    results = [result for result in parts[-1].results if result is not None]
    for (number, bad), result in zip(items, results, strict=True):
        assert type(result.error) is ItemFailed if bad else result.error is None
        assert bad or changes or result.body == number + 1
    assert set(sizes) <= set(ladder.sizes)
    if parts[-1].oom is not None:
        failed, ran = parts[-1].oom
        assert failed in ladder.sizes
        assert ran in (0, *ladder.sizes)
        assert ran <= memory < failed
