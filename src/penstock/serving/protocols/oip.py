"""Open Inference Protocol v2: the base of its codecs, and the codec of pure JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct, structs

from penstock.core.columns import (
    MOST_KEY_BYTES,
    Block,
    PlanMemory,
    PlannedRequest,
    RequestPlan,
    TensorRequest,
    TensorRows,
)
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import JSON, decode_json
from penstock.serving.protocols.columns import (
    GAP,
    JsonLists,
    OutputColumn,
    OutputForm,
    Planning,
    Respond,
    SharedStack,
    columns_of,
    cut_id,
    has_cut_id,
    output_column,
)
from penstock.serving.protocols.native import BYTES, encode_response
from penstock.serving.protocols.oip_heads import large_parameters, peek_json
from penstock.serving.protocols.oip_messages import (
    ADVICE,
    ALIGNMENT,
    HEADER_BYTES,
    HEADER_LENGTH,
    NO_PARAMETERS,
    TYPED,
    AllParameters,
    OipRequest,
    OipResponse,
    RequestParameters,
    SharedTensor,
    Tensor,
    TensorParameters,
    array_of_tensor,
    refusal,
    sequence_of_json,
    split_parameters,
    split_sections,
    write_head,
)
from penstock.serving.protocols.oip_shared import is_shared, shared_input, shared_output
from penstock.serving.protocols.oip_tensors import (
    MAX_DIMS,
    output_array,
    request_content,
    response_content,
    to_bytes,
    to_json,
    top_classes,
)
from penstock.types import Item, ItemResult, ModelMetadata, Response, SequenceRequest

if TYPE_CHECKING:
    import numpy as np

_PICKLES: Final = tuple(bytes((0x80, version)) for version in range(2, 6))  # first bytes of a pickle


class Selection(Struct):
    """A requested output; with `classes`, only the largest values of each row, this many. `shared`: where it goes."""

    name: str
    binary: bool
    classes: int = 0
    shared: SharedTensor | None = None


class OipContext(Struct):
    """The part of the request that `encode` needs. `outputs` None means all outputs.

    `typed`: over gRPC, outputs are typed contents. `streams`: a part of the response was sent.
    """

    id: str | None = None
    outputs: list[Selection] | None = None
    binary: bool = False
    typed: bool = False
    streams: bool = False


class OipCodec(Planning):
    """Base of the codecs of `/v2/models/{m}/infer`. Checks requests against the inputs of `metadata`, if given."""

    def __init__(self, model: str, version: str, metadata: ModelMetadata | None = None) -> None:
        self.model = model
        self.version = version
        known = metadata or ModelMetadata(model, version)
        self.inputs = {spec.name: spec for spec in known.inputs}
        self.outputs = {spec.name: spec.datatype for spec in known.outputs}
        self.takes_parameters, self.unbatched = known.takes_parameters, known.unbatched
        self.strict_parameters, self.typed_contents = known.strict_parameters, known.typed_contents
        self.labels, self.strict_json = known.labels, known.strict_json
        revision = known.parameters.get("revision")
        self.parameters = None if revision is None else {"revision": revision}
        self.plans, self._heads = PlanMemory(), PlanMemory()

    # ---- requests

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """(JSON of a body, bytes after it). Raises BadRequest."""
        raise NotImplementedError

    def read(self, item: Item) -> tuple[OipRequest, Sequence[memoryview | None]]:
        """The request, and the bytes of each input; None for data in the JSON. Raises BadRequest."""
        head, rest = self.head_of(item)
        request: OipRequest = decode_json(head, OipRequest)
        if self.strict_parameters:
            decode_json(head, AllParameters).check_known(self.takes_parameters)
        return request, split_sections(request.inputs, rest, "input", BadRequest)

    def decode(self, item: Item) -> tuple[dict[str, np.ndarray[Any, Any]], OipContext]:
        """Input name -> array `[rows, ...]`; only rows [start, stop) for a part of a split request."""
        request, sections = self.read(item)
        asked, own = split_parameters(request.parameters)
        if self.takes_parameters:
            item.parameters = own
        if self.strict_parameters and item.sequence is None:
            for name in ("sequence_id", "sequence_start", "sequence_end"):
                if getattr(asked, name):
                    raise refusal(name, "", ADVICE["sequence"])
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for tensor, data in zip(request.inputs, sections, strict=True):
            if tensor.name in arrays:
                raise BadRequest(f"input '{tensor.name[:100]}' is given twice")
            self._check(tensor)
            place = tensor.parameters
            if is_shared(place, f"input '{tensor.name[:100]}'"):
                data = shared_input(tensor, place)
            arrays[tensor.name] = array_of_tensor(tensor, data, "input", BadRequest)
        return self._rows(arrays, item), self.context_of(request, bool(asked.binary_data_output))

    def _rows(self, arrays: dict[str, np.ndarray[Any, Any]], item: Item) -> dict[str, np.ndarray[Any, Any]]:
        """The rows of this item. Raises BadRequest for missing inputs or different numbers of rows."""
        if arrays or not self.inputs or any(not spec.optional for spec in self.inputs.values()):
            self._check_set(arrays)
        if item.stop < 0:
            return arrays
        return {name: array[item.start : item.stop] for name, array in arrays.items()}

    def _check(self, tensor: Tensor) -> None:
        if not self.inputs:
            return
        spec = self.inputs.get(tensor.name)
        if spec is None:
            raise BadRequest(f"unknown input '{tensor.name[:100]}'; the model has {', '.join(self.inputs)}")
        if tensor.datatype != spec.datatype:
            raise BadRequest(f"input '{spec.name}': datatype must be {spec.datatype}, found '{tensor.datatype[:40]}'")
        shape = tensor.shape
        wanted = [*(spec.shape if self.unbatched else (-1, *spec.shape[1:]))]  # rows may be of any number
        if len(shape) != len(wanted) or any(w not in (-1, f) for w, f in zip(wanted, shape, strict=True)):
            raise BadRequest(f"input '{spec.name}': shape must be {wanted} (-1 is any size), found {shape[:MAX_DIMS]}")

    def _check_set(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if not arrays:
            raise BadRequest("inputs is empty, expected at least one tensor")
        needed = [name for name, spec in self.inputs.items() if not spec.optional]
        missing = [name for name in needed if name not in arrays]
        if missing:
            raise BadRequest(f"input '{missing[0]}' is missing; the model needs {', '.join(needed)}")
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) > 1 and not self.unbatched:
            counts = ", ".join(f"'{name[:100]}' {n}" for name, n in list(rows.items())[:4])
            raise BadRequest(f"inputs must all have the same number of rows (axis 0), found {counts}")

    # ---- in columns

    def parts_of(self, plan: RequestPlan, values: Any, item: Item) -> tuple[Sequence[Any], int] | None:
        """As of the format; the places of inputs in shared memory are part of the plan."""
        if type(plan.stack) is not SharedStack:
            return super().parts_of(plan, values, item)
        return (plan.sizes, plan.rows) if item.stop < 0 else None

    def plan_of(self, request: TensorRequest, values: Any, item: Item) -> RequestPlan | None:
        """As of the format; inputs are all in shared memory, or none of them is."""
        tensors = self.read(item)[0].inputs
        places = [t.parameters for t in tensors if t.parameters is not None and t.parameters.shared_memory_region]
        if not places:
            return super().plan_of(request, values, item)
        columns = columns_of(request, self.inputs)
        sizes: Any = [(p.shared_memory_region, p.shared_memory_offset, p.shared_memory_byte_size) for p in places]
        plain = columns is not None and all(kind != "BOOL" for _, kind, _ in columns)
        if columns is None or not plain or [size for *_, size in sizes] != [a.nbytes for a in request.arrays.values()]:
            return None
        return RequestPlan(SharedStack(columns), request.rows, request.single, request.named, sizes)

    def is_steady(self, item: Item, id: str | None) -> bool:
        """Whether its parameters belong to no single request, and its id is where `cut_id` found it."""
        head = bytes(self.head_of(item)[0])
        steady = is_steady(decode_json(head, OipRequest))
        return steady and has_cut_id(head, id, lambda text: decode_json(text, OipRequest).id)

    def plan_context(self, context: OipContext) -> tuple[OipContext, bytes]:
        """The context of every request with the plan, and its key."""
        context = structs.replace(context, id=None)
        return context, msgspec.json.encode(context)

    def encode_all(
        self, values: Sequence[Any], items: Sequence[Item], requests: Sequence[PlannedRequest]
    ) -> list[ItemResult]:
        """See `ColumnCodec`. What requests with the same plan share is made once."""
        results: list[ItemResult] = []
        last, respond = None, None
        for value, item, request in zip(values, items, requests, strict=True):
            shape = (value.block, request.plan, value.rows, request.id is None)
            if respond is None or shape != last:
                last, respond = shape, self._respond(value, request)
            results.append(respond(value, request.id, item))
        return results

    def _respond(self, found: TensorRows, request: PlannedRequest) -> Respond:
        """What makes the response to this request, and to others with its plan and its number of rows."""
        plan, forms = request.plan, found.block.forms
        key = (type(self), plan.key)
        form = forms.get(key)
        if form is None:
            form = forms[key] = OutputForm(self._output_columns(found.block, plan.context))
        columns = form.columns
        if columns is None:
            return lambda value, id, item: self.encode(value.plain(), item, structs.replace(plan.context, id=id))
        shape = (found.rows, request.id is None)
        respond = form.respond.get(shape)
        if respond is None:
            signature = (*key, *shape, *[(c.name, c.datatype, c.tail) for c in columns])
            head = self._heads.get(signature)
            if head is None:
                head = self.response_head(columns, found.rows, plan.context, request.id is not None)
                self._heads.keep(signature, head)
            plain = len(columns) == 1 and columns[0].shared is None and request.id is None
            respond = self._respond_plainly(head, *columns) if plain else partial(self.respond, head, columns)
            form.respond[shape] = respond
        return respond

    def _respond_plainly(self, head: list[bytes], column: OutputColumn) -> Respond:
        """`respond` for one output and no id, as of most requests."""
        if texts := column.texts:
            before, after = head

            def in_json(found: TensorRows, id: str | None, item: Item) -> ItemResult:
                rows = b",".join(texts[found.start : found.start + found.rows])
                return ItemResult(b"%b[%b]%b" % (before, rows, after), JSON)

            return in_json
        begin, kind, headers = self.opening(b"".join(head))
        data, size = column.data, column.row_bytes

        def in_bytes(found: TensorRows, id: str | None, item: Item) -> ItemResult:
            start = found.start * size
            return ItemResult(begin + data[start : start + found.rows * size], kind, 200, headers)

        return in_bytes

    def _output_columns(self, block: Block, context: OipContext) -> list[OutputColumn] | None:
        """The outputs of a block that a request wants; None if they are encoded row by row."""
        wanted = context.outputs
        if wanted is None:
            wanted = [Selection(name, context.binary) for name in block.arrays]
        found = []
        for each in wanted:
            if each.classes or each.name not in block.arrays:
                return None
            binary = each.binary or each.shared is not None
            column = output_column(each.name, block.arrays[each.name], self.outputs.get(each.name), block.rows, binary)
            if column is None:
                return None
            column.shared = each.shared
            found.append(column)
        return found

    def response_head(self, columns: list[OutputColumn], rows: int, context: OipContext, has_id: bool) -> list[bytes]:
        """The JSON of a response, cut at the data of its outputs and at its id."""
        tensors = []
        for column in columns:
            tensor = Tensor(column.name, [rows, *column.tail], column.datatype)
            if column.texts:
                tensor.data = GAP
            elif column.shared is None:  # Triton's C++ client reads binary_data_size in any parameters that it finds
                tensor.parameters = TensorParameters(binary_data_size=rows * column.row_bytes)
            tensors.append(tensor)
        id: Any = GAP if has_id else None
        return msgspec.json.encode(OipResponse(self.model, self.version, tensors, id, self.parameters)).split(GAP)

    def opening(self, text: bytes) -> tuple[bytes, str, list[tuple[str, str]] | None]:
        """What precedes the bytes of outputs, by the JSON of a response; its content type and its headers."""
        text += b" " * (-len(text) % ALIGNMENT)
        return text, BYTES, [(HEADER_LENGTH, str(len(text)))]

    def respond(
        self, head: list[bytes], columns: list[OutputColumn], found: TensorRows, id: str | None, item: Item
    ) -> ItemResult:
        """The response with these rows of the columns. Raises BadRequest for a place in shared memory."""
        start, stop = found.start, found.start + found.rows
        values = [b"[%b]" % b",".join(column.texts[start:stop]) for column in columns if column.texts]
        if id is not None:
            values.append(msgspec.json.encode(id))
        text = b"".join([head[0], *chain.from_iterable(zip(values, head[1:], strict=True))]) if values else head[0]
        sections = []
        for column in columns:
            if column.shared is not None:
                shared_output(column.name, column.section(start, found.rows), column.shared, item)
            elif not column.texts:
                sections.append(column.section(start, found.rows))
        if not sections:
            return ItemResult(text, JSON)
        text, kind, headers = self.opening(text)
        return ItemResult(b"".join([text, *sections]), kind, headers=headers)

    # ---- responses

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The response for a dict of arrays, or one array ("output_0"). Raises BadRequest for an unknown output."""
        if type(value) is TensorRows:
            return self._respond(value, context)(value, context.id, item)
        if isinstance(value, Response):
            return encode_response(value)
        outputs = named_outputs(value)
        requested: OipContext = context or OipContext()
        selected = requested.outputs
        if selected is None:
            selected = [Selection(name, requested.binary) for name in outputs]
        tensors, sections = [], []
        for wanted in selected:
            name = wanted.name
            if name not in outputs:
                raise BadRequest(f"unknown output '{name[:100]}' requested; the model returned {', '.join(outputs)}")
            datatype, array = output_array(name, outputs[name], self.outputs.get(name))
            if wanted.classes:
                rows = array.reshape(1, -1) if self.unbatched else array
                best = top_classes(name, datatype, rows, wanted.classes, self.labels.get(name, ()))
                datatype, array = "BYTES", best[0] if self.unbatched else best
            tensor = Tensor(name, list(array.shape), datatype)
            if wanted.shared is not None:
                shared_output(name, to_bytes(name, datatype, array), wanted.shared, item)
            elif wanted.binary:
                sections.append(to_bytes(name, datatype, array))
                tensor.parameters = TensorParameters(binary_data_size=len(sections[-1]))
            else:
                tensor.data = to_json(name, datatype, array, self.strict_json, item.stop >= 0)
            tensors.append(tensor)
        answer = OipResponse(self.model, self.version, tensors, requested.id, self.parameters)
        return self.write(answer, sections, requested.typed)

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """A part of a stream, in JSON. Raises BadRequest for binary outputs: their header describes one whole body."""
        result = self.encode(value, item, context)
        if any(name == HEADER_LENGTH for name, _ in result.headers or ()):
            raise BadRequest("the model streams its response, which requires JSON outputs")
        return result

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """One response: the outputs of all parts, concatenated along axis 0. Raises BadOutput if they differ."""
        for part in parts:
            if part.error is not None or len(parts) == 1:
                return part
        answers = [self.read_part(part) for part in parts]
        first = answers[0][0]
        sections: list[bytes | memoryview] = []
        for position, tensor in enumerate(first.outputs):
            same = [(a.outputs[position], split[position]) for a, split in answers if position < len(a.outputs)]
            key = _key(tensor)
            if len(same) != len(answers) or any(_key(t) != key for t, _ in same):
                raise BadOutput(f"output '{tensor.name}' differs between the parts of a split request")
            tensor.shape = [sum(t.shape[0] for t, _ in same), *tensor.shape[1:]]
            if tensor.binary_bytes is None:
                flat = b",".join(inner for t, _ in same if (inner := bytes(t.data)[1:-1]))
                if tensor.datatype.startswith("FP"):
                    flat = flat.replace(b'"', b"")  # of NaN and infinity
                tensor.data = Raw(b"[" + flat + b"]")
            else:
                sections += [data for _, data in same if data is not None]
                tensor.parameters = TensorParameters(binary_data_size=sum(t.binary_bytes or 0 for t, _ in same))
        return self.write(first, sections, parts[0].content_type == TYPED)

    # ---- the form of the messages

    def context_of(self, request: OipRequest, binary: bool) -> OipContext:
        if not request.outputs:
            return OipContext(request.id, None, binary)
        selected = []
        for output in request.outputs:
            asked = output.parameters or NO_PARAMETERS
            own = binary if asked.binary_data is None else asked.binary_data
            shared = asked if is_shared(asked, f"output '{output.name[:100]}'") else None
            selected.append(Selection(output.name, own, asked.classification, shared))
        return OipContext(request.id, selected, binary)

    def write(self, answer: OipResponse, sections: Sequence[bytes | memoryview], typed: bool) -> ItemResult:
        """The response with the bytes of its binary outputs. See `OipContext` for `typed`."""
        if all(tensor.binary_bytes is None for tensor in answer.outputs):
            return ItemResult(body=msgspec.json.encode(answer), content_type=JSON)
        head = write_head(answer)
        headers = [(HEADER_LENGTH, str(len(head)))]
        return ItemResult(body=b"".join([head, *sections]), content_type=BYTES, headers=headers)

    def read_part(self, part: ItemResult) -> tuple[OipResponse, list[memoryview | None]]:
        """The response and the sections that `write` encoded."""
        body = memoryview(part.body)
        length = next((int(value) for name, value in part.headers or () if name == HEADER_LENGTH), len(body))
        answer = msgspec.json.decode(body[:length], type=OipResponse)
        return answer, split_sections(answer.outputs, body[length:], "output", BadOutput)


