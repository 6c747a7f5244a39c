"""The benchmark for people with a GPU, on a machine without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
FILE = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FILE), "--rounds", "1", *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, cwd=FILE.parent, capture_output=True, text=True, timeout=120)


def test_it_says_that_there_is_no_gpu() -> None:
    done = run()
    assert done.returncode == 1
    assert re.fullmatch(r"not measured: there is no CUDA device here .*; --dry .*\n", done.stderr)


def test_a_dry_run_has_the_bare_loop_beside_each_row() -> None:
    done = run("--dry", "--only", "bert")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| BERT-base, streamer \| (.*?) \| (.*?) \| [\d,.]+ ", done.stdout, re.MULTILINE)
    loads = ("futures, 256 ahead", "128 callers")
    assert rows == [(load, who) for load in loads for who in ("loop", "penstock")]
