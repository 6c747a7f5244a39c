import gzip
import io
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArchiveError
from penstock.torchserve.archive.safe_unpack import MemberNames, UnpackLimits, check_name, unpack

BOMB_BYTES = 10 * 2**30

BAD_NAMES = {
    "../x": "climb",
    "a/../../x": "climb",
    "a/..": "climb",
    "..": "climb",
    "/etc/passwd": "absolute",
    "//x": "absolute",
    "": "empty",
    "./": "empty",
    "a//b": "empty or '.'",
    "a/./b": "empty or '.'",
    ".": "empty or '.'",
    "C:/x": "drive",
    "c:x": "drive",
    "a\\b": "backslash",
    "..\\x": "backslash",
    "a\0b": "printable",
    "a\nb": "printable",
    "a\udc80": "printable",
    "a" * 256: "255",
    "é" * 128: "255",
    "/".join(["a" * 200] * 6): "1024",
}


@pytest.mark.parametrize(("name", "rule"), BAD_NAMES.items(), ids=[ascii(name)[:30] for name in BAD_NAMES])
def test_a_bad_name_is_refused_with_the_broken_rule(name: str, rule: str):
    with pytest.raises(ArchiveError, match=rule):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "a b.py", ".hidden", "a/b/c", "...", "a..b", "モデル.pt", "ab:b", "-f"])
def test_a_valid_name_is_accepted(name: str):
    assert check_name(name) == name
    assert check_name(f"./{name}") == name


@given(st.text() | st.lists(st.sampled_from(["..", ".", "a", "", "\\", "C:"])).map("/".join))
def test_an_accepted_name_stays_inside_its_folder(name: str):
    try:
        checked = check_name(name)
    except ArchiveError:
        return
    assert os.path.normpath(f"/root/{checked}") == f"/root/{checked}"
    assert checked.isprintable()


@pytest.mark.parametrize(
    "names",
    [["a", "a"], ["a", "A"], ["d/x", "D/y"], ["d", "d/x"], ["d/x", "d"], ["café", "cafe\u0301"], ["straße", "STRASSE"]],
)
def test_duplicate_names_are_refused_also_in_another_case(names: list[str]):
    seen = MemberNames()
    seen.add(names[0], folder=False)
    with pytest.raises(ArchiveError, match=r"twice|only in case"):
        seen.add(names[1], folder=False)


def test_a_folder_may_be_listed_after_its_content():
    seen = MemberNames()
    seen.add("d/x", folder=False)
    seen.add("d", folder=True)
    seen.add("d", folder=True)
    seen.add("d/y", folder=False)


def opened(path: Path, target: Path, limits: UnpackLimits | None = None) -> None:
    with path.open("rb") as file:
        unpack(file, target, tar=path.suffix != ".mar", limits=limits or UnpackLimits())


def refused(path: Path, rule: str, limits: UnpackLimits | None = None) -> None:
    """Asserts that the archive is refused by this rule, and that nothing of it stays."""
    target = path.parent / "unpacked" / "here"
    with pytest.raises(ArchiveError, match=rule):
        opened(path, target, limits)
    assert list(target.parent.iterdir()) == []


def tar_entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zip_entry(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize("kind", ["mar", "tgz"])
def test_exactly_the_files_of_the_archive_are_unpacked(archives: Any, files_below: Any, tmp_path: Path, kind: str):
    members = {"h.py": b"x = 1\n", "sub/empty": b"", "big.bin": bytes(range(256)) * 10_000}
    path = archives.mar(members) if kind == "mar" else archives.tgz({f"m/{n}": d for n, d in members.items()})
    target = tmp_path / "a" / "b"
    opened(path, target)
    assert files_below(target) == members
    assert [p.name for p in target.parent.iterdir()] == ["b"]


def test_the_first_part_of_names_in_a_tar_is_dropped(archives: Any, files_below: Any, tmp_path: Path):
    root, dot = tar_entry("m", tarfile.DIRTYPE), tar_entry(".", tarfile.DIRTYPE)
    opened(archives.tgz([(root, b""), ("m/a", b"1"), ("m/s/b", b"2"), ("top", b"3")]), tmp_path / "named")
    assert files_below(tmp_path / "named") == {"a": b"1", "s/b": b"2", "top": b"3"}
    opened(archives.tgz([(dot, b""), ("./a", b"1"), ("./s/b", b"2")], "dot.tar.gz"), tmp_path / "dot")
    assert files_below(tmp_path / "dot") == {"a": b"1", "s/b": b"2"}


def test_no_file_is_left_executable(archives: Any, tmp_path: Path):
    opened(archives.mar([(zip_entry("run.sh", stat.S_IFREG | 0o6777), b"#!/bin/sh\n")]), tmp_path / "z")
    assert not (tmp_path / "z" / "run.sh").stat().st_mode & 0o6111


NAMES = {
    "climbing": (["../x"], "climb"),
    "climbing later": (["m/../../x"], "climb"),
    "absolute": (["/tmp/penstock-x"], "absolute"),
    "drive": (["C:/x"], "drive"),
    "backslash": (["m\\..\\x"], "backslash"),
    "newline": (["m/a\nb"], "printable"),
    "too long": (["m/" + "a" * 300], "255"),
    "twice": (["m/a", "m/a"], "occur twice"),
    "case": (["m/Handler.py", "m/handler.py"], "only in case"),
    "file and folder": (["m/a", "m/a/b"], "twice"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("names", "rule"), NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("kind", ["mar", "tgz"])
def test_archives_with_bad_names_are_refused_with_the_broken_rule(
    archives: Any, kind: str, names: list[str], rule: str
):
    refused(getattr(archives, kind)([("m/fine", b"1"), *((name, b"2") for name in names)]), rule)


def test_a_zip_name_is_checked_before_zipfile_alters_it(archives: Any):
    path = archives.mar({"okXevil.py": b"1"})
    path.write_bytes(path.read_bytes().replace(b"okXevil.py", b"ok\0evil.py"))
    refused(path, "printable")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "m/fine"])
def test_links_are_refused_regardless_of_their_target(archives: Any, target: str):
    refused(archives.mar([("m/fine", b"1"), (zip_entry("m/l", stat.S_IFLNK | 0o777), target.encode())]), "links")
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        refused(archives.tgz([("m/fine", b"1"), (tar_entry("m/l", kind, target), b"")]), "links")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"?"])
def test_only_files_and_folders_of_a_tar_are_unpacked(archives: Any, kind: bytes, files_below: Any, tmp_path: Path):
    path = archives.tgz([(tar_entry("m/x", kind), b"")])
    if kind == tarfile.CONTTYPE:  # another name for a plain file
        opened(path, tmp_path / "t")
        assert files_below(tmp_path / "t") == {"x": b""}
    else:
        refused(path, "only files and folders")


