"""A TorchServe handler for the model that BENCH_WORKLOAD names."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.environ["BENCH_MODELS"])

import models

workload = json.loads(os.environ["BENCH_WORKLOAD"])
predict = getattr(models, workload["model"])


def handle(data: list[dict[str, Any]] | None, context: object) -> list[Any] | None:
    if data is None:
        return None
    items = [row["body"] if "body" in row else row["data"] for row in data]
    if not workload["binary"]:
        items = [json.loads(item) if isinstance(item, (bytes, bytearray)) else item for item in items]
    return [bytes(r) if isinstance(r, bytearray) else r for r in predict(items)]
