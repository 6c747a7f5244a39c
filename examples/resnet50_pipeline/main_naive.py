"""The usual implementation of the service: `python main_naive.py`, on port 8888.

Each client has a thread, which decodes and prepares its image in Python, and waits for the lock of the only model. It
follows TorchPipe's published baseline: Thrift in Python, bytes copied into a bytearray, pixels converted to float32
by torch in its own thread pool, one image at a time. `--parallel` removes the lock.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import torch
from service import HERE, MODELS, PORT, InferenceResult, InferenceService, exported
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.server import TThreadedServer
from thriftpy2.thrift import TProcessor
from thriftpy2.transport import TBufferedTransportFactory, TServerSocket

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Naive:
    """The handler of the service."""

    def __init__(self, model: Path, device: str, parallel: bool) -> None:
        options = onnxruntime.SessionOptions()
        # By default idle threads of a session spin, on cores that decoding needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
        if provider not in (known := onnxruntime.get_available_providers()):
            raise SystemExit(f"--device {device} needs onnxruntime-gpu; this onnxruntime has {', '.join(known)}")
        self._session = onnxruntime.InferenceSession(str(model), options, providers=[provider])
        (given,) = self._session.get_inputs()
        self._input, self._side = given.name, given.shape[2]
        self._lock = contextlib.nullcontext() if parallel else threading.Lock()

    def preprocess(self, image: np.ndarray) -> torch.Tensor:
        """BGR uint8 `[height, width, 3]` -> float32 `[1, 3, side, side]`, as torchvision's ToTensor and Normalize."""
        resized = torch.from_numpy(cv2.resize(image[:, :, (2, 1, 0)], (self._side, self._side)))
        tensor = resized.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        mean, std = torch.as_tensor(MEAN), torch.as_tensor(STD)
        if (std == 0).any():
            raise ValueError("std is 0")
        return torch.stack([tensor.clone().sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))])

    def infer(self, data: bytes) -> tuple[int, float]:
        """The class of an encoded image and its probability."""
        image = cv2.imdecode(np.asarray(bytearray(data), dtype="uint8"), flags=cv2.IMREAD_COLOR)
        tensor = self.preprocess(image)
        with self._lock:
            (result,) = self._session.run(None, {self._input: tensor.numpy()})
        score, label = torch.max(torch.softmax(torch.from_numpy(result), dim=-1), 1)
        return label.item(), score.item()

    def infer_batch(self, params: object) -> InferenceResult:
        try:
            label, score = self.infer(params.data)
        except Exception as error:
            print(f"uuid={params.uuid}: {error}")
            return InferenceResult()
        return InferenceResult(label=str(label), score=score)

    def ping(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the ONNX file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--parallel", action="store_true", help="no lock: calls of the model side by side")
    given = parser.parse_args()
    handler = Naive(exported(given.model, given.models), given.device, given.parallel)
    socket = TServerSocket("127.0.0.1", given.port, client_timeout=None)
    server = TThreadedServer(
        TProcessor(InferenceService, handler), socket, TBufferedTransportFactory(), TBinaryProtocolFactory()
    )
    server.daemon = True
    print(
        f"naive{', parallel' if given.parallel else ''}: {given.model} at thrift://127.0.0.1:{given.port}", flush=True
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()


if __name__ == "__main__":
    main()
