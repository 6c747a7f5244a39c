"""The contenders of a table of `streamer.py`, their turns, and the rows of their samples."""

import argparse
import concurrent.futures as futures_of
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import harness
from harness import Runs, Sample
from streamer_programs import Calls, Failed, Program, Web

PEER = "service_streamer"
LOADGEN = "loadgen"  # a program that makes calls, not a library that answers them
STARTS = 3  # programs that come up at the same time
BEST_OF_S = (0.1, 0.01, 0.001)  # waits of service_streamer, where it is to be at its best; the first is its default
FORM = ("application/x-www-form-urlencoded", b"s=Happy+birthday+to+%5BMASK%5D.")
IMAGE = (
    "multipart/form-data; boundary=edge",
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="cat.jpg"\r\n'
    b"Content-Type: image/jpeg\r\n\r\n" + bytes(range(256)) * 200 + b"\r\n--edge--\r\n",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Key(NamedTuple):
    """The contender of a sample. A key without a kind applies to every kind, without workers to every number."""

    who: str
    kind: str = ""
    workers: int = 0


Contender = tuple[Callable[[], Program], Callable[[Any], Sample]]
Contenders = dict[Key, Contender]


class Bench:
    """One run of the benchmark: its options and the report."""

    def __init__(self, options: argparse.Namespace, report: harness.Report) -> None:
        self.options = options
        self.report = report
        self.seconds: int = options.seconds
        self.libraries = ("penstock", *(peer for peer in options.peers if peer != LOADGEN))

    def measure(self, contenders: Contenders, rounds: int | None = None) -> dict[Key, list[Sample]]:
        """Samples of all, in interleaved rounds. A peer that does not start is reported and has none."""
        rounds = rounds or self.options.rounds
        programs: dict[Key, Program] = {}
        with contextlib.ExitStack() as stack:
            with futures_of.ThreadPoolExecutor(STARTS) as starts:
                making = {key: starts.submit(make) for key, (make, _) in contenders.items()}
            for key, made in making.items():
                if made.exception() is None:
                    programs[key] = stack.enter_context(made.result())
            for key in contenders.keys() - programs.keys():
                if not key.who.startswith(PEER) or not isinstance(making[key].exception(), Failed):
                    making[key].result()
                print(making[key].exception(), flush=True)
                self.report.section(f"Not measured: {' '.join(str(part) for part in key if part)} did not start.")
            runs = {key: functools.partial(contenders[key][1], program) for key, program in programs.items()}
            found = harness.interleave(rounds, runs) if runs else {}
            for program in programs.values():
                if program.failure:
                    self.report.section(f"Failed: {program.failure}")
        return {key: found.get(key, [{}] * rounds) for key in contenders}

    def show(self, cell: Mapping[str, Any], found: Mapping[Key, list[Sample]], base: str = "penstock") -> None:
        """Rows for each kind and number of workers, each including the contenders that belong to all."""
        groups = dict.fromkeys((key.kind, key.workers) for key in found if key.kind)
        for kind, workers in groups:
            runs: Runs = {}
            for key, samples in found.items():
                if key.kind in ("", kind) and key.workers in (0, workers):
                    runs[key.who] = samples
            more = {"workers": workers} if workers else {}
            self.report.add({**cell, "streamer": kind, **more}, runs, base=base)

    def ratio(self, found: Mapping[Key, list[Sample]], one: Key, other: Key, key: str = "rate") -> list[float]:
        """The value of one over the value of the other, per round; empty if one of them was not measured."""
        ours, theirs = found.get(one, []), found.get(other, [])
        if any(sample.get("invalid") for sample in (*ours, *theirs)):
            return []
        return [a[key] / b[key] for a, b in zip(ours, theirs, strict=False) if key in a and b.get(key)]

    def beats(self, what: str, found: Mapping[Key, list[Sample]], kind: str, least: float) -> None:
        """Targets of samples of `against_best`: the rate, and where there is one, a p99 of at most the peer's."""
        ours = Key("penstock", kind)
        peer = next((key for key in found if key.kind == kind and key.who.startswith(PEER)), Key(PEER, kind))
        self.report.target(f"{what}: x {PEER} at its best", self.ratio(found, ours, peer), least=least)
        if any("p99_ms" in sample for sample in found[ours]):
            p99 = self.ratio(found, ours, peer, "p99_ms")
            self.report.target(f"{what}: p99 as a part of {PEER}'s", p99, most=1)

    def models(self, *names: str) -> tuple[str, ...]:
        return ("bert_base",) if self.options.gpu else names

    def spec(self, model: str) -> dict[str, Any]:
        """Further settings of a program with this model: threads and devices."""
        if model == "bert_base":
            dry = {"env": ONE_THREAD, "dry": True} if self.options.dry else {}
            return {"devices": list(range(self.options.gpu)), **dry}
        return {"env": ONE_THREAD} if model == "bert" else {}


def web(
    library: str, kind: str, model: str, connections: int, seconds: int, *, server: str = "flask", **spec: Any
) -> tuple[Callable[[], Program], Callable[[Web], Sample]]:
    """A web server in front of a model, and one run of `wrk` on it."""
    content_type, body = IMAGE if model == "vision" else FORM
    told = {"library": library, "kind": kind, "model": model, **spec}
    make = functools.partial(Web, server, told, body=body, content_type=content_type)
    if kind == "direct":
        return make, lambda program: program.run_anew(connections, seconds)
    return make, lambda program: program.run(connections, seconds)


def calls(
    library: str,
    kind: str,
    model: str,
    what: str,
    seconds: float,
    arguments: Mapping[str, Any] | None = None,
    **spec: Any,
) -> tuple[Callable[[], Program], Callable[[Calls], Sample]]:
    """A program with a streamer in it, and one run of calls."""
    make = functools.partial(Calls, "calls", {"library": library, "kind": kind, "model": model, **spec})
    return make, lambda program: program.run(what, seconds, seconds=seconds, **(arguments or {}))


def against_best(
    bench: Bench,
    contender: Callable[..., Contender],
    kinds: Iterable[str],
    model: str,
    *args: Any,
    others: Contenders | None = None,
    **spec: Any,
) -> dict[Key, list[Sample]]:
    """Samples of Penstock at its defaults and of the peer at its best wait, for each kind, and of other contenders.

    `contender` is `web` or `calls`, called with the model, `args` and the spec. Each wait is tried for one run.
    """
    spec |= bench.spec(model)
    contenders = dict(others or {})
    for kind in kinds:
        contenders[Key("penstock", kind)] = contender("penstock", kind, model, *args, **spec)
        if PEER not in bench.libraries:
            continue
        tried = {
            Key(f"{PEER}, {wait_s * 1e3:g} ms", kind): contender(PEER, kind, model, *args, max_latency=wait_s, **spec)
            for wait_s in BEST_OF_S
        }
        rates = {key: samples[0].get("rate", 0.0) for key, samples in bench.measure(tried, rounds=1).items()}
        fastest = max(rates, key=rates.__getitem__)
        contenders[fastest] = tried[fastest]
    return bench.measure(contenders)
