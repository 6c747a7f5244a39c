"""ONNX graphs in ONNX Runtime: metadata, providers, refused settings, TensorRT engines, pixel normalization."""

import os
import subprocess
import sys
import types

import msgspec
import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, InputConfig, ModelConfig
from penstock.core.worker.tensor_model import ANY_ROWS, Input
from penstock.errors import ConfigError, LoadFailed
from penstock.runtimes import files, onnx_device
from penstock.runtimes import onnx as loaders
from penstock.runtimes.files import file_model
from penstock.runtimes.onnx import RAW, SIDECAR, normalised, plain_input
from penstock.types import TensorSpec
from support.files import scores, write_onnx

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
X = np.array([[1, 2, 3, 4], [0, 0, 1, 0]], np.float32)
KINDS = onnx.TensorProto


def graph(folder, inputs, outputs, nodes, **keys):
    """Writes a model file: inputs and outputs are (name, kind, shape), nodes (op, inputs, outputs)."""
    h = onnx.helper
    made = h.make_graph(
        [h.make_node(op, i, o, domain=keys.get("domain", "")) for op, i, o in nodes],
        "g",
        [h.make_tensor_value_info(*i) for i in inputs],
        [h.make_tensor_value_info(*o) for o in outputs],
    )
    opsets = [h.make_opsetid("", keys.get("opset", 17)), h.make_opsetid("my.own", 1)]
    model = h.make_model(made, opset_imports=opsets, ir_version=8)
    model.ir_version = keys.get("ir", 8)
    path = folder / "graph.onnx"
    onnx.save(model, path)
    return str(path)


def test_a_graph_declares_its_inputs_and_outputs(model_files):
    program = loaders.OnnxProgram(loaders.open_session(str(model_files / "net.onnx")))
    assert program.inputs == (Input("x", "FP32", (-1, 4)),)
    assert program.outputs == (TensorSpec("scores", "FP32", (-1, 3)),)
    assert (program.rows, program.platform) == (ANY_ROWS, "onnxruntime_onnx")
    assert np.allclose(program.run({"x": X})["scores"], scores(X), atol=1e-6)


def test_a_graph_with_fixed_rows_declares_them(tmp_path):
    write_onnx(tmp_path / "one.onnx", [1, 4], np.ones((3, 4), np.float32), np.zeros(3, np.float32))
    program = loaders.OnnxProgram(loaders.open_session(str(tmp_path / "one.onnx")))
    assert program.rows == (1, 1)
    assert program.inputs[0].shape == (-1, 4)


def test_a_graph_without_rows_keeps_its_sizes(tmp_path):
    nodes = [("Identity", ["x"], ["y"]), ("Identity", ["wait"], ["z"])]
    x, wait = ("x", KINDS.FLOAT, [5]), ("wait", KINDS.FLOAT, [1])
    path = graph(tmp_path, [x, wait], [("y", KINDS.FLOAT, [5]), ("z", KINDS.FLOAT, [1])], nodes)
    program = loaders.OnnxProgram(loaders.open_session(path))
    assert program.unbatched
    assert [i.shape for i in program.inputs] == [(5,), (1,)]
    found = program.run({"x": np.ones(5, np.float32), "wait": np.ones(1, np.float32)})
    assert [len(array) for array in found.values()] == [5, 1]


@pytest.mark.parametrize(
    ("size", "expected"),
    [("n", False), ("found", True), ("unk__7", False), ("Addy_dim_0", False), (None, False), (3, True)],
)
def test_names_that_an_exporter_invents_for_a_size_tell_nothing(tmp_path, size, expected):
    path = graph(tmp_path, [("x", KINDS.FLOAT, ["n"])], [("y", KINDS.FLOAT, [size])], [("Identity", ["x"], ["y"])])
    assert loaders.OnnxProgram(loaders.open_session(path)).unbatched is expected


