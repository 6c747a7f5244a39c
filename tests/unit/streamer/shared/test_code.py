"""The digest of a model's code: the same in all processes, another one after each change that a worker would load."""

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.core.transports.launch import PackedTarget
from penstock.streamer.shared.code import code_digest

FILES = {
    "shop/__init__.py": "",
    "shop/model.py": """
        import json, numpy, shop_settings
        from . import near
        from .deep import inner as other
        from nowhere import nothing

        def predict(batch):
            from shop_late import late
            return batch
    """,
    "shop/near.py": "",
    "shop/deep/__init__.py": "from ..deeper import deepest",
    "shop/deep/inner.py": "",
    "shop/deeper.py": "deepest = 1",
    "shop_settings.py": "",
    "shop_late/late.py": "",
    "site-packages/numpy_like.py": "",
    "shop_broken.py": "print 'Python 2'",
}
UNUSED = {"shop/unused.py": "", "app.py": "from shop.model import predict"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {**FILES, **UNUSED}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "shop/near.py").write_text("import shop_broken, numpy_like, shop.model")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def digest(*named: str, files: list[tuple[str, str]] | None = None) -> str:
    """For a target whose pickle names these modules."""
    return code_digest(PackedTarget(pickle.dumps(named), files or [], ""))


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_any_file_that_may_be_imported_changes_the_digest(folder: Path, name: str) -> None:
    before = digest("shop.model")
    assert digest("shop.model") == before
    os.utime(folder / name, (1, 1))
    assert (digest("shop.model") == before) == ("site-packages" not in name), "installed packages count by their time"
    (folder / name).write_text((folder / name).read_text() + "\n# changed")
    assert digest("shop.model") != before


def test_other_files_and_modules_that_happen_to_be_loaded_are_no_part_of_it(folder: Path) -> None:
    before = digest("shop.model")
    for name in UNUSED:
        (folder / name).write_text("changed = 1")
    assert digest("shop.model", "no module", "not.there", "../x") == before
    loads = (
        "import sys, pickle, shop.unused, shop_late.late; from penstock.core.transports.launch import PackedTarget;"
        "from penstock.streamer.shared.code import code_digest;"
        "print(code_digest(PackedTarget(pickle.dumps(('shop.model',)), [], '')))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", loads],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == before


def test_a_script_counts_with_its_imports_and_its_place(folder: Path) -> None:
    found = digest(files=[(f"{folder}/app.py", "app")])
    assert digest(files=[(f"{folder}/app.py", "app")]) == found
    (folder / "shop/near.py").write_text("changed = 1")
    assert digest(files=[(f"{folder}/app.py", "app")]) != found
    (folder / "copy.py").write_text((folder / "app.py").read_text())
    assert digest(files=[(f"{folder}/copy.py", "app")]) != digest(files=[(f"{folder}/app.py", "app")])
