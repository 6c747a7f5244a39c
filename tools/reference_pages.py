"""Generates reference pages from the code: all of docs/configuration.md, and the tables of docs/pipelines.md.

`make docs` runs `python tools/reference_pages.py`. Tests compare the pages with the code.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from penstock.config.load import RESERVED
from penstock.config.schema import SECTIONS
from penstock.pipeline.describe import default_of, first_line
from penstock.pipeline.notation import NODE, PIPELINE, Key
from penstock.pipeline.ops.base import Op, OpParameter, parameters_of
from penstock.pipeline.ops.catalog import BUILTIN, find
from penstock.torchpipe.ops import ALIASES, NOT_HERE, OPS
from penstock.values import expected

DOCS = Path(__file__).parents[1] / "docs"

BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"
"""The lines of docs/pipelines.md between which a table stands."""

_HEAD = """\
# Configuration

`tools/reference_pages.py` generates this page; to change it, edit `src/penstock/config/schema.py`.

All settings are in one `penstock.toml`. Every key has a default except the `target` of a model:

```toml
[server]
port = 8080

[models.digits]
target = "app.py:Digits"
instances = 2

[models.digits.batching]
max_batch_size = 64
slo_s = 0.05
```

`penstock serve penstock.toml` reads it; `penstock config check penstock.toml` only checks it. An unknown key is an
error that names the file, the key and the closest valid name. Times are in seconds (`_s`), sizes in bytes (`_bytes`).
Relative paths in the file, including `app.py:Digits`, start at the file's folder.

## Precedence

Later sources override earlier ones:

1. the default in the tables below;
2. the TOML file;
3. the environment: `PENSTOCK_<SECTION>__<KEY>`, with two underscores between the parts. Sections and keys may be in
   either case; model names are case sensitive:
   `PENSTOCK_SERVER__PORT=9000`, `PENSTOCK_MODELS__digits__BATCHING__MAX_BATCH_SIZE=8`;
4. the options of `penstock serve`, such as `--port 9000`;
5. `--set`, with a dotted key: `--set models.digits.batching.max_batch_size=8`.

Values in 3 and 5 are TOML, except that a string needs no quotes: `--set models.digits.devices='["cuda:0"]'`,
`--set server.host=::1`. Quote a model name that contains dots: `--set 'models."my.net".version=2'`.

These variables do not set a key:

"""

_BOUND = """
`max_body_bytes` must not exceed `limits.pool_bytes`, because a larger body could not be received. A listener on an
address that other machines can reach requires a token, `server.tls_client_ca`, or the option `--insecure`.
"""

_DEVICES = """
## `[devices]`

Budgets of memory for the models on a device, in bytes or as a text: `"cuda:0" = "40GiB"`, `cpu = "800MB"`. Models on
these devices are loaded when they are wanted ([Scale](scale.md)).
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    reserved = "".join(f"- `{name}`: {meaning}\n" for name, meaning in RESERVED.items())
    return _HEAD + reserved + "".join(_section(name, table) for name, table in SECTIONS.items()) + _DEVICES


def _section(name: str, table: Any) -> str:
    _, _, summary = (table.__doc__ or "").partition(": ")
    lines = [f"\n## `[{name}]`\n\n{_capital(summary)}\n\n| key | takes | default | meaning |\n|---|---|---|---|\n"]
    kinds: Any = inspect.type_info(table)
    for field, info in zip(msgspec.structs.fields(table), kinds.fields, strict=True):
        meaning = _capital(info.type.extra_json_schema["description"])
        lines.append(f"| `{field.name}` | {expected(field.type)} | {_default(field)} | {meaning} |\n")
    return "".join(lines) + (_BOUND if name == "limits" else "")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default is None:
        return "none"
    if field.default is msgspec.NODEFAULT:  # a default factory: an empty table
        return "`{}`"
    if field.name.endswith("_bytes") and field.default % 1024 == 0:
        amount, unit = (field.default // 2**20, "MiB") if field.default % 2**20 == 0 else (field.default // 1024, "KiB")
        return f"{field.default} ({amount} {unit})"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{msgspec.json.encode(value).decode()}`"


def tables() -> dict[str, str]:
    """The tables, by the name in their marks."""
    return {"keys of a node": _keys(NODE), "keys of the pipeline": _keys(PIPELINE), "ops": _ops()}


def with_tables(page: str) -> str:
    """The page with the current text of each table that it marks."""
    for name, table in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in page or end not in page:
            continue
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def _keys(keys: Mapping[str, Key]) -> str:
    rows = [(f"`{name}`", expected(key.type), key.default, key.doc) for name, key in keys.items()]
    return _markdown(("key", "takes", "default", "meaning"), rows)


def _ops() -> str:
    rows = []
    known: dict[type[Op], str] = {}
    for name in (name for name in (*BUILTIN, *OPS) if name not in ALIASES):
        cls = find(name)
        first = known.setdefault(cls, name)
        params = ", ".join(_parameter(p) for p in parameters_of(cls).values()) if first == name else ""
        does = first_line(name) if first == name else f"as `{first}`"
        rows.append((f"`{name}`", f"{cls.takes} -> {cls.gives}", params, does))
    rows.sort(key=lambda row: row[0].lower())
    others = ", ".join(f"`{name}` is `{of}`" for name, of in ALIASES.items())
    absent = _markdown(("TorchPipe's", "here"), [(f"`{name}`", why) for name, why in NOT_HERE.items()])
    table = _markdown(("op", "data", "parameters", "gives"), rows)
    return f"{table}\n\nOther names: {others}. Not available:\n\n{absent}"


def _parameter(parameter: OpParameter) -> str:
    return f"`{parameter.name}`" if parameter.required else f"`{parameter.name}` = {default_of(parameter)}"


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration_page())
    pipelines = DOCS / "pipelines.md"
    pipelines.write_text(with_tables(pipelines.read_text()))
