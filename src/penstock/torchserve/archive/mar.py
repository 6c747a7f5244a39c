"""A model archive as a folder with a manifest, whatever it came as: .mar, .tar.gz or a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from penstock.errors import ArchiveError
from penstock.torchserve.archive.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, name_of, parse_manifest
from penstock.torchserve.archive.safe_unpack import LIMITS, Limits, unpack


class Archive(Struct, frozen=True):
    """`folder` is the root of the archive's files: the handler's model_dir."""

    folder: Path
    manifest: Manifest
    has_manifest: bool = True


def read_folder(folder: Path, *, name: str = "") -> Archive:
    """The archive whose files lie in the folder; if all it holds is one folder, that is meant.

    Without a manifest the model is called `name` (made fit for a name), has version "1.0" and no handler. Raises
    ArchiveError.
    """
    inner = list(folder.iterdir())
    if len(inner) == 1 and inner[0].is_dir() and inner[0].name != "MAR-INF":
        folder = inner[0]
    try:
        with (folder / MANIFEST).open("rb") as f:
            text = f.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Archive(folder, Manifest(model_name=name_of(name or folder.name)), has_manifest=False)
    except OSError as e:
        raise ArchiveError(f"{MANIFEST} cannot be read: {e.strerror}", detail=str(e)) from None
    return Archive(folder, parse_manifest(text, file_name=name or folder.name))


def read_archive(path: Path, target: Path, *, limits: Limits = LIMITS) -> Archive:
    """The archive in a file, unpacked into the new folder `target`: a zip if its name ends in .mar, else a .tar.gz.

    A folder is read where it is. Raises ArchiveError; then there is no `target`.
    """
    if path.is_dir():
        return read_folder(path, name=path.name)
    with path.open("rb") as file:
        return unpack_archive(file, path.name, target, limits=limits)


def unpack_archive(file: BinaryIO, name: str, target: Path, *, limits: Limits = LIMITS) -> Archive:
    """As `read_archive`, of an open file at its beginning. `name` is the file's."""
    unpack(file, target, tar=not name.endswith(".mar"), limits=limits)
    try:
        return read_folder(target, name=name)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