def test_string_inputs_are_bytes(tmp_path):
    path = graph(tmp_path, [("t", KINDS.STRING, ["n"])], [("u", KINDS.STRING, ["n"])], [("Identity", ["t"], ["u"])])
    program = loaders.OnnxProgram(loaders.open_session(path))
    assert program.inputs[0].datatype == "BYTES"
    assert program.run({"t": np.array(["hé".encode(), b"x"], object)})["u"].tolist() == ["hé", "x"]


def test_a_session_has_the_configured_threads_which_do_not_spin(model_files):
    options = loaders.open_session(str(model_files / "net.onnx"), threads=2).get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    for kind in ("intra", "inter"):
        assert options.get_session_config_entry(f"session.{kind}_op.allow_spinning") == "0"


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (
            [("x", KINDS.FLOAT, [])],
            "input 'x' of the graph is a tensor.float. that is a scalar or has an unknown rank.*axis 0 is rows",
        ),
        ([("x", KINDS.COMPLEX64, ["n"])], "cannot be loaded|is a tensor.complex64."),
        ([("x", KINDS.BFLOAT16, ["n"])], "input 'x' of the graph is a tensor.bfloat16."),
    ],
)
def test_inputs_that_cannot_be_rows_are_refused(tmp_path, inputs, error):
    nodes = [("Identity", [name], [f"y{name}"]) for name, *_ in inputs]
    path = graph(tmp_path, inputs, [(f"y{n}", k, s) for n, k, s in inputs], nodes)
    with pytest.raises(LoadFailed, match=error):
        loaders.OnnxProgram(loaders.open_session(path))


PLAIN = ([("x", KINDS.FLOAT, ["n"])], [("y", KINDS.FLOAT, ["n"])])


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"opset": 999}, "[Oo]pset"),
        ({"ir": 99}, "Unsupported model IR version: 99"),
        ({"domain": "my.own"}, "my.own:Identity"),
    ],
)
def test_an_unsupported_graph_is_reported_with_the_version_of_onnx_runtime(tmp_path, keys, error):
    path = graph(tmp_path, *PLAIN, [("Identity", ["x"], ["y"])], **keys)
    with pytest.raises(LoadFailed, match=f"cannot be loaded by ONNX Runtime {ort.__version__}: .*{error}"):
        loaders.open_session(path)


def test_files_that_are_not_models_are_refused(tmp_path):
    with pytest.raises(LoadFailed, match=r"there is no file .*nowhere\.onnx"):
        loaders.open_session(str(tmp_path / "nowhere.onnx"))
    for content in (b"this is no model", b"", bytes(100)):
        (tmp_path / "bad.onnx").write_bytes(content)
        with pytest.raises(LoadFailed, match=r"bad\.onnx cannot be loaded"):
            loaders.OnnxProgram(loaders.open_session(str(tmp_path / "bad.onnx")))
    (tmp_path / "bad.onnx").write_bytes(b"this is no model")
    with pytest.raises(LoadFailed, match=r"bad\.onnx cannot be read as an ONNX model"):
        normalised(str(tmp_path / "bad.onnx"), lambda inputs: {})


def test_out_of_memory_raises_memory_error(model_files):
    real = loaders.open_session(str(model_files / "net.onnx"))

    def run(*_):
        raise ort.capi.onnxruntime_pybind11_state.RuntimeException("Failed to allocate memory for requested buffer")

    full = types.SimpleNamespace(get_inputs=real.get_inputs, get_outputs=real.get_outputs, run=run)
    program = loaders.OnnxProgram(full)
    with pytest.raises(MemoryError, match="Failed to allocate"):
        program.run({"x": X})


# ---- providers


def test_a_device_has_its_providers():
    assert loaders.providers_of("cpu") == ["CPUExecutionProvider"]
    assert loaders.providers_of("cuda:2") == [("CUDAExecutionProvider", {"device_id": 2}), "CPUExecutionProvider"]
    assert loaders.providers_of("cuda")[0] == ("CUDAExecutionProvider", {"device_id": 0})
    with pytest.raises(ConfigError, match="found 'mps', expected cpu or cuda:0"):
        loaders.providers_of("mps")


