"""Names to objects: "adaptive", "pkg.mod:Class", "app.py:obj". Imports only what is named."""

import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import threading
import traceback
import zlib
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError, LoadFailed, PenstockError, TargetNotFound, describe, install_hint, nearest

_loading = threading.RLock()

BUILTIN: dict[str, dict[str, str]] = {
    "codec": {
        "kserve": "penstock.serving.protocols.kserve:KServeCodec",
        "openai_chat": "penstock.serving.protocols.openai_text:ChatCodec",
        "openai_completions": "penstock.serving.protocols.openai_text:CompletionsCodec",
        "openai_embeddings": "penstock.serving.protocols.openai_embeddings:EmbeddingsCodec",
        "kserve_explain": "penstock.serving.protocols.kserve:KServeExplainCodec",
        "native": "penstock.serving.protocols.native:NativeCodec",
        "oip_binary": "penstock.serving.protocols.oip_binary:OipBinaryCodec",
        "oip_binary_coded": "penstock.serving.protocols.oip_binary:CodedBinaryCodec",
        "oip_generate": "penstock.serving.protocols.oip_generate:GenerateCodec",
        "oip_generate_stream": "penstock.serving.protocols.oip_generate:GenerateStreamCodec",
        "oip_grpc": "penstock.serving.protocols.oip_grpc:OipGrpcCodec",
        "oip_json": "penstock.serving.protocols.oip:OipJsonCodec",
        "oip_json_coded": "penstock.serving.protocols.oip_binary:CodedJsonCodec",
        "oip_npy": "penstock.serving.protocols.oip_binary:OipNpyCodec",
        "oip_npy_coded": "penstock.serving.protocols.oip_binary:CodedNpyCodec",
        "thrift": "penstock.torchpipe.thrift_protocol:ThriftCodec",
        "torchserve": "penstock.torchserve.protocol.codec:TorchServeCodec",
        "torchserve_inputs": "penstock.torchserve.protocol.codec:InputsCodec",
        "torchserve_raw": "penstock.torchserve.protocol.codec:RawCodec",
    },
    # where a bulk job decodes and sends
    "cluster": {"ray": "penstock.ray.captions:RayCaptions"},
    # what servers of captioners take and return
    "caption-backend": {
        "openai": "penstock.bulk.chat:ChatBackend",
        "penstock": "penstock.bulk.servers:PenstockBackend",
    },
    # opens targets other than Python code: model files, pipeline files, torch.nn.Module; a `predict` of tensors; and
    # `preprocess` in processes of its own
    "runtime": {
        "file": "penstock.runtimes.files:file_model",
        "module": "penstock.runtimes.files:module_model",
        "arrays": "penstock.runtimes.torch_arrays:torch_arrays",
        "pipeline": "penstock.pipeline.model:PipelineModel",
        "preprocess": "penstock.runtimes.preprocess:PreprocessPool",
    },
    # functions that recognise a TOML file of a model by its tables; any other file is a configuration
    "toml": {"pipeline": "penstock.pipeline.notation:is_pipeline"},
    # further notations of pipelines' files
    "dialect": {"torchpipe": "penstock.torchpipe.dialect:DIALECT"},
    "policy": {
        "adaptive": "penstock.core.batching.policies.adaptive:Adaptive",
        "fixed": "penstock.core.batching.policies.fixed:Fixed",
        "none": "penstock.core.batching.policies.fixed:Unbatched",
    },
    "transport": {
        "inline": "penstock.core.transports.local:InlineTransport",
        "thread": "penstock.core.transports.local:ThreadTransport",
        "process": "penstock.core.transports.process:ProcessTransport",
        "ray": "penstock.ray.transport:RayTransport",
    },
}


