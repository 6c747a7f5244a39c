"""Helpers that handlers import: labels, partial responses, imports by name, timers, compiler names, words of a text."""

import enum
import functools
import importlib
import inspect
import itertools
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple

log = logging.getLogger("penstock.model")

CLEANUP_REGEX = re.compile("<.*?>|&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")  # HTML tags and entities


class PT2Backend(str, enum.Enum):  # noqa: UP042 - handlers see `str(member)`
    """The backends of torch.compile that a model's configuration may name."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether torch.compile's backend is known; warns if not."""
    known = backend in {member.value for member in PT2Backend}
    if not known:
        log.warning("backend_unknown backend=%s: the model is not compiled", backend)
    return known


class PredictionException(Exception):
    """Raised by a handler to choose the status that all clients of its batch get."""

    def __init__(self, message: Any, error_code: int = 500) -> None:
        self.message = message
        self.error_code = error_code
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


# ---- labels


def load_label_mapping(mapping_file_path: str | os.PathLike[str]) -> dict[str, str] | None:
    """{class number as text: label} from index_to_name.json; None without the file.

    For a label that is a list, its last element counts. Raises Exception for another format.
    """
    if not os.path.isfile(mapping_file_path):
        log.warning("labels_missing file=%s: responses have class numbers", os.path.basename(mapping_file_path))
        return None
    with open(mapping_file_path, encoding="utf-8") as f:
        mapping = json.load(f)
    if not isinstance(mapping, dict):
        raise Exception('index->name JSON mapping should be in "class": "label" format.')
    names = mapping.get("object_type_names")
    if isinstance(names, list):
        return {str(k): v for k, v in enumerate(names)}
    for key, value in mapping.items():
        label = value[-1] if isinstance(value, list) and value else value
        if not isinstance(label, str):
            raise Exception("labels in index->name mapping must be either str or List[str]")
        mapping[key] = label
    return mapping


def map_class_to_label(
    probs: list[Any], mapping: dict[str, str] | None = None, lbl_classes: Iterable[Iterable[Any]] | None = None
) -> list[dict[str, Any]]:
    """{label: value} for each row of `probs` `[rows, n]`; `lbl_classes` `[rows, n]` holds the class numbers.

    The default class numbers are 0 ... n-1. Without a mapping the number is the label.
    """
    if not isinstance(probs, list):
        raise Exception("Convert classes to list before doing mapping")
    if mapping is not None and not isinstance(mapping, dict):
        raise Exception("Mapping must be a dict")
    if lbl_classes is None:
        lbl_classes = itertools.repeat(range(len(probs[0])), len(probs))
    return [
        {(str(c) if mapping is None else mapping[str(c)]): p for c, p in zip(classes, row, strict=False)}
        for classes, row in zip(lbl_classes, probs, strict=False)
    ]


# ---- partial responses


class PredictResponse(NamedTuple):
    """`values` holds responses, or parts of them, by place in the batch; `more` announces further parts.

    `ids` maps places to request ids; None if the handler gave only places.
    """

    values: dict[int, Any]
    ids: Mapping[int, str] | None
    code: int
    message: str
    context: Any
    more: bool


def create_predict_response(
    ret: Any, req_id_map: Any, message: str, code: int, context: Any = None, ts_stream_next: bool = False
) -> PredictResponse:
    """The argument of `context.cl_socket.sendall`: `ret[idx]` for each place in the dict or list `req_id_map`."""
    values = {idx: ret[idx] for idx in req_id_map}
    ids = dict(req_id_map) if isinstance(req_id_map, Mapping) else None
    return PredictResponse(values, ids, code, message, context, ts_stream_next)


