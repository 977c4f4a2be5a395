"""Toy base models: dense families by one table, and Qwen3.5 with its MTP head.

Knows how published base checkpoints spell their configuration; tensor names come from
transformers. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from tests import shared
from tests.toys.files import (
    Dtype,
    RopeSpelling,
    random_tensors,
    rope_keys,
    save,
    version_keys,
    write_json,
)
from tests.toys.tokenizer import ENDOFTEXT, IM_END, IM_START, write_tokenizer

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FAMILY_THETA = {"llama": 10000.0, "mistral": 10000.0, "qwen2": 1000000.0, "qwen3": 1000000.0}


@shared.copied
def make_base(
    path: str | Path,
    family: Family = "llama",
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    vocab: int = 256,
    tied: bool = False,
    attention_bias: bool | None = None,
    mlp_bias: bool = False,
    rope: Mapping[str, Any] | None = None,
    rope_spelling: RopeSpelling = "old",
    sliding_window: int | None = None,
    layer_types: list[str] | None = None,
    max_position: int = 512,
    dtype: Dtype = "float32",
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random base checkpoint and return its directory.

    `rope` is what transformers 5 calls `rope_parameters`, `rope_theta` included or not. EAGLE-3's
    default taps (2, L//2, L-3) are distinct from 7 layers on. `attention_bias` is for llama and
    qwen3 (q, k, v and o); qwen2 always has its q, k, v bias. `eos` replaces both the config's and
    the generation config's ids (default: 2, and [2, 0]).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "bos_token_id": IM_START,
        "eos_token_id": IM_END if eos is None else eos,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "model_type": family,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": vocab,
    }
    if head_dim is not None or family == "qwen3":
        config["head_dim"] = head_dim or hidden // heads
    config |= _family_keys(family, attention_bias, mlp_bias, sliding_window)
    if layer_types is not None:
        config["layer_types"] = layer_types
    config |= rope_keys(rope, rope_spelling, _FAMILY_THETA[family])
    config |= version_keys(rope_spelling, dtype)
    write_json(path / "config.json", config)

    generation_eos = [IM_END, ENDOFTEXT] if eos is None else eos
    write_json(
        path / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": IM_START, "eos_token_id": generation_eos},
    )
    if tokenizer:
        write_tokenizer(path, vocab, max_position)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    save(path, random_tensors(shapes, seed, dtype), shards)
    return path


def _family_keys(
    family: Family, attention_bias: bool | None, mlp_bias: bool, sliding_window: int | None
) -> dict[str, Any]:
    if attention_bias is not None and family not in ("llama", "qwen3"):
        raise ValueError(f"{family} has no attention_bias key")
    if mlp_bias and family != "llama":
        raise ValueError(f"{family} has no mlp_bias key")
    if family == "llama":
        if sliding_window is not None:
            raise ValueError("llama has no sliding window; use mistral, qwen2 or qwen3")
        return {"attention_bias": bool(attention_bias), "mlp_bias": mlp_bias}
    if family == "mistral":
        return {"sliding_window": sliding_window}
    keys: dict[str, Any] = {
        "use_sliding_window": sliding_window is not None,
        "sliding_window": sliding_window,
    }
    if family == "qwen2" and sliding_window is None:
        keys["sliding_window"] = (
            16  # Qwen2 publishes a width that use_sliding_window=false switches off
        )
    # transformers: layers from max_window_layers on use the window. 0 makes all of them do so.
    keys["max_window_layers"] = 0 if sliding_window is not None else 28
    if family == "qwen3":
        keys["attention_bias"] = bool(attention_bias)
    return keys


@shared.copied
def make_qwen3_5(
    path: str | Path,
    *,
    images: bool = False,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    vocab: int = 256,
    tied: bool = False,
    mtp: bool = True,
    experts: int = 0,
    per_token: int = 2,
    expert_size: int = 48,
    shared_size: int = 32,
    key_heads: int = 2,
    value_heads: int = 4,
    key_head_dim: int = 16,
    value_head_dim: int = 24,
    conv_kernel: int = 4,
    layer_types: list[str] | None = None,
    attention_bias: bool = False,
    rope: Mapping[str, Any] | None = None,
    max_position: int = 512,
    dtype: Dtype = "float32",
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random Qwen3.5 checkpoint and return its directory; `images` puts the text beside a
    small encoder, `experts` so many experts in place of each MLP.

    Every fourth layer has full attention, unless `layer_types` says otherwise. `mtp` adds the head,
    which transformers neither reads nor writes. A quarter of a head is rotated, unless `rope` says
    otherwise. A_log and the delta nets' own norm are float32 in every dtype, as published.
    """
    import transformers

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    kinds = layer_types or [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
    ]
    text: dict[str, Any] = {
        "attention_bias": attention_bias,
        "attn_output_gate": True,
        "dtype": dtype,
        "eos_token_id": IM_END if eos is None else eos,
        "full_attention_interval": 4,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "layer_types": kinds,
        "linear_conv_kernel_dim": conv_kernel,
        "linear_key_head_dim": key_head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": value_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": max_position,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": int(mtp),
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
            **(rope or {}),
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": vocab,
    }
    if experts:
        del text["intermediate_size"]
        text |= {
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": expert_size,
            "num_experts": experts,
            "num_experts_per_tok": per_token,
            "shared_expert_intermediate_size": shared_size,
        }
    family = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = {
        **text,
        "architectures": [f"{family}ForCausalLM"],
        "bos_token_id": IM_START,
        "transformers_version": "5.2.0",
    }
    if images:
        config = {
            "architectures": [f"{family}ForConditionalGeneration"],
            "image_token_id": vocab - 4,
            "model_type": "qwen3_5_moe" if experts else "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": tied,
            "transformers_version": "5.2.0",
            "video_token_id": vocab - 3,
            "vision_config": _encoder(hidden, "qwen3_5_moe" if experts else "qwen3_5"),
            "vision_end_token_id": vocab - 1,
            "vision_start_token_id": vocab - 2,
        }
    write_json(path / "config.json", config)
    generation_eos = [IM_END, ENDOFTEXT] if eos is None else eos
    write_json(
        path / "generation_config.json", {"bos_token_id": IM_START, "eos_token_id": generation_eos}
    )
    if tokenizer:
        write_tokenizer(path, vocab, max_position)

    with torch.device("meta"):
        made = transformers.AutoConfig.from_pretrained(path)
        model: Any = getattr(transformers, config["architectures"][0])(made)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    if mtp:
        shapes |= _mtp_shapes(model.config.get_text_config())
    save(path, _centred(random_tensors(shapes, seed, dtype), seed), shards)
    return path


