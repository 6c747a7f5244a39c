"""Redis behavior that users of service_streamer rely on, and fixes of its known problems, under both module names."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock
from penstock import BadRequest, DeadlineExceeded, QueueFull
from penstock.errors import LoadFailed

HERE = Path(__file__).parent
COMPAT = HERE.parents[1] / "compat" / "service_streamer"
REQUIRED = inspect.Parameter.empty
BROKER = {"redis_broker": "localhost:6379", "prefix": ""}
INIT = {"model_init_args": None, "model_init_kwargs": None}
SIGNATURES = {
    "RedisStreamer": BROKER,
    "RedisWorker": {"model_class": REQUIRED, "batch_size": REQUIRED, "max_latency": 0.1, **BROKER, **INIT},
    "run_redis_workers_forever": {
        "model_class": REQUIRED, "batch_size": REQUIRED, "max_latency": 0.1, "worker_num": 1, "cuda_devices": None,
        **BROKER, "mp_start_method": "spawn", **INIT,
    },
}  # fmt: skip

Start = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("paths")


@pytest.fixture
def start(start_over_redis: Start) -> Start:
    return start_over_redis


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_and_defaults_equal_the_reference(name: str) -> None:
    found = inspect.signature(getattr(penstock, name)).parameters.values()
    assert {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD} == SIGNATURES[name]


def test_a_worker_accepts_further_arguments_like_the_reference(models: ModuleType) -> None:
    worker = penstock.RedisWorker(models.Times, 8, 0.1, "localhost:6379", "", (3,), None, "more", other="too")
    assert {n: p.default for n, p in inspect.signature(worker.run_forever).parameters.items()} == {"gpu_id": None}
    assert penstock.RedisWorker(models.double, batch_size=8).model_predict([1, 2]) == [2, 4]


def test_a_list_is_split_at_the_batch_size_and_calls_share_batches(start: Start, models: ModuleType) -> None:
    streamer = start(models.sizes, 4, worker_num=2)
    assert max(streamer.predict(range(50))) == 4
    futures = [streamer.submit([1]) for _ in range(40)]
    assert max(f.result(20)[0] for f in futures) > 1


def test_only_the_worker_instantiates_the_model(start: Start, models: ModuleType) -> None:
    assert start(models.Times, 8, model_init_args=(3,)).predict([2]) == [6]
    [(pid, *_)] = [start(models.pids, 8).predict([1])]
    assert pid != os.getpid()


def test_destroy_workers_is_refused(start: Start, models: ModuleType) -> None:
    streamer = start(models.double, 64)
    with pytest.raises(NotImplementedError, match="ended where they run"):
        streamer.destroy_workers()
    assert streamer.predict([1]) == [2]


def test_pain_1_an_exception_fails_its_own_item_alone(start: Start, models: ModuleType) -> None:
    streamer = start(models.inverse, 4)
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        streamer.predict([1, 0])
    assert str(caught.value.__cause__) == "the model raised ZeroDivisionError"
    answers = streamer.predict([2, 0, 4], return_exceptions=True)
    assert (answers[0], answers[2]) == (0.5, 0.25)
    assert isinstance(answers[1], ZeroDivisionError)
    with pytest.raises(models.Refused, match="3: zero"):
        start(models.refuse_zero, 4).predict([0])


def test_pain_3_a_model_that_cannot_be_loaded_ends_its_worker_with_the_error(models: ModuleType, broker: str) -> None:
    with pytest.raises((LoadFailed, TypeError), match=r"init_model|argument"):
        penstock.RedisWorker(models.Times, 8, 0.1, broker, "broken", (1, 2, 3, 4)).run_forever()


def test_pain_6_requests_run_first_in_first_out(start: Start, models: ModuleType, tmp_path: Path) -> None:
    streamer = start(models.noted, 1)
    file = str(tmp_path / "ran")
    for future in [streamer.submit([(file, text)]) for text in "abcdef"]:
        future.result(20)
    assert Path(file).read_text() == "abcdef"


def test_pain_6_no_foreign_pickle_is_loaded(start: Start, models: ModuleType) -> None:
    with pytest.raises(BadRequest, match="object cannot be sent over the broker"):
        start(models.echo, 64).predict([object()])


def test_values_keep_their_types_over_the_broker(start: Start, models: ModuleType) -> None:
    sent = [
        models.Box(1.5, {datetime(2026, 1, 1)}), Decimal("1.10"), uuid.UUID(int=1), bytearray(b"x"), models.Point(1, 2)
    ]  # fmt: skip
    back = start(models.echo, 64).predict(sent)
    assert back == sent
    assert [type(value) for value in back] == [type(value) for value in sent]


def test_pickles_are_sent_only_if_both_sides_allow_them(models: ModuleType, broker: str) -> None:
    [process] = penstock.run_redis_workers_forever(
        models.echo, 8, redis_broker=broker, prefix="pickles", block=False, allow_pickle=True
    )
    try:
        with (
            penstock.RedisStreamer(broker, "pickles", allow_pickle=True) as trusting,
            penstock.RedisStreamer(broker, "pickles") as careful,
        ):
            assert trusting.predict([{1: models.Odd()}, 2])[0][1] == models.Odd()
            with pytest.raises(BadRequest, match="Odd cannot be sent over the broker"):
                careful.predict([models.Odd()])
            assert careful.predict([3]) == [3]
    finally:
        process.terminate()
        process.join(30)


def test_pain_7_a_forked_child_has_its_own_connection(start: Start, models: ModuleType) -> None:
    streamer = start(models.double, 64)
    assert streamer.predict([1]) == [2]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.warns(RuntimeWarning, match="forked"):
                code = 0 if streamer.predict([5]) == [10] else 2
            streamer.close()
        finally:
            os._exit(code)
    assert streamer.predict([3]) == [6]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert streamer.predict([4]) == [8]


def test_pain_8_one_script_starts_two_models(broker: str, tmp_path: Path) -> None:
    script = tmp_path / "two_models.py"
    script.write_text(
        textwrap.dedent(f"""
        from service_streamer import ManagedModel, RedisStreamer, run_redis_workers_forever

        class Times(ManagedModel):
            def init_model(self, factor):
                self.model = factor

            def predict(self, batch):
                return [x * self.model for x in batch]

        if __name__ == "__main__":
            processes = []
            for factor in (2, 3):
                processes += run_redis_workers_forever(
                    Times, 8, redis_broker="{broker}", prefix=f"times-{{factor}}",
                    model_init_args=[factor], block=False,
                )
            for factor in (2, 3):
                with RedisStreamer("{broker}", prefix=f"times-{{factor}}") as streamer:
                    print(streamer.predict([1, 10]))
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
                print(process.exitcode)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPAT), *sys.path])},
    )
    assert done.stdout.split("\n")[:4] == ["[2, 20]", "[3, 30]", "0", "0"], done.stderr


