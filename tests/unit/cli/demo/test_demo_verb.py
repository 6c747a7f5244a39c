"""The demo's exit status says whether every image was answered and enough of them rightly."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from click.testing import CliRunner
from rich.console import Console

from penstock.cli.demo import trial
from penstock.cli.demo.command import _verdict, demo
from penstock.cli.demo.trial import Row


def row(accuracy: float = 0.99, rate: float = 1000.0, failures: dict[str, int] | None = None) -> Row:
    return Row(accuracy, rate, 1.0, 2.0, 1.0, Counter(failures or {}))


def verdict(off: Row, on: Row) -> tuple[bool, str]:
    console = Console(record=True, file=open("/dev/null", "w"), width=200)  # noqa: SIM115 - closed below
    with console.file:
        return _verdict(console, {"off": off, "on": on}), console.export_text()


def test_two_right_rows_are_good_and_compared() -> None:
    assert verdict(row(), row(rate=4000.0)) == (True, "batching answers 4.0 x as many requests\n")


def test_one_failed_request_or_a_row_below_97_percent_is_not_good() -> None:
    good, text = verdict(row(failures={"status 503: full": 2}), row())
    assert (good, text) == (False, "batching off: 2 requests failed: status 503: full\n")
    good, text = verdict(row(), row(accuracy=0.96))
    assert (good, text) == (False, "batching on: accuracy 96.00%, expected 97%\n")


def test_without_opencv_the_demo_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "forward_terminations", lambda: None)
    monkeypatch.setitem(sys.modules, "cv2", None)
    result = CliRunner().invoke(demo, [])
    assert result.exit_code == 1
    assert "pip install 'penstock[image]'" in result.output
