"""TorchServe's config.properties: every key with its type and default, the sources of values, and the addresses."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct, field, structs

from penstock.config.checks import UNIX, is_loopback
from penstock.config.schema import Count, Port, Positive, Seconds
from penstock.errors import ConfigError, nearest
from penstock.torchserve.protocol.api import Group
from penstock.values import bare, convert

log = logging.getLogger("penstock.torchserve")

Minutes = Annotated[float, Meta(gt=0, le=2**31 - 1)]
Models = dict[str, dict[str, dict[str, Any]]]

ANY_URL: Final = "file://.*|http(s)?://.*"
_PORTS: Final = {  # the defaults of TorchServe 0.12.0
    "inference": {"http": 80, "https": 443},
    "management": {"http": 8081, "https": 8444},
    "metrics": {"http": 8082, "https": 8445},
}
_ADDRESS = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.%]+\]|[^:/\s\[\]]+)(?::([0-9]{1,9}))?/?", re.IGNORECASE)


# ---- addresses


class ListenerAddress(Struct, frozen=True):
    """Host and port, or the host `unix:PATH`. Groups with equal addresses share a listener."""

    host: str
    port: int = 0
    scheme: str = "http"

    @property
    def unix(self) -> bool:
        return self.host.startswith(UNIX)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.host if self.unix else f"{self.scheme}://{host}:{self.port}"


def parse_address(group: str, text: str) -> ListenerAddress:
    """The address of the "inference", "management" or "metrics" listener. Raises ConfigError."""
    if text.startswith(UNIX):
        path = re.sub(r"^//(?=/)", "", text.removeprefix(UNIX))  # unix:///path means the same
        if not path:
            raise ConfigError(f"{group}_address: found {text!r}, expected a path after unix:")
        return ListenerAddress(UNIX + path)
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{group}_address: found {text!r}, expected http://host:port, https://host:port or unix:/path"
        )
    scheme = (match[1] or "http").lower()
    port = int(match[3]) if match[3] else _PORTS[group][scheme]
    if port > 65535:
        raise ConfigError(f"{group}_address: found port {port}, expected 0 to 65535")
    return ListenerAddress(match[2].strip("[]"), port, scheme)


# ---- keys


class _IgnoredProperties(Struct, frozen=True, kw_only=True):
    """Keys without effect: they configure the JVM, netty, or features that are not supported."""

    number_of_netty_threads: Count = 0
    netty_client_threads: Count = 0
    prefer_direct_buffer: bool = False
    use_native_io: bool = True
    io_ratio: Count = 50
    vmargs: str | None = None
    async_logging: bool = False
    debug: bool = False
    plugins_path: str | None = None
    model_server_home: str | None = None
    cpp_log_config: str | None = None
    cpu_launcher_enable: bool = False
    cpu_launcher_args: str | None = None
    ipex_enable: bool = False
    ipex_gpu_enable: bool = False
    initial_distribution_port: Port = 29500


class Properties(_IgnoredProperties, frozen=True, kw_only=True):
    """The keys of config.properties. Units are the file's; None means not set.

    `allowed_urls` are regular expressions that match a whole URL. `models` is {name: {version: {key: value}}}.
    """

    inference_address: str = "http://127.0.0.1:8080"
    management_address: str = "http://127.0.0.1:8081"
    metrics_address: str = "http://127.0.0.1:8082"
    grpc_inference_address: str = "127.0.0.1"
    grpc_management_address: str = "127.0.0.1"
    grpc_inference_port: Port = 7070
    grpc_management_port: Port = 7071
    grpc_inference_max_connection_age_ms: Positive | None = None
    grpc_management_max_connection_age_ms: Positive | None = None
    grpc_inference_max_connection_age_grace_ms: Positive | None = None
    grpc_management_max_connection_age_grace_ms: Positive | None = None
    enable_grpc_ssl: bool = False
    model_store: str | None = None
    workflow_store: str | None = None  # None: the model store
    load_models: list[str] = field(default_factory=list)
    models: Annotated[Models, Meta(title="{name: {version: {key: value}}}")] = field(default_factory=dict)
    model_snapshot: dict[str, Any] | None = None
    default_workers_per_model: Count = 0
    default_response_timeout: Positive = 120  # s
    default_startup_timeout: Positive = 120  # s
    unregister_model_timeout: Count = 120  # s
    job_queue_size: Positive = 100
    number_of_gpu: Count | None = None  # None: all
    max_request_size: Positive = 6553500
    max_response_size: Positive = 6553500
    limit_max_image_pixels: bool = True
    decode_input_request: bool = True
    service_envelope: str | None = None
    default_service_handler: str | None = None
    allowed_urls: list[str] = field(default_factory=lambda: [ANY_URL])
    use_env_allowed_urls: bool = False
    install_py_dep_per_model: bool = False
    blacklist_env_vars: str | None = None
    enable_model_api: bool = False
    disable_token_authorization: bool = False
    token_expiration_min: Minutes = 60.0
    enable_metrics_api: bool = True
    metrics_mode: Literal["log", "prometheus", "legacy"] = "log"
    metrics_config: str | None = None
    model_metrics_auto_detect: bool = False
    disable_system_metrics: bool = False
    system_metrics_cmd: str | None = None
    metric_time_interval: Positive = 60  # s
    keystore: str | None = None
    keystore_pass: str = "changeit"
    keystore_type: str = "PKCS12"
    private_key_file: str | None = None
    certificate_file: str | None = None
    cors_allowed_origin: str = ""
    cors_allowed_methods: str = ""
    cors_allowed_headers: str = ""
    ts_open_inference_protocol: bool = False
    initial_worker_port: Port = 9000
    enable_envvars_config: bool = False
    # Penstock's own.
    ts_yaml_wins: bool = False
    """model-config.yaml overrides the parameters of a request, as in TorchServe's code."""
    console_metrics: bool = True
    """A line on stdout for each value of a metric, as TorchServe prints it."""
    access_log: bool = False
    """One line per request in access_log.log."""
    ready_ping: bool = False
    """/ping is unhealthy until the models are loaded, for readiness probes."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names in the Host header that management accepts without tokens, besides localhost and IP addresses."""
    tracing_endpoint: str | None = None
    tracing_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    tracing_max_per_s: Seconds = 50.0
    tracing_service: str = "penstock"
    """As `[tracing]` of `penstock serve`."""
    ts_header_key_sequence_id: str = "ts_request_sequence_id"
    ts_header_key_sequence_start: str = "ts_request_sequence_start"
    ts_header_key_sequence_end: str = "ts_request_sequence_end"
    # From the environment only.
    log_location: str = "logs"
    metrics_location: str = "logs"

    def address(self, group: str) -> ListenerAddress:
        """The address of the "inference", "management" or "metrics" listener. Raises ConfigError."""
        return parse_address(group, getattr(self, f"{group}_address"))


