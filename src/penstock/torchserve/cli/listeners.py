"""The HTTP and gRPC listeners that config.properties asks for: addresses, routes, limits and TLS."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from functools import cached_property
from ssl import SSLContext
from typing import TYPE_CHECKING, Final, Literal

from msgspec import structs

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError, install_hint
from penstock.serving.http.auth import make_ssl_context, replace_ssl_context
from penstock.serving.http.descriptors import share_connections
from penstock.serving.http.server import HttpServer
from penstock.torchserve.admin.startup import ServerComponents
from penstock.torchserve.config import ListenerAddress, ListenerConfig, Properties
from penstock.torchserve.http.listener import Scrape, make_listener
from penstock.torchserve.protocol.api import Group

if TYPE_CHECKING:
    from penstock.serving.grpc.listener import GrpcListener

log = logging.getLogger("penstock.torchserve")

GROUPS: Final[tuple[Group, ...]] = ("inference", "management", "metrics")
GRPC_GROUPS: Final[tuple[Literal["inference", "management"], ...]] = ("inference", "management")
_SLOWEST: Final = 2**20  # bytes/s: a client on a slow line may still send the largest body
_ADVICE: Final = "put it into a keystore, whose password is keystore_pass"
_SELF_SIGNED: Final = "req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost"


def http_addresses(properties: Properties) -> list[tuple[ListenerAddress, set[Group]]]:
    """The HTTP listeners with their groups. Equal addresses share a listener, except port 0.

    A listener that inference and management share also serves the metrics.
    """
    found: list[tuple[ListenerAddress, set[Group]]] = []
    for group in GROUPS:
        if group == "metrics" and not properties.enable_metrics_api:
            continue
        address = properties.address(group)
        same = [groups for other, groups in found if other == address and (address.port or address.unix)]
        if same:
            same[0].add(group)
        else:
            found.append((address, {group}))
    for _, groups in found:
        if {"inference", "management"} <= groups and properties.enable_metrics_api:
            groups.add("metrics")
    return found


def grpc_addresses(properties: Properties) -> list[ListenerAddress]:
    """The gRPC listeners of GRPC_GROUPS."""
    keys = ((f"grpc_{group}_address", f"grpc_{group}_port") for group in GRPC_GROUPS)
    return [ListenerAddress(getattr(properties, host), getattr(properties, port), "grpc") for host, port in keys]


def limits_of(properties: Properties) -> LimitsConfig:
    """The core's limits, which admit the largest request, also over a slow line."""
    defaults = LimitsConfig()
    pool_bytes = max(defaults.pool_bytes, 2 * properties.max_request_size)
    return LimitsConfig(
        max_body_bytes=properties.max_request_size,
        pool_bytes=pool_bytes,
        max_queue_bytes=max(defaults.max_queue_bytes, pool_bytes),
        body_timeout_s=max(defaults.body_timeout_s, properties.max_request_size / _SLOWEST),
    )


class Listeners:
    """All listeners of one server, and the TLS files that they share."""

    def __init__(self, components: ServerComponents, limits: LimitsConfig) -> None:
        self.running: list[HttpServer | GrpcListener] = []
        self.urls: dict[str, str] = {}  # of the HTTP listeners, by group
        self._components = components
        self._properties = components.properties
        self._limits = limits

    async def start(self, scrape: Scrape) -> None:
        """Starts all listeners; `/metrics` returns the result of `scrape`. Raises ConfigError."""
        components, properties = self._components, self._properties
        addresses = http_addresses(properties)
        main = 1 + sum("inference" in groups for _, groups in addresses)  # gRPC has one more of both kinds
        most, aside = share_connections(self._limits.max_connections, main, len(addresses) - main + 2)
        for address, groups in addresses:
            max_connections = most if "inference" in groups else aside
            listener = make_listener(
                components.backend,
                components.administrator,
                ListenerConfig(frozenset(groups), properties),
                structs.replace(self._limits, max_connections=max_connections),
                ssl=self._context if address.scheme == "https" else None,
                scrape=scrape,
            )
            names = sorted(groups, key=GROUPS.index)
            host, port = await listener.start(address.host, address.port, f"{names[0]}_address")
            bound = structs.replace(address, host=host, port=port)
            self.running.append(listener)
            for group in names:
                log.info("%s API bind to: %s", group.capitalize(), bound)
                self.urls[group] = str(bound)
        for grpc_listener, group, at in grpc_listeners(components, self._limits, (most, aside), lambda: self._tls):
            self.running.append(grpc_listener)
            port = await grpc_listener.start(at.host, at.port, f"grpc_{group}_{'address' if at.unix else 'port'}")
            log.info("%s gRPC API bind to: %s", group.capitalize(), structs.replace(at, port=port))

    def reload_tls(self) -> None:
        """Uses the changed certificate for new connections. Raises ConfigError; then nothing changes."""
        if "_tls" not in vars(self):
            return
        self._tls.renew()
        context = self._tls.context()
        if "_context" in vars(self):
            replace_ssl_context(self._context, context)
        for listener in self.running:
            if not isinstance(listener, HttpServer):
                listener.reload_tls(self._tls.context())

    def close_tls(self) -> None:
        if "_tls" in vars(self):
            self._tls.close()

    @cached_property
    def _tls(self) -> TlsFiles:
        """Made for the first listener that needs it: a self-signed certificate is generated only then."""
        return TlsFiles(self._properties)

    @cached_property
    def _context(self) -> SSLContext:
        """The context that the HTTPS listeners share."""
        return self._tls.context()


