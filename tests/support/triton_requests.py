"""Requests to infer over HTTP, for Triton and Penstock alike: tensors, and everything that can be wrong with them."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from support.triton_answers import HEADER, Http

MLP = "/v2/models/mlp/infer"
X = [1.0, 2.0, 3.0, 4.0]
RAW = struct.pack("<4f", *X)
SAMPLES: dict[str, list[Any]] = {  # values that JSON holds exactly
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**53],
    "INT8": [-128, 127],
    "INT16": [-32768, 32767],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**53), 2**53],
    "FP32": [-1.5, 0.25],
    "FP64": [-1.5, 1e300],
    "BYTES": ["a", 'ü, "b"'],
}
KINDS = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8"} | {
    f"{sign}INT{bits}": f"{sign.lower() or 'i'}{bits // 8}" for sign in ("", "U") for bits in (8, 16, 32, 64)
}


def tensor(name: str, datatype: str, shape: Any, data: Any = None, **parameters: Any) -> dict[str, Any]:
    """An input in JSON; without data it has parameters only."""
    found = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        found["data"] = data
    return found | ({"parameters": parameters} if parameters else {})


def raw(datatype: str, values: Any) -> bytes:
    """The bytes of a tensor."""
    if datatype == "BYTES":
        parts = [value if isinstance(value, bytes) else value.encode() for value in values]
        return b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return np.asarray(values, f"<{KINDS[datatype]}").tobytes()


def x(data: Any = X, shape: Any = (1, 4), datatype: str = "FP32", name: str = "x", **parameters: Any) -> dict[str, Any]:
    """The input of `mlp`."""
    return tensor(name, datatype, shape, data, **parameters)


def infer(name: str, model: str = "mlp", version: str = "", *, inputs: Any = None, **keys: Any) -> Http:
    """An inference in JSON; `head` has other keys of the request's object."""
    path = f"/v2/models/{model}{version and f'/versions/{version}'}/infer"
    head = {"inputs": [x()] if inputs is None else inputs, **keys.pop("head", {})}
    return Http(f"infer: {name}", path, head, **keys)


