"""How a payload is asked of a target, and which answers are good ones."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.load import Check, http_request
from penstock.perf.bench.target import Target
from penstock.serving.protocols.oip import HEADER_LENGTH, NPY
from penstock.serving.protocols.oip_binary import encode_request
from penstock.serving.protocols.oip_tensors import to_bytes
from penstock.types import DTYPES, TensorSpec

if TYPE_CHECKING:
    import numpy as np

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
RANDOM: Final = "random"
MOST_BYTES: Final = 2**30  # of all payloads together: they are held while the load runs
HOW_MANY: Final = 16  # of chance, if so many have room: enough that no cache of the model answers
FREE_AXIS: Final = 16  # what stands for an inner axis of any size
JSON_ELEMENTS: Final = 4096  # a larger tensor of chance is sent in binary
_TYPES: Final = {".json": JSON, ".txt": "text/plain", ".npy": NPY, ".bin": BYTES}
_HINT: Final = "give --data FILE, DIR, LINES.jsonl or random"


class Payload(Struct, frozen=True):
    """One body, and where it came from. `path` is that of the route it is made for, "" for the target's own."""

    body: bytes
    content_type: str
    name: str
    path: str = ""
    headers: dict[str, str] = {}


def payloads(spec: str | None, target: Target, seed: int = 0) -> list[Payload]:
    """What `spec` names, at least one: a file, all files of a folder (sorted), the lines of a .jsonl, or "random".

    None: the model's own `parameters["example"]` if it declares one, else random. Raises ConfigError for what is not
    there, is empty or broken, and for random without declared inputs.
    """
    if spec is None:
        example = target.parameters.get("example")
        if example is not None and target.protocol != "oip":
            return [Payload(msgspec.json.encode(example), JSON, "the model's example")]
        if not target.inputs:
            raise ConfigError(f"{_who(target)} declares neither an example nor inputs; {_HINT}")
        return _random(target, seed)
    if spec == RANDOM:
        return _random(target, seed)
    path = Path(spec)
    if path.is_dir():
        found = _read(sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))), target)
        if not found:
            raise ConfigError(f"--data {spec}: the folder holds no file")
        return found
    if not path.is_file():
        raise ConfigError(f"--data {spec}: no such file or folder; {_HINT}")
    return _lines(path) if path.suffix == ".jsonl" else _read([path], target)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _who(target: Target) -> str:
    return f"model '{target.model}'" if target.model else target.url


# ---- files


def _read(paths: list[Path], target: Target) -> list[Payload]:
    found = []
    left = MOST_BYTES
    for path in paths:
        content = _content(path, left)
        left -= len(content)
        found.append(_payload(content, path, target))
    return found


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        if path.stat().st_size > most_bytes:
            raise ConfigError(f"--data: the files have more than {MOST_BYTES >> 30} GiB; give fewer")
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"--data {path}: cannot be read: {exc.strerror}") from None


def content_type_of(path: Path) -> str:
    """The content type that a file of that name is sent as."""
    return _TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or BYTES


def _payload(body: bytes, path: Path, target: Target) -> Payload:
    content_type = content_type_of(path)
    if target.protocol != "oip" or content_type in (JSON, NPY):
        return Payload(body, content_type, path.name)
    wanted = [spec for spec in target.inputs if not spec.optional]
    if len(wanted) != 1 or wanted[0].datatype != "BYTES" or not set(wanted[0].shape) <= {-1, 1}:
        raise ConfigError(
            f"--data {path}: an Open Inference request is JSON or .npy, and the model has no single input of BYTES"
            f" that this file could be; use --protocol native, or write the request as .json"
        )
    head, buffers = encode_request([(wanted[0].name, "BYTES", (1,) * len(wanted[0].shape), [body])])
    return _binary(head, buffers, path.name)