def resolve(kind: str, name: str) -> Any:
    """The plugin of a kind ("codec", "transport" ...) with this name.

    A built-in name, "pkg.mod:obj", or an entry point of the group `penstock.<kind>`. Raises ConfigError.
    """
    known = BUILTIN.get(kind, {})
    if name in known:
        return load_object(known[name])
    if ":" in name:
        return load_object(name)
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=f"penstock.{kind}")}
    if name in found:
        return found[name].load()
    names = sorted({*known, *found})
    raise ConfigError(
        f"unknown {kind} '{name}'{nearest(name, names)} Known: {', '.join(names) or 'none'}; or give pkg.mod:obj"
    )


MODEL_FILES = (".onnx", ".pt", ".pt2", ".pth", ".ts")


def optional_module(name: str, need: str, extra: str, error: type[PenstockError] = ConfigError) -> ModuleType:
    """The module of an optional package. Raises `error` with the need and the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        missing = isinstance(e, ModuleNotFoundError) and e.name == name.partition(".")[0]
        raise error(f"{need}{'' if missing else f' ({describe(e)})'}: {install_hint(extra)}") from e


def is_model_file(target: str) -> bool:
    """Whether a target is a model file, such as `model.onnx`; a target with a colon names an object instead."""
    return target.lower().endswith(MODEL_FILES) and ":" not in target.rpartition("/")[2]


def is_pipeline_file(target: str) -> bool:
    """Whether a target is a pipeline file, such as `resnet50.toml`."""
    return target.lower().endswith(".toml") and ":" not in target.rpartition("/")[2]


def is_whole_file(target: str) -> bool:
    """Whether a target is a whole file and names no object in it."""
    return is_model_file(target) or is_pipeline_file(target)


def load_object(spec: str, module: str = "") -> object:
    """The object at "pkg.mod:obj" or "path/app.py:obj" (dots reach into it).

    `module` is the module name for a file, if not its own. Raises TargetNotFound if the file, module or object does
    not exist, LoadFailed if the module raises.
    """
    where, colon, path = spec.rpartition(":")
    if not colon or not where or not path:
        raise TargetNotFound(f"target '{spec}' names no object: write app.py:Model or pkg.mod:Model")
    found: Any
    if where.endswith(".py") or "/" in where:
        with _loading:  # other threads must not see a module that is still loading
            found = _from_file(where, path, module)
    else:
        found = _from_package(where, path)
    for name in path.split("."):
        if not hasattr(found, name):
            names = candidates(found)
            listed = f"it has: {', '.join(names)}" if names else "it defines no function or class"
            raise TargetNotFound(f"'{where}' has no '{path}'{nearest(name, names)} ({listed})")
        found = getattr(found, name)
    return found


def loaded_class(module: str, name: str) -> type | None:
    """The class of this name in a module that this process has imported. Imports nothing and runs no code of it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name) else None


