"""Models of every kind in worker processes, through the faces that users have: Engine, Portal and `penstock serve`."""

import json
import os
import subprocess
import sys
import textwrap
from asyncio import gather, get_running_loop, sleep, timeout
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine import upkeep
from penstock.core.engine.engine import Engine
from penstock.core.portal.portal import Portal
from penstock.errors import BadOutput, BadRequest, ItemFailed, LoadFailed, PenstockError, TargetNotFound, WorkerDied
from penstock.types import Item, ItemResult, MetricDelta

LARGE = 300_000


class Ears:
    """An Observer that keeps the models' own metrics."""

    def __init__(self) -> None:
        self.metrics: list[MetricDelta] = []

    def on_model_metrics(self, model: str, version: str, slot: int, changes: list[MetricDelta]) -> None:
        self.metrics += changes

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModelConfig]]:
    """`app(source, "f")` writes app.py and gives the configuration of `app.py:f` in one worker process."""

    def write(source: str, name: str, env: dict[str, str] | None = None, **batching: Any) -> ModelConfig:
        (tmp_path / "app.py").write_text(textwrap.dedent(source))
        target = f"{tmp_path / 'app.py'}:{name}"
        return ModelConfig(target=target, env=env or {}, batching=BatchingConfig(**batching))

    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write
    sys.modules.pop("app", None)


@asynccontextmanager
async def running(config: ModelConfig, ears: Ears | None = None) -> AsyncIterator[Engine]:
    async with Engine(observers=[ears] if ears else []) as engine:
        await engine.load("m", config)
        yield engine


@pytest.fixture
def portal() -> Iterator[Portal]:
    with Portal() as portal:
        yield portal


# ---- memory and warm-up


async def test_the_ceiling_that_memory_taught_is_remembered_and_shown(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        class cuOutOfMemoryError(RuntimeError): ...

        sizes = []

        def predict(items):
            if items[0] == "sizes":
                return [sizes]
            sizes.append(len(items))
            if len(items) > 4:
                raise cuOutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return items
        """,
        "predict",
        max_batch_size=16,
        max_hold_s=0,
    )
    async with running(config) as engine:
        assert await engine.infer_many("m", list(range(16))) == list(range(16))
        told = engine.statistics("m")
        assert 4 <= told["ceiling"] < 8, told
        first = await engine.infer("m", "sizes")
        assert max(first) == 16
        assert await engine.infer_many("m", list(range(16))) == list(range(16))
        later = (await engine.infer("m", "sizes"))[len(first) :]
        assert max(later) <= told["ceiling"]


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 2.00 GiB", "CUDA error: out of memory"])
async def test_a_plain_error_that_says_out_of_memory_counts_as_one(
    app: Callable[..., ModelConfig], message: str
) -> None:
    config = app(
        f"""
        def predict(items):
            if len(items) > 2:
                raise RuntimeError({message!r})
            return items
        """,
        "predict",
        max_batch_size=8,
        retry_split=False,
        max_hold_s=0,
    )
    async with running(config) as engine:
        assert await engine.infer_many("m", list(range(8))) == list(range(8))
        assert engine.statistics("m")["ceiling"] < 4


async def test_the_warm_up_chooses_the_batch_size(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        import time
        import numpy as np

        class Model:
            def warmup(self):
                return np.zeros((2, 3))

            def predict(self, items):
                time.sleep(0.01 * max(1, len(items) / 8) ** 1.5)  # slower per item beyond 8
                return items
        """,
        "Model",
    )
    async with running(config) as engine:
        (status,) = engine.statuses()
        assert status.max_batch_size in (8, 16)
        assert (await engine.infer("m", 1)) == 1


# ---- what crosses


