import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from penstock.perf.bench import figures
from penstock.perf.bench.cli import bench

APP = """
import time

def double(items):
    time.sleep(0.005)
    return [2 * item["x"] for item in items]
"""


DEADLY = """
import os, signal

left = 50

def deadly(items):
    global left
    left -= 1
    if not left:
        os.kill(os.getppid(), signal.SIGKILL)
    return [0] * len(items)
"""
ROOT = Path(__file__).parents[2]


def run_bench(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(APP, "double")


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps runs valid on a machine that is busy with other tests."""
    monkeypatch.setattr(figures, "MOST_LATE", 2.0)
    monkeypatch.setattr(figures, "MOST_CPU", 100.0)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text('{"x": 21}')
    return str(path)


@pytest.mark.usefixtures("any_machine")
def test_a_server_is_measured_from_both_sides(server: Any, data: str) -> None:
    flags = ["--concurrency", "8", "--duration", "0.8", "--warmup", "0.2", "--slo", "p50<=10s,error<=0%", "--json"]
    result = run_bench(server.url, "--data", data, *flags)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["measurements"]
    assert run["requests"] == run["answered"] > 8
    assert run["latency"]["p50_s"] >= 0.005
    side = run["server"]
    assert side["queue_s"] is not None
    assert 0.005 <= side["run_s"] < 1
    assert 1 < side["mean_batch"] <= 8
    assert sum(side["batches"].values()) > 1
    assert side["cpu"] > 0
    assert side["memory_bytes"] > 2**20
    assert run["goodput"] <= run["throughput"]


@pytest.mark.usefixtures("any_machine")
def test_an_open_loop_of_two_rates_is_stored_with_a_report(server: Any, data: str, tmp_path: Path) -> None:
    flags = ["--rate", "50,100", "--duration", "0.5", "--warmup", "0", "--output", str(tmp_path / "out")]
    result = run_bench(server.url, "--data", data, *flags)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["50/s", "100/s"]
    assert re.search(r"^load +queue .*\n50/s poisson ", result.stdout, re.MULTILINE)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "100/s poisson" in report
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.usefixtures("any_machine")
def test_a_ramp_ends_at_its_last_rate(server: Any, data: str) -> None:
    flags = ["--mode", "ramp", "--rate", "100,150", "--duration", "0.3", "--warmup", "0", "--slo", "p50<=10s"]
    result = run_bench(server.url, "--data", data, *flags)
    assert result.exit_code == 0, result.output
    assert "knee: 150/s hold p50<=10s; no higher rate was requested" in result.stdout.splitlines()


@pytest.mark.usefixtures("any_machine")
def test_an_app_is_served_for_the_time_and_ended(tmp_path: Path, data: str) -> None:
    (tmp_path / "app.py").write_text(APP)
    flags = ["--requests", "20", "--concurrency", "2", "--warmup", "0"]
    flags += ["--set", "models.double.batching.max_batch_size=4"]
    result = run_bench(f"{tmp_path}/app.py:double", "--data", data, *flags, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["measurements"][0]["answered"] == 20
    assert found["measurements"][0]["server"]["memory_bytes"] > 2**20
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie of another test
            assert f"{tmp_path}/app.py:double" not in child.cmdline()


def test_an_app_that_does_not_load_shows_its_output(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("raise RuntimeError('no weights here')\n")
    result = run_bench(f"{tmp_path}/app.py:model", "--data", "x")
    assert result.exit_code == 1
    assert "the server did not start; its output:" in result.stderr
    assert "no weights here" in result.stderr


@pytest.mark.usefixtures("any_machine")
def test_a_server_that_dies_in_a_run_makes_it_invalid(serve: Callable[..., Any], data: str) -> None:
    server = serve(DEADLY, "deadly")
    result = run_bench(server.url, "--data", data, "--concurrency", "2,4", "--duration", "60", "--warmup", "0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split()[:3] == ["2", "clients", "INVALID"]
    assert "the target went away" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("penstock: no connection to ")


def test_ctrl_c_ends_a_run_with_partial_results(server: Any, data: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "bench", server.url, "--data", data, "--warmup", "0"]
    command += ["--concurrency", "1,2", "--requests", "20", "--repeat", "1000", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("1 client #1"):
            break
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "1 client" in out
    assert "interrupted; partial results follow" in err
    kept = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert 1 <= len(kept) < 2000
    assert (tmp_path / "out" / "report.md").exists()


@pytest.mark.usefixtures("any_machine")
def test_the_documented_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "bench.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("    $ penstock bench ")]
    monkeypatch.chdir(ROOT)
    shorter = line.replace("--duration 5", "--duration 0.3 --warmup 0")
    result = run_bench(*shlex.split(shorter.removeprefix("    $ penstock bench ")))
    assert [row.split()[:2] for row in result.stdout.splitlines()[1:3]] == [["1", "client"], ["16", "clients"]]
    assert "SLO p99<=20ms" in result.stdout
