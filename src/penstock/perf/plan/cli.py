"""`penstock plan`: the command line."""

import sys
from pathlib import Path
from typing import Any

import click

from penstock.perf.cli import exit_code, seconds


@click.command()
@click.option(
    "--arrivals", required=True, metavar="FILE|KIND:RATE",
    help="A recording of `penstock serve --record`, or poisson:500, constant:500, gamma:2.5:500 requests per second.",
)  # fmt: skip
@click.option(
    "--cost", required=True, metavar="A,B|N:TIME,...|DIR|URL",
    help="A batch takes A + B x rows (5ms,0.2ms); or times by size (1:5.2ms,32:11ms); or the results folder of tune or "
    "bench; or a server that has learned it.",
)  # fmt: skip
@click.option("--slo", required=True, metavar="SLO", help='The SLO to keep, such as "p99<=100ms".')
@click.option("--failures", type=click.IntRange(0), default=0, show_default=True, help="Instances that may be down.")
@click.option(
    "--price", type=click.FloatRange(0, min_open=True), help="Price of an instance for an hour: adds the cost."
)
@click.option("--memory", metavar="SIZE", help="Memory of one instance, such as 2GiB [from the cost, if it is known].")
@click.option("--batch", metavar="RANGE", help="Batch ceilings to try: 1..64, or 8,16 [up to the largest measured].")
@click.option(
    "--most", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Most instances, with the spare ones."
)
@click.option("--policy", default="adaptive", show_default=True, metavar="NAME[:DELAY]", help="As for simulate.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Scale a FILE to this many requests per second."
)
@click.option(
    "--seconds", "duration", callback=seconds, metavar="TIME",
    help="Length of the arrivals [enough for a p99; a FILE: all of it].",
)  # fmt: skip
@click.option("--model", default="", metavar="NAME", help="The model, if a FILE or a URL has several.")
@click.option("--handover", default="0.5ms", show_default=True, metavar="TIME", help="From queue to worker and back.")
@click.option("--start", default="10s", show_default=True, metavar="TIME", help="Start of an instance, to autoscale.")
@click.option(
    "--jitter", type=click.FloatRange(0, 1), default=0.05, show_default=True,
    help="Spread of a batch's time, as a share of it.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals and jitter.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Folder for report.html with plots, report.md and plan.json.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON and nothing else.")
@click.option("--token-file", type=click.Path(), help="File with the token of a URL; or set PENSTOCK_TOKEN.")
def plan(**flags: Any) -> None:
    """Plan the capacity for given arrivals: instances, batch ceiling, scaling target, memory and price.

    The scheduler that serves runs in virtual time, with up to 1,000 instances. The fewest instances that keep the SLO
    at the busiest part of the arrivals are chosen, then all arrivals are replayed on them.

    Exit status: 0 planned; 1 no number of instances keeps the SLO; 2 wrong usage.
    """
    from penstock.perf.plan.job import run_plan  # `penstock --help` imports this file only

    sys.exit(exit_code(lambda: run_plan(flags)))
