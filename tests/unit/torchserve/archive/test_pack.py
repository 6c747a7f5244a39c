import json
import logging
import os
import tarfile
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ArchiveError
from penstock.torchserve.archive.manifest import MANIFEST
from penstock.torchserve.archive.pack import BUILT_IN, ArchiveContents, Format, pack
from penstock.torchserve.archive.safe_unpack import LIMITS
from support.archives import read_archive

FORMATS: list[Format] = ["default", "zip-store", "tgz", "no-archive"]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of a model."""
    folder = tmp_path / "work"
    files = {
        "h.py": "def handle(data, context): return data\n",
        "net.py": "class Net: pass\n",
        "w.pt": "weights",
        "requirements.txt": "numpy\n",
        "model-config.yaml": "minWorkers: 1\n",
        "extra/a.txt": "a",
        "extra/sub/b.txt": "b",
        "extra/.hidden_file": "c",
        "extra/.git/d": "d",
        "extra/sub/__pycache__/e.pyc": "e",
        "extra/__MACOSX/f": "f",
        "extra/MAR-INF/MANIFEST.json": "not ours",
        "index_to_name.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "out").mkdir()
    monkeypatch.chdir(folder)
    return folder


def parts(**changed: str) -> ArchiveContents:
    return ArchiveContents(**{"model_name": "m", "version": "1.0", "handler": "h.py", **changed})


FULL = {
    "handler": "h:handle",
    "serialized_file": "./w.pt",
    "model_file": "net.py",
    "extra_files": "extra,index_to_name.json",
    "requirements_file": "requirements.txt",
    "config_file": "model-config.yaml",
}


@pytest.mark.parametrize("archive_format", FORMATS)
def test_all_files_lie_at_the_root_of_the_archive(work: Path, files_below: Any, archive_format: Format):
    target = pack(parts(**FULL), Path("out"), archive_format)
    found = read_archive(target, work / "unpacked")
    names = "h.py net.py w.pt requirements.txt model-config.yaml a.txt sub/b.txt .hidden_file index_to_name.json"
    assert set(files_below(found.folder)) == {*names.split(), MANIFEST}
    assert files_below(found.folder)["sub/b.txt"] == b"b"
    tree = found.manifest.raw
    assert tree["model"] == {
        "modelName": "m",
        "serializedFile": "w.pt",
        "handler": "h:handle",
        "modelFile": "net.py",
        "modelVersion": "1.0",
        "requirementsFile": "requirements.txt",
        "configFile": "model-config.yaml",
    }
    assert tree["runtime"] == "python"
    assert tree["archiverVersion"]
    datetime.strptime(tree["createdOn"], "%d/%m/%Y %H:%M:%S")
    assert [p.name for p in Path("out").iterdir()] == [target.name]


def test_the_container_has_the_requested_format(work: Path):
    assert pack(parts(), Path("out")).name == "m.mar"
    with zipfile.ZipFile("out/m.mar") as z:
        assert {i.compress_type for i in z.infolist()} == {zipfile.ZIP_DEFLATED}
    pack(parts(), Path("out"), "zip-store", force=True)
    with zipfile.ZipFile("out/m.mar") as z:
        assert {i.compress_type for i in z.infolist()} == {zipfile.ZIP_STORED}
    with tarfile.open(pack(parts(), Path("out"), "tgz")) as t:
        assert sorted(t.getnames()) == ["m/MAR-INF/MANIFEST.json", "m/h.py"]
        assert {(i.uid, i.uname) for i in t} == {(0, "")}
    assert pack(parts(), Path("out"), "no-archive").is_dir()


@pytest.mark.parametrize("handler", ["h", "h.py", "h:run", "h.py:run", "./h.py", "../work/h.py:run"])
def test_a_handler_is_a_file_with_or_without_a_function(work: Path, handler: str, files_below: Any):
    found = read_archive(pack(parts(handler=handler), Path("out")), work / "t")
    assert found.manifest.handler == handler.rpartition("/")[2]
    assert set(files_below(found.folder)) == {"h.py", MANIFEST}


@pytest.mark.parametrize("handler", BUILT_IN)
def test_a_built_in_handler_has_no_file(work: Path, handler: str, files_below: Any):
    found = read_archive(pack(parts(handler=handler), Path("out")), work / "t")
    assert (found.manifest.handler, set(files_below(found.folder))) == (handler, {MANIFEST})


def test_a_handler_of_the_cpp_runtime_is_a_library(work: Path):
    Path("lib.so").write_bytes(b"\x7fELF")
    with zipfile.ZipFile(pack(parts(handler="lib:Class", runtime="LSP"), Path("out"))) as z:
        assert z.namelist() == ["lib.so", MANIFEST]
        assert json.loads(z.read(MANIFEST))["runtime"] == "LSP"
    with zipfile.ZipFile(pack(parts(handler="BaseHandler", runtime="LSP"), Path("out"), force=True)) as z:
        assert z.namelist() == [MANIFEST]


def test_extra_files_are_a_comma_separated_list_with_globs(
    work: Path, files_below: Any, caplog: pytest.LogCaptureFixture
):
    listed = " extra/*.txt, index_to_name.json,,extra/su?,no*thing "
    found = read_archive(pack(parts(extra_files=listed), Path("out")), work / "t")
    assert set(files_below(found.folder)) == {"h.py", "a.txt", "index_to_name.json", "b.txt", MANIFEST}
    assert "wildcard pattern did not match any file: no*thing" in caplog.text


def test_a_file_named_like_a_glob_is_packed(work: Path, files_below: Any):
    Path("a[1].txt").write_text("1")
    found = read_archive(pack(parts(extra_files="a[1].txt"), Path("out")), work / "t")
    assert "a[1].txt" in files_below(found.folder)


def test_links_are_followed_when_packed(work: Path, files_below: Any):
    Path("extra/link.txt").symlink_to(work / "w.pt")
    Path("extra/linked").symlink_to(work / "extra" / "sub")
    for archive_format in FORMATS:
        found = read_archive(pack(parts(extra_files="extra"), Path("out"), archive_format), work / archive_format)
        inside = files_below(found.folder)
        assert inside["link.txt"] == b"weights"
        assert inside["linked/b.txt"] == b"b"
        assert not any(p.is_symlink() for p in found.folder.rglob("*"))
        (work / "out" / "m.mar").unlink(missing_ok=True)


def test_the_later_of_two_files_with_one_name_wins(work: Path, files_below: Any, caplog: pytest.LogCaptureFixture):
    Path("extra/w.pt").write_text("other")
    found = read_archive(pack(parts(serialized_file="w.pt", extra_files="extra/w.pt"), Path("out")), work / "t")
    assert files_below(found.folder)["w.pt"] == b"other"
    assert "extra/w.pt replaces w.pt" in caplog.text


def test_naming_one_file_twice_causes_no_warning(work: Path, caplog: pytest.LogCaptureFixture):
    pack(parts(config_file="model-config.yaml", extra_files="model-config.yaml"), Path("out"))
    assert caplog.text == ""


def test_only_force_overwrites_an_existing_archive(work: Path, caplog: pytest.LogCaptureFixture):
    for archive_format in FORMATS:
        target = pack(parts(), Path("out"), archive_format, force=True)
        before = target.stat().st_mtime_ns
        with pytest.raises(ArchiveError, match=r"already exists; use --force"):
            pack(parts(), Path("out"), archive_format)
        assert target.stat().st_mtime_ns == before
        caplog.set_level(logging.WARNING)
        pack(parts(version="2.0"), Path("out"), archive_format, force=True)
        assert f"Overwriting {target}" in caplog.text
        unpacked = work / f"u-{archive_format}"
        assert read_archive(target, unpacked).manifest.model_version == "2.0"


WRONG = {
    "name": ({"model_name": "../x"}, "the model's name is"),
    "empty name": ({"model_name": ""}, "the model's name is"),
    "handler": ({"handler": "nono"}, "handler: there is no file nono.py; expected"),
    "handler misspelt": ({"handler": "image_clasifier"}, "did you mean 'image_classifier'"),
    "weights": ({"serialized_file": "nono.pt"}, "serialized file: there is no file nono.pt"),
    "model file": ({"model_file": "extra"}, "model file: there is no file extra"),
    "requirements": ({"requirements_file": "nono"}, "requirements file: there is no file"),
    "config": ({"config_file": "nono"}, "config file: there is no file"),
    "extra": ({"extra_files": "extra,nono"}, "extra files: there is no file or folder nono"),
    "version": ({"version": "a/b"}, "modelVersion is 'a/b'"),
    "case": ({"extra_files": "H.py"}, "only in case"),
    "broken link": ({"extra_files": "links"}, "links/gone is not a regular file"),
    "endless link": ({"extra_files": "loop"}, "link to one of its parent folders"),
    "device": ({"extra_files": "/dev/null"}, "neither a file nor a folder"),
}


@pytest.mark.parametrize(("changed", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_reported_and_nothing_is_written(work: Path, changed: dict[str, str], said: str):
    Path("H.py").write_text("")
    Path("links").mkdir()
    Path("links/gone").symlink_to("nowhere")
    Path("loop").mkdir()
    Path("loop/again").symlink_to(work / "loop")
    with pytest.raises(ArchiveError, match=said):
        pack(parts(**changed), Path("out"))
    assert list(Path("out").iterdir()) == []


def test_the_export_path_must_be_a_folder(work: Path):
    with pytest.raises(ArchiveError, match="export path: nono is not a folder"):
        pack(parts(), Path("nono"))


def test_more_files_than_the_reader_accepts_are_not_written(work: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.torchserve.archive.pack.LIMITS", type(LIMITS)(members=2))
    pack(parts(), Path("out"))
    with pytest.raises(ArchiveError, match="at most 2 members"):
        pack(parts(serialized_file="w.pt"), Path("out"), force=True)


def test_a_write_that_fails_leaves_the_old_archive(work: Path, monkeypatch: pytest.MonkeyPatch):
    before = pack(parts(), Path("out")).read_bytes()
    monkeypatch.setattr("zipfile.ZipFile.writestr", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(parts(version="2"), Path("out"), force=True)
    assert Path("out/m.mar").read_bytes() == before
    assert os.listdir("out") == ["m.mar"]


def test_a_file_older_than_zip_is_packed(work: Path):
    os.utime("w.pt", (0, 0))
    for archive_format in FORMATS:
        pack(parts(serialized_file="w.pt"), Path("out"), archive_format, force=True)


PART = st.text("abcXYZ019 .-_é", min_size=1, max_size=12).filter(lambda s: s.strip(" .") == s)
FILES = st.dictionaries(
    st.lists(PART, min_size=1, max_size=3).map("/".join),
    st.binary(max_size=200),
    max_size=5,
)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(files=FILES, archive_format=st.sampled_from(FORMATS))
def test_packed_files_are_read_back(
    work: Path, files_below: Any, files: dict[str, bytes], archive_format: Format, tmp_path_factory: Any
):
    folder = tmp_path_factory.mktemp("any")
    written = {}
    for name, data in files.items():
        clash = {other.casefold() for other in written} | {"h.py"}
        prefixes = {part for other in (*written, "h.py") for part in _above(other)}
        if name.casefold() in clash | prefixes or _above(name) & (clash | prefixes):
            continue
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        written[name] = data
    (folder / "in").mkdir(exist_ok=True)
    target = pack(parts(extra_files=str(folder / "in")), folder, archive_format)
    inside = files_below(read_archive(target, folder / "unpacked").folder)
    hidden = {n for n in written if any(p.startswith(".") for p in n.split("/")[:-1])}
    assert set(inside) == {"h.py", MANIFEST} | (set(written) - hidden)
    assert all(inside[name] == written[name] for name in set(written) - hidden)


def _above(name: str) -> set[str]:
    """The folders of a name, case folded: two files may share them only if they are spelled alike."""
    parts_ = name.casefold().split("/")
    return {"/".join(parts_[:i]) for i in range(1, len(parts_))}
