"""The common parts of both servers and the client: the Thrift interface and the models."""

from __future__ import annotations

from pathlib import Path

import thriftpy2

HERE = Path(__file__).parent
PORT = 8888
MODELS = ("resnet50", "mobilenet", "small")

module = thriftpy2.load(str(HERE / "service.thrift"), module_name="service_thrift")
InferenceParams = module.InferenceParams
InferenceResult = module.InferenceResult
InferenceService = module.InferenceService


def exported(name: str, folder: Path = HERE) -> Path:
    """The ONNX file of a model, which is created if it does not exist."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        import export  # imports torch and transformers, which are needed only once

        print(f"writing {path}", flush=True)
        getattr(export, f"export_{name}")(path)
    return path
