"""KServe's V1 protocol: `{"instances": [...]}` becomes `{"predictions": [...]}`; codecs and routes.

An instance is a row, so that the instances of all requests share batches. A model that declares its inputs receives
named arrays with all instances of a request, any other model the instances themselves. `{"inputs": {name: column}}` is
the column format, answered with `{"outputs": ...}`. `parameters`, an object, goes to models whose `predict` takes them.

Source: KServe's V1 data plane, and TensorFlow Serving's REST API, whose format it is; for `parameters`, Vertex AI.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from penstock.core.arrays import array_of
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import JSON, decode_json, encode_json, is_countable, json_bytes, raw_list
from penstock.serving.protocols.oip import OipCodec, named_outputs
from penstock.serving.protocols.oip_messages import Tensor
from penstock.serving.protocols.oip_routes import error_body
from penstock.serving.protocols.oip_tensors import nested, output_array
from penstock.serving.protocols.route import POST, Template, json_route
from penstock.types import Item, ItemResult, Many, ModelMetadata, Parts, plain_result
from penstock.values import prepare

if TYPE_CHECKING:
    import numpy as np

_NONE: Final = Raw(b"")
_B64: Final = re.compile(rb'"b64"')


class _Body(Struct):
    instances: Raw = _NONE
    inputs: Raw = _NONE
    parameters: Raw = _NONE


class _Answer(Struct):
    predictions: Raw = _NONE
    explanations: Raw = _NONE
    outputs: Raw = _NONE


_body = msgspec.json.Decoder(_Body)
_columns = msgspec.json.Decoder(dict[str, Raw])
prepare(_Answer)


def _peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
    """(number of instances, "") unless there may be very many."""
    if not is_countable(body):
        return None
    try:
        found = _body.decode(body)
        rows = bytes(found.inputs if found.instances == _NONE else found.instances)
        if rows[:1] == b"{":
            rows = bytes(next(iter(_columns.decode(rows).values())))
        return max(1, len(raw_list.decode(rows))), ""
    except (msgspec.DecodeError, ValueError, StopIteration, RecursionError):  # the worker reports the error
        return None


class KServeCodec(OipCodec):
    """Codec of `/v1/models/{m}:predict`."""

    divisible = True
    peek = staticmethod(_peek)
    key = "predictions"

    @staticmethod
    def request_content(model: ModelMetadata) -> dict[str, Any]:
        """Rows, or columns, of the model's inputs or of its type."""
        whole = model.unbatched
        columns = {spec.name: nested(spec, unbatched=whole) for spec in model.inputs}
        instance: dict[str, Any] = model.schemas.item
        if columns:
            needed = [spec.name for spec in model.inputs if not spec.optional]
            row = {spec.name: nested(spec, 0 if whole else 1, whole) for spec in model.inputs}
            instance = {"type": "object", "properties": row, "required": needed, "additionalProperties": False}
            if len(row) == 1:
                instance = {"anyOf": [instance, *row.values()]}
        rows = {"type": "array", "items": instance, "minItems": 1}
        column = {"type": "object", "properties": columns} if columns else {"type": "object", "minProperties": 1}
        others = {"parameters": {"type": ["object", "null"]}} if model.takes_parameters else {}
        by_row = {"type": "object", "properties": {"instances": rows, **others}, "required": ["instances"]}
        either = {"anyOf": [rows, column]}
        by_column = {"type": "object", "properties": {"inputs": either, **others}, "required": ["inputs"]}
        return {JSON: {"oneOf": [by_row, by_column]}}

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """Predictions of the declared outputs, or of the model's type."""
        return _answer_content("predictions", model)

    # ---- requests

    def decode(self, item: Item) -> tuple[Any, Any]:
        """(`Many` instances, or the named arrays of a model with inputs; whether the request is in column format)."""
        body: _Body = decode_json(item.payload, _Body)
        if (body.instances == _NONE) == (body.inputs == _NONE):
            raise BadRequest('the body must have either the key "instances" or the key "inputs"')
        if self.takes_parameters and body.parameters != _NONE:
            item.parameters = decode_json(body.parameters, dict[str, Any] | None)
        binary = _B64.search(item.payload) is not None
        if bytes(body.inputs)[:1] == b"{":
            return self._columns(_value(bytes(body.inputs), binary), item), True
        rows = bytes(body.inputs if body.instances == _NONE else body.instances)
        if item.stop >= 0:
            rows = b"[%b]" % b",".join(raw_list.decode(rows)[item.start : item.stop])
        instances = _value(rows, binary)
        if not isinstance(instances, list) or not instances:
            raise BadRequest("the instances must be a list of at least one")
        if not self.inputs:
            return Many(instances), False
        if not self.unbatched:
            return self._arrays(self._named(instances)), False
        named = (self._named([each]) for each in instances)
        return Many([self._arrays({name: only for name, (only,) in one.items()}) for one in named]), False

    def _named(self, instances: list[Any]) -> dict[str, list[Any]]:
        """Input name -> its values in all instances, which are objects, or values of the only input."""
        if len(self.inputs) == 1 and not any(isinstance(each, dict) for each in instances):
            return {next(iter(self.inputs)): instances}
        names = list(instances[0]) if isinstance(instances[0], dict) else []
        for k, each in enumerate(instances):
            if not isinstance(each, dict):
                raise BadRequest(f"instance {k} is no object; the model has the inputs {', '.join(self.inputs)}")
            if each.keys() != set(names):
                raise BadRequest(f"instance {k} has other inputs than instance 0; all of a request must have the same")
        return {name: [each[name] for each in instances] for name in names}

    def _columns(self, columns: dict[str, Any], item: Item) -> Any:
        """The rows of this item in a request in column format."""
        if self.inputs:
            arrays = self._arrays(columns)
            return arrays if item.stop < 0 else {k: array[item.start : item.stop] for k, array in arrays.items()}
        lengths = {len(column) if isinstance(column, list) else 0 for column in columns.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise BadRequest('every column of "inputs" must be a list; all have the same length, of at least 1')
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return Many(rows if item.stop < 0 else rows[item.start : item.stop])

    def _arrays(self, columns: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        arrays = {}
        for name, column in columns.items():
            spec = self.inputs.get(name)
            if spec is None:
                raise BadRequest(f"unknown input '{name[:100]}'; the model has {', '.join(self.inputs)}")
            arrays[name] = array = array_of(name, column, spec.datatype)
            self._check(Tensor(name, list(array.shape), spec.datatype))
        self._check_set(arrays)
        return arrays

    # ---- responses

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """Predictions in the format of the request. Raises BadOutput."""
        columns: Any
        if self.inputs and (context or not self.unbatched):
            columns = {name: self._cells(name, one) for name, one in named_outputs(value).items()}
            single = len(columns) == 1
            rows = next(iter(columns.values())) if single else columns if context else _rows_of(columns)
            columns = rows if single else columns
        elif isinstance(value, list):
            rows = list(map(_prediction, value))
            columns = _columns_of(rows) if context else rows
        else:
            raise BadOutput(f"the model returned a {type(value).__name__} for the instances, expected a list")
        return ItemResult(encode_json({"outputs": columns} if context else {self.key: rows}), JSON)

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """Raises BadRequest: a response of this protocol is one JSON object."""
        raise BadRequest("the model streams its response, which this protocol cannot carry; use /v2 or /predictions")

    def _cells(self, name: str, value: Any) -> list[Any]:
        _, array = output_array(name, value, self.outputs.get(name))
        cells: list[Any] = array.tolist()
        return _texts(name, cells) if array.dtype.kind == "O" else cells

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The rows, or the columns, of all parts in one response."""
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
        answers = [msgspec.json.decode(part.body, type=_Answer) for part in parts]
        key = self.key if answers[0].outputs == _NONE else "outputs"
        found = [bytes(getattr(answer, key)) for answer in answers]
        if found[0][:1] == b"[":
            joined = _joined(found)
        else:
            columns = [_columns.decode(each) for each in found]
            if any(each.keys() != columns[0].keys() for each in columns):
                raise BadOutput("the outputs differ between the parts of a split request")
            joined = msgspec.json.encode({k: Raw(_joined([bytes(each[k]) for each in columns])) for k in columns[0]})
        return ItemResult(b'{"%b":%b}' % (key.encode(), joined), JSON)


class KServeExplainCodec(KServeCodec):
    """Codec of `/v1/models/{m}:explain`."""

    explains = True
    key = "explanations"

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """Explanations of any type."""
        return _answer_content("explanations", ModelMetadata(model.name, model.version))


def _answer_content(key: str, model: ModelMetadata) -> dict[str, Any]:
    result: dict[str, Any] = model.schemas.result
    if model.outputs:
        row = {spec.name: nested(spec, 0 if model.unbatched else 1, model.unbatched) for spec in model.outputs}
        result = next(iter(row.values())) if len(row) == 1 else {"type": "object", "properties": row}
    by_row = {"type": "object", "properties": {key: {"type": "array", "items": result}}, "required": [key]}
    by_column = {"type": "object", "properties": {"outputs": {"type": ["array", "object"]}}, "required": ["outputs"]}
    return {JSON: {"anyOf": [by_row, by_column]}}


def _value(body: bytes, binary: bool) -> Any:
    """The value of JSON. With `binary`, every object `{"b64": text}` becomes bytes. Raises BadRequest."""
    value = decode_json(body)
    return _unwrapped(value) if binary else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrapped(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"b64"}:
        return {name: _unwrapped(each) for name, each in value.items()}
    try:
        return b64decode(value["b64"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadRequest('the value of "b64" is not Base64') from None


def _prediction(result: Any) -> Any:
    """The JSON value of a result. Raises BadOutput for None."""
    result = plain_result(result)
    if result is None:
        raise BadOutput("the model returned None for an instance; return a value, or an exception to fail the request")
    if isinstance(result, bytes):
        return {"b64": b64encode(result).decode()}
    if isinstance(result, Parts):
        parts = list(map(_prediction, result))
        return "".join(parts) if all(isinstance(part, str) for part in parts) else parts
    return result


def _texts(name: str, cells: list[Any]) -> list[Any]:
    """Nested lists of BYTES as text, or as `{"b64": text}` if they are not UTF-8. Raises BadOutput."""
    found = []
    for cell in cells:
        if isinstance(cell, list):
            cell = _texts(name, cell)
        elif isinstance(cell, bytes):
            cell = json_bytes(cell)
        elif not isinstance(cell, str):
            raise BadOutput(f"output '{name}' holds a {type(cell).__name__}; object arrays may hold str or bytes only")
        found.append(cell)
    return found


def _rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    if len({len(column) for column in columns.values()}) > 1:
        raise BadOutput(f"the outputs {', '.join(columns)} have different numbers of rows")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _columns_of(rows: list[Any]) -> Any:
    """The columns of rows that are objects with the same keys; other rows unchanged."""
    if rows and all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        return {name: [row[name] for row in rows] for name in rows[0]}
    return rows


def _joined(lists: list[bytes]) -> bytes:
    return b"[%b]" % b",".join(inner for each in lists if (inner := each[1:-1]))


# ---- routes


class Alive(Struct):
    """The body of /."""

    status: str


def _infer(path: str, verb: str, codec: str) -> Template:
    summary = f"{verb.title()} by KServe's V1 protocol"
    return Template(f"{path}:{verb}", summary, codec=codec, error_body=error_body, methods=POST)


ROUTES: Final = (
    *(
        _infer(f"/v1/models/{{model}}{version}", verb, codec)
        for verb, codec in (("predict", "kserve"), ("explain", "kserve_explain"))
        for version in ("", "/versions/{version}")
    ),
    json_route(
        "/", "Whether the server is alive, as KServe's V1 clients ask", lambda *_: Alive("alive"), Alive, open=True
    ),
)
