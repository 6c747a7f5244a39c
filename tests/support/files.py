"""Model files: one small network in every file format that can be served."""

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.softmax(self.linear(x), -1)
"""


def scores(x: Any) -> Any:
    """The network's output for `[rows, 4]`: softmax of x @ w.T + b, where w counts 0.0, 0.1 ... 1.1."""
    import numpy as np

    weight = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
    z = np.asarray(x, np.float32) @ weight.T + np.array([0.3, 0.2, 0.1], np.float32)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def write_models(folder: Path) -> Path:
    """The folder with `net.ts` (scripted), `net.pt` (traced), `net.pt2`, `net.onnx`, `net.py` with the class `Net`,
    its state dict `weights.pt`, and `whole.pt`, a pickled module. Needs torch and onnx."""
    torch: Any = importlib.import_module("torch")

    (folder / "net.py").write_text(NET)
    spec = importlib.util.spec_from_file_location("penstock_testing_net", folder / "net.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.Net().train(False)
    with torch.no_grad():
        net.linear.weight.copy_(torch.arange(12.0).reshape(3, 4) / 10)
        net.linear.bias.copy_(torch.tensor([0.3, 0.2, 0.1]))
    x = torch.zeros(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(net).save(str(folder / "net.ts"))
        torch.jit.trace(net, x).save(str(folder / "net.pt"))
        rows = torch.export.Dim("rows", min=1, max=512)
        torch.export.save(torch.export.export(net, (x,), dynamic_shapes=({0: rows},)), folder / "net.pt2")
    torch.save(net.state_dict(), folder / "weights.pt")
    torch.save(torch.nn.Linear(4, 3), folder / "whole.pt")
    weight, bias = (p.detach().numpy() for p in (net.linear.weight, net.linear.bias))
    write_onnx(folder / "net.onnx", ["rows", 4], weight, bias)
    return folder


def write_onnx(path: Path, shape: list[Any], weight: Any, bias: Any, opset: int = 17) -> None:
    """An ONNX graph: input x of `shape`, output "scores", softmax of x @ weight.T + bias. Needs onnx."""
    import onnx
    from onnx import TensorProto
    from onnx import helper as h

    graph = h.make_graph(
        [h.make_node("Gemm", ["x", "w", "b"], ["z"], transB=1), h.make_node("Softmax", ["z"], ["scores"], axis=-1)],
        "net",
        [h.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [h.make_tensor_value_info("scores", TensorProto.FLOAT, [shape[0], len(bias)])],
        [
            h.make_tensor("w", TensorProto.FLOAT, list(weight.shape), weight.ravel()),
            h.make_tensor("b", TensorProto.FLOAT, [len(bias)], bias),
        ],
    )
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8), str(path))
