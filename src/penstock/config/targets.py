"""TARGETs of the command line, and the option values that several commands share."""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from penstock.config.load import describes_model, toml_value
from penstock.errors import ConfigError, PenstockError
from penstock.plugins import MODEL_FILES, is_pipeline_file, is_whole_file, located

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def split_targets(targets: tuple[str, ...]) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """The configuration file among TARGETs, and the models that the others name. Raises ConfigError.

    `app.py:Digits` is served as `digits`, and so is `app.py` if Digits is its only model; `resnet.onnx` as `resnet`,
    and so is `resnet.toml` if it describes a pipeline; `name=app.py:Digits` as `name`.
    """
    toml: str | None = None
    models: dict[str, dict[str, Any]] = {}
    for target in targets:
        given, equals, rest = target.partition("=")
        spec = rest if equals else target
        if is_pipeline_file(target) and not equals and not describes_model(target):
            if toml is not None:
                raise ConfigError(f"one TOML file at most, found '{toml}' and '{target}'; merge them")
            toml = target
            continue
        if spec.endswith(".py"):
            spec = f"{spec}:{only_model(spec)}"
        module, colon, attribute = spec.rpartition(":")
        if is_whole_file(spec) and "://" not in spec:
            attribute = Path(spec).stem
        elif not colon or not module or not attribute or "://" in spec:
            raise ConfigError(f"TARGET '{target}' {_why_not(spec)}")
        name = given if equals else re.sub(r"[^a-z0-9_-]+", "-", attribute.lower())
        if name in models:
            raise ConfigError(f"two models are named '{name}'; name one with NAME={spec}")
        if is_whole_file(spec):
            spec = str(located(spec))
        elif module.endswith(".py"):
            spec = f"{located(module)}:{attribute}"
        models[name] = {"target": spec}
    return toml, models


def _why_not(spec: str) -> str:
    """Why a text is no TARGET, and what to write instead."""
    path, file = Path(spec), Path(spec.rstrip(":") if spec.endswith(".py:") else f"{spec}.py")
    module, _, name = spec.rpartition(".")
    forms = f"app.py, app.py:obj, pkg.mod:obj, a model ({', '.join(MODEL_FILES)}) or a .toml file"
    if "://" in spec:
        return "is a URL; download the file and name that"
    if path.is_dir():
        return "is a folder; name a file in it, such as app.py or model.onnx"
    if path.suffix in (".mar", ".war"):
        store = f"--model-store {path.parent} --models {path.name}"
        return f"is an archive of TorchServe; write penstock torchserve --start --foreground {store}"
    if file.is_file() or Path(f"{module.replace('.', '/')}.py").is_file():
        return f"names no object; did you mean {file if file.is_file() else f'{module}:{name}'}?"
    if path.is_file():
        return f"is a {path.suffix} file, which no runtime opens; load it in a class, and name that ({forms})"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        return f"is no file; a class loads a model of a hub: write penstock serve app.py:Model --model {spec}"
    return f"must be {forms}, of a configuration or a pipeline"


def only_model(file: str) -> str:
    """The name of the object that `@penstock.model` decorates, else of the only class with `predict`, or with `step`.

    Reads the file without running it. Raises ConfigError unless there is exactly one.
    """
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except OSError as e:
        raise ConfigError(f"TARGET '{file}' cannot be read: {e.strerror}") from None
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"TARGET '{file}' is not valid Python: {e}") from None
    definitions = [node for node in tree.body if isinstance(node, _Definition)]
    decorated = [d.name for d in definitions if any(map(_is_model, d.decorator_list))]
    found = decorated or [d.name for d in definitions if isinstance(d, ast.ClassDef) and any(map(_predicts, d.body))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"TARGET '{file}' has the models {', '.join(found)}; name one: {file}:{found[0]}")
    names = ", ".join(d.name for d in definitions if not d.name.startswith("_")) or "no class and no function"
    raise ConfigError(
        f"TARGET '{file}' names no object, and nothing in it is decorated with @penstock.model or is a class with"
        f" `predict`; it has {names}; write for instance {file}:Model"
    )


def _is_model(decorator: ast.expr) -> bool:
    """Whether it is `@penstock.model` or `@model`, with or without options."""
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(named) in ("penstock.model", "model")


def _predicts(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in ("predict", "step")


def read_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Name to value of each `NAME=VALUE`; a value is TOML, or a string without quotes. Raises ConfigError."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--option {text}: found no NAME=VALUE; expected for instance --option max_new_tokens=12")
        options[name] = toml_value(value)
    return options


def number_or_auto(_: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Click callback for an option that takes a number or "auto"."""
    if value is None or value == "auto":
        return value
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f"expected a whole number from 1, or auto, found '{value}'", param=parameter)
    return int(value)


def devices_list(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    """Click callback for an option that takes devices, separated by commas."""
    return None if value is None else [d.strip() for d in value.split(",") if d.strip()]


@contextmanager
def errors_end_the_command() -> Iterator[None]:
    """Prints a PenstockError that the block raises, and exits with its status."""
    try:
        yield
    except PenstockError as e:
        click.echo(f"penstock: {e}", err=True)
        if e.detail:
            click.echo(e.detail, err=True)
        sys.exit(e.exit_status)
