"""What a suite needs is looked up before its first run: archives, inputs, GPUs; and a mistake names file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.suite import Job, Wishes, digest, load_of, prepare
from penstock.bench.suite_yaml import Case, Processor
from penstock.errors import ArchiveError, ConfigError

CPU, ALL, TWO = Processor(), Processor("all"), Processor(2)


def case(folder: Path, url: str = "m.mar", **more: object) -> Case:
    given: dict[str, object] = {"model": "m", "mode": "e", "url": url, "input": "cat.jpg"}
    return Case(folder=folder, where=f"{folder}/models.yaml:2", **{**given, **more})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a YAML, with an archive, an application and an input beside it."""
    for name in ("m.mar", "cat.jpg", "app.py", "net.onnx"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "store" / "folder").mkdir(parents=True)
    (tmp_path / "store" / "stored.mar").write_bytes(b"x")
    return tmp_path


def source(folder: Path, url: str, wishes: Wishes | None = None, **more: object) -> str:
    ((job,), _) = prepare([case(folder, url, **more)], wishes or Wishes(), folder / "downloads", 0)
    return job.source


def test_a_model_is_found_beside_the_yaml_in_the_store_or_by_its_whole_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Wishes(store=folder / "store")
    assert source(folder, "m.mar") == str(folder / "m.mar")
    assert source(folder, str(folder / "m.mar")) == str(folder / "m.mar")
    assert source(folder, f"file://{folder}/m.mar") == str(folder / "m.mar")
    assert source(folder, "stored", store) == source(folder, "stored.mar", store) == f"{folder}/store/stored.mar"
    assert source(folder, "folder", store) == f"{folder}/store/folder"
    assert source(folder, "net.onnx") == str(folder / "net.onnx")
    assert source(folder, "app.py:Model") == f"{folder}/app.py:Model"
    assert source(folder, "package.module:Model") == "package.module:Model"
    monkeypatch.chdir(folder)
    assert source(Path("elsewhere"), "m.mar") == str(folder / "m.mar")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("none.mar", r"models.yaml:2: m e: url: no file 'none.mar' in .*, nor in --model-store"),
        ("none.py:Model", "no file 'none.py'"),
        ("file:///none.mar", "no file '/none.mar'"),
    ],
)
def test_a_model_that_is_not_there_is_told_before_anything_is_started(folder: Path, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(folder, url)


def test_an_archive_that_cannot_be_downloaded_is_told_before_anything_is_started(folder: Path) -> None:
    (folder / "downloads").mkdir()
    with pytest.raises(ArchiveError, match="Failed to download archive from: http://127"):
        source(folder, "http://127.0.0.1:1/m.mar")


def test_what_is_sent_is_found_too_and_an_archive_needs_it(folder: Path) -> None:
    def data(wishes: Wishes, **more: object) -> str | None:
        ((job,), _) = prepare([case(folder, **more)], wishes, folder, 0)
        return job.data

    assert data(Wishes()) == str(folder / "cat.jpg")
    assert data(Wishes(data="random")) == "random"
    assert data(Wishes(), url="app.py:Model", input=None) is None
    with pytest.raises(ConfigError, match=r"models.yaml:2: m e: input: no file 'dog.jpg' in [^,]*, nor here$"):
        data(Wishes(data="dog.jpg"))
    with pytest.raises(ConfigError, match="m e has no input, and an archive tells no example; give --data"):
        data(Wishes(), input=None)


def test_a_gpu_that_is_not_there_is_told_before_anything_is_started(folder: Path) -> None:
    asks = case(folder, processors=(CPU, ALL))
    with pytest.raises(ConfigError, match="m e asks for gpus all, and this machine has none; take it out, or go on"):
        prepare([asks], Wishes(), folder, 0)
    (job,), notes = prepare([asks], Wishes(skip_missing_hardware=True), folder, 0)
    assert job.case.processors == (CPU,)
    assert notes == ["m e asks for gpus all, and this machine has none: left out"]
    with pytest.raises(ConfigError, match="nothing is left to run: m e asks for gpus all"):
        prepare([case(folder, processors=(ALL,))], Wishes(skip_missing_hardware=True), folder, 0)
    with pytest.raises(ConfigError, match="asks for gpus 2, and this machine has 1;"):
        prepare([case(folder, processors=(ALL, TWO))], Wishes(), folder, 1)
    (job,), _ = prepare([case(folder, processors=(ALL, TWO))], Wishes(), folder, 2)
    assert job.case.processors == (ALL, TWO)


def test_the_command_line_says_how_many_requests_and_that_is_another_suite(folder: Path) -> None:
    def jobs(requests: int | None) -> list[Job]:
        return prepare([case(folder, concurrency=(4,))], Wishes(requests=requests), folder, 0)[0]

    load = load_of(jobs(7)[0], 4, seed=3)
    assert (load.mode, load.requests, load.concurrency, load.seed) == ("closed", 7, 4, 3)
    assert jobs(None)[0].case.requests == 100
    assert digest(jobs(7)) == digest(jobs(7)) != digest(jobs(8))
