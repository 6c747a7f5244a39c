"""The lines about refused requests."""

from __future__ import annotations

import asyncio

import pytest

from penstock.serving.observe import refusals
from penstock.serving.observe.refusals import RefusalLog


async def test_the_first_refusal_leaves_a_line_at_once_and_the_others_one_with_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "INTERVAL_S", 0.0)
    log = RefusalLog()
    for _ in range(26_926):
        log.on_reject("m", "1", "queue_full")
    log.on_reject("m", "2", "timeout")
    log.on_reject("m", "1", "cancelled")  # the caller's own wish
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("event=requests_refused model=m version=1 reason=queue_full count=1 hint='add instances")
    while len(caplog.records) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    lines = [record.getMessage().partition(" hint")[0] for record in caplog.records]
    assert lines[1:] == [
        "event=requests_refused model=m version=1 reason=queue_full count=26925",
        "event=requests_refused model=m version=2 reason=timeout count=1",
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(caplog.records) == 3
    assert log._timer is None, "a server that refuses nothing has no timer"
    log.on_reject("m", "1", "overload")
    log.on_reject("m", "1", "overload")
    log.close()
    assert [record.getMessage().partition(" hint")[0][-7:] for record in caplog.records[3:]] == ["count=1"] * 2
