"""The HTTP and gRPC listeners that config.properties asks for, and their certificates and keys in each form."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
from penstock.torchserve.admin.models import VersionRegistry
from penstock.torchserve.admin.startup import ServerComponents
from penstock.torchserve.cli.listeners import (
    GROUPS,
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
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not here")


def write_certificate(folder: Path, bits: int = 2048) -> tuple[str, str]:
    """The paths of a new certificate and its key."""
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", f"rsa:{bits}", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def write_keystore(folder: Path, certificate: str = CERT, key: str = KEY) -> str:
    path = str(folder / "keystore.p12")
    command = ["openssl", "pkcs12", "-export", "-in", certificate, "-inkey", key, "-out", path]
    subprocess.run([*command, "-passout", "pass:changeit"], check=True, capture_output=True)
    return path


def listeners(properties: Properties) -> list[Any]:
    components: Any = ServerComponents(FakeAdministration(), VersionRegistry(), FakeBackend(), None, properties, 0, 1)  # type: ignore[arg-type]
    return list(grpc_listeners(components, LimitsConfig(), (9, 3), lambda: TlsFiles(properties)))


def test_inference_and_management_have_a_grpc_listener_each():
    assert [(group, address) for _, group, address in listeners(Properties())] == [
        ("inference", ListenerAddress("127.0.0.1", 7070, "grpc")),
        ("management", ListenerAddress("127.0.0.1", 7071, "grpc")),
    ]


@pytest.mark.parametrize(
    ("host", "shown", "unix"),
    [
        ("127.0.0.1", "grpc://127.0.0.1:7070", False),
        ("::1", "grpc://[::1]:7070", False),
        ("unix:/run/s", "unix:/run/s", True),
    ],
)
def test_an_address_is_shown_as_clients_use_it(host, shown, unix):
    address = grpc_addresses(Properties(grpc_inference_address=host))[0]
    assert (str(address), address.unix) == (shown, unix)


async def test_tls_needs_matching_files(tmp_path):
    def files(key: str) -> Properties:
        return Properties(enable_grpc_ssl=True, certificate_file=str(TLS / "cert.pem"), private_key_file=key)

    assert len(listeners(files(str(TLS / "key.pem")))) == 2
    with pytest.raises(ConfigError):
        listeners(files(str(TLS / "cert.pem")))
    with pytest.raises(ConfigError):
        listeners(files(str(tmp_path / "none.pem")))


@needs_openssl
@pytest.mark.parametrize("source", ["pem", "keystore"])
async def test_all_listeners_use_changed_files_after_a_reload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    def write_files() -> None:
        write_keystore(tmp_path, *write_certificate(tmp_path))

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
    components: Any = ServerComponents(FakeAdministration(), VersionRegistry(), FakeBackend(), None, properties, 0, 1)  # type: ignore[arg-type]
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


# ---- TLS files


def certificate_of(path: str) -> str:
    """The first certificate of a file as text, without openssl's comments."""
    text = Path(path).read_text()
    return text[text.index("-----BEGIN CERTIFICATE") : text.index("-----END CERTIFICATE")]


def test_pem_files_are_used_in_place() -> None:
    pem = TlsFiles(Properties(certificate_file=CERT, private_key_file=KEY))
    assert (pem.certificate, pem.key) == (CERT, KEY)
    assert isinstance(pem.context(), ssl.SSLContext)
    pem.close()
    assert os.path.exists(CERT)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"certificate_file": CERT}, "certificate_file: found without private_key_file; set both, or neither"),
        ({"private_key_file": KEY}, "private_key_file: found without certificate_file"),
        ({"keystore": "none.p12"}, "keystore: there is no file none.p12"),
        (
            {"keystore": KEY, "keystore_type": "JKS"},
            "keystore_type: found 'JKS', expected PKCS12; convert the keystore",
        ),
    ],
)
def test_an_unusable_configuration_names_the_key(keys: dict[str, str], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TlsFiles(Properties(**keys))
    assert shown in caught.value.message


def test_a_key_that_does_not_match_is_refused_on_use(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    pem = TlsFiles(Properties(certificate_file=CERT, private_key_file=str(tmp_path / "key.pem")))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        pem.context()


def with_key_of(folder: Path, bits: int) -> TlsFiles:
    certificate, key = write_certificate(folder, bits)
    return TlsFiles(Properties(certificate_file=certificate, private_key_file=key))


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Raises SSLError unless both sides agree."""
    pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [server.wrap_bio(*pipes, server_side=True), client.wrap_bio(*pipes[::-1])]
    for side in [*sides, *sides, *sides]:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert all(side.version() for side in sides)


@needs_openssl
def test_a_key_of_1024_bits_works_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pem = with_key_of(tmp_path, 1024)
    client = ssl._create_unverified_context()
    client.set_ciphers("DEFAULT:@SECLEVEL=1")
    shake_hands(pem.context(), client)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "event=weak_certificate" in record.getMessage()


@needs_openssl
def test_a_weaker_key_is_refused_with_the_command_for_a_new_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*; create new ones: openssl req .*rsa:2048"):
        with_key_of(tmp_path, 512).context()


@needs_openssl
def test_a_keystore_is_extracted_until_the_server_stops(tmp_path: Path) -> None:
    pem = TlsFiles(Properties(keystore=write_keystore(tmp_path)))
    assert isinstance(pem.context(), ssl.SSLContext)
    assert certificate_of(pem.certificate) == certificate_of(CERT)
    assert os.stat(os.path.dirname(pem.key)).st_mode & 0o077 == 0, "nobody else may read the key"
    pem.close()
    assert not os.path.exists(pem.key)


@needs_openssl
def test_a_wrong_password_is_reported_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_keystore(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(ConfigError, match=r"keystore: .*keystore\.p12 cannot be opened: .*; set certificate_file"):
        TlsFiles(Properties(keystore=path, keystore_pass="wrong"))
    assert not os.listdir(tmp_path / "tmp")


@needs_openssl
def test_without_a_certificate_one_is_generated_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pem = TlsFiles(Properties())
    assert isinstance(pem.context(), ssl.SSLContext)
    assert "event=self_signed_certificate consequence=clients_cannot_check_it" in caplog.text
    pem.close()
    assert not os.path.exists(pem.key)


def test_a_missing_openssl_is_reported_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="the program openssl is missing; install it, or set certificate_file and"):
        TlsFiles(Properties())
