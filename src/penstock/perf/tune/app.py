"""The system under test for a real app: a server under load, and profiles of one instance alone.

The server is started once, then moved from settings to settings with the smallest change. A different number of
instances is scaled. Other keys of the model unload and reload it in the same server, so memory never holds two copies.
Keys that only a configuration may set (`options`, `weights`) restart the server.
"""

import logging
import os
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import psutil

from penstock.client.endpoint import Unreachable, tls_context
from penstock.client.response import HttpResponse
from penstock.config.schema import ModelConfig
from penstock.core.engine.rules import queue_bound
from penstock.core.readings import Gpus
from penstock.core.worker.devices import expanded
from penstock.errors import ConfigError, LoadFailed, PenstockError
from penstock.perf.bench.expectation import TOLERANCE
from penstock.perf.bench.load_run import run_async
from penstock.perf.bench.measurement import Load, Measurement, Slo
from penstock.perf.bench.run import TargetFailing, measure
from penstock.perf.bench.server import error_line, fetch
from penstock.perf.bench.target import Target, open_target
from penstock.perf.bench.workload import Payload, check_of, payloads, request_of
from penstock.perf.tune.accuracy import AccuracySample, agreement, expected_responses
from penstock.perf.tune.config_file import TunedModel, changed_keys
from penstock.perf.tune.profiler import InstanceProfile, ProfileRequest, RequestBody, profile_instance
from penstock.perf.tune.runner import BatchCurve, MeasuredRun, single_instance
from penstock.perf.tune.space import KEYS, UNCHANGED, CandidateSettings, SearchSpace
from penstock.serving.http.server import resolve
from penstock.serving.protocols.route import RouteTable
from penstock.serving.protocols.routes import TEMPLATES

log = logging.getLogger("penstock.perf")

_CONFIGURED: Final = ("env", "options", "trust", "weights")  # keys that no request may set
_PRINTED: Final = 2000  # characters of the server's output in an error
_GRACE_S: Final = 60.0  # for a request that loads, beyond the load's own timeout
_MOST_CLIENTS: Final = 512

# ---- the server


