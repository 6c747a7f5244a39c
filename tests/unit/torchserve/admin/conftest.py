import asyncio
import json
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.core.engine.engine import Engine
from penstock.torchserve.admin.startup import ServerComponents, build_components
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError
from penstock.types import Item, ItemResult

ECHO = """
def handle(data, context):
    if data is None:
        return
    if context.get_request_header(0, "describe"):
        return [{"kind": "echo"}]
    return [f"{context.manifest['model']['modelVersion']} {bytes(d['body']).decode()}" for d in data]
"""


class ServerSetup:
    """A model store, an engine and their administration, with helpers that write archives and send requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir()
        self.engine: Engine
        self.components: ServerComponents

    def open(self, **properties: Any) -> ServerComponents:
        """Creates a new engine and an administration with these keys of config.properties."""
        keys = {"model_store": str(self.store), "log_location": str(self.folder / "logs"), **properties}
        most = keys.pop("max_workers", 8)
        more = {key: keys.pop(key) for key in ("snapshots", "file") if key in keys}
        self.engine = Engine(LimitsConfig(max_versions=keys.pop("max_versions", 256)))
        self.components = build_components(
            self.engine,
            Properties(**keys),
            max_workers=most,
            folder=self.folder,
            cache=self.folder / "cache",
            **more,
        )
        return self.components

    def archive(self, name: str, version: str = "1.0", code: str = ECHO, yaml: str = "", file: str = "") -> str:
        """Writes an archive to the store and returns its name."""
        model = {"modelName": name, "modelVersion": version, "handler": "service.py"}
        if yaml:
            model["configFile"] = "model-config.yaml"
        path = self.store / (file or f"{name}.mar")
        with zipfile.ZipFile(path, "w") as mar:
            mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
            mar.writestr("service.py", code)
            if yaml:
                mar.writestr("model-config.yaml", yaml)
        return path.name

    async def ask(self, model: str, version: str | None = None, body: bytes = b"hi") -> str:
        """The answer of a model as text. Raises the error of the request."""
        result = await self.result(model, version, body)
        if result.error is not None:
            raise result.error
        return bytes(result.body).decode()

    async def result(self, model: str, version: str | None = None, body: bytes = b"hi") -> ItemResult:
        """The final result of one request. Raises the errors of `submit`."""
        future: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()
        item = Item(body, codec="torchserve", content_type="application/octet-stream", headers=[(b"explain", b"False")])
        self.components.backend.submit(model, version, item, lambda r: future.set_result(r) if r.final else None)
        return await asyncio.wait_for(future, 20)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds."""
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the condition never held")

    async def close(self) -> None:
        """Closes in the same order as the program."""
        self.components.administrator.stop()
        await self.engine.close(5.0)
        await self.components.administrator.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerSetup]:
    server = ServerSetup(tmp_path)
    yield server
    if hasattr(server, "components"):
        await server.close()


@pytest.fixture
def refused() -> Callable[[pytest.ExceptionInfo[ApiError]], tuple[int, str, str]]:
    """(status, type, message) of an ApiError that was raised."""
    return lambda found: (found.value.status, found.value.kind, found.value.message)