def datatypes() -> Iterator[Http]:
    """Each datatype in JSON, and in binary both ways."""
    for kind, values in SAMPLES.items():
        given = [tensor(kind, kind, [1, 2], values)]
        yield infer(f"{kind} in JSON", "same", inputs=given)
        yield infer(f"{kind} of two rows", "same", inputs=[tensor(kind, kind, [2, 1], [[v] for v in values])])
        yield infer(
            f"{kind} in JSON, binary out", "same", inputs=given, head={"parameters": {"binary_data_output": True}}
        )
    for kind, values in {**SAMPLES, "FP16": [-1.5, 0.25]}.items():
        data = raw(kind, values)
        given = [tensor(kind, kind, [1, 2], binary_data_size=len(data))]
        both = {"parameters": {"binary_data_output": True}}
        yield infer(f"{kind} in binary", "same", inputs=given, binary=data, head=both)
        if kind != "FP16":
            yield infer(f"{kind} in binary, JSON out", "same", inputs=given, binary=data)
        yield infer(f"{kind} in binary, a byte short", "same", inputs=given, binary=data[:-1], head=both)
        short = [tensor(kind, kind, [1, 2], binary_data_size=len(data) - 1)]
        yield infer(f"{kind} in binary, size a byte short", "same", inputs=short, binary=data[:-1], head=both)
    bf16 = np.array([1.5, -2.0], np.float32).tobytes()[2:4] + np.array([-2.0], np.float32).tobytes()[2:4]
    given = [tensor("x", "BF16", [1, 2], binary_data_size=4)]
    yield infer("BF16 in binary", "bf16", inputs=given, binary=bf16, head={"parameters": {"binary_data_output": True}})
    yield infer("BF16 in JSON", "bf16", inputs=[tensor("x", "BF16", [1, 2], [1.5, -2.0])])
    yield infer("BF16 out in JSON", "bf16", inputs=given, binary=bf16)
    yield infer("FP16 in JSON", "same", inputs=[tensor("FP16", "FP16", [1, 2], [1.5, -2.0])])
    half = [tensor("FP16", "FP16", [1, 1], binary_data_size=2)]
    yield infer("FP16 out in JSON", "same", inputs=half, binary=raw("FP16", [1.5]))
    two = [tensor("BOOL", "BOOL", [1, 3], binary_data_size=3)]
    yield infer("BOOL bytes above 1", "same", inputs=two, binary=b"\x02\x00\xff")
    yield infer("BOOL bytes above 1, binary out", "same", inputs=two, binary=b"\x02\x00\xff", head=both)
    odd = raw("FP32", [float("nan"), float("inf"), -float("inf")])
    three = [tensor("FP32", "FP32", [1, 3], binary_data_size=12)]
    yield infer("NaN and infinity in JSON", "same", inputs=three, binary=odd)
    yield infer("NaN and infinity in binary", "same", inputs=three, binary=odd, head=both)
    double = [tensor("FP64", "FP64", [1, 1], binary_data_size=8)]
    yield infer("NaN of FP64 in JSON", "same", inputs=double, binary=raw("FP64", [float("nan")]))
    third = [tensor("FP32", "FP32", [1, 2], binary_data_size=8)]
    yield infer("FP32 that JSON rounds", "same", inputs=third, binary=raw("FP32", [1 / 3, 1e-7]))
    yield infer("FP32 whole numbers", "same", inputs=third, binary=raw("FP32", [3.0, -0.0]))
    yield infer("FP32 of a thin JSON integer", "same", inputs=[tensor("FP32", "FP32", [1, 2], [1, 2])])
    yield infer(
        "BYTES that are no UTF-8, JSON out",
        "same",
        inputs=[tensor("BYTES", "BYTES", [1, 1], binary_data_size=6)],
        binary=raw("BYTES", [b"\xff\xfe"]),
    )
    yield infer("BYTES with a zero byte", "same", inputs=[tensor("BYTES", "BYTES", [1, 1], ["a\0b"])])
    yield infer("BYTES of no length", "same", inputs=[tensor("BYTES", "BYTES", [1, 2], ["", ""])])
    yield infer(
        "BYTES whose length is too long",
        "same",
        binary=struct.pack("<I", 99) + b"ab",
        head=both,
        inputs=[tensor("BYTES", "BYTES", [1, 1], binary_data_size=6)],
    )
    several = [tensor("INT8", "INT8", [1, 1], [1]), tensor("FP64", "FP64", [1, 2], [1.0, 2.0])]
    yield infer("two inputs", "same", inputs=several)
    yield infer("two inputs, the other order", "same", inputs=several[::-1])
    yield infer(
        "one in JSON, one in binary",
        "same",
        binary=b"\x07",
        inputs=[several[1], tensor("INT8", "INT8", [1, 1], binary_data_size=1)],
    )
    yield infer("no inputs where all are optional", "same", inputs=[])
    yield infer("a row without elements", "same", inputs=[tensor("FP32", "FP32", [1, 0], [])])
    yield infer("no rows", "same", inputs=[tensor("FP32", "FP32", [0, 1], [])])
    for kind, value in {"UINT8": 256, "INT8": -129, "UINT32": -1, "INT32": 2**31, "INT64": 2**63, "BOOL": 1}.items():
        yield infer(f"{kind} out of range", "same", inputs=[tensor(kind, kind, [1, 1], [value])])
    for kind, value in {"INT32": 1.5, "FP32": "1", "BYTES": 1, "BOOL": "true", "UINT8": None}.items():
        yield infer(f"{kind} of the wrong JSON", "same", inputs=[tensor(kind, kind, [1, 1], [value])])


