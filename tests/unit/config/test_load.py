"""Later sources override earlier ones, and errors state the source, the key, the found and the expected value."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.load import load_config
from penstock.config.schema import Config
from penstock.errors import ConfigError

Write = Callable[[str], str]
MODEL = '[models.digits]\ntarget = "pkg.mod:Digits"\n'


def refused(path: str | None = None, *, sets: tuple[str, ...] = (), env: dict[str, str] | None = None) -> str:
    """The message of the ConfigError."""
    with pytest.raises(ConfigError) as info:
        load_config(path, env=env or {}, sets=sets)
    return info.value.message


def test_an_empty_configuration_has_the_defaults() -> None:
    assert load_config(None, env={}) == Config()


def test_later_sources_override_earlier_ones(toml: Write) -> None:
    path = toml("[server]\nport = 2\nmetrics_port = 2\nmanagement_port = 2\n[limits]\nmax_pipelined = 2\n")
    config = load_config(
        path,
        env={f"PENSTOCK_SERVER__{key}": "3" for key in ("PORT", "METRICS_PORT", "MANAGEMENT_PORT")},
        base={"server": {"port": 4, "metrics_port": 4, "host": None}},
        sets=["server.port=5"],
    )
    assert (config.server.port, config.server.metrics_port, config.server.management_port) == (5, 4, 3)
    assert config.limits.max_pipelined == 2
    assert config.server.host == "127.0.0.1", "a flag that was not given is absent"


def test_only_the_server_tables_of_a_pipeline_file_count(toml: Write, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\n")
    file = toml(
        'batching_timeout = 5\n[server]\nport = 1\nmetrics_port = 1\n[auth]\ntoken_file = "tokens"\n'
        '[limits]\nmax_pipelined = 3\n[decode]\nbackend = "DecodeMat"\n'
    )
    config = load_config(None, env={"PENSTOCK_SERVER__METRICS_PORT": "2"}, pipelines=[file])
    assert (config.server.port, config.server.metrics_port, config.limits.max_pipelined) == (1, 2, 3)
    assert config.auth.token_file == str(tmp_path / "tokens")
    assert not config.models
    file = toml("[server]\nprt = 1\n")
    with pytest.raises(ConfigError, match=f"{re.escape(file)}: server: unknown key 'prt'; did you mean 'port'"):
        load_config(None, env={}, pipelines=[file])


def test_the_path_of_a_pipeline_starts_at_the_folder_of_the_file(toml: Write, tmp_path: Path) -> None:
    config = load_config(toml('[models.net]\ntarget = "deep/net.toml"\n'), env={})
    assert config.models["net"].target == str(tmp_path / "deep" / "net.toml")


def test_sources_are_merged_per_key_and_not_modified(toml: Write) -> None:
    base = {"models": {"digits": {"target": "pkg.mod:Digits", "env": {"A": "1"}}}}
    config = load_config(
        toml('[models.digits.batching]\npolicy = "fixed"\n[models.digits.env]\nB = "2"\n'),
        env={"PENSTOCK_MODELS__digits__BATCHING__MAX_BATCH_SIZE": "8"},
        sets=["models.digits.env.C=3"],
        base=base,
    )
    model = config.models["digits"]
    assert (model.target, model.batching.policy, model.batching.max_batch_size) == ("pkg.mod:Digits", "fixed", 8)
    assert model.env == {"A": "1", "B": "2", "C": "3"}
    assert base == {"models": {"digits": {"target": "pkg.mod:Digits", "env": {"A": "1"}}}}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("models.m.version=2", "version", "2"),
        ("models.m.version='2'", "version", "2"),
        ("models.m.version=2024-01-01", "version", "2024-01-01"),
        ("models.m.instances=auto", "instances", "auto"),
        ("models.m.instances=3", "instances", 3),
        ("models.m.devices=['cuda:0', 'cuda:1']", "devices", ("cuda:0", "cuda:1")),
        ('models."m".transport=thread', "transport", "thread"),
        ("models.m.env={A = '1'}", "env", {"A": "1"}),
    ],
)
def test_set_accepts_toml_values_and_bare_words(text: str, key: str, value: object) -> None:
    config = load_config(None, env={}, sets=["models.m.target=pkg.mod:M", text])
    assert getattr(config.models["m"], key) == value


def test_a_model_name_with_dots_is_quoted(toml: Write) -> None:
    assert list(load_config(toml('[models."my.model"]\ntarget = "app.py:M"\n'), env={}).models) == ["my.model"]
    config = load_config(None, env={}, sets=['models."a.b".target=pkg:M', 'models."a.b".batching.policy=none'])
    assert config.models["a.b"].batching.policy == "none"


def test_a_second_line_in_a_value_adds_no_key() -> None:
    config = load_config(None, env={"PENSTOCK_SERVER__HOST": "'::1'\nport = 1"})
    assert config.server.port == Config().server.port
    assert config.server.host == "'::1'\nport = 1"


def test_environment_keys_ignore_case_but_model_names_do_not() -> None:
    env = {
        "PENSTOCK_server__Port": "1",
        "PENSTOCK_MODELS__My__net__TARGET": "pkg:M",
        "PENSTOCK_Models__My__net__batching__slo_s": "0.5",
    }
    config = load_config(None, env=env)
    assert config.server.port == 1
    assert config.models["My__net"].batching.slo_s == 0.5


def test_variables_without_a_double_underscore_are_ignored() -> None:
    env = {"PENSTOCK_READY_FD": "3", "PENSTOCK_SERVICE_HOST": "10.0.0.1", "PENSTOCK_PORT_8080_TCP": "tcp://10.0.0.1:1"}
    assert load_config(None, env=env) == Config()


def test_a_key_with_a_single_underscore_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.config"):
        config = load_config(None, env={"PENSTOCK_SERVER_METRICS_PORT": "1"})
    assert config == Config()
    assert "PENSTOCK_SERVER__METRICS_PORT" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", "server: unknown key 'prot'; did you mean 'port'?"),
        ("[zzz]\n", "unknown section 'zzz'; known are server, limits, auth, logging, tracing, devices, models"),
        ('[modles.m]\ntarget = "a:b"\n', "unknown section 'modles'; did you mean 'models'?"),
        (
            MODEL + "[models.digits.batching]\nmax_batch = 1\n",
            "models.digits.batching: unknown key 'max_batch'; did you mean 'max_batch_size'?",
        ),
        ('[server]\nport = "a"\n', "server.port: found the string 'a', expected a whole number from 0 to 65535"),
        ("[server]\nport = 70000\n", "server.port: found 70000, expected a whole number from 0 to 65535"),
        ("[server]\nport = true\n", "server.port: found true, expected a whole number from 0 to 65535"),
        ("[server]\nhost = 1\n", "server.host: found 1, expected a string"),
        ("[server]\ninsecure = 1\n", "server.insecure: found 1, expected true or false"),
        ("[limits]\nidle_timeout_s = 0\n", "limits.idle_timeout_s: found 0, expected a number above 0"),
        ("[limits]\nidle_timeout_s = inf\n", "limits.idle_timeout_s: found inf, expected a number above 0"),
        ("[server]\ndrain_s = -1\n", "server.drain_s: found -1, expected a number from 0 to 2147483647"),
        ("server = 3\n", "server: found 3, expected a table"),
        ("[[models]]\n", "models: found a list of 1, expected a table"),
        ("[server.port]\nx = 1\n", "server.port: found a table, expected a whole number from 0 to 65535"),
        (
            MODEL + 'instances = "many"\n',
            "models.digits.instances: found the string 'many', expected a whole number from 1 to 4096 or \"auto\"",
        ),
        (MODEL + 'devices = ["cpu", 1]\n', "models.digits.devices[1]: found 1, expected a list, each a string"),
        (MODEL + 'trust = "all"\n', 'models.digits.trust: found the string \'all\', expected "none" or "pickle"'),
        (MODEL + "[models.digits.env]\nA = 1\n", "models.digits.env.A: found 1, expected a string"),
        (MODEL + "batching.priority = [0, nan]\n", "models.digits.batching.priority[1]: found nan"),
        (
            MODEL + "batching.priority = []\n",
            "models.digits.batching.priority: found a list of 0, expected a list of 1 or more, each a number",
        ),
    ],
)
def test_an_invalid_value_is_refused(toml: Write, text: str, message: str) -> None:
    path = toml(text)
    assert refused(path).startswith(f"{path}: {message}")


def test_a_wrong_variable_is_named() -> None:
    assert refused(env={"PENSTOCK_SERVER__PORT": "abc"}) == (
        "environment variable PENSTOCK_SERVER__PORT: server.port: found the string 'abc',"
        " expected a whole number from 0 to 65535"
    )
    assert "did you mean 'port'" in refused(env={"PENSTOCK_SERVER__PRT": "1"})
    assert "unknown section 'servr'; did you mean 'server'?" in refused(env={"PENSTOCK_SERVR__PORT": "1"})


@pytest.mark.parametrize("text", ["server.port", "=1", "", "a b=1", "server.=1", "a=1\nb=2=3", "a\nb=1"])
def test_a_set_without_an_assignment_is_refused(text: str) -> None:
    message = refused(sets=(text,))
    assert message.startswith(f"--set {text}: ")


def test_a_set_on_a_table_accepts_an_inline_table() -> None:
    assert load_config(None, env={}, sets=["server={port = 1}"]).server.port == 1
    assert "server: found 1, expected a table" in refused(sets=("server=1",))
    assert "server.port is not a table; it takes a whole number" in refused(sets=("server.port.x=1",))


def test_malformed_toml_is_reported_with_line_and_column(toml: Write) -> None:
    path = toml("[server]\nport = \n")
    message = refused(path)
    assert message.startswith(f"{path}: not valid TOML: ")
    assert "line 2, column 8" in message
    assert refused(toml("a = " + "[" * 3000 + "]" * 3000)).endswith("nested too deeply")


def test_a_missing_file_a_folder_and_binary_content_have_different_errors(tmp_path: os.PathLike[str]) -> None:
    missing = os.path.join(tmp_path, "no.toml")
    assert refused(missing).startswith(f"{missing}: no such file")
    assert "is a folder" in refused(str(tmp_path))
    with open(missing, "wb") as file:
        file.write(b"a = '\xff'")
    assert "not UTF-8 at byte 5" in refused(missing)


def test_a_model_without_a_target_is_refused_with_the_nearest_model(toml: Write) -> None:
    message = refused(
        toml(MODEL), env={"PENSTOCK_MODELS__DIGITS__VERSION": "2", "PENSTOCK_MODELS__digit__VERSION": "2"}
    )
    assert "variable PENSTOCK_MODELS__DIGITS__VERSION: models.DIGITS: found no target" in message
    assert "models.digit: found no target; did you mean 'digits'?" in refused(
        toml(MODEL), sets=("models.digit.version=2",)
    )
    assert "found an empty string" in refused(toml('[models.m]\ntarget = ""\n'))


@pytest.mark.parametrize("name", ["a/b", "", "..", "a b", "é", "x" * 129])
def test_an_invalid_model_name_is_refused(toml: Write, name: str) -> None:
    assert "is not a valid model name" in refused(toml(f'[models."{name}"]\ntarget = "a:b"\n'))


def test_paths_in_a_file_start_at_its_folder_and_others_do_not(toml: Write) -> None:
    path = toml(
        '[auth]\ntoken_file = "tokens"\n'
        '[models.a]\ntarget = "app.py:A"\n[models.b]\ntarget = "pkg.mod:B"\n[models.c]\ntarget = "/x/app.py:C"\n'
        '[models.e]\ntarget = "net.ONNX"\n[models.f]\ntarget = "net.py:Net"\nweights = "deep/net.pt"\n'
        'labels = {y = "names.txt"}\n'
    )
    folder = os.path.dirname(path)
    with open(os.path.join(folder, "tokens"), "w") as file:
        os.chmod(file.fileno(), 0o600)
        file.write("secret\n")
    config = load_config(path, env={}, sets=["models.d.target=app.py:D"])
    assert config.auth.token_file == os.path.join(folder, "tokens")
    assert {name: model.target for name, model in config.models.items()} == {
        "a": os.path.join(folder, "app.py:A"),
        "b": "pkg.mod:B",
        "c": "/x/app.py:C",
        "d": "app.py:D",
        "e": os.path.join(folder, "net.ONNX"),
        "f": os.path.join(folder, "net.py:Net"),
    }
    assert config.models["f"].weights == os.path.join(folder, "deep/net.pt")
    assert config.models["f"].labels == {"y": os.path.join(folder, "names.txt")}
