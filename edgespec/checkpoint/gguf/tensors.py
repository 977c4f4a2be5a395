"""The tensors of a GGUF file under Hugging Face's names, and as they are there: what llama.cpp's
converter did to rows, heads and norms is undone where rows are read.

Knows the names that all families share; a family's row has its own. A quantized Linear keeps its
raw blocks, as `MODULE.weight_TYPE` in bytes [out, bytes of a row]; what must be numbers (embedding,
router, convolution) is dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.gguf.config import (
    D2T,
    EMBEDDING,
    HEAD,
    LLAMA3,
    LONG,
    SHORT,
)
from edgespec.checkpoint.gguf.header import Header, StoredBlocks
from edgespec.checkpoint.gguf.types import BlockType, numbers_of, weight_of
from edgespec.checkpoint.source import Encoding, TensorInfo, some_of
from edgespec.config import DecoderConfig
from edgespec.errors import CheckpointError
from edgespec.families.base import GgufForm
from edgespec.quantization.quantized_weight import dequantize

_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
    "output.scale": "lm_head.weight_scale_2",
    "output.input_scale": "lm_head.input_scale",
    D2T: "d2t",
    f"{D2T}.weight": "d2t",  # some forks', with offsets
}
_FUSION = "fc.weight"  # of a draft
_IN_CONFIG = (LLAMA3, SHORT, LONG)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+?)(?:\.(weight|bias|scale|input_scale))?")
# Beside a matrix of NVFP4: what multiplies it, and what its inputs would be rounded by
_SCALES = {"scale": "weight_scale_2", "input_scale": "input_scale"}
# Within a block -> within a layer
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Stacked experts -> the parts of each
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_STACKED = {"weight": 3, "scale": 1, "input_scale": 1}  # dimensions of all experts' together
# A draft's fc among them: its inputs have outliers that no low-bit format holds
_NUMBERS = re.compile(
    r"^fc\.|embed_tokens\.|\.mlp\.gate\.|shared_expert_gate\.|\.conv1d\.|norm\w*\.weight$"
    r"|bias$|A_log$"
)
_NORM = re.compile(r"norm(_embedding|_hidden)?\.weight$")
_PLAIN_NORM = "linear_attn.norm.weight"

Change = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Form:
    """What the converter did, of one model."""

    names: GgufForm
    decoder: DecoderConfig

    def order(self, name: str) -> NDArray[np.intp] | None:
        """The stored row of each row of a tensor by its name in Hugging Face's form."""
        module = name.rpartition(".")[0]
        attention = self.decoder.attention
        for proj, heads in (("q_proj", attention.num_heads), ("k_proj", attention.num_kv_heads)):
            if self.names.permuted and module.endswith(f"self_attn.{proj}"):
                # A head's rows are stored as pairs: the i-th of its halves side by side
                rows = np.arange(heads * attention.head_dim).reshape(heads, -1, 2)
                return rows.swapaxes(1, 2).reshape(-1)
        return self._value_heads(name.partition("linear_attn.")[2])

    def _value_heads(self, name: str) -> NDArray[np.intp] | None:
        """The same of a tensor of a delta net, whose value heads the file may have in turns."""
        linear = self.decoder.linear
        if linear is None or not self.names.tiled_heads:
            return None
        keys, values = linear.num_key_heads, linear.num_value_heads
        wide = name.startswith(("in_proj_qkv.", "in_proj_z.", "conv1d.", "out_proj."))
        if keys == values or not (wide or name.startswith(("in_proj_", "A_log", "dt_bias"))):
            return None
        width = linear.value_head_dim if wide else 1
        heads = np.arange(values * width).reshape(-1, keys, width).swapaxes(0, 1).reshape(-1)
        before = 0
        if name.startswith(("in_proj_qkv.", "conv1d.")):  # q and k are as they were
            before = 2 * keys * linear.key_head_dim
        return np.concatenate([np.arange(before), before + heads])

    def change(self, name: str) -> Change | None:
        """What makes Hugging Face's numbers of the stored ones."""
        if name.endswith("A_log"):
            return _log_of_negative
        plus_one = self.names.norms_plus_one and _NORM.search(name)
        return _minus_one if plus_one and not name.endswith(_PLAIN_NORM) else None


def _minus_one(numbers: NDArray[Any]) -> NDArray[Any]:
    lower: NDArray[Any] = numbers - np.float32(1)
    return lower


def _log_of_negative(numbers: NDArray[Any]) -> NDArray[Any]:
    logarithms: NDArray[Any] = np.log(-numbers)
    return logarithms


def tensors_of(header: Header, names: GgufForm, decoder: DecoderConfig) -> dict[str, TensorInfo]:
    """All tensors by name. Raises CheckpointError for names that no layer of the family has, and
    for sizes that cannot be brought into Hugging Face's form."""
    form = _Form(names, decoder)
    infos: dict[str, TensorInfo] = {}
    unknown = []
    for stored in header.tensors.values():
        if stored.name in _IN_CONFIG:
            continue
        if stored.name.endswith(tuple(f".{end}" for end in _SCALES)):
            matrix = header.tensors.get(f"{stored.name.rpartition('.')[0]}.weight")
            wanted = (matrix.shape[:-2] or (1,)) if matrix and matrix.type.scaled else None
            if stored.shape != wanted:
                raise _misshapen(stored)
        pieces = list(_pieces(stored, names, decoder.num_layers))
        if not pieces and not _of_prediction_head(stored.name, decoder.num_layers):
            unknown.append(stored.name)
        for name, piece in pieces:
            info = _info(name, piece, form)
            infos[info.name] = info
    if unknown:
        raise CheckpointError(
            f"{header.files[0]} has tensors that this version does not know of this architecture:"
            f" {some_of(unknown)}.",
            "Give the Hugging Face checkpoint that it was made from.",
        )
    table = header.tensors.get(EMBEDDING)
    tied = _FUSION not in names.tensors  # a draft without a head has its base's
    if tied and HEAD not in header.tensors and table is not None and not table.type.dtype:
        head = _info(_TOP[HEAD], table, form)  # of tied weights: the same blocks, for a product
        infos[head.name] = head
    return infos


