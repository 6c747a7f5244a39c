"""Behavior that users of service_streamer rely on, and fixes of its known problems, under both module names."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import DeadlineExceeded, ModelNotReady, QueueFull
from penstock.errors import BadOutput, BadRequest, LoadFailed, WorkerDied
from support.shared_batchers import batchers

HERE = Path(__file__).parent
COMPAT = HERE.parents[1] / "compat" / "service_streamer"
SERVICE_STREAMER_NAMES = (
    "Future", "ManagedModel", "RedisStreamer", "RedisWorker", "Streamer", "ThreadedStreamer",
    "run_redis_workers_forever",
)  # fmt: skip
REQUIRED = inspect.Parameter.empty
THREADED = {"predict_function": REQUIRED, "batch_size": REQUIRED, "max_latency": 0.1, "worker_timeout": 20}
PROCESS = {
    "predict_function_or_model": REQUIRED, "batch_size": REQUIRED, "max_latency": 0.1, "worker_num": 1,
    "cuda_devices": None, "model_init_args": None, "model_init_kwargs": None, "wait_for_worker_ready": False,
    "mp_start_method": "spawn", "worker_timeout": 20,
}  # fmt: skip

Start = Callable[..., Any]
NUMBERS = itertools.count()
pytestmark = pytest.mark.usefixtures("paths")


@pytest.fixture(scope="module")
def made(paths: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Streamers by their arguments, shared by many tests."""
    streamers: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("shared") / "run"
    with pytest.MonkeyPatch.context() as patch, batchers(folder):
        patch.setenv("PENSTOCK_RUNTIME_DIR", str(folder))
        yield streamers
        for streamer in streamers.values():
            streamer.destroy_workers()


def shared_streamer(function: Any, *arguments: Any, **keys: Any) -> Any:
    """A streamer with a batcher of its own."""
    return penstock.Streamer(function, *arguments, shared=f"s{next(NUMBERS)}", linger_s=0.1, **keys)


def _starting(made: dict[str, Any], make: Start) -> Start:
    def start(function: Any, *arguments: Any, **keys: Any) -> Any:
        key = repr((make, function, arguments, keys))
        if key not in made:
            made[key] = make(function, *arguments, **keys)
        return made[key]

    return start


@pytest.fixture(params=["ThreadedStreamer", "Streamer", "shared"])
def start(made: dict[str, Any], request: pytest.FixtureRequest) -> Start:
    """Starts a streamer of one kind: `start(function, batch_size, ...)`."""
    return _starting(made, getattr(penstock, request.param, shared_streamer))


@pytest.fixture(params=["ThreadedStreamer", "Streamer", "shared", "redis"])
def start_any(made: dict[str, Any], request: pytest.FixtureRequest) -> Start:
    if request.param == "redis":
        over_redis: Start = request.getfixturevalue("start_over_redis")
        return over_redis
    return _starting(made, getattr(penstock, request.param, shared_streamer))


@pytest.fixture(params=["Streamer", "shared"])
def start_processes(made: dict[str, Any], request: pytest.FixtureRequest) -> Start:
    return _starting(made, getattr(penstock, request.param, shared_streamer))


@pytest.fixture(params=["ThreadedStreamer", "Streamer", "shared"])
def make(made: dict[str, Any], request: pytest.FixtureRequest) -> Start:
    """Makes a streamer for one test; both modules export the same class."""
    found: Start = getattr(penstock, request.param, shared_streamer)
    return found


# ---- behavior that users rely on


