"""SageMaker's scripts: which functions run with what, and what stands in for those that a script leaves out."""

import io
import json
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import LoadFailed, OutOfMemory
from penstock.platforms.sagemaker import HANDLER
from penstock.torchserve.protocol.codec import HandlerRequest, HandlerResponse

Make = Callable[..., Any]
ECHO = """
def model_fn(model_dir):
    return "model"

def transform_fn(model, body, content_type, accept):
    return repr((model, body, content_type, accept)), "text/plain"
"""


@pytest.fixture
def make(tmp_path: Path, make_handler: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The loaded model of a script; None: a folder without one."""

    def make(script: str | None, **env: str) -> Any:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        sys.modules.pop("inference", None)
        if script is not None:
            (tmp_path / "model" / "code").mkdir(parents=True)
            (tmp_path / "model" / "code" / "inference.py").write_text(textwrap.dedent(script))
        return make_handler("", handler=HANDLER)

    return make


@pytest.fixture
def doubler(tmp_path: Path) -> Path:
    """A folder with TorchScript in model.pt, which doubles its input."""
    import torch

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * torch.nn.functional.dropout(x, 0.9, self.training)

    (tmp_path / "model").mkdir(exist_ok=True)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.script(Double()).save(str(tmp_path / "model" / "model.pt"))
    return tmp_path / "model"


def ask(model: Any, *bodies: bytes, content_type: str = "application/json", **headers: str) -> list[HandlerResponse]:
    sent = {"Content-Type": content_type, **headers}
    found: list[HandlerResponse] = model.predict(
        [HandlerRequest("id", {"body": bytearray(b)}, dict(sent)) for b in bodies]
    )
    return found


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def message(answer: HandlerResponse) -> tuple[int, str]:
    return answer.status, json.loads(bytes(answer.body))["message"]


# ---- scripts


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("application/json", "'hi'"), ("text/csv; charset=utf-8", "'hi'"), ("application/octet-stream", "b'hi'")],
)
def test_a_script_receives_text_for_json_and_csv_and_bytes_for_other_types(make: Make, content_type: str, body: str):
    (answer,) = ask(make(ECHO), b"hi", content_type=content_type)
    expected = f"('model', {body}, '{content_type}', 'application/json')"
    assert (bytes(answer.body), answer.content_type) == (expected.encode(), "text/plain")


def test_the_environment_names_the_type_of_answers_to_clients_that_accept_any(make: Make) -> None:
    model = make(ECHO, SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT="text/csv")
    assert b"'text/csv')" in ask(model, b"", Accept="*/*")[0].body
    assert b"'image/png')" in ask(model, b"", Accept="image/png")[0].body


def test_each_function_may_take_the_context_of_its_own_request(make: Make) -> None:
    model = make("""
        def model_fn(model_dir, context):
            return context.system_properties["model_dir"] == model_dir

        def input_fn(body, content_type, context):
            return context.get_request_header(0, "x-amzn-sagemaker-custom-attributes")

        def predict_fn(data, model, context):
            context.set_response_header(0, "x-seen", data)
            return {"model": model, "id": context.get_request_id(), "data": data}
    """)
    requests = [HandlerRequest(id, {"body": b""}, {"X-Amzn-SageMaker-Custom-Attributes": id}) for id in "ab"]
    answers = model.predict(requests)
    assert [json.loads(bytes(each.body)) for each in answers] == [{"model": True, "id": x, "data": x} for x in "ab"]
    assert [each.headers for each in answers] == [[("x-seen", "a")], [("x-seen", "b")]]


def test_the_functions_around_the_load_run_in_their_order(make: Make) -> None:
    model = make("""
        calls = []
        def pre_model_fn(model_dir):
            calls.append("before")
        def model_fn(model_dir):
            calls.append("load")
            return calls
        def model_warmup_fn(model_dir, model):
            model.append("warm up")
        def transform_fn(model, body, content_type, accept):
            return ",".join(model)
    """)
    assert bytes(ask(model, b"")[0].body) == b"before,load,warm up"


def test_one_failing_request_of_a_batch_fails_alone_without_a_traceback(make: Make) -> None:
    model = make("""
        def model_fn(model_dir):
            return None
        def transform_fn(model, body, content_type, accept):
            return str(1 / int(body))
    """)
    good, bad = ask(model, b"1", b"0")
    assert (good.status, bytes(good.body)) == (200, b"1.0")
    assert message(bad) == (500, "Prediction failed")


def test_the_errors_of_the_toolkit_reach_the_client_with_their_status(make: Make) -> None:
    model = make("""
        class GenericInferenceToolkitError(Exception):
            def __init__(self, status_code, message):
                self.status_code, self.message = status_code, message
        def model_fn(model_dir):
            return None
        def transform_fn(model, body, content_type, accept):
            raise GenericInferenceToolkitError(422, "no cat in the picture")
    """)
    assert message(ask(model, b"")[0]) == (422, "no cat in the picture")


def test_a_lack_of_memory_is_reported_as_such(make: Make) -> None:
    model = make("def model_fn(model_dir):\n    return None\ndef predict_fn(data, model):\n    raise MemoryError\n")
    with pytest.raises(OutOfMemory):
        ask(model, b"[1]")


@pytest.mark.parametrize(
    ("script", "env", "text"),
    [
        ("def transform_fn(): ...\ndef predict_fn(): ...", {}, "transform_fn and predict_fn; remove one"),
        (None, {}, "expected model.pt or one other .pt, .pth or .pt2 file, found none"),
        ("x = 1", {"SAGEMAKER_PROGRAM": "other.py"}, "SAGEMAKER_PROGRAM: found no other.py"),
    ],
)
def test_a_model_that_cannot_be_served_says_why(make: Make, script: str | None, env: dict[str, str], text: str) -> None:
    with pytest.raises(LoadFailed, match=text):
        make(script, **env)


def test_weights_without_their_network_are_refused(make: Make, doubler: Path) -> None:
    import torch

    torch.save({"weight": torch.zeros(1)}, doubler / "model.pt")
    with pytest.raises(LoadFailed, match=r"model\.pt holds a state dict, not a program"):
        make(None)


# ---- defaults


def test_without_a_script_a_torchscript_model_takes_and_returns_json_csv_and_npy(make: Make, doubler: Path) -> None:
    (doubler / "model.pt").rename(doubler / "other.pth")
    model = make(None)
    (answer,) = ask(model, b"[1, 2.5]", Accept="application/json")
    assert (bytes(answer.body), answer.content_type) == (b"[2.0, 5.0]", "application/json")
    (answer,) = ask(model, b"1,2.5", content_type="text/csv", Accept="text/html, text/csv;q=0.5")
    assert (bytes(answer.body), answer.content_type) == (b"2.0\n5.0\n", "text/csv")
    sent = np.array([[1, 2]], np.float64)
    (answer,) = ask(model, npy(sent), content_type="application/x-npy", Accept="application/x-npy")
    assert answer.content_type == "application/x-npy"
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.body)), 2 * sent, strict=True)


def test_a_batch_of_different_types_is_answered_one_by_one(make: Make, doubler: Path) -> None:
    model = make(None)
    requests = [
        HandlerRequest("a", {"body": b"[1]"}, {"Content-Type": "application/json"}),
        HandlerRequest("b", {"body": b"7"}, {"Content-Type": "text/csv", "Accept": "text/csv"}),
    ]
    assert [bytes(each.body) for each in model.predict(requests)] == [b"[2.0]", b"14.0\n"]


@pytest.mark.parametrize(
    ("body", "content_type", "accept", "status", "text"),
    [
        (b"[1", "application/json", "*/*", 400, "the body is not the array of numbers that application/json announces"),
        (b'{"a": 1}', "application/json", "*/*", 400, "the body is not the array of numbers"),
        (b"[" * 100_000, "application/json", "*/*", 400, "the body is not the array of numbers"),
        (b"\xff", "text/csv", "*/*", 400, "the body is not UTF-8: bad byte at offset 0"),
        (npy(np.array([{}])), "application/x-npy", "*/*", 400, "the array has the dtype '|O'"),
        (b"", "application/x-npy", "*/*", 400, "the body is not an array in the format of numpy.save"),
        (b"x", "image/png", "*/*", 415, "the content type 'image/png' is not supported"),
        (b"[1]", "application/json", "image/png", 406, "the type 'image/png' cannot be returned"),
    ],
)
def test_what_the_defaults_cannot_read_or_write_is_refused(
    make: Make, doubler: Path, body: bytes, content_type: str, accept: str, status: int, text: str
) -> None:
    (answer,) = ask(make(None), body, content_type=content_type, Accept=accept)
    found = message(answer)
    assert found[0] == status
    assert found[1].startswith(text)
