"""The sender against faulty captioners: every chunk gets one result, its own captions or an error."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.bulk.endpoints import ENDS_THE_JOB, NoServer, NotSent, window_for
from penstock.bulk.sender import ChunkSender, Undelivered
from penstock.bulk.servers import Asked, PenstockBackend, RevisionChanged, ServerFault, WrongAnswer, ask
from penstock.bulk.types import Answer, Chunk, SendOptions, Video
from penstock.client.endpoint import ConnectionLost, ResponseTooLarge
from penstock.errors import BadRequest, DeadlineExceeded, PayloadTooLarge, PenstockError, Unauthorized
from support.captioner import (
    Answerer,
    FakeCaptioner,
    Gone,
    Incoming,
    answer_of,
    caption,
    describe,
    hang_up,
    reset,
    shuffled,
    too_few,
    with_body,
    with_raw,
    with_reset,
    with_status,
    with_wait,
)
from support.waiting import wait_for

ROWS = 4
QUICK = {"backoff_s": 0.005, "longest_backoff_s": 0.02, "connect_timeout_s": 5.0, "fingerprint": "0123456789abcdef"}


class NoBlock:
    def release(self) -> None:
        pass


def chunk(number: int, rows: int = ROWS, jpeg: bool = False) -> Chunk:
    frames = list(range(number * ROWS, number * ROWS + rows))
    pixels: Any = [b"jpeg %d" % n for n in frames] if jpeg else np.full((rows, 8, 8, 3), number % 256, np.uint8)
    video = Video("a.mp4", "a.mp4", 1000, 5)
    return Chunk(video, number, pixels, frames, [0.0] * rows, [None] * rows, NoBlock())


class Job:
    """Sends chunks and waits for their results; checks that each arrives once, in the sender's thread."""

    def __init__(
        self, *servers: FakeCaptioner, token: str | None = None, ca: str | None = None, **options: Any
    ) -> None:
        self.hung: list[tuple[str, str]] = []
        infos = [ask(server.url, "captioner", token=token, ca=ca) for server in servers]
        self.answers: dict[int, list[str] | PenstockError] = {}
        self.twice: list[int] = []
        self.threads: set[str] = set()
        self.sent = 0
        self._done = threading.Condition()
        sending = SendOptions(**{**QUICK, **options})
        self.sender = ChunkSender(
            infos, sending, self._answered, on_hang=lambda *found: self.hung.append(found), seed=1
        )
        self.sender.start()

    def _answered(self, chunk: Chunk, outcome: list[str] | PenstockError) -> None:
        with self._done:
            if chunk.number in self.answers:
                self.twice.append(chunk.number)
            self.answers[chunk.number] = outcome
            self.threads.add(threading.current_thread().name)
            self._done.notify_all()

    def send(self, count: int, **form: Any) -> None:
        for _ in range(count):
            self.sender.send(chunk(self.sent, **form))
            self.sent += 1

    def wait(self, count: int | None = None) -> dict[int, list[str] | PenstockError]:
        with self._done:
            whole = self._done.wait_for(lambda: len(self.answers) >= (self.sent if count is None else count), 20)
        assert whole, (self.sender.stats(), self.answers)
        return self.answers

    def close(self, drain_s: float = 0.0) -> None:
        self.sender.close(drain_s)
        assert not self.twice
        assert sorted(self.answers) == list(range(self.sent)), "each chunk once"
        assert self.threads <= {"penstock-sender"}

    def all_captioned(self) -> bool:
        return all(
            outcome == [f"frame {n}" for n in range(number * ROWS, number * ROWS + ROWS)]
            for number, outcome in self.wait().items()
        )


@pytest.fixture
def server() -> Iterator[FakeCaptioner]:
    with FakeCaptioner() as server:
        yield server


