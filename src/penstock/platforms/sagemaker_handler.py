"""The handler for SageMaker's scripts: `model_fn`, `input_fn`, `predict_fn` and `output_fn`, or `transform_fn`.

A script is `code/inference.py` in the model's folder. What it leaves out works as in SageMaker's PyTorch toolkit,
except that an error's traceback stays in the log, `.npy` bodies hold no pickles, and each request of a batch has a
context of its own. Source: sagemaker-inference 1.10, sagemaker-pytorch-inference 2.0.
"""

import importlib
import importlib.util
import inspect
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from penstock.core.arrays import plain_array
from penstock.errors import BadRequest, LoadFailed, out_of_memory
from penstock.platforms import read_sagemaker
from penstock.plugins import load_object
from penstock.runtimes.torch_files import import_torch, load_module
from penstock.serving.protocols.oip_binary import read_npy, read_npy_head
from penstock.torchserve.handlers.entry import LIBRARY
from penstock.torchserve.protocol.api import error_body
from penstock.torchserve.protocol.codec import media_type

log = logging.getLogger("penstock.platforms")

Step = Callable[..., Any]  # receives the context, then its arguments

JSON: Final = "application/json"
CSV: Final = "text/csv"
NPY: Final = "application/x-npy"
SCRIPT: Final = "inference.py"
ARGUMENTS: Final = {  # of the functions of a script, which may take the context after them
    "pre_model_fn": 1,  # model_dir
    "model_fn": 1,  # model_dir
    "model_warmup_fn": 2,  # model_dir, model
    "transform_fn": 4,  # model, body, content_type, accept
    "input_fn": 2,  # body, content_type
    "predict_fn": 2,  # data, model
    "output_fn": 2,  # prediction, accept
}


class SageMaker:
    """Runs one script, request by request."""

    def initialize(self, context: Any) -> None:
        """Loads the script and the model. Raises LoadFailed, and the errors of the script."""
        environment = read_sagemaker(os.environ)
        self._context_of: Any = load_object(f"{LIBRARY}.context:context_of")
        self._default_accept = environment.default_accept
        model_dir = context.system_properties["model_dir"]
        script = _script(os.path.join(model_dir, "code"), environment.program)
        own = {name: getattr(script, name) for name in ARGUMENTS if hasattr(script, name)}
        steps = own.keys() & {"input_fn", "predict_fn", "output_fn"}
        if "transform_fn" in own and steps:
            raise LoadFailed(f"the script has transform_fn and {', '.join(sorted(steps))}; remove one or the other")
        functions = {"model_fn": _load, "input_fn": _input, "predict_fn": _predict, "output_fn": _output, **own}
        self._steps = {name: _step(function, ARGUMENTS[name]) for name, function in functions.items()}
        if "pre_model_fn" in own:
            self._steps["pre_model_fn"](context, model_dir)
        model = self._steps["model_fn"](context, model_dir)
        self._model = model if own.keys() & {"transform_fn", "predict_fn"} else _placed(model)
        if "model_warmup_fn" in own:
            self._steps["model_warmup_fn"](context, model_dir, self._model)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """The responses, as bytes or text. Raises errors that mean a lack of memory; others become responses."""
        return [self._response(data[i], self._context_of(context, i)) for i in range(len(data))]

    def _response(self, row: dict[str, Any], context: Any) -> Any:
        content_type = context.get_request_header(0, "content-type") or ""
        accept = context.get_request_header(0, "accept") or "*/*"
        if accept == "*/*":
            accept = self._default_accept
        try:
            body: Any = bytes(row.get("body", b""))
            if media_type(content_type) in (JSON, CSV):
                body = _text(body)
            result = self._transform(context, body, content_type, accept)
        except Exception as e:
            if out_of_memory(e):
                raise
            return _error(e, context)
        data, kind = result if isinstance(result, tuple) else (result, accept)
        context.set_response_content_type(0, kind)
        return data

    def _transform(self, context: Any, body: Any, content_type: str, accept: str) -> Any:
        steps = self._steps
        if "transform_fn" in steps:
            return steps["transform_fn"](context, self._model, body, content_type, accept)
        data = steps["input_fn"](context, body, content_type)
        prediction = steps["predict_fn"](context, data, self._model)
        return steps["output_fn"](context, prediction, accept)


