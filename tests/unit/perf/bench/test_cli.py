import csv
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.client.endpoint import Endpoint
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench import figures, suite
from penstock.perf.bench.cli import bench, benchmark_suite, make_plan
from penstock.perf.bench.measurement import Latency, Load, Measurement, ObjectiveResult, Slo, parse_slo
from penstock.perf.bench.results import Origin, Results, write_error
from penstock.perf.bench.session import BenchSession
from penstock.perf.bench.suite import SuiteJob
from penstock.perf.bench.suite_yaml import SuitePoint
from penstock.perf.bench.target import Target
from support.numbered import NumberedServer, numbered_elsewhere


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of the results of one load, each repeat a little slower than the one before."""

    def make(name: str, *, slower: float = 1.0, invalid: Sequence[str] = (), repeats: int = 5, cpu: str = "C") -> Path:
        with Results.open(tmp_path / name, Origin(command="bench", machine={"cpu": cpu})) as results:
            for repeat in range(repeats):
                once = slower * (1 + repeat / 500)
                latency = Latency(p50_s=0.01 * once, p99_s=0.02 * once)
                results.append(
                    Measurement(
                        load=Load(mode="closed", concurrency=8), repeat=repeat, requests=1000, answered=1000,
                        throughput=800 / once, latency=latency, invalid=list(invalid),
                    )
                )  # fmt: skip
        return tmp_path / name

    return make


def penstock(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_compare_reports_changes_with_their_intervals(folder: Callable[..., Path]) -> None:
    before, after = folder("a"), folder("b", slower=1.2)
    done = penstock("compare", before, after)
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["load", "metric", "before", "after", "change", "95", "%", "interval", "note"] in rows
    assert rows[1][:9] == ["8", "clients", "throughput/s", "797", "664", "-17", "%", "-17", "%"]
    assert done.stdout.endswith(f"{after} is worse than {before}\n")
    assert f"{before} is better than {after}" in penstock("compare", after, before).stdout
    assert f"{before} is the same as {before}" in penstock("compare", before, before).stdout


def test_compare_as_json(folder: Callable[..., Path]) -> None:
    found = json.loads(penstock("compare", folder("a"), folder("b", slower=1.2), "--json").stdout)
    assert found["verdict"] == "worse"
    assert [change["metric"] for change in found["changes"]] == ["throughput/s", "p50", "p99", "errors"]


def test_compare_reports_different_machines_and_refuses_a_folder_without_results(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    done = penstock("compare", folder("a"), folder("b", cpu="D"))
    assert done.stdout.startswith("ANOTHER MACHINE: cpu: C in the first run, D in the second\n")
    done = penstock("compare", tmp_path / "a", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"penstock: {tmp_path / 'nowhere'} holds no results: there is no such folder")
    assert penstock("compare", tmp_path / "a", tmp_path / "b", "--tolerance", "big").exit_code == 2


@pytest.mark.parametrize(
    ("run", "code", "last"),
    [
        ({}, 0, "PASS"),
        ({"slower": 0.8}, 0, "PASS"),
        ({"slower": 1.1}, 1, "REGRESSION"),
        ({"invalid": ["the generator was late"]}, 2, "INVALID"),
        ({"repeats": 2}, 2, "INVALID"),
        ({"repeats": 0}, 2, "INVALID"),
        ({"cpu": "D"}, 2, "INVALID"),
        ({"cpu": "D", "flags": ["--any-machine"]}, 0, "PASS"),
    ],
)
def test_gate_exits_with_its_decision(
    folder: Callable[..., Path], tmp_path: Path, run: dict[str, Any], code: int, last: str
) -> None:
    report, flags = tmp_path / "junit.xml", run.pop("flags", [])
    done = penstock("gate", folder("run", **run), "--baseline", folder("base"), "--junit", report, *flags)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (code, last)
    suite = ElementTree.fromstring(report.read_bytes())
    assert (suite.get("failures") != "0", suite.get("errors") != "0") == (code == 1, code == 2)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Missing argument"),
        (["RUN"], "Missing option '--baseline'"),
        (["RUN", "--baseline"], "requires an argument"),
        (["RUN", "--baseline", "B", "--unknown"], "No such option"),
        (["NONE", "--baseline", "B"], "holds no results"),
        (["RUN", "--baseline", "B", "--junit", "NONE/x.xml"], "cannot be written: No such file or directory"),
    ],
)
def test_gate_exits_with_3_for_wrong_usage(folder: Callable[..., Path], arguments: list[str], why: str) -> None:
    places = {"RUN": folder("run"), "B": folder("base"), "NONE": "/nowhere", "NONE/x.xml": "/nowhere/x.xml"}
    done = penstock("gate", *(places.get(argument, argument) for argument in arguments))
    assert done.exit_code == 3
    assert why in done.stderr


YAML = """
good:
  e: {url: app.py:Good, concurrency: [1, 2], requests: 7}
