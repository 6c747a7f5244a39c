"""An `Administrator` without models and a backend, for tests of the TorchServe listeners."""

from collections.abc import Mapping
from typing import Any, Final

from penstock.torchserve.protocol.api import ApiError, ChangeResult, Group, RegisterRequest, WorkflowRequest
from support.backend import FakeBackend

REFUSED: Final = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class KnownBackend(FakeBackend):
    """A backend that has every version except "9", with the errors of `ModelsBackend`."""

    def _find(self, model: str, version: str | None) -> None:
        if model not in self.models:
            raise not_found(model, None)
        if version == "9":
            raise not_found(model, version)


def not_found(model: str, version: str | None) -> ApiError:
    """The error for an unknown model, or for an unknown version of a known model."""
    if version is None:
        return ApiError("ModelNotFoundException", f"Model not found: {model}")
    return ApiError("ModelVersionNotFoundException", f"Model version: {version} does not exist for model: {model}")


class FakeAdministration:
    """Records its calls in `asked`; knows the model "m" in the versions "1.0" and "2.0".

    With `keys`, a request needs `Bearer` and the key of its group. Every call except key checks raises `error`; changes
    return `done`.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.keys: dict[str, bytes] | None = None  # of "management", "inference", "token"
        self.error: Exception | None = None
        self.done = ChangeResult("done")
        self.is_healthy = True
        self.names = ["m"]
        self.workflows = FakeWorkflows(self)

    def check_token(self, group: Group, authorization: bytes | None) -> None:
        """Raises ApiError for a wrong header."""
        self._check(group, authorization)

    def new_token(self, group: str, authorization: bytes | None) -> None:
        """Needs the key "token"."""
        self._check("token", authorization)
        if group not in ("management", "inference"):
            raise ApiError("InvalidKeyException", REFUSED)
        self._note("new_token", group)

    def healthy(self) -> bool:
        """Returns `is_healthy`."""
        return self.is_healthy

    def ready(self) -> bool:
        """Returns `is_healthy`."""
        return self.is_healthy

    async def register(self, registration: RegisterRequest) -> ChangeResult:
        """Accepts any registration."""
        return self._note("register", registration)

    async def scale(
        self,
        model: str,
        version: str | None,
        *,
        min_worker: int | None = None,
        max_worker: int | None = None,
        synchronous: bool = False,
    ) -> ChangeResult:
        """Raises ApiError for an unknown model or version."""
        self._find(model, version)
        return self._note("scale", model, version, min_worker, max_worker, synchronous)

    async def describe(self, model: str, version: str | None, *, customized: bool = False) -> list[dict[str, Any]]:
        """One version, or both. Raises ApiError for an unknown model or version."""
        self._note("describe", model, version, customized)
        self._find(model, None if version == "all" else version)
        versions = ["1.0", "2.0"] if version == "all" else [version or "1.0"]
        workers = [{"id": "9000", "status": "READY"}]
        return [
            {"modelName": model, "modelVersion": found, "deviceIds": None, "workers": workers} for found in versions
        ]

    def models(self) -> list[tuple[str, str]]:
        """`names`, each with its archive."""
        self._note("models")
        return [(name, f"{name}.mar") for name in sorted(self.names)]

    async def set_default(self, model: str, version: str) -> ChangeResult:
        """Raises ApiError for an unknown model or version."""
        self._find(model, version)
        return self._note("set_default", model, version)

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> ChangeResult:
        """Raises ApiError for an unknown model."""
        self._find(model, None)
        return self._note("set_traffic", model, dict(weights))

    async def unregister(self, model: str, version: str | None) -> ChangeResult:
        """Raises ApiError for an unknown model or version."""
        self._find(model, version)
        return self._note("unregister", model, version)

    def note(self, *what: Any) -> ChangeResult:
        """Records a call."""
        return self._note(*what)

    def _check(self, key: str, authorization: bytes | None) -> None:
        if self.keys is not None and authorization != b"Bearer " + self.keys[key]:
            raise ApiError("InvalidKeyException", REFUSED)

    def _find(self, model: str, version: str | None) -> None:
        if model != "m":
            raise not_found(model, None)
        if version not in (None, "1.0", "2.0"):
            raise not_found(model, version)

    def _note(self, *what: Any) -> ChangeResult:
        if self.error is not None:
            raise self.error
        self.asked.append(what)
        return self.done


class FakeWorkflows:
    """The `Workflows` of a FakeAdministration; knows the workflow "w"."""

    def __init__(self, administration: FakeAdministration) -> None:
        self._administration = administration

    def listed(self) -> list[tuple[str, str]]:
        """One workflow."""
        return [("w", "w.war")]

    def describe(self, name: str) -> dict[str, Any]:
        """Raises ApiError for an unknown workflow."""
        if name != "w":
            raise ApiError("WorkflowNotFoundException", f"Workflow not found: {name}")
        return {"workflowName": name}

    async def register(self, request: WorkflowRequest) -> ChangeResult:
        """Accepts any registration."""
        return self._administration.note("register", request)

    async def unregister(self, name: str) -> ChangeResult:
        """Raises ApiError for an unknown workflow."""
        self.describe(name)
        return self._administration.note("unregister", name)