@pytest.mark.parametrize(
    ("device", "precision", "optimize", "error"),
    [
        ("cpu", "fp16", "none", "fp16 needs a CUDA device and optimize = 'compile'"),
        ("cuda:0", "bf16", "none", "bf16 needs optimize = 'compile'"),
        ("cpu", "fp32", "compile", "uses TensorRT for an ONNX model and needs a CUDA device"),
        ("cpu", "fp8", "none", "found precision 'fp8'"),
        ("cpu", "fp32", "fast", "optimize 'fast'"),
        ("cuda:0", "fp32", "graph", "optimize: found graph, which is for PyTorch models; leave it out for an ONNX"),
    ],
)
def test_settings_that_a_device_does_not_support_are_refused(device, precision, optimize, error):
    with pytest.raises(ConfigError, match=error):
        loaders.compiled(device, precision, optimize)


def test_supported_settings_are_accepted():
    assert not loaders.compiled("cpu", "fp32", "optimize_for_inference")
    assert loaders.compiled("cuda:0", "fp16", "compile")


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="needs ONNX Runtime without CUDA")
def test_a_device_without_its_provider_is_reported(model_files):
    with pytest.raises(LoadFailed, match=r"needs the CUDAExecutionProvider .* install onnxruntime-gpu"):
        loaders.open_session(str(model_files / "net.onnx"), "cuda:0")
    with pytest.raises(LoadFailed, match="needs the TensorRT provider"):
        loaders.open_tensorrt(str(model_files / "net.onnx"), "cuda:0")


def test_a_provider_that_falls_back_to_the_cpu_is_an_error(monkeypatch, model_files):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(
        ort, "InferenceSession", lambda *_, **__: types.SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    )
    with pytest.raises(LoadFailed, match="CUDAExecutionProvider of ONNX Runtime could not be started"):
        loaders.open_session(str(model_files / "net.onnx"), "cuda:0")


def test_without_onnx_runtime_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(LoadFailed, match=r"pip install 'onnxruntime"):
        loaders.import_onnxruntime()


# ---- TensorRT, with a session that stands for its


@pytest.fixture
def tensorrt(monkeypatch, tmp_path):
    """Fakes TensorRT sessions that write a missing engine to the configured folder; returns their options."""
    real, got = ort.InferenceSession, []

    def session(path, options, providers):
        if isinstance(providers[0], str):
            return real(path, options, providers=providers)
        name, settings = providers[0]
        got.append(settings)
        cache = settings.get("trt_engine_cache_path")
        if cache is not None:
            engine = next(iter((tmp_path / cache).glob("*.engine")), None)
            settings["built"] = engine is None
            if engine is None:
                (tmp_path / cache / "net.engine").write_bytes(b"engine")
        return types.SimpleNamespace(get_providers=lambda: [name])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [loaders.TENSORRT, loaders.CUDA, loaders.CPU])
    monkeypatch.setattr(loaders, "gpu_name", lambda device: "H0 driver 1")
    return got


def test_an_engine_is_built_once_for_each_key(tensorrt, model_files, tmp_path, monkeypatch):
    net = str(model_files / "net.onnx")

    def built(**keys):
        loaders.open_tensorrt(net, "cuda:0", **keys)
        return tensorrt[-1]["built"]

    assert [built(), built()] == [True, False]
    assert [built(precision="fp16"), built(precision="fp16")] == [True, False]
    assert [built(most_rows=8), built(most_rows=8)] == [True, False]
    monkeypatch.setattr(loaders, "gpu_name", lambda device: "another")
    assert [built(), built()] == [True, False]
    monkeypatch.setattr(loaders, "tensorrt_version", lambda: "99")
    assert built()
    assert len(list((tmp_path / "penstock" / "engines").glob(f"*/{SIDECAR}"))) == 5


