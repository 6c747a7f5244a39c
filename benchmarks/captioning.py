"""What does it cost to send video frames to a captioner and to return captions?

The design follows the published table: three ways of sending x four resolutions, 901 frames of H.264, with the tiny
captioner of `examples/video_captioning` ("tiny") and without a model ("none", which measures only the transport of
pixels). "published" is the design to compare with (`peers/published_client.py`, `peers/published_handler.py`: pickled
frames in original size, a connection per request, a processor that prepares frame by frame), under TorchServe with
two workers like Penstock, or under Flask if Java is missing. It gets fewer frames where it is slow. "none" uses clips
that are as hard to decode as real footage, "tiny" uses clips with numbers that verify each caption. All costs are CPU
time without the client's start; see `captioning_runs.py`.

`--quick` uses few frames and two resolutions. `--only none,tiny,sweep,pixels,flask,pinned` selects tables. `--gpu`
uses BLIP-2 in full size with random weights on a GPU instead, for three minutes (without a GPU, `--dry` shrinks the
model, and `--rehearse` simulates it at the rates of an H200).
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import harness
from captioning_clips import FRAMES, SIZES
from captioning_runs import FLASK, NONE, PENSTOCK, PUBLISHED, TINY, Captioner, Model, Setting, captioners, per_frame
from closed_loop import Sample

MODES = ("single", "stream-single", "stream-prebatch")
BEST = "stream-prebatch"
SLOW = {270: 901, 360: 301, 720: 161, 1080: 161}  # frames for the published design
PREBATCH = {270: 32, 360: 32, 720: 16, 1080: 8}  # and its way of batching them
SWEEP = (1, 8, 16, 32, 64)
PIXELS = {
    "fast": (),
    "exact": ("--kernel", "exact"),
    "fast, as JPEG": ("--pixels", "jpeg"),
    "source": ("--pixels", "source"),
}
COLUMNS = {
    "rate": "frames/s",
    "total_ms": "CPU ms/frame",
    "client_ms": "client",
    "server_ms": "server",
    "frame_kb": "kB/frame",
    "busy": "GPU busy %",
    "roof": "roof, frames/s",
    "of_roof": "% of it",
    "client_rss_mb": "client RSS MB",
    "client_own_mb": "own",
    "server_rss_mb": "server RSS MB",
    "server_own_mb": "own ",
    "frames": "frames",
    "config": "server config",
    "parameters": "client parameters",
}
PARAMETERS = {"single": "rounds of 50", "stream-single": "500 at once", BEST: "{} a prebatch"}


class Bench:
    """Options, report, and the cost of a client's start."""

    def __init__(self, options: argparse.Namespace, report: harness.Report) -> None:
        self.options, self.report = options, report
        self._starts: dict[tuple[str, ...], float] = {}

    @property
    def heights(self) -> Sequence[int]:
        return (270, 1080) if self.options.quick else tuple(SIZES)

    @property
    def few(self) -> int:
        """The number of rounds for cells that are shown but not compared."""
        return min(2, self.options.rounds)

    def start_s(self, server: Captioner, flags: tuple[str, ...]) -> float:
        """The CPU time of a client that sends one frame: the median of three runs."""
        key = (server.kind, *flags)
        if key not in self._starts:
            runs = [server.run(server.model.clip(270), 1, Setting(flags=flags)) for _ in range(3)]
            self._starts[key] = statistics.median(run["client_cpu_s"] for run in runs)
        return self._starts[key]

    def once(self, server: Captioner, height: int, setting: Setting, frames: int) -> Callable[[], Sample]:
        """A client run whose result is one row."""
        frames = min(frames, 151) if self.options.quick else frames
        clip = server.model.clip(height)
        size = str(setting.prebatch) if setting.prebatch else "auto"
        words = {"config": server.config, "parameters": PARAMETERS[setting.mode].format(size), "frames": frames}

        def run() -> Sample:
            start_s = self.start_s(server, setting.flags)
            total = frames * setting.copies
            return {**per_frame(server.run(clip, frames, setting), start_s, total), **words}

        return run


def modes(bench: Bench, model: Model) -> None:
    """Three ways of sending x four resolutions. Cells without a comparison run fewer rounds."""
    wanted = [(PENSTOCK, {})]
    if bench.options.peers:
        wanted += [(PUBLISHED, {"batch": 128}), (PUBLISHED, {"batch": 1})]
    with captioners(*wanted, model=model) as servers:
        for server in servers:
            server.warm(model.clip(270))
        for height in bench.heights:
            compared = (BEST,) if model is NONE else MODES if height == 270 else ()
            found = _rounds(bench, servers, height, compared, bench.options.rounds)
            found |= _rounds(bench, servers, height, [m for m in MODES if m not in compared], bench.few)
            for mode in MODES:
                width = SIZES[height][0]
                runs = {kind: found[kind, mode] for kind in (PENSTOCK, PUBLISHED) if (kind, mode) in found}
                bench.report.add({"model": model.name, "clip": f"{width}x{height}", "client": mode}, runs)
            judge(bench, model, height, found)


def _rounds(
    bench: Bench, servers: Sequence[Captioner], height: int, modes: Sequence[str], rounds: int
) -> dict[tuple[str, str], list[Sample]]:
    """(contender, way of sending) -> samples, interleaved."""
    contenders = {}
    for mode in modes:
        contenders[PENSTOCK, mode] = bench.once(servers[0], height, Setting(mode), FRAMES)
        for server in servers[1:]:
            if (server.batch == 1) == (mode == BEST):
                slow = SLOW[height] if mode == BEST or height < 720 else SLOW[height] // 2
                setting = Setting(mode, PREBATCH[height] if mode == BEST else None)
                contenders[PUBLISHED, mode] = bench.once(server, height, setting, slow)
    return harness.interleave(rounds, contenders) if contenders else {}


