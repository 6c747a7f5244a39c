"""One request to a TorchServe handler, and the answer to it, as they stand between codec and handler. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class HandlerRequest(Struct):
    """`inputs` is the handler's dict of this request; `headers` are as the client spelled them, the last one wins.

    The server adds the headers `explain` ("True" or "False") and, for a longer path, `url_path`. Headers of the
    parts of a form stand as `{field: {"content-type": ...}}`.
    """

    id: str
    inputs: dict[str, Any]
    headers: dict[str, Any] = field(default_factory=dict)


class HandlerAnswer(Struct):
    """What the handler gave for one request, already bytes; `reason` is the phrase beside the status."""

    body: bytes | bytearray | memoryview
    content_type: str = ""
    status: int = 200
    reason: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
