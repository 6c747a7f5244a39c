"""One `Config` from defaults, a TOML file, the environment, flags and `--set`, each stronger than the one before it.

The environment: `PENSTOCK_<SECTION>__<KEY>`, for instance `PENSTOCK_SERVER__PORT=9000` or
`PENSTOCK_MODELS__digits__BATCHING__MAX_BATCH_SIZE=8`. Sections and keys may be in either case, the name of a model is
taken as it stands. Only a double underscore makes a variable a key: names with single ones are left alone, because
container platforms make such names for a service that is called "penstock".
"""

from __future__ import annotations

import logging
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec

from penstock.config import toml
from penstock.config.checks import check_bind as check_bind
from penstock.config.checks import check_config
from penstock.config.schema import Config, ModelConfig
from penstock.config.words import bare, expected, found, is_table
from penstock.errors import ConfigError, nearest
from penstock.plugins import is_whole_file

log = logging.getLogger("penstock.config")

Tree = toml.Tree
Path = tuple[str, ...]

ENV_PREFIX = "PENSTOCK_"
RESERVED = {
    "PENSTOCK_READY_FD": "file descriptor to which `penstock serve` writes one JSON line of addresses when it is ready",
    "PENSTOCK_PARENT_FD": "file descriptor at whose end the server stops: a pipe that its starter holds open",
}
"""Variables that are not keys, with their meaning."""

SERVER_SECTIONS = ("server", "limits", "auth")
"""What the file of a pipeline may say of the server that serves it."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH_KEYS = {
    ("server", "tls_cert"),
    ("server", "tls_key"),
    ("server", "tls_client_ca"),
    ("server", "model_store"),
    ("auth", "token_file"),
    ("auth", "inference_token_file"),
    ("auth", "management_token_file"),
    ("auth", "metrics_token_file"),
}


def load_config(
    path: str | None,
    *,
    env: Mapping[str, str],
    sets: Sequence[str] = (),
    base: Tree | None = None,
    pipelines: Sequence[str] = (),
) -> Config:
    """The whole configuration. Strength: defaults < TOML file < `env` < `base`, the command line < `sets`.

    `base` is a tree such as `{"server": {"port": 0}}`; values None in it are absent. `pipelines` are TOML files of
    which only the tables of the server count, each stronger than the one before it. Relative paths in a file are taken
    from the file's folder, all others from the working directory. Raises ConfigError with the source, the key, what
    was found and what was expected.
    """
    layers: list[tuple[str, Tree]] = []
    if path is not None:
        layers.append((path, read_toml(path)))
    layers += [(file, _of_server(read_toml(file))) for file in pipelines]
    layers += _from_env(env)
    if base:
        layers.append(("command line", _without_none(base)))
    layers += [_from_set(text) for text in sets]
    merged: Tree = {}
    for source, tree in layers:
        _check(tree, Config, (), source)
        _merge(merged, tree)
    _check_targets(merged, layers)
    config = msgspec.convert(merged, Config)
    check_config(config)
    return config


def model_config(tree: Tree, name: str) -> ModelConfig:
    """The configuration of one model, from the keys of `[models.NAME]`. Raises ConfigError, as `load_config` does."""
    _child(dict[str, ModelConfig], name, ("models",), "request")
    _check(tree, ModelConfig, ("models", name), "request")
    return msgspec.convert(tree, ModelConfig)


def read_toml(path: str) -> Tree:
    """The tables of a file, in which the paths of our own keys start at the file's folder. Raises ConfigError."""
    tree, _ = toml.read(path)
    _root_paths(tree, os.path.dirname(path))
    return tree


def _of_server(tree: Tree) -> Tree:
    return {section: tree[section] for section in SERVER_SECTIONS if section in tree}


def _root_paths(tree: Tree, folder: str) -> None:
    """Makes relative paths in a file's tree start at the file's folder. Wrong types are left for `_check`."""
    for section, key in _PATH_KEYS:
        table = tree.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = os.path.join(folder, os.path.expanduser(table[key]))
    models = tree.get("models")
    for model in models.values() if isinstance(models, dict) else ():
        if isinstance(model, dict) and isinstance(model.get("target"), str):
            file = model["target"].partition(":")[0]
            if file.endswith(".py") or "/" in file or is_whole_file(file):  # else it is the name of a module
                model["target"] = os.path.join(folder, os.path.expanduser(model["target"]))
        if isinstance(model, dict) and isinstance(model.get("weights"), str):
            model["weights"] = os.path.join(folder, os.path.expanduser(model["weights"]))


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


