"""A `penstock.toml` in a temporary folder."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], str]:
    """Writes a text to `penstock.toml` and returns the path."""

    def write(text: str) -> str:
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return str(path)

    return write
