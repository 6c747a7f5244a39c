"""The log of a native server."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema import LoggingConfig
from penstock.errors import ConfigError
from penstock.serving import process as logs
from penstock.serving.process import ServerLog
from penstock.torchserve.cli.logs import TorchServeFormatter


@pytest.fixture(autouse=True)
def only_its_handlers() -> Iterator[None]:
    """Takes pytest's handlers away from the root logger."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    yield
    root.handlers = before


def written(path: Path, **keys: Any) -> list[str]:
    """The lines of a log in which one logger writes at each level."""
    server_log = ServerLog(LoggingConfig(file=str(path), **keys))
    log = logging.getLogger("some.name")
    log.debug("a debug line")
    log.info("answer=%d", 42, extra={"request_id": "r-1", "model": "m"})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    server_log.close()
    return path.read_text().splitlines()


def test_every_line_of_text_has_time_level_and_logger(tmp_path: Path) -> None:
    first, *others = written(tmp_path / "log")
    assert first[10:].partition(" ")[2] == "INFO some.name request_id=r-1 model=m answer=42"
    assert len(others) > 4
    assert all(line[23:].startswith("Z ERROR some.name ") for line in others)
    assert others[-1].endswith(" lines")


@pytest.mark.parametrize(
    "make", [logs.LineFormatter, logs.TextFormatter, TorchServeFormatter, lambda: TorchServeFormatter(True)]
)
def test_control_characters_of_messages_and_tracebacks_are_escaped(make: Any) -> None:
    """They would command the terminal of a reader, or overwrite what the line says."""
    try:
        raise ValueError("\x1b[2J\rall is well\x00")
    except ValueError:
        failed = sys.exc_info()
    record = logging.makeLogRecord({"name": "n", "msg": "a\x1b]0;b\x07\tc\x9bd\x7f\r\nnext", "exc_info": failed})
    text = make().format(record)
    assert r"a\x1b]0;b\x07" + "\t" + r"c\x9bd\x7f\x0d" in text
    assert r"ValueError: \x1b[2J\x0dall is well\x00" in text
    assert {c for c in text if not c.isprintable()} == {"\t", "\n"}


def test_json_has_one_object_for_each_record_and_level_bounds_them(tmp_path: Path) -> None:
    found = [json.loads(line) for line in written(tmp_path / "log", format="json", level="debug")]
    assert [each["level"] for each in found] == ["DEBUG", "INFO", "ERROR"]
    assert found[1] | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "logger": "some.name",
        "request_id": "r-1",
        "model": "m",
        "message": "answer=42",
    }
    assert found[2]["message"].endswith("ValueError: two\nlines")
    assert len(written(tmp_path / "other", level="error")) == len(written(tmp_path / "third")) - 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "event=request_failed model=m version=1 status=500 cause='it\\'s \"bad\"\\n=x'",
            {"event": "request_failed", "model": "m", "version": "1", "status": 500, "cause": 'it\'s "bad"\n=x'},
        ),
        ("memory_grows model=m slot=0 pid=7: it leaks", {"event": "memory_grows", "model": "m", "slot": "0", "pid": 7}),
        ("event=loading model=m seconds=12.5", {"event": "loading", "model": "m", "seconds": 12.5}),
        ("item_failed: see below\nValueError: a=b", {"event": "item_failed"}),
        ("a plain text, with x=1 in it", {"x": 1}),
        ("error='unclosed why=\"", {"error": "'unclosed", "why": '"'}),
        ("", {}),
    ],
)
def test_the_pairs_of_a_line_become_keys(text: str, found: dict[str, Any]) -> None:
    assert logs.pairs_of(text) == found


@given(st.text())
def test_any_text_has_pairs_that_json_can_hold(text: str) -> None:
    json.dumps(logs.pairs_of(text))
    json.dumps(logs.pairs_of(f"event=x value={text!r} other={text}"))


def test_pairs_of_a_model_s_own_text_are_no_keys(tmp_path: Path) -> None:
    server_log = ServerLog(LoggingConfig(file=str(tmp_path / "log"), format="json"))
    for name in ("penstock.engine", "penstock.model", "other"):
        logging.getLogger(name).warning("event=x time=1 model=forged", extra={"model": "m"})
    server_log.close()
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [each.get("event") for each in found] == ["x", None, None]
    assert all(each["model"] == "m" and each["time"] != 1 for each in found)


def test_a_full_disk_leaves_one_message_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    server_log = ServerLog(LoggingConfig(file="/dev/full"))
    for _ in range(20):
        logging.getLogger("some.name").info("line")
    server_log.close()
    wanted = "penstock: /dev/full cannot be written: No space left on device; log lines are lost until it can\n"
    assert capfd.readouterr().err == wanted


def test_a_file_that_cannot_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging.file: .*/none/log cannot be opened: No such file or directory"):
        ServerLog(LoggingConfig(file=str(tmp_path / "none" / "log")))


def test_a_stalled_file_costs_lines_that_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logs, "_MAX_QUEUE", 4)
    server_log = ServerLog(LoggingConfig(file=str(tmp_path / "log")))
    taken, gate = threading.Event(), threading.Event()
    emit = server_log._target.emit

    def stalled(record: logging.LogRecord) -> None:
        taken.set()
        gate.wait()
        emit(record)

    monkeypatch.setattr(server_log._target, "emit", stalled)
    log = logging.getLogger("some.name")
    log.info("the thread takes it")
    assert taken.wait(10)
    for n in range(10):
        log.info("line %d", n)
    gate.set()
    server_log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert "event=lines_lost count=6" in lines[5]
