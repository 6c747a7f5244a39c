"""`penstock bench`: reads flags, sends load to a model, and tells what was measured."""

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
from msgspec import Struct, structs

from penstock.errors import ConfigError, PenstockError
from penstock.perf.cli import FAILED, INTERRUPTED, USAGE, exit_code, run_async, seconds, warmup

if TYPE_CHECKING:
    from penstock.perf.bench.compare import Comparison
    from penstock.perf.bench.document import Plot
    from penstock.perf.bench.measurement import Measurement
    from penstock.perf.bench.modes import LoadPlan, Mode
    from penstock.perf.bench.origin import Origin
    from penstock.perf.bench.results import Results
    from penstock.perf.bench.slo import Slo
    from penstock.perf.bench.suite import SuiteJob, SuiteOptions
    from penstock.perf.bench.suite_yaml import Registration
    from penstock.perf.bench.target import Target

FOLDER = click.Path(path_type=Path)


def share(_: click.Context, parameter: click.Parameter, value: str) -> float:
    """What a flag of a share says: `5%`, `0.05`."""
    try:
        found = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise click.BadParameter(f"expected a share such as 5% or 0.05, found '{value}'", param=parameter)
    return found


tolerance = click.option(
    "--tolerance", callback=share, default="5%", show_default=True, help="A smaller change does not matter."
)


def compared(before: Path, after: Path, tolerance: float) -> Comparison:
    """How the folder `after` differs from `before`. Raises ConfigError for what is no folder of results."""
    from penstock.perf.bench.compare import compare
    from penstock.perf.bench.results import read

    return compare(read(before), read(after), tolerance=tolerance)


def lines(comparison: Comparison) -> Sequence[str]:
    """The comparison as it is read on a terminal."""
    from penstock.perf.bench.compare import HEADER
    from penstock.perf.bench.document import align

    told = [f"ANOTHER MACHINE: {text}" for text in comparison.other_machine]
    told += comparison.notes
    told += [f"{load}: only in the first run" for load in comparison.missing]
    table = [HEADER, *(change.cells() for change in comparison.changes)]
    return [*told, *(align(table) if comparison.changes else ["no load is in both runs"])]


@click.command()
@click.argument("before", type=FOLDER)
@click.argument("after", type=FOLDER)
@tolerance
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def compare(before: Path, after: Path, tolerance: float, as_json: bool) -> None:
    """Tell what is better or worse in AFTER than in BEFORE, and how sure that is.

    Both are folders of `penstock bench --output`, with 3 repeats or more; 10 see what 3 cannot.

    Exit status: 0 compared, 2 wrong usage.
    """
    sys.exit(exit_code(lambda: _compare(before, after, tolerance, as_json)))