def test_the_modules_of_service_streamer_export_its_names_and_its_installation_brings_redis() -> None:
    inner = importlib.import_module("service_streamer.service_streamer")
    modules = {
        "": SERVICE_STREAMER_NAMES,
        ".managed_model": ["ManagedModel"],
        ".service_streamer": SERVICE_STREAMER_NAMES,
    }
    for module, names in modules.items():
        found = importlib.import_module(f"service_streamer{module}")
        assert sorted(found.__all__) == sorted(names)
        for name in names:
            assert getattr(found, name) is getattr(inner, name)
            if name.endswith("Streamer"):
                assert issubclass(getattr(found, name), getattr(penstock, name))
            else:
                assert getattr(found, name) is getattr(penstock, name)
        assert not hasattr(found, "Stream")
    project = tomllib.loads((COMPAT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["penstock[redis]"]


@pytest.mark.parametrize(("name", "parameters"), [("ThreadedStreamer", THREADED), ("Streamer", PROCESS)])
def test_signatures_and_defaults_equal_the_reference(name: str, parameters: dict[str, Any]) -> None:
    found = inspect.signature(getattr(penstock, name)).parameters.values()
    assert {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD} == parameters


def test_there_is_one_result_per_item_in_order(start_any: Start, models: ModuleType) -> None:
    streamer = start_any(models.double, 64)
    assert streamer.predict([1, 2, 3]) == [2, 4, 6]
    assert streamer.predict(range(10_001)) == [2 * i for i in range(10_001)]
    assert streamer.submit([1, 2]).result(timeout=20) == [2, 4]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda i: streamer.predict([i, -i]), range(200))) == [[2 * i, -2 * i] for i in range(200)]


def test_a_list_is_split_at_the_batch_size_and_calls_share_batches(start: Start, models: ModuleType) -> None:
    streamer = start(models.sizes, 4)
    assert max(streamer.predict(range(10))) == 4
    with ThreadPoolExecutor(8) as pool:
        assert max(size for [size] in pool.map(lambda i: streamer.predict([i]), range(40))) > 1


def test_a_function_may_return_an_array_or_be_async(start: Start, models: ModuleType) -> None:
    for function in (models.as_array, models.later):
        assert start(function, 8).predict([1, 2]) == [2, 4]


def test_a_function_with_declared_tensors_receives_arrays(start_any: Start, models: ModuleType) -> None:
    streamer = start_any(models.doubled_rows, 8)
    row, rows = np.array([1, 2], np.float32), np.ones((3, 2), np.float32)
    alone, together, listed = streamer.predict([row, {"x": rows}, [5, 6]])
    assert (alone.tolist(), together["y"].tolist(), listed.tolist()) == ([2, 4], [[2, 2]] * 3, [10, 12])
    fine, bad, wrong = streamer.predict([row, -row, [1, 2, 3]], return_exceptions=True)
    assert fine.tolist() == [2, 4]
    assert [type(error) for error in (bad, wrong)] == [ValueError, BadRequest]


@pytest.mark.parametrize("function", ["whole_sizes", "whole_sizes_of_rows"])
def test_the_options_of_the_model_are_honoured(start_any: Start, models: ModuleType, function: str) -> None:
    sizes = [int(np.max(size)) for size in start_any(getattr(models, function), 8).predict([[1, 2]] * 11)]
    assert set(sizes) <= {4, 8}, "sizes=[4, 8]"


def test_arrays_and_bytes_of_any_size_survive_the_round_trip(start_any: Start, models: ModuleType) -> None:
    big = np.arange(150_000, dtype=np.float32).reshape(300, 500)
    arrays = start_any(models.echo, 4).predict([big, b"x" * 200_000, {"a": big}, "text"])
    assert np.array_equal(arrays[0], big)
    assert arrays[0].dtype == big.dtype
    assert arrays[1] == b"x" * 200_000
    assert np.array_equal(arrays[2]["a"], big)
    assert arrays[3] == "text"


def test_tensors_survive_the_round_trip(start_any: Start, models: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    sent = [torch.arange(100_000.0).reshape(100, 1000), torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)]
    found = start_any(models.echo, 4).predict(sent)
    for mine, theirs in zip(sent, found, strict=True):
        assert theirs.dtype == mine.dtype
        assert torch.equal(mine, theirs)


def test_each_worker_has_its_own_device_before_it_imports_the_model(start_processes: Start, models: ModuleType) -> None:
    streamer = start_processes(models.Device, 1, worker_num=3, cuda_devices=(4, 7), wait_for_worker_ready=True)
    with ThreadPoolExecutor(8) as pool:
        found = {seen for [seen] in pool.map(lambda i: streamer.predict([i]), range(40))}
    assert found == {(4, "4", "4"), (7, "7", "7")}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None


