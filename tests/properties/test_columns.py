"""Batches in columns answer byte by byte as the same requests decoded, checked and encoded one by one."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.schema import BatchingConfig
from penstock.core.columns import MOST_PLANS
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.core.worker.tensor_model import ANY_ROWS, Arrays, Input, ProgramSettings, TensorModel
from penstock.serving.protocols import oip_protobuf
from penstock.serving.protocols.oip_grpc import encode_infer
from penstock.serving.protocols.oip_messages import encode_request
from penstock.serving.protocols.oip_protobuf import open_inference, set_parameters
from penstock.serving.protocols.oip_tensors import to_bytes
from penstock.types import DTYPES, BatchPart, Item, TensorSpec

INPUTS = (("x", "FP32", (3,)), ("n", "INT32", ()), ("flag", "BOOL", (2, 2)))
WIDE = (("d", "FP64", (2,)), ("x", "FP32", (3,)), ("u", "UINT64", ()), ("b", "BF16", (2,)))
TYPED = {"FP32": "fp32_contents", "FP64": "fp64_contents", "INT32": "int_contents", "BOOL": "bool_contents"}


class Halving:
    """A program with one input and one output."""

    platform = "python"
    inputs = (Input("x", "FP32", (-1, 3)),)
    outputs = (TensorSpec("y", "FP32", (-1, 3)),)
    rows = ANY_ROWS
    unbatched = False

    def run(self, arrays: Arrays) -> Arrays:
        return {"y": arrays["x"] / 2}


class Program:
    """Outputs that depend on every input, in several datatypes; one of them is a view of an input."""

    platform = "python"
    inputs = tuple(Input(name, datatype, (-1, *tail)) for name, datatype, tail in INPUTS)
    outputs = (
        TensorSpec("sum", "FP32", (-1, 3)),
        TensorSpec("half", "FP16", (-1,)),
        TensorSpec("flag", "BOOL", (-1, 2, 2)),
    )
    rows = ANY_ROWS
    unbatched = False

    def run(self, arrays: Arrays) -> Arrays:
        total = arrays["x"] + arrays["n"][:, None]
        return {"sum": np.asfortranarray(total), "half": total[:, 0].astype("f2"), "flag": arrays["flag"]}


class Texts:
    """Floats in, also with texts, and both out."""

    platform = "python"
    inputs = (Input("x", "FP32", (-1, 3)), Input("text", "BYTES", (-1, 2), required=False))
    outputs = (TensorSpec("text", "BYTES", (-1, 2)), TensorSpec("label", "BYTES", (-1,)))
    rows = ANY_ROWS
    unbatched = False

    def run(self, arrays: Arrays) -> Arrays:
        cells = arrays["text"].copy() if "text" in arrays else np.empty((len(arrays["x"]), 2), object)
        for cell, row in zip(cells, arrays["x"].tolist(), strict=True):
            cell[0] = cell[0] or f'"{row[0]}],['
            cell[1] = {1: b"\xff", 2: "\ud800", 3: 4}.get(row[1], b"\xc3\xa9\0")
        return {"text": cells, "label": cells[:, 0]}


class Wide:
    """The datatypes that JSON or typed contents treat alone, in and out."""

    platform = "python"
    inputs = tuple(Input(name, datatype, (-1, *tail), required=name in "dx") for name, datatype, tail in WIDE)
    outputs = tuple(TensorSpec(name, datatype, (-1, *tail)) for name, datatype, tail in WIDE)
    rows = ANY_ROWS
    unbatched = False

    def run(self, arrays: Arrays) -> Arrays:
        return {name: array[:] for name, array in arrays.items()}


class InPhases(Program):
    """The same in three phases, of which the first takes only memory of its own."""

    def __init__(self) -> None:
        self._own: list[np.ndarray[Any, Any]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        self._own.append(np.empty(shape, dtype))
        return self._own[-1]

    def stage(self, arrays: Arrays, rows: int) -> Arrays:
        assert all(any(array is own for own in self._own) for array in arrays.values())
        self._own.clear()
        return arrays

    def launch(self, staged: Arrays) -> Arrays:
        return self.run(staged)

    def fetch(self, launched: Arrays) -> tuple[Arrays, float]:
        return launched, 0.5


def runner(in_columns: bool, program: Any = Program) -> BatchRunner:
    model = TensorModel(lambda settings: program(), ProgramSettings())
    model.__penstock_columns__ = in_columns  # type: ignore[misc]
    python_model = PythonModel(model)
    python_model.load("cpu")
    return BatchRunner(python_model, python_model.metadata("m", "1"), BatchingConfig())


def answers(run: BatchRunner, batch: list[Item]) -> list[Any]:
    """What the clients of a batch get."""
    items = [msgspec.structs.replace(item) for item in batch]
    parts: list[BatchPart] = []
    run.run(1, run.decode(items), parts.append)
    return [
        (bytes(r.body), r.content_type, r.status, r.headers, r.error and (type(r.error), r.error.message))
        for r in parts[-1].results
        if r is not None
    ]


def numbers(datatype: str, tail: tuple[int, ...], rows: int, values: st.DataObject) -> np.ndarray[Any, Any]:
    size = int(np.prod((rows, *tail)))
    cells: Any = {
        "FP32": st.floats(width=32),
        "BF16": st.floats(width=32),
        "FP64": st.floats(),
        "UINT64": st.integers(0, 2**64 - 1) | st.integers(0, 9),
        "INT32": st.integers(-(2**31), 2**31 - 1),
        "BOOL": st.booleans(),
    }[datatype]
    found = values.draw(st.lists(cells, min_size=size, max_size=size))
    return np.array(found, DTYPES[datatype]).reshape(rows, *tail)


def octets(datatype: str, tail: tuple[int, ...], rows: int, values: st.DataObject) -> bytes:
    """A binary tensor; of BOOL, every byte other than 0 is true."""
    array = numbers(datatype, tail, rows, values)
    data = bytes(to_bytes("", datatype, array))
    return data.replace(b"\1", values.draw(st.sampled_from([b"\1", b"\2", b"\xff"]))) if datatype == "BOOL" else data


def raw(values: st.DataObject) -> Item:
    """A raw request for the program with one input; some do not divide."""
    data = numbers("FP32", (3,), 1, values).tobytes() + values.draw(st.sampled_from([b"", b"", b"?"]))
    return Item(data, "oip_binary", "application/octet-stream", 1)


def coded(values: st.DataObject, item: Item) -> Item:
    """The item, or one whose client accepts a compressed response, also of events."""
    if accepted := values.draw(st.sampled_from([b"", b"", b"gzip", b"deflate", b"identity"])):
        item.codec += "_coded"
        events = values.draw(st.sampled_from([[], [], [(b"accept", b"text/event-stream")]]))
        item.headers = [*(item.headers or ()), (b"accept-encoding", accepted), *events]
    return item


IDS = st.one_of(st.none(), st.just("7"), st.sampled_from(['"', 'a"b', "\\", '\\"id":"7"']), st.text(max_size=8))


# of a request; the model takes none
PARAMETERS: Any = st.sampled_from([{}, {}, {"x": 1}, {"x": 2}, {"id": "7"}, {"timeout": 5}, {"sequence_id": 3}])
LISTS: Any = st.sampled_from([{}, {"list": [1, 2]}, {"shape": [[3.5]], "data": {"id": "a"}}])  # JSON only


def spoiled(values: st.DataObject, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The inputs, or perhaps some that are refused."""
    first, *others = inputs
    no_rows = first | {"shape": [0, *first["shape"][1:]]}
    refused = [
        [first, *inputs],
        others,
        [first | {"name": "absent"}, *others],
        [first | {"datatype": "INT8"}, *others],
        [first | {"shape": [*first["shape"], 1]}, *others],
        [no_rows, *others],
    ]
    return values.draw(st.sampled_from([inputs] * 12 + refused))


