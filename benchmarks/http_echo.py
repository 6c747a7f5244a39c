"""How many small JSON requests a second pass through the whole server, beside mosec in the same minute?

Closed loop by `wrk` on this machine, one worker process each, all features on. Rounds alternate between the two; the
table gives the median of the rounds, and the ratio of each round's pair. `python benchmarks/http_echo.py [--rounds 5]`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
MOSEC = "0.9.8"
BODY = '{"id": 12345, "text": "a small request of 50 bytes"}'


def mosec_python() -> str:
    """The Python of a venv of its own that holds the peer; made at the first run."""
    venv = HERE / ".venvs" / "mosec"
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"mosec=={MOSEC}"], check=True)
    return str(python)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.contextmanager
def server(command: list[str], url: str) -> Iterator[str]:
    """The url of a server that answers, ended afterwards."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd=tempfile.gettempdir()
    )
    try:
        for _ in range(300):
            request = urllib.request.Request(url, BODY.encode(), {"content-type": "application/json"})
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=1).read()
                break
            time.sleep(0.1)
        else:
            raise SystemExit(f"{command} did not answer at {url}")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wrk(url: str, connections: int, seconds: float) -> tuple[float, float]:
    """(requests a second, p99 in ms) of one run; a run with errors counts for nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(f"wrk.method='POST'\nwrk.body='{BODY}'\nwrk.headers['content-type']='application/json'\n")
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", "-s", script.name, url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        raise SystemExit(f"errors from {url}:\n{out}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", out)
    assert rate is not None
    assert p99 is not None
    return float(rate[1]), float(p99[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[p99[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", default="1,16,64,256")
    options = parser.parse_args()
    ours, theirs = free_port(), free_port()
    penstock = [sys.executable, "-m", "penstock.cli.main", "serve", f"{HERE}/models.py:echo", "--port", str(ours)]
    penstock += ["--set", "server.management_port=0", "--set", "server.metrics_port=0"]
    mosec = [mosec_python(), str(HERE / "peers" / "mosec_echo.py"), "--port", str(theirs), "--log-level", "error"]
    versions = f"Python {platform.python_version()}, mosec {MOSEC}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {versions}, {options.rounds} rounds of {options.seconds:g} s")
    print(f"{'connections':>11}{'penstock/s':>12}{'p99 ms':>9}{'mosec/s':>10}{'p99 ms':>9}{'ratio':>7}  (spread)")
    with (
        server(penstock, f"http://127.0.0.1:{ours}/predictions/echo") as a,
        server(mosec, f"http://127.0.0.1:{theirs}/inference") as b,
    ):
        for connections in map(int, options.connections.split(",")):
            wrk(a, connections, 1), wrk(b, connections, 1)
            rounds = [
                (wrk(a, connections, options.seconds), wrk(b, connections, options.seconds))
                for _ in range(options.rounds)
            ]
            median = [statistics.median(r[who][what] for r in rounds) for who in (0, 1) for what in (0, 1)]
            ratios = sorted(x[0] / y[0] for x, y in rounds)
            print(
                f"{connections:>11}{median[0]:>12.0f}{median[1]:>9.2f}{median[2]:>10.0f}{median[3]:>9.2f}"
                f"{statistics.median(ratios):>7.2f}  ({ratios[0]:.2f}..{ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