def is_steady(request: OipRequest) -> bool:
    """Whether a request with other values would be read in the same way."""
    asked, _ = split_parameters(request.parameters)
    return asked == RequestParameters(asked.binary_data_output)


def named_outputs(value: Any) -> dict[str, Any]:
    """Output name -> value for a result of the model. Raises BadOutput."""
    if value is None:
        raise BadOutput("the model returned None for this item; return an array or a dict of name to array")
    return {str(name): one for name, one in value.items()} if isinstance(value, dict) else {"output_0": value}


def _key(tensor: Tensor) -> tuple[str, str, list[int], bool]:
    """The properties of an output that must agree between parts."""
    return tensor.name, tensor.datatype, tensor.shape[1:], tensor.binary_bytes is None


class OipJsonCodec(OipCodec, JsonLists):
    """Codec of `/v2/models/{m}/infer` for pure JSON bodies; the content type does not matter."""

    request_content = staticmethod(request_content)
    response_content = staticmethod(response_content)

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(rows, shape key) of up to 64 KiB of JSON."""
        return peek_json(body, len(body)) if len(body) <= HEADER_BYTES else None

    def cut(self, item: Item) -> tuple[bytes, str | None, Any] | None:
        """As of any JSON; a body without lists of numbers, for tensors in shared memory, is all head."""
        found = super().cut(item)
        if found is not None or item.stop >= 0 or len(item.payload) > MOST_KEY_BYTES:
            return found
        head = cut_id(bytes(item.payload))
        return None if head is None else (*head, ())

    @staticmethod
    def peek_sequence(item: Item, body: bytes | memoryview) -> SequenceRequest | None:
        """The sequence of JSON. Raises BadRequest."""
        return sequence_of_json(body if len(body) <= HEADER_BYTES else large_parameters(body))

    def head_of(self, item: Item) -> tuple[bytes | memoryview, memoryview]:
        """The whole body. Raises BadRequest for other formats, because a JSON error would be misleading."""
        payload = item.payload
        if bytes(payload[:2]) in _PICKLES:
            raise BadRequest("the body is a pickle, which is never loaded here; send JSON, or binary tensors")
        if item.content_type.startswith("application/octet-stream") and bytes(payload[:1]) != b"{":
            raise BadRequest(f"the body is not JSON; binary tensors need the header {HEADER_LENGTH}")
        return payload, memoryview(b"")
