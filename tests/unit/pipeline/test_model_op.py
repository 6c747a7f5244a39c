"""ModelOp: each item gets its own result, whatever its batch."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from penstock import metrics
from penstock.errors import BadOutput, BadRequest, ConfigError, LoadFailed
from penstock.pipeline import model_op
from penstock.pipeline.model_op import MOST_VIEWED, ModelOp
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import make_op
from penstock.runtimes import onnx as loaders
from support.files import scores, write_onnx

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

KINDS = onnx.TensorProto
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
IMAGES = ["N", 3, 8, 6]


@pytest.fixture
def write(tmp_path):
    """Writes a graph: inputs and outputs are (name, kind, shape), nodes (op, inputs, outputs)."""

    def made(inputs, outputs, nodes, name="graph.onnx"):
        h = onnx.helper
        graph = h.make_graph(
            [h.make_node(op, i, o) for op, i, o in nodes],
            "g",
            [h.make_tensor_value_info(*i) for i in inputs],
            [h.make_tensor_value_info(*o) for o in outputs],
        )
        onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), tmp_path / name)
        return str(tmp_path / name)

    return made


@pytest.fixture
def means(write):
    """A graph of the mean of each channel of an image, float32 `[N, 3, 8, 6]` -> `[N, 3]`."""

    def made(shape=IMAGES, **keys):
        steps = [("GlobalAveragePool", ["x"], ["p"]), ("Flatten", ["p"], ["y"])]
        return write([("x", KINDS.FLOAT, shape)], [("y", KINDS.FLOAT, [shape[0], 3])], steps, **keys)

    return made


@pytest.fixture
def same(write):
    """A graph that returns its input of a given shape."""

    def made(shape, kind=KINDS.FLOAT):
        return write([("x", kind, shape)], [("y", kind, shape)], [("Identity", ["x"], ["y"])])

    return made


def loaded(path, device="cpu", **keys):
    op = ModelOp(path, **keys)
    op.load(device)
    return op


def run(op, *data):
    return list(op(list(data), [{} for _ in data]))


def image(seed, rows=1, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, 256, (rows, 3, 8, 6)).astype(dtype)


def by_hand(pixels):
    """The means of channels of normalized pixels, in float64."""
    mean, std = (np.array(v).reshape(1, 3, 1, 1) for v in (MEAN, STD))
    return ((pixels.astype(np.float64) - mean) / std).mean((2, 3))


class Seen:
    """A program of an op, and its recorded inputs."""

    def __init__(self, op, raw=False, place=0):
        self._program = op._programs[raw][place]
        self.rows = self._program.rows
        self.feeds = []
        op._programs[raw][place] = self

    def run(self, arrays):
        self.feeds.append({name: a.copy() for name, a in arrays.items()})
        return self._program.run(arrays)

    @property
    def sizes(self):
        return [len(next(iter(feed.values()))) for feed in self.feeds]


# ---- rows


@pytest.mark.parametrize(
    ("graph_rows", "keys", "rows", "sizes"),
    [
        ("N", {}, [1, 3, 1, 2], [7]),
        ("N", {"max_batch": 4}, [1, 1, 1, 1], [4]),
        ("N", {"max_batch": 2}, [5], [2, 2, 1]),
        ("N", {"min_batch": 3, "max_batch": 4}, [1] * 5, [4, 3]),  # padded to the smallest size
        (4, {"max_batch": 4}, [1, 1], [4]),
        (4, {"sizes": (1, 4)}, [1], [4]),  # the graph does not support 1
    ],
)
def test_each_item_gets_its_own_rows_in_calls_of_the_sizes_that_fit(means, graph_rows, keys, rows, sizes):
    op = loaded(means([graph_rows, *IMAGES[1:]]), **keys)
    seen = Seen(op)
    items = [image(i, n) for i, n in enumerate(rows)]
    results = run(op, *items)
    assert seen.sizes == sizes
    assert [r.shape for r in results] == [(n, 3) for n in rows]
    for item, result in zip(items, results, strict=True):
        assert np.allclose(result, item.mean((2, 3)), atol=1e-4)


def test_items_of_other_shapes_are_run_apart(means):
    op = loaded(means(["N", 3, "h", "w"]))
    seen = Seen(op)
    wide = np.full((1, 3, 2, 9), 7, np.uint8)
    results = run(op, image(0), wide, image(1))
    assert seen.sizes == [2, 1]
    assert np.allclose(results[1], 7)
    assert np.allclose(results[2], image(1).mean((2, 3)), atol=1e-4)


def test_padding_rows_are_added_and_counted(means):
    op = loaded(means(name="sized.onnx"), sizes=(4, 8))
    seen = Seen(op)
    metrics.drain()  # what other tests have counted
    metrics.own_registry()
    try:
        results = run(op, *[image(i) for i in range(6)])
        counted = {d.name: (d.value, d.labels) for d in metrics.drain() or ()}
    finally:
        metrics._own.__dict__.clear()
    assert seen.sizes == [8]
    assert not seen.feeds[0]["x"][6:].any()
    assert len(results) == 6
    assert np.allclose(results[5], image(5).mean((2, 3)), atol=1e-4)
    assert counted == {"pipeline_padded_rows_total": (2.0, {"model": "sized"})}


def test_a_graph_of_one_row_runs_items_one_by_one_with_a_warning(means, caplog):
    path = means([1, *IMAGES[1:]])
    ops = [loaded(path, max_batch=4) for _ in range(2)]
    assert ops[0].max_rows == 1
    results = run(ops[0], image(0), image(1, 2))
    assert np.allclose(results[1], image(1, 2).mean((2, 3)), atol=1e-4)
    (record,) = caplog.records
    assert "takes 1 rows at once, the node has max_batch 4" in record.getMessage()


def test_files_of_fixed_rows_share_the_batches(means):
    files = [means([rows, *IMAGES[1:]], name=f"{rows}.onnx") for rows in (1, 4)]
    op = loaded(files, max_batch=4, mean=MEAN, std=STD)
    one, four = Seen(op), Seen(op, place=1)
    pixels = [image(i) for i in range(6)]
    results = run(op, *pixels)
    assert (op.max_rows, one.sizes, four.sizes) == (4, [1, 1], [4])
    for result, item in zip(results, pixels, strict=True):
        assert np.allclose(result, by_hand(item), atol=1e-4)


def test_a_file_of_free_rows_takes_what_the_others_do_not(means):
    op = loaded([means([1, *IMAGES[1:]], name="one.onnx"), means()], max_batch=8)
    one, free = Seen(op), Seen(op, place=1)
    assert np.allclose(run(op, image(0), image(1))[1], image(1).mean((2, 3)), atol=1e-4)
    run(op, image(2))
    assert (one.sizes, free.sizes) == ([1], [2])


def test_files_of_other_networks_are_refused(means, write):
    other = write([("z", KINDS.FLOAT, [4, 3])], [("y", KINDS.FLOAT, [4, 3])], [("Identity", ["z"], ["y"])], "z.onnx")
    with pytest.raises(ConfigError, match=r"z\.onnx has the inputs and outputs .*expected those of .*graph\.onnx"):
        loaded([means(), other])
    with pytest.raises(ConfigError, match="found 3 files and 2 of model_cache"):
        ModelOp([means(), other, other], model_cache=["a", "b"])


# ---- mean and std


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.int32])
def test_pixels_are_normalised(means, dtype):
    op = loaded(means(), mean=MEAN, std=STD)
    items = [image(i, dtype=dtype) for i in range(3)]
    for item, result in zip(items, run(op, *items), strict=True):
        assert np.allclose(result, by_hand(item), atol=1e-5)


def test_items_of_different_dtypes_share_a_batch(means):
    op = loaded(means(), mean=MEAN, std=STD)
    seen = Seen(op)
    results = run(op, image(0), image(1, dtype=np.float32))
    assert seen.sizes == [2]
    assert np.allclose(results[1], by_hand(image(1)), atol=1e-5)


def test_channels_may_be_the_last_axis(same):
    item = np.random.default_rng(0).integers(0, 256, (1, 4, 5, 3)).astype(np.uint8)
    (result,) = run(loaded(same(["N", 4, 5, 3]), mean=MEAN, std=STD), item)
    assert np.allclose(result, (item - np.array(MEAN)) / np.array(STD), atol=1e-5)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose sessions run on the CPU, with a list of opened sessions."""
    real, opened = loaders.open_session, []

    def session(path, device="cpu", **keys):
        opened.append((device, keys.get("graph") is not None))
        return real(path, threads=1, graph=keys.get("graph"))

    monkeypatch.setattr(loaders, "open_session", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [loaders.CUDA, loaders.CPU])
    return opened


