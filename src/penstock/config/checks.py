"""Checks across keys: contradicting bounds, missing files, unguarded listeners, traffic weights and tokens."""

import ipaddress
import logging
import math
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.config import schema
from penstock.config.inputs import input_texts
from penstock.errors import ConfigError, ErrorList, nearest
from penstock.values import SIZE_UNITS, quantity, shorten, tensor_specs

log = logging.getLogger("penstock.config")

LISTENERS = ("inference", "management", "metrics")
ROUTES: Final = ("scale", "default", "traffic")  # follow a model name in a URL, so no version can have these names
MOST_PASSWORD_BYTES: Final = 1024  # of a key, for Python's ssl
MOST_LABEL_BYTES: Final = 64 * 2**20  # a choice: far above the names of any classes
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
_DAY_TIME = re.compile(r"([01]?\d|2[0-3]):[0-5]\d", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
# GPUs are cuda here; GPU and GPU.0 are names of OpenVINO
_DEVICE = re.compile(
    r"(?!gpu$|(?i:gpu|cuda):(?<!cuda:))[A-Za-z][A-Za-z0-9._-]*(:([0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,100}))?"
)


def check_config(config: schema.Config) -> None:
    """Raises ConfigError, with all reasons, if two keys contradict each other or a named file cannot serve."""
    errors = ErrorList()
    _check_models(config, errors)
    with errors:
        device_budgets(config.devices)
    for check in (thrift_model, _check_pool, _check_tls, _check_store):
        with errors:
            check(config)
    for key in config.auth.__struct_fields__:
        with errors:
            _check_tokens(getattr(config.auth, key), f"auth.{key}")
    errors.check()


def _check_pool(config: schema.Config) -> None:
    limits = config.limits
    if limits.max_body_bytes > limits.pool_bytes:
        raise ConfigError(
            f"limits.max_body_bytes: found {limits.max_body_bytes}, which is more than limits.pool_bytes"
            f" ({limits.pool_bytes}); raise pool_bytes to at least the same, or lower max_body_bytes"
        )


def _check_tls(config: schema.Config) -> None:
    server = config.server
    if (server.tls_cert is None) != (server.tls_key is None):
        here, absent = ("tls_cert", "tls_key") if server.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError(f"server.{here}: found without server.{absent}; set both, or neither")
    for key in ("tls_client_ca", "tls_password_file"):
        if getattr(server, key) is not None and server.tls_cert is None:
            raise ConfigError(f"server.{key}: found without server.tls_cert and server.tls_key; set all three")
    for key, pattern, example in (
        ("allowed_hosts", _HOST, "api.example.com, *.example.com or *, without scheme and port"),
        ("cors_origins", _ORIGIN, "https://app.example.com, http://localhost:3000 or *, without a path"),
    ):
        for found in getattr(server, key):
            if not pattern.fullmatch(found):
                raise ConfigError(f"server.{key}: found {shorten(found, 100)!r}, expected for example {example}")
    for key in ("tls_cert", "tls_key", "tls_client_ca"):
        if (path := getattr(server, key)) is not None:
            _read(path, f"server.{key}")
    if server.tls_password_file is not None:
        read_password(server.tls_password_file, "server.tls_password_file")


def _check_store(config: schema.Config) -> None:
    store = config.server.model_store
    if store is not None and not os.path.isdir(store):
        raise ConfigError(f"server.model_store: there is no folder {store}")


def _check_tokens(path: str | None, key: str) -> None:
    if path is None:
        return
    read_tokens(path, key)
    if os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("key=%s file=%s mode=readable_by_others consequence=tokens_are_known", key, path)


def thrift_model(config: schema.Config) -> str:
    """The model that answers Thrift calls; "" without a Thrift listener. Raises ConfigError for an unknown model."""
    if config.server.thrift_port is None:
        return ""
    names = list(dict.fromkeys(model.name or section for section, model in config.models.items()))
    model = config.server.thrift_model
    if model is None:
        if len(names) > 1:
            raise ConfigError(
                f"server.thrift_model: not set, and there are the models {', '.join(names)}; a Thrift call names no"
                " model, so set the one that answers"
            )
        return names[0] if names else ""
    if model not in names:
        raise ConfigError(f"server.thrift_model: there is no model '{model}'{nearest(model, names)}")
    return model


def _check_models(config: schema.Config, errors: ErrorList) -> None:
    """Sections with the same name are versions of one model; at most one of them is the default or sets its traffic."""
    versions: dict[str, dict[str, str]] = {}
    limits, most = config.limits, config.limits.max_instances
    with errors:
        if len(config.models) > limits.max_versions:
            found = len(config.models)
            raise ConfigError(f"models: found {found} sections, more than limits.max_versions ({limits.max_versions})")
    for section, model in config.models.items():
        with errors:
            check_model(model, f"models.{section}.")
        known = versions.setdefault(model.name or section, {})
        with errors:
            if model.version in known:
                raise ConfigError(
                    f"models.{section}.version: found '{model.version}', which models.{known[model.version]} already"
                    " has; give every version of a model its own"
                )
        known[model.version] = section
        with errors:
            for key, value in (("instances", model.instances), ("autoscale.max", model.autoscale.max)):
                if isinstance(value, int) and value > most:
                    raise ConfigError(f"models.{section}.{key}: found {value}, more than limits.max_instances ({most})")
    deciding: dict[str, str] = {}  # the key that decides on a model's requests without a version
    for section, model in config.models.items():
        name = model.name or section
        for key in ("traffic", "default"):
            with errors:
                this = f"models.{section}.{key}"
                if getattr(model, key) and (first := deciding.setdefault(name, this)) != this:
                    raise ConfigError(f"{this}: {first} decides on the requests without a version already; set one")
        with errors:
            if model.traffic:
                check_traffic(f"models.{section}.traffic", model.traffic, versions[name])


def check_model(model: schema.ModelConfig, where: str = "") -> None:
    """Raises ConfigError for an invalid version, tensor, device or number of instances. `where` precedes the key."""
    if not _VERSION.fullmatch(model.version) or model.version in ROUTES:
        raise ConfigError(
            f"{where}version: found {shorten(model.version, 100)!r}, expected at most 128 letters, digits, '.', '_',"
            f" '+' and '-', starting with a letter or digit, and not {', '.join(ROUTES)}"
        )
    tensor_specs(input_texts(model.inputs, f"{where}inputs"), f"{where}inputs")
    tensor_specs(model.outputs, f"{where}outputs")
    for device in model.devices:
        if not _DEVICE.fullmatch(device):
            forms = "cpu, cuda (all GPUs), cuda:0, or another accelerator's name in its framework"
            raise ConfigError(f"{where}devices: found {shorten(device, 100)!r}, expected for example {forms}")
    if (
        model.instances != "auto" and not 1 <= model.instances <= schema.MOST_INSTANCES
    ):  # a caller in Python skips the schema
        raise ConfigError(f"{where}instances: found {model.instances}, expected 1 to {schema.MOST_INSTANCES} or 'auto'")
    if model.transport in schema.REMOTE and model.instances == "auto" and model.autoscale.max is None:
        raise ConfigError(
            f"{where}instances: found 'auto', which counts this machine's devices; with transport = '{model.transport}'"
            " give a number"
        )
    if model.transport != "ray" and model.ray != schema.RayConfig():
        raise ConfigError(f"{where}ray: [ray] keys require transport = 'ray'")
    if model.transport in ("inline", "thread", *schema.REMOTE):
        own = ("requirements", "python", "max_requests", "max_memory_bytes")
        for key in (*own, *(() if model.transport in schema.REMOTE else ("env",))):
            if getattr(model, key):
                raise ConfigError(
                    f"{where}{key}: found {getattr(model, key)}, but the {model.transport} transport has no worker"
                    " process of its own on this machine; use transport = 'process'"
                )
    if model.transport == "inline" and model.instances not in (1, "auto"):
        raise ConfigError(
            f"{where}instances: found {model.instances}, but the inline transport runs one instance, on the event loop;"
            " use transport = 'thread' or 'process' for more"
        )
    helpers = model.preprocess_processes
    if not 0 <= helpers <= schema.MOST_HELPERS:  # a caller in Python skips the schema
        raise ConfigError(f"{where}preprocess_processes: found {helpers}, expected 0 to {schema.MOST_HELPERS}")
    if helpers and model.transport == "inline":
        raise ConfigError(
            f"{where}preprocess_processes: found {helpers}, but the inline transport runs on the event loop, which"
            " cannot wait for helpers; use transport = 'process' or 'thread'"
        )
    _check_autoscale(model, where)
    schema.check_sizes(model.batching, f"{where}batching.")
    if model.residency.keep_alive_s is not None and (model.residency.pinned or model.autoscale.max is not None):
        why = "residency.pinned" if model.residency.pinned else "autoscale.max"
        raise ConfigError(f"{where}residency.keep_alive_s: a model with {why} never leaves; keep one of the two")


def device_budgets(devices: Mapping[str, int | str]) -> dict[str, int]:
    """The budgets of `[devices]` in bytes: whole numbers, or texts such as "40GiB" and "800MB". Raises ConfigError."""
    found = {}
    for device, value in devices.items():
        if not _DEVICE.fullmatch(device) or device == "cuda":
            raise ConfigError(f"devices: found {shorten(device, 100)!r}, expected for example cpu or cuda:0")
        found[device] = value if isinstance(value, int) else int(quantity(value, SIZE_UNITS) or 0)
        if found[device] < 1:
            raise ConfigError(f'devices.{device}: found {value!r}, expected bytes above 0 such as "40GiB" or "800MB"')
    return found


def day_times(scale: schema.AutoscaleConfig, where: str = "") -> tuple[tuple[float, int], ...]:
    """The schedule as (seconds since midnight, least instances), in order. Raises ConfigError."""
    found = []
    for text, instances in scale.schedule.items():
        if not _DAY_TIME.fullmatch(text):
            raise ConfigError(
                f"{where}autoscale.schedule: found {shorten(text, 100)!r}, expected a time of day such as 07:30"
            )
        if scale.max is not None and instances > scale.max:
            raise ConfigError(
                f"{where}autoscale.schedule: found {instances} from {text} on, expected at most autoscale.max"
                f" ({scale.max})"
            )
        hours, minutes = text.split(":")
        found.append((int(hours) * 3600.0 + int(minutes) * 60.0, instances))
    return tuple(sorted(found))


def _check_schedule(scale: schema.AutoscaleConfig, where: str) -> None:
    day_times(scale, where)
    if scale.timezone is None:
        return
    if not scale.schedule:
        raise ConfigError(f"{where}autoscale.timezone: found {scale.timezone!r} without autoscale.schedule")
    try:
        ZoneInfo(scale.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(
            f"{where}autoscale.timezone: found {shorten(scale.timezone, 100)!r}, which this machine does not know;"
            " expected a zone such as Europe/Berlin (the package tzdata has them)"
        ) from None


def _check_autoscale(model: schema.ModelConfig, where: str) -> None:
    """Raises ConfigError for limits that contradict each other, or a model whose instances cannot come and go."""
    scale = model.autoscale
    if scale.max is None:
        if scale != schema.AutoscaleConfig():
            raise ConfigError(f"{where}autoscale.max: found none, expected the most instances that the load may start")
        return
    if scale.min > scale.max:
        raise ConfigError(f"{where}autoscale.min: found {scale.min}, expected at most autoscale.max ({scale.max})")
    if isinstance(model.instances, int) and model.instances != 1 and not scale.min <= model.instances <= scale.max:
        raise ConfigError(
            f"{where}instances: found {model.instances}, expected autoscale.min to max ({scale.min} to {scale.max});"
            " leave it out to start with autoscale.min"
        )
    if scale.spare >= scale.max and scale.spare:
        raise ConfigError(
            f"{where}autoscale.spare: found {scale.spare}, expected fewer than autoscale.max ({scale.max})"
        )
    _check_schedule(scale, where)
    if scale.slo_s is not None and scale.target_wait_s is not None:
        raise ConfigError(f"{where}autoscale: found slo_s and target_wait_s; keep one of them")
    if model.transport == "inline":
        raise ConfigError(f"{where}autoscale: the inline transport runs one instance; use 'process' or 'thread'")
    if scale.scale_to_zero and model.residency != schema.ResidencyConfig():
        raise ConfigError(
            f"{where}autoscale.scale_to_zero: found true beside [residency], with which its instances stay; keep one of"
            " the two"
        )
    if model.batching.max_sequences:
        raise ConfigError(
            f"{where}autoscale: an instance that leaves would end the sequences on it (batching.max_sequences);"
            " remove one of the two"
        )


def check_traffic(where: str, weights: Mapping[str, float], versions: Collection[str]) -> None:
    """Raises ConfigError unless each weight is from 0 to 1 and belongs to a known version, and they add up to 1."""
    for version, weight in weights.items():
        if version not in versions:
            raise ConfigError(
                f"{where}: there is no version '{shorten(version, 100)}'; there are {', '.join(versions)}"
            )
        if not 0 <= weight <= 1:
            raise ConfigError(f"{where}: found {weight} for version '{version}', expected a number from 0 to 1")
    total = math.fsum(weights.values())
    if abs(total - 1) > 1e-6:
        raise ConfigError(f"{where}: the weights add up to {total:.9g}, expected 1")


def tokens_for(config: schema.Config, listener: str) -> frozenset[bytes]:
    """The bearer tokens that open the listener ("inference", "management", "metrics"); empty if it requires none.

    Raises ConfigError for a missing, unreadable or empty token file: the listener would admit everyone or no one.
    """
    keys = ("token_file", f"{listener}_token_file")
    paths = {key: path for key in keys if (path := getattr(config.auth, key)) is not None}
    return frozenset(token.encode() for key, path in paths.items() for token in read_tokens(path, f"auth.{key}"))


def read_tokens(path: str, key: str) -> list[str]:
    """The tokens of a file, one per line, without blank lines and comments (#). `key` is for messages."""
    try:
        lines = _read(path, key).decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} holds bytes that are not ASCII, which no request can send") from None
    tokens = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not tokens:
        raise ConfigError(f"{key}: {path} holds no token; expected one per line")
    for token in tokens:
        if not token.isprintable() or " " in token:
            raise ConfigError(f"{key}: {path} holds a token with spaces or control characters; expected one per line")
    return tokens


def read_password(path: str, key: str) -> bytes:
    """The password in the first line of a file. `key` is for messages. Raises ConfigError."""
    password = _read(path, key).split(b"\n", 1)[0].rstrip(b"\r")
    if not 0 < len(password) <= MOST_PASSWORD_BYTES:
        raise ConfigError(f"{key}: {path} holds no password of 1 to {MOST_PASSWORD_BYTES} bytes in its first line")
    return password


UNIX = "unix:"  # a host, followed by the path of a socket


def check_bind(config: schema.Config, insecure: bool = False) -> None:
    """Raises ConfigError if a listener would be open to other machines with no token and no client certificate.

    `insecure` is the flag `--insecure`, the same as `server.insecure`.
    """
    server = config.server
    if insecure or server.insecure or server.tls_client_ca is not None:
        return
    for key, listener, host in (
        ("host", "inference", server.host),
        ("management_host", "management", server.management_host),
        ("metrics_host", "metrics", server.metrics_host),
        ("grpc_host", "inference", server.grpc_host),
    ):
        if host is not None and not is_loopback(host) and not tokens_for(config, listener):
            try:
                socket.getaddrinfo(host.strip("[]"), None)
            except (OSError, UnicodeError) as e:
                raise ConfigError(f"server.{key}: found {host!r}, which is no address of this machine: {e}") from None
            raise ConfigError(
                f"server.{key}: found {host!r}, which other machines can reach, while nothing guards the {listener}"
                f" listener; set auth.token_file (--token-file) or auth.{listener}_token_file, or server.tls_client_ca,"
                " or say --insecure if a guard stands elsewhere"
            )
    if server.thrift_port is not None and (not is_loopback(server.thrift_host) or tokens_for(config, "inference")):
        where = f"server.thrift_host: found {server.thrift_host!r}, which other machines can reach, while"
        if is_loopback(server.thrift_host):
            where = "server.thrift_port: found with tokens that guard the inference listener, while"
        raise ConfigError(
            f"{where} a call over Thrift carries no token; set server.tls_client_ca, or say --insecure if a guard"
            " stands elsewhere"
        )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a listener bound to `host`. Other names than localhost are not resolved."""
    if host == "localhost" or host.startswith(UNIX):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_labels(path: str, key: str) -> tuple[str, ...]:
    """The lines of a file as they are, with blanks and carriage returns, as Triton reads them. Raises ConfigError."""
    data = _read(path, key, MOST_LABEL_BYTES + 1)
    if len(data) > MOST_LABEL_BYTES:
        raise ConfigError(f"{key}: {path} has more than {MOST_LABEL_BYTES} bytes; expected a line for each class")
    try:
        return tuple(data.decode().split("\n"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 at byte {error.start}; expected a line for each class") from None


def _read(path: str, key: str, most: int = 2**20) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(most)  # a device file must not fill the memory
    except FileNotFoundError:
        raise ConfigError(f"{key}: no such file: {path}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


# ---- PEM files


def refused(key: str, advice: str) -> Callable[[], NoReturn]:
    """For OpenSSL to call when it needs a password. Raises ConfigError; `advice` says how it is given, if it can be."""

    def no_password() -> NoReturn:
        ways = (advice, f"decrypt it with openssl pkey -in {key} -out decrypted.pem")
        raise ConfigError(f"the key {key} is encrypted: {', or '.join(filter(None, ways))}")

    return no_password


def load_chain(context: ssl.SSLContext, cert: str, key: str | None, password_file: str | None, advice: str) -> None:
    """Loads a chain and its key. `advice`: how the password of an encrypted key is given.

    Raises OSError, which includes ssl.SSLError; ConfigError for a key that its password does not open, and DER files.
    """
    opened = False

    def password() -> bytes:
        nonlocal opened
        opened = True
        return read_password(password_file or "", "server.tls_password_file")

    try:
        context.load_cert_chain(cert, key, password if password_file else refused(key or cert, advice))
    except ssl.SSLError as exc:
        if opened and "DECRYPT" in (exc.reason or "DECRYPT"):  # others, such as KEY_VALUES_MISMATCH, come after it
            raise ConfigError(f"the password in {password_file} does not open the key {key or cert}") from None
        refuse_der(cert, "x509")
        refuse_der(key or cert, "pkey")
        raise


def refuse_der(path: str, kind: str) -> None:
    """Raises ConfigError for a DER file, with the command that converts it. `kind`: OpenSSL's "x509" or "pkey"."""
    if Path(path).read_bytes()[:1] == b"\x30":  # ASN.1's SEQUENCE; PEM is text, in which it would be a 0
        raise ConfigError(
            f"{path} is a DER file, expected PEM; convert it: openssl {kind} -inform DER -in {path} -out {kind}.pem"
        )
