from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Measurement
from penstock.perf.bench.publish import publish
from penstock.perf.bench.report import Verdict
from penstock.perf.bench.results import Origin, Results

Make = Callable[..., Measurement]


@pytest.fixture
def folder(tmp_path: Path, make_measurement: Make) -> Path:
    with Results.open(tmp_path / "run", Origin(command="bench", slo="p99<=1s")) as results:
        for rate in (100.0, 500.0):
            results.append(make_measurement(rate=rate, slo="p99<=1s", caveats=["a caveat of ours"]))
    return tmp_path / "run"


def test_both_reports_are_written_beside_the_results(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    text, page = publish(folder, Verdict(slo="p99<=1s", chosen="batch=2", default="batch=1", gain=0.5))
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "records.jsonl", "summary.csv", "report.md", "report.html", "verdict.json",
    }  # fmt: skip
    for path in (text, page):
        assert "a caveat of ours" in path.read_text()
        assert "Chosen: batch=2" in path.read_text()
    assert page.read_text().count("<svg") == 5
    assert json.loads((folder / "verdict.json").read_text())["gain"] == 0.5


def test_without_matplotlib_the_page_has_no_plots_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, page = publish(folder)
    assert "No plots: plots are drawn by matplotlib; install penstock[plots]" in page.read_text()
    assert "<svg" not in page.read_text()


def test_a_folder_of_no_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no results"):
        publish(tmp_path)


def test_a_full_disk_is_told_and_leaves_no_half_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(PenstockError, match="the disk is full"):
        publish(folder)
    assert not list(folder.glob("report*"))
    assert len((folder / "records.jsonl").read_text().splitlines()) == 2


def no_room(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_the_page(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, page = publish(folder)
    shot = tmp_path / "page.png"
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,1500",
    )  # fmt: skip
    command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    image = pytest.importorskip("PIL.Image")
    with image.open(shot) as seen:
        counts = dict((colour, count) for count, colour in seen.convert("RGB").getcolors(1 << 24))
    assert counts[(0x0B, 0x6C, 0xB8)] > 500, "no line of a plot in the page's first colour"
    assert counts[(0x0A, 0x7A, 0x3D)] > 50, "no mark of a good verdict"