def test_tensorrt_gets_precision_and_shapes(tensorrt, model_files):
    loaders.open_tensorrt(str(model_files / "net.onnx"), "cuda:3", precision="bf16", most_rows=8)
    (options,) = tensorrt
    assert (options["device_id"], options["trt_fp16_enable"], options["trt_bf16_enable"]) == (3, False, True)
    assert options["trt_profile_min_shapes"] == "x:1x4"
    assert options["trt_profile_max_shapes"] == options["trt_profile_opt_shapes"] == "x:8x4"


def test_an_engine_is_cached_where_the_user_says(tensorrt, model_files, tmp_path, caplog):
    cache = str(tmp_path / "mine" / "net.trt")
    for _ in range(2):
        loaders.open_tensorrt(str(model_files / "net.onnx"), "cuda:0", cache=cache)
    assert [options["built"] for options in tensorrt] == [True, False]
    assert sorted(p.name for p in (tmp_path / "mine" / "net.trt.penstock").iterdir()) == [SIDECAR, "net.engine"]
    loaders.open_tensorrt(str(model_files / "net.onnx"), "cuda:0", cache=cache, precision="fp16")
    assert tensorrt[-1]["built"]
    (record,) = caplog.records
    assert "found precision 'fp32', expected 'fp16'" in record.getMessage()


def test_a_changed_graph_has_its_own_engine(tensorrt, model_files):
    net = str(model_files / "net.onnx")
    model = onnx.load(net)
    model.doc_string = "changed"
    graph = model.SerializeToString()
    loaders.open_tensorrt(net, "cuda:0")
    loaders.open_tensorrt(net, "cuda:0", graph=graph)
    loaders.open_tensorrt(net, "cuda:0", graph=graph)
    assert [options["built"] for options in tensorrt] == [True, True, False]


def test_tensorrt_gets_the_smallest_batch_and_int8(tensorrt, model_files):
    loaders.open_tensorrt(str(model_files / "net.onnx"), "cuda:0", precision="int8", least_rows=4, most_rows=8)
    (options,) = tensorrt
    assert (options["trt_int8_enable"], options["trt_fp16_enable"]) == (True, False)
    assert (options["trt_profile_min_shapes"], options["trt_profile_max_shapes"]) == ("x:4x4", "x:8x4")


def test_an_engine_with_dynamic_shapes_is_not_cached(tensorrt, tmp_path):
    shape = ["n", "m"]
    path = graph(tmp_path, [("x", KINDS.FLOAT, shape)], [("y", KINDS.FLOAT, shape)], [("Identity", ["x"], ["y"])])
    loaders.open_tensorrt(path, "cuda:0")
    assert "trt_engine_cache_path" not in tensorrt[0]


def test_the_telemetry_of_onnx_runtime_is_off(tmp_path):
    """With telemetry, it writes a session id to the temporary folder and events to the user's cache."""
    inherited = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    own = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    code = "from penstock.runtimes.onnx import import_onnxruntime; import_onnxruntime()"
    subprocess.run([sys.executable, "-c", code], env=inherited | own, check=True)
    assert not list(tmp_path.iterdir())


# ---- pixel normalization inside a graph

MEAN = np.array([123.675, 116.28, 103.53]).reshape(1, 3, 1, 1)
SCALE = 1 / np.array([58.395, 57.12, 57.375]).reshape(1, 3, 1, 1)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5)).astype(np.uint8)


def write(path, nodes, *, kind=KINDS.FLOAT, inputs=("x",), weights=(), **keys):
    h = onnx.helper
    shape = ["N", 3, 4, 5]
    graph = h.make_graph(
        nodes, "g", [h.make_tensor_value_info(n, kind, shape) for n in inputs],
        [h.make_tensor_value_info("y", kind, None)], list(weights),
    )  # fmt: skip
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, **keys)
    return str(path)


