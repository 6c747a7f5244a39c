"""What workers print."""

import asyncio
import logging
import os
from itertools import pairwise

import msgspec
import pytest

from penstock.core.transports import output
from penstock.core.worker import logs as worker_logs
from penstock.plugins import resolve
from penstock.types import Item, Trace
from support.transports import TransportHarness


class Printer:
    """Writes into the pipe of an Output; `lines` are what was logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.model")
        self._caplog = caplog
        read, self.fd = os.pipe()
        self.output = output.Output(asyncio.get_running_loop(), read, "m", "1", 3)

    async def write(self, data: bytes) -> None:
        os.set_blocking(self.fd, False)
        async with asyncio.timeout(10):
            while data:
                try:
                    data = data[os.write(self.fd, data) :]
                except BlockingIOError:
                    await asyncio.sleep(0)

    @property
    def lines(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.name == "penstock.model"]

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(10):
            while len(self.lines) < count:  # noqa: ASYNC110 - passes of the loop are what is tested
                await asyncio.sleep(0)
        return self.lines

    def close(self) -> None:
        os.close(self.fd)
        self.output.close()


async def test_each_line_is_a_log_record_with_its_worker(caplog):
    printer = Printer(caplog)
    await printer.write(b"one\ntw")
    assert await printer.until(1) == ["one"]
    await printer.write(b"o\r\n\nbad \xff\n% s")
    assert await printer.until(4) == ["one", "two", "", "bad \ufffd"]
    printer.close()
    assert printer.lines[4:] == ["% s"]
    assert {(r.model, r.version, r.slot, r.levelname) for r in caplog.records} == {("m", "1", 3, "INFO")}


async def test_a_log_record_of_the_worker_keeps_level_logger_and_request_ids(caplog, monkeypatch):
    records = [(logging.WARNING, "my.model", "a,b", "0af7", "two\nlines"), (logging.ERROR, "x", "", "", "y" * 9_000)]
    lines = [worker_logs.MARK + msgspec.json.encode(each) + b"\n" for each in records]
    printer = Printer(caplog)
    await printer.write(b"print\nno newline" + lines[0] + lines[1][:5_000])
    await printer.write(lines[1][5_000:] + worker_logs.MARK + b'[20, "cut by other out\nput\n')
    assert await printer.until(4) == ["print", "no newline", '[20, "cut by other out', "put"]
    printer.close()
    found = [(r.levelno, r.name, r.request_id, r.trace_id, r.getMessage()) for r in caplog.records[2:4]]
    assert found == records
    assert {(r.model, r.version, r.slot) for r in caplog.records} == {("m", "1", 3)}


ITEMS = [Item(b"", request_id="a"), Item(b"", trace=Trace("0af7", "b7ad")), Item(b"", request_id="b")]


def test_a_worker_forwards_records_with_the_ids_of_its_batch(capfdbinary, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    worker_logs.forward("info")
    monkeypatch.setattr(worker_logs.running, "items", ITEMS)
    logging.getLogger("my.model").info("z" * 9_000 + "\ud800")
    logging.getLogger("my.model").debug("unseen")
    (line,) = capfdbinary.readouterr().err.splitlines()
    level, name, ids, traces, text = worker_logs.read(line.removeprefix(worker_logs.MARK))
    assert (level, name, ids, traces) == (logging.INFO, "my.model", "a,b", "0af7")
    assert text.startswith("zzz")
    assert text.endswith("zzz?")
    assert 8_000 < len(text) < 8_300


async def test_a_long_line_is_cut(caplog):
    printer = Printer(caplog)
    for _ in range(4):
        await printer.write(b"x" * 50_000)
        await asyncio.sleep(0)
    assert len(printer.output._rest) <= output.LINE_BYTES
    await printer.write(b"tail\nnext\n")
    assert await printer.until(2) == ["x" * output.LINE_BYTES, "next"]
    printer.close()


async def test_a_flood_is_counted_and_not_kept(caplog, monkeypatch):
    monkeypatch.setattr(output, "LINES_PER_S", 300)
    printer = Printer(caplog)
    printer.output._left = 300
    for _ in range(100):
        await printer.write(b"\n" * 5000)
        assert len(printer.output._lines) <= 300
    printer.close()
    counted = [line for line in printer.lines if line.startswith("output_dropped")]
    dropped = sum(int(line.split("lines=")[1].split(":")[0]) for line in counted)
    assert dropped + len(printer.lines) - len(counted) == 500_000
    assert 1 <= len(counted) <= 10


async def test_a_pass_of_the_loop_logs_a_bounded_number_of_lines(caplog):
    printer = Printer(caplog)
    await printer.write(b"\n" * 1000)
    seen = []
    while not seen or seen[-1] < 1000:
        await asyncio.sleep(0)
        seen.append(len(printer.lines))
    assert max(b - a for a, b in pairwise(seen)) <= output.LINES_PER_PASS
    await printer.write(b"after\n")
    assert (await printer.until(1001))[-1] == "after"
    printer.close()


async def test_output_without_a_listener_is_not_kept(caplog):
    printer = Printer(caplog)
    caplog.set_level(logging.WARNING, "penstock.model")
    await printer.write(b"quiet\n")
    await asyncio.sleep(0.01)
    assert not printer.output._lines
    printer.close()
    assert printer.lines == []


SOURCE = """
import sys

print("while it loads")

def predict(items):
    print("out", items[0])
    print("err", file=sys.stderr)
    if items[0] == "die":
        sys.stdout.write("last words")
        sys.stdout.flush()
        import os
        os._exit(3)
    return items
"""


@pytest.fixture
def printing(tmp_path):
    (tmp_path / "printing.py").write_text(SOURCE)

    def make(spec, pool):
        spec.capture_output = True
        return resolve("transport", "process")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**20)

    return lambda: TransportHarness(make, f"{tmp_path}/printing.py:predict")


async def test_the_output_of_a_worker_is_logged_by_its_parent(printing, caplog, capfd):
    caplog.set_level(logging.INFO, "penstock.model")
    async with printing() as harness:
        assert await harness.values("x") == ["x"]
    records = [r for r in caplog.records if r.name == "penstock.model"]
    assert [r.getMessage() for r in records] == ["while it loads", "out x", "err"]
    assert {(r.model, r.version, r.slot) for r in records} == {("scripted", "1", 0)}
    assert capfd.readouterr() == ("", "")


async def test_the_last_output_of_a_worker_and_its_successor_is_logged(printing, caplog):
    caplog.set_level(logging.INFO, "penstock.model")
    async with printing() as harness:
        await harness.up()
        await harness.final(harness.post([Item("die")]))
        assert caplog.messages[-3:] == ["out die", "err", "last words"]
        assert await harness.values("x") == ["x"]
    assert caplog.messages[-3:] == ["while it loads", "out x", "err"]
