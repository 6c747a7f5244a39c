"""Everything a benchmark needs, in one name: servers, interleaved rounds, request loops, tables and results."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import uvloop
from closed_loop import Sample, percentiles, timed, wrk
from report import FLAG, Report, Runs, options
from servers import HERE, Server, Workload, free_ports, python_of, same, serving, tuned

from penstock.client.endpoint import Endpoint, parse_url
from penstock.perf.bench.load import Samples, http_request
from penstock.perf.bench.load import open_loop as run_open_loop
from penstock.perf.bench.workload import Arrival, times

__all__ = [
    "FLAG",
    "HERE",
    "Report",
    "Runs",
    "Sample",
    "Server",
    "Workload",
    "closed_loops",
    "free_ports",
    "interleave",
    "open_loop",
    "options",
    "percentiles",
    "poisson",
    "post",
    "python_of",
    "same",
    "serving",
    "timed",
    "tuned",
    "wrk",
]


def interleave(rounds: int, contenders: Mapping[str, Callable[[], Sample]]) -> Runs:
    """The samples of each contender, one per round; each round begins with a different contender."""
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
    """Interleaved runs of `wrk`, after a second that does not count; `also` adds contenders to the same rounds.

    A peer with several settings continues with the fastest one of that second.
    """
    first = {label: server.closed_loop(connections, 1)["rate"] for label, server in servers.items()}
    best: dict[str, str] = {}
    for label, server in servers.items():
        if server.name not in best or first[label] > first[best[server.name]]:
            best[server.name] = label
    loops = {label: lambda s=servers[label]: s.closed_loop(connections, options.seconds) for label in best.values()}
    return interleave(options.rounds, {**loops, **(also or {})})


def poisson(rate: float, seconds: float, seed: int) -> Sequence[float]:
    """Arrival times at `rate` per second, from 0 to `seconds`."""
    return times(Arrival("poisson"), rate, seconds, seed)


def post(url: str, body: bytes, content_type: str, **headers: str) -> tuple[Endpoint, bytes]:
    """The endpoint of the URL, and the whole request; "_" in a header name becomes "-"."""
    given = {"content-type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
    endpoint = parse_url(url.removesuffix(path := urlsplit(url).path))
    return endpoint, http_request(endpoint, "POST", path, given, body)


def open_loop(
    url: str, body: bytes, content_type: str, arrivals: Sequence[float], *, connections: int = 256, **headers: str
) -> Samples:
    """The same request at each of the times, independent of earlier answers."""
    endpoint, request = post(url, body, content_type, **headers)
    return uvloop.run(run_open_loop(endpoint, [request], arrivals, connections=connections))
