"""What every benchmark stands on: servers started and ended, interleaved rounds, closed loops, tables and results.

A peer lives in a venv of its own under `benchmarks/.venvs/`, made at first use, and serves by `peers/serve_NAME.py`.
Every server is a process group that is stopped (SIGSTOP) while another is measured, so that an idle one costs nothing.
The open loop is in `open_loop.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
PACKAGES = {
    "mosec": ("mosec==0.9.8", "numpy"),
    "litserve": ("litserve==0.2.19", "numpy"),
    "service_streamer": ("service_streamer==0.1.2", "flask==3.1.3", "gevent", "numpy"),
    "torchserve": ("torchserve==0.12.0", "torch-model-archiver==0.12.0", "torch==2.13.0", "pyyaml", "numpy"),
}
QUICK = ("mosec", "litserve")
KEPT_ROUNDS = 5  # fewer make no result
START_S = 60.0

Sample = dict[str, float]
Runs = dict[str, list[Sample]]


# ---- what is served


@dataclass(frozen=True)
class Workload:
    """One model of `models.py`, as every server is to run it, with the request that is sent and its right answer."""

    model: str
    body: bytes
    answer: Any  # bytes, or what the JSON of the answer holds
    binary: bool = False
    max_batch: int = 64
    wait_ms: int = 1  # of servers that wait a fixed time for a batch to fill
    instances: int = 1
    timeout_ms: int = 30_000  # after which a server may give a request up, where it can be told so
    queue: int | None = None  # most items that wait, where a server can be told so; else its default

    @property
    def content_type(self) -> str:
        return "application/octet-stream" if self.binary else "application/json"

    def check(self, answer: bytes) -> None:
        """Raises ValueError unless the answer is the right one."""
        found = answer if isinstance(self.answer, bytes) else json.loads(answer)
        if found != self.answer:
            raise ValueError(f"wrong answer {answer[:200]!r}")


# ---- servers


def python_of(peer: str) -> str:
    """The Python of the peer's own venv, which is made first if it is missing or holds other packages."""
    venv = HERE / ".venvs" / peer
    python, mark, wanted = venv / "bin" / "python", venv / "installed", "\n".join(PACKAGES[peer])
    if not mark.exists() or mark.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PACKAGES[peer]]
        subprocess.run(install, check=True)
        mark.write_text(wanted)
    return str(python)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


