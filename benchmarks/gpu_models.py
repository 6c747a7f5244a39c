"""The networks of `gpu.py`: ResNet-50 and BERT-base with random weights, or small ones for a trial without a GPU."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import model

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
DRY = os.environ.get("BENCH_DRY") == "1"
SIDE = 32 if DRY else 224
TOKENS = 32
DTYPE = torch.float32 if DRY else torch.float16
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Array = np.ndarray[Any, Any]


class Logits(torch.nn.Module):
    """Normalised pixels `[rows, 3, SIDE, SIDE]` -> logits `[rows, 1000]`."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        small: Any = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if DRY else {}
        self.net = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000, **small))

    def forward(self, x: Any) -> Any:
        return self.net(x, return_dict=False)[0]


class Classes(torch.nn.Module):
    """Pixels, uint8 `[rows, SIDE, SIDE, 3]` -> the most likely class, int64 `[rows]`: bytes become floats here."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = Logits().to(DTYPE, memory_format=torch.channels_last)
        self.register_buffer("mean", torch.tensor(MEAN))
        self.register_buffer("std", torch.tensor(STD))

    def forward(self, pixels: Any) -> Any:
        x = ((pixels.float() - self.mean) / self.std).to(DTYPE)
        return self.logits(x.permute(0, 3, 1, 2)).float().argmax(1)


class ResNet:
    """The class that a user writes: stack, copy, compute, copy back."""

    def load(self, device: str) -> None:
        self.device, self.net = device, Classes().eval().to(device)

    def preprocess(self, body: bytes) -> Array:
        return np.frombuffer(body, np.uint8).reshape(SIDE, SIDE, 3)

    def predict(self, items: list[Array]) -> list[int]:
        with torch.inference_mode():
            found: list[int] = self.net(torch.from_numpy(np.stack(items)).to(self.device)).tolist()
        return found

    def warmup(self) -> list[Any]:
        return [bytes(SIDE * SIDE * 3)]


@model(inputs={"pixels": f"UINT8[-1,{SIDE},{SIDE},3]"}, outputs={"number": "INT64[-1]"}, arrays="torch")
class TensorResNet:
    """The same by tensors: Penstock copies both ways, while other batches run."""

    def load(self, device: str) -> None:
        self.net = Classes().eval().to(device)

    def predict(self, pixels: Any) -> Any:
        return self.net(pixels)


class Bert:
    """Sentences of TOKENS token numbers -> the most likely sixth word of each."""

    def __init__(self, device: str) -> None:
        import transformers

        torch.manual_seed(0)
        small: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        config = transformers.BertConfig(**small if DRY else {})
        self.device, self.net = device, transformers.BertForMaskedLM(config).eval().to(device, DTYPE)

    def predict(self, items: list[list[int]]) -> list[int]:
        with torch.inference_mode():
            found: list[int] = self.net(torch.tensor(items, device=self.device)).logits[:, 5].argmax(-1).tolist()
        return found


def save(folder: Path, device: str) -> None:
    """Writes `classes.pt`, the network on bytes, and `logits.pt`, on normalised floats, as TorchScript."""
    pixels = torch.zeros(2, SIDE, SIDE, 3, dtype=torch.uint8)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about checks of shapes
        net = Classes().eval().to(device)
        torch.jit.trace(net, pixels.to(device)).save(folder / "classes.pt")
        torch.jit.trace(Logits().eval(), torch.zeros(2, 3, SIDE, SIDE)).save(folder / "logits.pt")
