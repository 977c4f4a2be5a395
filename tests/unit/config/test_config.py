"""Claims about config, held against transformers' own configurations and models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from edgespec.config import RopeConfig
from edgespec.errors import CheckpointError, PairingError, UnsupportedModel
from edgespec.families import parse_eos, parse_model_config, with_eos
from edgespec.methods.aux_layers import normalize_aux_layers, resolve_aux_layers
from edgespec.methods.eagle3 import Eagle3Config, parse_eagle3_config

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES = [
    (LlamaConfig, {}),
    (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    (MistralConfig, {"sliding_window": None}),
    (MistralConfig, {"sliding_window": 32}),
    (Qwen2Config, {}),
    (Qwen2Config, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    (Qwen3Config, {"head_dim": 16, "rms_norm_eps": 1e-5}),
    (
        Qwen3Config,
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "max_window_layers": 3,
        },
    ),
]


def llama(**changes: Any) -> dict[str, Any]:
    """A Llama's config.json with `changes`; a change to `...` leaves the key out."""
    raw = {
        **LlamaConfig(**SIZES).to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": None,
    }
    return {key: value for key, value in (raw | changes).items() if value is not ...}


# Base models


@pytest.mark.parametrize(("config_class", "extra"), FAMILIES)
def test_base_config_describes_the_model_that_transformers_builds(
    config_class: Any, extra: dict[str, Any]
) -> None:
    config = config_class(**SIZES, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parsed = parse_model_config({**config.to_dict(), "architectures": [type(model).__name__]})

    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    decoder = parsed.decoder
    assert attention.q_proj.weight.shape == (
        decoder.num_heads * decoder.head_dim,
        decoder.hidden_size,
    )
    assert attention.k_proj.weight.shape == (
        decoder.num_kv_heads * decoder.head_dim,
        decoder.hidden_size,
    )
    assert mlp.gate_proj.weight.shape == (decoder.intermediate_size, decoder.hidden_size)
    assert len(model.model.layers) == decoder.num_layers
    assert decoder.attention.qkv_bias == (attention.q_proj.bias is not None)
    assert decoder.attention.o_bias == (attention.o_proj.bias is not None)
    assert decoder.layers[0].mlp.bias == (mlp.gate_proj.bias is not None)
    assert decoder.attention.qk_norm == hasattr(attention, "q_norm")
    assert decoder.norm.eps == model.model.norm.variance_epsilon
    window = getattr(attention, "sliding_window", None)
    if config_class is MistralConfig:
        window = config.sliding_window
    assert decoder.sliding_window == window
    assert parsed.tied_head == config.tie_word_embeddings
    assert parsed.vocab_size == model.model.embed_tokens.num_embeddings
    assert parsed.max_position == 256


def test_late_layers_slide_as_layer_types_or_max_window_layers_say() -> None:
    theirs = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    raw = theirs.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    assert "sliding_attention" in theirs.layer_types
    windows = [32 if kind == "sliding_attention" else None for kind in theirs.layer_types]
    for spelling in (raw, raw | {"layer_types": None}):
        found = parse_model_config(spelling).decoder
        assert [attention.window for attention in found.attentions] == windows
        assert (found.windows, found.sliding_window) == ((None, 32), 32)


def test_layer_types_of_another_kind_are_refused_by_name() -> None:
    kinds = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        parse_model_config(llama(layer_types=kinds, num_hidden_layers=2))
    with pytest.raises(CheckpointError, match="contradicts itself"):
        parse_model_config(llama(layer_types=["sliding_attention"] * 2, num_hidden_layers=2))


def test_use_sliding_window_false_switches_a_published_width_off() -> None:
    raw = Qwen2Config(**SIZES).to_dict() | {
        "architectures": ["Qwen2ForCausalLM"],
        "layer_types": None,
    }
    assert parse_model_config(raw | {"sliding_window": 32}).decoder.sliding_window is None
    on = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}
    assert parse_model_config(raw | on).decoder.sliding_window == 32


