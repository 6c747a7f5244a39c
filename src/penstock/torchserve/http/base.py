"""What TorchServe's front-ends (HTTP and gRPC) are handed, beside a `Backend`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct

from penstock.torchserve.protocol.api import Done, Registration

Group = Literal["inference", "management", "metrics"]


class Face(Struct, frozen=True, kw_only=True):
    """How one listener shows itself. `groups` are the routes that it has: two equal addresses share one listener."""

    groups: frozenset[Group]
    codec: str = "torchserve"  # "torchserve_raw" with decode_input_request=false
    cors_origin: str = ""
    cors_methods: str = ""
    cors_headers: str = ""
    open_inference: bool = False  # ts_open_inference_protocol
    model_api: bool = False  # enable_model_api
    metrics_api: bool = True  # enable_metrics_api


class Administration(Protocol):
    """The models as TorchServe's management API sees them. Called on the loop's thread; what fails raises ApiError.

    `version` None is the default version.
    """

    def check_token(self, group: Group, authorization: bytes | None) -> None:
        """Raises ApiError (InvalidKeyException) unless tokens are off or the header is `Bearer` and the group's key."""
        ...

    def new_token(self, group: str, authorization: bytes | None) -> None:
        """Makes a new key of "management" or "inference", authorised by the API key, and rewrites the key file."""
        ...

    def healthy(self) -> bool:
        """False if the default version of some model has fewer live workers than its minWorkers."""
        ...

    async def register(self, registration: Registration) -> Done: ...

    async def scale(
        self,
        model: str,
        version: str | None,
        *,
        min_worker: int | None = None,  # None: 1
        max_worker: int | None = None,  # None: min_worker
        synchronous: bool = False,
    ) -> Done: ...

    async def describe(self, model: str, version: str | None, *, customized: bool = False) -> list[dict[str, Any]]:
        """The objects of `GET /models/{m}[/{version}|/all]`, the JSON's keys; `version` "all" is every version."""
        ...

    def models(self, limit: int, page_token: int) -> tuple[list[tuple[str, str]], int | None]:
        """((name, url) of each default version, by name, of one page; the token of the next page, None at the end)."""
        ...

    async def set_default(self, model: str, version: str) -> Done: ...

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> Done:
        """Shares the requests that name no version out by weight, at least one of them above 0. An extension."""
        ...

    async def unregister(self, model: str, version: str | None) -> Done: ...