bad:
  e: {url: app.py:Bad, concurrency: [1, 2], requests: 7}
"""


class Servers:
    """Replaces servers and loads; `asked` records what was started and measured."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken = {"bad"}
        self.lost: set[int] = set()

    @contextmanager
    def serving(self, job: SuiteJob, point: SuitePoint) -> Iterator[Target]:
        self.asked.append(f"start {job.case.model}")
        if job.case.model in self.broken:
            raise PenstockError("it does not load")
        parameters = {"example": {"x": 1}}
        yield Target(text="", endpoint=Endpoint("h", 1), model="m", path="/predictions/m", parameters=parameters)
        self.asked.append("stop")

    async def measure(
        self, target: Target, requests: list[bytes], load: Load, *, label: str, repeat: int, **more: Any
    ) -> Measurement:
        self.asked.append(f"{load.concurrency} clients")
        assert requests[0].endswith(b'{"x":1}')
        if load.concurrency in self.lost:
            raise PenstockError("it went away")
        latency = Latency(p50_s=0.002, p99_s=0.003)
        return Measurement(
            load=load, label=label, repeat=repeat, requests=7, answered=7, throughput=100.0 + repeat, latency=latency
        )


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """A working directory with the YAML and its application."""
    found = Servers()
    monkeypatch.setattr(suite, "serving", found.serving)
    monkeypatch.setattr(suite, "measure", found.measure)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text(YAML)
    (tmp_path / "app.py").write_text("")
    return found


def invoke(*words: str) -> Result:
    return CliRunner().invoke(benchmark_suite, ["models.yaml", "--output", "out", *words])


def rows() -> list[dict[str, str]]:
    with Path("out/ab_report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_repeats_run_in_turn_and_a_failing_server_affects_only_its_runs(servers: Servers) -> None:
    done = invoke("--repeat", "2")
    once = ["start good", "1 clients", "2 clients", "stop", "start bad"]
    assert (done.exit_code, servers.asked) == (1, once * 2)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "[1/8] good e, cpu, 1 worker, batch 1, 1 client: 100/s, p50 2 ms, p99 3 ms",
        "[2/8] good e, cpu, 1 worker, batch 1, 2 clients: 100/s, p50 2 ms, p99 3 ms",
        "[3/8] bad e, cpu, 1 worker, batch 1, 1 client: INVALID: it does not load",
    ]
    assert lines[-3:] == [
        "good e: cpu, 1 worker, batch 1, 1 client: 100/s, p99 3 ms. A tie, because the repeats overlap: cpu, 1 worker, "
        "batch 1, 2 clients.",
        "bad e: no valid measurement.",
        "out: ab_report.csv, report.md, report.html",
    ]
    assert [(row["Model"], row["Repeats"], row["TS throughput"]) for row in rows()] == [
        ("good", "2", "100.5"),
        ("good", "2", "100.5"),
        ("bad", "2", ""),
        ("bad", "2", ""),
    ]


def test_resume_measures_only_missing_and_invalid_runs(servers: Servers) -> None:
    servers.lost = {2}
    assert invoke().exit_code == 1
    assert [row["Invalid"] for row in rows()] == ["", "it went away", "it does not load", "it does not load"]
    servers.asked.clear()
    servers.lost.clear()
    servers.broken.clear()
    assert "out already holds a run; continue it with --resume" in invoke().stderr
    assert servers.asked == []
    done = invoke("--resume")
    assert (done.exit_code, servers.asked) == (
        0,
        ["start good", "2 clients", "stop", "start bad", "1 clients", "2 clients", "stop"],
    )
    assert done.stdout.startswith("[2/4] good e, cpu, 1 worker, batch 1, 2 clients: 100/s")
    assert [(row["Repeats"], row["Invalid"]) for row in rows()] == [("1", "")] * 4


