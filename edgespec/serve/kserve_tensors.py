"""Tensors of KServe's protocol V2, in JSON or behind it (Triton's extension for binary tensors).

An input of shape [1], [1, 1] or [N, 1] is a parameter of one or each of N prompts. BYTES are texts
in UTF-8, each behind its length in 4 bytes, little-endian. Knows shapes and bytes; knows no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from edgespec.errors import RequestError
from edgespec.serve.bodies import parsed, read_bytes
from edgespec.serve.errors import Refusal
from edgespec.serve.fields import BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, Fields, taken
from edgespec.serve.limits import ServeLimits
from edgespec.serve.service import Call

LENGTH = "inference-header-content-length"  # of the JSON in front of the tensors
NUMPY = {
    "BOOL": "?",
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
MAX_PROMPTS = 64
LIST = {"type": "array", "items": OBJECT}
# The body of `infer`, whose parts are read together
INFER: Fields = {
    name: taken(lambda value, here: value, schema, required=name == "inputs")
    for name, schema in zip(
        ("inputs", "outputs", "parameters", "id"), (LIST, LIST, OBJECT, STRING), strict=True
    )
}


async def read_generate(request: Request, limits: ServeLimits) -> dict[str, Any]:
    """The parameters of `generate`, of whatever content type: curl calls JSON a form. Those under
    `parameters` stand beside the others then. Raises RequestError, and Refusal for a long body."""
    body = parsed(await read_bytes(request, limits.max_body_bytes), limits.max_json_depth)
    inner = body.pop("parameters", {})
    if not isinstance(inner, dict) or (twice := inner.keys() & body.keys()):
        name = "parameters" if not isinstance(inner, dict) else sorted(twice)[0]
        raise RequestError(f"request: {name} is no object, or is there twice.", param=name)
    return body | inner


async def read_infer(request: Request, limits: ServeLimits) -> dict[str, Any]:
    """The JSON of `infer`, its inputs with their `data`. Raises RequestError and Refusal."""
    raw = await read_bytes(request, limits.max_body_bytes)
    length = request.headers.get(LENGTH)
    if length is not None and not (length.isdecimal() and int(length) <= len(raw)):
        raise RequestError(f"request: {LENGTH} is not a length within the body.")
    end = len(raw) if length is None else int(length)
    body, rest = parsed(raw[:end], limits.max_json_depth), memoryview(raw)[end:]
    inputs = body.get("inputs")
    if not isinstance(inputs, list) or not all(isinstance(one, dict) for one in inputs):
        raise RequestError("request: inputs are not a list of tensors.", param="inputs")
    for one in inputs:
        size = parameters_of(one).get("binary_data_size")
        if size is None:
            continue
        if not isinstance(size, int) or not 0 <= size <= len(rest):
            raise RequestError(f"request: the body ends within {one.get('name')!r:.80}.")
        one["data"], rest = elements(rest[:size], str(one.get("datatype"))), rest[size:]
    if rest:
        raise RequestError(f"request: {len(rest)} bytes are of no input.")
    return body


def parameters_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a request or a tensor."""
    found = part.get("parameters") or {}
    if not isinstance(found, dict):
        raise RequestError("request: parameters are no object.", param="parameters")
    return found


def elements(raw: memoryview, datatype: str) -> list[Any]:
    """The elements of a binary tensor."""
    if datatype in NUMPY:
        dtype = np.dtype(NUMPY[datatype])
        if len(raw) % dtype.itemsize:
            raise RequestError(f"request: {len(raw)} bytes are no {datatype} tensor.")
        return list(np.frombuffer(raw, dtype).tolist())
    texts = []
    while raw and datatype == "BYTES":
        size = int.from_bytes(raw[:4], "little")
        if len(raw) < 4 + size:
            raise RequestError("request: a BYTES tensor ends within an element.")
        try:
            texts.append(bytes(raw[4 : 4 + size]).decode())
        except UnicodeDecodeError:
            raise RequestError("request: a BYTES element is not UTF-8.") from None
        raw = raw[4 + size :]
    if raw:
        raise RequestError(f"request: tensors of type {datatype[:40]} are not taken.")
    return texts