def shapes() -> Iterator[Http]:
    """Shapes and data that fit and that do not, and rows."""
    for rows in (1, 2, 8):
        yield infer(f"{rows} rows", inputs=[x(X * rows, [rows, 4])])
    yield infer("nested data", inputs=[x([X, X], [2, 4])])
    yield infer("data nested otherwise", inputs=[x([[X], [X]], [2, 4])])
    yield infer("more rows than max_batch_size", inputs=[x(X * 9, [9, 4])])
    for name, shape in {
        "one axis": [4],
        "three axes": [1, 1, 4],
        "no axes": [],
        "a wrong axis": [1, 5],
        "a negative axis": [-1, 4],
        "two negative axes": [-1, -4],
        "a zero axis": [1, 0],
        "a product above 2**64": [2**40, 2**40],
        "a float": [1.0, 4],
        "a text": ["1", "4"],
        "a number": 4,
        "an axis of null": [1, None],
        "an axis of 2**63": [2**63, 4],
    }.items():
        yield infer(f"shape: {name}", inputs=[x(X, shape)])
        yield infer(f"shape in binary: {name}", inputs=[x(None, shape, binary_data_size=16)], binary=RAW)
    yield infer("too little data", inputs=[x(X[:3])])
    yield infer("too much data", inputs=[x([*X, 5.0])])
    yield infer("no data", inputs=[x(None)])
    yield infer("data is empty", inputs=[x([])])
    yield infer("data is an object", inputs=[x({"a": 1})])
    yield infer("data is a number", inputs=[x(1.0)])
    yield infer("data has a text", inputs=[x([1, 2, 3, "4"])])
    yield infer("data has null", inputs=[x([1, 2, 3, None])])
    yield infer("data has true", inputs=[x([1, 2, 3, True])])
    for size in (0, 15, 17, -16, 2**40, "16", 16.0, None, True):
        yield infer(f"binary_data_size {size!r}", inputs=[x(None, binary_data_size=size)], binary=RAW)
    yield infer("binary_data_size and data", inputs=[x(X, binary_data_size=16)], binary=RAW)
    yield infer("bytes that no input names", inputs=[x()], binary=RAW)
    yield infer("more bytes than named", inputs=[x(None, binary_data_size=16)], binary=RAW + b"1")
    yield infer("binary_data_size without bytes", inputs=[x(None, binary_data_size=16)])
    yield infer("sums of no batch axis", "sums", inputs=[tensor("x", "INT32", [3], [1, 2, 3])])
    yield infer("sums of nothing", "sums", inputs=[tensor("x", "INT32", [0], [])])
    yield infer("sums with two axes", "sums", inputs=[tensor("x", "INT32", [1, 3], [1, 2, 3])])
    yield infer("a model that fails", "sums", inputs=[tensor("x", "INT32", [1], [-1])])
    sizes = {"binary_data_size": 8}
    yield infer("sums in binary", "sums", inputs=[tensor("x", "INT32", [2], **sizes)], binary=raw("INT32", [1, 2]))
    a, b = tensor("a", "INT32", [1, 2], [1, 2]), tensor("b", "INT32", [1, 2], [3, 4])
    yield infer("an optional input", "added", inputs=[a, b])
    yield infer("without the optional input", "added", inputs=[a])
    yield infer("only the optional input", "added", inputs=[b])
    yield infer("inputs in the other order", "added", inputs=[b, a])
    for model, left, right, output in (("added", "a", "b", "difference"), ("chain", "A", "B", "DIFFERENCE")):
        both = [tensor(left, "INT32", [2, 2], [1, 2, 3, 4]), tensor(right, "INT32", [2, 2], [3, 4, 5, 6])]
        one = {"outputs": [{"name": output}]}  # an ensemble answers its outputs in any order
        yield infer(f"{model} of two rows", model, inputs=both, head=one)
        yield infer(f"{model}, unknown output", model, inputs=both, head={"outputs": [{"name": "z"}]})
        yield infer(f"{model}, without {left}", model, inputs=both[1:])
        yield infer(f"{model}, two of a name", model, inputs=[*both, both[0]])
        yield infer(f"{model}, unknown input", model, inputs=[*both, tensor("z", "INT32", [1, 2], [1, 2])])
        yield infer(f"{model}, wrong datatype", model, inputs=[both[0], {**both[1], "datatype": "FP32"}])
        yield infer(f"{model}, wrong shape", model, inputs=[both[0], tensor(right, "INT32", [2, 1], [1, 2])])
        data = [tensor(name, "INT32", [1, 2], binary_data_size=8) for name in (left, right)]
        numbers, head = raw("INT32", [1, 2, 3, 4]), {"outputs": [{"name": output, "parameters": {"binary_data": True}}]}
        yield infer(f"{model} in binary", model, inputs=data, binary=numbers, head=head)
    yield infer("chain, without B", "chain", inputs=[tensor("A", "INT32", [1, 2], [1, 2])])
    yield infer("inputs of different rows", "added", inputs=[a, tensor("b", "INT32", [2, 2], [1, 2, 3, 4])])


