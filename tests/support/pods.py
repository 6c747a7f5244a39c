"""Pod rehearsal: runs a container's command as local processes, with its environment, paths, ports, user and probes.

Linux namespaces give the container a root, a network and processes of its own. Users other than root need the system's
permission to create namespaces, and the container's user is then theirs. Without it, the tests are skipped.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import psutil
import pytest

import penstock
from support.containers import Container, Probe
from support.waiting import wait_for

INIT = Path(__file__).with_name("pod_init.py")
SOURCES = Path(penstock.__file__).parents[1]
IS_ROOT = os.geteuid() == 0
UNSHARE = ["unshare", *([] if IS_ROOT else ["--user", "--map-root-user"]), "--mount", "--net", "--ipc", "--uts"]
READY_S = 30.0
PROBE_S = 0.01


@cache
def refusal() -> str:
    """Why this process cannot isolate a container; "" if it can."""
    with tempfile.TemporaryDirectory() as folder:
        pod = Pod(Container(cmd=("true",)), Path(folder), check=False)
        try:
            return "" if pod.wait() == 0 else pod.said()
        finally:
            pod.close()


class Pod:
    """A running container. `volumes` are folders by the path at which the container sees them."""

    def __init__(
        self, container: Container, folder: Path, volumes: Mapping[str, Path] | None = None, *, check: bool = True
    ) -> None:
        if check and refusal():
            pytest.skip(f"no container can be isolated here: {refusal()[-300:]}")
        self.container = container
        self.uid = container.uid if IS_ROOT else 0  # another user's namespace has only one
        self._folder = folder / "pod"
        (self._folder / "scratch").mkdir(parents=True)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - an unread pipe would block the container
        for volume in (volumes or {}).values():
            if volume.stat().st_mode & 0o5 != 0o5:
                volume.chmod(0o755)  # temporary folders are their owner's alone
        spec = {
            "argv": container.argv,
            "env": self._env(),
            "uid": self.uid,
            "workdir": container.workdir,
            "read_only": container.read_only,
            "keep": sorted({sys.prefix, sys.base_prefix, str(SOURCES)} - {"/usr", "/usr/local"}),
            "mounts": [
                *((str(source), at) for at, source in (volumes or {}).items()),
                *((sys.prefix, at) for at in container.venvs),
            ],
            "copies": [(str(source), at) for at, source in container.copies.items()],
        }
        (self._folder / "spec.json").write_text(json.dumps(spec))
        self.began_s = time.monotonic()
        self._process = subprocess.Popen(
            [*UNSHARE, sys.executable, "-I", str(INIT), str(self._folder / "spec.json")],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _env(self) -> dict[str, str]:
        env = {"HOME": "/", **self.container.env}
        if "PYTHONPATH" in os.environ:  # Penstock is not installed
            env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(SOURCES)])
        return env

    # ---- state

    @property
    def pid(self) -> int:
        """The container's process 1, as this machine numbers it."""
        file = self._folder / "pid"
        while not file.exists():
            assert self._process.poll() is None, self.said()
            time.sleep(0.001)
        return int(file.read_text())

    def said(self) -> str:
        return os.pread(self._log.fileno(), 2**24, 0).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        """Waits until the container has printed the text."""
        wait_for(lambda: text in self.said(), READY_S, said=self.said)

    def processes(self) -> list[psutil.Process]:
        """Process 1 and all its descendants."""
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def uids(self) -> set[int]:
        """The users of all processes."""
        return {each.uids().real for each in self.processes()}

    def wait_ready(self, limit_s: float = READY_S) -> float:
        """Waits until the startup and readiness probes succeed; the seconds since the start."""
        probes = [
            self.container.probes[name] for name in ("startupProbe", "readinessProbe") if name in self.container.probes
        ]
        assert probes, "the container has no readiness probe"
        end = self.began_s + limit_s
        for probe in probes:
            while not self.probe(probe):
                assert self._process.poll() is None, f"exit {self._process.returncode}\n{self.said()}"
                assert time.monotonic() < end, f"not ready after {limit_s:g} s\n{self.said()}"
                time.sleep(PROBE_S)
        return time.monotonic() - self.began_s

    def probe(self, probe: Probe) -> bool:
        if probe.command:
            return self.run(*probe.command).returncode == 0
        try:
            if probe.path:
                return 200 <= self.request("GET", probe.path, port=probe.port, tls=probe.tls)[0] < 400
            self.socket(probe.port).close()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def run(self, *command: str) -> subprocess.CompletedProcess[bytes]:
        """Runs a command in the container, as its user."""
        user = ["-S", str(self.uid), "-G", str(self.uid)] if IS_ROOT else ["--user", "--preserve-credentials"]
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--net", "--ipc", "--uts", "--pid", "--root", "--wd", *user]
        env = [f"{name}={value}" for name, value in self._env().items()]
        return subprocess.run([*enter, "env", "-i", *env, *command], capture_output=True, timeout=READY_S)

    # ---- requests

    def socket(self, port: int) -> socket.socket:
        """A connection to a port of the container."""
        assert self.pid  # the agent listens
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(str(self._folder / "agent"))
            agent.send(str(port).encode())
            data, fds, _, _ = socket.recv_fds(agent, 16, 1)
        if not fds:
            error = int(data or b"111")  # the agent ended with the container
            raise OSError(error, os.strerror(error))
        found = socket.socket(fileno=fds[0])
        found.settimeout(READY_S)
        return found

    def connect(self, port: int = 0, tls: bool = False) -> http.client.HTTPConnection:
        """An HTTP connection, by default to the first port. As with the kubelet, any certificate will do."""
        connection = http.client.HTTPConnection("127.0.0.1", timeout=READY_S)
        connection.sock = self.socket(port or self.container.ports[0])
        if tls:
            connection.sock = ssl._create_unverified_context().wrap_socket(connection.sock)
        return connection

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        port: int = 0,
        tls: bool = False,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """The status, the body and the headers (in lower case) of one answer."""
        with contextlib.closing(self.connect(port, tls)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}

    @contextlib.contextmanager
    def forward(self, port: int) -> Iterator[str]:
        """`host:port` on this machine that leads to a port of the container, like kubectl port-forward."""
        threads: list[threading.Thread] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepting = threading.Thread(target=self._accept, args=(listener, port, threads))
            accepting.start()
            yield f"127.0.0.1:{listener.getsockname()[1]}"
            listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join()

    def _accept(self, listener: socket.socket, port: int, threads: list[threading.Thread]) -> None:
        while True:
            try:
                outer = listener.accept()[0]
            except OSError:
                return
            try:
                inner = self.socket(port)
            except OSError:  # the container's port is closed
                outer.close()
                continue
            threads.append(threading.Thread(target=_relay, args=(outer, inner)))
            threads[-1].start()

    # ---- end

    def terminate(self) -> None:
        """Sends SIGTERM to process 1, as the kubelet does."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """The exit status, within the grace period."""
        return self._process.wait(self.container.grace_s)

    def close(self) -> None:
        """Kills what is left."""
        if (self._folder / "pid").exists() and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class Load:
    """Clients that send a request over and over until the port is closed. A request counts as lost if it was sent and
    not answered with `expected`."""

    def __init__(self, pod: Pod, path: str, body: bytes, expected: bytes, *, clients: int = 8, **headers: str) -> None:
        self.answered = 0
        self.lost: list[str] = []
        self._request = (path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        self.pod, self._expected = pod, expected
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self) -> None:
        path, body, headers = self._request
        while True:
            try:
                connection = self.pod.connect()
            except OSError:  # the port is closed: no request was accepted
                return
            with contextlib.closing(connection):
                while self._exchange(connection, path, body, headers):
                    pass

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]
    ) -> bool:
        """One request; False if it was the last of its connection."""
        try:
            connection.request("POST", path, body, dict(headers))
            answer = connection.getresponse()
            found = answer.read()
        except (OSError, http.client.HTTPException) as e:
            self.lost.append(repr(e))
            return False
        if answer.status != 200 or found != self._expected:
            self.lost.append(f"{answer.status} {found[:200]!r}")
        self.answered += 1
        return not answer.will_close

    def until(self, answered: int) -> None:
        wait_for(
            lambda: self.answered >= answered, READY_S, said=lambda: (self.answered, self.lost[:3], self.pod.said())
        )

    def join(self) -> None:
        for thread in self._threads:
            thread.join(self.pod.container.grace_s)
            assert not thread.is_alive()


class GrpcLoad(Load):
    """The same with calls: `address` leads to the container's port, `method` is its path."""

    def __init__(self, pod: Pod, address: str, method: str, request: bytes, expected: bytes) -> None:
        self._address = address
        super().__init__(pod, method, request, expected)

    def _client(self) -> None:
        import grpc

        method, request, _ = self._request
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        with grpc.insecure_channel(self._address, options) as channel:
            call = channel.unary_unary(method)
            while True:
                try:
                    found = call(request, timeout=READY_S)
                except grpc.RpcError as e:
                    if "failed to connect" in (e.details() or ""):  # the port is closed: the call was not sent
                        return
                    self.lost.append(f"{e.code()} {e.details()}")
                    continue
                if found != self._expected:
                    self.lost.append(repr(found[:200]))
                self.answered += 1


def survives_sigterm(*loads: Load) -> None:
    """Ends the containers under load and asserts that no accepted request was lost."""
    for load in loads:
        load.until(50)
    for pod in {load.pod for load in loads}:  # a second signal would end it at once
        pod.terminate()
    for load in loads:
        load.join()
        assert load.pod.wait() == 0, load.pod.said()
        assert load.lost == []


def _relay(outer: socket.socket, inner: socket.socket) -> None:
    """Passes bytes on in both directions, until both ends have closed theirs."""
    others = {outer: inner, inner: outer}
    with outer, inner, contextlib.suppress(OSError):
        while others:
            for source in select.select(list(others), [], [])[0]:
                if data := source.recv(2**16):
                    others[source].sendall(data)
                else:
                    others.pop(source).shutdown(socket.SHUT_WR)
