from penstock.core.batching.entry import INF, Entry
from penstock.core.batching.queues import MAX_BYPASSES, Bucket, Expiries


def entry(id: int, v: float, rows: int = 1, deadline: float = INF) -> Entry:
    return Entry(id=id, rows=rows, deadline_s=deadline, vdeadline_s=min(v, deadline), seq=id, state=1)


def filled(*entries: Entry) -> Bucket:
    bucket = Bucket("")
    for e in entries:
        bucket.push(e)
    return bucket


def ids(entries: list[Entry]) -> list[int]:
    return [e.id for e in entries]


def test_push_returns_whether_the_head_changed() -> None:
    bucket = Bucket("")
    assert [bucket.push(entry(i, v)) for i, v in ((1, 5.0), (2, 6.0), (3, 4.0), (4, 4.0))] == [True, False, True, False]
    assert ids(bucket.entries) == [3, 4, 1, 2]
    assert bucket.keys == [4.0, 4.0, 5.0, 6.0]


def test_a_returned_entry_precedes_younger_equals() -> None:
    bucket = filled(entry(1, 5.0), entry(3, 5.0))
    assert bucket.push_back(entry(2, 5.0)) is False
    assert bucket.push_back(entry(0, 5.0)) is True
    assert ids(bucket.entries) == [0, 1, 2, 3]


def test_removal_takes_the_very_entry_among_equals() -> None:
    a, b, c = (entry(i, 5.0, rows=i, deadline=5.0) for i in (1, 2, 3))
    bucket = filled(a, b, c)
    bucket.remove(b)
    assert ids(bucket.entries) == [1, 3]
    assert (bucket.rows, bucket.finite) == (4, 2)


def test_tight_and_tolerant_entries_differ_by_the_real_deadline() -> None:
    mixed = filled(entry(1, 3.0), entry(2, 9.0, rows=2, deadline=4.0), entry(3, 9.0, rows=4, deadline=6.0))
    assert ids(mixed.tight(5.0)) == [2]  # 1 comes first, but has no deadline
    assert mixed.rows_tolerating(5.0) == 5
    pure = filled(*(entry(i, 9.0, deadline=float(i)) for i in (1, 2, 3)))
    assert ids(pure.tight(2.0)) == [1]
    assert pure.rows_tolerating(2.0) == 2


def test_take_skips_tight_heads_and_leaves_them_in_place() -> None:
    bucket = filled(*(entry(i, 9.0, deadline=float(i)) for i in range(1, 6)))
    assert ids(bucket.take(2, 3.0)) == [3, 4]
    assert ids(bucket.entries) == [1, 2, 5]
    assert (bucket.rows, bucket.finite, bucket.loose) == (3, 3, 0)


def test_take_from_a_mixed_bucket_keeps_all_counts() -> None:
    bucket = filled(entry(1, 5.0, 2), entry(2, 6.0, 1, 6.0), entry(3, 7.0, 2), entry(4, 8.0, 1))
    assert ids(bucket.take(4, -INF)) == [1, 2, 4]
    assert (bucket.rows, bucket.finite, bucket.loose) == (2, 0, 1)
    assert ids(bucket.take(4, -INF)) == [3]
    assert (bucket.rows, bucket.finite, bucket.loose) == (0, 0, 0)


def test_the_first_entry_is_taken_even_if_it_exceeds_the_limit() -> None:
    assert ids(filled(entry(1, 1.0, 3), entry(2, 2.0)).take(1, -INF)) == [1]


def test_one_batch_passes_over_a_bounded_number_of_misfits() -> None:
    misfits = [entry(10 + k, 2.0, rows=3) for k in range(MAX_BYPASSES)]
    assert ids(filled(entry(1, 1.0, 2), *misfits, entry(99, 3.0)).take(4, -INF)) == [1, 99]
    one_more = [*misfits, entry(50, 2.5, rows=3)]
    assert ids(filled(entry(1, 1.0, 2), *one_more, entry(99, 3.0)).take(4, -INF)) == [1]


def test_ends_come_in_order_whatever_the_order_of_arrival() -> None:
    ends = Expiries(waiting=1)
    for i, t in enumerate((5.0, 3.0, 9.0, 1.0)):
        ends.add(entry(i, INF, deadline=t))
    assert ends.next() == 1.0
    assert ids(ends.due(5.0)) == [3, 1, 0]
    assert ends.next() == 9.0


def test_deadlines_drop_entries_that_left_the_queue() -> None:
    ends = Expiries(waiting=1)
    gone, stays = entry(1, INF, deadline=1.0), entry(2, INF, deadline=2.0)
    ends.add(gone)
    ends.add(stays)
    gone.state = 2
    assert ends.next() == 2.0
    stays.state = 2
    assert ends.next() == INF
    assert ends.due(10.0) == []


def test_entries_without_any_end_cost_nothing() -> None:
    ends = Expiries(waiting=1)
    ends.add(entry(1, 5.0))
    assert ends.next() == INF
