"""config.properties: syntax, keys, and the precedence of sources."""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.torchserve.admin.files import format_properties
from penstock.torchserve.config import (
    IGNORED,
    ListenerAddress,
    Properties,
    load_properties,
    parse_address,
    parse_properties,
)

CAPTIONING = r"""
inference_address=http://0.0.0.0:12345
management_address=http://0.0.0.0:12346
metrics_address=http://0.0.0.0:12347
grpc_inference_port=7070
grpc_management_port=7071
enable_envvars_config=true
install_py_dep_per_model=false
max_request_size=500000000
number_of_gpu=1
load_models=blip2.mar
models={\
  "blip2": {\
    "1.0": {\
        "defaultVersion": true,\
        "marName": "blip2.mar",\
        "minWorkers": 1,\
        "maxWorkers": 1,\
        "batchSize": 1,\
        "maxBatchDelay": 0,\
        "responseTimeout": 120\
    }\
  }\
}
enable_metrics_api=false
disable_system_metrics=true
"""


def write_file(folder: Path, text: str) -> str:
    path = folder / "config.properties"
    path.write_text(text)
    return str(path)


def values_of(text: str) -> dict[str, str]:
    return {key: each.value for key, each in parse_properties(text, "file").items()}


# ---- syntax


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a=b", "a", "b"),
        ("a = b", "a", "b"),
        ("a:b", "a", "b"),
        ("a b", "a", "b"),
        ("a\tb c", "a", "b c"),
        ("a  :  b", "a", "b"),
        ("a==b", "a", "=b"),
        ("  a=b", "a", "b"),
        ("a=b ", "a", "b "),
        ("a", "a", ""),
        ("a=", "a", ""),
        ("=b", "", "b"),
        (r"a\=b=c", "a=b", "c"),
        (r"a\ b=c", "a b", "c"),
        (r"a\:b:c", "a:b", "c"),
        ("a=1,\\\n    2", "a", "1,2"),
        ("a=1\\\r\n2", "a", "12"),
        ("a=1\\\n# not a comment", "a", "1# not a comment"),
        ("a=b\\\\\nc=d", "a", "b\\"),
        ("a=b\\", "a", "b"),
        (r"a=\t\n\r\f\q\"", "a", '\t\n\r\fq"'),
        (r"a=\u00e9\u20AC", "a", "é€"),
        (r"a=\ud83d\ude00", "a", "😀"),
        ("a=1\na=2", "a", "2"),
        ("#a=1\n ! a=2\na=3", "a", "3"),
        ("\n\n \t\na=3", "a", "3"),
    ],
)
def test_a_line_is_parsed_as_in_java(text: str, key: str, value: str) -> None:
    assert values_of(text)[key] == value


def test_an_escape_of_fewer_than_four_digits_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"file:2: found \\u12z, expected four hexadecimal digits"):
        parse_properties("a=1\nb=\\u12z", "file")


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]))
    )
)
def test_properties_round_trip(values: dict[str, str]) -> None:
    text = format_properties(values.items())
    assert text.isascii()
    assert values_of(text) == values


@given(st.text())
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    try:
        parse_properties(text, "file")
    except ConfigError:
        pass


# ---- keys


def test_without_a_file_every_key_has_its_default() -> None:
    assert load_properties(None, env={}) == Properties()
    assert Properties().max_request_size == 6553500
    assert Properties().allowed_urls == ["file://.*|http(s)?://.*"]


def test_the_file_of_a_captioning_server_is_parsed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    properties = load_properties(write_file(tmp_path, CAPTIONING), env={})
    assert properties.address("inference") == ListenerAddress("0.0.0.0", 12345)
    assert properties.max_request_size == 500_000_000
    assert properties.number_of_gpu == 1
    assert properties.load_models == ["blip2.mar"]
    assert properties.models["blip2"]["1.0"]["maxBatchDelay"] == 0
    assert properties.models["blip2"]["1.0"]["defaultVersion"] is True
    assert not properties.enable_metrics_api
    assert properties.disable_system_metrics
    assert not caplog.records


