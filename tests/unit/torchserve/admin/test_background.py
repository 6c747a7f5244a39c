from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.torchserve.admin.background import on_thread


async def test_the_loop_goes_on_while_the_work_is_done() -> None:
    seen = threading.Event()

    def work() -> str:
        assert seen.wait(10)
        return threading.current_thread().name

    task = asyncio.create_task(on_thread(work))
    await asyncio.sleep(0)
    seen.set()
    assert await task == "penstock-archives"


async def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await on_thread(work)


async def test_who_waits_may_leave() -> None:
    begun, end, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(10)
        done.set()

    task = asyncio.create_task(on_thread(work))
    while not begun.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end.set()
    assert done.wait(10)
    await asyncio.sleep(0.01)  # what the thread posts finds nobody


def test_a_loop_that_is_gone_meanwhile_does_no_harm() -> None:
    end, ended = threading.Event(), threading.Event()

    async def run() -> None:
        task = asyncio.create_task(on_thread(lambda: (end.wait(10), ended.set())))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())
    end.set()
    assert ended.wait(10)
