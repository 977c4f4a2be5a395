"""What stands beside a graph: the runtime configuration, the tokenizer, the vocabulary map.

File names and keys are those of TensorRT Edge-LLM where it has them, so that its users find what they know. Knows
nothing of graphs' insides.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DecoderConfig, DraftConfig, ModelConfig
from edgespec.contract import GraphShape
from edgespec.errors import CheckpointError, MissingDependency


def base_config(
    checkpoint: Checkpoint, config: ModelConfig, shape: GraphShape, taps: tuple[int, ...]
) -> dict[str, Any]:
    """config.json of a base or a plain decoder."""
    out = {
        "model": config.architecture,
        "spec_decode_type": "eagle3" if taps else "none",
        "engine_role": shape.role.value,
        "vocab_size": config.vocab_size,
        **decoder_keys(config.decoder),
        "max_position_embeddings": config.max_position,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "identity": checkpoint.identity(),
        "graph": asdict(shape),
    }
    return out | ({"eagle_hidden_state_layers": list(taps)} if taps else {})


def draft_config(
    checkpoint: Checkpoint,
    config: DraftConfig,
    shape: GraphShape,
    taps: tuple[int, ...] | None,
    base: Checkpoint | None,
) -> dict[str, Any]:
    """config.json of a draft. `pair` is what it asks of its base; null where the draft does not say."""
    return {
        "model": "Eagle3",
        "spec_decode_type": config.kind.value,
        "engine_role": shape.role.value,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        **decoder_keys(config.decoder),
        "base_model_hidden_size": shape.base_features,
        "identity": checkpoint.identity(),
        "pair": {
            "base_identity": base.identity() if base else None,
            "base_name": config.base_name,
            "tap_ids": list(taps) if taps else None,
            "num_taps": config.num_taps,
            "target_hidden_size": config.target_hidden_size,
            "own_embedding": config.own_embedding,
        },
        "graph": asdict(shape),
    }


def decoder_keys(decoder: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "sliding_window": decoder.sliding_window,
        "rope_theta": decoder.rope.theta,
        "rope": asdict(decoder.rope),
        "kv_cache_dtype": "fp32",
    }


def text_identity(checkpoint: Checkpoint) -> str:
    """sha256 over config.json and the files of the tokenizer, as far as they are there."""
    digest = hashlib.sha256()
    for name in (bundle.CONFIG, *bundle.TOKENIZER_FILES):
        path = checkpoint.path / name
        digest.update(f"{name}:{bundle.sha256_file(path) if path.is_file() else None}\n".encode())
    return digest.hexdigest()


def copy_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy tokenizer and chat template files; a checkpoint with only `tokenizer.model` gets a tokenizer.json."""
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
        raise MissingDependency(what, "pip install 'edgespec[convert]', or add the model's tokenizer.json.") from error
    tokenizer = LlamaTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
