import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.errors import LoadFailed
from penstock.perf.tune.profiler import ProfileRequest, RequestBody, profile_instance
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, encode_request

MODEL = """
import time


class Model:
    def load(self, device, precision=None):
        self.device, self.factor = device, 2 if precision is None else 3

    def predict(self, items):
        time.sleep(0.004 + 0.001 * len(items))
        return [{"twice": self.factor * item} for item in items]
"""


def order(tmp_path: Path, source: str, **keys: object) -> ProfileRequest:
    (tmp_path / "alone.py").write_text(textwrap.dedent(source))
    config = ModelConfig(target=f"{tmp_path}/alone.py:Model", load_timeout_s=20)
    bodies = [RequestBody(b"1", "application/json"), RequestBody(b"2", "application/json")]
    return ProfileRequest(**{"name": "m", "config": config, "device": "cpu", "sys_path": [], "bodies": bodies, **keys})  # type: ignore[arg-type]


def test_the_curve_has_the_time_of_each_size_and_samples_are_answered_as_over_http(tmp_path: Path) -> None:
    found = profile_instance(
        order(
            tmp_path,
            MODEL,
            sizes=[1, 8],
            samples=[RequestBody(b"21", "application/json"), RequestBody(b"{", "text/json")],
        )
    )
    assert sorted(found.curve) == [1, 8]
    assert 0.005 <= found.curve[1] < 0.5
    assert 0.012 <= found.curve[8] < 0.5
    assert (found.responses[0].body, found.responses[0].content_type) == (b'{"twice":42}', "application/json")
    assert found.memory_bytes > 2**20
    assert not found.error


def predict(body: str, before: str = "") -> str:
    """A model with this `predict`."""
    return f"{before}class Model:\n    def predict(self, items):\n        {body}\n"


COUPLED = """
    import numpy as np

    class Model:
        def warmup(self):
            return [np.ones(2), np.zeros(2)]

        def predict(self, items):
            x = np.array(items, float).reshape(len(items), -1)
            return list(x - x.mean(0))
"""
SLOW = predict("time.sleep(0.5 if len(items) > 1 else 0); return items", "import time\n")
FULL = predict("return items if len(items) <= 2 else bytes(2**60)")
STREAM = predict('yield [f"{item} a " for item in items]; yield [f"{item} b" for item in items]')
ONE = [RequestBody(b"1", "application/json")]


@pytest.mark.parametrize(
    ("source", "asked", "sizes", "found"),
    [
        (SLOW, {"sizes": [1, 16, 32], "limit_s": 0.2}, [1, 16], {}),  # larger ones are skipped
        (COUPLED, {"sizes": [1, 2, 4]}, [1], {"alone": "a row has other results beside another"}),
        (predict("return items[:1]"), {"sizes": [1, 2, 4]}, [1], {"alone": "2 rows give another number of rows"}),
        (FULL, {"sizes": [1, 2, 4, 8]}, [1, 2], {"oom_rows": 4}),
        (
            predict("import os; len(items) > 2 and os._exit(137); return items"),
            {"sizes": [1, 2, 4, 8], "samples": ONE}, [1, 2],
            {"fatal_rows": 4, "fatal": "a batch of 4 ends the process of the model", "bodies": [b"1"], "failure": ""},
        ),
        (
            predict('return [item["x"] for item in items]'), {"sizes": [1], "samples": ONE}, [],
            {"error": "the model raised TypeError", "errors": ["the model raised TypeError"]},
        ),
        (STREAM, {"sizes": [1], "samples": ONE}, [1], {"error": "", "bodies": [b"1 a 1 b"]}),
    ],
    ids=["slow", "coupled", "pairs", "full", "fatal", "failing", "stream"],
)  # fmt: skip
def test_a_profile_tells_what_one_instance_can_do(
    tmp_path: Path, source: str, asked: dict[str, Any], sizes: list[int], found: dict[str, Any]
) -> None:
    profile = profile_instance(order(tmp_path, source, **asked))
    assert sorted(profile.curve) == sizes
    known = msgspec.structs.asdict(profile)
    known |= {"failure": profile.failure}
    known |= {"bodies": [r.body for r in profile.responses], "errors": [r.error for r in profile.responses]}
    assert {name: known[name] for name in found} == found


