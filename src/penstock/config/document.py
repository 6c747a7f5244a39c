"""`docs/configuration.md`, made from the schema: `python -m penstock.config.document > docs/configuration.md`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from penstock.config.load import RESERVED
from penstock.config.schema import SECTIONS
from penstock.config.toml import expected

_HEAD = """\
# Configuration

This page is made from the schema by `python -m penstock.config.document`; edit `src/penstock/config/schema.py`.

One `penstock.toml` holds everything, and every key has a default except the `target` of a model:

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

`penstock serve penstock.toml` reads it, `penstock config check penstock.toml` only tells whether it is right. A key
that does not exist is refused, with the file, the key and the nearest right name. Times are seconds (`_s`), sizes bytes
(`_bytes`). Relative paths in the file, also that of `app.py:Digits`, start at the file's folder.

## Where a value comes from

Each of these is stronger than the one before it:

1. the default in the tables below;
2. the TOML file;
3. the environment: `PENSTOCK_<SECTION>__<KEY>`, with two underscores between the parts. Sections and keys may be in
   either case, the name of a model is taken as it stands:
   `PENSTOCK_SERVER__PORT=9000`, `PENSTOCK_MODELS__digits__BATCHING__MAX_BATCH_SIZE=8`;
4. the flags of `penstock serve`, such as `--port 9000`;
5. `--set`, with the key in dots: `--set models.digits.batching.max_batch_size=8`.

In 3 and 5 a value is written as in TOML, and a text needs no quotes: `--set models.digits.devices='["cuda:0"]'`,
`--set server.host=::1`. A model's name with dots is quoted: `--set 'models."my.net".version=2'`.

These variables are no keys:

"""

_BOUND = """
A request body larger than `limits.pool_bytes` could not be received, so `max_body_bytes` must not exceed it.
A listener on an address that other machines can reach needs a token or `server.tls_client_ca`, or
the word `--insecure`.
"""


def document() -> str:
    """The page as Markdown."""
    reserved = "".join(f"- `{name}`: {meaning}\n" for name, meaning in RESERVED.items())
    return _HEAD + reserved + "".join(_section(name, table) for name, table in SECTIONS.items())


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
    if field.default is msgspec.NODEFAULT:  # made by a factory: an empty table
        return "`{}`"
    if field.name.endswith("_bytes") and field.default % 1024 == 0:
        amount, unit = (field.default // 2**20, "MiB") if field.default % 2**20 == 0 else (field.default // 1024, "KiB")
        return f"{field.default} ({amount} {unit})"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    print(document(), end="")