def node(op, inputs, outputs, **keys):
    return onnx.helper.make_node(op, inputs, outputs, **keys)


def run(path, graph, **feeds):
    return loaders.open_session(path, graph=graph).run(None, feeds)[0]


def constants(inputs):
    return {i.name: (MEAN, SCALE) for i in inputs}


def test_the_graph_normalizes_pixels(tmp_path):
    path = write(tmp_path / "a.onnx", [node("Identity", ["x"], ["y"])])
    graph = normalised(path, constants)
    (spec,) = loaders.OnnxProgram(loaders.open_session(path, graph=graph)).inputs
    assert spec == Input("x" + RAW, "UINT8", (-1, 3, 4, 5))
    assert plain_input(spec) == Input("x", "FP32", (-1, 3, 4, 5))
    found = run(path, graph, x__uint8=PIXELS)
    assert np.allclose(found, (PIXELS - MEAN) * SCALE, atol=1e-6)
    plain = run(path, None, x=((PIXELS.astype(np.float32) - np.float32(MEAN)) * np.float32(SCALE)))
    assert np.array_equal(found, plain)


def test_only_named_inputs_are_changed(tmp_path):
    path = write(tmp_path / "a.onnx", [node("Sub", ["x", "z"], ["y"])], inputs=("x", "z"))
    graph = normalised(path, lambda inputs: {inputs[0].name: (MEAN, SCALE)})
    zeros = np.zeros((2, 3, 4, 5), np.float32)
    assert np.allclose(run(path, graph, x__uint8=PIXELS, z=zeros), (PIXELS - MEAN) * SCALE, atol=1e-6)
    assert normalised(path, lambda inputs: {}) is None


def test_a_graph_of_fp16_gets_fp16(tmp_path):
    path = write(tmp_path / "a.onnx", [node("Identity", ["x"], ["y"])], kind=KINDS.FLOAT16)
    found = run(path, normalised(path, constants), x__uint8=PIXELS)
    assert found.dtype == np.float16
    assert np.allclose(found, (PIXELS - MEAN) * SCALE, atol=2e-3)


def test_inputs_of_an_inner_graph_are_normalized_too(tmp_path):
    h = onnx.helper
    one = h.make_graph([node("Identity", ["x"], ["i"])], "one", [], [h.make_tensor_value_info("i", KINDS.FLOAT, None)])
    two = h.make_graph([node("Neg", ["x"], ["i"])], "two", [], [h.make_tensor_value_info("i", KINDS.FLOAT, None)])
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    path = write(tmp_path / "a.onnx", [node("If", ["yes"], ["y"], then_branch=one, else_branch=two)], weights=[yes])
    assert np.allclose(run(path, normalised(path, constants), x__uint8=PIXELS), (PIXELS - MEAN) * SCALE, atol=1e-6)


def test_weights_are_not_inputs(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((1, 3, 4, 5), np.float32), "w")
    path = write(tmp_path / "a.onnx", [node("Mul", ["x", "w"], ["y"])], inputs=("x", "w"), weights=[weight])
    seen = []
    normalised(path, lambda inputs: seen.extend(inputs) or {})
    assert [i.name for i in seen] == ["x"]


def test_a_graph_with_external_weights_is_not_changed(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((1, 3, 4, 5), np.float32), "w")
    path = write(
        tmp_path / "a.onnx", [node("Mul", ["x", "w"], ["y"])], weights=[weight],
        save_as_external_data=True, location="a.bin", size_threshold=0,
    )  # fmt: skip
    assert (tmp_path / "a.bin").exists()
    assert normalised(path, constants) is None


def test_without_the_package_onnx_nothing_is_changed(tmp_path, monkeypatch):
    path = write(tmp_path / "a.onnx", [node("Identity", ["x"], ["y"])])
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert normalised(path, constants) is None


