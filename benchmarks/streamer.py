"""What does a streamer do for an application: behind web servers, with futures, single calls, and large arrays?

The same application (`streamer_app.py`) runs with `penstock` and with service_streamer 0.1.2, in batches of 64, with
default settings unless a table says otherwise. "At its best wait": each of three waits is tried for one run, and
service_streamer is measured with the fastest one. Tables 1 to 3 are the ones that the authors of service_streamer
published. Their device is simulated (one call at a time, t(n) = 77 ms + 1.16 ms n). The BERT of
`examples/bert_infilling` runs too, on the CPU with one thread per worker. `--only 1,3` selects tables, `--memory`
makes a million calls and measures memory instead, and `--gpu` uses the architecture of BERT-base on a GPU instead
(`--gpu --dry`: a small BERT without a GPU).
"""

import argparse
import functools
from typing import Any

import harness
from closed_loop import Sample
from servers import site_of
from streamer_bench import LOADGEN, PEER, Bench, Contenders, Key, against_best, calls, web
from streamer_loadgen import fastest_valid
from streamer_programs import Calls

MILLION = 1_000_000
KINDS = ("threaded", "process", "redis")
# the least that Penstock is to reach, as a multiple of the peer at its best wait; of `device`, of the model alone
FLASK: dict[str, dict[str, float]] = {
    "device": {"threaded": 16, "process": 25, "redis": 25},
    "bert": {"threaded": 1.05, "process": 1.1, "redis": 1},
    "no-op": {"threaded": 1.1},
    "bert_base": dict.fromkeys(KINDS, 1),
}
FUTURES = (
    ("threaded", "no-op", 2),
    ("threaded", "busy", 1.05),
    ("threaded", "accelerator", 1),
    ("redis", "no-op", 2),
)
CROWDS = (
    ("threaded", "no-op", 128, 1.2),
    ("threaded", "busy", 128, 1.05),
    ("threaded", "accelerator", 128, 1),
    *((kind, "no-op", 32, 1.3) for kind in KINDS),
)
GPU_FUTURES = (("threaded", "bert_base", 1.05),)
GPU_CROWDS = (("threaded", "bert_base", 128, 1.05),)


def web_servers(bench: Bench) -> None:
    """1: a web server in front of one device."""
    bench.report.section(f"## 1. Flask, `wrk -c 128`, one device, {PEER} at its best wait")
    for model in bench.models("device", "bert", "no-op"):
        naive_s = bench.seconds * (7 if model == "device" else 1)  # its requests take 10 s each
        naive: Contenders = {Key("naive"): web("penstock", "direct", model, 128, naive_s, **bench.spec(model))}
        found = against_best(bench, web, FLASK[model], model, 128, bench.seconds, others=naive)
        bench.show({"model": model}, found)
        for kind, least in FLASK[model].items():
            if model == "device":
                times = bench.ratio(found, Key("penstock", kind), Key("naive"))
                bench.report.target(f"{kind} behind Flask: x naive", times, least=least)
            else:
                bench.beats(f"{kind} behind Flask, {model}", found, kind, least)


def gevent_servers(bench: Bench) -> None:
    """2: one greenlet per connection, with several devices."""
    bench.report.section("## 2. gevent's server, 512 connections, 1, 2 and 4 devices")
    contenders: Contenders = {}
    for kind in KINDS[1:]:
        for workers in (1, 2, 4):
            for library in bench.libraries:
                made = web(library, kind, "device", 512, bench.seconds, server="gevent", workers=workers)
                contenders[Key(library, kind, workers)] = made
    bench.show({"model": "device"}, bench.measure(contenders))


def futures(bench: Bench) -> None:
    """3a: one item per call, results fetched later by the same thread, 256 calls ahead, no web server."""
    bench.report.section(f"## 3. Futures of one thread, {PEER} at its best wait, beside a loop of full batches")
    for kind, model, least in GPU_FUTURES if bench.options.gpu else FUTURES:
        loop: Contenders = {}
        if model != "no-op":
            loop[Key("loop")] = calls("penstock", "direct", model, "loop", 1, **bench.spec(model))
        found = against_best(bench, calls, (kind,), model, "futures", bench.seconds, {"ahead": 256}, others=loop)
        bench.show({"model": model}, found)
        bench.beats(f"futures, {kind}, {model}", found, kind, least)
        if model == "accelerator":
            of_loop = bench.ratio(found, Key("penstock", kind), Key("loop"))
            bench.report.target(f"futures, {kind}: part of the loop", of_loop, least=0.97)


