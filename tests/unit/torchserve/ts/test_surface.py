import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.torchserve.ts import MODULES

PAGE = (Path(__file__).parents[4] / "docs" / "torchserve-compatibility.md").read_text()
SURFACE = {  # module, without "ts.": the names that the page promises
    module.removeprefix("ts").removeprefix("."): re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"(?m)^\| `(ts(?:\.[\w.]+)?)` \| yes \| ([^|]+)\|", PAGE)
}
IMPORTS = """
import importlib, json, sys
from penstock.torchserve.handlers.entry import make_ts_importable
from penstock.torchserve.ts import MODULES
make_ts_importable()
for name, members in json.loads(sys.argv[1]).items():
    module = importlib.import_module(f"ts.{name}".rstrip("."))
    ours = importlib.import_module(f"penstock.torchserve.ts.{MODULES.get(name, name)}".rstrip("."))
    assert module is ours, name
    if name and "." not in name:
        exec(f"from ts import {name} as found")
        assert found is ours, name
    for member in members:
        getattr(module, member)
print(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
"""
NEEDS = ("image_", "object_", "text_classifier", "text_handler", "vision_", "hf_batch")  # torch, whatever they do


def loaded_by(surface: dict[str, list[str]]) -> set[str]:
    command = [sys.executable, "-W", "error", "-c", IMPORTS, json.dumps(surface)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_name_that_handlers_import_exists_once_under_both_paths():
    loaded = loaded_by(SURFACE)
    assert {"torch", "transformers"} <= loaded
    assert not loaded & {"captum", "onnxruntime"}


def test_no_module_has_the_name_of_a_package_of_torchserve():
    assert set(SURFACE) == {"", *MODULES}
    assert all(SURFACE.values())
    packages = {path.partition(".")[0] for path in MODULES if "." in path}
    assert not packages & set(MODULES.values()), "importing ts.NAME would hide the module of that name"


def test_only_modules_that_are_useless_without_torch_load_it():
    light = {name: members for name, members in SURFACE.items() if not any(n in name for n in NEEDS)}
    assert not loaded_by(light) & {"torch", "PIL", "yaml", "transformers"}


def test_the_base_handler_alone_loads_no_numpy():
    assert "numpy" not in loaded_by({n: SURFACE[n] for n in ("context", "torch_handler.base_handler")})


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(AssertionError, match=r"No module named 'ts\.nothing'"):
        loaded_by({"nothing": []})
