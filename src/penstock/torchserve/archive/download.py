"""A file from an allowed URL: no redirects, no private addresses, bounded in bytes and time."""

from __future__ import annotations

import hashlib
import http.client
import io
import ipaddress
import logging
import os
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import SplitResult, urlsplit

from penstock.torchserve.archive.errors import ArchiveExists, DownloadFailed, UrlForbidden

log = logging.getLogger("penstock.archive")

CHUNK_BYTES: Final = 1 << 20
SILENCE_S: Final = 30.0  # without a byte
TIMEOUT_S: Final = 3600.0  # of all: 100 GB at 28 MB/s


def download(
    url: str,
    target: Path,
    allowed_urls: Sequence[str],
    *,
    sha256: str = "",
    sign_s3: bool = False,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Writes what is behind the URL, which an allowed one matches, to `target`, whole or not at all.

    The host's name is looked up once, and the address that was checked is the one that is connected to. Addresses that
    are not public are taken only if an allowed URL that matches names the host letter by letter. Raises UrlForbidden,
    DownloadFailed, and ArchiveExists if `target` came to be meanwhile.
    """
    parts = urlsplit(url)
    try:
        if parts.username is not None or parts.password is not None or not parts.hostname:
            raise ValueError("the URL has a name and password, or no host")
        addresses = _addresses(url, parts, allowed_urls)
        headers = _signed(url) if sign_s3 else {}
        deadline_s = time.monotonic() + timeout_s
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
        try:
            with open(handle, "wb") as out:
                _fetch(parts, addresses, headers, out, sha256, max_bytes, deadline_s)
            os.link(temporary, target)  # unlike a rename, never over another
        finally:
            os.unlink(temporary)
    except FileExistsError:
        raise ArchiveExists(f"Model file already exists {target.name}") from None
    except (OSError, ValueError, http.client.HTTPException) as e:
        shown = parts._replace(query="", fragment="", netloc=parts.netloc.rpartition("@")[2]).geturl()
        log.warning("download failed url=%s reason=%r", shown, str(e) or type(e).__name__)
        raise DownloadFailed(f"Failed to download archive from: {url}", detail=str(e) or type(e).__name__) from None


def _addresses(url: str, parts: SplitResult, allowed_urls: Sequence[str]) -> list[tuple[str, int]]:
    """Addresses, with the port, at which the host is. Raises UrlForbidden if one of them is not public, OSError."""
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = [info[4] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    named = any(re.fullmatch(pattern, url) and _names(pattern, host) for pattern in allowed_urls)
    for address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        public = getattr(ip, "ipv4_mapped", None) or ip
        if not (named or (public.is_global and not public.is_multicast)):
            log.warning("download refused host=%s address=%s: not public, and no allowed URL names this host", host, ip)
            raise UrlForbidden(f"Given URL {url} does not match any allowed URL(s)", detail=f"{host} is at {ip}")
    return [(str(address[0]), port) for address in found]


def _connected(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    """A connection to the first of the addresses that takes one. Raises OSError of the last."""
    for address in addresses[:-1]:
        try:
            return socket.create_connection(address, timeout=SILENCE_S)
        except OSError:
            continue
    return socket.create_connection(addresses[-1], timeout=SILENCE_S)


def _names(pattern: str, host: str) -> bool:
    """Whether a regular expression has the host in it as it is, and not by way of wildcards."""
    literal = pattern.replace("\\", "").lower()
    name = f"[{host}]" if ":" in host else host
    return any(f"://{name}{end}" in literal for end in "/:")


def _fetch(
    parts: SplitResult,
    addresses: Sequence[tuple[str, int]],
    headers: dict[str, str],
    out: BinaryIO,
    sha256: str,
    max_bytes: int,
    deadline_s: float,
) -> None:
    """Writes the answer's body. Raises OSError, ValueError or HTTPException if it is not the whole, right file."""
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    plain = _connected(addresses)
    try:
        plain = _secured(plain, parts) if parts.scheme == "https" else plain
        connection.sock = _Timed(plain, deadline_s)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2]
        connection.request("GET", path, headers={"Host": host, "Accept-Encoding": "identity", **headers})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the server answers {response.status}; redirects are not followed")
        expected = response.length
        if expected is not None and expected > max_bytes:
            raise ValueError(f"the file has {expected} bytes; at most {max_bytes}")
        size, digest = 0, hashlib.sha256()
        while data := response.read1(CHUNK_BYTES):
            size += len(data)
            if size > max_bytes:
                raise ValueError(f"the file has more than {max_bytes} bytes")
            digest.update(data)
            out.write(data)
        if expected is not None and size != expected:
            raise ValueError(f"the connection ended after {size} of {expected} bytes")
        if sha256 and digest.hexdigest() != sha256.lower():
            raise ValueError(f"its SHA-256 is {digest.hexdigest()}; expected {sha256}")
    finally:
        plain.close()


def _secured(plain: socket.socket, parts: SplitResult) -> socket.socket:
    context = ssl.create_default_context()
    return context.wrap_socket(plain, server_hostname=parts.hostname)


class _Timed:
    """A socket, as http.client uses one, whose every read ends before the deadline, however slowly bytes drip in."""

    def __init__(self, plain: socket.socket, deadline_s: float) -> None:
        self._plain = plain
        self._deadline_s = deadline_s

    def sendall(self, data: bytes) -> None:
        self._plain.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reads(self._plain, self._deadline_s))

    def close(self) -> None:
        """Nothing: http.client closes a socket whose answer is still being read."""


class _Reads(io.RawIOBase):
    def __init__(self, plain: socket.socket, deadline_s: float) -> None:
        self._plain = plain
        self._deadline_s = deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the download took too long")
        self._plain.settimeout(min(left_s, SILENCE_S))
        return self._plain.recv_into(buffer)


def _signed(url: str) -> dict[str, str]:
    """The headers that sign a GET of an S3 object, with the credentials and region that the AWS SDK finds."""
    try:
        import botocore.auth
        import botocore.awsrequest
        import botocore.session
    except ImportError:
        raise ValueError("s3_sse_kms needs the package botocore: pip install botocore") from None
    session = botocore.session.get_session()
    credentials, region = session.get_credentials(), session.get_config_variable("region")
    if credentials is None or not region:
        raise ValueError("s3_sse_kms needs AWS credentials and a region: set AWS_ACCESS_KEY_ID and AWS_DEFAULT_REGION")
    request = botocore.awsrequest.AWSRequest("GET", url)
    botocore.auth.S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return {str(name): str(value) for name, value in request.headers.items()}
