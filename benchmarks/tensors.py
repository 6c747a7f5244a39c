"""How fast are models that take tensors, beside Triton Inference Server, and behind JSON beside mosec?

Both servers load the same ONNX file (64 FP32 numbers, 256 hidden units, 10 outputs), the same echo in Python, and the
same device that sleeps 5 ms + 0.2 ms a row. A request has one row unless a table says otherwise. `wrk` sends HTTP, and
Triton's own `perf_analyzer` sends gRPC; `h2load` does as well, without a target, because it takes less of the
processor. mosec runs the ONNX file in a worker of a few lines.

Tables: 1 ONNX over binary HTTP; 2 a Python model with declared tensors; 3 ONNX over gRPC; 4 eight rows a request; 5 an
image of 602 KB; 6 JSON, against mosec; 7 processor time; 8 the device, with one instance and with two.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import harness
import tensor_clients as clients
import tensor_processor
from tensor_clients import Run
from tensor_models import case, write_files
from tensor_servers import MAX_BATCH, SETTINGS, Penstock, TensorServer, Triton

CONNECTIONS = (1, 16, 64, 256)
COLUMNS = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", **tensor_processor.COLUMNS}
DELAYS_US = (200, 1000, 5000)  # of Triton
WAITS_MS, SIZES = (1, 2, 5), (16, 64)  # of mosec
MOSEC, MSGSPEC = "mosec_onnx", "mosec with msgspec"
WORKER_US = {"binary": 6, "Open Inference JSON": 10, "native JSON": 10}  # per row, the model aside
DEVICE_GOALS = {"device": (1.0, 1.25, 1.07, 1.14), "two_devices": (1.0,) * 4}


class Bench:
    """Servers by their models, started when a table needs them, and the comparisons of two of them."""

    def __init__(self, options: argparse.Namespace, report: harness.Report, folder: Path, stack: ExitStack) -> None:
        self.options, self.report, self.folder = options, report, folder
        self._stack = stack

    def server(self, kind: Callable[[Path, str, int], TensorServer], model: str, delay_us: int = 0) -> TensorServer:
        return self._stack.enter_context(kind(self.folder, model, delay_us))

    def servers(self, model: str) -> dict[str, TensorServer]:
        """Penstock and, if it takes part, Triton, with this model."""
        found = {"penstock": self.server(Penstock, model)}
        return found | ({"triton": self.server(Triton, model)} if "triton" in self.options.peers else {})

    def delayed(self, model: str) -> dict[str, TensorServer]:
        """Triton with each of DELAYS_US, if it takes part."""
        delays = DELAYS_US if "triton" in self.options.peers else ()
        return {f"with a delay: triton, {delay} us": self.server(Triton, model, delay) for delay in delays}

    def compare(
        self,
        cell: tuple[str, int],
        servers: Mapping[str, TensorServer],
        run: Callable[[int], Run],
        goal: float | None,
        delayed: Mapping[str, TensorServer] | None = None,
    ) -> harness.Runs:
        """Adds the rows of a run of `run(seconds)` on each server, after a second that does not count.

        `cell`: what is sent, and the number of connections. `goal`: the least ratio of rates to Triton's; p99 may then
        not be above Triton's. `delayed`: servers of which the fastest in that second joins, without a target.
        """
        contenders = {**servers, **(delayed or {})}
        rates = {name: server.measure(run(1))["rate"] for name, server in contenders.items()}
        joins = [max(delayed, key=rates.__getitem__)] if delayed else []
        whole = run(self.options.seconds)
        calls = {name: functools.partial(contenders[name].measure, whole) for name in [*servers, *joins]}
        runs = harness.interleave(self.options.rounds, calls)
        self.report.add({"requests": cell[0], "connections": cell[1]}, runs)
        self.judge(f"{cell[0]}, {cell[1]}", runs, "triton", goal)
        return runs

    def judge(self, what: str, runs: harness.Runs, peer: str, goal: float | None) -> None:
        """Records the targets against a peer; without a goal there are none."""
        if goal is not None:
            self.report.target(f"{what}: rate, times {peer}", self.report.ratios(runs, "penstock", peer), least=goal)
            p99 = self.report.ratios(runs, "penstock", peer, "p99_ms")
            self.report.target(f"{what}: p99, over that of {peer}", p99, most=1.0)


def onnx_http(bench: Bench) -> None:
    _binary(bench, "mlp", "ONNX, binary HTTP", (1.0, 1.1, 1.3, 1.4))


def declared(bench: Bench) -> None:
    _binary(bench, "echo", "Python echo, binary HTTP", (1.0, 1.2, 1.4, 1.5))


def _binary(bench: Bench, model: str, what: str, goals: Sequence[float]) -> None:
    """One row a request over HTTP, with each number of connections."""
    servers, delayed, sent = bench.servers(model), bench.delayed(model), case(model)
    request = clients.binary(sent)
    for server in (*servers.values(), *delayed.values()):
        clients.check_http(server, sent, request)
    for connections, goal in zip(CONNECTIONS, goals, strict=True):
        run = functools.partial(clients.closed_loop, request, connections)
        bench.compare((what, connections), servers, run, goal, delayed)


def onnx_grpc(bench: Bench) -> None:
    servers, sent = bench.servers("mlp"), case("mlp")
    for server in servers.values():
        clients.check_grpc(server, sent)
    for connections in (1, 16, 64):
        run = functools.partial(clients.perf_analyzer, sent, connections)
        bench.compare(("ONNX, gRPC", connections), servers, run, 1.0)
    for connections in (1, 16, 64):
        run = functools.partial(clients.multiplexed, sent, connections)
        bench.compare(("ONNX, gRPC, h2load", connections), servers, run, None)


def eight_rows(bench: Bench) -> None:
    servers, sent = bench.servers("mlp"), case("mlp", rows=8)
    request = clients.binary(sent)
    for server in servers.values():
        clients.check_http(server, sent, request)
        clients.check_grpc(server, sent)
    run = functools.partial(clients.closed_loop, request, 16)
    bench.compare(("ONNX, 8 rows, binary HTTP", 16), servers, run, 1.2)
    bench.compare(("ONNX, 8 rows, gRPC", 16), servers, functools.partial(clients.perf_analyzer, sent, 16), 1.2)


def images(bench: Bench) -> None:
    servers, sent = bench.servers("img"), case("img")
    request = clients.binary(sent)
    for server in servers.values():
        clients.check_http(server, sent, request)
        clients.check_grpc(server, sent)
    analyzed = functools.partial(clients.perf_analyzer, sent, 4)
    bench.compare(("602 KB, HTTP", 4), servers, functools.partial(clients.closed_loop, request, 4), 1.3)
    bench.compare(("602 KB, gRPC", 4), servers, analyzed, 1.2)
    shared = functools.partial(clients.shared_memory, sent, 4)
    bench.compare(("602 KB, shared memory, HTTP", 4), servers, shared, 1.2)
    bench.compare(("602 KB, shared memory, gRPC", 4), servers, functools.partial(analyzed, shared=True), None)


@dataclasses.dataclass(frozen=True)
class OnnxWorkload(harness.Workload):
    """A `Workload` whose answer is a `Case`; mosec's worker loads `file`, and decodes with its own codec or msgspec."""

    file: str = ""
    msgspec: bool = False

    def check(self, answer: bytes) -> None:
        self.answer.check(json.loads(answer))


