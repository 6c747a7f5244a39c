"""The protocol of the shared batcher's socket: its address, its users, the offer, the messages, and their values.

The socket is in a directory that only this user can enter, and both ends check the user at the other end, which the
kernel reports. So no trust boundary lies between them: a process that can write to the socket can already read the
memory of both processes and send them signals. Values cross it as pickles for this reason. The batcher passes them on
as bytes and never loads them: it imports neither the application nor NumPy nor PyTorch.

The frames and most messages are those between a process and its own child.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import pickle
import re
import socket
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock._version import __version__
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core import os_threads
from penstock.core.transports.launch import PackedTarget, pack_target
from penstock.core.wire import messages
from penstock.core.wire.objects import dumps
from penstock.core.worker.spec import Wrapped
from penstock.errors import BadOutput, BadRequest, ConfigError, PenstockError, describe
from penstock.streamer.model import StreamerModel
from penstock.streamer.shared.code import code_digest
from penstock.tracing import SpanRecord
from penstock.types import Item
from penstock.values import prepare

VERSION = __version__

# ---- the socket

DIRECTORY_VARIABLE: Final = "PENSTOCK_RUNTIME_DIR"
READY: Final = b"1"  # from a new batcher that listens
STARTER_FD: Final = 3  # of the batcher: a socket to the process that starts it
CONNECT_S: Final = 10.0  # for a batcher with a full backlog
MAX_PATH_BYTES: Final = 107  # of a Unix socket on Linux
IDENTITY: Final = 8  # hexadecimal digits
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OPEN: set[Any] = set()  # sockets of this process


def socket_path(shared: str) -> str:
    """The path with which the files of a name begin, from the name or an absolute path. Creates the directory.

    The socket of a batcher is PATH.IDENTITY. Names are in $PENSTOCK_RUNTIME_DIR, or in `penstock-UID` of the directory
    for temporary files. Raises ConfigError.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise ConfigError("a shared streamer needs Linux, which reports the user at the other end of a socket")
    if os.path.isabs(shared):
        path = os.path.normpath(shared)
    elif _NAME.fullmatch(shared):
        root = os.environ.get(DIRECTORY_VARIABLE)
        if not root:
            advice = f"{DIRECTORY_VARIABLE} to a directory of your own for the socket"
            root = f"{os_threads.temporary_folder(advice)}/penstock-{os.geteuid()}"
        path = os.path.join(os.path.abspath(root), f"{shared}.sock")
    else:
        raise ConfigError(
            f"shared: found {shared!r}, expected an absolute path, or a name of at most 64 letters, digits, '.', '_'"
            " and '-' that begins with a letter or a digit"
        )
    if len(os.fsencode(path)) > (most := MAX_PATH_BYTES - 1 - IDENTITY):
        raise ConfigError(
            f"the path of the socket, {path}, has more than {most} bytes: set {DIRECTORY_VARIABLE} to a shorter"
            " directory"
        )
    _check_directory(os.path.dirname(path))
    return path


def socket_paths(path: str) -> list[str]:
    """The sockets of a name's batchers, the newest first. They may be dead."""
    found: list[tuple[int, str]] = []
    for each in glob.glob(f"{glob.escape(path)}.{'[0-9a-f]' * IDENTITY}"):
        with suppress(FileNotFoundError):  # it ends
            found.append((os.stat(each).st_mtime_ns, each))
    return [each for _, each in sorted(found, reverse=True)]


def _check_directory(directory: str) -> None:
    """Creates the directory. Raises ConfigError unless this user owns it, and no other can use it."""
    try:
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass
        found = os.lstat(directory)
    except OSError as e:
        raise ConfigError(
            f"the directory {directory} for the socket cannot be made: {e.strerror}; set {DIRECTORY_VARIABLE}"
        ) from e
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{directory}, for the socket, is not a directory: remove it, or set {DIRECTORY_VARIABLE}")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the directory {directory} for the socket belongs to user {found.st_uid}, expected user {os.geteuid()}:"
            f" set {DIRECTORY_VARIABLE} to a directory of your own"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"the directory {directory} for the socket has mode {mode:04o}, expected 0700: others could reach the"
            f" socket; run chmod 700 {directory}"
        )


