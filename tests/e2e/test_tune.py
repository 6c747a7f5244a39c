"""`penstock tune` on a small model, from the first measurement to a server that meets the SLO."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

APP = """
import time

import numpy as np

import penstock


@penstock.model(max_queue=16, max_batch_size=1)  # excess requests are rejected at once
class Net:
    parameters = {"example": [0.25, 0.5]}

    def load(self, device, precision=None):
        self.weights = np.eye(2) * (3 if precision == "bf16" else 2)

    def predict(self, items):
        time.sleep(0.01 + 0.0002 * len(items))
        return (np.array(items) @ self.weights).tolist()


@penstock.model(max_queue=64)
class Good(Net):
    pass


class Broken(Net):
    def load(self, device):
        raise OSError("no weights here")
"""
TOML = """\
# of the team
[server]
port = 0  # any

[models.net]
# the one that counts
target = "app.py:Net"

[models.net.batching]
timeout_s = 5.0  # as agreed
"""
SLO = "p99<=2s,error<=25%"  # a busy machine stalls now and then
TUNE = [
    "tune", "app.py:Net", "--slo", SLO, "--space", "batch=8,instances=1,precision=fp32,bf16", "--search", "grid",
    "--warmup", "0.2", "--price", "2", "--write", "penstock.toml", "--accuracy-check", "check.jsonl",
]  # fmt: skip
# The latencies of a busy machine are not under test: runs are short, and the SLO is generous.
LENIENT = """
import penstock.perf.bench.figures as figures
from penstock.cli.main import main
from penstock.perf.tune.rates import EFFORTS, Effort

