"""TLS certificates and keys from config.properties, in each form."""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.torchserve.cli.listeners import TlsFiles
from penstock.torchserve.config import Properties

TLS = Path(__file__).parents[3] / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not here")


def keystore(folder: Path, password: str = "changeit") -> str:
    path = str(folder / "keystore.p12")
    command = ["openssl", "pkcs12", "-export", "-in", CERT, "-inkey", KEY, "-out", path, "-passout", f"pass:{password}"]
    subprocess.run(command, check=True)
    return path


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
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", f"rsa:{bits}", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
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
    pem = TlsFiles(Properties(keystore=keystore(tmp_path)))
    assert isinstance(pem.context(), ssl.SSLContext)
    assert certificate_of(pem.certificate) == certificate_of(CERT)
    assert os.stat(os.path.dirname(pem.key)).st_mode & 0o077 == 0, "nobody else may read the key"
    pem.close()
    assert not os.path.exists(pem.key)


@needs_openssl
def test_a_wrong_password_is_reported_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keystore(tmp_path)
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
