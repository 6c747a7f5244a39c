"""Every kind of model file answers as its own runtime does: the worker against PyTorch, ONNX Runtime and scikit-learn.

Each network is written in each format that can hold it. A batch of requests of several sizes must give the rows that
the runtime computes from the file for each request alone.
"""

import importlib.util
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.types import DTYPES, BatchPart, Item

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")

ROWS = (1, 3, 2)  # of the requests of a batch
NETWORKS = """
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(x), -1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.AvgPool2d(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image).flatten(1)


class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(1, 4, 5, dilation=2)

    def forward(self, wave: Tensor) -> Tensor:
        return F.gelu(self.layer(wave)).amax(2)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).mean(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 8), nn.LayerNorm(8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(input_ids)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(attention_mask.unsqueeze(1) == 0, -1e4)
        return self.norm(torch.softmax(scores, -1) @ x)[:, 0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, steps: Tensor) -> Tensor:
        return self.lstm(steps)[0][:, -1]


class TwoInputs(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left * 2, right - 1], 1)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        scores = self.linear(x)
        return scores, scores.argmax(1)


class NamedOutputs(nn.Module):
    def forward(self, x: Tensor) -> Dict[str, Tensor]:
        return {"least": x.amin(1), "most": x.amax(1)}


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        y = x + 1
        return y, y


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 1)


class Whole(nn.Module):
    def forward(self, count: Tensor) -> Tensor:
        return count * 3 // 2


class Flags(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x > 0


class Pixels(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.to(torch.float32).div(255).mean([1, 2])


class Scalar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)
"""
_draw = np.random.default_rng(7)


def floats(*shape: int) -> Callable[[int], Any]:
    return lambda rows: _draw.normal(size=(rows, *shape)).astype(np.float32)


def whole(most: int, dtype: type, *shape: int) -> Callable[[int], Any]:
    return lambda rows: _draw.integers(0, most, (rows, *shape)).astype(dtype)


class Case(NamedTuple):
    """The inputs of a network by name, each with a function that draws some rows."""

    inputs: Mapping[str, Callable[[int], Any]]
    without: tuple[str, ...] = ()  # formats that cannot hold it
    tolerance: float = 1e-5


CASES = {
    "Linear": Case({"x": floats(4)}),
    "Convolution": Case({"image": floats(3, 16, 16)}),
    "Sound": Case({"wave": floats(1, 40)}),
    "Embedding": Case({"tokens": whole(50, np.int64, 7)}),
    "Attention": Case({"input_ids": whole(50, np.int64, 6), "attention_mask": whole(2, np.int64, 6)}),
    "Recurrent": Case({"steps": floats(5, 4)}),
    "TwoInputs": Case({"left": floats(2), "right": floats(3)}),
    "TwoOutputs": Case({"x": floats(4)}),
    "NamedOutputs": Case({"x": floats(4)}),
    "Twice": Case({"x": floats(4)}, without=("onnx",)),  # its graph has one name for both, and is refused
    "Doubles": Case({"x": lambda rows: _draw.normal(size=(rows, 4))}),
    "Whole": Case({"count": whole(100, np.int32, 3)}),
    "Flags": Case({"x": floats(4)}),
    "Pixels": Case({"image": whole(256, np.uint8, 8, 8, 3)}),
    "Scalar": Case({"x": floats(4)}),
    "Half": Case({"x": lambda rows: _draw.normal(size=(rows, 4)).astype(np.float16)}, tolerance=2e-3),
}
FORMATS = ("scripted", "traced", "exported", "onnx", "weights")
FILES = [(name, kind) for name, case in CASES.items() for kind in FORMATS if kind not in case.without]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("differential")
    (found / "networks.py").write_text(textwrap.dedent(NETWORKS))
    return found


