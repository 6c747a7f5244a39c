"""The configuration of the model to tune, with candidate settings, and the `penstock.toml` that receives the result.

In the file only the tuned keys change, comments stay, and one comment is added.
"""

import logging
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from msgspec import Struct, convert, structs, to_builtins

from penstock.config.load import Tree, load_config, parse_toml
from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.rules import queue_bound
from penstock.core.os_threads import atomic_file
from penstock.errors import ConfigError, PenstockError, nearest
from penstock.perf.tune.space import KEYS, CandidateSettings
from penstock.plugins import is_whole_file, optional_module

log = logging.getLogger("penstock.perf")

_RELATIVE: Final = ("target", "weights", "name")  # keys that a file may write differently
MARK: Final = "# penstock tune"
"""The prefix of our comment, which the next run replaces."""


class TunedModel(Struct, frozen=True, kw_only=True):
    """The model to tune: `target` and `sets` in the form of `penstock serve`, and the baseline of its section.

    `tls_cert` is the server's certificate, if it uses TLS. `queue_rows` is the baseline's limit of the queue, 0 while
    unknown.
    """

    target: str
    section: str
    model: ModelConfig
    sets: tuple[str, ...] = ()
    token: str | None = None
    tls_cert: str | None = None
    queue_rows: int = 0

    @property
    def name(self) -> str:
        """The model's name in its routes."""
        return self.model.name or self.section

    def with_settings(self, settings: CandidateSettings) -> ModelConfig:
        """The model's configuration with these settings."""
        tree = to_builtins(self.model)
        put(tree, self.keys(settings))
        return convert(tree, ModelConfig)

    def keys(self, settings: CandidateSettings) -> dict[str, Any]:
        """The keys of `[models.NAME]` that these settings set. The queue's limit follows max_batch_size, so a smaller
        batch keeps the baseline's: otherwise it would refuse clients that the baseline serves."""
        found, batch = keys_of(settings), settings.whole("batch")
        if self.queue_rows and batch is not None:
            instances = settings.whole("instances", self.model.instances) or 1
            if queue_bound(self.model.batching, instances, batch) < self.queue_rows:
                found.setdefault("batching.max_queue", self.queue_rows)
        return found


def keys_of(settings: CandidateSettings) -> dict[str, Any]:
    """The keys of `[models.NAME]`, such as "batching.max_batch_size", that these settings set."""
    return {KEYS.get(name, name): [value] if name == "device" else value for name, value in settings.items}


