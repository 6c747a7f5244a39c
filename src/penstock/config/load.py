"""Builds a `Config` from defaults, a TOML file, the environment, flags and `--set`: later sources override earlier.

Environment variables are `PENSTOCK_<SECTION>__<KEY>`, such as `PENSTOCK_SERVER__PORT=9000` or
`PENSTOCK_MODELS__digits__BATCHING__MAX_BATCH_SIZE=8`. Sections and keys may be in either case; model names are case
sensitive. Names with single underscores are ignored, because container platforms create such variables for a service
called "penstock".
"""

import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin

import msgspec

from penstock.config.checks import check_config
from penstock.config.schema import AuthConfig, Config, ModelConfig
from penstock.errors import ConfigError, ErrorList, nearest
from penstock.plugins import BUILTIN, is_whole_file, load_object, optional_module
from penstock.values import bare, convert, expected

Tree = dict[str, Any]


def parse_toml(path: str | os.PathLike[str]) -> tuple[Tree, str]:
    """The tables of a file, and its text. Raises ConfigError for a missing, unreadable or malformed file."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # an editor on Windows may write a byte order mark
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; expected a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; expected a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None  # the message ends in line and column
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: brackets are nested too deeply") from None


def describes_model(file: str) -> bool:
    """Whether a TOML file describes a model, such as a pipeline, and no configuration.

    False for an unreadable file: loading it as a configuration reports the error.
    """
    try:
        tables, _ = parse_toml(file)
    except ConfigError:
        return False
    tests: list[Any] = [load_object(where) for where in BUILTIN["toml"].values()]
    return any(test(tables) for test in tests)


MAX_YAML_BYTES: Final = 2**20  # real files have a few KB


def load_yaml(path: Path | str, shown: str) -> tuple[Any, Any]:
    """The value in a YAML file, and its root node, which knows the lines of all keys.

    Raises ConfigError, which names the file as `shown` and the line.
    """
    yaml: Any = optional_module("yaml", f"{shown} cannot be read without PyYAML", "yaml")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_YAML_BYTES:
        raise ConfigError(f"{shown}: found more than {MAX_YAML_BYTES} bytes, expected a configuration file")
    try:
        # two passes, because constructing the value merges the nodes of `<<` into others
        return yaml.safe_load(raw), yaml.compose(raw, Loader=yaml.SafeLoader)
    except Exception as error:  # PyYAML raises many types: IndexError for !!int "", AttributeError for !!timestamp x
        mark = getattr(error, "problem_mark", None)
        where = shown if mark is None else f"{shown}:{mark.line + 1}"
        text = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: not valid YAML: {text}") from None


log = logging.getLogger("penstock.config")

Keys = tuple[str, ...]

ENV_PREFIX = "PENSTOCK_"
RESERVED = {
    "PENSTOCK_READY_FD": "file descriptor to which `penstock serve` writes its addresses as a line of JSON when ready",
    "PENSTOCK_PARENT_FD": "file descriptor of a pipe from the starting process; the server stops when it is closed",
}
"""Variables that do not set a key, with their meaning."""

SERVER_SECTIONS = ("server", "limits", "auth")
"""Tables of a pipeline file that configure the server."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH_KEYS = {
    "server": ("tls_cert", "tls_key", "tls_password_file", "tls_client_ca", "model_store"),
    "auth": AuthConfig.__struct_fields__,
}


def load_config(
    path: str | None,
    *,
    env: Mapping[str, str],
    sets: Sequence[str] = (),
    base: Tree | None = None,
    pipelines: Sequence[str] = (),
) -> Config:
    """The whole configuration. Precedence: defaults < TOML file < `env` < `base`, the command line < `sets`.

    `base` is a tree such as `{"server": {"port": 0}}`, in which None means absent. Of the TOML files `pipelines`, only
    the server's tables count; later files override earlier ones. Relative paths in a file start at the file's folder,
    all others at the working directory. Raises ConfigError, which names the source and the key, and what was found and
    expected.
    """
    layers: list[tuple[str, Tree]] = []
    if path is not None:
        layers.append((path, read_toml(path)))
    for file in pipelines:
        layers.append((file, {name: table for name, table in read_toml(file).items() if name in SERVER_SECTIONS}))
    layers += _from_env(env)
    if base:
        layers.append(("command line", _without_none(base)))
    layers += [_from_set(text) for text in sets]
    merged: Tree = {}
    errors = ErrorList()
    for source, tree in layers:
        _check(tree, Config, (), source, errors)
        merged = _merge(merged, tree)
    errors.check()
    _check_targets(merged, layers, errors)
    errors.check()
    config = msgspec.convert(merged, Config)
    check_config(config)
    return config


