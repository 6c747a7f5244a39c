"""Answers of Triton and of Penstock in one form: what a client's program acts on, without the words.

An answer is a dictionary. Over HTTP it has the status, the JSON and the binary tensors; over gRPC the code and the
messages. Left out are texts of errors, the server's name, its version and times.
"""

import http.client
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

HEADER = "inference-header-content-length"
FREE = frozenset(
    {"platform", "last_inference", "reason", "log_file", "trace_file"}
)  # values that are each server's own
TIMES = frozenset({"ns"})
CONFIG = (  # what programs read of a configuration
    "name",
    "max_batch_size",
    "input",
    "output",
    "model_transaction_policy",
)
CONFIG_TENSOR = ("name", "data_type", "dims", "optional", "label_filename")


@dataclass(frozen=True)
class Http:
    """A request over HTTP. `json` becomes the body, or its head before `binary`."""

    name: str
    path: str
    json: Any = None
    binary: bytes | None = None
    body: bytes | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def parts(self) -> tuple[bytes | None, dict[str, str]]:
        """The body and the headers."""
        if self.body is not None or self.json is None:
            return self.body, dict(self.headers)
        head = json.dumps(self.json).encode()
        if self.binary is None:
            return head, {"content-type": "application/json", **self.headers}
        return head + self.binary, {"content-type": "application/octet-stream", HEADER: str(len(head)), **self.headers}


@dataclass(frozen=True)
class Grpc:
    """A call over gRPC, of a stream if there are several messages or if `stream` is true."""

    name: str
    method: str
    message: Any
    stream: bool = False


def ask_http(address: str, request: Http) -> dict[str, Any]:
    """The answer to a request on a connection of its own."""
    body, headers = request.parts()
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(request.method, request.path, body, headers)
        response = connection.getresponse()
        found = response.read()
        return _http_answer(request.path, response, found)
    except (http.client.HTTPException, OSError) as error:
        return {"status": type(error).__name__}
    finally:
        connection.close()


def _http_answer(path: str, response: http.client.HTTPResponse, body: bytes) -> dict[str, Any]:
    kind = (response.headers.get("content-type") or "").partition(";")[0]
    answer: dict[str, Any] = {"status": response.status}
    if kind == "text/event-stream":
        events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
        return answer | {"type": kind, "events": [_plain(path, _json(event)) for event in events]}
    if response.status >= 400:
        return answer | {"error": isinstance(_json(body), dict) and [*_json(body)]}
    length = response.headers.get(HEADER)
    head, rest = (body, b"") if length is None else (body[: int(length)], body[int(length) :])
    if length is not None:
        answer["binary"] = rest.hex()
    return answer | ({"json": _plain(path, _json(head))} if head else {"body": "none"})


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"not JSON": text[:200].decode(errors="replace")}


def ask_grpc(address: str, request: Grpc) -> dict[str, Any]:
    """The answer to a call on a channel of its own."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = getattr(stub, request.method)
        try:
            if request.stream:
                messages = request.message if isinstance(request.message, Sequence) else [request.message]
                return {"code": "OK", "messages": [_message(each) for each in call(iter(messages), timeout=30)]}
            return {"code": "OK", "message": _message(call(request.message, timeout=30))}
        except grpc.RpcError as error:
            return {"code": error.code().name}


def _message(message: Any) -> Any:
    found = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if isinstance(message, service_pb2.ModelStreamInferResponse) and "error_message" in found:
        found["error_message"] = "..."
    return _plain("", found)


def _plain(path: str, found: Any) -> Any:
    """Without values that are each server's own; NaN as a text, because it does not equal itself."""
    if isinstance(found, dict):
        if path.endswith("/config") or ("config" in found and isinstance(found["config"], dict)):
            return _config(found.get("config", found))
        if "extensions" in found:
            return sorted(found["extensions"])
        if "versions" in found:  # metadata: Penstock's has parameters too
            found = {key: value for key, value in found.items() if key != "parameters"}
        found = {key: _plain(path, value) for key, value in found.items() if key not in FREE}
        if "error" in found:
            found["error"] = "..."
        return {key: ("time" if key in TIMES else value) for key, value in found.items()}
    if isinstance(found, list):
        each = [_plain(path, one) for one in found]
        index = bool(each) and all(isinstance(one, dict) and "state" in one for one in each)
        return sorted(each, key=lambda one: (one["name"], one.get("version", ""))) if index else each  # it has no order
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return found


def _config(found: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {key: found[key] for key in CONFIG if found.get(key)}
    chosen["model_transaction_policy"] = bool(found.get("model_transaction_policy", {}).get("decoupled"))
    for key in ("input", "output"):
        chosen[key] = [{k: t[k] for k in CONFIG_TENSOR if t.get(k)} for t in found.get(key, [])]
    return chosen


def outcome(answer: dict[str, Any]) -> str:
    """The status or the code of an answer."""
    return str(answer.get("status", answer.get("code")))


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, str]:
    """Where two answers differ, with what each has there; only the status or the code if they differ in that."""
    if outcome(theirs) != outcome(ours):
        return {"status": f"Triton {outcome(theirs)}, Penstock {outcome(ours)}"}
    return dict(_differences(theirs, ours, ""))


def _differences(theirs: Any, ours: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**theirs, **ours}:
            where = f"{place}.{key}" if place else key
            if key in ours and key in theirs:
                yield from _differences(theirs[key], ours[key], where)
            elif key in theirs:
                yield where, f"Triton {theirs[key]!r:.200}, Penstock nothing"
            else:
                yield where, f"Triton nothing, Penstock {ours[key]!r:.200}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, both in enumerate(zip(theirs, ours, strict=True)):
            yield from _differences(*both, f"{place}.{number}")
    elif ours != theirs or type(ours) is not type(theirs):
        yield place, f"Triton {theirs!r:.200}, Penstock {ours!r:.200}"
