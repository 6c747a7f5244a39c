"""The command `torchserve`: flags, configuration files and environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main as penstock
from penstock.errors import ConfigError
from penstock.torchserve.cli import torchserve
from penstock.torchserve.cli.pid_file import PidFile, pid_path
from penstock.torchserve.cli.torchserve import ServerOptions, parser, resolve_options


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model store in it."""
    (tmp_path / "store").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TS_CONFIG_FILE", "LOG_LOCATION", "TEMP"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def options(*words: str, env: dict[str, str] | None = None) -> ServerOptions:
    return resolve_options(parser().parse_args(words), env or {})


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        torchserve.main(words)
    return end.value.code, capsys.readouterr().out


# ---- flags


def test_every_flag_of_torchserve_is_known() -> None:
    found = options(
        *("--start", "--foreground", "--model-store", "store", "--models", "a=a.mar", "b.mar", "--ncs", "--dt"),
        *("--enable-model-api", "--ppath", "plugins", "--workflow-store", "other"),
    )
    assert found.properties.model_store == "store"
    assert found.properties.load_models == ["a=a.mar", "b.mar"]
    assert found.properties.disable_token_authorization
    assert found.properties.enable_model_api
    assert not found.snapshots
    assert options("--model-store", "store", "--no-config-snapshots").snapshots is False
    assert options("--model-store", "store", "--plugins-path", "x", "--disable-token-auth").snapshots


def test_flags_can_be_abbreviated() -> None:
    assert options("--model-st", "store").properties.model_store == "store"


def test_start_and_stop_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--start", "--stop")[0] == 2
    assert output_of(capsys, "--strat")[0] == 2


def test_the_version_is_torchserves(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = output_of(capsys, "--version")
    assert (status, out.splitlines()[0]) == (0, "TorchServe Version is 0.12.0")


def test_penstock_torchserve_is_the_same_command() -> None:
    done = CliRunner().invoke(penstock, ["torchserve", "--version"])
    assert (done.exit_code, done.output.splitlines()[0]) == (0, "TorchServe Version is 0.12.0")
    assert "--model-store" in CliRunner().invoke(penstock, ["torchserve", "--help"]).output
    assert "torchserve" in CliRunner().invoke(penstock, ["--help"]).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing mandatory parameter --model-store"),
        (["--model-store", "none"], "--model-store directory not found: none"),
        (["--ts-config", "none"], "--ts-config file not found: none"),
        (["--model-store", "store", "--log-config", "none"], "--log-config file not found: {folder}/none"),
        (["--model-store", "store", "--cpp-log-config", "none"], "--cpp-log-config file not found: {folder}/none"),
        (["--model-store", "store", "--workflow-store", "none"], "--workflow-store directory not found: none"),
    ],
)
def test_a_missing_path_is_reported_on_stdout_with_status_1(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output_of(capsys, "--start", *words) == (1, message.format(folder=os.path.realpath(folder)) + "\n")


def test_a_malformed_file_keeps_the_server_from_starting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.properties").write_text("model_store=store\njob_queue_size=many\n")
    status, out = output_of(capsys, "--start", "--ts-config", "config.properties")
    assert status == 1
    assert out.startswith("config.properties:2: job_queue_size: found the string 'many', expected a whole number")


def test_an_invalid_temporary_folder_is_reported() -> None:
    with pytest.raises(ConfigError, match="Invalid temp directory: /none, please check TEMP environment variable"):
        options("--model-store", "store", env={"TEMP": "/none"})


def test_a_running_server_is_reported_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = PidFile(str(folder / ".model_server.pid"))
    message = "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
    assert output_of(capsys, "--start", "--model-store", "none") == (1, message)
    own.remove()


def test_stopping_without_a_server_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--stop") == (0, "TorchServe is not currently running.\n")
    with pytest.raises(SystemExit):
        torchserve.main(["--stop"])
    told = f"No server has {pid_path()}. Stop a server with the TMPDIR with which it was started.\n"
    assert capsys.readouterr().err == told


# ---- which file


def write_config(path: Path, queue: int) -> str:
    path.write_text(f"model_store=store\njob_queue_size={queue}\n")
    return str(path)


def test_the_file_in_the_environment_overrides_the_flag(folder: Path) -> None:
    one, two = write_config(folder / "one", 1), write_config(folder / "two", 2)
    assert options("--ts-config", one).properties.job_queue_size == 1
    assert options("--ts-config", one, env={"TS_CONFIG_FILE": two}).properties.job_queue_size == 2


def test_without_a_named_file_the_last_snapshot_or_the_local_file_is_used(folder: Path) -> None:
    here = write_config(folder / "config.properties", 3)
    assert options().properties.job_queue_size == 3
    (folder / "logs" / "config").mkdir(parents=True)
    write_config(folder / "logs" / "config" / "20260101000000000-startup.cfg", 4)
    write_config(folder / "logs" / "config" / "20260101000000001-snapshot.cfg", 5)
    assert options().properties.job_queue_size == 5
    assert options("--ncs").properties.job_queue_size == 3
    assert options("--ts-config", here).properties.job_queue_size == 3
    assert options(env={"LOG_LOCATION": str(folder / "other")}).properties.job_queue_size == 3


def test_flags_override_the_file(folder: Path) -> None:
    (folder / "config.properties").write_text("model_store=other\nload_models=all")
    found = options("--model-store", "store", "--models", "b.mar").properties
    assert (found.model_store, found.load_models) == ("store", ["b.mar"])


def test_the_command_loads_neither_the_engine_nor_numpy() -> None:
    code = (
        "import sys, penstock.torchserve.cli.torchserve\n"
        "heavy = {'numpy', 'penstock.core.engine', 'asyncio', 'psutil', 'uvloop', 'httptools'}\n"
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"
