"""The report of a capacity plan: the numbers first, then the plots and every simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.document import (
    PAGE,
    REPORT,
    UNKNOWN,
    Block,
    BulletList,
    Heading,
    Paragraph,
    Report,
    TableBlock,
    make_report,
    markdown,
    number,
    page,
    percent,
    reproduce,
    seconds,
)
from penstock.perf.bench.measurement import Slo, parse_slo
from penstock.perf.bench.plots import BAD, FAINT, SERIES, draw_each, seconds_axis
from penstock.perf.bench.results import write_whole, writing
from penstock.perf.plan.costs import memory_text
from penstock.perf.plan.planner import CapacityPlan, objective_of, tail
from penstock.perf.simulate.replay import ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAN: Final = "plan.json"
_HIGHEST: Final = 4.0  # times the SLO: slower settings are left out of the plot of costs
_LOOKS: Final = 50  # at the number of instances in a bin
_FAR: Final = 4.0  # times the planned instances: more are left out of the plots


class PlanReport(Struct, frozen=True):
    """A plan with the texts that its command knows."""

    plan: CapacityPlan
    arrivals: str
    cost: str
    command: str

    @property
    def slo(self) -> Slo:
        return parse_slo(self.plan.slo)


def publish(folder: Path, report: PlanReport) -> Path:
    """Writes plan.json, report.md and report.html; returns the path of the page. Raises NotWritten.

    Without matplotlib the page says why it has no plots.
    """
    composed = compose(report)
    try:
        plots, without = draw_each(_PLOTS, report), ""
    except ConfigError as error:
        plots, without = [], error.message
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PLAN, msgspec.json.format(msgspec.json.encode(report.plan)) + b"\n")
        write_whole(folder / REPORT, markdown(composed).encode())
        write_whole(folder / PAGE, page(composed, plots, without).encode())
    return folder / PAGE


def compose(report: PlanReport) -> Report:
    """The report without its plots."""
    plan = report.plan
    first: list[Block] = [verdict(plan), TableBlock(["", ""], [[name, text] for name, text in facts(report)])]
    if plan.notes:
        first.append(BulletList(plan.notes))
    first += [reproduce(report.command)]
    header = ["instances", "batch", "SLO", "answered/s", "p50", "p99", "p99.9", "mean batch", "busy", "wait"]
    rest: list[Block] = [Heading("Every simulation of the peak"), TableBlock(header, list(map(_row, plan.tried)))]
    return make_report("penstock plan", first, rest)


def verdict(plan: CapacityPlan) -> Paragraph:
    """The result in a sentence."""
    one, most = plan.chosen, f"{count(plan.instances)} with batches of up to {plan.batch}"
    value = f"{objective_of(parse_slo(plan.slo)).name} {seconds(_value(one, plan))}"
    spare = f", also with {plan.failures} down" if plan.failures else ""
    if not plan.met:
        state = value if one.keeps_up else f"{number(one.throughput)} responses/s at {number(one.offered)} requests/s"
        none = f"No instance count up to {plan.most:,} meets {plan.slo}{spare}"
        return Paragraph(f"{none}. The best reachable is {state}: {most}.", "bad")
    return Paragraph(
        f"{most}: {value} at the peak of {number(one.offered)} requests/s meets {plan.slo}{spare}.", "good"
    )


def count(instances: int) -> str:
    """The number with its noun."""
    return f"{instances:,} instance{'s' * (instances != 1)}"


def facts(report: PlanReport) -> list[tuple[str, str]]:
    """The plan as (name, text)."""
    plan, day = report.plan, report.plan.day
    found = [("arrivals", report.arrivals), ("cost of a batch", report.cost)]
    found += [("instances", f"{plan.instances:,}"), ("batching.max_batch_size", f"{plan.batch}")]
    if plan.limit is not None:
        room = percent(plan.limit.rate / plan.chosen.offered - 1)
        down = f" with {plan.failures} down" if plan.failures else ""
        found.append(("head-room", f"{number(plan.limit.rate)}/s within the SLO{down}, {room} above the peak"))
    found += [("with instances down", _degraded(plan)), ("full batches", f"{number(plan.full_rate)} requests/s")]
    if plan.limit is not None:
        rate, busy, wait = number(plan.limit.per_instance), percent(plan.limit.busy), seconds(plan.limit.wait_s)
        found.append(("scale up at", f"{rate} requests/s per instance: {busy} busy, a mean wait of {wait}"))
    found.append(("memory", memory_text(plan.cost.memory_bytes)))
    if plan.cost.hour is not None:
        per = number(plan.cost.million)
        found.append(("price", f"{number(plan.cost.hour)} per hour, {per} per million requests"))
    if (scaling := plan.autoscaled) is not None:
        hours, change = scaling.instance_s / 3600, percent(scaling.instance_s / scaling.fixed_s - 1, signed=True)
        texts = (f"{scaling.fewest} to {scaling.most}", f"{number(hours)} instance-hours ({change})")
        found.append(("autoscaled", f"{', '.join(texts)}, {percent(scaling.late)} of the requests over the SLO"))
    p99, share = seconds(day.latency.p99_s), sum(day.busy) / len(day.busy)
    found.append(("over all arrivals", f"{percent(share)} busy, p99 {p99}, {day.requests:,} requests"))
    return found


def _degraded(plan: CapacityPlan) -> str:
    """What happens while instances are down, and how many survive one failure."""
    down = max(1, plan.failures)
    if plan.degraded is None:
        return f"{down} down: nothing is left; {count(plan.needed + 1)} meet the SLO with one down"
    value = f"{objective_of(parse_slo(plan.slo)).name} {seconds(_value(plan.degraded, plan))}"
    state = value if plan.degraded.keeps_up else "the queue grows without bound"
    if plan.degraded.met:
        return f"{down} down: {state}, the SLO is met"
    advice = f"; {count(plan.needed + down)} meet it" if plan.met else ""
    return f"{down} down: {state}, the SLO is missed{advice}"


def _value(result: ReplayResult, plan: CapacityPlan) -> float | None:
    found = tail(result, parse_slo(plan.slo))
    return found if found < float("inf") else None


def _row(one: ReplayResult) -> list[str]:
    state = {True: "met", False: "missed", None: UNKNOWN}[one.met] if one.keeps_up else "does not keep up"
    tails = (one.latency.p50_s, one.latency.p99_s, one.latency.p999_s)
    return [
        f"{one.instances:,}", f"{one.batch}", state, number(one.throughput), *map(seconds, tails),
        f"{one.mean_batch:.1f}", percent(one.busy), seconds(one.wait_s),
    ]  # fmt: skip


# ---- the plots


def _known(report: PlanReport, results: Sequence[ReplayResult]) -> list[tuple[int, float]]:
    """(instances, value of the SLO's latency) of the results near the plan that keep up."""
    near = [one for one in results if one.keeps_up and one.instances <= _FAR * report.plan.instances]
    return [(one.instances, value) for one in near if (value := tail(one, report.slo)) < float("inf")]


def _slo_mark(axes: Axes, report: PlanReport, *, upright: bool = False) -> None:
    objective = objective_of(report.slo)
    draw = axes.axvline if upright else axes.axhline
    draw(objective.limit, color=BAD, linestyle="--", linewidth=1.2, label=f"SLO: {objective.text}")


def _cost_slo(axes: Axes, report: PlanReport) -> tuple[str, str] | None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    plan, objective = report.plan, objective_of(report.slo)
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
    name = objective_of(report.slo).name
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
    if objective_of(report.slo).name == "p99":
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
