from __future__ import annotations

import contextlib
import io
import json
import logging
import os

import pytest

from penstock.bulk.progress import (
    JobSummary,
    Progress,
    ProgressReporter,
    RateWindow,
    Style,
    WarningHandler,
    duration,
    make_reporter,
)
from penstock.bulk.types import EndpointStats
from penstock.errors import PenstockError

NOW = Progress(
    elapsed_s=10.0, frames=1234, frames_total=5000, videos=3, videos_total=10, failed=1, frames_per_s=123.4,
    bytes_per_s=18_500_000, eta_s=30.5, in_flight=5, retries=2,
    servers=(EndpointStats("http://a", "up", 5, 9, 40), EndpointStats("http://b", "away", 0, 3, 0)),
)  # fmt: skip


def test_rates_cover_the_last_seconds() -> None:
    rates = RateWindow()
    assert rates.add(0.0, 0, 0) == (0.0, 0.0)
    assert rates.add(1.0, 100, 1000) == (100.0, 1000.0)
    for second in range(2, 101):
        found = rates.add(float(second), 100 if second < 50 else 100 + 10 * (second - 49), 1000)
    assert found == (pytest.approx(10.0), 0.0)


def test_the_progress_line_has_every_number() -> None:
    line = NOW.line()
    for part in (
        "1,234/5,000 frames", "25%", "3/10 videos", "123.4 frames/s", "18.5 MB/s", "5 in flight", "0:30 left",
        "2 retries", "1 failed", "http://a 5/9", "http://b away",
    ):  # fmt: skip
        assert part in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0.2, "0:00"), (187, "3:07"), (7387, "2:03:07"), (5 * 86400 + 7380, "5d 02:03"), (3599.6, "1:00:00")],
)
def test_durations_are_readable(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_plain_progress_prints_lines_and_the_summary() -> None:
    stream = io.StringIO()
    show = make_reporter("auto", stream)  # not a terminal
    show.show(NOW)
    show.note("a note")
    show.close()
    show.end(JobSummary(videos=2))
    lines = stream.getvalue().splitlines()
    assert lines[0] == NOW.line()
    assert lines[1] == "a note"
    assert lines[2].startswith("0 of 2 videos complete")


def test_json_progress_prints_one_object_per_line() -> None:
    stream = io.StringIO()
    show = make_reporter("json", stream)
    show.show(NOW)
    show.note("a note\nof two lines")
    show.end(JobSummary(frames=5))
    shown, note, summary = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (shown["frames"], shown["frames_total"], shown["eta_s"]) == (1234, 5000, 30.5)
    assert shown["servers"][1] == {"url": "http://b", "state": "away", "in_flight": 0, "window": 3, "answered": 0}
    assert note == {"note": "a note\nof two lines"}
    assert summary["summary"]["frames"] == 5


@pytest.mark.parametrize("style", ["plain", "json", "bar"])
def test_a_lost_reader_does_not_end_the_job(style: Style) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    use(make_reporter(style, stream))
    with contextlib.suppress(OSError):
        stream.close()


def test_style_none_prints_notes_and_the_summary_and_quiet_only_problems() -> None:
    stream = io.StringIO()
    use(make_reporter("none", stream))
    note, total, unfinished = stream.getvalue().splitlines()
    assert (note, total[:22]) == ("a [note]", "0 of 2 videos complete")
    stream = io.StringIO()
    use(make_reporter("quiet", stream))
    assert stream.getvalue() == f"penstock: {unfinished}\n"
    make_reporter("quiet", stream).end(JobSummary(videos=2, complete=2))
    assert stream.getvalue() == f"penstock: {unfinished}\n"


def test_the_bar_restores_the_cursor() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    show = make_reporter("auto", stream)
    use(show)
    assert "1,234/5,000 frames" in stream.getvalue().replace("\n", " ")
    assert "a [note]" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("run the same command again to continue")
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_warnings_appear_between_progress_lines() -> None:
    stream = io.StringIO()
    logger = logging.Logger("penstock.bulk")
    logger.addHandler(WarningHandler(make_reporter("plain", stream)))
    logger.info("server=http://a waited_for=nothing")
    logger.warning("server=%s gets no chunks", "http://a")
    assert stream.getvalue() == "warning: server=http://a gets no chunks\n"


def use(show: ProgressReporter) -> None:
    show.show(NOW)
    show.note("a [note]")
    show.close()
    show.end(JobSummary(videos=2))


@pytest.mark.parametrize("style", ["plain", "bar"])
def test_file_names_cannot_control_the_terminal(style: Style) -> None:
    stream = io.StringIO()
    show = make_reporter(style, stream)
    show.note("named twice: \x1b[31mred\n.mp4 \x9b2J ü 漢")
    show.close()
    assert "named twice: \\x1b[31mred\\n.mp4 \\x9b2J ü 漢\n" in stream.getvalue()


def test_the_summary_names_the_next_step() -> None:
    done = JobSummary(videos=3, complete=1, failed=1, partial=1, frames=1234, seen=2000, new_frames=100, seconds=4.0)
    done.failures, done.outputs = "failures.jsonl", ("captions.jsonl",)
    output = "\n".join(done.lines())
    for part in ("1 of 3 videos complete", "1,234 captions", "25.0 frames/s", "failures.jsonl", "--retry-failed"):
        assert part in output
    assert "1 videos are not finished: run the same command again" in output
    damaged = JobSummary(videos=2, complete=2, damaged=1, failures="failures.jsonl")
    assert damaged.problems() == ["1 damaged, captioned except for gaps: see failures.jsonl"]
    fields = json.loads(json.dumps(done.fields()))
    assert (fields["unfinished"], fields["stopped"], fields["exit_code"]) == (1, None, 3)


@pytest.mark.parametrize(
    ("summary", "code"),
    [
        (JobSummary(videos=2, complete=2), 0),
        (JobSummary(videos=2, complete=1, failed=1), 3),
        (JobSummary(videos=2, complete=1), 3),
        (JobSummary(videos=2, complete=2, stopped=PenstockError("the disk")), 3),
        (JobSummary(videos=2, complete=2, damaged=1), 3),
        (JobSummary(videos=2, complete=1, failed=1, interrupted=True), 130),
    ],
)
def test_exit_codes_reflect_the_result_of_the_job(summary: JobSummary, code: int) -> None:
    assert summary.exit_code == code
