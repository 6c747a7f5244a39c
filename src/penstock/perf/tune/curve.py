"""One instance alone, in a process of its own: does it load, how long do its batches take, what does it answer.

No server, no queue, no other instance: what is too slow or too large here is so everywhere, and needs no load to tell.
`python -m penstock.perf.tune.curve` is that process; `rehearse` starts it and waits.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct, field

from penstock.config.schema import ModelConfig
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.threads import environment
from penstock.errors import LoadFailed, OutOfMemory, PenstockError
from penstock.types import BatchPart, Item

RUNS: Final = 3
HANDED: Final = ("precision", "optimize")  # keys that a model may have no use for
BUDGET_S: Final = 20.0  # of all timed runs; one that has begun is ended
_PRINTED: Final = 4000  # characters of what the process printed, in an error


class Body(Struct, frozen=True):
    """One request, as it comes over HTTP. `codec` is "native" or that of an Open Inference body."""

    body: bytes
    content_type: str
    codec: str = "native"
    headers: dict[str, str] = {}


class Order(Struct):
    """What the process is asked. `bodies` are for timing, in turn; `samples` are those whose answers are wanted.

    Batches of `sizes` are timed in their order, until one takes longer than `limit_s`.
    """

    name: str
    config: ModelConfig
    device: str
    sys_path: list[str]
    bodies: list[Body] = field(default_factory=list)
    samples: list[Body] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    limit_s: float = 60.0


class Given(Struct):
    """One answer: its bytes, or the error that came in its place."""

    body: bytes = b""
    content_type: str = ""
    error: str = ""


class Rehearsal(Struct):
    """What one instance alone is like.

    `curve`: rows -> seconds of a batch, of its runs the median. `memory_bytes`: what the process, at the end, shared
    with no other; `device_bytes`: the most that PyTorch held on the GPU, 0 without. `oom_rows`: the size that ran out
    of memory. `error`: the model failed on a request of `bodies`, and nothing more was timed. `ignores` are those keys
    of `HANDED` that change nothing about this model.
    """

    load_s: float = 0.0
    curve: dict[int, float] = field(default_factory=dict)
    memory_bytes: int = 0
    device_bytes: int = 0
    oom_rows: int | None = None
    answers: list[Given] = field(default_factory=list)
    error: str = ""
    ignores: list[str] = field(default_factory=list)


class _Failed(Struct):
    """In place of a Rehearsal, when the model did not load."""

    message: str
    detail: str = ""


def rehearse(order: Order, *, instances: int = 1) -> Rehearsal:
    """What the process told. Blocks; the process ends with this call, and with this process.

    It has the environment of a worker that is one of `instances`. Raises LoadFailed, with what the model printed in its
    detail: it did not load, ended its process, or took longer than its own limits.
    """
    spec = WorkerSpec(order.name, order.config.version, order.config, order.config.target, instances)
    env, inner = environment(spec, order.device, os.environ)
    data = msgspec.msgpack.encode(msgspec.structs.replace(order, device=inner))
    limit_s = order.config.load_timeout_s + BUDGET_S + 2 * order.config.batching.run_timeout_s
    read, write = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read, "rb") as told:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.perf.tune.curve", str(write)],
            pass_fds=[write],
            env=env,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C is the parent's alone
        )
        os.close(write)
        try:
            answer = _answer(process, told, data, limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # what it never read
                process.stdin.close()
        printed.seek(0)
        text = printed.read()[-_PRINTED:].decode(errors="replace").strip()
    if answer is None:
        raise LoadFailed(f"'{order.name}' alone on {order.device} took longer than {limit_s:g} s", detail=text)
    if not answer:
        raise LoadFailed(f"the process of '{order.name}' ended while the model was loaded and timed", detail=text)
    if answer[:1] == b"-":
        failed = msgspec.msgpack.decode(answer[1:], type=_Failed)
        raise LoadFailed(failed.message, detail="\n".join(filter(None, (failed.detail, text))))
    return msgspec.msgpack.decode(answer[1:], type=Rehearsal)


def _answer(process: subprocess.Popen[bytes], told: BinaryIO, data: bytes, limit_s: float) -> bytes | None:
    """All that the process tells, b"" if it ended without, None if it takes longer than that."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: its answer, or that there is none, tells
        process.stdin.write(len(data).to_bytes(8, "big") + data)
        process.stdin.flush()
    pieces: list[bytes] = []
    end = time.monotonic() + limit_s
    while select.select([told], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(told.fileno(), 2**20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    return None


# ---- in the process


def main() -> None:
    """Reads an Order, answers with a Rehearsal or with why there is none."""
    out = int(sys.argv[1])
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=Order)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = b"+" + msgspec.msgpack.encode(perform(order))
    except PenstockError as error:
        answer = b"-" + msgspec.msgpack.encode(_Failed(error.message, error.detail))
    with os.fdopen(out, "wb") as told:
        told.write(answer)
    sys.stdout.flush()
    os._exit(0)  # a model's own threads shall not hold it up


def _end_with_parent() -> None:
    """Ends this process when the parent's end of its input closes."""
    os.read(0, 1)
    os._exit(1)


def perform(order: Order) -> Rehearsal:
    """Loads the model here and runs it. Raises LoadFailed, TargetNotFound, ConfigError."""
    started = time.monotonic()
    # sizes are timed below, with what callers send: the model's own warm-up is for what its first call pays for
    batching = msgspec.structs.replace(order.config.batching, max_batch_size=1)
    config = msgspec.structs.replace(order.config, batching=batching)
    spec = WorkerSpec(order.name, config.version, config, config.target, sys_path=order.sys_path)
    runner, _ = open_model(spec, order.device)
    ignores = [key for key in HANDED if key not in runner.model.takes]
    found = Rehearsal(load_s=time.monotonic() - started, ignores=ignores)
    found.answers = [_given(_run(runner, [sample])) for sample in order.samples]
    _time(runner, order, found)
    found.memory_bytes, found.device_bytes = _memory()
    return found


def _time(runner: BatchRunner, order: Order, found: Rehearsal) -> None:
    end = time.monotonic() + BUDGET_S
    for size in order.sizes if order.bodies else ():
        bodies = [order.bodies[i % len(order.bodies)] for i in range(size)]
        runs = []
        for _ in range(RUNS + 1):
            part = _run(runner, bodies)[-1]
            error = next((r.error for r in part.results if r is not None and r.error), None)
            if part.oom is not None or isinstance(error, OutOfMemory):
                found.oom_rows = size
                return
            if error is not None:
                found.error = error.message
                return
            runs.append(part.run_s + part.prepare_s)
            if time.monotonic() > end or runs[-1] > 2 * order.limit_s:
                break
        # the first run of a size pays for caches and allocators
        found.curve[size] = statistics.median(runs[1:] or runs)
        if found.curve[size] > order.limit_s or time.monotonic() > end:
            return


def _run(runner: BatchRunner, bodies: Sequence[Body]) -> list[BatchPart]:
    """What one batch gave: any number of parts, the final one last."""
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([_item(body) for body in bodies]), parts.append)
    return parts


def _item(body: Body) -> Item:
    headers = [(name.lower().encode(), value.encode()) for name, value in body.headers.items()]
    return Item(body.body, body.codec, body.content_type, headers=headers or None)


def _given(parts: list[BatchPart]) -> Given:
    """The answer to a batch of one; where it came in parts, these end to end."""
    results = [part.results[0] for part in parts if part.results and part.results[0] is not None]
    error = next((r.error for r in results if r.error is not None), None)
    if error is not None:
        return Given(error=error.message)
    kind = results[0].content_type if results else ""
    return Given(b"".join(bytes(r.body) for r in results), kind)


def _memory() -> tuple[int, int]:
    """(bytes that this process alone holds, most that PyTorch held on the GPU)."""
    import psutil  # after the model: what is loaded for it is not ours to delay

    held = psutil.Process().memory_full_info().uss
    torch: Any = sys.modules.get("torch")
    device = 0
    if torch is not None and torch.cuda.is_initialized():
        device = torch.cuda.max_memory_reserved()
    return held, device


if __name__ == "__main__":
    main()
