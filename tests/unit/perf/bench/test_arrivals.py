from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.arrivals import Arrival, parse_arrival, read_trace, times
from penstock.serving.observe.recorders import ArrivalRecorder

RECORDED = '{"t": 10.5, "rows": 2, "bytes": 300, "model": "m"}\n\n{"t": 10.25}\n{"t": 12.5, "bytes": 7}\n'


def gaps(text: str, rate: float = 100.0, seconds: float = 200.0, seed: int = 1) -> list[float]:
    return [b - a for a, b in pairwise(times(parse_arrival(text), rate, seconds, seed))]


def test_flags_are_read() -> None:
    assert parse_arrival("poisson") == Arrival("poisson")
    assert parse_arrival("constant") == Arrival("constant")
    assert parse_arrival("gamma:2.5") == Arrival("gamma", 2.5)
    assert parse_arrival("trace:a:b.jsonl") == Arrival("trace", path="a:b.jsonl")


@pytest.mark.parametrize("text", ["", "poison", "poisson:2", "constant:1", "gamma", "gamma:", "gamma:0", "gamma:x",
                                  "gamma:nan", "gamma:1e9", "trace", "trace:"])  # fmt: skip
def test_an_unknown_arrival_is_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"gamma:"):
        parse_arrival(text)


@pytest.mark.parametrize(
    ("text", "variation"), [("poisson", 1.0), ("gamma:1", 1.0), ("gamma:3", 3.0), ("gamma:0.2", 0.2)]
)
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(text: str, variation: float) -> None:
    found = gaps(text)
    assert statistics.mean(found) == pytest.approx(0.01, rel=0.08)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.08)


@pytest.mark.parametrize("text", ["poisson", "gamma:10", "gamma:0.1"])
def test_the_rate_holds_from_the_first_second_on_however_bursty_arrivals_are(text: str) -> None:
    counts = [len(times(parse_arrival(text), 100.0, 1.0, seed)) for seed in range(500)]
    assert statistics.mean(counts) == pytest.approx(100, abs=15), "149 if each run began with an arrival before it"


def test_constant_arrivals_start_at_once_and_match_the_rate() -> None:
    assert list(times(parse_arrival("constant"), 4.0, 1.0, 0)) == [0.0, 0.25, 0.5, 0.75]
    assert len(times(parse_arrival("constant"), 100.0, 20.0, 0)) == 2000
    assert list(times(parse_arrival("constant"), 0.5, 1.0, 0)) == [0.0]


@pytest.mark.parametrize("text", ["poisson", "gamma:2"])
def test_the_seed_decides_and_all_lie_within_the_time(text: str) -> None:
    arrival = parse_arrival(text)
    once = times(arrival, 50.0, 10.0, 7)
    assert once == times(arrival, 50.0, 10.0, 7) != times(arrival, 50.0, 10.0, 8)
    assert list(once) == sorted(once)
    assert 0.0 < min(once) <= max(once) < 10.0


@pytest.mark.parametrize(
    ("rate", "seconds", "why"),
    [
        *((rate, 1.0, "expected a rate and a time over 0") for rate in (0.0, -1.0, float("inf"), float("nan"))),
        (1.0, 0.0, "expected a rate and a time over 0"),
        (1e9, 3600.0, r"at 1e\+09/s for 3600 s are 3\.6e\+12; expected at most 3e\+07"),
    ],
)
def test_no_rate_no_time_and_more_arrivals_than_memory_can_hold_are_refused(
    rate: float, seconds: float, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        times(parse_arrival("poisson"), rate, seconds, 0)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def file(text: str) -> str:
        (tmp_path / "trace.jsonl").write_text(text, errors="surrogateescape")
        return str(tmp_path / "trace.jsonl")

    return file


def test_a_trace_is_read_in_order_of_time_from_its_first(write: Callable[[str], str]) -> None:
    trace = read_trace(write(RECORDED))
    assert list(trace.times_s) == [0.0, 0.25, 2.25]
    assert list(trace.rows) == [1, 2, 1]


async def test_a_recording_of_the_server_is_a_trace(tmp_path: Path) -> None:
    clock = count(10, 0.5)
    recorder = ArrivalRecorder(str(tmp_path / "arrivals.jsonl"), clock=lambda: next(clock))
    recorder.on_request("digits", "1", 1, 300)
    recorder.on_request('odd "name"', "2", 16, 0)
    recorder.close()
    trace = read_trace(str(tmp_path / "arrivals.jsonl"))
    assert (list(trace.times_s), list(trace.rows)) == ([0.0, 0.5], [1, 16])


def test_a_trace_of_several_models_can_be_read_for_one(write: Callable[[str], str]) -> None:
    path = write('{"t": 1, "model": "a"}\n{"t": 2, "model": "b"}\n{"t": 4, "model": "b"}\n')
    assert read_trace(path).models == ("a", "b")
    assert list(read_trace(path, "b").times_s) == [0.0, 2.0]
    with pytest.raises(ConfigError, match="no request for model 'c'; found a, b"):
        read_trace(path, "c")


def test_a_trace_keeps_its_times_or_is_stretched_to_a_rate(write: Callable[[str], str]) -> None:
    arrival, trace = parse_arrival("trace:x"), read_trace(write(RECORDED)).times_s
    assert list(times(arrival, 0.0, 0.0, 0, trace)) == [0.0, 0.25, 2.25]
    assert list(times(arrival, 0.0, 1.0, 0, trace)) == [0.0, 0.25]
    doubled = times(arrival, 4 / 2.25, 0.0, 0, trace)
    assert list(doubled) == pytest.approx([0.0, 0.125, 1.125])
    assert list(times(arrival, 5.0, 0.0, 0, [0.0])) == [0.0], "a single arrival has no rate to stretch"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is empty"),
        ('{"t": 1}\n{"rows": 1}\n', ":2: .*missing required field `t`"),
        ('{"t": 1}\n{"t": "x"}\n', ":2: "),
        ('{"t": 1}\nnothing\n', ":2: "),
        ('{"t": 1, "rows": 0}\n', ":1: .*rows over 0"),
        ('{"t": 1, "bytes": -1}\n', ":1: .*bytes from 0"),
        (f'{{"t": 1, "rows": {10**30}}}\n', ":1: .*rows over 0"),
        (f'{{"t": 1, "bytes": {10**30}}}\n', ":1: .*bytes from 0"),
        ('{"t": 1, "model": "\udcff"}\n', ":1: .*can't decode byte 0xff"),
    ],
)
def test_an_invalid_trace_is_reported_with_its_line(write: Callable[[str], str], text: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        read_trace(write(text))


def test_a_truncated_last_line_is_dropped_with_a_warning(
    write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    assert list(read_trace(write('{"t": 1}\n{"t": 3}\n{"t": 4, "mod')).times_s) == [0.0, 2.0]
    assert [record.message.partition("trace.jsonl ")[2] for record in caplog.records] == [
        "line=3 dropped=true reason=truncated"
    ]
    with pytest.raises(ConfigError, match=":1: Input data was truncated"):
        read_trace(write('{"t": 1'))


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "no.jsonl"))
