"""The architecture's rules: layers, purity, pickle, safe readers, and what an import loads. One test per rule."""

import ast
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "penstock"
FILES = sorted(PACKAGE.rglob("*.py"))

# A file may import from its own entry and from the rows above its own. docs/architecture.md shows this table.
LAYERS = (
    ("backoff", "errors", "images", "types", "plugins", "metrics", "request", "runs", "tracing", "values", "_version"),
    ("config",),
    ("core.contracts", "core.os_threads", "core.arrays", "core.readings"),
    ("core.codecs", "core.columns"),
    ("core.batching", "core.wire"),
    ("core.worker",),
    ("core.transports",),
    ("core.engine",),
    ("core.portal",),
    ("runtimes", "serving.protocols", "serving.http2", "serving.process"),
    ("client", "serving.observe"),
    ("serving.triton",),
    ("serving.http",),
    ("serving.grpc",),
    ("streamer", "pipeline", "bulk", "perf"),
    ("ray",),
    ("torchserve",),
    ("torchpipe",),
    ("platforms",),
    ("cli", "testing", "__main__"),
)
ROW = {entry: row for row, entries in enumerate(LAYERS) for entry in entries}
SUBSYSTEMS = ("streamer", "pipeline", "bulk", "perf", "ray", "torchserve", "torchpipe")
BETWEEN_SUBSYSTEMS = {("torchpipe", "pipeline"), ("torchserve", "pipeline"), ("ray", "bulk")}
WITHIN_A_ROW = {*LAYERS[0], *LAYERS[-1]}
PUBLIC_API_USERS = ("cli.demo",)  # they import the names that users import

PURE = ("core.batching", "serving.protocols", "serving.http2", "torchserve.protocol", "torchpipe.thrift_protocol")
IMPURE_MODULES = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select",
    "selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uvloop",
}  # fmt: skip
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
# between a process and its own child, over a private socketpair; over a broker that the program trusts explicitly;
# between processes of one user, over a socket that only this user can reach
MAY_PICKLE = ("core.transports", "core.wire", "streamer.redis.pickles", "streamer.shared.protocol")
CONCURRENCY = {"asyncio", "concurrent", "multiprocessing", "threading"}

