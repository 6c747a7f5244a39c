"""BLIP-2 in full size on a GPU, with random weights and the full transport of pixels, against the limit of the GPU.

One frame takes 0.70 TFLOP for vision, Q-Former and prompt, and 5.3 GFLOP for each new token (2.65 billion weights).
Random weights never end a caption, so all captions have the same number of tokens. The limit is half of what one
large matrix product reaches on this GPU. "GPU busy" is the driver's figure, sampled every 0.2 s during the run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator

import harness
from captioning_clips import FRAMES, pan
from captioning_runs import PENSTOCK, TINY, Captioner, Model, Setting, per_frame
from closed_loop import Sample

FULL = Model("BLIP-2 OPT-2.7B", TINY.app, None, pan, lambda frame, caption: True)
LEAST_RATE = 250.0  # frames/s, bf16 with 12 tokens on one H200
LEAST_BUSY = 85.0
FIXED_TFLOP, TOKEN_TFLOP = 0.70, 0.0053
COPIES = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the network."""

    precision: str
    tokens: int
    batch: int
    optimize: str = "none"

    @property
    def words(self) -> str:
        return f"{self.precision}, {self.tokens} tokens, batch {self.batch}" + ", compiled" * (self.optimize != "none")

    def flags(self, dry: bool) -> list[str]:
        """The flags of `penstock serve`."""
        model = str(TINY.folder) if dry else "blip2-opt-2.7b"
        options = (f"min_new_tokens={self.tokens}", f"max_new_tokens={self.tokens}", "random_weights=true")
        sets = {"precision": f'"{self.precision}"', "optimize": f'"{self.optimize}"'}
        sets |= {} if dry else {"devices": '["cuda:0"]'}
        found = ["--model", model, "--max-batch-size", str(self.batch)]
        found += [word for option in options for word in ("--option", option)]
        return found + [word for key, value in sets.items() for word in ("--set", f"models.captioner.{key}={value}")]


WAYS = (Way("fp16", 100, 128), Way("bf16", 12, 64), Way("bf16", 12, 64, "compile"), Way("bf16", 12, 256))
DRY = (Way("fp32", 30, 64), Way("bf16", 12, 64))


def gpu(report: harness.Report, options: argparse.Namespace) -> None:
    """One row for each way. The targets hold for one H200."""
    if not options.dry and not shutil.which("nvidia-smi"):
        raise SystemExit("not measured: there is no GPU here; --dry does without")
    roof_tflops = None if options.dry else _matmul_tflops() / 2
    if roof_tflops is not None:
        report.section(f"{_driver('name')[0]}; half of a large product of bf16 matrices is {roof_tflops:.0f} TFLOP/s.")
    for way in DRY if options.dry else WAYS:
        with Captioner(PENSTOCK, FULL, workers=1, flags=way.flags(options.dry)) as server:
            server.warm(pan(270))
            runs = [_once(server, way, roof_tflops, options) for _ in range(options.rounds)]
        report.add({"model": FULL.name + ", shrunken" * options.dry, "how": way.words}, {PENSTOCK: runs})
        if (way.precision, way.tokens) == ("bf16", 12) and not options.dry:
            report.target(f"{way.words}: frames/s per GPU", [s["rate"] for s in runs], least=LEAST_RATE)
            report.target(f"{way.words}: GPU busy, %", [s["busy"] for s in runs], least=LEAST_BUSY)


def _once(server: Captioner, way: Way, roof_tflops: float | None, options: argparse.Namespace) -> Sample:
    frames = 65 if options.dry else 301 if options.quick else FRAMES
    with _busy(wanted=not options.dry) as looks:
        whole = server.run(pan(270), frames, Setting(copies=COPIES))
    found = per_frame(whole, 0.0, frames * COPIES)
    if looks:
        running = looks[len(looks) // 10 : -max(1, len(looks) // 10)]
        found["busy"] = statistics.mean(running or looks)
    if roof_tflops is not None:
        roof = roof_tflops / (FIXED_TFLOP + TOKEN_TFLOP * way.tokens)
        found |= {"roof": roof, "of_roof": 100 * found["rate"] / roof}
    return found


def _driver(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")


@contextlib.contextmanager
def _busy(wanted: bool) -> Iterator[list[float]]:
    """Fills the list with percentages when the block ends."""
    looks: list[float] = []
    if not wanted:
        yield looks
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0", "-lms", "200"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL)
        try:
            yield looks
        finally:
            process.terminate()
            process.wait()
            said.seek(0)
            looks += [float(line) for line in said.read().split("\n") if line.strip().isdigit()]


def _matmul_tflops() -> float:
    """The throughput of the product of two bf16 matrices of 8192 x 8192."""
    import torch

    side, times = 8192, 50
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        a @ b
    torch.cuda.synchronize()
    return 2 * side**3 * times / (time.perf_counter() - began) / 1e12
