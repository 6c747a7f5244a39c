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

    monkeypatch.setattr("penstock.perf.tune.app.open_target", start)
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
        (["app.py:Net", "--space", "device=cuda"], "devices: found cuda, but this machine has cpu"),
        (["app.py:Net", "--set", 'models.net.devices=["cuda"]'], "devices: found cuda, but this machine has cpu"),
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
        (["app.py:Net", "--token-file", "none"], "cannot be read"),
    ],
)
def test_wrong_usage_is_reported_in_one_line_before_anything_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.core.engine.rules.visible_gpus", lambda: 0)
    slo = [] if "--slo" in words else ["--slo", "p99<=100ms"]
    found = run(*words, *slo)
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1)
    assert found.stderr.startswith("penstock: ")
    assert message in found.stderr


def test_the_slo_limits_errors_even_if_it_does_not_say_so() -> None:
    assert read_job("app.py:Net", flags()).slo.text == "p99<=100ms,error<=1%"
    slo = "p99<=100ms,error<=5%"
    assert read_job("app.py:Net", flags(slo=slo)).slo.text == slo


def test_the_default_space_has_batches_and_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    found = read_job("app.py:Net", flags())
    assert found.space.text == "batch=1,2,4,8,16,32,instances=1,2,4"
    assert found.folder == Path("tune-net")


def test_a_list_of_sizes_leaves_no_choice_of_batches() -> None:
    listed = ("models.net.batching.sizes=[1, 8]",)
    assert read_job("app.py:Net", flags(sets=listed)).space.text.startswith("instances=")
    assert read_job("app.py:Net", flags(sets=listed, space="batch=4,sizes=auto")).space.text == "batch=4,sizes=auto"
    with pytest.raises(ConfigError, match=r"found batch, but the model has batching\.sizes = \[1, 8\], whose last one"):
        read_job("app.py:Net", flags(sets=listed, space="batch=4"))


def test_gpu_adds_devices_unless_the_space_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "check_devices", lambda model: None)
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


def test_a_search_resumes_only_with_the_same_app_requests_and_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "net.pt").write_bytes(b"1")

    def identity(**other: Any) -> dict[str, str]:
        return job.identity(read_job("app.py:Net", flags(sets=('models.net.weights="net.pt"',), **other)))

    before = identity()
    assert identity() == before
    for other in ({"slo": "p99<=99ms"}, {"space": "batch=1,2"}, {"seed": 1}, {"effort": "quick"}, {"data": "app.py"}):
        assert identity(**other) != before
    for name in ("app.py", "net.pt"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"\n")
        assert identity() != before
        (folder / name).write_bytes(content)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    asked = read_job("app.py:Net", flags())
    monkeypatch.setattr(job.Path, "open", refused)
    with pytest.raises(ConfigError, match=r"app\.py: cannot be read: Permission denied"):
        job.identity(asked)


def test_a_search_that_fails_before_its_first_answer_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[JournalEntry] = []

    def search(_: object, __: object, journal: Journal, ___: str) -> None:
        for entry in known:
            journal.add(entry)
        raise ConfigError("the app cannot answer the requests")

    monkeypatch.setattr(job, "run_search", search)
    words = ("app.py:Net", "--slo", "p99<=100ms")
    assert run(*words).exit_code == 2
    assert not (folder / "tune-net").exists()
    known.append(JournalEntry(key="1", failed="no room"))
    for _ in range(2):
        assert run(*words).exit_code == 2
        assert (folder / "tune-net" / "journal.jsonl").read_text().count("no room") == 1
        known.clear()
    (folder / "tune-net" / "mine.txt").write_text("")
    assert run(*words, "--no-resume").exit_code == 2
    assert [path.name for path in (folder / "tune-net").iterdir()] == ["mine.txt"], (
        "starting over deletes only its files"
    )


def test_a_folder_with_other_files_is_rejected(folder: Path) -> None:
    (folder / "tune-net").mkdir()
    (folder / "tune-net" / "photo.jpg").write_text("")
    found = run("app.py:Net", "--slo", "p99<=100ms")
    assert found.exit_code == 2
    assert "expected an empty folder or a results folder" in found.stderr


@pytest.mark.parametrize(("effort", "warned"), [("normal", True), ("quick", False)])
def test_a_budget_too_short_for_any_proof_is_reported_at_once(effort: str, warned: bool) -> None:
    stderr = run("app.py:Net", "--slo", "p99<=2s", "--budget", "20s", "--effort", effort).stderr
    assert ("--budget 20s ends before anything is proven: the runs of the proof alone take 90s" in stderr) == warned
