"""Writes model archives, as torch-model-archiver 0.12 does: which files, under which names, in which container."""

from __future__ import annotations

import glob
import io
import logging
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from penstock._version import __version__
from penstock.errors import ArchiveError, nearest
from penstock.torchserve.archive.manifest import MANIFEST, Manifest, check_model_name, parse_manifest
from penstock.torchserve.archive.names import Names, check_name
from penstock.torchserve.archive.safe_unpack import LIMITS

log = logging.getLogger("penstock.archive")

Format = Literal["default", "zip-store", "tgz", "no-archive"]
SUFFIX: Final[dict[Format, str]] = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
BUILT_IN: Final = (
    "base_handler", "image_classifier", "image_segmenter", "object_detector", "text_classifier",
    "dali_image_classifier", "vllm_handler", "trt_llm_handler",
)  # fmt: skip
_BUILT_IN_LSP: Final = ("BaseHandler", "TorchScriptHandler")
_UNWANTED: Final = ("__pycache__", "__MACOSX")


class Parts(Struct, frozen=True, kw_only=True):
    """What an archive is made of; "" is what it does not have. `extra_files` is a comma list of paths and globs."""

    model_name: str
    version: str
    handler: str
    serialized_file: str = ""
    model_file: str = ""
    extra_files: str = ""
    runtime: str = "python"
    requirements_file: str = ""
    config_file: str = ""


def pack(parts: Parts, export_path: Path, archive_format: Format = "default", *, force: bool = False) -> Path:
    """The archive, newly written into the folder `export_path`: whole, or not at all.

    A folder ("no-archive") that is there already is written into. Raises ArchiveError: found, expected, what to do.
    """
    check_model_name(parts.model_name)
    if not export_path.is_dir():
        raise ArchiveError(f"export path: {export_path} is not a folder; make it, or name one that is there")
    target = export_path / f"{parts.model_name}{SUFFIX[archive_format]}"
    if target.exists():
        if not force:
            raise ArchiveError(f"{target} already exists; say --force (-f) to overwrite it")
        log.warning("Overwriting %s ...", target)
    manifest = _manifest(parts).to_json().encode()
    parse_manifest(manifest)  # what we would not read is not written
    members = _members(parts)
    if archive_format == "no-archive":
        _write_folder(target, members, manifest)
        return target
    with tempfile.TemporaryDirectory(prefix=f".{parts.model_name[:64]}.", dir=export_path) as folder:
        made = Path(folder) / target.name
        if archive_format == "tgz":
            _write_tar(made, parts.model_name, members, manifest)
        else:
            _write_zip(made, members, manifest, stored=archive_format == "zip-store")
        made.replace(target)
    return target


def _manifest(parts: Parts) -> Manifest:
    base = os.path.basename
    return Manifest(
        model_name=parts.model_name,
        model_version=parts.version,
        handler=base(parts.handler),
        runtime=parts.runtime,
        serialized_file=base(parts.serialized_file),
        model_file=base(parts.model_file),
        requirements_file=base(parts.requirements_file),
        config_file=base(parts.config_file),
        created_on=datetime.now().strftime("%d/%m/%Y %H:%M:%S"),
        archiver_version=f"penstock {__version__}",
    )


def _members(parts: Parts) -> dict[str, Path]:
    """Name in the archive -> file. Of two files with one name the later stands, in the order of copying there."""
    found: dict[str, Path] = {}
    _add(found, "model file", parts.model_file)
    _add(found, "serialized file", parts.serialized_file)
    _add(found, "handler", _handler_file(parts))
    for name, path in _extra_files(parts.extra_files):
        _put(found, name, path)
    _add(found, "requirements file", parts.requirements_file)
    _add(found, "config file", parts.config_file)
    if len(found) >= LIMITS.members:
        raise ArchiveError(f"{len(found)} files; an archive has at most {LIMITS.members} members with its manifest")
    names = Names()
    for name in (*found, MANIFEST):
        names.add(check_name(name), folder=False)
    return found


def _add(found: dict[str, Path], what: str, path: str) -> None:
    if not path:
        return
    if not os.path.isfile(path):
        raise ArchiveError(f"{what}: there is no file {path}")
    _put(found, os.path.basename(path), Path(path))


def _put(found: dict[str, Path], name: str, path: Path) -> None:
    before = found.get(name)
    if before is not None and not before.samefile(path):
        log.warning("%s replaces %s: both are called %s in the archive", path, before, name)
    found[name] = path


def _handler_file(parts: Parts) -> str:
    """The file of the handler, "" of a built-in one. Raises ArchiveError if there is none."""
    lsp = parts.runtime == "LSP"
    built_in = _BUILT_IN_LSP if lsp else BUILT_IN
    if parts.handler in built_in:
        return ""
    file = parts.handler.partition(":")[0]
    suffix = ".so" if lsp else ".py"
    if not file.endswith(suffix):
        file += suffix
    if not os.path.isfile(file):
        raise ArchiveError(
            f"handler: there is no file {file}; expected FILE[:FUNCTION] or a built-in handler ({', '.join(built_in)})"
            + nearest(parts.handler, built_in)
        )
    return file


def _extra_files(extra_files: str) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file): what is in a folder stands at the archive's root, folders in it stay folders."""
    for word in filter(None, (word.strip() for word in extra_files.split(","))):
        if os.path.exists(word):
            paths = [word]
        elif glob.has_magic(word):
            paths = sorted(glob.glob(word))
            if not paths:
                log.warning("Given wildcard pattern did not match any file: %s", word)
        else:
            raise ArchiveError(f"extra files: there is no file or folder {word}; expected a comma list of them")
        for path in paths:
            if os.path.isdir(path):
                yield from _folder(Path(path))
            elif os.path.isfile(path):
                yield os.path.basename(path), Path(path)
            else:
                raise ArchiveError(f"extra files: {path} is neither a file nor a folder")


def _folder(folder: Path, prefix: str = "", above: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    real = os.path.realpath(folder)
    if real in above:
        raise ArchiveError(f"extra files: {folder} is a link to a folder that holds it")
    for path in sorted(folder.iterdir()):
        name = prefix + path.name
        if path.is_dir():
            if not path.name.startswith(".") and path.name not in _UNWANTED:
                yield from _folder(path, f"{name}/", (*above, real))
        elif not path.is_file():
            raise ArchiveError(f"extra files: {path} is not a regular file")
        elif name != MANIFEST:  # ours stands there
            yield name, path


def _write_zip(target: Path, members: dict[str, Path], manifest: bytes, *, stored: bool) -> None:
    method = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(target, "x", method, strict_timestamps=False) as archive:
        for name, path in members.items():
            archive.write(path, name)
        archive.writestr(MANIFEST, manifest)


def _write_tar(target: Path, model_name: str, members: dict[str, Path], manifest: bytes) -> None:
    with tarfile.open(target, "x:gz", dereference=True, compresslevel=6) as archive:
        for name, path in members.items():
            archive.add(path, f"{model_name}/{name}", recursive=False, filter=_nobodys)
        last = tarfile.TarInfo(f"{model_name}/{MANIFEST}")
        last.size = len(manifest)
        last.mtime = int(datetime.now().timestamp())
        archive.addfile(last, io.BytesIO(manifest))


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member without the name of who packed it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _write_folder(target: Path, members: dict[str, Path], manifest: bytes) -> None:
    for name, path in members.items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not (copy.exists() and copy.samefile(path)):
            shutil.copy2(path, copy)
    inner = target / MANIFEST
    inner.parent.mkdir(parents=True, exist_ok=True)
    inner.write_bytes(manifest)
