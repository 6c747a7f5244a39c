"""What MAR-INF/MANIFEST.json says of a model archive.

Source: archives written by torch-model-archiver 0.1 to 0.12. Older ones have other keys beside; all are kept in `raw`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from msgspec import Struct, field

from penstock.errors import ArchiveError
from penstock.torchserve.archive.names import check_name

MANIFEST: Final = "MAR-INF/MANIFEST.json"
MAX_MANIFEST_BYTES: Final = 1 << 20  # the manifests of real archives have a few hundred bytes
RUNTIMES: Final = ("python", "python3", "LSP")
NAME_RULE: Final = "^[A-Za-z0-9][A-Za-z0-9_\\-.]*$"
MAX_NAME: Final = 128
SUFFIXES: Final = (".mar", ".tar.gz", ".tgz", ".zip")

_NAME = re.compile(NAME_RULE.replace("$", r"\Z"))
_FILES = (  # attribute, key in the manifest
    ("serialized_file", "serializedFile"),
    ("model_file", "modelFile"),
    ("requirements_file", "requirementsFile"),
    ("config_file", "configFile"),
)


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One archive's manifest. An empty string is a field that it does not have.

    `handler` is a file with an optional function ("a.py:run", "a:run", "a") or the name of a built-in handler. The
    names of files are relative to the archive's root and stay inside it. `raw` is the JSON as it was read.
    """

    model_name: str
    model_version: str = "1.0"
    handler: str = ""
    runtime: str = "python"
    serialized_file: str = ""
    model_file: str = ""
    requirements_file: str = ""
    config_file: str = ""
    extensions: Any = None
    envelope: str = ""
    created_on: str = ""
    archiver_version: str = ""
    raw: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of MANIFEST.json; fields that are empty are left out, `raw` is not looked at."""
        keys = {"modelName": self.model_name, "serializedFile": self.serialized_file, "handler": self.handler}
        keys |= {"modelFile": self.model_file, "modelVersion": self.model_version, "extensions": self.extensions}
        keys |= {"requirementsFile": self.requirements_file, "configFile": self.config_file}
        tree: dict[str, Any] = {"createdOn": self.created_on, "runtime": self.runtime}
        tree["model"] = {key: value for key, value in keys.items() if value}
        tree["archiverVersion"] = self.archiver_version
        return json.dumps({key: value for key, value in tree.items() if value}, indent=2)


def check_model_name(name: str) -> str:
    """The name. Raises ArchiveError if it does not match `NAME_RULE` or is too long."""
    if len(name) > MAX_NAME or not _NAME.match(name):
        raise ArchiveError(
            f"the model's name is {name[:MAX_NAME]!r}; expected at most {MAX_NAME} characters that match {NAME_RULE}"
        )
    return name


def name_of(file_name: str) -> str:
    """A model's name made of the name of its file. Raises ArchiveError if that leaves nothing."""
    for suffix in SUFFIXES:
        if file_name.endswith(suffix):
            file_name = file_name.removesuffix(suffix)
            break
    return check_model_name(re.sub(r"[^A-Za-z0-9_.-]", "_", file_name).lstrip("_.-")[:MAX_NAME])


def parse_manifest(text: bytes, *, file_name: str = "") -> Manifest:
    """The manifest in the bytes of MANIFEST.json. Raises ArchiveError that says which field is wrong.

    `file_name` is what the model is named after where the manifest has no name.
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise ArchiveError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ArchiveError(f"{MANIFEST} is not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise ArchiveError(f"{MANIFEST} holds a {type(raw).__name__}; expected an object")
    model = raw.get("model")
    if not isinstance(model, dict):
        raise ArchiveError(f'{MANIFEST} has no object "model"')
    runtime = _text(raw, "runtime") or "python"
    if runtime not in RUNTIMES:
        raise ArchiveError(f"{MANIFEST}: runtime is {runtime[:64]!r}; expected one of {', '.join(RUNTIMES)}")
    return Manifest(
        model_name=check_model_name(_text(model, "modelName") or name_of(file_name)),
        model_version=_version(_text(model, "modelVersion") or "1.0"),
        handler=check_handler(_text(model, "handler")),
        runtime=runtime,
        extensions=model.get("extensions"),
        envelope=_text(model, "envelope"),
        created_on=_text(raw, "createdOn"),
        archiver_version=_text(raw, "archiverVersion"),
        raw=raw,
        **{attribute: _file(model, key) for attribute, key in _FILES},
    )


def check_handler(handler: str) -> str:
    """The handler, "" included. Raises ArchiveError if its file would be outside the archive."""
    if handler:
        try:
            check_name(handler.partition(":")[0])
        except ArchiveError as e:
            raise ArchiveError(f"{MANIFEST}: handler: {e.message}") from None
    return handler


def _file(model: dict[str, Any], key: str) -> str:
    """The name of a file in the archive's root, or ""."""
    name = _text(model, key)
    if name:
        try:
            check_name(name)
        except ArchiveError as e:
            raise ArchiveError(f"{MANIFEST}: {key}: {e.message}") from None
    return name


def _version(version: str) -> str:
    """The version: one segment of a path, as it stands in URLs."""
    if len(version) > MAX_NAME or not version.isprintable() or set(version) & set("/\\") or version == "..":
        raise ArchiveError(f"{MANIFEST}: modelVersion is {version[:MAX_NAME]!r}; expected a word without slashes")
    return version


def _text(table: dict[str, Any], key: str) -> str:
    """The text of a field, "" if it is absent; hand-written manifests have numbers as versions."""
    value = table.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ArchiveError(f"{MANIFEST}: {key} is a {type(value).__name__}; expected a text")
