"""Toy checkpoints in the formats that are found on disk: base models, EAGLE-3 and DFlash drafts,
tokenizers.

Knows how published checkpoints spell their configurations and name their tensors, and writes
small random ones. Knows nothing of edgespec: what it writes is what edgespec is tested on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
DraftLayout = Literal["eagle", "specforge", "modelopt", "speculators"]
Layout = Literal["z-lab", "modelopt", "speculators"]
RopeSpelling = Literal["old", "new"]
Dtype = Literal["float32", "bfloat16", "float16"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
ENDOFTEXT, IM_START, IM_END = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

torch.set_num_threads(
    1
)  # toys are too small to share out: with more threads these tests take four times as long

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FAMILY_THETA = {"llama": 10000.0, "mistral": 10000.0, "qwen2": 1000000.0, "qwen3": 1000000.0}

_TEXT = """\
The small boat left the harbour before the sun was up, and nobody on the shore saw where it went.
A draft model proposes several words; the larger model reads them all at once and keeps what it would have said.
If the first word is wrong, then the second word does not matter. If the first word is right, go on to the next.
We count the words that stand: one, two, three, four, five, six, seven, eight, nine, ten.
Question: what is 12 + 30? Answer: 42. Question: what is 7 * 8? Answer: 56.
def add(left, right):
    return left + right
In the morning the children walked to school along the river; in the evening they walked home over the hill.
Rain fell on the roof, on the road and on the fields, and the water ran down to the valley where the mill stands.
Every tree has a root, every branch has a parent, and every leaf has a path that leads back to the ground.
She asked whether the machine could think. It answered that it could count, and that counting was enough for today.
"""


# Bases


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
    config |= _rope_keys(rope, rope_spelling, _FAMILY_THETA[family])
    config |= _version_keys(rope_spelling, dtype)
    _write_json(path / "config.json", config)

    generation_eos = [IM_END, ENDOFTEXT] if eos is None else eos
    _write_json(
        path / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": IM_START, "eos_token_id": generation_eos},
    )
    if tokenizer:
        _write_tokenizer(path, vocab, max_position)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    _save(path, _random_tensors(shapes, seed, dtype), shards)
    return path


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
    """Write a random dense Qwen3.5 checkpoint and return its directory; `images` puts the text
    beside a small tower.

    Every fourth layer has full attention, unless `layer_types` says otherwise. `mtp` adds the head,
    which transformers neither reads nor writes. A quarter of a head is rotated, unless `rope` says
    otherwise. A_log and the delta nets' own norm are float32 in every dtype, as published.
    """
    from transformers import AutoConfig, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

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
    config = {
        **text,
        "architectures": ["Qwen3_5ForCausalLM"],
        "bos_token_id": IM_START,
        "transformers_version": "5.2.0",
    }
    if images:
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": vocab - 4,
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": tied,
            "transformers_version": "5.2.0",
            "video_token_id": vocab - 3,
            "vision_config": _tower(hidden),
            "vision_end_token_id": vocab - 1,
            "vision_start_token_id": vocab - 2,
        }
    _write_json(path / "config.json", config)
    generation_eos = [IM_END, ENDOFTEXT] if eos is None else eos
    _write_json(
        path / "generation_config.json", {"bos_token_id": IM_START, "eos_token_id": generation_eos}
    )
    if tokenizer:
        _write_tokenizer(path, vocab, max_position)

    family: Any = Qwen3_5ForConditionalGeneration if images else Qwen3_5ForCausalLM
    with torch.device("meta"):
        model = family(AutoConfig.from_pretrained(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    if mtp:
        shapes |= _mtp_shapes(model.config.get_text_config())
    _save(path, _centred(_random_tensors(shapes, seed, dtype), seed), shards)
    return path


def _tower(width: int) -> dict[str, Any]:
    """A vision_config of one small layer whose output is `width` wide."""
    return {
        "depth": 1,
        "hidden_size": 32,
        "in_channels": 3,
        "intermediate_size": 32,
        "model_type": "qwen3_5",  # the first published files say so
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

    config = deepcopy(config)
    config.layer_types = ["full_attention"]
    with torch.device("meta"):
        layer = Qwen3_5DecoderLayer(config, 0)
    width = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (width, 2 * width)}
    shapes |= {
        f"mtp.layers.0.{name}": tuple(tensor.shape) for name, tensor in layer.state_dict().items()
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return shapes | {f"mtp.{name}.weight": (width,) for name in norms}


def _centred(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Qwen3.5's own spread: norms around 0 but for the delta nets' own and the tower's, decays from
    short to long."""
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


