"""The files of a captioner, and the revision that changes with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from penstock.bulk.captioner.networks import ModelSource, find, revision, sampled_places
from penstock.errors import LoadFailed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text("{}")
    (tmp_path / "net" / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path / "net"


def test_a_folder_gives_the_model_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(str(folder)) == ModelSource("net", folder)
    monkeypatch.chdir(folder)
    assert find(".").name == "net"


@pytest.mark.parametrize("missing", ["/nowhere/net", "./net", "~/no such net", "a/b/c"])
def test_a_missing_folder_is_not_requested_from_the_hub(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(LoadFailed, match="there is no folder"):
        find(missing)


def test_a_hub_name_is_downloaded_without_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("org/net") == ModelSource("org/net", folder)
    assert asked == [("org/net", ["*.json", "*.txt", "*.model", "*.safetensors"])]


def test_a_failed_download_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        LoadFailed,
        match=r"org/net is not a folder, and cannot be downloaded from .*: OSError: no network",
    ):
        find("org/net")


def test_pickled_weights_require_trust(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadFailed, match="no weights in safetensors, only pickled ones, which require trust"):
        find(str(folder))
    assert find(str(folder), trust="pickle").folder == folder
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(LoadFailed, match=r"no weights in safetensors$"):
        find(str(folder), trust="pickle")
    assert find(str(folder), weights=False).folder == folder


def test_a_folder_without_a_configuration_is_rejected(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(LoadFailed, match=r"has no config\.json"):
        find(str(folder))


def test_a_revision_depends_on_the_contents_only(folder: Path, tmp_path: Path) -> None:
    before = revision(ModelSource("net", folder), {"prompt": ""})
    assert len(before) == 16
    copied = tmp_path / "elsewhere"
    shutil.copytree(folder, copied)
    os.utime(copied / "config.json", (0, 0))
    (copied / "README.md").write_text("nothing that matters")
    assert revision(ModelSource("other name", copied), {"prompt": ""}) == before


CHANGES: dict[str, Callable[[Path], object]] = {
    "a setting file": lambda f: (f / "config.json").write_text(json.dumps({"x": 1})),
    "a new file": lambda f: (f / "generation_config.json").write_text("{}"),
    "a byte of the weights": lambda f: (f / "model.safetensors").write_bytes(bytes(500) + b"\1" + bytes(499)),
    "the length of the weights": lambda f: (f / "model.safetensors").write_bytes(bytes(1001)),
    "the name of the weights": lambda f: (f / "model.safetensors").rename(f / "m.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_revision_changes_with_any_file(change: str, folder: Path) -> None:
    before = revision(ModelSource("net", folder), {})
    CHANGES[change](folder)
    assert revision(ModelSource("net", folder), {}) != before


def test_a_revision_changes_with_the_settings(folder: Path) -> None:
    found = {
        revision(ModelSource("net", folder), settings)
        for settings in ({}, {"precision": "bf16"}, {"precision": "fp32"}, {"prompt": "a"}, {"max_new_tokens": 12})
    }
    assert len(found) == 5
    assert revision(ModelSource("a"), {}) != revision(ModelSource("b"), {})


def test_large_weights_are_sampled(folder: Path) -> None:
    size = 2 * 2**30
    weights = folder / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(size)
    assert sum(count for _, count in sampled_places(size)) == 2**20
    before = revision(ModelSource("net", folder), {})
    for offset in (0, size // 2, size - 1):
        with weights.open("r+b") as file:
            file.seek(offset - offset % 4096 if offset < size - 1 else offset)
            file.write(b"\1" * (2**24 if 0 < offset < size - 1 else 1))  # training changes every 16 MiB
        after = revision(ModelSource("net", folder), {})
        assert after != before
        before = after