def _of_prediction_head(name: str, num_layers: int) -> bool:
    match = _BLOCK.fullmatch(name)
    return match is not None and int(match[1]) >= num_layers


def _pieces(
    stored: StoredBlocks, names: GgufForm, num_layers: int
) -> Iterator[tuple[str, StoredBlocks]]:
    """Hugging Face's names of a tensor, and of each expert of stacked ones."""
    if (top := names.tensors.get(stored.name) or _TOP.get(stored.name)) is not None:
        yield top, stored
        return
    match = _BLOCK.fullmatch(stored.name)
    if match is None or (int(match[1]) >= num_layers and not names.behind):
        return
    layer, bare, end = f"model.layers.{match[1]}", match[2], match[3]
    if int(match[1]) >= num_layers:
        number = int(match[1]) - num_layers
        own_parts = bare.startswith("nextn.")
        layer = names.behind if own_parts else f"{names.behind}.layers.{number}"
    if bare in _EXPERTS and end in _STACKED and len(stored.shape) == _STACKED[end]:
        parts = tuple(f"{part}.{_SCALES.get(end, end)}" for part in _EXPERTS[bare])
        yield from _experts(stored, f"{layer}.mlp.experts", parts)
        return
    whole = f"{bare}.{end}" if end else bare
    if whole in names.tensors:
        bare, end = whole, None
    own = names.tensors.get(bare) or _NAMES.get(bare)
    if own is not None:
        end = _SCALES.get(end, end)
        yield f"{layer}.{own}.{end}" if end else f"{layer}.{own}", stored


def _experts(
    stored: StoredBlocks, prefix: str, parts: tuple[str, ...]
) -> Iterator[tuple[str, StoredBlocks]]:
    """The parts of each expert; they share its scale."""
    count, *shape = stored.shape
    if shape and shape[0] % len(parts):
        raise _misshapen(stored)
    each = len(parts) if shape else 1
    size = stored.num_bytes // (count * each)
    for i in range(count * len(parts)):
        piece = replace(
            stored,
            shape=(shape[0] // each, shape[1]) if shape else (1,),
            offset=stored.offset + i * each // len(parts) * size,
            num_bytes=size,
        )
        yield f"{prefix}.{i // len(parts)}.{parts[i % len(parts)]}", piece


def _info(name: str, stored: StoredBlocks, form: _Form) -> TensorInfo:
    if name.endswith(tuple(_SCALES.values())) and stored.type.dtype:
        size = stored.num_bytes
        return TensorInfo(name, stored.type.dtype, stored.shape, stored.file, stored.offset, size)
    order, change, columns = form.order(name), form.change(name), None
    if name.endswith("linear_attn.out_proj.weight"):
        order, columns = None, order
    shape, size, kind = stored.shape, stored.num_bytes, stored.type
    if name.endswith("shared_expert_gate.weight"):
        shape = (1, shape[-1])
    if name.endswith("conv1d.weight") and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    rows = shape[0]
    fits = (order is None or len(order) == rows) and (columns is None or len(columns) == shape[-1])
    if not fits or (not kind.dtype and len(shape) != 2):
        raise _misshapen(stored)
    info = TensorInfo(name, kind.dtype, shape, stored.file, stored.offset, size)
    if kind.dtype and order is None and columns is None and change is None:
        return info
    if not kind.dtype and not _NUMBERS.search(name):
        raw = replace(info, name=f"{name}_{kind.name}", dtype="uint8", shape=(rows, size // rows))
        if order is None and columns is None:
            return raw
        return replace(raw, encoding=Encoding(size // rows, lambda rows: rows, order, columns))
    dtype = "float32" if change or not kind.dtype else kind.dtype
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    return replace(
        info,
        dtype=dtype,
        num_bytes=int(np.prod(shape)) * itemsize,
        encoding=Encoding(size // rows, _decoder(name, kind, change, columns), order),
    )


def _decoder(
    name: str, kind: BlockType, change: Change | None, columns: NDArray[np.intp] | None
) -> Change:
    """From raw rows to numbers in Hugging Face's form."""
    stored = np.dtype(getattr(ml_dtypes, kind.dtype, kind.dtype)) if kind.dtype else None

    @np.errstate(all="ignore")  # what is not finite is refused where it is written
    def decode(raw: NDArray[Any]) -> NDArray[Any]:
        raw = np.ascontiguousarray(raw)
        if stored is not None:
            numbers = raw.view(stored)
        elif kind.fields is not None:
            numbers = dequantize(weight_of(name, kind, raw))
        else:
            numbers = numbers_of(kind, raw)
        numbers = numbers if columns is None else numbers[:, columns]
        return numbers if change is None else change(numbers.astype(np.float32))

    return decode


def _misshapen(stored: StoredBlocks) -> CheckpointError:
    return CheckpointError(
        f"{stored.file}: tensor {stored.name!r} of {stored.type.name} has the shape"
        f" {list(stored.shape)}, which its metadata do not lead to expect.",
        "Download it again.",
    )
