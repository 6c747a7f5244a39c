"""The generator in virtual time, where every latency is exact, and over real sockets, where bytes arrive in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.endpoint import Endpoint, Unreachable, tls_context
from penstock.errors import ConfigError
from penstock.perf.bench import load, load_run
from penstock.perf.bench.figures import summarise
from penstock.perf.bench.load import LoopTimer, TimerFile, http_request, make_alarm
from penstock.perf.bench.load_run import LOST, REFUSED, TIMED_OUT, UNDER_WAY, WRONG, Samples
from penstock.perf.bench.measurement import Load, Measurement
from penstock.serving.http import descriptors

KINDS = [LoopTimer, *([TimerFile] if sys.platform == "linux" else [])]


def loops() -> list[Any]:
    found: list[Any] = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    try:
        import uvloop
    except ImportError:
        return found
    return [*found, pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.mark.parametrize("new_loop", loops())
@pytest.mark.parametrize("kind", KINDS)
def test_an_alarm_rings_once_for_each_time_that_is_set(kind: type[LoopTimer] | type[TimerFile], new_loop: Any) -> None:
    rung: list[float] = []

    async def run() -> list[float]:
        rang = asyncio.Event()

        def ring() -> None:
            rung.append(time.perf_counter())
            rang.set()

        made = kind(ring)
        asked = []
        for after_s in (0.01, -1.0, 0.0005, 0.02):
            asked.append(time.perf_counter() + after_s)
            made.at(asked[-1] + 1000)  # replaced
            made.at(asked[-1])
            await rang.wait()
            rang.clear()
        await asyncio.sleep(0.01)
        made.at(time.perf_counter() + 0.005)
        made.close()
        await asyncio.sleep(0.02)
        return asked

    with asyncio.Runner(loop_factory=new_loop) as runner:
        asked = runner.run(run())
    assert len(rung) == 4
    slack = 0.0015 if kind is LoopTimer else 0.0  # the loop's timer has a resolution of 1 ms
    assert all(when >= at - slack for when, at in zip(rung, asked, strict=True)), "never early"


@pytest.mark.parametrize("new_loop", loops())
@pytest.mark.parametrize("kind", KINDS)
def test_an_alarm_can_be_set_again_from_its_callback(kind: type[LoopTimer] | type[TimerFile], new_loop: Any) -> None:
    async def run() -> int:
        rung = 0
        over = asyncio.Event()

        def ring() -> None:
            nonlocal rung
            rung += 1
            if rung < 50:
                made.at(time.perf_counter() + 0.0002)
            else:
                over.set()

        made = kind(ring)
        made.at(time.perf_counter())
        await over.wait()
        await asyncio.sleep(0.005)
        made.close()
        return rung

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == 50


async def test_without_a_timer_file_the_loops_own_timer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ring: object) -> TimerFile:
        raise OSError(38, "timerfd_create")

    monkeypatch.setattr(load, "TimerFile", refuse)
    made = make_alarm(lambda: None)
    assert isinstance(made, LoopTimer)
    made.close()


HERE = Endpoint("127.0.0.1", 9)
TLS = Path(__file__).parents[3] / "tls"
ENDS = b"<the connection ends>"
REQUESTS = [http_request(HERE, "POST", "/p", {"Content-Type": "image/png"}, b"body %d" % number) for number in range(5)]


def answer(status: int = 200, body: bytes = b"ok", *head: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status} S", *head, f"Content-Length: {len(body)}"))
    return lines.encode() + b"\r\n" + body


SILENT = b"<no response>"


class Server:
    """A server in virtual time: after `takes_s`, whatever else is under way, it sends what `sends` returns for the n-th
    request; None ends the connection."""

    def __init__(
        self,
        takes_s: float = 0.005,
        sends: Callable[[int, bytes, int], bytes | None] = lambda number, request, connection: answer(),
    ) -> None:
        self.takes_s, self.sends = takes_s, sends
        self.here: Callable[[float], bool] = lambda now: True
        self.error: OSError | None = None  # raised on connect
        self.received: list[tuple[float, bytes]] = []

    def begins_s(self, now: float) -> float:
        return now

    def reply(self, now: float, request: bytes, connection: int) -> tuple[float, bytes | None]:
        return self.begins_s(now) + self.takes_s, self.sends(len(self.received), request, connection)


class Frozen(Server):
    """Stalls from `start_s` to `end_s`, then answers all requests that arrived in between."""

    def __init__(self, start_s: float, end_s: float) -> None:
        super().__init__()
        self.start_s, self.end_s = start_s, end_s

    def begins_s(self, now: float) -> float:
        return self.end_s if self.start_s <= now < self.end_s else now


class Transport(asyncio.Transport):
    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol, number: int) -> None:
        super().__init__({"peername": ("127.0.0.1", 9)})
        self.loop, self.protocol, self.number, self.closed = loop, protocol, number, False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        now = self.loop.now
        self.loop.server.received.append((now, bytes(data)))
        at, sent = self.loop.server.reply(now, bytes(data), self.number)
        if sent != SILENT:
            self.loop.call_at(at, self.comes, sent)

    def comes(self, data: bytes | None) -> None:
        if data is None:
            self.close()
        elif not self.closed:
            self.protocol.data_received(data.removesuffix(ENDS))
            if data.endswith(ENDS):
                self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    abort = close


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when idle, its time jumps to the next timer."""

    def __init__(self, server: Server) -> None:
        self.now = 1000.0
        self.server = server
        self.opened = 0
        selector = selectors.SelectSelector()
        ask = selector.select

        def select(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            assert timeout is not None, "deadlock: everything waits"
            self.now += timeout + 1e-9  # a turn takes time: includes what is due a rounding error later
            return ask(0)

        cast(Any, selector).select = select
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> Any:
        if self.server.error is not None:
            raise self.server.error
        if not self.server.here(self.now - 1000.0):
            raise ConnectionRefusedError(111, "refused")
        protocol = factory()
        self.opened += 1
        transport = Transport(self, protocol, self.opened)
        protocol.connection_made(transport)
        return transport, protocol


Virtually = Callable[[Coroutine[Any, Any, Any], Server], Any]


@contextlib.contextmanager
def virtual(server: Server) -> Iterator[VirtualLoop]:
    """An event loop that provides the generator's time."""
    loop = VirtualLoop(server)
    clock = SimpleNamespace(perf_counter=loop.time, process_time=time.process_time)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(loop):
        for module in (load_run, load):
            patch.setattr(module, "time", clock)
        patch.setattr(load, "make_alarm", load.LoopTimer)
        yield loop


@pytest.fixture
def virtually() -> Iterator[Virtually]:
    """Runs a coroutine against a server in virtual time; `virtually.loop` afterwards has the loop."""

    def run(work: Coroutine[Any, Any, Any], server: Server) -> Any:
        run.loop = loops.enter_context(virtual(server))  # type: ignore[attr-defined]
        return run.loop.run_until_complete(work)  # type: ignore[attr-defined]

    with contextlib.ExitStack() as loops:
        yield run


def open_(**more: Any) -> Coroutine[Any, Any, Samples]:
    return load.open_loop(HERE, REQUESTS, **{"times": [n / 100 for n in range(2000)], **more})


def closed(**more: Any) -> Coroutine[Any, Any, Samples]:
    return load.closed_loop(HERE, REQUESTS, **{"concurrency": 3, **more})


def figures(samples: Samples, mode: str = "open") -> Measurement:
    return summarise(Load(mode=cast(Any, mode)), samples)


# ---- the open loop


def test_a_server_stall_delays_every_request_that_arrives_during_it(virtually: Virtually) -> None:
    """Coordinated omission: 100 requests per second for 20 s, of which the server is stalled for 2 s."""
    run = figures(virtually(open_(), Frozen(1009.02, 1011.02)))
    assert run.requests == run.answered == 2000
    assert run.latency.p50_s == pytest.approx(0.005)
    assert run.latency.p95_s == pytest.approx(1.005, rel=0.02)
    assert run.latency.p99_s == pytest.approx(1.805, rel=0.02)
    assert run.latency.p999_s == pytest.approx(1.985, rel=0.02)
    assert run.throughput == pytest.approx(100, rel=0.001)
    assert not run.invalid


def test_a_closed_loop_warns_that_it_cannot_see_stalls(virtually: Virtually) -> None:
    run = figures(virtually(closed(concurrency=1, seconds=20.0), Frozen(1009.02, 1011.02)), "closed")
    assert run.latency.p99_s == pytest.approx(0.005)
    assert run.latency.max_s == pytest.approx(2.005, rel=0.02)
    assert any("cannot see stalls: use --mode open" in caveat for caveat in run.caveats)


def test_requests_leave_at_their_times_in_turn(virtually: Virtually) -> None:
    server = Server()
    times = [0.0, 0.0, 0.001, 0.5, 0.5004, 1.25]
    samples = virtually(open_(times=times), server)
    start = server.received[0][0]
    assert [at - start for at, _ in server.received] == pytest.approx(times, abs=1e-6)
    assert [request for _, request in server.received] == [*REQUESTS, REQUESTS[0]]
    assert list(samples.intended_s) == times
    assert list(samples.number) == [0, 1, 2, 3, 4, 0]
    assert list(samples.status) == [200] * 6
    assert list(samples.latency_s) == pytest.approx([0.005] * 6, abs=1e-6)
    assert max(samples.late_s) < 1e-6
    assert samples.seconds == pytest.approx(1.25 * 6 / 5)


def test_more_connections_are_opened_while_none_is_free(virtually: Virtually) -> None:
    samples = virtually(open_(times=[0.0, 0.001, 0.002, 1.0], connections=2), Server())
    assert (samples.waited, virtually.loop.opened) == (1, 3)  # type: ignore[attr-defined]
    assert list(samples.latency_s) == pytest.approx([0.005] * 4, abs=1e-6)


def test_requests_without_a_free_connection_wait_and_the_wait_counts(
    virtually: Virtually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_run, "MOST_CONNECTIONS", 1)
    samples = virtually(open_(times=[0.0, 0.001, 0.002]), Server(0.010))
    assert list(samples.latency_s) == pytest.approx([0.010, 0.019, 0.028], abs=1e-6)
    assert max(samples.late_s) < 1e-6, "the generator itself was on time"
    assert any("2 requests waited for a connection" in caveat for caveat in figures(samples).caveats)


def test_lateness_of_the_generator_counts_as_latency_and_invalidates_the_run(virtually: Virtually) -> None:
    def stumbles(number: int, status: int, body: bytes) -> bool:
        virtually.loop.now += 0.050  # type: ignore[attr-defined]
        return True

    samples = virtually(open_(times=[n / 100 for n in range(100)], check=stumbles), Server())
    assert max(samples.late_s) > 0.5
    assert all(took > late for took, late in zip(samples.latency_s, samples.late_s, strict=True))
    run = figures(samples)
    assert len(run.invalid) == 1
    assert "the generator was late" in run.invalid[0]


def test_a_request_without_a_response_times_out_after_the_wait(virtually: Virtually) -> None:
    server = Server(sends=lambda number, request, _: SILENT if request.endswith(b"2") else answer())
    samples = virtually(open_(times=[0.0, 0.1, 0.2, 0.3], patience_s=2.0), server)
    assert list(samples.status) == [200, 200, TIMED_OUT, 200]
    assert samples.latency_s[2] == pytest.approx(2.1), "the time waited"
    assert virtually.loop.now == pytest.approx(1000 + load_run.LEAD_S + 0.3 + 2.0)  # type: ignore[attr-defined]
    assert figures(samples).first_error == "timeout: no response 2 s after the last request"


def test_requests_that_all_come_at_once_have_a_throughput(virtually: Virtually) -> None:
    assert figures(virtually(open_(times=[0.0, 0.0, 0.0]), Server(0.5))).throughput == pytest.approx(6)


FATES = st.one_of(st.just("silent"), st.just("ends"), st.sampled_from([200, 404, 503]))


class Fated(Server):
    """Treats the n-th request as drawn: silence, end of the connection, or a status, after a delay."""

    def __init__(self, fates: list[tuple[float, Any]]) -> None:
        super().__init__()
        self.fates = fates

    def reply(self, now: float, request: bytes, connection: int) -> tuple[float, bytes | None]:
        after_s, fate = self.fates[int(request.rpartition(b"\r\n")[2])]
        return now + after_s, {"ends": None, "silent": SILENT}.get(fate, answer(fate))


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0.001, 1), FATES), min_size=1, max_size=40), st.integers(1, 5))
@settings(max_examples=60)
def test_every_request_has_its_own_latency_or_error(drawn: list[tuple[float, float, Any]], connections: int) -> None:
    times, now_s = [], 0.0
    for gap_s, _, _ in drawn:
        times.append(now_s := now_s + gap_s)
    requests = [http_request(HERE, "POST", "/p", {}, b"%d" % number) for number in range(len(drawn))]
    server = Fated([(after_s, fate) for _, after_s, fate in drawn])
    with virtual(server) as loop:
        samples = loop.run_until_complete(load.open_loop(HERE, requests, times, connections=connections, patience_s=2))
    assert list(samples.intended_s) == times
    for (_, after_s, fate), status, took in zip(drawn, samples.status, samples.latency_s, strict=True):
        assert status == {"silent": TIMED_OUT, "ends": LOST}.get(fate, fate)
        if status > 0:
            assert took == pytest.approx(after_s, abs=1e-5)
        else:
            assert took == math.inf if status == LOST else took >= 2


