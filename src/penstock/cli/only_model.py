"""The one model of a file that is named alone: `penstock serve app.py`. The file is read, and not run."""

from __future__ import annotations

import ast
from pathlib import Path

from penstock.errors import ConfigError

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def only_model(file: str) -> str:
    """The name of what `@penstock.model` decorates at the top of the file, else of its only class with `predict`.

    Raises ConfigError when there is none, or more than one.
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
    """Whether it is `@penstock.model` or `@model`, also with options."""
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(named) in ("penstock.model", "model")


def _predicts(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "predict"