class Property(Struct, frozen=True):
    """One key with its value and its first line (from 1)."""

    key: str
    value: str
    line: int


class ListenerConfig(Struct, frozen=True):
    """The groups that one listener serves, and the keys that determine its routes and headers."""

    groups: frozenset[Group]
    properties: Properties

    @property
    def codec(self) -> str:
        return "torchserve" if self.properties.decode_input_request else "torchserve_raw"

    @property
    def open(self) -> bool:
        """Whether any program of this machine may call, and therefore any web page in its browsers."""
        addresses = [self.properties.address(group) for group in self.groups]
        local = all(is_loopback(address.host) and not address.unix for address in addresses)
        return self.properties.disable_token_authorization and local


# ---- reading

IGNORED: Final = frozenset(_IgnoredProperties.__struct_fields__)
_ENVIRONMENT: Final = {"log_location": "LOG_LOCATION", "metrics_location": "METRICS_LOCATION"}
_VARIABLES: Final = {"token_expiration_min": "TS_TOKEN_EXPIRATION_TIME_MIN"}  # all others: TS_ and the key
_LENIENT: Final = frozenset(  # TorchServe starts with any integer
    {"number_of_gpu", "metric_time_interval", "unregister_model_timeout", "token_expiration_min", "initial_worker_port"}
)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_SILENT: Final = frozenset({"version", "tsConfigFile", "name", "modelCount", "created"})  # other keys of snapshots
_BLANK: Final = " \t\f"
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_LINE = re.compile(r"((?:\\.|[^\\=: \t\f])*+\\?)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)  # key, value
_ESCAPED = re.compile(r"\\(u.{0,4}|.?)", re.DOTALL)
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_VARIABLE = re.compile(r"\$\$(\w+)\$\$")


def load_properties(path: str | None, *, env: Mapping[str, str], flags: Mapping[str, str] | None = None) -> Properties:
    """The properties of the file (None: defaults), overridden by `flags` and, if the file allows it, by `env`.

    Raises ConfigError with file, line, and the found and expected values. One warning lists the unknown keys, another
    the keys without effect.
    """
    found = read_properties(path) if path is not None else {}
    resolved = {key: _with_variables(path, each, env) for key, each in found.items()}
    values = {key: (value, f"{path}:{found[key].line}") for key, value in resolved.items()}
    for key, value in (flags or {}).items():
        values[key] = (value, f"--{key.replace('_', '-')}")
    _add_environment(values, env)
    _warn_unused(path, values)
    return _typed(values, env)


def read_properties(path: str) -> dict[str, Property]:
    """The keys of a .properties file, with `$$NAME$$` unresolved. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(2**24 + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected one such as config.properties") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > 2**24:
        raise ConfigError(f"{path}: found more than 16 MiB, expected a file such as config.properties")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")  # as in Java
    return parse_properties(text, path)


def _with_variables(path: str | None, each: Property, env: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        if match[1] not in env:
            raise ConfigError(
                f"{path}:{each.line}: {each.key}: found $${match[1]}$$, but the environment has no variable"
                f" {match[1]}; set it before starting"
            )
        return env[match[1]]

    return _VARIABLE.sub(value_of, each.value)


def _add_environment(values: dict[str, tuple[str, str]], env: Mapping[str, str]) -> None:
    def on(key: str) -> bool:
        return values.get(key, ("", ""))[0].strip().lower() == "true"

    if on("enable_envvars_config"):
        for key in Properties.__struct_fields__:
            name = _VARIABLES.get(key, f"TS_{key.removeprefix('ts_').upper()}")
            if name in env and key not in _ENVIRONMENT and (key != "allowed_urls" or on("use_env_allowed_urls")):
                values[key] = (env[name], f"environment variable {name}")
    protocol = "TS_OPEN_INFERENCE_PROTOCOL"  # this variable only enables the protocol
    if env.get(protocol, "").strip().lower() in ("oip", "true"):
        values["ts_open_inference_protocol"] = ("true", f"environment variable {protocol}")


def _warn_unused(path: str | None, values: Mapping[str, tuple[str, str]]) -> None:
    ignored = sorted(IGNORED & values.keys())
    if ignored:
        log.warning("file=%s ignored=%s consequence=these_keys_have_no_effect", path, ",".join(ignored))
    known = set(Properties.__struct_fields__) - _ENVIRONMENT.keys()
    unknown = [key for key in values if key not in known and key not in _SILENT]
    if unknown:
        places = "; ".join(f"{values[key][1]} '{key}'{nearest(key, known).lstrip(';')}" for key in unknown)
        log.warning("unknown_keys=%d consequence=they_have_no_effect at: %s", len(unknown), places)


def _typed(values: Mapping[str, tuple[str, str]], env: Mapping[str, str]) -> Properties:
    typed: dict[str, Any] = {key: env[name] for key, name in _ENVIRONMENT.items() if env.get(name)}
    for each in structs.fields(Properties):
        if each.name in values and each.name not in _ENVIRONMENT:
            value, where = values[each.name]
            try:
                typed[each.name] = _value(value, each.type, f"{where}: {each.name}")
            except ConfigError as error:
                if each.name not in _LENIENT or not _INTEGER.fullmatch(value.strip()):
                    raise
                log.warning("event=number_replaced %s used=the default", error.message)
    properties = Properties(**typed)
    for group in ("inference", "management", "metrics"):
        try:
            properties.address(group)
        except ConfigError as error:
            raise ConfigError(f"{values[f'{group}_address'][1]}: {error.message}") from None
    return properties


def _value(text: str, kind: Any, where: str) -> Any:
    """The text as a value of the key's type. Raises ConfigError, which begins with `where`."""
    text = text.strip()
    plain = bare(kind)
    if plain is bool:
        if text.lower() not in ("true", "false", ""):
            log.warning("%s: found %r, expected true or false; as in TorchServe, this means false", where, text)
        return text.lower() == "true"
    if plain == list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]
    if plain is str:
        return text
    if plain == Models or dict[str, Any] in get_args(plain):
        return _json(text, kind, where)
    if str in get_args(plain):
        return text or None
    return convert(text, kind, where, loose=True)