def test_large_arrays_cross_both_ways_from_many_threads(app: Callable[..., ModelConfig], portal: Portal) -> None:
    from concurrent.futures import ThreadPoolExecutor

    portal.load("m", app("def double(items):\n    return [x * 2 for x in items]", "double"))

    def ask(seed: int) -> bool:
        arrays = [np.full((2, LARGE // 8), seed + i, np.float64) for i in range(2)]
        arrays.append(np.asfortranarray(np.random.default_rng(seed).random((300, 200))))
        found = portal.predict("m", arrays)
        for got in found:
            got += 0  # an answer is the caller's own: it can be written
        return all((got == 2 * sent).all() for got, sent in zip(found, arrays, strict=True))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(64)))


async def test_a_model_may_write_into_large_items_as_into_small_ones(app: Callable[..., ModelConfig]) -> None:
    config = app("def scale(items):\n    for x in items:\n        x *= 2\n    return items", "scale")
    async with running(config) as engine:
        for size in (10, LARGE):
            own = np.ones(size)
            assert ((await engine.infer("m", own)) == 2).all()
            assert (own == 1).all()  # the caller's own stays as it is


async def test_arrays_that_a_model_keeps_over_batches_stay_as_they_were(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        kept = []

        def predict(items):
            results = []
            for item in items:
                if isinstance(item, str):
                    results.append([float(k.min()) == float(k.max()) == n for n, k in kept])
                    kept.clear()
                else:
                    kept.append((item["n"], item["x"][10:]))
                    results.append(item["x"])
            return results
        """,
        "predict",
    )
    async with running(config) as engine:
        for round_ in range(3):
            for n in range(20):
                found = await engine.infer("m", {"n": n, "x": np.full(LARGE, n, np.uint8)})
                assert (found == n).all(), round_
            assert await engine.infer("m", "check") == [True] * 20
            await engine.infer("m", "check")
            assert engine.pool.in_use_bytes == 0


async def test_what_cannot_be_pickled_fails_alone_among_many(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        def predict(items):
            return [(lambda: 0) if type(item) is str else item for item in items]
        """,
        "predict",
    )
    async with running(config) as engine:
        fine, bad, also = await engine.infer_many("m", [1, "bad", np.zeros(LARGE)])
        assert (fine, also.nbytes) == (1, 8 * LARGE)
        assert type(bad) is BadOutput
        assert "function that cannot be pickled" in bad.message
        fine, bad, also = await engine.infer_many("m", [np.zeros(LARGE), lambda: 0, 3])
        assert (fine.nbytes, also) == (8 * LARGE, 3)
        assert type(bad) is BadRequest
        assert "function that cannot be pickled" in bad.message
        with pytest.raises(BadRequest, match="function that cannot be pickled"):
            await engine.infer("m", lambda: 0)
        with pytest.raises(BadOutput, match="function that cannot be pickled"):
            await engine.infer("m", "bad")
        assert engine.pool.in_use_bytes == 0


async def test_numbers_of_numpy_are_numbers_of_metrics(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        import os
        import numpy as np
        from penstock import metrics

        def predict(items):
            metrics.counter("seen", np.int64(len(items)), kind=b"\\xff".decode(errors="surrogateescape"))
            metrics.gauge("mean", np.mean(items))
            return [os.getpid()] * len(items)
        """,
        "predict",
    )
    ears = Ears()
    async with running(config, ears) as engine:
        assert await engine.infer("m", 1.5) == await engine.infer("m", 1.5)  # one worker, which lives on
    assert {(m.name, m.value) for m in ears.metrics} == {("seen", 1.0), ("mean", 1.5)}


@pytest.mark.parametrize("raised", ["ValueError('\\ud800')", "BadRequest('\\ud800')", "Unspeakable()", "BadRequest(7)"])
async def test_an_error_with_any_text_costs_no_worker(app: Callable[..., ModelConfig], raised: str) -> None:
    config = app(
        f"""
        import os
        from penstock.errors import BadRequest

        class Unspeakable(Exception):
            def __str__(self):
                raise RuntimeError

        def predict(items):
            if items[0] == "pid":
                return [os.getpid()]
            raise {raised}
        """,
        "predict",
    )
    async with running(config) as engine:
        pid = await engine.infer("m", "pid")
        with pytest.raises(BadRequest if "Bad" in raised else ItemFailed):
            await engine.infer("m", 1)
        assert await engine.infer("m", "pid") == pid


FINE = ["Response('x', status=np.int64(200))", "[np.bytes_(b'x')]", "[{'a': Text('x'), 'b': Count(1)}]", "[Text('x')]"]
REFUSED = [
    "Frame()",
    "Odd()",
    "Response('x', headers={'a': 1})",
    "Response('x', headers={1: 'a'})",
    "Response('x', content_type=3)",
    "Response('\\ud800')",
]


@pytest.fixture(scope="module")
def answering(serve_all: Callable[..., Any]) -> Any:
    """A server whose model answers what it is told to."""
    return serve_all(
        """
        import os
        import numpy as np
        from penstock import Response

        class Frame:  # as pandas: iterating gives the columns
            columns, ndim, shape = ["a", "b"], 2, (1, 2)
            def __array__(self): return np.zeros((1, 2))
            def __len__(self): return 1
            def __iter__(self): return iter(self.columns)

        class Odd(list):
            def __iter__(self): raise RuntimeError

        class Text(str): ...
        class Count(int): ...

        def predict(items):
            if items[0] == "pid":
                return [os.getpid()]
            found = eval(items[0])
            return [found] if isinstance(found, Response) else found
        """,
        "predict",
    )


@pytest.mark.parametrize("answer", [*FINE, *REFUSED])
def test_an_answer_of_any_kind_costs_no_worker(answering: Any, answer: str) -> None:
    _, pid = answering.post("/predictions/predict", b'"pid"')
    status, body = answering.post("/predictions/predict", json.dumps(answer).encode())
    assert status == (200 if answer in FINE else 500), body
    assert b"worker" not in body
    assert answering.post("/predictions/predict", b'"pid"') == (200, pid)


async def test_an_answer_that_no_message_can_hold_fails_alone(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        import os
        from penstock.types import ItemResult

        class Codec:
            def __init__(self, model, version): ...
            def decode(self, item):
                return item.payload, None
            def encode(self, value, item, context):
                return ItemResult(bytes(value), headers=object() if value == b"bad" else None)

        def predict(items):
            return [b"%d" % os.getpid() if item == b"pid" else item for item in items]
        """,
        "predict",
    )
    async with running(config) as engine:

        async def ask(body: bytes) -> ItemResult:
            future = get_running_loop().create_future()
            engine.submit("m", None, Item(body, config.target.replace("predict", "Codec")), future.set_result)
            return await future

        before, fine, bad = await gather(ask(b"pid"), ask(b"fine"), ask(b"bad"))
        assert fine.body == b"fine"
        assert type(bad.error) is BadOutput
        assert (await ask(b"pid")).body == before.body


async def test_a_panic_of_native_code_is_an_error_of_its_item(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        class PanicException(BaseException): ...  # as what Rust extensions raise

        def predict(items):
            if "bad" in items:
                raise PanicException
            return items
        """,
        "predict",
    )
    async with running(config) as engine:
        one, bad, two = await engine.infer_many("m", [1, "bad", 2])
        assert (one, two, bad.message) == (1, 2, "the model raised PanicException")


def test_an_async_generator_streams_events(serve: Callable[..., Any]) -> None:
    server = serve(
        """
        import asyncio

        async def tokens(items):
            for n in range(3):
                await asyncio.sleep(0.001)
                yield [f"{item}-{n}" for item in items]
        """,
        "tokens",
    )
    status, body = server.post("/predictions/tokens", b'"a"', accept="text/event-stream")
    assert status == 200
    assert [line for line in body.splitlines() if line.startswith(b"data")] == [
        b"data: a-0",
        b"data: a-1",
        b"data: a-2",
    ]


async def test_a_prompt_that_raises_at_its_second_step_leaves_the_other_streams_of_its_batch_alone(
    app: Callable[..., ModelConfig],
) -> None:
    config = app(
        """
        def tokens(items):
            for step in range(3):
                if step == 1 and "bad" in items:
                    raise ValueError("no such token")
                yield [f"{item}-{step}" for item in items]
        """,
        "tokens",
        policy="fixed",
        max_batch_size=3,
        max_hold_s=5.0,
    )
    async with running(config) as engine:

        async def read(prompt: str, parts: list[str]) -> None:
            async for part in engine.stream("m", prompt):
                parts.append(part)

        prompts: dict[str, list[str]] = {"a": [], "bad": [], "c": []}
        ends = await gather(*(read(prompt, parts) for prompt, parts in prompts.items()), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), ItemFailed, type(None)]
    assert prompts == {"a": ["a-0", "a-1", "a-2"], "bad": ["bad-0"], "c": ["c-0", "c-1", "c-2"]}


def test_a_large_body_is_a_view_of_shared_memory_and_a_small_one_bytes(serve: Callable[..., Any]) -> None:
    server = serve(
        "def kind(items):\n    return [[type(x).__name__, getattr(x, 'readonly', None)] for x in items]", "kind"
    )
    small, large = (server.post("/predictions/kind", bytes(n), "image/x")[1] for n in (10, LARGE))
    assert (small, large) == (b'["bytes",null]', b'["memoryview",true]')


# ---- deaths


async def test_an_item_that_kills_its_worker_fails_alone_after_three_deaths(
    app: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    config = app(
        f"""
        import os

        def predict(items):
            if "kill" in items:
                with open({str(tmp_path / "deaths")!r}, "a") as file:
                    file.write(f"{{len(items)}} ")
                os._exit(1)
            return items
        """,
        "predict",
        max_batch_size=8,
        max_hold_s=0,
    )
    async with running(structs.replace(config, instances=2)) as engine:
        items = [0, 1, 2, "kill", 4, 5, 6, 7]
        answers = await gather(*(engine.infer("m", x) for x in items), return_exceptions=True)
        assert type(answers.pop(3)) is WorkerDied
        assert answers == [0, 1, 2, 4, 5, 6, 7]
        answers = await engine.infer_many("m", items)  # the same as items of one request
        assert type(answers.pop(3)) is WorkerDied
        assert answers == [0, 1, 2, 4, 5, 6, 7]
    assert (tmp_path / "deaths").read_text().split() == ["8", "2", "1"] * 2


async def test_without_leave_to_run_again_a_death_fails_its_batch(app: Callable[..., ModelConfig]) -> None:
    config = app("import os\n\ndef predict(items):\n    os._exit(1)", "predict", idempotent=False)
    async with running(config) as engine:
        answers = await gather(*(engine.infer("m", x) for x in range(4)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {WorkerDied}


async def test_readiness_is_false_from_a_death_until_the_next_worker_is_up(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        import os, time

        class Model:
            def load(self, device):
                time.sleep(0.2)

            def predict(self, items):
                os._exit(1)
        """,
        "Model",
        idempotent=False,
    )
    async with running(config) as engine:
        assert engine.ready()
        with pytest.raises(WorkerDied):
            await engine.infer("m", 1)
        await sleep(0)
        assert not engine.ready()
        assert not engine.model_ready("m", None)
        (status,) = engine.statuses()
        assert (status.state, status.ready_instances) == ("FAILED", 0)
        async with timeout(20):
            while not engine.ready():  # noqa: ASYNC110
                await sleep(0.01)
        assert engine.statuses()[0].ready_instances == 1


# ---- what a model may do to its process


async def test_printing_does_not_disturb_the_conversation(app: Callable[..., ModelConfig], capfd: Any) -> None:
    config = app(
        """
        import os, sys
        print("imported")

        def predict(items):
            print("x" * 100_000)
            os.write(1, b"raw\\n")
            sys.stdout.close()
            return items
        """,
        "predict",
    )
    async with running(config) as engine:
        assert await engine.infer_many("m", [1, 2]) == [1, 2]
    out = capfd.readouterr().out
    assert "imported" in out
    assert "raw" in out


async def test_a_model_may_start_threads_and_processes(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        import multiprocessing, subprocess, sys, threading, time, warnings

        import dataclasses

        @dataclasses.dataclass
        class Square:
            x: int

        def square(x):
            return Square(x * x)

        def sleep(ready):
            ready.set()
            time.sleep(30)

        def predict(items):
            found = []
            thread = threading.Thread(target=lambda: found.append("thread"))
            thread.start()
            thread.join()
            found.append(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True).stdout.decode())
            warnings.simplefilter("ignore")
            fork = multiprocessing.get_context("fork")
            ready = fork.Event()
            process = fork.Process(target=sleep, args=(ready,))
            process.start()
            ready.wait()
            process.terminate()
            process.join(10)
            found.append(process.exitcode)
            with fork.Pool(2) as pool:
                found.append([square.x for square in pool.map(square, [2, 3])])
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append([square.x for square in pool.map(square, [-2])])
            return [found] * len(items)
        """,
        "predict",
        run_timeout_s=20,
    )
    async with running(config) as engine:
        assert await engine.infer("m", 1) == ["thread", "child\n", -15, [4, 9], [4]]


def test_a_program_gets_objects_whose_classes_are_of_the_models_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: int\n\n"
        "def double(points):\n    return [Point(2 * p.x) for p in points]\n"
    )
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
            from model import Point
            from penstock.config.schema import ModelConfig
            from penstock.core.portal.portal import Portal

            with Portal() as portal:
                portal.load("m", ModelConfig(target="model.py:double"))
                print(portal.predict("m", [Point(1)]) == [Point(2)])
        """)
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.stdout == "True\n", done.stderr


