"""The commands `bench`, `benchmark-suite`, `compare` and `gate`."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.errors import FAILED, INTERRUPTED, USAGE, ConfigError, PenstockError
from penstock.perf.cli import exit_code, seconds, warmup
from penstock.values import quantity

if TYPE_CHECKING:
    from penstock.perf.bench.compare import Comparison
    from penstock.perf.bench.measurement import Slo
    from penstock.perf.bench.session import LoadPlan, Mode
    from penstock.perf.bench.suite import SuiteSession
    from penstock.perf.bench.target import Target

N = TypeVar("N", int, float)

SECONDS: Final = 10.0
FOLDER: Final = click.Path(path_type=Path)


# ---- bench


def _numbers(kind: Callable[[str], N]) -> Callable[[click.Context, click.Parameter, str | None], tuple[N, ...] | None]:
    """A parser of comma-separated numbers over 0."""

    def read(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[N, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(kind(part) for part in value.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < number < math.inf for number in found):
            what = "whole numbers" if kind is int else "numbers"
            raise click.BadParameter(f"expected {what} over 0 such as 1,8,64, found '{value}'", param=parameter)
        return found

    return read


@click.command()
@click.argument("target")
@click.option(
    "--mode", type=click.Choice(["closed", "open", "ramp", "saturate"]),
    help="closed: clients that wait for their responses. open: a rate of requests, whatever the server does. "
    "ramp: a rate that rises until the SLO breaks. saturate: clients that double [open with --rate, else closed].",
)  # fmt: skip
@click.option("--concurrency", callback=_numbers(int), metavar="N,...", help="Clients of a closed loop [1,8,64].")
@click.option("--rate", callback=_numbers(float), metavar="N,...", help="Requests per second; for a ramp FIRST,LAST.")
@click.option("--arrival", metavar="KIND", help="poisson, constant, gamma:CV or trace:FILE [poisson].")
@click.option("--duration", callback=seconds, metavar="TIME", help="Time per run: 30, 30s, 10m [10s; a whole trace].")
@click.option("--requests", type=click.IntRange(1), help="Requests per run, instead of --duration.")
@click.option(
    "--warmup", callback=warmup, default="auto", show_default=True, metavar="auto|S",
    help="Warm-up before each run: until the load gets no faster, or seconds.",
)  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Repeats of all loads.")
@click.option("--data", metavar="FILE|DIR|random", help="What to send: files, lines of a .jsonl, random tensors.")
@click.option(
    "--expect", metavar="FILE|PATH=VALUE",
    help="What responses must be: a file (.jsonl: a line per request), or a value in their JSON, such as label=cat.",
)  # fmt: skip
@click.option(
    "--protocol", type=click.Choice(["auto", "native", "torchserve", "oip"]), default="auto", show_default=True
)
@click.option("--model", metavar="NAME", help="One of the server's models.")
@click.option("--slo", metavar="SLO", help='For instance "p99<=100ms,error<=0.1%".')
@click.option("--json", is_flag=True, help="Print JSON only.")
@click.option("--output", type=FOLDER, metavar="DIR", help="Folder for results and a report.")
@click.option("--connections", type=click.IntRange(1, 8000), default=256, show_default=True, help="Of an open loop.")
@click.option(
    "--timeout", callback=seconds, metavar="TIME", help="Timeout of a request [60s; open loop: 10s after the last]."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of arrivals and random data.")
@click.option("--metrics", metavar="URL", help="The server's metrics listener, if it is not found.")
@click.option("--token-file", type=click.Path(), help="File with the server's token; or set PENSTOCK_TOKEN.")
@click.option("--ca", type=click.Path(), help="PEM file of the authority that signed the server's certificate.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Like serve, for a served TARGET.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Like serve, for a served TARGET.")
def bench(target: str, **flags: Any) -> None:
    """Send load to a model and measure it.

    TARGET is the URL of a running server, something to serve during the run (app.py:Model, model.onnx, penstock.toml,
    model.mar), or the name of a model at http://127.0.0.1:8080.

    Exit status: 0 measured, SLO met; 1 SLO missed, INVALID, a response differs from --expect, or the target failed;
    2 wrong usage; 130 interrupted.
    """
    sys.exit(exit_code(lambda: _bench(target, flags)))


def make_plan(flags: dict[str, Any]) -> LoadPlan:
    """The loads that the flags describe. Raises ConfigError for contradictory flags."""
    from penstock.perf.bench.session import LoadPlan
    from penstock.perf.bench.workload import parse_arrival

    mode: Mode = flags["mode"] or ("open" if flags["rate"] or flags["arrival"] else "closed")
    trace = parse_arrival(flags["arrival"] or "poisson").kind == "trace"
    modes = {"rate": ("open", "ramp"), "arrival": ("open", "ramp"), "concurrency": ("closed", "saturate")}
    for name, allowed in modes.items():
        if flags[name] and mode not in allowed:
            raise ConfigError(f"--{name} is for --mode {' and '.join(allowed)}, found --mode {mode}")
    if mode == "open" and not flags["rate"] and not trace:
        raise ConfigError("--mode open: give the requests per second with --rate, or replay --arrival trace:FILE")
    if mode == "ramp" and trace:
        raise ConfigError("--mode ramp: a trace does not rise; expected poisson, constant or gamma:CV")
    if mode == "ramp" and len(flags["rate"] or ()) > 2:
        raise ConfigError("--mode ramp: --rate is FIRST or FIRST,LAST")
    if mode in ("ramp", "saturate") and flags["requests"]:
        raise ConfigError(f"--mode {mode}: --duration limits each step; --requests is for closed and open")
    if flags["requests"] and flags["duration"] and not trace:
        raise ConfigError("--requests and --duration: a run ends by one of them; leave the other out")
    return LoadPlan(
        mode=mode,
        concurrency=flags["concurrency"] or ((1,) if mode == "saturate" else (1, 8, 64)),
        rates=flags["rate"] or (),
        arrival=flags["arrival"] or "poisson",
        seconds=flags["duration"] or (0.0 if trace else SECONDS),
        requests=flags["requests"] or 0,
        seed=flags["seed"],
        connections=flags["connections"],
        repeat=flags["repeat"],
    )


def _bench(text: str, flags: dict[str, Any]) -> int:
    """The exit status. Raises PenstockError."""
    from penstock.client.endpoint import read_token, tls_context
    from penstock.perf.bench.measurement import Slo, parse_slo
    from penstock.perf.bench.target import open_target

    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    plan = make_plan(flags)
    if plan.mode == "ramp" and any(objective.name == "throughput" for objective in slo.objectives):
        raise ConfigError("--mode ramp searches for the throughput; leave it out of --slo")
    timeout_s = flags["timeout"] or math.inf
    if any(objective.is_latency and objective.limit >= timeout_s for objective in slo.objectives):
        raise ConfigError(f"--timeout {timeout_s:g}s: requests dropped so early cannot break {slo.text}; raise it")
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
        return _measure(target, plan, slo, flags)


def _measure(target: Target, plan: LoadPlan, slo: Slo, flags: dict[str, Any]) -> int:
    """Sends the load, prints the results however it ends, and returns the exit status."""
    from penstock.perf.bench.expectation import Expectation
    from penstock.perf.bench.load_run import run_async
    from penstock.perf.bench.results import Origin, Results, redacted
    from penstock.perf.bench.session import BenchSession
    from penstock.perf.bench.workload import payloads, request_of

    bodies = payloads(flags["data"], target, flags["seed"])
    requests = [request_of(target, body) for body in bodies]
    libraries = ("torch", "onnxruntime", "hdrhistogram")
    session = BenchSession(
        plan=plan,
        slo=slo,
        origin=Origin.of_process("bench", redacted(target.text), slo.text, flags["seed"], libraries),
        warm_s=flags["warmup"],
        timeout_s=flags["timeout"],
        as_json=flags["json"],
        expect=None if flags["expect"] is None else Expectation(flags["expect"], len(requests)),
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
        click.echo("penstock: interrupted; partial results follow", err=True)
        code = INTERRUPTED
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        code = USAGE if isinstance(error, ConfigError) else FAILED
    finally:
        session.print()
        session.close()
    return code


# ---- benchmark-suite


@click.command("benchmark-suite")
@click.argument("files", nargs=-1, metavar="MODELS.yaml...")
@click.option("--input", "inputs", multiple=True, metavar="FILE", help="MODELS.yaml, like in TorchServe's suite.")
@click.option("--output", type=FOLDER, metavar="DIR", help="Folder of the results [benchmark-suite-TIME].")
@click.option("--resume", is_flag=True, help="Continue in DIR and skip finished measurements.")
@click.option("--data", metavar="FILE|DIR|JSONL|random", help="What to send, instead of the input in the files.")
@click.option("--requests", type=click.IntRange(1), help="Requests per run, instead of the number in the files.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Repeats; medians are reported.")
@click.option("--warmup", default="auto", show_default=True, callback=warmup, help="Seconds before each run, or auto.")
@click.option("--slo", metavar="SLO", help="Limits for the recommendation, for instance p99<=100ms,error<=0.1%.")
@click.option(
    "--model-store", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the archives."
)
@click.option("--skip-missing-hardware", is_flag=True, help="Skip runs that need more GPUs than there are.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random payloads.")
@click.option("--skip", hidden=True, help="Accepted for TorchServe's suite: nothing is installed anyway.")
@click.pass_context
def benchmark_suite(ctx: click.Context, /, files: tuple[str, ...], inputs: tuple[str, ...], **flags: Any) -> None:
    """Run the models of TorchServe's benchmark YAML, or of its template, in all their configurations.

    Exit status: 0 measured; 1 a run is INVALID; 2 wrong usage, or a mistake in a file; 130 interrupted.
    """
    flags["download"] = (ctx.obj or {}).get("download_archive")
    sys.exit(exit_code(lambda: _suite([Path(name) for name in (*files, *inputs)], flags)))


def _suite(paths: Sequence[Path], flags: dict[str, Any]) -> int:
    """The exit status: 0 if every run is valid. Raises PenstockError."""
    from penstock.perf.bench.measurement import Slo, parse_slo
    from penstock.perf.bench.results import RUN, Origin, Results
    from penstock.perf.bench.suite import SuiteOptions, SuiteSession, digest, prepare
    from penstock.perf.bench.suite_yaml import read_suite

    if not paths:
        raise ConfigError("no file of models is given; expected for instance penstock benchmark-suite models.yaml")
    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    names = ("repeat", "seed", "model_store", "download", "data", "requests", "skip_missing_hardware")
    options = SuiteOptions(slo=slo, warm_s=flags["warmup"], **{name: flags[name] for name in names})
    folder = flags["output"]
    if flags["resume"] and folder is None:
        raise ConfigError("--resume needs the folder to continue in; give --output DIR")
    if folder is not None and not flags["resume"] and (folder / RUN).exists():
        raise ConfigError(f"{folder} already holds a run; continue it with --resume, or name another folder")
    folder = folder or Path(f"benchmark-suite-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    cases, notes = read_suite(paths)
    with tempfile.TemporaryDirectory(prefix="penstock-") as downloads:
        jobs, left_out = prepare(cases, options, Path(downloads))
        notes = [*notes, *left_out]
        for note in notes:
            click.echo(f"penstock: {note}", err=True)
        target = f"{', '.join(map(str, paths))} ({digest(jobs)})"
        origin = Origin.of_process("benchmark-suite", target, slo.text, options.seed, ("torch", "onnxruntime", "numpy"))
        with Results.open(folder, origin, resume=flags["resume"]) as results:
            session = SuiteSession(jobs, options, results)
            return _run_suite(session, notes)


def _run_suite(session: SuiteSession, notes: Sequence[str]) -> int:
    """Runs the suite, writes its report however it ends, and returns the exit status. Raises PenstockError."""
    interrupted = False
    try:
        session.run()
    except KeyboardInterrupt:
        click.echo("penstock: interrupted; partial results follow", err=True)
        interrupted = True
    except PenstockError:
        with suppress(PenstockError):
            session.report(notes)
        raise
    valid = session.report(notes)
    return INTERRUPTED if interrupted else 0 if valid else FAILED


# ---- compare and gate


def _share(_: click.Context, parameter: click.Parameter, value: str) -> float:
    """Parses a share: `5%`, `0.05`."""
    found = quantity(value, {"": 1.0, "%": 0.01})
    if found is None or found >= 1:
        raise click.BadParameter(f"expected a share such as 5% or 0.05, found '{value}'", param=parameter)
    return found


_tolerance: Final = click.option(
    "--tolerance", callback=_share, default="5%", show_default=True, help="The smallest change that counts."
)


def _compared(before: Path, after: Path, tolerance: float) -> Comparison:
    """The comparison of two results folders. Raises ConfigError."""
    from penstock.perf.bench.compare import compare
    from penstock.perf.bench.results import read

    return compare(read(before), read(after), tolerance=tolerance)


def _comparison_lines(comparison: Comparison) -> list[str]:
    from penstock.perf.bench.compare import HEADER
    from penstock.perf.bench.document import align

    lines = [f"ANOTHER MACHINE: {text}" for text in comparison.other_machine]
    lines += comparison.notes
    lines += [f"{load}: only in the first run" for load in comparison.missing]
    table = [HEADER, *(change.cells() for change in comparison.changes)]
    return [*lines, *(align(table) if comparison.changes else ["the runs have no load in common"])]


@click.command()
@click.argument("before", type=FOLDER)
@click.argument("after", type=FOLDER)
@_tolerance
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def compare(before: Path, after: Path, tolerance: float, as_json: bool) -> None:
    """Show the differences between BEFORE and AFTER, and how certain they are.

    Both are folders of `penstock bench --output`, with at least 3 repeats; 10 detect smaller changes.

    Exit status: 0 compared, 2 wrong usage.
    """
    sys.exit(exit_code(lambda: _compare(before, after, tolerance, as_json)))


def _compare(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    from msgspec import to_builtins

    from penstock.perf.bench.results import json_text

    comparison = _compared(before, after, tolerance)
    if as_json:
        found = to_builtins(comparison) | {"verdict": comparison.verdict}
        click.echo(json_text(found), nl=False)
        return 0
    words = {"worse": "worse than", "better": "better than", "same": "the same as"}
    verdict = words.get(comparison.verdict, "not comparable with")
    click.echo("\n".join([*_comparison_lines(comparison), f"{after} is {verdict} {before}"]))
    return 0


class _GateCommand(click.Command):
    """A command whose exit status for wrong usage is 3, because 2 means INVALID."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        from penstock.perf.bench.compare import USAGE

        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            error.exit_code = USAGE  # type: ignore[misc]
            raise