class TunedFile:
    """The file that receives the result: an existing configuration with the model, or a new file.

    It is checked before anything is measured, so errors appear at the start. Raises ConfigError if it is not a valid
    configuration, lacks the model, or its folder is not writable.
    """

    def __init__(self, path: str, name: str, model: ModelConfig, source: str | None = None) -> None:
        """`name` and `model` describe the tuned model; `source` is the TOML that defines it, if any."""
        _tomlkit()
        self.path = os.path.realpath(path)  # a link stays a link
        self.name, self._model = name, model
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ConfigError(f"--write {path}: there is no writable folder {folder}")
        if os.path.exists(self.path) and not os.access(self.path, os.W_OK):
            raise ConfigError(f"--write {path}: the file is not writable; change its mode, or name another")
        if is_whole_file(model.target) and os.path.realpath(model.target) == self.path:
            raise ConfigError(f"--write {path}: is the target itself, not a configuration; name a new file")
        begin = self.path if os.path.exists(self.path) else source
        if begin is None:
            self._text = None
            return
        if os.path.dirname(os.path.realpath(begin)) != folder:
            raise ConfigError(
                f"--write {path}: paths in {begin} are relative to its folder; name {begin} itself or a new file next"
                " to it"
            )
        tree, self._text = parse_toml(begin)
        load_config(begin, env={})
        self.name = _section(tree, begin, name, model)

    def write(self, values: Mapping[str, Any], note: str) -> None:
        """Replaces the file by one with these values of the model's keys, such as "batching.max_batch_size".

        None removes a key. `note` becomes the comment, one or more lines. Changes made to the file in the meantime are
        kept. Raises ConfigError, or PenstockError if it cannot be written; then the file is unchanged.
        """
        if os.path.exists(self.path):
            tree, text = parse_toml(self.path)
            self.name = _section(tree, self.path, self.name, self._model)
        else:
            text = self._new() if self._text is None else self._text
        changed = patched(text, self.name, values, note)
        try:
            with atomic_file(Path(self.path)) as file:
                file.write(changed.encode())
                file.flush()
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), os.stat(self.path).st_mode & 0o7777)
                written = load_config(file.name, env={}).models[self.name]
        except OSError as error:
            raise PenstockError(f"{self.path}: cannot be written: {error.strerror}; it is unchanged") from None
        if other := _differing(self._model, written, values):
            log.warning(
                "file=%s other=%s consequence=this file serves the model with other settings than measured",
                self.path,
                ",".join(other),
            )

    def _new(self) -> str:
        """A file with nothing but the model."""
        keys = changed_keys(self._model)
        folder = os.path.dirname(self.path)
        keys["target"] = _relative(self._model.target, os.getcwd(), folder)
        if self._model.weights is not None:
            keys["weights"] = os.path.relpath(self._model.weights, folder)
        text: str = _tomlkit().dumps({"models": {self.name: keys}})
        return text


def _differing(measured: ModelConfig, written: ModelConfig, tuned: Collection[str]) -> list[str]:
    """The keys in which the two differ, except tuned ones and paths."""
    one, other = _flat(changed_keys(measured)), _flat(changed_keys(written))
    return [k for k in {**one, **other} if one.get(k) != other.get(k) and k not in (*tuned, *_RELATIVE)]


def _flat(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in keys.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def changed_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of a model that differ from their defaults, as in `[models.NAME]`."""
    keys = _changed(model, ModelConfig(target=""))
    batching = _changed(model.batching, BatchingConfig())
    return {**keys, **({"batching": batching} if batching else {})}


def _changed(found: Any, default: Any) -> dict[str, Any]:
    return {key: _plain(value) for key, value in structs.asdict(found).items() if value != getattr(default, key)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def patched(text: str, section: str, values: Mapping[str, Any], note: str) -> str:
    """The TOML text with these values of the keys of `[models.SECTION]` and the note as a comment.

    None removes a key. An existing key keeps its place and its comment; a new one follows the header of its table, or
    goes where tomlkit puts it if that would change the meaning. Raises ConfigError if no place works.
    """
    text = _without_mark(text)
    wanted = tomllib.loads(text)
    put(wanted["models"][section], values)
    comment = [f"{MARK}: {line}" for line in note.splitlines()]
    for changed in variants(text, section, values, comment):
        if _means(changed, wanted):
            return changed
    raise ConfigError(f"found no place for the tuned keys; expected [models.{section}] as a table with a header")


def variants(text: str, section: str, values: Mapping[str, Any], comment: list[str]) -> Iterator[str]:
    """Texts with the keys and the comment, the neatest first. Their meaning still has to be checked."""
    tomlkit, path = _tomlkit(), ("models", section)
    document = tomlkit.parse(text)
    put(document["models"][section], values, tomlkit.inline_table)
    changed = document.as_string()
    if _header(text, path) is not None:
        yield _by_lines(text, path, values, comment)
        yield _below_header(changed, path, comment)
    yield "".join(line + "\n" for line in comment) + changed


def _by_lines(text: str, path: tuple[str, ...], values: Mapping[str, Any], comment: list[str]) -> str:
    """The text with new keys as lines below the header of their table, or of the model's if that has none."""
    document = _tomlkit().parse(text)
    model: Any = document["models"][path[-1]]
    below: dict[tuple[str, ...], list[str]] = {path: list(comment)}
    for key, value in values.items():
        *tables, last = key.split(".")
        if value is None or last in _table(model, tables, dict, make=False):
            put(model, {key: value})
        else:
            own = (*path, *tables) if _header(text, (*path, *tables)) else path
            below.setdefault(own, []).append(_line([*path, *tables, last][len(own) :], value))
    changed: str = document.as_string()
    for table, lines in below.items():
        changed = _below_header(changed, table, lines)
    return changed


def put(model: Any, values: Mapping[str, Any], new: Callable[[], Any] = dict) -> None:
    """Sets keys such as "batching.max_batch_size" of a model, or removes them for None; `new` makes missing tables."""
    for key, value in values.items():
        *tables, last = key.split(".")
        table = _table(model, tables, new, make=value is not None)
        if value is None:
            table.pop(last, None)
        else:
            table[last] = _plain(value)


def _table(model: Any, names: Sequence[str], new: Callable[[], Any], *, make: bool) -> Any:
    """A table of a model; a missing one is added if `make`."""
    for name in names:
        if name not in model:
            if not make:
                return new()
            model[name] = new()
        model = model[name]
    return model


def _line(path: Sequence[str], value: Any) -> str:
    tomlkit = _tomlkit()
    return f"{tomlkit.key(path).as_string()} = {tomlkit.item(_plain(value)).as_string()}"


def _means(text: str, wanted: Tree) -> bool:
    try:
        return tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        return False


def _without_mark(text: str) -> str:
    """The text without the comment of an earlier run, unless removing it would change a value."""
    kept = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(MARK))
    return kept if _means(kept, tomllib.loads(text)) else text


