"""TorchPipe's files as graphs: the effect of its keys, and the errors of bad ones."""

import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.pipeline.check import check
from penstock.pipeline.describe import to_toml
from penstock.pipeline.graph import Each, Graph, NodeInput, NodeStep
from penstock.pipeline.load import load_graph, parse_graph
from penstock.pipeline.ops import catalog
from penstock.torchpipe import dialect

PUBLISHED = """\
batching_timeout = 5
instance_num = 8
precision = "fp16"
[cpu_decoder]
backend = "DecodeMat"
next = "cpu_posdecoder"
[cpu_posdecoder]
backend = "Sequential[ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]"
resize_h = 224
resize_w = 224
color = "rgb"
next = "resnet50"
[resnet50]
backend = "SyncTensor[TensorrtTensor]"
min = 1
max = 4
instance_num = 4
model = "/you/model/path/resnet50.onnx"
mean="123.675, 116.28, 103.53"
std="58.395, 57.120, 57.375"
"model::cache"="/you/model/path/resnet50.trt"
"""
NET = '[net]\nbackend = "OnnxTensor"\nmodel = "net.onnx"\n'


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "visible_gpus", lambda: 0)


def load(tmp_path: Path, text: str, *, compat: bool = False) -> Graph:
    (tmp_path / "p.toml").write_text(text)
    return load_graph(tmp_path / "p.toml", compat=compat)


