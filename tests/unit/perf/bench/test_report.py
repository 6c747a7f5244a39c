import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.document import Paragraph, Report, TableBlock, markdown, seconds
from penstock.perf.bench.measurement import Latency, Measurement, RunnerUp, ServerStats, Verdict, p99
from penstock.perf.bench.report import compose, publish
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
    assert "No plots: plots are drawn by matplotlib: pip install " in page.read_text()
    assert "<svg" not in page.read_text()


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no results"):
        publish(tmp_path)


def test_a_full_disk_is_reported_and_leaves_no_partial_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with image.open(shot) as picture:
        counts = dict((colour, count) for count, colour in picture.convert("RGB").getcolors(1 << 24))
    assert counts[(0x0B, 0x6C, 0xB8)] > 500, "no line in the page's first colour"
    assert counts[(0x0A, 0x7A, 0x3D)] > 50, "no mark of a good verdict"


SLO = "p99<=100ms"
ORIGIN = Origin(
    command="bench", line="penstock bench app.py:Model --rate 100", target="app.py:Model", slo=SLO, seed=3,
    started="2026-01-01T00:00:00Z", machine={"cpu": "Some | CPU", "cores": 2}, versions={"python": "3.11.7"},
)  # fmt: skip
VERDICT = Verdict(
    slo=SLO, chosen="batch=8,instances=2", default="batch=1,instances=1", goodput=412.0, default_goodput=298.0,
    gain=0.383, interval=(0.31, 0.45), command="penstock tune app.py:Model --slo p99<=100ms --seed 3",
    cost_per_million=0.42, notes=["the budget of 600 s ended the search"],
    runners_up=[RunnerUp(settings="batch=16,instances=2", why="p99 up to 112 ms at 410/s")],
)  # fmt: skip


def lines(report: Report) -> list[str]:
    return markdown(report).splitlines()


def loads(report: Report) -> list[dict[str, str]]:
    table = next(block for block in report.rest if isinstance(block, TableBlock))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_the_verdict_of_tuning_is_complete(make_measurement: Make) -> None:
    text = markdown(compose(ORIGIN, [make_measurement(rate=400.0, label="batch=8,instances=2")], VERDICT))
    head = text[: text.index("## Loads")]
    assert head.startswith(
        "# penstock bench of app.py:Model\n\n**Chosen: batch=8,instances=2: 412 good responses/s within"
    )
    assert "Against the default (batch=1,instances=1: 298/s): +38 %, between +31 % and +45 % (95 %)." in head
    assert "A million requests cost 0.42" in head
    assert "- the budget of 600 s ended the search" in head
    assert "```\npenstock tune app.py:Model --slo p99<=100ms --seed 3\n```" in head
    assert "| batch=16,instances=2 | p99 up to 112 ms at 410/s |" in head


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"met": False, "chosen": "batch=1", "goodput": None}, "**No settings meet p99<=100ms. Nearest: batch=1.**"),
        ({"proven": False}, "**Not proven: batch=8,instances=2: 412 good responses/s within p99<=100ms.**"),
        ({"chosen": "", "met": False}, "**No measurement shows whether p99<=100ms can be met.**"),
        ({"chosen": "batch=1,instances=1"}, "That is the default: no other settings were shown to be better."),
        ({"gain": None}, "is not known to meet the SLO at any rate, so the gain is unknown."),
        ({"interval": None}, "298/s): +38 %."),
        ({"gain": -0.02, "interval": (-0.04, 0.01)}, "-2.0 %, between -4.0 % and +1.0 % (95 %)."),
        (
            {"table": [["workers", "p99_ms"], ["2", "81"]]},
            "## Settings\n\n| workers | p99_ms |\n| --- | --- |\n| 2 | 81 |",
        ),
    ],
)
def test_what_a_search_found_is_said(change: dict[str, Any], expected: str) -> None:
    assert expected in markdown(compose(ORIGIN, [], structs.replace(VERDICT, **change)))


def test_a_search_without_measurements_has_no_empty_parts() -> None:
    text = lines(compose(ORIGIN, [], Verdict(slo=SLO, chosen="", default="batch=1", met=False, table=[["workers"]])))
    assert text[2:5] == ["**No measurement shows whether p99<=100ms can be met.**", "", "## Machine"]
    assert lines(compose(Origin(command="tune"), []))[0] == "# penstock tune"


Runs = list[dict[str, Any]]
SLOW: Runs = [{"rate": 500.0, "base_s": 0.2}]


