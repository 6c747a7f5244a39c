"""BLIP-2 in full size on a GPU, with random weights and the full transport of pixels, against the limit of the GPU.

One frame takes 0.70 TFLOP for vision, Q-Former and prompt, and 5.3 GFLOP for each new token (2.65 billion weights).
Random weights never end a caption, so all captions have the same number of tokens. The limit is half of what one
large matrix product reaches on this GPU. "GPU busy" is the driver's figure, sampled every 0.2 s during the run.

Everything ends within three minutes, with the rows that were measured until then; progress goes to standard error. A
rehearsal replaces the network by one that sleeps, at the rates that BLIP-2 alone reached on one H200.
"""

import argparse
import contextlib
import dataclasses
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import harness
from captioning_clips import FRAMES, pan
from captioning_runs import NONE, PENSTOCK, TINY, Captioner, Model, Setting, per_frame
from closed_loop import Sample

FULL = Model("BLIP-2 OPT-2.7B", TINY.app, None, pan, lambda frame, caption: True)
LEAST_RATE = 250.0  # frames/s, bf16 with 12 tokens on one H200
LEAST_BUSY = 85.0
LEAST_SHARE = 95.0  # of the rate of the simulated network, %
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


WAYS = (Way("bf16", 12, 64), Way("bf16", 12, 256), Way("bf16", 12, 64, "compile"), Way("fp16", 100, 128))
DRY = (Way("fp32", 30, 64), Way("bf16", 12, 64))
ALONE = {64: 298.0, 256: 512.0}  # frames/s of the network alone on one H200, by batch: what a rehearsal simulates
LIMIT_S = 180.0  # of everything: machines with a GPU are lent for minutes
ROUND_S = 10.0  # of one measured run


class Late(Exception):
    """The benchmark has used its time."""


class Clock:
    """Says what happens, and ends the benchmark after its time."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        signal.signal(signal.SIGALRM, self._end)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)

    def _end(self, *_: object) -> None:
        raise Late

    @property
    def left_s(self) -> float:
        return LIMIT_S - (time.monotonic() - self._began_s)

    @contextlib.contextmanager
    def phase(self, words: str) -> Iterator[None]:
        """Prints the start of a phase, its age every five seconds, and its end."""
        done, began_s = threading.Event(), time.monotonic()
        self._say(f"{words} ...")

        def repeat() -> None:
            while not done.wait(5.0):
                self._say(f"{words}: {time.monotonic() - began_s:.0f} s so far")

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self._say(f"{words}: took {time.monotonic() - began_s:.1f} s")

    def _say(self, words: str) -> None:
        print(f"[{time.monotonic() - self._began_s:5.1f} s] {words}", file=sys.stderr, flush=True)


def gpu(report: harness.Report, options: argparse.Namespace) -> None:
    """One row for each way. The targets hold for one H200."""
    simulated = options.rehearse
    if not (options.dry or simulated) and not shutil.which("nvidia-smi"):
        raise SystemExit("not measured: there is no GPU here; --dry and --rehearse do without")
    clock = Clock()
    try:
        with clock.phase("the clip"):
            pan(270)
        roof_tflops = None
        if not (options.dry or simulated):
            with clock.phase("a large product of matrices"):
                roof_tflops = _matmul_tflops() / 2
            report.section(
                f"{_driver('name')[0]}; half of a large product of bf16 matrices is {roof_tflops:.0f} TFLOP/s."
            )
        ways = WAYS[:2] if simulated else DRY if options.dry else WAYS
        took_s = 0.0
        for place, way in enumerate(ways):
            if clock.left_s < took_s:  # the way before took longer than what is left
                raise Late
            began_s = clock.left_s
            _measure(report, options, clock, way, f"{place + 1}/{len(ways)} {way.words}", roof_tflops)
            took_s = began_s - clock.left_s
    except Late:
        report.section(f"The limit of {LIMIT_S:.0f} s left no time for the other ways.")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _measure(
    report: harness.Report, options: argparse.Namespace, clock: Clock, way: Way, name: str, roof_tflops: float | None
) -> None:
    """The row of one way: as many rounds as are wanted and fit."""
    alone = ALONE[way.batch] if options.rehearse else None
    flags = way.flags(options.dry)
    model = FULL
    if alone is not None:
        model = dataclasses.replace(FULL, name="simulated network", app=NONE.app)
        flags = ["--option", f"rate={alone}", "--max-batch-size", str(way.batch)]
    with contextlib.ExitStack() as stack:
        with clock.phase(f"{name}: loading the network"):
            server = stack.enter_context(Captioner(PENSTOCK, model, workers=1, flags=flags))
        with clock.phase(f"{name}: the first frames"):
            server.warm(pan(270))
            frames = min(FRAMES, 65 if options.dry else 301)
            rate = _once(server, way, roof_tflops, alone, frames, 1)["rate"]
        copies = 1 if options.dry or options.quick else max(1, min(COPIES, round(rate * ROUND_S / FRAMES)))
        runs: list[Sample] = []
        try:
            while len(runs) < options.rounds and (not runs or clock.left_s > 2 * ROUND_S):
                with clock.phase(f"{name}: round {len(runs) + 1} of {options.rounds}"):
                    runs.append(_once(server, way, roof_tflops, alone, frames if copies == 1 else FRAMES, copies))
        finally:
            if runs:
                report.add({"model": model.name + ", shrunken" * options.dry, "how": way.words}, {PENSTOCK: runs})
    if alone is not None:
        shares = [s["of_roof"] for s in runs]
        report.target(f"{way.words}: share of the network alone, %", shares, least=LEAST_SHARE)
    elif (way.precision, way.tokens) == ("bf16", 12) and not options.dry:
        report.target(f"{way.words}: frames/s per GPU", [s["rate"] for s in runs], least=LEAST_RATE)
        report.target(f"{way.words}: GPU busy, %", [s["busy"] for s in runs], least=LEAST_BUSY)


def _once(
    server: Captioner, way: Way, roof_tflops: float | None, alone: float | None, frames: int, copies: int
) -> Sample:
    with _busy(wanted=roof_tflops is not None) as looks:
        whole = server.run(pan(270), frames, Setting(copies=copies))
    found = per_frame(whole, 0.0, frames * copies)
    if looks:
        running = looks[len(looks) // 10 : -max(1, len(looks) // 10)]
        found["busy"] = statistics.mean(running or looks)
    roof = alone or (roof_tflops and roof_tflops / (FIXED_TFLOP + TOKEN_TFLOP * way.tokens))
    if roof:
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
