"""`penstock simulate`: the command line."""

import sys
from typing import Any

import click

from penstock.perf.cli import exit_code, seconds


@click.command()
@click.option(
    "--arrivals", required=True, metavar="FILE|KIND:RATE",
    help="A recording of `penstock serve --record`, or poisson:500, constant:500, gamma:2.5:500 requests per second.",
)  # fmt: skip
@click.option("--cost", required=True, metavar="A,B", help="A batch takes A + B x rows, for instance 5ms,0.2ms.")
@click.option(
    "--policies", default="adaptive,fixed:5ms,none", show_default=True, metavar="NAME[:DELAY],...",
    help="adaptive, fixed or none, with the longest hold.",
)  # fmt: skip
@click.option("--batch", default="1..64", show_default=True, metavar="RANGE", help="Largest batches: 1..64, or 8,16.")
@click.option("--instances", default="1", show_default=True, metavar="RANGE", help="How many: 1..8, or 1,2,4.")
@click.option("--slo", metavar="SLO", help='For instance "p99<=100ms".')
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Scale a FILE to this many requests per second."
)
@click.option(
    "--seconds", "duration", callback=seconds, metavar="TIME", help="Length of the arrivals [30s; a FILE: all of it]."
)
@click.option("--model", default="", metavar="NAME", help="The model whose requests to replay, if a FILE has several.")
@click.option("--handover", default="0.5ms", show_default=True, metavar="TIME", help="From queue to worker and back.")
@click.option(
    "--jitter", type=click.FloatRange(0, 1), default=0.05, show_default=True,
    help="Spread of a batch's time, as a share of it.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals and jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def simulate(**flags: Any) -> None:
    """Replay arrivals through each batching policy and batch size, in virtual time.

    The scheduler is the one that serves; only time and the model are simulated. Nothing is rejected and nothing
    expires, so overload shows as latency. A server under load learns the cost of a batch: see
    penstock_cost_fixed_seconds and penstock_cost_row_seconds in its metrics.
    """
    from penstock.perf.simulate.replay import run_simulation  # `penstock --help` imports this file only

    sys.exit(exit_code(lambda: run_simulation(flags)))
