"""`penstock bench`: reads flags, sends load to a model, and tells what was measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.cli.measuring import FAILED, INTERRUPTED, USAGE, exit_code, run_async, seconds, warmup
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.perf.bench.modes import Mode, Plan
    from penstock.perf.bench.results import Origin
    from penstock.perf.bench.slo import Slo
    from penstock.perf.bench.target import Target

N = TypeVar("N", int, float)

SECONDS: Final = 10.0


def _numbers(kind: Callable[[str], N]) -> Callable[[click.Context, click.Parameter, str | None], tuple[N, ...] | None]:
    """Reads a flag of numbers over 0 with commas between."""

    def read(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[N, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(kind(part) for part in value.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < number < float("inf") for number in found):
            what = "whole numbers" if kind is int else "numbers"
            raise click.BadParameter(f"expected {what} over 0 such as 1,8,64, found '{value}'", param=parameter)
        return found

    return read


def make_plan(flags: dict[str, Any]) -> Plan:
    """The loads that the flags describe. Raises ConfigError for flags that do not go together."""
    from penstock.perf.bench.arrivals import parse_arrival
    from penstock.perf.bench.modes import Plan

    mode: Mode = flags["mode"] or ("open" if flags["rate"] or flags["arrival"] else "closed")
    arrival = parse_arrival(flags["arrival"] or "poisson")
    trace = arrival.kind == "trace"
    for name, modes in (
        ("rate", ("open", "ramp")),
        ("arrival", ("open", "ramp")),
        ("concurrency", ("closed", "saturate")),
    ):
        if flags[name] and mode not in modes:
            raise ConfigError(f"--{name} is for --mode {' and '.join(modes)}, found --mode {mode}")
    if mode == "open" and not flags["rate"] and not trace:
        raise ConfigError(
            "--mode open: say how many requests come a second with --rate, or replay --arrival trace:FILE"
        )
    if mode == "ramp" and trace:
        raise ConfigError("--mode ramp: a trace does not rise; expected poisson, constant or gamma:CV")
    if mode == "ramp" and len(flags["rate"] or ()) > 2:
        raise ConfigError("--mode ramp: --rate is FIRST or FIRST,LAST")
    if mode in ("ramp", "saturate") and flags["requests"]:
        raise ConfigError(f"--mode {mode}: steps last by --duration; --requests is for closed and open")
    if flags["requests"] and flags["duration"] and not trace:
        raise ConfigError("--requests and --duration: a run ends by one of them; leave the other out")
    given: dict[str, Any] = {"concurrency": flags["concurrency"]} if flags["concurrency"] else {}
    if mode == "saturate":
        given.setdefault("concurrency", (1,))
    return Plan(
        mode=mode,
        rates=flags["rate"] or (),
        arrival=flags["arrival"] or "poisson",
        seconds=flags["duration"] or (0.0 if trace else SECONDS),
        requests=flags["requests"] or 0,
        seed=flags["seed"],
        connections=flags["connections"],
        repeat=flags["repeat"],
        **given,
    )


def _bench(text: str, flags: dict[str, Any]) -> int:
    """The exit status. Raises PenstockError."""
    from penstock.cli.tokens import read_token
    from penstock.client.endpoint import tls_context
    from penstock.perf.bench.slo import Slo, parse_slo
    from penstock.perf.bench.target import open_target

    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    plan = make_plan(flags)
    if plan.mode == "ramp" and any(part.name == "throughput" for part in slo.parts):
        raise ConfigError("--mode ramp: throughput is what is looked for; leave it out of --slo")
    patience_s = flags["timeout"] or math.inf
    if any(part.is_latency and part.limit >= patience_s for part in slo.parts):
        raise ConfigError(f"--timeout {patience_s:g}s: who is given up so soon cannot break {slo.text}; raise it")
    with open_target(
        text,
        protocol=flags["protocol"],
        model=flags["model"],
        token=read_token(flags["token_file"]),
        tls=tls_context(flags["ca"]) if flags["ca"] else None,
        metrics=flags["metrics"],
        options=flags["options"],
        sets=flags["sets"],
    ) as target:
        return _measured(target, plan, slo, flags)


def _measured(target: Target, plan: Plan, slo: Slo, flags: dict[str, Any]) -> int:
    """Sends the load, tells what it saw, whatever ends it, and gives the exit status."""
    from penstock.cli.bench_session import Session
    from penstock.perf.bench.payload import payloads
    from penstock.perf.bench.protocol import request_of
    from penstock.perf.bench.results import Results

    bodies = payloads(flags["data"], target, flags["seed"])
    requests = [request_of(target, body) for body in bodies]
    session = Session(
        plan=plan,
        slo=slo,
        origin=_origin(target, slo, flags["seed"]),
        warm_s=flags["warmup"],
        timeout_s=flags["timeout"],
        as_json=flags["json"],
    )
    if flags["output"] is not None:
        session.results = Results.open(flags["output"], session.origin)
    if not flags["json"]:
        size = sum(len(body.body) for body in bodies) / len(bodies)
        several = f"{len(bodies)} requests in turn, on average" if len(bodies) > 1 else "one request of"
        click.echo(f"{target.url}: {several} {size:,.0f} bytes", err=True)
    code = FAILED
    try:
        run_async(session.send(target, requests))
        code = session.code()
    except KeyboardInterrupt:
        click.echo("penstock: interrupted; this is what there is", err=True)
        code = INTERRUPTED
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        code = USAGE if isinstance(error, ConfigError) else FAILED
    finally:
        session.tell()
        session.close()
    return code


def _origin(target: Target, slo: Slo, seed: int) -> Origin:
    from penstock.perf.bench.machine import machine, versions
    from penstock.perf.bench.redact import redacted, typed
    from penstock.perf.bench.results import Origin

    return Origin(
        command="bench",
        line=typed(sys.argv[1:]),
        target=redacted(target.text),
        slo=slo.text,
        seed=seed,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(("torch", "onnxruntime", "hdrhistogram")),
    )


@click.command()
@click.argument("target")
@click.option(
    "--mode", type=click.Choice(["closed", "open", "ramp", "saturate"]),
    help="closed: clients that wait for their answers. open: so many requests a second, whatever the server does. "
    "ramp: a rate that rises until the SLO breaks. saturate: clients that double [open with --rate, else closed].",
)  # fmt: skip
@click.option("--concurrency", callback=_numbers(int), metavar="N,...", help="Clients of a closed loop [1,8,64].")
@click.option(
    "--rate", callback=_numbers(float), metavar="N,...", help="Requests a second; of a ramp, the first and the last."
)
@click.option("--arrival", metavar="KIND", help="poisson, constant, gamma:CV or trace:FILE [poisson].")
@click.option("--duration", callback=seconds, metavar="TIME", help="Of each run: 30, 30s, 10m [10s; a trace whole].")
@click.option("--requests", type=click.IntRange(1), help="So many in each run, instead of --duration.")
@click.option(
    "--warmup", callback=warmup, default="auto", show_default=True, metavar="auto|S",
    help="Before each run: until the load gets no faster, or so many seconds.",
)  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="All of it so often.")
@click.option("--data", metavar="FILE|DIR|random", help="What is sent: files, lines of a .jsonl, tensors of chance.")
@click.option(
    "--protocol", type=click.Choice(["auto", "native", "torchserve", "oip"]), default="auto", show_default=True
)
@click.option("--model", metavar="NAME", help="Which of the server's models.")
@click.option("--slo", metavar="SLO", help='For instance "p99<=100ms,error<=0.1%".')
@click.option("--json", is_flag=True, help="Print JSON, and nothing else.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Keep the results and a report there.")
@click.option("--connections", type=click.IntRange(1, 8000), default=256, show_default=True, help="Of an open loop.")
@click.option(
    "--timeout", callback=seconds, metavar="TIME", help="Patience with a request [60s; open 10s after the last]."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of arrivals and random data.")
@click.option("--metrics", metavar="URL", help="The server's metrics listener, where it is not found.")
@click.option("--token-file", type=click.Path(), help="The server's token; or the variable PENSTOCK_TOKEN.")
@click.option("--ca", type=click.Path(), help="PEM file of the authority that signed the server's certificate.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="As of serve, for what is served.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="As of serve, for what is served.")
def bench(target: str, **flags: Any) -> None:
    """Send load to a model and measure it.

    TARGET is the URL of a server that runs, something to serve for the time (app.py:Model, model.onnx, penstock.toml,
    model.mar), or the name of a model at http://127.0.0.1:8080.

    Exit status: 0 measured, and the SLO kept; 1 missed, INVALID, or the target failed; 2 wrong usage; 130 interrupted.
    """
    sys.exit(exit_code(lambda: _bench(target, flags)))
