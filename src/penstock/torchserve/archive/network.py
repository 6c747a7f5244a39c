"""What a model needs from the network: its archive.

Downloads come from allowed URLs only: no redirects, no private addresses, bounded bytes and time.
"""

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

from penstock.torchserve.archive import ArchiveExists, DownloadFailed, UrlForbidden

log = logging.getLogger("penstock.torchserve")

CHUNK_BYTES: Final = 1 << 20
IDLE_TIMEOUT_S: Final = 30.0  # without a byte
TIMEOUT_S: Final = 3600.0  # the whole download: 100 GB at 28 MB/s


def download(
    url: str, target: Path, allowed_urls: Sequence[str], *, sha256: str = "", sign_s3: bool = False, max_bytes: int
) -> None:
    """Writes the file at the URL to `target`, completely or not at all. The caller has matched `allowed_urls`.

    The host name is resolved once, and the connection goes to the address that was checked. A non-public address is
    accepted only if a matching allowed URL spells out the host. Raises UrlForbidden, DownloadFailed, and
    ArchiveExists if `target` appears meanwhile.
    """
    parts = urlsplit(url)
    try:
        if parts.username is not None or parts.password is not None or not parts.hostname:
            raise ValueError("the URL has a name and password, or no host")
        addresses = _resolve(url, parts, allowed_urls)
        headers = _s3_headers(url) if sign_s3 else {}
        deadline_s = time.monotonic() + TIMEOUT_S
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
        try:
            with open(handle, "wb") as out, _DeadlineReader(_connect(addresses), deadline_s) as reader:
                _save(_request(parts, headers, reader), out, sha256, max_bytes)
            os.link(temporary, target)  # unlike a rename, never replaces a file
        finally:
            os.unlink(temporary)
    except FileExistsError:
        raise ArchiveExists(f"Model file already exists {target.name}") from None
    except (OSError, ValueError, http.client.HTTPException) as e:
        shown = parts._replace(query="", fragment="", netloc=parts.netloc.rpartition("@")[2]).geturl()
        log.warning("download failed url=%s reason=%r", shown, str(e) or type(e).__name__)
        raise DownloadFailed(f"Failed to download archive from: {url}", detail=str(e) or type(e).__name__) from None


def _resolve(url: str, parts: SplitResult, allowed_urls: Sequence[str]) -> list[tuple[str, int]]:
    """The host's addresses with the port. Raises UrlForbidden if one of them is not public, OSError."""
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = [info[4] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    named = any(re.fullmatch(pattern, url) and _spells_out(pattern, host) for pattern in allowed_urls)
    for address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        public = getattr(ip, "ipv4_mapped", None) or ip
        if not (named or (public.is_global and not public.is_multicast)):
            log.warning("download refused host=%s address=%s: not public, and no allowed URL names this host", host, ip)
            raise UrlForbidden(f"Given URL {url} does not match any allowed URL(s)", detail=f"{host} is at {ip}")
    return [(str(address[0]), port) for address in found]


def _spells_out(pattern: str, host: str) -> bool:
    """Whether a regular expression contains the host literally, without wildcards."""
    literal = pattern.replace("\\", "").lower()
    name = f"[{host}]" if ":" in host else host
    return any(f"://{name}{end}" in literal for end in "/:")


def _connect(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    """A connection to the first address that accepts. Raises the last address's OSError."""
    for address in addresses[:-1]:
        try:
            return socket.create_connection(address, timeout=IDLE_TIMEOUT_S)
        except OSError:
            continue
    return socket.create_connection(addresses[-1], timeout=IDLE_TIMEOUT_S)


def _request(parts: SplitResult, headers: dict[str, str], reader: _DeadlineReader) -> http.client.HTTPResponse:
    """The response's head, the body still unread. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    if parts.scheme == "https":
        reader.sock = ssl.create_default_context().wrap_socket(reader.sock, server_hostname=parts.hostname)
    connection.sock = reader
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    connection.request("GET", path, headers={"Host": host, "Accept-Encoding": "identity", **headers})
    return connection.getresponse()


def _save(response: http.client.HTTPResponse, out: BinaryIO, sha256: str, max_bytes: int) -> None:
    """Writes the response's body. Raises OSError, or ValueError unless it is the complete, expected file."""
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


class _DeadlineReader(io.RawIOBase):
    """A socket for http.client on which every read ends by the deadline, however slowly bytes arrive."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.sock = sock
        self._deadline_s = deadline_s

    def sendall(self, data: bytes) -> None:
        self.sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the download took too long")
        self.sock.settimeout(min(left_s, IDLE_TIMEOUT_S))
        return self.sock.recv_into(buffer)

    def close(self) -> None:
        """Does nothing: http.client closes the socket of a response that it still reads."""

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def _s3_headers(url: str) -> dict[str, str]:
    """The headers that sign a GET of an S3 object, with the AWS SDK's credentials and region."""
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
