import math
import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.perf.bench import figures
from penstock.perf.bench.figures import decode, encode, enough, interval_p99, latency_of, percentile, summarise
from penstock.perf.bench.load_run import LOST, REFUSED, TIMED_OUT, UNDER_WAY, WRONG, Samples
from penstock.perf.bench.measurement import Load, ServerStats, parse_slo

OPEN = Load(mode="open", rate=100.0)
CLOSED = Load(mode="closed", concurrency=4)


def samples(*requests: tuple[float, float, int], seconds: float = 10.0, **more: Any) -> Samples:
    """(intended, latency, status) of each request."""
    made = Samples()
    for number, (at, took, status) in enumerate(requests):
        made.intended_s.append(at)
        made.late_s.append(0.0)
        made.latency_s.append(took)
        made.status.append(status)
        made.number.append(number)
    made.seconds = seconds
    for name, value in more.items():
        setattr(made, name, value)
    return made


def even(count: int, took: float = 0.02, status: int = 200) -> list[tuple[float, float, int]]:
    return [(n * 10.0 / count, took, status) for n in range(count)]


# ---- percentiles


def test_percentiles_are_the_nearest_rank() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert math.isnan(percentile([], 0.5))


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300), st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99, 0.999]))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], q: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, q)
    assert sum(v <= found for v in values) >= q * len(values) - 1e-6
    assert found == ordered[0] or sum(v < found for v in values) < q * len(values)


@pytest.mark.parametrize(("q", "least"), [(0.5, 2), (0.75, 4), (0.9, 10), (0.95, 20), (0.99, 100), (0.999, 1000)])
def test_a_percentile_takes_samples_beyond_it(q: float, least: int) -> None:
    assert enough(least, q)
    assert not enough(least - 1, q)


def test_a_percentile_without_enough_samples_is_unknown() -> None:
    latency = latency_of([0.01 * n for n in range(1, 51)])
    assert latency.p95_s == pytest.approx(0.48)
    assert latency.max_s == pytest.approx(0.5)
    assert latency.mean_s == pytest.approx(0.255)
    assert (latency.p99_s, latency.p999_s, latency.p99_high_s) == (None, None, None)
    assert latency_of([]) == figures.Latency()


# ---- the interval of the p99


@pytest.mark.parametrize("n", [400, 2_000, 20_000])
def test_the_interval_contains_the_true_p99_nineteen_times_of_twenty(n: int) -> None:
    draw = random.Random(n)
    rounds = 400 if n < 20_000 else 60
    held = 0
    for _ in range(rounds):
        # only the order of the upper values matters: use those of n uniform values
        low, high = interval_p99(sorted(draw.random() for _ in range(n)))
        assert low is not None
        assert high is not None
        held += low <= 0.99 <= high
    assert held / rounds >= 0.91


def test_too_few_samples_bound_the_p99_from_below_only() -> None:
    assert interval_p99([float(n) for n in range(367)])[1] is None, "0.99 ** 367 is over 2.5 %"
    assert interval_p99([float(n) for n in range(368)]) == (359.0, 367.0)
    assert interval_p99([]) == (None, None)


@pytest.mark.parametrize("n", [1, 100, 368, 369, 1_000, 12_345, 50_000, 50_001, 1_000_000])
def test_the_ranks_of_the_interval_are_those_of_the_binomial_distribution(n: int) -> None:
    binomial = pytest.importorskip("scipy.stats").binom(n, 0.01)
    few, many = int(binomial.ppf(0.025)), int(binomial.ppf(0.975))
    low, high = interval_p99(range(n))
    off = 0 if n <= 50_000 else 2  # ranks, of the normal distribution
    assert low == (None if many >= n else pytest.approx(n - 1 - many, abs=off))
    assert high == (None if few < 1 else pytest.approx(n - few, abs=off))


# ---- a run


def test_a_run_of_good_responses() -> None:
    run = summarise(OPEN, samples(*even(1000)), label="a", repeat=2, started="now", server=ServerStats(cpu=1.0))
    assert (run.label, run.repeat, run.started, run.server) == ("a", 2, "now", ServerStats(cpu=1.0))
    assert (run.requests, run.answered, run.errors, run.first_error) == (1000, 1000, {}, None)
    assert run.throughput == pytest.approx(100)
    assert (run.goodput, run.slo, run.met) == (None, [], None)
    assert run.latency.p999_s == pytest.approx(0.02)
    assert decode(run.histogram) == [(pytest.approx(0.02, rel=0.001), 1000)]
    assert (run.invalid, run.caveats) == ([], [])


