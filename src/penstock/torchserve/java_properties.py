"""The format of Java's .properties files. Source: `java.util.Properties`."""

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from penstock.errors import ConfigError

_BLANK = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPECIAL = {character: f"\\{letter}" for letter, character in _ESCAPES.items()}
_LINE = re.compile(r"((?:\\.|[^\\=: \t\f])*+\\?)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)  # key, value
_ESCAPED = re.compile(r"\\(u.{0,4}|.?)", re.DOTALL)
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")


class Property(Struct, frozen=True):
    """One key with its value and its first line (from 1)."""

    key: str
    value: str
    line: int


def parse_properties(text: str, source: str) -> dict[str, Property]:
    """The keys of the text; the last value of a repeated key counts. Raises ConfigError with `source` and line."""
    found: dict[str, Property] = {}
    for number, line in _logical_lines(text):
        match = _LINE.fullmatch(line)
        assert match is not None  # each part may be empty
        key, value = (_unescape(part, f"{source}:{number}") for part in match.groups())
        found[key] = Property(key, value, number)
    return found


def format_properties(values: Iterable[tuple[str, str]]) -> str:
    """The ASCII text of a file that `parse_properties` and Java read back as these keys and values."""
    return "".join(f"{_escape(key, is_key=True)}={_escape(value, is_key=False)}\n" for key, value in values)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of each logical line: continuation lines are joined, comments and blank lines skipped."""
    parts: list[str] = []
    first = 0
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = raw.lstrip(_BLANK)
        if not parts:
            if not line or line[0] in "#!":
                continue
            first = number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            parts.append(line[:-1])
            continue
        yield first, "".join([*parts, line])
        parts = []
    if parts:  # the last line ends with a continuation
        yield first, "".join(parts)


def _unescape(text: str, where: str) -> str:
    def character(match: re.Match[str]) -> str:
        escaped = match[1]
        if escaped[:1] != "u":
            return _ESCAPES.get(escaped, escaped)
        if not _HEX4.fullmatch(escaped[1:]):
            raise ConfigError(f"{where}: found \\{escaped}, expected four hexadecimal digits after \\u")
        return chr(int(escaped[1:], 16))

    plain = _ESCAPED.sub(character, text)
    # Characters beyond 16 bits are surrogate pairs.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(text: str, *, is_key: bool) -> str:
    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        if " " <= character <= "~":
            return character if character == " " and match.start() and not is_key else f"\\{character}"
        units = character.encode("utf-16-be", "surrogatepass").hex()
        return _SPECIAL.get(character) or re.sub("(....)", r"\\u\1", units)

    return re.sub(r"[\\=:#! ]|[^ -~]", escaped, text)
