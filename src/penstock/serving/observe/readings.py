"""Readings: from counters, once a second, to what each model did in the last seconds. Pure: time is an argument."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.core.contracts import ModelSnapshot, ServerSnapshot
from penstock.serving.observe.causes import Reading, ServerReading
from penstock.serving.observe.history import Key

LOOKED_S: Final = 10  # seconds that a reading covers
DEATHS_S: Final = 60.0  # a worker that died in this time is news
_PADDING: Final = (("tokens", "sent_tokens", "padded_tokens"), ("rows", "sent_rows", "padded_rows"))


class Work(NamedTuple):
    """Counters of one model version since its load. Times are sums over its batches; `prepare_s` has decoding and
    preprocessing, `preprocess_s` the second of them alone."""

    requests: float = 0
    answers: float = 0
    refused: float = 0
    memory_failed: float = 0
    died: float = 0
    leaking: float = 0
    batches: float = 0
    rows: float = 0.0
    run_s: float = 0.0
    prepare_s: float = 0.0
    preprocess_s: float = 0.0


class Machine(NamedTuple):
    """The machine at one time. `idle_s` sums over the cores since the start; `threads` has (CPU time, time waiting for
    a core) of the threads of each process, `loop` of the event loop's thread; `gpus` the utilization by index.
    `broker_s` is the last round trip to a broker."""

    cores: int = 1
    idle_s: float = 0.0
    threads: Mapping[int, Mapping[int, tuple[float, float]]] = {}
    loop: tuple[float, float] = (0.0, 0.0)
    gpus: Mapping[str, float] = {}
    broker_s: float = 0.0


class _Counts(NamedTuple):
    """The figures of a model in one second."""

    work: Work
    busy_s: float
    bytes: float
    rows: float
    done: float  # work of batches, in rows or tokens
    padding: float
    in_flight: float


class _Sample(NamedTuple):
    at_s: float
    models: Mapping[Key, _Counts]
    machine: Machine | None
    unsent_bytes: float
    pool: float


class Readings:
    """The readings of the last LOOKED_S. `add` is called once a second; `machine` is None without a viewer."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=LOOKED_S + 1)
        self._deaths: dict[Key, list[float]] = {}
        self._now = ServerSnapshot()

    def add(self, at_s: float, now: ServerSnapshot, work: Mapping[Key, Work], machine: Machine | None = None) -> None:
        """Adds the state at `at_s`."""
        before = self._samples[-1].models if self._samples else {}
        models = {m.key: _counts(m, work.get(m.key, Work())) for m in now.models}
        for key, counts in models.items():
            died = int(counts.work.died - before[key].work.died) if key in before else 0
            if died > 0:
                self._deaths.setdefault(key, []).extend([at_s] * died)
        self._deaths = {
            key: recent
            for key, times in self._deaths.items()
            if key in models and (recent := [t for t in times if t > at_s - DEATHS_S])
        }
        unsent = sum(found.unsent_bytes for found in now.listeners.values())
        pool = now.pool_used_bytes / now.pool_capacity_bytes if now.pool_capacity_bytes else 0.0
        self._samples.append(_Sample(at_s, models, machine, unsent, pool))
        self._now = now

    def read(self) -> list[Reading]:
        """The readings of all models; none before the second sample."""
        if len(self._samples) < 2:
            return []
        server = self._server()
        known = set.intersection(*(set(s.models) for s in self._samples))
        return [self._model(m, server) for m in self._now.models if m.key in known]

    def _machines(self) -> Sequence[tuple[float, Machine]]:
        """The first and the last time when the machine was read, and how it was then; nothing if that is one time."""
        found = [(s.at_s, s.machine) for s in self._samples if s.machine is not None]
        return (found[0], found[-1]) if len(found) > 1 else ()

    def _server(self) -> ServerReading:
        unsent, pool = min(s.unsent_bytes for s in self._samples), min(s.pool for s in self._samples)
        machines = self._machines()
        if not machines:
            return ServerReading(unsent_bytes=unsent, pool=pool)
        (began_s, first), (ended_s, last) = machines
        seconds = max(ended_s - began_s, 1e-3)
        ran_s, waited_s = (b - a for a, b in zip(first.loop, last.loop, strict=True))
        pids = {pid for m in self._now.models for pid in m.pids.values()}
        return ServerReading(
            cores=last.cores,
            idle=max(0.0, last.idle_s - first.idle_s) / seconds,
            runnable=sum(_threads(first, last, pid)[1] for pid in pids) / seconds,
            loop_busy=min(1.0, (ran_s + waited_s) / seconds),
            loop_cpu=ran_s / seconds,
            unsent_bytes=unsent,
            pool=pool,
            broker_s=min(s.machine.broker_s for s in self._samples if s.machine is not None),
        )

    def _model(self, model: ModelSnapshot, server: ServerReading) -> Reading:
        key, status, explained = model.key, model.status, model.scheduler
        kept = [s.models[key] for s in self._samples]
        a, b, seconds = kept[0], kept[-1], max(self._samples[-1].at_s - self._samples[0].at_s, 1e-3)
        work = Work(*(max(0, y - x) for x, y in zip(a.work, b.work, strict=True)))
        batches, requests = max(work.batches, 1), max(work.requests, 1)
        done, padding = b.done - a.done, b.padding - a.padding
        cpu, runnable, gpu = self._processes(model)
        fixed_s, row_s = _line(explained)
        return Reading(
            name=status.name,
            version=status.version,
            requests=work.requests / seconds,
            answers=work.answers / seconds,
            refused=work.refused / seconds,
            memory_failed=work.memory_failed / seconds,
            died=len(self._deaths.get(key, ())),
            leaking=int(b.work.leaking),
            up=status.ready_instances,
            busy=max(0.0, b.busy_s - a.busy_s) / seconds,
            working=work.run_s / seconds,
            batches=work.batches / seconds,
            rows=work.rows / batches,
            max_batch_size=status.max_batch_size,
            ceiling=explained.get("ceiling"),
            in_flight_rows=(b.rows - a.rows) / requests * sum(k.in_flight for k in kept) / len(kept),
            max_queue=model.max_queue_rows,
            decode_s=max(0.0, work.prepare_s - work.preprocess_s) / batches,
            preprocess_s=work.preprocess_s / batches,
            run_s=work.run_s / batches,
            fixed_s=fixed_s,
            row_s=row_s,
            helping=model.helpers // max(1, status.ready_instances),
            texts="sent_tokens" in explained,
            padded=padding / (done + padding) if padding > 0 else 0.0,
            body_bytes=max(0.0, b.bytes - a.bytes) / requests,
            cpu=cpu,
            runnable=runnable,
            gpu=gpu,
            server=server,
        )

    def _processes(self, model: ModelSnapshot) -> tuple[float, float, float | None]:
        """(cores that its workers use, threads of them that want one, utilization of its GPUs)."""
        machines = self._machines()
        if not machines:
            return 0.0, 0.0, None
        (began_s, first), (ended_s, last) = machines
        both = [_threads(first, last, pid) for pid in model.pids.values()]
        seconds = max(ended_s - began_s, 1e-3)
        cpu, runnable = sum(ran_s for ran_s, _ in both) / seconds, sum(wanted_s for _, wanted_s in both) / seconds
        devices = (*model.status.devices, *model.status.model_devices)
        gpus = {device.partition(":")[2] for device in devices if device.startswith("cuda")}
        used = [s.machine.gpus[i] for s in self._samples if s.machine for i in gpus if i in s.machine.gpus]
        return cpu, runnable, sum(used) / len(used) if used else None


