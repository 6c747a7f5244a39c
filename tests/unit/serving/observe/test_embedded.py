"""The metrics page of models inside another program."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from penstock import Engine, ModelConfig, RedisStreamer, ThreadedStreamer, metrics
from penstock.serving.http.asgi import InferenceApp


def values(page: bytes | str) -> dict[str, float]:
    text = page if isinstance(page, str) else page.decode()
    return {
        sample.name + sample.labels.get("outcome", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def test_a_streamer_has_a_page_whose_counters_begin_with_the_first_call() -> None:
    with ThreadedStreamer(double, 8) as streamer:
        assert streamer.predict([1]) == [2]
        before = values(metrics.page(streamer))
        assert before["penstock_workers_up"] == 1
        assert before.get("penstock_requests_total", 0) == 0
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(streamer.predict, [n]) for n in range(200)]
            pages = [pool.submit(metrics.page, streamer) for _ in range(10)]
            assert [call.result() for call in calls] == [[2 * n] for n in range(200)]
            assert all(page.result() for page in pages)
        after = values(metrics.page(streamer))
    assert after["penstock_answers_totalok"] == after["penstock_requests_total"] == 200
    assert after["penstock_batch_rows_sum"] == 200
    assert after["penstock_requests_in_flight"] == 0
    assert 0 < after["penstock_busy_seconds_total"] < 60


async def test_an_engine_and_its_app_have_a_route() -> None:
    async with Engine() as engine:
        await engine.load("double", ModelConfig(target="double", transport="inline"), target=double)
        app = Starlette(routes=[Mount("/metrics", metrics.asgi(engine)), Mount("/models", InferenceApp(engine))])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert (await client.post("/models/predictions/double", json=3)).json() == 6
            answer = await client.get("/metrics/")
        assert answer.headers["content-type"] == metrics.CONTENT_TYPE
        assert values(answer.text)["penstock_answers_totalok"] == 1
        later = ModelConfig(target="double", transport="inline", name="later")
        await engine.load("later", later, target=double)
        await engine.infer("later", 1)
        text = metrics.page(InferenceApp(engine)).decode()
        assert 'penstock_answers_total{model="later",version="1",outcome="ok"} 1' in text
        assert 'penstock_answers_total{model="double",version="1",outcome="ok"} 1' in text


async def test_the_route_of_a_streamer_does_not_block_the_loop() -> None:
    with ThreadedStreamer(double, 8) as streamer:
        transport = httpx.ASGITransport(metrics.asgi(streamer))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert "penstock_workers_up" in (await client.get("/")).text


def test_what_has_no_models_here_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a Streamer"):
        metrics.page(double)
    with RedisStreamer("localhost:1") as streamer, pytest.raises(TypeError, match="penstock worker --metrics-port"):
        metrics.page(streamer)