def written(values: st.DataObject, request: dict[str, Any]) -> bytes:
    """JSON with the white space and the order of keys of some client."""
    inputs: Any = spoiled(values, request["inputs"])
    if values.draw(st.booleans()):
        inputs = [dict(reversed(tensor.items())) for tensor in inputs]
    pairs = [*(request | {"inputs": inputs}).items()]
    request = dict(pairs if values.draw(st.booleans()) else reversed(pairs))
    indent = values.draw(st.sampled_from([None, 0, 1]))
    separators = values.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")]))
    return json.dumps(request, indent=indent, separators=separators, ensure_ascii=values.draw(st.booleans())).encode(
        errors="surrogatepass"
    )


def binary(values: st.DataObject, rows: int) -> Item:
    names = values.draw(st.permutations(INPUTS))
    inputs = [(name, datatype, (rows, *tail), octets(datatype, tail, rows, values)) for name, datatype, tail in names]
    wanted = values.draw(st.sampled_from([None, ["sum"], ["flag", "half"], ["absent"]]))
    head, buffers = encode_request(
        inputs,
        outputs=wanted,
        binary_outputs=values.draw(st.booleans()),
        id=values.draw(IDS),
        parameters=values.draw(PARAMETERS) | values.draw(LISTS),
    )
    if values.draw(st.booleans()):
        head = written(values, json.loads(head))
    body = b"".join([head, *buffers]) + values.draw(st.sampled_from([b"", b"", b"", b"?"]))
    return coded(values, Item(body, "oip_binary", "application/octet-stream", max(rows, 1), head_bytes=len(head)))