@pytest.mark.gpu
@pytest.mark.skipif(loaders.CUDA not in ort.get_available_providers(), reason="needs ONNX Runtime with CUDA")
def test_a_graph_runs_on_the_gpu(model_files):
    program = file_model(str(model_files / "net.onnx"), ModelConfig(target="net.onnx"), 1)
    program.load("cuda:0")
    requests = [program.preprocess({"x": X[k % 2 :]}) for k in range(20)]
    phases = program.__penstock_phases__
    for k, launched in enumerate([phases.launch(phases.stage([request])) for request in requests]):
        (found,), seconds = phases.fetch(launched)
        assert np.allclose(found["scores"], scores(X[k % 2 :]), atol=1e-3)
        assert seconds > 0


@pytest.mark.parametrize(
    ("batching", "profile", "rows"),
    [
        ({"sizes": (2, 8, 24)}, ("x:2x4", "x:24x4", "x:24x4"), (2, 24)),
        ({"max_batch_size": 8}, ("x:1x4", "x:8x4", "x:8x4"), (1, 8)),
        ({}, ("x:1x4", "x:64x4", "x:64x4"), (1, 64)),
    ],
)
def test_the_profile_of_an_engine_spans_the_sizes_of_batches(
    tensorrt, model_files, monkeypatch, batching, profile, rows
):
    monkeypatch.setattr(
        onnx_device, "OnnxProgram", lambda session: types.SimpleNamespace(rows=ANY_ROWS, inputs=(), outputs=())
    )
    config = ModelConfig(target="net.onnx", optimize="compile", batching=BatchingConfig(**batching))
    settings = msgspec.structs.replace(files.settings_of(config, 1), device="cuda:0")
    program = files._open_onnx(str(model_files / "net.onnx"), settings)
    (options,) = tensorrt
    assert tuple(options[f"trt_profile_{name}_shapes"] for name in ("min", "opt", "max")) == profile
    assert program.rows == rows


def test_texts_of_a_graph_are_padded(tmp_path):
    inputs = [(name, KINDS.FLOAT, ["rows", "length"]) for name in ("x", "mask")]
    outputs = [("masked", KINDS.FLOAT, ["rows", "length"]), ("sums", KINDS.FLOAT, ["rows"])]
    nodes = [("Mul", ["x", "mask"], ["masked"]), ("ReduceSum", ["masked", "one"], ["sums"])]
    h = onnx.helper
    made = h.make_graph(
        [*(h.make_node(op, i, o) for op, i, o in nodes[:1]), h.make_node("ReduceSum", *nodes[1][1:], keepdims=0)],
        "g",
        [h.make_tensor_value_info(*i) for i in inputs],
        [h.make_tensor_value_info(*o) for o in outputs],
        [onnx.numpy_helper.from_array(np.array([1]), "one")],
    )
    onnx.save(h.make_model(made, opset_imports=[h.make_opsetid("", 17)], ir_version=8), tmp_path / "texts.onnx")
    tables = {name: InputConfig(datatype="FP32", shape=(-1, -1), pad=pad) for name, pad in (("x", -1.0), ("mask", 0.0))}
    config = ModelConfig(target=str(tmp_path / "texts.onnx"), inputs=tables)
    made = file_model(config.target, config, 1)
    made.load("cpu")
    items = [{"x": [float(n)] * n, "mask": [1.0] * n} for n in (1, 3)]
    found = made.predict([made.preprocess(item) for item in items])
    assert [(each["masked"].tolist(), each["sums"].tolist()) for each in found] == [([1], 1), ([3, 3, 3], 9)]
    config = ModelConfig(target=config.target, inputs={"x": "FP32[-1,-1]"})
    with pytest.raises(ConfigError, match="leave the key out, except for images with a layout and for texts with pad"):
        file_model(config.target, config, 1).load("cpu")