def _encoder(width: int, model_type: str) -> dict[str, Any]:
    """A vision_config of one small layer whose output is `width` wide."""
    return {
        "depth": 1,
        "hidden_size": 32,
        "in_channels": 3,
        "intermediate_size": 32,
        "model_type": model_type,  # the first published files say so
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": width,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _mtp_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The head's tensors: one decoder layer of full attention, two norms and a projection before
    it, a norm behind."""
    from copy import deepcopy

    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

    config = deepcopy(config)
    config.layer_types = ["full_attention"]
    with torch.device("meta"):
        kind = Qwen3_5MoeDecoderLayer if hasattr(config, "num_experts") else Qwen3_5DecoderLayer
        layer: Any = kind(config, 0)
    width = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (width, 2 * width)}
    shapes |= {
        f"mtp.layers.0.{name}": tuple(tensor.shape) for name, tensor in layer.state_dict().items()
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return shapes | {f"mtp.{name}.weight": (width,) for name in norms}


def _centred(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Qwen3.5's own spread: norms around 0 but for the delta nets' own and the encoder's, decays
    from short to long."""
    generator = torch.Generator().manual_seed(seed + 1000)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            tensors[name] = tensor.float()
        elif name.endswith("linear_attn.A_log"):
            tensors[name] = (0.5 * noise).float()
        elif name.endswith("linear_attn.dt_bias"):
            tensors[name] = (noise - 1).to(tensor.dtype)
        elif (name.endswith("norm.weight") and "visual" not in name) or "pre_fc_norm" in name:
            tensors[name] = (0.3 * noise).to(tensor.dtype)
    return tensors


def load_base(path: str | Path) -> Any:
    """The checkpoint as a transformers model: float32, eager attention, evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
