"""Calls to Triton and Penstock alike, over gRPC; in their order, because some change the server."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from support.triton_answers import Grpc, Http
from support.triton_requests import KINDS, RAW, SAMPLES, X, infer, raw, tensor

CONTENTS = {"BOOL": "bool_contents", "BYTES": "bytes_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"} | {
    kind: f"{sign}int{64 if bits == 64 else ''}_contents"
    for sign, prefix in (("", "INT"), ("u", "UINT"))
    for bits in (8, 16, 32, 64)
    for kind in (f"{prefix}{bits}",)
}


def request(model: str = "mlp", *inputs: Any, raw: Any = (), outputs: Any = (), **keys: Any) -> Any:
    """A ModelInferRequest; inputs and outputs are dictionaries in protobuf's JSON."""
    found = {"model_name": model, "inputs": inputs, "outputs": outputs, **keys}
    message = json_format.ParseDict(found, pb.ModelInferRequest())
    message.raw_input_contents.extend(raw)
    return message


def call(name: str, *args: Any, stream: bool = False, **keys: Any) -> Grpc:
    method = "ModelStreamInfer" if stream else "ModelInfer"
    return Grpc(f"gRPC: {name}", method, request(*args, **keys), stream)


def x(shape: Any = (1, 4), datatype: str = "FP32", name: str = "x", **keys: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **keys}


