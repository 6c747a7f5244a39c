"""The native protocol: the content type selects the input type of `predict`, the result type the response type."""

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.core.columns import Block, PlanMemory, PlannedRequest, TensorRows
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import (
    JSON,
    MAX_FIELDS,
    collect,
    decode_form,
    decode_json,
    decode_text,
    encode_json,
    encode_text,
    parse_parts,
    part_value,
    split_type,
)
from penstock.serving.protocols.columns import JsonLists, OutputColumn, cut_lists, nested_json, output_column
from penstock.serving.protocols.route import Template
from penstock.types import Item, ItemResult, ModelMetadata, Response, plain_result

TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"
ROUTES: Final = (
    Template("/predictions/{model}", "Predict one item", codec="native"),
    Template("/predictions/{model}/{version}", "Predict one item", codec="native"),
)

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "connection", "content-type", "date"})


def encode_response(response: Response) -> ItemResult:
    """The result for a model's own `Response`. Raises BadOutput for headers that would break the framing."""
    body = response.body
    for name, value in response.headers.items():
        if not _HEADER_NAME.fullmatch(name) or any(c in value for c in "\r\n\0") or not value.isascii():
            raise BadOutput(f"the model returned a Response with an invalid header {name[:60]!r}")
        if name.lower() in _FRAMING:
            raise BadOutput(f"the model returned a Response with the header {name!r}, which the server sets itself")
    if any(c in response.content_type for c in "\r\n\0") or not response.content_type.isascii():
        raise BadOutput("the model returned a Response with an invalid content type")
    return ItemResult(
        body=body.encode() if isinstance(body, str) else bytes(body),
        content_type=str(response.content_type),
        status=response.status,
        headers=[(str(name), str(value)) for name, value in response.headers.items()] or None,
    )


def _columns(block: Block) -> list[OutputColumn] | None:
    """The outputs of a block as JSON; None for one that is encoded row by row."""
    if NativeCodec not in block.forms:
        found = [output_column(name, a, None, block.rows, binary=False) for name, a in block.arrays.items()]
        flat = all(c is not None and c.datatype != "BYTES" and len(c.tail) < 2 for c in found)
        block.forms[NativeCodec] = found if flat else None
    columns: list[OutputColumn] | None = block.forms[NativeCodec]
    return columns


class NativeCodec(JsonLists):
    """Codec of `/predictions`: JSON, text, forms, or unchanged bytes."""

    @staticmethod
    def request_content(model: ModelMetadata) -> dict[str, Any]:
        """The model's type if it is annotated, else anything."""
        item = model.schemas.item
        if not item:
            return {JSON: {}, "text/plain": {"type": "string"}, BYTES: {}}
        texts = [each for each in (item, *item.get("anyOf", ())) if each.get("type") == "string"]
        return {JSON: item, **({"text/plain": texts[0]} if texts else {})}

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """The model's type if it is annotated, else anything. A stream has parts of this type, as lines or events."""
        result = model.schemas.result
        if not result:
            return {JSON: {}, "text/plain": {"type": "string"}, BYTES: {}}
        kind = "text/plain" if result.get("type") == "string" else JSON
        return {kind: result}

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version
        self.plans = PlanMemory()

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """As of any JSON, but without an id: the inputs give all names."""
        found = cut_lists(bytes(item.payload)) if item.content_type == JSON and item.stop < 0 else None
        return None if found is None else (found[0], None, found[1])

    def decode(self, item: Item) -> tuple[Any, None]:
        """JSON -> object, text -> str, form -> dict of str or bytes, any other type -> the payload."""
        kind, charset = split_type(item.content_type)
        value: Any = item.payload
        if kind == JSON or kind.endswith("+json"):
            value = decode_json(item.payload)
        elif kind.startswith("text/"):
            value = decode_text(item.payload, charset)
        elif kind == "multipart/form-data":
            parts = parse_parts(item.payload, item.content_type, MAX_FIELDS)
            value = collect((part.name, part_value(part)) for part in parts)
            item.files = {}
            for part in parts:
                if part.file:
                    item.files.setdefault(part.name, []).append(part.file)
        elif kind == "application/x-www-form-urlencoded":
            value = decode_form(item.payload)
        if item.stop < 0:
            return value, None
        if not isinstance(value, list):
            raise BadRequest(
                f"a request of {item.rows} rows exceeds the maximum batch size, and only a JSON list can be split"
            )
        return value[item.start : item.stop], None

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """bytes -> octet-stream, str -> text, Response -> its own content type, any other type -> JSON."""
        if type(value) is TensorRows:
            if (columns := _columns(value.block)) is not None:
                return ItemResult(body=nested_json(columns, value), content_type=JSON)
            value = value.plain()
        value = plain_result(value)
        if isinstance(value, bytes):
            return ItemResult(body=value if type(value) is bytes else bytes(value), content_type=BYTES)
        if isinstance(value, str):
            return ItemResult(body=encode_text(value), content_type=TEXT)
        if isinstance(value, (bytearray, memoryview)):
            return ItemResult(body=bytes(value), content_type=BYTES)
        if isinstance(value, Response):
            return encode_response(value)
        if value is None:
            raise BadOutput("the model returned None for this item; return a value, or an exception to fail the item")
        return ItemResult(body=encode_json(value), content_type=JSON)

    def encode_all(
        self, values: Sequence[Any], items: Sequence[Item], requests: Sequence[PlannedRequest]
    ) -> list[ItemResult]:
        """See `ColumnCodec`. A vector without a name needs only its brackets."""
        block = values[0].block
        columns = _columns(block)
        if columns and len(columns) == 1 and columns[0].tail:
            texts = columns[0].texts
            if all([v.block is block and v.single and not v.named for v in values]):
                return [ItemResult(b"[%b]" % texts[v.start], JSON) for v in values]
        return super().encode_all(values, items, requests)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """One response from the parts of a split request: concatenated JSON lists, text or bytes."""
        first = parts[0]
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
            if part.content_type != first.content_type:
                raise BadOutput("the responses to the parts of a split request have different content types")
        bodies = [bytes(part.body) for part in parts]
        if first.content_type == JSON:
            if not all(body.startswith(b"[") for body in bodies):
                raise BadOutput("the responses to the parts of a split request can be joined only if they are lists")
            inner = b",".join(body[1:-1] for body in bodies if len(body) > 2)
            return ItemResult(body=b"[" + inner + b"]", content_type=JSON)
        return ItemResult(body=b"".join(bodies), content_type=first.content_type, status=first.status)