def connected(path: str) -> Any:
    """A socket that is connected to the batcher; None if none listens. Raises ConfigError."""
    sock = keep(os_threads.unix_socket())
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(path)
        check_peer(sock)
    except (FileNotFoundError, ConnectionRefusedError):  # never started; or dead, and its file is left
        close(sock)
        return None
    except BaseException as e:
        close(sock)
        if isinstance(e, OSError):
            raise ConfigError(f"the batcher at {path} cannot be reached: {e}") from e
        raise
    return sock


def listening(path: str) -> Any:
    """A non-blocking listener in place of the file that a dead batcher left. The caller holds the batcher's lock.

    Raises ConfigError if something else is at the path.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is not a socket: remove it, or use another name")
        os.unlink(path)
    except FileNotFoundError:
        pass
    sock = os_threads.unix_socket()
    before = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    sock.listen(socket.SOMAXCONN)
    sock.setblocking(False)
    return sock


def check_peer(sock: Any) -> None:
    """Raises ConfigError unless the process at the other end belongs to the user of this process."""
    uid = peer_uid(sock)
    if uid != os.geteuid():
        raise ConfigError(f"the other end of the socket belongs to user {uid}, expected user {os.geteuid()}")


def peer_uid(sock: Any) -> int:
    """The user of the process at the other end, as the kernel recorded it when that process connected or listened."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


def keep(sock: Any) -> Any:
    """The socket. A process that is forked before `close` closes its copy, so that the peer sees the end in time."""
    _OPEN.add(sock)
    return sock


def close(sock: Any) -> None:
    """Closes a socket of `keep`. Idempotent."""
    _OPEN.discard(sock)
    sock.close()


def _after_fork() -> None:
    for sock in list(_OPEN):
        close(sock)


os.register_at_fork(after_in_child=_after_fork)

# ---- the offer

CODE: Final = "the digest of its code"


class Offer(Struct):
    """The configuration and the model with which a process offers to start a batcher."""

    config: ModelConfig
    limits: LimitsConfig
    target: bytes
    files: list[tuple[str, str]]  # see PackedSpec
    main: str
    sys_path: list[str]
    linger_s: float
    settings: dict[str, str]  # by the names of the streamer's arguments; equal for all clients of a batcher

    def packed_target(self) -> PackedTarget:
        return PackedTarget(self.target, self.files, self.main)

    @property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:IDENTITY]

    def renewed(self) -> Offer:
        """The offer with the code that a batcher would load now: files may have changed since this process started."""
        return msgspec.structs.replace(self, settings={**self.settings, CODE: code_digest(self.packed_target())})

    def differences(self, settings: Mapping[str, str]) -> str:
        """Between the `settings` of another batcher and of this offer."""
        return ", ".join(
            f"{name} is {settings.get(name, '(unknown)')} there and {mine} here"
            for name, mine in self.settings.items()
            if settings.get(name) != mine
        )


def offer_of(config: ModelConfig, target: Wrapped, limits: LimitsConfig, linger_s: float) -> Offer:
    """The offer of a streamer, whose `target` is wrapped as a StreamerModel. Raises LoadFailed if it cannot be sent."""
    packed = pack_target(Wrapped(target.target, f"{SealedModel.__module__}:{SealedModel.__name__}", target.arguments))
    batching = config.batching
    assert batching.max_queue is not None
    settings = {
        "the model": f"{getattr(target.target, '__module__', '')}.{config.target}",
        "batch_size": str(batching.max_batch_size),
        "max_latency": str(batching.max_hold_s),
        "worker_num": str(config.instances),
        "cuda_devices": ",".join(config.devices),
        "the longest run in seconds (3 x worker_timeout)": f"{batching.run_timeout_s:g}",
        "slo_s": str(batching.slo_s),
        "timeout_s": f"{batching.timeout_s:g}",
        "max_queue": str(batching.max_queue),
        "max_queue_bytes": str(limits.max_queue_bytes),
        "idempotent": str(batching.idempotent),
        "linger_s": f"{linger_s:g}",
        "the digest of the model's name, file and arguments": _digest(target, packed.files),
        CODE: code_digest(packed),
        "the version of Penstock": VERSION,
    }
    sys_path = [path or os.getcwd() for path in sys.path]
    return Offer(config, limits, packed.data, packed.files, packed.main, sys_path, linger_s, settings)


