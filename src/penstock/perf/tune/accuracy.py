"""The accuracy guard: compares a model's responses to known inputs with the expected ones, in the form that callers
receive.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import UNSET, Struct

from penstock.errors import ConfigError, nearest
from penstock.perf.bench.expectation import JSON_ERRORS, difference
from penstock.perf.bench.workload import JSON, content_type_of
from penstock.perf.tune.profiler import RequestBody, SampleResponse

_EXPECTED: Final = "expected.jsonl"


class AccuracySample(Struct, frozen=True):
    """One input and its expected response; UNSET stands for the response of the reference. `name` is for messages."""

    name: str
    body: RequestBody
    expected: Any = UNSET


class Agreement(Struct, frozen=True):
    """How many responses differ from the expected ones, and the largest difference within the tolerance."""

    samples: int
    differing: int
    worst: float
    first: str = ""

    @property
    def holds(self) -> bool:
        return not self.differing

    @property
    def text(self) -> str:
        """The agreement in words, with the first difference."""
        if self.holds:
            return f"all {self.samples} responses agree (largest difference {self.worst:.2g})"
        return f"{self.differing} of {self.samples} responses differ; {self.first}"


# ---- samples


def read_samples(path: str) -> list[AccuracySample]:
    """The samples of a `.jsonl`, a `.npz`, a folder, or any other file, which is one request. Raises ConfigError.

    A line of `.jsonl` is a request's JSON, or `{"input": ..., "output": ...}` with the expected response. A `.npz` has
    `inputs` and optionally `outputs`, whose axis 0 indexes requests. Each file of a folder is a request, in the order
    of the names; an `expected.jsonl` has a line for each.
    """
    file = Path(path)
    readers = {".jsonl": _of_lines, ".npz": _of_arrays}
    try:
        if not file.exists():
            raise ConfigError("no such file; expected .jsonl, .npz, or a folder of inputs")
        samples = _of_folder(file) if file.is_dir() else readers.get(file.suffix, _of_file)(file)
        if not samples:
            raise ConfigError("found no input; expected one or more")
    except OSError as error:
        raise ConfigError(f"--accuracy-check {path}: cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--accuracy-check {path}: {error.message}") from None
    return samples


def _of_file(file: Path, expected: Any = UNSET) -> list[AccuracySample]:
    return [AccuracySample(file.name, RequestBody(file.read_bytes(), content_type_of(file)), expected)]


def _of_folder(folder: Path) -> list[AccuracySample]:
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name != _EXPECTED and not f.name.startswith("."))
    responses = folder / _EXPECTED
    expected = [value for _, value in _lines(responses)] if responses.exists() else [UNSET] * len(files)
    if len(expected) != len(files):
        raise ConfigError(
            f"found {len(files)} inputs and {len(expected)} lines in {_EXPECTED}; expected a line for each input, in"
            " the order of their names"
        )
    return [sample for f, value in zip(files, expected, strict=True) for sample in _of_file(f, value)]


def _of_lines(file: Path) -> list[AccuracySample]:
    samples = []
    for number, value in _lines(file):
        has_output = isinstance(value, dict) and set(value) == {"input", "output"}
        given, expected = (value["input"], value["output"]) if has_output else (value, UNSET)
        samples.append(AccuracySample(f"line {number}", RequestBody(msgspec.json.encode(given), JSON), expected))
    without = next((s for s in samples if s.expected is UNSET), None)
    outputs = sum(s.expected is not UNSET for s in samples)
    if without is not None and outputs:
        raise ConfigError(
            f'{outputs} of {len(samples)} lines have an "output", {without.name} has none; expected'
            ' {"input": ..., "output": ...} in all lines, or in none'
        )
    return samples


def _lines(file: Path) -> list[tuple[int, Any]]:
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            if line.strip():
                found.append((number, msgspec.json.decode(line)))
        except JSON_ERRORS as error:
            raise ConfigError(f"{file.name}, line {number} is not JSON: {error}") from None
    return found


def _of_arrays(file: Path) -> list[AccuracySample]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # TypeError: a .npy
        raise ConfigError(f"cannot be read as .npz: {error}") from None
    for name, array in found.items():
        if name not in ("inputs", "outputs"):
            hint = nearest(name, ("inputs", "outputs"))
            raise ConfigError(f"found an array '{name}', expected inputs and outputs{hint}")
        if array.dtype.kind not in "biufU":
            raise ConfigError(f"{name} are {array.dtype}, expected numbers, booleans or strings")
    if "inputs" not in found or not found["inputs"].ndim:
        raise ConfigError("found no array 'inputs' whose axis 0 indexes requests")
    inputs, outputs = found["inputs"], found.get("outputs")
    if outputs is not None and (not outputs.ndim or len(outputs) != len(inputs)):
        count = len(outputs) if outputs.ndim else "no"
        raise ConfigError(f"found {len(inputs)} inputs and {count} outputs; expected one for each")
    bodies = [RequestBody(msgspec.json.encode(row.tolist()), JSON) for row in inputs]
    expected = [UNSET] * len(inputs) if outputs is None else outputs.tolist()
    return [AccuracySample(f"row {i}", body, e) for i, (body, e) in enumerate(zip(bodies, expected, strict=True))]


# ---- comparison


def expected_responses(samples: Sequence[AccuracySample], reference: Sequence[SampleResponse]) -> list[Any]:
    """The expected response of each sample: from its file, else the reference's. Raises ConfigError if that failed,
    because then there is nothing to compare with."""
    responses = []
    for sample, response in zip(samples, reference, strict=True):
        if sample.expected is UNSET and response.error:
            raise ConfigError(
                f"--accuracy-check: the model itself cannot answer {sample.name} ({response.error}), so there is"
                " nothing to compare with; give inputs that it accepts"
            )
        responses.append(_value(response) if sample.expected is UNSET else sample.expected)
    return responses


def agreement(
    samples: Sequence[AccuracySample], expected: Sequence[Any], responses: Sequence[SampleResponse], tolerance: float
) -> Agreement:
    differing, worst, first = 0, 0.0, ""
    for sample, wanted, response in zip(samples, expected, responses, strict=True):
        if response.error:
            size, where = float("inf"), f"the model failed: {response.error}"
        else:
            size, where = difference(wanted, _value(response))
        if size <= tolerance:
            worst = max(worst, size)
            continue
        differing += 1
        beyond = f", more than the tolerance of {tolerance:g}" if size < float("inf") else ""
        first = first or f"{sample.name}: {where}{beyond}"
    return Agreement(len(samples), differing, worst, first)


def _value(response: SampleResponse) -> Any:
    """The value to compare: decoded JSON, text, or bytes."""
    kind = response.content_type.partition(";")[0].strip().lower()
    if kind == JSON or kind.endswith("+json"):
        try:
            return msgspec.json.decode(response.body)
        except JSON_ERRORS:
            return response.body
    if kind.startswith("text/"):
        return response.body.decode(errors="replace")
    return response.body