def test_lists_lose_blanks_and_empty_parts(tmp_path: Path) -> None:
    properties = load_properties(
        write_file(tmp_path, "load_models= a.mar, b=b.mar ,\nallowed_urls=https://x/.*,y"), env={}
    )
    assert properties.load_models == ["a.mar", "b=b.mar"]
    assert properties.allowed_urls == ["https://x/.*", "y"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "job_queue_size=many",
            "job_queue_size: found the string 'many', expected a whole number from 1 to 2147483647",
        ),
        ("job_queue_size=", "job_queue_size: found the string '', expected a whole number"),
        ("number_of_gpu=two", "number_of_gpu: found the string 'two', expected a whole number from 0 to 2147483647"),
        ("max_request_size=1.5", "max_request_size: found the string '1.5', expected a whole number"),
        (
            "grpc_inference_port=70700",
            "grpc_inference_port: found the string '70700', expected a whole number from 0 to 65535",
        ),
        ("metrics_mode=loud", 'metrics_mode: found the string \'loud\', expected "legacy" or "log" or "prometheus"'),
        ("token_expiration_min=nan", "token_expiration_min: found the string 'nan'"),
        ("models={", "models: not valid JSON"),
        ('models={"a": 1}', "models: found a table, expected {name: {version: {key: value}}}"),
        ("inference_address=ftp://x:1", "inference_address: found 'ftp://x:1', expected http://host:port"),
        ("metrics_address=http://x:99999", "metrics_address: found port 99999"),
        ("management_address=unix:", "management_address: found 'unix:', expected a path"),
    ],
)
def test_a_malformed_value_is_reported_with_file_and_line(tmp_path: Path, line: str, shown: str) -> None:
    path = write_file(tmp_path, f"# a comment\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_properties(path, env={})
    assert caught.value.message.startswith(f"{path}:2: ")
    assert shown in caught.value.message


@pytest.mark.parametrize(
    ("line", "default"),
    [
        ("number_of_gpu=-1", None),
        ("metric_time_interval=0", 60),
        ("unregister_model_timeout=-1", 120),
        ("token_expiration_min=-5", 60.0),
        ("initial_worker_port=-1", 9000),
    ],
)
def test_a_number_that_torchserve_ignores_means_the_default(
    tmp_path: Path, line: str, default: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    properties = load_properties(write_file(tmp_path, line), env={})
    key, _, value = line.partition("=")
    assert getattr(properties, key) == default
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f":1: {key}: found the string '{value}'" in caplog.text
    assert "used=the default" in caplog.text


def test_an_unknown_boolean_is_false_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    properties = load_properties(write_file(tmp_path, "enable_model_api=yes\nlimit_max_image_pixels=FALSE"), env={})
    assert not properties.enable_model_api
    assert not properties.limit_max_image_pixels
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "found 'yes', expected true or false" in caplog.text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_properties(str(tmp_path / "none"), env={})


# ---- what is taken without effect


def test_keys_without_effect_cause_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_properties(write_file(tmp_path, "io_ratio=60\nvmargs=-Xmx2g -XX:+Foo\ndebug=true\njob_queue_size=9"), env={})
    assert [record.getMessage() for record in caplog.records] == [
        f"file={tmp_path}/config.properties ignored=debug,io_ratio,vmargs consequence=these_keys_have_no_effect"
    ]
    assert set(Properties.__struct_fields__) > IGNORED


def test_unknown_keys_cause_a_warning_with_the_nearest_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    properties = load_properties(write_file(tmp_path, "\njob_queue_sise=9\nversion=0.12.0"), env={})
    assert properties.job_queue_size == 100
    (record,) = caplog.records
    assert f"{tmp_path}/config.properties:2 'job_queue_sise' did you mean 'job_queue_size'?" in record.getMessage()


# ---- where values come from


def test_variables_in_values_are_replaced(tmp_path: Path) -> None:
    path = write_file(tmp_path, "model_store=/$$BASE$$/store-$$N$$")
    assert load_properties(path, env={"BASE": "srv", "N": "2"}).model_store == "/srv/store-2"


def test_a_missing_variable_stops_the_start_with_its_line(tmp_path: Path) -> None:
    path = write_file(tmp_path, "debug=false\nmodel_store=$$BASE$$")
    with pytest.raises(ConfigError, match=r":2: model_store: found \$\$BASE\$\$, but the environment has no variable"):
        load_properties(path, env={})


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = write_file(tmp_path, "model_store=a\nload_models=all")
    properties = load_properties(path, env={}, flags={"model_store": "b"})
    assert (properties.model_store, properties.load_models) == ("b", ["all"])


def test_the_environment_wins_only_if_the_file_allows_it(tmp_path: Path) -> None:
    env = {"TS_JOB_QUEUE_SIZE": "7", "TS_ALLOWED_URLS": "https://y", "TS_MODEL_STORE": "/env"}
    path = write_file(tmp_path, "job_queue_size=5")
    assert load_properties(path, env=env).job_queue_size == 5
    path = write_file(tmp_path, "job_queue_size=5\nenable_envvars_config=true\nallowed_urls=https://x")
    properties = load_properties(path, env=env, flags={"model_store": "/flag"})
    assert properties.job_queue_size == 7
    assert properties.model_store == "/env"
    assert properties.allowed_urls == ["https://x"]
    path = write_file(tmp_path, "enable_envvars_config=true\nuse_env_allowed_urls=true\nallowed_urls=https://x")
    assert load_properties(path, env=env).allowed_urls == ["https://y"]


def test_a_wrong_value_of_the_environment_names_the_variable(tmp_path: Path) -> None:
    path = write_file(tmp_path, "enable_envvars_config=true")
    with pytest.raises(
        ConfigError, match="environment variable TS_JOB_QUEUE_SIZE: job_queue_size: found the string 'x'"
    ):
        load_properties(path, env={"TS_JOB_QUEUE_SIZE": "x"})


def test_the_environment_always_controls_the_open_inference_protocol() -> None:
    assert load_properties(None, env={"TS_OPEN_INFERENCE_PROTOCOL": "oip"}).ts_open_inference_protocol
    assert not load_properties(None, env={"TS_OPEN_INFERENCE_PROTOCOL": "x"}).ts_open_inference_protocol


def test_folders_of_logs_come_from_the_environment() -> None:
    properties = load_properties(None, env={"LOG_LOCATION": "/l", "METRICS_LOCATION": "/m"})
    assert (properties.log_location, properties.metrics_location) == ("/l", "/m")


# ---- addresses


@pytest.mark.parametrize(
    ("group", "text", "address"),
    [
        ("inference", "http://127.0.0.1:8080", ListenerAddress("127.0.0.1", 8080)),
        ("inference", "https://0.0.0.0", ListenerAddress("0.0.0.0", 443, "https")),
        ("management", "https://localhost", ListenerAddress("localhost", 8444, "https")),
        ("metrics", "HTTPS://localhost/", ListenerAddress("localhost", 8445, "https")),
        ("inference", "http://localhost", ListenerAddress("localhost", 80)),
        ("management", "localhost", ListenerAddress("localhost", 8081)),
        ("metrics", "http://[::1]:9", ListenerAddress("::1", 9)),
        ("inference", "unix:/tmp/a.sock", ListenerAddress("unix:/tmp/a.sock")),
        ("inference", "unix:///tmp/a.sock", ListenerAddress("unix:/tmp/a.sock")),
    ],
)
def test_an_address_is_parsed(group: str, text: str, address: ListenerAddress) -> None:
    assert parse_address(group, text) == address
    assert parse_address(group, str(address)) == address
