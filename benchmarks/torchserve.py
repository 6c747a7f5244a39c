"""What does a TorchServe user gain from starting Penstock instead, with unchanged files?

The same archive, config.properties and flags run under TorchServe 0.12.0 and under Penstock: a handler that does
nothing, a small network for digits, and a simulated accelerator of 50 ms for 8 items; 1, 10 and 100 connections of
`wrk`, batches of 1 and 8, 1 and 4 workers (a single client has no use for four). "torchserve" logs as it does by
default, 6 KB per request; "torchserve, unlogged" logs only errors. The batch delay is 1 ms (no-op), 5 ms (digits) and
10 ms (accelerator), except in rows with TorchServe's default of 100 ms. "in process" is the accelerator itself,
called repeatedly with 8 items by one thread per worker. The start time is measured from the command to the first
right prediction. Memory covers all processes with one worker, after a second of 16 connections.

`--only start,noop,digits,accelerator` selects tables; `--gpu` uses ResNet-50 on a GPU instead.
"""

import argparse
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import harness
from torchserve_servers import Archive, Setting, TorchServe, load, make_archive, network, start_once

PEER = "torchserve"
UNLOGGED = "torchserve, unlogged"
CEILING = "in process"
BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
CONNECTIONS = (1, 10, 100)
DELAYS_MS = {"noop": 1, "digits": 5, "accelerator": 10}
COLUMNS = {
    "rate": "requests/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "start_s": "start s",
    "rss_mb": "RSS MB",
    "pss_mb": "PSS MB",
}
EDGE_S = 5  # the last batches of a run are not counted: 1 % of a run of 5 s


def calls(servers: dict[str, TorchServe], connections: int, seconds: int) -> dict[str, Callable[[], harness.Sample]]:
    """A run of each server."""
    return {kind: functools.partial(server.closed_loop, connections, seconds) for kind, server in servers.items()}


class Bench:
    """Options, report, and the folder of the archives."""

    def __init__(self, options: argparse.Namespace, report: harness.Report, store: Path) -> None:
        self.options, self.report, self.store = options, report, store

    def kinds(self, *more: str) -> list[str]:
        return ["penstock", *((PEER, *more) if self.options.peers else ())]

    def plain(self, model: str) -> Archive:
        """The archive of a handler without a model, which returns its input."""
        return Archive(make_archive(self.store, model, model), BODY, BODY)

    def serving(self, stack: ExitStack, kinds: list[str], archive: Archive, setting: Setting) -> dict[str, TorchServe]:
        return {kind: stack.enter_context(TorchServe(kind, archive, setting)) for kind in kinds}

    def cell(self, servers: dict[str, TorchServe], setting: Setting, connections: int, seconds: int) -> harness.Runs:
        """One row of the table for each server."""
        seconds = min(seconds, self.options.seconds)
        for server in servers.values() if setting.delay_ms == DELAYS_MS["noop"] else ():
            server.closed_loop(connections, 1)  # Java goes on compiling what it runs often
        runs = harness.interleave(self.options.rounds, calls(servers, connections, seconds))
        self.add(servers, setting, connections, runs)
        return runs

    def add(self, servers: dict[str, TorchServe], setting: Setting, connections: int, runs: harness.Runs) -> None:
        model = next(iter(servers.values())).workload.model
        cell = {"model": model, "batch": setting.batch, "workers": setting.workers, "delay ms": setting.delay_ms}
        self.report.add({**cell, "connections": connections}, runs)

    def grid(self, archive: Archive, *more: str) -> None:
        """Batches of 1 and 8; 1 worker with 1 to 100 connections, 4 workers with more than one. `more` run with 1
        worker."""
        for workers in (1, 4):
            for batch in (1, 8):
                setting = Setting(batch, workers, DELAYS_MS[archive.model])
                with ExitStack() as stack:
                    kinds = self.kinds(*(more if workers == 1 else ()))
                    servers = self.serving(stack, kinds, archive, setting)
                    for connections in CONNECTIONS[workers > 1 :]:
                        self.judged(servers, setting, connections)
                    if archive.model == "noop" and (batch, workers) == (8, 1):
                        self.judged(servers, setting, 32)

    def judged(self, servers: dict[str, TorchServe], setting: Setting, connections: int) -> None:
        """A cell with its target."""
        model = next(iter(servers.values())).workload.model
        if model == "accelerator" and (setting.batch, setting.workers, connections) == (8, 4, 100):
            return full_accelerators(self, servers, setting, connections)
        wanted = {(1, 10): 5.0, (1, 100): 5.0, (8, 32): 4.0}.get((setting.batch, connections))
        named = model == "noop" and setting.workers == 1 and wanted is not None
        runs = self.cell(servers, setting, connections, 2 if named else 1)
        if named:
            what = f"no-op, batch {setting.batch}, {connections} connections"
            self.report.target(f"{what}: x torchserve", self.report.ratios(runs, "penstock", PEER), least=wanted)
            p99 = self.report.ratios(runs, "penstock", PEER, "p99_ms")
            self.report.target(f"{what}: p99, x torchserve's", p99, most=1 / 3)


