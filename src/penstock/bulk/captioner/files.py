"""The files of a captioning network, and a revision that changes with them."""

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.errors import LoadFailed, describe

_FORMAT: Final = 1  # of the hash
_WHOLE_BYTES: Final = 16 * 2**20  # files up to this size are hashed completely
_SAMPLES: Final = 256  # evenly spread places of a larger file: training changes nearly all weights, if only a little
_SAMPLE_BYTES: Final = 4096
_SETTINGS: Final = ("*.json", "*.txt", "*.model")
_WEIGHTS: Final = "*.safetensors"
_PICKLES: Final = "*.bin"


class ModelSource(Struct, frozen=True):
    """A model's name as others see it, and its folder; None if only its architecture is known."""

    name: str
    folder: Path | None = None


def find(model: str, *, weights: bool = True, trust: str = "none") -> ModelSource:
    """The folder `model`, or the local copy of a model on the Hugging Face Hub, downloaded if necessary.

    Weights are safetensors; pickled weights require `trust` "pickle". Raises LoadFailed.
    """
    folder = Path(model).expanduser()
    name = folder.resolve().name
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise LoadFailed(f"model: there is no folder {model}")
        folder, name = _download(model, weights, trust), model
    if not (folder / "config.json").is_file():
        raise LoadFailed(f"model: {model} has no config.json; expected what `save_pretrained` writes")
    if weights and not any(folder.glob(_WEIGHTS)):
        pickled = any(folder.glob(_PICKLES))
        if not pickled or trust != "pickle":
            hint = ", only pickled ones, which require trust = 'pickle'" if pickled else ""
            raise LoadFailed(f"model: {model} has no weights in safetensors{hint}")
    return ModelSource(name, folder)


def _download(model: str, weights: bool, trust: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_SETTINGS, *([_WEIGHTS] if weights else [])]
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns))
        if weights and trust == "pickle" and not any(folder.glob(_WEIGHTS)):
            folder = Path(snapshot_download(model, allow_patterns=[*patterns, _PICKLES]))
    except Exception as e:
        raise LoadFailed(
            f"model: {model} is not a folder, and cannot be downloaded from the Hugging Face Hub: {describe(e)}"
        ) from e
    return folder


def revision(source: ModelSource, settings: dict[str, Any]) -> str:
    """16 hexadecimal digits that change with a model's files and the settings.

    Of files over 16 MiB, only their size and 1 MiB spread over them is read, to avoid reading gigabytes twice.
    """
    found = hashlib.sha256(msgspec.json.encode([_FORMAT, settings], order="sorted"))
    if source.folder is None:
        found.update(source.name.encode())
        return found.hexdigest()[:16]
    files = {path for pattern in (*_SETTINGS, _WEIGHTS, _PICKLES) for path in source.folder.glob(pattern)}
    for path in sorted(files):
        size = path.stat().st_size
        found.update(msgspec.json.encode([path.name, size]))
        with path.open("rb") as file:
            for offset, count in _sampled_places(size):
                file.seek(offset)
                found.update(file.read(count))
    return found.hexdigest()[:16]


def _sampled_places(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the hashed parts of a file."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    last = size - _SAMPLE_BYTES
    return [(last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
