"""`penstock benchmark-suite` without a server: the order of the runs, what fails alone, what is not measured again."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from penstock.cli.benchmark_suite import benchmark_suite
from penstock.client.endpoint import Endpoint
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench import run, suite
from penstock.perf.bench.measurement import Latency, Load, Measurement
from penstock.perf.bench.results import Results, not_written
from penstock.perf.bench.suite import Job
from penstock.perf.bench.suite_yaml import Point
from penstock.perf.bench.target import Target

YAML = """
good:
  e: {url: app.py:Good, concurrency: [1, 2], requests: 7}
bad:
  e: {url: app.py:Bad, concurrency: [1, 2], requests: 7}
"""


class Servers:
    """In place of servers and loads; `asked` notes what was started and measured."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken = {"bad"}
        self.lost: set[int] = set()

    @contextmanager
    def serving(self, job: Job, point: Point) -> Iterator[Target]:
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
    """In a folder with the YAML and its application."""
    found = Servers()
    monkeypatch.setattr(suite, "serving", found.serving)
    monkeypatch.setattr(run, "measure", found.measure)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text(YAML)
    (tmp_path / "app.py").write_text("")
    return found


def invoke(*words: str) -> Result:
    return CliRunner().invoke(benchmark_suite, ["models.yaml", "--output", "out", *words])


def rows() -> list[dict[str, str]]:
    with Path("out/ab_report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_of_a_repeat_comes_before_the_next_and_a_server_that_fails_does_so_alone(servers: Servers) -> None:
    done = invoke("--repeat", "2")
    once = ["start good", "1 clients", "2 clients", "stop", "start bad"]
    assert (done.exit_code, servers.asked) == (1, once * 2)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "[1/8] good e, cpu, 1 worker, batch 1, 1 client: 100/s, p99 3 ms",
        "[2/8] good e, cpu, 1 worker, batch 1, 2 clients: 100/s, p99 3 ms",
        "[3/8] bad e, cpu, 1 worker, batch 1, 1 client: INVALID: it does not load",
    ]
    assert lines[-3:] == [
        "good e: cpu, 1 worker, batch 1, 1 client: 100/s, p99 3 ms.",
        "bad e: nothing was measured.",
        "out: ab_report.csv, report.md, report.html",
    ]
    assert [(row["Model"], row["Repeats"], row["TS throughput"]) for row in rows()] == [
        ("good", "2", "100.5"),
        ("good", "2", "100.5"),
        ("bad", "2", ""),
        ("bad", "2", ""),
    ]


def test_on_resume_only_what_says_nothing_yet_is_measured(servers: Servers) -> None:
    servers.lost = {2}
    assert invoke().exit_code == 1
    assert [row["Invalid"] for row in rows()] == ["", "it went away", "it does not load", "it does not load"]
    servers.asked.clear()
    servers.lost.clear()
    servers.broken.clear()
    assert "out holds a run already; go on with it by --resume" in invoke().stderr
    assert servers.asked == []
    done = invoke("--resume")
    assert (done.exit_code, servers.asked) == (
        0,
        ["start good", "2 clients", "stop", "start bad", "1 clients", "2 clients", "stop"],
    )
    assert done.stdout.startswith("[2/4] good e, cpu, 1 worker, batch 1, 2 clients: 100/s")
    assert [(row["Repeats"], row["Invalid"]) for row in rows()] == [("1", "")] * 4


def test_what_was_told_when_ctrl_c_comes_is_kept(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = click.echo

    def told(message: str = "", **how: Any) -> None:
        echo(message, **how)
        if message.startswith("[1/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(click, "echo", told)
    assert invoke().exit_code == 130
    assert [row["Repeats"] for row in rows()] == ["1", "0", "0", "0"]


def test_a_disk_that_is_full_ends_the_suite_and_what_found_no_room_is_told(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Results.append

    def full(self: Results, measurement: Measurement) -> None:
        if measurement.load.concurrency == 2:  # and there is room again for what is smaller
            raise not_written(self.folder, OSError(28, "No space left on device"))
        append(self, measurement)

    monkeypatch.setattr(Results, "append", full)
    done = invoke()
    assert (done.exit_code, servers.asked) == (1, ["start good", "1 clients", "2 clients"])
    assert done.stdout.splitlines()[1] == "[2/4] good e, cpu, 1 worker, batch 1, 2 clients: 100/s, p99 3 ms"
    assert done.stderr.endswith(
        "disk is full: out takes no more results; what is there is whole. Make room for the next run\n"
    )
    assert [row["Repeats"] for row in rows()] == ["1", "0", "0", "0"]


def test_a_mistake_that_only_a_server_can_tell_does_not_end_the_suite(
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


def test_a_report_that_finds_no_room_is_told_all_the_same(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> None:
        if path.suffix == ".csv":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.perf.bench.results.write_whole", full)
    done = invoke()
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "bad e: nothing was measured.")
    assert "good e: cpu, 1 worker, batch 1, 1 client: 100/s, p99 3 ms." in done.stdout
    assert "the disk is full: out takes no more results" in done.stderr


def test_secrets_that_were_typed_are_not_kept(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", "benchmark-suite", "https://me:t0p@h/m.yaml?token=t0p"])
    Path("models.yaml").write_text("m:\n  e: {url: app.py:M, requests: 7, concurrency: 1}\n")
    assert invoke().exit_code == 0
    for path in Path("out").iterdir():
        assert "t0p" not in path.read_text(), path
    assert "https://***@h/m.yaml?token=***" in Path("out/report.md").read_text().replace("\\*", "*")
