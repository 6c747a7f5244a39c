"""A `penstock.toml` in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], str]:
    """Writes the text to `penstock.toml` and gives back its path."""

    def write(text: str) -> str:
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return str(path)

    return write