# ---- the closed loop


def test_every_client_sends_after_its_response(virtually: Virtually) -> None:
    server = Server(0.010)
    samples = virtually(closed(concurrency=3, seconds=0.095), server)
    assert len(server.received) == 30, "ten times three, the last of them at 90 ms"
    assert list(samples.number) == [n % 5 for n in range(30)]
    assert list(samples.latency_s) == pytest.approx([0.010] * 30)
    assert samples.seconds == 0.095
    assert figures(samples, "closed").throughput == pytest.approx(300), "the last three count by half"


def test_the_requested_number_of_requests_is_sent(virtually: Virtually) -> None:
    samples = virtually(closed(at_least=7), Server(0.010))
    assert list(samples.status) == [200] * 7
    assert samples.seconds == pytest.approx(0.030), "until the last response"
    assert figures(samples, "closed").throughput == pytest.approx(7 / 0.030)


def test_a_client_gives_up_a_request_that_takes_too_long_and_goes_on_anew(virtually: Virtually) -> None:
    server = Server(1.0 / 3, lambda number, request, connection: SILENT if connection == 2 else answer())
    samples = virtually(closed(concurrency=2, seconds=4.0, timeout_s=1.0), server)
    assert sorted(set(samples.status)) == [TIMED_OUT, 200]
    assert list(samples.status).count(TIMED_OUT) == 1
    assert 1.0 <= samples.latency_s[list(samples.status).index(TIMED_OUT)] <= 1.2
    assert virtually.loop.opened == 3  # type: ignore[attr-defined]
    assert figures(samples, "closed").first_error == "timeout: no response in 1 s"