def test_a_printed_run_is_stored_when_ctrl_c_follows(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = click.echo

    def interrupt(message: str = "", **how: Any) -> None:
        echo(message, **how)
        if message.startswith("[1/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(click, "echo", interrupt)
    assert invoke().exit_code == 130
    assert [row["Repeats"] for row in rows()] == ["1", "0", "0", "0"]


def test_a_full_disk_ends_the_suite_and_the_unstored_run_is_printed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Results.append

    def full(self: Results, measurement: Measurement) -> None:
        if measurement.load.concurrency == 2:  # later, smaller writes succeed
            raise write_error(self.folder, OSError(28, "No space left on device"))
        append(self, measurement)

    monkeypatch.setattr(Results, "append", full)
    done = invoke()
    assert (done.exit_code, servers.asked) == (1, ["start good", "1 clients", "2 clients"])
    assert done.stdout.splitlines()[1] == "[2/4] good e, cpu, 1 worker, batch 1, 2 clients: 100/s, p50 2 ms, p99 3 ms"
    assert done.stderr.endswith(
        "disk is full: out takes no more results. Its content is intact; make room for the next run\n"
    )
    assert [row["Repeats"] for row in rows()] == ["1", "0", "0", "0"]


def test_a_mistake_found_by_the_server_does_not_end_the_suite(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.broken = set()
    wrong = iter([True, False, False])

    def requests_of(*_: object) -> list[bytes]:
        if next(wrong):
            raise ConfigError("the input does not fit")
        return [b'{"x":1}']

    monkeypatch.setattr(suite, "requests_of", requests_of)
    done = invoke()
    assert done.exit_code == 1
    fits = "the input does not fit"
    assert [row["Invalid"] for row in rows()] == [fits, fits, "", ""]


def test_a_report_that_cannot_be_stored_is_still_printed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> None:
        if path.suffix == ".csv":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.perf.bench.document.write_whole", full)
    done = invoke()
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "bad e: no valid measurement.")
    assert "good e: cpu, 1 worker, batch 1, 1 client: 100/s, p99 3 ms." in done.stdout
    assert "the disk is full: out takes no more results" in done.stderr


def test_secrets_on_the_command_line_are_not_stored(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", "benchmark-suite", "https://me:t0p@h/m.yaml?token=t0p"])
    Path("models.yaml").write_text("m:\n  e: {url: app.py:M, requests: 7, concurrency: 1}\n")
    assert invoke().exit_code == 0
    for path in Path("out").iterdir():
        assert "t0p" not in path.read_text(), path
    assert "https://***@h/m.yaml?token=***" in Path("out/report.md").read_text().replace("\\*", "*")


FLAGS: dict[str, Any] = {
    "mode": None, "concurrency": None, "rate": None, "arrival": None, "duration": None, "requests": None,
    "repeat": 1, "seed": 0, "connections": 256,
}  # fmt: skip


@pytest.fixture
def elsewhere() -> Iterator[NumberedServer]:
    with numbered_elsewhere(takes_s=0.002) as server:  # keeps the generator from being the bottleneck
        yield server


@pytest.fixture
def body(tmp_path: Path) -> str:
    path = tmp_path / "body.json"
    path.write_text("{}")
    return str(path)


def url_of(server: NumberedServer) -> str:
    return f"{server.url}/infer"


def run_bench(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


def test_a_model_is_measured_and_printed_as_a_table(elsewhere: NumberedServer, body: str) -> None:
    flags = ["--data", body, "--concurrency", "1,2", "--requests", "100", "--warmup", "0"]
    result = run_bench(url_of(elsewhere), *flags)
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["load", "throughput/s"]
    assert lines[1].startswith("1 client ")
    assert lines[2].startswith("2 clients ")
    assert "a closed loop sends nothing while the server is stalled" in result.stdout
    assert "INVALID" not in result.stdout
    assert result.exit_code == 0


def test_responses_that_differ_from_the_expected_ones_are_counted_and_fail_the_run(
    elsewhere: NumberedServer, body: str
) -> None:
    elsewhere.answer = lambda number: (200, b'{"label":"%s"}' % (b"dog" if number % 10 == 7 else b"cat"))
    flags = [url_of(elsewhere), "--data", body, "--concurrency", "1", "--requests", "100", "--warmup", "0"]
    result = run_bench(*flags, "--expect", "label=cat")
    assert result.exit_code == 1
    assert "wrong: 10" in result.stdout
    assert "10 of 100 responses differ from --expect; the first: to request 1, label: found 'dog', expected 'cat'" in (
        result.stdout
    )
    elsewhere.answer = lambda number: (200, b'{"label": "cat"}')
    result = run_bench(*flags, "--expect", "label=cat")
    assert "0 of 100 responses differ from --expect\n" in result.stdout
    assert result.exit_code == 0
    assert run_bench(*flags, "--expect", "label").exit_code == 2


def test_json_is_all_that_is_printed(elsewhere: NumberedServer, body: str) -> None:
    flags = ["--data", body, "--rate", "200", "--duration", "0.2", "--warmup", "0", "--slo", "p50<=10s", "--json"]
    result = run_bench(url_of(elsewhere), *flags)
    found = json.loads(result.stdout)
    assert result.stderr == ""
    (run,) = found["measurements"]
    assert run["load"]["mode"] == "open"
    assert run["requests"] == run["answered"] > 0
    assert run["slo"][0]["met"]
    assert found["origin"]["target"] == url_of(elsewhere)


def test_results_are_stored_and_a_folder_with_results_is_refused(
    elsewhere: NumberedServer, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--data", body, "--concurrency", "1", "--requests", "20", "--warmup", "0", "--output", str(tmp_path / "r")]
    url = f"{url_of(elsewhere)}?token=not-for-files"
    monkeypatch.setattr("sys.argv", ["penstock", "bench", url])
    done = run_bench(url, *flags)
    assert f"{url_of(elsewhere)}?token=***: one request" in done.stderr
    origin = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (origin["command"], origin["target"]) == ("bench", f"{url_of(elsewhere)}?token=***")
    assert "not-for-files" not in "".join(path.read_text() for path in (tmp_path / "r").iterdir())
    assert len((tmp_path / "r" / "records.jsonl").read_text().splitlines()) == 1
    assert {"summary.csv", "report.md", "report.html"} <= {path.name for path in (tmp_path / "r").iterdir()}
    again = run_bench(url_of(elsewhere), *flags)
    assert again.exit_code == 2
    assert "already holds a run" in again.stderr


def test_a_measurement_is_printed_when_the_disk_is_full(
    elsewhere: NumberedServer, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Results, run: Measurement) -> None:
        raise PenstockError("the disk is full")

    monkeypatch.setattr(Results, "append", full)
    flags = ["--data", body, "--concurrency", "1,2", "--requests", "20", "--warmup", "0", "--output", f"{tmp_path}/r"]
    result = run_bench(url_of(elsewhere), *flags)
    assert result.exit_code == 1
    assert result.stderr.count("penstock: the disk is full") == 1
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:2]] == [["1", "client"]]
    assert elsewhere.asked < 40  # the second load is not sent


def test_a_rate_that_gives_no_request_is_wrong_usage(elsewhere: NumberedServer, body: str) -> None:
    result = run_bench(url_of(elsewhere), "--data", body, "--rate", "0.001", "--duration", "0.1")
    assert result.exit_code == 2
    assert "no request arrives at 0.001/s poisson" in result.stderr


def test_a_target_that_only_fails_ends_the_run_and_its_first_error_is_shown_once(
    elsewhere: NumberedServer, body: str
) -> None:
    elsewhere.answer = lambda number: (500, b"no model here, %d" % number)
    result = run_bench(url_of(elsewhere), "--data", body, "--concurrency", "1,8,64")
    assert result.exit_code == 1
    assert result.output.count("500 Internal Server Error: no model here, 0") == 1
    assert elsewhere.asked == 5


def test_an_unreachable_target_is_an_error_in_one_line(body: str) -> None:
    result = run_bench("http://127.0.0.1:9/infer", "--data", body)
    assert result.exit_code == 1
    assert result.stderr.startswith("penstock: http://127.0.0.1:9: cannot connect")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_reports_partial_results(elsewhere: NumberedServer, body: str) -> None:
    first = 100

    def interrupt(number: int) -> tuple[int, bytes]:
        if number == first + 100:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return 200, b"ok"

    elsewhere.answer = interrupt
    flags = ["--data", body, "--concurrency", "1,2", "--requests", f"{first}", "--warmup", "0"]
    result = run_bench(url_of(elsewhere), *flags)
    assert result.exit_code == 130
    assert "interrupted; partial results follow" in result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [["1", "client"], ["2", "clients"]]
    assert "the run was interrupted" in result.stdout


def test_a_run_limited_by_the_generator_has_no_figures(
    elsewhere: NumberedServer, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_CPU", 0.0)  # any CPU use is too much
    result = run_bench(url_of(elsewhere), "--data", body, "--concurrency", "1", "--requests", "20", "--warmup", "0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split()[:3] == ["1", "client", "INVALID"]
    assert "the generator was at its limit" in result.stdout


def test_signal_handlers_are_restored(body: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run_bench("http://127.0.0.1:9/infer", "--data", body)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--concurrency", "1,x"], "expected whole numbers over 0 such as 1,8,64, found '1,x'"),
        (["--concurrency", "0"], "expected whole numbers over 0"),
        (["--rate", "-1"], "expected numbers over 0"),
        (["--rate", "inf"], "expected numbers over 0"),
        (["--duration", "0"], "expected a time over 0"),
        (["--duration", "soon"], "expected a time over 0"),
        (["--warmup", "long"], "expected auto or seconds from 0"),
        (["--mode", "sideways"], "Invalid value for '--mode'"),
        (["--rate", "10", "--concurrency", "2"], "--concurrency is for --mode closed and saturate"),
        (["--mode", "closed", "--rate", "2"], "--rate is for --mode open and ramp"),
        (["--mode", "open"], "give the requests per second"),
        (["--mode", "ramp", "--rate", "1,2,3"], "--rate is FIRST or FIRST,LAST"),
        (["--mode", "ramp", "--arrival", "trace:x"], "a trace does not rise"),
        (["--mode", "ramp", "--slo", "p99<=1s,throughput>=5/s"], "searches for the throughput"),
        (["--mode", "saturate", "--requests", "9"], "--duration limits each step"),
        (["--requests", "9", "--duration", "1"], "a run ends by one of them"),
        (["--timeout", "1s", "--slo", "p50<=10ms,max<=1s"], "requests dropped so early cannot break p50<=10ms,max<=1s"),
        (["--arrival", "sometimes", "--rate", "1"], "sometimes"),
        (["--slo", "p98<=1ms"], "p98"),
        (["--set", "a=1"], "--set"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_message(flags: list[str], text: str) -> None:
    result = run_bench("http://127.0.0.1:9/infer", *flags)
    assert result.exit_code == 2
    assert text in result.stderr


def test_flags_become_a_plan() -> None:
    plan = make_plan({**FLAGS, "concurrency": (2, 4), "duration": 5.0, "repeat": 3})
    assert (plan.mode, plan.concurrency, plan.seconds, plan.repeat) == ("closed", (2, 4), 5.0, 3)
    assert make_plan(FLAGS).concurrency == (1, 8, 64)
    assert make_plan({**FLAGS, "rate": (5.0,)}).mode == "open"
    assert make_plan({**FLAGS, "mode": "saturate"}).concurrency == (1,)
    assert make_plan({**FLAGS, "arrival": "trace:a.jsonl"}).seconds == 0
    assert make_plan({**FLAGS, "arrival": "gamma:2", "mode": "ramp"}).arrival == "gamma:2"


RUN = Measurement(load=Load(mode="closed", concurrency=1), requests=9, answered=9)
MISSED = Measurement(
    load=RUN.load, requests=9, answered=9, slo=[ObjectiveResult(text="p50<=1ms", value=0.1, met=False)]
)


@pytest.mark.parametrize(
    ("mode", "runs", "found", "slo", "code"),
    [
        ("closed", [RUN], [], "", 0),
        ("closed", [], [], "", 1),
        ("closed", [MISSED], [], "p50<=1ms", 1),
        ("closed", [RUN], [], "p50<=1ms", 1),  # unknown
        ("closed", [Measurement(load=RUN.load, answered=9, invalid=["late"])], [], "", 1),
        ("closed", [Measurement(load=RUN.load, requests=9)], [], "", 1),
        ("saturate", [MISSED], ["saturates at 1 client"], "p50<=1ms", 0),
        ("ramp", [MISSED], ["knee: 5/s"], "p50<=1ms", 0),
        ("ramp", [MISSED], ["no knee: "], "p50<=1ms", 1),
        ("ramp", [Measurement(load=RUN.load, invalid=["late"]), RUN], ["knee: 5/s"], "", 0),
        ("ramp", [RUN], [], "", 1),
    ],
)
def test_the_exit_status_says_whether_the_slo_is_met(
    mode: str, runs: list[Measurement], found: list[str], slo: str, code: int
) -> None:
    session = BenchSession(
        plan=make_plan({**FLAGS, "mode": mode}),
        slo=parse_slo(slo) if slo else Slo(),
        origin=Origin(command="bench"),
        runs=runs,
        found=found,
    )
    assert session.code() == code