def grpc_listeners(
    components: ServerComponents, limits: LimitsConfig, shares: tuple[int, int], tls_files: Callable[[], TlsFiles]
) -> Iterable[tuple[GrpcListener, Group, ListenerAddress]]:
    """Yields the gRPC listeners, not yet started, with their groups and addresses; none, and a warning, without hpack.

    `shares` are the connections of the inference port and of the management port. Raises ConfigError.
    """
    try:
        from penstock.serving.grpc.listener import GrpcLimits
        from penstock.torchserve.grpc import make_grpc_listener
    except ModuleNotFoundError as error:
        log.warning("event=no_grpc missing=%s consequence=http_only hint=%s", error.name, install_hint("grpc"))
        return
    properties = components.properties
    for group, address, share in zip(GRPC_GROUPS, grpc_addresses(properties), shares, strict=True):
        bounds = GrpcLimits(
            structs.replace(limits, max_connections=share),
            getattr(properties, f"grpc_{group}_max_connection_age_ms"),
            getattr(properties, f"grpc_{group}_max_connection_age_grace_ms"),
        )
        config = ListenerConfig(frozenset({group}), properties)
        tls = tls_files().context() if properties.enable_grpc_ssl else None
        yield make_grpc_listener(components.backend, components.administrator, config, bounds, tls), group, address


# ---- TLS: PEM files, a PKCS12 keystore, or a generated self-signed certificate


class TlsFiles:
    """PEM files of certificate chain and key. Generated files are in a private folder until `close`."""

    def __init__(self, properties: Properties) -> None:
        """Raises ConfigError."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._keystore: Properties | None = None
        certificate, key = properties.certificate_file, properties.private_key_file
        if (certificate is None) != (key is None):
            keys = ("certificate_file", "private_key_file")
            present, missing = keys if certificate else keys[::-1]
            raise ConfigError(f"{present}: found without {missing}; set both, or neither")
        if certificate is not None and key is not None:
            self.certificate, self.key = certificate, key
            return
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-tls-")  # mode 0700
        self.certificate = os.path.join(self._folder.name, "certificate.pem")
        self.key = os.path.join(self._folder.name, "key.pem")
        try:
            if properties.keystore is not None:
                self._keystore = properties
                self.renew()
            else:
                self._generate()
        except BaseException:
            self.close()
            raise

    def context(self) -> SSLContext:
        """A server context from the current files. Warns about a key of 1024 bits.

        Raises ConfigError for unreadable files, or a key that does not match the certificate.
        """
        context = make_ssl_context(self.certificate, self.key, weak_keys=True, advice=_ADVICE)
        assert context is not None
        return context

    def renew(self) -> None:
        """Extracts the current keystore. Raises ConfigError."""
        if self._keystore is not None and self._keystore.keystore is not None:
            self._extract(self._keystore.keystore, self._keystore.keystore_pass, self._keystore.keystore_type)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _extract(self, keystore: str, password: str, kind: str) -> None:
        if kind.upper() not in ("PKCS12", "P12"):
            raise ConfigError(
                f"keystore_type: found {kind!r}, expected PKCS12; convert the keystore with: keytool"
                f" -importkeystore -srckeystore {keystore} -destkeystore keystore.p12 -deststoretype PKCS12"
            )
        if not os.path.isfile(keystore):
            raise ConfigError(f"keystore: there is no file {keystore}")
        chain = os.path.join(os.path.dirname(self.certificate), "chain.pem")
        for selection, path in (
            (("-clcerts", "-nokeys"), self.certificate),
            (("-cacerts", "-nokeys"), chain),
            (("-nocerts", "-nodes"), self.key),
        ):
            self._openssl(
                ["pkcs12", "-in", keystore, "-passin", "env:PENSTOCK_KEYSTORE_PASS", *selection, "-out", path],
                f"keystore: {keystore} cannot be opened",
                "set certificate_file and private_key_file to PEM files instead",
                password,
            )
        with open(self.certificate, "ab") as certificate, open(chain, "rb") as rest:
            certificate.write(rest.read())  # the server's own certificate comes first

    def _generate(self) -> None:
        self._openssl(
            [*_SELF_SIGNED.split(), "-keyout", self.key, "-out", self.certificate],
            "https: no certificate is configured and none can be generated",
            "set certificate_file and private_key_file",
        )
        log.warning(
            "event=self_signed_certificate consequence=clients_cannot_check_it hint=set private_key_file and"
            " certificate_file, or keystore"
        )

    def _openssl(self, arguments: list[str], failure: str, advice: str, password: str = "") -> None:
        program = shutil.which("openssl")
        if program is None:
            raise ConfigError(f"{failure}: the program openssl is missing; install it, or {advice}")
        try:
            subprocess.run(
                [program, *arguments],
                env={**os.environ, "PENSTOCK_KEYSTORE_PASS": password},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error).encode()
            reason = output.decode(errors="replace").strip().splitlines()[-1:] or [type(error).__name__]
            raise ConfigError(f"{failure}: {reason[0][:200]}; {advice}") from None
