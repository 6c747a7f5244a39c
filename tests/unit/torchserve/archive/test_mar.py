from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ArchiveError
from penstock.torchserve.archive.manifest import MANIFEST
from penstock.torchserve.archive.mar import read_archive, read_folder


@pytest.mark.parametrize("kind", ["mar", "tgz"])
def test_an_archive_is_unpacked_and_read(archives: Any, tmp_path: Path, kind: str):
    found = read_archive(getattr(archives, kind)(), tmp_path / "target")
    assert found.folder == tmp_path / "target"
    assert found.has_manifest
    assert (found.manifest.model_name, found.manifest.handler) == ("m", "h.py")
    assert (found.folder / "h.py").is_file()


def test_a_file_that_is_no_mar_is_read_as_tar_whatever_its_name(archives: Any, tmp_path: Path):
    assert read_archive(archives.tgz(name="model.data"), tmp_path / "t").manifest.model_name == "m"


def test_a_folder_is_read_where_it_is(archives: Any, tmp_path: Path):
    tree = archives.tree()
    assert read_archive(tree, tmp_path / "target").folder == tree
    assert not (tmp_path / "target").exists()


def test_the_one_folder_in_a_folder_is_meant(archives: Any):
    outer = archives.tree({f"inner/{name}": data for name, data in archives.files().items()}, "outer")
    assert read_folder(outer).folder == outer / "inner"


def test_a_folder_with_a_manifest_only_is_itself_meant(archives: Any):
    tree = archives.tree({MANIFEST: archives.manifest(handler="image_classifier")})
    assert read_folder(tree).folder == tree


def test_without_a_manifest_the_model_is_named_after_the_file(archives: Any, tmp_path: Path):
    found = read_archive(archives.mar({"h.py": b"", "w.pt": b""}, "resnet-18.mar"), tmp_path / "t")
    assert not found.has_manifest
    assert (found.manifest.model_name, found.manifest.model_version) == ("resnet-18", "1.0")
    assert (found.manifest.handler, found.manifest.runtime, found.manifest.raw) == ("", "python", {})
    assert read_folder(tmp_path / "t", name="given").manifest.model_name == "given"


@pytest.mark.parametrize("kind", ["mar", "tgz"])
@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"{", "is not JSON"),
        (b" " * 2**21, "more than"),
        (b'{"model": {"modelName": "m", "handler": "../../x"}}', "handler: .*climb"),
        (b'{"model": {"modelName": "../x", "handler": "h.py"}}', "the model's name is '../x'"),
    ],
)
def test_an_archive_with_a_bad_manifest_leaves_nothing(
    archives: Any, tmp_path: Path, kind: str, manifest: bytes, said: str
):
    inner = "" if kind == "mar" else "m/"
    path = getattr(archives, kind)({f"{inner}h.py": b"", f"{inner}{MANIFEST}": manifest})
    with pytest.raises(ArchiveError, match=said):
        read_archive(path, tmp_path / "in" / "target")
    assert list((tmp_path / "in").iterdir()) == []


def test_a_manifest_that_is_a_folder_is_told(archives: Any):
    tree = archives.tree({f"{MANIFEST}/x": b"", "h.py": b""})
    with pytest.raises(ArchiveError, match="cannot be read: Is a directory"):
        read_folder(tree)