@pytest.mark.parametrize(
    ("slo", "runs", "first", "more"),
    [
        (
            SLO, [{"rate": rate, "base_s": 0.02} for rate in (200.0, 500.0, 950.0)],
            "**SLO p99<=100ms met up to 495 good responses/s (500/s poisson).**", "- missed, 950/s poisson: p99<=100ms",
        ),
        (SLO, SLOW * 3, "**No measured load met SLO p99<=100ms.**", "in 3 of 3"),
        ("p99<=9s", [{"clients": 8, "errors": {"503": 400}}], "**No measured", "- missed, 8 clients: 5.0 % errors"),
        (
            "p99<=1ms,error<=0.1%,throughput>=5000/s,p50<=9s", [{"clients": 8, "errors": {"503": 40}}], "**No measured",
            "- missed, 8 clients: p99<=1ms is 31 ms, error<=0.1% is 0.50 %, throughput>=5000/s is 800/s",
        ),
        (
            SLO, [{"rate": 5.0, "latency": Latency(p50_s=0.01)}],
            "**Too few requests to judge SLO p99<=100ms.**", "- unknown, 5/s poisson: too few requests",
        ),
        (SLO, [{"rate": 5.0, "latency": Latency(p50_s=0.01)}, *SLOW], "**No measured load met SLO p99<=100ms.**", ""),
        ("", [{"clients": n} for n in (1, 8, 64)], "Highest throughput: 1,000/s, 64 clients, p99 224 ms.", ""),
        ("", [{"clients": 1, "invalid": ["late"]}], "**INVALID: 1 of 1 runs measure", "**No valid measurement.**"),
        ("", [], "**No valid measurement.**", ""),
    ],
)  # fmt: skip
def test_without_tuning_the_verdict_is_about_the_loads(
    make_measurement: Make, slo: str, runs: Runs, first: str, more: str
) -> None:
    origin = structs.replace(ORIGIN, slo=slo)
    text = lines(compose(origin, [make_measurement(**run, slo=slo) for run in runs]))
    assert text[2].startswith(first)
    assert more in text[4]
    assert "penstock bench app.py:Model --rate 100" in text


def test_a_missed_objective_has_the_value_of_the_repeats_that_missed_it(make_measurement: Make) -> None:
    runs = [make_measurement(rate=500.0, base_s=base_s, slo=SLO) for base_s in (0.02, 0.02, 0.2)]
    text = lines(compose(ORIGIN, [*runs, make_measurement(rate=800.0, base_s=0.01, most=5000.0, slo=SLO)]))
    value = p99(runs[2])
    assert value is not None
    assert value > 0.1
    assert text[4] == f"- missed, 500/s poisson: p99<=100ms is {seconds(value)} in 1 of 3"
    assert text[2].startswith("SLO p99<=100ms met at ")
    assert text[2].endswith("(800/s poisson), but missed at a lower load (500/s poisson).")


def test_a_tuning_with_a_result_says_nothing_red_of_invalid_runs(make_measurement: Make) -> None:
    bad = make_measurement(rate=900.0, invalid=["the generator used 0.97 of a core"])
    report = compose(ORIGIN, [bad, make_measurement(rate=100.0)], VERDICT)
    assert not [block for block in report.verdict if isinstance(block, Paragraph) and block.mark == "bad"]
    assert "- 900/s poisson: the generator used 0.97 of a core" in markdown(report)


@pytest.mark.parametrize(
    ("runs", "cells"),
    [
        ([{"most": most} for most in (500.0, 520.0, 510.0)], ("3", "510 (500..520)", "54.9 ms (53.8..56)")),
        ([{"most": most} for most in (500.0, 520.0)], ("2", "510 (500..520)", "54.9 ms (53.8..56)")),
        ([{}, {"invalid": ["late"]}], ("1 (+1 invalid)", "800", "31 ms (29.4..33.2)")),
        ([{"latency": Latency(p50_s=0.01, p99_s=0.0301)}], ("1", "800", "30.1 ms")),
        ([{}, {"latency": Latency(p50_s=0.01)}], ("2", "800 (800..800)", "n/a")),
    ],
)
def test_the_repeats_of_a_load_are_one_row(make_measurement: Make, runs: Runs, cells: tuple[str, str, str]) -> None:
    (row,) = loads(compose(ORIGIN, [make_measurement(clients=8, repeat=n, **run) for n, run in enumerate(runs)]))
    assert (row["runs"], row["throughput/s"], row["p99 (95 %)"]) == cells


