"""What does a streamer do for an application: behind web servers, with futures, single calls, and large arrays?

The same application (`streamer_app.py`) runs with `penstock` and with service_streamer 0.1.2, in batches of 64, with
default settings unless a row says otherwise. Tables 1 to 3 are the ones that the authors of service_streamer
published. Their device is simulated (one call at a time, t(n) = 77 ms + 1.16 ms n). The BERT of
`examples/bert_infilling` runs too, on the CPU with one thread per worker. `--only 1,3` selects tables, `--memory`
makes a million calls and measures memory instead, and `--gpu` uses the architecture of BERT-base on a GPU instead.
"""

from __future__ import annotations

import argparse
import functools
import sys

import harness
from closed_loop import Sample
from streamer_bench import PEER, Bench, Contenders, Key, against_best, best, calls, web
from streamer_programs import Calls

MILLION = 1_000_000
GPU_TABLES = ("1", "3")  # those with BERT in them
KINDS = ("threaded", "process", "redis")


def web_servers(bench: Bench) -> None:
    """1: a web server in front of one device."""
    bench.report.section("## 1. Flask, `wrk -c 128`, one device")
    for model in bench.models("device", "bert"):
        naive_s = bench.seconds * (7 if model == "device" else 1)  # its requests take 10 s each
        contenders: Contenders = {Key("naive"): web("penstock", "direct", model, 128, naive_s, **bench.spec(model))}
        for kind in KINDS:
            for library in bench.libraries:
                contenders[Key(library, kind)] = web(library, kind, model, 128, bench.seconds, **bench.spec(model))
        found = bench.measure(contenders)
        bench.show({"model": model}, found)
        if model == "device":
            for kind, least in (("threaded", 16), ("process", 25), ("redis", 25)):
                times = bench.ratio(found, Key("penstock", kind), Key("naive"))
                bench.report.target(f"{kind} behind Flask: x naive", times, least=least)


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
    """3: one item per call, results fetched later, no web server."""
    bench.report.section("## 3. Futures, beside the model alone in a loop of full batches")
    for model in bench.models("accelerator", "bert"):
        spec = bench.spec(model)
        numbers, seconds = ((1, 2), 1) if model == "bert" else ((1, 2, 4), bench.seconds)  # it needs a core a worker
        contenders: Contenders = {Key("loop"): calls("penstock", "direct", model, "loop", seconds, **spec)}
        for kind in KINDS:
            for workers in numbers if kind != "threaded" else (1,):
                for library in bench.libraries:
                    made = calls(library, kind, model, "futures", seconds, workers=workers, **spec)
                    contenders[Key(library, kind, workers)] = made
        found = bench.measure(contenders)
        bench.show({"model": model}, found)
        if model == "accelerator":
            for kind in KINDS:
                of_loop = bench.ratio(found, Key("penstock", kind, 1), Key("loop"))
                bench.report.target(f"futures, {kind}, 1 worker: part of the loop", of_loop, least=0.97)
            for kind, least in (("process", 3.8), ("redis", 3.6)):
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
        for kind, most in (("threaded", 1), ("process", 1), ("redis", 2)):
            pairs = zip(found[Key("penstock", kind)], found[Key("model alone")], strict=True)
            more = [ours["p50_ms"] - alone["p50_ms"] for ours, alone in pairs if ours]
            bench.report.target(f"lone call, {model}, {kind}: p50 ms above the model alone", more, most=most)


def crowds(bench: Bench) -> None:
    """5b: many callers of a model that does nothing, one item each, and Redis at its maximum load."""
    for kind in KINDS:
        found = against_best(bench, kind, "no-op", {"threads": 32, "items": 1})
        bench.show({"calls": "32 callers", "model": "no-op"}, found)
        what = f"32 callers, {kind}: x {PEER}"
        ours = Key("penstock", kind)
        bench.report.target(f"{what} at its defaults", bench.ratio(found, ours, Key(PEER, kind)), least=20)
        bench.report.target(f"{what} at its best", bench.ratio(found, ours, best(found)), least=1.3)
    contenders: Contenders = {
        Key(library, "redis"): calls(library, "redis", "no-op", "futures", bench.seconds) for library in bench.libraries
    }
    found = bench.measure(contenders)
    bench.show({"calls": "futures", "model": "no-op"}, found)
    times = bench.ratio(found, Key("penstock", "redis"), Key(PEER, "redis"))
    bench.report.target(f"futures, redis, no-op: x {PEER}", times, least=2)


def arrays(bench: Bench) -> None:
    """5c: arrays of 600 KB through worker processes; 16 callers with 4 each, a full batch."""
    crowd = {"threads": 16, "items": 4}
    found = against_best(bench, "process", "first number", crowd, floats=150_000)
    bench.show({"calls": "arrays of 600 KB", "model": "first number"}, found)
    times = bench.ratio(found, Key("penstock", "process"), best(found))
    bench.report.target(f"arrays of 600 KB, process: x {PEER} at its best", times, least=5)


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
    "3": (futures,),
    "4": (vision,),
    "5": (lone, crowds, arrays),
    "6": (processors,),
    "7": (costs,),
}
COLUMNS = {
    "rate": "items/s",
    "mean_ms": "mean ms",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "cpu_us": "CPU us/call",
    "switches": "switches/call",
    "given_up": "given up",
    "grown_mb": "MB grown",
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
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", default=",".join(TABLES))
    parser.add_argument("--memory", type=int, nargs="?", const=MILLION, default=0)
    parser.add_argument("--gpu", action="store_true")
    ours, sys.argv[1:] = parser.parse_known_args()
    options = harness.options(__doc__, seconds=2, peers=(PEER,))
    options.only = ours.only.split(",")
    if unknown := set(options.only) - set(TABLES):
        raise SystemExit(f"no such table: {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    options.memory = ours.memory
    options.gpu = gpus() if ours.gpu else 0
    if ours.gpu and not options.gpu:
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
    for number in GPU_TABLES if options.gpu else options.only:
        for table in TABLES[number]:
            table(bench)
    report.save(None if options.gpu or options.only == list(TABLES) else False)


if __name__ == "__main__":
    main()
