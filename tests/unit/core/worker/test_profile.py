from __future__ import annotations

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.worker import loop
from penstock.core.worker import profile as profiling
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.profile import COLD_RUNS, MAX_AUTO, warm_up
from penstock.core.worker.python_model import PythonModel
from penstock.errors import LoadFailed
from penstock.types import ModelMetadata


class Clock:
    """Stands in for `time` in the worker's loop; the model moves it."""

    now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(profiling, "time", clock)
    return clock


def profile(clock, seconds_of, *, samples=("sample",), memory=10**9, **batching):
    """(profile, best size, sizes that ran) of a model that takes `seconds_of(n)` for n items."""
    sizes = []

    class Timed:
        def warmup(self):
            return samples

        def predict(self, items):
            sizes.append(len(items))
            if len(items) > memory:
                raise MemoryError
            clock.now += seconds_of(len(items))
            return items

    model = PythonModel(Timed)
    model.load("cpu")
    config = BatchingConfig(**batching)
    samples_, best = warm_up(BatchRunner(model, ModelMetadata("m", "1"), config), config)
    return samples_, best, sizes


def test_a_fixed_size_is_profiled_up_to_it(clock):
    found, best, sizes = profile(clock, lambda n: 0.001, max_batch_size=6)
    assert sizes == [1, 1, 1, 2, 2, 2, 4, 4, 4, 6, 6, 6]
    assert [n for n, _ in found] == sizes[COLD_RUNS:]
    assert all(s == pytest.approx(0.001) for _, s in found)
    assert best is None  # it was chosen already


def test_auto_stops_where_throughput_stops_to_grow(clock):
    # 16 -> 32 gains 3 %, 32 -> 64 only 1.5 %
    assert profile(clock, lambda n: 0.0001 + 0.0001 * max(n, 16))[1] == 32
    _, best, sizes = profile(clock, lambda n: 0.001 if n <= 8 else 0.001 * n / 8)
    assert best == 8
    assert sizes[-1] == 32, "the second that gains nothing"


def test_a_size_that_was_disturbed_does_not_end_the_profile(clock):
    calls = []

    def seconds_of(n):
        calls.append(n)
        return 0.010 + 0.001 * n + (0.030 if n == 2 else 0)

    assert profile(clock, seconds_of)[1] == 64


def test_auto_stays_within_half_the_slo(clock):
    assert profile(clock, lambda n: 0.01 + 0.001 * n, slo_s=0.06)[1] == 16


def test_auto_without_a_slo_stays_below_a_tenth_of_a_second_or_four_rows(clock):
    assert profile(clock, lambda n: 0.02 + 0.001 * n)[1] == 64
    assert profile(clock, lambda n: 0.05 + 0.001 * n)[1] == 128
    assert profile(clock, lambda n: 0.1 * n**0.6)[1] == 8


def test_auto_has_an_end(clock):
    assert profile(clock, lambda n: 0.001)[1] == MAX_AUTO


def test_a_slow_model_has_as_many_sizes_tried_as_others(clock):
    assert profile(clock, lambda n: 1.0 + 0.01 * n)[1] == 256
    assert profile(clock, lambda n: 3.0 if n < 64 else 11.0, max_batch_size=64)[2][-1] == 64
    assert profile(clock, lambda n: float(n), max_batch_size=64)[2][-1] == 16, "the time is up"


def test_memory_ends_the_profile_at_the_size_before(clock):
    found, best, _ = profile(clock, lambda n: 0.001, memory=4)
    assert best == 4
    assert max(n for n, _ in found) == 4


def test_samples_can_be_the_rows_of_an_array(clock):
    assert profile(clock, lambda n: 0.001, samples=np.zeros((2, 3)), max_batch_size=1)[2] == [1, 1, 1]


def test_without_samples_nothing_is_learned(clock):
    assert profile(clock, lambda n: 0.001, samples=None) == ([], None, [])


def test_a_model_that_fails_on_its_own_samples_does_not_load():
    class Bad:
        def warmup(self):
            return [1]

        def predict(self, items):
            raise ValueError

    model = PythonModel(Bad)
    model.load("cpu")
    with pytest.raises(LoadFailed, match="fails on its own warm-up items: the model raised ValueError"):
        warm_up(BatchRunner(model, ModelMetadata("m", "1"), BatchingConfig()), BatchingConfig())
