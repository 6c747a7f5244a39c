"""The contenders of a table of `streamer.py`, their turns, and the rows of their samples."""

from __future__ import annotations

import argparse
import concurrent.futures as futures_of
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import harness
from harness import Runs, Sample
from streamer_programs import Calls, Failed, Program, Web

PEER = "service_streamer"
STARTS = 3  # programs that come up at the same time
BEST_OF_S = (0.001, 0.002, 0.005, 0.010)  # waits of service_streamer, where it is to be at its best
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


Contenders = dict[Key, tuple[Callable[[], Program], Callable[[Any], Sample]]]


class Bench:
    """One run of the benchmark: its options and the report."""

    def __init__(self, options: argparse.Namespace, report: harness.Report) -> None:
        self.options = options
        self.report = report
        self.seconds: int = options.seconds
        self.libraries = ("penstock", *options.peers)

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
            found = harness.interleave(rounds, runs)
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

    def models(self, *names: str) -> tuple[str, ...]:
        return ("bert_base",) if self.options.gpu else names

    def spec(self, model: str) -> dict[str, Any]:
        """Further settings of a program with this model: threads and devices."""
        if model == "bert_base":
            return {"devices": list(range(self.options.gpu))}
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


def against_best(bench: Bench, kind: str, model: str, crowd: dict[str, int], **spec: Any) -> dict[Key, list[Sample]]:
    """Samples of callers: Penstock at its defaults, the peer at its defaults and with its best wait."""
    tried = {
        Key(f"{PEER}, {wait_s * 1e3:g} ms", kind): calls(
            PEER, kind, model, "callers", 1, crowd, max_latency=wait_s, **spec
        )
        for wait_s in (BEST_OF_S if PEER in bench.libraries else ())
    }
    rates = {key: samples[0].get("rate", 0.0) for key, samples in bench.measure(tried, rounds=1).items()}
    contenders: Contenders = {
        Key(library, kind): calls(library, kind, model, "callers", 1, crowd, **spec) for library in bench.libraries
    }
    if rates:
        fastest = max(rates, key=rates.__getitem__)
        contenders[fastest] = tried[fastest]
    return bench.measure(contenders)


def best(found: Mapping[Key, list[Sample]]) -> Key:
    """The peer with its best wait, which comes last."""
    return list(found)[-1] if len(found) > 1 else Key(PEER)