def judge(bench: Bench, model: Model, height: int, found: dict[tuple[str, str], list[Sample]]) -> None:
    """The targets of one resolution."""
    report = bench.report
    if model is NONE:
        runs = {kind: samples for (kind, mode), samples in found.items() if mode == BEST}
        least = {270: 5.0, 720: 8.0, 1080: 8.0}.get(height)
        if least is not None:
            less = report.ratios(runs, PUBLISHED, PENSTOCK, "total_ms")
            report.target(f"no model, {height}p: CPU of the published shape ÷ ours", less, least=least)
        if height == 1080:
            peaks = [s["client_rss_mb"] for s in runs[PENSTOCK]]
            report.target("no model, 1080p: the client's peak memory, MB", peaks, most=300)
    elif height == 270:
        pairs = {mode: samples for (kind, mode), samples in found.items() if kind == PENSTOCK}
        times = report.ratios(pairs, BEST, "single", "rate")
        report.target("tiny, 270p: stream-prebatch ÷ single", times, least=4)
        runs = {PENSTOCK: pairs[BEST], PUBLISHED: found.get((PUBLISHED, "single"), [])}
        if runs[PUBLISHED]:
            times = report.ratios(runs, PENSTOCK, PUBLISHED, "rate")
            report.target("tiny, 270p: stream-prebatch ÷ the published single", times, least=4)


def sweep(bench: Bench) -> None:
    """Sizes of prebatches at 480x270."""
    bench.report.section("Sizes of prebatches, 480x270")
    for model in (NONE, TINY):
        with captioners((PENSTOCK, {}), model=model) as (server,):
            server.warm(model.clip(270))
            sizes = {str(size): bench.once(server, 270, Setting(BEST, size), FRAMES) for size in SWEEP}
            runs = harness.interleave(bench.few, {**sizes, "auto": bench.once(server, 270, Setting(), FRAMES)})
            bench.report.add({"model": model.name, "clip": "480x270", "client": BEST}, runs, base="auto")


def pixels(bench: Bench) -> None:
    """Kernels, and encodings of frames. This server does not decode compressed frames."""
    bench.report.section("How frames are scaled, and how they travel")
    with captioners((PENSTOCK, {}), model=NONE) as (server,):
        server.warm(NONE.clip(270))
        for height in (270, 1080):
            ways = {name: bench.once(server, height, Setting(flags=flags), FRAMES) for name, flags in PIXELS.items()}
            runs = harness.interleave(bench.few, ways)
            bench.report.add({"model": "none", "clip": f"{SIZES[height][0]}x{height}"}, runs, base="fast")


def flask(bench: Bench) -> None:
    """The published single-process server, compared with one worker of Penstock."""
    bench.report.section("A single process: Flask and one worker, 480x270")
    for model in (NONE, TINY):
        wanted = [(PENSTOCK, {"workers": 1}), *([(FLASK, {})] if bench.options.peers else [])]
        with captioners(*wanted, model=model) as servers:
            contenders = {}
            for server in servers:
                server.warm(model.clip(270))
                setting = Setting(BEST, 32 if server.kind == FLASK else None)
                contenders[server.kind] = bench.once(server, 270, setting, FRAMES)
            runs = harness.interleave(bench.few, contenders)
            bench.report.add({"model": model.name, "clip": "480x270", "client": BEST}, runs)


ALONE = "model alone"


def pinned(bench: Bench) -> None:
    """The tiny captioner with one worker on one core and the rest on the other, compared with the model alone."""
    bench.report.section("One worker on one core, front-end and client on the other, 480x270")
    frames = 151 if bench.options.quick else FRAMES
    with captioners((PENSTOCK, {"workers": 1}), model=TINY) as (server,):
        server.warm(TINY.clip(270))
        server.pin(worker=0, others=1)
        program = [sys.executable, f"{harness.HERE}/captioning_alone.py", str(TINY.folder), str(TINY.clip(270))]
        contenders = {
            PENSTOCK: bench.once(server, 270, Setting(copies=4, core=1), frames),
            ALONE: functools.partial(_alone, ["taskset", "-c", "0", *program, str(frames)]),
        }
        runs = harness.interleave(bench.options.rounds, contenders)
    bench.report.add({"model": "tiny", "clip": "480x270", "client": BEST}, runs)
    share = bench.report.ratios(runs, PENSTOCK, ALONE)
    bench.report.target("tiny, one core: share of what the model alone does", share, least=0.9)


def _alone(command: list[str]) -> Sample:
    found: Sample = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


TABLES: dict[str, Callable[[Bench], None]] = {
    "none": functools.partial(modes, model=NONE),
    "tiny": functools.partial(modes, model=TINY),
    "sweep": sweep,
    "pixels": pixels,
    "flask": flask,
    "pinned": pinned,
}


def main() -> None:
    further = dict.fromkeys(("quick", "gpu", "dry", "rehearse"), harness.FLAG)
    options = harness.options(__doc__, seconds=None, peers=(PUBLISHED,), tables=TABLES, **further)
    method = f"Medians of {options.rounds} interleaved rounds (2 where nothing is compared), (least..most) behind."
    libraries = ("av", "torch", "transformers")
    report = harness.Report(__file__, __doc__, options, COLUMNS, libraries, method, "gpu" if options.gpu else "")
    if options.gpu:
        from captioning_gpu import gpu

        gpu(report, options)
        report.save(False if options.dry or options.rehearse else None)
        return
    bench = Bench(options, report)
    for name in options.only:
        TABLES[name](bench)
    report.save(None if options.only == list(TABLES) and not options.quick else False)


if __name__ == "__main__":
    main()