def model_config(tree: Tree, name: str) -> ModelConfig:
    """The configuration of one model, from the keys of `[models.NAME]`. Raises ConfigError."""
    errors = ErrorList()
    _child(dict[str, ModelConfig], name, ("models",), "request")
    _check(tree, ModelConfig, ("models", name), "request", errors)
    errors.check()
    return msgspec.convert(tree, ModelConfig)


def read_toml(path: str) -> Tree:
    """The tables of a file, with the paths of known keys joined to the file's folder. Raises ConfigError."""
    tree, _ = parse_toml(path)
    _root_paths(tree, os.path.dirname(path))
    return tree


def _root_paths(tree: Tree, folder: str) -> None:
    """Joins relative paths in a file's tree to the file's folder. `_check` reports wrong types later."""

    def root(table: Any, *keys: str) -> None:
        for key in keys:
            if isinstance(table, dict) and isinstance(table.get(key), str):
                table[key] = os.path.join(folder, os.path.expanduser(table[key]))

    for section, keys in _PATH_KEYS.items():
        root(tree.get(section), *keys)
    models = tree.get("models")
    for model in models.values() if isinstance(models, dict) else ():
        root(model, "weights")
        labels = model.get("labels") if isinstance(model, dict) else None
        root(labels, *(labels if isinstance(labels, dict) else ()))
        file = str(model.get("target")).partition(":")[0] if isinstance(model, dict) else ""
        if file.endswith(".py") or "/" in file or is_whole_file(file):  # otherwise it names a module
            root(model, "target")


def _from_env(env: Mapping[str, str]) -> list[tuple[str, Tree]]:
    layers = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in RESERVED:
            continue
        if "__" not in name:
            _warn_single_underscore(name)
            continue
        source = f"environment variable {name}"
        layers.append((source, _nest(path := _env_path(name), _value(env[name], path, source))))
    return layers


def _env_path(name: str) -> Keys:
    section, *rest = name.removeprefix(ENV_PREFIX).split("__")
    section = section.lower()
    if section != "models":
        return (section, *(part.lower() for part in rest))
    # a model's name may contain "__": it is everything before the key
    keys = 2 if len(rest) > 2 and rest[-2].lower() in ("batching", "options", "restart") else 1
    return ("models", "__".join(rest[:-keys]), *(part.lower() for part in rest[-keys:]))


def _warn_single_underscore(name: str) -> None:
    for section, kind in _kinds(Config).items():
        key = name.removeprefix(f"{ENV_PREFIX}{section.upper()}_").lower()
        if _is_table(kind) and key in _kinds(kind):
            right = f"{ENV_PREFIX}{section.upper()}__{key.upper()}"
            log.warning("variable=%s ignored=true hint=%s (two underscores after the section)", name, right)


def _from_set(text: str) -> tuple[str, Tree]:
    source = f"--set {text}"
    key, equals, value = text.partition("=")
    path: list[str] = []
    try:
        node: Any = tomllib.loads(f"{key} = 0") if equals and "\n" not in key else {}
    except tomllib.TOMLDecodeError:
        node = {}
    while isinstance(node, dict) and len(node) == 1:
        name, node = next(iter(node.items()))
        path.append(name)
    if node != 0 or not path:
        raise ConfigError(f"{source}: found no KEY=VALUE; expected for example --set server.port=9000")
    return source, _nest(tuple(path), _value(value, tuple(path), source))


