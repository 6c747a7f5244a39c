"""The parsers for queries and bodies of TorchServe's management API, with valid and hostile input."""

import json
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.torchserve.protocol import management as parsers
from penstock.torchserve.protocol.api import ApiError, RegisterRequest

JSON = "application/json; charset=utf-8"
NUMBERS = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout", "startup_timeout")


def ignore(warning: str) -> None:
    pass


READERS = (
    lambda query, body: parsers.read_registration(query, "", body, ignore),
    lambda query, body: parsers.read_registration(query, JSON, body, ignore),
    lambda query, body: parsers.read_scaling(query, ignore),
    lambda query, body: parsers.read_page(query, ignore),
    lambda query, body: parsers.read_query(parsers.DESCRIBE, query, ignore),
    lambda query, body: parsers.read_weights(body),
    lambda query, body: parsers.unknown_parameters(parsers.REGISTER, query),
)


def query(text: str) -> dict[str, list[str]]:
    return parse_qs(text, keep_blank_values=True)


def register(text: str) -> RegisterRequest:
    return parsers.read_registration(query(text), "", b"", ignore)


def refusal(reader, *given) -> ApiError:
    with pytest.raises(ApiError) as caught:
        reader(*given)
    return caught.value


# ---- registration


def test_a_query_sets_every_parameter():
    text = (
        "url=a.mar&model_name=x&handler=h.py:f&runtime=python3&batch_size=8&max_batch_delay=0&initial_workers=2"
        "&synchronous=False&response_timeout=5&startup_timeout=6&s3_sse_kms=TRUE"
    )
    assert register(text) == RegisterRequest(
        url="a.mar",
        model_name="x",
        handler="h.py:f",
        runtime="python3",
        batch_size=8,
        max_batch_delay=0,
        initial_workers=2,
        synchronous=False,
        response_timeout=5,
        startup_timeout=6,
        s3_sse_kms=True,
    )


def test_missing_parameters_are_none():
    assert register("url=a.mar") == RegisterRequest(url="a.mar")
    assert register("url=a.mar&model_name=").model_name is None


def test_a_json_body_has_the_same_keys_and_accepts_numbers_as_strings():
    body = {"url": "a.mar", "batch_size": 4, "initial_workers": "3", "max_batch_delay": 7.0, "synchronous": "true"}
    found = parsers.read_registration(
        query("url=other.mar"), JSON, json.dumps(body | {"handler": None}).encode(), ignore
    )
    assert found == RegisterRequest(url="a.mar", batch_size=4, initial_workers=3, max_batch_delay=7, synchronous=True)


def test_a_body_that_is_empty_or_not_json_is_ignored():
    assert parsers.read_registration(query("url=a.mar"), "text/plain", b'{"url": "b.mar"}', ignore).url == "a.mar"
    assert parsers.read_registration(query("url=a.mar"), JSON, b"", ignore).url == "a.mar"


def test_the_first_of_repeated_parameters_counts_and_unknown_ones_are_ignored():
    assert register("url=a&url=b&batch_delay=9") == RegisterRequest(url="a")
    assert parsers.unknown_parameters(parsers.REGISTER, query("url=a&batch_delay=9&x=1")) == ["batch_delay", "x"]
    assert parsers.unknown_parameters(parsers.REGISTER, {"x" * 1000: ["1"]}) == ["x" * 40]


@pytest.mark.parametrize("text", ["", "model_name=m"])
def test_the_url_is_required(text):
    error = refusal(register, text)
    assert (error.status, error.kind, error.message) == (400, "BadRequestException", "Parameter url is required.")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["NaN", "", "1" + "0" * 30, "-1", "x", "1.5", "0x10", "١", "1e3", "9" * 5000, "--1"])
def test_an_invalid_number_in_a_query_means_the_default_with_a_warning(name, value):
    used = 0 if value == "-1" and name in ("max_batch_delay", "initial_workers") else None
    warnings: list[str] = []
    found = parsers.read_registration({"url": ["a"], name: [value]}, "", b"", warnings.append)
    assert getattr(found, name) is used
    (text,) = warnings
    assert text.startswith(
        f"parameter={name} found=the string {value!r}"
        if len(value) < 60
        else f"parameter={name} found=a string of 5000"
    )
    assert text.endswith(f"used={'the default' if used is None else used}")
    assert len(text) < 200


@pytest.mark.parametrize("body", ['"batch_size": -1', '"batch_size": 0', '"startup_timeout": "0"'])
def test_a_number_that_is_too_small_in_a_body_means_the_default(body):
    warnings: list[str] = []
    found = parsers.read_registration({}, JSON, b'{"url": "a", %s}' % body.encode(), warnings.append)
    assert found == RegisterRequest(url="a")
    assert len(warnings) == 1


