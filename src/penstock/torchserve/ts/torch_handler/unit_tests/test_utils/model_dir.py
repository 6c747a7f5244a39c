"""Files of a model for tests of handlers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copies each file of `src_dir` to its name in `dst_dir`."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir) / source, Path(dst_dir) / target)
