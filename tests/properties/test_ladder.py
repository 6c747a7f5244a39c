"""A ladder pads every batch to the nearest size that holds it, loses and repeats no row, and harms no caller much."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.config.schema import BatchingConfig
from penstock.core.batching.cost import StairCost
from penstock.core.batching.entry import Dispatch, Entry, Outcome
from penstock.core.batching.ladder import Ladder, ladder_of, powers
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed, Unbatched
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import ItemFailed
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, Simulation, SimulationSettings, primed, unbounded
from penstock.testing.policies import PolicyChecker, check_invariance
from penstock.testing.scripts import random_setup
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


# ---- the scheduler


POLICIES: dict[str, tuple[Callable[[], BatchPolicy], Callable[[], BatchPolicy] | None]] = {
    "adaptive": (Adaptive, None),
    "adaptive, never held": (lambda: Adaptive(0.0), None),
    "fixed": (lambda: Fixed(0.01), lambda: Fixed(0.02)),
    "none": (Unbatched, None),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_invariant_of_policies_holds_with_sizes(name: str) -> None:
    """Among them: no request starves, and none waits beside an idle slot without a reason."""
    make, doubled = POLICIES[name]
    padded = cut = 0
    for k in range(200):
        rng = Random(f"sizes/{k}")
        setup = random_setup(rng)
        most = setup.max_batch_size
        sizes = powers(most) if rng.random() < 0.5 else (*sorted(rng.sample(range(1, most), rng.randrange(most))), most)
        setup = structs.replace(setup, sizes=sizes)
        checker = PolicyChecker(setup, make)
        checker.play()
        explained = checker.scheduler.explain()
        padded += int(str(explained["padded_rows"]))
        cut += sum("lower size" in decision for decision in checker.trace)
        if k % 10 == 0:
            check_invariance(setup, make, doubled)
    assert padded
    assert cut or not name.startswith("adaptive")


class Stairs(ServiceTime, frozen=True):
    """A device that takes `times[k]` seconds for batches up to `sizes[k]` rows, whoever pads them."""

    sizes: tuple[int, ...] = ()
    times: tuple[float, ...] = ()

    def t(self, rows: float) -> float:
        return self.times[self.sizes.index(Ladder(self.sizes).up(int(rows)))]


@st.composite
def stairs(draw: st.DrawFn) -> Stairs:
    """Steps of any height: flat, a set-up time and a time per row, or falling below the line."""
    sizes = draw(st.sets(st.integers(1, 64), min_size=2, max_size=7).map(lambda found: tuple(sorted(found))))
    steps = draw(st.lists(st.integers(0, 1000), min_size=len(sizes), max_size=len(sizes)))
    first = draw(st.integers(1, 5000))
    times = tuple((first + sum(steps[:k])) * 1e-6 for k in range(len(sizes)))
    return Stairs(0.0, 0.0, 0.0, 0.0, sizes=sizes, times=times)


def settings_for(service: Stairs, sizes: tuple[int, ...], slots: int = 1) -> SimulationSettings:
    return SimulationSettings(slots=slots, max_batch_size=service.sizes[-1], sizes=sizes)


def answers_of(service: Stairs, load: OpenLoop, sizes: tuple[int, ...], slots: int = 1) -> list[float]:
    """The latencies of the requests, in the order of their answers. Without `sizes` the scheduler pads nothing, and the
    device takes the same time."""
    settings = settings_for(service, sizes, slots)
    simulation = Simulation(service, primed(service, Adaptive(), settings), settings)
    simulation.run(load)
    assert len(simulation.done) == len(load.arrivals), "every request is answered"
    return [response - arrival for arrival, response in simulation.done]


@settings(max_examples=300, deadline=None)
@given(service=stairs(), rows=st.integers(1, 200))
def test_a_burst_is_answered_at_most_one_step_later_and_earlier_in_the_mean(service: Stairs, rows: int) -> None:
    """Beside full batches and a padded one for the rest, which a scheduler without sizes sends."""
    ladder, scheduler = Ladder(service.sizes), unbounded(Adaptive(), settings_for(service, service.sizes))
    scheduler.prime([(size, service.t(size)) for size in service.sizes for _ in range(8)])
    scheduler.slot_up(0, 0.0)
    for k in range(rows):
        scheduler.offer(Entry(id=k), 0.0)
    found, now = list[float](), 0.0
    while events := scheduler.poll(now):
        (batch,) = events
        assert isinstance(batch, Dispatch)
        now += service.t(batch.rows)
        scheduler.complete(batch.batch_id, Outcome("ok"), now)
        found += [now] * batch.rows
    plain = _padded(service, rows)
    last = rows % ladder.top
    step = service.t(last) - service.t(ladder.down(last)) if ladder.down(last) else 0.0
    assert len(found) == rows
    assert sum(found) <= sum(plain) * (1 + 1e-9)
    assert max(found) <= (max(plain) + step) * (1 + 1e-9)


def _padded(service: Stairs, rows: int) -> list[float]:
    """The latencies of a burst in full batches and one padded one."""
    top, out, now = service.sizes[-1], list[float](), 0.0
    for start in range(0, rows, top):
        count = min(top, rows - start)
        now += service.t(count)
        out += [now] * count
    return out


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sizes", [powers(64), (1, 8, 64), powers(48)])
@pytest.mark.parametrize(("a", "b"), [(5e-3, 0.2e-3), (1e-3, 1e-3), (3.8e-3, 0.02e-3), (0.5e-3, 4e-3)])
def test_loads_are_answered_as_fast_as_without_sizes_and_much_faster_where_rows_cost(
    a: float, b: float, sizes: tuple[int, ...], slots: int
) -> None:
    """An accelerator, a model of equal parts, one bound by launches, and one bound by rows, at three loads."""
    times = tuple(a + b * size for size in sizes)
    service = Stairs(0.0, 0.0, 0.05, 0.002, sizes=sizes, times=times)
    step = max(after - before for before, after in pairwise(times))
    gain = []
    for share in (0.3, 0.6, 0.85):
        rng, now, arrivals = Random(3), 0.0, list[float]()
        for _ in range(1500):
            now += rng.expovariate(share * slots * sizes[-1] / times[-1])
            arrivals.append(now)
        means = [
            sum(found) / len(found) for s in (sizes, ()) if (found := answers_of(service, OpenLoop(arrivals), s, slots))
        ]
        assert means[0] <= 1.02 * means[1]
        assert means[0] <= means[1] + step
        gain.append(means[1] / means[0])
    assert b < a or max(gain) > 1.5


@given(ladder=ladders, samples=st.lists(st.tuples(st.integers(1, 120), st.floats(0, 10)), max_size=60))
def test_the_learned_cost_is_a_staircase(ladder: Ladder, samples: list[tuple[int, float]]) -> None:
    cost = StairCost(ladder)
    for rows, seconds in samples:
        cost.add(rows, seconds)
    assert cost.a >= 0
    assert cost.b > 0
    for rows in range(1, ladder.top + 1):
        assert cost.t(rows) == cost.t(ladder.up(rows)) >= 0
