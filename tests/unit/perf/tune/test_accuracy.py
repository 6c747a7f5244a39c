import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from penstock.errors import ConfigError
from penstock.perf.tune.accuracy import AccuracySample, agreement, expected_responses, read_samples
from penstock.perf.tune.profiler import RequestBody, SampleResponse
from penstock.serving.protocols.oip_binary import NPY

JSON = "application/json"


def given(value: Any) -> SampleResponse:
    return SampleResponse(json.dumps(value).encode(), JSON)


def sample(name: str = "line 1", expected: Any = UNSET) -> AccuracySample:
    return AccuracySample(name, RequestBody(b"1", JSON), expected)


@pytest.mark.parametrize(
    ("expected", "found", "text"),
    [
        ([[1.0, 2.0], 5.0], [[1.001, 2.0], 5.0], "all 2 responses agree (largest difference 0.001)"),
        (
            [1.0, 1.0, 1.0], [1.0, 1.5, SampleResponse(error="the model raised")],
            "2 of 3 responses differ; line 2: the response: found 1.5, expected 1, more than the tolerance of 0.01",
        ),
        ([{"boxes": [1, 2]}], [{"boxes": [1]}], "1 of 1 responses differ; line 1: boxes: found 1 elements, expected 2"),
    ],
)  # fmt: skip
def test_one_response_beyond_the_tolerance_is_enough_and_the_first_is_named(
    expected: list[Any], found: list[Any], text: str
) -> None:
    samples = [sample(f"line {n}") for n in range(1, len(expected) + 1)]
    responses = [each if isinstance(each, SampleResponse) else given(each) for each in found]
    agreed = agreement(samples, expected, responses, 0.01)
    assert (agreed.text, agreed.holds) == (text, text.startswith("all"))


def test_text_and_bytes_are_compared_exactly() -> None:
    text, png = SampleResponse("Straße".encode(), "text/plain; charset=utf-8"), SampleResponse(b"\x89PNG", "image/png")
    assert agreement(
        [sample(), sample()], expected_responses([sample(), sample()], [text, png]), [text, png], 0.0
    ).holds
    assert not agreement([sample()], ["Strasse"], [text], 1e9).holds


def test_invalid_json_is_compared_as_bytes() -> None:
    latin = SampleResponse(b'"\xe9"', JSON)
    assert agreement([sample()], expected_responses([sample()], [latin]), [latin], 0.0).holds
    assert not agreement([sample()], expected_responses([sample()], [latin]), [given("e")], 0.0).holds


def test_expected_outputs_take_precedence_over_the_reference_and_a_reference_that_fails_is_an_error() -> None:
    samples, failed = [sample("a", 7), sample("line 4")], SampleResponse(error="the model raised")
    assert expected_responses(samples, [given(1), given(2)]) == [7, 2]
    assert expected_responses(samples[:1], [failed]) == [7]
    with pytest.raises(ConfigError, match="cannot answer line 4 \\(the model raised\\)"):
        expected_responses(samples, [failed, failed])


def test_a_line_is_an_input_or_an_input_with_its_output(tmp_path: Path) -> None:
    file = tmp_path / "check.jsonl"
    file.write_text('{"x": [1, 2]}\n\n[3]\n')
    assert [(s.name, s.body.body, s.expected) for s in read_samples(str(file))] == [
        ("line 1", b'{"x":[1,2]}', UNSET),
        ("line 3", b"[3]", UNSET),
    ]
    file.write_text('{"input": [3], "output": {"label": 1}}\n{"input": 4, "output": null}\n')
    assert [(s.body.body, s.expected) for s in read_samples(str(file))] == [(b"[3]", {"label": 1}), (b"4", None)]


def test_axis_0_of_arrays_indexes_requests(tmp_path: Path) -> None:
    np.savez(tmp_path / "check.npz", inputs=np.arange(4).reshape(2, 2), outputs=np.array([0.5, 1.5]))
    found = read_samples(str(tmp_path / "check.npz"))
    assert [(s.body.body, s.body.content_type, s.expected) for s in found] == [
        (b"[0,1]", JSON, 0.5),
        (b"[2,3]", JSON, 1.5),
    ]


def test_each_file_of_a_folder_is_a_request_and_expected_responses_are_optional(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    (tmp_path / "a.json").write_bytes(b"[1]")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY")
    found = read_samples(str(tmp_path))
    assert [(s.name, s.body.content_type, s.expected) for s in found] == [
        ("a.json", JSON, UNSET),
        ("a.npy", NPY, UNSET),
        ("b.png", "image/png", UNSET),
    ]
    (tmp_path / "expected.jsonl").write_text("1\n2\n3\n")
    assert [s.expected for s in read_samples(str(tmp_path))] == [1, 2, 3]


def make(folder: Path, name: str, content: str | bytes | dict[str, Any]) -> str:
    path = folder / name
    if not isinstance(content, dict):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        np.savez(path, **content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"input": 1, "output": 1}\n{"input": 2}\n', '1 of 2 lines have an "output", line 2 has none'),
        ("a.jsonl", "1\n{\n", "line 2 is not JSON"),
        ("a.jsonl", "\n", "found no input"),
        ("a.npz", {"inputs": np.zeros(3), "outputs": np.zeros(2)}, "found 3 inputs and 2 outputs"),
        ("a.npz", {"inputs": np.zeros(3), "output": np.zeros(3)}, "found an array 'output'.*did you mean 'outputs'"),
        ("a.npz", {"outputs": np.zeros(3)}, "found no array 'inputs'"),
        ("a.npz", {"inputs": np.array([{}], dtype=object)}, r"cannot be read as \.npz"),
        ("a.npz", {"inputs": np.array([1j])}, "inputs are complex128, expected numbers"),
        ("a.npz", {"inputs": np.zeros(1), "outputs": np.array([b"x"])}, r"outputs are \|S1, expected numbers"),
        ("a.jsonl", b'"\xff"\n', "line 1 is not JSON"),
    ],
)
def test_a_file_of_the_wrong_length_or_form_is_rejected(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_samples(make(tmp_path, name, content))


def test_a_file_that_is_no_archive_of_arrays_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(2))
    single = path.read_bytes()
    np.savez_compressed(path, inputs=np.arange(10_000))
    whole = path.read_bytes()
    for content in (single, whole[:100] + b"\xff" * 60 + whole[160:], b"no archive", b""):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be read as \.npz"):
            read_samples(str(path))


def test_a_folder_with_too_few_responses_is_rejected(tmp_path: Path) -> None:
    for name, content in (("a.json", "[1]"), ("b.json", "[1]"), ("expected.jsonl", "1\n")):
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"found 2 inputs and 1 lines in expected\.jsonl"):
        read_samples(str(tmp_path))


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_samples("/nowhere/check.jsonl")
