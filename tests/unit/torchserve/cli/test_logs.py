"""The log files: their names, their lines, and which records each receives."""

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.torchserve.cli.logs import ServerLogs, read_log4j
from penstock.torchserve.config import Properties

Open = Callable[..., ServerLogs]


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Open]:
    """Opens logs in tmp_path/logs and closes them at the end."""
    found: list[ServerLogs] = []

    def open_logs(location: str = "logs", config: str | None = None, **keys: Any) -> ServerLogs:
        folder = str(tmp_path / location)
        found.append(ServerLogs(Properties(log_location=folder, metrics_location=folder, **keys), config))
        return found[-1]

    yield open_logs
    for each in found:
        each.close()


def lines(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.log").read_text().splitlines()


def test_metrics_have_a_folder_of_their_own(tmp_path: Path) -> None:
    ServerLogs(Properties(log_location=str(tmp_path / "a"), metrics_location=str(tmp_path / "b"))).close()
    assert set(os.listdir(tmp_path / "a")) == {"access_log.log", "ts_log.log", "model_log.log"}
    assert set(os.listdir(tmp_path / "b")) == {"ts_metrics.log", "model_metrics.log"}


def test_the_servers_lines_have_torchserves_shape(
    logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = logs()
    logging.getLogger("penstock.engine").warning("event=%s", "here")
    logging.getLogger("penstock.engine").debug("not told")
    opened.close()
    (line,) = lines(tmp_path / "logs", "ts_log")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} \[WARN \] main penstock\.engine - event=here", line)
    assert capsys.readouterr().out == line + "\n"


def test_worker_output_goes_to_its_own_file_and_to_stdout(
    logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = logs(initial_worker_port=9100)
    logging.getLogger("penstock.model").info("loss=1%", extra={"model": "blip2", "version": "1.0", "slot": 2})
    opened.close()
    (line,) = lines(tmp_path / "logs", "model_log")
    assert line.endswith(" [INFO ] W-9102-blip2_1.0-stdout MODEL_LOG - loss=1%")
    assert capsys.readouterr().out == line + "\n"
    assert not lines(tmp_path / "logs", "ts_log")


def test_characters_that_stdout_cannot_encode_are_escaped(
    logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as ascii_alone:
        monkeypatch.setattr("sys.stdout", ascii_alone)
        opened = logs()
        logging.getLogger("penstock.model").info("caf\u00e9 \udcff")
        opened.close()
    assert (tmp_path / "out").read_text().endswith(" - caf\\xe9 \\udcff\n")
    assert lines(tmp_path / "logs", "model_log")[0].endswith(" - café ?")


def test_metrics_go_only_to_their_files(logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = logs()
    logging.getLogger("TS_METRICS").info("Requests2XX.Count:1")
    logging.getLogger("MODEL_METRICS").info("%s", "HandlerTime.ms:1\nHandlerTime.ms:2")
    opened.close()
    assert re.fullmatch(r"[\d:,T-]+ - Requests2XX\.Count:1", lines(tmp_path / "logs", "ts_metrics")[0])
    found = [line.partition(" - ") for line in lines(tmp_path / "logs", "model_metrics")]
    assert [text for _, _, text in found] == ["HandlerTime.ms:1", "HandlerTime.ms:2"]
    assert found[0][0] == found[1][0], "one record has one time"
    assert capsys.readouterr().out == ""


def say_metrics() -> None:
    names = {"worker": "W-9000-m_1.0-stdout", "metrics": "MODEL_METRICS"}
    logging.getLogger("METRICS_CONSOLE").info("%s", "HandlerTime.ms:1\nHandlerTime.ms:2", extra=names)


def test_metrics_are_lines_of_stdout_in_torchserves_form(
    logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = logs()
    say_metrics()
    opened.close()
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in shown] == [
        f"[INFO ] W-9000-m_1.0-stdout MODEL_METRICS - HandlerTime.ms:{value}" for value in (1, 2)
    ]
    assert not lines(tmp_path / "logs", "ts_log") + lines(tmp_path / "logs", "model_metrics")
    say_metrics()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "change",
    [
        ('<Root level="all">', '<Root level="warn">'),
        ("<Root", '<Logger name="TS_METRICS" level="error"/><Root'),
        ("<Root", '<Logger name="TS_METRICS" level="info" additivity="false"/><Root'),
    ],
)
def test_metrics_leave_stdout_by_key_or_log4j2_xml(
    logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str]
) -> None:
    for xml, keys, shown in ((XML, {}, 2), (XML.replace(*change), {}, 0), (XML, {"console_metrics": False}, 0)):
        opened = logs(config=str(log4j(tmp_path, xml)), **keys)
        say_metrics()
        opened.close()
        assert capsys.readouterr().out.count("HandlerTime") == shown


def lost(folder: Path) -> int:
    """The lines of stdout that ts_log.log reports as lost."""
    found = re.findall(r"event=lines_lost where=stdout count=(\d+)", "\n".join(lines(folder, "ts_log")))
    return sum(map(int, found))


def test_metrics_wait_in_a_bounded_number_of_records(
    logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.torchserve.cli.logs.CLOSE_S", 0.1)
    with full_pipe(monkeypatch) as empty:
        monkeypatch.setattr("penstock.torchserve.cli.logs._MAX_METRICS", 3)
        opened = logs()
        for _ in range(20):
            say_metrics()
        assert not opened.close()
        assert lost(tmp_path / "logs") in (2 * 16, 2 * 17)  # stdout's thread has taken one or none
        end_writing(opened, empty)


def test_an_access_is_logged_only_on_request(logs: Open, tmp_path: Path) -> None:
    logs().close()
    assert not logging.getLogger("ACCESS_LOG").isEnabledFor(logging.INFO)
    opened = logs(access_log=True)
    assert logging.getLogger("ACCESS_LOG").isEnabledFor(logging.INFO)
    logging.getLogger("ACCESS_LOG").info('/127.0.0.1:1 "GET /ping HTTP/1.1" 200 1')
    opened.close()
    assert len(lines(tmp_path / "logs", "access_log")) == 1
    assert not logging.getLogger("ACCESS_LOG").handlers


def test_a_traceback_is_written_completely(logs: Open, tmp_path: Path) -> None:
    opened = logs()
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("penstock.engine").exception("failed")
    opened.close()
    assert lines(tmp_path / "logs", "ts_log")[-1] == "ValueError: broken"


def test_an_unwritable_folder_leaves_the_lines_on_stdout(
    logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    logs("file").close()
    assert "event=no_log_files consequence=lines_are_on_stdout_alone" in capsys.readouterr().out


def test_closing_stdout_does_not_stop_the_server(logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as nobody_reads:
        monkeypatch.setattr("sys.stdout", nobody_reads)
        opened = logs()
        for _ in range(3):
            logging.getLogger("penstock.engine").info("still here")
        opened.close()
    assert len(lines(tmp_path / "logs", "ts_log")) == 3


@contextlib.contextmanager
def full_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Replaces stdout by a full pipe and returns a function that empties it. The queue is short."""
    monkeypatch.setattr("penstock.serving.process._MAX_QUEUE", 4)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)

    def empty() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(read, 2**20)

    with os.fdopen(write, "w", buffering=1) as writer:
        monkeypatch.setattr("sys.stdout", writer)
        yield empty
    os.close(read)


def end_writing(opened: ServerLogs, empty: Callable[[], None]) -> None:
    """Reads stdout until its thread has ended."""
    threading.Thread(target=opened._stdout._waiting.put, args=(None,)).start()
    while opened._stdout.is_alive():
        empty()


def test_a_stdout_that_is_not_read_keeps_no_line_from_the_files(
    logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.torchserve.cli.logs.CLOSE_S", 0.1)
    with full_pipe(monkeypatch) as empty:
        opened = logs()
        for i in range(20):
            logging.getLogger("penstock.engine").info("line %d", i)
            while not any(line.endswith(f" line {i}") for line in lines(tmp_path / "logs", "ts_log")):
                time.sleep(0.001)
        reports = lines(tmp_path / "logs", "ts_log")
        assert sum("event=lines_lost" in line for line in reports) == 1, "once a minute"
        assert not opened.close()
        assert lost(tmp_path / "logs") in (15 + 1, 16 + 1)  # with the report itself
        end_writing(opened, empty)


def test_a_printed_line_has_no_prefix_and_keeps_its_order(logs: Open, capsys: pytest.CaptureFixture[str]) -> None:
    opened = logs()
    logging.getLogger("penstock.engine").info("first")
    opened.print_line("Model server started.")
    assert opened.close()
    opened.print_line("after the end")
    lines_said = capsys.readouterr().out.splitlines()
    assert lines_said[0].endswith(" - first")
    assert lines_said[1:] == ["Model server started.", "after the end"]


# ---- --log-config

XML = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders>
    <RollingFile name="a" fileName="${env:LOG_LOCATION:-logs}/mine.log">
      <PatternLayout pattern="%m%n"/>
    </RollingFile>
    <Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%m%n"/></Console>
    MORE
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="info"><AppenderRef ref="a"/></Logger>
    <Logger name="io.netty" level="error"/>
    <Logger name="org.pytorch.serve" level="warn"/>
    <Root level="all"><AppenderRef ref="STDOUT"/></Root>
  </Loggers>
</Configuration>"""


def log4j(folder: Path, xml: str = XML) -> Path:
    """A file with the access log in the folder."""
    path = folder / "log4j2.xml"
    path.write_text(xml.replace("MORE", "").replace("${env:LOG_LOCATION:-logs}", str(folder)))
    return path


def test_levels_and_files_of_a_log4j2_xml_apply(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log4j2.xml"
    path.write_text(XML.replace("MORE", ""))
    taken = read_log4j(str(path), {"LOG_LOCATION": "/var/log"})
    assert taken.levels == {"ACCESS_LOG": "INFO", "penstock": "WARNING", "": "DEBUG"}
    assert taken.files == {"access_log": "/var/log/mine.log"}
    assert read_log4j(str(path), {}).files == {"access_log": "logs/mine.log"}
    assert not caplog.records


def test_ignored_parts_of_a_log4j2_xml_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log4j2.xml"
    path.write_text(XML.replace("MORE", '<Kafka name="k"/><File name="f" fileName="x"><JsonLayout/></File>'))
    read_log4j(str(path), {})
    (record,) = caplog.records
    assert "ignored=appender k,layout of f hint=--log-config also takes" in record.getMessage()


def test_a_log4j2_xml_can_enable_the_access_log(logs: Open, tmp_path: Path) -> None:
    path = log4j(tmp_path)
    opened = logs(config=str(path))
    logging.getLogger("ACCESS_LOG").info("here")
    logging.getLogger("penstock.engine").info("not told: the level is warn")
    opened.close()
    assert "here" in (tmp_path / "mine.log").read_text()
    assert not lines(tmp_path / "logs", "ts_log")


def test_a_log4j2_xml_that_names_the_servers_logger_moves_none_of_its_lines(
    logs: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = '<Logger name="org.pytorch.serve" level="debug"/><Root level="info"/>'
    opened = logs(config=str(log4j(tmp_path, f"<Configuration><Loggers>{logger}</Loggers></Configuration>")))
    logging.getLogger("penstock.engine").debug("here")
    opened.close()
    (line,) = lines(tmp_path / "logs", "ts_log")
    assert line.endswith("[DEBUG] main penstock.engine - here")
    assert capsys.readouterr().out == line + "\n"


def test_vmargs_can_name_a_log4j2_xml(logs: Open, tmp_path: Path) -> None:
    path = log4j(tmp_path)
    logs(vmargs=f"-Xmx1g -Dlog4j.configurationFile=file://{path}").close()
    assert (tmp_path / "mine.log").exists()


@pytest.mark.parametrize("text", ["", "<a>", "appender.console.type = Console", "\x00"])
def test_a_log_config_that_is_not_xml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log4j2.properties"
    path.write_text(text)
    with pytest.raises(ConfigError, match="expected a log4j2 XML, or a configuration of Python's logging"):
        read_log4j(str(path), {})


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_configuration_of_pythons_logging_applies_completely(logs: Open, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / "out.txt"
    config = {
        "handlers": {"h": {"class": "logging.FileHandler", "filename": str(file)}},
        "loggers": {"penstock.test_logs": {"handlers": ["h"], "level": "INFO"}},
    }
    path = tmp_path / f"log.{suffix}"
    path.write_text(json.dumps(config))  # which is YAML too
    logs(config=str(path))
    found = logging.getLogger("penstock.test_logs")
    found.info("here")
    for handler in list(found.handlers):
        found.removeHandler(handler)
        handler.close()
    assert file.read_text() == "here\n"
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"handlers": {"h": {"class": "nothing.Here"}}}'])
def test_a_wrong_configuration_is_refused_with_its_name(logs: Open, tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--log-config .*log\.json"):
        logs(config=str(path))
