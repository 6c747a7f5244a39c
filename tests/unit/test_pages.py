"""The pages about the code agree with the code: their files exist, and the layer table is the one that is enforced."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
PAGES = [
    *(ROOT / "docs" / name for name in ("architecture.md", "internals.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
PATH = re.compile(r"`((?:\w+/)*\w+\.py|(?:\w+/)+\w+)`")
MADE_HERE = {"app.py", "streamed.py"}  # by the reader of the README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    named = {
        match for match in PATH.findall(prose) if match.endswith(".py") or (PACKAGE / match.split("/")[0]).is_dir()
    }
    for name in named - MADE_HERE:
        anywhere = "/" not in name and any(PACKAGE.rglob(name))
        assert (PACKAGE / name).exists() or (ROOT / name).exists() or anywhere, f"{page.name} names {name}"


def test_the_layer_table_of_the_page_is_the_enforced_one() -> None:
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    (layers,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    ]
    section = (ROOT / "docs" / "internals.md").read_text().partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = [tuple(re.findall(r"`([\w.]+)`", line)) for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    assert rows == [tuple(row) for row in layers]
