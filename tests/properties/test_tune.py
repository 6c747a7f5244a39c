"""On a noisy machine the tuner recommends nothing that is worse than the default, and still finds what is better.

The machine is simulated: its speed drifts, each run has its own luck, and every few runs something else takes the
cores. Whether a recommendation is worse is known here, unlike on a real machine.
"""

import math
import random
from typing import Any

import pytest
from msgspec import Struct

from penstock.perf.bench.measurement import parse_slo
from penstock.perf.tune.rates import EFFORTS
from penstock.perf.tune.runner import MeasuredRun
from penstock.perf.tune.space import CandidateSettings, parse_space
from penstock.perf.tune.tuner import tune
from support.synthetic import Hill

SPACE = parse_space("batch=1..32,instances=1,2")
SLO = parse_slo("p99<=20ms,error<=1%")
LIMIT_S = 0.02
BASELINE = CandidateSettings()
WORSE = 0.03  # share by which a recommendation may be worse than the default
DRIFT_S = 60.0  # time in which the machine forgets its speed


class Noise(Struct, frozen=True):
    """`drift` and `luck` are deviations of the logarithm of the speed; `bursts` is the share of runs that lose up to
    two thirds of their speed to something else."""

    drift: float
    luck: float
    bursts: float


QUIET, BUSY, WILD = Noise(0.01, 0.01, 0.0), Noise(0.1, 0.05, 0.1), Noise(0.3, 0.15, 0.25)


class NoisyMachine(Hill):
    """A machine whose settings meet the SLO up to `rates` requests per second at the speed of the moment."""

    limit_s = LIMIT_S

    def __init__(self, seed: int, noise: Noise, best: float) -> None:
        """`best` is the largest rate of the space, as a multiple of the default's 1000/s."""
        super().__init__(lambda settings: self.rates[settings] * self.speed / 0.9, base_s=0.1 * LIMIT_S)
        self.rng, self.noise, self.speed = random.Random(seed), noise, 1.0
        self.rates = {settings: 1000 * self.rng.uniform(0.1, 1.0) * best for settings in SPACE}
        self.rates[self.rng.choice(list(SPACE))] = 1000 * best
        self.rates[BASELINE] = 1000.0
        self.drift = self.rng.gauss(0, noise.drift)

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        self._proceed(seconds)
        return super().measure(settings, rate, seconds, seed)

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        self._proceed(seconds)
        return super().saturate(settings, seconds, seed)

    def _proceed(self, seconds: float) -> None:
        """Draws the speed of the next run."""
        rng, noise = self.rng, self.noise
        kept = math.exp(-seconds / DRIFT_S)
        self.drift = kept * self.drift + math.sqrt(1 - kept * kept) * rng.gauss(0, noise.drift)
        burst = rng.uniform(1 / 3, 1.0) if rng.random() < noise.bursts else 1.0
        self.speed = math.exp(self.drift + rng.gauss(0, noise.luck)) * burst

    def late(self, n: int, p99: float) -> int:
        share = min(1.0, 0.01 * (p99 / LIMIT_S) ** 2)
        return min(n, max(0, round(self.rng.gauss(n * share, math.sqrt(n * share * (1 - share))))))


def recommended(seed: int, noise: Noise, best: float, **options: Any) -> float | None:
    """The true rate of what is recommended, as a multiple of the default's; None if nothing is."""
    machine = NoisyMachine(seed, noise, best)
    result = tune(machine, SPACE, SLO, seed=seed, **options)
    if result.unproven:
        return None
    assert result.chosen is not None
    return machine.rates[result.chosen] / 1000


@pytest.mark.parametrize("noise", [QUIET, BUSY, WILD], ids=["quiet", "busy", "wild"])
@pytest.mark.parametrize("best", [0.2, 0.95, 1.02])
def test_nothing_worse_than_the_default_is_recommended(noise: Noise, best: float) -> None:
    for seed in range(24):
        budget_s, effort = (math.inf, 300.0, 60.0)[seed % 3], EFFORTS[("normal", "quick")[seed % 2]]
        found = recommended(seed, noise, best, budget_s=budget_s, effort=effort)
        assert found is None or found >= 1 - WORSE, f"seed {seed}"


@pytest.mark.parametrize(("noise", "least"), [(QUIET, 19), (BUSY, 12)], ids=["quiet", "busy"])
def test_what_is_better_is_found(noise: Noise, least: int) -> None:
    found = [recommended(seed, noise, 1.5) for seed in range(20)]
    assert all(one is None or one > 1 for one in found)
    assert sum(one is not None and one >= 1.2 for one in found) >= least
