"""Reads the archives that tests write."""

from __future__ import annotations

from pathlib import Path

from penstock.torchserve.archive.store import Archive, read_folder, unpack_archive


def read_archive(path: Path, target: Path) -> Archive:
    """The archive at `path`, unpacked into the new folder `target`; a folder is read in place."""
    if path.is_dir():
        return read_folder(path, name=path.name)
    with path.open("rb") as file:
        return unpack_archive(file, path.name, target)