def _lines(path: Path) -> list[Payload]:
    """Each line of JSON is a request."""
    found = []
    for number, line in enumerate(_content(path, MOST_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ConfigError(f"--data {path}, line {number}: no JSON: {exc}") from None
        found.append(Payload(line, JSON, f"{path.name}:{number}"))
    if not found:
        raise ConfigError(f"--data {path}: the file holds no line")
    return found


# ---- of chance


def _random(target: Target, seed: int) -> list[Payload]:
    import numpy as np

    specs = [spec for spec in target.inputs if not spec.optional]
    if not specs:
        raise ConfigError(f"--data random: {_who(target)} declares no inputs; give --data FILE or DIR")
    for spec in specs:
        if spec.datatype not in DTYPES:
            raise ConfigError(f"--data random: input '{spec.name}' is of the unknown datatype '{spec.datatype}'")
    chance = np.random.default_rng(seed)
    path = "" if target.protocol == "oip" else _oip_path(target)
    found = [_tensors(specs, chance, "random 0", path)]
    fit = min(HOW_MANY, MOST_BYTES // len(found[0].body))
    return found + [_tensors(specs, chance, f"random {number}", path) for number in range(1, fit)]


def _oip_path(target: Target) -> str:
    """The Open Inference route of the same model: the native one does not know names of inputs."""
    name, _, version = target.path.partition("?")[0].removeprefix("/predictions/").partition("/")
    return f"/v2/models/{name}/versions/{version}/infer" if version else f"/v2/models/{name}/infer"


def _tensors(specs: list[TensorSpec], chance: np.random.Generator, name: str, path: str) -> Payload:
    arrays = {spec.name: _array(spec, chance) for spec in specs}
    small = sum(array.size for array in arrays.values()) <= JSON_ELEMENTS
    if small and not any(spec.datatype == "BF16" for spec in specs):
        inputs: list[dict[str, Any]] = [
            {
                "name": spec.name,
                "datatype": spec.datatype,
                "shape": arrays[spec.name].shape,
                "data": arrays[spec.name].ravel().tolist(),
            }
            for spec in specs
        ]
        return Payload(msgspec.json.encode({"inputs": inputs}), JSON, name, path)
    head, buffers = encode_request(
        [
            (spec.name, spec.datatype, arrays[spec.name].shape, to_bytes(spec.name, spec.datatype, arrays[spec.name]))
            for spec in specs
        ]
    )
    return _binary(head, buffers, name, path)


def _binary(head: bytes, buffers: list[Any], name: str, path: str = "") -> Payload:
    body = b"".join([head, *buffers])
    return Payload(body, BYTES, name, path, {HEADER_LENGTH: str(len(head))})


def _array(spec: TensorSpec, chance: np.random.Generator) -> np.ndarray[Any, Any]:
    """One row. Numbers from 0 to 1, whole ones below 100 (which any vocabulary has), texts of a few words."""
    import numpy as np

    axes = spec.shape or (1,)
    shape = tuple(n if n >= 0 else (1 if axis == 0 else FREE_AXIS) for axis, n in enumerate(axes))
    if spec.datatype == "BYTES":
        texts = [f"text {int(n)} of chance" for n in chance.integers(1000, size=shape).ravel()]
        return np.array(texts, dtype=object).reshape(shape)
    dtype = np.dtype(DTYPES[spec.datatype])
    if dtype.kind == "f":
        return chance.random(shape).astype(dtype)
    return chance.integers(2 if dtype.kind == "b" else 100, size=shape).astype(dtype)


def request_of(target: Target, payload: Payload) -> bytes:
    """The whole HTTP message. Raises ConfigError for a token that no header can carry."""
    headers = {"Content-Type": payload.content_type, **payload.headers}
    if target.token is not None:
        if not target.token.isascii() or not target.token.isprintable():
            raise ConfigError("the token holds a character that no header can carry")
        headers["Authorization"] = f"Bearer {target.token}"
    return http_request(target.endpoint, "POST", payload.path or target.path, headers, payload.body)


def check_of(target: Target) -> Check | None:
    """What an answer of 2xx must hold to be a good one; None where its status tells, and bodies need no look."""
    return _has_outputs if target.protocol == "oip" else None


def _has_outputs(number: int, status: int, body: bytes) -> bool:
    """Some servers of the Open Inference Protocol answer 200 with {"error": ...}."""
    return b'"outputs"' in body
