"""The files of TorchServe's benchmark suite: the runs that they describe, and the keys that are accepted but ignored.

A file of models contains `Model_name: eager_mode: {url, workers, batch_size, ...}`; a template lists such files and the
hardware. Source: the suite's guide and `benchmarks/auto_benchmark.py` of TorchServe 0.12.0. Defaults are those of
`benchmark-ab.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, structs

from penstock.config.load import load_yaml
from penstock.errors import ConfigError, nearest
from penstock.values import convert, found

_TEMPLATE: Final = ("ts_version", "models", "hardware", "metrics_cmd", "report_cmd")
_IGNORED: Final = {
    "ts_version": "nothing is installed; this penstock runs",
    "metrics_cmd": "nothing is uploaded; the figures are in the output folder",
    "report_cmd": "nothing is uploaded; the report is in the output folder",
    "backend_profiling": "no profiler runs; the report has the times of the stages",
    "handler_profiling": "no profiler runs; the report has the times of the stages",
    "generate_graphs": "the figures are in ab_report.csv",
    "image": "the run is on this machine, not in a container",
    "docker_runtime": "the run is on this machine, not in a container",
}


class Processor(Struct, frozen=True):
    """The CPU, or that many GPUs."""

    gpus: int | Literal["all"] = 0

    @property
    def text(self) -> str:
        return f"gpus {self.gpus}" if self.gpus else "cpu"


class _Gpus(Struct, forbid_unknown_fields=True):
    gpus: Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern="^(all|0*[1-9][0-9]*)$")]


_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]
_Counts = _Count | Annotated[list[_Count], Meta(min_length=1)]
_Device = Literal["cpu"] | _Gpus
_DEVICES: Final = "cpu, gpus: all, or gpus: N from 1, or a list of them"
_KINDS: Final[dict[str, Any]] = {
    "url": _Text,
    "input": _Text,
    "content_type": _Text,
    "workers": _Counts,
    "batch_size": _Counts,
    "concurrency": _Counts,
    "requests": _Count,
    "batch_delay": Annotated[int, Meta(ge=0)],
    "processors": Annotated[_Device | Annotated[list[_Device], Meta(min_length=1)], Meta(title=_DEVICES)],
    "benchmark_engine": Literal["ab", "locust", "penstock"],
    "exec_env": Literal["local", "docker"],
}
_LISTS: Final = ("workers", "batch_size", "concurrency", "processors")
_KEYS: Final = (*_KINDS, *(key for key in _IGNORED if key not in _TEMPLATE))


class SuiteCase(Struct, frozen=True, kw_only=True):
    """One mode of one model. `where` is the file and line, for errors."""

    model: str
    mode: str
    url: str
    workers: tuple[int, ...] = (1,)
    batch_size: tuple[int, ...] = (1,)
    batch_delay_ms: int = 200
    requests: int = 100
    concurrency: tuple[int, ...] = (10,)
    input: str | None = None
    content_type: str | None = None
    processors: tuple[Processor, ...] = (Processor(),)
    folder: Path = Path()
    where: str = ""

    @property
    def text(self) -> str:
        return f"{self.model} {self.mode}"


class SuitePoint(Struct, frozen=True, kw_only=True):
    """A model as it is registered; its runs differ only in concurrency."""

    case: SuiteCase
    processor: Processor
    workers: int
    batch_size: int

    @property
    def settings(self) -> str:
        """The varying settings, for sentences."""
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}"
        return f"{self.processor.text}, {workers}, batch {self.batch_size}"

    @property
    def label(self) -> str:
        """All settings except the load, for records, with the parameter names of tuning."""
        settings = f"instances={self.workers},batch={self.batch_size},hold={self.case.batch_delay_ms}ms"
        return f"{self.case.text},device={self.processor.text},{settings}"

    @property
    def short(self) -> str:
        """The settings that differ within the mode, for plots."""
        device = f",device={self.processor.text}" if len(self.case.processors) > 1 else ""
        return f"batch={self.batch_size},instances={self.workers}{device}"


def suite_points(case: SuiteCase) -> list[SuitePoint]:
    return [
        SuitePoint(case=case, processor=processor, workers=workers, batch_size=batch)
        for processor in case.processors
        for workers in case.workers
        for batch in case.batch_size
    ]


def read_suite(paths: Sequence[Path]) -> tuple[list[SuiteCase], list[str]]:
    """(the cases in order, notes about what is ignored or left out).

    Raises ConfigError with file and line for a missing file, invalid YAML, an unknown key or an invalid value.
    """
    cases: list[SuiteCase] = []
    notes: dict[str, None] = {}
    for path in paths:
        file = YamlFile(path)
        cases += _template(file, notes) if isinstance(file.data.get("models"), list) else _models(file, notes)
    first: dict[str, str] = {}
    for case in cases:
        if case.text in first:
            raise ConfigError(f"{case.where}: {case.text} is defined twice, first at {first[case.text]}; rename one")
        first[case.text] = case.where
    if not cases:
        raise ConfigError(f"{', '.join(map(str, paths))}: nothing is left to run: {'; '.join(notes)}")
    return cases, list(notes)


def _template(file: YamlFile, notes: dict[str, None]) -> list[SuiteCase]:
    """The cases of all files that a template lists, restricted to its hardware."""
    file.check_keys((), file.data, _TEMPLATE)
    for key in file.data:
        if key in _IGNORED and file.data[key] is not None:
            notes.setdefault(f"{key} is ignored: {_IGNORED[key]}")
    hardware = file.data.get("hardware") or "cpu"
    if hardware not in ("cpu", "gpu"):
        raise file.error(("hardware",), found(hardware), "cpu or gpu")
    cases: list[SuiteCase] = []
    for index, name in enumerate(file.data["models"]):
        if not isinstance(name, str):
            raise file.error(("models", index), found(name), "the name of a YAML file")
        places = [file.path.parent / name, file.path.parent / "models_config" / name, Path(name)]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise file.error(("models", index), f"no file {name!r}", f"it at {places[0]}")
        for case in _models(YamlFile(path), notes):
            processors = tuple(p for p in case.processors if bool(p.gpus) == (hardware == "gpu"))
            if processors:
                cases.append(structs.replace(case, processors=processors))
            else:
                notes.setdefault(f"{case.text} is left out: {file.path} wants {hardware}, which it does not list")
    if not cases:
        raise file.error(("hardware",), hardware, "one that a model of the template lists among its processors")
    return cases


def _models(file: YamlFile, notes: dict[str, None]) -> list[SuiteCase]:
    cases: list[SuiteCase] = []
    for model, modes in file.data.items():
        if not isinstance(modes, dict) or not modes:
            raise file.error((model,), found(modes), f"modes of the model {model}, for instance eager_mode:")
        for mode, keys in modes.items():
            if not isinstance(keys, dict):
                raise file.error((model, mode), found(keys), f"the keys of {mode}, for instance url:")
            if str(keys.get("url")).endswith(".war"):
                notes.setdefault(f"{model} {mode} is left out: workflows are not supported")
            else:
                cases.append(_case(file, (model, mode), keys, notes))
    return cases


def _case(file: YamlFile, at: tuple[str, str], keys: Mapping[str, Any], notes: dict[str, None]) -> SuiteCase:
    model, mode = at
    file.check_keys(at, keys, _KEYS)
    if keys.get("url") is None:
        raise file.error(at, "no url", "url: FILE.mar, a model of --model-store, app.py:Model or model.onnx")
    given = {key: _value(file, at, key, keys[key]) for key in _KINDS if keys.get(key) is not None}
    engine = given.pop("benchmark_engine", "penstock")
    if engine != "penstock":
        notes.setdefault(f"benchmark_engine {engine}: penstock's own generator sends the load")
    if given.pop("exec_env", "local") == "docker":
        notes.setdefault(f"exec_env docker: {model} {mode} runs on this machine, not in a container")
    for key, why in _IGNORED.items():
        if keys.get(key):
            notes.setdefault(f"{key} is ignored: {why}")
    if "batch_delay" in given:
        given["batch_delay_ms"] = given.pop("batch_delay")
    return SuiteCase(model=model, mode=mode, folder=file.path.parent, where=file.where(at), **given)


def _value(file: YamlFile, at: tuple[str, str], key: str, value: Any) -> Any:
    """The value of a key of a mode; a list becomes a tuple without duplicates. Raises ConfigError if it is invalid."""
    read = convert(value, _KINDS[key], f"{file.where((*at, key))}: {'.'.join(at)}: {key}")
    if key == "processors":
        gpus = [each.gpus if isinstance(each, _Gpus) else 0 for each in _listed(read)]
        read = [Processor("all" if number == "all" else int(number)) for number in gpus]
    return tuple(dict.fromkeys(_listed(read))) if key in _LISTS else read


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


class YamlFile:
    """A YAML file with the lines of its keys, for errors. Raises ConfigError, also for keys that are not texts and for
    duplicate keys, which YAML silently overwrites."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data, root = load_yaml(path, str(path))
        if not isinstance(data, dict) or not data:
            raise ConfigError(f"{path}: found {found(data)}, expected Model_name: eager_mode: url: ...")
        self.data: dict[str, Any] = data
        self._lines: dict[tuple[str | int, ...], int] = {(): 1}
        self._read(root, (), set())

    def where(self, at: tuple[str | int, ...]) -> str:
        """The file and line of the value with this path of keys, or of the nearest value around it."""
        return f"{self.path}:{next(line for k in range(len(at), -1, -1) if (line := self._lines.get(at[:k])))}"

    def error(self, at: tuple[str | int, ...], found: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where(at)}: found {found}, expected {expected}")

    def check_keys(self, at: tuple[str, ...], keys: Iterable[str], known: Sequence[str]) -> None:
        """Raises ConfigError for an unknown key."""
        for key in keys:
            if key not in known:
                what = f"{'.'.join(at)}: unknown key {key!r}" if at else f"unknown key {key!r}"
                raise self.error((*at, key), what, f"one of {', '.join(known)}{nearest(key, known)}")

    def _read(self, node: Any, at: tuple[str | int, ...], seen: set[int]) -> None:
        if id(node) in seen or not isinstance(node.value, list):
            return
        seen.add(id(node))  # an alias may contain itself
        for index, entry in enumerate(node.value):
            key, value = entry if isinstance(entry, tuple) else (entry, entry)
            line = key.start_mark.line + 1
            name = str(key.value) if isinstance(entry, tuple) else index
            if isinstance(entry, tuple) and key.tag != "tag:yaml.org,2002:str" and name != "<<":
                raise ConfigError(f"{self.path}:{line}: found the key {name}, expected a string")
            if (*at, name) in self._lines:
                raise ConfigError(f"{self.path}:{line}: duplicate key {name!r}; remove one")
            self._lines[*at, name] = line
            self._read(value, (*at, name), seen)
