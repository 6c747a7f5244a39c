"""What does continuous batching gain over whole batches when answers have different lengths?

First the text generator of `examples/text_generation`, then a model whose step costs 4 ms + 0.1 ms for each active
answer. `steps` is the step model, `ended rows leave` the same with `mode = "batch"`, and `batches` a `predict` that
steps all rows until the longest answer ends. `loop` is not a server: it runs the same steps in one program, and
replaces an answer that ends at once. Answers have 8 to 128 parts, as many of 8 to 32 as of 32 to 128.
"""

import asyncio
import functools
import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import uvloop
from closed_loop import Sample
from processes import Processes
from servers import free_ports

EXAMPLE = harness.HERE.parent / "examples" / "text_generation"
START_S = 60.0
CLIENTS = (1, 8, 32)
SHORTEST, LONGEST = 8, 128
COLUMNS = {"rate": "parts/s", "first_p50_ms": "first p50 ms", "first_p95_ms": "first p95 ms", "p50_ms": "p50 ms"}
MODEL = """
import time

import penstock


class Timed:
    max_active = 32

    def admit(self, item):
        return [item]

    def step(self, states):
        time.sleep(0.004 + 0.0001 * len(states))
        for state in states:
            state[0] -= 1
        return [penstock.Step("a", done=state[0] <= 0) for state in states]


def batches(items):
    for step in range(max(items)):
        time.sleep(0.004 + 0.0001 * len(items))
        yield ["a" if step < item else None for item in items]
"""
CONFIG = """
[models.steps]
target = "timed.py:Timed"

[models.leaving]
target = "timed.py:Timed"

[models.leaving.batching]
mode = "batch"
max_batch_size = 32

[models.batches]
target = "timed.py:batches"

[models.batches.batching]
max_batch_size = 32
"""


class Service(Processes):
    """Both models under `penstock serve`."""

    def __init__(self, config: Path, request: Callable[[int, random.Random], object]) -> None:
        super().__init__()
        self.port = free_ports(1)[0]
        self._request = request
        sets = [f"server.port={self.port}", "server.management_port=0", "server.metrics_port=0"]
        command = ["-m", "penstock.cli.main", "serve", str(config)]
        self._spawn([sys.executable, *command, *(word for key in sets for word in ("--set", key))])
        end = time.monotonic() + START_S
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            if time.monotonic() > end or self.process.poll() is not None:
                log = self._log.read_text(errors="replace")
                self.close()
                raise RuntimeError(f"the server does not answer\n{log}")
            time.sleep(0.1)
        self.stop()

    def run(self, model: str, clients: int, seconds: float) -> Sample:
        """Closed loops of so many clients, while the server is awake."""
        with self.awake():
            return uvloop.run(streaming_clients(self.port, model, self._request, clients, seconds))


async def streaming_clients(
    port: int, model: str, request: Callable[[int, random.Random], object], count: int, seconds: float
) -> Sample:
    """Closed loops of `count` clients that read every part."""
    loop = asyncio.get_running_loop()
    end = time.perf_counter() + seconds
    clients = [Client(model, request, random.Random(k), end) for k in range(count)]
    for client in clients:
        await loop.create_connection(lambda c=client: c, "127.0.0.1", port)
    await asyncio.wait_for(asyncio.gather(*(client.over for client in clients)), seconds + 60)
    first = sorted(t for client in clients for t in client.first)
    latencies = sorted(t for client in clients for t in client.latencies)
    return {
        "rate": sum(client.parts for client in clients) / seconds,
        "first_p50_ms": first[len(first) // 2] * 1e3,
        "first_p95_ms": first[int(0.95 * len(first))] * 1e3,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
    }


class Client(asyncio.Protocol):
    """One connection in a closed loop. Every part is a chunk of 6 bytes, the end one of 5: nothing is parsed."""

    def __init__(self, model: str, request: Callable[[int, random.Random], object], rng: random.Random, end: float):
        self._path, self._request, self._rng, self._end = f"/predictions/{model}", request, rng, end
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parts = 0  # until the end of the run
        self.first: list[float] = []  # seconds to the first part
        self.latencies: list[float] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(RuntimeError(f"the connection ended: {error}"))

    def _send(self) -> None:
        length = random_length(self._rng)
        body = json.dumps(self._request(length, self._rng)).encode()
        lines = (
            f"POST {self._path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(body)}",
        )
        self._transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self._begun, self._head, self._left = time.perf_counter(), b"", 6 * length + 5

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._head is not None:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self.over.set_exception(RuntimeError(repr(self._head[:300])))
                return
            self._head = None
            self.first.append(now - self._begun)
        self._left -= len(data)
        if now < self._end:
            self.parts += len(data) // 6
        if self._left:
            return
        self.latencies.append(now - self._begun)
        if now < self._end:
            self._send()
        else:
            self.over.set_result(None)
            self._transport.abort()


def random_length(rng: random.Random) -> int:
    """The number of parts of an answer: its logarithm is uniform."""
    return round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())


