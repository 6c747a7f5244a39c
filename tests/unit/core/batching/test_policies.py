"""What each policy chooses, seen through a Scheduler."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.fixed import Fixed, Unbatched
from penstock.core.engine.rules import policy_of
from penstock.errors import ConfigError

Make = Callable[..., Any]

SCRIPTS: dict[str, tuple[Callable[[], Any], tuple[float, float] | None, dict[str, int], str]] = {
    "none sends every request alone": (Unbatched, None, {"slots": 2}, "+1 2 3 | >[1] [2]"),
    "none sends a request of many rows whole": (Unbatched, None, {}, "+1 rows=3 | >[1] | running 3"),
    "fixed waits for its delay": (
        lambda: Fixed(0.5), None, {}, "+1 | > | wake 0.5 | wait 0.2 | +2 | > | >@0.3 [1 2]"
    ),
    "fixed sends a full batch at once": (lambda: Fixed(0.5), None, {}, "+1 2 3 4 5 | >[1 2 3 4]"),
    "fixed without a delay is greedy": (lambda: Fixed(0.0), None, {"slots": 2}, "+1 2 | >[1 2]"),
    "adaptive sends a lone request at once": (
        Adaptive, (0.005, 0.0002), {"slots": 4, "max_batch_size": 64}, "+1 | >[1]"
    ),
    "adaptive spreads a long queue over idle slots": (  # the knee is at 2 rows
        Adaptive, (1.0, 0.5), {"slots": 2, "max_batch_size": 64}, "+0 1 2 3 4 5 6 7 | >[0 1 2 3] [4 5 6 7]"
    ),
    # below, n rows take (1 + n) s, times 1.15 and a little less to be sure
    "adaptive takes the largest batch that enough can bear and skips tight heads": (
        Adaptive, (1.0, 1.0), {"max_batch_size": 8},
        "+1 deadline_s=3 | +2 3 4 5 6 7 deadline_s=20 | >[2 3 4 5 6 7]deadline | queued 1 1",
    ),
    "adaptive drops requests that cannot meet their deadline alone": (
        Adaptive, (1.0, 1.0), {}, "+1 deadline_s=1.9 | +2 deadline_s=9 | >[2] !expired 1"
    ),
    "adaptive drops many rows by the time of all of them": (
        Adaptive, (1.0, 1.0), {"max_batch_size": 8}, "+1 rows=8 deadline_s=6 | +2 deadline_s=6 | >[2] !expired 1"
    ),
    # below, three clients are known
    "adaptive lets a batch wait for all clients while they keep a processor busy": (
        Adaptive, (0.005, 0.0002), {},
        "+1 2 3 | >[1 2 3] | ok 1 | crowd | +4 | > | wake 0.005 | +5 | > | +6 | >[4 5 6]crowd",
    ),
    "adaptive waits no longer once they rest, nor the next time for those that did not come": (
        Adaptive, (0.005, 0.0002), {},
        "+1 2 3 | >[1 2 3] | ok 1 | crowd | +4 5 | > | calm | >@0.005 [4 5]crowd | ok 2 | crowd | +6 7 | >[6 7]",
    ),
    "adaptive waits for busy callers for 0.1 s at most": (
        Adaptive, (0.005, 0.0002), {},
        "+1 2 3 | >[1 2 3] | ok 1 | crowd | +4 | > | >@0.06 | wake 0.005 | >@0.04 [4]crowd",
    ),
    "adaptive remembers its clients after a full batch that ended such a wait": (
        Adaptive, (0.005, 0.0002), {},
        "+1 2 3 | >[1 2 3] | ok 1 | crowd | +4 | > | +5 6 7 | >[4 5 6 7]full | ok 2"
        " | calm | wait 1 | +8 | >[8] | ok 3 | crowd | +9 | >",
    ),
    "adaptive lets no batch wait for busy callers if a deadline would be missed": (
        Adaptive, (0.005, 0.0002), {}, "+1 2 3 | >[1 2 3] | ok 1 | crowd | +4 deadline_s=0.01 | >[4]"
    ),
    "adaptive lets the only client that is known wait for nobody": (
        Adaptive, (0.005, 0.0002), {}, "+1 | >[1] | ok 1 | crowd | +2 | >[2]"
    ),
    "adaptive without holds does not wait for busy callers": (
        lambda: Adaptive(0.0), (0.005, 0.0002), {}, "+1 2 3 | >[1 2 3] | ok 1 | crowd | +4 | >[4]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(bench: Make, name: str) -> None:
    policy, prime, keys, script = SCRIPTS[name]
    b = bench(policy(), **keys)
    if prime is not None:
        b.prime(*prime)
    b.play(script)


def test_fixed_does_not_hold_a_request_until_its_deadline_is_lost(bench: Make) -> None:
    b = bench(Fixed(5.0))
    b.prime(0.5, 0.5)
    b.offer(1, deadline_s=b.now + 3.0)
    assert b.poll() == []
    assert b.poll(b.scheduler.wake_at - b.now) == [[1]]
    assert b.now + 1.0 < 103.0


# ---- by name


@pytest.mark.parametrize(("name", "cls"), [("adaptive", Adaptive), ("fixed", Fixed), ("none", Unbatched)])
def test_policies_are_made_by_name(name: str, cls: type) -> None:
    assert type(policy_of(BatchingConfig(policy=name))) is cls


def test_the_delay_of_fixed_follows_the_target_unless_it_is_given() -> None:
    for hold, slo, delay in (("auto", None, 0.1), ("auto", 0.05, 0.025), (0.3, 0.05, 0.3)):
        policy = policy_of(BatchingConfig(policy="fixed", max_hold_s=hold, slo_s=slo))
        assert policy.explain() == {"policy": "fixed", "max_hold_s": delay}


def test_an_unknown_policy_is_named_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"'adaptve'.*did you mean 'adaptive'"):
        policy_of(BatchingConfig(policy="adaptve"))


class Delayed(Unbatched):
    """A user's own policy."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s


