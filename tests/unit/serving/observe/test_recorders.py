from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.contracts import BatchRecord
from penstock.errors import ConfigError
from penstock.serving.observe import recorders
from penstock.serving.observe.recorders import KEPT_BATCHES, KEPT_VERSIONS, ArrivalRecorder, BatchRecords


def recorded(path: Path, write: Callable[[ArrivalRecorder], None], **more: Any) -> list[dict[str, Any]]:
    """What stands in the file after `write` was called on a loop; the clock is at 10, 10.5, 11 ..."""
    clock = iter(10 + n / 2 for n in range(10**6))

    async def main() -> None:
        recorder = ArrivalRecorder(str(path), clock=lambda: next(clock), **more)
        try:
            write(recorder)
        finally:
            recorder.close()

    asyncio.run(main())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_times_and_sizes_of_requests_are_written_and_read_as_a_trace(tmp_path: Path) -> None:
    def write(recorder: ArrivalRecorder) -> None:
        recorder.on_request("digits", "1", 1, 300)
        recorder.on_request('odd "name"', "2", 16, 0)

    path = tmp_path / "arrivals.jsonl"
    assert recorded(path, write) == [
        {"t": 0.5, "rows": 1, "bytes": 300, "model": "digits"},
        {"t": 1.0, "rows": 16, "bytes": 0, "model": 'odd "name"'},
    ]


def test_requests_are_written_soon_and_an_idle_recorder_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "FLUSH_INTERVAL_S", 0.0)
    path = tmp_path / "arrivals.jsonl"

    async def main() -> None:
        recorder = ArrivalRecorder(str(path))
        loop = asyncio.get_running_loop()
        timers: list[Any] = []
        later = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda *call: timers.append(call) or later(*call))
        for _ in range(3):
            recorder.on_request("m", "1", 1, 1)
        assert len(timers) == 1
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        await loop.run_in_executor(recorder._thread, lambda: None)  # behind what it was given
        assert path.read_text().count("\n") == 3
        assert len(timers) == 1 + 1  # the second is that of the sleep
        recorder.close()
        recorder.close()

    asyncio.run(main())


def test_the_maximum_file_size_ends_the_recording_with_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(recorder: ArrivalRecorder) -> None:
        for _ in range(10):
            recorder.on_request("m", "1", 1, 1)
        recorder._flush()
        recorder._thread.submit(lambda: None).result()
        recorder.on_request("m", "1", 1, 1)

    path = tmp_path / "arrivals.jsonl"
    found = recorded(path, write, max_bytes=200)
    assert 0 < len(found) < 10
    assert path.stat().st_size <= 200
    assert [record.message.count("the file has reached 200 bytes") for record in caplog.records] == [1]


def test_a_full_disk_ends_the_recording_with_whole_lines_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [75], os.write

    def half(fd: int, data: bytes) -> int:
        room = min(left[0], len(data))
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= room
        return real(fd, bytes(data[:room]))

    def write(recorder: ArrivalRecorder) -> None:
        for _ in range(3):
            recorder.on_request("m", "1", 1, 1)
            recorder._flush()
        recorder._thread.submit(lambda: None).result()
        recorder.on_request("m", "1", 1, 1)

    monkeypatch.setattr(os, "write", half)
    assert [line["t"] for line in recorded(tmp_path / "arrivals.jsonl", write)] == [0.5]
    assert [record.message.count("No space left on device") for record in caplog.records] == [1]


def test_a_disk_that_is_too_slow_ends_the_recording_and_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "MAX_PENDING_BYTES", 500)
    go_on = threading.Event()

    def write(recorder: ArrivalRecorder) -> None:
        recorder._thread.submit(go_on.wait)
        for _ in range(100):
            recorder.on_request("m", "1", 1, 1)
        assert not recorder._lines
        go_on.set()

    recorded(tmp_path / "arrivals.jsonl", write)
    assert [record.message.count("the disk is too slow") for record in caplog.records] == [1]


def test_a_file_that_is_there_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine\n")
    with pytest.raises(ConfigError, match="the file exists"):
        ArrivalRecorder(str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "mine\n"
    with pytest.raises(ConfigError, match="No such file or directory"):
        ArrivalRecorder(str(tmp_path / "no" / "file"))


def test_a_recording_without_requests_leaves_no_file(tmp_path: Path) -> None:
    recorder = ArrivalRecorder(str(tmp_path / "arrivals.jsonl"))
    fd = recorder._fd
    recorder.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_batch_report_gives_the_reason_for_its_size(record: Callable[..., BatchRecord]) -> None:
    records = BatchRecords()
    before = time.time()
    records.on_complete(
        record(
            3, 0.5, reason="deadline", waits_s=[0.1, 0.3, 0.2], bucket="b", slot=4, ahead=True, failed=1, outcome="died"
        )
    )
    (shown,) = json.loads(records.body(None, 10))["batches"]
    assert before <= shown.pop("time_s") <= time.time()
    assert shown == {
        "model": "m",
        "version": "1",
        "reason": "deadline",
        "requests": 3,
        "rows": 3,
        "max_batch_size": 64,
        "waited_s": 0.3,
        "bucket": "b",
        "instance": 4,
        "ahead": True,
        "run_s": 0.5,
        "seconds": 0.5,
        "failed": 1,
        "outcome": "died",
        "stages_s": None,
        "hooks_s": None,
    }


def test_the_last_thousand_batches_are_listed_newest_first(record: Callable[..., BatchRecord]) -> None:
    records = BatchRecords()
    for rows in range(1, KEPT_BATCHES + 11):
        records.on_complete(record(1, max_batch_size=rows))
    assert [b.max_batch_size for b in records.newest()] == list(range(KEPT_BATCHES + 10, 10, -1))
    assert [b.max_batch_size for b in records.newest(limit=2)] == [KEPT_BATCHES + 10, KEPT_BATCHES + 9]


@pytest.mark.parametrize(("model", "limit", "rows"), [("a", 10, [5, 3, 1]), ("a", 2, [5, 3]), ("c", 10, [])])
def test_batches_can_be_filtered_by_model(
    record: Callable[..., BatchRecord], model: str, limit: int, rows: list[int]
) -> None:
    records = BatchRecords()
    for i in range(1, 6):
        records.on_complete(record(i, model="a" if i % 2 else "b"))
    assert [b.rows for b in records.newest(model, limit=limit)] == rows


def test_a_busy_version_does_not_hide_the_batches_of_a_quiet_one(record: Callable[..., BatchRecord]) -> None:
    records = BatchRecords()
    records.on_complete(record(3, model="quiet", version="2"))
    for _ in range(KEPT_BATCHES + 5):
        records.on_complete(record(1, model="busy"))
    assert [b.rows for b in records.newest("quiet", "2")] == [3]
    assert not records.newest("quiet", "1")
    for i in range(KEPT_VERSIONS):
        records.on_complete(record(1, model=f"other{i}"))
    assert not records.newest("quiet")
