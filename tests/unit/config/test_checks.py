"""Contradicting keys, unusable files and open listeners are refused before a listener is bound."""

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.config.checks import (
    check_bind,
    check_config,
    check_model,
    is_loopback,
    read_labels,
    read_tokens,
    thrift_model,
    tokens_for,
)
from penstock.config.schema import (
    AuthConfig,
    AutoscaleConfig,
    BatchingConfig,
    Config,
    LimitsConfig,
    ModelConfig,
    RayConfig,
    ServerConfig,
)
from penstock.errors import ConfigError


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text("# the first team\none\n\n  two  \n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (
            "allowed_hosts",
            ("api.example.com", "*.example.com", "*", "box_1"),
            ("", "a b", "a:80", "http://a", "a.*", ".a", "**"),
        ),
        (
            "cors_origins",
            ("https://app.example.com", "http://localhost:3000", "*", "null", "chrome-extension://abc"),
            ("", "app.example.com", "https://app.example.com/", "https://a b", "https://"),
        ),
    ],
)
def test_hosts_and_origins_have_their_form(key: str, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    check_config(Config(server=ServerConfig(**{key: good})))
    for each in bad:
        with pytest.raises(ConfigError, match=rf"server.{key}: found .*, expected for example"):
            check_config(Config(server=ServerConfig(**{key: ("*", each)})))


def test_a_token_file_has_one_token_per_line_and_comments(tokens: str) -> None:
    assert read_tokens(tokens, "auth.token_file") == ["one", "two"]


def test_a_listener_accepts_its_own_tokens_and_the_common_ones(tokens: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("three\n")
    config = Config(auth=AuthConfig(token_file=tokens, metrics_token_file=str(own)))
    assert tokens_for(config, "metrics") == {b"one", b"two", b"three"}
    assert tokens_for(config, "inference") == {b"one", b"two"}
    assert tokens_for(Config(), "inference") == frozenset()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no token"),
        (b"\n# only a remark\n", "holds no token"),
        (b"two words\n", "a token with spaces"),
        (b"\xff\n", "not ASCII"),
    ],
)
def test_an_unusable_token_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as info:
        check_config(Config(auth=AuthConfig(management_token_file=str(path))))
    assert info.value.message.startswith(f"auth.management_token_file: {path}")


def test_a_token_file_that_others_can_read_causes_a_warning(tokens: str, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(auth=AuthConfig(token_file=tokens))
    with caplog.at_level(logging.WARNING, "penstock.config"):
        check_config(config)
        assert caplog.text == ""
        Path(tokens).chmod(0o644)
        check_config(config)
    assert "auth.token_file" in caplog.text


@pytest.mark.parametrize("key", ["host", "management_host", "metrics_host"])
def test_an_open_listener_without_a_guard_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"server.{key}: found '0.0.0.0'.*token_file.*--insecure"):
        check_bind(Config(server=ServerConfig(**{key: "0.0.0.0"})))


def test_an_open_listener_is_allowed_with_a_token_client_certificates_or_insecure(tokens: str) -> None:
    server = ServerConfig(metrics_host="0.0.0.0")
    check_bind(Config(server=server), insecure=True)
    check_bind(Config(server=ServerConfig(metrics_host="0.0.0.0", insecure=True)))
    check_bind(Config(server=ServerConfig(metrics_host="0.0.0.0", tls_client_ca="ca.pem")))
    check_bind(Config(server=server, auth=AuthConfig(token_file=tokens)))
    check_bind(Config(server=server, auth=AuthConfig(metrics_token_file=tokens)))
    with pytest.raises(ConfigError, match="metrics_host"):
        check_bind(Config(server=server, auth=AuthConfig(inference_token_file=tokens)))


def test_a_thrift_listener_without_a_guard_is_refused(tokens: str) -> None:
    check_bind(Config(server=ServerConfig(thrift_host="0.0.0.0")))  # there is none
    check_bind(Config(server=ServerConfig(thrift_port=0)))
    with pytest.raises(ConfigError, match=r"server.thrift_host: found '0.0.0.0'.*no token; set server.tls_client_ca"):
        check_bind(Config(server=ServerConfig(thrift_host="0.0.0.0", thrift_port=0)))
    guarded = Config(server=ServerConfig(thrift_port=0), auth=AuthConfig(inference_token_file=tokens))
    with pytest.raises(ConfigError, match=r"server.thrift_port: found with tokens that guard the inference listener"):
        check_bind(guarded)
    check_bind(guarded, insecure=True)
    check_bind(Config(server=ServerConfig(thrift_host="0.0.0.0", thrift_port=0, tls_client_ca="ca.pem")))


