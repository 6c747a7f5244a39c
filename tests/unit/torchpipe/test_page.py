"""docs/migrate-from-torchpipe.md has a row for each key, backend and name of the code, with its state."""

import inspect
import re
from pathlib import Path

import pytest

import penstock.torchpipe as torchpipe
from penstock.errors import ConfigError
from penstock.pipeline.filters import canonical
from penstock.pipeline.graph import NODE_FILTERS
from penstock.pipeline.load import parse_graph
from penstock.pipeline.lower import flatten
from penstock.pipeline.notation import NODE, parse
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import parameters_of
from penstock.torchpipe.boundary import INSTEAD
from penstock.torchpipe.dialect import TORCHPIPE
from penstock.torchpipe.expressions import ENGINES, FAN_OUTS, SEQUENCES
from penstock.torchpipe.expressions import SCOPES as WRAPPERS
from penstock.torchpipe.ops import BRANCHES, FILTERS, NOT_HERE, OPS

PAGE = (Path(__file__).parents[3] / "docs" / "migrate-from-torchpipe.md").read_text()
TESTS = Path(__file__).parents[2]
STATES = {"works", "differently", "ignored", "never"}
OF_CODE = {
    "used": {"works", "differently"},
    "ignored": {"ignored"},
    "rewritten": {"works", "differently"},
    "not supported": {"never"},
}
PENSTOCKS_OWN = {"Model", "OnnxTensor", "OpenvinoTensor"}
SCOPES = {
    *("Sequential", "S", "SequentialV0", "S_v0", "SyncTensor", "TensorSync", "Torch", "StreamGuard", "Parallel"),
    *("Range", "FakeInstance", "Max", "EventLoop", "Ring", "SyncRing", "PipelineReviser", "EnsureInputHasEvent"),
}


def rows(section: str) -> dict[str, str]:
    """The state of each name of a section's table."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith(("| `", "| values", "| filters", "| those")):
            names, state, _, test = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            assert any((TESTS / folder / test).is_file() for folder in ("unit", "..")), line
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in found, f"{name} stands twice"
                found[name] = state
    return found


@pytest.mark.parametrize("section", ["Keys", "Backends", "Filters", "Python"])
def test_every_row_has_a_state(section: str) -> None:
    states = set(rows(section).values()) - {""}
    assert states
    assert states <= STATES


def test_every_key_is_there_in_the_state_that_the_code_has() -> None:
    found = rows("Keys")
    for key in TORCHPIPE.values():
        assert found[key.name] in OF_CODE[key.state], key.name
    of_ops = {p for name in catalog.names() for p in parameters_of(catalog.find(name))}
    of_ops |= {p for make in FILTERS.values() for p in inspect.signature(make).parameters}
    coded = set(TORCHPIPE)
    for name in found.keys() - coded - {"&", "\\|"}:
        assert (found[name] == "works") == (name in of_ops or name in NODE), name


def test_every_backend_is_there_and_works_if_the_catalog_has_it() -> None:
    found = rows("Backends")
    here = {*catalog.BUILTIN, *OPS} - PENSTOCKS_OWN
    assert here | NOT_HERE.keys() | SCOPES | {*BRANCHES.values()} <= found.keys()
    for name, state in found.items():
        ours = here | SCOPES | {*ENGINES, *BRANCHES.values()}
        assert (state in ("works", "differently")) == (name in ours or name.lower() in FAN_OUTS), name


def test_the_page_lists_every_wrapper() -> None:
    assert {name.lower() for name in SCOPES} == WRAPPERS | SEQUENCES


@pytest.mark.parametrize("scope", sorted(SCOPES))
def test_scopes_and_sequences_have_no_effect(scope: str) -> None:
    assert [draft.op for draft in flatten(parse(f"{scope}[ResizeMat,{scope}]"))] == ["ResizeMat"]


def test_every_filter_that_runs_is_there() -> None:
    found = rows("Filters")
    listed = {canonical(name) for name, state in found.items() if state == "works"}
    assert listed == {*NODE_FILTERS, *FILTERS, "register_filter"} - {*BRANCHES.values()}


def test_every_name_is_there_and_those_without_a_counterpart_are_never() -> None:
    found = rows("Python")
    public = {name for name in vars(torchpipe) if not name.startswith("_")} - {"unavailable", "annotations"}
    modules = {name for name in public if type(getattr(torchpipe, name)).__name__ == "module"} - {"utils"}
    assert public - modules <= found.keys()
    for name in INSTEAD:
        assert found[name if name in found else name.rpartition(".")[0]] == "never", name


def test_every_method_of_an_event_is_there() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `Event`"))
    of_who_begins = {"begin", "settle"}
    methods = {name for name in vars(torchpipe.Event) if not name.startswith("_")} - of_who_begins
    assert methods == set(re.findall(r"`(\w+)`", row)) - {"Event"}


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_a_backend_that_is_not_here_is_refused_with_a_replacement(name: str) -> None:
    with pytest.raises(ConfigError, match=f"TorchPipe's op '{name.upper()}' is not available: \\w"):
        catalog.find(name.upper())
    assert name.lower() not in map(str.lower, catalog.names())


@pytest.mark.parametrize("key", sorted(k.name for k in TORCHPIPE.values() if k.state in ("not supported", "ignored")))
def test_a_key_without_an_effect_is_refused_or_warned_about(key: str, caplog: pytest.LogCaptureFixture) -> None:
    tables = {"a": {"backend": "Identity", key: "1"}}
    if TORCHPIPE[key].state == "not supported":
        for given in (tables, {key: "1", "a": {"backend": "Identity"}}):
            with pytest.raises(ConfigError, match=rf"{key}: is not supported: \w"):
                parse_graph(given, name="t", folder="/", compat=True)
        return
    parse_graph(tables, name="t", folder="/", compat=True)
    assert f"[a] {key}: has no meaning here and is ignored: {TORCHPIPE[key].why}" in caplog.text


@pytest.mark.parametrize("section", ["Keys", "Backends", "Filters", "Python"])
def test_the_test_of_a_row_names_it(section: str) -> None:
    """Rows whose behavior is the same for all of them are tested here, from the registries."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ")[0]
    for line in text.splitlines():
        names = re.findall(r"`([^`]+)`", line.strip("|").split(" | ")[0])
        test = line.rstrip("| ").rpartition("| ")[2]
        if names and line.startswith("| `") and not test.endswith("test_page.py"):
            path = next(found for folder in ("unit", "..") if (found := TESTS / folder / test).is_file())
            content = path.read_text().lower()
            assert any(name.rpartition(".")[2].lower() in content for name in names), line
