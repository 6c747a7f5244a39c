"""The program of a Python model whose `predict` receives tensors: `arrays = "torch"`.

On a CUDA device it has three phases, like a model file: the tensors are on their way there while the batch before them
runs, and the results are fetched while the next one runs. So `predict` must neither copy nor wait.
"""

import inspect
from collections.abc import Callable
from typing import Any

from penstock.core.worker.array_model import by_name
from penstock.core.worker.tensor_model import Input, Program
from penstock.errors import BadOutput, LoadFailed
from penstock.runtimes.torch import TorchProgram, on_device
from penstock.runtimes.torch_files import import_torch
from penstock.types import DATATYPES, TensorSpec

_REFUSED = ("BYTES", "FP16", "BF16")  # of outputs: half precision is answered as FP32


def torch_arrays(
    predict: Callable[..., Any],
    inputs: tuple[Input, ...],
    outputs: tuple[TensorSpec, ...],
    device: str,
    unbatched: bool,
) -> Program:
    """The program of `predict(**tensors)` on its device. `unbatched`: axis 0 cannot be rows. Raises LoadFailed."""
    if inspect.iscoroutinefunction(predict):
        raise LoadFailed('arrays = "torch": predict is async; expected a plain function, which only launches kernels')
    for spec in inputs:
        if spec.datatype == "BYTES":
            raise LoadFailed(f"arrays = \"torch\": input '{spec.name}' is BYTES, but PyTorch has no tensors of text")
    for output in outputs:
        if output.datatype in _REFUSED:
            raise LoadFailed(f"arrays = \"torch\": output '{output.name}' is {output.datatype}; declare FP32")
    program = TorchProgram(
        CheckedPredict(predict, outputs, device),
        device,
        inputs,
        platform="python",
        keywords=frozenset(spec.name for spec in inputs),
        outputs=outputs,
        unbatched=unbatched,
    )
    return on_device(program, device)


class CheckedPredict:
    """Calls `predict`, and checks that it returns the declared tensors on the device."""

    def __init__(self, predict: Callable[..., Any], outputs: tuple[TensorSpec, ...], device: str) -> None:
        torch = import_torch()
        self._tensor, self._halves = torch.Tensor, (torch.float16, torch.bfloat16)
        self._predict, self._device = predict, torch.device(device)
        self._outputs = {spec.name: spec for spec in outputs}

    def __call__(self, **tensors: Any) -> dict[str, Any]:
        """Raises what `predict` raises, and BadOutput."""
        found = by_name(self._predict(**tensors), list(self._outputs))
        return {name: self._checked(name, value) for name, value in found.items()}

    def _checked(self, name: str, value: Any) -> Any:
        if not isinstance(value, self._tensor):
            raise BadOutput(
                f"output '{name}': predict returned a {type(value).__name__}, expected a tensor on {self._device}"
            )
        if value.device != self._device:
            raise BadOutput(
                f"output '{name}': predict returned a tensor on {value.device}, expected one on {self._device}:"
                " return it without a copy, it is fetched for you"
            )
        spec = self._outputs.get(name)
        if spec is not None:
            datatype = "FP32" if value.dtype in self._halves else DATATYPES.get(str(value.dtype).removeprefix("torch."))
            shape = (-1, *spec.shape[1:])
            fits = len(shape) == value.ndim and all(w in (-1, n) for w, n in zip(shape, value.shape, strict=True))
            if not fits or datatype != spec.datatype:
                raise BadOutput(
                    f"output '{name}': predict returned {datatype or value.dtype} {list(value.shape)}, but the model"
                    f" declares {spec.datatype} {list(shape)}"
                )
        return value.contiguous()
