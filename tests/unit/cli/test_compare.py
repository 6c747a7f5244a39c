from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.perf.bench.measurement import Latency, Load, Measurement
from penstock.perf.bench.results import Origin, Results


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


def test_compare_tells_what_is_worse_by_how_much_and_how_surely(folder: Callable[..., Path]) -> None:
    before, after = folder("a"), folder("b", slower=1.2)
    done = penstock("compare", before, after)
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["load", "metric", "before", "after", "change", "95", "%", "interval", "to", "be", "known"] in rows
    assert rows[1][:9] == ["8", "clients", "throughput/s", "797", "664", "-17", "%", "-17", "%"]
    assert done.stdout.endswith(f"{after} is worse than {before}\n")
    assert f"{before} is better than {after}" in penstock("compare", after, before).stdout
    assert f"{before} is the same as {before}" in penstock("compare", before, before).stdout


def test_compare_as_json(folder: Callable[..., Path]) -> None:
    told = json.loads(penstock("compare", folder("a"), folder("b", slower=1.2), "--json").stdout)
    assert told["verdict"] == "worse"
    assert [change["metric"] for change in told["changes"]] == ["throughput/s", "p50", "p99", "errors"]


def test_compare_says_that_machines_differ(folder: Callable[..., Path]) -> None:
    done = penstock("compare", folder("a"), folder("b", cpu="D"))
    assert done.stdout.startswith("ANOTHER MACHINE: cpu: C in the first run, D in the second\n")


def test_compare_refuses_what_is_no_folder_of_results(folder: Callable[..., Path], tmp_path: Path) -> None:
    done = penstock("compare", folder("a"), tmp_path / "nowhere")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"penstock: {tmp_path / 'nowhere'} holds no results: there is no such folder")
    assert penstock("compare", folder("b"), folder("c"), "--tolerance", "big").exit_code == 2


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
    ],
)
def test_gate_ends_with_what_it_found(
    folder: Callable[..., Path], tmp_path: Path, run: dict[str, object], code: int, last: str
) -> None:
    report = tmp_path / "junit.xml"
    done = penstock("gate", folder("run", **run), "--baseline", folder("base"), "--junit", report)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (code, last)
    suite = ElementTree.fromstring(report.read_bytes())
    assert (suite.get("failures") != "0", suite.get("errors") != "0") == (code == 1, code == 2)


@pytest.mark.parametrize(
    "arguments",
    [[], ["RUN"], ["RUN", "--baseline"], ["RUN", "--baseline", "B", "--unknown"], ["NONE", "--baseline", "B"]],
)
def test_gate_tells_wrong_usage_by_a_status_of_its_own(folder: Callable[..., Path], arguments: list[str]) -> None:
    places = {"RUN": folder("run"), "B": folder("base"), "NONE": "/nowhere/at/all"}
    done = penstock("gate", *(places.get(argument, argument) for argument in arguments))
    assert done.exit_code == 3
    assert done.stderr


def test_gate_tells_a_report_that_cannot_be_written(folder: Callable[..., Path], tmp_path: Path) -> None:
    done = penstock("gate", folder("run"), "--baseline", folder("base"), "--junit", tmp_path / "no" / "junit.xml")
    assert done.exit_code == 3
    assert "cannot be written: No such file or directory" in done.stderr


def test_gate_of_another_machine_on_request(folder: Callable[..., Path]) -> None:
    assert penstock("gate", folder("run", cpu="D"), "--baseline", folder("base"), "--any-machine").exit_code == 0