class Server:
    """A server and all processes that come of it, in a folder of its own. Stopped unless inside `awake()`."""

    def __init__(self, name: str, workload: Workload, *sets: str) -> None:
        self.name = name
        self.workload = workload
        self._tag = f"penstock-benchmark-{uuid.uuid4().hex}"
        self._folder = tempfile.mkdtemp(prefix="bench-")
        self._log = Path(self._folder, "log")
        try:
            self.url = self._start_penstock(sets) if name == "penstock" else self._start_peer()
            self._wait()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _spawn(self, command: list[str], pass_fds: Sequence[int] = (), **env: str) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                cwd=self._folder,
                start_new_session=True,
                env={**os.environ, "TMPDIR": self._folder, "BENCH_TAG": self._tag, **env},
            )

    def _start_penstock(self, sets: Sequence[str]) -> str:
        w = self.workload
        command = [sys.executable, "-m", "penstock.cli.main", "serve", f"{HERE}/models.py:{w.model}", "--port", "0"]
        command += ["--instances", str(w.instances), "--max-batch-size", str(w.max_batch)]
        keys = ["server.management_port=0", "server.metrics_port=0", *sets]
        if w.queue is not None:
            keys.append(f"models.{w.model}.batching.max_queue={w.queue}")
        command += [word for key in keys for word in ("--set", key)]
        read, write = os.pipe()
        with open(read) as pipe:
            try:
                self._spawn(command, [write], PENSTOCK_READY_FD=str(write))
            finally:
                os.close(write)
            line = pipe.readline()
        if not line:
            raise SystemExit(f"penstock did not start:\n{self._log.read_text()}")
        return f"{json.loads(line)['inference']}/predictions/{w.model}"

    def _start_peer(self) -> str:
        """The peers read what to serve from BENCH_WORKLOAD, and serve it below one of these paths."""
        ports = free_ports(5)
        told = {k: v for k, v in asdict(self.workload).items() if k not in ("body", "answer")}
        command = [python_of(self.name), str(HERE / "peers" / f"serve_{self.name}.py"), "--port", str(ports[0])]
        self._spawn(command, BENCH_WORKLOAD=json.dumps({**told, "ports": ports}), PYTHONPATH=str(HERE))
        path = {"mosec": "inference", "torchserve": "predictions/model"}.get(self.name, "predict")
        return f"http://127.0.0.1:{ports[0]}/{path}"

    def _wait(self) -> None:
        """Returns when the server gives the right answer."""
        request = urllib.request.Request(self.url, self.workload.body, {"content-type": self.workload.content_type})
        last: Exception | None = None
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return self.workload.check(response.read())
            except (OSError, ValueError, urllib.error.URLError) as e:
                last = e
                time.sleep(0.1)
        raise SystemExit(f"{self.name} did not answer at {self.url}: {last}\n{self._log.read_text()[-3000:]}")

    def members(self) -> list[psutil.Process]:
        """The processes of this server that live: those of its session, and those that left it but carry its tag."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                mine = os.getsid(process.pid) == self.process.pid or process.environ().get("BENCH_TAG") == self._tag
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @contextlib.contextmanager
    def awake(self) -> Iterator[Server]:
        """Runs the server for the length of the block."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self._signal(signal.SIGSTOP)

    def closed_loop(self, connections: int, seconds: int) -> Sample:
        """One run of `wrk`; see `wrk`."""
        with self.awake():
            return wrk(self.url, self.workload, connections, seconds)

    def close(self) -> None:
        """Kills everything that this server started, and leaves nothing behind."""
        process = getattr(self, "process", None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for _ in range(100):  # a dying parent may have forked meanwhile
                if process.poll() is not None and not self.members():
                    break
                self._signal(signal.SIGKILL)
                time.sleep(0.05)
            else:
                raise RuntimeError(f"{self.name} cannot be killed: {self.members()}")
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def serving(contenders: Mapping[str, tuple[str, Workload]], *sets: str) -> Iterator[dict[str, Server]]:
    """Label to running server. `sets` are `--set` keys for penstock."""
    with contextlib.ExitStack() as stack:
        yield {
            label: stack.enter_context(Server(name, workload, *(sets if name == "penstock" else ())))
            for label, (name, workload) in contenders.items()
        }


def same(workload: Workload, peers: Sequence[str]) -> dict[str, tuple[str, Workload]]:
    """penstock and its peers, all with one workload."""
    return {name: (name, workload) for name in ("penstock", *peers)}


# ---- closed loops

WRK = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = "{content_type}"
file:close()
function done(summary, latency)
  local e = summary.errors
  io.write(string.format('\\nRESULT [%d, %d, %d, %d, %d]\\n', summary.duration, summary.requests,
    e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""


def wrk(url: str, workload: Workload, connections: int, seconds: int) -> Sample:
    """Requests/s (answers other than 2xx and 3xx are not counted), p50, p99 and errors of one run."""
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "body"), Path(folder, "wrk.lua")
        body.write_bytes(workload.body)
        script.write_text(WRK.format(body=body, content_type=workload.content_type))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script), url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^RESULT (.*)$", out, re.MULTILINE)
    assert found is not None, out
    duration_us, requests, errors, p50_us, p99_us = json.loads(found[1])
    sample = {"rate": max(0, requests - errors) / duration_us * 1e6, "errors": errors}
    return {**sample, "p50_ms": p50_us / 1e3, "p99_ms": p99_us / 1e3} if requests else sample


def interleave(rounds: int, contenders: Mapping[str, Callable[[], Sample]]) -> Runs:
    """The samples of each contender, one a round; each round begins with another one."""
    runs: Runs = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            runs[name].append(contenders[name]())
    return runs


def closed_loops(
    servers: Mapping[str, Server],
    connections: int,
    options: argparse.Namespace,
    also: Mapping[str, Callable[[], Sample]] | None = None,
) -> Runs:
    """Interleaved runs of `wrk`, after a second that is not counted; `also` are other contenders of the same rounds."""
    for server in servers.values():
        server.closed_loop(connections, 1)
    loops = {n: lambda s=s: s.closed_loop(connections, options.seconds) for n, s in servers.items()}
    return interleave(options.rounds, {**loops, **(also or {})})


def timed(call: Callable[[], Any], seconds: float) -> Sample:
    """Calls a second and latency of `call`, made again and again by this thread."""
    latencies: list[float] = []
    start = last = time.perf_counter()
    while last - start < seconds:
        call()
        now = time.perf_counter()
        latencies.append(now - last)
        last = now
    return {"rate": len(latencies) / (last - start), **percentiles(latencies)}


def percentiles(latencies_s: Sequence[float]) -> Sample:
    """p50 and p99 in ms; nothing of nothing."""
    if not latencies_s:
        return {}
    ordered = sorted(latencies_s)
    return {f"p{p}_ms": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in (50, 99)}


# ---- results


def options(doc: str, *, seconds: int = 2, peers: Sequence[str] = tuple(PACKAGES)) -> argparse.Namespace:
    """What the command line says. `peers` are those that can answer this question at all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=KEPT_ROUNDS)
    parser.add_argument("--seconds", type=int, default=seconds, help="length of one run")
    default = ",".join([p for p in peers if p in QUICK] or peers)
    parser.add_argument("--peers", default=default, help=f"some of {', '.join(peers) or '(none)'}; '' for none")
    found = parser.parse_args()
    asked = [p for p in found.peers.split(",") if p]
    if unknown := set(asked) - set(PACKAGES):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; known are {', '.join(PACKAGES)}")
    found.peers = [p for p in asked if p in peers]
    return found


def machine() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": os.getloadavg()[0],
    }


def versions(peers: Sequence[str], libraries: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= {name: version(name) for name in ("penstock", "uvloop", "httptools", "msgspec", *libraries)}
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    found["penstock"] += f" ({commit})" if commit else ""
    for peer in peers:
        code = f"import importlib.metadata as m, platform; print(m.version('{peer}'), platform.python_version())"
        found[peer] = subprocess.run([python_of(peer), "-c", code], capture_output=True, text=True).stdout.split()[0]
    return found


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Report:
    """The tables of one benchmark: printed as they come, kept in `results/` when the rounds are enough."""

    def __init__(
        self,
        file: str,
        doc: str,
        options: argparse.Namespace,
        columns: Mapping[str, str],
        libraries: Sequence[str] = (),
    ) -> None:
        """`columns`: key in a sample -> heading, for what a table shows; the first is what is compared.

        `libraries`: those of this environment whose versions matter besides the usual ones.
        """
        self._name = Path(file).stem
        self._question = doc.splitlines()[0]
        self._options = options
        self._columns = dict(columns)
        self._machine = machine()
        self._versions = versions(options.peers, libraries)
        self._results: list[dict[str, Any]] = []
        self._targets: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._header: list[str] = []
        about = self._machine
        self._say(f"# {self._question}\n")
        self._say(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}.")
        self._say(", ".join(f"{k} {v}" for k, v in self._versions.items()) + ".")
        self._say(f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind.")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)

    def add(self, cell: Mapping[str, Any], runs: Runs, base: str = "penstock") -> None:
        """One row for each contender: medians, and the ratio of `base` to it, from the pairs of each round."""
        self._results.append({**cell, "runs": runs})
        first = next(iter(self._columns))
        shown = [k for k in self._columns if any(k in s for samples in runs.values() for s in samples)]
        if any(s.get("errors") for samples in runs.values() for s in samples):
            shown.append("errors")
        header = [*cell, "who", *(self._columns.get(k, k) for k in shown), f"{base} ÷ this"]
        if header != self._header:
            self._header = header
            self._say("\n| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        if errors := sum(s.get("errors", 0) for s in runs.get("penstock", ())):
            self.target(f"errors of penstock, {', '.join(f'{k} {v}' for k, v in cell.items())}", [errors], most=0)
        for name, samples in runs.items():
            row = [str(v) for v in cell.values()] + [name]
            for key in shown:
                values = [s[key] for s in samples if key in s]
                row.append(spread(values) if key == first else number(statistics.median(values)) if values else "-")
            row.append("" if name == base or base not in runs else spread(self.ratios(runs, base, name)))
            self._say("| " + " | ".join(row) + " |")

    def ratios(self, runs: Runs, one: str, other: str, key: str | None = None) -> list[float]:
        """One's value over the other's, a round; of the first column unless another is named."""
        key = key or next(iter(self._columns))
        pairs = zip(runs[one], runs[other], strict=True)
        return [a[key] / b[key] for a, b in pairs if key in a and b.get(key)]

    def note(self, line: str) -> None:
        self._say(f"\n{line}")

    def target(self, what: str, values: Sequence[float], *, least: float | None = None, most: float | None = None):
        """Keeps whether the median of `values` is what is wanted; nothing is known of no values."""
        if not values:
            return
        found = statistics.median(values)
        met = found >= least if least is not None else most is not None and found <= most
        wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
        self._targets.append({"what": what, "wanted": wanted, "found": found, "met": met})

    def save(self) -> None:
        """Prints the targets, and writes `results/DATE-NAME.md` and `.json`."""
        if self._targets:
            self._say("\n| wanted | | found | met |\n|---|---|---|---|")
            for t in self._targets:
                self._say(f"| {t['what']} | {t['wanted']} | {number(t['found'])} | {'yes' if t['met'] else 'NO'} |")
        if self._options.rounds < KEPT_ROUNDS:
            print(f"\nnot kept: a result takes {KEPT_ROUNDS} rounds")
            return
        flags = f"--rounds {self._options.rounds} --seconds {self._options.seconds}"
        flags += f" --peers {','.join(self._options.peers)}" if self._options.peers else ""
        self._lines.append(f"\nRepeat with `python benchmarks/{self._name}.py {flags}`.")
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        path = folder / f"{datetime.date.today().isoformat()}-{self._name}"
        path.with_suffix(".md").write_text("\n".join(self._lines) + "\n")
        kept = {
            "question": self._question,
            "machine": self._machine,
            "versions": self._versions,
            "options": {"rounds": self._options.rounds, "seconds": self._options.seconds},
            "targets": self._targets,
            "results": self._results,
        }
        path.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"\nkept in {path}.md and .json")


def spread(values: Sequence[float]) -> str:
    """The median, and between which values it lies."""
    if not values:
        return "-"
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))}..{number(max(values))})"
