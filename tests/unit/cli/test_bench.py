from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.bench import bench, make_plan
from penstock.cli.bench_session import Session
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench import figures
from penstock.perf.bench.measurement import Clause, Load, Measurement
from penstock.perf.bench.results import Origin, Results
from penstock.perf.bench.slo import Slo, parse_slo

FLAGS: dict[str, Any] = {
    "mode": None, "concurrency": None, "rate": None, "arrival": None, "duration": None, "requests": None,
    "repeat": 1, "seed": 0, "connections": 256,
}  # fmt: skip


class Elsewhere:
    """A server of HTTP in a thread of its own, whose answers are a function of the request's number."""

    def __init__(self) -> None:
        self.answer: Callable[[int], tuple[int, bytes]] = lambda number: (200, b"ok")
        self.asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        self._up.wait()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/infer"
        self._up.set()
        await self._over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0.01)  # aborted connections end

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):  # for pages of metrics, which it has none of
                    writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
                    continue
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                status, body = self.answer(self.asked)
                self.asked += 1
                await asyncio.sleep(0.002)  # so that the generator is not what is measured
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    server = Elsewhere()
    yield server
    server.close()


@pytest.fixture
def body(tmp_path: Path) -> str:
    path = tmp_path / "body.json"
    path.write_text("{}")
    return str(path)


def told(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


def test_a_model_is_measured_and_told_as_a_table(elsewhere: Elsewhere, body: str) -> None:
    flags = ["--data", body, "--concurrency", "1,2", "--requests", "100", "--warmup", "0"]
    result = told(elsewhere.url, *flags)
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["load", "good/s"]
    assert lines[1].startswith("1 client ")
    assert lines[2].startswith("2 clients ")
    assert "a closed loop sends nothing while the server stands still" in result.stdout
    assert "INVALID" not in result.stdout
    assert result.exit_code == 0


def test_json_is_all_that_is_printed(elsewhere: Elsewhere, body: str) -> None:
    flags = ["--data", body, "--rate", "200", "--duration", "0.2", "--warmup", "0", "--slo", "p50<=10s", "--json"]
    result = told(elsewhere.url, *flags)
    found = json.loads(result.stdout)
    assert result.stderr == ""
    (run,) = found["measurements"]
    assert run["load"]["mode"] == "open"
    assert run["requests"] == run["answered"] > 0
    assert run["slo"][0]["met"]
    assert found["origin"]["target"] == elsewhere.url


def test_results_are_kept_and_a_folder_that_has_some_is_refused(
    elsewhere: Elsewhere, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--data", body, "--concurrency", "1", "--requests", "20", "--warmup", "0", "--output", str(tmp_path / "r")]
    url = f"{elsewhere.url}?token=not-for-files"
    monkeypatch.setattr("sys.argv", ["penstock", "bench", url])
    done = told(url, *flags)
    assert f"{elsewhere.url}?token=***: one request" in done.stderr
    origin = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (origin["command"], origin["target"]) == ("bench", f"{elsewhere.url}?token=***")
    assert "not-for-files" not in "".join(path.read_text() for path in (tmp_path / "r").iterdir())
    assert len((tmp_path / "r" / "records.jsonl").read_text().splitlines()) == 1
    assert {"summary.csv", "report.md", "report.html"} <= {path.name for path in (tmp_path / "r").iterdir()}
    again = told(elsewhere.url, *flags)
    assert again.exit_code == 2
    assert "holds a run already" in again.stderr


def test_what_was_measured_is_told_when_the_disk_is_full(
    elsewhere: Elsewhere, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Results, run: Measurement) -> None:
        raise PenstockError("the disk is full")

    monkeypatch.setattr(Results, "append", full)
    flags = [
        "--data",
        body,
        "--concurrency",
        "1,2",
        "--requests",
        "20",
        "--warmup",
        "0",
        "--output",
        str(tmp_path / "r"),
    ]
    result = told(elsewhere.url, *flags)
    assert result.exit_code == 1
    assert result.stderr.count("penstock: the disk is full") == 1
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:2]] == [["1", "client"]]
    assert elsewhere.asked < 40  # the second load is not sent


def test_a_rate_that_gives_no_request_is_wrong_usage(elsewhere: Elsewhere, body: str) -> None:
    result = told(elsewhere.url, "--data", body, "--rate", "0.001", "--duration", "0.1")
    assert result.exit_code == 2
    assert "no request comes at 0.001/s poisson" in result.stderr


def test_a_target_that_only_fails_ends_the_run_and_its_first_error_is_shown_once(
    elsewhere: Elsewhere, body: str
) -> None:
    elsewhere.answer = lambda number: (500, b"no model here, %d" % number)
    result = told(elsewhere.url, "--data", body, "--concurrency", "1,8,64")
    assert result.exit_code == 1
    assert result.output.count("500 Internal Server Error: no model here, 0") == 1
    assert elsewhere.asked == 5


