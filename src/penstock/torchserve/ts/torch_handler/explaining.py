"""Captum, which explains answers; loaded by the first request for an explanation."""

from __future__ import annotations

from typing import Any


def captum() -> Any:
    """The module `captum.attr`. Raises ImportError naming the extra that brings it."""
    try:
        from captum import attr
    except ImportError as e:
        raise ImportError(
            "explanations need Captum, which cannot be imported: pip install '.[explain]'", name="captum"
        ) from e
    return attr


def target_of(target: Any) -> Any:
    """The class to be explained: a field of a form is bytes of its digits."""
    return int(target) if isinstance(target, (bytes, bytearray, str)) else target
