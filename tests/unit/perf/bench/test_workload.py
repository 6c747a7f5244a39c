"""What a load sends, and when: arrival times and request bodies."""

import json
import statistics
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client.endpoint import parse_url
from penstock.errors import ConfigError
from penstock.perf.bench import workload
from penstock.perf.bench.target import Target
from penstock.perf.bench.workload import (
    HOW_MANY,
    Arrival,
    check_of,
    parse_arrival,
    payloads,
    read_trace,
    request_of,
    times,
)
from penstock.serving.observe.recorders import ArrivalRecorder
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.types import Item, ModelMetadata, TensorSpec

# ---- arrival times


RECORDED = '{"t": 10.5, "rows": 2, "bytes": 300, "model": "m"}\n\n{"t": 10.25}\n{"t": 12.5, "bytes": 7}\n'


def gaps(text: str, rate: float = 100.0, seconds: float = 200.0, seed: int = 1) -> list[float]:
    return [b - a for a, b in pairwise(times(parse_arrival(text), rate, seconds, seed))]


def test_flags_are_read() -> None:
    assert parse_arrival("poisson") == Arrival("poisson")
    assert parse_arrival("constant") == Arrival("constant")
    assert parse_arrival("gamma:2.5") == Arrival("gamma", 2.5)
    assert parse_arrival("trace:a:b.jsonl") == Arrival("trace", path="a:b.jsonl")


@pytest.mark.parametrize("text", ["", "poison", "poisson:2", "constant:1", "gamma", "gamma:", "gamma:0", "gamma:x",
                                  "gamma:nan", "gamma:1e9", "trace", "trace:"])  # fmt: skip
def test_an_unknown_arrival_is_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"gamma:"):
        parse_arrival(text)


@pytest.mark.parametrize(
    ("text", "variation"), [("poisson", 1.0), ("gamma:1", 1.0), ("gamma:3", 3.0), ("gamma:0.2", 0.2)]
)
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(text: str, variation: float) -> None:
    found = gaps(text)
    assert statistics.mean(found) == pytest.approx(0.01, rel=0.08)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.08)


@pytest.mark.parametrize("text", ["poisson", "gamma:10", "gamma:0.1"])
def test_the_rate_holds_from_the_first_second_on_however_bursty_arrivals_are(text: str) -> None:
    counts = [len(times(parse_arrival(text), 100.0, 1.0, seed)) for seed in range(500)]
    assert statistics.mean(counts) == pytest.approx(100, abs=15), "149 if each run began with an arrival before it"


def test_constant_arrivals_start_at_once_and_match_the_rate() -> None:
    assert list(times(parse_arrival("constant"), 4.0, 1.0, 0)) == [0.0, 0.25, 0.5, 0.75]
    assert len(times(parse_arrival("constant"), 100.0, 20.0, 0)) == 2000
    assert list(times(parse_arrival("constant"), 0.5, 1.0, 0)) == [0.0]


@pytest.mark.parametrize("text", ["poisson", "gamma:2"])
def test_the_seed_decides_and_all_lie_within_the_time(text: str) -> None:
    arrival = parse_arrival(text)
    once = times(arrival, 50.0, 10.0, 7)
    assert once == times(arrival, 50.0, 10.0, 7) != times(arrival, 50.0, 10.0, 8)
    assert list(once) == sorted(once)
    assert 0.0 < min(once) <= max(once) < 10.0


