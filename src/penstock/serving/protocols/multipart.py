"""`multipart/form-data` bodies as parts, or as pairs of name and value, on python-multipart's parser."""

from __future__ import annotations

from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.errors import BadRequest
from penstock.serving.protocols.bodies import decode_text, split_type


class FormPart(NamedTuple):
    """One part of a form. `content_type` is as sent, "" if none was; `is_file`: it has a file name."""

    name: str
    body: bytearray
    content_type: str
    is_file: bool


class _Parts:
    """Collects what the parser tells: the parts in `found`, and whether the closing boundary came in `ended`."""

    def __init__(self, max_fields: int) -> None:
        self.found: list[FormPart] = []
        self.ended = False
        self._max_fields = max_fields

    def callbacks(self) -> dict[str, Any]:
        """The hooks that the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_part_data": lambda data, start, end: self._body.extend(data[start:end]),
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.found) >= self._max_fields:
            raise BadRequest(f"the multipart body has more than {self._max_fields} parts")
        self._field, self._value, self._body = bytearray(), bytearray(), bytearray()
        self._headers: dict[str, bytes] = {}

    def _header_end(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _part_end(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition"))
        if b"name" not in options:
            raise BadRequest(f"part {len(self.found) + 1} of the multipart body has no name in its content-disposition")
        name = options[b"name"].decode("utf-8", "replace")
        content_type = self._headers.get("content-type", b"").decode("latin-1")
        self.found.append(FormPart(name, self._body, content_type, b"filename" in options))

    def _end(self) -> None:
        self.ended = True


def parse_parts(body: bytes | memoryview, content_type: str, max_fields: int) -> list[FormPart]:
    """Every part, in order. Raises BadRequest."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise BadRequest("the content type multipart/form-data names no boundary")
    parts = _Parts(max_fields)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        parser.write(bytes(body))
    except FormParserError as exc:
        where = max(getattr(exc, "offset", 0), 0)
        raise BadRequest(f"the multipart body is malformed at byte {where}") from None
    if not parts.ended:
        raise BadRequest(f"the multipart body ends at byte {len(body)} before its closing boundary")
    return parts.found


def parse_multipart(body: bytes | memoryview, content_type: str, max_fields: int) -> list[tuple[str, Any]]:
    """(name, value) of every part: `str` for text fields, `bytes` for files and other types. Raises BadRequest."""
    pairs: list[tuple[str, Any]] = []
    for part in parse_parts(body, content_type, max_fields):
        kind, charset = split_type(part.content_type or "text/plain")
        text = not part.is_file and kind.startswith("text/")
        pairs.append((part.name, decode_text(bytes(part.body), charset) if text else bytes(part.body)))
    return pairs
