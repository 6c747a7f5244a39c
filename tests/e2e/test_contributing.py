"""Every recipe of CONTRIBUTING.md works as written, on a copy of the sources."""

import re
import shutil
from pathlib import Path

import pytest

from support.pages import ROOT, PageShell, blocks, write

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^## (Add an? [^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
SHOWN = {
    "Add a policy": "HELLO",
    "Add an op": "invert",
    "Add a runtime": "[2.0,4.0,6.0]",
    "Add a codec with its route": "2.0,5.0",
    "Add a metric": "",
    "Add a configuration key": "",
    "Add a command": "HELLO, ADA.\n",
}


@pytest.fixture
def copied(tmp_path: Path) -> PageShell:
    """A copy of the package, the tools and the pages that they generate, with that package first on the path."""
    for folder in ("src", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "pipelines.md", tmp_path / "docs")
    return PageShell(tmp_path, env={"PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path}"})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_works_as_written(recipe: str, copied: PageShell) -> None:
    shown = ""
    for language, text in blocks(RECIPES[recipe]):
        if language:
            write(text, copied.folder)
        else:
            shown += copied.run(text)
    assert SHOWN[recipe] in shown


def test_each_kind_of_extension_has_a_recipe() -> None:
    assert RECIPES.keys() == SHOWN.keys()
