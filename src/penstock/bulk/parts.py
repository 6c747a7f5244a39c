"""What a job is made of, so that tests may put their own in place of some."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from penstock.bulk.decode import read_chunks
from penstock.bulk.reading import ReadChunks
from penstock.bulk.send import Sender
from penstock.bulk.sending import SendOptions, SendStats
from penstock.bulk.servers import ServerInfo, ask
from penstock.bulk.types import Answered, Sending
from penstock.bulk.video import Probe, probe


class SenderLike(Sending, Protocol):
    """`send.Sender`, or what stands for it."""

    def start(self) -> None: ...

    def close(self, drain_s: float) -> None: ...

    def stats(self) -> SendStats: ...


class Parts(Struct, frozen=True):
    """The real ones."""

    ask: Callable[..., ServerInfo] = ask
    read_chunks: ReadChunks = read_chunks
    probe: Callable[[str], Probe] = probe
    sender: Callable[[list[ServerInfo], SendOptions, Answered], SenderLike] = Sender
    clock: Callable[[], float] = time.monotonic