def write_pickle(path: str | Path) -> Path:
    """Turn a checkpoint's safetensors (sharded or not) into one `pytorch_model.bin`."""
    path = Path(path)
    files = sorted(path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    torch.save(tensors, path / "pytorch_model.bin")
    for file in [*files, *path.glob("*.safetensors.index.json")]:
        file.unlink()
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


def _rope_keys(
    rope: Mapping[str, Any] | None, spelling: RopeSpelling, default_theta: float | None
) -> dict[str, Any]:
    scaling = dict(rope or {})
    theta = scaling.pop("rope_theta", default_theta)
    if spelling == "new":
        if theta is not None:
            scaling["rope_theta"] = theta
        return {"rope_parameters": {"rope_type": "default"} | scaling}
    keys: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    plain = (
        scaling.get("rope_type", scaling.get("type", "default")) == "default" and len(scaling) <= 1
    )
    return keys | {"rope_scaling": None if plain else scaling}


def _version_keys(spelling: RopeSpelling, dtype: Dtype) -> dict[str, Any]:
    if spelling == "new":
        return {"dtype": dtype, "transformers_version": "5.14.1"}
    return {"torch_dtype": dtype, "transformers_version": "4.51.0"}


# Tokenizers


def make_sentencepiece(
    path: str | Path, *, vocab: int = 400, tokenizer_config: bool = False
) -> Path:
    """Give `path` a SentencePiece `tokenizer.model` (BPE, byte fallback) and nothing else that is a
    tokenizer.

    Files of a fast tokenizer that are there already are removed. Ids: <unk> 0, <s> 1, </s> 2, then
    the 256 bytes; the trained vocabulary has at most `vocab` pieces. With `tokenizer_config`, a
    LlamaTokenizer config is written too.
    """
    import sentencepiece

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (path / name).unlink(missing_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=3,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    if tokenizer_config:
        _write_json(
            path / "tokenizer_config.json",
            {
                "add_bos_token": True,
                "add_eos_token": False,
                "bos_token": "<s>",
                "eos_token": "</s>",
                "legacy": False,
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
            },
        )
    return path


def _write_tokenizer(path: Path, vocab: int, max_position: int) -> None:
    (path / "tokenizer.json").write_text(_train_bpe(vocab), encoding="utf-8")
    added = {
        str(i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    _write_json(
        path / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": max_position,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


@cache
def _train_bpe(vocab: int) -> str:
    """A byte-level BPE of at most `vocab` ids. Below 300 only ASCII is in the alphabet: 256 bytes
    would not fit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 110:
        raise ValueError(
            f"a vocabulary of {vocab} cannot hold ASCII and {len(SPECIAL_TOKENS)} special tokens"
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < 300:
        ascii_text = "".join(map(chr, range(32, 127))) + "\n\t"
        alphabet = sorted(
            {char for piece, _ in byte_level.pre_tokenize_str(ascii_text) for char in piece}
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() <= vocab
    return tokenizer.to_str(pretty=False)


# Drafts


def make_draft(
    path: str | Path,
    base_path: str | Path,
    layout: DraftLayout,
    *,
    draft_vocab: int | None = 96,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    layers: int = 1,
    seed: int = 1,
    d2t: Literal["offset", "absolute"] | None = "offset",
    t2d: bool = True,
    own_embedding: bool = False,
    own_head: bool = True,
    target_hidden_size: bool = False,
    norm_before_residual: bool | None = None,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool | None = None,
    aux_layers: Iterable[int] | None = None,
    qk_norm: bool = False,
    rope_theta: float | None = None,
    rope_spelling: RopeSpelling = "old",
    speculators_version: str = "0.3.0",
    dtype: Dtype = "float32",
    pickle: bool = False,
) -> Path:
    """Write a random EAGLE-3 draft for the base at `base_path` and return its directory.

    Sizes default to the base's. `aux_layers` are hidden_states indices, written in the layout's own
    convention; the EAGLE repository has no key for them. `draft_vocab=None` leaves out
    `draft_vocab_size` and means the base's vocabulary, for which there is no d2t; `d2t=None` with a
    smaller one is a broken checkpoint. None for a norm_x: no such key.
    """
    path, base = Path(path), _read_base_config(Path(base_path))
    path.mkdir(parents=True, exist_ok=True)
    vocab, width = base["vocab_size"], hidden or base["hidden_size"]
    num_draft = vocab if draft_vocab is None else draft_vocab
    target_hidden_size = target_hidden_size or width != base["hidden_size"]
    _check_draft(
        layout,
        borrows_head=not own_head,
        whole_vocab=num_draft == vocab,
        borrows_embedding=not own_embedding,
        own_width=width != base["hidden_size"],
        names_taps=aux_layers is not None,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    heads = heads or base["num_attention_heads"]
    default_head_dim = base.get("head_dim") or width // heads
    decoder = {
        "hidden_size": width,
        "intermediate_size": intermediate or base["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or base["num_key_value_heads"],
        "head_dim": head_dim or (default_head_dim if hidden is None else width // heads),
        "num_hidden_layers": layers,
    }
    base_layers = base["num_hidden_layers"]
    aux_layer_ids = (
        tuple(aux_layers) if aux_layers is not None else (2, base_layers // 2, base_layers - 3)
    )
    norms = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc or None,
        "fc_norm": fc_norm or None,
        "norm_output": norm_output,
    }
    head_keys = {name: value for name, value in norms.items() if value is not None}
    if draft_vocab is not None:
        head_keys["draft_vocab_size"] = draft_vocab
    if target_hidden_size:
        head_keys["target_hidden_size"] = base["hidden_size"]
    rope_keys = _rope_keys(None, rope_spelling, rope_theta)
    if rope_theta is None:
        rope_keys = {}
    layer_keys = {
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "model_type": "qwen3" if qk_norm else "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        **decoder,
        **rope_keys,
    }
    config = _draft_config(
        layout,
        layer_keys,
        head_keys,
        base=base,
        aux_layer_ids=aux_layer_ids,
        taps_named=aux_layers is not None,
        dtype=dtype,
        rope_spelling=rope_spelling,
        speculators_version=speculators_version,
    )
    _write_json(path / "config.json", config)

    shapes = _draft_shapes(
        decoder,
        first_layer="midlayer" if layout in ("eagle", "specforge") else "layers.0",
        tap_width=base["hidden_size"],
        num_aux_layers=len(aux_layer_ids),
        qk_norm=qk_norm,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
    )
    if own_head:
        shapes["lm_head.weight"] = (num_draft, width)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, width)
    tensors = _random_tensors(shapes, seed, dtype)
    if num_draft < vocab:
        used = _draft_vocabulary(vocab, num_draft, base["eos_ids"], seed)
        if d2t is not None:
            tensors["d2t"] = used if d2t == "absolute" else used - torch.arange(num_draft)
        if t2d and layout != "modelopt":
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, used, True)
    _save(path, tensors, shards=1)
    return write_pickle(path) if pickle else path


def make_dflash(
    path: str | Path,
    base_path: str | Path,
    layout: Layout = "z-lab",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    block_size: int = 4,
    block_in: Literal["top", "inner", "both"] = "top",
    mask_token: int | None = None,
    aux_layers: Iterable[int] | None = None,
    layer_types: list[str] | None = None,
    window: int | None = None,
    use_swa: bool = False,
    causal: bool | None = None,
    is_causal: bool | None = None,
    draft_vocab: int | None = None,
    own_embedding: bool = False,
    fused: bool = False,
    renamed: bool = False,
    attention_bias: bool = False,
    rope_theta: float | None = None,
    dtype: Dtype = "float32",
    shards: int = 1,
    seed: int = 2,
) -> Path:
    """Write a random DFlash draft for the base at `base_path` and return its directory.

    `aux_layers` are hidden_states indices, written in the layout's own convention; None leaves them
    out, which means z-lab's rule, and that many as the draft has layers (speculators has no such
    rule and names them). The mask is the last id of the vocabulary where none is given. `fused`
    stores q, k, v in one; `renamed` is the spelling with context_proj.
    """
    path, base = Path(path), _read_base_config(Path(base_path))
    path.mkdir(parents=True, exist_ok=True)
    width, vocab, depth = base["hidden_size"], base["vocab_size"], base["num_hidden_layers"]
    span = max(1, depth - 3) - 1
    ruled = (
        [depth // 2] if layers == 1 else [round(1 + i * span / (layers - 1)) for i in range(layers)]
    )
    aux_layer_ids = [i + 1 for i in ruled] if aux_layers is None else list(aux_layers)
    mask = vocab - 1 if mask_token is None else mask_token
    base_rope = base.get("rope_parameters") or {}
    layer_keys: dict[str, Any] = {
        "attention_bias": attention_bias,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": intermediate,
        "max_position_embeddings": base["max_position_embeddings"],
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta or base.get("rope_theta") or base_rope["rope_theta"],
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    if layer_types is not None or layout == "modelopt":
        layer_keys["layer_types"] = layer_types or ["full_attention"] * layers
    if window is not None:
        layer_keys |= {"sliding_window": window, "use_sliding_window": layer_types is not None}
    inner: dict[str, Any] = {"mask_token_id": mask}
    if aux_layers is not None or layout == "modelopt":
        inner["target_layer_ids"] = [i - 1 for i in aux_layer_ids]
    if use_swa:
        inner |= {"use_swa": True, "swa_window_size": window}
    if causal is not None or layout == "modelopt":
        inner["causal"] = bool(causal)
    if block_in != "top":
        inner["block_size"] = block_size
    top = {} if block_in == "inner" else {"block_size": block_size}
    top |= {} if is_causal is None else {"is_causal": is_causal}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": inner,
        "num_target_layers": depth,
        **layer_keys,
        **top,
    }
    if layout == "z-lab":
        config |= {
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            **_version_keys("old", dtype),
        }
    elif layout == "modelopt":
        config["torch_dtype"] = dtype
    else:
        config = {
            "architectures": ["DFlashSpeculator"],
            "aux_hidden_state_layer_ids": aux_layer_ids,
            "block_size": block_size,
            "draft_vocab_size": draft_vocab or vocab,
            "mask_token_id": mask,
            "sliding_window_non_causal": causal is False,
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": block_size - 1}
                ],
                "verifier": {"name_or_path": base["name"], "architectures": base["architectures"]},
            },
            "speculators_model_type": "dflash",
            "speculators_version": "0.5.0",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer_keys,
            **_version_keys("new", dtype),
        }
    _write_json(path / "config.json", config)

    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(aux_layer_ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(layers):
        shapes |= _dflash_layer(
            f"layers.{i}", width, heads * head_dim, kv_heads * head_dim, intermediate, head_dim
        )
        if attention_bias:
            rows = {
                "q": heads * head_dim,
                "k": kv_heads * head_dim,
                "v": kv_heads * head_dim,
                "o": width,
            }
            shapes |= {f"layers.{i}.self_attn.{x}_proj.bias": (count,) for x, count in rows.items()}
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, width)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, width)
    tensors = _random_tensors(shapes, seed, dtype)
    if draft_vocab is not None:
        used = _draft_vocabulary(vocab, draft_vocab, base["eos_ids"], seed)
        tensors["d2t"] = used - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, used, True)
    _save(path, _respelt(tensors, layers, fused=fused, renamed=renamed), shards)
    return path


def _dflash_layer(
    layer: str, width: int, q: int, kv: int, inner: int, dim: int
) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (q, width),
        f"{layer}.self_attn.k_proj.weight": (kv, width),
        f"{layer}.self_attn.v_proj.weight": (kv, width),
        f"{layer}.self_attn.o_proj.weight": (width, q),
        f"{layer}.self_attn.q_norm.weight": (dim,),
        f"{layer}.self_attn.k_norm.weight": (dim,),
        f"{layer}.mlp.gate_proj.weight": (inner, width),
        f"{layer}.mlp.up_proj.weight": (inner, width),
        f"{layer}.mlp.down_proj.weight": (width, inner),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
    }


def _respelt(
    tensors: dict[str, torch.Tensor], layers: int, *, fused: bool, renamed: bool
) -> dict[str, torch.Tensor]:
    """The same draft under the names of other exports."""
    groups = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    for layer in range(layers if fused else 0):
        for joint, parts in groups.items():
            parent = f"layers.{layer}.{joint.partition('.')[0]}"
            for kind in ("weight", "bias"):
                names = [f"{parent}.{part}.{kind}" for part in parts]
                if names[0] in tensors:
                    tensors[f"layers.{layer}.{joint}.{kind}"] = torch.cat(
                        [tensors.pop(name) for name in names]
                    )
    if renamed:
        for ours, theirs in (
            ("fc", "context_proj"),
            ("hidden_norm", "context_norm"),
            ("norm", "final_norm"),
        ):
            tensors[f"{theirs}.weight"] = tensors.pop(f"{ours}.weight")
    return tensors


def _check_draft(
    layout: DraftLayout,
    *,
    borrows_head: bool,
    whole_vocab: bool,
    borrows_embedding: bool,
    own_width: bool,
    names_taps: bool,
    norm_before_fc: bool,
    fc_norm: bool,
    norm_output: bool | None,
) -> None:
    if borrows_head and (not whole_vocab or own_width):
        raise ValueError(
            "a draft that borrows the base's head needs draft_vocab=None and the base's width"
        )
    if borrows_embedding and own_width:
        raise ValueError("a draft with a width of its own needs own_embedding=True")
    if names_taps and layout == "eagle":
        raise ValueError(
            "the EAGLE repository's config has no key for taps; use specforge, modelopt or"
            " speculators"
        )
    if norm_before_fc and fc_norm:
        raise ValueError("norm_before_fc and fc_norm exclude each other")
    if norm_output is False and layout == "specforge":
        raise ValueError(
            "SpecForge's norm_output=false means a head without norm, which no toy has"
        )


def _draft_config(
    layout: DraftLayout,
    layer_keys: dict[str, Any],
    head_keys: dict[str, Any],
    *,
    base: dict[str, Any],
    aux_layer_ids: tuple[int, ...],
    taps_named: bool,
    dtype: Dtype,
    rope_spelling: RopeSpelling,
    speculators_version: str,
) -> dict[str, Any]:
    version = _version_keys(rope_spelling, dtype)
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            **head_keys,
            "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": 3,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": base["name"], "architectures": base["architectures"]},
            },
            "speculators_model_type": "eagle3",
            "speculators_version": speculators_version,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer_keys,
            **version,
        }
    tokens = {
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
        "pad_token_id": 0,
    }
    config = {**tokens, **layer_keys, **head_keys, **version}
    output_ids = [i - 1 for i in aux_layer_ids]  # "output of layer i" is hs[i + 1]
    if layout == "eagle":
        config["architectures"] = ["LlamaForCausalLM"]
        if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
            del config["head_dim"]
        return config
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    if layout == "specforge" and taps_named:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": output_ids,
            "use_aux_hidden_state": True,
        }
    if layout == "modelopt":
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": output_ids,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        }
    return config


def _draft_shapes(
    decoder: Mapping[str, int],
    *,
    first_layer: str,
    tap_width: int,
    num_aux_layers: int,
    qk_norm: bool,
    norm_before_fc: bool,
    fc_norm: bool,
) -> dict[str, tuple[int, ...]]:
    width, inner, dim = decoder["hidden_size"], decoder["intermediate_size"], decoder["head_dim"]
    q, kv = decoder["num_attention_heads"] * dim, decoder["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, num_aux_layers * tap_width),
        "norm.weight": (width,),
    }
    if norm_before_fc:
        shapes["input_norm.weight"] = (num_aux_layers * tap_width,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (tap_width,) for i in range(num_aux_layers)}
    for i in range(decoder["num_hidden_layers"]):
        layer = first_layer if i == 0 else f"layers.{i}"
        attention_width = 2 * width if i == 0 else width
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (q, attention_width),
            f"{layer}.self_attn.k_proj.weight": (kv, attention_width),
            f"{layer}.self_attn.v_proj.weight": (kv, attention_width),
            f"{layer}.self_attn.o_proj.weight": (width, q),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
        }
        if i == 0:
            shapes[f"{layer}.hidden_norm.weight"] = (width,)
        if qk_norm:
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    return shapes


def _draft_vocabulary(vocab: int, num_draft: int, eos_ids: list[int], seed: int) -> torch.Tensor:
    """A sorted random choice of `num_draft` base ids that holds the eos ids: int64 [Vd]."""
    shuffled = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = eos_ids + [token for token in shuffled if token not in eos_ids]
    return torch.tensor(sorted(chosen[:num_draft]))


def _read_base_config(base_path: Path) -> dict[str, Any]:
    """The base's config.json, with `name` and `eos_ids` (config and generation config together)
    added.

    Where the text part is nested, its keys are raised to the top.
    """
    config: dict[str, Any] = json.loads((base_path / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    generation = json.loads((base_path / "generation_config.json").read_text(encoding="utf-8"))
    eos_ids: set[int] = set()
    for eos in (config["eos_token_id"], generation["eos_token_id"]):
        eos_ids.update(eos if isinstance(eos, list) else [eos])
    return config | {"name": base_path.name, "eos_ids": sorted(eos_ids)}


# Tensors and files


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: Dtype
) -> dict[str, torch.Tensor]:
    """Weights with enough spread to tell one reading of a checkpoint from another: no norm is 1, no
    bias is 0.

    Layers add at least as much to the residual stream as they find there (0.3 from the embedding, 1
    from fc): with weaker ones a draft repeats one token, whatever its positions and its recycled
    state are.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1 and name.endswith("weight"):
            value = 1 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.3 * noise
        else:
            gain = 0.4 if name == "fc.weight" else 1.2
            value = gain * shape[-1] ** -0.5 * noise
        tensors[name] = value.to(getattr(torch, dtype))
    return tensors


def _save(path: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": size_bytes}, "weight_map": weight_map},
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
