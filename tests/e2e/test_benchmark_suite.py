"""`penstock benchmark-suite` on real servers: the guide's YAML runs with only the name of its archive filled in."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.perf.bench.cli import benchmark_suite
from penstock.perf.bench.results import read

GUIDE = (Path(__file__).parents[1] / "unit" / "perf" / "bench" / "guide.yaml").read_text()
# Both take long beside what the generator does for a request: else it is the generator that is measured.
ECHO = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.02)
    return [bytes(row["body"]).decode() for row in data]
"""
APP = """
import time

class Lengths:
    def predict(self, items):
        time.sleep(0.01)
        return [len(item["text"]) for item in items]

class Broken:
    def __init__(self):
        raise RuntimeError("no weights here")

    def predict(self, items):
        return items
"""
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


# A machine that is busy with other tests makes no run invalid: what is invalid is measured again on resume.
ANY_MACHINE = """
import penstock.perf.bench.figures as figures
from penstock.cli.main import main

figures.MOST_LATE, figures.MOST_CPU = 2.0, 100.0
main()
"""


def penstock(*words: str) -> list[str]:
    return [sys.executable, "-c", ANY_MACHINE, *words]


def suite(folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command in the folder, on a machine without GPUs."""
    command = penstock("benchmark-suite", *words)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **NO_GPUS}, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "ab_report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with echo.mar, app.py and an input."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "echo.py").write_text(ECHO)
    (folder / "app.py").write_text(APP)
    (folder / "Path to model input").write_text("hello")
    (folder / "item.json").write_text('{"text": "hello"}')
    words = ("archive", "--model-name", "echo", "--version", "1.0", "--handler", "echo.py")
    subprocess.run(penstock(*words), cwd=folder, check=True, capture_output=True)
    (folder / "strict.yaml").write_text("strict_delay: true\n")
    words = ("archive", "--model-name", "strict", "--version", "1.0", "--handler", "echo.py")
    subprocess.run(penstock(*words, "--config-file", "strict.yaml"), cwd=folder, check=True, capture_output=True)
    return folder


def test_the_guides_yaml_runs_unchanged(made: Path) -> None:
    (made / "model_config.yaml").write_text(GUIDE.replace("Path to .mar file", "echo.mar"))
    words = ("--skip-missing-hardware", "--requests", "30", "--warmup", "0", "--slo", "p50<=60s", "--output", "guide")
    code, out, warned = suite(made, "--input", "model_config.yaml", *words)
    assert code == 0, out + warned
    assert "Model_name eager_mode needs gpus all, and this machine has none: left out" in warned
    found = rows(made / "guide")
    assert [(row["Workers"], row["Batch size"]) for row in found] == [(w, b) for w in "14" for b in "1248"]
    for row in found:
        known = {
            "Benchmark": "penstock", "Model": "Model_name", "Mode": "eager_mode", "Processor": "cpu",
            "Batch delay": "100", "Concurrency": "10", "Requests": "30",
            "TS failed requests": "0", "TS error rate": "0.0", "Invalid": "",
            "TS latency P99": "", "SLO met": "yes",
        }  # fmt: skip
        assert {name: row[name] for name in known} == known, "30 requests are too few to tell the P99"
        assert float(row["TS throughput"]) > 0
        assert 0 < float(row["TS latency P50"]) <= float(row["TS latency P90"])
        assert float(row["Model_p50"]) > 0
        assert 1 <= float(row["Batch size mean"]) <= int(row["Batch size"])
    origin, measurements = read(made / "guide")
    assert origin.command == "benchmark-suite"
    assert origin.line.endswith("--output guide")
    assert [m.requests for m in measurements] == [30] * 8
    page = (made / "guide" / "report.md").read_text()
    assert "Model_name eager_mode: cpu, " in page.splitlines()[2]
    assert "within p50<=60s" in page.splitlines()[2]
    assert page.count("\n| cpu | 1 | ") == page.count("\n| cpu | 4 | ") == 4
    assert out.count("/s") >= 8


def test_the_delay_is_really_applied(made: Path) -> None:
    lines = ["strict:", "  e:", "    url: strict.mar", "    batch_size: 2", "    batch_delay: 150", "    requests: 4"]
    lines += ["    concurrency: 1", "    input: Path to model input"]
    (made / "delay.yaml").write_text("\n".join(lines) + "\n")
    code, out, warned = suite(made, "delay.yaml", "--warmup", "0", "--output", "delay")
    assert code == 0, out + warned
    (row,) = rows(made / "delay")
    assert float(row["TS latency mean"]) >= 150, "a single client never fills a batch of two"


def test_an_application_and_one_that_does_not_load(made: Path) -> None:
    texts = []
    for name in ("Broken", "Lengths"):
        texts.append(f"{name}:\n  e:\n    url: app.py:{name}\n    batch_size: 4\n    requests: 200\n")
    (made / "apps.yaml").write_text("".join(texts))
    code, out, warned = suite(made, "apps.yaml", "--data", "item.json", "--warmup", "0", "--output", "apps")
    assert code == 1, out + warned
    broken, lengths = rows(made / "apps")
    assert "no weights here" in broken["Invalid"]
    assert (broken["TS throughput"], broken["Repeats"]) == ("", "1")
    assert float(lengths["TS throughput"]) > 0
    assert lengths["TS latency P90"]
    assert 1 < float(lengths["Batch size mean"]) <= 4
    assert "Broken e: no valid measurement." in out


def test_ctrl_c_writes_a_report_and_resume_measures_the_rest(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "m:\n  e:\n    url: app.py:Lengths\n    workers: [1, 2]\n    requests: 40\n    input: item.json\n"
    (made / "resumed.yaml").write_text(text)
    words = ("benchmark-suite", "resumed.yaml", "--warmup", "0", "--output", "resumed")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    try:
        process: Any = subprocess.Popen(
            penstock(*words),
            cwd=made,
            env={**os.environ, **NO_GPUS, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, warned = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert first.startswith("[1/2] m e, cpu, 1 worker, batch 1, 10 clients: ")
    assert process.returncode == 130, out + warned
    assert "penstock: interrupted; partial results follow" in warned
    assert [row["Repeats"] for row in rows(made / "resumed")] == ["1", "0"]
    assert "not run" in (made / "resumed" / "report.md").read_text()
    monkeypatch.chdir(made)
    again = CliRunner().invoke(benchmark_suite, words[1:])
    assert (again.exit_code, again.stdout) == (2, "")
    assert "resumed already holds a run" in again.stderr
    other = CliRunner().invoke(benchmark_suite, [*words[1:], "--resume", "--requests", "41"])
    assert other.exit_code == 2
    assert "results of another run" in other.stderr
    code, out, warned = suite(made, *words[1:], "--resume")
    assert code == 0, warned
    assert next(line for line in out.splitlines() if line.startswith("[")).startswith("[2/2] m e, cpu, 2 workers")
    assert [row["Repeats"] for row in rows(made / "resumed")] == ["1", "1"]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("m:\n  e:\n    url: echo.mar\n    batchsize: 2\n", (), "wrong.yaml:4: found m.e: unknown key 'batchsize'"),
        (GUIDE, (), "wrong.yaml:2: Model_name eager_mode needs gpus all, and this machine has none"),
        ("m:\n  e:\n    url: echo.mar\n", ("--slo", "p98<=1ms"), '"p98" is none of'),
        ("m:\n  e:\n    url: echo.mar\n", ("--resume",), "give --output DIR"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(
    made: Path, text: str, words: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "wrong.yaml").write_text(text)
    monkeypatch.chdir(made)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(benchmark_suite, ["wrong.yaml", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("penstock: ")
    assert expected in last
    assert not list(made.glob("benchmark-suite-*"))


def test_without_a_file_the_command_shows_its_usage() -> None:
    done = CliRunner().invoke(benchmark_suite, [])
    assert done.exit_code == 2
    assert "expected for instance penstock benchmark-suite models.yaml" in done.stderr