def _compare(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    import msgspec

    comparison = compared(before, after, tolerance)
    if as_json:
        told = msgspec.to_builtins(comparison) | {"verdict": comparison.verdict}
        click.echo(msgspec.json.format(msgspec.json.encode(told)))
    else:
        click.echo("\n".join([*lines(comparison), f"{after} is {_words(comparison)} {before}"]))
    return 0


def _words(comparison: Comparison) -> str:
    return {"worse": "worse than", "better": "better than", "same": "the same as"}.get(
        comparison.verdict, "not to be compared with"
    )


_WORDS: Final = {0: "PASS", 1: "REGRESSION", 2: "INVALID"}


class _Gate(click.Command):
    """Wrong usage is its own exit status here: 2 says that the runs tell nothing."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        from penstock.perf.bench.compare import USAGE

        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            error.exit_code = USAGE  # type: ignore[misc]
            raise


@click.command(cls=_Gate)
@click.argument("run", type=FOLDER)
@click.option("--baseline", type=FOLDER, required=True, help="The folder of results that it must keep up with.")
@tolerance
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write the answer as JUnit XML.")
@click.option("--any-machine", is_flag=True, help="Also hold runs of different machines against each other.")
def gate(run: Path, baseline: Path, tolerance: float, junit: Path | None, any_machine: bool) -> None:
    """Tell whether RUN is as good as its baseline.

    Both are folders of `penstock bench --output`, with 3 repeats or more; 10 are better.

    Exit status: 0 pass, 1 regression, 2 invalid (the runs cannot tell), 3 wrong usage.
    """
    from penstock.perf.bench.compare import USAGE

    try:
        sys.exit(_gate(run, baseline, tolerance, junit, any_machine))
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        sys.exit(USAGE)


def _gate(run: Path, baseline: Path, tolerance: float, junit: Path | None, any_machine: bool) -> int:

    from penstock.perf.bench.compare import decide, junit_xml

    comparison = compared(baseline, run, tolerance)
    decision = decide(comparison, any_machine=any_machine)
    click.echo("\n".join([*lines(comparison), *decision.why, _WORDS[decision.code]]))
    if junit is not None:
        try:
            junit.write_bytes(junit_xml(comparison, decision))
        except OSError as e:
            raise ConfigError(f"--junit {junit} cannot be written: {e.strerror}") from None
    return decision.code


class _How(Struct, frozen=True, kw_only=True):
    """What holds for every run."""

    slo: Slo
    warm_s: float | None
    repeat: int
    seed: int


@click.command("benchmark-suite")
@click.argument("files", nargs=-1, metavar="MODELS.yaml...")
@click.option("--input", "inputs", multiple=True, metavar="FILE", help="as MODELS.yaml, as TorchServe's suite has it")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="folder of the results; by default a new one, benchmark-suite-TIME",
)
@click.option("--resume", is_flag=True, help="go on in DIR: what was measured is not measured again")
@click.option("--data", metavar="FILE|DIR|JSONL|random", help="what is sent, in place of the input of the files")
@click.option("--requests", type=click.IntRange(1), help="how many a run, in place of what the files say")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="runs of each; medians are told")
@click.option("--warmup", default="auto", show_default=True, callback=warmup, help="seconds before each run, or auto")
@click.option("--slo", metavar="TEXT", help="what to choose within, for instance p99<=100ms,error<=0.1%")
@click.option(
    "--model-store", type=click.Path(exists=True, file_okay=False, path_type=Path), help="where archives are found"
)
@click.option("--skip-missing-hardware", is_flag=True, help="leave out runs on GPUs that are not there")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of payloads of chance")
@click.option("--skip", hidden=True, help="of TorchServe's suite: nothing is installed in any case")
@click.pass_context
def benchmark_suite(ctx: click.Context, /, files: tuple[str, ...], inputs: tuple[str, ...], **flags: Any) -> None:
    """Run the models of TorchServe's benchmark YAML, or of its template, in every way that it names.

    Exit status: 0 measured; 1 a run is INVALID; 2 wrong usage, or a mistake in a file; 130 interrupted.
    """
    flags["download"] = (ctx.obj or {}).get("download_archive")
    sys.exit(exit_code(lambda: _suite([Path(name) for name in (*files, *inputs)], flags)))


def _read_flags(flags: dict[str, Any]) -> tuple[SuiteOptions, _How, Path]:
    """What is wished of all runs, how they are measured, and the folder of the results. Raises ConfigError."""
    from penstock.perf.bench.results import RUN
    from penstock.perf.bench.slo import Slo, parse_slo
    from penstock.perf.bench.suite import SuiteOptions

    wishes = SuiteOptions(
        store=flags["model_store"],
        download=flags["download"],
        data=flags["data"],
        requests=flags["requests"],
        skip_missing_hardware=flags["skip_missing_hardware"],
    )
    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    how = _How(slo=slo, warm_s=flags["warmup"], repeat=flags["repeat"], seed=flags["seed"])
    folder = flags["output"]
    if flags["resume"] and folder is None:
        raise ConfigError("--resume goes on in a folder; name it by --output DIR")
    if folder is not None and not flags["resume"] and (folder / RUN).exists():
        raise ConfigError(f"{folder} holds a run already; go on with it by --resume, or name another folder")
    return wishes, how, folder or Path(f"benchmark-suite-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def _suite(paths: Sequence[Path], flags: dict[str, Any]) -> int:
    """The exit status: 0 when each run says something. Raises PenstockError."""
    from penstock.perf.bench.results import Results
    from penstock.perf.bench.suite import prepare
    from penstock.perf.bench.suite_yaml import read_suite

    if not paths:
        raise ConfigError("no file of models is named; expected for instance penstock benchmark-suite models.yaml")
    wishes, how, folder = _read_flags(flags)
    cases, notes = read_suite(paths)
    with tempfile.TemporaryDirectory(prefix="penstock-") as downloads:
        jobs, left_out = prepare(cases, wishes, Path(downloads))
        notes = [*notes, *left_out]
        for note in notes:
            click.echo(f"penstock: {note}", err=True)
        with Results.open(folder, _suite_origin(paths, jobs, how), resume=flags["resume"]) as results:
            interrupted = False
            try:
                _Runs(jobs, how, results).all()
            except KeyboardInterrupt:
                click.echo("penstock: interrupted; this is what there is", err=True)
                interrupted = True
            except PenstockError:
                with suppress(PenstockError):
                    _reported(jobs, how, results, notes)
                raise
            code = _reported(jobs, how, results, notes)
            return INTERRUPTED if interrupted else code


def _suite_origin(paths: Sequence[Path], jobs: Sequence[SuiteJob], how: _How) -> Origin:
    from penstock.perf.bench.origin import Origin, command_line, machine, versions
    from penstock.perf.bench.suite import digest

    return Origin(
        command="benchmark-suite",
        line=command_line(sys.argv[1:]),
        target=f"{', '.join(map(str, paths))} ({digest(jobs)})",
        slo=how.slo.text,
        seed=how.seed,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(["torch", "onnxruntime", "numpy"]),
    )


class _Runs:
    """All runs of a suite, repeat by repeat, so that a disturbance does not fall on one of them alone."""

    def __init__(self, jobs: Sequence[SuiteJob], how: _How, results: Results) -> None:
        self._jobs, self._how, self._results = jobs, how, results
        self._done = {_key(m) for m in results.measurements if not m.invalid}
        self._number = 0
        self._count = how.repeat * sum(len(job.points) * len(job.case.concurrency) for job in jobs)

    def all(self) -> None:
        """Measures what is not measured yet. Raises NotWritten."""
        for repeat in range(self._how.repeat):
            for job in self._jobs:
                for point in job.points:
                    self._point(job, point, repeat)

    def _point(self, job: SuiteJob, point: Registration, repeat: int) -> None:
        """Every number of clients that is not measured yet, on one server."""
        from penstock.perf.bench.results import NotWritten
        from penstock.perf.bench.suite import serving

        first = self._number
        left = [
            (first + i, n) for i, n in enumerate(job.case.concurrency, 1) if (point.label, n, repeat) not in self._done
        ]
        self._number += len(job.case.concurrency)
        try:
            if left:
                with serving(job, point) as target:
                    while left:
                        self._keep(left[0][0], point, self._run(job, point, target, left[0][1], repeat))
                        del left[0]
        except NotWritten:
            raise
        except PenstockError as error:  # also a ConfigError: an input that does not fit the model
            for number, clients in left:  # the next has a server of its own
                self._keep(number, point, self._failed(job, point, clients, repeat, error))

    def _run(self, job: SuiteJob, point: Registration, target: Target, clients: int, repeat: int) -> Measurement:
        from penstock.perf.bench.payload import check_of
        from penstock.perf.bench.run import measure
        from penstock.perf.bench.suite import load_of, requests_of

        return run_async(
            measure(
                target,
                requests_of(job, target, self._how.seed),
                load_of(job, clients, self._how.seed),
                slo=self._how.slo,
                warm_s=self._how.warm_s,
                label=point.label,
                repeat=repeat,
                check=check_of(target),
                on_progress=_show if sys.stderr.isatty() else None,
            )
        )

    def _failed(
        self, job: SuiteJob, point: Registration, clients: int, repeat: int, error: PenstockError
    ) -> Measurement:
        from penstock.perf.bench.measurement import Measurement
        from penstock.perf.bench.suite import load_of

        started = datetime.now(UTC).isoformat(timespec="seconds")
        load = load_of(job, clients, self._how.seed)
        return Measurement(load=load, label=point.label, repeat=repeat, started=started, invalid=[error.message[:2000]])

    def _keep(self, number: int, point: Registration, found: Measurement) -> None:
        told = f"{found.throughput:,.5g}/s"
        if found.latency.p99_s is not None:
            told += f", p99 {found.latency.p99_s * 1e3:,.4g} ms"
        if found.errors:
            told += f", {found.error_share:.1%} errors"
        if found.invalid:
            told = f"INVALID: {found.invalid[0]}"
        try:
            self._results.append(found)
        finally:  # who sees the line may press Ctrl-C at once: it is kept by then; what found no room is told, too
            click.echo(f"[{number}/{self._count}] {point.case.text}, {point.settings}, {found.load.label}: {told}")


def _show(seconds: float, answered: int) -> None:
    """What a run does meanwhile; the line of its end is written over it."""
    click.echo(f"{answered:,} answered in {seconds:.0f} s\r", nl=False, err=True)


def _key(m: Measurement) -> tuple[str, int, int]:
    return m.label, m.load.concurrency, m.repeat


def _reported(jobs: Sequence[SuiteJob], how: _How, results: Results, notes: Sequence[str]) -> int:
    """Writes ab_report.csv and the report, tells what to choose; 1 if a run says nothing. Raises PenstockError."""
    from penstock.perf.bench.document import Paragraph, markdown, page
    from penstock.perf.bench.report import PAGE, REPORT
    from penstock.perf.bench.results import write_error, write_whole
    from penstock.perf.bench.suite_report import ab_report, report, rows_of

    latest = {_key(m): m for m in results.measurements}  # one that was invalid is measured again on --resume
    rows = rows_of([point for job in jobs for point in job.points], list(latest.values()))
    origin = results.origin
    told = report(rows, origin.machine, origin.versions, slo=how.slo.text, line=origin.line, notes=notes)
    plots, without = _plots(jobs, list(latest.values()), how.slo.text)
    for block in told.verdict:
        if isinstance(block, Paragraph):
            click.echo(block.text)
    try:
        write_whole(results.folder / "ab_report.csv", ab_report(rows, origin.machine).encode())
        write_whole(results.folder / REPORT, markdown(told).encode())
        write_whole(results.folder / PAGE, page(told, plots, without).encode())
    except OSError as error:
        raise write_error(results.folder, error) from None
    click.echo(f"{results.folder}: ab_report.csv, {REPORT}, {PAGE}")
    return FAILED if any(m.invalid for m in latest.values()) else 0


def _plots(jobs: Sequence[SuiteJob], measurements: Sequence[Measurement], slo: str) -> tuple[list[Plot], str]:
    """The plots, and why there are none."""
    from penstock.perf.bench.plots import draw

    if len(jobs) > 1:
        return [], f"they are of one model at a time, and here are {len(jobs)}"
    short = {point.label: point.short for point in jobs[0].points}
    try:
        return draw([structs.replace(m, label=short[m.label]) for m in measurements], slo), ""
    except ConfigError as error:
        return [], error.message


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


def make_plan(flags: dict[str, Any]) -> LoadPlan:
    """The loads that the flags describe. Raises ConfigError for flags that do not go together."""
    from penstock.perf.bench.arrivals import parse_arrival
    from penstock.perf.bench.modes import LoadPlan

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
    return LoadPlan(
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
    from penstock.client.endpoint import read_token, tls_context
    from penstock.perf.bench.slo import Slo, parse_slo
    from penstock.perf.bench.target import open_target

    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    plan = make_plan(flags)
    if plan.mode == "ramp" and any(part.name == "throughput" for part in slo.objectives):
        raise ConfigError("--mode ramp: throughput is what is looked for; leave it out of --slo")
    patience_s = flags["timeout"] or math.inf
    if any(part.is_latency and part.limit >= patience_s for part in slo.objectives):
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


def _measured(target: Target, plan: LoadPlan, slo: Slo, flags: dict[str, Any]) -> int:
    """Sends the load, tells what it saw, whatever ends it, and gives the exit status."""
    from penstock.perf.bench.payload import payloads, request_of
    from penstock.perf.bench.results import Results
    from penstock.perf.bench.session import BenchSession

    bodies = payloads(flags["data"], target, flags["seed"])
    requests = [request_of(target, body) for body in bodies]
    session = BenchSession(
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
    from penstock.perf.bench.origin import Origin, command_line, machine, redacted, versions

    return Origin(
        command="bench",
        line=command_line(sys.argv[1:]),
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