def behind_json(bench: Bench) -> None:
    """A list of 64 numbers, and of 10 in the answer: `/predictions/mlp`, and mosec's `/inference`.

    mosec has its best batch size and delay, once with its own codec and once with msgspec.
    """
    server, sent = bench.server(Penstock, "mlp"), case("mlp")
    request = clients.native_json(sent)
    clients.check_http(server, sent, request)
    workload = OnnxWorkload("mlp", request.body, sent, max_batch=MAX_BATCH, file=str(bench.folder / "mlp.onnx"))
    faster = dataclasses.replace(workload, msgspec=True)
    with_json, with_msgspec = (
        harness.tuned(w, MOSEC, WAITS_MS, SIZES) if MOSEC in bench.options.peers else {} for w in (workload, faster)
    )
    with harness.serving(with_json) as plains, harness.serving(with_msgspec) as quicks:
        for connections in (16, 64, 256):
            run = functools.partial(clients.closed_loop, request, connections)
            server.measure(run(1))
            also = {"penstock": functools.partial(server.measure, run(bench.options.seconds))}
            if quicks:
                rates = {label: quick.closed_loop(connections, 1)["rate"] for label, quick in quicks.items()}
                label = max(rates, key=rates.__getitem__)
                loop = functools.partial(quicks[label].closed_loop, connections, bench.options.seconds)
                also[f"{MSGSPEC}{label.removeprefix(MOSEC)}"] = loop
            runs = harness.closed_loops(plains, connections, bench.options, also)
            bench.report.add({"requests": "ONNX, JSON", "connections": connections}, runs)
            for peer in (MOSEC, MSGSPEC):
                bench.judge(f"ONNX, JSON, {connections}", runs, peer, 1.2)


def processors(bench: Bench) -> None:
    """The processor time of a row at 64 connections."""
    servers, sent, file = bench.servers("mlp"), case("mlp"), bench.folder / "mlp.onnx"
    kinds = {
        "binary": clients.binary(sent),
        "Open Inference JSON": clients.open_inference_json(sent),
        "native JSON": clients.native_json(sent),
    }
    for kind, request in kinds.items():
        chosen = {name: s for name, s in servers.items() if name == "penstock" or kind != "native JSON"}
        for server in chosen.values():
            clients.check_http(server, sent, request)

        def run(seconds: int, request: clients.Post = request) -> Run:
            loop = clients.closed_loop(request, 64, seconds)
            return tensor_processor.with_processor_time(loop, file)

        runs = bench.compare((f"processor time, {kind}", 64), chosen, run, None)
        spent = [sample["aside_us"] for sample in runs["penstock"]]
        bench.report.target(f"{kind}, 64: worker less model, us/row", spent, most=WORKER_US[kind])


def devices(bench: Bench) -> None:
    for model, goals in DEVICE_GOALS.items():
        what = "device" if model == "device" else "device, two instances"
        _binary(bench, model, what, goals)


TABLES = {
    "1": onnx_http,
    "2": declared,
    "3": onnx_grpc,
    "4": eight_rows,
    "5": images,
    "6": behind_json,
    "7": processors,
    "8": devices,
}


def main() -> None:
    options = harness.options(__doc__, seconds=3, peers=("triton", MOSEC), tables=TABLES)
    rounds = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, with (least..most)."
    report = harness.Report(__file__, __doc__, options, COLUMNS, ("onnxruntime", "numpy"), f"{rounds} {SETTINGS}")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for number in options.only:
            with ExitStack() as stack:
                TABLES[number](Bench(options, report, Path(folder), stack))
    report.save(None if options.only == list(TABLES) else False)


if __name__ == "__main__":
    main()
