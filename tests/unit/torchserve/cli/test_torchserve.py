"""What flags, file and environment make of a `torchserve` command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import main as penstock
from penstock.config.addresses import Address
from penstock.errors import ConfigError
from penstock.torchserve.admin.launch import PidFile
from penstock.torchserve.cli import torchserve
from penstock.torchserve.cli.flags import Settings, parser, settings_of
from penstock.torchserve.cli.server import face_of, limits_of, listeners_of
from penstock.torchserve.config.properties import Properties


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


def settings(*words: str, env: dict[str, str] | None = None) -> Settings:
    return settings_of(parser().parse_args(words), env or {})


def told_by(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        torchserve.main(words)
    return end.value.code, capsys.readouterr().out


# ---- flags


def test_every_flag_of_torchserve_is_known() -> None:
    found = settings(
        *("--start", "--foreground", "--model-store", "store", "--models", "a=a.mar", "b.mar", "--ncs", "--dt"),
        *("--enable-model-api", "--ppath", "plugins", "--workflow-store", "other"),
    )
    assert found.properties.model_store == "store"
    assert found.properties.load_models == ["a=a.mar", "b.mar"]
    assert found.properties.disable_token_authorization
    assert found.properties.enable_model_api
    assert not found.snapshots
    assert settings("--model-store", "store", "--no-config-snapshots").snapshots is False
    assert settings("--model-store", "store", "--plugins-path", "x", "--disable-token-auth").snapshots


def test_words_may_be_cut_short_as_with_argparse() -> None:
    assert settings("--model-st", "store").properties.model_store == "store"


def test_start_and_stop_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert told_by(capsys, "--start", "--stop")[0] == 2
    assert told_by(capsys, "--strat")[0] == 2


def test_the_version_is_that_of_the_compatible_torchserve(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = told_by(capsys, "--version")
    assert (status, out.splitlines()[0]) == (0, "TorchServe Version is 0.12.0")


def test_penstock_torchserve_is_the_same_command() -> None:
    done = CliRunner().invoke(penstock, ["torchserve", "--version"])
    assert (done.exit_code, done.output.splitlines()[0]) == (0, "TorchServe Version is 0.12.0")
    assert "--model-store" in CliRunner().invoke(penstock, ["torchserve", "--help"]).output
    assert "torchserve" in CliRunner().invoke(penstock, ["--help"]).output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "Missing mandatory parameter --model-store"),
        (["--model-store", "none"], "--model-store directory not found: none"),
        (["--ts-config", "none"], "--ts-config file not found: none"),
        (["--model-store", "store", "--log-config", "none"], "--log-config file not found: {folder}/none"),
        (["--model-store", "store", "--cpp-log-config", "none"], "--cpp-log-config file not found: {folder}/none"),
        (["--model-store", "store", "--workflow-store", "none"], "--workflow-store directory not found: none"),
    ],
)
def test_what_is_missing_is_told_on_stdout_with_status_1(
    words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_by(capsys, "--start", *words) == (1, told.format(folder=os.path.realpath(folder)) + "\n")


def test_a_malformed_file_keeps_the_server_from_starting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.properties").write_text("model_store=store\njob_queue_size=many\n")
    status, out = told_by(capsys, "--start", "--ts-config", "config.properties")
    assert status == 1
    assert out.startswith("config.properties:2: job_queue_size: found 'many', expected a whole number")


def test_a_wrong_temporary_folder_is_told() -> None:
    with pytest.raises(ConfigError, match="Invalid temp directory: /none, please check TEMP environment variable"):
        settings("--model-store", "store", env={"TEMP": "/none"})


def test_one_that_runs_is_told_before_anything_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = PidFile(str(folder / ".model_server.pid"))
    told = "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
    assert told_by(capsys, "--start", "--model-store", "none") == (1, told)
    own.remove()


def test_stopping_without_a_server_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert told_by(capsys, "--stop") == (0, "TorchServe is not currently running.\n")


# ---- which file


def write_config(path: Path, queue: int) -> str:
    path.write_text(f"model_store=store\njob_queue_size={queue}\n")
    return str(path)


def test_the_file_of_the_environment_is_stronger_than_the_flag(folder: Path) -> None:
    one, two = write_config(folder / "one", 1), write_config(folder / "two", 2)
    assert settings("--ts-config", one).properties.job_queue_size == 1
    assert settings("--ts-config", one, env={"TS_CONFIG_FILE": two}).properties.job_queue_size == 2


def test_without_a_named_file_the_last_snapshot_is_restored_else_the_one_here(folder: Path) -> None:
    here = write_config(folder / "config.properties", 3)
    assert settings().properties.job_queue_size == 3
    (folder / "logs" / "config").mkdir(parents=True)
    write_config(folder / "logs" / "config" / "20260101000000000-startup.cfg", 4)
    write_config(folder / "logs" / "config" / "20260101000000001-snapshot.cfg", 5)
    assert settings().properties.job_queue_size == 5
    assert settings("--ncs").properties.job_queue_size == 3
    assert settings("--ts-config", here).properties.job_queue_size == 3
    assert settings(env={"LOG_LOCATION": str(folder / "other")}).properties.job_queue_size == 3


def test_flags_are_stronger_than_the_file(folder: Path) -> None:
    (folder / "config.properties").write_text("model_store=other\nload_models=all")
    found = settings("--model-store", "store", "--models", "b.mar").properties
    assert (found.model_store, found.load_models) == ("store", ["b.mar"])


# ---- what the server makes of it


def groups_of(**keys: Any) -> list[list[str]]:
    """The groups of each listener."""
    return [sorted(groups) for _, groups in listeners_of(Properties(**keys))]


def test_equal_addresses_share_a_listener() -> None:
    one = "http://127.0.0.1:9"
    assert listeners_of(Properties(inference_address=one, management_address=one, metrics_address=one)) == [
        (Address("127.0.0.1", 9), {"inference", "management", "metrics"})
    ]
    assert groups_of(inference_address=one, metrics_address=one) == [["inference", "metrics"], ["management"]]


def test_port_0_is_another_port_for_each_listener() -> None:
    one = "http://127.0.0.1:0"
    assert groups_of(inference_address=one, management_address=one) == [["inference"], ["management"], ["metrics"]]


def test_a_listener_that_inference_and_management_share_has_the_metrics_too() -> None:
    one = "unix:/tmp/both"
    found = groups_of(inference_address=one, management_address=one)
    assert found == [["inference", "management", "metrics"], ["metrics"]]


def test_without_the_metrics_api_nothing_listens_for_it() -> None:
    assert groups_of(enable_metrics_api=False) == [["inference"], ["management"]]


def test_a_face_shows_what_the_file_says() -> None:
    face = face_of(
        Properties(decode_input_request=False, cors_allowed_origin="*", ts_open_inference_protocol=True),
        {"inference"},
    )
    assert (face.codec, face.cors_origin, face.open_inference, face.model_api) == ("torchserve_raw", "*", True, False)


def test_the_largest_request_fits_into_the_limits() -> None:
    limits = limits_of(Properties(max_request_size=500_000_000))
    assert limits.max_body_bytes == 500_000_000
    assert limits.pool_bytes >= 2 * limits.max_body_bytes
    assert limits.max_queue_bytes >= limits.max_body_bytes
    assert limits.body_timeout_s > 400, "1 MB/s is enough"
    assert limits_of(Properties()).body_timeout_s == 30


def test_the_command_loads_neither_the_engine_nor_numpy() -> None:
    code = (
        "import sys, penstock.torchserve.cli.torchserve\n"
        "heavy = {'numpy', 'penstock.engine', 'asyncio', 'psutil', 'uvloop', 'httptools'}\n"
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"
