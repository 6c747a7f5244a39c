"""What a job's captions depend on, in plain words: two jobs may share rows only if these are equal."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from penstock.bulk.types import Pixels, Sampling
from penstock.errors import PenstockError

FORMAT = 1  # of the spools, and of how frames are sampled and scaled
OWN = ("model", "revision", "prompt", "max_new_tokens", "precision")  # what a server says of its model

Fingerprint = dict[str, Any]


class FingerprintDiffers(PenstockError):
    """The work folder has captions that another configuration made."""

    code = "fingerprint_differs"


def fingerprint(parameters: dict[str, Any], sampling: Sampling, pixels: Pixels) -> Fingerprint:
    """All that changes captions, and nothing else: neither servers nor how many frames travel together.

    `parameters` are what the server says of its model.
    """
    model = {key: parameters.get(key) for key in OWN}
    form = {"pixels": pixels.mode, "kernel": pixels.kernel, "height": pixels.height, "width": pixels.width}
    if pixels.mode == "source":
        form["kernel"] = None  # nothing is scaled here
    return {"format": FORMAT} | model | msgspec.structs.asdict(sampling) | form


def short(of: Fingerprint) -> str:
    """Eight characters that differ when fingerprints do."""
    return hashlib.sha256(msgspec.json.encode(of, order="sorted")).hexdigest()[:8]


def differences(was: Fingerprint, now: Fingerprint) -> list[str]:
    """A line for each field that is not the same."""
    return [
        f"{key}: was {_text(was, key)}, is {_text(now, key)}"
        for key in dict.fromkeys([*now, *was])
        if was.get(key) != now.get(key)
    ]


def _text(of: Fingerprint, key: str) -> str:
    return msgspec.json.encode(of[key]).decode() if of.get(key) is not None else "not set"