def test_a_device_may_be_a_uuid(models: ModuleType) -> None:
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    with penstock.Streamer(models.Device, 1, cuda_devices=uuid) as streamer:
        assert streamer.predict([1]) == [(uuid, uuid, uuid)]


def test_a_model_receives_its_arguments(start_processes: Start, models: ModuleType) -> None:
    made = start_processes(models.Times, 8, model_init_args=[3], model_init_kwargs={"offset": 1})
    assert made.predict([1, 2]) == [4, 7]


def test_set_gpu_id_sets_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    penstock.ManagedModel.set_gpu_id(5)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    assert penstock.ManagedModel(6).gpu_id == 6
    assert penstock.ManagedModel().model is None


@pytest.mark.parametrize("name", ["ThreadedStreamer", "Streamer"])
def test_the_old_module_waits_as_long_as_its_own_constant_says_and_then_goes_on(
    models: ModuleType, paths: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = importlib.import_module("service_streamer.service_streamer")
    monkeypatch.setattr(module, "WORKER_TIMEOUT", 0.2)
    began = time.monotonic()
    with getattr(module, name)(models.SlowToLoad, 8) as streamer:
        assert streamer._wait_for_worker_ready() is None
        assert streamer._wait_for_worker_ready(0.1) is None
        assert time.monotonic() - began < 2
        with pytest.raises(TimeoutError, match=r"no answer within 0.2 s: the model is still being loaded"):
            streamer.predict([1])
        streamer._wait_for_worker_ready(20)
        assert streamer.predict([1]) == [1]
    with getattr(module, name)(models.double, 8, 0.1, worker_timeout=20) as streamer:
        assert streamer.predict([1]) == [2]


def test_worker_timeout_is_a_built_in_timeout_error(start: Start, models: ModuleType) -> None:
    streamer = start(models.slow, 1, worker_timeout=0.3)
    streamer._wait_for_worker_ready(20)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        streamer.predict(range(20))
    assert 0.2 < time.monotonic() - began < 2


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_other_start_methods_are_accepted_with_a_warning(models: ModuleType, method: str) -> None:
    with pytest.warns(RuntimeWarning, match="do not see changes that this process has made"):
        streamer = penstock.Streamer(models.double, 4, mp_start_method=method)
    streamer.destroy_workers()
    with pytest.raises(ValueError, match="mp_start_method"):
        penstock.Streamer(models.double, 4, mp_start_method="thread")


# ---- known problems of service_streamer


def test_pain_1_an_exception_or_a_dead_worker_fails_only_its_own_call(
    start_processes: Start, models: ModuleType
) -> None:
    streamer = start_processes(models.inverse, 8)
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        streamer.predict([1, 0])
    assert "return [1 / x for x in batch]" in str(caught.value.__cause__)
    found = streamer.predict([2, 0, 4], return_exceptions=True)
    assert [found[0], found[2]] == [0.5, 0.25]
    assert isinstance(found[1], ZeroDivisionError)
    assert streamer.predict([4]) == [0.25]
    mortal = start_processes(models.die_at_zero, 8)
    with pytest.raises(WorkerDied):
        mortal.predict([0])
    assert mortal.predict([1]) == [1]


def test_the_models_exception_can_be_caught_by_its_type(start: Start, models: ModuleType) -> None:
    streamer = start(models.refuse_zero, 8)
    with pytest.raises(models.Refused, match="3: zero") as caught:
        streamer.predict([1, 0])
    assert caught.value.code == 3
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in refuse_zero" in str(caught.value.__cause__.__cause__)
    assert isinstance(streamer.submit([0]).exception(20), models.Refused)
    with pytest.raises(models.Refused):
        asyncio.run(streamer.apredict([0]))
    assert isinstance(streamer.predict([0, 1], return_exceptions=True)[0], models.Refused)


def test_pain_2_a_lone_request_is_not_held_for_max_latency(start_any: Start, models: ModuleType) -> None:
    streamer = start_any(models.double, 64, 30)
    streamer._wait_for_worker_ready()
    assert streamer.predict([1]) == [2]
    with ThreadPoolExecutor(32) as pool:
        assert len(list(pool.map(lambda i: streamer.predict([i]), range(320)))) == 320
    assert streamer.predict([1]) == [2]  # each within worker_timeout, which is less than max_latency


def test_pain_3_an_error_of_init_model_is_raised_at_once_and_loading_is_retried(
    start_processes: Start, models: ModuleType, tmp_path: Path
) -> None:
    arguments = {"model_init_args": [str(tmp_path / "weights")]}
    with pytest.raises(LoadFailed, match="ValueError: the weights are missing") as caught:
        penstock.Streamer(models.Broken, 8, wait_for_worker_ready=True, **arguments)
    assert "in init_model" in str(caught.value.__cause__)
    streamer = start_processes(models.Broken, 8, **arguments)
    with pytest.raises(LoadFailed, match="the weights are missing") as caught:
        streamer.predict([1])
    assert "in init_model" in str(caught.value.__cause__)
    (tmp_path / "weights").touch()
    for _ in range(1000):
        try:
            assert streamer.predict([1]) == [1]
            break
        except LoadFailed:
            time.sleep(0.01)
    else:
        pytest.fail("it was not loaded again")


def test_pain_3_a_model_that_is_not_loaded_in_time_is_an_error(make: Start, models: ModuleType) -> None:
    with make(models.SlowToLoad, 8, worker_timeout=0.2) as streamer:
        for call in (streamer._wait_for_worker_ready, lambda: streamer.predict([1])):
            with pytest.raises(TimeoutError, match="the model is still being loaded"):
                call()


def test_pain_3_a_constructor_that_waits_too_long_warns_and_does_not_abort_the_load(models: ModuleType) -> None:
    with pytest.warns(RuntimeWarning, match=r"no answer within 0.2 s: the model is still being loaded; calls wait"):
        streamer = penstock.Streamer(models.SlowToLoad, 8, wait_for_worker_ready=True, worker_timeout=0.2)
    with streamer:
        assert streamer.submit([1]).result(20) == [1]


def test_pain_4_a_call_that_timed_out_leaves_nothing_behind(start: Start, models: ModuleType, tmp_path: Path) -> None:
    streamer = start(models.gated, 1, worker_timeout=0.3)
    streamer._wait_for_worker_ready(20)
    file = tmp_path / "ran"
    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(streamer.predict, [(str(file), "x")]) for _ in range(8)]:
            assert isinstance(call.exception(20), TimeoutError)
    streamer.statistics()  # answered behind the cancellations, wherever the batcher runs
    (tmp_path / "ran.open").touch()
    assert streamer.submit([(str(file), "last")]).result(20)
    assert file.read_text().count("x") <= 2, "more was run than the first call and one sent ahead"
    assert streamer.predict([]) == []
    backend = streamer._portal._loop_thread.backend
    engine = getattr(backend, "_engine", None)  # None: it is in the batcher
    assert engine is None or engine.reading().models[0].in_flight == 0
    assert engine is not None or backend.statistics("") == {"unanswered": 0, "unanswered_bytes": 0}