def _value(text: str, path: Keys, source: str) -> Any:
    """`text` as a TOML value if the key accepts it, otherwise as a string. Raises ConfigError for an unknown key."""
    kind: Any = Config
    for depth, name in enumerate(path):
        kind = _child(kind, name, path[:depth], source)
    parsed = toml_value(text)
    for value in (parsed, text):  # version=2 is the string "2"
        with suppress(msgspec.ValidationError):
            msgspec.convert(value, kind)
            return value
    return parsed


def toml_value(text: str) -> Any:
    """`text` as a TOML value if it is valid TOML, otherwise unchanged."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["v"] if set(parsed) == {"v"} else text  # otherwise it holds more than one value


def _is_table(kind: Any) -> bool:
    """Whether a key of this type is a table of named keys, such as `[server]`."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _table(kind: Any) -> Any:
    """The type without its annotations; of a key that takes a table or a plain value, the table."""
    plain = bare(kind)
    arms = get_args(plain) if isinstance(plain, UnionType) else ()
    return next((arm for arm in arms if _is_table(arm)), plain)


def _kinds(table: Any) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(table)}


def _child(kind: Any, name: str, path: Keys, source: str) -> Any:
    kind = _table(kind)
    if get_origin(kind) is dict:
        if path == ("models",) and not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                f"{source}: models: {name!r} is not a valid model name;"
                " expected at most 128 letters, digits, '.', '_' and '-', starting with a letter or digit"
            )
        return get_args(kind)[1]
    if not _is_table(kind):
        raise ConfigError(f"{source}: {'.'.join(path)} is not a table; it takes {expected(kind)}")
    known = _kinds(kind)
    if name not in known:
        where = f"{'.'.join(path)}: unknown key" if path else "unknown section"
        other = " or ".join(_keys_named(name, Config))
        hint = f"; did you mean {other}?" if other else nearest(name, known)
        dotted = f'; for a name with a dot write models."{path[1]}.{name}"' if path[:-1] == ("models",) else ""
        raise ConfigError(f"{source}: {where} {name!r}{hint or '; known are ' + ', '.join(known) + dotted}")
    return known[name]


def _keys_named(name: str, kind: Any, before: str = "") -> list[str]:
    """Every key of this name in a table and the tables below it, with the path to it."""
    kind = _table(kind)
    if get_origin(kind) is dict:
        return _keys_named(name, get_args(kind)[1], f"{before}NAME.")
    tables = [(f"{before}{key}", child) for key, child in _kinds(kind).items()] if _is_table(kind) else []
    here = [key for key, _ in tables if key == f"{before}{name}"]
    return here + [found for key, child in tables for found in _keys_named(name, child, f"{key}.")]


def _check(value: Any, kind: Any, path: Keys, source: str, errors: ErrorList) -> None:
    """Adds to `errors` each key of `value` that is unknown or has an invalid value."""
    plain = _table(kind)
    if (_is_table(plain) or get_origin(plain) is dict) and isinstance(value, dict):
        for name, child in value.items():
            with errors:
                _check(child, _child(plain, name, path, source), (*path, name), source, errors)
    else:
        with errors:
            convert(value, kind, f"{source}: {'.'.join(path)}")


def _check_targets(merged: Tree, layers: list[tuple[str, Tree]], errors: ErrorList) -> None:
    models: Tree = merged.get("models", {})
    named = [name for name, model in models.items() if "target" in model]
    for name, model in models.items():
        with errors:
            if "target" not in model:
                source = next(source for source, tree in layers if name in tree.get("models", {}))
                hint = nearest(name, named) or '; expected for example target = "app.py:Model"'
                raise ConfigError(f"{source}: models.{name}: found no target{hint}")
            if not model["target"]:
                raise ConfigError(f'models.{name}.target: found an empty string, expected for example "app.py:Model"')


def _nest(path: Keys, value: Any) -> Any:
    return {path[0]: _nest(path[1:], value)} if path else value


def _merge(tree: Any, over: Any) -> Any:
    """`tree` with the values of `over`; neither is changed."""
    if not (isinstance(tree, dict) and isinstance(over, dict)):
        return over
    return tree | {name: _merge(tree.get(name), value) for name, value in over.items()}


def _without_none(tree: Tree) -> Tree:
    present = {name: value for name, value in tree.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in present.items()}