def workers_of_futures(bench: Bench) -> None:
    """3b: the same through worker processes, 16 batches per worker ahead."""
    for model in bench.models("accelerator", "bert"):
        spec = bench.spec(model)
        numbers, seconds = ((1, 2), 1) if model == "bert" else ((1, 2, 4), bench.seconds)  # it needs a core a worker
        contenders: Contenders = {Key("loop"): calls("penstock", "direct", model, "loop", seconds, **spec)}
        for kind in KINDS[1:]:
            for workers in numbers:
                for library in bench.libraries:
                    made = calls(library, kind, model, "futures", seconds, workers=workers, **spec)
                    contenders[Key(library, kind, workers)] = made
        found = bench.measure(contenders)
        bench.show({"model": model}, found)
        if model == "accelerator":
            for kind, least in (("process", 3.8), ("redis", 3.6)):
                of_loop = bench.ratio(found, Key("penstock", kind, 1), Key("loop"))
                bench.report.target(f"futures, {kind}, 1 worker: part of the loop", of_loop, least=0.97)
                scale = bench.ratio(found, Key("penstock", kind, 4), Key("penstock", kind, 1))
                bench.report.target(f"futures, {kind}: 4 workers x 1 worker", scale, least=least)


def vision(bench: Bench) -> None:
    """4: a device with room for 64 images, and more clients than that."""
    bench.report.section(
        "## 4. Vision: Flask, images of 51 KB, t(n) = 11 ms + 3.25 ms n, room for 64 images on the device"
    )
    contenders: Contenders = {
        Key(f"naive, {n} connections"): web("penstock", "direct", "vision", n, bench.seconds + 1) for n in (64, 128)
    }
    for kind in KINDS:
        for library in bench.libraries:
            contenders[Key(library, kind)] = web(library, kind, "vision", 128, bench.seconds + 1)
    found = bench.measure(contenders)
    bench.show({"connections": 128}, found)
    errors = [sample["errors"] for sample in found[Key("naive, 128 connections")]]
    bench.report.target("vision, naive at 128: errors", errors, least=1)
    for kind in KINDS:
        times = bench.ratio(found, Key("penstock", kind), Key("naive, 64 connections"))
        bench.report.target(f"vision, {kind} at 128: x naive at 64", times, least=3.6)


def lone(bench: Bench) -> None:
    """5a: one call at a time."""
    bench.report.section("## 5. No web server: lone calls, many callers, large arrays")
    for model in ("no-op", "accelerator"):
        one = {"threads": 1, "items": 1}
        contenders: Contenders = {Key("model alone"): calls("penstock", "direct", model, "callers", 1, one)}
        for kind in KINDS:
            for library in bench.libraries:
                contenders[Key(library, kind)] = calls(library, kind, model, "callers", 1, one)
        found = bench.measure(contenders)
        latencies = {k: [{n: v for n, v in s.items() if n != "rate"} for s in samples] for k, samples in found.items()}
        bench.show({"calls": "lone", "model": model}, latencies, base="")
        for kind, most in (("threaded", 0.1 if model == "no-op" else 1), ("process", 1), ("redis", 2)):
            pairs = zip(found[Key("penstock", kind)], found[Key("model alone")], strict=True)
            more = [ours["p50_ms"] - alone["p50_ms"] for ours, alone in pairs if ours]
            bench.report.target(f"lone call, {model}, {kind}: p50 ms above the model alone", more, most=most)


def crowds(bench: Bench) -> None:
    """5b: many callers, one item each."""
    for kind, model, threads, least in GPU_CROWDS if bench.options.gpu else CROWDS:
        crowd = {"threads": threads, "items": 1}
        found = against_best(bench, calls, (kind,), model, "callers", bench.seconds, crowd)
        bench.show({"calls": f"{threads} callers", "model": model}, found)
        bench.beats(f"{threads} callers, {kind}, {model}", found, kind, least)


def arrays(bench: Bench) -> None:
    """5c: arrays of 600 KB through worker processes; 16 callers with 4 each, a full batch."""
    crowd, floats = {"threads": 16, "items": 4}, 150_000
    found = against_best(bench, calls, ("process",), "first number", "callers", bench.seconds, crowd, floats=floats)
    bench.show({"calls": "arrays of 600 KB", "model": "first number"}, found)
    bench.beats("arrays of 600 KB, process", found, "process", 5)


def processors(bench: Bench) -> None:
    """6: more workers than cores."""
    bench.report.section("## 6. Models on the processor: 1 and 4 worker processes, threads as each library leaves them")
    for model in ("matmul", "bert"):
        contenders: Contenders = {}
        for workers in (1, 4):
            for library in bench.libraries:
                made = calls(library, "process", model, "futures", bench.seconds, workers=workers)
                contenders[Key(library, "process", workers)] = made
        found = bench.measure(contenders)
        bench.show({"model": model}, found)
        scale = bench.ratio(found, Key("penstock", "process", 4), Key("penstock", "process", 1))
        bench.report.target(f"{model}: 4 worker processes x 1", scale, least=1)


def costs(bench: Bench) -> None:
    """7: what a call costs the program that makes it; least of all rounds, because other programs only add to it."""
    bench.report.section("## 7. The cost of a call: 64 threads, one item per call")
    for model in ("no-op", "accelerator"):
        contenders: Contenders = {}
        for kind in KINDS:
            for library in bench.libraries:
                waits = {"max_latency": 0.002} if library == PEER else {}  # at its default, its batches wait 0.1 s
                made = calls(library, kind, model, "callers", 1, {"threads": 64, "items": 1}, **waits)
                contenders[Key(library, kind)] = made
        found = bench.measure(contenders)
        bench.show({"calls": "64 callers", "model": model}, found)
        for kind in KINDS:
            ours = [sample for sample in found[Key("penstock", kind)] if sample]
            for key, unit, most in (("cpu_us", "us of CPU", 60), ("switches", "thread switches", 2)):
                least = [min(sample[key] for sample in ours)] if ours else []
                bench.report.target(f"64 callers, {model}, {kind}: {unit} per call", least, most=most)