# ---- bad servers


def test_an_unreachable_address_is_an_error_before_sending(virtually: Virtually) -> None:
    server = Server()
    server.here = lambda now: False
    with pytest.raises(Unreachable, match=r"no connection to http://127\.0\.0\.1:9: .*refused"):
        virtually(open_(), server)
    with pytest.raises(Unreachable, match="no connection"):
        virtually(closed(seconds=1.0), server)


def test_the_first_error_is_stored_with_its_body(virtually: Virtually) -> None:
    body = b"expected image/png, found %d" + b"!" * 1000
    samples = virtually(open_(times=[0.0, 0.1, 0.2]), Server(sends=lambda number, *_: answer(415, body % number)))
    assert list(samples.status) == [415] * 3
    assert samples.first_error == (415, b"expected image/png, found 1" + b"!" * 473)
    run = figures(samples)
    assert (run.errors, run.requests, run.answered) == ({"415": 3}, 3, 0)
    assert run.first_error is not None
    assert run.first_error.startswith("415 Unsupported Media Type: expected image/png, found 1!")


class Dies(Server):
    """Ends all connections that send a request after one second, and accepts no new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.here = lambda now: now < 1.0

    def reply(self, now: float, request: bytes, connection: int) -> tuple[float, bytes | None]:
        return now + self.takes_s, answer() if now < 1001.0 else None


@pytest.mark.parametrize("work", [lambda: open_(connections=2), lambda: closed(seconds=20.0)])
def test_a_run_ends_early_when_its_server_is_gone(virtually: Virtually, work: Callable[[], Any]) -> None:
    samples = virtually(work(), Dies())
    assert samples.ended == "gone"
    assert set(samples.status) == {200, LOST, REFUSED}
    assert 1002.9 < virtually.loop.now < 1004.0  # type: ignore[attr-defined]
    assert samples.seconds == pytest.approx(virtually.loop.now - 1000, abs=0.1)  # type: ignore[attr-defined]


BOTH = pytest.mark.parametrize(
    "work",
    [
        lambda **k: open_(times=[0.1 * n for n in range(4)], connections=1, **k),
        lambda **k: closed(concurrency=1, at_least=4, **k),
    ],
)


@BOTH
@pytest.mark.parametrize(
    ("sends", "statuses", "first_error"),
    [
        (lambda number: None if number == 3 else answer(), [200, 200, LOST, 200], "lost"),
        (lambda number: answer(200, b"ok", "Connection: close"), [200] * 4, None),
        (lambda number: b"what?\r\n\r\n", [LOST] * 4, "lost: not an HTTP/1 response: what?"),
    ],
    ids=["one connection is lost", "each response ends its connection", "not HTTP"],
)
def test_a_lost_connection_fails_its_own_request_only(
    virtually: Virtually, work: Any, sends: Callable[[int], bytes | None], statuses: list[int], first_error: str | None
) -> None:
    samples = virtually(work(), Server(sends=lambda number, *_: sends(number)))
    assert list(samples.status) == statuses
    assert figures(samples).first_error == first_error
    assert not samples.ended


@BOTH
@pytest.mark.parametrize(
    ("response", "body"),
    [
        ("1.0 200 OK\r\n\r\nhello", b"hello"),
        ("1.1 200 OK\r\nConnection: close\r\n\r\nhello", b"hello"),
        ("1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\n9\r\nhello", None),
        ("1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhello", None),
        ("1.1 200 OK\r\nConnection: close\r\n", None),
    ],
)
def test_only_a_response_without_a_length_ends_with_its_connection(
    virtually: Virtually, work: Any, response: str, body: bytes | None
) -> None:
    bodies: list[bytes] = []
    server = Server(sends=lambda *_: f"HTTP/{response}".encode() + ENDS)
    samples = virtually(work(check=lambda number, status, body: bodies.append(body) is None), server)
    lost = body is None
    assert (list(samples.status), bodies) == ([LOST if lost else 200] * 4, [] if lost else [body] * 4)


@BOTH
def test_only_the_beginning_of_unchecked_responses_is_kept(virtually: Virtually, work: Any) -> None:
    chunks = b"".join(b"1\r\n%d\r\n" % n for n in range(9)) + b"0\r\n\r\n"
    server = Server(sends=lambda *_: b"HTTP/1.1 500 S\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert virtually(work(), server).first_error == (500, b"0123")
    assert virtually(work(check=lambda *_: False), server).first_error == (500, b"012345678")


@BOTH
def test_an_error_of_the_check_is_raised(virtually: Virtually, work: Any) -> None:
    def check(number: int, status: int, body: bytes) -> bool:
        raise ZeroDivisionError

    try:
        raise LookupError
    except LookupError:  # which the parser takes for the cause of its own error
        with pytest.raises(ZeroDivisionError):
            virtually(work(check=check), Server())


@BOTH
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
def test_a_machine_without_ports_or_files_makes_the_run_invalid(virtually: Virtually, work: Any, number: int) -> None:
    server = Server()

    def scarce(*_: object) -> bytes:
        server.error = OSError(number, "no more")
        return answer(200, b"ok", "Connection: close")

    server.sends = scarce
    samples = virtually(work(), server)
    assert samples.starved == 3
    assert "had no file or port for 3 more connections" in figures(samples).invalid[0]


def test_a_server_with_one_connection_at_a_time_gets_requests_on_its_first(virtually: Virtually) -> None:
    server = Server(sends=lambda number, request, connection: answer() if connection == 1 else SILENT)
    samples = virtually(open_(times=[0.1 * n for n in range(9)], connections=5, patience_s=0.1), server)
    assert list(samples.status) == [200] * 9


def test_cpu_time_before_a_run_does_not_count(virtually: Virtually) -> None:
    assert virtually(open_(times=[0.0]), Server()).busy_s == pytest.approx(load_run.LEAD_S)


def test_the_check_sees_every_response_and_marks_rejected_ones_wrong(virtually: Virtually) -> None:
    server = Server(sends=lambda number, request, _: answer(503 if number == 2 else 200, request[-1:]))
    seen: list[tuple[int, int, bytes]] = []

    def check(number: int, status: int, body: bytes) -> bool:
        seen.append((number, status, body))
        return number != 3

    samples = virtually(open_(times=[0.0, 0.1, 0.2, 0.3], check=check), server)
    assert seen == [(0, 200, b"0"), (1, 503, b"1"), (2, 200, b"2"), (3, 200, b"3")]
    assert list(samples.status) == [200, 503, 200, WRONG]
    assert figures(samples).errors == {"503": 1, "wrong": 1}


@pytest.mark.parametrize("loop", [open_, closed])
def test_a_cancelled_run_keeps_its_samples(virtually: Virtually, loop: Any) -> None:
    samples = Samples()
    given = {"times": [n / 10 for n in range(100)]} if loop is open_ else {"concurrency": 1, "seconds": 10.0}

    async def interrupted() -> None:
        task = asyncio.ensure_future(loop(samples=samples, **given))
        await asyncio.sleep(2.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtually(interrupted(), Server(0.08))
    assert samples.ended == "cancelled"
    assert samples.seconds == pytest.approx(2.05, abs=0.03)
    assert len(samples.status) > 15
    assert set(samples.status[:-1]) == {200}
    assert samples.status[-1] == UNDER_WAY
    run = figures(samples)
    assert (run.requests, run.errors) == (len(samples.status) - 1, {})
    assert any("1 requests under way" in text for text in run.caveats)


def test_progress_is_reported_during_the_run(virtually: Virtually) -> None:
    reported: list[tuple[float, int]] = []
    virtually(open_(times=[n / 10 for n in range(10)], on_progress=lambda s, n: reported.append((s, n))), Server())
    assert len(reported) == 9
    assert reported == sorted(reported)
    assert reported[-1] == (pytest.approx(0.88), 9)


def test_more_clients_than_files_may_be_open_are_refused(virtually: Virtually, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(256, 1024)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, given: limits.append(given))
    with pytest.raises(ConfigError, match="5000 connections need as many open files; the limit is 1024"):
        virtually(closed(concurrency=5000, seconds=1.0), Server())
    assert limits[-1] == (1024, 1024), "raised as far as allowed"
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (9000, 9000))
    with pytest.raises(ConfigError, match="8001 connections: expected at most 8000 per generator"):
        virtually(closed(concurrency=8001, seconds=1.0), Server())
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits[-1])
    virtually(open_(times=[0.0], connections=5000), Server())
    assert virtually.loop.opened == 924  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("loop", "given"),
    [
        ("closed", {"concurrency": 0, "seconds": 1.0}),
        ("closed", {"concurrency": 1}),
        ("closed", {"concurrency": 1, "seconds": 1.0, "requests": []}),
        ("open", {"times": []}),
        ("open", {"times": [0.0], "requests": []}),
    ],
)
def test_a_load_without_a_beginning_or_an_end_is_refused(loop: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{loop} loop needs"):
        asyncio.run(getattr(load, f"{loop}_loop")(HERE, **{"requests": REQUESTS, **given}))


# ---- real sockets


async def in_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echoes bodies: first an interim response, then a chunked one, split at its boundaries."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            start = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            for piece in (start[:30], start[30:], b"3\r\n%b\r\n" % body[:3], b"%x\r\n" % len(body[3:]), body[3:]):
                writer.write(piece)
                await writer.drain()
            writer.write(b"\r\n0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("new_loop", loops())
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_responses_that_arrive_in_pieces_are_joined(new_loop: Any, tls: bool) -> None:
    from penstock.serving.http.auth import make_ssl_context

    bodies: list[tuple[int, int, bytes]] = []

    def check(number: int, status: int, body: bytes) -> bool:
        bodies.append((number, status, body))
        return True

    async def both() -> tuple[Samples, Samples]:
        given = make_ssl_context(str(TLS / "cert.pem"), str(TLS / "key.pem")) if tls else None
        server = await asyncio.start_server(in_pieces, "127.0.0.1", 0, ssl=given)
        async with server:
            port = server.sockets[0].getsockname()[1]
            there = Endpoint("localhost", port, "/v", tls_context(str(TLS / "cert.pem")) if tls else None)
            requests = [http_request(there, "POST", "/p", {}, b"body %d" % n) for n in range(5)]
            first = await load.open_loop(there, requests, [n / 1000 for n in range(20)], connections=3, check=check)
            second = await load.closed_loop(there, requests, concurrency=3, at_least=20, check=check)
            return first, second

    with asyncio.Runner(loop_factory=new_loop) as runner:
        found = runner.run(both())
    assert [list(samples.status) for samples in found] == [[200] * 20] * 2
    assert sorted(bodies) == sorted((n, 200, b"body %d" % n) for n in [*range(5)] * 8)
    assert all(0 < took < 10 for samples in found for took in samples.latency_s)


def test_a_message_is_complete_with_its_host() -> None:
    there = Endpoint("::1", 8080, "/v")
    message = http_request(there, "POST", "/predictions/m", {"Content-Type": "text/plain"}, b"hello")
    head = "POST /v/predictions/m HTTP/1.1\r\nHost: [::1]:8080\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\n"
    assert message == head.encode() + b"hello"