def _counts(model: ModelSnapshot, work: Work) -> _Counts:
    done, padding = _padding(model.scheduler)
    return _Counts(work, model.busy_s, model.arrived_bytes, model.arrived_rows, done, padding, model.in_flight)


def _line(explained: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds of a batch, and of each row of it. Under a load that fills all batches the scheduler gives up its line;
    the smaller batches that it saw before still say more than that a batch of no rows takes no time."""
    points = sorted(explained.get("points", ()))
    if not explained.get("fitted") and points and points[-1][0] >= 1.5 * points[0][0]:
        (least, short_s, _), (most, long_s, _) = points[0], points[-1]
        row_s = max(0.0, (long_s - short_s) / (most - least))
        return max(0.0, long_s - row_s * most), row_s
    return float(explained.get("a_s", 0.0)), float(explained.get("b_s", 0.0))


def _padding(explained: Mapping[str, Any]) -> tuple[float, float]:
    """(rows or tokens that were sent, and that padding added)."""
    for _, sent, padded in _PADDING:
        if sent in explained:
            return float(explained[sent]), float(explained[padded])
    return 0.0, 0.0


def _threads(first: Machine, last: Machine, pid: int) -> tuple[float, float]:
    """(CPU time, time running or waiting for a core) of the threads of a process between two readings."""
    before, after = first.threads.get(pid, {}), last.threads.get(pid, {})
    pairs = [(before.get(tid, (0.0, 0.0)), times) for tid, times in after.items()] if before else []
    ran_s = sum(b[0] - a[0] for a, b in pairs)
    return ran_s, ran_s + sum(b[1] - a[1] for a, b in pairs)