def test_pain_5_futures_are_futures(start_any: Start, models: ModuleType) -> None:
    streamer = start_any(models.double, 4)
    future = streamer.submit([1, 2])
    assert isinstance(future, penstock.Future)
    assert isinstance(future, concurrent.futures.Future)
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert future.result(20) == future.result() == [2, 4]
    assert future.done() is True
    assert future.exception() is None
    assert called.wait(5)
    assert not future.cancel()
    assert isinstance(streamer.submit([None]).exception(20), TypeError)
    assert streamer.submit([]).result(0) == []

    async def awaited() -> list[Any]:
        return [*await streamer.submit([3]), *await streamer.apredict([4, 5])]

    assert asyncio.run(awaited()) == [6, 8, 10]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_pain_7_a_forked_child_has_its_own_workers_or_shares_them(start: Start, models: ModuleType) -> None:
    streamer = start(models.pids, 4)
    shared = getattr(streamer, "_shared", False)
    [mine] = streamer.predict([1])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with contextlib.nullcontext() if shared else pytest.warns(RuntimeWarning, match="its own workers"):
                [theirs] = streamer.predict([1])
            code = 0 if (theirs == mine) == shared and theirs != os.getppid() else 2
            streamer.destroy_workers()
        finally:
            os._exit(code)
    os.close(write)
    assert os.read(read, 1) == b""  # its end
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert streamer.predict([1]) == [mine]


