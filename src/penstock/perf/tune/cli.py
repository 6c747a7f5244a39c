"""`penstock tune`: the command line."""

import sys
from pathlib import Path
from typing import Any, Final

import click

from penstock.perf.cli import exit_code, seconds, warmup

SEARCHES: Final = ("auto", "grid", "climb", "halving", "tpe")


@click.command()
@click.argument("target")
@click.option("--slo", required=True, metavar="SLO", help='The SLO to keep, such as "p99<=100ms,error<=0.1%".')
@click.option(
    "--space", metavar="NAME=VALUES,...",
    help="The settings to try, such as batch=1..32,instances=1..8,precision=fp32,bf16,optimize=none,compile,"
    "hold=auto,0,device=cpu,cuda,threads=1,2; also keys of the model such as batching.slo_s [batch and instances].",
)  # fmt: skip
@click.option("--gpu", is_flag=True, help="Add device=cpu,cuda to the space.")
@click.option(
    "--search", type=click.Choice(SEARCHES), default="auto", show_default=True, help="Search strategy; tpe is Optuna's."
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
    help="Inputs (.jsonl, .npz, a folder), with or without expected answers, whose answers must not change "
    "[the requests sent].",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(0), default=0.01, show_default=True,
    help="Accepted difference of numbers in answers, relative to the larger of the number and 1.",
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
    from penstock.perf.tune.job import run_job  # `penstock --help` imports this file only

    sys.exit(exit_code(lambda: run_job(target, flags)))