@dataclass(frozen=True, slots=True)
class InferTensors:
    """The inputs of each prompt by name, and what is to be sent of the outputs: all where
    `wanted` is None, as bytes those in `binary`, None: all."""

    id: str | None
    inputs: Sequence[Mapping[str, Any]]
    wanted: Sequence[str] | None
    binary: Set[str] | None

    def response(
        self,
        model: str,
        rows: Sequence[Mapping[str, Any]],
        known: Set[str],
        adjusted: Sequence[str],
    ) -> ASGIApp:
        """The outputs of each prompt as tensors of shape [N], with what of the request was taken
        otherwise. Raises RequestError for one that there is not, or that was not asked for."""
        names = self.wanted if self.wanted is not None else [*rows[0]]
        outputs, tail = [], b""
        for name in names:
            if name not in rows[0]:
                why = "needs its return_ input" if name in known else "is not there"
                raise RequestError(f"request: the output {name!r:.80} {why}.", param="outputs")
            data = [row[name] for row in rows]
            first = data[0]
            kind = "BYTES" if isinstance(first, str) else "FP32"
            kind = "INT64" if isinstance(first, int) else kind
            tensor: dict[str, Any] = {"name": name, "datatype": kind, "shape": [len(data)]}
            if self.binary is None or name in self.binary:
                raw = raw_of(data, kind)
                tensor["parameters"], tail = {"binary_data_size": len(raw)}, tail + raw
            else:
                tensor["data"] = data
            outputs.append(tensor)
        own: dict[str, Any] = {} if self.id is None else {"id": self.id}
        if adjusted:
            own["parameters"] = {"adjusted": "; ".join(adjusted)}
        body = {**own, "model_name": model, "model_version": "1", "outputs": outputs}
        if not tail:
            return JSONResponse(body)
        head = json.dumps(body, separators=(",", ":")).encode()
        headers = {LENGTH: str(len(head))}
        return Response(head + tail, headers=headers, media_type="application/octet-stream")


def raw_of(data: Sequence[Any], datatype: str) -> bytes:
    """The bytes of a tensor."""
    if datatype != "BYTES":
        return np.array(data, NUMPY[datatype]).tobytes()
    texts = [text.encode() for text in data]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def request_of(call: Call) -> InferTensors:
    """The tensors of a request. Raises RequestError for shapes and elements that do not go
    together, Refusal for too many prompts."""
    body = call.values
    columns = {str(one.get("name")): column_of(one) for one in body["inputs"]}
    if len(columns) != len(body["inputs"]):
        raise RequestError("request: an input is there twice.", param="inputs")
    count = len(columns.get("text_input", [""]))
    if count > MAX_PROMPTS:
        raise Refusal(400, f"{count} prompts, and {MAX_PROMPTS} is the limit.", param="text_input")
    for name, column in columns.items():
        if len(column) not in (1, count):
            message = f"request: {name[:80]} has {len(column)} elements for {count} prompts."
            raise RequestError(message, param="inputs")
    rows = [
        {name: column[index if len(column) > 1 else 0] for name, column in columns.items()}
        for index in range(count)
    ]
    outputs, parameters = body.get("outputs"), parameters_of(body)
    wanted, binary = None, None if parameters.get("binary_data_output") else frozenset[str]()
    if outputs is not None:
        if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
            raise RequestError("request: outputs are not a list of objects.", param="outputs")
        wanted = [str(one.get("name")) for one in outputs]
        binary = frozenset(
            str(one.get("name")) for one in outputs if parameters_of(one).get("binary_data")
        )
    own = body.get("id")
    return InferTensors(own if isinstance(own, str) and own else None, rows, wanted, binary)


def column_of(tensor: Mapping[str, Any]) -> list[Any]:
    """The elements of an input, one for each prompt. Raises RequestError."""
    name, shape, data = str(tensor.get("name"))[:80], tensor.get("shape"), tensor.get("data")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise RequestError(f"request: the shape of {name} is no list of sizes.", param="inputs")
    while isinstance(data, list) and data and isinstance(data[0], list):
        data = [item for row in data for item in (row if isinstance(row, list) else [row])]
    if not isinstance(data, list) or not data or len(data) != math.prod(shape):
        raise RequestError(f"request: {name} has not as many elements as its shape.", param=name)
    return data


# ---- metadata


def declared(fields: Fields, sizes: str) -> list[dict[str, Any]]:
    """The inputs that are taken, for metadata and config; `sizes` is the key of a shape."""
    types = {id(BOOLEAN): "BOOL", id(INTEGER): "INT32", id(NUMBER): "FP32"}
    taken = {name: row for name, row in fields.items() if row.check is not None and name != "id"}
    return outputs({name: types.get(id(row.schema), "BYTES") for name, row in taken.items()}, sizes)


def outputs(types: Mapping[str, str], sizes: str) -> list[dict[str, Any]]:
    """Tensors of one element a prompt."""
    named = {"text_output": "BYTES", **types} if "finish_reason" in types else types
    config = sizes == "dims"
    return [
        {
            "name": name,
            ("data_type" if config else "datatype"): type_of(kind) if config else kind,
            sizes: [-1],
        }
        for name, kind in named.items()
    ]


def type_of(datatype: str) -> str:
    """A type as config.pbtxt calls it."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