def _json(text: str, kind: Any, where: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not valid JSON: {error}; expected {{...}}, with a \\ at the end of continued lines"
        ) from None
    return convert(value, kind, where)


# ---- the format of Java's .properties files; source: java.util.Properties


def parse_properties(text: str, source: str) -> dict[str, Property]:
    """The keys of the text; the last value of a repeated key counts. Raises ConfigError with `source` and line."""
    found: dict[str, Property] = {}
    for number, line in _logical_lines(text):
        match = _LINE.fullmatch(line)
        assert match is not None  # each part may be empty
        key, value = (_unescape(part, f"{source}:{number}") for part in match.groups())
        found[key] = Property(key, value, number)
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of each logical line: continuation lines are joined, comments and blank lines skipped."""
    parts: list[str] = []
    first = 0
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = raw.lstrip(_BLANK)
        if not parts:
            if not line or line[0] in "#!":
                continue
            first = number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            parts.append(line[:-1])
            continue
        yield first, "".join([*parts, line])
        parts = []
    if parts:  # the last line ends with a continuation
        yield first, "".join(parts)


def _unescape(text: str, where: str) -> str:
    def character(match: re.Match[str]) -> str:
        escaped = match[1]
        if escaped[:1] != "u":
            return _ESCAPES.get(escaped, escaped)
        if not _HEX4.fullmatch(escaped[1:]):
            raise ConfigError(f"{where}: found \\{escaped}, expected four hexadecimal digits after \\u")
        return chr(int(escaped[1:], 16))

    plain = _ESCAPED.sub(character, text)
    # Characters beyond 16 bits are surrogate pairs.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