def refused(tmp_path: Path, text: str) -> str:
    """The error of a bad file."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.message


def test_the_published_file_is_three_nodes(tmp_path: Path) -> None:
    graph = load(tmp_path, PUBLISHED)
    assert (graph.name, graph.entry, graph.outputs) == ("p", "cpu_decoder", ("resnet50",))
    assert graph.order() == ("cpu_decoder", "cpu_posdecoder", "resnet50")
    decode, prepare, net = graph.nodes.values()
    assert (decode.steps, decode.instances, decode.max_batch) == ((NodeStep("DecodeMat"),), 8, None)
    assert prepare.steps == (
        NodeStep("ResizeMat", {"resize_h": 224, "resize_w": 224}),
        NodeStep("CvtColorMat", {"color": "rgb"}, "swap"),
        NodeStep("Mat2Tensor", {}, "swap"),
    )
    (step,) = net.steps
    assert step.op == "TensorrtTensor"
    assert step.params["model"] == "/you/model/path/resnet50.onnx"
    assert step.params["model_cache"] == "/you/model/path/resnet50.trt"
    assert step.params["mean"] == (123.675, 116.28, 103.53)
    assert step.params["precision"] == "fp16"
    assert (net.instances, net.min_batch, net.max_batch, net.wait_s) == (4, 1, 4, 0.005)


def test_waits_and_batches_for_all_nodes_are_for_those_with_a_model(tmp_path: Path) -> None:
    graph = load(tmp_path, "max = 4\n" + PUBLISHED)
    assert graph.nodes["cpu_decoder"].wait_s is None
    assert graph.nodes["cpu_decoder"].max_batch is None
    assert graph.nodes["resnet50"].max_batch == 4


def test_texts_are_numbers_where_numbers_belong() -> None:
    tables = {
        "batching_timeout": "2.5",
        "a": {
            "backend": "S[DecodeMat,ResizeMat]",
            "resize_h": "8",
            "resize_w": "9",
            "instance_num": "3",
            "next": "net",
        },
        "net": {"backend": "OnnxTensor", "model": "/m.onnx", "max": "4", "retry_split": "0"},
    }
    graph = parse_graph(tables, name="t", folder="/", compat=True)
    assert graph.nodes["a"].instances == 3
    assert graph.nodes["a"].steps[1].params == {"resize_h": 8, "resize_w": 9}
    assert (graph.nodes["net"].wait_s, graph.nodes["net"].max_batch) == (0.0025, 4)
    assert graph.nodes["net"].retry_split is False


def test_a_model_has_a_batch_of_one_in_the_dialect_and_eight_natively(tmp_path: Path) -> None:
    assert load(tmp_path, NET).nodes["net"].max_batch == 8
    assert load(tmp_path, NET, compat=True).nodes["net"].max_batch == 1
    assert load(tmp_path, NET + "sizes = [1, 4, 16]").nodes["net"].max_batch == 16


def test_a_users_batch_op_sets_its_own_size_in_the_dialect(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Whole:\n    def forward(self, items):\n        pass\n    def max(self):\n        return 32\n"
    )
    text = '[a]\nbackend = "Python[own.py:Whole]"\n'
    assert load(tmp_path, text, compat=True).nodes["a"].max_batch == 64
    assert load(tmp_path, text).nodes["a"].max_batch == 8


@pytest.mark.parametrize(
    ("text", "least", "most", "sizes"),
    [
        ('max = "4x3x224x224"\nmin = "1x3x224x224"', 1, 4, ()),
        ('max = "4x3x8x8,4x10"', 1, 4, ()),
        ('max = "1;4"\nmin = "1;2"', 1, 4, (1, 4)),
        ('max = "8;1;8"', 1, 8, (1, 8)),
        ("min = 2\nmax = 4", 2, 4, ()),
        ("min = 16", 16, 16, ()),
    ],
)
def test_max_and_min_may_be_shapes_and_lists(
    tmp_path: Path, text: str, least: int, most: int, sizes: tuple[int, ...]
) -> None:
    node = load(tmp_path, NET + text).nodes["net"]
    assert (node.min_batch, node.max_batch, node.sizes) == (least, most, sizes)


def test_a_backend_of_an_unknown_engine_is_refused_and_never_only_warned_about(tmp_path: Path) -> None:
    key = '"Torch::backend" = "Identity"'
    for text in (NET + key, f"{key}\n{NET}"):
        with pytest.raises(ConfigError, match="is not supported"):
            load(tmp_path, text, compat=True)


def test_a_parameter_may_name_its_op(tmp_path: Path) -> None:
    graph = load(tmp_path, '[a]\nbackend = "S[Sleep,Identity]"\n"Sleep::time" = 3\n', compat=True)
    assert graph.nodes["a"].steps[0].params == {"time": 3.0}
    graph = load(tmp_path, '"Sleep::time" = "7"\n[a]\nbackend = "Sleep"\n[b]\nbackend = "Identity"\n', compat=True)
    assert graph.nodes["a"].steps[0].params == {"time": 7.0}


def test_a_gpu_is_used_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path, NET).nodes["net"].device == "auto"
    assert load(tmp_path, NET + "device_id = 1").nodes["net"].device == "cpu"
    assert "there is no GPU: the node runs on the CPU" in caplog.text
    monkeypatch.setattr(dialect, "visible_gpus", lambda: 2)
    assert load(tmp_path, NET + "device_id = 1").nodes["net"].device == "cuda:1"
    assert load(tmp_path, NET + 'device = "cuda"').nodes["net"].device == "cuda:0"


def test_names_of_task_keys_are_fields(tmp_path: Path) -> None:
    graph = load(tmp_path, '[a]\nnext = "b"\n[b]\nmap = "a[TASK_RESULT_KEY:TASK_DATA_KEY, data : TASK_BOX_KEY]"\n')
    assert graph.nodes["b"].inputs == (NodeInput("a", "result", "data"), NodeInput("a", "data", "_box"))


@pytest.mark.parametrize(("text", "found"), [("or = true", "or"), ('or = "1"', "or"), ("or = false", "swap")])
def test_the_key_or_is_a_synonym_of_its_filter(tmp_path: Path, text: str, found: str) -> None:
    assert load(tmp_path, f'[a]\nnext = "b"\n[b]\n{text}\n').nodes["b"].filter == found


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (
            '"MapReduce"\nsplit = "TASK_BOX_KEY"\njump = "crop"\nmerge = "score,result"',
            Each("crop", "_box", ("score", "result")),
        ),
        ('"S[Identity,MapReduce[crop]]"', Each("crop", "data", ("result",))),
        ('"Jump[crop]"', Each("crop")),
        ('"Jump"\njump = "crop"\nsplit = "x"\nmerge = "y"', Each("crop")),
        ('"Identity"\nbody = "crop"', Each("crop")),
    ],
)
def test_a_fan_out_is_read(tmp_path: Path, backend: str, expected: Each) -> None:
    graph = load(tmp_path, f'[boxes]\nnext = "objects"\n[objects]\nbackend = {backend}\n[crop]\n')
    assert graph.nodes["objects"].each == expected
    assert [step.op for step in graph.nodes["objects"].steps] == ["Identity"]
    assert (graph.entry, graph.outputs) == ("boxes", ("objects",))
    assert parse_graph(tomllib.loads(to_toml(graph)), name="x", folder=graph.folder).nodes == graph.nodes


def test_defaults_may_be_in_their_own_table() -> None:
    tables = {"global": {"instance_num": "2"}, "a": {"node_name": "a", "backend": "Identity"}}
    for compat in (True, False):
        assert parse_graph(tables, name="t", folder="/", compat=compat).nodes["a"].instances == 2


def test_filters_before_brackets_guard_all_that_is_in_them(tmp_path: Path) -> None:
    text = '[a]\nbackend = "S[S[DecodeTensor,CvtColorMat],(or)S[DecodeMat,CvtColorMat],Mat2Tensor]"\ncolor = "rgb"'
    steps = load(tmp_path, text).nodes["a"].steps
    assert [s.filter for s in steps] == ["run", "swap", "or", "then", "swap"]


def test_parameters_of_an_op_override_those_of_the_node(tmp_path: Path) -> None:
    text = '[a]\nbackend = "S[ResizeMat(resize_h=8),ResizeMat]"\nresize_h = 4\nresize_w = 4'
    first, second = load(tmp_path, text).nodes["a"].steps
    assert (first.params, second.params) == ({"resize_h": 8, "resize_w": 4}, {"resize_h": 4, "resize_w": 4})


def test_a_map_needs_no_name_after_a_single_node(tmp_path: Path) -> None:
    graph = load(tmp_path, '[a]\nnext = "b"\n[b]\nmap = "[result:data,data:image]"\n')
    assert graph.nodes["b"].inputs == (NodeInput("a", "result", "data"), NodeInput("a", "data", "image"))


def test_an_unknown_key_causes_a_warning_in_the_dialect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, "resize_hh = 3\n[a]\nnxt = 3\n", compat=True)
    assert [r.getMessage().partition("p.toml, ")[2][:25] for r in caplog.records] == [
        "line 3: [a] nxt: unknown ",
        "line 1: resize_hh: unknow",
    ]
    caplog.clear()
    load(tmp_path, "[pipeline]\ncompat = 'torchpipe'\n[a]\nnxt = 3\n")
    assert "[a] nxt: unknown key, ignored; did you mean 'next'?" in caplog.text


def test_two_entries_cause_a_warning_in_the_dialect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, "[a]\n[b]\n", compat=True).entry == "a"
    assert "items that name no node begin at [a]" in caplog.text


def test_the_dialect_becomes_native(tmp_path: Path) -> None:
    tables = {
        "batching_timeout": "5",
        "instance_num": "2",
        "decode": {"backend": "DecodeMat", "next": "net"},
        "net": {"backend": "S[Mat2Tensor,SyncTensor[OnnxTensor]]", "model": "n.onnx", "max": "4", "odd": "1"},
    }
    graph = parse_graph(tables, name="c", folder=str(tmp_path), compat=True)
    native = tomllib.loads(to_toml(graph))
    assert native["net"] == {
        "ops": ["Mat2Tensor", {"op": "OnnxTensor", "model": "n.onnx"}],
        "instances": 2,
        "max_batch": 4,
        "wait_ms": 5.0,
    }
    assert parse_graph(native, name="c", folder=str(tmp_path)) == replace(graph, compat=False)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ('max = "4&x"', "expected a whole number, 1 or more, or a shape"),
        ('instance_num = "2&x"', "groups of a node ('&') may have other model,"),
        ('precision = "fp16&fp32"', "groups of a node ('&') may have other model,"),
        ('map = "a[result|data]"', "map: found 'result|data', expected a pair"),
        ('max = "4x3,8x3"', "expected the same batch for each input"),
        ('max = "many"', "expected a whole number, 1 or more, or a shape"),
        ("max = 0", "expected a whole number, 1 or more, or a shape"),
        ("min = 5\nmax = 4", "min: found 5, expected at most max_batch, which is 4"),
        ("max = 4\nmax_batch = 4", "is another spelling of 'max_batch', which is also set"),
        ('cal_request_size_method = "Mine"', "cal_request_size_method: is not supported: each row of a tensor counts"),
        ('model_type = ".trt"', "model_type: found the string '.trt' for "),
        ('device_id = "first"', "device_id: found the string 'first', expected the number of a GPU"),
        ('map = "prep"', "map: found the string 'prep', expected for instance prep[result:data,box:box]"),
        ('map = "prep[result]"', "map: found 'result', expected a pair"),
        ('map = "a[result:data],b[result:data]"', "map: found the field 'data' twice"),
        ('map = "a[TASK_DATTA_KEY:data]"', "found TASK_DATTA_KEY, expected one of TASK_BOX_KEY"),
        ("or = 3", "line 4: [net] or: found 3, expected true or false"),
        ('or = true\nfilter = "swap"', "[net] or: is another spelling of 'filter', which is also set"),
        ('jump = "a"', "jump: there is no node 'a'"),
    ],
)
def test_an_invalid_value_is_refused(tmp_path: Path, keys: str, told: str) -> None:
    message = refused(tmp_path, NET + keys)
    assert "[net]" in message
    assert told in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[a]\nbackend = "MapReduce"\n[b]\n', "[a] backend: MapReduce needs 'jump', the node where the items begin"),
        ('[a]\nbackend = "Jump[b]"\njump = "c"\n[b]\n[c]\n', "Jump needs 'jump', the node where the items begin, once"),
        ('[a]\nbackend = "S[S[Jump[b],Identity]]"\n[b]\n', "[a] backend: Jump must be the last op of its node"),
        ('[a]\nops = [{op = "S[DecodeMat,Mat2Tensor]"}]', "is more than one op"),
        ('[a]\nbackend = "S[DecodeMat,Mat2Tensr]"', "unknown op 'Mat2Tensr'; did you mean 'Mat2Tensor'?"),
        ('[a]\nbackend = "Torch(device_id=1)[DecodeMat]"', "[a] backend: at character 1: Torch takes no parameters"),
        (
            '[a]\nbackend = "(or)S[DecodeMat,(or)DecodeTensor]"',
            "a filter before brackets cannot contain other filters",
        ),
    ],
)
def test_wrong_expressions_are_refused(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, text)


@pytest.mark.parametrize(("name", "found"), [("cp", "Copy"), ("rm", "Remove")])
def test_an_alias_is_an_op(name: str, found: str) -> None:
    assert catalog.find(name).__name__ == found


@pytest.mark.parametrize("name", ["Continue", "Skip", "serialskip", "half_chance"])
def test_filters_of_nodes_are_found_in_any_spelling(name: str) -> None:
    graph = parse_graph({"a": {"next": "b"}, "b": {"filter": name}}, name="g", folder="/")
    check(graph)
    assert graph.nodes["b"].filter in ("run", "skip", "serial_skip", "half_chance")
