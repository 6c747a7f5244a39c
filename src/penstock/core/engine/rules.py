"""The meaning of `[models.NAME]` keys in the engine: devices, policy, queue limit, rows and buckets."""

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.config.schema import REMOTE, BatchingConfig, ModelConfig, check_sizes
from penstock.core.batching.ladder import DEFAULT_BATCH
from penstock.core.batching.lengths import length_of
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.codecs import OBJECT, traits_of
from penstock.core.wire.messages import Pickled, Unsent
from penstock.core.wire.slabs import Slab
from penstock.core.worker.devices import expanded, physical_cores, visible_gpus
from penstock.errors import BadRequest, ConfigError, describe
from penstock.plugins import BUILTIN, is_whole_file, resolve
from penstock.types import EmbeddingRequest, Item, SequenceRequest, TensorSpec

MAX_SEQUENCE_ID = 200  # characters
_QUEUED_BATCHES = 16  # queue limit per instance without `max_queue`
_LARGEST = {"embedding": 2 * 2048}  # rows: two requests of OpenAI's API, because a part of the queue is reserved


def devices_of(config: ModelConfig) -> tuple[str, ...]:
    """The device of each instance, round robin over `devices`."""
    devices = _expanded(config)
    if config.autoscale.max is not None:
        n = max(config.autoscale.min, 1 if config.instances == "auto" else config.instances)
    elif config.instances != "auto":
        n = config.instances
    elif config.transport == "inline":  # it runs in the only event loop
        n = 1
    elif all(d == "cpu" for d in devices):
        n = max(1, physical_cores() // 2)
    else:
        n = len(devices)
    return tuple(devices[i % len(devices)] for i in range(n))


def _expanded(config: ModelConfig) -> tuple[str, ...]:
    return (config.devices or ("cpu",)) if config.transport in REMOTE else expanded(config.devices)


def check_devices(config: ModelConfig, where: str = "") -> None:
    """Raises ConfigError for a GPU that this machine does not have. `where` precedes the key."""
    if config.transport in REMOTE:
        return
    gpus = visible_gpus() if any(device.startswith("cuda") for device in config.devices) else 0
    there = ["cpu", *(f"cuda:{i}" for i in range(gpus))]
    for device in expanded(config.devices):
        if device.partition(":")[0] == "cuda" and device not in there:
            raise ConfigError(f"{where}devices: found {device}, but this machine has {', '.join(there)}")


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+\.*([\w.]*)[ \t]+)?import\b([ \t]*\([^)]*\)|[\w., \t]*)", re.MULTILINE)


