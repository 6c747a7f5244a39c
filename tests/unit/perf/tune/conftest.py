"""A system under test without noise or time, so the right answer of the tuner is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.errors import LoadFailed
from penstock.perf.bench.measurement import Latency, Load, Measurement
from penstock.perf.tune.runner import BatchCurve, MeasuredRun
from penstock.perf.tune.space import CandidateSettings


class Hill:
    """A SystemUnderTest: settings that sustain `able(settings)` requests/s have a p99 of `base_s / (1 - rate / able)`.

    With a p99 of 100 ms, 1 % of the answers take longer than 100 ms; with a higher p99 more do. `asked` lists the
    measurements as (settings, rate).
    """

    def __init__(self, able: Callable[[CandidateSettings], float], base_s: float = 0.01) -> None:
        self.able, self.base_s = able, base_s
        self.asked: list[tuple[CandidateSettings, float]] = []
        self.prepared: list[CandidateSettings] = []
        self.curves: dict[CandidateSettings, BatchCurve] = {}
        self.refused: dict[CandidateSettings, str] = {}
        self.fails: set[CandidateSettings] = set()
        self.invalid = 0  # this many further measurements are invalid
        self.interrupt_at = 0  # the measurement that Ctrl-C interrupts

    def refusal(self, settings: CandidateSettings) -> str | None:
        return self.refused.get(settings)

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        return self.curves.get(settings)

    def prepare(self, settings: CandidateSettings) -> None:
        self.prepared.append(settings)
        if settings in self.fails:
            raise LoadFailed("no room for it")

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        self.asked.append((settings, rate))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        able = self.able(settings)
        p99 = self.base_s / (1 - rate / able) if rate < able else 100.0
        self.invalid -= 1
        return self._measured(settings, Load(mode="open", rate=rate, seconds=seconds, seed=seed), min(rate, able), p99)

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        return self._measured(settings, Load(mode="closed", concurrency=8, seconds=seconds), self.able(settings), 1.0)

    def _measured(self, settings: CandidateSettings, load: Load, throughput: float, p99: float) -> MeasuredRun:
        n = max(1, round(throughput * load.seconds))
        latency = Latency(mean_s=p99 / 2, p99_s=p99, p99_low_s=p99, p99_high_s=p99, max_s=p99)
        run = Measurement(
            load=load,
            label=settings.text,
            seconds=n / throughput,
            requests=n,
            answered=n,
            throughput=throughput,
            too_slow=int(n * min(1.0, 0.01 * (p99 / 0.1) ** 2)),
            latency=latency,
            invalid=["the generator was too slow"] if self.invalid >= 0 and load.mode == "open" else [],
        )
        return MeasuredRun(run=run, cost_s=load.seconds)

    def close(self) -> None:
        pass


@pytest.fixture
def hill() -> type[Hill]:
    """The class Hill."""
    return Hill
