"""Small things that handlers share: labels, classes of a module, the backends of torch.compile, and an exception."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

log = logging.getLogger("penstock.model")

CLEANUP_REGEX = re.compile("<.*?>|&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")  # tags and entities of HTML


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


class PredictionException(Exception):
    """What a handler raises to choose the status that all clients of its batch get."""

    def __init__(self, message: Any, error_code: int = 500) -> None:
        self.message = message
        self.error_code = error_code
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that the module itself defines, by name; those derived from `parent_class`, if it is given."""
    classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    return [c for c in classes if parent_class is None or issubclass(c, parent_class)]


def check_valid_pt2_backend(backend: str) -> bool:
    """False, with a warning, for a backend of torch.compile that is not known."""
    known = backend in {member.value for member in PT2Backend}
    if not known:
        log.warning("backend_unknown backend=%s: the model is not compiled", backend)
    return known


def load_label_mapping(mapping_file_path: str | os.PathLike[str]) -> dict[str, str] | None:
    """Class number, as text, to label, of index_to_name.json; None without the file.

    A label that is a list is its last element. Raises Exception for another form.
    """
    if not os.path.isfile(mapping_file_path):
        log.warning("labels_missing file=%s: answers have the numbers of classes", os.path.basename(mapping_file_path))
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
    """{label: value} for each row of `probs`, `[rows, n]`; `lbl_classes` `[rows, n]` are the classes' numbers.

    Without `lbl_classes` they are 0 ... n-1; without a mapping the label is the number.
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


def get_yaml_config(yaml_file_path: str | os.PathLike[str]) -> Any:
    """The content of a file of YAML."""
    import yaml  # the extra `yaml`

    with open(yaml_file_path, encoding="utf-8") as f:
        return yaml.safe_load(f)


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function warns at each call that it has moved."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} is deprecated in {version} and moved to {replacement}"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return warning

    return decorate
