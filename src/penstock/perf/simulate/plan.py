"""Runs `penstock plan`: reads the flags, plans, and reports the numbers first, then the plots and every simulation."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import numpy as np
from msgspec import Struct

from penstock.errors import FAILED, ConfigError
from penstock.perf.bench import document
from penstock.perf.bench.document import (
    Block,
    BulletList,
    Heading,
    Paragraph,
    Report,
    make_report,
    memory,
    number,
    percent,
    publish,
    reproduce,
    seconds,
    table,
    value_text,
)
from penstock.perf.bench.measurement import Objective, Slo, parse_slo
from penstock.perf.bench.plots import BAD, FAINT, SERIES, draw_each, seconds_axis
from penstock.perf.bench.results import command_line
from penstock.perf.simulate import replay
from penstock.perf.simulate.costs import CostCurve, parse_memory, read_cost
from penstock.perf.simulate.planner import (
    LONG,
    PEAK,
    CapacityPlan,
    Planner,
    PlanOptions,
    holes,
    objective_of,
    tail,
    useful,
)
from penstock.perf.simulate.simulator import OpenLoop

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORTH_S: Final = 120.0  # the quiet window of an autoscaler has 30 s: a shorter recording shows nothing
LARGEST: Final = 64  # of the default batches, if the cost is a formula, or counts tokens
SAMPLE: Final = 1000  # lengths that show how long a batch takes
PLAN: Final = "plan.json"
_HIGHEST: Final = 4.0  # times the SLO: slower settings are left out of the plot of costs
_LOOKS: Final = 50  # at the number of instances in a bin
_FAR: Final = 4.0  # times the planned instances: more are left out of the plots


def run_plan(flags: dict[str, Any]) -> int:
    """Runs the command and returns its exit status. Raises ConfigError, Unreachable, NotWritten."""
    slo = read_slo(flags["slo"])
    curve = read_cost(flags["cost"], flags)
    recorded = os.path.exists(flags["arrivals"])
    texts = OpenLoop((), (), replay.read_lengths(flags["lengths"], SAMPLE, flags["seed"]) if flags["lengths"] else ())
    options = read_options(flags, slo, curve, texts)
    longest_s = LONG * curve.seconds(texts.full_batch(max(options.batches), options.max_tokens)[1])

    def usual_s(rate: float) -> float:
        return max(PEAK / rate, longest_s)

    load, remark = replay.read_arrivals(flags, usual_s)
    others = (
        None if recorded else replay.read_arrivals({**flags, "seed": flags["seed"] + 1, "duration": None}, usual_s)[0]
    )
    notes = [remark.removeprefix("; ") + " and were sorted"] if remark else []
    notes += _holes(load) if recorded else []
    started = time.perf_counter()
    if not recorded or load.arrivals[-1] < WORTH_S or options.policy.name != "adaptive":
        options = msgspec.structs.replace(options, start_s=None)
    planner = Planner(load, curve, options, others)
    plan = planner.plan()
    plan = msgspec.structs.replace(plan, notes=[*notes, *plan.notes])
    report = PlanReport(plan, replay.describe(flags["arrivals"], load), curve.source, command_line(sys.argv[1:]))
    took = f"{planner.requests:,} requests simulated in {time.perf_counter() - started:.3g} s"
    if flags["output"] is not None:
        _, page = publish(flags["output"], report.compose(), lambda: draw_each(_PLOTS, report), {PLAN: plan})
        took += f"; {page} has the plots"
    if flags["as_json"]:
        click.echo(msgspec.json.encode(plan))
    else:
        lines = [f"{name:<23} {text}" for name, text in report.facts().items()]
        lines += [*(f"note: {note}" for note in plan.notes), report.verdict().text]
        click.echo("\n".join(lines))
        click.echo(took, err=True)
    return 0 if plan.met else FAILED


def read_slo(text: str) -> Slo:
    """The SLO, which must bound a latency. Raises ConfigError."""
    slo = parse_slo(text)
    if slo.latency_s is None:
        raise ConfigError(f"SLO {text} bounds no latency, so one instance is enough; add for instance p99<=100ms")
    return slo


def read_options(flags: dict[str, Any], slo: Slo, curve: CostCurve, texts: OpenLoop) -> PlanOptions:
    """What to plan for; `texts` has some of the lengths. Raises ConfigError."""
    policies = replay.parse_policies(flags["policy"])
    if len(policies) > 1:
        raise ConfigError(f"--policy {flags['policy']}: expected one; `penstock simulate` compares several")
    handover_s = replay.parse_duration(flags["handover"])
    sizes = replay.parse_sizes(flags["sizes"])
    batches = replay.read_batches(flags["batch"], sizes, f"1..{LARGEST if texts.lengths else curve.largest or LARGEST}")
    tokens = flags["max_tokens"]
    if policies[0].name == "none":
        batches = [1]
    if flags["failures"] >= flags["most"]:
        raise ConfigError(f"--failures {flags['failures']}: expected fewer than the most instances ({flags['most']})")
    return PlanOptions(
        slo=slo,
        batches=useful(batches, curve, slo, handover_s, lambda n: texts.full_batch(n, tokens)[1]),
        sizes=sizes,
        max_tokens=tokens,
        most=flags["most"],
        failures=flags["failures"],
        price=flags["price"],
        memory_bytes=parse_memory(flags["memory"]) if flags["memory"] else None,
        policy=policies[0],
        handover_s=handover_s,
        jitter=flags["jitter"],
        start_s=replay.parse_duration(flags["start"]),
        spare=flags["spare"],
        headroom=flags["headroom"],
        seed=flags["seed"],
    )


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


# ---- the report


class PlanReport(Struct, frozen=True):
    """A plan with the texts that its command knows."""

    plan: CapacityPlan
    arrivals: str
    cost: str
    command: str

    @property
    def slo(self) -> Slo:
        return parse_slo(self.plan.slo)

    @property
    def objective(self) -> Objective:
        """The latency objective by which settings are ranked."""
        return objective_of(self.slo)

    def value(self, one: replay.ReplayResult) -> str:
        """The value of that objective in a simulation: "p99 84.8 ms"."""
        found, name = tail(one, self.slo), self.objective.name
        return f"{name} {value_text(name, found if found < float('inf') else None)}"

    def compose(self) -> Report:
        """The report without its plots."""
        rest: list[Block] = [Heading("Every simulation of the peak"), table(replay.COLUMNS, self.plan.tried)]
        first: list[Block] = [
            self.verdict(),
            document.facts(self.facts()),
            BulletList(self.plan.notes),
            reproduce(self.command),
        ]
        return make_report("penstock plan", first, rest)

    def verdict(self) -> Paragraph:
        """The result in a sentence."""
        plan, one = self.plan, self.plan.chosen
        settings = f"{_count(plan.instances)} with batches of up to {plan.batch}"
        spare = f", also with {plan.failures} down" if plan.failures else ""
        peak = f"{number(one.offered)} requests/s"
        if plan.met:
            return Paragraph(f"{settings}: {self.value(one)} at the peak of {peak} meets {plan.slo}{spare}.", "good")
        state = self.value(one) if one.keeps_up else f"{number(one.throughput)} responses/s at {peak}"
        none = f"No instance count up to {plan.most:,} meets {plan.slo}{spare}"
        return Paragraph(f"{none}. The best reachable is {state}: {settings}.", "bad")

    def facts(self) -> dict[str, str]:
        """The plan as texts by name."""
        plan, day, limit, scaling = self.plan, self.plan.day, self.plan.limit, self.plan.autoscaled
        down = f" with {plan.failures} down" if plan.failures else ""
        found = {
            "arrivals": self.arrivals,
            "cost of a batch": self.cost,
            "instances": f"{plan.instances:,}",
            "batching.max_batch_size": f"{plan.batch}",
        }
        if plan.chosen.sizes:
            found["batching.sizes"] = f"[{', '.join(map(str, plan.chosen.sizes))}]"
        if limit is not None:
            room = percent(limit.rate / plan.chosen.offered - 1)
            found["head-room"] = f"{number(limit.rate)}/s within the SLO{down}, {room} above the peak"
        found["with instances down"] = self._degraded()
        found["full batches"] = f"{number(plan.full_rate)} requests/s"
        if limit is not None:
            rate, busy, wait = number(limit.per_instance), percent(limit.busy), seconds(limit.wait_s)
            found["scale up at"] = f"{rate} requests/s per instance: {busy} busy, a mean wait of {wait}"
        found["memory"] = memory(plan.cost.memory_bytes)
        if plan.cost.hour is not None:
            per = number(plan.cost.million)
            found["price"] = f"{number(plan.cost.hour)} per hour, {per} per million requests"
        if scaling is not None:
            hours, change = (
                number(scaling.instance_s / 3600),
                percent(scaling.instance_s / scaling.fixed_s - 1, signed=True),
            )
            found["autoscaled"] = (
                f"{scaling.fewest} to {scaling.most}, {hours} instance-hours ({change}),"
                f" {percent(scaling.late)} of the requests over the SLO"
            )
        p99, share = seconds(day.latency.p99_s), percent(sum(day.busy) / len(day.busy))
        return found | {"over all arrivals": f"{share} busy, p99 {p99}, {day.requests:,} requests"}

    def _degraded(self) -> str:
        """What happens while instances are down, and how many survive one failure."""
        plan, one, down = self.plan, self.plan.degraded, max(1, self.plan.failures)
        if one is None:
            return f"{down} down: nothing is left; {_count(plan.needed + 1)} meet the SLO with one down"
        state = self.value(one) if one.keeps_up else "the queue grows without bound"
        if one.met:
            return f"{down} down: {state}, the SLO is met"
        advice = f"; {_count(plan.needed + down)} meet it" if plan.met else ""
        return f"{down} down: {state}, the SLO is missed{advice}"


def _count(instances: int) -> str:
    """The number with its noun."""
    return f"{instances:,} instance{'s' * (instances != 1)}"


# ---- the plots


def _known(report: PlanReport, results: Sequence[replay.ReplayResult]) -> list[tuple[int, float]]:
    """(instances, value of the SLO's latency) of the results near the plan that keep up."""
    near = [one for one in results if one.keeps_up and one.instances <= _FAR * report.plan.instances]
    return [(one.instances, value) for one in near if (value := tail(one, report.slo)) < float("inf")]


def _slo_mark(axes: Axes, report: PlanReport, *, upright: bool = False) -> None:
    objective = report.objective
    draw = axes.axvline if upright else axes.axhline
    draw(objective.limit, color=BAD, linestyle="--", linewidth=1.2, label=f"SLO: {objective.text}")


def _cost_slo(axes: Axes, report: PlanReport) -> tuple[str, str] | None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    plan, objective = report.plan, report.objective
    known = sorted((value, n) for n, value in _known(report, plan.tried) if value < _HIGHEST * objective.limit)
    front: list[tuple[float, int]] = []  # the cheapest settings for each SLO
    for value, n in known:
        if not front or n < front[-1][1]:
            front.append((value, n))
    if len(front) < 2:
        return None
    unit = plan.cost.hour / plan.instances if plan.cost.hour is not None else 1.0
    values, costs = [value for value, _ in front], [n * unit for _, n in front]
    axes.step([*values, max(values[-1], objective.limit) * 1.1], [*costs, costs[-1]], where="post", color=SERIES[0])
    axes.plot(values, costs, "o", color=SERIES[0], label="cheapest settings that meet it")
    _slo_mark(axes, report, upright=True)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_xlabel(f"SLO: {objective.name} at most")
    axes.set_ylabel("price per hour" if plan.cost.hour is not None else "instances")
    axes.set_ylim(bottom=0)
    return "Cost against SLO", "At the peak; a looser SLO is to the right. Settings between the simulated ones exist."


def _tail_instances(axes: Axes, report: PlanReport) -> tuple[str, str] | None:
    from matplotlib.ticker import MaxNLocator

    plan, values = report.plan, []
    batches = sorted({one.batch for one in plan.tried}, key=lambda batch: (batch != plan.batch, -batch))
    for batch, colour in zip(batches, SERIES, strict=False):
        points = sorted(_known(report, [one for one in plan.tried if one.batch == batch]))
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=f"batches of up to {batch}")
            values += [value for _, value in points]
    if not values:
        return None
    _slo_mark(axes, report)
    axes.axvline(plan.instances, color=FAINT, linestyle=":", label="planned")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("instances")
    name = report.objective.name
    seconds_axis(axes, values, f"{name} at the peak")
    return f"{name} against instances", "Settings whose queue grows without bound are left out."


