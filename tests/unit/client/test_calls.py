import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.calls import RetryPolicy, is_safe
from penstock.client.endpoint import (
    ConnectionLost,
    MalformedResponse,
    ResponseTimeout,
    Unreachable,
    UntrustedCertificate,
)
from penstock.errors import (
    BadRequest,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
    QueueFull,
    RunTimeout,
    WorkerDied,
)

NEVER_RUN = (Unreachable, QueueFull, ModelNotReady)
PERHAPS_RUN = (ConnectionLost, WorkerDied)
FINAL = (BadRequest, ItemFailed, ModelNotFound, RunTimeout, UntrustedCertificate, MalformedResponse, ResponseTimeout)
seconds = st.floats(0, 1e6)
policies = st.builds(RetryPolicy, st.integers(0, 50), st.floats(0, 60), st.floats(0.01, 600))


@pytest.mark.parametrize("repeatable", [False, True])
def test_only_requests_that_are_safe_to_repeat_are_sent_again(repeatable: bool):
    safe = {kind for kind in (*NEVER_RUN, *PERHAPS_RUN, *FINAL) if is_safe(kind("no"), repeatable)}
    assert safe == {*NEVER_RUN, *(PERHAPS_RUN if repeatable else ())}


@given(policies, st.sampled_from(NEVER_RUN), st.integers(1, 60), seconds, seconds | st.none(), st.floats(0, 1))
def test_a_pause_is_bounded_and_ends_in_time(policy, kind, failures, left_s, retry_after_s, chance):
    error: PenstockError = kind("busy", retry_after_s=retry_after_s)
    pause_s = policy.pause_s(error, failures, left_s, repeatable=False, chance=chance)
    if failures > policy.retries:
        assert pause_s is None
        return
    bound_s = min(policy.longest_pause_s, policy.backoff_s * 2.0 ** (failures - 1))
    wanted_s = min(retry_after_s or 0.0, policy.longest_pause_s)
    if pause_s is None:
        assert wanted_s + bound_s >= left_s
    else:
        assert wanted_s <= pause_s <= wanted_s + bound_s
        assert pause_s < left_s
        assert pause_s <= 2 * policy.longest_pause_s


def test_pauses_double_and_honour_retry_after():
    policy = RetryPolicy(retries=9, backoff_s=0.1, longest_pause_s=1.0)
    pauses = [policy.pause_s(QueueFull("full"), n, 60.0, repeatable=False, chance=1.0) for n in range(1, 7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    busy = QueueFull("full", retry_after_s=0.5)
    assert policy.pause_s(busy, 1, 60.0, repeatable=False, chance=0.0) == 0.5
    assert policy.pause_s(busy, 1, 0.5, repeatable=False, chance=0.0) is None