Start = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts jobs; at the end each of their chunks has one result."""
    with ExitStack() as jobs:

        def begin(*servers: FakeCaptioner, **options: Any) -> Job:
            job = Job(*servers, **options)
            jobs.callback(job.close)
            return job

        yield begin


@pytest.fixture
def job(start: Start, server: FakeCaptioner) -> Job:
    return start(server)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["a"], "expected 4 texts"),
        (["a"] * 5, "expected 4 texts"),
        (["a", "b", "c", None], "None"),
        ([Answer("a"), "b", "c", Answer(3)], "3"),  # type: ignore[arg-type]
        (None, "TypeError"),
        (KeyError("text"), "KeyError"),
    ],
)
@pytest.mark.parametrize("tpm", [None, 1e9])
def test_a_backend_that_returns_or_raises_anything_fails_its_chunk(
    server: FakeCaptioner, found: Any, words: str, tpm: float | None
) -> None:
    class Wrong(PenstockBackend):
        async def answers(self, chunk: Chunk, body: Any, info: Any, post: Any) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

        def encode(self, chunk: Chunk, info: Any, job: str) -> Any:
            return super().encode(chunk, info, job) if chunk.number else {}["no such key"]

    results: dict[int, Any] = {}
    info = replace(ask(server.url, "captioner"), backend=Wrong(Asked()))
    done = threading.Semaphore(0)

    def keep(chunk: Chunk, result: Any) -> None:
        results[chunk.number] = result
        done.release()

    sender = ChunkSender([info], SendOptions(**{**QUICK, "tpm": tpm}), keep, seed=1)  # type: ignore[arg-type]
    sender.start()
    try:
        for number in range(2):
            sender.send(chunk(number))
        assert all(done.acquire(timeout=20) for _ in range(2)), "each chunk has a result"
    finally:
        sender.close(0.0)
    assert "KeyError" in results[0].message
    assert isinstance(results[1], Undelivered)
    assert words in results[1].message


def test_every_chunk_gets_the_captions_of_its_own_frames(job: Job):
    job.send(50)
    assert job.all_captioned()
    stats = job.sender.stats()
    assert (stats.answered, stats.in_flight, stats.waiting, stats.retries) == (50, 0, 0, 0)
    assert stats.sent_bytes > 50 * ROWS * 8 * 8 * 3
    job.close(1.0)


def test_pixels_and_jpegs_arrive_unchanged(server: FakeCaptioner, job: Job):
    job.send(1)
    job.wait()
    job.send(1, jpeg=True)
    job.wait()
    raw, jpeg = server.seen
    head = int(raw.headers["inference-header-content-length"])
    assert raw.body[head:-32] == bytes(ROWS * 8 * 8 * 3)
    head = int(jpeg.headers["inference-header-content-length"])
    assert jpeg.body[head:-32] == b"".join(b"\6\0\0\0jpeg %d" % n for n in range(4, 8))
    assert jpeg.frames == [4, 5, 6, 7]


def test_a_request_has_its_headers(start: Start):
    with FakeCaptioner(token="t0ken") as server:
        job = start(server, token="t0ken")
        job.send(1)
        assert job.all_captioned()
        headers = server.seen[0].headers
        assert headers["content-type"] == "application/octet-stream"
        assert headers["x-priority"] == "1"
        assert headers["authorization"] == "Bearer t0ken"
        assert headers["idempotency-key"].startswith("01234567-")
        assert headers["idempotency-key"].endswith("-0-4")
        assert server.seen[0].path == "/v2/models/captioner/infer"


def test_connections_are_reused_for_later_chunks(server: FakeCaptioner, job: Job):
    job.send(40)
    job.wait()
    assert server.connections - 1 <= 10  # less the metadata's; 40 responses open the window to at most 8


# ---- temporary faults


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "wrong",
    [
        with_status(500),
        with_status(502),
        with_status(504),
        with_status(503),
        with_status(503, "Retry-After: 0.01"),
        with_status(429, "Retry-After: 0"),
        with_status(429, early=True),
        with_status(404),
        with_status(409),
        with_reset(),
        with_reset(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"),
        too_few,
        shuffled,
        with_body(lambda frames, server: b'["just", "some", "list", "!"]'),
        with_body(lambda frames, server: b"{'python': 1}"),
        with_body(lambda frames, server: answer_of(frames, "r1"), kind="text/html"),
        with_body(lambda frames, server: answer_of(frames, "r1", model="other")),
        with_raw(b"no HTTP at all\r\n\r\n"),
        with_raw(ENDLESS + b"Content-Length: 1000000000\r\n\r\n", forever=b"x" * 65536),
        with_raw(ENDLESS + b"Transfer-Encoding: chunked\r\n\r\n", forever=b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        hang_up,
    ],
    ids=["500", "502", "504", "503", "503 later", "429", "429 early", "404", "409", "reset", "half", "too few",
         "shuffled", "a list", "no JSON", "html", "other model", "no HTTP", "1 GB", "endless", "hang up"],
)  # fmt: skip
def test_a_temporary_fault_costs_no_caption(start: Start, server: FakeCaptioner, wrong: Answerer):
    job = start(server, max_response_bytes=100_000)
    server.script_next(caption, wrong, wrong)
    job.send(12)
    assert job.all_captioned()
    job.close(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_lose_repeat_and_mix_no_captions(start: Start, seed: int):
    faults = [
        with_status(500), with_status(503, "Retry-After: 0.01"), with_status(429), with_status(404), with_reset(),
        with_status(502), too_few, shuffled, hang_up, with_raw(b"no HTTP\r\n\r\n"),
        with_reset(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    ]  # fmt: skip
    dice = random.Random(seed)
    with FakeCaptioner() as one, FakeCaptioner() as other:
        for server in (one, other):
            server.script_next(*[dice.choice(faults) if dice.random() < 0.3 else caption for _ in range(150)])
        job = start(one, other, attempts=100)
        job.send(150)
        assert job.all_captioned()
        assert job.sender.stats().retries > 20


def test_a_retry_has_the_same_key_and_body(server: FakeCaptioner, job: Job):
    server.script_next(with_status(500), with_reset(), too_few)
    job.send(1)
    assert job.all_captioned()
    assert len({seen.headers["idempotency-key"] for seen in server.seen}) == 1
    assert len({seen.body for seen in server.seen}) == 1
    assert len(server.seen) == 4
    assert job.sender.stats().retries == 2  # the reset reused connection was reopened silently
    job.send(1)
    job.wait()
    assert server.seen[-1].headers["idempotency-key"] != server.seen[0].headers["idempotency-key"]


def test_another_run_uses_another_key_for_the_same_chunk(start: Start, server: FakeCaptioner):
    for _ in range(2):
        job = start(server)
        job.send(1)
        assert job.all_captioned()
        job.close()
    first, second = (seen.headers["idempotency-key"] for seen in server.seen)
    assert first != second


def test_retry_after_pauses_all_chunks_to_the_server(start: Start, server: FakeCaptioner):
    times: list[float] = []

    def note(request: Incoming, server: FakeCaptioner) -> None:
        times.append(time.monotonic())
        caption(request, server)

    def refuse(request: Incoming, server: FakeCaptioner) -> None:
        times.append(time.monotonic())
        with_status(503, "Retry-After: 0.3")(request, server)

    job = start(server)
    server.script_next(refuse, *[note] * 9)
    job.send(1)
    wait_for(lambda: job.sender.stats().servers[0].state == "rests")
    job.send(8)
    assert job.all_captioned()
    assert times[1] - times[0] >= 0.3


def test_a_server_that_says_at_once_rests_nevertheless(start: Start, server: FakeCaptioner):
    job = start(server, backoff_s=60.0, longest_backoff_s=60.0)
    server.script_next(with_status(429, "Retry-After: 0"))
    job.send(1)
    wait_for(lambda: len(server.seen) > 0)
    wait_for(lambda: job.sender.stats().servers[0].state == "rests")
    assert len(server.seen) == 1


def test_the_window_halves_when_the_server_is_busy(start: Start, server: FakeCaptioner):
    server.parameters["instances"] = 8
    job = start(server)
    assert job.sender.stats().window == 17
    server.script_next(with_status(429))
    job.send(1)
    assert job.all_captioned()
    assert job.sender.stats().window == 8


def test_a_late_response_is_retried(start: Start, server: FakeCaptioner):
    release = threading.Event()
    job = start(server, request_timeout_s=0.1)
    server.script_next(with_wait(release))
    job.send(1)
    assert job.all_captioned()
    release.set()


def test_an_early_rejection_is_received_while_the_body_is_being_sent(server: FakeCaptioner, job: Job):
    server.script_next(with_status(413, early=True))
    big = chunk(0)
    big.pixels = np.zeros((4, 2000, 2000, 3), np.uint8)
    job.sender.send(big)
    job.sent = 1
    outcome = job.wait()[0]
    assert isinstance(outcome, Undelivered)
    assert isinstance(outcome.__cause__, PayloadTooLarge)
    assert len(server.seen) == 1


# ---- permanent faults


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [(with_status(500), ServerFault), (shuffled, WrongAnswer), (with_reset(), ConnectionLost),
     (with_status(504), DeadlineExceeded),
     (with_raw(ENDLESS + b"Content-Length: 1000000000\r\n\r\n"), ResponseTooLarge)],
)  # fmt: skip
def test_a_chunk_that_always_fails_fails_alone(
    start: Start, server: FakeCaptioner, wrong: Answerer, cause: type[PenstockError]
):
    def only_the_third(request: Incoming, server: FakeCaptioner) -> None:
        (wrong if request.frames[0] == 2 * ROWS else caption)(request, server)

    job = start(server, attempts=3)
    server.script_next(*[only_the_third] * 20)
    job.send(6)
    answers = job.wait()
    outcome = answers.pop(2)
    assert isinstance(outcome, Undelivered)
    assert type(outcome.__cause__) is cause
    assert "(3 attempts)" in outcome.message
    assert all(isinstance(other, list) for other in answers.values())
    answers[2] = outcome


@pytest.mark.parametrize(("status", "cause"), [(400, BadRequest), (422, BadRequest), (413, PayloadTooLarge)])
def test_a_rejected_chunk_is_not_retried(server: FakeCaptioner, job: Job, status: int, cause: type[PenstockError]):
    server.script_next(with_status(status))
    job.send(1)
    outcome = job.wait()[0]
    assert isinstance(outcome, Undelivered)
    assert type(outcome.__cause__) is cause
    assert "attempts" not in outcome.message
    assert len(server.seen) == 1


def test_pixels_that_do_not_match_their_frames_fail_without_a_request(job: Job):
    odd = chunk(0)
    odd.pixels = np.zeros((4, 8, 8, 6), np.uint8)[:, :, :, ::2]
    job.sender.send(odd)
    job.sent = 1
    assert isinstance(job.wait()[0], Undelivered)


def test_a_rejected_token_ends_the_job(server: FakeCaptioner, job: Job):
    server.token = "another"
    job.send(5)
    assert all(isinstance(outcome, Unauthorized) for outcome in job.wait().values())
    assert isinstance(job.answers[0], ENDS_THE_JOB)


# ---- servers that leave and return


def test_a_server_that_restarts_captions_every_chunk(start: Start, server: FakeCaptioner):
    def die(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        threading.Thread(target=restart).start()
        reset(request.connection)
        raise Gone

    def restart() -> None:
        server.stop()
        time.sleep(0.1)
        server.start()
        back.set()

    back = threading.Event()
    job = start(server)
    server.script_next(*[caption] * 10, die)
    job.send(30)
    back.wait(20)
    assert job.all_captioned()
    assert job.sender.stats().servers[0].state == "up"


def test_an_absent_server_costs_a_chunk_no_attempts(start: Start, server: FakeCaptioner):
    job = start(server, attempts=1)
    server.stop()
    job.send(5)
    wait_for(lambda: job.sender.stats().servers[0].state == "away")
    time.sleep(0.1)  # several probes
    assert not job.answers
    server.start()
    assert job.all_captioned()


def test_a_tunnel_that_closes_every_connection_costs_one_attempt(start: Start, server: FakeCaptioner):
    def closed(request: Incoming, server: FakeCaptioner) -> None:
        reset(request.connection)
        raise Gone

    job = start(server, attempts=2)
    server.script_next(closed)
    server.metadata.extend([closed] * 6)
    job.send(1)
    assert job.all_captioned()
    assert len(server.seen) == 2


def test_a_server_that_stays_away_ends_the_job_after_give_up_s(start: Start, server: FakeCaptioner):
    job = start(server, give_up_s=0.2)
    server.stop()
    began = time.monotonic()
    job.send(5)
    assert all(isinstance(outcome, NoServer) for outcome in job.wait().values())
    assert time.monotonic() - began >= 0.19
    assert "refused" in str(job.answers[0])
    job.send(1)
    assert isinstance(job.wait()[5], NoServer)


def test_a_hanging_server_fails_no_chunk_but_ends_the_job_after_give_up_s(start: Start, server: FakeCaptioner):
    release = threading.Event()
    job = start(server, request_timeout_s=0.05, connect_timeout_s=0.05, give_up_s=0.5)
    server.script_next(*[with_wait(release)] * 1000)
    server.metadata.extend([with_wait(release, describe)] * 1000)
    job.send(3)
    assert all(isinstance(outcome, NoServer) for outcome in job.wait().values())
    assert len(server.seen) == 3, "it gets no chunks before it answers again"
    release.set()


def test_a_server_that_answers_some_requests_in_time_does_not_hang(start: Start, server: FakeCaptioner):
    release = threading.Event()
    job = start(server, request_timeout_s=0.3)
    server.script_next(with_wait(release))
    job.send(1)
    wait_for(lambda: len(server.seen) == 1)
    job.send(1)
    assert job.all_captioned()
    assert not job.hung
    server.script_next(with_wait(release))
    job.send(1)
    wait_for(lambda: len(job.hung) == 1)
    assert job.hung == [(server.url, "it has answered no request for 0.3 s")]
    release.set()
    assert job.all_captioned()


def test_a_server_that_recovers_from_a_hang_gets_its_chunks_again(start: Start, server: FakeCaptioner):
    release = threading.Event()
    job = start(server, request_timeout_s=0.05, connect_timeout_s=0.05, attempts=2)
    server.script_next(*[with_wait(release)] * 2)
    server.metadata.extend([with_wait(release, describe)] * 5)
    job.send(2)
    wait_for(lambda: not server.metadata)
    release.set()
    assert job.all_captioned()


def test_a_server_that_never_accepts_ends_the_job(start: Start, server: FakeCaptioner):
    server.script_next(*[with_status(503)] * 1000)
    job = start(server, give_up_s=0.2)
    job.send(2)
    assert all(isinstance(outcome, NoServer) for outcome in job.wait().values())


@pytest.mark.parametrize("told_by", ["answer", "metadata"])
def test_another_model_after_a_restart_ends_the_job_and_mixes_no_captions(
    server: FakeCaptioner, job: Job, told_by: str
):
    job.send(5)
    assert job.all_captioned()
    if told_by == "metadata":
        server.stop()
        job.send(1)
        wait_for(lambda: job.sender.stats().servers[0].state == "away")
        server.revision = "r2"
        server.start()
    server.revision = "r2"
    job.send(5)
    job.wait()
    for number in range(5, job.sent):
        outcome = job.answers[number]
        assert isinstance(outcome, RevisionChanged), outcome
        assert "'r1'" in outcome.message
        assert "'r2'" in outcome.message


# ---- several servers


def test_the_least_loaded_server_gets_the_next_chunk(start: Start):
    release = threading.Event()
    with FakeCaptioner() as slow, FakeCaptioner(instances=2) as quick:
        slow.script_next(*[with_wait(release)] * 3)
        job = start(slow, quick)
        job.send(40)
        job.wait(37)
        release.set()
        assert job.all_captioned()
        assert 1 <= len(slow.seen) <= 3
        assert len(slow.seen) + len(quick.seen) == 40


def test_an_absent_server_is_skipped_and_used_again_after_its_return(start: Start):
    with FakeCaptioner() as one, FakeCaptioner() as other:
        job = start(one, other)
        one.stop()
        job.send(20)
        assert job.all_captioned()
        assert len(other.seen) == 20
        assert {server.state for server in job.sender.stats().servers} == {"up", "away"}
        one.start()
        wait_for(lambda: all(server.state == "up" for server in job.sender.stats().servers))
        job.send(20)
        assert job.all_captioned()
        assert one.seen


def test_a_chunk_that_failed_on_one_server_goes_to_another(start: Start):
    with FakeCaptioner() as one, FakeCaptioner() as other:
        one.script_next(*[with_status(500)] * 100)
        job = start(one, other, attempts=2)
        job.send(30)
        assert job.all_captioned()


def test_a_server_that_always_fails_rests(start: Start):
    with FakeCaptioner() as one, FakeCaptioner() as other:
        one.script_next(*[with_status(500)] * 1000)
        job = start(one, other, backoff_s=20.0, longest_backoff_s=20.0)
        job.send(6)
        wait_for(lambda: job.sender.stats().servers[0].state == "rests")


# ---- modes


def test_a_round_waits_for_all_of_the_previous_one(start: Start, server: FakeCaptioner):
    release = threading.Event()
    server.script_next(with_wait(release), *[caption] * 49)
    job = start(server, mode="single")
    job.send(60)
    job.wait(49)
    assert len(server.seen) == 50
    release.set()
    assert job.all_captioned()


def test_each_mode_has_the_window_of_the_published_client(server: FakeCaptioner):
    info = ask(server.url, "captioner")
    assert window_for("single", info, 1).room() == 50
    assert window_for("stream-single", info, 1).room() == 500
    assert window_for("stream-prebatch", info, None).room() == 3
    assert window_for("stream-prebatch", info, 4).room() == 3
    assert window_for("stream-prebatch", info, 1).room() == 9


# ---- closing


def test_a_drain_finishes_chunks_in_flight_and_returns_the_rest(start: Start, server: FakeCaptioner):
    release = threading.Event()
    server.script_next(*[with_wait(release)] * 3)
    job = start(server)
    job.send(10)
    wait_for(lambda: len(server.seen) == 3)
    threading.Timer(0.1, release.set).start()
    job.close(drain_s=20.0)
    assert [isinstance(job.answers[n], list) for n in range(10)] == [True] * 3 + [False] * 7
    assert all(isinstance(job.answers[n], NotSent) for n in range(3, 10))


def test_a_close_without_drain_returns_every_chunk_at_once(start: Start, server: FakeCaptioner):
    release = threading.Event()
    server.script_next(*[with_wait(release)] * 3)
    job = start(server)
    job.send(10)
    wait_for(lambda: len(server.seen) == 3)
    job.close(0.0)
    assert all(isinstance(outcome, NotSent) for outcome in job.answers.values())
    release.set()


def test_a_second_close_shortens_the_first(start: Start, server: FakeCaptioner):
    release = threading.Event()
    server.script_next(with_wait(release))
    job = start(server)
    job.send(1)
    wait_for(lambda: len(server.seen) == 1)
    first = threading.Thread(target=job.sender.close, args=(1000.0,))
    first.start()
    wait_for(lambda: job.sender.stats().servers[0].in_flight == 1)
    job.close(0.0)
    first.join(20)
    assert not first.is_alive()
    release.set()


def test_a_chunk_that_fails_while_draining_is_not_retried(start: Start, server: FakeCaptioner):
    release = threading.Event()
    server.script_next(with_wait(release, with_status(500)))
    job = start(server)
    job.send(1)
    wait_for(lambda: len(server.seen) == 1)
    threading.Timer(0.1, release.set).start()
    job.close(20.0)
    assert isinstance(job.answers[0], NotSent)
    assert len(server.seen) == 1


def test_a_chunk_after_the_end_is_returned(server: FakeCaptioner):
    job = Job(server)
    job.close()
    job.send(1)
    assert isinstance(job.answers[0], NotSent)


def test_a_close_does_not_wait_for_an_absent_server(server: FakeCaptioner, job: Job):
    server.stop()
    job.send(3)
    wait_for(lambda: job.sender.stats().servers[0].state == "away")
    began = time.monotonic()
    job.close(30.0)
    assert time.monotonic() - began < 10
    assert all(isinstance(outcome, NotSent) for outcome in job.answers.values())


def test_many_threads_may_send_while_the_sender_closes(job: Job):
    numbers = iter(range(400))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            job.sender.send(chunk(number))

    job.sent = 400
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    job.wait(50)
    job.sender.close(5.0)
    for thread in threads:
        thread.join()
    job.close()
    for number, outcome in job.answers.items():
        assert isinstance(outcome, NotSent) or outcome[0] == f"frame {number * ROWS}"


def test_a_failing_callback_harms_no_other_chunk(server: FakeCaptioner, caplog: pytest.LogCaptureFixture):
    got: list[int] = []
    whole = threading.Event()

    def answered(chunk: Chunk, outcome: object) -> None:
        got.append(chunk.number)
        if len(got) == 5:
            whole.set()
        if chunk.number == 1:
            raise RuntimeError("the taker is broken")

    sender = ChunkSender([ask(server.url, "captioner")], SendOptions(**QUICK), answered)
    sender.start()
    for number in range(5):
        sender.send(chunk(number))
    assert whole.wait(20)
    sender.close(1.0)
    assert sorted(got) == [0, 1, 2, 3, 4]
    assert "its response is lost" in caplog.text
