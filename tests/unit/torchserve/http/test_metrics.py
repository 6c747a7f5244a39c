"""The route of the metrics listener."""

from __future__ import annotations

METRICS = frozenset({"metrics"})


async def test_metrics_are_those_whose_names_are_asked_for(site):
    async with site(METRICS) as ask:
        reply = await ask("GET", "/metrics")
        assert (reply.status, reply.body) == (200, b"metrics of ")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (await ask("GET", "/metrics?name[]=a&name%5B%5D=b&other=c")).body == b"metrics of a,b"


async def test_metrics_need_no_token_and_no_other_listener_has_them(site, administration):
    administration.keys = {"management": b"k", "inference": b"i", "token": b"t"}
    async with site(METRICS) as ask:
        assert (await ask("GET", "/metrics")).status == 200
        assert (await ask("GET", "/models")).status == 404
    async with site(frozenset({"management"})) as ask:
        assert (await ask("GET", "/metrics", "Authorization: Bearer k")).status == 404


async def test_metrics_that_are_off_are_not_found(site):
    async with site(METRICS, metrics_api=False) as ask:
        assert (await ask("GET", "/metrics")).status == 404


async def test_a_failure_of_the_metrics_tells_nothing_of_itself(site, caplog):
    async def fail(names: list[str]) -> bytes:
        raise RuntimeError("secret")

    async with site(METRICS, scrape=fail) as ask:
        reply = await ask("GET", "/metrics")
    assert (reply.status, reply.json()["type"]) == (500, "InternalServerException")
    assert b"secret" not in reply.body
    assert "event=bug" in caplog.text