def test_eos_ids_are_read_from_a_number_or_a_list() -> None:
    assert parse_model_config(llama(eos_token_id=5)).eos_token_ids == (5,)
    assert parse_model_config(llama(eos_token_id=[7, 5, 7])).eos_token_ids == (7, 5)
    assert parse_eos({}) == ()
    assert with_eos(parse_model_config(llama()), [3, 1, 3]).eos_token_ids == (3, 1)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        parse_eos({"eos_token_id": "</s>"})


def test_dtype_is_read_in_both_spellings() -> None:
    assert parse_model_config(llama(dtype=..., torch_dtype="torch.bfloat16")).dtype == "bfloat16"
    assert parse_model_config(llama(dtype="float16")).dtype == "float16"


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
    ],
)
def test_missing_key_is_named_with_its_file(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"base/config\.json: '{key}' is missing"):
        parse_model_config(llama(**{key: ...}), "base/config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -48),
        ("hidden_size", "48"),
        ("num_hidden_layers", True),
        pytest.param("vocab_size", 10**5000, id="huge"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-5"),
        ("head_dim", 0),
        ("head_dim", 7),
        ("tie_word_embeddings", "yes"),
        ("num_key_value_heads", 4),
        ("layer_types", ["full_attention"]),
        ("rope_scaling", "linear"),
        ("rope_theta", 0),
        ("architectures", "LlamaForCausalLM"),
        ("num_hidden_layers", 2**31 - 1),
    ],
)
def test_impossible_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        parse_model_config(llama(**{key: value}))


def test_hidden_size_must_divide_into_heads_where_head_dim_is_not_told() -> None:
    with pytest.raises(CheckpointError, match="not a multiple"):
        parse_model_config(llama(head_dim=None, num_attention_heads=10, num_key_value_heads=10))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gemma2"}, "gemma2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "su"}}, "su"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "mrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_this_version_cannot_do_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        parse_model_config(llama(**changes))


def test_two_names_of_the_architecture_must_agree() -> None:
    with pytest.raises(CheckpointError, match="contradicts itself"):
        parse_model_config(llama(model_type="qwen3"))
    assert parse_model_config(llama(architectures=...)).architecture == "LlamaForCausalLM"


def test_code_named_in_auto_map_is_ignored() -> None:
    assert parse_model_config(llama(auto_map={"AutoConfig": "evil.Config"})) == parse_model_config(
        llama()
    )


# Rotary embeddings

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 0.5,
        "beta_fast": 0,
        "beta_slow": None,
        "original_max_position_embeddings": 128,
    },
]


def frequencies(config: LlamaConfig, positions: int = 600) -> tuple[torch.Tensor, float]:
    """What transformers turns by after a sequence of `positions` tokens, and what it multiplies cos
    and sin by."""
    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.zeros(1), torch.arange(positions)[None])
    return rotary.inv_freq, rotary.attention_scaling


