"""The flags of torch-model-archiver."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Literal


@dataclass
class ModelArchiverConfig:
    """One archive; None means absent. Without an `export_path` it is written to the working directory."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = "python"
    export_path: str | None = None
    archive_format: Literal["default", "zip-store", "tgz", "no-archive"] = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> ModelArchiverConfig:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})
