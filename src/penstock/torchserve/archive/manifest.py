"""The manifest of an archive: MAR-INF/MANIFEST.json of a model, WAR-INF/MANIFEST.json of a workflow.

Source: archives written by torch-model-archiver 0.1 to 0.12 and torch-workflow-archiver 0.2. Older manifests have
further keys; `raw` keeps them all.
"""

import json
import re
from typing import Any, Final

from msgspec import Struct, field

from penstock.errors import ArchiveError
from penstock.torchserve.archive.safe_unpack import check_name

MANIFEST: Final = "MAR-INF/MANIFEST.json"
WORKFLOW_MANIFEST: Final = "WAR-INF/MANIFEST.json"
MAX_MANIFEST_BYTES: Final = 1 << 20  # real manifests have a few hundred bytes
RUNTIMES: Final = ("python", "python3", "LSP")
NAME_RULE: Final = "^[A-Za-z0-9][A-Za-z0-9_\\-.]*$"
MAX_NAME: Final = 128
SUFFIXES: Final = (".mar", ".war", ".tar.gz", ".tgz", ".zip")

_NAME = re.compile(NAME_RULE.replace("$", r"\Z"))
_FILES = {  # attribute: key in the manifest
    "serialized_file": "serializedFile",
    "model_file": "modelFile",
    "requirements_file": "requirementsFile",
    "config_file": "configFile",
}


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One archive's manifest; an absent field is "".

    `handler` is a file with an optional function ("a.py:run", "a:run", "a") or the name of a built-in handler. File
    names are relative to the archive's root and stay inside it. `raw` is the original JSON. A workflow's `model_name`
    is its own name, and its `config_file` the specification.
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

    @property
    def is_workflow(self) -> bool:
        return "workflow" in self.raw and "model" not in self.raw

    def to_json(self) -> str:
        """The text of MANIFEST.json without empty fields. Ignores `raw`."""
        model = {"modelName": self.model_name, "handler": self.handler, "modelVersion": self.model_version}
        model |= {"extensions": self.extensions} | {key: getattr(self, name) for name, key in _FILES.items()}
        tree: dict[str, Any] = {"createdOn": self.created_on, "runtime": self.runtime}
        tree["model"] = {key: value for key, value in model.items() if value}
        tree["archiverVersion"] = self.archiver_version
        return json.dumps({key: value for key, value in tree.items() if value}, indent=2)


def check_model_name(name: str) -> str:
    """The name. Raises ArchiveError if it does not match `NAME_RULE` or is too long."""
    if len(name) > MAX_NAME or not _NAME.match(name):
        raise ArchiveError(
            f"the model's name is {name[:MAX_NAME]!r}; expected at most {MAX_NAME} characters that match {NAME_RULE}"
        )
    return name


def model_name_from(file_name: str) -> str:
    """A model name derived from a file name. Raises ArchiveError if nothing usable remains."""
    suffix = next((suffix for suffix in SUFFIXES if file_name.endswith(suffix)), "")
    stem = file_name.removesuffix(suffix)
    return check_model_name(re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("_.-")[:MAX_NAME])


def parse_manifest(text: bytes, *, file_name: str = "") -> Manifest:
    """The manifest in the bytes of MANIFEST.json. Raises ArchiveError that names the wrong field.

    A manifest without a model name gets one derived from `file_name`.
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise ArchiveError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ArchiveError(f"{MANIFEST} is not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise ArchiveError(f"{MANIFEST} holds a {type(raw).__name__}; expected an object")
    workflow, model = raw.get("workflow"), raw.get("model")
    if isinstance(workflow, dict) and model is None:
        keys = {"modelName": "workflowName", "handler": "handler", "configFile": "specFile"}
        model = {key: workflow.get(other) for key, other in keys.items()}
    if not isinstance(model, dict):
        raise ArchiveError(f'{MANIFEST} has no object "model", or "workflow" for a workflow')
    runtime = _text(raw, "runtime") or "python"
    if runtime not in RUNTIMES:
        raise ArchiveError(f"{MANIFEST}: runtime is {runtime[:64]!r}; expected one of {', '.join(RUNTIMES)}")
    return Manifest(
        model_name=check_model_name(_text(model, "modelName") or model_name_from(file_name)),
        model_version=_version(_text(model, "modelVersion") or "1.0"),
        handler=check_handler(_text(model, "handler")),
        runtime=runtime,
        extensions=model.get("extensions"),
        envelope=_text(model, "envelope"),
        created_on=_text(raw, "createdOn"),
        archiver_version=_text(raw, "archiverVersion"),
        raw=raw,
        **{name: _file(model, key) for name, key in _FILES.items()},
    )


def check_handler(handler: str) -> str:
    """The handler, possibly "". Raises ArchiveError if its file would be outside the archive."""
    if handler:
        _check_file("handler", handler.partition(":")[0])
    return handler


def _check_file(key: str, name: str) -> None:
    try:
        check_name(name)
    except ArchiveError as e:
        raise ArchiveError(f"{MANIFEST}: {key}: {e.message}") from None


def _file(model: dict[str, Any], key: str) -> str:
    name = _text(model, key)
    if name:
        _check_file(key, name)
    return name


def _version(version: str) -> str:
    """The version, which must be usable as one segment of a URL path."""
    if len(version) > MAX_NAME or not version.isprintable() or set(version) & set("/\\") or version == "..":
        raise ArchiveError(f"{MANIFEST}: modelVersion is {version[:MAX_NAME]!r}; expected a word without slashes")
    return version


def _text(table: dict[str, Any], key: str) -> str:
    """The text of a field, "" if absent. Hand-written manifests have numbers as versions."""
    value = table.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ArchiveError(f"{MANIFEST}: {key} is a {type(value).__name__}; expected a string")
