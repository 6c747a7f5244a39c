"""The protocol of the shared batcher's socket: the offer that starts a batcher, and the messages.

The frames and most messages are those between a process and its own child. `sealed.py` has the values.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock._version import __version__
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.transports.launch import PackedTarget, pack_target
from penstock.core.wire.messages import AbandonBatch, FreeReplies, PartMessage, WorkerFailed
from penstock.core.wire.objects import dumps
from penstock.core.worker.spec import Wrapped
from penstock.errors import PenstockError
from penstock.streamer.shared.sealed import SealedModel
from penstock.types import Item

VERSION = __version__

# ---- the offer


class Offer(Struct):
    """The configuration and the model with which a process offers to start a batcher."""

    config: ModelConfig
    limits: LimitsConfig
    target: bytes
    files: list[tuple[str, str]]  # see PackedSpec
    main: str
    sys_path: list[str]
    linger_s: float
    settings: dict[str, str]  # compared with every client's, by the names of the streamer's arguments

    def packed_target(self) -> PackedTarget:
        return PackedTarget(self.target, self.files, self.main)

    def conflict(self, settings: Mapping[str, str]) -> str:
        """The differences between `settings` and the settings of this offer; empty without any."""
        differing = [
            f"{name} is {mine} there and {settings.get(name, '(unknown)')} here"
            for name, mine in self.settings.items()
            if settings.get(name) != mine
        ]
        return ", ".join(differing)


def offer_of(config: ModelConfig, target: Wrapped, limits: LimitsConfig, linger_s: float) -> Offer:
    """The offer of a streamer, whose `target` is wrapped as a StreamerModel. Raises LoadFailed if it cannot be sent."""
    packed = pack_target(Wrapped(target.target, f"{SealedModel.__module__}:{SealedModel.__name__}", target.arguments))
    batching = config.batching
    assert batching.max_queue is not None
    settings = {
        "the model": f"{getattr(target.target, '__module__', '')}.{config.target}",
        "batch_size": str(batching.max_batch_size),
        "max_latency": str(batching.max_hold_s),
        "worker_num": str(config.instances),
        "cuda_devices": ",".join(config.devices),
        "the longest run in seconds (3 x worker_timeout)": f"{batching.run_timeout_s:g}",
        "slo_s": str(batching.slo_s),
        "timeout_s": f"{batching.timeout_s:g}",
        "max_queue": str(batching.max_queue),
        "max_queue_bytes": str(limits.max_queue_bytes),
        "idempotent": str(batching.idempotent),
        "linger_s": f"{linger_s:g}",
        "the digest of the model's name, file and arguments": _digest(target, packed.files),
    }
    sys_path = [path or os.getcwd() for path in sys.path]
    return Offer(config, limits, packed.data, packed.files, packed.main, sys_path, linger_s, settings)


def _digest(target: Wrapped, files: Sequence[tuple[str, str]]) -> str:
    """Equal in all processes that give the same target with the same arguments."""
    arguments = {name: _plain(value) for name, value in target.arguments.items()}
    data = dumps([target.target, arguments, list(files)], lambda _: True)
    return hashlib.sha256(data).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """The value with its sets in a fixed order: sets of strings differ in order between processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if type(value) in (list, tuple):
        return [_plain(each) for each in value]
    if type(value) is dict:
        return [[key, _plain(each)] for key, each in value.items()]
    return value


# ---- messages


class JoinMessage(Struct, array_like=True, tag="join"):
    """The first message of a client. `settings`: None from a client that accepts any."""

    version: str
    settings: dict[str, str] | None


class WelcomeMessage(Struct, array_like=True, tag="welcome"):
    """The response, with the descriptors of shared memory for requests and for replies.

    `max_rows` and `max_bytes`: of the unanswered calls of one client.
    """

    pid: int
    request_bytes: int
    reply_bytes: int
    max_rows: int
    max_bytes: int
    idempotent: bool
    loading: bool


class LoadedMessage(Struct, array_like=True, tag="loaded"):
    """To all clients: the model is loaded."""


class CallMessage(Struct, array_like=True, tag="call"):
    """A call, whose answer is a PartMessage. `item.budget_s` is the time left. `free`: see RunBatch.

    `asks`: "" for the results of the item, or "ready" or "statistics", which need no item.
    """

    id: int
    item: Item | None
    free: list[int]
    asks: str = ""


ToBatcher = JoinMessage | CallMessage | FreeReplies | AbandonBatch
FromBatcher = WelcomeMessage | LoadedMessage | PartMessage | WorkerFailed
_encode_offer = msgspec.msgpack.Encoder().encode
read_offer = msgspec.msgpack.Decoder(Offer).decode


def write_offer(offer: Offer) -> bytes:
    """The offer for `read_offer`. Raises PenstockError if an option of the configuration is no plain value."""
    try:
        return _encode_offer(offer)
    except TypeError as e:
        raise PenstockError(f"the settings of a shared streamer must be plain values: {e}") from e