def choice(value: Any) -> dict[str, Any]:
    """A parameter."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return {kinds[type(value)]: value}


def datatypes() -> Iterator[Grpc]:
    """Each datatype as bytes and in its field."""
    for kind, values in {**SAMPLES, "FP16": [-1.5, 0.25]}.items():
        given, data = x((1, 2), kind, kind), raw(kind, values)
        yield call(f"{kind} raw", "same", given, raw=[data])
        yield call(f"{kind} raw, a byte short", "same", given, raw=[data[:-1]])
        if kind in CONTENTS:
            message = request("same", given)
            typed = [each.encode() for each in values] if kind == "BYTES" else values
            getattr(message.inputs[0].contents, CONTENTS[kind]).extend(typed)
            yield Grpc(f"gRPC: {kind} typed", "ModelInfer", message)
    yield call("BF16 raw", "bf16", x((1, 2), "BF16"), raw=[b"\xc0\x3f\x00\xc0"])
    yield call("typed and raw", "mlp", x(contents={"fp32_contents": X}), raw=[RAW])
    yield call("typed of the wrong field", "mlp", x(contents={"int_contents": [1, 2, 3, 4]}))
    yield call("typed, too few", "mlp", x(contents={"fp32_contents": X[:3]}))
    yield call("typed, too many", "mlp", x(contents={"fp32_contents": [*X, 5]}))
    yield call("one raw of two inputs", "added", x((1, 2), "INT32", "a"), x((1, 2), "INT32", "b"), raw=[bytes(8)])
    yield call("more raw than inputs", "mlp", x(), raw=[RAW, RAW])
    yield call("raw that is empty", "mlp", x(), raw=[b""])
    yield call("no data", "mlp", x())


def inference() -> Iterator[Grpc]:
    """What fits and what does not; outputs, parameters, streams and sequences."""
    yield call("one row", "mlp", x(), raw=[RAW])
    yield call("an id", "mlp", x(), raw=[RAW], id="7")
    yield call("two rows", "mlp", x((2, 4)), raw=[RAW * 2])
    for name, shape in {
        "one axis": (4,),
        "none": (),
        "wrong": (1, 5),
        "negative": (-1, 4),
        "two negative": (-1, -4),
    }.items():
        yield call(f"shape {name}", "mlp", x(shape), raw=[RAW])
    yield call("unknown model", "nothing", x(), raw=[RAW])
    yield call("no model", "", x(), raw=[RAW])
    yield call("unknown version", "mlp", x(), raw=[RAW], model_version="7")
    yield call("version that is no number", "mlp", x(), raw=[RAW], model_version="one")
    yield call("version 1", "mlp", x(), raw=[RAW], model_version="1")
    yield call("two versions, none named", "versions", x((1, 1), "INT32"), raw=[bytes(4)])
    yield call("unknown input", "mlp", x(name="z"), raw=[RAW])
    yield call("an unknown input beside", "mlp", x(), x(name="z"), raw=[RAW, RAW])
    yield call("two of a name", "mlp", x(), x(), raw=[RAW, RAW])
    yield call("wrong datatype", "mlp", x(datatype="INT32"), raw=[RAW])
    yield call("unknown datatype", "mlp", x(datatype="FLOAT"), raw=[RAW])
    yield call("no inputs", "mlp")
    yield call("no inputs where all are optional", "same")
    yield call("without the optional input", "added", x((1, 2), "INT32", "a"), raw=[raw("INT32", [1, 2])])
    yield call("a model that fails", "sums", x((1,), "INT32"), raw=[raw("INT32", [-1])])
    yield call("no batch axis", "sums", x((2,), "INT32"), raw=[raw("INT32", [1, 2])])
    a = [x((1, 2), "INT32", "a")], [raw("INT32", [1, 2])]
    yield call("one output", "added", *a[0], raw=a[1], outputs=[{"name": "difference"}])
    yield call(
        "both outputs, the other order", "added", *a[0], raw=a[1], outputs=[{"name": "difference"}, {"name": "sum"}]
    )
    both = x((1, 2), "INT32", "A"), x((1, 2), "INT32", "B")
    data = [raw("INT32", [1, 2]), raw("INT32", [3, 4])]
    yield call("a chain, the other output", "chain", *both, raw=data, outputs=[{"name": "SUM"}])
    yield call("a chain without an input", "chain", both[0], raw=data[:1])
    yield call("a chain, one output", "chain", *both, raw=data, outputs=[{"name": "DIFFERENCE"}])
    yield call("unknown output", "added", *a[0], raw=a[1], outputs=[{"name": "z"}])
    for output, count in itertools.product(("scores", "plain"), (1, 2, 4)):
        wanted = [{"name": output, "parameters": {"classification": choice(count)}}]
        yield call(
            f"classification of {output}: {count}", "classes", x((1, 3)), raw=[raw("FP32", [1, 3, 2])], outputs=wanted
        )
    for name, parameters in {
        "unknown": {"later": 1},
        "of each kind": {"a": 1, "b": "t", "c": True, "d": 1.5},
        "priority": {"priority": 1},
        "timeout": {"timeout": 10_000_000},
        "sequence_id": {"sequence_id": 5},
        "binary_data_output": {"binary_data_output": False},
        "triton_": {"triton_a": 1},
    }.items():
        found = {key: choice(value) for key, value in parameters.items()}
        yield call(f"parameters: {name}", "mlp", x(), raw=[RAW], parameters=found)
        yield call(
            f"parameters of a model that takes them: {name}",
            "told",
            x((1, 1)),
            raw=[raw("FP32", [1])],
            parameters=found,
        )
    yield call("parameters of an input", "mlp", x(parameters={"later": choice(1)}), raw=[RAW])
    yield call("a model that streams", "count", x((1, 1), "INT32", "n"), raw=[raw("INT32", [2])])
    yield from streams()
    yield from sequences()


def streams() -> Iterator[Grpc]:
    for count in (0, 1, 3, -1):
        for empty in (False, True):
            asked = {"triton_enable_empty_final_response": choice(True)} if empty else {}
            name = f"stream of {count}{', final response' * empty}"
            yield call(
                name,
                "count",
                x((1, 1), "INT32", "n"),
                raw=[raw("INT32", [count])],
                parameters=asked,
                id="7",
                stream=True,
            )
    for empty in (False, True):
        asked = {"triton_enable_empty_final_response": choice(True)} if empty else {}
        end = ", final response" * empty
        yield call(f"stream of a plain model{end}", "mlp", x(), raw=[RAW], parameters=asked, id="8", stream=True)
        yield call(f"stream of an unknown model{end}", "nothing", x(), raw=[RAW], parameters=asked, id="9", stream=True)
        yield call(f"stream of a wrong shape{end}", "mlp", x((1, 5)), raw=[RAW], parameters=asked, id="10", stream=True)
        yield call(
            f"stream of a failing model{end}",
            "sums",
            x((1,), "INT32"),
            raw=[raw("INT32", [-1])],
            parameters=asked,
            stream=True,
        )
    yield Grpc("gRPC: stream without a request", "ModelStreamInfer", [], stream=True)


def sequences() -> Iterator[Grpc]:
    def step(value: int, **parameters: Any) -> Any:
        found = {f"sequence_{key}": choice(each) for key, each in parameters.items()}
        return request("totals", x((1, 1), "INT32"), raw=[raw("INT32", [value])], parameters=found, id=str(value))

    for name, message in {
        "start": step(1, id=1, start=True),
        "middle": step(2, id=1),
        "end": step(3, id=1, end=True),
        "after its end": step(4, id=1),
        "no id": step(5),
        "never begun": step(6, id=9),
        "start and end": step(7, id=2, start=True, end=True),
        "a running one": step(8, id=3, start=True),
        "begins anew": step(9, id=3, start=True),
        "ends": step(1, id=3, end=True),
    }.items():
        yield Grpc(f"gRPC: sequence: {name}", "ModelInfer", message)
    steps = [step(1, id=5, start=True), step(2, id=5), step(3, id=5, end=True)]
    for empty in (False, True):
        for each in steps:
            each.parameters["triton_enable_empty_final_response"].bool_param = empty
        end = ", final response" * empty
        yield Grpc(
            f"gRPC: sequence in one stream{end}",
            "ModelStreamInfer",
            [pb.ModelInferRequest.FromString(m.SerializeToString()) for m in steps],
            stream=True,
        )


def management(key: str, other: str) -> Iterator[Grpc]:
    """Health, metadata, configuration, repository, settings and regions of the objects `key` and `other`."""

    def ask(method: str, what: str = "", /, **keys: Any) -> Grpc:
        kind = getattr(pb, f"{method}Request")
        return Grpc(f"gRPC: {method}{what and ': '}{what}", method, json_format.ParseDict(keys, kind()))

    for method in (
        "ServerLive",
        "ServerReady",
        "ServerMetadata",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryUnregister",
    ):
        yield ask(method)
    for model in ("mlp", "same", "sums", "count", "totals", "classes", "versions", "chain", "nothing"):
        for method in ("ModelReady", "ModelMetadata", "ModelConfig"):
            yield ask(method, model, name=model)
    for version in ("1", "2", "9", "x"):
        for method in ("ModelReady", "ModelMetadata", "ModelConfig"):
            yield ask(method, f"version {version}", name="versions", version=version)
    yield ask("ModelStatistics", "of an unknown model", name="nothing")
    yield ask("ModelStatistics", "of an unknown version", name="mlp", version="9")
    yield ask("RepositoryIndex")
    yield ask("RepositoryIndex", "ready", ready=True)
    yield ask("RepositoryModelLoad", "again", model_name="told")
    yield ask("RepositoryModelLoad", "unknown", model_name="nothing")
    yield ask("RepositoryModelUnload", "told", model_name="told")
    yield ask("ModelReady", "after an unload", name="told")
    yield call("an unloaded model", "told", x((1, 1)), raw=[raw("FP32", [1])])
    yield ask("RepositoryModelUnload", "again", model_name="told")
    yield ask("RepositoryModelUnload", "unknown", model_name="nothing")
    yield ask("RepositoryModelLoad", "after an unload", model_name="told")
    yield ask("ModelReady", "after a load", name="told")
    yield ask("LogSettings")
    yield ask("LogSettings", "verbose", settings={"log_verbose_level": {"uint32_param": 1}})
    yield ask("LogSettings", "back", settings={"log_verbose_level": {"uint32_param": 0}})
    yield ask("LogSettings", "wrong kind", settings={"log_info": {"uint32_param": 1}})
    yield ask("TraceSetting")
    yield ask("TraceSetting", "of a model", model_name="mlp")
    yield ask("TraceSetting", "of an unknown model", model_name="nothing")
    system, place = "SystemSharedMemory", {"offset": 0, "byte_size": 64}
    yield ask(f"{system}Status")
    yield ask(f"{system}Status", "unknown", name="r")
    yield ask(f"{system}Register", "a region", name="r", key=key, **place)
    yield ask(f"{system}Register", "a name twice", name="r", key=key, **place)
    yield ask(f"{system}Register", "another", name="s", key=other, **place)
    yield ask(f"{system}Register", "an unknown object", name="t", key="/nothing-here", **place)
    yield ask(f"{system}Status", "one", name="r")
    here = {"shared_memory_region": choice("r"), "shared_memory_byte_size": choice(16)}
    there = {"shared_memory_region": choice("s"), "shared_memory_byte_size": choice(8)}
    unknown = {**here, "shared_memory_region": choice("nothing")}
    yield call("input in shared memory", "mlp", x(parameters=here))
    yield call("output in shared memory", "mlp", x(), raw=[RAW], outputs=[{"name": "y", "parameters": there}])
    yield call("both in shared memory", "mlp", x(parameters=here), outputs=[{"name": "y", "parameters": there}])
    yield call("an unknown region", "mlp", x(parameters=unknown))
    yield call("an unknown region of an output", "mlp", x(), raw=[RAW], outputs=[{"name": "y", "parameters": unknown}])
    yield call("past the end of a region", "mlp", x(parameters={**here, "shared_memory_offset": choice(60)}))
    yield ask(f"{system}Unregister", "one", name="s")
    yield ask(f"{system}Unregister", "again", name="s")
    yield ask(f"{system}Unregister")


def grpc_requests(key: str, other: str) -> Iterator[Grpc]:
    """All calls. `key` and `other`: objects in shared memory of 64 bytes; the first begins with the input of `mlp`."""
    yield from datatypes()
    yield from inference()
    yield from management(key, other)


# ---- from a seed


def random_requests(seed: int, count: int) -> Iterator[Http]:
    """Requests to `same` with random tensors, every second one with a random flaw, which is in its name."""
    rng = random.Random(seed)
    for number in range(count):
        kinds = rng.sample([*SAMPLES], rng.randint(1, 3))
        rows, size = rng.randint(1, 4), rng.randint(1, 3)
        inputs, binary = [], b""
        for kind in kinds:
            values = [rng.choice(SAMPLES[kind]) for _ in range(rows * size)]
            if rng.random() < 0.5:
                data = raw(kind, values)
                inputs.append(tensor(kind, kind, [rows, size], binary_data_size=len(data)))
                binary += data
            else:
                inputs.append(tensor(kind, kind, [rows, size], values))
        head: dict[str, Any] = {"id": str(number)} if rng.random() < 0.5 else {}
        if rng.random() < 0.3:
            head["parameters"] = {"binary_data_output": True}
        elif rng.random() < 0.5:
            names = sorted(rng.sample(kinds, rng.randint(1, len(kinds))), key=[*SAMPLES].index)
            head["outputs"] = [
                {"name": f"same_{kind}", "parameters": {"binary_data": rng.random() < 0.5}} for kind in names
            ]
        flaw = rng.choice([*FLAWS]) if number % 2 else "none"
        whole = {"inputs": inputs, **head}
        if flaw != "none":
            FLAWS[flaw](rng, rng.choice(inputs), whole)
        name = f"random {number}, flaw: {flaw}"
        yield infer(name, "same", inputs=whole.pop("inputs"), head=whole, binary=binary if binary else None)


FLAWS: dict[str, Any] = {
    "no name": lambda rng, given, whole: given.pop("name"),
    "no datatype": lambda rng, given, whole: given.pop("datatype"),
    "no shape": lambda rng, given, whole: given.pop("shape"),
    "another datatype": lambda rng, given, whole: given.update(datatype=rng.choice([*KINDS])),
    "an unknown name": lambda rng, given, whole: given.update(name="z"),
    "an axis more": lambda rng, given, whole: given["shape"].append(1),
    "an axis less": lambda rng, given, whole: given["shape"].pop(),
    "a longer axis": lambda rng, given, whole: given["shape"].append(given["shape"].pop() + 1),
    "a negative axis": lambda rng, given, whole: given["shape"].append(-given["shape"].pop()),
    "no data": lambda rng, given, whole: (given.pop("data", None), given.pop("parameters", None)),
    "twice": lambda rng, given, whole: whole["inputs"].append(dict(given)),
    "an unknown output": lambda rng, given, whole: whole.update(outputs=[{"name": "z"}]),
    "an unknown parameter": lambda rng, given, whole: whole.setdefault("parameters", {}).update(later=json.dumps(1)),
    "rows that differ": lambda rng, given, whole: given["shape"].__setitem__(0, given["shape"][0] + 1),
}
