"""What every benchmark stands on, in one name: servers, interleaved rounds, closed loops, tables and results.

The open loop is in `open_loop.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from closed_loop import Sample, percentiles, timed, wrk
from report import Report, Runs, options
from servers import HERE, Server, Workload, free_ports, python_of, same, serving, tuned

__all__ = [
    "HERE",
    "Report",
    "Runs",
    "Sample",
    "Server",
    "Workload",
    "closed_loops",
    "free_ports",
    "interleave",
    "options",
    "percentiles",
    "python_of",
    "same",
    "serving",
    "timed",
    "tuned",
    "wrk",
]


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
    """Interleaved runs of `wrk`, after a second that is not counted; `also` are other contenders of the same rounds.

    A peer that is there with several settings goes on with the one that was fastest in that second.
    """
    first = {label: server.closed_loop(connections, 1)["rate"] for label, server in servers.items()}
    best: dict[str, str] = {}
    for label, server in servers.items():
        if server.name not in best or first[label] > first[best[server.name]]:
            best[server.name] = label
    loops = {label: lambda s=servers[label]: s.closed_loop(connections, options.seconds) for label in best.values()}
    return interleave(options.rounds, {**loops, **(also or {})})
