"""What stands beside a graph: the runtime configuration, the tokenizer, the vocabulary map.

File names and keys are those of TensorRT Edge-LLM where it has them, so that its users find what
they know. Knows nothing of graphs' insides.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.checkpoint.files import Checkpoint, some_of
from edgespec.checkpoint.layouts import all_kv_scales
from edgespec.checkpoint.quantization import Quantization
from edgespec.config import DecoderConfig, ModelConfig
from edgespec.contract import GraphShape
from edgespec.errors import CheckpointError, MissingDependency
from edgespec.methods import mtp
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.rope import rope_dict
from edgespec.schemes import SCHEMES


def base_config(
    checkpoint: Checkpoint,
    config: ModelConfig,
    shape: GraphShape,
    kind: str | None,
    aux_layers: tuple[int, ...],
    quantized_from: str | None,
) -> dict[str, Any]:
    """config.json of a base for drafts of a kind, or of a plain decoder; `quantized_from` is the
    identity of its original, if it has one."""
    out = {
        "model": config.architecture,
        "spec_decode_type": kind if kind else "none",
        "engine_role": shape.role.value,
        "vocab_size": config.vocab_size,
        **decoder_keys(config.decoder),
        "max_position_embeddings": config.max_position,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "identity": checkpoint.identity(),
        "graph": shape.as_dict(),
    }
    if quantized_from:
        out["quantized_from"] = quantized_from
    out |= hybrid_keys(shape)
    return out | ({"eagle_hidden_state_layers": list(aux_layers)} if aux_layers else {})


def draft_config(
    checkpoint: Checkpoint,
    config: Eagle3Config,
    shape: GraphShape,
    aux_layers: tuple[int, ...] | None,
    base: Checkpoint | None,
    base_quantized_from: str | None,
) -> dict[str, Any]:
    """config.json of a draft. `pair` is what it asks of its base; null where the draft does not
    say."""
    root = {"base_quantized_from": base_quantized_from} if base_quantized_from else {}
    return {
        "model": "Eagle3",
        "spec_decode_type": config.method,
        "engine_role": shape.role.value,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        **decoder_keys(config.decoder),
        "base_model_hidden_size": shape.base_features,
        "identity": checkpoint.identity(),
        "pair": {
            "base_identity": base.identity() if base else None,
            **root,
            "base_name": config.base_name,
            "tap_ids": list(aux_layers) if aux_layers else None,
            "num_taps": config.num_aux_layers,
            "target_hidden_size": config.target_hidden_size,
            "own_embedding": config.own_embedding,
        },
        "graph": shape.as_dict(),
    }


def mtp_config(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: DecoderConfig,
    shape: GraphShape,
    quantized_from: str | None,
) -> dict[str, Any]:
    """config.json of an MTP head, which has the vocabulary, the embedding and the identity of its
    base."""
    root = {"base_quantized_from": quantized_from} if quantized_from else {}
    return {
        "model": "Mtp",
        "spec_decode_type": mtp.NAME,
        "engine_role": shape.role.value,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        **decoder_keys(layer),
        "base_model_hidden_size": shape.base_features,
        "identity": checkpoint.identity(),
        "pair": {
            "base_identity": checkpoint.identity(),
            **root,
            "base_name": checkpoint.path.name,
            "tap_ids": None,
            "num_taps": 1,
            "target_hidden_size": shape.base_features,
            "own_embedding": False,
        },
        "graph": shape.as_dict(),
    }


def hybrid_keys(shape: GraphShape) -> dict[str, Any]:
    """What a base with recurrent layers says of them; nothing of another base."""
    sizes = shape.recurrent
    if sizes is None:
        return {}
    kinds = ["mamba" if i in sizes.layers else "attention" for i in range(shape.num_layers)]
    cache = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    return {
        "num_linear_attn_layers": len(sizes.layers),
        "num_attention_layers": len(shape.attention_layers),
        "recurrent_state_num_heads": sizes.num_value_heads,
        "recurrent_state_head_dim": sizes.key_head_dim,
        "recurrent_state_size": sizes.value_head_dim,
        "conv_dim": sizes.conv_width,
        "conv_kernel": sizes.conv_kernel,
        "recurrent_state_dtype": "fp32",
        "conv_state_dtype": "fp32",
        "layer_types": kinds,
        "kv_layer_configs": [None if kind == "mamba" else cache for kind in kinds],
    }


def decoder_keys(decoder: DecoderConfig) -> dict[str, Any]:
    """What config.json says of the layers: sizes, window and rotary embedding."""
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "sliding_window": decoder.sliding_window,
        "rope_theta": decoder.rope.theta,
        "partial_rotary_factor": decoder.rope.rotary_dim / decoder.head_dim,
        "rope": rope_dict(decoder.rope),
        **({"local_rope": rope_dict(decoder.ropes[1])} if len(decoder.ropes) > 1 else {}),
        "kv_cache_dtype": "fp32",
    }


def quantization_keys(
    products: Iterable[tuple[str, str | None, int | None]],
    checkpoint: Checkpoint,
    quantization: Quantization | None,
) -> dict[str, Any] | None:
    """What config.json says of quantised weights; None: there are none, and no scales of a cache
    either.

    `products` are the graph's Linears with scheme and block. Of each scheme: how many Linears have
    it, which block sizes, what becomes of the activations, and whether the graph itself rounds them
    or leaves it to the backend.
    """
    rows = sorted(products, key=lambda row: row[0])
    names = sorted({name for _, name, _ in rows if name})
    kv_cache = quantization.kv_cache if quantization is not None else None
    if not (names or kv_cache):
        return None
    schemes = {}
    for name in names:
        blocks = {block for _, found, block in rows if found == name}
        activations = SCHEMES[name].activations
        schemes[name] = {
            "linears": sum(found == name for _, found, _ in rows),
            "blocks": sorted(block for block in blocks if block),
            "activations": activations,
            "activations_in_graph": not activations.startswith("dynamic"),
        }
    cache = {
        "type": kv_cache,
        "scales": [list(pair) for pair in all_kv_scales(checkpoint)],
        "in_graph": False,
    }
    return {
        "layout": (
            quantization.layout if quantization is not None else None
        ),  # none: a borrowed head alone
        "schemes": schemes,
        "lm_head": next((found for node, found, _ in rows if node == "lm_head"), None),
        "unquantised": [node for node, found, _ in rows if found is None],
        "kv_cache": cache if kv_cache else None,
        "golden": GOLDEN_WEIGHTS,
    }


# How golden outputs are made of quantised weights: as the canonical graph is, but for its rounding
# of sums
GOLDEN_WEIGHTS = "dequantised weights in float32; activations rounded where the graph does it"


def quantization_notes(keys: dict[str, Any] | None) -> tuple[str, ...]:
    """The same for the user."""
    if keys is None:
        return ()
    notes = []
    for name, row in keys["schemes"].items():
        blocks = f" in blocks of {', '.join(map(str, row['blocks']))}" if row["blocks"] else ""
        left = (
            ""
            if row["activations_in_graph"]
            else "; its activations are rounded by engines that can, not here"
        )
        notes.append(f"{name}{blocks}: {row['linears']} Linears{left}")
    if keys["unquantised"]:
        notes.append(f"not quantised: {some_of(keys['unquantised'])}")
    if keys["kv_cache"]:
        notes.append(
            f"{keys['kv_cache']['type']} cache: its scales are recorded and not applied; the"
            " graph's caches are float32"
        )
    return tuple(notes)


def text_identity(checkpoint: Checkpoint) -> str:
    """sha256 over the files with settings and those of the tokenizer, as far as they are there."""
    digest = hashlib.sha256()
    for name in (bundle.CONFIG, "hf_quant_config.json", *bundle.TOKENIZER_FILES):
        path = checkpoint.path / name
        digest.update(f"{name}:{bundle.sha256_file(path) if path.is_file() else None}\n".encode())
    return digest.hexdigest()


def copy_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy tokenizer and chat template files; a checkpoint with only `tokenizer.model` gets a
    tokenizer.json."""
    for name in bundle.TOKENIZER_FILES:
        source = checkpoint.path / name
        if source.is_file():
            shutil.copyfile(source, directory / name)
    if (directory / "tokenizer.json").is_file():
        return
    if not (directory / "tokenizer.model").is_file():
        what = f"{checkpoint.path} has neither tokenizer.json nor tokenizer.model"
        raise CheckpointError(what, "Put the model's tokenizer files beside its weights.")
    convert_sentencepiece(checkpoint.path, directory)


def convert_sentencepiece(source: Path, directory: Path) -> None:
    """Write tokenizer.json for a SentencePiece `tokenizer.model`, by transformers' converter."""
    try:
        import sentencepiece  # noqa: F401
        from transformers import LlamaTokenizer
    except ImportError as error:
        what = f"{source} has only tokenizer.model; converting it needs the package {error.name}"
        raise MissingDependency(
            what, "pip install 'edgespec[convert]', or add the model's tokenizer.json."
        ) from error
    tokenizer = LlamaTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
