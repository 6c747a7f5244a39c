"""A Bench over a real app: a server of its own that is loaded and measured, and one instance alone beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
from msgspec import Struct

from penstock.client.errors import Unreachable
from penstock.core.worker.devices import expanded
from penstock.errors import ConfigError, LoadFailed, PenstockError
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.payload import Payload, check_of, payloads, request_of
from penstock.perf.bench.run import TargetFailing, measure
from penstock.perf.bench.slo import Slo
from penstock.perf.tune.accuracy import TOLERANCE, Sample, agreement, truth_of
from penstock.perf.tune.curve import Body, Order, Rehearsal, rehearse
from penstock.perf.tune.served import Served, Subject
from penstock.perf.tune.space import Settings, Space
from penstock.perf.tune.trial import Curve, Reading
from penstock.serving.observe.system import Gpus
from penstock.serving.protocols.oip import HEADER_LENGTH
from penstock.serving.protocols.oip_npy import NPY

log = logging.getLogger("penstock.tune")

WARM_S: Final = 0.5  # of load that is not counted, on settings that were warmed up before
PATIENCE: Final = 3.0  # times the latency of the SLO: what takes longer has broken it
LEAST_PATIENCE_S: Final = 1.0
LATE: Final = 0.1  # of the SLO's latency: late by so little the generator only makes it harder to keep
MOST_INVALID: Final = 8  # runs in a row: then it is no rate that is too high, but the machine that is too busy
SAMPLES: Final = 16  # requests whose answers are compared where no file of samples is given
_SHARED: Final = ("batch", "instances", "hold", "policy")  # knobs that change nothing about one batch alone


class Check(Struct, frozen=True, kw_only=True):
    """How the answers of settings are checked. `samples` None: the first requests of the load are compared."""

    samples: Sequence[Sample] | None = None
    tolerance: float = TOLERANCE


class App:
    """What `penstock serve` makes of an app under settings. See Bench for its calls; `start` comes first."""

    def __init__(
        self,
        subject: Subject,
        space: Space,
        slo: Slo,
        *,
        check: Check | None = None,
        data: str | None = None,
        seed: int = 0,
        warm_s: float | None = None,
    ) -> None:
        """`data` is what is sent, as `penstock bench --data` takes it. `warm_s`: uncounted load on settings that were
        just loaded, None until it is settled."""
        self._subject, self._space, self._slo = subject, space, slo
        self._check = check or Check()
        self._data, self._seed = data, seed
        self._served = Served(subject)
        self._payloads: list[Payload] = []
        self._bodies: list[Body] = []  # the same, as a worker sees them
        self._rehearsed: dict[Settings, Rehearsal | LoadFailed] = {}
        self._costs: dict[Settings, float] = {}
        self._truth: list[Any] | None = None
        self._warm_s, self._warm = warm_s, False  # whether what is loaded was under load before
        self._warm_again_s = WARM_S if warm_s is None else min(WARM_S, warm_s)
        self._spent_s = 0.0  # that changes of settings and failed rehearsals took, and no reading has counted yet
        self._invalid = 0  # how many of the last runs were
        self._free_bytes = _free_bytes()
        self._runner = asyncio.Runner(loop_factory=_loop_factory())

    def start(self) -> None:
        """Serves the app as it is, finds what to send, and lets one instance of it answer that.

        Raises PenstockError: it does not load, or cannot answer what is sent; ConfigError for data that cannot be, for
        samples that its own answers differ from, and for knobs that it has no use for.
        """
        self._served.use(Settings())
        self._payloads = payloads(self._data, self._served.target, self._seed)
        self._bodies = [_body(payload, self._served.target.path) for payload in self._payloads]
        found = self._alone(Settings())
        if isinstance(found, LoadFailed):
            raise found
        if why := _wrong(found):
            raise PenstockError(f"the app cannot answer what is sent: {why}; give --data that it takes")
        for knob in self._space.knobs:
            if knob.name in found.ignores:
                raise ConfigError(
                    f"--space {knob.name}: the model has no use for it, for its `load` has no parameter of that name;"
                    " add that, or leave the knob out"
                )
        samples, (reference, how) = self._samples(), self._reference(found)
        self._truth = truth_of(samples, reference.answers)
        agreed = agreement(samples, self._truth, reference.answers, self._check.tolerance)
        if not agreed.holds:
            raise ConfigError(f"the app {how} does not pass --accuracy-check: {agreed.text}")

    @property
    def payload_bytes(self) -> int:
        """Mean size of what is sent; 0 before that is known."""
        return round(sum(len(p.body) for p in self._payloads) / max(1, len(self._payloads)))

    # ---- Bench

    def refusal(self, settings: Settings) -> str | None:
        """See Bench: it does not load, cannot answer, or answers otherwise."""
        found = self._alone(settings)
        if isinstance(found, LoadFailed):
            return f"does not load: {found.message}"
        if why := _wrong(found):
            return f"cannot answer: {why}"
        assert self._truth is not None, "started"
        agreed = agreement(self._samples(), self._truth, found.answers, self._check.tolerance)
        return None if agreed.holds else agreed.text

    def curve(self, settings: Settings) -> Curve | None:
        """See Bench. Times and memory of one instance that has all cores for itself: no server is faster."""
        found = self._alone(settings)
        if isinstance(found, LoadFailed) or not found.curve:
            return None
        devices = self._devices(settings)
        on_gpu = devices[0].startswith("cuda")
        memory, limit = (
            (found.device_bytes, _gpu_bytes(len(devices))) if on_gpu else (found.memory_bytes, self._free_bytes)
        )
        return Curve(
            points=tuple(sorted(found.curve.items())),
            memory_bytes=memory or None,
            limit_bytes=limit or None,
            cost_s=self._costs[self._key(settings)],
        )

    def prepare(self, settings: Settings) -> None:
        """See Bench. Raises LoadFailed."""
        started = time.monotonic()
        if self._served.use(settings):
            self._warm = False
        self._spent_s += time.monotonic() - started

    def measure(self, settings: Settings, rate: float, seconds: float, seed: int) -> Reading:
        """See Bench. Raises PenstockError when the load generator itself is too slow for anything."""
        return self._read(settings, lambda: Load(mode="open", rate=rate, seconds=seconds, seed=seed))

    def saturate(self, settings: Settings, seconds: float, seed: int) -> Reading:
        """See Bench."""
        return self._read(
            settings,
            lambda: Load(mode="closed", concurrency=self._served.clients(), seconds=seconds, seed=seed),
        )

    def close(self) -> None:
        """See Bench; safe to call twice."""
        self._served.close()
        self._runner.close()

    # ---- the server

    def _read(self, settings: Settings, load: Callable[[], Load]) -> Reading:
        self.prepare(settings)
        started = time.monotonic()
        try:
            run = self._runner.run(self._measured(settings, load()))
        except (
            TargetFailing,
            Unreachable,
            ConfigError,
        ) as error:  # in time before any load: these settings are no good
            self._spent_s = 0.0  # whoever asks for what fails counts its time
            raise LoadFailed(f"loaded, but {error.message}") from error  # ConfigError: so slow that no request comes
        self._warm = True
        self._invalid = self._invalid + 1 if run.invalid else 0
        if self._invalid == MOST_INVALID:
            raise PenstockError(
                f"{MOST_INVALID} runs in a row were INVALID, so nothing can be told here: {run.invalid[0]}"
            )
        cost_s, self._spent_s = self._spent_s + time.monotonic() - started, 0.0
        return Reading(run=run, cost_s=cost_s)

    async def _measured(self, settings: Settings, load: Load) -> Measurement:
        target, limit_s = self._served.target, self._slo.latency_s
        return await measure(
            target,
            [request_of(target, payload) for payload in self._payloads],
            load,
            slo=self._slo,
            warm_s=self._warm_again_s if self._warm else self._warm_s,
            label=str(settings),
            check=check_of(target),
            timeout_s=None if limit_s is None else max(LEAST_PATIENCE_S, PATIENCE * limit_s),
            late_s=LATE * (limit_s or 0.0),
        )

    # ---- one instance alone

    def _alone(self, settings: Settings) -> Rehearsal | LoadFailed:
        """What one instance does with what of the settings concerns it; found out once."""
        key = self._key(settings)
        if key not in self._rehearsed:
            started = time.monotonic()
            if self._crowded(key):
                self._served.close()
            try:
                self._rehearsed[key] = rehearse(self._order(key))
            except LoadFailed as error:
                self._rehearsed[key] = error
                self._spent_s += time.monotonic() - started  # nobody asks for its curve
            self._costs[key] = time.monotonic() - started
            log.info("alone settings=%s cost_s=%.3g", key, self._costs[key])
        return self._rehearsed[key]

    def _crowded(self, settings: Settings) -> bool:
        """Whether the model may have no room for one instance more beside those of the server."""
        return self._devices(settings)[0].startswith("cuda") or 2 * _free_bytes() < self._free_bytes

    def _key(self, settings: Settings) -> Settings:
        kept = [knob for knob, _ in settings.items if knob not in _SHARED and not knob.startswith("batching.")]
        return settings.only(*kept)

    def _reference(self, plain: Rehearsal) -> tuple[Rehearsal, str]:
        """What the app as it is does, in fp32 where that is among what is tried and runs; and that in words."""
        if any(knob.name == "precision" and "fp32" in knob.values for knob in self._space.knobs):
            found = self._alone(Settings().put(precision="fp32"))
            if not isinstance(found, LoadFailed) and not _wrong(found):
                return found, "in fp32"
        return plain, "as it is"

    def _order(self, settings: Settings) -> Order:
        largest = max(
            (v for k in self._space.knobs if k.name == "batch" for v in k.values if isinstance(v, int)), default=1
        )
        sizes = sorted({largest} | {2**k for k in range(largest.bit_length()) if 2**k < largest})
        return Order(
            name=self._subject.name,
            config=self._subject.with_settings(settings),
            device=self._devices(settings)[0],
            sys_path=_paths(),
            bodies=self._bodies,
            samples=[sample.body for sample in self._samples()],
            sizes=sizes,
            limit_s=self._slo.latency_s or 60.0,
        )

    def _devices(self, settings: Settings) -> tuple[str, ...]:
        return expanded(self._subject.with_settings(settings).devices)

    def _samples(self) -> Sequence[Sample]:
        if self._check.samples is not None:
            return self._check.samples
        first = zip(self._payloads[:SAMPLES], self._bodies[:SAMPLES], strict=True)
        return [Sample(payload.name, body) for payload, body in first]


def _wrong(found: Rehearsal) -> str:
    """Why one instance alone cannot serve what is sent; "" if it can."""
    return found.error or ("a single request runs out of memory" if found.oom_rows == 1 else "")


def _body(payload: Payload, path: str) -> Body:
    """What a worker gets of it; `path` is that of requests without one of their own."""
    if not (payload.path or path).startswith("/v2/"):
        codec = "native"
    elif HEADER_LENGTH in payload.headers:
        codec = "oip_binary"
    else:
        codec = "oip_npy" if payload.content_type == NPY else "oip_json"
    return Body(payload.body, payload.content_type, codec, payload.headers)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _paths() -> list[str]:
    """Where the server finds modules: it is started in this folder."""
    return list(dict.fromkeys([os.getcwd(), *(p for p in sys.path if p)]))


def _free_bytes() -> int:
    """Memory that is there for instances: what is free, at most what a container is allowed."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def _gpu_bytes(count: int) -> int:
    """Memory of so many GPUs, the smallest taken for all; 0 where nobody tells."""
    return min((total for _, _, _, total in Gpus().read()), default=0) * count