def test_pain_9_queues_are_bounded_and_calls_have_deadlines(start: Start, models: ModuleType, broker: str) -> None:
    with penstock.RedisStreamer(broker, "nobody", max_queue=4) as streamer:
        with pytest.raises(TimeoutError):  # first: the others' time does not run while this connects
            streamer.predict([1, 2], deadline=0.05)
        futures = [streamer.submit([i], deadline=1) for i in range(10)]
        refused = [isinstance(f.exception(20), QueueFull) for f in futures]
        assert refused == [False] * 4 + [True] * 6
        assert all(isinstance(f.exception(20), DeadlineExceeded) for f in futures[:4])
    small = start(models.double, 64)
    assert small.predict([5], priority=2) == [10]
    assert small.statistics()["waiting"] == 0


def test_a_call_larger_than_the_queue_is_sent_in_chunks(start: Start, models: ModuleType, broker: str) -> None:
    prefix = start(models.double, 64)._model.removeprefix("redis:")
    with penstock.RedisStreamer(broker, prefix, max_queue=100) as streamer:
        assert streamer.predict(range(1000)) == [2 * n for n in range(1000)]


def test_wrong_arguments_are_refused_by_name(models: ModuleType) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        penstock.RedisWorker(models.double, 0)
    with pytest.raises(ValueError, match="max_latency"):
        penstock.RedisWorker(models.double, 1, -1)
    with pytest.raises(TypeError, match="model_class"):
        penstock.RedisWorker(7, 1)
    with pytest.raises(ValueError, match="worker_num"):
        penstock.run_redis_workers_forever(models.double, 1, worker_num=0)
    with pytest.raises(LoadFailed, match="cannot be sent to a worker process"):
        penstock.RedisWorker(lambda batch: batch, 1)
    with pytest.raises(Exception, match="expected host:port"):
        penstock.RedisStreamer("http://host")