@pytest.mark.parametrize(
    ("rate", "seconds", "why"),
    [
        *((rate, 1.0, "expected a rate and a time over 0") for rate in (0.0, -1.0, float("inf"), float("nan"))),
        (1.0, 0.0, "expected a rate and a time over 0"),
        (1e9, 3600.0, r"at 1e\+09/s for 3600 s are 3\.6e\+12; expected at most 3e\+07"),
    ],
)
def test_no_rate_no_time_and_more_arrivals_than_memory_can_hold_are_refused(
    rate: float, seconds: float, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        times(parse_arrival("poisson"), rate, seconds, 0)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def file(text: str) -> str:
        (tmp_path / "trace.jsonl").write_text(text, errors="surrogateescape")
        return str(tmp_path / "trace.jsonl")

    return file


def test_a_trace_is_read_in_order_of_time_from_its_first(write: Callable[[str], str]) -> None:
    trace = read_trace(write(RECORDED))
    assert list(trace.times_s) == [0.0, 0.25, 2.25]
    assert list(trace.rows) == [1, 2, 1]


async def test_a_recording_of_the_server_is_a_trace(tmp_path: Path) -> None:
    clock = count(10, 0.5)
    recorder = ArrivalRecorder(str(tmp_path / "arrivals.jsonl"), clock=lambda: next(clock))
    recorder.on_request("digits", "1", 1, 300)
    recorder.on_request('odd "name"', "2", 16, 0)
    recorder.close()
    trace = read_trace(str(tmp_path / "arrivals.jsonl"))
    assert (list(trace.times_s), list(trace.rows)) == ([0.0, 0.5], [1, 16])


def test_a_trace_of_several_models_can_be_read_for_one(write: Callable[[str], str]) -> None:
    path = write('{"t": 1, "model": "a"}\n{"t": 2, "model": "b"}\n{"t": 4, "model": "b"}\n')
    assert read_trace(path).models == ("a", "b")
    assert list(read_trace(path, "b").times_s) == [0.0, 2.0]
    with pytest.raises(ConfigError, match="no request for model 'c'; found a, b"):
        read_trace(path, "c")


def test_a_trace_keeps_its_times_or_is_stretched_to_a_rate(write: Callable[[str], str]) -> None:
    arrival, trace = parse_arrival("trace:x"), read_trace(write(RECORDED)).times_s
    assert list(times(arrival, 0.0, 0.0, 0, trace)) == [0.0, 0.25, 2.25]
    assert list(times(arrival, 0.0, 1.0, 0, trace)) == [0.0, 0.25]
    doubled = times(arrival, 4 / 2.25, 0.0, 0, trace)
    assert list(doubled) == pytest.approx([0.0, 0.125, 1.125])
    assert list(times(arrival, 5.0, 0.0, 0, [0.0])) == [0.0], "a single arrival has no rate to stretch"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is empty"),
        ('{"t": 1}\n{"rows": 1}\n', ":2: .*missing required field `t`"),
        ('{"t": 1}\n{"t": "x"}\n', ":2: "),
        ('{"t": 1}\nnothing\n', ":2: "),
        ('{"t": 1, "rows": 0}\n', ":1: .*rows over 0"),
        ('{"t": 1, "bytes": -1}\n', ":1: .*bytes from 0"),
        (f'{{"t": 1, "rows": {10**30}}}\n', ":1: .*rows over 0"),
        (f'{{"t": 1, "bytes": {10**30}}}\n', ":1: .*bytes from 0"),
        ('{"t": 1, "model": "\udcff"}\n', ":1: .*can't decode byte 0xff"),
    ],
)
def test_an_invalid_trace_is_reported_with_its_line(write: Callable[[str], str], text: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        read_trace(write(text))


def test_a_truncated_last_line_is_dropped_with_a_warning(
    write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    assert list(read_trace(write('{"t": 1}\n{"t": 3}\n{"t": 4, "mod')).times_s) == [0.0, 2.0]
    assert [record.message.partition("trace.jsonl ")[2] for record in caplog.records] == [
        "line=3 dropped=true reason=truncated"
    ]
    with pytest.raises(ConfigError, match=":1: Input data was truncated"):
        read_trace(write('{"t": 1'))


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "no.jsonl"))


# ---- request bodies


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
    monkeypatch.setattr(workload, "MOST_BYTES", 150_000)
    for name in ("a.txt", "b.txt", "lines.jsonl"):
        (tmp_path / name).write_bytes(b"1\n" * 50_000)
    assert len(payloads(str(tmp_path / "a.txt"), target())) == 1
    with pytest.raises(ConfigError, match="give fewer"):
        payloads(str(tmp_path), target())
    assert len(payloads("random", target(IMAGE))) == 3  # of 48 KiB and a header
    monkeypatch.setattr(workload, "MOST_BYTES", 40_000)
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