def test_an_empty_url_is_passed_on():
    assert register("url=").url == ""
    assert parsers.read_registration({}, JSON, b'{"url": ""}', ignore).url == ""


@pytest.mark.parametrize("value", ["NaN", "", "[]", "{}", "true", "1.5", "1" + "0" * 30, "1" + "0" * 300, "-0.5"])
def test_an_invalid_number_in_a_body_is_refused(value):
    body = b'{"url": "a", "batch_size": %s}' % (value.encode() or b'""')
    error = refusal(parsers.read_registration, {}, JSON, body, ignore)
    assert (error.status, error.kind) == (400, "BadRequestException")
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b"3", b'"x"', b"{", b"\xff", b'{"url": 5}', b'{"url": "a", "runtime": []}']
)
def test_a_body_that_is_not_a_registration_is_refused(body):
    assert refusal(parsers.read_registration, {}, JSON, body, ignore).status == 400


def test_an_unknown_runtime_is_refused():
    assert refusal(register, "url=a&runtime=java").message == "Invalid RuntimeType value: java"
    assert register("url=a&runtime=LSP").runtime == "LSP"


# ---- scaling, pages, weights


def test_a_scale_request_has_the_parameters_of_the_query():
    names = ("version", "min_worker", "max_worker", "synchronous")
    assert parsers.read_scaling(query(""), ignore) == dict(zip(names, (None, None, None, False), strict=True))
    assert parsers.read_scaling(
        query("min_worker=2&synchronous=true&model_version=2.0&timeout=x&number_gpu="), ignore
    ) == dict(zip(names, ("2.0", 2, None, True), strict=True))
    zero = parsers.read_scaling(query("min_worker=0&max_worker=0"), ignore)
    assert zero == dict(zip(names, (None, 0, 0, False), strict=True))


@pytest.mark.parametrize("value", ["NaN", "", "1" + "0" * 30, "one"])
@pytest.mark.parametrize("name", ["min_worker", "max_worker"])
def test_an_invalid_number_in_a_scale_request_means_the_default(name, value):
    warnings: list[str] = []
    assert parsers.read_scaling({name: [value]}, warnings.append)[name] is None
    assert f"parameter={name} found=the string {value!r}" in warnings[0]


def test_a_negative_number_of_workers_is_refused():
    text = "min_worker: found -1, expected a whole number from 0 to 2147483647"
    assert refusal(parsers.read_scaling, query("min_worker=-1"), ignore).message == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", (100, 0)),
        ("limit=1&next_page_token=7", (1, 7)),
        ("limit=100", (100, 0)),
        ("limit=0", (100, 0)),
        ("limit=101", (100, 0)),
        ("limit=-5&next_page_token=-1", (100, 0)),
        ("limit=" + "9" * 30 + "&next_page_token=" + "9" * 30, (100, 0)),
        ("limit=&next_page_token=", (100, 0)),
        ("limit=x&next_page_token=NaN", (100, 0)),
    ],
)
def test_a_page_has_at_most_a_hundred_models(text, found):
    assert parsers.read_page(query(text), ignore) == found


def test_only_the_word_true_is_true():
    values = ["true", "True", "TRUE", "false", "1", "yes", ""]
    found = [parsers.read_query(parsers.DESCRIBE, {"customized": [value]}, ignore)["customized"] for value in values]
    assert found == [True] * 3 + [False] * 4


def test_weights_are_numbers_by_version():
    assert parsers.read_weights(b'{"1.0": 9, "2.0": 0.5, "3.0": 0}') == {"1.0": 9.0, "2.0": 0.5, "3.0": 0.0}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"1": 0}',
        b'{"1": -1}',
        b'{"1": true}',
        b'{"1": "1"}',
        b'{"1": null}',
        b'{"1": 1e999}',
        b'{"1": NaN}',
    ],
)
def test_invalid_weights_are_refused(body):
    error = refusal(parsers.read_weights, body)
    assert (error.status, error.kind) == (400, "BadRequestException")


# ---- whatever comes

NAMES = (
    "url model_name runtime synchronous s3_sse_kms min_worker max_worker model_version limit next_page_token customized"
)
WORDS = st.sampled_from([*NAMES.split(), *NUMBERS])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
QUERIES = st.dictionaries(WORDS | st.text(), st.lists(st.text() | st.integers().map(str), max_size=3))
BODIES = (
    st.binary()
    | st.dictionaries(WORDS | st.text(), VALUES).map(lambda value: json.dumps(value).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
)


@given(QUERIES, BODIES)
def test_requests_raise_only_api_errors(given_query, body):
    for reader in READERS:
        refused: ApiError | None = None
        try:
            reader(given_query, body)
        except ApiError as error:
            refused = error
        assert refused is None or (refused.status == 400 and len(refused.message) < 400)
