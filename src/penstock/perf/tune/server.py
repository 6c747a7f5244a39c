"""The server under test: started once, then moved from settings to settings with the smallest change.

A different number of instances is scaled. Other keys of the model unload and reload it in the same server, so memory
never holds two copies. Keys that only a configuration may set (`options`, `weights`) restart the server.
"""

import logging
import ssl
from contextlib import ExitStack
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct, convert, to_builtins

from penstock.client.endpoint import tls_context
from penstock.client.response import HttpResponse
from penstock.config.schema import ModelConfig
from penstock.core.engine.rules import queue_bound
from penstock.errors import LoadFailed, PenstockError
from penstock.perf.bench.server import fetch
from penstock.perf.bench.target import Target, open_target
from penstock.perf.tune.config_file import changed_keys, put
from penstock.perf.tune.space import KEYS, UNCHANGED, CandidateSettings

log = logging.getLogger("penstock.perf")

_CONFIGURED: Final = ("env", "options", "trust", "weights")  # keys that no request may set
_PRINTED: Final = 2000  # characters of the server's output in an error
_GRACE_S: Final = 60.0  # for a request that loads, beyond the load's own timeout
_MOST_CLIENTS: Final = 512


class TunedModel(Struct, frozen=True, kw_only=True):
    """The model to tune: `target` and `sets` in the form of `penstock serve`, and the baseline of its section.

    `tls_cert` is the server's certificate, if it uses TLS. `queue_rows` is the baseline's limit of the queue, 0 while
    unknown.
    """

    target: str
    section: str
    model: ModelConfig
    sets: tuple[str, ...] = ()
    token: str | None = None
    tls_cert: str | None = None
    queue_rows: int = 0

    @property
    def name(self) -> str:
        """The model's name in its routes."""
        return self.model.name or self.section

    def with_settings(self, settings: CandidateSettings) -> ModelConfig:
        """The model's configuration with these settings."""
        tree = to_builtins(self.model)
        put(tree, self.keys(settings))
        return convert(tree, ModelConfig)

    def keys(self, settings: CandidateSettings) -> dict[str, Any]:
        """The keys of `[models.NAME]` that these settings set. The queue's limit follows max_batch_size, so a smaller
        batch keeps the baseline's: otherwise it would refuse clients that the baseline serves."""
        found, batch = keys_of(settings), settings.whole("batch")
        if self.queue_rows and batch is not None:
            instances = settings.whole("instances", self.model.instances) or 1
            if queue_bound(self.model.batching, instances, batch) < self.queue_rows:
                found.setdefault("batching.max_queue", self.queue_rows)
        return found


def keys_of(settings: CandidateSettings) -> dict[str, Any]:
    """The keys of `[models.NAME]`, such as "batching.max_batch_size", that these settings set."""
    return {KEYS.get(name, name): [value] if name == "device" else value for name, value in settings.items}


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
            raise LoadFailed(f"no server starts: {_error_line(error.message)}", detail=error.message) from error
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


def _error_line(text: str) -> str:
    """The last line with an error in the output of a server that did not start, else its first line."""
    lines, ours = text.splitlines() or [""], "penstock: "
    return next((line for line in reversed(lines) if line.startswith(ours)), lines[0]).removeprefix(ours)
