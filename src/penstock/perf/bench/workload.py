"""What a load sends, and when: request bodies (files, lines of a file, or random tensors in the shapes that a model
declares), and arrival times (Poisson, constant, gamma, or recorded).
"""

from __future__ import annotations

import logging
import math
import mimetypes
import random
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct

from penstock.errors import ConfigError, nearest
from penstock.perf.bench.load import Check, http_request
from penstock.perf.bench.target import Target
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, NPY, encode_request
from penstock.serving.protocols.oip_tensors import to_bytes
from penstock.types import DTYPES, TensorSpec

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("penstock.perf")

# ---- arrival times. Pure except for `read_trace`

_EXPECTED: Final = "expected poisson, constant, gamma:CV or trace:FILE"
_CV: Final = (0.01, 100.0)  # outside, arrivals are constant, or a few bursts that no run is long enough for
_MOST: Final = 30_000_000  # arrivals of one run: 1 GB of samples


class Arrival(Struct, frozen=True):
    """An arrival process. `cv` is the coefficient of variation of the times between arrivals (gamma): 1 is Poisson,
    more is burstier. `path` is the file of a trace."""

    kind: Literal["poisson", "constant", "gamma", "trace"]
    cv: float = 1.0
    path: str = ""


class Trace(Struct, frozen=True):
    """Recorded arrivals: sorted seconds from the first, rows of each (1 if unknown), and the names of the models.

    `unsorted` counts the lines that were earlier than the line before."""

    times_s: array[float]
    rows: array[int]
    models: tuple[str, ...] = ()
    unsorted: int = 0


class _Line(Struct):
    t: float
    rows: int = 1
    bytes: int = 0
    model: str = ""


def parse_arrival(text: str) -> Arrival:
    """Parses "poisson", "constant", "gamma:2.5" or "trace:FILE". Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if kind in ("poisson", "constant") and not rest:
        return Arrival("poisson" if kind == "poisson" else "constant")
    if kind == "trace" and rest:
        return Arrival("trace", path=rest)
    if kind == "gamma":
        try:
            cv = float(rest)
        except ValueError:
            cv = math.nan
        if not _CV[0] <= cv <= _CV[1]:
            raise ConfigError(f'arrival "{text}": expected a coefficient of variation, for instance gamma:2.5')
        return Arrival("gamma", cv)
    hint = nearest(kind, ("poisson", "constant", "gamma", "trace"))
    raise ConfigError(f'arrival "{text}" is not known; {_EXPECTED}{hint}')


def times(arrival: Arrival, rate: float, seconds: float, seed: int, trace: Sequence[float] = ()) -> array[float]:
    """Sorted arrival times in seconds at `rate` per second, all below `seconds`; deterministic.

    A trace keeps its own times if `rate` is 0, otherwise it is stretched to the rate. It is whole if `seconds` is 0,
    and does not repeat.
    """
    if arrival.kind == "trace":
        stretches = rate > 0 and len(trace) > 1 and trace[-1] > 0
        stretch = (len(trace) - 1) / trace[-1] / rate if stretches else 1.0
        return array("d", (t * stretch for t in trace if not seconds or t * stretch < seconds))
    if not (0 < rate < math.inf and 0 < seconds < math.inf):
        raise ConfigError(f"arrivals at {rate:g}/s for {seconds:g} s: expected a rate and a time over 0")
    if rate * seconds > _MOST:
        many = f"{rate * seconds:.3g}"
        raise ConfigError(f"arrivals at {rate:g}/s for {seconds:g} s are {many}; expected at most {_MOST:g}")
    if arrival.kind == "constant":
        return array("d", (n / rate for n in range(math.ceil(seconds * rate - 1e-9))))
    draw = random.Random(seed)
    shape = 1.0 if arrival.kind == "poisson" else arrival.cv**-2
    scale = 1 / (rate * shape)
    found: array[float] = array("d")
    now = draw.gammavariate(shape + 1, scale) * draw.random()  # a stationary start: the rate holds from time 0
    while now < seconds:
        found.append(now)
        now += draw.gammavariate(shape, scale)
    return found


def read_trace(path: str, model: str = "") -> Trace:
    """Reads a file of `penstock serve --record`, or JSON lines with `t` in seconds and optional `rows` and `bytes`.

    `model` selects the requests of one model. Other keys and a truncated last line are ignored. Raises ConfigError with
    file and line.
    """
    decode = msgspec.json.Decoder(_Line).decode
    lines: list[_Line] = []
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = decode(text)
                if not (0 <= line.t < math.inf and 1 <= line.rows < 2**31 and 0 <= line.bytes < 2**63):
                    found = text.strip()[:80]
                    raise ConfigError(f"{path}:{number}: found {found!r}, expected t from 0, rows over 0, bytes from 0")
                lines.append(line)
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read: {exc.strerror or exc}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        if text.endswith(b"\n") or not lines:
            raise ConfigError(f'{path}:{number}: {exc}; expected for instance {{"t": 0.25, "rows": 1}}') from None
        log.warning("file=%s line=%d dropped=true reason=truncated", path, number)  # by the end of a server
    models = tuple(sorted({line.model for line in lines if line.model}))
    if model:
        lines = [line for line in lines if line.model == model]
        if not lines:
            raise ConfigError(f"trace {path}: no request for model '{model}'; found {', '.join(models) or 'no names'}")
    if not lines:
        raise ConfigError(f'trace {path} is empty; expected JSON lines such as {{"t": 0.25, "rows": 1}}')
    unsorted = sum(after.t < before.t for before, after in pairwise(lines))
    lines.sort(key=lambda line: line.t)  # several processes may have written it
    first = lines[0].t
    times_s, rows = array("d", (line.t - first for line in lines)), array("q", (line.rows for line in lines))
    return Trace(times_s, rows, models, unsorted)


# ---- request bodies


JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
RANDOM: Final = "random"
MOST_BYTES: Final = 2**30  # of all payloads together, which stay in memory
HOW_MANY: Final = 16  # random payloads, if they fit: enough to defeat a cache in the model
FREE_AXIS: Final = 16  # size of an inner axis of any size, such as the tokens of a text
JSON_ELEMENTS: Final = 4096  # larger random tensors are sent in binary: JSON of an image would measure its parser
_TYPES: Final = {".json": JSON, ".txt": "text/plain", ".npy": NPY, ".bin": BYTES}
_HINT: Final = "give --data FILE, DIR, LINES.jsonl or random"


class Payload(Struct, frozen=True):
    """One body and its source. `path` is the route it requires, "" for the target's own."""

    body: bytes
    content_type: str
    name: str
    path: str = ""
    headers: dict[str, str] = {}