def file_stamps(config: ModelConfig, folders: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """{path: (inode, size, time of the last change in ns)} of the files that a model's section names.

    Target, weights, labels and options may name files, and so may the texts of a target in TOML, which is a pipeline. A
    module is looked up in `folders`; what a module imports from its own folder belongs to it.
    """
    where, colon, _ = config.target.rpartition(":")
    where = config.target if is_whole_file(config.target) or not colon else where
    paths = [where, *_modules(where, folders)]
    if where.endswith(".toml"):
        with contextlib.suppress(OSError, ValueError), open(os.path.expanduser(where), "rb") as file:
            at = os.path.dirname(os.path.abspath(file.name))
            for name in _names(tomllib.load(file)):
                paths += [os.path.normpath(os.path.join(at, os.path.expanduser(name))), *_modules(name, folders)]
    paths = [path for path in map(os.path.expanduser, paths) if os.path.isfile(path)]
    root = [os.path.dirname(path) or "." for path in paths[:1]]
    for path in paths:  # which grows: a module imports others beside it, or beside the first one
        text = ""
        with contextlib.suppress(OSError):  # loading the model says what is wrong with it
            text = Path(path).read_text(errors="replace") if path.endswith(".py") else ""
        for package, names in _IMPORT.findall(text):
            asked = [package, *(f"{package}.{name}".strip(".") for name in re.findall(r"[\w.]+", names))]
            beside = [file for name in asked if name for file in _modules(name, [os.path.dirname(path) or ".", *root])]
            paths += [file for file in beside if os.path.isfile(file) and file not in paths]
    others = (config.weights, config.requirements, *config.labels.values(), *config.options.values())
    paths += [value for value in others if isinstance(value, str)]
    return stamps_of(paths)


def stamps_of(paths: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """{path: (inode, size, time of the last change in ns)} of the files among the paths."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(os.path.expanduser(path))
            if stat.S_ISREG(status.st_mode):
                found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _modules(name: str, folders: Sequence[str]) -> list[str]:
    """The candidate files of a module."""
    return [f"{folder}/{name.replace('.', '/')}{end}" for folder in folders for end in (".py", "/__init__.py")]


def _names(value: Any) -> Iterator[str]:
    """The parts of all texts in a table that may name a file or a module: `Python[steps.py:f]` has `steps.py`."""
    if isinstance(value, str):
        for part in re.split(r"[\[\](),=]", value):
            yield from filter(None, (part.strip(), part.rpartition(":")[0].strip()))
    elif isinstance(value, dict):
        for key, each in value.items():
            if not key.endswith("cache"):  # written by the model itself
                yield from _names(each)
    elif isinstance(value, list):
        for each in value:
            yield from _names(each)


def next_device(config: ModelConfig, used: Sequence[str]) -> str:
    """The device for one more instance: the least used one, relative to its share of `devices`."""
    devices = _expanded(config)
    return min(dict.fromkeys(devices), key=lambda d: used.count(d) / devices.count(d))


def check_rules(config: BatchingConfig) -> None:
    """Raises ConfigError for an unknown policy or rule, and for rules that exclude each other."""
    rows_rule(config)
    check_sizes(config)
    if config.rows == "none" and config.max_batch_size not in ("auto", 1):
        raise ConfigError(
            f'batching.max_batch_size: found {config.max_batch_size} with rows = "none", which runs one request at a'
            " time; leave it out"
        )
    bucket_rule(config)
    policy_of(config)


def policy_of(config: BatchingConfig) -> BatchPolicy:
    """A new policy. A built-in one gets its parameters from the keys of `config`, any other from `options`.

    Raises ConfigError.
    """
    found: Any = resolve("policy", config.policy)
    if config.policy in BUILTIN["policy"]:
        if config.options:
            raise ConfigError(
                f"batching.options: the policy '{config.policy}' takes none, found '{next(iter(config.options))}'; its"
                " parameters are the other keys of [models.NAME.batching]"
            )
        policy: BatchPolicy = found.of(config)
        return policy
    try:
        policy = found(**config.options)
    except Exception as e:
        given = f" with options {', '.join(config.options)}" if config.options else ""
        raise ConfigError(f"batching.policy: making {config.policy}{given} raised {describe(e)}") from e
    return policy


def queue_bound(config: BatchingConfig, instances: int, max_batch_size: int, task: str = "") -> int:
    """The maximum number of queued rows: `max_queue`, or a multiple of the number of instances, which has room for the
    largest requests of the task."""
    size = DEFAULT_BATCH if config.rows == "none" else max_batch_size  # as many requests as of other models
    return config.max_queue or max(_QUEUED_BATCHES * max(1, instances) * size, _LARGEST.get(task, 0))


# ---- rows and bucket of a request, read before a worker decodes it


def _peeked(item: Item) -> tuple[int, str]:
    peek = traits_of(item.codec).peek
    if peek is not None:
        found = peek(item, item.payload.view if isinstance(item.payload, Slab) else item.payload)
        if found is not None:
            return found
    return item.rows, ""


def _rows_auto(item: Item) -> int:
    peek = traits_of(item.codec).peek
    payload = item.payload
    found = None if peek is None else peek(item, payload.view if type(payload) is Slab else payload)
    return item.rows if found is None else found[0]


def _header(item: Item, name: bytes) -> bytes | None:
    for key, value in item.headers or ():
        if key.lower() == name:
            return value
    return None


def _rows_from_header(name: bytes) -> Callable[[Item], int]:
    def rows(item: Item) -> int:
        value = _header(item, name)
        if value is None:
            return item.rows
        rows = int(value) if value.isdigit() and len(value) < 10 else 0  # int() refuses thousands of digits
        if rows < 1:
            raise BadRequest(f"header {name.decode()} must be a whole number of rows from 1, found {value[:40]!r}")
        return rows

    return rows


_FLAGS = {b"true": True, b"1": True, b"false": False, b"0": False}


def sequence_of(item: Item) -> SequenceRequest | None:
    """The sequence of an item: its own, of the headers x-sequence-*, or of the body. Raises BadRequest."""
    if item.sequence is not None:
        return item.sequence
    id = _header(item, b"x-sequence-id")
    if id is None:
        body = item.payload.view if isinstance(item.payload, Slab) else item.payload
        found = traits_of(item.codec).peek_sequence(item, body)
    else:
        found = SequenceRequest(id.decode("latin-1"))
    if found is not None and not 0 < len(found.id) <= MAX_SEQUENCE_ID:
        raise BadRequest(f"the id of a sequence has 1 to {MAX_SEQUENCE_ID} characters, found {len(found.id)}")
    for name in ("start", "end") if id is not None else ():
        value = _header(item, b"x-sequence-" + name.encode())
        flag = _FLAGS.get(value.lower()) if value is not None else False
        if flag is None:
            raise BadRequest(f'header x-sequence-{name} must be "true" or "false", found {value!r:.40}')
        setattr(found, name, flag)
    return found


def rows_rule(config: BatchingConfig) -> Callable[[Item], int]:
    """A function that returns the rows of an item. Raises ConfigError for an unknown rule."""
    if config.rows in ("auto", "axis0"):
        return _rows_auto
    if config.rows == "none":
        return lambda item: 1
    kind, _, name = config.rows.partition(":")
    if kind == "header" and name:
        return _rows_from_header(name.lower().encode())
    raise ConfigError(f'batching.rows must be "auto", "axis0", "none" or "header:NAME", found "{config.rows}"')


def bucket_rule(config: BatchingConfig) -> Callable[[Item], str] | None:
    """A function that returns the bucket of an item; None when all share one. Raises ConfigError."""
    kind, _, name = config.bucket.partition(":")
    if config.bucket == "none":
        return None
    if config.bucket == "shape":
        return lambda item: _peeked(item)[1]
    if config.bucket == "length":
        return None  # `length_rule`
    if config.bucket == "content-type":
        return lambda item: item.content_type
    if kind == "header" and name:
        key = name.lower().encode()
        return lambda item: (_header(item, key) or b"").decode("latin-1")
    raise ConfigError(
        f'batching.bucket must be "none", "shape", "length", "content-type" or "header:NAME", found "{config.bucket}"'
    )


def length_rule(config: BatchingConfig, inputs: Sequence[TensorSpec]) -> Callable[[Item], tuple[str, int]] | None:
    """A function that returns the bucket and the length of an item; None without lengths. `inputs`: of the model.

    The length is that of the padded inputs or, without any, of the longest item. Where only a worker can read it, it
    is estimated from the body: from its values or, without padded inputs, from its bytes. The function raises
    BadRequest for an item without a length.
    """
    if config.bucket != "length":
        return None
    padded = [(n, i) for n, i in enumerate(inputs) if i.pad is not None]
    places = {name: (i.shape.index(-1, 1), len(i.shape)) for n, i in padded for name in (i.name, f"INPUT__{n}")}
    if padded and not padded[0][0]:
        places[""] = places[inputs[0].name]  # an array without a name

    @lru_cache(1024)  # shapes recur
    def of_shapes(key: str) -> tuple[str, int]:
        others, length = [], 0
        for text in key.split(";"):
            if len(found := text.rsplit(":", 2)) < 3:  # of a name with a semicolon: the worker reports it
                return "", 0
            name, datatype, shape = found
            sizes, axis = shape.split("x"), places.get(name, (0, 0))[0]
            if 0 < axis <= len(sizes) and sizes[axis - 1].isdecimal():
                length, sizes[axis - 1] = int(sizes[axis - 1]), "-1"
            others.append(f"{name}:{datatype}:{'x'.join(sizes)}")
        return ";".join(others), length

    def rule(item: Item) -> tuple[str, int]:
        if item.codec == OBJECT:
            if item.length:  # a caller in another process has told it
                return "", item.length
            values = item.payload if item.many else [item.payload]
            return "", max([_length(value, places, config.max_tokens) for value in values], default=0)
        rows, key = _peeked(item)
        bucket, length = of_shapes(key) if key and places else ("", 0)
        body = item.payload.view if isinstance(item.payload, Slab) else item.payload
        length = min(length, len(body))  # a shape may claim anything, and values take a byte each
        if not length:
            length = bytes(body).count(b",") // len(padded) if padded else len(body)
            length = min(max(1, length // max(1, rows)), config.max_tokens or length)
        return bucket, length

    return rule


def _length(value: Any, places: Mapping[str, tuple[int, int]], most: int | None) -> int:
    """The length of an item of a caller in Python; `most`: if it can only be estimated. `places`: the padded axis and
    the rank of each padded input; lists may lack the axis of the rows. Raises BadRequest."""
    if type(value) is Unsent:
        return 0
    if type(value) is EmbeddingRequest:
        value = value.input
    if type(value) is Pickled:
        return min(len(value), most or len(value))
    if not places:
        try:
            return length_of(value)
        except TypeError:
            raise BadRequest(
                f'an item is a {type(value).__name__}, which has no length; batching.bucket = "length" expects texts,'
                " lists or arrays"
            ) from None
    name = next((name for name in places if name in value), "") if isinstance(value, dict) else next(iter(places))
    axis, rank = places.get(name, (0, 0))
    shape = getattr(value := value[name] if name and isinstance(value, dict) else value, "shape", None)
    if shape is None:
        shape = []
        while isinstance(value, list | tuple):
            shape.append(len(value))
            value = value[0] if value else None
    at = axis - rank + len(shape)
    return int(shape[at]) if 0 <= at < len(shape) else 0  # the worker reports other values
