"""docs/configuration.md is up to date and documents every key."""

from pathlib import Path

import msgspec
import pytest

from penstock.config.schema import SECTIONS
from reference_pages import configuration_page

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == configuration_page(), "run: python tools/reference_pages.py"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_has_a_line(name: str) -> None:
    section = configuration_page().split(f"\n## `[{name}]`\n")[1].split("\n## ")[0]
    for key in SECTIONS[name].__struct_fields__:
        row = next(line for line in section.splitlines() if line.startswith(f"| `{key}` |"))
        takes, default, meaning = row.strip("| ").removeprefix(f"`{key}` | ").split(" | ")
        assert takes
        assert default
        assert len(meaning) > 10


def test_every_section_of_a_file_is_documented() -> None:
    tables = {cls for cls in SECTIONS.values()}
    for cls in list(tables):
        for field in msgspec.structs.fields(cls):
            kind = field.type
            args = getattr(kind, "__args__", ())
            for inner in (kind, *args):
                if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                    assert inner in tables
