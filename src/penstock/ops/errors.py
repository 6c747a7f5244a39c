"""Errors of ops that other floors tell apart."""

from __future__ import annotations

from penstock.errors import BadRequest


class DecodeError(BadRequest):
    """An item's bytes are no image that can be decoded: empty, of no known format, broken, cut short, or too large."""

    code = "undecodable"