def test_errors_are_named_and_requests_under_way_do_not_count() -> None:
    failed = [(1.0, 5.0 if s == TIMED_OUT else math.inf, s) for s in (LOST, LOST, TIMED_OUT, REFUSED, UNDER_WAY)]
    answered = [(2.0, 0.1, s) for s in (503, 503, 503, WRONG, 204)]
    run = summarise(OPEN, samples(*failed, *answered, first_error=(LOST, b"")))
    assert run.errors == {"503": 3, "lost": 2, "timeout": 1, "refused": 1, "wrong": 1}
    assert (run.requests, run.answered) == (9, 1)
    assert run.first_error == "lost"
    assert (run.latency.p50_s, run.latency.max_s) == (0.1, 5.0), "of the good response and of the timeout"


def test_timeouts_are_the_tail_of_the_latencies() -> None:
    """2 % of the requests get no response: that misses any SLO."""
    run = summarise(OPEN, samples(*even(980), *even(20, 5.0, TIMED_OUT)), parse_slo("p99<=100ms"))
    assert (run.answered, run.throughput) == (980, pytest.approx(98))
    assert run.latency.p99_s == 5.0
    assert run.met is False
    assert run.goodput == pytest.approx(98)
    assert "20 requests timed out: latencies count them" in run.caveats[0]


def test_the_first_error_is_reported_with_its_body() -> None:
    for error, expected in (
        ((503, b" queue full\n"), "503 Service Unavailable: queue full"),
        ((799, b""), "799"),
        ((400, b"\xff"), "400 Bad Request: \ufffd"),
    ):
        assert summarise(OPEN, samples((0.0, 0.1, error[0]), first_error=error)).first_error == expected


def test_the_slo_is_judged_and_goodput_counts_responses_within_its_latency() -> None:
    slow = [(at, 0.2, 200) for at, _, _ in even(200)]
    slo = parse_slo("p50<=100ms,p99<=100ms,error<=2%")
    run = summarise(OPEN, samples(*even(800), *slow, *even(10, 0.01, 503)), slo)
    assert [clause.met for clause in run.slo] == [True, False, True]
    assert (run.goodput, run.throughput) == (pytest.approx(80), pytest.approx(100, rel=0.01))
    assert (run.too_slow, run.met) == (200, False)


def test_responses_after_the_window_of_the_throughput_are_not_too_slow() -> None:
    """`tune` judges by the share of slow responses: a growing queue at the end of a run is no violation by itself."""
    run = summarise(OPEN, samples(*((at, 0.01 + at / 20, 200) for at, _, _ in even(1000))), parse_slo("p99<=1s"))
    assert run.goodput == run.throughput < 100
    assert (run.answered, run.too_slow) == (1000, 0)


LATENCIES = st.lists(st.tuples(st.floats(0, 9.99), st.floats(0.001, 30)), min_size=1, max_size=60)


@given(LATENCIES, st.sampled_from([OPEN, CLOSED]))
def test_goodput_never_exceeds_throughput(requests: list[tuple[float, float]], load: Load) -> None:
    """Both count responses in the same window, however late the others arrive."""
    run = summarise(load, samples(*((at, took, 200) for at, took in sorted(requests))), parse_slo("p99<=5s"))
    assert run.goodput is not None
    assert run.goodput <= run.throughput + 1e-9


@pytest.mark.parametrize(
    ("load", "requests", "throughput"),
    [
        # 100 requests per second for 10 s, 50 per second completed: responses arrive until 20 s
        (OPEN, [(n / 100, 0.02 * (n + 1) - n / 100) for n in range(1000)], 50),
        # one client with responses after 4 s each: 2.5 of them in 10 s, though only two arrived
        (CLOSED, [(0.0, 4.0), (4.0, 4.0), (8.0, 4.0)], 0.25),
        # 50 clients of a server that handles 50 requests per second: what is queued at the end adds nothing
        (
            Load(mode="closed", concurrency=50, seconds=10.0),
            [*((0.0, (n + 1) / 50) for n in range(50)), *(((n + 1) / 50, 1.0) for n in range(500))], 50,
        ),
        # a first response that took most of the time, or is one of a number of requests, counts
        (Load(mode="closed", concurrency=1, seconds=10.0), [(0.0, 6.0), (6.0, 4.0), (10.0, 0.0)], 0.2),
        (Load(mode="closed", concurrency=1), [(0.0, 2.0), (2.0, 8.0), (10.0, 0.0)], 0.2),
    ],
)  # fmt: skip
def test_throughput_counts_what_lies_within_the_time(
    load: Load, requests: list[tuple[float, float]], throughput: float
) -> None:
    run = summarise(load, samples(*((at, took, 200) for at, took in requests)), parse_slo("p50<=60s"))
    assert run.throughput == run.goodput == pytest.approx(throughput, rel=0.01)
    assert (figures.CLOSED in run.caveats) == (load.mode == "closed")