def test_the_model_of_a_script_may_spawn(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing
            from penstock.config.schema import ModelConfig
            from penstock.core.portal.portal import Portal

            def predict(items):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    return pool.map(abs, items)

            if __name__ == "__main__":
                with Portal() as portal:
                    portal.load("m", ModelConfig(target=""), target=predict)
                    print(portal.predict("m", [-1, 2]))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[1, 2]\n", done.stderr


async def test_a_model_may_change_directory_and_environment(app: Callable[..., ModelConfig]) -> None:
    config = app(
        """
        import os

        def predict(items):
            if items[0] == "die":
                os._exit(1)
            before = os.environ.get("PENSTOCK_TEST_MARK"), os.getcwd()
            os.chdir("/")
            os.environ.clear()
            os.environ["PENSTOCK_TEST_MARK"] = "mine"
            return [before] * len(items)
        """,
        "predict",
        env={"PENSTOCK_TEST_MARK": "given"},
    )
    here = os.getcwd()
    async with running(config) as engine:
        assert await engine.infer("m", 1) == ("given", here)
        assert await engine.infer("m", 1) == ("mine", "/")
        with pytest.raises(PenstockError):
            await engine.infer("m", "die")
        assert await engine.infer("m", 1) == ("given", here)  # the next worker starts afresh
    assert os.getcwd() == here
    assert "PENSTOCK_TEST_MARK" not in os.environ


async def test_threads_are_set_before_user_code_and_the_users_own_word_stands(
    app: Callable[..., ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "9")
    (tmp_path / "torch.py").write_text(  # stands in for torch, which looks at the environment when it is imported
        "import os\nthreads = int(os.environ['OMP_NUM_THREADS'])\n"
        "def set_num_threads(n):\n    global threads\n    threads = n\n"
    )
    config = app(
        """
        import os
        import torch

        seen = [os.environ.get(n) for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")] + [torch.threads]
        torch.set_num_threads(7)

        def predict(items):
            return [(seen, torch.threads)] * len(items)
        """,
        "predict",
        env={},
    )
    async with running(config) as engine:
        (omp, mkl, policy, at_import), now = await engine.infer("m", 1)
    assert omp is not None
    assert omp.isdecimal()
    assert (mkl, policy, at_import, now) == ("9", "PASSIVE", int(omp), 7)


# ---- targets that do not load


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys\nsys.exit(3)", ["called sys.exit(3)"]),
        ("\nimport no_such_module_at_all", ["No module named 'no_such_module_at_all'", "app.py, line 2"]),
        ("x = 1\n\ndef f(:\n", ["SyntaxError", "app.py, line 3"]),
        ("def f():\n    1/0\n\nf()", ["ZeroDivisionError: division by zero", "app.py, line 2"]),
        ("from .sibling import x", ["relative import", "app.py, line 1"]),
        (
            "class predict:\n    def load(self, device):\n        1/0\n    predict = list\n",
            ["ZeroDivisionError", "app.py, line 3"],
        ),
        (
            "class predict:\n    async def load(self, device): ...\n    def predict(self, items): ...\n",
            ["'load' of the model is async"],
        ),
    ],
    ids=["exit", "import", "syntax", "raises", "relative", "load", "async load"],
)
async def test_a_target_that_does_not_load_says_where_in_one_line(
    app: Callable[..., ModelConfig], source: str, words: list[str]
) -> None:
    with pytest.raises(LoadFailed) as caught:
        async with running(app(source, "predict")):
            pass
    message = caught.value.message
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert "\n" not in message


