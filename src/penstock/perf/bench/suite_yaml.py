"""The files of TorchServe's benchmark suite, read: which runs they ask for, and what of them is taken and ignored.

A file of models says `Model_name: eager_mode: {url, workers, batch_size, ...}`; a template names such files, and the
hardware. Source: the suite's guide and `benchmarks/auto_benchmark.py` of TorchServe 0.12.0. What a file leaves out is
as `benchmark-ab.py` has it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct, structs

from penstock.errors import ConfigError, install_hint, nearest

MOST_BYTES: Final = 2**20


class YamlFile:
    """One file: what it says, and where. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import yaml
        except ImportError:
            raise ConfigError(f"{path} cannot be read without PyYAML: {install_hint('yaml')}") from None
        try:
            with path.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        if len(raw) > MOST_BYTES:
            raise ConfigError(f"{path}: found more than {MOST_BYTES} bytes, expected the models of a benchmark suite")
        try:
            data = yaml.safe_load(raw)
            self._root: Any = yaml.compose(raw, Loader=yaml.SafeLoader)
        except Exception as error:  # PyYAML raises many kinds, also AttributeError and IndexError
            mark = getattr(error, "problem_mark", None)
            text = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
            raise ConfigError(f"{path}{'' if mark is None else f':{mark.line + 1}'}: no valid YAML: {text}") from None
        if not isinstance(data, dict) or not data:
            raise ConfigError(f"{path}: found {kind_of(data)}, expected Model_name: eager_mode: url: ...")
        self._check(self._root, set())
        self.data: dict[str, Any] = data

    def where(self, at: tuple[str | int, ...]) -> str:
        """The file and the line of what stands under these keys."""
        node, line = self._root, 0
        for step in at:
            pairs = node.value if hasattr(node, "value") and isinstance(node.value, list) else []
            if isinstance(step, int):
                key = node = pairs[step]
            else:
                found = [pair for pair in pairs if isinstance(pair, tuple) and pair[0].value == step]
                if not found:
                    break
                key, node = found[0]
            line = key.start_mark.line
        return f"{self.path}:{line + 1}"

    def wrong(self, at: tuple[str | int, ...], found: str, expected: str) -> ConfigError:
        """The error of what stands under these keys."""
        return ConfigError(f"{self.where(at)}: found {found}, expected {expected}")

    def _check(self, node: Any, seen: set[int]) -> None:
        """Keys are texts, and none stands twice: YAML would keep the last one without a word."""
        if id(node) in seen or not isinstance(node.value, list):
            return
        seen.add(id(node))
        keys: set[str] = set()
        for entry in node.value:
            if not isinstance(entry, tuple):
                self._check(entry, seen)
                continue
            key, value = entry
            name = str(key.value)
            if key.tag != "tag:yaml.org,2002:str" and name != "<<":
                raise ConfigError(f"{self.path}:{key.start_mark.line + 1}: found the key {name}, expected a text")
            if name in keys:
                raise ConfigError(f"{self.path}:{key.start_mark.line + 1}: the key {name!r} stands twice; remove one")
            keys.add(name)
            self._check(value, seen)


def kind_of(value: object) -> str:
    """What a value is, as an error tells it."""
    if value is None:
        return "nothing"
    return "keys" if isinstance(value, dict) else "a list" if isinstance(value, list) else shown(value)


def shown(value: object) -> str:
    """The value, in as many characters as an error has room for: lists in lists in lists may have no end."""
    return (repr(value) if isinstance(value, str) else reprlib.repr(value))[:100]


_TEMPLATE: Final = ("ts_version", "models", "hardware", "metrics_cmd", "report_cmd")
_IGNORED: Final = {
    "ts_version": "nothing is installed: the runs are of this penstock",
    "metrics_cmd": "nothing is uploaded: figures are in the output folder",
    "report_cmd": "nothing is uploaded: the report is in the output folder",
    "backend_profiling": "no profiler runs: the times of the parts of a batch are in the report",
    "handler_profiling": "no profiler runs: the times of the parts of a batch are in the report",
    "generate_graphs": "the figures are in ab_report.csv",
    "image": "the run is on this machine, not in a container",
    "docker_runtime": "the run is on this machine, not in a container",
}
_KEYS: Final = (
    "benchmark_engine", "url", "workers", "batch_delay", "batch_size", "requests", "concurrency", "input",
    "content_type", "exec_env", "processors", "backend_profiling", "handler_profiling", "generate_graphs", "image",
    "docker_runtime",
)  # fmt: skip
_ENGINES: Final = ("ab", "locust", "penstock")


