"""How busy does a client keep a vision-language engine, if each image takes 10 ms of a processor before it is sent?

The engine is the stand-in of `examples/vlm_captions`: 100 requests/s, 50 ms each, 16 at a time. The images are JPEGs of
1024 x 768, which every client scales to 448 x 336, compresses again and sends as data URLs, some 10 ms in Pillow.
"plain" is what people write: an asyncio client of the `openai` package with 64 requests at a time, Pillow in its loop.
`saturate` runs with two threads for preparation, and also as it is by default. Busy is the share of the time from the
first request to the last answer in which the engine had work.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import harness
import numpy as np

STAND_IN = Path(__file__).parents[1] / "examples" / "vlm_captions" / "stand_in.py"
CLIENTS = Path(__file__).with_name("peers") / "vlm_clients.py"
IMAGES = 400
PIXELS = 448 * 336
COLUMNS = {"busy": "busy %", "rate": "rows/s", "cpu_ms": "client's CPU ms/row"}


def make_images(folder: Path, count: int) -> None:
    """Photos' worth of detail: noise, smoothed, on a gradient."""
    from PIL import Image

    random = np.random.default_rng(0)
    noise = random.integers(-40, 40, (192, 256, 3))
    detail = np.kron(noise, np.ones((4, 4, 1))).astype(np.int16)
    ramp = np.linspace(60, 190, 1024, dtype=np.int16)[None, :, None]
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


def run(command: list[str], images: Path, rate: float) -> harness.Sample:
    """One job of a client at a fresh stand-in."""
    (port,) = harness.free_ports(1)
    engine = subprocess.Popen(
        [sys.executable, STAND_IN, "--port", str(port), "--rate", str(rate), "--slots", "16"], stdout=subprocess.PIPE
    )
    try:
        assert engine.stdout is not None
        engine.stdout.readline()
        url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            words = [word.replace("URL", url).replace("IMAGES", str(images)) for word in command]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{words}: {done.stderr[-2000:]}")
        with urllib.request.urlopen(f"{url}/stats") as response:
            stats = json.load(response)
        count = len(list(images.iterdir()))
        assert stats["served"] == count, stats
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"busy": stats["busy"] * 100, "rate": count / stats["span_s"], "cpu_ms": cpu_s / count * 1000}
    finally:
        engine.kill()
        engine.wait()


def main() -> None:
    options = harness.options(
        __doc__, seconds=None, peers=["plain_vlm", "saturate"], rate={"type": float, "default": 100.0}
    )
    report = harness.Report(
        __file__, __doc__, options, COLUMNS, ["av", "simplejpeg"], f"Medians of {options.rounds} interleaved rounds."
    )
    penstock = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "caption",
        "IMAGES",
        "--backend",
        "openai",
        "--server",
        "URL",
    ]
    commands = {"penstock": [*penstock, "--max-pixels", str(PIXELS), "--progress", "none"]}
    for peer, kinds in (("plain_vlm", ["plain"]), ("saturate", ["saturate", "saturate-by-default"])):
        if peer in options.peers:
            commands |= {kind: [harness.python_of(peer), str(CLIENTS), kind, "URL", "IMAGES"] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        make_images(images, IMAGES)
        report.section(f"Preparing one image takes the plain client {preparation_ms(images):.1f} ms.")
        contenders = {
            name: lambda command=command: run(command, images, options.rate) for name, command in commands.items()
        }
        runs = harness.interleave(options.rounds, contenders)
    report.add({"images": IMAGES, "engine's rate": options.rate}, runs)
    report.target("busy time with penstock, %", [s["busy"] for s in runs["penstock"]], least=95)
    report.target("busy time with the plain client, %", [s["busy"] for s in runs.get("plain", ())], most=60)
    report.target("rate against saturate", report.ratios(runs, "penstock", "saturate", "rate"), least=1)
    report.save()


if __name__ == "__main__":
    main()
