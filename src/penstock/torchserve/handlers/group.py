"""Workers that are groups of processes, as `torchrun` starts them: parallelType pp, tp and pptp, and the key torchrun.

The worker itself is rank 0 and answers. It starts the other ranks, each of which loads the handler and gets every batch
that rank 0 gets; their results are dropped. All have the environment of torch's own launcher. A group lives and dies as
one: a rank that ends ends the worker, and ending the worker ends its process group.
"""

import logging
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.errors import LoadFailed, PenstockError, describe
from penstock.torchserve.handlers.handler import HandlerModel
from penstock.torchserve.protocol.codec import HandlerRequest

log = logging.getLogger("penstock.torchserve")

PORT_TRIES: Final = 3  # another program takes a free port only by accident
_LENGTH: Final = struct.Struct("<Q")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[HandlerRequest]).decode


def launch_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of torch's launcher for a group on this machine."""
    same = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks)
    elastic = {"RESTART_COUNT": 0, "MAX_RESTARTS": 0, "RUN_ID": f"penstock-{os.getpid()}", "USE_AGENT_STORE": False}
    found = {**same, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ROLE_NAME": "default"}
    found |= {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    return {name: str(value) for name, value in found.items()}


class GroupHandlerModel(HandlerModel):
    """Rank 0 of a group."""

    def load(self, device: str) -> None:
        """Loads all ranks at once, and again if another program took their port. Raises LoadFailed, which names a
        rank that ended, and the errors of rank 0."""
        import_path = list(sys.path)  # rank 0 changes it
        for left in reversed(range(PORT_TRIES)):
            self._others = _OtherRanks(self.setup.ranks, _free_port(), import_path)
            try:
                self._others.load(
                    msgspec.to_builtins(self.setup), device, lambda: super(GroupHandlerModel, self).load(device)
                )
                return
            except Exception as e:
                self._others.end()
                if not left or "address already in use" not in str(e).lower():
                    raise
                log.warning("group_port_taken model=%s: another one is tried", self.setup.model_name)

    def _run(self, requests: list[HandlerRequest], places: list[int], count: int) -> list[Any]:
        self._others.send(requests)
        return super()._run(requests, places, count)

    def unload(self) -> None:
        """Ends the other ranks."""
        self._others.end()


class _OtherRanks:
    """The processes of ranks 1 and up. Each receives batches on one pipe and reports on another that it is ready."""

    def __init__(self, ranks: int, port: int, import_path: list[str]) -> None:
        self._ranks, self._port, self._import_path = ranks, port, import_path
        self._events: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._idle = [threading.Semaphore(0) for _ in range(ranks)]  # of each rank: it waits for a batch
        self._pipes: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loaded = self._ending = False

    def load(self, setup: dict[str, Any], device: str, load: Callable[[], None]) -> None:
        for rank in range(1, self._ranks):
            self._start(rank, _encode({"setup": setup, "device": device}))
        os.environ.update(launch_environment(0, self._ranks, self._port))

        def first() -> None:
            try:
                load()
                self._events.put((0, None))
            except BaseException as e:
                self._events.put((0, e))

        threading.Thread(target=first, name="penstock-rank-0", daemon=True).start()
        for _ in range(self._ranks):
            _, error = self._events.get()
            if error is not None:
                raise error
        self._loaded = True

    def _start(self, rank: int, first: bytes) -> None:
        environment = {**os.environ, **launch_environment(rank, self._ranks, self._port)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in self._import_path if path)
        batches, done = os.pipe(), os.pipe()
        command = [sys.executable, "-m", __name__, str(batches[0]), str(done[1])]
        process = subprocess.Popen(command, env=environment, pass_fds=(batches[0], done[1]))
        os.close(batches[0])
        os.close(done[1])
        self._processes.append(process)
        pipe = open(batches[1], "wb")  # noqa: SIM115 - open as long as the group lives
        self._pipes.append(pipe)
        _write(pipe, first)
        threading.Thread(target=self._watch, args=(rank, process, done[0]), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], done: int) -> None:
        loaded = False
        while os.read(done, 1):
            if not loaded:
                loaded = True
                self._events.put((rank, None))
            self._idle[rank].release()
        os.close(done)
        code = process.wait()
        if self._ending:
            return
        text = f"rank {rank} of {self._ranks} ended with exit code {code}"
        if not self._loaded:
            self._events.put((rank, LoadFailed(f"{text} while the model was loaded: its output shows why")))
            return
        log.critical("rank_ended: %s; the worker ends too", text)
        os._exit(1)

    def send(self, requests: list[HandlerRequest]) -> None:
        """Passes a batch on, once each rank has finished the one before. Raises ItemFailed if it cannot be sent."""
        data = _encode(requests)
        for rank, pipe in enumerate(self._pipes, 1):
            self._idle[rank].acquire()
            _write(pipe, data)

    def end(self) -> None:
        self._ending = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _write(pipe: Any, data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- another rank's process


def main(batches: int, done: int) -> None:
    """Loads the handler and runs it on every batch from rank 0; ends with rank 0, also in the middle of a batch."""
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        with open(batches, "rb") as pipe:
            while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
                frames.put(pipe.read(_LENGTH.unpack(head)[0]))
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    found = msgspec.msgpack.decode(frames.get())
    device, rank = found["device"], os.environ["RANK"]
    model = HandlerModel(setup=found["setup"])
    try:
        model.load(device if device == "cpu" else f"cuda:{rank}")
    except Exception as e:
        print(f"rank {rank} did not load: {describe(e)}", file=sys.stderr, flush=True)
        os._exit(1)
    while True:
        os.write(done, b"+")
        requests = _decode(frames.get())
        for request in requests:
            inputs = request.inputs
            request.inputs = {k: bytearray(v) if isinstance(v, bytes) else v for k, v in inputs.items()}
        try:
            model.predict(requests)
        except PenstockError:
            pass  # the handler's error is logged; rank 0 answers


if __name__ == "__main__":
    arguments, sys.argv[1:] = sys.argv[1:], []  # a model that parses options has none
    main(*map(int, arguments))
