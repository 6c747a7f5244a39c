"""Generates `docs/configuration.md` from the schema: `python -m penstock.config.document > docs/configuration.md`."""

from typing import Any

import msgspec
from msgspec import inspect

from penstock.config.load import RESERVED
from penstock.config.schema import SECTIONS
from penstock.config.toml import expected

_HEAD = """\
# Configuration

`python -m penstock.config.document` generates this page; to change it, edit `src/penstock/config/schema.py`.

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


def document() -> str:
    """The page in Markdown."""
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
    if field.default is msgspec.NODEFAULT:  # a default factory: an empty table
        return "`{}`"
    if field.name.endswith("_bytes") and field.default % 1024 == 0:
        amount, unit = (field.default // 2**20, "MiB") if field.default % 2**20 == 0 else (field.default // 1024, "KiB")
        return f"{field.default} ({amount} {unit})"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    print(document(), end="")
