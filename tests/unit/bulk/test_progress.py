from __future__ import annotations

import contextlib
import io
import json
import logging
import os

import pytest

from penstock.bulk.progress import WINDOW_S, Notes, Now, Rates, Server, Style, Teller, duration, sentence, teller
from penstock.errors import ConfigError

NOW = Now(
    elapsed_s=10.0, frames=1234, frames_total=5000, videos=3, videos_total=10, failed=1, frames_per_s=123.4,
    bytes_per_s=18_500_000, eta_s=30.5, in_flight=5, retries=2,
    servers=(Server("http://a", "up", 5, 9, 40), Server("http://b", "away", 0, 3, 0)),
)  # fmt: skip


def test_rates_are_of_the_last_seconds() -> None:
    rates = Rates()
    assert rates.add(0.0, 0, 0) == (0.0, 0.0)
    assert rates.add(1.0, 100, 1000) == (100.0, 1000.0)
    for second in range(2, 101):
        found = rates.add(float(second), 100 if second < 50 else 100 + 10 * (second - 49), 1000)
    assert found == (pytest.approx(10.0), 0.0)
    assert len(rates._points) <= WINDOW_S + 2


def test_a_line_has_everything() -> None:
    line = sentence(NOW)
    for part in (
        "1,234/5,000 frames", "25%", "3/10 videos", "123.4 frames/s", "18.5 MB/s", "5 in flight", "0:30 left",
        "2 retries", "1 failed", "http://a 5/9", "http://b away",
    ):  # fmt: skip
        assert part in line


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, "?"), (0.2, "0:00"), (187, "3:07"), (7387, "2:03:07"), (5 * 86400 + 7380, "5d 02:03"), (3599.6, "1:00:00")],
)
def test_durations_are_told_for_people(seconds: float | None, told: str) -> None:
    assert duration(seconds) == told


def test_plain_progress_is_a_line_each_and_the_sums() -> None:
    stream = io.StringIO()
    show = teller("auto", stream)  # no terminal
    show.show(NOW)
    show.say("a note")
    show.close()
    show.end(["the sums"], {})
    lines = stream.getvalue().splitlines()
    assert lines[0] == sentence(NOW)
    assert lines[1:] == ["a note", "the sums"]


def test_json_progress_is_an_object_a_line() -> None:
    stream = io.StringIO()
    show = teller("json", stream)
    show.show(NOW)
    show.say("a note\nof two lines")
    show.end([], {"frames": 5})
    shown, note, summary = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (shown["frames"], shown["frames_total"], shown["eta_s"]) == (1234, 5000, 30.5)
    assert shown["servers"][1] == {"url": "http://b", "state": "away", "in_flight": 0, "window": 3, "answered": 0}
    assert note == {"note": "a note\nof two lines"}
    assert summary == {"summary": {"frames": 5}}


@pytest.mark.parametrize("style", ["plain", "json", "bar"])
def test_progress_that_nobody_reads_any_more_ends_nothing(style: Style) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    use(teller(style, stream))
    with contextlib.suppress(OSError):
        stream.close()


def test_no_progress_is_nothing() -> None:
    stream = io.StringIO()
    show = teller("none", stream)
    use(show)
    assert stream.getvalue() == ""


def test_the_bar_shows_and_leaves_the_terminal_with_its_cursor() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    show = teller("auto", stream)
    use(show)
    assert "1,234/5,000 frames" in stream.getvalue().replace("\n", " ")
    assert "a [note]" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("sums")
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_warnings_of_the_parts_are_said_between() -> None:
    stream = io.StringIO()
    logger = logging.Logger("penstock.bulk")
    logger.addHandler(Notes(teller("plain", stream)))
    logger.info("server=http://a waited_for=nothing")
    logger.warning("server=%s gets no chunks", "http://a")
    assert stream.getvalue() == "warning: server=http://a gets no chunks\n"


def use(show: Teller) -> None:
    show.show(NOW)
    show.say("a [note]")
    show.close()
    show.end(["sums"], {})


@pytest.mark.parametrize("style", ["plain", "bar"])
def test_names_of_files_command_no_terminal(style: Style) -> None:
    stream = io.StringIO()
    show = teller(style, stream)
    show.say("named twice: \x1b[31mred\n.mp4 \x9b2J ü 漢")
    show.close()
    assert "named twice: \\x1b[31mred\\n.mp4 \\x9b2J ü 漢\n" in stream.getvalue()


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ConfigError, match="plain"):
        teller("fancy")  # type: ignore[arg-type]
