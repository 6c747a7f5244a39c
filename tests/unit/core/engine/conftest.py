from collections.abc import Callable, Sequence

import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.scheduler import Scheduler
from penstock.core.contracts import Observer, OnPart, TransportListener
from penstock.core.engine.batcher import Batcher
from penstock.types import Batch, BatchPart, Item, ItemResult


class FakeTransport:
    """Keeps every batch until the test answers it."""

    slots = 1
    depth = 1

    def __init__(self) -> None:
        self.sent: list[tuple[Batch, OnPart]] = []
        self.abandoned: tuple[int, int] | None = None

    async def start(self, listener: TransportListener) -> None: ...

    async def close(self, drain_s: float) -> None: ...

    def forget(self) -> None: ...

    def abandon(self, slot: int, batch_id: int) -> None:
        self.abandoned = (slot, batch_id)

    def send(self, batch: Batch, on_part: OnPart) -> None:
        self.sent.append((batch, on_part))

    def answer(self, part: BatchPart | None = None, **fields: object) -> Batch:
        """Answers the oldest batch: every payload with itself, unless `part` or fields of it say otherwise."""
        batch, on_part = self.sent.pop(0)
        results = [ItemResult(body=item.payload) for item in batch.items]
        on_part(part or BatchPart(batch.id, **{"results": results, **fields}))  # type: ignore[arg-type]
        return batch

    def item(self, batch: int, place: int) -> Item:
        return next(sent for sent, _ in self.sent if sent.id == batch).items[place]

    def echo(self, batch: int, place: int) -> ItemResult:
        """What answers an item of many, or its part, with itself."""
        item = self.item(batch, place)
        return ItemResult(item.payload[item.start : item.stop] if item.stop >= 0 else item.payload)

    def some(self, batch: int, *places: int, final: bool = False, **fields: object) -> None:
        """Answers items of a batch, which works beside others: every payload with itself."""
        sent, on_part = next(pair for pair in self.sent if pair[0].id == batch)
        results = [ItemResult(body=sent.items[place].payload) for place in places]
        on_part(BatchPart(batch, **{"results": results, "at": list(places), "final": final, **fields}))  # type: ignore[arg-type]

    def part(self, results: list[ItemResult | None]) -> None:
        """A non-final part of the oldest batch."""
        batch, on_part = self.sent[0]
        on_part(BatchPart(batch.id, results=results, final=False))


class Caller:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.parts: list[ItemResult] = []

    def __call__(self, result: ItemResult) -> None:
        assert not self.parts or not self.parts[-1].final, "answered twice"
        self.parts.append(result)

    @property
    def answer(self) -> ItemResult:
        assert self.parts, "not answered"
        assert self.parts[-1].final, "not answered to the end"
        return self.parts[-1]


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def caller() -> type[Caller]:
    return Caller


@pytest.fixture
def make_batcher(transport: FakeTransport) -> Callable[..., Batcher]:
    def make(
        max_batch_size: int = 4,
        max_queue: int = 8,
        depth: int = 1,
        width: int = 1,
        observers: Sequence[Observer] = (),
        quarantine_s: float = 0.0,
        **keys: object,
    ) -> Batcher:
        config = BatchingConfig(**keys)  # type: ignore[arg-type]
        policy = Adaptive(0.0)
        scheduler = Scheduler(
            policy,
            max_batch_size=max_batch_size,
            max_queue=max_queue,
            max_queue_bytes=2**20,
            depth=depth,
            idempotent=config.idempotent,
        )
        batcher = Batcher("m", "1", transport, scheduler, config, observers, quarantine_s)
        batcher.scheduler.slot_up(0, 0.0, width)
        return batcher

    return make
