"""Writes a checkpoint of Qwen3's shape, or an EAGLE-3 draft of it, as a GGUF file.

    python gguf_file.py CHECKPOINT OUT.gguf [--base BASE]      # --base: CHECKPOINT is a draft of it
    python gguf_file.py CHECKPOINT OUT.gguf --float32          # for llama-quantize

Matrices become Q4_0 (blocks of 32), the tied embedding included, as `llama-quantize --pure` makes
them; `fc` of a draft stays float16, and norms are float32. The vocabulary is made up of ASCII words,
so that every token is printed the moment it comes. With --float32 matrices and vocabulary stay what
they are, the words those of a byte-pair tokenizer that takes digits one by one. Runs where `gguf` is, in an environment of its
own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import quantize

ROWS = 8192  # of a matrix that are quantized at a time
DTYPES = {"BF16": ml_dtypes.bfloat16, "I64": np.int64}
DRAFT_NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of model.safetensors by name, one at a time."""
    path = checkpoint / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + size)
    for name, entry in header.items():
        if name == "t2d":  # which d2t says too
            continue
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the sizes of a decoder."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters", config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_vocabulary(writer: gguf.GGUFWriter, size: int, end: int) -> None:
    """Writes a byte-pair vocabulary of `size` words whose last token of an answer is `end`."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["<0> <1>"])
    writer.add_eos_token_id(end)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    """Writes the vocabulary of tokenizer.json."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    control = {entry["content"] for entry in tokenizer["added_tokens"]}
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    order = sorted(words, key=words.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(order)
    writer.add_token_types([kinds[word in control] for word in order])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])


def turned(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Returns q and k with the pairs that are rotated together next to each other, as llama.cpp has
    them in drafts; others as they are."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if (key := heads.get(name.split(".")[-2])) is None:
        return array
    return array.reshape(config[key], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def add_matrix(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, *, as_float32: bool = False
) -> None:
    """Writes a matrix in Q4_0, or float32, a vector in float32, and integers as they are."""
    if array.dtype == np.int64:
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.I64)
    elif array.ndim == 1 or as_float32:
        writer.add_tensor(name, array.astype(np.float32))
    elif name == "fc.weight":
        writer.add_tensor(name, array.astype(np.float16))
    else:
        kind = gguf.GGMLQuantizationType.Q4_0
        parts = (array[i : i + ROWS] for i in range(0, len(array), ROWS))
        codes = np.concatenate([quantize(part.astype(np.float32), kind) for part in parts])
        writer.add_tensor(name, codes, raw_dtype=kind)


def write(checkpoint: Path, path: Path, base: Path | None, *, as_float32: bool = False) -> None:
    """Writes the file; `base` is the checkpoint that a draft belongs to."""
    config = json.loads((checkpoint / "config.json").read_text())
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "eagle3" if base else "qwen3")
    add_sizes(writer, config)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.ALL_F32 if as_float32 else kinds.MOSTLY_Q4_0)
    if base:
        target = json.loads((base / "config.json").read_text())
        layers = target["num_hidden_layers"]
        # Keys that the published package has no methods for
        writer.add_array("eagle3.target_layers", [2, layers // 2, layers - 3])
        writer.add_uint32("eagle3.target_hidden_size", target["hidden_size"])
        names = DRAFT_NAMES
    else:
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
        stems = [name.removesuffix(".weight") for name, _ in tensors_of(checkpoint)]
        names = {stem: new for stem in stems if (new := table.get_name(stem))}
    if as_float32:
        add_tokenizer(writer, base or checkpoint)
    else:
        add_vocabulary(writer, config["vocab_size"], (target if base else config)["eos_token_id"])
    for name, array in tensors_of(checkpoint):
        if name == "d2t":  # ours are distances, theirs are ids
            writer.add_tensor("d2t", array + np.arange(len(array)))
        else:
            new = names[name.removesuffix(".weight")] + ".weight"
            if base:
                array = turned(name, array, config)
            add_matrix(writer, new, array, as_float32=as_float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def main() -> None:
    """Writes one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--float32", action="store_true")
    args = parser.parse_args()
    write(args.checkpoint, args.out, args.base, as_float32=args.float32)


if __name__ == "__main__":
    main()
