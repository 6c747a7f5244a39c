"""Writes archives as torch-model-archiver 0.12 and torch-workflow-archiver 0.2 do: the same members and formats."""

import glob
import io
import json
import logging
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Literal

from msgspec import Struct

from penstock._version import __version__
from penstock.core.os_threads import atomic_file
from penstock.errors import ArchiveError, nearest
from penstock.torchserve.archive import manifest as manifests
from penstock.torchserve.archive.safe_unpack import LIMITS, MemberNames, check_name

log = logging.getLogger("penstock.torchserve")

Format = Literal["default", "zip-store", "tgz", "no-archive"]
SUFFIX: Final[dict[Format, str]] = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
BUILT_IN: Final = (
    "base_handler", "image_classifier", "image_segmenter", "object_detector", "text_classifier",
    "dali_image_classifier", "vllm_handler", "trt_llm_handler",
)  # fmt: skip
_BUILT_IN_LSP: Final = ("BaseHandler", "TorchScriptHandler")
_IGNORED_FOLDERS: Final = ("__pycache__", "__MACOSX")


class ArchiveContents(Struct, frozen=True, kw_only=True):
    """The contents of a new archive; absent parts are "". `extra_files` is a comma list of paths and globs."""

    model_name: str
    version: str
    handler: str
    serialized_file: str = ""
    model_file: str = ""
    extra_files: str = ""
    runtime: str = "python"
    requirements_file: str = ""
    config_file: str = ""


class WorkflowContents(Struct, frozen=True):
    """The contents of a new workflow archive; absent parts are "". `extra_files` is a comma list of paths and globs."""

    workflow_name: str
    spec_file: str
    handler: str = ""
    extra_files: str = ""


def pack(
    contents: ArchiveContents, export_path: Path, archive_format: Format = "default", *, force: bool = False
) -> Path:
    """Writes the archive into the folder `export_path`, completely or not at all, and returns its path.

    "no-archive" writes into an existing folder. Raises ArchiveError.
    """
    target = _target(export_path, contents.model_name, SUFFIX[archive_format], force)
    manifest = _manifest(contents).to_json().encode()
    manifests.parse_manifest(manifest)  # never write a manifest that cannot be read
    members = _members(contents)
    if archive_format == "no-archive":
        _write_folder(target, members, manifest)
        return target
    with atomic_file(target) as file:
        if archive_format == "tgz":
            _write_tar(file, contents.model_name, members, manifest)
        else:
            _write_zip(file, members, manifest, stored=archive_format == "zip-store")
    return target


def pack_workflow(contents: WorkflowContents, export_path: Path, *, force: bool = False) -> Path:
    """Writes the workflow's archive into the folder `export_path`, completely or not at all, and returns its path.

    Raises ArchiveError.
    """
    target = _target(export_path, contents.workflow_name, ".war", force)
    found: dict[str, Path] = {}
    _add_file(found, "spec file", contents.spec_file)
    _add_file(found, "handler", contents.handler)
    for name, path in _extra_files(contents.extra_files):
        _add(found, name, path)
    workflow = {
        "workflowName": contents.workflow_name,
        "specFile": os.path.basename(contents.spec_file),
        "handler": os.path.basename(contents.handler),
    }
    tree = {"createdOn": _now(), "workflow": workflow, "archiverVersion": f"penstock {__version__}"}
    manifest = json.dumps(tree, indent=2).encode()
    manifests.parse_manifest(manifest)
    _check_members(found, manifests.WORKFLOW_MANIFEST)
    with atomic_file(target) as file:
        _write_zip(file, found, manifest, stored=False, manifest_name=manifests.WORKFLOW_MANIFEST)
    return target


def _target(export_path: Path, name: str, suffix: str, force: bool) -> Path:
    """The path of a new archive. Raises ArchiveError."""
    manifests.check_model_name(name)
    if not export_path.is_dir():
        raise ArchiveError(f"export path: {export_path} is not a folder; create it, or name an existing one")
    target = export_path / f"{name}{suffix}"
    if target.exists():
        if not force:
            raise ArchiveError(f"{target} already exists; use --force (-f) to overwrite it")
        log.warning("Overwriting %s ...", target)
    return target


def _now() -> str:
    return datetime.now().strftime("%d/%m/%Y %H:%M:%S")