def test_on_a_gpu_the_graph_normalises_and_takes_pixels_as_they_are(means, gpu):
    path = means()
    op = loaded(path, "cuda:0", mean=MEAN, std=STD, max_batch=4)
    seen = Seen(op, raw=True)
    items = [image(i) for i in range(3)]
    results = run(op, *items)
    assert gpu == [("cuda:0", True)]
    assert seen.feeds[0]["x__uint8"].dtype == np.uint8
    assert np.allclose(
        np.concatenate(results), np.concatenate(run(loaded(path, mean=MEAN, std=STD), *items)), atol=1e-6
    )
    assert [(i.name, i.datatype, i.shape) for i in op.inputs] == [("x", "FP32", (-1, 3, 8, 6))]


def test_the_path_to_tensorrt_computes_the_same_with_the_cpus_provider(means, monkeypatch, tmp_path):
    """All of it but TensorRT runs: the fused graph, the profile of its shapes, and the cache with its key."""
    real, built = ort.InferenceSession, []

    def session(model, options, providers):
        made = real(model, options, providers=[loaders.CPU])
        if isinstance(providers[0], tuple):
            folder = Path(providers[0][1]["trt_engine_cache_path"])
            built.append(not list(folder.glob("*.engine")))
            (folder / "net.engine").write_bytes(b"engine")
            monkeypatch.setattr(made, "get_providers", lambda: [loaders.TENSORRT])
        return made

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [loaders.TENSORRT, loaders.CUDA, loaders.CPU])
    monkeypatch.setattr(loaders, "gpu_name", lambda device: "H0 driver 1")
    path = means()
    for mean, expected in ((MEAN, True), (MEAN, False), ((0.0, 0.0, 0.0), True)):
        op = loaded(path, "cuda:0", runtime="tensorrt", mean=mean, std=STD, max_batch=4)
        assert built[-1] == expected, "mean and std are in the engine, and so in its key"
        pixels = image(0, rows=3)
        plain = loaded(path, mean=mean, std=STD, max_batch=4)
        assert op._signature.takes_raw
        assert not plain._signature.takes_raw
        assert np.allclose(run(op, pixels)[0], run(plain, pixels)[0], atol=1e-4)
    sidecars = [json.loads(file.read_text())["key"] for file in tmp_path.glob("penstock/engines/*/engine.json")]
    assert len(sidecars) == 2
    assert sidecars[0].keys() == {"model", "shapes", "precision", "device", "onnxruntime", "tensorrt"}
    assert sidecars[0]["shapes"]["trt_profile_max_shapes"] == "x__uint8:4x3x8x6"