def in_json(values: st.DataObject, rows: int) -> Item:
    inputs = []
    for name, datatype, tail in INPUTS:
        array = numbers(datatype, tail, rows, values)
        array = np.nan_to_num(array) if array.dtype.kind == "f" else array
        nested = values.draw(st.booleans())
        data = array.tolist() if nested else array.ravel().tolist()
        if values.draw(st.integers(0, 9)) == 0:
            data = values.draw(st.sampled_from([[True], [], ["1"], [1, [2]], None, [2**70], [1e300], data[:-1]]))
        inputs.append({"name": name, "shape": [rows, *tail], "datatype": datatype, "data": data})
    inputs[0]["parameters"] = values.draw(LISTS)
    request: dict[str, Any] = {"inputs": inputs}
    if parameters := values.draw(PARAMETERS) | values.draw(LISTS):
        request = (
            {"parameters": parameters, **request}
            if values.draw(st.booleans())
            else {**request, "parameters": parameters}
        )
    if (id := values.draw(IDS)) is not None:
        request = {"id": id, **request} if values.draw(st.booleans()) else {**request, "id": id}
    return coded(values, Item(written(values, request), "oip_json", "application/json", max(rows, 1)))


def native(values: st.DataObject, rows: int) -> Item:
    single = rows > 0 and values.draw(st.booleans())
    request = {}
    for name, datatype, tail in INPUTS:
        array = numbers(datatype, tail, rows, values)
        array = np.nan_to_num(array) if array.dtype.kind == "f" else array
        request[name] = array[0].tolist() if single else array.tolist()
    return Item(msgspec.json.encode(request), "native", "application/json", 1)


def grpc(values: st.DataObject, rows: int) -> Item:
    inputs = [(name, datatype, (rows, *tail), octets(datatype, tail, rows, values)) for name, datatype, tail in INPUTS]
    inputs += values.draw(st.sampled_from([[], [], [], inputs[:1]]))
    wanted = values.draw(st.sampled_from([None, ["sum"], ["absent"]]))
    body = encode_infer(("m", "", values.draw(IDS) or ""), inputs, wanted, values.draw(PARAMETERS))
    return Item(body, "oip_grpc", "", max(rows, 1))


def typed(values: st.DataObject, rows: int, inputs: Any = INPUTS) -> Item:
    """A request with typed contents, of which those of FP32 and FP64 are their bytes."""
    request = open_inference().message("inference.ModelInferRequest")(model_name="m", id=values.draw(IDS) or "")
    set_parameters(request.parameters, values.draw(PARAMETERS))
    for name, datatype, tail in inputs:
        array = numbers(datatype, tail, max(rows - values.draw(st.sampled_from([0, 0, 0, 0, 1])), 0), values)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[rows, *tail])
        getattr(tensor.contents, TYPED[datatype]).extend(array.ravel().tolist())
    for name in values.draw(st.sampled_from([(), (), ("x",), ("absent",)])):
        request.outputs.add(name=name)
    return Item(request.SerializeToString(), "oip_grpc", "", max(rows, 1))


