"""The commands `simulate`, `plan` and `tune`, and what all commands that measure share: flags, statuses and signals.

What the commands run is imported late: `penstock --help` imports this file.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from penstock.errors import INTERRUPTED, PenstockError
from penstock.values import quantity

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(_: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Parses a duration: `90`, `90s`, `10m`, `1.5h`."""
    if value is None:
        return None
    found = quantity(value, _UNITS)
    if not found:
        raise click.BadParameter(f"expected a time over 0 such as 30, 30s, 10m or 1h, found '{value}'", param=parameter)
    return found


def warmup(_: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """Parses a warm-up: None for auto, else seconds."""
    if value == "auto":
        return None
    found = quantity(value, {"": 1.0, "s": 1.0})
    if found is None or found >= 3600:
        raise click.BadParameter(f"expected auto or seconds from 0, found '{value}'", param=parameter)
    return found


def exit_code(work: Callable[[], int]) -> int:
    """The result of `work`, or the status of its error, printed in one line. SIGTERM and SIGHUP act like Ctrl-C."""
    as_interrupt = {number: lambda *_: signal.raise_signal(signal.SIGINT) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A shell starts background jobs with SIGINT ignored.
    handlers = {signal.SIGINT: signal.default_int_handler, **as_interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return work()
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        return error.exit_status
    except KeyboardInterrupt:
        click.echo("penstock: interrupted", err=True)
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the commands

_ARRIVALS = click.option(
    "--arrivals", required=True, metavar="FILE|KIND:RATE",
    help="A recording of `penstock serve --record`, or poisson:500, constant:500, gamma:2.5:500 requests per second.",
)  # fmt: skip
_RATE = click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Scale a FILE to this many requests per second."
)
_HANDOVER = click.option(
    "--handover", default="0.5ms", show_default=True, metavar="TIME", help="From queue to worker and back."
)
_JITTER = click.option(
    "--jitter", type=click.FloatRange(0, 1), default=0.05, show_default=True,
    help="Spread of a batch's time, as a share of it.",
)  # fmt: skip
_SIZES = click.option(
    "--sizes", default="any", show_default=True, metavar="any|auto|N,...",
    help="Sizes that batches are padded to: powers of two (auto), or 1,8,32.",
)  # fmt: skip
_LENGTHS = click.option(
    "--lengths", metavar="LEAST..MOST|FILE",
    help="Tokens of each row: log-normal, or drawn from a FILE with one number a line. --cost then counts tokens.",
)  # fmt: skip
_MAX_TOKENS = click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of a batch, with --lengths.")
_SEED = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals and jitter."
)


@click.command()
@_ARRIVALS
@click.option("--cost", required=True, metavar="A,B", help="A batch takes A + B x rows, for instance 5ms,0.2ms.")
@click.option(
    "--policies", default="adaptive,fixed:5ms,none", show_default=True, metavar="NAME[:DELAY],...",
    help="adaptive, fixed or none, with the longest hold.",
)  # fmt: skip
@click.option("--batch", metavar="RANGE", help="Largest batches: 1..64, or 8,16 [1..64, or the --sizes].")
@_SIZES
@_LENGTHS
@_MAX_TOKENS
@click.option("--instances", default="1", show_default=True, metavar="RANGE", help="How many: 1..8, or 1,2,4.")
@click.option("--slo", metavar="SLO", help='For instance "p99<=100ms".')
@_RATE
@click.option(
    "--seconds", "duration", callback=seconds, metavar="TIME", help="Length of the arrivals [30s; a FILE: all of it]."
)
@click.option("--model", default="", metavar="NAME", help="The model whose requests to replay, if a FILE has several.")
@_HANDOVER
@_JITTER
@_SEED
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def simulate(**flags: Any) -> None:
    """Replay arrivals through each batching policy and batch size, in virtual time.

    The scheduler is the one that serves; only time and the model are simulated. Nothing is rejected and nothing
    expires, so overload shows as latency. A server under load learns the cost of a batch: see
    penstock_cost_fixed_seconds and penstock_cost_row_seconds in its metrics.
    """
    from penstock.perf.simulate.replay import run_simulation

    sys.exit(exit_code(lambda: run_simulation(flags)))


@click.command()
@_ARRIVALS
@click.option(
    "--cost", required=True, metavar="A,B|N:TIME,...|DIR|URL",
    help="A batch takes A + B x rows (5ms,0.2ms); or times by size (1:5.2ms,32:11ms); or the results folder of tune or "
    "bench; or a server that has learned it.",
)  # fmt: skip
@click.option("--slo", required=True, metavar="SLO", help='The SLO to meet, such as "p99<=100ms".')
@click.option("--failures", type=click.IntRange(0), default=0, show_default=True, help="Instances that may be down.")
@click.option(
    "--price", type=click.FloatRange(0, min_open=True), help="Price of an instance for an hour: adds the cost."
)
@click.option("--memory", metavar="SIZE", help="Memory of one instance, such as 2GiB [from the cost, if it is known].")
@click.option("--batch", metavar="RANGE", help="Batch ceilings to try: 1..64, or 8,16 [up to the largest measured].")
@_SIZES
@_LENGTHS
@_MAX_TOKENS
@click.option(
    "--most", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Most instances, with the spare ones."
)
@click.option("--policy", default="adaptive", show_default=True, metavar="NAME[:DELAY]", help="As for simulate.")
@_RATE
@click.option(
    "--seconds", "duration", callback=seconds, metavar="TIME",
    help="Length of the arrivals [enough for a p99; a FILE: all of it].",
)  # fmt: skip
@click.option("--model", default="", metavar="NAME", help="The model, if a FILE or a URL has several.")
@_HANDOVER
@click.option("--start", default="10s", show_default=True, metavar="TIME", help="Start of an instance, to autoscale.")
@click.option("--spare", type=click.IntRange(0, 1000), default=0, show_default=True, help="autoscale.spare to try.")
@click.option(
    "--headroom", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="autoscale.headroom to try."
)
@_JITTER
@_SEED
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Folder for report.html with plots, report.md and plan.json.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON and nothing else.")
@click.option("--token-file", type=click.Path(), help="File with the token of a URL; or set PENSTOCK_TOKEN.")
def plan(**flags: Any) -> None:
    """Plan the capacity for given arrivals: instances, batch ceiling, scaling target, memory and price.

    The scheduler that serves runs in virtual time, with up to 1,000 instances. The fewest instances that meet the SLO
    at the busiest part of the arrivals are chosen, then all arrivals are replayed on them.

    Exit status: 0 planned; 1 no instance count meets the SLO; 2 wrong usage.
    """
    from penstock.perf.simulate.plan import run_plan

    sys.exit(exit_code(lambda: run_plan(flags)))


@click.command()
@click.argument("target")
@click.option("--slo", required=True, metavar="SLO", help='The SLO to meet, such as "p99<=100ms,error<=0.1%".')
@click.option(
    "--space", metavar="NAME=VALUES,...",
    help="The settings to try, such as batch=1..32,instances=1..8,precision=fp32,bf16,optimize=none,compile,"
    "sizes=any,auto,hold=auto,0,device=cpu,cuda,threads=1,2; also keys of the model such as batching.slo_s [batch and "
    "instances].",
)  # fmt: skip
@click.option("--gpu", is_flag=True, help="Add device=cpu,cuda to the space.")
@click.option(
    "--search",
    type=click.Choice(["auto", "grid", "climb", "halving", "tpe"]),
    default="auto",
    show_default=True,
    help="Search strategy; tpe is Optuna's.",
)
@click.option(
    "--effort", type=click.Choice(["quick", "normal", "thorough"]), default="normal", show_default=True,
    help="Length of the runs, and how often the best settings are repeated.",
)  # fmt: skip
@click.option("--budget", callback=seconds, metavar="TIME", help="Time limit for measuring: 90s, 10m, 1h [none].")
@click.option("--write", metavar="FILE", help="The penstock.toml to write the result to; its comments stay.")
@click.option("--data", metavar="FILE|DIR|random", help="Requests to send: files, lines of a .jsonl, random tensors.")
@click.option(
    "--accuracy-check", metavar="FILE|DIR",
    help="Inputs (.jsonl, .npz, a folder), with or without expected responses; the responses to them must not change "
    "[the requests sent].",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(0), default=0.01, show_default=True,
    help="Accepted difference of numbers in responses, relative to the larger of the number and 1.",
)  # fmt: skip
@click.option("--price", type=click.FloatRange(0, min_open=True), help="Price of an hour: adds cost per million.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Results and reports [tune-NAME].")
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Reuse the measurements of the same search in DIR."
)
@click.option("--model", metavar="NAME", help="The model to tune, if a configuration has several.")
@click.option(
    "--warmup", callback=warmup, default="auto", show_default=True, metavar="auto|S",
    help="Warm-up after each model load.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals, search and random data."
)
@click.option("--json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--token-file", type=click.Path(), help="The token that the configuration requires.")
@click.option("--option", "options", multiple=True, metavar="A=B", help="As for serve.")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="As for serve.")
def tune(target: str, **flags: Any) -> None:
    """Find the settings with the most throughput within an SLO.

    TARGET is a target of penstock serve: app.py:Model, model.onnx, the TOML of a pipeline or of a configuration.

    Exit status: 0 found; 1 nothing shown to be better than the app's own settings, or the app failed; 2 wrong usage;
    130 interrupted.
    """
    from penstock.perf.tune.job import run_job

    sys.exit(exit_code(lambda: run_job(target, flags)))