async def test_threads_that_load_the_same_file_wait_for_each_other(
    app: Callable[..., ModelConfig], caplog: pytest.LogCaptureFixture
) -> None:
    config = app("import time\ntime.sleep(0.2)\n\ndef predict(items):\n    return items", "predict")
    async with running(structs.replace(config, transport="thread", instances=3)) as engine:
        assert await engine.infer("m", 1) == 1
        assert "slot_down" not in caplog.text


def test_neighbours_of_the_file_can_be_imported(
    app: Callable[..., ModelConfig], portal: Portal, tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("def answer():\n    return 42\n")
    source = """
        def predict(items):
            from neighbour import answer  # late, as many do
            return [answer() for _ in items]
        """
    portal.load("m", app(source, "predict"))
    assert portal.predict("m", [1, 2]) == [42, 42]


def test_a_module_of_the_working_directory_is_served(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "near.py").write_text("ANSWER = 42\n")
    (tmp_path / "pack" / "mod.py").write_text(
        "from .near import ANSWER\n\ndef obj(items):\n    return [ANSWER] * len(items)\n"
    )
    server = serve(None, "pack.mod:obj", cwd=tmp_path)
    assert server.post("/predictions/obj", b"1") == (200, b"42")


async def test_a_missing_module_names_its_neighbours(app: Callable[..., ModelConfig]) -> None:
    with pytest.raises(TargetNotFound, match="did you mean 'predict'"):
        async with running(app("def predict(items):\n    return items", "predit")):
            pass


async def test_worker_processes_are_replaced_under_load_without_losing_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "CHECK_S", 0.05)
    (tmp_path / "leaks.py").write_text(
        textwrap.dedent(
            """
            import os

            kept = []


            class Leaks:
                def predict(self, items):
                    kept.append(bytearray(b"x" * 2**20))
                    return [os.getpid()] * len(items)
            """
        )
    )
    async with Engine() as engine:
        for instances, key, most in ((2, "max_requests", 50), (1, "max_memory_bytes", 100 * 2**20)):
            config = ModelConfig(target=f"{tmp_path}/leaks.py:Leaks", instances=instances, **{key: most})
            await engine.load("m", config)
            before = set(engine.reading().models[0].pids.values())
            pids: set[int] = set()
            async with timeout(30):
                while len(pids - before) < instances:
                    pids.update(await gather(*(engine.infer("m", 1) for _ in range(4))))
                    await sleep(0.005)
            await engine.unload("m")
            assert not [pid for pid in before | pids if psutil.pid_exists(pid)]