LOADED_IN_A_WORKER = (
    *LAYERS[0],
    "config",
    "core",
    "serving.protocols",
    "runtimes",
    "torchserve.protocol",
    "torchserve.ts",
    "torchserve.handlers",
    "torchserve.sequence_headers",  # a function of the package itself
)
SERVER_SIDE = {
    "asyncio", "click", "grpc", "hpack", "httptools", "hyperframe", "prometheus_client", "psutil", "redis", "rich",
    "starlette", "uvicorn",
}  # fmt: skip
RUNTIMES = {"captum", "numpy", "onnx", "onnxruntime", "PIL", "torch", "transformers", "yaml"}
MEDIA_LIBRARIES = {"av", "cv2", "PIL", "pyarrow", "simplejpeg"}
HTTP_CLIENTS = {"aiohttp", "http", "httpx", "requests", "urllib3"}
BULK = {"penstock.bulk", "penstock.client"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that an import statement names, with `from a import b` as `a.b`; typing-only imports too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Every call by its dotted name, with its keywords; a keyword that is not a constant has its node."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            given = {k.arg: getattr(k.value, "value", k.value) for k in node.keywords if k.arg is not None}
            yield ast.unparse(node.func), given


def name_of(path: Path) -> str:
    """The module of a file, without `penstock.`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def inside(module: str, entries: tuple[str, ...]) -> bool:
    return any(module == entry or module.startswith(entry + ".") for entry in entries)


def entry_of(module: str) -> str | None:
    """The entry of the layer table that a module belongs to."""
    parts = module.split(".")
    return next((e for k in range(len(parts), 0, -1) if (e := ".".join(parts[:k])) in ROW), None)


def files_in(*entries: str) -> list[Path]:
    return [path for path in FILES if inside(name_of(path), entries)]


def edges() -> Iterator[tuple[str, str]]:
    """(importing module, imported module), both without `penstock.`; the package root is left out."""
    for path in FILES:
        if path.parent != PACKAGE or path.name != "__init__.py":
            yield from (
                (name_of(path), x.removeprefix("penstock.")) for x in imports(path) if x.startswith("penstock.")
            )


def test_every_file_has_a_layer() -> None:
    known = {entry.split(".")[0] for entry in ROW}
    lost = [m for m in map(name_of, FILES) if m and m != "__init__" and entry_of(m) is None and m not in known]
    assert not lost, f"add these to LAYERS and to docs/architecture.md: {lost}"
    assert not [e for e in ROW if not files_in(e)], "a layer without files"


def test_imports_point_down() -> None:
    wrong = []
    for importer, imported in edges():
        mine, other = entry_of(importer), entry_of(imported)
        if other is None:  # a public name such as penstock.Response
            allowed = inside(importer, PUBLIC_API_USERS)
        else:
            assert mine is not None, importer
            sideways = ROW[other] == ROW[mine] and {mine, other} <= WITHIN_A_ROW
            allowed = mine == other or ROW[other] < ROW[mine] or sideways
        if not allowed:
            wrong.append(f"{importer} -> {imported}")
    assert not wrong, "\n".join(wrong)


def test_subsystems_do_not_import_each_other() -> None:
    wrong = []
    for importer, imported in edges():
        pair = importer.split(".")[0], imported.split(".")[0]
        if pair[0] != pair[1] and set(pair) <= set(SUBSYSTEMS) and pair not in BETWEEN_SUBSYSTEMS:
            wrong.append(f"{importer} -> {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    """Between files, at the top level of modules; imports for type checkers count too."""
    modules = {name_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in top_level_imports(path):
            parts = name.removeprefix("penstock.").split(".")
            found = next((m for k in (len(parts), len(parts) - 1) if (m := ".".join(parts[:k])) in modules), None)
            if found is not None and found != module:
                graph[module].add(found)
    cycles = [c for c in strongly_connected(graph) if len(c) > 1]
    assert not cycles, cycles


def top_level_imports(path: Path) -> Iterator[str]:
    """Our own modules that a file imports, without the imports inside functions."""
    body = list(tree(path).body)
    while body:
        node = body.pop()
        if isinstance(node, ast.If):
            body += node.body + node.orelse
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("penstock."))


def strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            cut = stack.index(node)
            found.append(stack[cut:])
            del stack[cut:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_decisions_are_pure() -> None:
    wrong = []
    for path in files_in(*PURE):
        wrong += [f"{path.name} imports {m}" for m in {x.split(".")[0] for x in imports(path)} & IMPURE_MODULES]
        wrong += [
            f"{path.name} calls {n}" for n in {n for n, _ in calls(path)} & {"open", "print", "input", "eval", "exec"}
        ]
    assert not wrong, "\n".join(wrong)


def test_core_and_http_name_no_codec() -> None:
    """What they must know of a codec, the codec declares."""
    from penstock.plugins import BUILTIN

    wrong = []
    for path in files_in("core", "serving.http"):
        named = {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant)} & set(BUILTIN["codec"])
        wrong += [f"{name_of(path)}: {name}" for name in named]
    assert not wrong, wrong


def test_pickle_stays_inside_one_trust_boundary() -> None:
    wrong = []
    for path in FILES:
        used = {name.split(".")[0] for name in imports(path)} & UNSAFE
        if used and not inside(name_of(path), MAY_PICKLE):
            wrong.append(f"{name_of(path)} imports {used}")
        with path.open("rb") as f:
            if "eval" in [t.string for t in tokenize.tokenize(f.readline) if t.type == tokenize.NAME]:
                wrong.append(f"{name_of(path)} uses eval")
    assert not wrong, "\n".join(wrong)


def test_untrusted_files_are_read_without_running_code() -> None:
    wrong = []
    for path in FILES:
        for name, keywords in calls(path):
            bad = (
                # a variable holds the trust that the model's owner configured
                (name == "torch.load" and keywords.get("weights_only", False) is False)
                or (name in ("np.load", "numpy.load") and keywords.get("allow_pickle"))
                or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system")
                or name.endswith((".extractall", ".unpack_archive"))
                or keywords.get("shell")
            )
            if bad:
                wrong.append(f"{name_of(path)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_archives_and_configuration_are_read_in_the_calling_thread() -> None:
    files = files_in("torchserve.archive", "torchserve.config", "config")
    assert not [p for p in files if {name.split(".")[0] for name in imports(p)} & CONCURRENCY]


def test_the_handler_library_imports_only_what_a_worker_loads() -> None:
    ours = {x for p in files_in("torchserve.ts") for x in imports(p) if x.startswith("penstock.")}
    assert not [x for x in ours if not inside(x.removeprefix("penstock."), LOADED_IN_A_WORKER)]


def test_nothing_imports_the_handler_library_by_name() -> None:
    """It is found at run time, in workers that hold a handler."""
    assert not [(a, b) for a, b in edges() if inside(b, ("torchserve.ts",)) and not inside(a, ("torchserve.ts",))]


def test_bulk_jobs_reach_servers_through_our_client_only() -> None:
    assert not [p for p in files_in("bulk", "client") if {x.split(".")[0] for x in imports(p)} & HTTP_CLIENTS]


def loaded_by(statement: str) -> set[str]:
    """What the statement makes Python load, as names of up to three parts such as `penstock.serving.http`."""
    code = f"{statement}; import sys; print(*{{'.'.join(m.split('.')[:k]) for m in sys.modules for k in (1, 2, 3)}})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.splitlines()[-1].split())


def test_import_penstock_loads_no_front_end_and_no_runtime() -> None:
    heavy = {
        "torch",
        "onnxruntime",
        "uvicorn",
        "starlette",
        "httptools",
        "hpack",
        "redis",
        "grpc",
        "ray",
        "prometheus_client",
    }
    loaded = loaded_by("import penstock")
    assert not loaded & {*heavy, "asyncio", "numpy", "click", "rich", *BULK, *MEDIA_LIBRARIES, *HTTP_CLIENTS}


def test_a_client_loads_no_server_and_nothing_for_arrays_before_it_sends_them() -> None:
    loaded = loaded_by("import penstock; penstock.Client('http://127.0.0.1:1').close(); penstock.AsyncClient")
    assert not loaded & {*(SERVER_SIDE - {"asyncio", "httptools"}), *RUNTIMES, *HTTP_CLIENTS, "google"}
    engine = {f"penstock.core.{name}" for name in ("batching", "transports", "worker", "wire")}
    assert not loaded & {"penstock.serving.http", "penstock.serving.grpc", "penstock.runtimes", *engine}
    assert not {m for m in loaded if m.startswith("penstock.serving.protocols.oip")}


def test_a_worker_child_loads_no_front_end() -> None:
    modules = "penstock.core.transports.process, penstock.core.worker.main, penstock.serving.protocols.native"
    assert not loaded_by(f"import {modules}, penstock.ray.actor") & {
        *("uvicorn", "starlette", "httptools", "click", "rich", "prometheus_client", "torch", "redis", "grpc"),
        *("transformers", "penstock.serving.http", "penstock.core.engine", *BULK, *MEDIA_LIBRARIES),
    }


def test_a_captioner_in_a_worker_loads_nothing_of_the_bulk_job() -> None:
    """Nor a runtime before the model loads, so that a wrong configuration fails at once."""
    child = "penstock.core.transports.child, penstock.bulk.captioner.model, penstock.serving.protocols.oip_binary"
    loaded = loaded_by(f"import {child}")
    jobs = {m for m in loaded if m.startswith(("penstock.bulk.", "penstock.client"))} - {"penstock.bulk.captioner"}
    assert not jobs
    assert not loaded & {*SERVER_SIDE, *(RUNTIMES - {"numpy"}), *MEDIA_LIBRARIES}


def test_the_help_of_a_bulk_job_loads_no_runtime_and_no_server() -> None:
    help_ = (
        "from click.testing import CliRunner; from penstock.cli.main import main;"
        " assert 'INPUT' in CliRunner().invoke(main, ['caption', '--help'], catch_exceptions=False).output"
    )
    loaded = loaded_by(help_)
    assert loaded > BULK
    assert not loaded & {*(RUNTIMES - {"numpy"}), *MEDIA_LIBRARIES, *(SERVER_SIDE - {"asyncio", "click", "httptools"})}
    server = {"penstock.core.engine", "penstock.serving.http", "penstock.runtimes", "penstock.core.transports"}
    assert not loaded & server


def test_a_server_loads_nothing_of_bulk_jobs() -> None:
    assert not loaded_by("import penstock.cli.server") & BULK


def test_the_torchserve_command_loads_no_server() -> None:
    """`torchserve --stop` and `--version` answer at once."""
    assert not loaded_by("import penstock.torchserve.cli.torchserve") & {*(SERVER_SIDE - {"click"}), *RUNTIMES}


def test_the_torchserve_server_loads_no_runtime_and_no_admin_server() -> None:
    loaded = loaded_by("import penstock.torchserve.cli.server, penstock.cli.main")
    assert not loaded & {*(RUNTIMES - {"numpy"}), "grpc", "redis", "starlette", "uvicorn"}


def test_the_base_of_the_handler_library_loads_no_runtime() -> None:
    modules = "penstock.core.transports.child, penstock.torchserve.handlers.handler, penstock.torchserve.protocol.codec"
    loaded = loaded_by(f"import {modules}, penstock.torchserve.ts.base_handler")
    assert not loaded & {*SERVER_SIDE, *RUNTIMES}


def test_every_http_port_is_served_by_our_own_bounded_listener() -> None:
    others = {"aiohttp", "fastapi", "flask", "http.server", "socketserver", "starlette", "uvicorn", "wsgiref"}
    assert not [p for p in FILES if any(inside(x, tuple(others)) for x in imports(p))]
    assert "prometheus_client" not in loaded_by("import penstock.serving.http.server")
