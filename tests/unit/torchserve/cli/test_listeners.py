"""The HTTP and gRPC listeners that config.properties asks for."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError
from penstock.torchserve.admin.startup import ServerComponents
from penstock.torchserve.cli.listeners import (
    GROUPS,
    GrpcAddress,
    Listeners,
    TlsFiles,
    grpc_addresses,
    grpc_listeners,
    http_addresses,
    limits_of,
)
from penstock.torchserve.config import ListenerAddress, Properties
from support.backend import FakeBackend
from support.torchserve import FakeAdministration

TLS = Path(__file__).parents[3] / "tls"


def listeners(properties: Properties) -> list[Any]:
    components: Any = ServerComponents(FakeAdministration(), FakeBackend(), None, properties, 0, 1)  # type: ignore[arg-type]
    return list(grpc_listeners(components, LimitsConfig(), (9, 3), lambda: TlsFiles(properties)))


def test_inference_and_management_have_a_grpc_listener_each():
    assert [address for _, address in listeners(Properties())] == [
        GrpcAddress("inference", "127.0.0.1", 7070),
        GrpcAddress("management", "127.0.0.1", 7071),
    ]


@pytest.mark.parametrize(
    ("host", "shown", "path"),
    [
        ("127.0.0.1", "grpc://127.0.0.1:7070", ""),
        ("::1", "grpc://[::1]:7070", ""),
        ("unix:/run/s", "unix:/run/s", "/run/s"),
    ],
)
def test_an_address_is_shown_as_clients_use_it(host, shown, path):
    address = grpc_addresses(Properties(grpc_inference_address=host))[0]
    assert (str(address), address.path) == (shown, path)


async def test_tls_needs_matching_files(tmp_path):
    def files(key: str) -> Properties:
        return Properties(enable_grpc_ssl=True, certificate_file=str(TLS / "cert.pem"), private_key_file=key)

    assert len(listeners(files(str(TLS / "key.pem")))) == 2
    with pytest.raises(ConfigError):
        listeners(files(str(TLS / "cert.pem")))
    with pytest.raises(ConfigError):
        listeners(files(str(tmp_path / "none.pem")))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not here")
@pytest.mark.parametrize("source", ["pem", "keystore"])
async def test_all_listeners_use_changed_files_after_a_reload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    def write_files() -> None:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        command = ["openssl", "pkcs12", "-export", "-in", certificate, "-inkey", key, "-passout", "pass:changeit"]
        subprocess.run([*command, "-out", keystore], check=True, capture_output=True)

    async def certificates() -> set[str]:
        ends = [(urlsplit(url).hostname, urlsplit(url).port) for url in found.urls.values()]
        ends += [(host, int(port)) for host, port in re.findall(r"bind to: grpc://([\d.]+):(\d+)", caplog.text)]
        assert len(ends) == 5
        return {await asyncio.to_thread(ssl.get_server_certificate, end) for end in ends}

    caplog.set_level("INFO", "penstock.torchserve")
    certificate, key, keystore = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "keystore.p12"))
    write_files()
    anywhere = dict.fromkeys((f"{group}_address" for group in GROUPS), "https://127.0.0.1:0")
    files = {"certificate_file": certificate, "private_key_file": key} if source == "pem" else {"keystore": keystore}
    properties = Properties(**anywhere, **files, enable_grpc_ssl=True, grpc_inference_port=0, grpc_management_port=0)
    components: Any = ServerComponents(FakeAdministration(), FakeBackend(), None, properties, 0, 1)  # type: ignore[arg-type]
    found = Listeners(components, LimitsConfig())
    await found.start(lambda names: asyncio.sleep(0, b""))
    before = await certificates()
    write_files()
    found.reload_tls()
    after = await certificates()
    assert (len(before), len(after)) == (1, 1)
    assert before != after
    for each in found.running:
        await each.close(0)
    found.close_tls()


def test_without_hpack_there_is_one_warning_and_no_listener(monkeypatch, caplog):
    ours = ("penstock.serving.grpc", "penstock.serving.http2", "penstock.torchserve.grpc")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hpack", None)
    assert listeners(Properties()) == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("event=no_grpc missing=hpack consequence=http_only hint=pip install 'hpack")


def test_grpc_is_loaded_only_for_listening():
    code = "import sys, penstock.torchserve.cli.server as m; print('hpack' in sys.modules, 'google' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- HTTP


def groups_of(**keys: Any) -> list[list[str]]:
    """The groups of each listener."""
    return [sorted(groups) for _, groups in http_addresses(Properties(**keys))]


def test_equal_addresses_share_a_listener() -> None:
    one = "http://127.0.0.1:9"
    assert http_addresses(Properties(inference_address=one, management_address=one, metrics_address=one)) == [
        (ListenerAddress("127.0.0.1", 9), {"inference", "management", "metrics"})
    ]
    assert groups_of(inference_address=one, metrics_address=one) == [["inference", "metrics"], ["management"]]


def test_listeners_with_port_0_are_separate() -> None:
    one = "http://127.0.0.1:0"
    assert groups_of(inference_address=one, management_address=one) == [["inference"], ["management"], ["metrics"]]


def test_a_shared_listener_of_inference_and_management_serves_metrics() -> None:
    one = "unix:/tmp/both"
    found = groups_of(inference_address=one, management_address=one)
    assert found == [["inference", "management", "metrics"], ["metrics"]]


def test_without_the_metrics_api_there_is_no_metrics_listener() -> None:
    assert groups_of(enable_metrics_api=False) == [["inference"], ["management"]]


def test_the_largest_request_fits_into_the_limits() -> None:
    limits = limits_of(Properties(max_request_size=500_000_000))
    assert limits.max_body_bytes == 500_000_000
    assert limits.pool_bytes >= 2 * limits.max_body_bytes
    assert limits.max_queue_bytes >= limits.max_body_bytes
    assert limits.body_timeout_s > 400, "1 MB/s is enough"
    assert limits_of(Properties()).body_timeout_s == 30