def refusals() -> Iterator[Http]:
    """Names that are unknown, keys that are missing, JSON that is broken, methods and paths that do not exist."""
    yield infer("unknown model", "nothing")
    yield infer("unknown version", version="7")
    yield infer("version 0", version="0")
    yield infer("version -1", version="-1")
    yield infer("version that is no number", version="one")
    yield infer("version 01", version="01")
    yield infer("version 1", version="1")
    yield infer("unknown input", inputs=[x(name="z")])
    yield infer("an unknown input beside", inputs=[x(), x(name="z")])
    yield infer("two of a name", inputs=[x(), x()])
    yield infer("wrong datatype", inputs=[x(datatype="FP64")])
    yield infer("unknown datatype", inputs=[x(datatype="FLOAT")])
    yield infer("datatype in small letters", inputs=[x(datatype="fp32")])
    yield infer("datatype is null", inputs=[x(datatype=None)])  # type: ignore[arg-type]
    yield infer("no inputs", inputs=[])
    yield infer("inputs is an object", inputs={})
    yield infer("inputs is null", head={"inputs": None})
    yield infer("an input is a number", inputs=[1])
    for key in ("name", "datatype", "shape"):
        yield infer(f"no {key}", inputs=[{k: v for k, v in x().items() if k != key}])
    yield infer("an empty name", inputs=[x(name="")])
    yield infer("a name that is a number", inputs=[x(name=1)])  # type: ignore[arg-type]
    yield infer("unknown keys", head={"later": 1}, inputs=[{**x(), "later": 1}])
    yield Http("infer: no key inputs", MLP, {"id": "1"})
    for name, body in {
        "no body": None,
        "an empty body": b"",
        "a list": b"[]",
        "a number": b"1",
        "null": b"null",
        "broken JSON": b'{"inputs": [',
        "two objects": b"{}{}",
        "no UTF-8": b'{"id": "\xff"}',
        "NaN": b'{"inputs": NaN}',
        "an empty object": b"{}",
        "blanks": b"  ",
        "a lone surrogate": b'{"inputs": [], "id": "\\ud800"}',
        "a byte order mark": b"\xef\xbb\xbf{}",
    }.items():
        yield Http(f"infer: {name}", MLP, body=body, headers={"content-type": "application/json"})
    good = json.dumps({"inputs": [x()]}).encode()
    for kind in (
        "text/plain",
        "application/octet-stream",
        "application/x-www-form-urlencoded",
        "application/json; charset=utf-8",
    ):
        yield Http(f"infer: content type {kind}", MLP, body=good, headers={"content-type": kind})
    yield Http("infer: no content type", MLP, body=good)
    for length in ("0", "-1", "x", "", "99999", str(2**63), "1.0", "+10"):
        yield Http(f"infer: header length {length!r}", MLP, body=good, headers={HEADER: length})
    yield Http("raw body", MLP, body=RAW, headers={HEADER: "0", "content-type": "application/octet-stream"})
    yield Http("raw body of two rows", MLP, body=RAW * 2, headers={HEADER: "0"})
    yield Http("raw body that does not divide", MLP, body=RAW[:-1], headers={HEADER: "0"})
    yield Http("raw body that is empty", MLP, body=b"", headers={HEADER: "0"})
    yield Http("raw body, an open axis", "/v2/models/sums/infer", body=raw("INT32", [1, 2]), headers={HEADER: "0"})
    yield Http("raw body, BYTES", "/v2/models/text/infer", body=b"abc", headers={HEADER: "0"})
    yield Http("raw body, two inputs", "/v2/models/added/infer", body=b"12345678", headers={HEADER: "0"})
    yield Http("raw body, unknown model", "/v2/models/nothing/infer", body=RAW, headers={HEADER: "0"})
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        yield Http(f"{method} of infer", MLP, method=method, body=None if method == "GET" else good)
    for path in ("/v2/models/mlp", "/v2/models/mlp/ready", "/v2/models/mlp/config", "/v2/health/live", "/v2"):
        yield Http(f"POST of {path}", path, body=b"{}")
    for path in (
        "/",
        "/v3",
        "/v2/",
        "/v2/models",
        "/v2/models/",
        "/v2/models/mlp/",
        "/v2/models/mlp/nothing",
        "/v2/models//infer",
        "/v2/models/mlp/versions",
        "/v2/models/mlp/versions/",
        "/v2/health",
        "/v2/repository",
        "/v2/models/mlp/infer/",
    ):
        yield Http(f"GET of {path}", path, method="GET")
    yield Http("an escaped name", "/v2/models/m%6Cp/infer", {"inputs": [x()]})
    yield Http("a query", MLP + "?a=1", {"inputs": [x()]})


def counted() -> Iterator[Http]:
    """Statistics of a model that has answered nothing else: two good requests, one with three rows, two bad ones."""
    given = [tensor("x", "INT32", [1, 1], [0])]
    yield infer("counted", "slow", inputs=given)
    yield infer("counted again", "slow", inputs=given)
    yield infer("counted, of a wrong shape", "slow", inputs=[tensor("x", "INT32", [1, 2], [0, 0])])
    yield infer("counted, of a wrong name", "slow", inputs=[tensor("z", "INT32", [1, 1], [0])])
    yield Http("statistics", "/v2/models/slow/stats", method="GET")
    yield Http("statistics of a version", "/v2/models/slow/versions/1/stats", method="GET")
    yield Http("statistics of an unknown version", "/v2/models/slow/versions/9/stats", method="GET")
