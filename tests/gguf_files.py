"""GGUF files of toy checkpoints, written with gguf-py: its names of tensors, and in a few lines
what llama.cpp's converter does to rows, heads and norms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
}
PICTURES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
Tensors = dict[str, NDArray[Any]]


def write(
    hf: Path,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    mtp: bool = False,
    encode: Callable[[NDArray[Any], Type], tuple[NDArray[Any], Type]] | None = None,
    **split: Any,
) -> Tensors:
    """Writes a checkpoint's matrices in a type, or each in that of its name, all else in float32;
    `more` are further keys behind the architecture's name, and `extra` tensors; `encode` makes
    blocks of a matrix, and may choose another type. Returns what is in the file, by names of
    GGUF."""
    config = json.loads((hf / "config.json").read_text())
    config = config.get("text_config", {}) | config
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), architecture, **split)
    layers = config["num_hidden_layers"]
    head = {"block_count": layers + 1, "nextn_predict_layers": 1} if mtp else {}
    for key, value in (sizes(config) | head | dict(more or {})).items():
        adders: dict[type, Callable[[str, Any], None]] = {
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        adders.get(type(value), writer.add_uint32)(f"{architecture}.{key}", value)
    add_tokenizer(writer, hf, config)
    stored = load_file(hf / "model.safetensors")
    if mtp:
        stored = {_as_layer(name, layers): array for name, array in stored.items()}
        config = config | {"num_hidden_layers": layers + 1}
    tensors = converted(stored, config, architecture) | dict(extra or {})
    for name, array in tensors.items():
        own = kind if isinstance(kind, str) else kind(name)
        if array.ndim < 2 or array.shape[-1] % 32 or own == "F32" or "conv1d" in name:
            writer.add_tensor(name, array)
        elif own == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            wanted = Type[own]
            blocks, made = encode(array, wanted) if encode else (encoded(array, wanted), wanted)
            tensors[name] = dequantize(blocks, made)
            writer.add_tensor(name, blocks, raw_dtype=made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


# Of types that gguf-py does not quantize to: where their factors stand in a block, and which make
# random values about as large as a toy's
FACTORS = {Type.Q4_K: (0, (2e-4, 1.6e-3)), Type.Q6_K: (208, (4e-5,))}


def encoded(array: NDArray[Any], kind: Type) -> NDArray[np.uint8]:
    """The blocks of an array [..., in]; random ones of types that gguf-py does not quantize to."""
    if kind not in FACTORS:
        return np.asarray(quantize(array, kind))
    (block, size), (start, factors) = GGML_QUANT_SIZES[kind], FACTORS[kind]
    random = np.random.default_rng(array.size)
    blocks = random.integers(0, 256, (array.size // block, size), np.uint8)
    halves = np.array(factors, np.float16).view(np.uint8)
    blocks[:, start : start + len(halves)] = halves
    return blocks.reshape(*array.shape[:-1], -1)


_HEAD = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}


def _as_layer(name: str, number: int) -> str:
    """The tensors of an MTP head as those of a layer behind the last."""
    module, _, end = name.rpartition(".")
    if module in _HEAD:
        return f"blk.{number}.nextn.{_HEAD[module]}.{end}"
    return name.replace("mtp.layers.0.", f"model.layers.{number}.")


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that all architectures have, and those of the delta nets and experts."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config.get("rope_theta") or rope.get("rope_theta", 10000)),
        "rope.dimension_count": int(head_dim * rotated),
        "expert_count": config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "rope.freq_base_swa": config.get("rope_local_base_freq"),
    }
    if "mrope_section" in rope:
        keys["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if config["model_type"] in ("phi3", "gemma3_text"):
        keys["attention.sliding_window"] = config.get("sliding_window")
    if values := config.get("linear_num_value_heads"):
        keys |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": values,
            "ssm.inner_size": values * config["linear_value_head_dim"],
            "full_attention_interval": config["full_attention_interval"],
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    return {key: value for key, value in keys.items() if value is not None}


def write_draft(
    hf: Path, path: Path, kind: str, keys: Mapping[str, Any], own: Mapping[str, str]
) -> None:
    """Writes a draft as llama.cpp's converter does, which gguf-py does not know: `keys` behind the
    architecture's name, `own` the names that no model has. d2t becomes ids."""
    config = json.loads((hf / "config.json").read_text())
    architecture = "eagle3" if "block_size" not in config else "dflash"
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in (sizes(config) | dict(keys)).items():
        adders: dict[type, Callable[[str, Any], None]] = {
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        adders.get(type(value), writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_mask_token_id(config["vocab_size"] - 1)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, array in load_file(hf / "model.safetensors").items():
        name = name.replace("midlayer.", "layers.0.")
        if name == "d2t":
            writer.add_tensor(name, array + np.arange(len(array)))
        elif name != "t2d":
            array = _changed(name, array, config) if "layers." in name else array
            whole = name if name.startswith("lm_head") else f"model.{name}"
            new = own.get(name) or _named(table, whole)
            if array.ndim == 2 and kind != "F32":
                writer.add_tensor(new, quantize(array, Type[kind]), raw_dtype=Type[kind])
            else:
                writer.add_tensor(new, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_eagle3(hf: Path, path: Path, aux_layers: list[int]) -> None:
    config = json.loads((hf / "config.json").read_text())
    keys = {"extract_layers": aux_layers, "target_hidden_size": config["hidden_size"]}
    keys["norm_before_residual"] = False
    own = {
        "fc.weight": "fc.weight",
        "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    }
    write_draft(hf, path, "F32", keys, own)


def write_dflash(hf: Path, path: Path, kind: str = "F32") -> None:
    config = json.loads((hf / "config.json").read_text())
    layers = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    keys = {"target_layers": layers, "block_size": config["block_size"], "attention.causal": False}
    own = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"}
    write_draft(hf, path, kind, keys, own)


def add_tokenizer(writer: gguf.GGUFWriter, hf: Path, config: dict[str, Any]) -> None:
    """The toy's byte-level BPE, which ends at the config's first end."""
    tokenizer = json.loads((hf / "tokenizer.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"].items())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    pictures = {config[key]: token for key, token in PICTURES.items() if key in config}
    vocab = {token: i for token, i in vocab.items() if i not in pictures}
    vocab |= {token: i for i, token in pictures.items()}
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if i in {*special, *pictures} else 1 for i in sorted(vocab.values())])
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    known = [m for m in merges if {*m.split(" "), m.replace(" ", "")} <= vocab.keys()]
    writer.add_token_merges(known)
    beside, texts = (
        hf / "chat_template.jinja",
        json.loads((hf / "tokenizer_config.json").read_text()),
    )
    writer.add_chat_template(beside.read_text() if beside.is_file() else texts["chat_template"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def converted(tensors: Tensors, config: dict[str, Any], architecture: str) -> Tensors:
    """The tensors of a file in float32, by gguf-py's names."""
    layers = config["num_hidden_layers"]
    table = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), layers
    )
    made: Tensors = {}
    stacks: dict[str, list[NDArray[Any]]] = {}
    for name in sorted(tensors, key=_expert):
        if name.startswith(("mtp.", "model.visual", "visual.")):
            continue
        array = _changed(name, tensors[name].astype(np.float32), config)
        name = name.replace("model.language_model.", "model.")
        if ".experts." in name and name.endswith(".weight"):
            start, _, end = name.partition(".experts.")
            stacks.setdefault(f"{start}.experts.{end.partition('.')[2]}", []).append(array)
            continue
        made[_named(table, name)] = array
    return made | {_named(table, name): np.stack(parts) for name, parts in stacks.items()}


def _expert(name: str) -> tuple[str, int]:
    start, _, end = name.partition(".experts.")
    number = end.partition(".")[0]
    return (start, int(number)) if number.isdigit() else (name, 0)


def _named(table: Any, name: str) -> str:
    if name.endswith("dt_bias"):  # the converter calls it dt_proj.bias
        name = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        name = f"{name}.weight"
    if ".nextn." in name:  # gguf-py knows them of other architectures
        return name
    new = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert new is not None, name
    return str(new)


def _changed(name: str, array: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    kind = config["model_type"]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    module = name.split(".")[-2]
    if kind == "llama" and module in heads:
        halves = array.reshape(config[heads[module]], 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape).copy()
    plus_one = kind.startswith(("gemma3", "qwen3_5")) and name.endswith("norm.weight")
    if plus_one and not name.endswith("linear_attn.norm.weight"):
        return array + np.float32(1)
    if ".linear_attn." in name:
        return _delta_net(name.partition(".linear_attn.")[2], array, config)
    return array


def _delta_net(name: str, array: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """Value heads of one key head after the other become the first of each key head, the second of
    each."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * keys * config["linear_key_head_dim"]

    def tiled(rows: NDArray[Any]) -> NDArray[Any]:
        return (
            rows.reshape(keys, values // keys, -1, *rows.shape[1:])
            .swapaxes(0, 1)
            .reshape(rows.shape)
        )

    if name.startswith("norm"):
        return array
    if name == "A_log":
        return tiled(-np.exp(array))
    if name.startswith("conv1d"):
        array = array[:, 0]
    if name.startswith(("in_proj_qkv", "conv1d")):
        return np.concatenate([array[:before], tiled(array[before:])])
    return tiled(array.T).T.copy() if name.startswith("out_proj") else tiled(array)


def write_mmproj(hf: Path, path: Path, kind: str = "F32") -> None:
    """Writes the image encoder of a checkpoint as llama.cpp's converter does: the kernels of two
    pictures apart, of Qwen2.5-VL q, k and v as well."""
    config = json.loads((hf / "config.json").read_text())
    vision, settings = config["vision_config"], json.loads((hf / PREPROCESSOR).read_text())
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_clip_has_vision_encoder(True)
    windows = config["model_type"] == "qwen2_5_vl"
    kinds = gguf.VisionProjectorType
    writer.add_clip_projector_type(kinds.QWEN25VL if windows else kinds.QWEN3VL)
    writer.add_vision_projection_dim(vision["out_hidden_size"])
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    inner = vision.get("deepstack_visual_indexes", [])
    if windows:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", vision["window_size"])
    else:
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_is_deepstack_layers([i in inner for i in range(vision["depth"])])
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    made: Tensors = {}
    for name, array in load_file(hf / "model.safetensors").items():
        bare = name.partition("visual.")[2]
        module, _, end = bare.rpartition(".")
        if not bare:
            continue
        if bare == "patch_embed.proj.weight":
            made |= {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
        elif windows and module.endswith("attn.qkv"):
            for part, rows in zip("qkv", np.split(array, 3), strict=True):
                made[f"v.blk.{bare.split('.')[1]}.attn_{part}.{end}"] = rows
        elif bare.startswith("deepstack_merger_list."):
            number, part = module.split(".")[1:]
            part = part.removeprefix("linear_")
            made[f"v.deepstack.{inner[int(number)]}.{part}.{end}"] = array
        elif module.startswith("merger.") and not windows:
            to = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
            made[f"{to[module.removeprefix('merger.')]}.{end}"] = array
        else:
            new = table.get_name(f"visual.{bare}", try_suffixes=(".weight", ".bias"))
            assert new is not None, bare
            made[str(new)] = array
    for name, array in sorted(made.items()):  # q, k and v need not lie side by side
        small = array.ndim < 2 or "position_embd" in name or kind == "F32"
        if small or (kind not in ("F16", "BF16") and array.shape[-1] % 32):
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, quantize(array, Type[kind]), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PREPROCESSOR = "preprocessor_config.json"