def _script(folder: str, program: str | None) -> ModuleType:
    """The script, or an empty module if there is none. Raises LoadFailed, and the script's errors."""
    name = (program or SCRIPT).removesuffix(".py")
    if not os.path.isfile(os.path.join(folder, f"{name}.py")):
        if program is not None:
            raise LoadFailed(f"SAGEMAKER_PROGRAM: found no {program} in the folder 'code' of the model")
        return ModuleType(name)
    sys.path.insert(0, folder)
    return importlib.import_module(name)


def _step(function: Callable[..., Any], count: int) -> Step:
    """The function behind a first argument, the context; it gets it last if it takes an argument more than `count`."""
    if len(inspect.signature(function).parameters) == count + 1:
        return lambda context, *arguments: function(*arguments, context)
    return lambda context, *arguments: function(*arguments)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as e:
        raise BadRequest(f"the body is not UTF-8: bad byte at offset {e.start}") from None


def _refused(status: int, text: str) -> BadRequest:
    error = BadRequest(text)
    error.status_code = status  # type: ignore[attr-defined] # as the errors of SageMaker's toolkit have it
    return error


def _error(error: Exception, context: Any) -> bytes:
    """The response to a failed request. Only errors with `status_code` and `message` have a text for clients."""
    status = getattr(error, "status_code", 400 if isinstance(error, BadRequest) else None)
    message = getattr(error, "message", None)
    if not isinstance(status, int) or not isinstance(message, str):
        log.exception("script_failed", exc_info=error)
        status, message = 500, "Prediction failed"
    context.set_response_status(status, "", 0)
    context.set_response_content_type(0, JSON)
    return error_body(status, "InternalServerException" if status >= 500 else "BadRequestException", message)


# ---- what a script may leave out


def _device() -> str:
    return "cuda" if import_torch().cuda.is_available() else "cpu"


def _load(model_dir: str) -> Any:
    """The network in `model.pt`, or in the only other file of PyTorch. Raises LoadFailed."""
    names = sorted(name for name in os.listdir(model_dir) if name.endswith((".pt", ".pt2", ".pth")))
    if "model.pt" in names:
        names = ["model.pt"]
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise LoadFailed(f"without model_fn, expected model.pt or one other .pt, .pth or .pt2 file, found {found}")
    return load_module(os.path.join(model_dir, names[0]), _device())


def _placed(model: Any) -> Any:
    """A network on its device and without dropout; any other model unchanged."""
    torch = sys.modules.get("torch")
    return model.to(_device()).train(False) if torch is not None and isinstance(model, torch.nn.Module) else model


def _input(body: Any, content_type: str) -> Any:
    """The tensor of a JSON, CSV or .npy body; without torch, the array. Raises BadRequest."""
    import numpy as np

    kind = media_type(content_type)
    if kind not in (JSON, CSV, NPY):
        raise _refused(415, f"the content type {kind[:100]!r} is not supported; expected {JSON}, {CSV} or {NPY}")
    try:
        if kind == JSON:
            array = np.array(json.loads(body), np.float32)
        elif kind == CSV:
            array = np.genfromtxt(io.StringIO(body), np.float32, delimiter=",")
        else:
            array = read_npy(read_npy_head(body), memoryview(body)).copy()  # torch refuses read-only memory
    except (ValueError, TypeError, RecursionError):
        raise BadRequest(f"the body is not the array of numbers that {kind} announces") from None
    if importlib.util.find_spec("torch") is None:
        return array
    return import_torch().from_numpy(array).to(_device())


def _predict(data: Any, model: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return model(data)
    with torch.no_grad():
        return model(data)


def _output(prediction: Any, accept: str) -> tuple[bytes, str]:
    """The prediction in the first known type of `accept`. Raises BadRequest."""
    import numpy as np

    prediction = plain_array(prediction)
    buffer = io.BytesIO()
    for kind in map(media_type, accept.split(",")):
        if kind in (JSON, "*/*"):
            return json.dumps(prediction, default=lambda value: value.tolist()).encode(), JSON
        if kind == CSV:
            np.savetxt(buffer, np.atleast_1d(prediction), delimiter=",", fmt="%s")
            return buffer.getvalue(), CSV
        if kind == NPY:
            np.save(buffer, prediction, allow_pickle=False)
            return buffer.getvalue(), NPY
    raise _refused(406, f"the type {accept[:100]!r} cannot be returned; accept {JSON}, {CSV} or {NPY}")
