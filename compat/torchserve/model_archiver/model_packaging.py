"""Writes an archive, from a configuration or from the command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from penstock.torchserve.archive.pack import ArchiveContents, pack


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Writes the archive; without a `config`, runs torch-model-archiver with this process's arguments.

    Raises ModelArchiverError.
    """
    if config is None:
        from penstock.torchserve.cli.archive import archive

        archive()
        return
    values = {name: value for name, value in asdict(config).items() if value is not None}
    folder, format_, force = (values.pop(name, None) for name in ("export_path", "archive_format", "force"))
    try:
        pack(ArchiveContents(**values), Path(folder or "."), format_, force=force)
    except OSError as error:
        raise ModelArchiverError(f"the archive cannot be written: {error}") from error
