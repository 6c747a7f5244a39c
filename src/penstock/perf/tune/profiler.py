"""Profiles one instance in a process of its own: does it load, how long do its batches take, what does it respond?

There is no server, no queue and no other instance. Settings that are too slow or too large here are so everywhere, and
ruling them out needs no load. `profile_instance` runs `python -m penstock.perf.tune.profiler`, which is that process.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, Final

import msgspec
from msgspec import Struct, field

from penstock.config.schema import ModelConfig
from penstock.core.worker.devices import environment
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import LoadFailed, OutOfMemory, PenstockError
from penstock.types import BatchPart, Item

RUNS: Final = 3
LOAD_KEYS: Final = ("precision", "optimize")  # keys that a model's `load` may not accept
BUDGET_S: Final = 20.0  # for all timed runs; a run that has started is finished
_PRINTED: Final = 4000  # characters of the process's output in an error


class RequestBody(Struct, frozen=True):
    """One request as it arrives over HTTP."""

    body: bytes
    content_type: str
    codec: str = "native"
    headers: dict[str, str] = {}


class ProfileRequest(Struct):
    """The input of the process. `bodies` are for timing, in turn; the responses to `samples` are compared.

    Batches of `sizes` are timed in order, until one takes longer than `limit_s`.
    """

    name: str
    config: ModelConfig
    device: str
    sys_path: list[str]
    bodies: list[RequestBody] = field(default_factory=list)
    samples: list[RequestBody] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    limit_s: float = 60.0


class SampleResponse(Struct):
    """The response to a sample, or its error."""

    body: bytes = b""
    content_type: str = ""
    error: str = ""


class InstanceProfile(Struct, tag="profile"):
    """The figures of one instance alone.

    `curve`: rows -> median seconds of a batch. `memory_bytes`: memory of the process at the end, excluding shared
    memory; `device_bytes`: the most that PyTorch reserved on the GPU, else 0. `oom_rows`: the size that ran out of
    memory. `fatal_rows`: the size that the process did not survive, as `fatal` says. `error`: the model failed on a
    request of `bodies`, which ended the timing. `ignores`: those of `LOAD_KEYS` that the model does not accept.
    `alone`: why requests run one by one, "" if they share batches. `cost_s`: the time that the profile took, with the
    start of the process.
    """

    curve: dict[int, float] = field(default_factory=dict)
    memory_bytes: int = 0
    device_bytes: int = 0
    oom_rows: int | None = None
    fatal_rows: int | None = None
    fatal: str = ""
    responses: list[SampleResponse] = field(default_factory=list)
    error: str = ""
    ignores: list[str] = field(default_factory=list)
    alone: str = ""
    cost_s: float = 0.0

    @property
    def failure(self) -> str:
        """Why one instance alone cannot serve the requests; "" if it can."""
        return self.error or ("a single request runs out of memory" if self.oom_rows == 1 else self.refusal(1))

    def refusal(self, rows: int) -> str:
        """Why batches of so many rows must not be used; "" if they may."""
        return self.fatal if self.fatal_rows is not None and rows >= self.fatal_rows else ""


class _Failure(Struct, tag="failure"):
    """Replaces the profile if the model did not load."""

    message: str
    detail: str = ""


def profile_instance(request: ProfileRequest) -> InstanceProfile:
    """The profile of one instance. Blocks; the process ends with this call and with this process.

    It has the environment of a worker. A batch that ends the process, or is too slow for it, ends the profile. Raises
    LoadFailed, with the process's output in its detail, if that happens before, or the model does not load.
    """
    spec = WorkerSpec(request.name, request.config.version, request.config, request.config.target)
    env, inner = environment(spec, request.device, os.environ)
    limit_s = request.config.load_timeout_s + BUDGET_S + 2 * request.config.batching.run_timeout_s
    # files, because a process that the model leaves behind would hold the end of a pipe open
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as order, tempfile.TemporaryFile() as found:
        order.write(msgspec.msgpack.encode(msgspec.structs.replace(request, device=inner)))
        order.seek(0)
        files = [order.fileno(), found.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.perf.tune.profiler", *map(str, files)],
            pass_fds=files,
            env=env,
            stdin=subprocess.PIPE,  # closes with this process, which ends the other one
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the parent only
        )
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        content = _whole(found)
        text = _whole(output)[-_PRINTED:].decode(errors="replace").strip()
    if late and not content:
        raise LoadFailed(f"'{request.name}' alone on {request.device} took longer than {limit_s:g} s", detail=text)
    if not content:
        raise LoadFailed(f"the process of '{request.name}' ended while the model was loaded and timed", detail=text)
    profile = msgspec.msgpack.decode(content, type=InstanceProfile | _Failure)
    if isinstance(profile, _Failure):
        raise LoadFailed(profile.message, detail="\n".join(filter(None, (profile.detail, text))))
    if profile.fatal_rows is not None:
        what = f"takes longer than {limit_s:g} s" if late else "ends the process of the model"
        profile.fatal = f"a batch of {profile.fatal_rows} {what}"
    return profile


def _whole(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


# ---- in the process


def main() -> None:
    """Reads a ProfileRequest; writes an InstanceProfile or a failure."""
    out, order = int(sys.argv.pop()), int(sys.argv.pop())  # a model that parses options has none
    with os.fdopen(order, "rb") as file:
        request = msgspec.msgpack.decode(file.read(), type=ProfileRequest)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found: InstanceProfile | _Failure
    try:
        found = profile_here(request, partial(_save, out))
    except PenstockError as error:
        found = _Failure(error.message, error.detail)
    _save(out, found)
    sys.stdout.flush()
    os._exit(0)  # the model's own threads must not delay the exit


def _save(file: int, found: InstanceProfile | _Failure) -> None:
    content = msgspec.msgpack.encode(found)
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))


def _end_with_parent() -> None:
    """Ends this process when the parent's end of its input closes."""
    os.read(0, 1)
    os._exit(1)