def npy(values: st.DataObject, rows: int) -> Item:
    """An array for the program with one input."""
    array = numbers("FP32", (3,), rows, values)
    if values.draw(st.booleans()):
        array = np.asfortranarray(array)
    file = io.BytesIO()
    np.save(file, array)
    accept = values.draw(st.sampled_from([[], [(b"accept", b"application/x-npy")]]))
    return coded(values, Item(file.getvalue(), "oip_npy", "application/x-npy", rows, headers=accept))


@pytest.fixture(scope="module")
def runners() -> tuple[BatchRunner, BatchRunner, BatchRunner]:
    return runner(True), runner(False), runner(True, InPhases)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_columns_answer_as_rows_do(runners: tuple[BatchRunner, ...], values: st.DataObject) -> None:
    kinds = values.draw(st.lists(st.sampled_from([binary, in_json, native, grpc, typed]), min_size=1, max_size=6))
    batch = [kind(values, values.draw(st.integers(0, 3))) for kind in kinds]
    columns, rows, phased = runners
    for _ in range(2):  # also with plans that were just learned
        assert answers(columns, batch) == answers(phased, batch) == answers(rows, batch)


def simple(values: st.DataObject) -> Item:
    """A request for the program with one input, of a kind that is recognized by the request before it."""
    x = [[1.5, 2.25, -3.0]]
    kind = values.draw(st.sampled_from(["binary", "text", "native", "single"]))
    if kind == "binary":
        head, buffers = encode_request([("x", "FP32", (1, 3), np.array(x, "f4").tobytes())], binary_outputs=True)
        return Item(b"".join([head, *buffers]), "oip_binary", "", 1, head_bytes=len(head))
    if kind == "text":
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": x[0]}
        return Item(msgspec.json.encode({"inputs": [tensor]}), "oip_json", "application/json", 1)
    return Item(msgspec.json.encode(x[0] if kind == "single" else {"x": x}), "native", "application/json", 1)


def changed(values: st.DataObject, item: Item) -> Item:
    """The request with another byte at one place."""
    at = values.draw(st.integers(0, len(item.payload) - 1))
    byte = values.draw(st.sampled_from(list(b'0179-.,:e[]{}"\\ x\0')))
    return msgspec.structs.replace(item, payload=item.payload[:at] + bytes([byte]) + item.payload[at + 1 :])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_requests_that_differ_in_one_byte_answer_as_rows_do(values: st.DataObject) -> None:
    columns, rows = runner(True, Halving), runner(False, Halving)
    item = simple(values)
    batch = [item, *[changed(values, item) for _ in range(4)], item]
    for _ in range(2):
        assert answers(columns, batch) == answers(rows, batch)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_arrays_of_numpy_answer_as_rows_do(values: st.DataObject) -> None:
    columns, rows = runner(True, Halving), runner(False, Halving)
    batch = [npy(values, values.draw(st.integers(0, 3))) for _ in range(3)]
    for _ in range(2):
        assert answers(columns, batch) == answers(rows, batch)