def candidates(owner: Any) -> list[str]:
    """The names of functions and classes that a module defines itself, and of instances with `predict`."""
    module = owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", "")
    return sorted(
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (
            ((inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module)
            or callable(getattr(value, "predict", None))
        )
    )


FILE_MODULE = f"{__name__}."
__path__: list[str] = []  # the modules of files that cannot have their own names are below this one
_FILES = "_PENSTOCK_FILES"  # in the environment: where these files are


class _FileFinder:
    """Finds such a module in a process that did not load its file, such as one of a model's spawn pool."""

    @staticmethod
    def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        file = json.loads(os.environ.get(_FILES, "{}")).get(name)
        return importlib.util.spec_from_file_location(name, file) if file else None


sys.meta_path.append(_FileFinder)


def module_name(file: Path) -> str:
    """A unique module name for a file."""
    return f"{FILE_MODULE}{file.stem.replace('.', '_')}_{zlib.crc32(bytes(str(file), 'utf-8')):08x}"


def _own_name(file: Path) -> bool:
    """Whether a file can be loaded under its own name, so that other processes find its definitions.

    False if another module has this name: a user's `code.py` must not replace the standard library's.
    """
    if not file.stem.isidentifier() or file.stem in sys.modules or file.stem in sys.stdlib_module_names:
        return False
    elsewhere = [path for path in sys.path if Path(path).resolve() != file.parent]
    return importlib.machinery.PathFinder.find_spec(file.stem, elsewhere) is None


def located(path: str | Path) -> Path:
    """The absolute path of a file. A link leads to its file, unless that has another name.

    In the cache of a hub every file is a link to its digest: suffix and neighbours are those of the link.
    """
    link = Path(os.path.abspath(Path(path).expanduser()))
    file = link.resolve()
    return file if file.name == link.name else link


def _from_file(where: str, path: str, name: str) -> ModuleType:
    file = located(where)
    if not file.is_file():
        raise TargetNotFound(f"target '{where}:{path}': there is no file {where}")
    for known in (name, module_name(file), file.stem):
        module = sys.modules.get(known)
        if module is not None and getattr(module, "__file__", None) == str(file):
            return module
    name = name or (file.stem if _own_name(file) else module_name(file))
    folder = str(file.parent)
    if file.stem in sys.stdlib_module_names:  # a process that the model spawns must find Python's own module first
        sys.path[:] = [*(path for path in sys.path if path != folder), folder]
    elif folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TargetNotFound(f"target '{where}:{path}': {where} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name.startswith(FILE_MODULE):
        os.environ[_FILES] = json.dumps({**json.loads(os.environ.get(_FILES, "{}")), name: str(file)})
    try:
        spec.loader.exec_module(module)
    except BaseException as e:
        del sys.modules[name]
        if isinstance(e, Exception):
            raise _load_failed(where, e) from e
        raise
    return module


def _from_package(where: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name and (where == e.name or where.startswith(e.name + ".")):
            raise TargetNotFound(
                f"target '{where}:{path}': there is no module '{e.name}'; for a file write {e.name}.py:{path}"
            ) from e
        raise _load_failed(where, e) from e
    except Exception as e:
        raise _load_failed(where, e) from e


def _load_failed(where: str, error: Exception) -> LoadFailed:
    text = "".join(traceback.format_exception(error))
    return LoadFailed(f"importing {where} raised {describe(error)}{raised_at(error)}", detail=text)


def raised_at(error: BaseException) -> str:
    """`" (app.py, line 3)"`: the innermost line of user code in the error's traceback, or ""."""
    if isinstance(error, SyntaxError):  # its text already contains the line
        return ""
    others = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def make_importable(name: str, package: str, modules: Mapping[str, str] | None = None) -> None:
    """Lets `import name` find `package`, unless a package of that name is installed.

    Both names give the same module object. `modules` lists the importable submodules, {"metrics.unit": "metrics"}, with
    "" for the package itself; None makes every submodule importable by its own name.
    """
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        # First, because other finders would find the package's files and load each a second time.
        sys.meta_path.insert(0, _Finder(name, package, modules))


def installed(name: str) -> bool:
    """Whether a package of this name is on the path of this process; a plain folder does not count."""
    found = PathFinder.find_spec(name)
    return found is not None and found.loader is not None


class _Finder(MetaPathFinder):
    def __init__(self, name: str, package: str, modules: Mapping[str, str] | None) -> None:
        self.name, self._package, self._modules = name, package, modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self.name:
            return None if installed(self.name) else ModuleSpec(fullname, _Alias(self._package))
        if not fullname.startswith(self.name + ".") or sys.modules.get(self.name) is not sys.modules.get(self._package):
            return None
        module = fullname.removeprefix(self.name + ".")
        if self._modules is not None:
            if any(known.startswith(f"{module}.") for known in self._modules):
                return ModuleSpec(fullname, None, is_package=True)  # a namespace package
            if module not in self._modules:  # other finders would load our files under this name
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
            module = self._modules[module]
        real = f"{self._package}.{module}" if module else self._package
        return None if importlib.util.find_spec(real) is None else ModuleSpec(fullname, _Alias(real))


class _Alias(Loader):
    """Returns the existing module of another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it with the alias's