def spelled_out(rope: RopeConfig, max_position: int) -> LlamaConfig:
    """A configuration for transformers with every value of `rope` explicit, so that no default of
    its own remains."""
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        parameters |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        parameters |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        parameters["attention_factor"] = rope.attention_factor
    length = rope.original_max_position if rope.kind == "dynamic" else max_position
    sizes = SIZES | {"max_position_embeddings": length}
    return LlamaConfig(**sizes, head_dim=rope.rotary_dim, rope_parameters=parameters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters", "type"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_turns_as_transformers_does(rope: dict[str, Any], spelling: str) -> None:
    theta = {"rope_theta": 50000.0}
    given = dict(rope)
    if spelling == "type":
        given["type"] = given.pop("rope_type")
    changes = (
        {"rope_parameters": given | theta}
        if spelling == "rope_parameters"
        else {"rope_scaling": given} | theta
    )
    config = LlamaConfig(**SIZES, head_dim=16, rope_parameters={**rope, **theta})

    parsed = parse_model_config(llama(head_dim=16, **changes)).decoder.rope
    wanted, wanted_scaling = frequencies(config)
    got, scaling = frequencies(spelled_out(parsed, 256))
    torch.testing.assert_close(got, wanted)
    assert scaling == pytest.approx(wanted_scaling)


@pytest.mark.parametrize("factor", [1e10, 1e-10, 101])
def test_attention_factor_that_no_scaling_has_is_refused(factor: float) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled = llama(rope_scaling=yarn | {"attention_factor": factor})
    with pytest.raises(CheckpointError, match=r"attention_factor.* a number from 0\.01 to 100"):
        parse_model_config(scaled)


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope["rope_type"] == "yarn"])
def test_yarn_attention_factor_is_resolved_as_transformers_does(rope: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(**SIZES, rope_parameters={**rope, "rope_theta": 10000.0})
        _, wanted = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert parse_model_config(
        llama(rope_scaling=rope)
    ).decoder.rope.attention_factor == pytest.approx(wanted)


def test_no_theta_is_10000_without_scaling() -> None:
    assert parse_model_config(llama()).decoder.rope == RopeConfig(10000.0, rotary_dim=8)


def test_ropes_per_layer_type_are_accepted_only_if_they_are_the_same() -> None:
    same = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    rope = parse_model_config(
        llama(rope_parameters={"full_attention": same, "sliding_attention": same})
    ).decoder.rope
    assert rope == RopeConfig(500.0, 8, "linear", 2.0)
    with pytest.raises(UnsupportedModel, match="more than one rotary embedding"):
        parse_model_config(
            llama(
                rope_parameters={
                    "full_attention": same,
                    "sliding_attention": same | {"rope_theta": 1e4},
                }
            )
        )


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic", "factor": 0}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"rope_type": "yarn", "factor": "2"}, "factor"),
    ],
)
def test_incomplete_rope_names_its_key(rope: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"rope_scaling\): '{key}'"):
        parse_model_config(llama(rope_scaling=rope))


# Drafts