def test_pain_9_queues_are_bounded_and_calls_have_deadlines_and_priorities(start: Start, models: ModuleType) -> None:
    streamer = start(models.slow, 1, max_queue=4, slo_s=30)
    streamer._wait_for_worker_ready()
    futures = [streamer.submit([i]) for i in range(20)]
    refused = [f for f in futures if isinstance(f.exception(20), QueueFull)]
    assert 10 <= len(refused) <= 16
    assert streamer.predict(range(10)) == list(range(10)), "a call is not refused for its size"
    running = streamer.submit([0])
    late = streamer.submit([1], deadline=0.01)
    assert isinstance(late.exception(20), DeadlineExceeded)
    with pytest.raises(TimeoutError):
        streamer.predict([1, 2], deadline=0.05)
    assert running.result(20) == [0]
    assert streamer.predict([5], priority=2) == [5]
    with pytest.raises(ValueError, match="priority"):
        streamer.predict([5], priority=-1)
    assert streamer.statistics()["slots"] == 1


def test_pain_9_unused_libraries_are_not_loaded() -> None:
    code = "import sys, service_streamer as s; s.Streamer, s.ThreadedStreamer; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPAT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert not {"redis", "tqdm", "torch", "gevent", "uvicorn", "starlette"} & set(done.stdout.split())


def test_pain_10_the_calling_process_never_loads_a_managed_model(start_processes: Start, models: ModuleType) -> None:
    assert start_processes(models.Made, 4).predict([1]) == [1]
    assert models.Made.made == 0


# ---- mistakes


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("nothing", "returned a NoneType, expected a list"),
        ("too_few", "returned 0 results for 1 items"),
        ("by_mistake", r"returned a generator, expected a list of results: write return list"),
    ],
)
def test_an_invalid_result_is_named(start: Start, models: ModuleType, function: str, error: str) -> None:
    streamer = start(getattr(models, function), 8)
    for _ in range(2):
        with pytest.raises(BadOutput, match=error):
            streamer.predict([1, 2, 3])


def test_an_object_that_cannot_be_pickled_is_named(start_processes: Start, models: ModuleType) -> None:
    with pytest.raises(LoadFailed, match="the target, a function, cannot be sent"):
        penstock.Streamer(lambda batch: batch, 4)
    with pytest.raises(LoadFailed, match=r"model_init_kwargs, a dict, cannot be sent .*generator"):
        penstock.Streamer(models.Times, 4, model_init_kwargs={"factor": (x for x in ())})
    streamer = start_processes(models.a_lock, 4)
    found = streamer.predict([1, threading.Lock(), "lock", 2], return_exceptions=True)
    assert [found[0], found[3]] == [1, 2]
    assert isinstance(found[1], BadRequest)
    assert "the item is a lock that cannot be pickled" in str(found[1])
    assert isinstance(found[2], BadOutput)
    assert "the model returned a lock that cannot be pickled" in str(found[2])


