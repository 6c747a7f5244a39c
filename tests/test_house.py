"""The plan of the house, kept: floors, purity, pickle, what an import loads. Sizes are reported, not judged."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
HOUSE = SRC / "penstock"
FILES = sorted(HOUSE.rglob("*.py"))

FLOORS = {
    "errors": 1,
    "types": 2, "config": 2, "plugins": 2, "metrics": 2, "native": 2,
    "batching": 3, "protocols": 3, "archive": 3, "wire": 3, "ops": 3,
    "models": 4, "observe": 4, "frontends": 4, "client": 4,
    "worker": 5,
    "transports": 6, "bench": 6,
    "engine": 7, "tune": 7, "broker": 7,
    "pipeline": 8, "streamer": 8, "bulk": 8, "dashboard": 8,
    "compat": 9,
    "cli": 10, "testing": 10, "demo": 10,
}  # fmt: skip
LEAF_FILES = {
    "errors",
    "types",
    "plugins",
    "metrics",
    "native",
}  # files, not folders: those of one floor may know each other

PURE = ("batching", "protocols")
NOT_PURE = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select",
    "selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uvloop",
}  # fmt: skip
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
MAY_PICKLE = {"transports", "wire"}  # between a process and its own child, over a private socketpair


def imports(path: Path) -> Iterator[str]:
    """Every module that an import statement names, with `from a import b` as `a.b`; typing-only ones too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def file_room(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "path", [f for f in FILES if f != HOUSE / "__init__.py"], ids=lambda p: str(p.relative_to(SRC))
)
def test_a_file_imports_only_from_lower_floors(path: Path) -> None:
    mine = file_room(path)
    assert mine in FLOORS, f"{mine} has no floor: give it one in FLOORS and in docs/architecture.md"
    for name in imports(path):
        other = room(name)
        if not name.startswith("penstock.") or other == mine or name == "penstock.__version__":
            continue
        if other not in FLOORS:  # a name of the package's own face, such as penstock.Response: for users, not for us
            assert mine in ("demo",), f"{path.relative_to(SRC)} imports penstock's face ({name}); import the module"
            continue
        lower = FLOORS[other] < FLOORS[mine]
        neighbour = FLOORS[other] == FLOORS[mine] and (other in LEAF_FILES or FLOORS[mine] == 10)
        assert lower or neighbour, (
            f"{path.relative_to(SRC)} (floor {FLOORS[mine]}) imports {name} (floor {FLOORS[other]})"
        )


@pytest.mark.parametrize("path", [f for f in FILES if file_room(f) in PURE], ids=lambda p: str(p.relative_to(SRC)))
def test_decisions_are_pure(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & NOT_PURE
    calls = {
        n.func.id
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "eval", "exec"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_pickle_stays_inside_one_trust_boundary(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)} & UNSAFE
    assert not used or file_room(path) in MAY_PICKLE, f"{path.relative_to(SRC)} imports {used}"
    with path.open("rb") as f:
        names = [t.string for t in tokenize.tokenize(f.readline) if t.type == tokenize.NAME]
    assert "eval" not in names


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_import_penstock_loads_no_front_end_and_no_runtime() -> None:
    heavy = {"torch", "onnxruntime", "uvicorn", "starlette", "httptools", "redis", "grpc", "ray", "prometheus_client"}
    assert not loaded_by("import penstock") & {*heavy, "asyncio", "numpy", "click", "rich"}


def test_a_worker_child_loads_no_front_end() -> None:
    child = loaded_by("import penstock.transports.process, penstock.worker.main, penstock.protocols.native")
    assert not child & {
        "uvicorn",
        "starlette",
        "httptools",
        "click",
        "rich",
        "prometheus_client",
        "torch",
        "redis",
        "grpc",
    }


def test_the_inference_listener_loads_no_admin_server() -> None:
    assert not loaded_by("import penstock.frontends.http.server") & {"uvicorn", "starlette", "prometheus_client"}


def test_sizes_are_reported(record_property: Callable[[str, object], None]) -> None:
    sizes = {str(f.relative_to(SRC)): len(f.read_text().splitlines()) for f in FILES}
    for name, lines in sorted(sizes.items(), key=lambda kv: -kv[1])[:5]:
        record_property(name, lines)
    assert sizes
