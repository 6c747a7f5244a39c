from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.pipeline.ops.decode import picture


@pytest.fixture(scope="session")
def rgb() -> np.ndarray[Any, Any]:
    """A picture uint8 `[67, 90, 3]`, RGB."""
    return picture(67, 90, 4)


@pytest.fixture(scope="session")
def encode(rgb: np.ndarray[Any, Any]) -> Callable[..., bytes]:
    """`encode("PNG", mode="L", ...)`: the picture in another mode, as bytes."""

    def encoded(kind: str, mode: str = "RGB", image: Image.Image | None = None, **options: Any) -> bytes:
        out = io.BytesIO()
        (image or Image.fromarray(rgb)).convert(mode).save(out, kind, **options)
        return out.getvalue()

    return encoded
