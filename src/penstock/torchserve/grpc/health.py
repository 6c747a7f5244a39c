"""The standard health service, which probes ask without a token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from penstock.torchserve.grpc.errors import Code, Refusal
from penstock.torchserve.grpc.messages import HEALTH, message
from penstock.torchserve.protocol.api import Administration

SERVICE: Final = f"{HEALTH}.Health"
SERVING: Final = 1
NOT_SERVING: Final = 2

_Response: Final = message(f"{HEALTH}.HealthCheckResponse")


class Health:
    """The functions of the service. Watch is not served, which clients take for healthy."""

    def __init__(self, administration: Administration, services: Iterable[str]) -> None:
        self._administration = administration
        self._known = frozenset(("", *services))

    async def Check(self, request: Any) -> Any:
        """What `/ping` says, for the server as for each of its services."""
        if request.service not in self._known:
            raise Refusal(Code.NOT_FOUND, f"there is no service {request.service[:200]!r}")
        return _Response(status=SERVING if self._administration.healthy() else NOT_SERVING)