def test_thrift_model_selects_the_model_that_answers_thrift_calls() -> None:
    one = {"a": ModelConfig(target="x:A"), "b": ModelConfig(target="x:B", name="a", version="2")}
    two = {**one, "c": ModelConfig(target="x:C")}
    port = ServerConfig(thrift_port=0)
    assert thrift_model(Config(models=two)) == ""
    assert thrift_model(Config(server=port, models=one)) == "a"
    assert thrift_model(Config(server=ServerConfig(thrift_port=0, thrift_model="c"), models=two)) == "c"
    with pytest.raises(ConfigError, match=r"server.thrift_model: not set, and there are the models a, c"):
        check_config(Config(server=port, models=two))
    wrong = ServerConfig(thrift_port=0, thrift_model="resnt")
    with pytest.raises(ConfigError, match=r"server.thrift_model: there is no model 'resnt'; did you mean 'resnet'\?"):
        check_config(Config(server=wrong, models={"resnet": ModelConfig(target="x:A")}))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def models(**sections: dict[str, object]) -> Config:
    return Config(models={name: ModelConfig(target="a:b", **keys) for name, keys in sections.items()})  # type: ignore[arg-type]


NO_VERSION = r"models.m.version: found .*, expected at most 128 letters"
NO_DEVICE = r"m.devices: found .*, expected for example cpu, cuda \(all GPUs\), cuda:0"
WRONG_VERSIONS = ("scale", "default", "traffic", "a/b", "", "v" * 129, "-1", "1\n")
WRONG_DEVICES = (
    "cuda:x", "cuda:-1", "cuda:", "cuda:1:2", "", "0", "cuda:0,cuda:1", "cuda:0 ", "gpu", "gpu:0", "GPU:0", "CUDA:0"
)  # fmt: skip
REFUSED: list[tuple[Config, str]] = [
    (
        Config(limits=LimitsConfig(max_body_bytes=11, pool_bytes=10)),
        r"max_body_bytes: found 11, .* limits.pool_bytes \(10\); raise pool_bytes",
    ),
    (Config(server=ServerConfig(tls_cert="a.pem")), r"server.tls_cert: found without server.tls_key"),
    (Config(server=ServerConfig(tls_key="a.pem")), r"server.tls_key: found without server.tls_cert"),
    (Config(server=ServerConfig(tls_client_ca="a.pem")), r"server.tls_client_ca: found without server.tls_cert"),
    (Config(server=ServerConfig(tls_cert="/no/c.pem", tls_key="k.pem")), r"server.tls_cert: no such file: .*c.pem"),
    (Config(server=ServerConfig(model_store="/no")), r"server.model_store: there is no folder"),
    (Config(auth=AuthConfig(token_file="/no")), r"auth.token_file: no such file"),
    (Config(auth=AuthConfig(token_file="/")), r"auth.token_file: .* cannot be read"),
    *[(models(m={"version": version}), NO_VERSION) for version in WRONG_VERSIONS],
    *[(models(m={"devices": ("cpu", device)}), NO_DEVICE) for device in WRONG_DEVICES],
    (models(m={}, n={"name": "m"}), r"models.n.version: found '1', which models.m already has"),
    (models(m={"traffic": {"1": 0.9, "2": 0.1}}), r"models.m.traffic: there is no version '2'; there are 1"),
    (models(m={"traffic": {"1": 0.9}}), r"models.m.traffic: the weights add up to 0.9, expected 1"),
    (models(m={"traffic": {"1": 1.1}}), r"found 1.1 for version '1', expected a number from 0 to 1"),
    (
        models(m={"traffic": {"1": 1.0}}, n={"name": "m", "version": "2", "traffic": {"2": 1.0}}),
        r"models.n.traffic: models.m.traffic decides on the requests without a version already; set one",
    ),
    (models(m={"default": True}, n={"name": "m", "version": "2", "default": True}), r"n.default: models.m.default dec"),
    (models(m={"default": True, "traffic": {"1": 1.0}}), r"models.m.default: models.m.traffic decides"),
    (models(m={"instances": 65}), r"models.m.instances: found 65, more than limits.max_instances \(64\)"),
    (models(m={"autoscale": AutoscaleConfig(max=65)}), r"models.m.autoscale.max: found 65, more than limits"),
    (
        models(**{f"m{n}": {} for n in range(257)}),
        r"models: found 257 sections, more than limits.max_versions \(256\)",
    ),
    (
        models(m={"autoscale": AutoscaleConfig(min=3, max=2)}),
        r"autoscale.min: found 3, expected at most autoscale.max \(2\)",
    ),
    (models(m={"autoscale": AutoscaleConfig(max=2, spare=2)}), r"autoscale.spare: found 2, expected fewer than"),
    (models(m={"autoscale": AutoscaleConfig(spare=2)}), r"autoscale.max: found none, expected the most instances"),
    *(
        (
            models(m={"autoscale": AutoscaleConfig(max=2, schedule={text: 1})}),
            r"autoscale.schedule: found '.*', expected a time of day such as 07:30",
        )
        for text in ("7.30", "24:00", "07:30:00", "mon 07:30", "")
    ),
    (
        models(m={"autoscale": AutoscaleConfig(max=2, schedule={"07:30": 3})}),
        r"autoscale.schedule: found 3 from 07:30 on, expected at most autoscale.max \(2\)",
    ),
    (
        models(m={"autoscale": AutoscaleConfig(max=2, timezone="UTC")}),
        r"autoscale.timezone: found 'UTC' without autoscale.schedule",
    ),
    *(
        (
            models(m={"autoscale": AutoscaleConfig(max=2, schedule={"07:30": 2}, timezone=zone)}),
            r"autoscale.timezone: found .*, which this machine does not know; expected a zone such as Europe/Berlin",
        )
        for zone in ("Europe/Berlim", "Europe", "../../etc/passwd", "")
    ),
    (models(m={"autoscale": AutoscaleConfig(min=2)}), r"autoscale.max: found none, expected the most instances"),
    (
        models(m={"autoscale": AutoscaleConfig(min=2, max=3), "instances": 4}),
        r"instances: found 4, expected autoscale.min to",
    ),
    (
        models(m={"autoscale": AutoscaleConfig(max=3, slo_s=1, target_wait_s=1)}),
        r"autoscale: found slo_s and target_wait_s",
    ),
    (
        models(m={"autoscale": AutoscaleConfig(max=2), "transport": "inline"}),
        r"the inline transport runs one instance",
    ),
    (
        models(m={"autoscale": AutoscaleConfig(max=2), "batching": BatchingConfig(max_sequences=4)}),
        r"an instance that leaves would end the sequences on it",
    ),
    (
        models(m={"transport": "inline", "instances": 2}),
        r"models.m.instances: found 2, but the inline transport runs one instance",
    ),
    (
        models(net={"transport": "ray", "instances": "auto"}),
        "instances: found 'auto'.*with transport = 'ray' give a number",
    ),
    (
        models(net={"transport": "ray", "max_memory_bytes": 10}),
        "max_memory_bytes: found 10, but the ray transport has no",
    ),
    (models(m={"preprocess_processes": -1}), "models.m.preprocess_processes: found -1, expected 0 to 1024"),
    (models(m={"preprocess_processes": 1025}), "models.m.preprocess_processes: found 1025, expected 0 to 1024"),
    (
        models(m={"transport": "inline", "preprocess_processes": 2}),
        "models.m.preprocess_processes: found 2, but the inline transport runs on the event loop",
    ),
    (models(net={"ray": RayConfig(num_gpus=1)}), "ray: .ray. keys require transport = 'ray'"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words[:50] for _, words in REFUSED])
