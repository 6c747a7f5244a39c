"""PyTorch files (TorchScript, exported programs, state dicts, whole modules): their kinds, and how they are read.

`torch.load(weights_only=True)`, which runs no code, reads pickles in files unless the model's configuration has
`trust = "pickle"`.
"""

import inspect
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from penstock.errors import LoadFailed, describe
from penstock.plugins import optional_module

_exported_lock: Final = threading.Lock()  # `torch.export.load` keeps its state in a global variable


def import_torch() -> Any:
    """The module `torch`. Raises LoadFailed, which names the extra to install."""
    return optional_module("torch", "PyTorch cannot be imported", "torch", LoadFailed)


def kind_of(path: str) -> str:
    """The kind of a PyTorch file, by its content: "script", "exported" or "pickled" (a state dict, a whole module).

    Raises LoadFailed for a missing or unreadable file.
    """
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                return "pickled"  # the format of torch.save before 1.6
            with zipfile.ZipFile(file) as archive:
                names = {name.partition("/")[2] or name for name in archive.namelist()}
    except FileNotFoundError:
        raise LoadFailed(f"there is no file {path}") from None
    except (OSError, zipfile.BadZipFile) as e:
        raise LoadFailed(f"{path} cannot be read: {describe(e)}") from e
    if "constants.pkl" in names:
        return "script"
    # `torch.export.save` since 2.6, and before
    exported = "archive_format" in names or any("serialized_exported_program" in name for name in names)
    return "exported" if exported else "pickled"


def load_module(path: str, device: str = "cpu", *, trust: str = "none") -> Any:
    """The module in a TorchScript file or an exported program, in evaluation mode on `device`.

    A whole pickled module needs `trust` "pickle". Raises LoadFailed.
    """
    torch = import_torch()
    kind = kind_of(path)
    if kind == "script":
        return load_script(path, device)
    if kind == "exported":
        return load_exported(path, device).module()
    found = load_pickled(path, device, trust=trust)
    if isinstance(found, torch.nn.Module):
        return found.to(device).train(False)
    holds = "a state dict" if isinstance(found, Mapping) else f"a {type(found).__name__}"
    raise LoadFailed(
        f"{path} holds {holds}, not a program: name its class too, target = 'net.py:Net' with weights = '{path}'"
    )


def load_script(path: str, device: str = "cpu") -> Any:
    """The TorchScript module in a file, in evaluation mode. Raises LoadFailed."""
    torch = import_torch()
    with quiet():
        try:
            return torch.jit.load(path, map_location=torch.device(device)).train(False)
        except (RuntimeError, ValueError) as e:
            raise _unreadable(path, "a TorchScript program", torch, e) from e


def load_exported(path: str, device: str = "cpu") -> Any:
    """The ExportedProgram in a file, moved to `device`. Raises LoadFailed."""
    torch = import_torch()
    with quiet(), _exported_lock:
        try:
            program = torch.export.load(path)
            if torch.device(device).type != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
        except Exception as e:  # from the archive, its JSON, or an unknown operator
            raise _unreadable(path, "an exported program", torch, e) from e
    return program


def load_pickled(path: str, device: str = "cpu", *, trust: str = "none") -> Any:
    """The object in a file of `torch.save` or safetensors, usually a state dict. Raises LoadFailed."""
    torch = import_torch()
    try:
        if path.endswith(".safetensors"):
            return _safetensors(path, device)
        return torch.load(path, map_location=torch.device(device), weights_only=trust != "pickle")
    except FileNotFoundError:
        raise LoadFailed(f"there is no file {path}") from None
    except LoadFailed:
        raise
    except Exception as e:  # a damaged pickle may raise anything
        if trust != "pickle" and "GLOBAL" in str(e):
            raise LoadFailed(
                f"{path} holds more than tensors, and loading it may run any code: save the state dict"
                ' (torch.save(model.state_dict(), ...)), or set trust = "pickle" if you trust the author of the file',
                detail=str(e),
            ) from e
        raise LoadFailed(
            f"{path} is damaged, or not a torch.save file that PyTorch {torch.__version__} can read", detail=str(e)
        ) from e


def _safetensors(path: str, device: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise LoadFailed(f"{path} needs safetensors, which is not installed: pip install safetensors") from None
    return load_file(path, device=device)


def load_weights(module: Any, path: str, device: str = "cpu", *, trust: str = "none") -> Any:
    """The module with all weights of a state dict file, on `device`, in evaluation mode.

    `module` is an `nn.Module` or its class, which is called without arguments. Raises LoadFailed.
    """
    module = instance_of(module)
    state = load_pickled(path, device, trust=trust)
    for key in ("state_dict", "model_state_dict", "model"):  # a checkpoint of Lightning, or of a training loop
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping) and key not in module.state_dict():
            state = state[key]
    if not isinstance(state, Mapping):
        raise LoadFailed(f"{path} holds a {type(state).__name__}, expected a state dict")
    try:
        module.load_state_dict(_unwrapped(state, module))
    except (RuntimeError, TypeError, AttributeError) as e:
        text = " ".join(str(e).split())[:500]
        raise LoadFailed(f"the weights in {path} do not fit {type(module).__name__}: {text}") from e
    return module.to(device).train(False)


def _unwrapped(state: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The state dict without the prefixes of DataParallel and `torch.compile`, unless the module itself has them."""
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):
        wrapped = state and all(name.startswith(prefix) for name in state)
        if wrapped and not any(name.startswith(prefix) for name in module.state_dict()):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def instance_of(module: Any) -> Any:
    """The module; of a class, an instance made without arguments. Raises LoadFailed."""
    if not inspect.isclass(module):
        return module
    try:
        return module()
    except TypeError as e:
        raise LoadFailed(
            f"{module.__name__} cannot be instantiated without arguments: {e}; name an instance of it"
        ) from e


def _unreadable(path: str, what: str, torch: Any, error: Exception) -> LoadFailed:
    return LoadFailed(f"{path} cannot be loaded as {what} by PyTorch {torch.__version__}: {describe(error)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the warning that TorchScript is deprecated, which the user of such a file cannot act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\..*` is (deprecated|not supported)", DeprecationWarning)
        yield
