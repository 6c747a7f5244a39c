"""What `import penstock` offers to programs, to editors and to type checkers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

NAMES: list[str] = vars(penstock)["__all__"]  # made at run time: type checkers see the imports
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
IMPORT = re.compile(r"^\s*from penstock import ([\w, ]+)", re.MULTILINE)


def test_the_names_that_the_pages_use_are_offered() -> None:
    texts = [page.read_text() for page in PAGES]
    used = {name for text in texts for names in IMPORT.findall(text) for name in re.findall(r"\w+", names)}
    used |= {name for text in texts for name in re.findall(r"\bpenstock\.([A-Z]\w+)", text)}
    assert {"BadRequest", "Streamer", "ModelConfig"} <= used
    assert used | {"ConfigError", "OutOfMemory", "BrokerUnavailable"} <= {*NAMES, "pipeline", "ray"}


def test_every_name_is_listed_and_found() -> None:
    assert set(NAMES) < set(dir(penstock))
    assert all(getattr(penstock, name) is not None for name in NAMES)
    assert not [name for name in NAMES if name.startswith("_") or name in ("annotations", "errors")]
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'Straemer'"):
        penstock.Straemer  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("code", ["import penstock; dir(penstock); penstock.OutOfMemory", "from penstock import Item"])
def test_the_import_loads_only_errors_and_plain_types(code: str) -> None:
    told = f"{code}; import sys; print(*sorted(m for m in sys.modules if m.startswith('penstock')))"
    loaded = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == ["penstock", "penstock._version", "penstock.errors", "penstock.types"]


def test_the_package_runs_as_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert told == f"penstock, version {penstock.__version__}\n"


PROGRAM = """\
import penstock
from penstock import Straemer
penstock.Engnie
@penstock.model(max_batch_size=8, task="embedding")
class Right:
    def predict(self, items: list[int]) -> list[int]:
        return items
@penstock.model
def plain(items: list[int]) -> list[int]:
    return items
kept: list[int] = [*plain([1]), *Right().predict([1])]
@penstock.model(max_batch_sise=8)
class Misspelt: ...
@penstock.model(max_batch_size="eight")
class Mistyped: ...
"""
CHECKER = "[mypy]\nfollow_imports = skip\nignore_missing_imports = true\n[mypy-msgspec.*]\nfollow_imports = silent\n"
CHECKED = ("__init__", "core/worker/python_model", "config/schema", "types", "errors")  # the other files are not read


def test_a_type_checker_sees_misspelt_names_and_options(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CHECKER)
    files = [str(ROOT / f"src/penstock/{name}.py") for name in CHECKED]
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, "program.py", *files], capture_output=True, text=True, cwd=tmp_path)
    told = re.findall(r"^program\.py:(\d+): error: (.*)", done.stdout, re.MULTILINE)
    assert [int(line) for line, _ in told] == [2, 3, 12, 14], done.stdout + done.stderr
    for (_, text), word in zip(told, ("Straemer", "Engnie", "max_batch_sise", "str"), strict=True):
        assert word in text
