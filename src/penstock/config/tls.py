"""PEM files for TLS. OpenSSL asks for the password of an encrypted key on the terminal, and the whole process stands
still until someone types. Here a password comes from a file, or the key is refused."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from penstock.config.checks import read_password
from penstock.errors import ConfigError


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
