"""Penstock gathers discrete requests into full batches and drives them onto accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._version import __version__ as __version__
from penstock.errors import BadRequest as BadRequest
from penstock.errors import BrokerUnavailable as BrokerUnavailable
from penstock.errors import ConfigError as ConfigError
from penstock.errors import DeadlineExceeded as DeadlineExceeded
from penstock.errors import ItemFailed as ItemFailed
from penstock.errors import ModelNotFound as ModelNotFound
from penstock.errors import ModelNotReady as ModelNotReady
from penstock.errors import OutOfMemory as OutOfMemory
from penstock.errors import PenstockError as PenstockError
from penstock.errors import Quarantined as Quarantined
from penstock.errors import QueueFull as QueueFull
from penstock.errors import SequenceLost as SequenceLost
from penstock.errors import SequenceNotFound as SequenceNotFound
from penstock.errors import WorkerDied as WorkerDied
from penstock.types import ChatMessage as ChatMessage
from penstock.types import Embedding as Embedding
from penstock.types import EmbeddingRequest as EmbeddingRequest
from penstock.types import Item as Item
from penstock.types import ItemResult as ItemResult
from penstock.types import ModelMetadata as ModelMetadata
from penstock.types import Response as Response
from penstock.types import SequenceRequest as SequenceRequest
from penstock.types import Step as Step
from penstock.types import StopScanner as StopScanner
from penstock.types import TensorSpec as TensorSpec
from penstock.types import TextPart as TextPart
from penstock.types import TextRequest as TextRequest

if TYPE_CHECKING:
    from penstock import metrics as metrics
    from penstock import tracing as tracing
    from penstock.client.client import AsyncClient as AsyncClient
    from penstock.client.sync import Client as Client
    from penstock.config.schema import ModelConfig as ModelConfig
    from penstock.core.engine.engine import Engine as Engine
    from penstock.core.portal.portal import Portal as Portal
    from penstock.core.portal.waiters import Future as Future
    from penstock.core.worker.lengths import pad as pad
    from penstock.core.worker.python_model import model as model
    from penstock.images import decode_image as decode_image
    from penstock.pipeline.steps import Pipeline as Pipeline
    from penstock.request import Request as Request
    from penstock.serving.protocols.oip_messages import InferResponse as InferResponse
    from penstock.streamer.local import Streamer as Streamer
    from penstock.streamer.local import ThreadedStreamer as ThreadedStreamer
    from penstock.streamer.model import ManagedModel as ManagedModel
    from penstock.streamer.redis.client import RedisStreamer as RedisStreamer
    from penstock.streamer.redis.serve import RedisWorker as RedisWorker
    from penstock.streamer.redis.serve import run_redis_workers_forever as run_redis_workers_forever
    from penstock.streamer.shared.client import connect as connect
else:  # a type checker that saw `__getattr__` would accept every name
    _LAZY = {
        "AsyncClient": "penstock.client.client",
        "Client": "penstock.client.sync",
        "Engine": "penstock.core.engine.engine",
        "Future": "penstock.core.portal.waiters",
        "InferResponse": "penstock.serving.protocols.oip_messages",
        "ManagedModel": "penstock.streamer.model",
        "ModelConfig": "penstock.config.schema",
        "Pipeline": "penstock.pipeline.steps",
        "Portal": "penstock.core.portal.portal",
        "RedisStreamer": "penstock.streamer.redis.client",
        "RedisWorker": "penstock.streamer.redis.serve",
        "Request": "penstock.request",
        "Streamer": "penstock.streamer.local",
        "ThreadedStreamer": "penstock.streamer.local",
        "connect": "penstock.streamer.shared.client",
        "decode_image": "penstock.images",
        "metrics": "penstock.metrics",
        "model": "penstock.core.worker.python_model",
        "pad": "penstock.core.worker.lengths",
        "run_redis_workers_forever": "penstock.streamer.redis.serve",
        "tracing": "penstock.tracing",
    }
    _OWN = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith("penstock.")]
    __all__ = sorted([*_LAZY, *_OWN])

    def __getattr__(name: str) -> object:
        """Loads the heavier names when they are first used: `import penstock` alone stays light (law 8)."""
        if name not in _LAZY:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        import importlib

        module = importlib.import_module(_LAZY[name])
        return module if name == "metrics" else getattr(module, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