def test_a_contradiction_is_refused_with_its_keys(config: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(config)


def test_a_model_store_a_pool_as_large_as_a_body_and_one_inline_instance_are_accepted(tmp_path: Path) -> None:
    check_config(Config(server=ServerConfig(model_store=str(tmp_path))))
    check_config(Config(limits=LimitsConfig(max_body_bytes=10, pool_bytes=10)))
    check_config(models(m={"transport": "inline"}, n={"transport": "inline", "instances": "auto"}))


def test_sections_with_one_name_are_versions_that_may_share_traffic() -> None:
    check_config(models(m={"traffic": {"1": 0.9, "2": 0.1}}, n={"name": "m", "version": "2"}, o={}))


def test_a_device_is_a_kind_with_an_optional_number() -> None:
    check_config(models(m={"devices": ("cpu", "cuda", "cuda:0", "cuda:15", "mps", "GPU.1", "GPU", "xpu:2")}))


@pytest.mark.parametrize("text", ["", "FP32", "FP32[]", "FP32[3]", "FP31[-1]", "FP32[-1,x]", "FP32[-1,-2]", "[-1]"])
@pytest.mark.parametrize("key", ["inputs", "outputs"])
def test_an_invalid_tensor_is_refused_with_its_key(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf'models\.m\.{key}\.x: found .*such as "FP32\[-1,3,224,224\]"'):
        check_model(ModelConfig(target="net.ts", **{key: {"x": text}}), "models.m.")


def test_instances_that_a_program_sets_are_bounded_before_devices_are_assigned() -> None:
    for wrong in (0, -1, 5000, 10**9, 1e30):
        with pytest.raises(ConfigError, match=r"instances: found .*, expected 1 to 4096 or 'auto'"):
            check_model(ModelConfig(target="a.py:M", instances=wrong))  # type: ignore[arg-type]


def test_labels_are_the_lines_of_a_file_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    for data, lines in (
        ("cat\ndog", ("cat", "dog")),
        ("a:b\r\n\n  é \n", ("a:b\r", "", "  é ", "")),
        ("", ("",)),
        ("x" * 9 + "\n", ("x" * 9, "")),
    ):
        file.write_bytes(data.encode())
        assert read_labels(str(file), "labels.y") == lines
    file.write_bytes(b"0123456789abcde\n" * 655_360)
    assert len(read_labels(str(file), "labels.y")) == 655_361
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"labels.y: .*labels.txt is not UTF-8 at byte 3"):
        read_labels(str(file), "labels.y")
    with pytest.raises(ConfigError, match=r"labels.y: .*/dev/zero has more than \d+ bytes"):
        read_labels("/dev/zero", "labels.y")
    with pytest.raises(ConfigError, match=r"labels.y: no such file: .*none"):
        read_labels(str(tmp_path / "none"), "labels.y")


