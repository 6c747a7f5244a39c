"""How busy does a client keep a vision-language engine, if each image takes 10 ms of a processor before it is sent?

The engine is the stand-in of `examples/vlm_captions`: 100 requests/s, 50 ms each, 16 at a time.

images: JPEGs of 1120 x 840, which every client scales to 448 x 336, compresses again and sends as data URLs. That
takes 10 to 11 ms in Pillow. "plain" is what people write: an asyncio client of the `openai` package with 64 requests at
a time, Pillow in its loop. `saturate` runs with two threads for preparation, and also as it is by default. Busy is the
share of the time from the first request to the last answer in which the engine had work.

video: frames of clips, from the start of the first program to the end of the last. `saturate` takes rows, so the frames
become files first: "ffmpeg, saturate" writes them in one go, at the size that is sent, and `saturate` sends the files
as they are; with "ffmpeg, saturate scales" they have the size of the video, and two threads scale them as above.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import captioning_clips
import harness
import numpy as np

from penstock.bulk.pixels import within

STAND_IN = Path(__file__).parents[1] / "examples" / "vlm_captions" / "stand_in.py"
CLIENTS = Path(__file__).with_name("peers") / "vlm_clients.py"
IMAGES, SIDES = 400, (1120, 840)
PIXELS = 448 * 336
COLUMNS = {"busy": "busy %", "rate": "rows/s", "cpu_ms": "client's CPU ms/row"}
VIDEO = ((270, 2, 100.0), (270, 2, 1000.0), (1080, 10, 100.0))  # height, every how many frames, the engine's rate
PENSTOCK = [sys.executable, "-m", "penstock.cli.main", "caption", "--backend", "openai", "--server", "URL"]
PENSTOCK += ["--max-pixels", str(PIXELS), "--progress", "none"]


def make_images(folder: Path, count: int) -> None:
    """Photos' worth of detail: noise, smoothed, on a gradient."""
    from PIL import Image

    random = np.random.default_rng(0)
    width, height = SIDES
    noise = random.integers(-40, 40, (height // 4, width // 4, 3))
    detail = np.kron(noise, np.ones((4, 4, 1))).astype(np.int16)
    ramp = np.linspace(60, 190, width, dtype=np.int16)[None, :, None]
    folder.mkdir()
    for number in range(count):
        picture = np.clip(np.roll(detail, number * 7, 1) + ramp, 0, 255).astype(np.uint8)
        Image.fromarray(picture).save(folder / f"{number:04}.jpg", quality=90)


def preparation_ms(images: Path) -> float:
    """The CPU time of one image in the plain client."""
    sys.path.insert(0, str(CLIENTS.parent))
    from vlm_clients import data_url

    files = sorted(images.iterdir())[:20]
    start_s = time.process_time()
    for file in files:
        data_url(file)
    return (time.process_time() - start_s) / len(files) * 1000


def run(commands: list[list[str]], source: Path, rows: int, rate: float, *, whole: bool = False) -> harness.Sample:
    """One job of a client at a fresh stand-in. The rate is of the engine's time, or of the `whole` job."""
    (port,) = harness.free_ports(1)
    limits = ["--rate", str(rate), "--slots", "16", "--latency", str(min(0.05, 8 / rate))]
    engine = subprocess.Popen([sys.executable, STAND_IN, "--port", str(port), *limits], stdout=subprocess.PIPE)
    try:
        assert engine.stdout is not None
        engine.stdout.readline()
        url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryDirectory() as folder:
            before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            for command in commands:
                words = [word.replace("URL", url).replace("SOURCE", str(source)) for word in command]
                done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
                if done.returncode:
                    raise SystemExit(f"{words}: {done.stderr[-2000:]}")
            seconds, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        with urllib.request.urlopen(f"{url}/stats") as response:
            stats = json.load(response)
        assert stats["served"] == rows, stats
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        busy_s = stats["busy"] * stats["span_s"]
        span_s = seconds if whole else stats["span_s"]
        return {"busy": 100 * busy_s / span_s, "rate": rows / span_s, "cpu_ms": cpu_s / rows * 1000}
    finally:
        engine.kill()
        engine.wait()


def other(peer: str, kind: str, folder: str) -> list[str]:
    return [harness.python_of(peer), str(CLIENTS), kind, "URL", folder]


def images(report: harness.Report, options: argparse.Namespace) -> None:
    commands = {"penstock": [*PENSTOCK, "SOURCE"]}
    for peer, kinds in (("plain_vlm", ["plain"]), ("saturate", ["saturate", "saturate-by-default"])):
        if peer in options.peers:
            commands |= {kind: other(peer, kind, "SOURCE") for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "images"
        make_images(folder, IMAGES)
        report.section(f"Preparing one image takes the plain client {preparation_ms(folder):.1f} ms.")
        contenders = {
            name: lambda command=command: run([command], folder, IMAGES, options.rate)
            for name, command in commands.items()
        }
        runs = harness.interleave(options.rounds, contenders)
    report.add({"images": IMAGES, "engine's rate": options.rate}, runs)
    report.target("busy time with penstock, %", [s["busy"] for s in runs["penstock"]], least=95)
    report.target("busy time with the plain client, %", [s["busy"] for s in runs.get("plain", ())], most=60)
    report.target("rate against saturate", report.ratios(runs, "penstock", "saturate", "rate"), least=1)


def video(report: harness.Report, options: argparse.Namespace) -> None:
    for height, every, rate in VIDEO:
        clip = captioning_clips.pan(height)
        wide, high = captioning_clips.SIZES[height]
        rows = -(-captioning_clips.FRAMES // every)
        contenders = {"penstock": [[*PENSTOCK, "--every", str(every), "SOURCE"]]}
        sent = within(PIXELS, high, wide)
        for name, kind, scale in (
            ("ffmpeg, saturate", "saturate-as-is", f",scale={sent[1]}:{sent[0]}:flags=area"),
            ("ffmpeg, saturate scales", "saturate", ""),
        ):
            select = f"select='not(mod(n,{every}))'{scale}"
            extract = ["ffmpeg", "-v", "error", "-i", "SOURCE", "-vf", select, "-fps_mode", "passthrough", "-q:v", "2"]
            commands = [["mkdir", "frames"], [*extract, "frames/%06d.jpg"]]
            if "saturate" in options.peers:
                contenders[name] = [*commands, other("saturate", kind, "frames")]
        runs = harness.interleave(
            options.rounds,
            {
                name: lambda commands=commands, rows=rows, rate=rate, clip=clip: run(
                    commands, clip, rows, rate, whole=True
                )
                for name, commands in contenders.items()
            },
        )
        report.add({"video": f"{wide}x{high}", "every": every, "engine's rate": rate}, runs)
        ratios = report.ratios(runs, "penstock", "ffmpeg, saturate", "rate")
        report.target(f"rate on {wide}x{high} at {rate:g}/s, against ffmpeg and saturate", ratios, least=5)


def main() -> None:
    tables = {"images": images, "video": video}
    options = harness.options(
        __doc__,
        seconds=None,
        peers=["plain_vlm", "saturate"],
        tables=tables,
        rate={"type": float, "default": 100.0, "help": "requests/s of the engine for images"},
    )
    report = harness.Report(
        __file__, __doc__, options, COLUMNS, ["av", "simplejpeg"], f"Medians of {options.rounds} interleaved rounds."
    )
    for name in options.only:
        tables[name](report, options)
    report.save()


if __name__ == "__main__":
    main()
