"""Tables of keys and ops for docs/pipelines.md, made from the code: `python -m penstock.pipeline.manual PAGE`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.errors import ConfigError
from penstock.pipeline.keys import NODE, PIPELINE, Key, torchpipe_keys
from penstock.pipeline.ops.base import Op
from penstock.pipeline.ops.catalog import ALIASES, BUILTIN, NOT_HERE, canonical, find, names
from penstock.pipeline.ops.parameters import Parameter, describe_type, parameters_of

BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"
"""Between these lines of the page stands a table of this module."""


def tables() -> dict[str, str]:
    """The tables of the page, by the name that stands in its marks."""
    return {
        "keys of a node": _keys(NODE),
        "keys of the pipeline": _keys(PIPELINE),
        "ops": _ops(),
        "keys of TorchPipe": _torchpipe(),
    }


def filled(page: str) -> str:
    """The page with those tables as they are now whose marks stand in it."""
    for name, table in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in page or end not in page:
            continue
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def listed() -> str:
    """All ops, a line each."""
    width = max(map(len, names()))
    return "\n".join(f"{name.ljust(width)}  {_first_line(name)}" for name in names())


def described(name: str) -> str:
    """An op with its docstring and its parameters. Raises ConfigError: there is none of that name."""
    name = canonical(name)
    cls = find(name)
    lines = [f"{name}: {cls.takes} -> {cls.gives}", "", inspect.getdoc(cls) or ""]
    rows = [f"  {p.name} = {_default(p)}   {describe_type(p.type)}" for p in parameters_of(cls).values()]
    return "\n".join([*lines, "", *rows])


def _first_line(name: str) -> str:
    try:
        return (inspect.getdoc(find(name)) or "").split("\n\n")[0].replace("\n", " ")
    except ConfigError as e:
        return f"({e.message})"


def _keys(keys: Mapping[str, Key]) -> str:
    rows = [(f"`{name}`", key.expected, key.default, key.doc) for name, key in keys.items()]
    return _markdown(("key", "takes", "default", "meaning"), rows)


def _ops() -> str:
    rows = []
    known: dict[type[Op], str] = {}
    for name in (name for name in BUILTIN if name not in ALIASES):
        cls = find(name)
        first = known.setdefault(cls, name)
        params = ", ".join(_parameter(p) for p in parameters_of(cls).values()) if first == name else ""
        does = _first_line(name) if first == name else f"as `{first}`"
        rows.append((f"`{name}`", f"{cls.takes} -> {cls.gives}", params, does))
    rows.sort(key=lambda row: row[0].lower())
    others = ", ".join(f"`{name}` is `{of}`" for name, of in ALIASES.items())
    absent = _markdown(("TorchPipe's", "here"), [(f"`{name}`", why) for name, why in NOT_HERE.items()])
    return f"{_markdown(('op', 'data', 'parameters', 'gives'), rows)}\n\nOther names: {others}. Not here:\n\n{absent}"


def _parameter(parameter: Parameter) -> str:
    return f"`{parameter.name}`" if parameter.required else f"`{parameter.name}` = {_default(parameter)}"


def _default(parameter: Parameter) -> str:
    if parameter.required:
        return "(must be set)"
    value = parameter.default
    return '""' if value == "" else "none" if value is None or value == () else str(value)


def _torchpipe() -> str:
    rows = [(f"`{k.name}`", k.state, f"`{k.native}`" if k.native else "", k.means) for k in torchpipe_keys()]
    return _markdown(("TorchPipe's key", "state", "native key", "here"), rows)


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(filled(page.read_text()))