def _unit(report: PlanReport) -> tuple[float, str]:
    """The seconds of the unit of time that suits all arrivals, and the name of the axis."""
    end = report.plan.day.seconds
    unit, name = (3600.0, "hours") if end > 2 * 3600 else (60.0, "minutes") if end > 300 else (1.0, "seconds")
    return unit, f"{name} from the first request"


def _hours(report: PlanReport) -> tuple[list[float], str]:
    """The middles of the bins, and the name of the axis."""
    unit, name = _unit(report)
    return [(k + 0.5) * report.plan.day.bin_s / unit for k in range(len(report.plan.day.rates))], name


def _utilisation(axes: Axes, report: PlanReport) -> tuple[str, str] | None:
    day, (at, name) = report.plan.day, _hours(report)
    axes.plot(at, [100 * share for share in day.busy], color=SERIES[0], label="time in which instances run batches")
    load = [100 * rate / report.plan.full_rate for rate in day.rates]
    axes.plot(at, load, color=SERIES[1], label="requests, of the rate of full batches")
    axes.set_ylim(0, 105)
    axes.set_xlabel(name)
    axes.set_ylabel("%")
    note = "All arrivals on the planned instances. Instances that are always busy still have room in their batches."
    return "Utilisation over time", note


def _day_tail(axes: Axes, report: PlanReport) -> tuple[str, str] | None:
    at, name = _hours(report)
    known = [(x, y) for x, y in zip(at, report.plan.day.p99_s, strict=True) if y is not None]
    if len(known) < 2:
        return None
    axes.plot(*zip(*known, strict=True), marker=".", color=SERIES[0], label="p99")
    if report.objective.name == "p99":
        _slo_mark(axes, report)
    axes.set_xlabel(name)
    seconds_axis(axes, [y for _, y in known], "p99 latency")
    return "p99 over time", "By time of arrival; times with fewer than 100 requests are left out."


def _scaling(axes: Axes, report: PlanReport) -> tuple[str, str] | None:
    scaling, (at, name) = report.plan.autoscaled, _hours(report)
    if scaling is None:
        return None
    changes, numbers = (np.array(column) for column in zip(*scaling.numbers, strict=True))
    looks = np.arange(len(at) * _LOOKS) * report.plan.day.bin_s / _LOOKS
    present = numbers[np.searchsorted(changes, looks, side="right") - 1].reshape(len(at), _LOOKS)
    axes.plot(at, present.mean(axis=1), color=SERIES[0], label="with autoscaling, mean")
    axes.plot(at, present.max(axis=1), color=SERIES[1], linewidth=0.8, label="with autoscaling, most")
    axes.axhline(report.plan.instances, color=FAINT, linestyle=":", label="fixed number")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(name)
    axes.set_ylabel("instances")
    start = seconds(scaling.start_s)
    return "Autoscaling over time", f"[models.NAME.autoscale] with the SLO; an instance takes {start} to start."


_PLOTS: Final = (_cost_slo, _tail_instances, _utilisation, _day_tail, _scaling)
