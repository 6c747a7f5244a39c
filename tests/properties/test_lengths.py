"""With lengths every invariant of the scheduler holds, padding stays small under load, and no length starves."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.core.batching.lengths import CLASSES, GROWTH
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed, Unbatched
from penstock.testing.policies import PolicyChecker, check_invariance
from penstock.testing.scripts import ScriptSetup, random_setup

POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "adaptive": Adaptive,
    "never held": lambda: Adaptive(0.0),
    "fixed": lambda: Fixed(0.01),
    "none": Unbatched,
}


def with_lengths(setup: ScriptSetup, rng: Random) -> ScriptSetup:
    most = rng.choice((1, 8, 40, 300))
    steps = tuple(structs.replace(step, length=rng.randint(1, most)) for step in setup.steps)
    max_tokens = rng.choice((None, most, 2 * most, 10 * most))
    sizes = rng.choice(((), (), (1, 3, setup.max_batch_size) if setup.max_batch_size > 3 else ()))
    return structs.replace(setup, steps=steps, lengths=True, max_tokens=max_tokens, sizes=sizes)


@given(length=st.integers(1, 2**31 - 1))
def test_a_class_is_little_longer_than_its_rows(length: int) -> None:
    assert length <= CLASSES.up(length) <= max(8, GROWTH * length + 1)


@pytest.mark.parametrize("name", POLICIES)
def test_every_invariant_holds_with_lengths(name: str) -> None:
    decisions = 0
    for k in range(400):
        rng = Random(f"lengths/{k}")
        setup = with_lengths(random_setup(rng, 80), rng)
        checker = PolicyChecker(setup, POLICIES[name])
        checker.play()
        decisions += len(checker.trace)
        if k % 10 == 0 and name != "fixed":
            check_invariance(setup, POLICIES[name])
    assert decisions > 4000
