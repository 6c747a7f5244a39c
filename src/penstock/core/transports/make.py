"""The transport of a name: "inline", "thread", "process", or "pkg.mod:Class". Imports only the one named."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.contracts import Transport
from penstock.core.wire.slabs import SlabPool
from penstock.core.worker.spec import WorkerSpec
from penstock.plugins import resolve


def make_transport(
    name: str,
    spec: WorkerSpec,
    *,
    slots: int,
    devices: Sequence[str],
    pool: SlabPool | None,
    reply_bytes: int,
) -> Transport:
    """A transport that is not started yet. Raises ConfigError."""
    made: Transport = resolve("transport", name)(spec, slots=slots, devices=devices, pool=pool, reply_bytes=reply_bytes)
    return made