@pytest.fixture(scope="module")
def networks(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("penstock_differential", folder / "networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path, networks: Any, name: str, kind: str) -> tuple[str, dict[str, Any], Callable[..., Any]]:
    """(target, keys of its configuration, its own runtime) of a new file."""
    torch.manual_seed(3)
    net, case = getattr(networks, name)().train(False), CASES[name]
    example = {key: torch.from_numpy(draw(2)) for key, draw in case.inputs.items()}
    path = folder / f"{name}-{kind}"
    declared = {"inputs": {key: declaration(draw(1)) for key, draw in case.inputs.items()}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        if kind in ("scripted", "traced"):
            script = torch.jit.script(net)
            if kind == "traced":
                script = torch.jit.trace(net, tuple(example.values()), strict=False)
            script.save(f"{path}.pt")
            return f"{path}.pt", declared, torch.jit.load(f"{path}.pt")
        if kind == "exported":
            rows = torch.export.Dim("rows", min=1, max=64)
            shapes = tuple({0: rows} for _ in example)
            torch.export.save(torch.export.export(net, tuple(example.values()), dynamic_shapes=shapes), f"{path}.pt2")
            return f"{path}.pt2", {}, torch.export.load(f"{path}.pt2").module()
        if kind == "onnx":
            axes = {key: {0: "rows"} for key in example}
            torch.onnx.export(
                net, tuple(example.values()), f"{path}.onnx", dynamo=False, input_names=list(example), dynamic_axes=axes
            )
            return f"{path}.onnx", {}, session(f"{path}.onnx")
    torch.save(net.state_dict(), f"{path}.pt")
    return f"{folder / 'networks.py'}:{name}", {"weights": f"{path}.pt", **declared}, net


def declaration(array: Any) -> str:
    """As a user writes it for a file that does not know its inputs: FP32[-1,4]."""
    datatype = next(name for name, dtype in DTYPES.items() if np.dtype(dtype) == array.dtype)
    return f"{datatype}[{','.join(map(str, (-1, *array.shape[1:])))}]"


def session(path: str) -> Callable[..., Any]:
    found = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in found.get_inputs()]
    return lambda *arrays: found.run(None, dict(zip(names, map(np.asarray, arrays), strict=True)))


def columns(result: Any) -> list[Any]:
    """The outputs as arrays, in order."""
    parts = list(result.values()) if isinstance(result, dict) else result
    return [np.asarray(each) for each in (parts if isinstance(parts, (list, tuple)) else [parts])]


def compared(target: str, keys: Mapping[str, Any], runtime: Callable[..., Any], case: Case) -> None:
    """A batch of requests, in the worker and one by one in the runtime."""
    config = ModelConfig(target="unused:unused", batching=BatchingConfig(max_batch_size=16), **keys)
    runner, _ = open_model(WorkerSpec("net", "1", config, target), "cpu")
    try:
        requests = [{name: draw(rows) for name, draw in case.inputs.items()} for rows in ROWS]
        items = [
            Item(next(iter(each.values())) if len(each) == 1 else each, rows=len(next(iter(each.values()))))
            for each in requests
        ]
        parts: list[BatchPart] = []
        runner.run(1, runner.decode(items), parts.append)
        for request, result in zip(requests, parts[-1].results, strict=True):
            assert result is not None
            assert result.error is None, result.error
            with torch.no_grad():
                expected = columns(runtime(*map(torch.from_numpy, request.values())))
            found = columns(result.body)
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.shape == theirs.shape
                assert np.issubdtype(ours.dtype, np.floating) == np.issubdtype(theirs.dtype, np.floating)
                np.testing.assert_allclose(ours, theirs, rtol=case.tolerance, atol=case.tolerance)
    finally:
        runner.close()


@pytest.mark.parametrize(("name", "kind"), FILES, ids=["-".join(each) for each in FILES])
def test_a_network_answers_as_in_its_runtime(folder: Path, networks: Any, name: str, kind: str) -> None:
    compared(*written(folder, networks, name, kind), CASES[name])


def estimators() -> Iterator[tuple[str, Any]]:
    from sklearn import ensemble, linear_model, naive_bayes, neighbors, neural_network, preprocessing, svm, tree
    from sklearn.pipeline import make_pipeline

    scaler = preprocessing.StandardScaler
    yield "linear regression", linear_model.LinearRegression()
    yield "ridge", make_pipeline(preprocessing.PolynomialFeatures(2), linear_model.Ridge())
    yield "logistic regression", linear_model.LogisticRegression()
    yield "scaled", make_pipeline(scaler(), linear_model.LogisticRegression())
    yield "tree", tree.DecisionTreeClassifier(max_depth=3, random_state=0)
    yield "forest", ensemble.RandomForestClassifier(10, max_depth=4, random_state=0)
    yield "regression forest", ensemble.RandomForestRegressor(10, max_depth=4, random_state=0)
    yield "boosted", ensemble.GradientBoostingClassifier(n_estimators=10, random_state=0)
    yield "naive Bayes", naive_bayes.GaussianNB()
    yield "neighbours", neighbors.KNeighborsRegressor(3)
    yield "network", make_pipeline(scaler(), neural_network.MLPClassifier((8,), max_iter=200, random_state=0))
    yield "support vectors", svm.SVR()


ESTIMATORS = dict(estimators())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_answers_as_scikit_learn(folder: Path, name: str) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    draw = np.random.default_rng(5)
    x = draw.normal(size=(120, 4)).astype(np.float32)
    y = x[:, 0] * 2 + x[:, 1]
    classifies = hasattr(ESTIMATORS[name], "predict_proba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a search that has not ended
        fitted = ESTIMATORS[name].fit(x, (y > 0).astype(np.int64) if classifies else y)
        graph = skl2onnx.to_onnx(fitted, x[:1], options={"zipmap": False} if classifies else None)
    path = folder / f"{name}.onnx"
    path.write_bytes(graph.SerializeToString())

    def runtime(rows: Any) -> Any:
        rows = rows.numpy()
        return [fitted.predict(rows), fitted.predict_proba(rows)] if classifies else fitted.predict(rows).reshape(-1, 1)

    compared(str(path), {}, runtime, Case({"X": floats(4)}, tolerance=2e-4))


def test_there_are_sixty_files_and_more() -> None:
    assert len(FILES) + len(ESTIMATORS) >= 60