def test_a_percentile_without_enough_samples_is_unknown(make_measurement: Make) -> None:
    latency = Latency(p50_s=0.01, p90_s=0.02, p99_s=0.0301)
    (row,) = loads(compose(ORIGIN, [make_measurement(clients=8, latency=latency)]))
    assert (row["p50"], row["p99 (95 %)"], row["p99.9"]) == ("10 ms", "30.1 ms", "n/a")


def test_an_invalid_run_has_a_reason_instead_of_figures(make_measurement: Make) -> None:
    bad = make_measurement(rate=900.0, invalid=["the generator used 0.97 of a core"])
    report = compose(ORIGIN, [bad, make_measurement(rate=100.0)])
    text = markdown(report)
    assert "**INVALID: 1 of 2 runs measure nothing; see below.**" in text
    assert "- 900/s poisson: the generator used 0.97 of a core" in text
    first, second = loads(report)
    assert (first["SLO"], first["throughput/s"], first["p50"]) == ("INVALID", "", "")
    assert second["throughput/s"] == "100"


def test_a_caveat_appears_once_with_all_its_loads(make_measurement: Make) -> None:
    runs = [make_measurement(clients=n, caveats=["cannot see stalls"]) for n in (1, 2, 4, 8, 16, 32)]
    assert "- cannot see stalls" in lines(compose(ORIGIN, runs))
    runs.append(make_measurement(clients=64))
    assert "- 1 client; 2 clients; 4 clients; 8 clients and 2 more: cannot see stalls" in lines(compose(ORIGIN, runs))


def test_errors_are_reported_by_code_with_the_first(make_measurement: Make) -> None:
    first = 'HTTP 503\n{"error": "```"}'
    runs = [make_measurement(clients=1, errors={"503": 2, "lost": 1}, first_error=first) for _ in range(2)]
    text = markdown(compose(ORIGIN, runs))
    assert "| 1 client | 503: 4, lost: 2 |" in text
    assert f"````\n{first}\n````" in text


def test_server_stats_form_a_table_with_unknown_figures_marked(make_measurement: Make) -> None:
    text = markdown(compose(ORIGIN, [make_measurement(clients=8)]))
    assert "| 8 clients | 5 ms | 400 µs | 4 ms | 200 µs | 5.8 | 1.1 | 400 MiB | 80 %, 1 GiB |" in text
    assert "In the server" not in markdown(compose(ORIGIN, [make_measurement(clients=8, server=None)]))


def test_a_machine_that_was_busy_is_to_be_known() -> None:
    busy = structs.replace(ORIGIN, machine={"cores": 2, "load_before": 3.5, "gpus": []})
    text = markdown(compose(busy, []))
    assert "- the machine was busy before the run began: load 3.5 on 2 cores" in text
    assert "| gpus | none |" in text
    calm = structs.replace(ORIGIN, machine={"cores": 2, "load_before": 0.4, "gpus": ["A", "B"]})
    assert "busy" not in markdown(compose(calm, []))
    assert "| gpus | A, B |" in markdown(compose(calm, []))


def test_text_of_others_stays_text() -> None:
    text = markdown(compose(ORIGIN, []))
    assert "| cpu | Some \\| CPU |" in text
    verdict = Verdict(slo=SLO, chosen="<script>`x`\n# big", default="a")
    assert "Chosen: \\<script>\\`x\\` # big within" in markdown(compose(ORIGIN, [], verdict))


def test_loads_without_server_stats_are_left_out_of_the_server_table(make_measurement: Make) -> None:
    runs = [make_measurement(rate=100.0), make_measurement(rate=200.0, server=None, errors={"503": 1000, "lost": 200})]
    report = compose(ORIGIN, runs)
    assert [row["errors"] for row in loads(report)] == ["0", "1,200"]
    (server,) = (block for block in report.rest if isinstance(block, TableBlock) and "queue" in block.header)
    assert [row[0] for row in server.rows] == ["100/s poisson"]
    assert (server.header[-2], server.rows[0][-2]) == ("GPU", "10 %, 1 GiB")
    assert (server.header[-1], server.rows[0][-1]) == ("batches by rows", "<=1:20 <=2:40 <=4:30 <=8:6")
    no_gpu = compose(ORIGIN, [make_measurement(rate=100.0, server=ServerStats(queue_s=0.1))])
    (server,) = (block for block in no_gpu.rest if isinstance(block, TableBlock) and "queue" in block.header)
    assert server.header[-1] == "memory"