figures.MATTERS = figures.MOST_CPU = 1e9
EFFORTS["normal"] = EFFORTS["quick"] = Effort(
    probe_s=0.4, probe_samples=50, sure_s=0.4, sure_samples=100, latencies=0.2, most_s=0.6, precision=0.5, repeats=2,
    finalists=1,
)
main()
"""


def command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", LENIENT, *words]


def penstock(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(words), cwd=folder, capture_output=True, text=True, timeout=400)


class Tuned(NamedTuple):
    """A search that was interrupted and then resumed."""

    folder: Path
    first: tuple[int, str, str]
    left: list[int]
    measured: list[str]
    toml: str
    second: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("tune")
    (folder / "app.py").write_text(APP)
    (folder / "penstock.toml").write_text(TOML)
    (folder / "check.jsonl").write_text('{"input": [1, 2], "output": [2.0, 4.0]}\n')
    first, left = interrupted(folder, TUNE)
    records = (folder / "tune-net/records.jsonl").read_text().splitlines()
    toml = (folder / "penstock.toml").read_text()
    return Tuned(folder, first, left, records, toml, resumed(folder))


def resumed(folder: Path) -> subprocess.CompletedProcess[str]:
    """A search that ends; it gets more time if a busy machine leaves none for the proof."""
    for budget in ("60s", "180s"):
        found = penstock(folder, *TUNE, "--budget", budget)
        if "give a longer --budget" not in found.stderr:
            break
    return found


def interrupted(folder: Path, words: Sequence[str]) -> tuple[tuple[int, str, str], list[int]]:
    """((exit status, stdout, stderr), remaining processes) of a search that gets SIGINT at its second run."""
    with subprocess.Popen(
        command(words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines: list[str] = []
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.append(process.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        children: list[psutil.Process] = []
        for line in process.stderr:
            lines.append(line)
            if sum("/s poisson:" in each for each in lines) == 1 and not children:
                children = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGINT)
        reader.join()
        code = process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=20)
    return (code, printed[0], "".join(lines)), [child.pid for child in alive]


def verdict(tuned: Tuned) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tuned.folder / "tune-net/verdict.json").read_text())
    return found


def test_ctrl_c_reports_the_best_so_far_and_leaves_no_process_and_no_change(tuned: Tuned) -> None:
    code, stdout, stderr = tuned.first
    assert code == 130, stderr
    assert "it was interrupted" in stdout
    assert re.search(r"nothing is written to .*penstock.toml: the search was interrupted", stderr)
    assert tuned.toml == TOML
    assert tuned.measured
    assert tuned.left == []


def test_a_second_start_resumes_and_repeats_no_measurement(tuned: Tuned) -> None:
    assert tuned.second.returncode == 0, tuned.second.stderr
    assert "resumes in tune-net" in tuned.second.stderr
    records = (tuned.folder / "tune-net/records.jsonl").read_text().splitlines()
    assert records[: len(tuned.measured)] == tuned.measured
    assert len(records) > len(tuned.measured)
    assert "(measured before)" in tuned.second.stderr
    lines = [line for line in tuned.second.stderr.splitlines() if "/s poisson:" in line]
    assert all(re.match(r"[01] of 2, \d+:\d\d of [13]:00: ", line) for line in lines), lines
    assert ": baseline: " in lines[0]
    assert any(line.startswith("1 of 2, ") for line in lines)


def test_the_folder_has_results_the_verdict_and_a_report_in_both_formats(tuned: Tuned) -> None:
    folder = tuned.folder / "tune-net"
    for name in ("run.json", "records.jsonl", "summary.csv", "journal.jsonl", "settings.csv", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    report = (folder / "report.md").read_text()
    assert f"within {SLO}" in report
    assert "| settings | slo | throughput_per_s | p99_ms | offered_per_s | device | workers |" in report
    assert f"within {SLO}" in tuned.second.stdout
    found = verdict(tuned)
    assert found["met"]
    assert (found["chosen"], found["proven"]) == ("batch=8,instances=1,precision=fp32", True)
    assert 0 < found["default_goodput"] < found["goodput"]
    assert found["cost_per_million"] == pytest.approx(2 / (found["goodput"] * 3600) * 1e6)
    assert found["command"].startswith("penstock tune app.py:Net --slo 'p99<=2s,error<=25%' ")
    whys = {other["settings"]: other["why"] for other in found["runners_up"]}
    assert "1 of 1 responses differ; line 1: [0]: found 3, expected 2" in whys["batch=8,instances=1,precision=bf16"]


def test_the_toml_has_the_result_and_every_comment(tuned: Tuned) -> None:
    text = (tuned.folder / "penstock.toml").read_text()
    for comment in ("# of the team", "# any", "# the one that counts", "# as agreed"):
        assert comment in text
    assert f"# penstock tune: {SLO} was met at " in text
    model = tomllib.loads(text)["models"]["net"]
    assert (model["instances"], model["precision"], model["batching"]["max_batch_size"]) == (1, "fp32", 8)
    assert model["batching"]["timeout_s"] == 5.0


def test_settings_that_are_worse_than_the_default_are_not_written(tuned: Tuned) -> None:
    found = penstock(
        tuned.folder, "tune", "app.py:Good", "--slo", SLO, "--space", "batch=1,instances=1", "--output", "worse",
        "--budget", "15s", "--write", "worse.toml",
    )  # fmt: skip
    assert found.returncode == 1, found.stderr
    assert "nothing is written to" in found.stderr
    assert not os.path.exists(tuned.folder / "worse.toml")
    measured = [line for line in found.stderr.splitlines() if "/s poisson:" in line]
    assert ": baseline: " in measured[0]


def test_a_server_with_that_toml_meets_the_slo_in_a_fresh_bench(tuned: Tuned) -> None:
    rate = max(60.0, 0.25 * verdict(tuned)["goodput"])
    found = penstock(
        tuned.folder, "bench", "penstock.toml", "--rate", f"{rate:.3g}", "--requests", "150", "--warmup", "0.3",
        "--slo", SLO, "--json",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr + found.stdout
    (run,) = json.loads(found.stdout)["measurements"]
    assert run["answered"] == run["requests"] > 0


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("app.py:Broken", [], "OSError: no weights here"),
        ("app.py:Net", ["--data", "wrong.jsonl"], "penstock: the app cannot answer the requests: the model raised"),
    ],
)
def test_an_app_that_does_not_load_or_answer_ends_the_tuning_with_its_error(
    tuned: Tuned, target: str, more: list[str], message: str
) -> None:
    (tuned.folder / "wrong.jsonl").write_text('{"a": 1}\n')
    found = penstock(tuned.folder, "tune", target, "--slo", SLO, "--output", "wrong", *more)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stdout


def test_for_an_impossible_slo_the_nearest_settings_are_reported_and_nothing_is_written(tuned: Tuned) -> None:
    found = penstock(
        tuned.folder, "tune", "app.py:Net", "--slo", "p99<=1ms", "--space", "batch=1,4,instances=1", "--effort",
        "quick", "--output", "impossible", "--write", "new.toml",
    )  # fmt: skip
    assert found.returncode == 1, found.stderr
    assert "no settings meet p99<=1ms" in found.stdout
    assert "batch=1,instances=1" in found.stdout
    assert "nothing meets p99<=1ms" in found.stderr
    assert not os.path.exists(tuned.folder / "new.toml")