def loop(clients: int, seconds: float) -> Sample:
    """The steps of the timed model in this program: an answer that ends is replaced by the next one at once."""
    scope: dict = {}
    exec(MODEL, scope)
    model, rng = scope["Timed"](), random.Random(0)
    states = [model.admit(random_length(rng)) for _ in range(clients)]
    parts, end = 0, (begun := time.perf_counter()) + seconds
    while time.perf_counter() < end:
        steps = model.step(states)
        parts += len(steps)
        states = [
            model.admit(random_length(rng)) if step.done else state for state, step in zip(states, steps, strict=True)
        ]
    return {"rate": parts / (time.perf_counter() - begun)}


def question(length: int, rng: random.Random) -> object:
    """A request of the example, with prompts of 8 to 100 letters."""
    prompt = "three after may: june july august\n" * rng.randint(0, 2) + "two after monday:"
    return {"prompt": prompt, "max_tokens": length, "ignore_end": True}


def main() -> None:
    options = harness.options(__doc__, seconds=10)
    method = (
        f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind. Answers of"
        f" {SHORTEST} to {LONGEST} parts; `first` is the time to the first part."
    )
    report = harness.Report(__file__, __doc__, options, COLUMNS, ("torch",), method, "")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "timed.py").write_text(MODEL)
        Path(folder, "penstock.toml").write_text(CONFIG)
        with (
            Service(EXAMPLE / "text_generation.toml", question) as example,
            Service(Path(folder, "penstock.toml"), lambda length, rng: length) as timed,
        ):
            for clients in CLIENTS:
                calls = {
                    "steps": functools.partial(example.run, "generate", clients, options.seconds),
                    "ended rows leave": functools.partial(example.run, "generate_by_batch", clients, options.seconds),
                }
                report.add({"model": "example", "clients": clients}, harness.interleave(options.rounds, calls), "steps")
            calls = {
                "steps": functools.partial(timed.run, "steps", CLIENTS[-1], options.seconds),
                "ended rows leave": functools.partial(timed.run, "leaving", CLIENTS[-1], options.seconds),
                "batches": functools.partial(timed.run, "batches", CLIENTS[-1], options.seconds),
                "loop": functools.partial(loop, CLIENTS[-1], options.seconds),
            }
            runs = harness.interleave(options.rounds, calls)
    report.add({"model": "4 ms + 0.1 ms x active", "clients": CLIENTS[-1]}, runs, "steps")
    ratios = functools.partial(report.ratios, runs)
    report.target("steps / batches, parts/s", ratios("steps", "batches", "rate"), least=2.5)
    report.target("steps / batches, p95 to the first part", ratios("steps", "batches", "first_p95_ms"), most=0.15)
    report.target("steps / loop, parts/s", ratios("steps", "loop", "rate"), least=0.97)
    report.save()


if __name__ == "__main__":
    main()