def _digest(target: Wrapped, files: Sequence[tuple[str, str]]) -> str:
    """Equal in all processes that give the same target with the same arguments."""
    arguments = {name: _plain(value) for name, value in target.arguments.items()}
    data = dumps([target.target, arguments, list(files)], lambda _: True)
    return hashlib.sha256(data).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """The value with its sets in a fixed order: sets of strings differ in order between processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if type(value) in (list, tuple):
        return [_plain(each) for each in value]
    if type(value) is dict:
        return [[key, _plain(each)] for key, each in value.items()]
    return value


# ---- messages


class JoinMessage(Struct, array_like=True, tag="join"):
    """The first message of a client. `guest`: it has no model, and accepts any."""

    version: str
    guest: bool


class WelcomeMessage(Struct, array_like=True, tag="welcome"):
    """The response, with the descriptors of shared memory for requests and for replies.

    `max_rows` and `max_bytes`: of the unanswered calls of one client.
    """

    pid: int
    request_bytes: int
    reply_bytes: int
    max_rows: int
    max_bytes: int
    idempotent: bool
    loading: bool


class LoadedMessage(Struct, array_like=True, tag="loaded"):
    """To all clients: the model is loaded."""


class SpanMessage(Struct, array_like=True, tag="span"):
    """To the client of a traced call: a finished span of the batcher."""

    span: SpanRecord


class CallMessage(Struct, array_like=True, tag="call"):
    """A call, whose answer is a PartMessage. `item.budget_s` is the time left. `free`: see RunBatch.

    `asks`: "" for the results of the item, or "ready" or "statistics", which need no item.
    """

    id: int
    item: Item | None
    free: list[int]
    asks: str = ""


ToBatcher = JoinMessage | CallMessage | messages.FreeReplies | messages.AbandonBatch
FromBatcher = WelcomeMessage | LoadedMessage | SpanMessage | messages.PartMessage | messages.WorkerFailed
_encode_offer = msgspec.msgpack.Encoder().encode
prepare(ToBatcher, FromBatcher)
read_offer = msgspec.msgpack.Decoder(Offer).decode


def write_offer(offer: Offer) -> bytes:
    """The offer for `read_offer`. Raises PenstockError if an option of the configuration is no plain value."""
    try:
        return _encode_offer(offer)
    except TypeError as e:
        raise PenstockError(f"the settings of a shared streamer must be plain values: {e}") from e


# ---- values


class Sealed(messages.Pickled):
    """A pickled value. Within another pickle, its large parts stay out of band."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return len(self._data) + sum(memoryview(part).nbytes for part in self._buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data = pickle.PickleBuffer(self._data) if len(self._data) > messages.LARGE_BYTES else self._data
        return Sealed, (data, [pickle.PickleBuffer(part) for part in self._buffers])


def seal(value: object) -> Sealed:
    """The value, pickled. Its large arrays are not copied. Raises the errors of pickle."""
    large: list[memoryview] = []
    return Sealed(dumps(value, partial(messages.in_band, large)), large)


def seal_item(value: object) -> Sealed | messages.Unsent:
    """An item for the worker; an error in its place if it cannot be pickled."""
    try:
        return seal(value)
    except Exception as e:
        return messages.unsent(value, e)


def opened(result: messages.Pickled) -> Any:
    """The value of one result, or its error; also an error if it cannot be loaded here."""
    try:
        return result.load()
    except Exception as e:
        return BadOutput(f"the result cannot be unpickled in this process: {type(e).__name__}", detail=repr(e))


def put_values(outbox: messages.MessageWriter, values: list[Any]) -> list[Any]:
    """The form of sealed values, and of errors in their place, in a message."""
    return [
        outbox.put_error(value.error)
        if type(value) is messages.Unsent
        else outbox.put_pickled(value._data, value._buffers)
        for value in values
    ]


def sealed_values(values: list[messages.Pickled | PenstockError]) -> list[Sealed | messages.Unsent]:
    """The values of a received message, sealed as they came."""
    return [messages.Unsent(v) if isinstance(v, PenstockError) else Sealed(v._data, v._buffers) for v in values]


class SealedModel(StreamerModel):
    """A streamer's model in a worker of a shared batcher: opens the items, and seals the results."""

    def preprocess(self, item: Sealed) -> Any:
        """Raises BadRequest."""
        try:
            return item.load()
        except Exception as e:
            raise BadRequest(f"the item cannot be unpickled in the worker: {describe(e)}", detail=repr(e)) from e

    def postprocess(self, result: Any) -> Sealed:
        """Raises BadOutput."""
        try:
            return seal(result)
        except Exception as e:
            text = f"the model returned a {type(result).__name__} that cannot be pickled"
            raise BadOutput(text, detail=repr(e)) from e