class TunedServer:
    """One server at a time. All calls block and come from one thread."""

    def __init__(self, model: TunedModel) -> None:
        self.model = model
        self._open = ExitStack()
        self._target: Target | None = None
        self._settings: CandidateSettings | None = None  # None: unknown
        self._started = False

    @property
    def target(self) -> Target:
        assert self._target is not None, "started"
        return self._target

    def use(self, settings: CandidateSettings) -> bool:
        """Serves with these settings and returns whether that changed anything.

        Raises LoadFailed; the first call raises any PenstockError instead, because then there is no server to tune.
        """
        if settings == self._settings and self._alive:
            return False
        if self._settings is None or not self._alive or self._needs_restart(self._settings, settings):
            self._start(settings)
        else:
            before, self._settings = self._settings, None
            if self._only_scaled(before, settings):
                log.info("scale instances=%s", instances := self.model.with_settings(settings).instances)
                self._change("PUT", "/scale", {"instances": instances})
            else:
                self._load(settings)
        self._settings = settings
        return True

    def clients(self) -> int:
        """The clients of a closed loop that keep every batch full: twice the rows of all instances' batches."""
        return min(_MOST_CLIENTS, max(4, 2 * sum(instances * rows for instances, rows in self._sizes())))

    def _sizes(self) -> list[tuple[int, int]]:
        """(instances, max_batch_size) of each version."""
        found: Any = self._request("GET", "", None).json() or {}
        return [(version["instances"], version["max_batch_size"]) for version in found.get("versions", ())]

    def close(self) -> None:
        self._settings, self._target = None, None
        self._open.close()

    @property
    def _alive(self) -> bool:
        return self._target is not None and self._target.server is not None and self._target.server.alive

    def _start(self, settings: CandidateSettings) -> None:
        self.close()
        model = self.model
        section = msgspec.json.encode(model.section).decode()
        values = ((key, msgspec.json.encode(value).decode()) for key, value in model.keys(settings).items())
        log.info("start settings=%s", settings)
        try:
            self._target = self._open.enter_context(
                open_target(
                    model.target,
                    model=model.name,
                    token=model.token,
                    tls=None if model.tls_cert is None else _trusting(model.tls_cert),
                    sets=[*model.sets, *(f"models.{section}.{key}={value}" for key, value in values)],
                    management=True,
                )
            )
        except PenstockError as error:
            if not self._started:
                raise
            why = error_line(error.message) or next(iter(error.message.splitlines()), "")
            raise LoadFailed(f"no server starts: {why}", detail=error.message) from error
        self._started = True
        if settings == UNCHANGED:
            bounds = [queue_bound(model.model.batching, *size) for size in self._sizes()]
            self.model = msgspec.structs.replace(model, queue_rows=max(bounds, default=0))

    @staticmethod
    def _needs_restart(before: CandidateSettings, after: CandidateSettings) -> bool:
        """Whether a key differs that no request may set, which includes a class such as a custom policy."""
        return any(
            KEYS.get(name, name).split(".")[0] in _CONFIGURED or ":" in str(value)
            for name, value in set(before.items) ^ set(after.items)
            if name != "device"
        )

    def _only_scaled(self, before: CandidateSettings, after: CandidateSettings) -> bool:
        """Whether scaling is enough. Without explicit `threads` it is not, because each instance gets its share of the
        cores."""
        differing = {name for name, _ in set(before.items) ^ set(after.items)}
        now, then = self.model.with_settings(before), self.model.with_settings(after)
        numbers = now.instances != "auto" and then.instances != "auto"
        return differing == {"instances"} and numbers and then.threads is not None and then.transport != "inline"

    def _load(self, settings: CandidateSettings) -> None:
        log.info("reload settings=%s", settings)
        model = self.model.with_settings(settings)
        keys = {k: v for k, v in changed_keys(model).items() if k not in (*_CONFIGURED, "name", "traffic")}
        version = f"/{quote(model.version, safe='')}"
        self._change("DELETE", version, None)
        self._change("PUT", version, keys)

    def _change(self, method: str, route: str, body: Any) -> None:
        """Raises LoadFailed, also if the server dies."""
        try:
            reply = self._request(method, route, body)
        except PenstockError as error:
            why = f"the server failed with the settings: {error.message}"
        else:
            if reply.ok:
                return
            content: Any = reply.json()
            message = content.get("error", {}).get("message") if isinstance(content, dict) else None
            why = f"the server rejected the settings ({reply.status}): {message or reply.text}"
        server = self.target.server
        raise LoadFailed(why, detail=server.output()[-_PRINTED:].strip() if server is not None else "")

    def _request(self, method: str, route: str, body: Any) -> HttpResponse:
        assert self.target.management is not None
        return fetch(
            self.target.management,
            method,
            f"/models/{quote(self.model.name, safe='')}{route}",
            None if body is None else msgspec.json.encode(body),
            token=self.model.token,
            timeout_s=self.model.model.load_timeout_s + _GRACE_S,
        )