def test_your_own_policy_receives_its_options() -> None:
    target = f"{__file__}:Delayed"
    assert policy_of(BatchingConfig(policy=target, options={"delay_s": 0.02})).delay_s == 0.02
    with pytest.raises(ConfigError, match=r"batching\.policy: making .*:Delayed with options dely_s raised TypeError"):
        policy_of(BatchingConfig(policy=target, options={"dely_s": 0.02}))
    with pytest.raises(ConfigError, match=r"batching\.options: the policy 'fixed' takes none, found 'delay_s'"):
        policy_of(BatchingConfig(policy="fixed", options={"delay_s": 0.02}))


# ---- classes


@pytest.fixture
def sixty(bench: Make) -> Any:
    """A slot that takes 20 ms and 1 ms a row, 64 rows at most; class 1 may wait 10 s longer."""
    b = bench(Adaptive(), max_batch_size=64, max_queue=10_000, priority=(0.0, 10.0), depth=2)
    b.scheduler.prime([(n, 0.020 + 0.001 * n) for n in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)])
    return b


def test_lower_classes_fill_a_batch_that_an_urgent_request_leads_only_as_throughput_needs_it(sixty: Any) -> None:
    sixty.offer(*range(1, 101), priority=1)
    sixty.offer(1000)
    assert sixty.poll() == [[1000, *range(1, 49)]]  # 49 rows take 69 ms: 93 % of the 64 rows in 84 ms
    assert sixty.sent[0].reason == "urgent"
    rate, full = 49 / 0.069, 64 / 0.084
    assert 48 / 0.068 < 0.93 * full <= rate


def test_a_batch_of_one_class_is_full_whatever_the_class(sixty: Any) -> None:
    sixty.offer(*range(1, 101), priority=1)
    assert sixty.poll() == [[*range(1, 65)]]
    sixty.complete(1)
    sixty.offer(*range(101, 201), priority=0)
    assert sixty.poll() == [[*range(101, 165)]]


def test_urgent_requests_fill_a_batch_themselves(sixty: Any) -> None:
    sixty.offer(*range(1, 101), priority=1)
    sixty.offer(*range(1001, 1061))
    assert sixty.poll() == [[*range(1001, 1061)]]


def test_a_few_queued_requests_share_the_batch_of_an_urgent_one(sixty: Any) -> None:
    sixty.offer(1, 2, 3, priority=1)
    sixty.offer(1000)
    assert sixty.poll() == [[1000, 1, 2, 3]]


def test_lower_classes_do_not_make_an_urgent_request_late(sixty: Any) -> None:
    sixty.offer(*range(1, 101), priority=1)
    sixty.offer(1000, deadline_s=sixty.now + 0.050)
    assert sixty.poll() == [[1000]]


def test_a_request_that_has_waited_its_budget_leads_a_full_batch_itself(sixty: Any) -> None:
    sixty.offer(*range(1, 101), priority=1)
    sixty.now += 10.5
    sixty.offer(1000)
    assert sixty.poll() == [[*range(1, 65)]]


def test_a_split_bulk_request_fills_the_batch_of_an_urgent_one(sixty: Any) -> None:
    for id in (1, 2, 3):
        sixty.offer(id, rows=32, priority=1, divisible=True)
    sixty.offer(1000)
    sixty.poll()
    assert [(e.id, e.start, e.rows) for e in sixty.sent[0].entries] == [(1000, 0, 1), (1, 0, 32), (2, 0, 16)]