def test_floats_for_a_graph_of_pixels_use_their_own_session(means, gpu, caplog):
    op = loaded(means(), "cuda:0", mean=MEAN, std=STD)
    results = run(op, image(0), image(1, dtype=np.float32), image(2))
    run(op, image(3, dtype=np.float32))
    for seed, result in enumerate(results):
        assert np.allclose(result, by_hand(image(seed)), atol=1e-5)
    assert gpu == [("cuda:0", True), ("cuda:0", False)]
    (record,) = caplog.records
    assert "another session is opened for them" in record.getMessage()


def test_a_gpu_is_warmed_up_with_every_size(means, gpu, monkeypatch):
    sizes = []
    real = loaders.OnnxProgram.run
    monkeypatch.setattr(
        loaders.OnnxProgram,
        "run",
        lambda self, arrays: sizes.append(len(next(iter(arrays.values())))) or real(self, arrays),
    )
    loaded(means(), "cuda:0", mean=MEAN, std=STD, min_batch=2, max_batch=4)
    loaded(means(), "cuda:0", sizes=(1, 8))
    assert list(dict.fromkeys(sizes)) == [2, 3, 4, 1, 8]


# ---- items that do not fit


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (
            np.zeros((1, 8, 6, 3), np.uint8),
            r"float32 \[rows, 3, 8, 6\], found uint8 array \[1, 8, 6, 3\]; Mat2Tensor makes",
        ),
        (np.zeros((8, 6, 3), np.uint8), r"found uint8 array \[8, 6, 3\]; Mat2Tensor makes"),
        (np.zeros((1, 3, 8, 7), np.float32), r"found float32 array \[1, 3, 8, 7\]$"),
        (np.zeros((1, 3, 8, 6), np.complex64), "found complex64 array"),
        (np.zeros((1, 3, 8, 6), object), "found object array"),
        (np.float32(3), "found float32 array|found float32"),
        (b"bytes", "found bytes"),
        ("text", "found str"),
        ([image(0), image(1)], "has the inputs x; found list of uint8 array .*, expected one tensor"),
        ({"x": 1}, "found dict"),
    ],
)
def test_an_item_that_does_not_fit_fails_alone(means, item, told):
    op = loaded(means(), mean=MEAN, std=STD)
    first, wrong, last = run(op, image(0), item, image(1))
    assert isinstance(wrong, BadRequest)
    with pytest.raises(BadRequest, match=told):
        raise wrong
    assert np.allclose(first, by_hand(image(0)), atol=1e-5)
    assert np.allclose(last, by_hand(image(1)), atol=1e-5)