def _trusting(cert: str) -> ssl.SSLContext:
    """A context that trusts this certificate alone. It names a host, but the server under test is reached by address,
    so host names are not checked."""
    context = tls_context(cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


# ---- the app


WARM_S: Final = 0.5  # of load that is not counted, with settings that were warmed up before
PATIENCE: Final = 3.0  # times the latency of the SLO: a slower response violates it anyway
LEAST_PATIENCE_S: Final = 1.0
LATE: Final = 0.1  # of the SLO's latency: a generator this late only makes the SLO harder to keep
MOST_INVALID: Final = 8  # runs in a row: then the machine is too busy, whatever the rate
SAMPLES: Final = 16  # requests whose responses are compared without a file of samples
_ROUTES: Final = RouteTable(TEMPLATES)


class AppUnderTest:
    """An app that `penstock serve` serves under candidate settings. Implements SystemUnderTest; call `start` first."""

    def __init__(
        self,
        model: TunedModel,
        space: SearchSpace,
        slo: Slo,
        *,
        samples: Sequence[AccuracySample] | None = None,
        tolerance: float = TOLERANCE,
        data: str | None = None,
        seed: int = 0,
        warm_s: float | None = None,
    ) -> None:
        """`samples` None compares the first requests of the load, within `tolerance`. `data` is the --data of `penstock
        bench`. `warm_s` is the uncounted load after each load of the model; None: until throughput settles."""
        self._space, self._slo, self._samples, self._tolerance = space, slo, samples, tolerance
        self._data, self._seed, self._warm_s = data, seed, warm_s
        self._server = TunedServer(model)
        self._profiles = _Profiles(model, space, slo, self._server)
        self._payloads: list[Payload] = []
        self._expected: list[Any] | None = None
        self._warm = False  # whether the loaded model has run under load before
        self._spent_s = 0.0  # of settings changes, not yet counted by a run
        self._invalid = 0  # consecutive INVALID runs

    def start(self) -> None:
        """Serves the baseline, finds the requests to send, and profiles one instance with them.

        Raises PenstockError if the app does not load or cannot answer the requests; ConfigError for invalid data, for
        samples that its own responses differ from, and for parameters that the model does not accept.
        """
        self._server.use(UNCHANGED)
        target = self._server.target
        self._payloads = payloads(self._data, target, self._seed)
        bodies = [_body(payload, target.path) for payload in self._payloads]
        first = zip(self._payloads[:SAMPLES], bodies[:SAMPLES], strict=True)
        samples = self._samples
        if samples is None:
            samples = [AccuracySample(payload.name, body) for payload, body in first]
        self._profiles.bodies, self._profiles.samples = bodies, samples
        profile = self._profiles.get(UNCHANGED)
        if isinstance(profile, LoadFailed):
            raise profile
        if why := profile.failure:
            raise PenstockError(f"the app cannot answer the requests: {why}; give --data that it accepts")
        for parameter in self._space.parameters:
            if parameter.name in profile.ignores:
                raise ConfigError(
                    f"--space {parameter.name}: the model does not use it, because its `load` has no parameter of that"
                    " name; add one, or remove it from the space"
                )
        reference, how = self._reference(profile)
        self._expected = expected_responses(samples, reference.responses)
        agreed = agreement(samples, self._expected, reference.responses, self._tolerance)
        if not agreed.holds:
            raise ConfigError(f"the app {how} does not pass --accuracy-check: {agreed.text}")

    def _reference(self, baseline: InstanceProfile) -> tuple[InstanceProfile, str]:
        """The profile whose responses count as correct: fp32 if the space has it and it runs, else the baseline."""
        if "fp32" in self._space.values("precision"):
            found = self._profiles.get(UNCHANGED.put(precision="fp32"))
            if not isinstance(found, LoadFailed) and not found.failure:
                return found, "in fp32"
        return baseline, "with its baseline settings"

    @property
    def tuned(self) -> TunedModel:
        """The model, with the limit of its queue after `start`."""
        return self._server.model

    @property
    def payload_bytes(self) -> int:
        """Mean size of the requests; 0 before `start`."""
        return round(sum(len(p.body) for p in self._payloads) / max(1, len(self._payloads)))

    # ---- SystemUnderTest

    def refusal(self, settings: CandidateSettings) -> str | None:
        """The model does not load, cannot answer, responds differently, or cannot have such batches."""
        found = self._profiles.get(settings)
        if isinstance(found, LoadFailed):
            return f"does not load: {found.message}"
        if why := found.failure:
            return f"cannot answer: {why}"
        rows = self._profiles.config(settings).batching.max_batch_size
        if why := found.refusal(1 if rows == "auto" else rows):
            return why
        if found.alone and (settings.whole("batch") or 1) > 1:
            return f"its requests run one by one: {found.alone}"
        assert self._expected is not None, "started"
        agreed = agreement(self._profiles.samples, self._expected, found.responses, self._tolerance)
        return None if agreed.holds else agreed.text

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        """Times and memory of one instance that has all cores to itself, so no server is faster."""
        return self._profiles.curve(settings)

    def prepare(self, settings: CandidateSettings) -> None:
        """Raises LoadFailed."""
        started = time.monotonic()
        if self._server.use(settings):
            self._warm = False
        self._spent_s += time.monotonic() - started

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        """Raises PenstockError if the load generator is too slow for any rate."""
        return self._run(settings, lambda: Load(mode="open", rate=rate, seconds=seconds, seed=seed))

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        """As many clients as the server's batches and instances need."""
        return self._run(
            settings, lambda: Load(mode="closed", concurrency=self._server.clients(), seconds=seconds, seed=seed)
        )

    def close(self) -> None:
        """Safe to call twice."""
        self._server.close()

    # ---- load

    def _run(self, settings: CandidateSettings, load: Callable[[], Load]) -> MeasuredRun:
        self.prepare(settings)
        started = time.monotonic()
        try:
            run = run_async(self._measured(settings, load()))
        except (TargetFailing, Unreachable, ConfigError) as error:
            # ConfigError: no request arrives within the run. The caller counts the time of a failure.
            self._spent_s = self._profiles.failed_s = 0.0
            raise LoadFailed(f"loaded, but {error.message}") from error
        self._warm = True
        self._invalid = self._invalid + 1 if run.invalid else 0
        if self._invalid == MOST_INVALID:
            raise PenstockError(
                f"{MOST_INVALID} runs in a row were INVALID, so nothing can be measured here: {run.invalid[0]}"
            )
        cost_s = self._spent_s + self._profiles.failed_s + time.monotonic() - started
        self._spent_s = self._profiles.failed_s = 0.0
        return MeasuredRun(run=run, cost_s=cost_s)

    async def _measured(self, settings: CandidateSettings, load: Load) -> Measurement:
        target, limit_s, warm_s = self._server.target, self._slo.latency_s, self._warm_s
        if self._warm:
            warm_s = WARM_S if warm_s is None else min(WARM_S, warm_s)
        return await measure(
            target,
            [request_of(target, payload) for payload in self._payloads],
            load,
            slo=self._slo,
            warm_s=warm_s,
            label=str(settings),
            check=check_of(target),
            timeout_s=None if limit_s is None else max(LEAST_PATIENCE_S, PATIENCE * limit_s),
            late_s=LATE * (limit_s or 0.0),
        )


class _Profiles:
    """Profiles of one instance alone, each measured once. `failed_s` is the time of failed ones, which no curve has.

    `bodies` are the requests for timing, `samples` those whose responses are compared.
    """

    def __init__(self, model: TunedModel, space: SearchSpace, slo: Slo, server: TunedServer) -> None:
        self._model, self._space, self._slo, self._server = model, space, slo, server
        self.bodies: list[RequestBody] = []
        self.samples: Sequence[AccuracySample] = ()
        self.failed_s = 0.0
        self._known: dict[CandidateSettings, InstanceProfile | LoadFailed] = {}
        self._free_bytes = free_bytes()

    def get(self, settings: CandidateSettings) -> InstanceProfile | LoadFailed:
        """The profile of an instance with these settings, or why it does not load."""
        key = single_instance(settings)
        if key not in self._known:
            started = time.monotonic()
            # there may be no room for one more instance next to the server's
            if self._devices(key)[0].startswith("cuda") or 2 * free_bytes() < self._free_bytes:
                self._server.close()
            found: InstanceProfile | LoadFailed
            try:
                found = profile_instance(self._request(key))
                found.cost_s = cost_s = time.monotonic() - started
            except LoadFailed as error:
                found = error
                self.failed_s += (cost_s := time.monotonic() - started)
            self._known[key] = found
            log.info("alone settings=%s cost_s=%.3g", key, cost_s)
        return self._known[key]

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        """The batch curve of an instance with these settings, with the memory of the machine."""
        found = self.get(settings)
        if isinstance(found, LoadFailed) or not found.curve:
            return None
        devices = self._devices(settings)
        memory, limit = found.memory_bytes, self._free_bytes
        if devices[0].startswith("cuda"):
            memory, limit = found.device_bytes, gpu_bytes(len(devices))
        return BatchCurve(
            points=tuple(sorted(found.curve.items())),
            memory_bytes=memory or None,
            limit_bytes=limit or None,
            cost_s=found.cost_s,
        )

    def config(self, settings: CandidateSettings) -> ModelConfig:
        """The configuration of the model with these settings."""
        return self._model.with_settings(settings)

    def _request(self, settings: CandidateSettings) -> ProfileRequest:
        largest = max((v for v in self._space.values("batch") if isinstance(v, int)), default=1)
        return ProfileRequest(
            name=self._model.name,
            config=self.config(settings),
            device=self._devices(settings)[0],
            sys_path=list(dict.fromkeys([os.getcwd(), *(p for p in sys.path if p)])),  # as the server finds modules
            bodies=self.bodies,
            samples=[sample.body for sample in self.samples],
            sizes=sorted({largest} | {2**k for k in range(largest.bit_length()) if 2**k < largest}),
            limit_s=self._slo.latency_s or 60.0,
        )

    def _devices(self, settings: CandidateSettings) -> tuple[str, ...]:
        return expanded(self.config(settings).devices)


def _body(payload: Payload, path: str) -> RequestBody:
    """The payload as the server's route hands it to a worker; `path` is the path of requests without their own."""
    template = resolve((payload.path or path).encode(), _ROUTES).template
    headers = {name.lower().encode(): value.encode() for name, value in payload.headers.items()}
    codec = template.select(headers, payload.content_type.encode())[0] if template.select is not None else ""
    return RequestBody(payload.body, payload.content_type, codec or template.codec, payload.headers)


def free_bytes() -> int:
    """Memory that is available to instances, within the limit of a container."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def gpu_bytes(count: int) -> int:
    """Memory of this many GPUs, each as large as the smallest; 0 if unknown."""
    return min((total for _, _, _, total in Gpus().read()), default=0) * count
