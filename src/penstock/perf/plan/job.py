"""Runs `penstock plan`: reads and checks the flags, plans, prints, and writes the report."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

import click
import msgspec

from penstock.errors import ConfigError
from penstock.perf.bench.document import number
from penstock.perf.bench.measurement import Slo, parse_slo
from penstock.perf.bench.results import command_line
from penstock.perf.cli import FAILED
from penstock.perf.plan.costs import CostCurve, parse_memory, read_cost
from penstock.perf.plan.day import LONG, PEAK, holes
from penstock.perf.plan.planner import Planner, PlanOptions, useful
from penstock.perf.plan.report import PlanReport, facts, publish, verdict
from penstock.perf.simulate.replay import parse_duration, parse_policies, read_arrivals, whole_numbers
from penstock.perf.simulate.simulator import OpenLoop

WORTH_S: Final = 120.0  # the quiet window of an autoscaler has 30 s: a shorter recording shows nothing
LARGEST: Final = 64  # of the default batches, if the cost is a formula


def run_plan(flags: dict[str, Any]) -> int:
    """Runs the command and returns its exit status. Raises ConfigError, Unreachable, NotWritten."""
    slo = read_slo(flags["slo"])
    curve = read_cost(flags["cost"], flags)
    recorded = os.path.exists(flags["arrivals"])
    options = read_options(flags, slo, curve)
    longest_s = LONG * curve.seconds(max(options.batches))
    load, remark = read_arrivals(flags, lambda rate: max(PEAK / rate, longest_s))
    notes = [remark.removeprefix("; ") + " and were sorted"] if remark else []
    notes += _holes(load) if recorded else []
    started = time.perf_counter()
    if not recorded or load.arrivals[-1] < WORTH_S or options.policy.name != "adaptive":
        options = msgspec.structs.replace(options, start_s=None)
    planner = Planner(load, curve, options, steady=not recorded)
    plan = planner.plan()
    plan = msgspec.structs.replace(plan, notes=[*notes, *plan.notes])
    report = PlanReport(plan, _describe(flags["arrivals"], load), curve.source, command_line(sys.argv[1:]))
    if flags["output"] is not None:
        page = publish(flags["output"], report)
    if flags["as_json"]:
        click.echo(msgspec.json.encode(plan))
        return 0 if plan.met else FAILED
    for name, text in facts(report):
        click.echo(f"{name:<23} {text}")
    for note in plan.notes:
        click.echo(f"note: {note}")
    click.echo(verdict(plan).text)
    took = f"{planner.requests:,} requests simulated in {time.perf_counter() - started:.3g} s"
    click.echo(took if flags["output"] is None else f"{took}; {page} has the plots", err=True)
    return 0 if plan.met else FAILED


def read_slo(text: str) -> Slo:
    """The SLO, which must bound a latency. Raises ConfigError."""
    slo = parse_slo(text)
    if slo.latency_s is None:
        raise ConfigError(f"SLO {text} bounds no latency, so one instance is enough; add for instance p99<=100ms")
    return slo


def read_options(flags: dict[str, Any], slo: Slo, curve: CostCurve) -> PlanOptions:
    """What to plan for. Raises ConfigError."""
    policies = parse_policies(flags["policy"])
    if len(policies) > 1:
        raise ConfigError(f"--policy {flags['policy']}: expected one; `penstock simulate` compares several")
    handover_s = parse_duration(flags["handover"])
    batches = whole_numbers("batch", flags["batch"] or f"1..{curve.largest or LARGEST}")
    if flags["failures"] >= flags["most"]:
        raise ConfigError(f"--failures {flags['failures']}: expected fewer than the most instances ({flags['most']})")
    return PlanOptions(
        slo=slo,
        batches=useful([1] if policies[0].name == "none" else batches, curve, slo, handover_s),
        most=flags["most"],
        failures=flags["failures"],
        price=flags["price"],
        memory_bytes=parse_memory(flags["memory"]) if flags["memory"] else None,
        policy=policies[0],
        handover_s=handover_s,
        jitter=flags["jitter"],
        start_s=parse_duration(flags["start"]),
        seed=flags["seed"],
    )


def _describe(text: str, load: OpenLoop) -> str:
    count, last_s = len(load.arrivals), load.arrivals[-1]
    rows = sum(load.rows) / count if load.rows else 1.0
    mean = f"{number(count / last_s)}/s in the mean" if last_s > 0 else "at once"
    return f"{text}: {count:,} requests in {number(last_s)} s, {mean}, {rows:.3g} row{'s' * (rows != 1)} each"


def _holes(load: OpenLoop) -> list[str]:
    """A note on the times without requests in a recording."""
    gap_s, at_s, many = holes(load.arrivals)
    if not many:
        return []
    more = f" and {many - 1} more" if many > 1 else ""
    return [
        f"the recording has a hole of {number(gap_s)} s from second {number(at_s)} on{more}: if it was interrupted"
        " there, cut the hole out, because utilisation and the cost per million count it as time without requests"
    ]
