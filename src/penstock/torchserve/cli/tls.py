"""TLS from config.properties: PEM files, a PKCS12 keystore, or a generated self-signed certificate."""

import logging
import os
import shutil
import ssl
import subprocess
import tempfile
from typing import Final

from penstock.errors import ConfigError
from penstock.serving.http.auth import make_ssl_context
from penstock.torchserve.config.properties import Properties

log = logging.getLogger("penstock.compat")

_ADVICE: Final = "put it into a keystore, whose password is keystore_pass"
_SELF_SIGNED: Final = "req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost"


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

    def context(self) -> ssl.SSLContext:
        """A server's context from the files as they are now. A key of 1024 bits causes a warning.

        Raises ConfigError for unreadable files, or a key that does not match the certificate.
        """
        context = make_ssl_context(self.certificate, self.key, weak_keys=True, advice=_ADVICE)
        assert context is not None
        return context

    def renew(self) -> None:
        """Extracts the keystore as it is now. Raises ConfigError."""
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