def test_without_responses_the_throughput_is_zero() -> None:
    run = summarise(OPEN, samples((0.0, math.inf, LOST)), parse_slo("p99<=1s"))
    assert (run.throughput, run.goodput, run.histogram != "") == (0.0, 0.0, True)
    assert summarise(OPEN, Samples()).requests == 0


# ---- whether to believe it


def late(count: int, by_s: float, of: int = 1000, took: float = 0.02) -> Samples:
    made = samples(*even(of, took))
    for n in range(count):
        made.late_s[n] = by_s
    return made


LATE = "found 2.0% of the sends over 1 ms after their time (p99 5 ms), expected under 1%; lower the rate"
SLIGHTLY = "2.0% of the sends were over 1 ms late (p99 5.0 ms); latencies include it"
TAIL = "{} include lateness of the generator itself, up to {} ms"


@pytest.mark.parametrize(
    ("made", "late_s", "invalid", "caveats"),
    [
        (late(20, 0.005), 0.0, LATE, []),
        (late(20, 0.005), 0.004, LATE, []),
        (late(20, 0.005), 0.005, "", [SLIGHTLY]),  # tolerated
        (late(20, 0.005, took=0.5), 0.0, "", [SLIGHTLY]),  # small relative to the latency
        # few late sends are chance, but the tail may be the generator's
        (late(9, 0.005), 0.0, "", [TAIL.format("p99.9", 5)]),
        (late(9, 0.015), 0.0, "", [TAIL.format("p99.9 and max", 15)]),
        (late(3, 0.005, of=50), 0.0, "", []),
        (late(1, 0.015, of=50), 0.0, "", [TAIL.format("max", 15)]),
        (late(20, 0.0009), 0.0, "", []),
        (late(9, 0.0019), 0.0, "", []),  # a small part of 20 ms
        (late(9, 0.0009, took=0.001), 0.0, "", []),  # less than the threshold
    ],
)
def test_lateness_of_the_generator_is_a_caveat_or_makes_the_run_invalid(
    made: Samples, late_s: float, invalid: str, caveats: list[str]
) -> None:
    run = summarise(OPEN, made, late_s=late_s)
    assert (len(run.invalid), invalid in "".join(run.invalid), run.caveats) == (bool(invalid), True, caveats)
    assert summarise(CLOSED, made).caveats == [figures.CLOSED]


def test_the_share_of_late_sends_is_stored() -> None:
    run = summarise(OPEN, late(20, 0.005), parse_slo("p99<=1s"))
    assert (run.generator.late_share, run.generator.late_p99_s, run.met) == (pytest.approx(0.02), 0.005, None)


def test_lateness_in_the_median_counts_despite_a_long_tail() -> None:
    made = late(1000, 0.005)
    for n in range(20):
        made.latency_s[n] = 2.0
    assert "100.0% of the sends" in summarise(OPEN, made).invalid[0]


@pytest.mark.parametrize("load", [OPEN, CLOSED])
def test_a_generator_without_processor_time_left_makes_the_run_invalid(load: Load) -> None:
    busy = samples(*even(1000), cpu_s=9.1, busy_s=10.0)
    assert "found 91% of a core in use, expected at most 90%" in summarise(load, busy).invalid[0]
    assert summarise(load, samples(*even(1000), cpu_s=8.9, busy_s=10.0)).invalid == []


def test_caveats_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for more, expected in (({"ended": "cancelled"}, "interrupted"), ({"waited": 7}, "7 requests waited")):
        assert expected in summarise(OPEN, samples(*even(10), **more)).caveats[0]
    monkeypatch.setattr(figures, "encode", lambda latencies: "")
    assert summarise(OPEN, samples(*even(10))).caveats == [figures.NO_HISTOGRAM]


@pytest.mark.parametrize(
    ("latencies_s", "found"),
    [
        ([0.001, 0.001, 0.0123456, 1.5, 0.25, 0.25, 0.25], [(0.001, 2), (0.0123456, 1), (0.25, 3), (1.5, 1)]),
        ([0.0, 1e-9, 7200.0], [(1e-6, 2), (3600, 1)]),  # clipped
        ([], []),
    ],
)
def test_latencies_come_back_to_three_digits_with_their_counts(
    latencies_s: list[float], found: list[tuple[float, int]]
) -> None:
    assert decode(encode(latencies_s)) == [(pytest.approx(seconds, rel=0.001), count) for seconds, count in found]


@pytest.mark.parametrize("text", ["", "x", "HISTFAAAA", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"])
def test_an_invalid_histogram_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no HDR histogram: found"):
        decode(text)


def test_without_the_library_there_is_no_histogram_and_none_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = encode([0.1])
    monkeypatch.setitem(sys.modules, "hdrh.histogram", None)
    assert encode([0.1]) == ""
    with pytest.raises(ConfigError, match=r"pip install 'hdrhistogram"):
        decode(text)