def loadgen(bench: Bench) -> None:
    """8: MLPerf's load generator over futures."""
    if LOADGEN not in bench.options.peers:
        return
    ceiling = 64 / 0.0178  # what the device does in full batches of 5 ms + 0.2 ms a row
    bench.report.section(f"## 8. MLPerf LoadGen over futures, a device of {ceiling:,.0f} rows/s, Server at p99 60 ms")
    make = functools.partial(calls, "penstock", "threaded", "accelerator", "loadgen", bench.seconds)
    offline, server = Key("Offline", "threaded"), Key("Server", "threaded")
    site = site_of(LOADGEN)
    program, run = make({"scenario": "Offline", "qps": ceiling}, loadgen=site)
    search = functools.partial(server_scenario, ceiling=ceiling, seconds=bench.seconds)
    found = bench.measure({offline: (program, run), server: (program, search)})
    bench.show({"model": "accelerator"}, found, base="")
    shares = [sample["rate"] / ceiling for sample in found[offline] if sample]
    bench.report.target("LoadGen, Offline: part of what the device does", shares, least=0.97)
    bench.report.target("LoadGen, Server: part of Offline", bench.ratio(found, server, offline), least=0.95)


def server_scenario(program: Calls, ceiling: float, seconds: float) -> Sample:
    def run(qps: float) -> dict[str, Any]:
        return program.run("loadgen", seconds, scenario="Server", qps=qps, seconds=seconds)

    return fastest_valid(run, ceiling)


def memory(bench: Bench, count: int) -> None:
    """The memory of the program, its workers and its broker, after a tenth of the calls and after all of them."""
    for kind in KINDS:
        contenders: Contenders = {}
        for library in bench.libraries:
            make = functools.partial(Calls, "calls", {"library": library, "kind": kind, "model": "no-op"})
            contenders[Key(library, kind)] = make, functools.partial(growth, count=count)
        found = bench.measure(contenders, rounds=1)
        bench.show({"calls": f"{count:,}"}, found)
        grown = [sample["grown_mb"] for sample in found[Key("penstock", kind)] if "grown_mb" in sample]
        bench.report.target(f"{kind}, {count:,} calls: MB grown after the first tenth", grown, most=20)


def growth(program: Calls, count: int) -> Sample:
    first = program.run("submits", 60, count=count // 10)
    before = program.memory_bytes()
    rest = program.run("submits", 600, count=count - count // 10)
    if not first or not rest:
        return {}
    grown_mb = (program.memory_bytes() - before) / 1e6
    return {"rate": rest["rate"], "given_up": first["given_up"] + rest["given_up"], "grown_mb": grown_mb}


TABLES = {
    "1": (web_servers,),
    "2": (gevent_servers,),
    "3": (futures, workers_of_futures),
    "4": (vision,),
    "5": (lone, crowds, arrays),
    "6": (processors,),
    "7": (costs,),
    "8": (loadgen,),
}
GPU_TABLES = (web_servers, futures, workers_of_futures, crowds)
COLUMNS = {
    "rate": "items/s",
    "mean_ms": "mean ms",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "cpu_us": "CPU us/call",
    "switches": "switches/call",
    "given_up": "given up",
    "grown_mb": "MB grown",
    "result": "LoadGen's results (first round)",
}


def gpus() -> int:
    """The number of GPUs that torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def arguments() -> argparse.Namespace:
    """The arguments of every benchmark, plus `only`, `memory` (number of calls, 0: off), `gpu` (number found)."""
    memory = {"type": int, "nargs": "?", "const": MILLION, "default": 0}
    further = {"memory": memory, "gpu": harness.FLAG, "dry": harness.FLAG}
    options = harness.options(__doc__, seconds=2, peers=(PEER, LOADGEN), tables=TABLES, **further)
    if options.gpu:
        options.gpu = options.dry or gpus()
        if not options.gpu:
            raise SystemExit("not measured: torch sees no GPU here")
    return options


def main() -> None:
    options = arguments()
    part = "memory" if options.memory else "gpu" if options.gpu else ""
    once = "One run each; one call in a hundred is given up at once, as by a caller whose time is over."
    libraries = ("redis", "flask", "gevent", "numpy")
    report = harness.Report(__file__, __doc__, options, COLUMNS, libraries, once if options.memory else None, part)
    bench = Bench(options, report)
    if options.memory:
        memory(bench, options.memory)
        report.save(whole=options.memory >= MILLION)
        return
    for table in GPU_TABLES if options.gpu else [table for number in options.only for table in TABLES[number]]:
        table(bench)
    report.save(None if not options.dry and (options.gpu or options.only == list(TABLES)) else False)


if __name__ == "__main__":
    main()