def test_only_worker_processes_can_be_replaced_and_have_variables() -> None:
    for key, value in (("max_requests", 10), ("max_memory_bytes", 10), ("env", {"A": "1"})):
        check_model(ModelConfig(target="a.py:M", **{key: value}))
        for transport in ("inline", "thread"):
            told = f"{key}: found {value}, but the {transport} transport has no worker"
            with pytest.raises(ConfigError, match=told):
                check_model(ModelConfig(target="a.py:M", transport=transport, **{key: value}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sizes": ()}, r"found \[\], expected ascending whole numbers from 1"),
        ({"sizes": (8, 4)}, r"found \[8, 4\], expected ascending"),
        ({"sizes": (4, 4)}, r"found \[4, 4\], expected ascending"),
        ({"sizes": (0, 4)}, r"found \[0, 4\], expected ascending"),
        ({"sizes": (1.5,)}, r"found \[1\.5\], expected ascending"),
        ({"sizes": (1, 64), "max_batch_size": 32}, r"found \[1, 64\] with max_batch_size = 32; the last size is the"),
        ({"sizes": (1, 16), "max_batch_size": 32}, r"end the list with 32, or leave max_batch_size out"),
        ({"sizes": (1, 16), "rows": "none"}, r'with rows = "none", which runs one request at a time'),
        ({"sizes": "auto", "max_sequences": 4}, r"found with max_sequences = 4, whose batches cannot be padded"),
        ({"sizes": (1, 4), "concurrency": 4}, r"found with concurrency = 4, whose"),
        ({"sizes": (1, 4), "mode": "continuous"}, r"found with mode = continuous, whose"),
    ],
)
def test_sizes_that_are_no_ladder_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"models\.m\.batching\.sizes: .*{said}"):
        check_config(Config(models={"m": ModelConfig(target="a:b", batching=BatchingConfig(**keys))}))


def test_sizes_may_end_with_the_largest_batch() -> None:
    for keys in ({"sizes": (1, 32), "max_batch_size": 32}, {"sizes": (7,)}, {"sizes": "auto", "max_batch_size": 48}):
        check_model(ModelConfig(target="a:b", batching=BatchingConfig(**keys)))  # type: ignore[arg-type]