@click.command(cls=_GateCommand)
@click.argument("run", type=FOLDER)
@click.option("--baseline", type=FOLDER, required=True, help="The results folder to compare with.")
@_tolerance
@click.option("--junit", type=FOLDER, metavar="FILE", help="Write the result as JUnit XML.")
@click.option("--any-machine", is_flag=True, help="Also compare runs of different machines.")
def gate(run: Path, baseline: Path, tolerance: float, junit: Path | None, any_machine: bool) -> None:
    """Check whether RUN is as good as its baseline.

    Both are folders of `penstock bench --output`, with at least 3 repeats; 10 are better.

    Exit status: 0 pass, 1 regression, 2 invalid (the runs do not decide it), 3 wrong usage.
    """
    from penstock.perf.bench.compare import USAGE, decide, junit_xml

    try:
        comparison = _compared(baseline, run, tolerance)
        decision = decide(comparison, any_machine=any_machine)
        word = ("PASS", "REGRESSION", "INVALID")[decision.code]
        click.echo("\n".join([*_comparison_lines(comparison), *decision.why, word]))
        if junit is not None:
            try:
                junit.write_bytes(junit_xml(comparison, decision))
            except OSError as error:
                raise ConfigError(f"--junit {junit} cannot be written: {error.strerror}") from None
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        sys.exit(USAGE)
    sys.exit(decision.code)