def of_wide(values: st.DataObject, rows: int) -> Item:
    """A request for `Wide`, in JSON without BF16."""
    kind = values.draw(st.sampled_from(["binary", "grpc", "typed", "json"]))
    floats, wanted = WIDE[:2], values.draw(st.sampled_from([None, ["u", "b"], ["d"]]))
    if kind == "typed":
        return typed(values, rows, floats)
    if kind == "json":
        arrays = {name: numbers(datatype, tail, rows, values) for name, datatype, tail in WIDE[:3]}
        tensors = [
            {"name": n, "datatype": t, "shape": [rows, *tail], "data": np.nan_to_num(arrays[n]).tolist()}
            for n, t, tail in WIDE[:3]
        ]
        return Item(msgspec.json.encode({"inputs": tensors}), "oip_json", "", rows)
    inputs = [(name, datatype, (rows, *tail), octets(datatype, tail, rows, values)) for name, datatype, tail in WIDE]
    if kind == "grpc":
        return Item(encode_infer(("m", "", ""), inputs, wanted, {}), "oip_grpc", "", rows)
    head, buffers = encode_request(inputs, outputs=wanted, binary_outputs=True)
    return Item(b"".join([head, *buffers]), "oip_binary", "", rows, head_bytes=len(head))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_wide_datatypes_answer_as_rows_do(values: st.DataObject) -> None:
    columns, rows = runner(True, Wide), runner(False, Wide)
    batch = [of_wide(values, values.draw(st.integers(1, 2))) for _ in range(3)]
    for _ in range(2):
        assert answers(columns, batch) == answers(rows, batch)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_texts_answer_as_rows_do(values: st.DataObject) -> None:
    columns, rows = runner(True, Texts), runner(False, Texts)
    batch = []
    for _ in range(3):
        x = numbers("FP32", (3,), values.draw(st.integers(1, 2)), values)
        x[:, 1] = values.draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
        binary = values.draw(st.sampled_from([None, True, False]))
        if binary is None:
            batch.append(Item(msgspec.json.encode(np.nan_to_num(x).tolist()), "native", "application/json", 1))
            continue
        inputs: list[Any] = [("x", "FP32", x.shape, x.tobytes())]
        if values.draw(st.booleans()):
            cells = values.draw(st.lists(st.binary(max_size=2), min_size=2 * len(x), max_size=2 * len(x)))
            inputs.append(("text", "BYTES", (len(x), 2), cells))
        head, buffers = encode_request(inputs, binary_outputs=binary, id="7")
        batch.append(Item(b"".join([head, *buffers]), "oip_binary", "", len(x), head_bytes=len(head)))
    for _ in range(2):
        assert answers(columns, batch) == answers(rows, batch)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_raw_requests_answer_as_rows_do(values: st.DataObject) -> None:
    columns, rows = runner(True, Halving), runner(False, Halving)
    batch = [raw(values) for _ in range(3)]
    for _ in range(2):
        assert answers(columns, batch) == answers(rows, batch)


def test_requests_of_one_plan_run_as_one_array() -> None:
    """One call of the program for a batch, whatever the ids and the formats, and no look at single requests."""
    calls: list[int] = []

    class Counting(Halving):
        def run(self, arrays: Arrays) -> Arrays:
            calls.append(len(arrays["x"]))
            return super().run(arrays)

    run = runner(True, Counting)
    x = np.arange(3, dtype="f4").reshape(1, 3)
    batch = []
    for k in range(6):
        head, buffers = encode_request([("x", "FP32", (1, 3), x.tobytes())], binary_outputs=True, id=f"request {k}")
        batch.append(Item(b"".join([head, *buffers]), "oip_binary", "", 1, head_bytes=len(head)))
    batch.append(Item(encode_infer(("m", "", "g"), [("x", "FP32", (1, 3), x.tobytes())], None, {}), "oip_grpc", "", 1))
    batch.append(Item(b'{"x": [[0, 1, 2]]}', "native", "application/json", 1))
    answers(run, batch)
    answers(run, batch)
    assert calls == [8, 8]
    recognized = [run.codecs.get(item.codec).recognize([item])[0] for item in batch]  # type: ignore[attr-defined]
    assert None not in recognized
    assert len({id(request.plan.stack) for request in recognized[:6]}) == 1


def test_requests_of_every_datatype_of_numbers_have_plans() -> None:
    """Also BF16, UINT64 in JSON, and typed contents that are the bytes of floats."""
    run, arrays = runner(True, Wide), {name: np.ones((1, *tail), DTYPES[kind]) for name, kind, tail in WIDE}
    inputs = [(n, kind, arrays[n].shape, bytes(to_bytes(n, kind, arrays[n]))) for n, kind, _ in WIDE]
    head, buffers = encode_request(inputs, binary_outputs=True)
    tensors = [{"name": n, "datatype": k, "shape": [1, *t], "data": arrays[n].tolist()} for n, k, t in WIDE[:3]]
    typed = open_inference().message("inference.ModelInferRequest")(model_name="m")
    for name, datatype, tail in WIDE[:2]:
        tensor = typed.inputs.add(name=name, datatype=datatype, shape=[1, *tail])
        getattr(tensor.contents, TYPED[datatype]).extend(arrays[name].ravel())
    typed.outputs.add(name="x")
    batch = [
        Item(b"".join([head, *buffers]), "oip_binary", "", 1, head_bytes=len(head)),
        Item(encode_infer(("m", "", ""), inputs, None, {}), "oip_grpc", "", 1),
        Item(msgspec.json.encode({"inputs": tensors}), "oip_json", "", 1),
        Item(typed.SerializeToString(), "oip_grpc", "", 1),
    ]
    assert [error for *_, error in answers(run, batch)] == [None] * 4
    assert [None] not in [run.codecs.get(item.codec).recognize([item]) for item in batch]  # type: ignore[attr-defined]


