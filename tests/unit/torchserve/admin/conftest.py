from __future__ import annotations

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
from penstock.torchserve.config.properties import Properties
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


class House:
    """A model store, an engine and the administration over them. Archives are written, models asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir()
        self.engine: Engine
        self.served: ServerComponents

    def open(self, **properties: Any) -> ServerComponents:
        """A new engine, and the administration with these keys of config.properties."""
        keys = {"model_store": str(self.store), "log_location": str(self.folder / "logs"), **properties}
        most = keys.pop("max_workers", 8)
        more = {key: keys.pop(key) for key in ("snapshots", "file") if key in keys}
        self.engine = Engine(LimitsConfig(max_versions=keys.pop("max_versions", 256)))
        self.served = build_components(
            self.engine,
            Properties(**keys),
            max_workers=most,
            folder=self.folder,
            cache=self.folder / "cache",
            **more,
        )
        return self.served

    def archive(self, name: str, version: str = "1.0", code: str = ECHO, yaml: str = "", file: str = "") -> str:
        """Writes an archive into the store; its name there."""
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
        """The answer of a model, as text. Raises what the request failed with."""
        result = await self.result(model, version, body)
        if result.error is not None:
            raise result.error
        return bytes(result.body).decode()

    async def result(self, model: str, version: str | None = None, body: bytes = b"hi") -> ItemResult:
        """The final result of one request. Raises what `submit` does."""
        future: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()
        item = Item(body, codec="torchserve", content_type="application/octet-stream", headers=[(b"explain", b"False")])
        self.served.backend.submit(model, version, item, lambda r: future.set_result(r) if r.final else None)
        return await asyncio.wait_for(future, 20)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what is under way has come true."""
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come true")

    async def close(self) -> None:
        """As the program does."""
        self.served.administrator.stop()
        await self.engine.close(5.0)
        await self.served.administrator.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    if hasattr(house, "served"):
        await house.close()


@pytest.fixture
def refused() -> Callable[[pytest.ExceptionInfo[ApiError]], tuple[int, str, str]]:
    """(status, type, message) of an ApiError that was raised."""
    return lambda found: (found.value.status, found.value.kind, found.value.message)
