"""The pages about Triton are complete: what works names existing tests, and each key of config.pbtxt has a row."""

import ast
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tritonclient.grpc import model_config_pb2

from penstock.config.load import model_config, read_toml
from penstock.config.schema import Config, ModelConfig

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
TABLE = (DOCS / "open-inference.md").read_text().partition("\n## What of Triton works\n")[2].partition("\n## ")[0]
PAGE = (DOCS / "migrate-from-triton.md").read_text()
STATES = {"works", "differs", "missing"}
MESSAGES = (
    "ModelConfig", "ModelInput", "ModelOutput", "ModelDynamicBatching", "ModelQueuePolicy", "ModelSequenceBatching",
    "ModelInstanceGroup",
)  # fmt: skip


def rows() -> list[list[str]]:
    """The cells of the table's rows: what, state, note, tests."""
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def functions(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_row_of_what_works_has_a_state_and_existing_tests() -> None:
    found = rows()
    assert {state for _, state, *_ in found} == STATES
    for what, state, _, tests in found:
        assert state in STATES, what
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, f"{what} names no test"
        for path, name in named:
            assert name in functions(path), f"{what}: there is no test {path}::{name}"


@pytest.mark.parametrize("message", MESSAGES)
def test_every_key_of_a_model_configuration_has_a_row(message: str) -> None:
    table = PAGE.partition("\n## config.pbtxt, key by key\n")[2].partition("\n## ")[0]
    left = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    named = {word for quoted in re.findall(r"`([^`]+)`", left) for word in re.findall(r"\w+", quoted)}
    assert {each.name for each in getattr(model_config_pb2, message).DESCRIPTOR.fields} <= named


def test_the_keys_that_replace_them_exist() -> None:
    kinds: dict[str, Any] = {"server": Config, "logging": Config, "batching": ModelConfig}
    for section, key in re.findall(r"`(server|logging|batching)\.(\w+)", PAGE):
        kind = next(each.type for each in msgspec.structs.fields(kinds[section]) if each.name == section)
        assert key in {each.name for each in msgspec.structs.fields(kind)}, f"{section}.{key}"


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    texts = re.findall(r"^```toml\n# (\S+)\n(.*?)^```$", PAGE, re.S | re.M)
    for name, text in texts:
        (tmp_path / name).write_text(text)
    tree = read_toml(str(tmp_path / "penstock.toml"))
    for name in tree["models"]:
        assert model_config(tree["models"][name], name).target
