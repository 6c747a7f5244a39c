import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import runs
from penstock.runs import MOST, Run, folder, running


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_run_is_listed_with_its_progress_until_it_ends() -> None:
    with Run("caption", "captions.jsonl") as run:
        run.write(5, 10, "5 of 10")
        run.write(6, 10, "too early to be written again")
        (found,) = running()
        assert (found["kind"], found["name"], found["pid"]) == ("caption", "captions.jsonl", os.getpid())
        assert (found["done"], found["total"], found["text"]) == (5.0, 10.0, "5 of 10")
        assert folder().stat().st_mode & 0o077 == 0
    assert not running()


def test_the_file_of_a_process_that_has_ended_is_removed() -> None:
    script = "from penstock.runs import Run; Run('tune', 'app.py').__enter__()"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(list(folder().iterdir())) == 1
    assert not running()
    assert not list(folder().iterdir())


def test_runs_are_bounded_and_a_folder_of_others_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with Run("caption", "x" * 10_000) as run:
        run.write(1, None, "y" * 10_000)
        (path,) = folder().iterdir()
        for i in range(MOST + 5):
            (folder() / f"{i}-copy.json").write_text(path.read_text())
        assert len(running()) == MOST
        assert running()[0]["total"] is None
        folder().chmod(0o777)
        assert not running()


def test_a_run_whose_folder_cannot_be_made_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/none")
    with Run("caption", "x") as run:
        run.write(1, 2, "")
    assert not running()


fields = st.dictionaries(
    st.sampled_from(["pid", "kind", "name", "text", "began_s", "done", "total"]), st.integers() | st.none()
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.builds(lambda value: json.dumps(value).encode(), fields | st.lists(st.integers())))
def test_damaged_files_are_not_shown(data: bytes) -> None:
    folder().mkdir(mode=0o700, exist_ok=True)
    (folder() / "1-x.json").write_bytes(data)
    for run in running():
        assert set(run) == {*runs._SHOWN, "total"}
