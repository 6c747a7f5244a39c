"""The page on planning from top to bottom: a model is served, its load recorded, and both are planned for."""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.perf.bench.server import ServerProcess
from support.pages import ROOT, blocks

URL = "http://127.0.0.1:8080"


def run(line: str, url: str, folder: Path) -> str:
    """The stdout of a line of the page, with short runs."""
    # an open loop ends early on a busy machine, and the recording then has too few requests to plan for
    line = line.replace(URL, url).replace("--mode open --rate 60 --duration 20s", "--concurrency 1,8 --requests 300")
    line = line.replace("--duration 20s", "--duration 2s --warmup 0")
    line = line.replace("poisson:600 --seconds 20", "poisson:600 --seconds 5")
    words = [sys.executable, "-m", "penstock.cli.main", *shlex.split(line)[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    late = words[3] == "bench" and "INVALID" in done.stdout  # a busy machine
    assert done.returncode == 0 or late, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_server_that_saw_batches_of_one_size_only_is_named(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def rank(items: list) -> list:\n    return items\n")
    with ServerProcess(["app.py:rank"], cwd=tmp_path) as server:
        url = server.urls["inference"]
        for _ in range(20):
            urllib.request.urlopen(f"{url}/predictions/rank", data=b'"a"', timeout=60).close()
        done = CliRunner().invoke(main, ["plan", "--arrivals", "poisson:10", "--slo", "p99<=1s", "--cost", url])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"penstock: {url} has not learned what a batch of rank costs, which takes")


@pytest.mark.slow
def test_every_command_of_the_page_on_planning_works(tmp_path: Path) -> None:
    found = blocks((ROOT / "docs/plan.md").read_text())
    app = next(text for language, text in found if language == "python")
    (tmp_path / "app.py").write_text(app)
    (tmp_path / "item.json").write_text('"a short text"\n')
    plain = [text for language, text in found if not language]
    lines = [line for text in plain for line in text.splitlines() if line.startswith("penstock ")]
    assert lines[0].endswith("--output plan")
    assert run(lines[0], "", tmp_path) == plain[1]
    page = (tmp_path / "plan" / "report.html").read_text()
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["instances"] == 3
    assert "<svg" in page or "No plots" in page
    assert lines[1] == "penstock serve app.py:rank --record arrivals.jsonl"
    with ServerProcess(["app.py:rank", "--record", "arrivals.jsonl"], cwd=tmp_path) as server:
        outputs = {line: run(line, server.urls["inference"], tmp_path) for line in lines[2:]}
    recorded, benched, given = (text for line, text in outputs.items() if line.startswith("penstock plan "))
    assert re.search(r"rank at .*: \S+ ms \+ \S+ (ms|µs) x rows", recorded)
    assert re.search(r"^memory +[\d.]+ MiB$", recorded, re.M), "of the server's worker"
    assert "bench-rank (mean batches under load)" in benched
    assert "also with 1 down" in given
    for text in (recorded, benched, given):
        assert re.search(r"^\d+ instances? with batches of up to \d+: .* meets p99<=150ms", text, re.M), text