class Processor(Struct, frozen=True):
    """What a run computes on: the CPU, or that many GPUs."""

    gpus: int | Literal["all"] = 0

    @property
    def text(self) -> str:
        """As it stands in tables."""
        return f"gpus {self.gpus}" if self.gpus else "cpu"


class SuiteCase(Struct, frozen=True, kw_only=True):
    """One mode of one model. `input` is None when the file names none; `where` is the file and line, for errors."""

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
        """As it stands in tables."""
        return f"{self.model} {self.mode}"


class Registration(Struct, frozen=True, kw_only=True):
    """A model as it is registered: its runs differ in the number of clients only."""

    case: SuiteCase
    processor: Processor
    workers: int
    batch_size: int

    @property
    def settings(self) -> str:
        """What varies, as it stands in sentences."""
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}"
        return f"{self.processor.text}, {workers}, batch {self.batch_size}"

    @property
    def label(self) -> str:
        """As it stands in records: all that is not the load, knobs by the names that tuning gives them."""
        knobs = f"instances={self.workers},batch={self.batch_size},hold={self.case.batch_delay_ms}ms"
        return f"{self.case.text},device={self.processor.text},{knobs}"

    @property
    def short(self) -> str:
        """What tells it from the others of its mode, as it stands in plots."""
        device = f",device={self.processor.text}" if len(self.case.processors) > 1 else ""
        return f"batch={self.batch_size},instances={self.workers}{device}"


def points(case: SuiteCase) -> list[Registration]:
    """All ways in which the case's model is registered, in the order in which they are measured."""
    return [
        Registration(case=case, processor=processor, workers=workers, batch_size=batch)
        for processor in case.processors
        for workers in case.workers
        for batch in case.batch_size
    ]


def read_suite(paths: Sequence[Path]) -> tuple[list[SuiteCase], list[str]]:
    """What the files ask for, in their order, and what of them is not done, in words.

    Raises ConfigError: no such file, no YAML, an unknown key, a wrong value; with file and line.
    """
    cases: list[SuiteCase] = []
    notes: dict[str, None] = {}
    for path in paths:
        page = YamlFile(path)
        cases += _template(page, notes) if isinstance(page.data.get("models"), list) else _models(page, notes)
    seen: dict[str, str] = {}
    for case in cases:
        if first := seen.get(case.text):
            raise ConfigError(f"{case.where}: {case.text} is described twice, first at {first}; rename one")
        seen[case.text] = case.where
    if not cases:
        raise ConfigError(f"{', '.join(map(str, paths))}: nothing is left to run: {'; '.join(notes)}")
    return cases, list(notes)


def _template(page: YamlFile, notes: dict[str, None]) -> list[SuiteCase]:
    """The cases of all files that a template names, on its hardware."""
    for key in page.data:
        if key not in _TEMPLATE:
            raise page.wrong((key,), f"unknown key {key!r}", f"one of {', '.join(_TEMPLATE)}{nearest(key, _TEMPLATE)}")
        if key in _IGNORED and page.data[key] is not None:
            notes.setdefault(f"{key} is ignored: {_IGNORED[key]}")
    hardware = page.data.get("hardware") or "cpu"
    if hardware not in ("cpu", "gpu"):
        raise page.wrong(("hardware",), shown(hardware), "cpu or gpu")
    found: list[SuiteCase] = []
    for index, name in enumerate(page.data["models"]):
        if not isinstance(name, str):
            raise page.wrong(("models", index), shown(name), "the name of a YAML file")
        places = [page.path.parent / name, page.path.parent / "models_config" / name, Path(name)]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise page.wrong(("models", index), f"no file {name!r}", f"it at {places[0]}")
        found += _models(YamlFile(path), notes)
    kept = [_on(case, hardware) for case in found]
    for case in kept:
        if not case.processors:
            notes.setdefault(
                f"{case.text} is left out: it has no {hardware} among its processors, and {page.path} wants it"
            )
    if not any(case.processors for case in kept):
        raise page.wrong(("hardware",), hardware, "one that a model of the template has among its processors")
    return [case for case in kept if case.processors]


def _on(case: SuiteCase, hardware: str) -> SuiteCase:
    return structs.replace(case, processors=tuple(p for p in case.processors if bool(p.gpus) == (hardware == "gpu")))


