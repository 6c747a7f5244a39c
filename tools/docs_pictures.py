"""Makes the pictures of the documentation: a server under load, and a report. Run by `make docs-pictures`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Browser  # noqa: E402

APP = """
import time


def classify(items):
    time.sleep(0.005 + 0.0002 * len(items))
    return items


def embed(items):
    time.sleep(0.01)
    return items


def rank(items):
    time.sleep(0.4)
    return items
"""
MODELS = ("classify", "embed", "rank")
KEYS = ("classify.batching.slo_s=0.1", "rank.batching.max_batch_size=2", "embed.instances=2")
LOADED_S = 60.0  # as long as the small charts reach back


def main() -> None:
    """Writes the pictures to `docs/pictures`."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(APP)
        command = [sys.executable, "-m", "penstock", "serve", *(f"app.py:{name}" for name in MODELS)]
        command += [f"--set=server.{name}port=0" for name in ("", "management_", "metrics_", "grpc_")]
        command += [f"--set=models.{key}" for key in KEYS]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                urls: dict[str, str] = {}
                while "metrics" not in urls:
                    name, _, url = server.stdout.readline().strip().partition(" ")
                    urls[name] = url.strip()
                _take(urls, Path(folder))
                _take_report(urls, Path(folder))
            finally:
                server.terminate()


def _take(urls: dict[str, str], folder: Path) -> None:
    over = threading.Event()

    def send(model: str, pause_s: float) -> None:
        while not over.is_set():
            body = json.dumps("x").encode()
            request = urllib.request.Request(f"{urls['inference']}/predictions/{model}", body)
            request.add_header("content-type", "application/json")
            urllib.request.urlopen(request).read()
            time.sleep(pause_s)

    callers = [("classify", 0.01)] * 12 + [("embed", 0.05)] * 3 + [("rank", 0.0)] * 8
    threads = [threading.Thread(target=send, args=caller, daemon=True) for caller in callers]
    with Browser(folder / "profile") as browser:
        browser.resize(1280, 560)
        browser.open(urls["metrics"])
        for thread in threads:
            thread.start()
        time.sleep(LOADED_S)
        (PICTURES / "dashboard.png").write_bytes(browser.picture())
        browser.resize(1280, 1750)
        browser.run("location.hash = '#model/rank/1'")
        browser.wait_for("document.querySelectorAll('#model .lane rect').length > 5")
        time.sleep(2.0)  # the charts have their width
        (PICTURES / "model.png").write_bytes(browser.picture())
    over.set()
    for thread in threads:
        thread.join()


def _take_report(urls: dict[str, str], folder: Path) -> None:
    """The report of a benchmark of one of the models."""
    (folder / "x.json").write_text('"x"')
    command = [sys.executable, "-m", "penstock", "bench", f"{urls['inference']}/predictions/classify"]
    command += ["--concurrency=1,4,16,64", "--duration=4", "--slo=p99<=40ms", "--data=x.json", "--output=report"]
    subprocess.run(command, cwd=folder, check=False)  # a missed SLO is a result, too
    with Browser(folder / "reader") as browser:
        browser.resize(1000, 1300)
        browser.open((folder / "report" / "report.html").as_uri())
        browser.wait_for(
            "document.readyState === 'complete' && document.images.length + document.querySelectorAll('svg').length > 0"
        )
        (PICTURES / "report.png").write_bytes(browser.picture())


if __name__ == "__main__":
    main()
