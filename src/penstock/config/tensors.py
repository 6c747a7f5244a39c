"""Tensors as the configuration names them: `image = "FP32[-1,3,224,224]"`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import ConfigError
from penstock.types import DTYPES, TensorSpec

_SPEC = re.compile(r"([A-Z0-9]+)\s*\[\s*-1((?:\s*,\s*(?:-1|[0-9]{1,9}))*)\s*\]")


def specs_of(inputs: Mapping[str, str], where: str = "") -> tuple[TensorSpec, ...]:
    """The tensors in their order. Raises ConfigError; `where` precedes the key in its message."""
    return tuple(_spec(name, text, f"{where}inputs.{name}") for name, text in inputs.items())


def _spec(name: str, text: str, key: str) -> TensorSpec:
    found = _SPEC.fullmatch(text.strip())
    if found is None or found[1] not in DTYPES:
        raise ConfigError(
            f'{key}: found {text[:60]!r}, expected a datatype and a shape such as "FP32[-1,3,224,224]", -1 first for'
            f" the rows; datatypes are {', '.join(DTYPES)}"
        )
    return TensorSpec(name, found[1], (-1, *(int(n) for n in found[2].split(",")[1:])))
