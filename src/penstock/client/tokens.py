"""The token that a verb sends to servers: from a file, never from the command line, where everybody could see it."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import ConfigError


def read_token(path: str | None) -> str | None:
    """The first line of the file, else the variable PENSTOCK_TOKEN. Raises ConfigError."""
    if path is None:
        return os.environ.get("PENSTOCK_TOKEN") or None
    try:
        token = Path(path).read_text().strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the token file {path} cannot be read: {e}") from None
    if not token:
        raise ConfigError(f"the token file {path} is empty; its first line must be the token")
    return token