def test_the_keys_of_the_configuration_reach_the_model(tmp_path: Path) -> None:
    asked = order(tmp_path, MODEL, samples=ONE)
    asked.config = ModelConfig(target=asked.config.target, precision="fp16", batching=BatchingConfig(max_batch_size=64))
    found = profile_instance(asked)
    assert found.responses[0].body == b'{"twice":3}'
    assert found.ignores == ["optimize"]


def test_an_open_inference_body_is_decoded_into_tensors(tmp_path: Path) -> None:
    source = """
    import penstock


    class Model:
        inputs = (penstock.TensorSpec("x", "FP32", (-1, 2)),)
        outputs = (penstock.TensorSpec("y", "FP32", (-1, 2)),)

        def predict(self, items):
            return [{"y": 2 * item["x"]} for item in items]
    """
    head, buffers = encode_request([("x", "FP32", (1, 2), np.array([[1, 2]], np.float32).tobytes())])
    headers = {HEADER_LENGTH: str(len(head))}
    body = RequestBody(b"".join([head, *buffers]), "application/octet-stream", "oip_binary", headers)
    given = profile_instance(order(tmp_path, source, samples=[body])).responses[0]
    assert not given.error
    assert b'"data":[2.0,4.0]' in given.body


def test_a_process_that_ends_before_it_reads_its_input_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **keys: Any) -> None:
            super().__init__(*arguments, **keys)
            self.wait()

    monkeypatch.setattr("penstock.perf.tune.profiler.subprocess.Popen", Ended)
    monkeypatch.setattr("penstock.perf.tune.profiler.sys.executable", "/bin/false")
    for size in (1, 2**20):
        with pytest.raises(LoadFailed, match="the process of 'm' ended"):
            profile_instance(order(tmp_path, MODEL, samples=[RequestBody(b"1" * size, "text/plain")]))


@pytest.mark.parametrize(
    ("source", "message", "detail"),
    [
        (
            "class Model:\n    def load(self, device):\n        raise OSError('no weights')\n    predict = print",
            "OSError: no weights",
            "Traceback",
        ),
        ("print('bye')\nimport os\nos._exit(3)", "the process of 'm' ended", "bye"),
        ("class Other: pass", "has no 'Model'", ""),
        ("import nothing_of_that_name", "ModuleNotFoundError", ""),
    ],
)
def test_an_app_that_does_not_load_has_a_reason(tmp_path: Path, source: str, message: str, detail: str) -> None:
    with pytest.raises(LoadFailed, match=message) as caught:
        profile_instance(order(tmp_path, source, sizes=[1]))
    assert detail in caught.value.detail


def test_ctrl_c_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 601\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr("penstock.perf.tune.profiler.sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("penstock.perf.tune.profiler.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_instance(order(tmp_path, MODEL))
    assert not [child for child in psutil.Process().children() if child.cmdline() == ["sleep", "601"]]


def test_a_process_that_the_model_leaves_behind_delays_nothing(tmp_path: Path) -> None:
    source = """
        import os, time

        class Model:
            def load(self, device):
                if not os.fork():
                    time.sleep(8)
                    os._exit(0)

            def predict(self, items):
                return items
    """
    started = time.monotonic()
    assert set(profile_instance(order(tmp_path, source, sizes=[1])).curve) == {1}
    assert time.monotonic() - started < 7


def test_a_model_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.perf.tune.profiler.BUDGET_S", 0.1)
    asked = order(tmp_path, "import time\n\ntime.sleep(600)", sizes=[1])
    asked.config = ModelConfig(
        target=asked.config.target, load_timeout_s=0.7, batching=BatchingConfig(run_timeout_s=0.1)
    )
    with pytest.raises(LoadFailed, match="took longer than 1 s"):
        profile_instance(asked)
    assert not [c for c in psutil.Process().children() if "penstock.perf.tune.profiler" in " ".join(c.cmdline())]


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    asked = order(tmp_path, "import time\n\nopen('pid', 'w').write(str(__import__('os').getpid()))\ntime.sleep(600)")
    (tmp_path / "order").write_bytes(msgspec.msgpack.encode(asked))
    program = (
        "import msgspec; from penstock.perf.tune.profiler import ProfileRequest, profile_instance;"
        "profile_instance(msgspec.msgpack.decode(open('order', 'rb').read(), type=ProfileRequest))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as parent:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert parent.poll() is None
            time.sleep(0.02)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        parent.kill()
    child.wait(30)