def draft_raw(**changes: Any) -> dict[str, Any]:
    """The config.json of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    return {key: value for key, value in (raw | changes).items() if value is not ...}


def draft_shapes(
    first: str = "midlayer", **changes: tuple[int, ...] | None
) -> dict[str, tuple[int, ...]]:
    """Its tensors. Changes name tensors with `__` for a dot; None leaves one out."""
    shapes: dict[str, tuple[int, ...] | None] = {
        "fc.weight": (4096, 12288),
        f"{first}.self_attn.q_proj.weight": (4096, 8192),
        f"{first}.self_attn.k_proj.weight": (1024, 8192),
        f"{first}.self_attn.v_proj.weight": (1024, 8192),
        f"{first}.self_attn.o_proj.weight": (4096, 4096),
        f"{first}.mlp.gate_proj.weight": (14336, 4096),
        f"{first}.mlp.up_proj.weight": (14336, 4096),
        f"{first}.mlp.down_proj.weight": (4096, 14336),
        f"{first}.input_layernorm.weight": (4096,),
        f"{first}.hidden_norm.weight": (4096,),
        f"{first}.post_attention_layernorm.weight": (4096,),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
        "d2t": (32000,),
        "t2d": (128256,),
    }
    shapes |= {name.replace("__", "."): shape for name, shape in changes.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def speculators_raw(top: dict[str, Any] | None = None, **layer: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": 32000,
        "transformer_layer_config": draft_raw(architectures=..., draft_vocab_size=..., **layer),
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        **(top or {}),
    }


def modelopt_raw(**eagle: Any) -> dict[str, Any]:
    return draft_raw(
        architectures=["LlamaForCausalLMEagle3"],
        eagle_config={
            "use_aux_hidden_state": True,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            **eagle,
        },
    )


def parse(
    changes: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None
) -> Eagle3Config:
    return parse_eagle3_config(draft_raw(**(changes or {})), shapes or draft_shapes())


def test_eagle_draft_is_read_as_published() -> None:
    draft = parse()
    assert draft.layout == "eagle"
    assert (draft.num_aux_layers, draft.target_hidden_size, draft.aux_layer_ids) == (3, 4096, None)
    assert (draft.vocab_size, draft.draft_vocab_size) == (128256, 32000)
    assert (draft.own_head, draft.own_embedding) == (True, False)
    assert (draft.decoder.num_layers, draft.decoder.head_dim) == (1, 128)
    assert draft.decoder.rope == RopeConfig(
        10000.0, rotary_dim=128
    )  # never the base's 500000 with llama3 scaling
    norms = (draft.norm_before_residual, draft.norm_before_fc, draft.fc_norm, draft.norm_output)
    assert not any(norms)


def test_three_layouts_of_one_draft_agree() -> None:
    eagle = parse()
    modelopt = parse_eagle3_config(modelopt_raw(), draft_shapes("layers.0"))
    speculators = parse_eagle3_config(speculators_raw(), draft_shapes("layers.0"))
    assert [d.layout for d in (eagle, modelopt, speculators)] == [
        "eagle",
        "modelopt",
        "speculators",
    ]
    assert eagle.decoder == modelopt.decoder == speculators.decoder
    assert speculators.base_name == "meta-llama/Llama-3.1-8B-Instruct"
    prefixed = {f"model.{name}": shape for name, shape in draft_shapes().items()}
    assert parse(shapes=prefixed) == eagle


def test_draft_narrower_than_its_base_reads_the_tap_width() -> None:
    wide = draft_shapes(fc__weight=(4096, 24576), embed_tokens__weight=(128256, 4096))
    draft = parse({"target_hidden_size": 8192}, wide)
    assert (draft.num_aux_layers, draft.target_hidden_size, draft.own_embedding) == (3, 8192, True)
    with pytest.raises(CheckpointError, match=r"no embed_tokens\.weight"):
        parse({"target_hidden_size": 8192}, draft_shapes(fc__weight=(4096, 24576)))


def test_head_dim_comes_from_the_projection_where_the_config_lacks_it() -> None:
    shapes = draft_shapes(
        midlayer__self_attn__q_proj__weight=(8192, 8192),
        midlayer__self_attn__k_proj__weight=(2048, 8192),
    )
    assert parse(shapes=shapes).decoder.head_dim == 256
    with pytest.raises(CheckpointError, match=r"8192 rows.*32 heads of 128"):
        parse({"head_dim": 128}, shapes)


def test_tensors_tell_of_biases_norms_and_layers() -> None:
    shapes = draft_shapes(
        midlayer__self_attn__q_norm__weight=(128,),
        midlayer__self_attn__q_proj__bias=(4096,),
        input_norm__weight=(12288,),
        layers__1__self_attn__q_proj__weight=(4096, 4096),
    )
    draft = parse(shapes=shapes)
    assert draft.decoder.attention.qk_norm
    assert draft.decoder.attention.qkv_bias
    assert not draft.decoder.attention.o_bias
    assert draft.norm_before_fc
    assert draft.decoder.num_layers == 2
    with pytest.raises(CheckpointError, match="lacks a layer"):
        parse(shapes=draft_shapes(layers__2__self_attn__q_proj__weight=(4096, 4096)))


def test_four_taps_are_counted_from_fc() -> None:
    assert parse(shapes=draft_shapes(fc__weight=(4096, 4 * 4096))).num_aux_layers == 4
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        parse(shapes=draft_shapes(fc__weight=(4096, 10000)))


def test_draft_vocabulary_defaults_to_the_base_s() -> None:
    shapes = draft_shapes(lm_head__weight=None, d2t=None, t2d=None)
    draft = parse({"draft_vocab_size": ...}, shapes)
    assert (draft.draft_vocab_size, draft.own_head) == (128256, False)
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
        parse(shapes=shapes)
    with pytest.raises(CheckpointError, match=r"declares \[128256, 4096\]"):
        parse({"draft_vocab_size": None})
    with pytest.raises(CheckpointError, match="greater than vocab_size"):
        parse({"draft_vocab_size": 128257}, shapes)


def test_tied_embeddings_copied_from_the_base_are_ignored_beside_a_head() -> None:
    assert parse({"tie_word_embeddings": True}) == parse()
    shapes = draft_shapes(lm_head__weight=None, embed_tokens__weight=(128256, 4096))
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        parse({"tie_word_embeddings": True, "draft_vocab_size": ...}, shapes)


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"speculators_version": "0.1.0.dev42"}, True),
        ({"speculators_version": "0.1.0.dev42", "norm_before_residual": False}, False),
        ({"speculators_version": "0.2.0"}, False),
        ({"speculators_version": "0.10.1"}, False),
        ({"speculators_version": "0.3.0", "norm_before_residual": True}, True),
        ({"speculators_version": None}, False),
    ],
)
def test_norm_before_residual_default_follows_the_speculators_version(
    top: dict[str, Any], expected: bool
) -> None:
    draft = parse_eagle3_config(speculators_raw(top), draft_shapes("layers.0"))
    assert draft.norm_before_residual is expected


def test_norm_output_means_recycling_only_where_the_format_means_it() -> None:
    norms = {f"fc_norm__{i}__weight": (4096,) for i in range(3)}
    assert not parse({"norm_output": True}).norm_output
    assert parse({"norm_output": True}, draft_shapes(**norms)).norm_output
    assert parse_eagle3_config(
        speculators_raw({"norm_output": True}), draft_shapes("layers.0")
    ).norm_output
    with pytest.raises(UnsupportedModel, match="norm_output"):
        parse({"norm_output": False})


def test_tensorrt_llm_s_key_says_what_is_recycled_in_every_layout() -> None:
    key = {"return_hidden_post_norm": True}
    shapes = draft_shapes("layers.0")
    assert parse({"eagle_config": key}).norm_output
    assert parse_eagle3_config(modelopt_raw(**key), shapes).norm_output
    assert not parse_eagle3_config(modelopt_raw(return_hidden_post_norm=False), shapes).norm_output
    with pytest.raises(CheckpointError, match="'return_hidden_post_norm' is 1"):
        parse_eagle3_config(modelopt_raw(return_hidden_post_norm=1), shapes)
    with pytest.raises(CheckpointError, match=r"eagle_config.*norm_before_fc.*input_norm"):
        parse_eagle3_config(modelopt_raw(norm_before_fc=True), shapes)


def test_norms_that_the_config_promises_must_be_there() -> None:
    with pytest.raises(CheckpointError, match=r"norm_before_fc.*input_norm"):
        parse({"norm_before_fc": True})
    with pytest.raises(CheckpointError, match=r"no fc_norm\.1\.weight"):
        parse(shapes=draft_shapes(fc_norm__0__weight=(4096,)))
    norms = {f"fc_norm__{i}__weight": (4096,) for i in range(3)}
    with pytest.raises(CheckpointError, match="exclude each other"):
        parse(shapes=draft_shapes(input_norm__weight=(12288,), **norms))


@pytest.mark.parametrize(
    ("scaling", "interleaved"),
    [
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, False),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, False),
        (
            {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            True,
        ),
    ],
)
def test_drafts_of_vision_language_models_declare_the_axes_of_their_positions(
    scaling: dict[str, Any], interleaved: bool
) -> None:
    """As SpecForge writes them for Qwen2.5-VL, and AngelSlim for Qwen3-VL."""
    more = {"target_model_type": "qwen2_5_vl", "modal_type": "VLM", "rope_theta": 1e6}
    rope = parse({"rope_scaling": scaling, **more}).decoder.rope
    section = tuple(scaling["mrope_section"])
    assert rope == RopeConfig(1e6, 128, mrope_section=section, mrope_interleaved=interleaved)


def test_sections_of_a_base_with_narrower_heads_leave_a_draft_one_axis() -> None:
    """As drafts for Qwen3.5 have them, whose base rotates a quarter of each head."""
    default = {"rope_type": "default", "mrope_section": [11, 11, 10]}
    rope = parse({"rope_scaling": default, "rope_theta": 1e7}).decoder.rope
    assert rope == RopeConfig(1e7, 128)


def test_sections_that_leave_pairs_over_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"mrope_section.*64 in all"):
        parse({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}})


@pytest.mark.parametrize(
    ("eagle", "name"),
    [
        ({"use_aux_hidden_state": False}, "EAGLE-1"),
        ({"use_last_layernorm": False}, "use_last_layernorm"),
        ({"use_mtp_layernorm": True}, "use_mtp_layernorm"),
        ({"parallel_draft_step": 4}, "parallel_draft_step"),
        ({"eh_proj_before_attn": True}, "eh_proj_before_attn"),
    ],
)
def test_relatives_of_eagle3_are_refused_by_their_switch(eagle: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        parse_eagle3_config(modelopt_raw(**eagle), draft_shapes("layers.0"))


def test_first_projection_must_take_embedding_and_hidden_state() -> None:
    with pytest.raises(CheckpointError, match="takes 4096 inputs"):
        parse(shapes=draft_shapes(midlayer__self_attn__q_proj__weight=(4096, 4096)))
    with pytest.raises(CheckpointError, match=r"no tensor 'fc\.weight'"):
        parse(shapes=draft_shapes(fc__weight=None))


# Taps: L=32, so the default is hs 2, 16, 29, which are the outputs of layers 1, 15, 28

KEY = "eagle_aux_hidden_state_layer_ids"


def named(*ids: int, where: str) -> Eagle3Config:
    if where == "modelopt":
        return parse_eagle3_config(modelopt_raw(**{KEY: list(ids)}), draft_shapes("layers.0"))
    if where == "speculators":
        return parse_eagle3_config(speculators_raw({KEY: list(ids)}), draft_shapes("layers.0"))
    if where == "nested":
        return parse({"eagle_config": {KEY: list(ids)}})
    return parse({KEY: list(ids)})


def test_default_taps_are_those_of_the_eagle3_reference() -> None:
    assert resolve_aux_layers(parse(), 32) == (2, 16, 29)
    assert resolve_aux_layers(parse(), 36) == (2, 18, 33)
    assert resolve_aux_layers(parse(), 28) == (2, 14, 25)


@pytest.mark.parametrize(
    ("ids", "where", "aux_layers"),
    [
        ((1, 15, 28), "modelopt", (2, 16, 29)),
        ((2, 16, 29), "modelopt", (3, 17, 30)),
        ((1, 15, 31), "modelopt", (2, 16, 32)),
        ((2, 16, 29), "speculators", (2, 16, 29)),
        ((1, 15, 28), "speculators", (1, 15, 28)),
        ((1, 16, 32), "speculators", (1, 16, 32)),
        ((1, 15, 28), "nested", (2, 16, 29)),
        ((2, 16, 29), "nested", (2, 16, 29)),
        ((4, 9, 20), "nested", (5, 10, 21)),
        ((1, 15, 28), "plain", (2, 16, 29)),
        ((2, 16, 29), "plain", (2, 16, 29)),
        ((0, 9, 20), "plain", (1, 10, 21)),
        ((4, 9, 32), "plain", (4, 9, 32)),
    ],
)
def test_named_taps_become_hidden_states_indices(
    ids: tuple[int, ...], where: str, aux_layers: tuple[int, ...]
) -> None:
    assert resolve_aux_layers(named(*ids, where=where), 32) == aux_layers


def test_taps_that_can_be_read_two_ways_are_refused() -> None:
    with pytest.raises(PairingError, match=r"\[5, 10, 21\].*\n.*`aux_layers`"):
        resolve_aux_layers(named(4, 9, 20, where="plain"), 32)
    assert resolve_aux_layers(named(4, 9, 20, where="plain"), 32, (5, 10, 21)) == (5, 10, 21)


@pytest.mark.parametrize("override", [(2, 16), (0, 16, 29), (2, 16, 33), (16, 2, 29), (2, 2, 29)])
def test_impossible_taps_are_refused_with_the_flag_that_mends_them(
    override: tuple[int, ...],
) -> None:
    with pytest.raises(PairingError) as error:
        resolve_aux_layers(parse(), 32, override)
    assert "`aux_layers`" in error.value.remedy


def test_base_too_shallow_for_the_default_taps_is_refused() -> None:
    with pytest.raises(PairingError, match="4 layers"):
        resolve_aux_layers(parse(), 4)
    assert resolve_aux_layers(parse(), 4, (1, 2, 3)) == (1, 2, 3)


def test_number_of_named_taps_must_be_that_of_fc() -> None:
    with pytest.raises(CheckpointError, match=r"names 2 layers.*takes 3"):
        named(1, 2, where="modelopt")


def test_both_conventions_normalise_to_the_same_taps() -> None:
    assert (
        normalize_aux_layers([1, 15, 28], 32, "output")
        == normalize_aux_layers([2, 16, 29], 32, "hs")
        == (2, 16, 29)
    )
