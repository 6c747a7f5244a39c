"""The rules that the names in an archive keep, so that nothing is written outside, twice, or over something else."""

from __future__ import annotations

import re
import unicodedata

from penstock.errors import ArchiveError

MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255  # what the usual file systems take

_DRIVE = re.compile(r"[A-Za-z]:")


def check_name(name: str) -> str:
    """The name of a member, relative to the archive's root; "./" in front is dropped.

    Raises ArchiveError that names the rule: no absolute or climbing paths, drives, backslashes, control characters,
    empty parts or over-long names.
    """
    plain = name.removeprefix("./")
    rule = _broken_rule(plain)
    if rule:
        raise ArchiveError(f"name {name[:128]!r}: {rule}")
    return plain


def _broken_rule(name: str) -> str:
    parts = name.split("/")
    if not name:
        return "no name may be empty"
    if name.startswith("/"):
        return "no path may be absolute"
    if ".." in parts:
        return "no path may climb with '..'"
    if "\\" in name:
        return "no name may hold a backslash"
    if _DRIVE.match(name):
        return "no path may name a drive"
    if not name.isprintable():  # NUL, newlines, halves of characters
        return "names hold printable characters only"
    if "" in parts or "." in parts:
        return "no part of a path may be empty or '.'"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"a name has at most {MAX_NAME_BYTES} bytes, a part of it at most {MAX_PART_BYTES}"
    return ""


class Names:
    """The names of one archive so far, folders included."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, bool]] = {}  # folded name -> (as spelled, whether it is a folder)

    def add(self, name: str, *, folder: bool) -> None:
        """Takes a checked name. Raises ArchiveError if it was there before, as it is or in another case."""
        at = name.find("/")
        while at > 0:
            self._one(name[:at], folder=True)
            at = name.find("/", at + 1)
        self._one(name, folder=folder)

    def _one(self, name: str, *, folder: bool) -> None:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = (name, folder)
        elif seen[0] != name:
            raise ArchiveError(f"name {name[:128]!r}: differs from {seen[0][:128]!r} only in case or in its accents")
        elif not (folder and seen[1]):
            raise ArchiveError(f"name {name[:128]!r}: no name may stand twice")
