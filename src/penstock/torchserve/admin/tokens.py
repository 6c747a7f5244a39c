"""The keys of TorchServe's APIs, and the file where users find them."""

import hmac
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from penstock.errors import ConfigError
from penstock.torchserve.admin.snapshots import write_private
from penstock.torchserve.protocol.api import ApiError

FILE: Final = "key_file.json"
KEY_BYTES: Final = 24  # 192 random bits, 32 characters

_WRONG: Final = "Token either incorrect, expired, or not provided correctly"


class Tokens:
    """The inference key and the management key, which expire, and the API key, which renews them.

    The file has mode 0600. It is written only by `publish`, so that a server that fails to start does not overwrite
    the file of another server in the same folder.
    """

    def __init__(self, folder: Path, expiration_s: float, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self.file = folder / FILE
        self._now = now
        self._expiration_s = expiration_s
        self._api = secrets.token_urlsafe(KEY_BYTES)
        self._keys = {kind: self._new_key() for kind in ("management", "inference")}

    def publish(self) -> None:
        """Writes the file. Raises ConfigError on failure."""
        try:
            self._write()
        except OSError as e:
            raise ConfigError(
                f"{self.file}: the token file cannot be written: {e.strerror}; start in a folder of your own, or with"
                " --disable-token-auth"
            ) from None

    def remove(self) -> None:
        """Removes the file, unless it belongs to another server by now."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(self.file.read_bytes())["API"]["key"] == self._api:
                self.file.unlink()

    def check(self, kind: str, authorization: bytes | None) -> None:
        """Raises ApiError unless the header is `Bearer` and the key of `kind` ("management" or "inference")."""
        key, expires = self._keys[kind]
        if not _is(key, authorization) or self._now() >= expires:
            raise ApiError("InvalidKeyException", f"Token Authorization failed. {_WRONG}")

    def renew(self, kind: str, authorization: bytes | None) -> None:
        """Creates a new key of `kind`, if the header is `Bearer` and the API key.

        Raises ApiError, and OSError if the file cannot be written; the old key then stays valid.
        """
        if not _is(self._api, authorization):
            raise ApiError("InvalidKeyException", f"Token Authentication failed. {_WRONG}")
        if kind not in self._keys:
            raise ApiError("BadRequestException", f"type: found {kind[:100]!r}, expected management or inference")
        old, self._keys[kind] = self._keys[kind], self._new_key()
        try:
            self._write()
        except OSError:
            self._keys[kind] = old
            raise

    def _new_key(self) -> tuple[str, datetime]:
        try:
            expires = self._now() + timedelta(seconds=self._expiration_s)
        except OverflowError:
            expires = datetime.max.replace(tzinfo=UTC)
        return secrets.token_urlsafe(KEY_BYTES), expires

    def _write(self) -> None:
        layout: dict[str, dict[str, str]] = {
            kind: {"key": key, "expiration time": expires.isoformat().replace("+00:00", "Z")}
            for kind, (key, expires) in self._keys.items()
        }
        write_private(self.file, json.dumps({**layout, "API": {"key": self._api}}, indent=2))


def _is(key: str, authorization: bytes | None) -> bool:
    return hmac.compare_digest(b"Bearer " + key.encode(), authorization or b"")
