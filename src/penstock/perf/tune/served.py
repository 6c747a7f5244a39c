"""The server that is tuned: started once, and brought from settings to settings with as little as these ask for.

More or fewer instances are scaled. Other keys of the model unload it and load it anew in the same server: never two of
it in memory. Keys that only a configuration may set (`options`, `weights`) start the server anew.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct, convert, to_builtins

from penstock.client.endpoint import tls_context
from penstock.config.schema import ModelConfig
from penstock.errors import LoadFailed, PenstockError
from penstock.perf.bench.server import Reply, fetch
from penstock.perf.bench.target import Target, open_target
from penstock.perf.tune.config import changed_keys
from penstock.perf.tune.space import KEYS, Settings, Value

log = logging.getLogger("penstock.tune")

_CONFIGURED: Final = ("env", "options", "trust", "weights")  # keys that no request may set
_PRINTED: Final = 2000  # characters of what the server said, with a load that failed
_GRACE_S: Final = 60.0  # of a request that loads, beyond what the load itself may take
_MOST_CLIENTS: Final = 512


class Subject(Struct, frozen=True, kw_only=True):
    """What is tuned: `target` and `sets` as `penstock serve` takes them, and the model's section there, as it is.

    `tls_cert` is the certificate that its server shows, if it speaks TLS.
    """

    target: str
    section: str
    model: ModelConfig
    sets: tuple[str, ...] = ()
    token: str | None = None
    tls_cert: str | None = None

    @property
    def name(self) -> str:
        """Of the model, as its routes have it."""
        return self.model.name or self.section

    def with_settings(self, settings: Settings) -> ModelConfig:
        """The model's configuration with the knobs turned."""
        tree: dict[str, Any] = to_builtins(self.model)
        for key, value in keys_of(settings).items():
            *tables, last = key.split(".")
            table = tree
            for name in tables:
                table = table.setdefault(name, {})
            table[last] = value
        return convert(tree, ModelConfig)


def keys_of(settings: Settings) -> dict[str, Any]:
    """The keys of `[models.NAME]`, such as "batching.max_batch_size", that these settings set."""
    return {KEYS.get(knob, knob): _as_key(knob, value) for knob, value in settings.items}


def _as_key(knob: str, value: Value) -> Any:
    return [value] if knob == "device" else value


