"""Every block of the README runs in a fresh checkout, in order and as written; only ports and durations differ."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.pages import ROOT, PageShell, blocks, write

README = (ROOT / "README.md").read_text()
SHELL = [text for language, text in blocks(README) if not language]
SHORTER = {
    "--frames 60": "--frames 20",
    "--concurrency 1,8,64": "--concurrency 8 --duration 0.3 --warmup 0",
    "--budget 5m": "--budget 8s --effort quick --warmup 0.2 --space batch=8,instances=1",
    "p99<=20ms": "p50<=200ms",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> PageShell:
    """A folder with the tracked examples and the files of the README."""
    folder = tmp_path_factory.mktemp("checkout")
    tracked = subprocess.run(["git", "ls-files", "-z", "examples"], cwd=ROOT, capture_output=True, check=True)
    for name in tracked.stdout.decode().rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for language, text in blocks(README):
        if language:
            write(text, folder)
    return PageShell(folder, shorter=SHORTER)


def block(part: str) -> str:
    """The one shell block with this text."""
    (found,) = [text for text in SHELL if part in text]
    return found


SETUP = ("make demo", "python3 -m venv")
RUN = ("app.py:shout", "photos.toml", "torchserve --start", "penstock caption", "penstock tune")


def test_each_shell_block_has_a_test() -> None:
    assert [sum(part in text for part in (*SETUP, *RUN)) for text in SHELL] == [1] * (len(SETUP) + len(RUN))
    assert len(README.splitlines()) <= 150


def test_the_make_targets_and_the_extras_exist_and_a_virtual_environment_precedes_pip() -> None:
    lines = [line for text in SHELL for line in text.splitlines()]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "demo-captions"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    pip = [line for line in lines if line.startswith("pip install")]
    venv = lines.index("python3 -m venv .venv")
    assert lines[venv + 1] == ". .venv/bin/activate"
    assert venv < lines.index(pip[0])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in pip:
        named = re.fullmatch(r"pip install (?:\.|'\.\[([a-z,]+)\]')", line)
        assert named is not None, line
        assert set((named[1] or "bench").split(",")) <= extras.keys()


def test_the_first_model_answers_and_its_metrics_are_exposed(checkout: PageShell) -> None:
    shown = checkout.run(block("app.py:shout"))
    assert shown.startswith("HELLO")
    assert 'penstock_answers_total{model="shout",version="1",outcome="ok"} 1' in shown


def test_the_streamer_runs(checkout: PageShell) -> None:
    assert checkout.run("python streamed.py\n") == "['HELLO']\n['HELLO', 'WORLD']\n"


def test_the_pipeline_recognises_the_digit(checkout: PageShell) -> None:
    (probabilities,) = json.loads(checkout.run(block("photos.toml")))
    assert probabilities.index(max(probabilities)) == 7


def test_the_torchserve_commands_archive_serve_and_stop(checkout: PageShell) -> None:
    shown = checkout.run(block("torchserve --start"))
    assert "HELLO" in shown
    assert "TorchServe has stopped." in shown


@pytest.mark.slow
def test_the_videos_are_generated_and_captioned(checkout: PageShell) -> None:
    checkout.run(block("penstock caption"))
    lines = (checkout.folder / "captions.jsonl").read_text().splitlines()
    assert [json.loads(line)["frame"] for line in lines] == [*range(20), *range(20)]


@pytest.mark.slow
def test_the_model_is_measured_and_tuned(checkout: PageShell) -> None:
    checkout.run(block("penstock tune"))


def test_the_page_names_existing_files() -> None:
    for path in re.findall(r"\]\(((?!https?:)[^)#]+)", README):
        assert Path(ROOT / path).exists(), path