def test_a_wrong_number_of_channels_for_mean_is_rejected(means):
    op = loaded(means(["N", "c", 8, 6]), mean=MEAN, std=STD)
    assert isinstance(run(op, np.zeros((1, 1, 8, 6), np.uint8))[0], BadRequest)


def test_fractions_are_not_rounded_to_whole_numbers(same):
    op = loaded(same(["N", 2], KINDS.INT64))
    good, floats, bad = run(op, np.ones((1, 2), np.int32), np.ones((1, 2), np.float32), np.ones((1, 2), np.uint64))
    assert good.dtype == np.int64
    assert "is int64 [rows, 2], found float32 array [1, 2]" in str(floats)
    assert isinstance(bad, BadRequest)


def test_an_output_without_rows_is_told(write):
    path = write(
        [("x", KINDS.FLOAT, ["N", 2])],
        [("y", KINDS.FLOAT, [])],
        [("ReduceMean", ["x"], ["m"]), ("Squeeze", ["m"], ["y"])],
    )
    with pytest.raises(BadOutput, match=r"output 'y' has the shape \[\] for 2 rows"):
        run(loaded(path, rows="axis0"), np.ones((1, 2)), np.ones((1, 2)))


def test_a_model_without_rows_runs_items_one_by_one_and_gives_its_outputs_as_they_are(write):
    path = write(
        [("x", KINDS.FLOAT, [5]), ("k", KINDS.FLOAT, [1])],
        [("y", KINDS.FLOAT, [5]), ("sum", KINDS.FLOAT, [])],
        [("Mul", ["x", "k"], ["y"]), ("ReduceSum", ["y"], ["s"]), ("Squeeze", ["s"], ["sum"])],
    )
    op = loaded(path)
    x, k = np.arange(5, dtype=np.float32), np.full(1, 2, np.float32)
    found = run(op, [x, k], [x[:4], k], [x + 1, k])
    assert (op.unbatched, op.max_rows) == (True, 1)
    assert "float32 [5], found float32 array [4]" in str(found.pop(1))
    assert [(y.tolist(), float(total)) for y, total in found] == [((2 * x).tolist(), 20), ((2 * x + 2).tolist(), 30)]


@pytest.mark.parametrize(("axis", "keys", "coupled"), [(0, {}, True), (1, {}, False), (0, {"rows": "axis0"}, False)])
def test_a_graph_that_couples_rows_runs_items_one_by_one_with_one_warning(write, caplog, axis, keys, coupled):
    path = write([("x", KINDS.FLOAT, ["N", 3])], [("y", KINDS.FLOAT, ["N", 3])], [("Softmax", ["x"], ["y"])])
    graph = onnx.load(path)
    graph.graph.node[0].attribute.append(onnx.helper.make_attribute("axis", axis))
    path = path.replace("graph.onnx", f"axis{axis}{len(keys)}.onnx")
    onnx.save(graph, path)
    ops = [loaded(path, **keys) for _ in range(3)]
    assert [op.unbatched for op in ops] == [coupled] * 3
    assert caplog.text.count("results depend on other rows") == coupled
    a, b = np.array([[1, 2, 3]], np.float32), np.array([[5, 0, 0]], np.float32)
    alone, together = [run(ops[0], one)[0] for one in (a, b)], run(ops[1], a, b)
    assert np.allclose(alone, together) is not bool(keys)


def test_a_graph_of_fixed_rows_that_couples_them_pads_each_item(write, caplog):
    x, y = (("x", KINDS.FLOAT, [4, 3]), ("y", KINDS.FLOAT, [4, 3]))
    op = loaded(write([x], [y], [("ReduceMax", ["x"], ["m"]), ("Sub", ["x", "m"], ["y"])]))
    assert (op.unbatched, op.max_rows) == (True, 1)
    a, b, whole = np.array([[1, 2, 3]], np.float32), np.array([[5, 0, 0]], np.float32), np.eye(4, 3, dtype=np.float32)
    assert [found.tolist() for found in run(op, a, b, whole)] == [(i - i.max()).tolist() for i in (a, b, whole)]