class Served:
    """One server at a time. All calls block; made by one thread."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._open = ExitStack()
        self._target: Target | None = None
        self._settings: Settings | None = None  # None: nobody knows what is loaded
        self._started = False

    @property
    def target(self) -> Target:
        assert self._target is not None, "started"
        return self._target

    @property
    def settings(self) -> Settings | None:
        """Those that it has."""
        return self._settings

    def use(self, settings: Settings) -> bool:
        """Serves with these settings, True if something had to be changed. Raises LoadFailed, and at the first call any
        PenstockError: then there is no server that could be tuned."""
        if settings == self._settings and self._alive:
            return False
        if self._settings is None or not self._alive or self._is_configured(self._settings, settings):
            self._start(settings)
        else:
            before, self._settings = self._settings, None
            if self._only_scaled(before, settings):
                self._scale(self.subject.with_settings(settings).instances)
            else:
                self._load(settings)
        self._settings = settings
        return True

    def clients(self) -> int:
        """How many clients of a closed loop keep every batch full: twice the rows that all instances hold."""
        found: Any = self._asked("GET", "", None).json() or {}
        rows: int = sum(v["instances"] * v["max_batch_size"] for v in found.get("versions", ()))
        return min(_MOST_CLIENTS, max(4, 2 * rows))

    def close(self) -> None:
        """Ends the server."""
        self._settings, self._target = None, None
        self._open.close()

    @property
    def _alive(self) -> bool:
        return self._target is not None and self._target.server is not None and self._target.server.alive

    def _start(self, settings: Settings) -> None:
        self.close()
        subject = self.subject
        sets = [*subject.sets, *(_set(subject.section, key, value) for key, value in keys_of(settings).items())]
        log.info("start settings=%s", settings)
        try:
            self._target = self._open.enter_context(
                open_target(
                    subject.target,
                    model=subject.name,
                    token=subject.token,
                    tls=None if subject.tls_cert is None else _trusting(subject.tls_cert),
                    sets=sets,
                    management=True,
                )
            )
        except PenstockError as error:
            if not self._started:
                raise
            raise LoadFailed(f"no server starts: {_last_words(error.message)}", detail=error.message) from error
        self._started = True

    @staticmethod
    def _is_configured(before: Settings, after: Settings) -> bool:
        """Whether a key differs that no request may set: also a class, as of a policy of one's own."""
        return any(
            KEYS.get(knob, knob).split(".")[0] in _CONFIGURED or ":" in str(value)
            for knob, value in set(before.items) ^ set(after.items)
            if knob != "device"
        )

    def _only_scaled(self, before: Settings, after: Settings) -> bool:
        """Whether only the number of instances differs, and with it nothing else: threads that nobody set are shared
        out among them, so that instances of another number have other threads."""
        differing = {knob for knob, _ in set(before.items) ^ set(after.items)}
        now, then = self.subject.with_settings(before), self.subject.with_settings(after)
        numbers = now.instances != "auto" and then.instances != "auto"
        return differing == {"instances"} and numbers and then.threads is not None and then.transport != "inline"

    def _scale(self, instances: int | str) -> None:
        log.info("scale instances=%s", instances)
        self._change("PUT", "/scale", {"instances": instances})

    def _load(self, settings: Settings) -> None:
        log.info("reload settings=%s", settings)
        model = self.subject.with_settings(settings)
        keys = {k: v for k, v in changed_keys(model).items() if k not in (*_CONFIGURED, "name", "traffic")}
        version = f"/{quote(model.version, safe='')}"
        self._change("DELETE", version, None)
        self._change("PUT", version, keys)

    def _change(self, method: str, route: str, body: Any) -> None:
        """Raises LoadFailed, also when the server dies of it."""
        try:
            reply = self._asked(method, route, body)
        except PenstockError as error:
            why = f"the server gave up on the settings: {error.message}"
        else:
            if reply.ok:
                return
            said: Any = reply.json()
            told = said.get("error", {}).get("message") if isinstance(said, dict) else None
            why = f"the server did not take the settings ({reply.status}): {told or reply.text}"
        server = self.target.server
        raise LoadFailed(why, detail=server.output()[-_PRINTED:].strip() if server is not None else "")

    def _asked(self, method: str, route: str, body: Any) -> Reply:
        assert self.target.management is not None
        model = self.subject.model
        return fetch(
            self.target.management,
            method,
            f"/models/{quote(self.subject.name, safe='')}{route}",
            None if body is None else msgspec.json.encode(body),
            token=self.subject.token,
            timeout_s=model.load_timeout_s + _GRACE_S,
        )


def _trusting(cert: str) -> ssl.SSLContext:
    """Trusts this certificate alone, which names a host where the server of a search has only an address."""
    context = tls_context(cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _last_words(text: str) -> str:
    """What a server that did not start said of it: the last line that tells an error, else the first of all."""
    lines, ours = text.splitlines() or [""], "penstock: "
    return next((line for line in reversed(lines) if line.startswith(ours)), lines[0]).removeprefix(ours)


def _set(section: str, key: str, value: Any) -> str:
    """The text of `--set` for a key of a model."""
    return f"models.{msgspec.json.encode(section).decode()}.{key}={_toml(value)}"


def _toml(value: Any) -> str:
    """A value as in TOML, which has the texts, numbers and lists of JSON."""
    return msgspec.json.encode(value).decode()


def reachable(devices: Sequence[str], gpus: int) -> str | None:
    """What is wrong with a device: None if the machine has it. `gpus` is how many there are."""
    for device in devices:
        kind, _, number = device.partition(":")
        if kind == "cuda" and not gpus:
            return f"device={device}: this machine has no GPU that CUDA shows; leave it out, or tune on one that has"
        if kind == "cuda" and number and not (number.isdecimal() and int(number) < gpus):
            return f"device={device}: there are {gpus} GPUs, cuda:0 to cuda:{gpus - 1}"
    return None
