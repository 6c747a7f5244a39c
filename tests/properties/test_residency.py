"""Models in the memory of devices, over random requests: the budget is kept, and everyone is loaded in the end."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batching.residency import Residency, ResidentModel

LOAD_S = 0.2


class Shell:
    """The moves of a ResidencyManager in virtual time: a load takes LOAD_S, a departure none, an answer none."""

    def __init__(self, residency: Residency, load_s: float = LOAD_S) -> None:
        self.residency, self.load_s = residency, load_s
        self.measured: dict[ResidentModel, dict[str, int]] = {}
        self.waiting: dict[ResidentModel, int] = {}  # model -> requests, in order of the first one
        self.loading: dict[ResidentModel, float] = {}  # model -> end
        self.hits = self.answered = self.requests = 0
        self.now = 0.0

    def request(self, model: ResidentModel, now: float) -> None:
        self.until(now)
        self.requests += 1
        model.requests += 1
        model.used_s = now
        if model.place == "in":
            self.hits += 1
            self.answered += 1
        else:
            self.waiting[model] = self.waiting.get(model, 0) + 1
        self.turn()

    def until(self, now: float) -> None:
        """Lets everything happen that is due."""
        while self.loading and min(self.loading.values()) <= now:
            model = min(self.loading, key=lambda m: self.loading[m])
            self.now = self.loading.pop(model)
            self.residency.loaded(model, self.measured.get(model, {}), self.load_s)
            model.move("in", "requested", self.now)
            self.answered += self.waiting.pop(model, 0)
            self.turn()
        self.now = now
        self.turn()

    def turn(self) -> None:
        residency = self.residency
        for model in residency.expired({}, self.now):
            model.move("out", "unused", self.now)
        for model in residency.excess({}, self.now):
            model.move("out", "budget exceeded", self.now)
        for model in [m for m in self.waiting if m.place == "out"]:
            leaving = residency.make_room(model, {}, self.now)
            for other in leaving or ():
                assert other.place == "in"
                assert not other.pinned
                other.move("out", "room", self.now)
            if leaving is None or not residency.fits(model):
                break
            model.move("loading", "requested", self.now)
            self.loading[model] = self.now + self.load_s
        for device, budget in residency.budgets.items():
            assert residency.used(device) <= budget


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.sampled_from([0.5, math.inf])),
        min_size=1,
        max_size=12,
    ),
    st.integers(60, 120),
    st.lists(st.tuples(st.integers(0, 11), st.floats(0, 2)), max_size=60),
)
def test_the_budget_is_kept_and_every_request_is_answered(
    sizes: list[tuple[int, int, bool, float]], budget: int, requests: list[tuple[int, float]]
) -> None:
    residency = Residency({"cpu": budget, "cuda:0": budget})
    models = []
    pinned = 0
    shell, now = Shell(residency), 0.0
    for k, (size, measured, pin, keep_alive_s) in enumerate(sizes):
        pin = pin and pinned + size <= budget - 60  # the largest other one still fits
        device = "cuda:0" if k % 2 else "cpu"
        model = ResidentModel((str(k), "1"), {device: size}, pin, keep_alive_s, declared=True)
        residency.add(model)
        models.append(model)
        if pin:
            pinned += size
            model.move("in", "pinned", 0.0)
        shell.measured[model] = {device: measured}
    for number, pause in requests:
        now += pause
        shell.request(models[number % len(models)], now)
    shell.until(now + LOAD_S * (len(models) + 1))
    assert shell.answered == len(requests)
    assert all(model.place == "in" for model in models if model.pinned)


def least_misses(arrivals: list[int], places: int) -> int:
    """Misses of Belady's rule: the model whose next request is the farthest away leaves."""
    following, last = [0] * len(arrivals), {}
    for k in range(len(arrivals) - 1, -1, -1):
        following[k] = last.get(arrivals[k], len(arrivals))
        last[arrivals[k]] = k
    inside: dict[int, int] = {}
    misses = 0
    for k, model in enumerate(arrivals):
        if model not in inside:
            misses += 1
            if len(inside) >= places:
                del inside[max(inside, key=lambda m: inside[m])]
        inside[model] = following[k]
    return misses


def recent_misses(arrivals: list[int], places: int) -> int:
    """Misses if the least recently used model leaves."""
    inside: dict[int, None] = {}
    misses = 0
    for model in arrivals:
        misses += model not in inside
        inside.pop(model, None)
        if len(inside) >= places:
            del inside[next(iter(inside))]
        inside[model] = None
    return misses


def zipf(exponent: float, every: int, count: int, seed: int) -> list[int]:
    """Requests for MODELS models, whose ranks change at random after each `every` requests."""
    rng, models = random.Random(seed), list(range(MODELS))
    weights = [1 / k**exponent for k in range(1, MODELS + 1)]
    found: list[int] = []
    while len(found) < count:
        found += rng.choices(models, weights, k=min(every, count - len(found)))
        rng.shuffle(models)
    return found