def _env_path(name: str) -> Path:
    section, *rest = name.removeprefix(ENV_PREFIX).split("__")
    section = section.lower()
    if section != "models":
        return (section, *(part.lower() for part in rest))
    # A model's name may hold "__" itself, so it is whatever stands before the key.
    keys = 2 if len(rest) > 2 and rest[-2].lower() in ("batching", "options") else 1
    return ("models", "__".join(rest[:-keys]), *(part.lower() for part in rest[-keys:]))


def _warn_single_underscore(name: str) -> None:
    for section in Config.__struct_fields__:
        kind = _kinds(Config)[section]
        key = name.removeprefix(f"{ENV_PREFIX}{section.upper()}_").lower()
        if is_table(kind) and key in _kinds(kind):
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
        raise ConfigError(f"{source}: found no KEY=VALUE; expected for instance --set server.port=9000")
    return source, _nest(tuple(path), _value(value, tuple(path), source))


def _value(text: str, path: Path, source: str) -> Any:
    """`text` as a TOML value if that is what the key takes, else as the text that it is."""
    kind = _kind_at(path, source)
    parsed = toml_value(text)
    try:
        msgspec.convert(parsed, kind)
    except msgspec.ValidationError:
        try:
            return msgspec.convert(text, kind)  # version=2 is the text "2"
        except msgspec.ValidationError:
            pass
    return parsed


def toml_value(text: str) -> Any:
    """`text` as a TOML value, or as it is if it is none."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["v"] if set(parsed) == {"v"} else text  # else there are more lines than one value


def _kinds(table: Any) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(table)}


def _kind_at(path: Path, source: str) -> Any:
    """The type of the key at `path`. Raises ConfigError when there is none."""
    kind: Any = Config
    for depth, name in enumerate(path):
        kind = _child(kind, name, path[:depth], source)
    return kind


def _child(kind: Any, name: str, path: Path, source: str) -> Any:
    kind = bare(kind)
    if get_origin(kind) is dict:
        if path == ("models",) and not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                f"{source}: models: {name!r} cannot be a model's name;"
                " expected letters, digits, '.', '_' and '-', 128 at most, beginning with a letter or digit"
            )
        return get_args(kind)[1]
    if not is_table(kind):
        raise ConfigError(f"{source}: {'.'.join(path)} is no table; it takes {expected(kind)}")
    known = _kinds(kind)
    if name not in known:
        where = f"{'.'.join(path)}: unknown key" if path else "unknown section"
        raise ConfigError(f"{source}: {where} {name!r}{nearest(name, known) or '; known are ' + ', '.join(known)}")
    return known[name]


def _check(value: Any, kind: Any, path: Path, source: str) -> None:
    """Raises ConfigError for the first key of `value` that is unknown or does not fit."""
    plain = bare(kind)
    if (is_table(plain) or get_origin(plain) is dict) and isinstance(value, dict):
        for name, child in value.items():
            _check(child, _child(plain, name, path, source), (*path, name), source)
        return
    try:
        fits = all(map(math.isfinite, _floats(msgspec.convert(value, kind))))
        where = ""
    except msgspec.ValidationError as error:
        fits, where = False, _index(str(error))
    if not fits:
        wrong = value[int(where)] if where and isinstance(value, (list, tuple)) else value
        key = ".".join(path) + (f"[{where}]" if where else "")
        raise ConfigError(f"{source}: {key}: found {found(wrong)}, expected {expected(kind)}")


def _floats(value: Any) -> list[float]:
    """The floats in a leaf: a wait of "inf" or "nan" seconds is a slip, no bound."""
    return [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, float)]


def _index(message: str) -> str:
    match = re.search(r"at `\$\[(\d+)\]`", message)
    return match[1] if match else ""


def _check_targets(merged: Tree, layers: list[tuple[str, Tree]]) -> None:
    models: Tree = merged.get("models", {})
    named = [name for name, model in models.items() if "target" in model]
    for name, model in models.items():
        if "target" not in model:
            source = next(source for source, tree in layers if name in tree.get("models", {}))
            hint = nearest(name, named) or '; expected for instance target = "app.py:Model"'
            raise ConfigError(f"{source}: models.{name}: found no target{hint}")
        if not model["target"]:
            raise ConfigError(f'models.{name}.target: found an empty text, expected for instance "app.py:Model"')


def _nest(path: Path, value: Any) -> Tree:
    for name in reversed(path):
        value = {name: value}
    tree: Tree = value
    return tree


def _merge(into: Tree, tree: Tree) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = _copy(value)


def _copy(value: Any) -> Any:
    return {name: _copy(child) for name, child in value.items()} if isinstance(value, dict) else value


def _without_none(tree: Tree) -> Tree:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }
