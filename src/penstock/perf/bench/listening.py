"""Whose process listens at a port of this machine, and what else it listens at: by these a server is watched."""

from __future__ import annotations

import psutil

from penstock.client.endpoint import Endpoint
from penstock.errors import PenstockError
from penstock.perf.bench.ask import ask

_MOST = 6  # listeners of one server that are looked at
_ASK_S = 2.0
_METRICS = (b"penstock_", b"ts_inference_", b"QueueTime", b"nv_inference_")


def process_at(port: int) -> int | None:
    """The process that listens at the port; None where it cannot be seen (another user's, or in a container)."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows only root those of others
        return None
    for connection in found:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return int(connection.pid)
    return None


def listeners_beside(endpoint: Endpoint, pid: int | None, token: str | None) -> tuple[Endpoint | None, Endpoint | None]:
    """(the listener of metrics, that of management) of the server at `endpoint`; None for what is not found.

    Where Penstock and TorchServe have them by default is looked at first: one and two ports on.
    """
    metrics = management = None
    token = None if pid is None else token  # whoever listens there may not be the one it is for
    for port in _ports(endpoint.port, pid):
        at = Endpoint(endpoint.host, port, "", endpoint.tls)
        if metrics is None and any(word in _body(at, "/metrics", token) for word in _METRICS):
            metrics = at
        if management is None and b'"models"' in _body(at, "/models", token):
            management = at
    return metrics, management


def _ports(port: int, pid: int | None) -> list[int]:
    usual = [port + 2, port + 1, port]
    if pid is None:
        return [p for p in usual if p < 65536]
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return [port]
    own = {int(c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    return sorted(own, key=lambda p: (p not in usual, p == port, p))[:_MOST]


def _body(at: Endpoint, path: str, token: str | None) -> bytes:
    try:
        reply = ask(at, "GET", path, token=token, timeout_s=_ASK_S)
    except (PenstockError, ValueError):
        return b""
    return reply.body if reply.ok else b""
