"""What stays in the server process after models are loaded and unloaded again and again."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

from penstock.config.schema import ModelConfig
from penstock.core.engine.engine import Engine
from penstock.serving.observe.prometheus import MAX_GONE, SHOWN_S, PrometheusObserver
from penstock.serving.observe.recorders import ArrivalRecorder, BatchRecords
from penstock.torchserve.metrics.families import default_config
from penstock.torchserve.metrics.observer import FrontendCounts, MetricsOptions, TorchServeMetrics

ROUNDS = 150
TIMER_TYPES = ("TimerHandle", "Context", "tuple")  # cancelled timers stay in the event loop's heap for a while


def model(items: list[int]) -> list[int]:
    return items


async def test_load_and_unload_rounds_leave_a_bounded_number_of_objects_and_samples(tmp_path: Path) -> None:
    now_s = 0.0
    requests: dict[tuple[str, str], int] = {}

    def counts() -> FrontendCounts:
        nonlocal requests
        found, requests = requests, {}
        return FrontendCounts({2: 1}, found)

    torchserve = TorchServeMetrics(MetricsOptions(config=default_config(), host="h", clock=lambda: now_s), counts)
    native = PrometheusObserver(clock=lambda: now_s)
    arrivals = ArrivalRecorder(str(tmp_path / "arrivals"))

    async def rounds(name: str, engine: Engine) -> tuple[Counter[str], int, int]:
        """Loads, calls and unloads ROUNDS models. The living objects by type, and the sizes of both pages."""
        for i in range(ROUNDS):
            await engine.put(
                engine.prepare(f"{name}{i}", ModelConfig(target="", transport="inline"), target=model), drain_s=1.0
            )
            requests[f"{name}{i}", "default"] = 1
            assert await engine.infer(f"{name}{i}", i) == i
            await engine.unload(f"{name}{i}")
        pages = len(native.render()), len(await torchserve.scrape())
        gc.collect()
        return Counter(type(found).__name__ for found in gc.get_objects()), *pages

    async with Engine(observers=(native, torchserve, BatchRecords(), arrivals)) as engine:
        native.read = engine.reading
        assert MAX_GONE < ROUNDS
        before, *pages = await rounds("a", engine)
        after, *pages_after = await rounds("b", engine)
        last, *_ = await rounds("c", engine)
        # what grows once may belong to a thread that an earlier test has left
        least = (after - before) & (last - after)
        grown = {name: n for name, n in least.items() if n > 0.8 * ROUNDS and name not in TIMER_TYPES}
        assert grown == {}, "one for each round"
        assert [size < 1.02 * size_before for size, size_before in zip(pages_after, pages, strict=True)] == [True] * 2
        assert b'model="c149"' in native.render()
        now_s += SHOWN_S
        assert b'model="' not in native.render()
        assert b'model_name="' not in await torchserve.scrape()
    await torchserve.close()
    arrivals.close()
