from __future__ import annotations

import pytest

from penstock.perf.bench.document import Bullets, Code, Report, Says, Table, around, markdown, number, percent, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (0.0, "0 µs"), (4.2e-7, "0.42 µs"), (0.00042, "420 µs"), (0.0009996, "1,000 µs"),
        (0.0123, "12.3 ms"), (0.9996, "1,000 ms"), (1.25, "1.25 s"), (3725.0, "3,725 s"),
    ],
)  # fmt: skip
def test_seconds_have_the_unit_that_suits(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_an_interval_has_one_unit() -> None:
    assert around(0.0123, 0.0119, 1.5) == "12.3 ms (11.9..1,500)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0.0, "0"), (0.1234, "0.123"), (99.4, "99.4"), (99.6, "100"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_or_are_whole(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (0.0, "0.0 %"), (0.0014, "+0.14 %"), (-0.00001, "0.0 %"), (-0.0451, "-4.5 %"),
        (0.00996, "+1.0 %"), (0.0994, "+9.9 %"), (0.0996, "+10 %"), (-1.0, "-100 %"), (12.3456, "+1,235 %"),
    ],
)  # fmt: skip
def test_shares_are_percent_with_their_sign(value: float | None, text: str) -> None:
    assert percent(value, signed=True) == text


def test_what_is_said_cannot_break_out_of_its_place() -> None:
    report = Report("a*b", [Says("x\n## y", "bad"), Bullets(["one\n- two"])], [Table(["h|"], [["<b>|"]]), Code("````")])
    assert markdown(report) == (
        "# a\\*b\n\n**x ## y**\n\n- one - two\n\n| h\\| |\n| --- |\n| \\<b>\\| |\n\n`````\n````\n`````\n"
    )
