import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import metrics
from penstock.torchserve.ts.context import Context, RequestProcessor
from penstock.torchserve.ts.metric_cache import MetricsCache


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    metrics.drain()
    yield
    metrics.drain()


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., Context]:
    """A worker's context: `make_context({"serializedFile": "w.pt"}, headers of requests..., config={...})`."""

    def make(model: dict[str, Any] | None = None, *headers: dict[str, Any], config: Any = None, **more: Any) -> Context:
        cache = MetricsCache("net")
        cache.initialize_cache()
        manifest = {"model": {"modelName": "net", "modelVersion": "1.0", **(model or {})}}
        context = Context("net", str(tmp_path), manifest, 1, None, "0.12.0", metrics=cache, model_yaml_config=config)
        headers = headers or ({"explain": "False"},)
        context.request_processor = [RequestProcessor(h) for h in headers]
        context.request_ids = {i: f"id-{i}" for i in range(len(headers))}
        cache.set_request_ids(context.request_ids)
        context.system_properties.update(more)
        return context

    return make


@pytest.fixture
def forget_modules() -> Iterator[None]:
    """Removes the modules that a test imports from its own folder."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "/pytest-" in file:
            del sys.modules[name]


@pytest.fixture
def picture() -> Callable[..., bytearray]:
    """A PNG of one colour, or of the pixels of an array `[height, width, 3]`."""

    def make(
        size: tuple[int, int] = (300, 260), color: Any = (10, 200, 30), mode: str = "RGB", pixels: Any = None
    ) -> Any:
        from PIL import Image

        image = Image.new(mode, size, color) if pixels is None else Image.fromarray(pixels)
        file = io.BytesIO()
        image.save(file, "PNG")
        return bytearray(file.getvalue())

    return make
