import pytest

from penstock.core.engine import quarantine as module
from penstock.core.engine.quarantine import Quarantine
from penstock.errors import Quarantined
from penstock.types import Item


def item(body, codec="json"):
    return Item(body, codec)


def refused(quarantine, body, now, codec="json"):
    try:
        quarantine.bucket(item(body, codec), "", now)
    except Quarantined:
        return True
    return False


def test_a_payload_that_killed_two_workers_is_refused_for_a_while():
    q = Quarantine("m", 10.0)
    assert not q.died([item(b"poison")], True, 0.0)
    assert not refused(q, b"poison", 1.0)
    assert q.died([item(b"poison")], True, 2.0)
    assert refused(q, b"poison", 11.9)
    assert not refused(q, b"Poison", 11.9)
    assert not refused(q, b"poison", 11.9, codec="raw")
    assert not refused(q, b"poison", 12.0)
    assert not q.active


def test_suspects_share_a_batch_only_with_themselves_until_a_worker_survives_them():
    q = Quarantine("m", 10.0)
    q.died([item(b"a"), item(b"b")], True, 0.0)
    buckets = [q.bucket(item(body), "x", 1.0) for body in (b"a", b"a", b"b", b"c")]
    assert buckets[0] == buckets[1] != buckets[2]
    assert "x" not in buckets[:3]
    assert buckets[3] == "x"
    q.survived([item(b"b")])
    assert q.bucket(item(b"b"), "x", 1.0) == "x"
    assert q.died([item(b"a"), item(b"a")], True, 2.0)
    assert refused(q, b"a", 3.0)


def test_a_payload_that_was_among_others_in_every_death_is_not_refused():
    q = Quarantine("m", 10.0)
    for now in range(5):
        assert not q.died([item(b"popular"), item(b"poison %d" % now)], True, float(now))
        assert not q.died([item(b"popular")], False, float(now))  # the worker ran other batches too
    assert not refused(q, b"popular", 5.0)


def test_payloads_that_differ_outside_their_sample_are_not_mistaken_for_each_other():
    q = Quarantine("m", 10.0)
    poison, good = bytes(10_000), bytes(9_999) + b"x"
    for _ in range(2):
        q.died([item(poison)], True, 0.0)
    assert refused(q, poison, 1.0)
    assert not refused(q, good, 1.0)


@pytest.mark.parametrize("payload", [[b"a"], {"a": 1}, b"", None])
def test_objects_and_empty_bodies_do_not_take_part(payload):
    q = Quarantine("m", 10.0)
    for _ in range(3):
        assert not q.died([Item(payload)], True, 0.0)
    assert not q.active


def test_without_a_time_nothing_is_recorded():
    q = Quarantine("m", 0.0)
    for _ in range(3):
        assert not q.died([item(b"poison")], True, 0.0)
    assert not q.active


def test_the_tables_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_PAYLOADS", 4)
    q = Quarantine("m", 10.0)
    for n in range(20):
        q.died([item(b"poison %d" % n)], True, 0.0)
        q.died([item(b"poison %d" % n)], True, 0.0)
        q.died([item(b"a %d" % n), item(b"b %d" % n)], True, 0.0)
    assert [n for n in range(20) if refused(q, b"poison %d" % n, 1.0)] == [16, 17, 18, 19]
    assert len(q._suspects) <= 4