def request_of(target: Target, payload: Payload) -> bytes:
    """The complete HTTP message. Raises ConfigError for a token that no header can carry."""
    headers = {"Content-Type": payload.content_type, **payload.headers}
    if target.token is not None:
        if not target.token.isascii() or not target.token.isprintable():
            raise ConfigError("the token contains a character that no header can carry")
        headers["Authorization"] = f"Bearer {target.token}"
    return http_request(target.endpoint, "POST", payload.path or target.path, headers, payload.body)


def check_of(target: Target, expect: Check | None = None) -> Check | None:
    """The check of 2xx responses; None if the status suffices."""
    if target.protocol != "oip":
        return expect
    # some servers of the Open Inference Protocol respond 200 with {"error": ...}
    return lambda number, status, body: b'"outputs"' in body and (expect is None or expect(number, status, body))


def payloads(spec: str | None, target: Target, seed: int = 0) -> list[Payload]:
    """The payloads that `spec` names: a file, the sorted files of a folder, the lines of a .jsonl, or "random".

    None: the model's own `parameters["example"]` if declared, else random. Raises ConfigError for missing, empty or
    invalid data, and for random without declared inputs.
    """
    if spec is None:
        example = target.parameters.get("example")
        if example is not None and target.protocol != "oip":
            return [Payload(msgspec.json.encode(example), JSON, "the model's example")]
        if not target.inputs:
            raise ConfigError(f"{_subject(target)} declares neither an example nor inputs; declare them, or {_HINT}")
        return _random(target, seed)
    if spec == RANDOM:
        return _random(target, seed)
    path = Path(spec)
    if path.is_dir():
        found = _read(sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))), target)
        if not found:
            raise ConfigError(f"--data {spec}: the folder contains no files")
        return found
    if not path.is_file():
        raise ConfigError(f"--data {spec}: no such file or folder; {_HINT}")
    return _lines(path) if path.suffix == ".jsonl" else _read([path], target)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _subject(target: Target) -> str:
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
    return _TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or BYTES


