"""Where a captioner's files are, and what tells that they changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.errors import LoadFailed, describe

_FORMAT: Final = 1  # of what is hashed
_WHOLE_BYTES: Final = 16 * 2**20  # of a file that is hashed from end to end
_SAMPLES: Final = 256  # places of a larger one, spread evenly: training changes nearly all weights, if only a little
_SAMPLE_BYTES: Final = 4096
_SETTINGS: Final = ("*.json", "*.txt", "*.model")
_WEIGHTS: Final = "*.safetensors"
_PICKLES: Final = "*.bin"


class Source(Struct, frozen=True):
    """What a model is called to others, and its folder; None where the architecture is all that is known of it."""

    name: str
    folder: Path | None = None


def find(model: str, *, weights: bool = True, trust: str = "none") -> Source:
    """The folder `model`, or where the Hub's library keeps what has that name, fetched at need.

    Weights are safetensors; pickled ones are taken only with `trust` "pickle". Raises LoadFailed.
    """
    folder = Path(model).expanduser()
    name = folder.resolve().name
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise LoadFailed(f"model: there is no folder {model}")
        folder, name = _fetched(model, weights, trust), model
    if not (folder / "config.json").is_file():
        raise LoadFailed(f"model: {model} has no config.json; expected what `save_pretrained` writes")
    if weights and not any(folder.glob(_WEIGHTS)):
        pickled = any(folder.glob(_PICKLES))
        if not pickled or trust != "pickle":
            hint = ", but pickled ones, which are taken only with trust = 'pickle'" if pickled else ""
            raise LoadFailed(f"model: {model} has no weights in safetensors{hint}")
    return Source(name, folder)


def _fetched(model: str, weights: bool, trust: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_SETTINGS, *([_WEIGHTS] if weights else [])]
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns))
        if weights and trust == "pickle" and not any(folder.glob(_WEIGHTS)):
            folder = Path(snapshot_download(model, allow_patterns=[*patterns, _PICKLES]))
    except Exception as e:
        raise LoadFailed(
            f"model: {model} is no folder, and the Hugging Face Hub does not give it: {describe(e)}"
        ) from e
    return folder


def revision(source: Source, settings: dict[str, Any]) -> str:
    """16 hexadecimal digits that change with the files of a model and with the settings.

    Of files over 16 MiB their size and 1 MiB spread over them is looked at: weights of gigabytes would be read twice.
    """
    found = hashlib.sha256(msgspec.json.encode([_FORMAT, settings], order="sorted"))
    if source.folder is None:
        found.update(source.name.encode())
        return found.hexdigest()[:16]
    files = {path for pattern in (*_SETTINGS, _WEIGHTS, _PICKLES) for path in source.folder.glob(pattern)}
    for path in sorted(files):
        found.update(msgspec.json.encode([path.name, path.stat().st_size]))
        with path.open("rb") as file:
            for offset, count in _places(path.stat().st_size):
                file.seek(offset)
                found.update(file.read(count))
    return found.hexdigest()[:16]


def _places(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what is hashed of a file."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    last = size - _SAMPLE_BYTES
    return [(last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
