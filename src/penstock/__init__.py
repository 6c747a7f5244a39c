"""Penstock gathers discrete requests into full batches and drives them onto accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import (
    BadRequest,
    DeadlineExceeded,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
    Quarantined,
    QueueFull,
    SequenceLost,
    SequenceNotFound,
    WorkerDied,
)
from penstock.tasks import ChatMessage, Embedding, EmbeddingRequest, StopScanner, TextPart, TextRequest
from penstock.types import Item, ItemResult, ModelMetadata, Response, SequenceRequest, Step, TensorSpec

if TYPE_CHECKING:
    from penstock import metrics as metrics
    from penstock.client.client import AsyncClient as AsyncClient
    from penstock.client.sync import Client as Client
    from penstock.core.engine.engine import Engine as Engine
    from penstock.core.engine.portal import Portal as Portal
    from penstock.core.engine.waiters import Future as Future
    from penstock.core.worker.python_model import model as model
    from penstock.pipeline.builder import Pipeline as Pipeline
    from penstock.serving.protocols.oip_binary import InferResponse as InferResponse
    from penstock.streamer.local import Streamer as Streamer
    from penstock.streamer.local import ThreadedStreamer as ThreadedStreamer
    from penstock.streamer.model import ManagedModel as ManagedModel
    from penstock.streamer.redis.client import RedisStreamer as RedisStreamer
    from penstock.streamer.redis.serve import RedisWorker as RedisWorker
    from penstock.streamer.redis.serve import run_redis_workers_forever as run_redis_workers_forever
    from penstock.streamer.shared.client import connect as connect

from penstock._version import __version__ as __version__

__all__ = [
    "AsyncClient",
    "BadRequest",
    "ChatMessage",
    "Client",
    "DeadlineExceeded",
    "Embedding",
    "EmbeddingRequest",
    "Engine",
    "Future",
    "InferResponse",
    "Item",
    "ItemFailed",
    "ItemResult",
    "ManagedModel",
    "ModelMetadata",
    "ModelNotFound",
    "ModelNotReady",
    "PenstockError",
    "Pipeline",
    "Portal",
    "Quarantined",
    "QueueFull",
    "RedisStreamer",
    "RedisWorker",
    "Response",
    "SequenceLost",
    "SequenceNotFound",
    "SequenceRequest",
    "Step",
    "StopScanner",
    "Streamer",
    "TensorSpec",
    "TextPart",
    "TextRequest",
    "ThreadedStreamer",
    "WorkerDied",
    "connect",
    "metrics",
    "model",
    "run_redis_workers_forever",
]

_LAZY = {
    "AsyncClient": "penstock.client.client",
    "Client": "penstock.client.sync",
    "Engine": "penstock.core.engine.engine",
    "Future": "penstock.core.engine.waiters",
    "InferResponse": "penstock.serving.protocols.oip_binary",
    "ManagedModel": "penstock.streamer.model",
    "Pipeline": "penstock.pipeline.builder",
    "Portal": "penstock.core.engine.portal",
    "RedisStreamer": "penstock.streamer.redis.client",
    "RedisWorker": "penstock.streamer.redis.serve",
    "Streamer": "penstock.streamer.local",
    "ThreadedStreamer": "penstock.streamer.local",
    "connect": "penstock.streamer.shared.client",
    "metrics": "penstock.metrics",
    "model": "penstock.core.worker.python_model",
    "run_redis_workers_forever": "penstock.streamer.redis.serve",
}


def __getattr__(name: str) -> object:
    """Loads the heavier names when they are first used: `import penstock` alone stays light (law 8)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LAZY[name])
    return module if name == "metrics" else getattr(module, name)
