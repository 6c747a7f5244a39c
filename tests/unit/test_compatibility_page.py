"""The page of what TorchServe has is complete, and what it says yes to has a test."""

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.torchserve.admin import model_spec
from penstock.torchserve.archive.pack import BUILT_IN
from penstock.torchserve.cli.archive import archive, archive_workflow
from penstock.torchserve.cli.torchserve import parser
from penstock.torchserve.config import IGNORED, ListenerConfig, Properties
from penstock.torchserve.http.listener import listener_templates
from penstock.torchserve.ts import MODULES
from penstock.torchserve.ts.context import Context
from penstock.torchserve.ts.metric_cache import MetricsCache
from penstock.torchserve.workflow import NodeSettings
from support.torchserve import FakeAdministration

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "torchserve-compatibility.md").read_text()
STATES = {"yes", "ignored", "refused", "later"}
SERVICES = (
    "org.pytorch.serve.grpc.inference.InferenceAPIsService",
    "org.pytorch.serve.grpc.management.ManagementAPIsService",
    "org.pytorch.serve.grpc.openinference.GRPCInferenceService",
)


def rows(section: str) -> dict[str, tuple[str, str]]:
    """What each name of a section's tables has as its state, and the test that shows it."""
    text = PAGE.split(f"\n## {section}", 1)[1].split("\n## ")[0]
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        assert len(cells) == 4, line
        for name in re.findall(r"`([^`]+)`", cells[0]):
            assert name not in found, f"{name} stands twice"
            found[name] = (cells[1], cells[3].strip("`"))
    return found


SECTIONS = re.findall(r"^## (.+)$", PAGE, re.M)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_has_a_state_and_every_yes_an_existing_test(section: str) -> None:
    found = rows(section)
    assert found
    for name, (state, test) in found.items():
        assert state in STATES, name
        assert test or state != "yes", f"{name} has no test"
        if test:
            path, _, function = test.partition("::")
            names = {
                node.name
                for node in ast.walk(ast.parse((TESTS / path).read_text()))
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
            assert function in names, f"{name}: there is no test {test}"


def test_every_key_of_the_configuration_has_a_row_with_its_state() -> None:
    found = rows("config.properties")
    assert set(found) == set(Properties.__struct_fields__)
    assert {name for name, (state, _) in found.items() if state == "ignored"} == IGNORED


async def _no_metrics(names: list[str]) -> bytes:
    return b""


def test_every_route_of_the_listeners_has_a_row() -> None:
    administration: Any = FakeAdministration()
    properties = Properties(ts_open_inference_protocol=True, enable_model_api=True)
    config = ListenerConfig(frozenset({"inference", "management", "metrics"}), properties)
    templates = listener_templates(administration, config, _no_metrics)
    routes = set()
    for template in templates:
        path = re.sub(r"\{[^}]*\}", "{}", template.path)
        methods = template.methods if template.methods is not None and len(template.methods) < 5 else {""}
        routes |= {(method, path) for method in methods}
    told = {}
    for section in ("HTTP: inference", "HTTP: management and metrics"):
        for name, (state, _) in rows(section).items():
            method, _, path = name.rpartition(" ")
            told[method, re.sub(r"\{[^}]*\}", "{}", path)] = state
    plain = {path for _, path in routes}
    for (_method, path), state in told.items():
        assert (path in plain) == (state == "yes"), path
    for method, path in routes:
        assert any(path == of and method in ("", by) for by, of in told), (method, path)


def test_every_call_of_the_services_has_a_row() -> None:
    services = import_module("penstock.torchserve.grpc")
    calls = {
        f"{name.rpartition('.')[2]}.{method.name}"
        for name in SERVICES
        for method in services.service_descriptor(name).methods
    }
    assert set(rows("gRPC")) == calls


def test_every_flag_of_the_commands_has_a_row() -> None:
    assert set(rows("torchserve")) == set(parser()._option_string_actions) - {"-h", "--help"}
    flags = {flag for parameter in archive.params for flag in parameter.opts}
    assert set(rows("torch-model-archiver, and penstock archive")) == flags | {"-h", "--help"}
    flags = {flag for parameter in archive_workflow.params for flag in parameter.opts}
    assert set(rows("torch-workflow-archiver")) == flags | {"-h", "--help"}


def test_every_key_of_a_workflow_has_a_row() -> None:
    keys = {each.encode_name for each in msgspec.structs.fields(NodeSettings)}
    assert set(rows("Keys of a workflow's specification")) == {"models", "dag", "url", *keys}


def test_every_key_of_a_models_configuration_has_a_row() -> None:
    known = {*model_spec.TYPES, "parallelType", "torchrun"}
    handlers_own = {"pt2", "precision", "optimize", "micro_batching"}
    assert set(rows("Keys of model-config.yaml")) == known | handlers_own


def test_every_member_of_the_context_has_a_row() -> None:
    context = Context("m", "/m", {}, 1, None, "0.12.0")
    members = {name for name in dir(context) if not name.startswith("_")}
    metrics = {name for name in rows("Members of the context") if name.startswith(("add_", "get_metric"))}
    assert set(rows("Members of the context")) - metrics == members | {"cache"}
    assert {name for name in dir(MetricsCache) if name.startswith(("add_", "get_metric"))} == metrics


def test_every_built_in_handler_and_envelope_has_a_row() -> None:
    envelopes = {path.rpartition(".")[2] for path in MODULES if "request_envelope" in path} - {"base"}
    assert set(rows("Built-in handlers and envelopes")) == {*BUILT_IN, *envelopes}


def test_every_module_that_handlers_import_has_a_row() -> None:
    assert set(rows("What handlers import")) == {"ts", *(f"ts.{path}" for path in MODULES)}


def test_every_switch_in_the_guide_exists() -> None:
    guide = (TESTS.parent / "docs" / "migrate-from-torchserve.md").read_text()
    different = guide.split("\n## What is different")[1].split("\n## ")[0]
    cells = [line.split("|")[-2] for line in different.splitlines() if line.startswith("| ") and "---" not in line]
    named = set(re.findall(r"`(\w+)(?:=|: )", " ".join(cells)))
    own_of_models = set(rows("Keys of model-config.yaml"))
    assert named <= set(Properties.__struct_fields__) | own_of_models
    assert {"strict_delay", "ts_yaml_wins", "retry_split", "trust", "allowed_urls", "access_log"} <= named
