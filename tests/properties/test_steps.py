"""Continuous batching: every active state advances once in each step, every item ends once, and none starves."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.worker.steps import ActiveSteps, StepLimits
from penstock.types import Step

items = st.tuples(
    st.integers(0, 20),  # the step before which it arrives
    st.integers(1, 12),  # steps until it is done
    st.integers(1, 4),  # places
    st.sampled_from(("ok", "ok", "ok", "raises", "leaves", "late", "refused")),
)
LAST = 1_000


class Script:
    """A step model with an oracle: what each item did, as the model sees it."""

    def __init__(self, crowd: list[tuple[int, int, int, str]]) -> None:
        self.crowd = crowd
        self.advanced: dict[int, int] = {}
        self.active: list[int] = []  # in the order of admission
        self.stepped: list[int] = []  # by the current step

    def cost(self, key: int) -> int:
        return self.crowd[key][2]

    def admit(self, key: int) -> int:
        if self.crowd[key][3] == "refused":
            raise ValueError(key)
        self.active.append(key)
        self.advanced[key] = 0
        return key

    def step(self, states: list[int]) -> list[Step]:
        if any(self.crowd[key][3] == "raises" and self.advanced[key] == 2 for key in states):
            raise ValueError(states)
        for key in states:
            self.advanced[key] += 1
        self.stepped += states
        return [Step(self.advanced[key], done=self.advanced[key] >= self.crowd[key][1]) for key in states]

    def evict(self, key: int) -> None:
        self.active.remove(key)


@settings(max_examples=300, deadline=None)
@given(st.lists(items, max_size=40), st.integers(4, 9))
def test_each_active_state_advances_once_a_step_and_every_item_ends_once(
    crowd: list[tuple[int, int, int, str]], max_active: int
) -> None:
    model = Script(crowd)
    steps = ActiveSteps(model, StepLimits(max_active, 100))
    order = sorted(range(len(crowd)), key=lambda key: crowd[key][0])
    parts: dict[int, list[Any]] = {}
    ended: dict[int, str] = {}
    waiting, coming = [], list(order)
    for now in range(LAST):
        while coming and crowd[coming[0]][0] <= now:
            key = coming.pop(0)
            steps.add(key, key, deadline_s=crowd[key][0] + 6.0 if crowd[key][3] == "late" else float("inf"))
            waiting.append(key)
        for key in [key for key in model.active if crowd[key][3] == "leaves" and model.advanced[key] == 2]:
            steps.cancel(key)
            ended[key] = "left"
        if steps.idle and not coming:
            break
        model.stepped = []
        before = dict(model.advanced)
        outcomes = steps.advance(float(now))
        for key, part, done in outcomes:
            assert key not in ended
            parts.setdefault(key, []).append(part)
            if done:
                ended[key] = "failed" if isinstance(part, Exception) else "done"
        assert sorted(model.stepped) == sorted(set(model.stepped)), "a state advanced twice"
        assert all(model.advanced[key] == before.get(key, 0) + 1 for key in model.stepped)
        assert set(model.active) <= set(model.stepped), "an active state did not advance"
        places = sum(crowd[key][2] for key in model.active)
        assert places <= max_active
        waiting = [key for key in waiting if key not in model.advanced and key not in ended]
        if waiting and not any(done for _, _, done in outcomes):  # what ends now frees its places for the next step
            assert places + crowd[waiting[0]][2] > max_active, "the first one could have been admitted"
    assert len(ended) == len(crowd)
    assert not model.active
    for key, (_, length, _, kind) in enumerate(crowd):
        if ended[key] == "done":
            assert parts[key] == list(range(1, length + 1))
        else:
            assert kind in ("raises", "leaves", "late", "refused")
            assert kind != "raises" or parts[key][:-1] == [1, 2]