def parametrized(parameters: dict[str, Any], id: str, x: Any) -> list[Item]:
    """The same request in each form."""
    inputs = [("x", "FP32", x.shape, x.tobytes())]
    head, buffers = encode_request(inputs, binary_outputs=True, id=id, parameters=parameters)
    tensor = {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}
    body = msgspec.json.encode({"parameters": parameters, "id": id, "inputs": [tensor]})
    return [
        Item(b"".join([head, *buffers]), "oip_binary", "", len(x), head_bytes=len(head)),
        Item(body, "oip_json", "", len(x)),
        Item(encode_infer(("m", "", id), inputs, None, parameters), "oip_grpc", "", len(x)),
    ]


def test_parameters_that_are_ignored_are_part_of_a_plan() -> None:
    run = runner(True, Halving)
    x = np.ones((1, 3), "f4")
    for _ in range(2):
        answers(run, parametrized({"user": "a", "n": 1}, "1", x))
    for item in parametrized({"user": "a", "n": 1}, "2", 2 * x):
        codec: Any = run.codecs.get(item.codec)
        (found,) = codec.recognize([item])
        assert found is not None
        assert found.id == "2"
    assert all(run.codecs.get(i.codec).recognize([i]) == [None] for i in parametrized({"user": "b"}, "2", x))  # type: ignore[attr-defined]


def test_a_model_that_takes_parameters_gets_those_of_each_request() -> None:
    class Scaled:
        inputs = (TensorSpec("x", "FP32", (-1, 3)),)

        def predict(self, items: list[Any], parameters: list[dict[str, Any]]) -> list[Any]:
            return [{"y": item["x"] * asked["scale"]} for item, asked in zip(items, parameters, strict=True)]

    model = PythonModel(Scaled)
    model.load("cpu")
    run = BatchRunner(model, model.metadata("m", "1"), BatchingConfig())
    x = np.ones((1, 3), "f4")
    for scale in (2, 3, 2):
        batch = [item for other in (scale, 5) for item in parametrized({"scale": other}, "1", x)]
        binary, text, grpc, *five = [body for body, *_ in answers(run, batch)]
        expected = (scale * x).tobytes()
        assert (binary[-12:], grpc[-12:]) == (expected, expected)
        assert msgspec.json.decode(text)["outputs"][0]["data"] == [scale] * 3
        assert five[0][-12:] == (5 * x).tobytes()


def test_a_thousand_plans_take_bounded_memory() -> None:
    run = runner(True, Halving)
    for rows in range(1, 1000):
        found = answers(run, parametrized({}, "7", np.full((rows, 3), rows, "f4")))
        assert [error for *_, error in found] == [None] * 3
    codecs: Any = [run.codecs.get(f"oip_{form}") for form in ("binary", "json", "grpc")]
    memories = [*[codec.plans for codec in codecs], oip_protobuf._known, oip_protobuf._sections]
    assert all(0 < len(memory) <= MOST_PLANS for memory in memories)


def test_a_program_that_fails_isolates_the_row() -> None:
    """A batch in columns runs again in halves, as any other, and only the guilty request fails."""

    class Picky(Halving):
        def run(self, arrays: Arrays) -> Arrays:
            x = arrays["x"]
            found = super().run(arrays)
            if x.flags.writeable:  # a model may change its input
                x *= 7
            if (found["y"] == 3.5).any():
                raise ValueError("seven")
            return found

    def request(value: float) -> Item:
        head, buffers = encode_request([("x", "FP32", (1, 3), np.full((1, 3), value, "f4").tobytes())])
        return Item(b"".join([head, *buffers]), "oip_binary", "", 1, head_bytes=len(head))

    columns, rows = runner(True, Picky), runner(False, Picky)
    good = answers(columns, [request(v) for v in (1, 2, 0, 4, 5)])
    for batch in ([request(1)], [request(v) for v in (1, 2, 7, 4, 5)]):
        found = answers(columns, batch)
        assert found == answers(rows, batch)
    assert found[:2] + found[3:] == good[:2] + good[3:]
    assert [error is None for *_, error in found] == [True, True, False, True, True]
