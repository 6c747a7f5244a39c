"""What can be taken of a log4j2 XML: the levels of the loggers that are known here, and the names of their files."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Final
from xml.etree import ElementTree

from msgspec import Struct, field

from penstock.errors import ConfigError

log = logging.getLogger("penstock.compat")

# Logger there -> (logger here, file).
_KNOWN: Final = {
    "Root": ("", "ts_log"),
    "org.pytorch.serve": ("penstock", "ts_log"),
    "ACCESS_LOG": ("ACCESS_LOG", "access_log"),
    "MODEL_LOG": ("penstock.model", "model_log"),
    "MODEL_METRICS": ("MODEL_METRICS", "model_metrics"),
    "TS_METRICS": ("TS_METRICS", "ts_metrics"),
}
_LEVELS: Final = {
    "all": "DEBUG",
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "error": "ERROR",
    "fatal": "CRITICAL",
    "off": "OFF",
}
_VARIABLE = re.compile(r"\$\{env:(\w+)(?::-([^}]*))?\}")


class Taken(Struct):
    """`levels` of loggers here ("" is the root), `files` by the name that they have by default."""

    levels: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def read_log4j(path: str, env: Mapping[str, str]) -> Taken:
    """What is understood of the file; one warning tells what is not. Raises ConfigError if it is no log4j2 XML."""
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"--log-config {path}: {error}; expected a log4j2 XML, or a configuration of Python's logging in a"
            " .json or .yaml file"
        ) from None
    appenders, left = _appenders(root, env)
    taken = Taken()
    for element in root.iter():
        kind = _bare(element.tag)
        if kind not in ("logger", "root", "asyncroot", "asynclogger"):
            continue
        name = "Root" if "root" in kind else element.get("name", "")
        level = _LEVELS.get(element.get("level", "").lower())
        if name not in _KNOWN:
            continue  # of a library that is not here
        logger, file = _KNOWN[name]
        if level is not None:
            taken.levels[logger] = level
        for ref in element:
            if (found := appenders.get(ref.get("ref", ""))) is not None and found:
                taken.files[file] = found
    if left:
        log.warning(
            "file=%s ignored=%s hint=--log-config also takes a configuration of Python's logging (.json, .yaml)",
            path,
            ",".join(sorted(left)),
        )
    return taken


def _appenders(root: ElementTree.Element, env: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """The file of each appender ("" for the console), and what is not understood."""
    found: dict[str, str] = {}
    left: set[str] = set()
    for group in root:
        if _bare(group.tag) != "appenders":
            continue
        for element in group:
            kind, name = _bare(element.tag), element.get("name", "")
            file = _VARIABLE.sub(lambda m: env.get(m[1], m[2] or ""), element.get("fileName", ""))
            if kind == "console":
                found[name] = ""
            elif kind in ("rollingfile", "file", "randomaccessfile", "rollingrandomaccessfile") and "$" not in file:
                found[name] = file
            else:
                left.add(f"appender {name}")
            left |= {f"layout of {name}" for child in element if _bare(child.tag) not in _PLAIN}
    return found, left


_PLAIN: Final = frozenset({"patternlayout", "policies", "defaultrolloverstrategy"})


def _bare(tag: object) -> str:
    """The name of an element without its namespace, in small letters; "" for a comment."""
    return tag.rpartition("}")[2].lower() if isinstance(tag, str) else ""
