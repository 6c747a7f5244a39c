"""A handler that returns its input."""

from __future__ import annotations

from typing import Any


def handle(data: list[dict[str, Any]] | None, context: object) -> list[Any] | None:
    if data is None:
        return None
    return [row["body"] for row in data]