def test_out_of_memory_applies_to_the_whole_batch(means, monkeypatch):
    def raises(self, arrays):
        raise MemoryError("no")

    monkeypatch.setattr(loaders.OnnxProgram, "run", raises)
    with pytest.raises(MemoryError):
        run(loaded(means()), image(0), image(1))


# ---- several inputs and outputs


@pytest.fixture
def two(write):
    """a [N, 2] and b [N, 2] -> their difference and their product."""
    return write(
        [("a", KINDS.FLOAT, ["N", 2]), ("b", KINDS.FLOAT, ["N", 2])],
        [("minus", KINDS.FLOAT, ["N", 2]), ("times", KINDS.FLOAT, ["N", 2])],
        [("Sub", ["a", "b"], ["minus"]), ("Mul", ["a", "b"], ["times"])],
    )


def test_several_inputs_are_a_list_and_so_are_outputs(two):
    op = loaded(two)
    five, two_, three = (np.full((1, 2), n, np.float32) for n in (5, 2, 3))
    first, second = run(op, [five, two_], (three, three))
    assert [a.tolist() for a in first] == [[[3, 3]], [[10, 10]]]
    assert [a.tolist() for a in second] == [[[0, 0]], [[9, 9]]]


def test_inputs_and_outputs_may_be_given_another_order(two):
    op = loaded(two, input_reorder=(1, 0), output_reorder=(1, 0))
    ((times, minus),) = run(op, [np.full((1, 2), 2.0), np.full((1, 2), 5.0)])
    assert (times.tolist(), minus.tolist()) == ([[10, 10]], [[3, 3]])
    assert ([i.name for i in op.inputs], [o.name for o in op.outputs]) == (["b", "a"], ["times", "minus"])


def test_an_invalid_order_is_rejected(two):
    for key in ("input_reorder", "output_reorder"):
        with pytest.raises(ConfigError, match=rf"{key}: found \(0, 2\), expected each index once, 0 to 1"):
            loaded(two, **{key: (0, 2)})


def test_too_few_tensors_and_different_rows_fail_alone(two):
    one = np.ones((1, 2), np.float32)
    single, uneven, good = run(loaded(two), one, [one, np.ones((2, 2))], [one, one])
    assert "has the inputs a, b; found float32 array [1, 2], expected a list of 2 tensors" in str(single)
    assert "found tensors of [1, 2] rows" in str(uneven)
    assert good[0].tolist() == [[0, 0]]


# ---- results are the item's own


def test_a_later_batch_does_not_change_results(same, tmp_path):
    torch = pytest.importorskip("torch")
    script = tmp_path / "same.pt2"
    torch.export.save(
        torch.export.export(torch.nn.Identity(), (torch.zeros(2, 3),), dynamic_shapes=({0: torch.export.Dim("n")},)),
        script,
    )
    for path in (same(["N", 3]), str(script)):
        op = loaded(path)
        before = run(op, np.full((1, 3), 1.0), np.full((1, 3), 2.0))
        run(op, np.full((1, 3), 8.0), np.full((1, 3), 9.0))
        assert [r.tolist() for r in before] == [[[1, 1, 1]], [[2, 2, 2]]]