def send_intermediate_predict_response(ret: Any, req_id_map: Any, message: str, code: int, context: Any = None) -> None:
    """Immediately sends a part of the responses to the callers in `req_id_map`, usually `context.request_ids`.

    The return value of `handle` is the last part. Only the first process of a multi-process model sends.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        context.cl_socket.sendall(create_predict_response(ret, req_id_map, message, code, context, True))


# ---- imports and files


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """The class `[module.]Class`, with the module below `module_prefix`. Raises ImportError."""
    module, _, name = (class_name or "").rpartition(".")
    path = ".".join(part for part in (module_prefix, module) if part)
    if not name or not path:
        raise ImportError(f"found {class_name!r}, expected 'module.Class'")
    try:
        return getattr(importlib.import_module(path), name)
    except AttributeError:
        raise ImportError(f"the module {path} has no {name}") from None


def require(module: str, advice: str) -> Any:
    """The module of an optional library. Raises ImportError with the advice."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(f"the module {module!r} cannot be imported: {advice}", name=module) from e


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that the module itself defines, by name; only subclasses of `parent_class` if given."""
    classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    return [c for c in classes if parent_class is None or issubclass(c, parent_class)]


def get_yaml_config(yaml_file_path: str | os.PathLike[str]) -> Any:
    """The content of a YAML file."""
    import yaml  # the extra `yaml`

    with open(yaml_file_path, encoding="utf-8") as f:
        return yaml.safe_load(f)


# ---- decorators


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a handler's methods: with `handler: {profile: true}` in model-config.yaml, records their time.

    The metric is `ts_handler_<name>` in ms. Waits for the GPU before and after the call.
    """

    @functools.wraps(function)
    def timing(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if not context or not (context.model_yaml_config.get("handler") or {}).get("profile"):
            return function(self, *args, **kwargs)
        _wait_for_gpu()
        start = time.perf_counter()
        result = function(self, *args, **kwargs)
        _wait_for_gpu()
        context.metrics.add_time(f"ts_handler_{function.__name__}", (time.perf_counter() - start) * 1000)
        return result

    return timing


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timeit(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that prints the wall-clock time and the CPU time of each call."""

    @functools.wraps(function)
    def timing(*args: Any, **kwargs: Any) -> Any:
        start, start_cpu = time.perf_counter(), time.process_time()
        result = function(*args, **kwargs)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        print(f"{function.__name__!r} took {wall_s:.4f} s, and {cpu_s:.4f} s of CPU time")
        return result

    return timing


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that warns at each call that the function has moved."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} is deprecated in {version} and moved to {replacement}"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return warning

    return decorate


# ---- tokenizers and contractions for English text

_MARKS = re.compile(r"<br />|['\".,()!?;:]")
_TOKENS = ("'", ".", ",", "(", ")", "!", "?")  # marks that are tokens; the others are dropped


def ngrams_iterator(token_list: list[str], ngrams: int) -> Iterator[str]:
    """The tokens, then adjacent pairs joined by a space, then triples, up to `ngrams`."""
    for n in range(1, ngrams + 1):
        for start in range(len(token_list) - n + 1):
            yield " ".join(token_list[start : start + n])


def basic_english(line: str) -> list[str]:
    """The lower-case words and punctuation marks of a line, without quotation marks, colons and semicolons."""
    return _MARKS.sub(_spaced, line.lower()).split()


def _spaced(match: re.Match[str]) -> str:
    mark = match[0]
    if mark == '"':
        return ""
    return f" {mark} " if mark in _TOKENS else " "


def get_tokenizer(tokenizer: Any, language: str = "en") -> Callable[[str], list[str]]:
    """The tokenizer of that name: None splits at whitespace, "basic_english" is `basic_english`.

    Returns a callable unchanged. Raises ValueError for an unknown name.
    """
    if tokenizer is None:
        return str.split
    if tokenizer == "basic_english" and language == "en":
        return basic_english
    if callable(tokenizer):
        found: Callable[[str], list[str]] = tokenizer
        return found
    raise ValueError(f"found tokenizer {tokenizer!r} of language {language!r}, expected 'basic_english' of 'en'")


_ENDINGS: Final = {
    "n't not": "are could did do does had has have is may might must need ought should was were would",
    "'d would": "he i it she that there they we you",
    "'ll will": "he how i it she they we what who you",
    "'ve have": "could i might must should they to we what when where who why will would you so",
    "'re are": "they we what you",
    "'s is": "he how it she that there what when where who why",
    "'m am": "i",
}
CONTRACTION_MAP: Final = {
    "ain't": "is not",
    "can't": "cannot",
    "won't": "will not",
    "shan't": "shall not",
    "sha'n't": "shall not",
    "'cause": "because",
    "how'd": "how did",
    "where'd": "where did",
    "let's": "let us",
    "so's": "so as",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "y'all": "you all",
} | {
    head + ending.split()[0]: f"{head} {ending.split()[1]}"
    for ending, heads in _ENDINGS.items()
    for head in heads.split()
}