def _header(text: str, path: Sequence[str]) -> re.Match[str] | None:
    """The apparent header of a table; it may be part of a multi-line string."""
    names = (rf'(?:"{re.escape(name)}"|\'{re.escape(name)}\'|{re.escape(name)})' for name in path)
    dotted = r"[ \t]*\.[ \t]*".join(names)
    return re.search(rf"^[ \t]*\[[ \t]*{dotted}[ \t]*\][^\n]*\n", text, re.MULTILINE)


def _below_header(text: str, path: Sequence[str], lines: Sequence[str]) -> str:
    """The text with these lines after the header of a table, if it has one."""
    header = _header(text, path)
    if header is None:
        return text
    end = "\r\n" if header[0].endswith("\r\n") else "\n"
    return text[: header.end()] + "".join(line + end for line in lines) + text[header.end() :]


def _section(tree: Tree, path: str, name: str, model: ModelConfig) -> str:
    """The model's section in the file: by its name, else the only one with its target."""
    models = tree.get("models", {})
    if name in models:
        return name
    folder = os.path.dirname(os.path.realpath(path))
    wanted = _relative(model.target, os.getcwd(), folder)
    same = [section for section, keys in models.items() if _relative(keys["target"], folder, folder) == wanted]
    if len(same) == 1:
        return str(same[0])
    known = f"it has {', '.join(models)}" if models else "it has no models"
    raise ConfigError(
        f"{path}: there is no [models.{name}], nor one with the target {wanted}{nearest(name, models)} ({known}); add"
        " that section, or write to a new file"
    )


def _relative(target: str, base: str, folder: str) -> str:
    """A target as a file in `folder` writes it; its path is relative to `base`, and a module name stays the same."""
    where, colon, attribute = target.rpartition(":")
    whole = is_whole_file(target) or not colon
    file = target if whole else where
    if not (file.endswith(".py") or "/" in file or whole):
        return target
    found = Path(os.path.relpath(os.path.join(base, os.path.expanduser(file)), folder)).as_posix()
    return found if whole else f"{found}:{attribute}"


def _tomlkit() -> ModuleType:
    return optional_module("tomlkit", "--write needs tomlkit, which is not installed", "tune")
