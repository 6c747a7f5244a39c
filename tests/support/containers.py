"""What a container runs, read from a Dockerfile, a Compose service or a Kubernetes container."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Probe:
    """`command` runs in the container; otherwise GET `path` on `port`, or without a path a TCP connection."""

    port: int = 0
    path: str = ""
    tls: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """A process with its surroundings. `copies` are files of the build context by their place in the image, `venvs`
    the folders that another stage installed."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    user: str = ""
    workdir: str = "/"
    ports: tuple[int, ...] = ()
    probes: Mapping[str, Probe] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    venvs: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    grace_s: float = 30.0
    read_only: bool = False  # all but the volumes

    @property
    def argv(self) -> list[str]:
        return [*self.entrypoint, *self.cmd]

    @property
    def uid(self) -> int:
        return int(self.user.partition(":")[0] or 0)


# ---- Dockerfile


def read_dockerfile(path: Path, context: Path, images: Mapping[str, Container] | None = None, **args: str) -> Container:
    """The last stage of a Dockerfile, built with `args`. `images` are bases other than those of registries."""
    global_args: dict[str, str] = {}  # before the first FROM; only FROM sees them
    scope = global_args
    stages: dict[str, Container] = dict(images or {})
    found, name = Container(), ""
    for word, rest in _instructions(path.read_text()):
        if word == "ARG":
            key, _, default = rest.partition("=")
            scope[key] = args.get(key) or _expand(default, scope) or global_args.get(key, "")
        elif word == "FROM":
            base, _, name = _expand(rest, global_args).partition(" AS ")
            found, scope = replace(stages.get(base, Container()), runs=()), {}
        elif word == "RUN":  # its shell expands
            found = replace(found, runs=(*found.runs, rest))
        else:
            found = _apply(found, word, _expand(rest, {**scope, **found.env}), context)
        stages[name] = found
    return found


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)
    ]


def _expand(text: str, values: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name, sign, other = match[1] or match[4], match[2], match[3] or ""
        value = values.get(name, "")
        if sign == ":+":
            return other if value else ""
        return value or (other if sign == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-+])([^}]*))?\}|\$(\w+)", value_of, text)


def _apply(c: Container, word: str, text: str, context: Path) -> Container:
    if word == "ENV":
        return replace(c, env={**c.env, **dict(pair.split("=", 1) for pair in shlex.split(text))})
    if word == "USER":
        return replace(c, user=text)
    if word == "WORKDIR":
        return replace(c, workdir=text)
    if word == "EXPOSE":
        return replace(c, ports=(*c.ports, *map(int, text.split())))
    if word == "COPY":
        return _copy(c, text, context)
    if word == "ENTRYPOINT":  # a CMD of the base does not apply to it
        return replace(c, entrypoint=_words(text), cmd=())
    if word == "CMD":
        return replace(c, cmd=_words(text))
    if word == "HEALTHCHECK":
        command = _words(text.partition("CMD ")[2])
        return replace(c, probes={**c.probes, "readinessProbe": Probe(command=command)})
    assert word == "LABEL", f"{word} is not rehearsed"
    return c


def _copy(c: Container, text: str, context: Path) -> Container:
    words = [word for word in text.split() if not word.startswith("--chown")]
    if words[0].startswith("--from="):
        return replace(c, venvs=(*c.venvs, words[-1]))
    sources, target = words[:-1], words[-1]
    for source in sources:
        assert (context / source).exists(), f"COPY {source}: the build context {context} has no such file"
    places = {target + Path(source).name if target.endswith("/") else target: context / source for source in sources}
    return replace(c, copies={**c.copies, **places})


def _words(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text.startswith("[") else ("/bin/sh", "-c", text)


# ---- Compose and Kubernetes


def read_compose(service: Mapping[str, Any], image: Container) -> Container:
    """A service of a Compose file, whose image is this."""
    known = {
        "build", "command", "depends_on", "environment", "healthcheck", "image", "ports", "restart",
        "stop_grace_period", "volumes",
    }  # fmt: skip
    assert not service.keys() - known, service.keys() - known
    c = image
    if "command" in service:
        command = service["command"]
        c = replace(c, cmd=tuple(shlex.split(command) if isinstance(command, str) else command))
    c = replace(c, env={**c.env, **service.get("environment", {})})
    if "healthcheck" in service:
        assert service["healthcheck"] == {"disable": True}, service["healthcheck"]
        c = replace(c, probes={})
    return replace(c, grace_s=float(str(service.get("stop_grace_period", "10s")).removesuffix("s")))


def read_kubernetes(container: Mapping[str, Any], image: Container, grace_s: float = 30.0) -> Container:
    """A container of a pod, whose image is this. `command` replaces the image's entrypoint, `args` its command."""
    c = image
    if "command" in container:
        c = replace(c, entrypoint=tuple(container["command"]), cmd=())
    if "args" in container:
        c = replace(c, cmd=tuple(container["args"]))
    env = {**c.env, **{each["name"]: str(each["value"]) for each in container.get("env", ())}}
    ports = tuple(each["containerPort"] for each in container.get("ports", ()))
    numbers = {each.get("name"): each["containerPort"] for each in container.get("ports", ())}
    probes = {name: _probe(container[name], numbers) for name in PROBES if name in container}
    security = container.get("securityContext", {})
    user = str(security.get("runAsUser", c.user))
    workdir = container.get("workingDir", c.workdir)
    c = replace(c, env=env, ports=ports, probes=probes, user=user, workdir=workdir, grace_s=grace_s)
    return replace(c, read_only=security.get("readOnlyRootFilesystem", False))


def _probe(probe: Mapping[str, Any], numbers: Mapping[Any, int]) -> Probe:
    if "exec" in probe:
        return Probe(command=tuple(probe["exec"]["command"]))
    action = probe.get("httpGet") or probe["tcpSocket"]
    return Probe(numbers.get(action["port"], action["port"]), action.get("path", ""), action.get("scheme") == "HTTPS")