@pytest.mark.parametrize("mode", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_only_files_and_folders_of_a_zip_are_unpacked(archives: Any, mode: int):
    refused(archives.mar([(zip_entry("x", mode | 0o644), b"")]), "only files and folders")


def test_a_sparse_file_in_a_tar_is_refused(archives: Any):
    info = tar_entry("m/x")
    info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(BOMB_BYTES), "GNU.sparse.numbytes": "1"}
    refused(archives.tgz([(info, b"1")]), "only files and folders")


def test_an_encrypted_member_is_refused(archives: Any):
    path = archives.mar({"a": b"1"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    data[6] |= 1
    path.write_bytes(data)
    refused(path, "encrypted")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_than_deflate_are_refused(archives: Any, method: int):
    with zipfile.ZipFile(archives.folder / "m.mar", "w", method) as archive:
        archive.writestr("a", b"1" * 1000)
    refused(archives.folder / "m.mar", "compression")


def flipped(path: Path, at: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    return path


def test_a_wrong_checksum_is_found(archives: Any):
    with zipfile.ZipFile(archives.folder / "m.mar", "w") as archive:
        archive.writestr("a", b"weights" * 100)
    refused(flipped(archives.folder / "m.mar", 200), "damaged or cut short: Bad CRC-32")
    tar = archives.tgz({"m/a": b"1"})
    refused(flipped(tar, -6), "damaged or cut short")


def test_a_truncated_archive_is_refused(archives: Any, files_below: Any, tmp_path: Path):
    members = {"m/a": b"weights" * 100, "m/b": bytes(range(256))}
    for path in (archives.mar(members), archives.tgz(members)):
        whole = path.read_bytes()
        for size in range(0, len(whole), 7):
            path.write_bytes(whole[:size])
            refused(path, "damaged or cut short|no gzip header")


def test_a_damaged_header_is_not_taken_for_the_end_of_a_tar(archives: Any):
    tar = gzip.decompress(archives.tgz({"m/a": b"1" * 512, "m/b": b"2" * 512}).read_bytes())
    assert tar[1024:1027] == b"m/b"
    path = archives.folder / "m.tar.gz"
    path.write_bytes(gzip.compress(tar[:1024] + b"#" + tar[1025:]))
    refused(path, "damaged: a member's header is invalid")


def test_other_files_than_archives_are_refused(archives: Any):
    for name, rule in (("m.mar", "damaged"), ("m.bin", "neither a .mar")):
        path = archives.folder / name
        path.write_bytes(b"MZ not an archive")
        refused(path, rule)


def zeros_deflated(size: int) -> bytes:
    """The deflate stream of so many zeros, made quickly: one compressed megabyte, again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    repeated = zlib.compressobj(9, zlib.DEFLATED, -15)
    end = repeated.flush()
    return block * (size // 2**20) + end


def test_a_zip_bomb_is_refused_for_its_declared_size(archives: Any):
    path = archives.folder / "m.mar"
    packed = zeros_deflated(BOMB_BYTES)
    name, crc = b"zeros", 0
    extra = struct.pack("<HHQQ", 1, 16, BOMB_BYTES, len(packed))
    sizes = struct.pack("<III", crc, 0xFFFFFFFF, 0xFFFFFFFF)
    local = struct.pack("<4sHHHHH", b"PK\3\4", 45, 0, 8, 0, 33) + sizes
    local += struct.pack("<HH", len(name), len(extra)) + name + extra
    central = struct.pack("<4sHHHHHH", b"PK\1\2", 45, 45, 0, 8, 0, 33) + sizes
    central += struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0o644 << 16, 0) + name + extra
    at = len(local) + len(packed)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(central), at, 0)
    path.write_bytes(local + packed + central + end)
    assert path.stat().st_size < 2**24
    refused(path, "times the archive's size")


def test_a_tar_bomb_is_refused_while_it_is_unpacked(archives: Any):
    header = tar_entry("m/zeros")
    header.size = 1000  # and then 10 GB follow
    small = zlib.compressobj(9, zlib.DEFLATED, 31)
    begin = small.compress(header.tobuf() + bytes(1024)) + small.flush(zlib.Z_FULL_FLUSH)
    path = archives.folder / "m.tar.gz"
    path.write_bytes(begin + zeros_deflated(BOMB_BYTES))
    assert path.stat().st_size < 2**24
    refused(path, "times the archive's size", UnpackLimits(ratio_free_bytes=2**20, ratio=1))


def test_a_tar_bomb_is_refused_for_its_declared_size(archives: Any):
    header = tar_entry("m/zeros")
    header.size = BOMB_BYTES
    path = archives.folder / "m.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf()))
    refused(path, "times the archive's size")


def test_a_zip_that_understates_its_size_is_refused(archives: Any):
    path = archives.mar({"a": bytes(2**20)})
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 2**20), struct.pack("<I", 100)))
    refused(path, "damaged or cut short")


def test_more_bytes_than_the_limit_are_refused(archives: Any):
    noise = bytes(range(256)) * 8
    limits = UnpackLimits(total_bytes=2000)
    refused(archives.mar({"a": noise}), "at most 2000", limits)
    refused(archives.tgz({"m/a": noise}), "at most 2000", limits)


def test_more_bytes_than_free_disk_space_are_refused(archives: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    refused(archives.mar({"a": b"1" * 11}), "the disk has 10 bytes free")


def test_small_archives_may_exceed_the_ratio(archives: Any, tmp_path: Path):
    opened(archives.mar({"zeros.pt": bytes(2**25)}), tmp_path / "z")
    assert (tmp_path / "z" / "zeros.pt").stat().st_size == 2**25


def test_more_members_than_the_limit_are_refused(archives: Any):
    members = {f"m/{i}": b"" for i in range(11)}
    for path in (archives.mar(members), archives.tgz(members)):
        refused(path, "more than 10 members", UnpackLimits(members=10))


@pytest.mark.parametrize(("members", "rule"), [(200_000, "too many members"), (20_000, "more than 10000 members")])
def test_too_many_members_are_refused_before_one_is_written(archives: Any, members: int, rule: str):
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0)
    directory = b"".join(entry + b"%07d" % i for i in range(members))
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 0, 0)
    (archives.folder / "m.mar").write_bytes(directory + end)
    refused(archives.folder / "m.mar", rule)


def test_a_million_members_of_a_tar_are_refused_at_the_limit(archives: Any):
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    thousand = packer.compress(tar_entry("m", tarfile.DIRTYPE).tobuf() * 1000) + packer.flush(zlib.Z_FULL_FLUSH)
    more = zlib.compressobj(1, zlib.DEFLATED, -15)
    block = more.compress(tar_entry("m", tarfile.DIRTYPE).tobuf() * 1000) + more.flush(zlib.Z_FULL_FLUSH)
    (archives.folder / "m.tar.gz").write_bytes(thousand + block * 999)
    refused(archives.folder / "m.tar.gz", "more than 10000 members")


def test_a_header_of_a_gigabyte_is_refused(archives: Any):
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE):
        header = tar_entry("m/x", kind)
        header.size = 2**30
        path = archives.folder / "m.tar.gz"
        path.write_bytes(gzip.compress(header.tobuf() + bytes(2**16)))
        refused(path, "header has")


@pytest.fixture(scope="module")
def samples() -> list[tuple[bool, bytes]]:
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("a.py", "x = 1\n" * 20)
        z.writestr("MAR-INF/MANIFEST.json", "{}")
    with tarfile.open(fileobj=tarred, mode="w") as t:
        for name in ("m/a.py", "m/" + "long" * 60, "m/MAR-INF/MANIFEST.json"):
            info = tarfile.TarInfo(name)
            info.size = 700
            t.addfile(info, io.BytesIO(b"7" * 700))
    return [(False, zipped.getvalue()), (True, tarred.getvalue())]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damage_raises_only_archive_errors_and_leaves_nothing(
    samples: list[tuple[bool, bytes]], tmp_path_factory: Any, data: st.DataObject
):
    tar, whole = data.draw(st.sampled_from(samples))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    path = folder / "x"
    path.write_bytes(gzip.compress(bytes(damaged), 1) if tar else damaged)
    target = folder / "unpacked" / "here"
    try:
        with path.open("rb") as file:
            unpack(file, target, tar=tar)
    except ArchiveError:
        assert list(target.parent.iterdir()) == []
    else:
        shutil.rmtree(target)
