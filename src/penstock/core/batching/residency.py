"""Residency: which models are in the memory of the devices, and which leaves for another. Pure; time is an argument.

Every device has a budget in bytes. A model that is wanted and does not fit takes the place of the least valuable ones.
The value of a model is what its absence costs, per byte: the probability of its use x the time of its load (the greedy
dual size frequency rule of web caches, without its aging). A use is one request or more between two loads of any
models: it is what a load would be needed for.

The probability is predicted from past uses. A long memory is exact while popularity stays, and wrong for long after it
has changed; a short one follows at once, and is never exact. So several memories predict. Each weighs as much as the
probability that it gave the uses of the last loads (a mixture of experts). Memories last for numbers of loads, not of
seconds or requests: a slow turnover needs a longer one, and the requests of one model must not hide the
requests of others.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from penstock.errors import ConfigError

if TYPE_CHECKING:  # NumPy is imported where models compete: a batcher of a streamer needs none
    import numpy as np
    from numpy.typing import NDArray

# Choices, checked by tests/properties/test_residency.py against Belady's rule and the least recently used model.
MEMORIES = (4.0, 16.0, 64.0, 256.0, 1024.0)  # loads after which a use counts 1/e
_SCORED = 20.0  # loads after which a prediction counts 1/e in the weight of its memory
_UNSEEN = 0.2  # uses that every model has at least: one without any is improbable, not impossible
STAY_S = 1.0  # a model with requests stays at least this long, or four times its load if that is longer
_LOADS = 4.0
OUT_OF_MEMORY = 1.25  # factor on the estimate of a model whose load ran out of memory


class OverBudget(ConfigError):
    """There can never be room for a model. The text has nothing that a client may not see."""


class ResidentModel(Struct, eq=False):
    """One model version. `need` has its bytes on each device, 0 if not known yet; `memory_declared`: from its section.

    `requests` counts since its start. `since_s` is the time of the last move: "out", "loading", "in" or "leaving".
    """

    key: tuple[str, str]
    need: dict[str, int]
    pinned: bool = False
    keep_alive_s: float = math.inf
    declared: bool = False
    place: str = "out"
    since_s: float = 0.0
    used_s: float = -math.inf
    load_s: float = 1.0  # learned
    requests: int = 0
    uses: Sequence[float] = (0.0,) * len(MEMORIES)  # in each memory
    counted: int = 0  # requests that are in `uses`
    share: float = 0.0  # predicted, of all uses
    loads: int = 0
    evictions: int = 0
    reason: str = ""  # of its last move
    held: dict[str, int] = field(default_factory=dict)  # while it loads: bytes on devices where `need` is not known

    @property
    def size(self) -> int:
        return sum(self.need.values())

    @property
    def value(self) -> float:
        """Seconds of waiting that a byte saves."""
        return self.share * self.load_s / max(1, self.size)

    def explain(self) -> dict[str, object]:
        """The statistics of one model, for people."""
        return {
            "place": self.place,
            "reason": self.reason,
            "bytes": dict(self.need),
            "load_s": self.load_s,
            "share": self.share,
            "loads": self.loads,
            "evictions": self.evictions,
            "pinned": self.pinned,
        }

    def move(self, place: str, reason: str, now: float) -> None:
        self.place, self.reason, self.since_s = place, reason, now
        if place != "loading":
            self.held = {}


class Residency:
    """The models of an engine whose devices have budgets, and those with `keep_alive_s`."""

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self.budgets = dict(budgets)
        self.models: dict[tuple[str, str], ResidentModel] = {}
        self._loads = self._learned = 0  # loads, and those when uses were counted last
        self._scores: Any = 0.0  # logarithms of the probability that each gave the last uses

    def add(self, model: ResidentModel) -> None:
        """Raises OverBudget if it can never be loaded."""
        self.check(model)
        self.models[model.key] = model

    def _pinned(self, device: str, model: ResidentModel) -> int:
        """Bytes of a device that other pinned models hold."""
        return sum(m.need.get(device, 0) for m in self.models.values() if m.pinned and m is not model)

    def check(self, model: ResidentModel) -> None:
        """Raises OverBudget if there can never be room: a size that was measured may be more than was expected."""
        for device, need in self.reservation(model).items():
            if device not in self.budgets:
                continue
            others = self._pinned(device, model)
            if need > self.budgets[device] - others:
                pinned = f", of which pinned models hold {others:,}" if others else ""
                needs = (
                    f"took {need:,} bytes of {device} when it was loaded"
                    if model.loads
                    else f"needs {need:,} bytes of {device}"
                )
                raise OverBudget(
                    f"model '{model.key[0]}' {needs}, and its budget is {self.budgets[device]:,} bytes{pinned}:"
                    " raise it in [devices]"
                )

    def used(self, device: str) -> int:
        """Bytes of the models that are on a device, come or leave."""
        return sum(m.need.get(device) or m.held.get(device, 0) for m in self.models.values() if m.place != "out")

    def reservation(self, model: ResidentModel) -> dict[str, int]:
        """What `model` needs; of a size that is not known yet, as much as the largest known model of the device, or
        all that pinned models leave."""
        found = dict(model.need)
        for device, need in found.items():
            if not need:
                largest = max((m.need.get(device, 0) for m in self.models.values()), default=0)
                free = self.budgets.get(device, largest) - self._pinned(device, model)
                found[device] = min(largest, max(1, free))
        return found

    def make_room(
        self, model: ResidentModel, busy: Mapping[tuple[str, str], int], now: float
    ) -> list[ResidentModel] | None:
        """The models that must leave, besides those that are leaving, before `model` can be loaded: the least valuable
        first. None: too many have requests.

        `busy` counts the waiting and running requests of models. A model with requests leaves only after it has stayed
        for a while, so that everyone gets a turn.
        """
        leaving, enough = self._leaving(self.reservation(model), busy, now)
        return leaving if enough else None

    def excess(self, busy: Mapping[tuple[str, str], int], now: float) -> list[ResidentModel]:
        """The models that must leave because a load has proved larger than expected: the least valuable first."""
        return self._leaving(dict.fromkeys(self.budgets, 0), busy, now)[0]

    @property
    def exceeded(self) -> bool:
        """Whether a model that may leave is on a device whose budget is exceeded."""
        over = {device for device, budget in self.budgets.items() if self.used(device) > budget}
        return any(m.place == "in" and not m.pinned and not over.isdisjoint(m.need) for m in self.models.values())

    def _leaving(
        self, wanted: Mapping[str, int], busy: Mapping[tuple[str, str], int], now: float
    ) -> tuple[list[ResidentModel], bool]:
        """The models that must leave to free the wanted bytes of each device, and whether that is enough."""
        missing = {}
        for device, need in wanted.items():
            if device in self.budgets:
                missing[device] = self.used(device) + need - self.budgets[device]
                missing[device] -= sum(m.need.get(device, 0) for m in self.models.values() if m.place == "leaving")
        leaving: list[ResidentModel] = []
        if all(n <= 0 for n in missing.values()):
            return leaving, True
        self._predict()
        candidates = [m for m in self.models.values() if m.place == "in" and not m.pinned]
        candidates.sort(key=lambda m: (busy.get(m.key, 0) > 0, m.value, m.used_s))
        for other in candidates:
            if not any(missing[d] > 0 and other.need.get(d) for d in missing):
                continue
            if busy.get(other.key) and now < other.since_s + max(STAY_S, _LOADS * other.load_s):
                continue
            leaving.append(other)
            for device in missing:
                missing[device] -= other.need.get(device, 0)
        return leaving, all(n <= 0 for n in missing.values())

    def _predict(self) -> None:
        """Scores the memories by the uses since the last load, adds these to them, and predicts the shares."""
        loads, self._learned = self._loads - self._learned, self._loads
        if not loads:
            return
        import numpy as np

        models = list(self.models.values())
        uses = np.array([m.uses for m in models])
        new = np.array([[m.requests > m.counted] for m in models])
        self._scores *= math.exp(-loads / _SCORED)
        self._scores += (new * np.log(_shares(uses))).sum(axis=0)
        uses = uses * np.exp(-loads / np.array(MEMORIES)) + new
        weights = np.exp(self._scores - self._scores.max())
        shares = _shares(uses) @ (weights / weights.sum())
        for model, used, share in zip(models, uses, shares.tolist(), strict=True):
            model.uses, model.counted, model.share = used, model.requests, share

    def fits(self, model: ResidentModel) -> bool:
        """Whether `model` can be loaded now. While no size is known, one model is loaded after the other."""
        need = self.reservation(model)
        coming = [m for m in self.models.values() if m.place == "loading" and m is not model]
        if any(d in need and d in self.budgets and not (n or m.held.get(d)) for m in coming for d, n in m.need.items()):
            return False
        return all(self.used(d) + n <= self.budgets.get(d, math.inf) for d, n in need.items())

    def expired(self, busy: Mapping[tuple[str, str], int], now: float) -> list[ResidentModel]:
        """The models that no request used for `keep_alive_s`."""
        return [
            m
            for m in self.models.values()
            if m.place == "in" and not m.pinned and not busy.get(m.key) and now >= m.used_s + m.keep_alive_s
        ]

    def next_expiry(self) -> float:
        """The earliest time at which a model that stays unused leaves; infinite if none does."""
        return min(
            (m.used_s + m.keep_alive_s for m in self.models.values() if m.place == "in" and not m.pinned),
            default=math.inf,
        )

    def loaded(self, model: ResidentModel, measured: Mapping[str, int], seconds: float) -> list[str]:
        """Learns from a load. Returns the devices on which the model took more than it declared."""
        model.loads += 1
        self._loads += 1
        model.load_s += (seconds - model.load_s) / min(model.loads, 4)
        more = [d for d, n in measured.items() if model.declared and n > model.need.get(d, 0)]
        for device, nbytes in measured.items():
            if not model.declared or device in more:
                model.need[device] = nbytes
        return more

    def ran_out(self, model: ResidentModel) -> bool:
        """Corrects the estimate of a model whose load ran out of memory. False: no budget can hold it."""
        can = False
        for device, need in self.reservation(model).items():
            largest = self.budgets.get(device, 0)
            if need < largest:
                model.need[device] = min(largest, max(need + 1, int(need * OUT_OF_MEMORY)))
                can = True
        return can


def _shares(uses: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """The shares that each memory predicts, from uses of shape (models, memories)."""
    shares: NDArray[np.float64] = (uses + _UNSEEN) / (uses + _UNSEEN).sum(axis=0)
    return shares