def _models(page: YamlFile, notes: dict[str, None]) -> list[SuiteCase]:
    found: list[SuiteCase] = []
    for model, modes in page.data.items():
        if not isinstance(modes, dict) or not modes:
            raise page.wrong((model,), kind_of(modes), f"modes of the model {model}, for instance eager_mode:")
        for mode, said in modes.items():
            if not isinstance(said, dict):
                raise page.wrong((model, mode), kind_of(said), f"the keys of {mode}, for instance url:")
            if str(said.get("url")).endswith(".war"):
                notes.setdefault(f"{model} {mode} is left out: workflows are not served")
            else:
                found.append(_case(_Part(page, (model, mode), said), notes))
    return found


def _case(part: _Part, notes: dict[str, None]) -> SuiteCase:
    model, mode = part.at
    for key in part.said:
        if key not in _KEYS:
            raise part.wrong(key, f"unknown key {key!r}", f"one of {', '.join(_KEYS)}{nearest(key, _KEYS)}")
    url = part.text("url")
    if url is None:
        raise part.page.wrong(part.at, "no url", "url: FILE.mar, a model of --model-store, app.py:Model or model.onnx")
    engine = part.one_of("benchmark_engine", _ENGINES)
    if engine not in (None, "penstock"):
        notes.setdefault(f"benchmark_engine {engine}: the load comes from penstock's own generator")
    if part.one_of("exec_env", ("local", "docker")) == "docker":
        notes.setdefault(f"exec_env docker: {model} {mode} runs on this machine, not in a container")
    for key, why in _IGNORED.items():
        if part.said.get(key):
            notes.setdefault(f"{key} is ignored: {why}")
    given = {
        "workers": part.numbers("workers"),
        "batch_size": part.numbers("batch_size"),
        "concurrency": part.numbers("concurrency"),
        "batch_delay_ms": part.number("batch_delay", 0),
        "requests": part.number("requests", 1),
        "processors": part.processors(),
    }
    case = SuiteCase(
        model=model,
        mode=mode,
        url=url,
        input=part.text("input"),
        content_type=part.text("content_type"),
        folder=part.page.path.parent,
        where=part.page.where(part.at),
    )
    return structs.replace(case, **{key: value for key, value in given.items() if value is not None})


class _Part:
    """The keys of one mode, each read as what it must be. All raise ConfigError; None: not said."""

    def __init__(self, page: YamlFile, at: tuple[str, str], said: Mapping[str, Any]) -> None:
        self.page, self.at, self.said = page, at, said

    def wrong(self, key: str, found: str, expected: str) -> ConfigError:
        return self.page.wrong((*self.at, key), f"{'.'.join(self.at)}: {found}", expected)

    def text(self, key: str) -> str | None:
        value = self.said.get(key)
        if value is None or (isinstance(value, str) and value):
            return value
        raise self.wrong(key, f"{key}: {shown(value)}", "a text")

    def one_of(self, key: str, words: tuple[str, ...]) -> str | None:
        value = self.text(key)
        if value is None or value in words:
            return value
        raise self.wrong(key, f"{key}: {value}", f"{' or '.join(words)}{nearest(value, words)}")

    def number(self, key: str, least: int) -> int | None:
        value = self.said.get(key)
        if value is None or (type(value) is int and value >= least):
            return value
        raise self.wrong(key, f"{key}: {shown(value)}", f"a whole number from {least}")

    def numbers(self, key: str) -> tuple[int, ...] | None:
        value = self.said.get(key)
        if value is None:
            return None
        found: list[Any] = value if isinstance(value, list) else [value]
        if found and all(type(each) is int and each >= 1 for each in found):
            return tuple(dict.fromkeys(found))
        raise self.wrong(key, f"{key}: {shown(value)}", "a whole number from 1, or a list of such")

    def processors(self) -> tuple[Processor, ...] | None:
        value = self.said.get("processors")
        if value is None:
            return None
        found = [self._processor(each) for each in (value if isinstance(value, list) else [value])]
        if not found:
            raise self.wrong("processors", "processors: []", "cpu, or gpus: all, or both")
        return tuple(dict.fromkeys(found))

    def _processor(self, said: object) -> Processor:
        if said == "cpu":
            return Processor()
        if isinstance(said, dict) and list(said) == ["gpus"]:
            gpus = said["gpus"]
            if gpus == "all" or (type(gpus) is int and gpus >= 1):
                return Processor(gpus)
            if isinstance(gpus, str) and gpus.isdecimal() and int(gpus):
                return Processor(int(gpus))
        raise self.wrong("processors", f"processors: {shown(said)}", "cpu, gpus: all, or gpus: N from 1")
