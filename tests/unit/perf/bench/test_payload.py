from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client.endpoint import parse_url
from penstock.errors import ConfigError
from penstock.perf.bench import payload
from penstock.perf.bench.payload import HOW_MANY, check_of, payloads, request_of
from penstock.perf.bench.target import Target
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.types import Item, ModelMetadata, TensorSpec

IMAGE = TensorSpec("image", "FP32", (-1, 3, 64, 64))


def target(*inputs: TensorSpec, protocol: Any = "native", path: str = "", **more: Any) -> Target:
    path = path or {"native": "/predictions/m", "oip": "/v2/models/m/infer"}[protocol]
    endpoint = parse_url("http://h:8080/under")
    return Target(text="t", endpoint=endpoint, model="m", path=path, protocol=protocol, inputs=inputs, **more)


def test_the_suffix_of_a_file_determines_its_content_type(tmp_path: Path) -> None:
    for name, wanted in [
        ("a.json", "application/json"),
        ("a.jpg", "image/jpeg"),
        ("a.PNG", "image/png"),
        ("a.txt", "text/plain"),
        ("a.wav", "audio/x-wav"),
        ("a.none", "application/octet-stream"),
    ]:
        (tmp_path / name).write_bytes(b"x" + name.encode())
        (found,) = payloads(str(tmp_path / name), target())
        assert (found.body, found.content_type, found.name) == (b"x" + name.encode(), wanted, name)


def test_all_files_of_a_folder_are_sent_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("deep", ".git"):
        (tmp_path / name).mkdir()
    for name in ("b.txt", "deep/a.txt", "a.txt", ".hidden", ".git/HEAD"):
        (tmp_path / name).write_text(name)
    assert [p.body.decode() for p in payloads(str(tmp_path), target())] == ["a.txt", "b.txt", "deep/a.txt"]


def test_each_line_of_a_jsonl_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n')
    found = payloads(str(path), target())
    assert [(p.body, p.content_type, p.name) for p in found] == [
        (b'{"a": 1}', "application/json", "x.jsonl:1"),
        (b"[2]", "application/json", "x.jsonl:3"),
    ]


def test_missing_empty_or_invalid_data_is_reported_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"a":\n')
    (tmp_path / "latin.jsonl").write_bytes(b'"\xe9"\n')
    for name, expected in [
        ("none.png", "no such file"),
        ("empty", "contains no files"),
        ("empty.jsonl", "has no lines"),
        ("broken.jsonl", "line 2"),
        ("latin.jsonl", "line 1: not JSON"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            payloads(str(tmp_path / name), target())


def test_payloads_that_exceed_the_memory_limit_are_refused_or_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "MOST_BYTES", 150_000)
    for name in ("a.txt", "b.txt", "lines.jsonl"):
        (tmp_path / name).write_bytes(b"1\n" * 50_000)
    assert len(payloads(str(tmp_path / "a.txt"), target())) == 1
    with pytest.raises(ConfigError, match="give fewer"):
        payloads(str(tmp_path), target())
    assert len(payloads("random", target(IMAGE))) == 3  # of 48 KiB and a header
    monkeypatch.setattr(payload, "MOST_BYTES", 40_000)
    assert len(payloads("random", target(IMAGE))) == 1
    with pytest.raises(ConfigError, match="give fewer"):
        payloads(str(tmp_path / "lines.jsonl"), target())


def test_random_tensors_fit_what_the_model_declares_and_differ() -> None:
    specs = (
        TensorSpec("x", "FP32", (-1, 4)),
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("flag", "BOOL", (1,)),
        TensorSpec("text", "BYTES", (-1, 1)),
        TensorSpec("more", "FP32", (-1, 4), optional=True),
    )
    found = payloads("random", target(*specs))
    assert len(found) == HOW_MANY == len({p.body for p in found})
    assert {p.path for p in found} == {"/v2/models/m/infer"}  # the native route has no names of inputs
    codec = OipJsonCodec("m", "1", ModelMetadata("m", "1", inputs=specs))
    value, _ = codec.decode(Item(found[0].body, content_type=found[0].content_type, codec="oip_json"))
    assert {name: (array.dtype.name, array.shape) for name, array in value.items()} == {
        "x": ("float32", (1, 4)),
        "ids": ("int64", (1, 16)),
        "flag": ("bool", (1,)),
        "text": ("object", (1, 1)),
    }
    assert ((value["x"] >= 0) & (value["x"] < 1)).all()
    assert ((value["ids"] >= 0) & (value["ids"] < 100)).all()


def test_the_same_seed_makes_the_same_payloads() -> None:
    one, same, other = (payloads("random", target(IMAGE), seed) for seed in (1, 1, 2))
    assert one == same
    assert one[0].body != other[0].body


def test_large_random_tensors_are_sent_in_binary() -> None:
    found = payloads("random", target(IMAGE, path="/predictions/m/2"))[0]
    length = int(found.headers["Inference-Header-Content-Length"])
    head = json.loads(found.body[:length])
    assert head["inputs"][0]["shape"] == [1, 3, 64, 64]
    array = np.frombuffer(found.body[length:], "<f4")
    assert array.size == 3 * 64 * 64
    assert array.min() >= 0
    assert array.max() < 1
    assert found.path == "/v2/models/m/versions/2/infer"


def test_without_data_the_models_example_is_sent_else_random_else_data_is_asked_for() -> None:
    (found,) = payloads(None, target(IMAGE, parameters={"example": {"text": "hello"}}))
    assert found.body == b'{"text":"hello"}'
    assert not found.path
    assert len(payloads(None, target(IMAGE))) == HOW_MANY
    with pytest.raises(ConfigError, match="give --data"):
        payloads(None, target())
    with pytest.raises(ConfigError, match="declares no inputs"):
        payloads("random", target())


def test_a_file_becomes_the_single_input_of_bytes_of_an_open_inference_model(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"\xff\xd8 cat")
    (found,) = payloads(str(path), target(TensorSpec("jpeg", "BYTES", (-1, 1)), protocol="oip"))
    length = int(found.headers["Inference-Header-Content-Length"])
    assert json.loads(found.body[:length])["inputs"][0]["name"] == "jpeg"
    assert found.body[length:] == len(path.read_bytes()).to_bytes(4, "little") + path.read_bytes()
    with pytest.raises(ConfigError, match="no single input of BYTES"):
        payloads(str(path), target(IMAGE, protocol="oip"))


def test_a_request_goes_to_the_path_of_its_payload_with_type_and_token() -> None:
    chance = payloads("random", target(TensorSpec("x", "FP32", (-1, 2))))[0]
    message = request_of(target(token="secret"), chance).decode()
    assert message.startswith("POST /under/v2/models/m/infer HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in message
    assert "Content-Type: application/json\r\n" in message
    assert f"Content-Length: {len(chance.body)}\r\n" in message
    assert message.endswith(chance.body.decode())
    with pytest.raises(ConfigError, match="token"):
        request_of(target(token="a\r\nX: b"), chance)


def test_an_open_inference_response_without_outputs_is_an_error() -> None:
    check = check_of(target(protocol="oip"))
    assert check is not None
    assert check(0, 200, b'{"model_name":"m","outputs":[]}')
    assert not check(0, 200, b'{"error":"no"}')
    assert check_of(target()) is None