def profile_here(
    request: ProfileRequest, save: Callable[[InstanceProfile], None] = lambda profile: None
) -> InstanceProfile:
    """Loads the model in this process and runs it. `save` keeps the figures before a batch that may end the process.

    Raises LoadFailed, TargetNotFound, ConfigError.
    """
    # the sizes are timed below with real requests, unpadded: the model's own warm-up only covers its first calls, and
    # shows whether two rows depend on each other
    batching = msgspec.structs.replace(request.config.batching, max_batch_size=2, sizes="any")
    config = msgspec.structs.replace(request.config, batching=batching)
    spec = WorkerSpec(request.name, config.version, config, config.target, sys_path=request.sys_path)
    runner, ready = open_model(spec, request.device)
    ignores = [key for key in LOAD_KEYS if key not in runner.model.takes]
    profile = InstanceProfile(ignores=ignores)
    if ready.metadata.unbatched:
        profile.alone = ready.coupled or 'rows = "none"'
    profile.responses = [_sample_response(_run(runner, [sample])) for sample in request.samples]
    _time(runner, request, profile, save)
    profile.fatal_rows = None
    profile.memory_bytes, profile.device_bytes = _memory()
    return profile


def _time(
    runner: BatchRunner, request: ProfileRequest, profile: InstanceProfile, save: Callable[[InstanceProfile], None]
) -> None:
    end = time.monotonic() + BUDGET_S
    for size in [n for n in request.sizes if n == 1 or not profile.alone] if request.bodies else ():
        bodies = [request.bodies[i % len(request.bodies)] for i in range(size)]
        runs = []
        profile.fatal_rows = size
        save(profile)
        for _ in range(RUNS + 1):
            part = _run(runner, bodies)[-1]
            error = next((r.error for r in part.results if r is not None and r.error), None)
            if part.oom is not None or isinstance(error, OutOfMemory):
                profile.oom_rows = size
                profile.alone = f"{size} rows give another number of rows" if part.miscounted else ""
                return
            if error is not None:
                profile.error = error.message
                return
            runs.append(part.run_s + part.prepare_s)
            if time.monotonic() > end or runs[-1] > 2 * request.limit_s:
                break
        # the first run of a size pays for caches and allocators
        profile.curve[size] = statistics.median(runs[1:] or runs)
        if profile.curve[size] > request.limit_s or time.monotonic() > end:
            return


def _run(runner: BatchRunner, bodies: Sequence[RequestBody]) -> list[BatchPart]:
    """The parts of one batch's result, the final one last."""
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([_item(body) for body in bodies]), parts.append)
    return parts


def _item(body: RequestBody) -> Item:
    headers = [(name.lower().encode(), value.encode()) for name, value in body.headers.items()]
    return Item(body.body, body.codec, body.content_type, headers=headers or None)


def _sample_response(parts: list[BatchPart]) -> SampleResponse:
    """The response to a batch of one; a stream is joined."""
    results = [part.results[0] for part in parts if part.results and part.results[0] is not None]
    error = next((r.error for r in results if r.error is not None), None)
    if error is not None:
        return SampleResponse(error=error.message)
    content_type = results[0].content_type if results else ""
    return SampleResponse(b"".join(bytes(r.body) for r in results), content_type)


def _memory() -> tuple[int, int]:
    """(bytes of this process alone, most bytes that PyTorch reserved on the GPU)."""
    from penstock.core.readings import private_bytes  # psutil after the model: its load time excludes this import

    held = private_bytes(os.getpid())
    torch: Any = sys.modules.get("torch")
    device = 0
    if torch is not None and torch.cuda.is_initialized():
        device = torch.cuda.max_memory_reserved()
    return held, device


if __name__ == "__main__":
    main()
