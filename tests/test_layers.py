"""The plan of the house, kept: floors, purity, pickle, what an import loads. Sizes are reported, not judged."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
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
NO_CONCURRENCY = {"asyncio", "concurrent", "multiprocessing", "threading"}

IN_A_WORKER = {"errors", "types", "config", "plugins", "metrics", "native", "protocols", "models"}
SERVER_SIDE = {
    "asyncio", "click", "grpc", "httptools", "prometheus_client", "psutil", "redis", "rich", "starlette", "uvicorn",
}  # fmt: skip
RUNTIMES = {"captum", "numpy", "onnx", "onnxruntime", "PIL", "torch", "transformers", "yaml"}
FILES_OF_OTHERS = {"av", "cv2", "PIL", "pyarrow", "simplejpeg"}  # what reads and writes them
OTHER_CLIENTS = {"aiohttp", "http", "httpx", "requests", "urllib3"}
JOB = {"penstock.bulk", "penstock.client"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that an import statement names, with `from a import b` as `a.b`; typing-only ones too."""
    for node in ast.walk(tree(path)):
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
    assert not {name for name, _ in calls(path)} & {"open", "print", "input", "eval", "exec"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_pickle_stays_inside_one_trust_boundary(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)} & UNSAFE
    assert not used or file_room(path) in MAY_PICKLE, f"{path.relative_to(SRC)} imports {used}"
    with path.open("rb") as f:
        names = [t.string for t in tokenize.tokenize(f.readline) if t.type == tokenize.NAME]
    assert "eval" not in names


def calls(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Every call by its dotted name, with its keywords; a keyword that is no constant has its node."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            given = {k.arg: getattr(k.value, "value", k.value) for k in node.keywords if k.arg is not None}
            yield ast.unparse(node.func), given


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_of_others_are_read_by_what_runs_no_code(path: Path) -> None:
    for name, keywords in calls(path):
        if name == "torch.load":  # a variable: what the model's owner said of trust
            assert keywords.get("weights_only", False) is not False, "torch.load without weights_only"
        if name in ("np.load", "numpy.load"):
            assert not keywords.get("allow_pickle"), name
        assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), f"{name}: yaml.safe_load is meant"
        assert not name.endswith((".extractall", ".unpack_archive")), f"{name}: archive/safe_unpack.py is meant"
        assert not keywords.get("shell"), f"{name} asks a shell"
        assert name != "os.system"


@pytest.mark.parametrize(
    "path", [f for f in FILES if file_room(f) in ("archive", "config")], ids=lambda p: str(p.relative_to(SRC))
)
def test_archives_and_settings_are_read_in_the_thread_that_asks(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & NO_CONCURRENCY


TS = HOUSE / "compat" / "ts"


@pytest.mark.parametrize("path", sorted(TS.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_the_library_of_handlers_knows_only_what_a_worker_has(path: Path) -> None:
    ours = [
        name for name in imports(path) if name.startswith("penstock.") and not name.startswith("penstock.torchserve.ts")
    ]
    assert {room(name) for name in ours} <= IN_A_WORKER, ours


def test_nobody_imports_the_library_of_handlers_by_name() -> None:
    """It is found at run time, in workers that hold a handler."""
    others = [path for path in FILES if TS not in path.parents]
    assert not [p for p in others if any(name.startswith("penstock.torchserve.ts.") for name in imports(p))]


def loaded_by(statement: str) -> set[str]:
    """What the statement makes Python load: packages, and rooms of ours as `penstock.bulk`."""
    code = f"{statement}; import sys; print(*{{'.'.join(m.split('.')[:k]) for m in sys.modules for k in (1, 2)}})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.splitlines()[-1].split())


def test_import_penstock_loads_no_front_end_and_no_runtime() -> None:
    heavy = {"torch", "onnxruntime", "uvicorn", "starlette", "httptools", "redis", "grpc", "ray", "prometheus_client"}
    loaded = loaded_by("import penstock")
    assert not loaded & {*heavy, "asyncio", "numpy", "click", "rich", *JOB, *FILES_OF_OTHERS, *OTHER_CLIENTS}


def test_a_worker_child_loads_no_front_end() -> None:
    child = loaded_by(
        "import penstock.core.transports.process, penstock.core.worker.main, penstock.serving.protocols.native"
    )
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
        "transformers",
        "penstock.frontends",
        "penstock.engine",
        *JOB,
        *FILES_OF_OTHERS,
    }


def test_a_workers_captioner_loads_nothing_of_the_job_that_asks_it() -> None:
    """Nor a runtime, before it is loaded: a wrong configuration is told at once."""
    loaded = loaded_by(
        "import penstock.core.transports.child, penstock.bulk.captioner.model, penstock.serving.protocols.oip_binary"
    )
    assert not loaded & {*SERVER_SIDE, *(RUNTIMES - {"numpy"}), *JOB, *FILES_OF_OTHERS}


def test_the_help_of_a_bulk_job_loads_no_runtime_and_no_server() -> None:
    help_ = (
        "from click.testing import CliRunner; from penstock.cli.main import main;"
        " assert 'INPUT' in CliRunner().invoke(main, ['caption', '--help'], catch_exceptions=False).output"
    )
    loaded = loaded_by(help_)
    assert loaded > JOB
    assert not loaded & {*(RUNTIMES - {"numpy"}), *FILES_OF_OTHERS, *(SERVER_SIDE - {"asyncio", "click", "httptools"})}
    assert not loaded & {"penstock.engine", "penstock.frontends", "penstock.models", "penstock.transports"}


def test_a_server_loads_nothing_of_bulk_jobs() -> None:
    assert not loaded_by("import penstock.cli.server") & JOB


@pytest.mark.parametrize(
    "path", [f for f in FILES if file_room(f) in ("bulk", "client")], ids=lambda p: str(p.relative_to(SRC))
)
def test_a_bulk_job_has_one_way_to_a_server(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & OTHER_CLIENTS


def test_the_command_torchserve_loads_no_server() -> None:
    """`torchserve --stop` and `--version` answer at once."""
    assert not loaded_by("import penstock.torchserve.cli.torchserve") & {*(SERVER_SIDE - {"click"}), *RUNTIMES}


def test_a_server_in_the_place_of_torchserve_loads_no_runtime_and_no_admin_server() -> None:
    loaded = loaded_by("import penstock.torchserve.cli.server, penstock.cli.main")
    assert not loaded & {*(RUNTIMES - {"numpy"}), "grpc", "redis", "starlette", "uvicorn"}


def test_the_library_of_handlers_loads_no_runtime_by_its_base() -> None:
    handlers = "import penstock.core.transports.child, penstock.torchserve.handlers.handler, penstock.torchserve.protocol.codec"
    assert not loaded_by(f"{handlers}, penstock.torchserve.ts.torch_handler.base_handler") & {*SERVER_SIDE, *RUNTIMES}


def test_the_inference_listener_loads_no_admin_server() -> None:
    assert not loaded_by("import penstock.serving.http.server") & {"uvicorn", "starlette", "prometheus_client"}


def test_sizes_are_reported(record_property: Callable[[str, object], None]) -> None:
    sizes = {str(f.relative_to(SRC)): len(f.read_text().splitlines()) for f in FILES}
    for name, lines in sorted(sizes.items(), key=lambda kv: -kv[1])[:5]:
        record_property(name, lines)
    assert sizes
