"""What does a service that reads the words of a page gain when the words of all requests share batches?

`examples/detect_and_read` with ten clients and pages of 1 to 30 words: its TOML under `penstock serve`, and the usual
service, Flask with one lock on the models. `bare loop` is not a server: it reads ten pages at a time, and shows what
the machine could do. All clients run on the same cores.
"""

import functools
import http.client
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request

import harness
from closed_loop import Sample, percentiles
from detect_and_read_bare import EXAMPLE, PAGES, pages
from processes import Processes
from servers import HERE, free_ports

CLIENTS = 10
START_S = 60.0
COLUMNS = {"rate": "pages/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "batch": "words a batch"}


class Service(Processes):
    """A server that reads pages."""

    def __init__(self, command: list[str], port: int, path: str, files: list[bytes], metrics: int = 0) -> None:
        super().__init__()
        self._port, self._path, self._files, self._metrics = port, path, files, metrics
        self._spawn([sys.executable, *command])
        end = time.monotonic() + START_S
        while True:
            try:
                self.words(0)
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() > end or self.process.poll() is not None:
                    log = self._log.read_text(errors="replace")
                    self.close()
                    raise RuntimeError(f"{command} does not answer: {error}\n{log}") from None
                time.sleep(0.1)
        self._load(1)
        self.stop()

    def words(self, n: int) -> list[str]:
        """The words of a page, sorted."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        return sorted(word["text"] for word in self._read(connection, n)["words"])

    def _read(self, connection: http.client.HTTPConnection, n: int) -> dict:
        connection.request("POST", self._path, self._files[n % PAGES], {"content-type": "image/jpeg"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {body[:200]!r}")
        return json.loads(body)

    def _batches(self) -> tuple[int, int]:
        """Batches of the recogniser and words in them so far."""
        if not self._metrics:
            return 0, 0
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics") as got:
            lines = [line for line in got.read().decode().splitlines() if "pipeline_batches_total" in line]
        found = [re.search(r'size="(\d+)".* ([\d.e+]+)$', line) for line in lines if 'node="recognise"' in line]
        sizes = [(int(one[1]), float(one[2])) for one in found if one]
        return int(sum(count for _, count in sizes)), int(sum(size * count for size, count in sizes))

    def _load(self, seconds: float) -> Sample:
        latencies: list[float] = []
        errors: list[Exception] = []
        end = time.perf_counter() + seconds

        def client(n: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                while (begun := time.perf_counter()) < end:
                    self._read(connection, n)
                    latencies.append(time.perf_counter() - begun)
                    n += 1
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=client, args=(k * PAGES // CLIENTS,)) for k in range(CLIENTS)]
        before, begun = self._batches(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        sample = {"rate": len(latencies) / (time.perf_counter() - begun), **percentiles(latencies)}
        batches, words = (now - then for now, then in zip(self._batches(), before, strict=True))
        return sample | ({"batch": words / batches} if batches else {})

    def run(self, seconds: float) -> Sample:
        """One run, while all other servers are paused."""
        with self.awake():
            return self._load(seconds)


def bare(seconds: float) -> Sample:
    """The loop without a server."""
    command = [sys.executable, str(HERE / "detect_and_read_bare.py"), str(seconds)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


def main() -> None:
    options = harness.options(__doc__, seconds=5)
    files = [data for data, _ in pages.some(PAGES)]
    first, second, metrics = free_ports(3)
    sets = [f"server.port={first}", "server.management_port=0", f"server.metrics_port={metrics}"]
    serve = ["-m", "penstock.cli.main", "serve", str(EXAMPLE / "detect_and_read.toml")]
    serve += [word for key in sets for word in ("--set", key)]
    flask = [str(EXAMPLE / "naive.py"), "--port", str(second)]
    with (
        Service(serve, first, "/predictions/detect_and_read", files, metrics) as pipeline,
        Service(flask, second, "/predict", files) as naive,
    ):
        with pipeline.awake(), naive.awake():
            assert all(pipeline.words(n) == naive.words(n) for n in range(10)), "the servers read different words"
        calls = {"pipeline": pipeline.run, "naive": naive.run, "bare loop": bare}
        runs = harness.interleave(
            options.rounds, {name: functools.partial(call, options.seconds) for name, call in calls.items()}
        )
    libraries = ("numpy", "onnxruntime", "opencv-python-headless", "simplejpeg", "flask")
    method = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind."
    report = harness.Report(__file__, __doc__, options, COLUMNS, libraries, method, "")
    report.add({"clients": CLIENTS}, runs, "pipeline")
    ratios = functools.partial(report.ratios, runs)
    report.target("pipeline / naive, pages/s", ratios("pipeline", "naive", "rate"), least=3)
    report.target("pipeline / naive, p99", ratios("pipeline", "naive", "p99_ms"), most=0.4)
    report.target("pipeline / bare loop, pages/s", ratios("pipeline", "bare loop", "rate"), least=0.9)
    report.target("mean batch of the recogniser", [sample["batch"] for sample in runs["pipeline"]], least=8)
    report.save()


if __name__ == "__main__":
    main()