def _manifest(contents: ArchiveContents) -> manifests.Manifest:
    names = ("handler", "serialized_file", "model_file", "requirements_file", "config_file")
    files: dict[str, Any] = {name: os.path.basename(getattr(contents, name)) for name in names}
    return manifests.Manifest(
        model_name=contents.model_name,
        model_version=contents.version,
        runtime=contents.runtime,
        created_on=_now(),
        archiver_version=f"penstock {__version__}",
        **files,
    )


def _members(contents: ArchiveContents) -> dict[str, Path]:
    """Name in the archive -> file. The last of several files with one name wins, in torch-model-archiver's order."""
    found: dict[str, Path] = {}
    _add_file(found, "model file", contents.model_file)
    _add_file(found, "serialized file", contents.serialized_file)
    _add_file(found, "handler", _handler_file(contents))
    for name, path in _extra_files(contents.extra_files):
        _add(found, name, path)
    _add_file(found, "requirements file", contents.requirements_file)
    _add_file(found, "config file", contents.config_file)
    _check_members(found, manifests.MANIFEST)
    return found


def _check_members(found: dict[str, Path], manifest: str) -> None:
    if len(found) >= LIMITS.members:
        raise ArchiveError(f"{len(found)} files; an archive has at most {LIMITS.members} members with its manifest")
    names = MemberNames()
    for name in (*found, manifest):
        names.add(check_name(name), folder=False)


def _add_file(found: dict[str, Path], what: str, path: str) -> None:
    if not path:
        return
    if not os.path.isfile(path):
        raise ArchiveError(f"{what}: there is no file {path}")
    _add(found, os.path.basename(path), Path(path))


def _add(found: dict[str, Path], name: str, path: Path) -> None:
    before = found.get(name)
    if before is not None and not before.samefile(path):
        log.warning("%s replaces %s: both are called %s in the archive", path, before, name)
    found[name] = path


def _handler_file(contents: ArchiveContents) -> str:
    """The handler's file, "" for a built-in handler. Raises ArchiveError."""
    lsp = contents.runtime == "LSP"
    built_in = _BUILT_IN_LSP if lsp else BUILT_IN
    if contents.handler in built_in:
        return ""
    suffix = ".so" if lsp else ".py"
    file = contents.handler.partition(":")[0].removesuffix(suffix) + suffix
    if not os.path.isfile(file):
        raise ArchiveError(
            f"handler: there is no file {file}; expected FILE[:FUNCTION] or a built-in handler ({', '.join(built_in)})"
            + nearest(contents.handler, built_in)
        )
    return file


def _extra_files(extra_files: str) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file). A folder's content goes to the archive's root with its subfolders."""
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
        raise ArchiveError(f"extra files: {folder} is a link to one of its parent folders")
    for path in sorted(folder.iterdir()):
        name = prefix + path.name
        if path.is_dir():
            if not path.name.startswith(".") and path.name not in _IGNORED_FOLDERS:
                yield from _folder(path, f"{name}/", (*above, real))
        elif not path.is_file():
            raise ArchiveError(f"extra files: {path} is not a regular file")
        elif name != manifests.MANIFEST:  # the new manifest replaces it
            yield name, path


def _write_zip(
    file: IO[bytes], members: dict[str, Path], manifest: bytes, *, stored: bool, manifest_name: str = manifests.MANIFEST
) -> None:
    method = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(file, "w", method, strict_timestamps=False) as archive:
        for name, path in members.items():
            archive.write(path, name)
        archive.writestr(manifest_name, manifest)


def _write_tar(file: IO[bytes], model_name: str, members: dict[str, Path], manifest: bytes) -> None:
    with tarfile.open(fileobj=file, mode="w:gz", dereference=True, compresslevel=6) as archive:
        for name, path in members.items():
            archive.add(path, f"{model_name}/{name}", recursive=False, filter=_without_owner)
        last = tarfile.TarInfo(f"{model_name}/{manifests.MANIFEST}")
        last.size = len(manifest)
        last.mtime = int(datetime.now().timestamp())
        archive.addfile(last, io.BytesIO(manifest))


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _write_folder(target: Path, members: dict[str, Path], manifest: bytes) -> None:
    for name, path in members.items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not (copy.exists() and copy.samefile(path)):
            shutil.copy2(path, copy)
    (target / manifests.MANIFEST).parent.mkdir(parents=True, exist_ok=True)
    (target / manifests.MANIFEST).write_bytes(manifest)