def _payload(body: bytes, path: Path, target: Target) -> Payload:
    content_type = content_type_of(path)
    if target.protocol != "oip" or content_type in (JSON, NPY):
        return Payload(body, content_type, path.name)
    required = [spec for spec in target.inputs if not spec.optional]
    if len(required) != 1 or required[0].datatype != "BYTES" or not set(required[0].shape) <= {-1, 1}:
        raise ConfigError(
            f"--data {path}: an Open Inference request is JSON or .npy, and the model has no single input of BYTES"
            f" for this file; use --protocol native, or write the request as .json"
        )
    head, buffers = encode_request([(required[0].name, "BYTES", (1,) * len(required[0].shape), [body])])
    return _binary(head, buffers, path.name)


def _lines(path: Path) -> list[Payload]:
    found = []
    for number, line in enumerate(_content(path, MOST_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ConfigError(f"--data {path}, line {number}: not JSON: {exc}") from None
        found.append(Payload(line, JSON, f"{path.name}:{number}"))
    if not found:
        raise ConfigError(f"--data {path}: the file has no lines")
    return found


# ---- random tensors


def _random(target: Target, seed: int) -> list[Payload]:
    import numpy as np

    specs = [spec for spec in target.inputs if not spec.optional]
    if not specs:
        raise ConfigError(f"--data random: {_subject(target)} declares no inputs; give --data FILE or DIR")
    for spec in specs:
        if spec.datatype not in DTYPES:
            raise ConfigError(f"--data random: input '{spec.name}' has the unknown datatype '{spec.datatype}'")
    random = np.random.default_rng(seed)
    path = "" if target.protocol == "oip" else _oip_path(target)
    found = [_tensors(specs, random, "random 0", path)]
    fit = min(HOW_MANY, MOST_BYTES // len(found[0].body))
    return found + [_tensors(specs, random, f"random {number}", path) for number in range(1, fit)]


def _oip_path(target: Target) -> str:
    """The Open Inference route of the same model: the native route has no names of inputs."""
    name, _, version = target.path.partition("?")[0].removeprefix("/predictions/").partition("/")
    return f"/v2/models/{name}/versions/{version}/infer" if version else f"/v2/models/{name}/infer"


def _tensors(specs: list[TensorSpec], random: np.random.Generator, name: str, path: str) -> Payload:
    arrays = [(spec, _array(spec, random)) for spec in specs]
    small = sum(array.size for _, array in arrays) <= JSON_ELEMENTS
    if small and not any(spec.datatype == "BF16" for spec in specs):
        inputs = [
            {"name": spec.name, "datatype": spec.datatype, "shape": array.shape, "data": array.ravel().tolist()}
            for spec, array in arrays
        ]
        return Payload(msgspec.json.encode({"inputs": inputs}), JSON, name, path)
    head, buffers = encode_request(
        [(spec.name, spec.datatype, array.shape, to_bytes(spec.name, spec.datatype, array)) for spec, array in arrays]
    )
    return _binary(head, buffers, name, path)


def _binary(head: bytes, buffers: list[Any], name: str, path: str = "") -> Payload:
    body = b"".join([head, *buffers])
    return Payload(body, BYTES, name, path, {HEADER_LENGTH: str(len(head))})


def _array(spec: TensorSpec, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """One row: floats from 0 to 1, integers below 100 (valid in any vocabulary), or short texts."""
    import numpy as np

    axes = spec.shape or (1,)
    shape = tuple(n if n >= 0 else (1 if axis == 0 else FREE_AXIS) for axis, n in enumerate(axes))
    if spec.datatype == "BYTES":
        texts = [f"random text {int(n)}" for n in random.integers(1000, size=shape).ravel()]
        return np.array(texts, dtype=object).reshape(shape)
    dtype = np.dtype(DTYPES[spec.datatype])
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    return random.integers(2 if dtype.kind == "b" else 100, size=shape).astype(dtype)