def test_a_target_that_is_not_there_is_an_error_in_one_line(body: str) -> None:
    result = told("http://127.0.0.1:9/infer", "--data", body)
    assert result.exit_code == 1
    assert result.stderr.startswith("penstock: http://127.0.0.1:9: cannot connect")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_reports_what_exists(elsewhere: Elsewhere, body: str) -> None:
    first = 100

    def interrupt(number: int) -> tuple[int, bytes]:
        if number == first + 100:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return 200, b"ok"

    elsewhere.answer = interrupt
    flags = ["--data", body, "--concurrency", "1,2", "--requests", f"{first}", "--warmup", "0"]
    result = told(elsewhere.url, *flags)
    assert result.exit_code == 130
    assert "interrupted; this is what there is" in result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [["1", "client"], ["2", "clients"]]
    assert "the run was interrupted" in result.stdout


def test_a_run_that_the_generator_was_too_slow_for_is_a_word_and_no_number(
    elsewhere: Elsewhere, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_CPU", 0.0)  # what it takes is too much
    result = told(elsewhere.url, "--data", body, "--concurrency", "1", "--requests", "20", "--warmup", "0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split() == ["1", "client", "INVALID"]
    assert "the generator was at its limit" in result.stdout


def test_handlers_of_signals_are_what_they_were(body: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    told("http://127.0.0.1:9/infer", "--data", body)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--concurrency", "1,x"], "expected whole numbers over 0 such as 1,8,64, found '1,x'"),
        (["--concurrency", "0"], "expected whole numbers over 0"),
        (["--rate", "-1"], "expected numbers over 0"),
        (["--rate", "inf"], "expected numbers over 0"),
        (["--duration", "0"], "expected a time over 0"),
        (["--duration", "soon"], "expected a time over 0"),
        (["--warmup", "long"], "expected auto or seconds from 0"),
        (["--mode", "sideways"], "Invalid value for '--mode'"),
        (["--rate", "10", "--concurrency", "2"], "--concurrency is for --mode closed and saturate"),
        (["--mode", "closed", "--rate", "2"], "--rate is for --mode open and ramp"),
        (["--mode", "open"], "say how many requests come a second"),
        (["--mode", "ramp", "--rate", "1,2,3"], "--rate is FIRST or FIRST,LAST"),
        (["--mode", "ramp", "--arrival", "trace:x"], "a trace does not rise"),
        (["--mode", "ramp", "--slo", "p99<=1s,throughput>=5/s"], "throughput is what is looked for"),
        (["--mode", "saturate", "--requests", "9"], "steps last by --duration"),
        (["--requests", "9", "--duration", "1"], "a run ends by one of them"),
        (["--timeout", "1s", "--slo", "p50<=10ms,max<=1s"], "who is given up so soon cannot break p50<=10ms,max<=1s"),
        (["--arrival", "sometimes", "--rate", "1"], "sometimes"),
        (["--slo", "p98<=1ms"], "p98"),
        (["--set", "a=1"], "--set"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(flags: list[str], text: str) -> None:
    result = told("http://127.0.0.1:9/infer", *flags)
    assert result.exit_code == 2
    assert text in result.stderr


def test_flags_become_a_plan() -> None:
    plan = make_plan({**FLAGS, "concurrency": (2, 4), "duration": 5.0, "repeat": 3})
    assert (plan.mode, plan.concurrency, plan.seconds, plan.repeat) == ("closed", (2, 4), 5.0, 3)
    assert make_plan(FLAGS).concurrency == (1, 8, 64)
    assert make_plan({**FLAGS, "rate": (5.0,)}).mode == "open"
    assert make_plan({**FLAGS, "mode": "saturate"}).concurrency == (1,)
    assert make_plan({**FLAGS, "arrival": "trace:a.jsonl"}).seconds == 0
    assert make_plan({**FLAGS, "arrival": "gamma:2", "mode": "ramp"}).arrival == "gamma:2"


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError):
        make_plan({**FLAGS, "rate": (1.0,), "concurrency": (1,)})


RUN = Measurement(load=Load(mode="closed", concurrency=1), requests=9, answered=9)
MISSED = Measurement(load=RUN.load, requests=9, answered=9, slo=[Clause(text="p50<=1ms", value=0.1, met=False)])


@pytest.mark.parametrize(
    ("mode", "runs", "found", "slo", "code"),
    [
        ("closed", [RUN], [], "", 0),
        ("closed", [], [], "", 1),
        ("closed", [MISSED], [], "p50<=1ms", 1),
        ("closed", [RUN], [], "p50<=1ms", 1),  # it cannot be told
        ("closed", [Measurement(load=RUN.load, answered=9, invalid=["late"])], [], "", 1),
        ("closed", [Measurement(load=RUN.load, requests=9)], [], "", 1),
        ("saturate", [MISSED], ["saturates at 1 client"], "p50<=1ms", 0),
        ("ramp", [MISSED], ["knee: 5/s"], "p50<=1ms", 0),
        ("ramp", [MISSED], ["no knee: "], "p50<=1ms", 1),
        ("ramp", [Measurement(load=RUN.load, invalid=["late"]), RUN], ["knee: 5/s"], "", 0),
        ("ramp", [RUN], [], "", 1),
    ],
)
def test_the_exit_status_says_whether_the_slo_is_kept(
    mode: str, runs: list[Measurement], found: list[str], slo: str, code: int
) -> None:
    session = Session(
        plan=make_plan({**FLAGS, "mode": mode}),
        slo=parse_slo(slo) if slo else Slo(),
        origin=Origin(command="bench"),
        runs=runs,
        found=found,
    )
    assert session.code() == code
