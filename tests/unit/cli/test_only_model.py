"""Which model a file means that is named alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.only_model import only_model
from penstock.errors import ConfigError

MARK = "raise SystemExit('the file was run')\n"


@pytest.mark.parametrize(
    "source",
    [
        "class Wanted:\n    def predict(self, items): ...\nclass Helper: ...\ndef predict(items): ...",
        "import penstock\nclass Other:\n    def predict(self, items): ...\n@penstock.model\nclass Wanted(Other): ...",
        "import penstock\n@penstock.model(max_batch_size=8)\ndef Wanted(items): ...\ndef other(items): ...",
        "from penstock import model\n@model\nasync def Wanted(items): ...",
    ],
    ids=["the class with predict", "the decorated one", "a function with options", "decorated by its short name"],
)
def test_the_one_model_is_found_and_the_file_is_not_run(source: str, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(MARK + source)
    assert only_model(str(file)) == "Wanted"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def f(items): ...\nclass _Hidden: ...", r"app.py' names no object, and nothing .* it has f; write .*:Model"),
        ("x = 1", "it has no class and no function"),
        (
            "class A:\n    def predict(self, items): ...\nclass B:\n    def predict(self, items): ...",
            r"has the models A, B; name one: .*app.py:A$",
        ),
        ("def f(:", "is not valid Python: .*line 1"),
        ("\0", "is not valid Python"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_without_one_model_tells_what_it_has(source: str | None, told: str, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ConfigError, match=told):
        only_model(str(file))