@pytest.mark.parametrize(
    "keys",
    [
        {"batch_size": 0}, {"batch_size": -1}, {"batch_size": 2.0}, {"batch_size": True}, {"max_latency": -1},
        {"worker_timeout": 0}, {"max_queue": 0}, {"slo_s": 0}, {"timeout_s": -1},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(make: Start, models: ModuleType, keys: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(keys))}: expected"):
        make(models.double, **{"batch_size": 4, **keys})


def test_wrong_arguments_of_processes_are_refused_by_name(models: ModuleType) -> None:
    with pytest.raises(ValueError, match="worker_num: expected 1 or more, found 0"):
        penstock.Streamer(models.double, 4, worker_num=0)
    with pytest.raises(ValueError, match=r"cuda_devices: expected numbers .* found 'gpu'"):
        penstock.Streamer(models.double, 4, cuda_devices=["gpu"])
    with pytest.raises(TypeError, match="expected a function of a list"):
        penstock.Streamer("predict", 4)
    for make in (penstock.Streamer, penstock.ThreadedStreamer):
        with pytest.raises(TypeError, match="a class like ManagedModel, with init_model, found <class"):
            make(type("Other", (), {}), 4)  # as `penstock serve` takes classes


def test_one_item_instead_of_a_list_is_refused(start: Start, models: ModuleType) -> None:
    streamer = start(models.double, 4)
    for one in ("text", b"bytes", {"a": 1}):
        with pytest.raises(TypeError, match=r"expected a list of items.*write predict\(\[x\]\)"):
            streamer.predict(one)
    with pytest.raises(TypeError):
        streamer.submit(5)


def test_a_cancelled_future_does_not_run_or_is_not_answered(start: Start, models: ModuleType, tmp_path: Path) -> None:
    streamer = start(models.noted, 1)
    streamer._wait_for_worker_ready()
    file = str(tmp_path / "ran")
    running = streamer.submit([(file, "a")])
    waiting = [streamer.submit([(file, "b")]) for _ in range(4)]
    assert waiting[-1].cancel()
    while not os.path.exists(file):
        time.sleep(0.001)
    assert running.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        running.result(20)
    done, _ = concurrent.futures.wait([running, *waiting], timeout=20)
    assert len(done) == 5
    assert not waiting[0].cancel(), "it is answered"
    assert Path(file).read_text() == "abbb"


def test_a_cancelled_coroutine_leaves_the_queue(start: Start, models: ModuleType, tmp_path: Path) -> None:
    streamer = start(models.noted, 1)
    streamer._wait_for_worker_ready()
    file = str(tmp_path / "ran")

    async def scenario() -> None:
        calls = [asyncio.ensure_future(streamer.apredict([(file, letter)])) for letter in "abcd"]
        await asyncio.sleep(0.05)
        calls[3].cancel()
        await asyncio.gather(*calls[:3])
        with pytest.raises(TimeoutError):
            await streamer.apredict([(file, "x")], deadline=0.05)
        found = await streamer.apredict([(file, "e"), 5], return_exceptions=True)
        assert isinstance(found[1], TypeError)

    asyncio.run(scenario())
    assert "d" not in Path(file).read_text()


def test_a_destroyed_streamer_refuses_calls(make: Start, models: ModuleType) -> None:
    with make(models.double, 4) as streamer:
        future = streamer.submit([1])
    assert future.result(0) == [2], "what was accepted is answered"
    streamer.destroy_workers()
    for call in (streamer.predict, streamer.submit):
        with pytest.raises(ModelNotReady, match="the streamer is closed"):
            call([1])


def test_a_streamer_may_be_destroyed_while_it_loads(make: Start, models: ModuleType) -> None:
    began = time.monotonic()
    make(models.double, 4).destroy_workers()
    assert time.monotonic() - began < 5


def test_a_worker_that_hangs_is_replaced(make: Start, models: ModuleType) -> None:
    streamer = make(models.hang_at_zero, 1, worker_timeout=0.2)
    streamer._wait_for_worker_ready(20)
    hanging = streamer.submit([0])
    with pytest.raises(TimeoutError):
        streamer.predict([1])
    assert isinstance(hanging.exception(20), WorkerDied)
    assert streamer.submit([1]).result(20) == [1]
    streamer.destroy_workers()


# ---- callers and models that behave badly


def test_an_item_that_ends_the_interpreter_of_its_model_fails_alone(start: Start, models: ModuleType) -> None:
    streamer = start(models.exit_at_zero, 8)
    streamer._wait_for_worker_ready(20)
    found = streamer.predict([1, 0, 2], return_exceptions=True)
    assert [type(value) for value in found] == [int, WorkerDied, int]
    with pytest.raises(WorkerDied):
        streamer.predict([0])
    assert streamer.predict([3]) == [3]


def test_results_that_cannot_be_compared_are_results(start: Start, models: ModuleType) -> None:
    streamer = start(models.moody, 4)
    asked = ["array", "object", "array"]

    async def awaited() -> list[Any]:
        return [await streamer.apredict(asked), await streamer.submit(asked)]

    waited = streamer.submit(asked)
    concurrent.futures.wait([waited], timeout=20)
    many = streamer.predict(asked * 9)
    found = [streamer.predict(asked), streamer.predict(asked, return_exceptions=True), waited.result(0), many[-3:]]
    for values in [*found, *asyncio.run(awaited())]:
        assert [type(value) for value in values] == [np.ndarray, models.Moody, np.ndarray]


def test_an_interrupted_caller_leaves_the_queue_and_others_go_on(
    start: Start, models: ModuleType, tmp_path: Path
) -> None:
    streamer = start(models.gated, 1)
    streamer._wait_for_worker_ready(20)
    file = tmp_path / "ran"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        futures = [streamer.submit([(str(file), "a")]) for _ in range(3)]
        for letter in "xyz":
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(KeyboardInterrupt):
                streamer.predict([(str(file), letter)])
        streamer.statistics()  # answered behind the cancellations, wherever the batcher runs
        (tmp_path / "ran.open").touch()
        assert streamer.predict([(str(file), "b")]) == [(str(file), "b")]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [future.result(20) for future in futures] == [[(str(file), "a")]] * 3
    assert file.read_text() == "aaab"


@pytest.mark.slow
def test_ten_thousand_threads_that_wait_each_get_their_own_answer() -> None:
    gate, ran = threading.Event(), 0

    def gated(batch: list[int]) -> list[int]:
        nonlocal ran
        gate.wait(60)
        ran += len(batch)
        return batch

    found: list[Any] = [None] * 10_000

    def call(number: int) -> None:
        found[number] = streamer.predict([number])

    with penstock.ThreadedStreamer(gated, 256, worker_timeout=120) as streamer:
        before = threading.stack_size(256 * 1024)
        try:
            threads = [threading.Thread(target=call, args=(number,)) for number in range(len(found))]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        assert found.count(None) == len(found)
        gate.set()
        for thread in threads:
            thread.join(60)
    assert found == [[number] for number in range(len(found))]
    assert ran == len(found)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*its own workers:RuntimeWarning")
def test_a_fork_while_a_batch_runs_disturbs_neither_process(start: Start, models: ModuleType, tmp_path: Path) -> None:
    streamer = start(models.gated, 4)
    streamer._wait_for_worker_ready(20)
    mine, theirs = str(tmp_path / "parent"), str(tmp_path / "child")
    Path(f"{theirs}.open").touch()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(streamer.predict, [(mine, "a")]) for _ in range(8)]
        future = streamer.submit([(mine, "a")])
        for _ in range(3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    forked = not getattr(streamer, "_shared", False)  # a shared batcher is busy with the parent's
                    code = 0 if not forked or streamer.predict([(theirs, "b")]) == [(theirs, "b")] else 2
                    streamer.destroy_workers()
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not any(call.done() for call in calls)
        Path(f"{mine}.open").touch()
        assert [call.result(20) for call in [*calls, future]] == [[(mine, "a")]] * 9
    assert Path(mine).read_text() == "a" * 9


def test_a_blocking_call_in_a_callback_is_refused(start: Start, models: ModuleType) -> None:
    streamer = start(models.slow, 4)
    streamer._wait_for_worker_ready(20)
    refused: list[BaseException] = []
    told = threading.Event()

    def again(_: object) -> None:
        for call in (lambda: streamer.predict([1]), lambda: streamer.submit([1]).result(), streamer.statistics):
            try:
                call()
            except RuntimeError as e:
                refused.append(e)
        told.set()
        raise OSError("a callback")

    future = streamer.submit([1])
    future.add_done_callback(again)
    assert told.wait(20)
    assert len(refused) == 3
    assert all("the thread that delivers the answers" in str(error) for error in refused)
    assert streamer.predict([2]) == [2]


@pytest.mark.parametrize("how", ["predict", "future", "coroutine"])
def test_a_model_that_calls_its_own_streamer_is_refused(how: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "predict": lambda: streamer.predict([1]),
        "future": lambda: streamer.submit([1]).result(),
        "coroutine": lambda: asyncio.run(streamer.apredict([1])),
    }

    def nested(batch: list[Any]) -> list[Any]:
        return [calls[how]() if item == "nested" else item for item in batch]

    with penstock.ThreadedStreamer(nested, 4) as streamer:
        with pytest.raises(RuntimeError, match="model 'nested' called itself"):
            streamer.predict(["nested"])
        assert streamer.predict([1, 2]) == [1, 2]
