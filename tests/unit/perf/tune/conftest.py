"""A bench without noise or time, of which everything is known: what the tuner makes of it can be told by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.errors import LoadFailed
from penstock.perf.bench.measurement import Latency, Load, Measurement
from penstock.perf.tune.space import Settings
from penstock.perf.tune.trial import Curve, Reading


class Hill:
    """A Bench: settings that can do `able(settings)` requests a second answer in `base_s / (1 - rate / able)`, which is
    their p99. Of answers 1 % take longer than 100 ms where that is the p99, more where it is more.

    `asked` has what was measured, as (settings, rate); `closed` how often it was told to end.
    """

    def __init__(self, able: Callable[[Settings], float], base_s: float = 0.01) -> None:
        self.able, self.base_s = able, base_s
        self.asked: list[tuple[Settings, float]] = []
        self.prepared: list[Settings] = []
        self.curves: dict[Settings, Curve] = {}
        self.refused: dict[Settings, str] = {}
        self.fails: set[Settings] = set()
        self.invalid = 0  # so many measurements more are
        self.interrupt_at = 0  # the measurement at which somebody presses Ctrl-C

    def refusal(self, settings: Settings) -> str | None:
        return self.refused.get(settings)

    def curve(self, settings: Settings) -> Curve | None:
        return self.curves.get(settings)

    def prepare(self, settings: Settings) -> None:
        self.prepared.append(settings)
        if settings in self.fails:
            raise LoadFailed("no room for it")

    def measure(self, settings: Settings, rate: float, seconds: float, seed: int) -> Reading:
        self.asked.append((settings, rate))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        able = self.able(settings)
        p99 = self.base_s / (1 - rate / able) if rate < able else 100.0
        self.invalid -= 1
        return self._reading(settings, Load(mode="open", rate=rate, seconds=seconds, seed=seed), min(rate, able), p99)

    def saturate(self, settings: Settings, seconds: float, seed: int) -> Reading:
        return self._reading(settings, Load(mode="closed", concurrency=8, seconds=seconds), self.able(settings), 1.0)

    def _reading(self, settings: Settings, load: Load, throughput: float, p99: float) -> Reading:
        n = max(1, round(throughput * load.seconds))
        latency = Latency(mean_s=p99 / 2, p99_s=p99, p99_low_s=p99, p99_high_s=p99, max_s=p99)
        run = Measurement(
            load=load,
            label=settings.text,
            seconds=n / throughput,
            requests=n,
            answered=n,
            throughput=throughput,
            goodput=throughput * (1 - min(1.0, 0.01 * (p99 / 0.1) ** 2)),
            latency=latency,
            invalid=["the generator was too slow"] if self.invalid >= 0 and load.mode == "open" else [],
        )
        return Reading(run=run, cost_s=load.seconds)

    def close(self) -> None:
        pass


@pytest.fixture
def hill() -> type[Hill]:
    """The class: each test makes its own."""
    return Hill
