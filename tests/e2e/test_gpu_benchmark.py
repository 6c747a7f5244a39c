"""The benchmarks for people with a GPU, on a machine without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(*words: str, program: str = "gpu.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / program), "--rounds", "1", *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=200)


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


def test_captioning_is_rehearsed_with_a_simulated_network_and_says_what_it_does() -> None:
    pytest.importorskip("cv2")
    done = run("--gpu", "--rehearse", "--quick", program="captioning.py")
    assert done.returncode in (0, 1), done.stderr  # 1: a busy machine misses the target
    rows = re.findall(r"^\| simulated network \| (.*?) \| penstock \| ([\d,.]+)", done.stdout, re.MULTILINE)
    assert [how for how, _ in rows] == ["bf16, 12 tokens, batch 64", "bf16, 12 tokens, batch 256"]
    assert all(float(rate.replace(",", "")) < limit for (_, rate), limit in zip(rows, (299, 513), strict=True))
    for phase in ("the clip", "loading the network", "the first frames", "round 1 of 1"):
        assert re.search(rf"\[ *[\d.]+ s\] .*{phase}: took [\d.]+ s", done.stderr), done.stderr
