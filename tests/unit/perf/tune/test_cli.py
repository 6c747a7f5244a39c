from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.perf.tune import job
from penstock.perf.tune.job import read_job
from penstock.perf.tune.runner import Journal, JournalEntry

APP = """
class Net:
    def predict(self, items):
        return items
"""
TOML = """
[models.one]
target = "app.py:Net"

[models.two]
target = "app.py:Net"
instances = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the app; starting a server fails the test."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "two.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("penstock.perf.tune.server.open_target", start)
    return tmp_path


def flags(**given: Any) -> dict[str, Any]:
    names = ("space", "write", "data", "accuracy_check", "output", "model", "token_file", "price", "budget")
    plain = {"slo": "p99<=100ms", "search": "auto", "effort": "normal", "seed": 0, "tolerance": 0.01}
    return {**dict.fromkeys(names), **plain, "options": (), "sets": (), "gpu": False, **given}


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["tune", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["app.py:Net", "--slo", "p99<100"], 'SLO part "p99<100": expected us or ms or s'),
        (["app.py:Net", "--slo", "throughput>=5/s"], "bounds no latency"),
        (["app.py:Net", "--slo", "error<=1%"], '--slo "error<=1%" bounds no latency'),
        (["app.py:Net", "--space", "batsh=1"], "there is no parameter 'batsh'; did you mean 'batch'?"),
        (["app.py:Net", "--space", "batch="], "'batch' has an empty value"),
        (["app.py:Net", "--space", ""], "space: '' names no parameter; expected for instance"),
        (["app.py:Net", "--space", "instances=0"], "space: instances: found 0, expected a whole number from 1 to 4096"),
        (["app.py:Net", "--space", "device=cuda"], "device=cuda: this machine has no GPU"),
        (["app.py:Net", "--set", 'models.net.devices=["cuda"]'], "device=cuda: this machine has no GPU"),
        (["app.py:Net", "--accuracy-check", "no.jsonl"], "--accuracy-check no.jsonl: no such file"),
        (["app.py:Net", "--write", "no/penstock.toml"], "there is no writable folder"),
        (["app.py:Net", "--write", "two.toml"], "there is no [models.net]"),
        (["app.py:Net", "--write", "app.py"], "not valid TOML"),
        (["http://127.0.0.1:8080"], "is a running server; expected a target of penstock serve"),
        (["net.mar"], "is a TorchServe archive"),
        (["two.toml"], "two.toml has one, two; choose the one to tune with --model NAME"),
        (["two.toml", "--model", "tow"], "two.toml has one, two; did you mean 'two'?"),
        (["two.toml", "--model", "two", "--option", "a=1"], "--option is for a model named on the command line"),
        (["app.py:Net", "--option", "a"], "found no NAME=VALUE"),
        (["none.toml"], "no such file"),
    ],
)
def test_wrong_usage_is_reported_in_one_line_before_anything_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.perf.tune.job.visible_gpus", lambda: 0)
    slo = [] if "--slo" in words else ["--slo", "p99<=100ms"]
    found = run(*words, *slo)
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1)
    assert found.stderr.startswith("penstock: ")
    assert message in found.stderr


def test_an_slo_is_required() -> None:
    found = run("app.py:Net")
    assert found.exit_code == 2
    assert "Missing option '--slo'" in found.stderr


def test_the_slo_limits_errors_even_if_it_does_not_say_so() -> None:
    assert read_job("app.py:Net", flags()).slo.text == "p99<=100ms,error<=1%"
    slo = "p99<=100ms,error<=5%"
    assert read_job("app.py:Net", flags(slo=slo)).slo.text == slo


def test_the_default_space_has_batches_and_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    found = read_job("app.py:Net", flags())
    assert found.space.text == "batch=1,2,4,8,16,32,instances=1,2,4"
    assert found.folder == Path("tune-net")


def test_gpu_adds_devices_unless_the_space_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.perf.tune.job.visible_gpus", lambda: 1)
    assert read_job("app.py:Net", flags(gpu=True, space="batch=1")).space.text == "batch=1,device=cpu,cuda"
    assert read_job("app.py:Net", flags(gpu=True, space="device=cuda")).space.text == "device=cuda"


def test_the_model_of_a_configuration_is_tuned_with_its_keys(folder: Path) -> None:
    found = read_job("two.toml", flags(model="two", write="two.toml", sets=("models.two.threads=1",)))
    assert (found.tuned.section, found.tuned.model.instances, found.tuned.model.threads) == ("two", 3, 1)
    assert found.tuned.sets == ("models.two.threads=1",)
    assert found.file is not None
    assert found.file.name == "two"


def test_options_of_the_command_line_reach_the_server() -> None:
    found = read_job("app.py:Net", flags(options=("width=3",)))
    assert found.tuned.model.options == {"width": 3}
    assert found.tuned.sets == ('models."net".options.width=3',)


def test_a_changed_app_is_another_search(folder: Path) -> None:
    before = job.identity(read_job("app.py:Net", flags()))
    assert job.identity(read_job("app.py:Net", flags())) == before
    (folder / "app.py").write_text(APP + "\n")
    assert job.identity(read_job("app.py:Net", flags())) != before
    for other in ({"slo": "p99<=99ms"}, {"space": "batch=1,2"}, {"seed": 1}, {"effort": "quick"}, {"data": "app.py"}):
        assert job.identity(read_job("app.py:Net", flags(**other))) != before


def test_changed_weights_are_another_search(folder: Path) -> None:
    weights = flags(sets=('models.net.weights="net.pt"',))
    found = []
    for content in (b"1", b"2", b"1"):
        (folder / "net.pt").write_bytes(content)
        found.append(job.identity(read_job("app.py:Net", weights)))
    assert found[0] == found[2] != found[1]


def test_an_unreadable_file_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = read_job("app.py:Net", flags())

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(job.Path, "open", refused)
    with pytest.raises(ConfigError, match=r"app\.py: cannot be read: Permission denied"):
        job.identity(asked)


def test_starting_over_deletes_only_files_of_a_run(folder: Path) -> None:
    results = folder / "tune-net"
    results.mkdir()
    for name in ("run.json", "records.jsonl", "journal.jsonl", "summary.csv", "report.md", "settings.csv", "mine.txt"):
        (results / name).write_text("")
    job._delete_results(results)
    assert [p.name for p in results.iterdir()] == ["mine.txt"]


def test_a_search_that_fails_before_its_first_answer_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[JournalEntry] = []

    def search(_: object, __: object, journal: Journal, ___: str) -> None:
        for answer in answers:
            journal.add(answer)
        raise ConfigError("the app cannot answer the requests")

    monkeypatch.setattr(job, "_search", search)
    words = ("app.py:Net", "--slo", "p99<=100ms")
    assert run(*words).exit_code == 2
    assert not (folder / "tune-net").exists()
    answers.append(JournalEntry(key="1", failed="no room"))
    for _ in range(2):
        assert run(*words).exit_code == 2
        assert (folder / "tune-net" / "journal.jsonl").read_text().count("no room") == 1
        answers.clear()


def test_a_folder_with_other_files_is_rejected(folder: Path) -> None:
    (folder / "tune-net").mkdir()
    (folder / "tune-net" / "photo.jpg").write_text("")
    found = run("app.py:Net", "--slo", "p99<=100ms")
    assert found.exit_code == 2
    assert "expected an empty folder or a results folder" in found.stderr


def test_a_missing_token_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job("app.py:Net", flags(token_file="none"))


@pytest.mark.parametrize(("effort", "warned"), [("normal", True), ("quick", False)])
def test_a_budget_too_short_for_any_proof_is_reported_at_once(effort: str, warned: bool) -> None:
    stderr = run("app.py:Net", "--slo", "p99<=2s", "--budget", "20s", "--effort", effort).stderr
    assert ("--budget 20s ends before anything is proven: the runs of the proof alone take 90s" in stderr) == warned