def test_large_results_do_not_keep_their_neighbours(same):
    op = loaded(same(["N", "n"]))
    wide = np.ones((1, MOST_VIEWED // 4), np.float32)
    small, large = run(op, wide[:, :5], wide[:, :5]), run(op, wide, wide)
    assert small[0].base is not None
    assert [result.base for result in large] == [None, None]


# ---- files and keys


def test_a_torchscript_file_is_run_by_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    path = str(tmp_path / "net.pt")
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.save(torch.jit.trace(net, torch.zeros(2, 3, 8, 6)), path)
    threads = torch.get_num_threads()
    try:
        op = loaded(path, mean=MEAN, std=STD, runtime="torch")
        plain = loaded(path)
    finally:
        torch.set_num_threads(threads)
    results = run(op, image(0), torch.from_numpy(image(1)))
    assert np.allclose(results[0], by_hand(image(0)), atol=1e-5)
    assert np.allclose(results[1], by_hand(image(1)), atol=1e-5)
    assert np.allclose(run(plain, image(0))[0], image(0).mean((2, 3)), atol=1e-4)
    gradient = run(op, torch.zeros(1, 3, 8, 6, requires_grad=True))[0]
    assert "found float32 tensor [1, 3, 8, 6] on cpu, with a gradient" in str(gradient)


def test_its_names_are_those_of_every_runtime():
    for name in ("OnnxTensor", "TensorrtTensor", "TorchScriptTensor", "OpenvinoTensor"):
        assert catalog.find(name) is ModelOp


def test_keys_are_texts_as_in_a_file(means):
    op = make_op(
        ModelOp,
        {"model": means(), "mean": "123.675, 116.28, 103.53", "std": "58.395, 57.120, 57.375", "max_batch": "4"},
    )
    op.load("cpu")
    assert np.allclose(run(op, image(0))[0], by_hand(image(0)), atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"runtime": "tensort"}, "runtime: found the string 'tensort'.*\"tensorrt\""),
        ({"precision": "fp8"}, "precision: found the string 'fp8'.*\"fp16\""),
        ({"std": "1, 0, 1"}, "no std of 0"),
        ({"mean": "nan"}, "expected numbers"),
        ({"min_batch": 5, "max_batch": 4}, "min_batch 5, max_batch 4"),
        ({"sizes": [0, 4]}, "sizes"),
        ({"modle": "x"}, "has no parameter 'modle'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(means, keys, told):
    with pytest.raises(ConfigError, match=told):
        make_op(ModelOp, {"model": means(), **keys})


def test_a_mean_of_a_wrong_length_is_rejected_at_load(means):
    with pytest.raises(ConfigError, match=r"mean: found 2 values, expected one, or one for each of the channels"):
        loaded(means(), mean=(1.0, 2.0))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(LoadFailed, match=r"there is no file .*nowhere\.onnx"):
        loaded(str(tmp_path / "nowhere.onnx"))


def test_a_graph_without_images_takes_its_rows(tmp_path):
    write_onnx(
        tmp_path / "net.onnx",
        ["rows", 4],
        np.arange(12, dtype=np.float32).reshape(3, 4) / 10,
        np.float32([0.3, 0.2, 0.1]),
    )
    x = np.array([[1, 2, 3, 4], [0, 0, 1, 0]], np.float32)
    op = loaded(str(tmp_path / "net.onnx"))
    assert np.allclose(np.concatenate(run(op, x[:1], x[1:])), scores(x), atol=1e-6)


def test_a_correct_file_causes_no_warning(means, caplog):
    with caplog.at_level(logging.WARNING):
        run(loaded(means(), mean=MEAN, std=STD, max_batch=4, precision="best"), image(0))
    assert caplog.records == []


def test_weights_in_files_of_their_own_are_found(tmp_path, gpu):
    write_onnx(tmp_path / "net.onnx", ["rows", 4], np.eye(3, 4, dtype=np.float32), np.zeros(3, np.float32))
    path = str(tmp_path / "apart.onnx")
    onnx.save(
        onnx.load(tmp_path / "net.onnx"), path, save_as_external_data=True, location="apart.bin", size_threshold=0
    )
    for device in ("cpu", "cuda:0"):
        assert np.allclose(run(loaded(path, device), np.eye(1, 4))[0], scores_of_eye(), atol=1e-6)


def scores_of_eye():
    e = np.exp([1.0, 0.0, 0.0])
    return e / e.sum()


def test_shapes_that_were_checked_are_not_gathered_for_ever(means, monkeypatch):
    monkeypatch.setattr(model_op, "MOST_KNOWN", 2)
    op = loaded(means(["N", 3, "h", "w"]))
    for width in (1, 2, 3, 1, 2, 3):
        assert np.allclose(run(op, np.full((1, 3, 2, width), width, np.float32))[0], width)
    assert len(op._known) <= 2
    for _ in range(2):
        assert isinstance(run(op, np.zeros((1, 4, 2, 2), np.float32))[0], BadRequest)


@pytest.mark.parametrize("keys", [{}, {"sizes": (2, 4)}, {"min_batch": 2, "max_batch": 4}])
def test_an_item_without_rows_gets_a_result_without_rows(means, keys):
    op = loaded(means(), mean=MEAN, std=STD, **keys)
    none = np.zeros((0, 3, 8, 6), np.float32)
    for items in ([none], [none, none], [image(0), none]):
        *_, result = run(op, *items)
        assert (result.shape, result.dtype) == ((0, 3), np.float32)


def test_texts_without_rows_get_no_rows(write):
    path = write([("x", KINDS.STRING, ["N"])], [("y", KINDS.STRING, ["N"])], [("Identity", ["x"], ["y"])])
    (result,) = run(loaded(path), np.empty(0, object))
    assert result.shape == (0,)