def bursts(count: int, seed: int) -> list[int]:
    """Eight models have requests at a time, up to 60 each, and are replaced by others: what is recent is all that
    counts."""
    rng = random.Random(seed)
    active = [rng.randrange(MODELS) for _ in range(8)]
    found: list[int] = []
    while len(found) < count:
        place = rng.randrange(8)
        found.append(active[place])
        if rng.random() < 1 / 30:
            active[place] = rng.randrange(MODELS)
    return found


def loads(arrivals: list[int], places: int, busy: int = 0) -> int:
    """Loads of a Residency with room for `places` models of equal size, with a request a second. Before each, a pinned
    model has `busy` requests."""
    residency = Residency({"cpu": places * 10})
    models = [ResidentModel((str(k), "1"), {"cpu": 10}, declared=True) for k in range(MODELS)]
    for model in models:
        residency.add(model)
    pinned = ResidentModel(("pinned", "1"), {"cpu": 0}, pinned=True, declared=True, place="in")
    if busy:
        residency.add(pinned)
    shell = Shell(residency)
    for second, k in enumerate(arrivals):
        pinned.requests += busy
        shell.request(models[k], float(second))
    shell.until(len(arrivals) + 1.0)
    assert shell.answered == len(arrivals)
    return sum(model.loads for model in models)


MODELS = 100
FIVE_MINUTES = 1500  # requests, of 5 a second
FOR_EVER = 10**9


@pytest.mark.parametrize("places", [5, 10, 30])
@pytest.mark.parametrize(
    ("exponent", "every", "share"),
    [
        (1.0, FIVE_MINUTES, 0.84),
        (1.2, FIVE_MINUTES, 0.88),
        (1.0, FOR_EVER, 0.86),
        (1.2, FOR_EVER, 0.9),
    ],
)
def test_the_models_in_memory_follow_a_change_of_popularity(
    places: int, exponent: float, every: int, share: float
) -> None:
    for seed in (1, 2, 3):
        arrivals = zipf(exponent, every, 4 * FIVE_MINUTES, seed)
        found, best, recent = (
            1 - misses(arrivals, places) / len(arrivals) for misses in (loads, least_misses, recent_misses)
        )
        assert found >= share * best, (found, best)
        assert found >= recent, (found, recent)


@settings(max_examples=12)
@given(
    st.integers(0, 999),
    st.integers(3, 40),
    st.floats(0.7, 1.4),
    st.sampled_from([150, 300, 1500, FOR_EVER]),
    st.sampled_from([0, 200]),
)
def test_fewer_models_are_loaded_than_if_the_least_recently_used_one_leaves(
    seed: int, places: int, exponent: float, every: int, busy: int
) -> None:
    arrivals = zipf(exponent, every, 1500, seed)
    found, recent = loads(arrivals, places, busy), recent_misses(arrivals, places)
    # a trace is a sample: in 570 of them the ratio exceeded 1.02 ten times, and was 348 to 329 at most
    assert found <= 1.02 * recent + recent**0.5, (found, recent)


@pytest.mark.parametrize("places", [5, 10, 30])
def test_bursts_are_followed(places: int) -> None:
    arrivals = bursts(3000, places)
    hits, recent = (len(arrivals) - misses(arrivals, places) for misses in (loads, recent_misses))
    assert hits >= 0.96 * recent, (hits, recent)


def test_a_model_with_requests_keeps_its_place_for_a_while() -> None:
    residency = Residency({"cpu": 10})
    one, two = (ResidentModel((name, "1"), {"cpu": 8}, declared=True, load_s=0.1) for name in "ab")
    residency.add(one)
    residency.add(two)
    one.move("in", "requested", 0.0)
    busy = {("a", "1"): 3}
    assert residency.make_room(two, busy, 0.5) is None
    assert residency.make_room(two, busy, 1.5) == [one]
    assert residency.make_room(two, {}, 0.5) == [one]


def test_memory_is_learned_from_loads() -> None:
    residency = Residency({"cpu": 100})
    first, second = ResidentModel(("a", "1"), {"cpu": 0}), ResidentModel(("b", "1"), {"cpu": 0})
    declared = ResidentModel(("c", "1"), {"cpu": 20}, declared=True)
    for model in (first, second, declared):
        residency.add(model)
    assert residency.loaded(first, {"cpu": 60}, 1.0) == []
    assert residency.reservation(second) == {"cpu": 60}, "as the largest known one"
    assert residency.loaded(declared, {"cpu": 10}, 1.0) == []
    assert declared.need == {"cpu": 20}
    assert residency.loaded(declared, {"cpu": 30}, 1.0) == ["cpu"]
    assert declared.need == {"cpu": 30}
    needs = []
    while residency.ran_out(declared):
        needs.append(declared.need["cpu"])
    assert needs == sorted(set(needs))
    assert needs[-1] == 100
