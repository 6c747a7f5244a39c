"""Does `penstock gate` fail when a server became 10 % slower, and only then?

A baseline, the same server again, and a server whose model does 10 % more work run as three processes all the time. A
trial runs each of them: repeats of two loads, 8 clients and an open loop at 60 % of their rate. The three take turns
with every repeat, so drift affects all of them. The runs of each trial are compared with its baseline as the command
does it. A round has four trials; a repeat of a load lasts a second.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import harness
import uvloop
from report import number

from penstock.perf.bench.compare import METRICS, REGRESSION, compare, decide
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.results import Origin
from penstock.perf.bench.run import measure
from penstock.perf.bench.target import Target, open_target
from penstock.perf.bench.workload import Payload, check_of, request_of

TRIALS_A_ROUND = 4
REPEATS = 10
ATTEMPTS = 3
CLIENTS = 8
OPEN_SHARE = 0.6
SIDES = {"baseline": "steady", "the same": "steady", "a tenth slower": "slowed"}
ORIGIN = Origin(command="bench")


def run(target: Target, load: Load, repeat: int, warm_s: float = 0.1) -> Measurement:
    """One measurement, as `penstock bench` makes it; an INVALID one is repeated."""
    request = request_of(target, Payload(body=b"{}", content_type="application/json", name=""))
    for _ in range(ATTEMPTS):
        work = measure(target, [request], load, warm_s=warm_s, repeat=repeat, check=check_of(target))
        with contextlib.closing(uvloop.new_event_loop()) as loop:
            found = loop.run_until_complete(work)
        if not found.invalid:
            break
    return found


def trial(number_: int, targets: dict[str, Target], loads: Sequence[Load]) -> dict[str, Any]:
    """The verdicts of the gate for both runs against the baseline."""
    runs: dict[str, list[Measurement]] = {name: [] for name in targets}
    names = list(targets)
    for repeat in range(REPEATS):
        at = repeat % len(names)
        for load in loads:
            for name in names[at:] + names[:at]:
                runs[name].append(run(targets[name], load, repeat))
    found: dict[str, Any] = {"trial": number_, "runs": {}}
    for name in names[1:]:
        comparison = compare((ORIGIN, runs[names[0]]), (ORIGIN, runs[name]))
        changes = {f"{c.load}, {c.metric}": (c.change, c.low, c.high, c.judged) for c in comparison.changes}
        found["runs"][name] = {"code": decide(comparison).code, "changes": changes}
    return found


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    trials = TRIALS_A_ROUND * options.rounds
    method = f"{trials} trials of {REPEATS} repeats of {options.seconds} s a load."
    report = harness.Report(__file__, __doc__, options, {}, method=method)
    with contextlib.ExitStack() as stack:
        model = f"{harness.HERE / 'models.py'}:"
        targets = {name: stack.enter_context(open_target(model + function)) for name, function in SIDES.items()}
        closed = Load(mode="closed", concurrency=CLIENTS, seconds=options.seconds)
        most = [run(target, closed, 0, warm_s=2).throughput for target in targets.values()]
        rate = round(OPEN_SHARE * min(most), -1)
        loads = [closed, Load(mode="open", rate=rate, seconds=options.seconds)]
        results = []
        for n in range(trials):
            results.append(trial(n, targets, loads))
            told = {name: side["code"] for name, side in results[-1]["runs"].items()}
            print(f"trial {n}: {told}", flush=True)
    for name in list(SIDES)[1:]:
        sides = [result["runs"][name] for result in results]
        rows = []
        for load in loads:
            for metric in METRICS:
                all_of = [side["changes"][f"{load.label}, {metric.name}"] for side in sides]
                changes = sorted(change for change, *_ in all_of if change is not None)
                middle = number(100 * changes[len(changes) // 2]) if changes else "-"
                ends = f"{number(100 * changes[0])}..{number(100 * changes[-1])}" if changes else ""
                worse = sum(judged == "worse" for *_, judged in all_of)
                rows.append([load.label, metric.name, f"{middle} ({ends})", str(worse)])
        report.table(f"{name}: change in %", ["load", "metric", "median (least..most)", "worse"], rows)
        alarms = sum(side["code"] == REGRESSION for side in sides)
        bounds: dict[str, Any] = {"most": trials // 20} if name == "the same" else {"least": trials - trials // 20}
        report.target(f"{name}: alarms in {trials}", [alarms], **bounds)
    report.save()


if __name__ == "__main__":
    main()
