"""Tokens and TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.client.endpoint import tls_context
from penstock.errors import ConfigError, Unauthorized
from penstock.serving.http.auth import check_token, make_ssl_context
from penstock.torchserve.cli.listeners import TlsFiles
from penstock.torchserve.config import Properties

TLS = Path(__file__).parents[3] / "tls"


@pytest.mark.parametrize("given", [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic right", b"right"])
def test_anything_but_a_right_bearer_token_is_refused(given):
    with pytest.raises(Unauthorized):
        check_token(frozenset({b"right", b"other"}), given)


def test_right_tokens_pass_and_no_tokens_open_to_all():
    check_token(frozenset({b"right", b"other"}), b"bearer right")
    check_token(frozenset(), None)


def test_tls_needs_files_that_can_be_read(tmp_path):
    assert make_ssl_context(None, None) is None
    with pytest.raises(ConfigError, match=r"need server\.tls_cert"):
        make_ssl_context(None, "key.pem")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_ssl_context(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The forms of a key and a certificate: encrypted, also in OpenSSL's own way, and DER."""
    folder = tmp_path_factory.mktemp("tls")
    for line in (
        f"pkey -in {TLS / 'key.pem'} -aes128 -passout pass:secret -out encrypted.pem",
        f"pkey -in {TLS / 'key.pem'} -aes128 -passout pass:secret -traditional -out traditional.pem",
        f"pkey -in {TLS / 'key.pem'} -outform DER -out key.der",
        f"pkcs8 -topk8 -in {TLS / 'key.pem'} -outform DER -passout pass:secret -out encrypted.der",
        f"x509 -in {TLS / 'cert.pem'} -outform DER -out cert.der",
        "genrsa -aes128 -passout pass:secret -out rsa.pem 2048",
        "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes128 -pass pass:secret -out other.pem",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
    for name, text in (("right", "secret\n"), ("wrong", "secret2"), ("empty", "\nsecret\n"), ("long", "s" * 1025)):
        (folder / name).write_text(text)
    for name in ("cert.pem", "key.pem"):
        (folder / name).write_bytes((TLS / name).read_bytes())
    return folder


@pytest.mark.parametrize("key", ["encrypted.pem", "traditional.pem"])
@pytest.mark.parametrize(
    ("password", "said"),
    [
        (
            None,
            "is encrypted: name a file with its password in server.tls_password_file .*, or decrypt it with openssl",
        ),
        ("right", None),
        ("wrong", "the password in .*wrong does not open the key"),
        ("empty", "server.tls_password_file: .* holds no password"),
        ("long", "server.tls_password_file: .* holds no password of 1 to 1024 bytes"),
        ("absent", "server.tls_password_file: no such file"),
    ],
)
def test_an_encrypted_key_is_opened_with_its_password_and_never_asks(
    files: Path, key: str, password: str | None, said: str | None
) -> None:
    given = (str(files / "cert.pem"), str(files / key), None, None if password is None else str(files / password))
    if said is None:
        assert make_ssl_context(*given)
    else:
        with pytest.raises(ConfigError, match=said):
            make_ssl_context(*given)


@pytest.mark.parametrize(
    ("cert", "key", "authority", "said"),
    [
        ("cert.pem", "key.der", None, "key.der is a DER file, expected PEM; convert it: openssl pkey -inform DER"),
        ("cert.pem", "encrypted.der", None, "encrypted.der is a DER file, expected PEM; convert it: openssl pkey"),
        ("cert.der", "key.pem", None, "cert.der is a DER file, expected PEM; convert it: openssl x509 -inform DER"),
        ("cert.pem", "key.pem", "cert.der", "cert.der is a DER file, expected PEM; convert it: openssl x509"),
        ("cert.pem", "other.pem", None, "key values mismatch"),
        ("cert.pem", "rsa.pem", None, "no certificate assigned"),
        ("key.pem", None, None, "cannot be loaded"),
    ],
)
def test_files_of_another_form_or_key_are_named_with_the_way_out(
    files: Path, cert: str, key: str | None, authority: str | None, said: str
) -> None:
    paths = [None if name is None else str(files / name) for name in (cert, key, authority)]
    with pytest.raises(ConfigError, match=said):
        make_ssl_context(*paths, str(files / "right"))


def test_no_client_and_no_keystore_asks_for_a_password(files: Path) -> None:
    cert, key = str(files / "cert.pem"), str(files / "encrypted.pem")
    with pytest.raises(ConfigError, match=r"encrypted.pem is encrypted: decrypt it with openssl pkey"):
        tls_context(cert=cert, key=key)
    with pytest.raises(ConfigError, match="is encrypted: put it into a keystore, whose password is keystore_pass, or"):
        TlsFiles(Properties(certificate_file=cert, private_key_file=key)).context()