def start(bench: Bench) -> None:
    """Start time and memory, with each server started again in every round."""
    archive = bench.plain("noop")
    report = bench.report
    starts = {kind: functools.partial(start_once, kind, archive) for kind in bench.kinds()}
    runs = harness.interleave(bench.options.rounds, starts)
    report.add({"model": "noop", "batch": 1, "workers": 1}, runs)
    report.target(
        "no-op: seconds from start to the first prediction", [s["start_s"] for s in runs["penstock"]], most=1.5
    )
    report.target("no-op: resident MB of server and worker", [s["rss_mb"] for s in runs["penstock"]], most=150)


def noop(bench: Bench) -> None:
    """The grid, and batches with a delay of 100 ms."""
    archive = bench.plain("noop")
    bench.grid(archive, UNLOGGED)
    setting = Setting(8, 1, 100)
    with ExitStack() as stack:
        servers = bench.serving(stack, bench.kinds(), archive, setting)
        alone = bench.report.ratios(bench.cell(servers, setting, 1, 2), "penstock", PEER)
        bench.report.target("no-op, batch 8, delay 100 ms, one client: x torchserve", alone, least=50)
        bench.judged(servers, setting, 32)


def digits(bench: Bench) -> None:
    """The grid."""
    bench.grid(network(bench.store, "digits", "digits", "Digits", (1, 28, 28)))


def accelerator(bench: Bench) -> None:
    """The grid."""
    bench.grid(bench.plain("accelerator"))


def full_accelerators(bench: Bench, servers: dict[str, TorchServe], setting: Setting, connections: int) -> None:
    """Compared with the handler itself, in full batches."""
    seconds = min(EDGE_S, 2 * bench.options.seconds + 1)
    also = {CEILING: lambda: ceiling(load("accelerator").handle, setting, seconds)}
    runs = harness.interleave(bench.options.rounds, calls(servers, connections, seconds) | also)
    bench.add(servers, setting, connections, runs)
    share = bench.report.ratios(runs, "penstock", CEILING)
    what = f"accelerator, batch {setting.batch}, {setting.workers} workers: share of the ceiling"
    bench.report.target(what, share, least=0.97)


def ceiling(handle: Callable[..., object], setting: Setting, seconds: int) -> harness.Sample:
    """Items/s of a handler in full batches."""
    batch = [{"body": BODY}] * setting.batch
    rates: list[float] = []

    def loop() -> None:
        rates.append(harness.timed(lambda: handle(batch, None), seconds)["rate"] * len(batch))

    threads = [threading.Thread(target=loop) for _ in range(setting.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"rate": sum(rates)}


def resnets(bench: Bench) -> None:
    """ResNet-50 in fp32, fp16, and compiled fp16; batches of 1 and 8 on one GPU."""
    for precision, compiled in (("fp32", False), ("fp16", False), ("fp16", True)):
        model = f"resnet50_{precision}" + "_compiled" * compiled
        config = bench.store / f"{model}.yaml"
        config.write_text(f"precision: {precision}\ncompile: {str(compiled).lower()}\n")
        flags = ("--config-file", str(config), "--archive-format", "zip-store")
        archive = network(bench.store, model, "resnet", "ResNet50", (3, 224, 224), *flags)
        for batch, connections in ((1, 1), (8, 32)):
            setting = Setting(batch, 1, 10)
            with ExitStack() as stack:
                bench.cell(bench.serving(stack, bench.kinds(), archive, setting), setting, connections, 5)


TABLES = {"start": start, "noop": noop, "digits": digits, "accelerator": accelerator}


def main() -> None:
    options = harness.options(__doc__, seconds=2, peers=(PEER,), tables=TABLES, gpu=harness.FLAG)
    if options.gpu and not shutil.which("nvidia-smi"):
        raise SystemExit("not measured: there is no GPU here")
    method = f"Medians of {options.rounds} interleaved rounds, (least..most) behind."
    part = "gpu" if options.gpu else ""
    report = harness.Report(__file__, __doc__, options, COLUMNS, ("torch",), method, part)
    with tempfile.TemporaryDirectory() as store:
        bench = Bench(options, report, Path(store))
        if options.gpu:
            resnets(bench)
        for name in () if options.gpu else options.only:
            TABLES[name](bench)
    report.save(None if options.gpu or options.only == list(TABLES) else False)


if __name__ == "__main__":
    main()
