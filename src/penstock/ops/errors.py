"""Errors of ops that other floors tell apart. They stand in the tree of errors: they cross processes by their codes."""

from __future__ import annotations

from penstock.errors import DecodeError as DecodeError
