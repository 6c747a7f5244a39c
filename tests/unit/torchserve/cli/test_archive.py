import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.torchserve.cli.archive import archive, archive_workflow


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ts_handler.py").write_text("def handle(data, context): return data\n")
    (tmp_path / "w.pt").write_bytes(b"weights")
    (tmp_path / "requirements.txt").write_text("numpy\n")
    (tmp_path / "model-config.yaml").write_text("minWorkers: 1\n")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "a.txt").write_text("a")
    (tmp_path / "store").mkdir()
    (tmp_path / "spec.yaml").write_text("models: {}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str) -> Result:
    return CliRunner().invoke(archive, words.split(), prog_name="torch-model-archiver")


def run_workflow(words: str) -> Result:
    return CliRunner().invoke(archive_workflow, words.split(), prog_name="torch-workflow-archiver")


def test_the_usual_command_writes_to_the_working_directory(work: Path):
    found = run("--model-name blip2 --version 1.0 --handler ts_handler.py")
    assert (found.exit_code, found.output) == (0, "")
    with zipfile.ZipFile("blip2.mar") as z:
        assert z.namelist() == ["ts_handler.py", "MAR-INF/MANIFEST.json"]


def test_every_flag_is_accepted(work: Path):
    found = run(
        "--model-name m -v 2.0 --handler ts_handler.py:handle --serialized-file w.pt --model-file ts_handler.py "
        "--extra-files extra,w.pt --runtime python3 --export-path store --archive-format zip-store -f "
        "-r requirements.txt -c model-config.yaml"
    )
    assert (found.exit_code, found.output) == (0, "")
    with zipfile.ZipFile("store/m.mar") as z:
        manifest = json.loads(z.read("MAR-INF/MANIFEST.json"))
    assert manifest["runtime"] == "python3"
    assert manifest["model"] == {
        "modelName": "m",
        "serializedFile": "w.pt",
        "handler": "ts_handler.py:handle",
        "modelFile": "ts_handler.py",
        "modelVersion": "2.0",
        "requirementsFile": "requirements.txt",
        "configFile": "model-config.yaml",
    }


@pytest.mark.parametrize(("archive_format", "made"), [("tgz", "m.tar.gz"), ("no-archive", "m"), ("default", "m.mar")])
def test_the_format_determines_the_name(work: Path, archive_format: str, made: str):
    assert run(f"--model-name m --version 1 --handler ts_handler --archive-format {archive_format}").exit_code == 0
    assert Path(made).exists()


def test_an_unambiguous_abbreviation_of_a_flag_is_accepted(work: Path):
    assert run("--model-n m --ver 1 --hand ts_handler --ser w.pt --archive-format=tgz").exit_code == 0
    found = run("--model m --version 1 --handler ts_handler")  # --model-name or --model-file
    assert found.exit_code == 2
    assert "No such option" in found.output


WRONG = {
    "name": ("--model-name ../x --version 1 --handler ts_handler", 1, "the model's name is '../x'; expected"),
    "handler": ("--model-name m --version 1 --handler nono", 1, "handler: there is no file nono.py; expected FILE"),
    "weights": ("--model-name m --version 1 --handler ts_handler --serialized-file x.pt", 1, "there is no file x.pt"),
    "export": ("--model-name m --version 1 --handler ts_handler --export-path no", 1, "no is not a folder"),
    "no version": ("--model-name m --handler ts_handler", 2, "Missing option '-v' / '--version'"),
    "no handler": ("--model-name m --version 1", 2, "Missing option '--handler'"),
    "no name": ("--handler ts_handler --version 1", 2, "Missing option '--model-name'"),
    "runtime": ("--model-name m --version 1 --handler ts_handler --runtime perl", 2, "'perl' is not one of 'python'"),
    "format": ("--model-name m --version 1 --handler ts_handler --archive-format rar", 2, "'rar' is not one of"),
    "flag": ("--model-name m --version 1 --handler ts_handler --nono", 2, "--nono"),
    "word": ("--model-name m --version 1 --handler ts_handler extra", 2, "unexpected extra argument (extra)"),
}


WRONG_WORKFLOWS = {
    "no specification": ("--workflow-name w", 2, "--spec-file"),
    "workflow": ("--workflow-name ../w --spec-file spec.yaml", 1, "the model's name is '../w'"),
    "specification": ("--workflow-name w --spec-file none.yaml", 1, "spec file: there is no file none.yaml"),
    "functions": ("--workflow-name w --spec-file spec.yaml --handler no.py", 1, "handler: there is no file no.py"),
    "extra": ("--workflow-name w --spec-file spec.yaml --extra-files no", 1, "there is no file or folder no"),
    "store": ("--workflow-name w --spec-file spec.yaml --export-path no", 1, "no is not a folder"),
}


@pytest.mark.parametrize(
    ("command", "words", "code", "printed"),
    [(run, *each) for each in WRONG.values()] + [(run_workflow, *each) for each in WRONG_WORKFLOWS.values()],
    ids=[*WRONG, *WRONG_WORKFLOWS],
)
def test_a_wrong_command_reports_it_and_writes_nothing(
    work: Path, command: Callable[[str], Result], words: str, code: int, printed: str
):
    found = command(words)
    assert found.exit_code == code
    assert printed in found.output
    assert not [*work.rglob("*.mar"), *work.rglob("*.war")]


def test_an_existing_archive_needs_force(work: Path):
    line = "--model-name m --version 1 --handler ts_handler"
    assert run(line).exit_code == 0
    found = run(line)
    assert found.exit_code == 1
    assert found.output.startswith("torch-model-archiver: error: ")
    assert "m.mar already exists; use --force (-f) to overwrite it" in found.output
    assert run(f"{line} --force").exit_code == 0


def test_a_disk_that_is_full_is_reported(work: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    found = run("--model-name m --version 1 --handler ts_handler")
    assert found.exit_code == 1
    assert "the archive cannot be written: [Errno 28] No space left on device" in found.output


def test_penstock_archive_is_the_same_command(work: Path):
    words = ["archive", "--model-name", "m", "--version", "1", "--handler", "ts_handler"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert Path("m.mar").is_file()


def test_torch_model_archiver_is_installed(work: Path):
    command = Path(sys.executable).parent / "torch-model-archiver"
    found = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "--archive-format" in found.stdout


def test_every_flag_of_the_workflow_archiver_is_accepted(work: Path):
    words = (
        "--workflow-name w --spec-file spec.yaml --handler ts_handler.py --extra-files w.pt,extra --export-path store"
    )
    statuses = [run_workflow(each).exit_code for each in (words, words, f"{words} -f")]
    assert statuses == [0, 1, 0]
    with zipfile.ZipFile("store/w.war") as z:
        assert sorted(z.namelist()) == ["WAR-INF/MANIFEST.json", "a.txt", "spec.yaml", "ts_handler.py", "w.pt"]
        manifest = json.loads(z.read("WAR-INF/MANIFEST.json"))
    assert manifest["workflow"] == {"workflowName": "w", "specFile": "spec.yaml", "handler": "ts_handler.py"}
    assert manifest.keys() == {"createdOn", "workflow", "archiverVersion"}
