"""Videos at URLs: which ones the user allows, and a file that reads one by HTTP ranges.

FFmpeg could open URLs itself, but it follows redirects to any host, and to its own protocols.
"""

import asyncio
import io
import re
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import SplitResult, unquote, unquote_plus, urlsplit

from penstock.backoff import Backoff
from penstock.client.endpoint import ConnectionLost, ResponseTimeout, ResponseTooLarge, Unreachable, parse_url
from penstock.client.http import ClientConnection
from penstock.client.response import HttpResponse
from penstock.errors import ConfigError, PenstockError

READ_BYTES: Final = 1 << 20  # a choice: with 50 ms for a request, 20 MB/s
ATTEMPTS: Final = 5
FIRST_S, LONGEST_S = 0.5, 8.0  # pauses between them
REDIRECTS: Final = 5
WHOLE: Final = "its server sends whole files only, and no ranges: download it first"
_AGAIN = (ConnectionLost, ResponseTimeout, Unreachable)
_SIGNED = re.compile(
    r"(?i)x-(amz|goog|ms)-|^(sig|signature|token|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|s[etprv])$"
)


def is_url(text: str) -> bool:
    return re.match(r"https?://", text) is not None


def check_allowed(url: str, allowed: Sequence[str]) -> None:
    """Raises ConfigError unless the URL has the scheme, host and port of an allowed one, and begins with its path."""
    parts = _parts(url)
    steps = unquote(parts.path).split("/")
    if ".." not in steps and any(
        _origin(parts) == _origin(prefix) and parts.path.startswith(prefix.path) for prefix in map(_parts, allowed)
    ):
        return
    raise ConfigError(
        f"the URL {url_name(url)} is not allowed: allow its beginning, as with --allow-url {parts.scheme}://{parts.netloc}/"
    )


def url_name(url: str) -> str:
    """The URL without the parts that sign it: they are secrets, and change between runs."""
    parts = urlsplit(url)
    fields = [field for field in parts.query.split("&") if not _SIGNED.search(unquote_plus(field.partition("=")[0]))]
    return parts._replace(query="&".join(fields), fragment="").geturl()


def _parts(url: str) -> SplitResult:
    parts = urlsplit(url)
    parse_url(f"{parts.scheme}://{parts.netloc}")  # raises ConfigError
    return parts


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


class RemoteFile(io.RawIOBase):
    """A file at a URL, for one thread without an event loop.

    `failed` makes the error that it raises once. Then it ends, because FFmpeg reads on until PyAV raises the error.
    """

    def __init__(self, url: str, failed: Callable[[str], PenstockError]) -> None:
        self._make_error, self._url, self.size = failed, url_name(url), 0
        self._runner = asyncio.Runner()
        self._place, self._first, self._broken = 0, b"", False
        self._connect(url)
        try:
            self._first = self._read_range(0, READ_BYTES, REDIRECTS)
        except BaseException:
            self.close()
            raise

    def _connect(self, url: str) -> None:
        parts = urlsplit(url)
        self._parts, self._path = parts, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._connection = ClientConnection(parse_url(f"{parts.scheme}://{parts.netloc}"))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self.size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """At most a megabyte."""
        size = max(0, min(READ_BYTES, READ_BYTES if size < 0 else size, self.size - self._place))
        if not size or self._broken:
            return b""
        data = self._first[self._place : self._place + size]
        if len(data) < size:
            data = self._read_range(self._place, size)
        self._place += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            self._connection.close()
            self._runner.close()
        super().close()

    def _read_range(self, start: int, size: int, redirects: int = 0) -> bytes:
        pause = Backoff(FIRST_S, LONGEST_S)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = self._get(start, size)
                if response.status < 500:
                    break
                why = f"its server answered {response.status}"
            except _AGAIN as e:
                why = e.message
            except ResponseTooLarge:
                raise self._failed(WHOLE) from None
            except PenstockError as e:
                raise self._failed(e.message) from e
            if attempt == ATTEMPTS:
                raise self._failed(f"{why} ({ATTEMPTS} attempts)")
            time.sleep(pause.next_s())
        if response.status in (301, 302, 303, 307, 308) and redirects:
            self._follow(response)
            return self._read_range(start, size, redirects - 1)
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", ""))
        if response.status == 200:
            raise self._failed(WHOLE)
        if response.status != 206 or found is None or int(found[1]) != start:
            raise self._failed(f"its server answered {response.status} to a request for a range")
        if self._first and int(found[2]) != self.size:
            raise self._failed("it changed while it was read")
        self.size = int(found[2])
        if len(response.body) != min(size, self.size - start):
            raise self._failed(f"its server sent {len(response.body):,} bytes of a range of {size:,}")
        return bytes(response.body)

    def _get(self, start: int, size: int) -> HttpResponse:
        headers = [("range", f"bytes={start}-{start + size - 1}"), ("accept-encoding", "identity")]
        asked = self._connection.request("GET", self._path, headers, max_response_bytes=READ_BYTES + 65_536)
        return self._runner.run(asked)

    def _follow(self, response: HttpResponse) -> None:
        to = response.headers.get("location", "")
        to = f"{self._parts.scheme}://{self._parts.netloc}{to}" if to.startswith("/") else to
        if not is_url(to) or _origin(urlsplit(to)) != _origin(self._parts):
            raise self._failed(f"its server redirects to another one: {url_name(to)[:200]}; name that URL")
        self._connection.close()
        self._connect(to)

    def _failed(self, why: str) -> PenstockError:
        self._broken = True
        return self._make_error(f"cannot be read from {self._url}: {why}")
