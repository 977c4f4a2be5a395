"""Claims about DFlash's configurations: three layouts and one reading, and relatives that are told
by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3Config

from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.dflash import parse_dflash_config

HIDDEN, VOCAB, LAYERS, DEPTH = 32, 96, 3, 12
Shapes = dict[str, tuple[int, ...]]


def layer_keys(**changes: Any) -> dict[str, Any]:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    ).to_dict()
    return {
        key: value
        for key, value in (config | {"layer_types": None} | changes).items()
        if value is not ...
    }


def z_lab(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A published config; a change to `...` leaves the key out."""
    section = {"mask_token_id": 90, "target_layer_ids": [1, 5, 9]} | (inner or {})
    raw = {
        **layer_keys(),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8,
        "num_target_layers": DEPTH,
        "dflash_config": {key: value for key, value in section.items() if value is not ...},
        **changes,
    }
    return {key: value for key, value in raw.items() if value is not ...}


def speculators(top: dict[str, Any] | None = None, **layer: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "verifier": {"name_or_path": "Qwen/Qwen3-8B"},
        },
        "aux_hidden_state_layer_ids": [2, 6, 10],
        "block_size": 8,
        "draft_vocab_size": VOCAB,
        "mask_token_id": 90,
        "target_hidden_size": None,
        "transformer_layer_config": layer_keys(**layer),
        **(top or {}),
    }
    return {key: value for key, value in raw.items() if value is not ...}


def modelopt(**inner: Any) -> dict[str, Any]:
    return z_lab({"causal": False} | inner, auto_map=..., transformers_version=...)


def shapes(fused: bool = False, **changes: tuple[int, ...] | None) -> Shapes:
    names: dict[str, tuple[int, ...] | None] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        parts = {"qkv_proj": 128} if fused else {"q_proj": 64, "k_proj": 32, "v_proj": 32}
        names |= {
            f"layers.{i}.self_attn.{name}.weight": (rows, HIDDEN) for name, rows in parts.items()
        }
        names |= {f"layers.{i}.self_attn.{name}.weight": (16,) for name in ("q_norm", "k_norm")}
    return {name: shape for name, shape in (names | changes).items() if shape is not None}


def parse(raw: dict[str, Any] | None = None, found: Shapes | None = None) -> BlockDraftConfig:
    return parse_dflash_config(
        z_lab() if raw is None else raw, shapes() if found is None else found
    )


# One reading


def test_published_draft_is_read() -> None:
    draft = parse()
    assert (draft.method, draft.layout) == ("dflash", "z-lab")
    assert (draft.aux_layer_ids, draft.block_size, draft.mask_token_id) == ((2, 6, 10), 8, 90)
    assert (draft.windows, draft.causal) == ((None,) * LAYERS, (False,) * LAYERS)
    assert (draft.vocab_size, draft.draft_vocab_size, draft.target_hidden_size) == (
        VOCAB,
        VOCAB,
        HIDDEN,
    )
    assert (draft.own_embedding, draft.own_head, draft.num_target_layers) == (False, False, DEPTH)
    assert draft.decoder.attention.qk_norm
    assert (draft.decoder.num_heads, draft.decoder.num_kv_heads, draft.decoder.head_dim) == (
        4,
        2,
        16,
    )


def test_three_layouts_of_one_draft_agree() -> None:
    told = [parse(z_lab()), parse(speculators()), parse(modelopt())]
    assert [draft.layout for draft in told] == ["z-lab", "speculators", "modelopt"]
    assert [draft.base_name for draft in told] == [None, "Qwen/Qwen3-8B", None]
    first, *others = [
        (
            draft.decoder,
            draft.aux_layer_ids,
            draft.block_size,
            draft.mask_token_id,
            draft.windows,
            draft.causal,
        )
        for draft in told
    ]
    assert others == [first, first]


def test_other_names_of_tensors_change_nothing() -> None:
    renamed = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    other = {
        f"{renamed.get(n.partition('.')[0], n.partition('.')[0])}.{n.partition('.')[2]}": s
        for n, s in shapes(fused=True).items()
    }
    assert "final_norm.weight" in other
    assert parse(found=other) == parse()
    assert parse(found={f"model.{name}": shape for name, shape in shapes().items()}) == parse()


def test_block_size_is_read_from_either_place_and_must_agree() -> None:
    assert parse(z_lab({"block_size": 6}, block_size=...)).block_size == 6
    assert parse(z_lab({"block_size": 8})).block_size == 8
    with pytest.raises(
        CheckpointError, match=r"'block_size' is 8 at the top level and 6 in .*dflash_config"
    ):
        parse(z_lab({"block_size": 6}))


@pytest.mark.parametrize(
    ("layers", "depth", "outputs"),
    [
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 32, [1, 8, 15, 22, 29]),
        (5, 64, [1, 16, 31, 46, 61]),
        (1, 12, [6]),
    ],
)
def test_default_taps_are_those_of_published_drafts(
    layers: int, depth: int, outputs: list[int]
) -> None:
    raw = z_lab({"target_layer_ids": ...}, num_target_layers=depth, num_hidden_layers=layers)
    found = {
        f"layers.{i}.{n.partition('layers.0.')[2]}": s
        for n, s in shapes().items()
        if n.startswith("layers.0.")
        for i in range(layers)
    }
    found |= {"fc.weight": (HIDDEN, len(outputs) * HIDDEN)}
    assert parse(raw, found).aux_layer_ids == tuple(i + 1 for i in outputs)


@pytest.mark.parametrize(
    ("raw", "windows", "causal"),
    [
        (
            z_lab(layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=20),
            "ss-",
            "cc-",
        ),
        (z_lab({"use_swa": True, "swa_window_size": 20}), "sss", "---"),
        (z_lab({"use_swa": True}, sliding_window=20), "sss", "---"),
        (
            z_lab(layer_types=["sliding_attention"] * 3, sliding_window=20, is_causal=False),
            "sss",
            "---",
        ),
        (z_lab({"causal": True}), "---", "ccc"),
        (z_lab({"causal": True}, is_causal=False), "---", "---"),
        (z_lab(use_sliding_window=True, sliding_window=20, max_window_layers=1), "-ss", "-cc"),
        (modelopt(use_swa=True, swa_window_size=20), "sss", "---"),
        (modelopt(causal=True), "---", "ccc"),
        (
            speculators(
                layer_types=["full_attention", *["sliding_attention"] * 2], sliding_window=20
            ),
            "-ss",
            "-cc",
        ),
        (
            speculators(
                {"sliding_window_non_causal": True},
                layer_types=["full_attention", *["sliding_attention"] * 2],
                sliding_window=20,
            ),
            "-ss",
            "---",
        ),
    ],
)
def test_windows_and_causality_follow_the_rules_of_their_layout(
    raw: dict[str, Any], windows: str, causal: str
) -> None:
    draft = parse(raw)
    assert draft.windows == tuple(20 if mark == "s" else None for mark in windows)
    assert draft.causal == tuple(mark == "c" for mark in causal)


def test_a_reduced_vocabulary_needs_a_head_of_its_own() -> None:
    reduced = speculators({"draft_vocab_size": 40})
    draft = parse(reduced, shapes(**{"lm_head.weight": (40, HIDDEN)}))
    assert (draft.draft_vocab_size, draft.own_head) == (40, True)
    with pytest.raises(
        CheckpointError,
        match=r"has no lm_head.weight, and the base's does not fit: 40 of 96 tokens",
    ):
        parse(reduced)


def test_a_draft_of_another_width_needs_an_embedding_and_a_head() -> None:
    raw, wide = z_lab(target_hidden_size=48), {"fc.weight": (HIDDEN, 3 * 48)}
    with pytest.raises(CheckpointError, match=r"no embed_tokens.weight.*width 32 on a base of 48"):
        parse(raw, shapes(**wide))
    own = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    assert parse(raw, shapes(**wide, **own)).target_hidden_size == 48


# Refusals


@pytest.mark.parametrize(
    ("raw", "found", "name"),
    [
        (z_lab({"projector_type": "domino", "emb_dim": 4}), {}, "Domino"),
        (z_lab({"projector_type": "causal_v5"}), {}, "Domino"),
        (z_lab(), {"prefix_gru.weight_ih_l0": (8, 8)}, "Domino"),
        (speculators({"projector_type": "domino"}), {}, "Domino"),
        (z_lab({"projector_type": "dspark", "markov_rank": 8}), {}, "DSpark"),
        (z_lab(), {"markov_w1.weight": (VOCAB, 8)}, r"DSpark draft .*markov_w1.weight"),
        (z_lab({"sample_from_anchor": True}), {}, "DSpark draft .'sample_from_anchor'"),
        (z_lab(architectures=["Qwen3DSparkModel"]), {}, "DSpark"),
        (speculators({"speculators_model_type": "dspark"}), {}, "DSpark"),
        (z_lab(architectures=["JetSpecDraftModel"]), {}, "JetSpec"),
        (z_lab({"projector_type": "jetspec"}), {}, "JetSpec"),
        (z_lab({"selector_rank": 8, "selector_top_k": 4}), {}, "DFlash2"),
        (z_lab(architectures=["DFlash2DraftModel"]), {}, "DFlash2"),
        (z_lab(architectures=["DFlareDraftModel"]), {}, "DFlare"),
        (z_lab(), {"fusion_weights": (LAYERS, 3)}, "DFlare"),
        (z_lab({"projector_type": "mlp"}), {}, "projector_type 'mlp'"),
        (z_lab({"shift_label": True}), {}, "shifted"),
        (z_lab({"attention_sink_bias": True}), {}, "attention sinks"),
        (z_lab(), {"layers.0.self_attn.attention_sink_bias": (4,)}, "attention sinks"),
        (z_lab(), {"layers.0.self_attn.g_proj.weight": (4, HIDDEN)}, "gated attention"),
        (z_lab(), {"aux_hidden_norms.0.weight": (HIDDEN,)}, "a norm per aux layer"),
        (z_lab(hidden_act="gelu"), {}, "hidden_act"),
        (
            z_lab(layer_types=["full_attention", "chunked_attention", "full_attention"]),
            {},
            "chunked_attention",
        ),
    ],
)
def test_relatives_are_refused_by_name(raw: dict[str, Any], found: Shapes, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        parse(raw, shapes(**found))


def test_switches_of_relatives_that_are_off_are_plain_dflash() -> None:
    off = {
        "attention_sink_bias": False,
        "sample_from_anchor": False,
        "shift_label": False,
        "projector_type": "dflash",
    }
    assert parse(z_lab(off, dspark_markov_rank=None)) == parse()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            z_lab({"target_layers_ids": [1, 5, 9]}),
            r"'target_layers_ids'.*nearest is 'target_layer_ids'",
        ),
        (z_lab({"mask_token": ..., "mask_tokens_id": 3}), r"nearest is 'mask_token_id'"),
        (z_lab(dflash_config={}), "dflash_config.* is empty"),
        (z_lab({"mask_token_id": ...}), "'mask_token_id' is missing"),
        (z_lab({"mask_token_id": VOCAB}), "mask_token_id 96 is outside the vocabulary of 96"),
        (z_lab({"mask_token_id": -1}), "mask_token_id -1 is outside"),
        (z_lab({"mask_token_id": "90"}), "mask_token_id"),
        (z_lab(mask_token_id=91), "'mask_token_id' is 91 at the top level and 90"),
        (z_lab(block_size=...), "'block_size' is missing"),
        (z_lab(block_size=1), "'block_size' is 1, not at least 2"),
        (z_lab(block_size=1025), "'block_size' is 1025, not at most 1024"),
        (z_lab({"target_layer_ids": [5, 1, 9]}), r"\[6, 2, 10\]; expected ascending"),
        (
            z_lab({"target_layer_ids": [1, 5, 12]}),
            r"\[2, 6, 13\]; expected ascending ones of 1\.\.12",
        ),
        (z_lab({"target_layer_ids": [1, 5]}), r"fc.weight has the shape \[32, 96\].*\[32, 64\]"),
        (z_lab({"target_layer_ids": ...}, num_target_layers=...), "neither 'target_layer_ids' nor"),
        (z_lab(eagle_aux_hidden_state_layer_ids=[1, 5, 9]), "eagle_aux_hidden_state_layer_ids"),
        (z_lab({"num_target_layers": 13}), "'num_target_layers' is 12 at the top level and 13"),
        (
            speculators({"aux_hidden_state_layer_ids": ...}),
            "'aux_hidden_state_layer_ids' is missing",
        ),
        (z_lab(layer_types=["sliding_attention"] * 3), "'sliding_window' is missing"),
        (z_lab({"use_swa": 1}), "use_swa"),
        (z_lab(num_hidden_layers=4), "4 layers; the tensors are of 3"),
        (z_lab(num_attention_heads=8), "q_proj.weight has the shape"),
        (z_lab(draft_vocab_size=97), "draft_vocab_size 97"),
    ],
)
def test_contradictions_are_named(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(raw)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"fc.weight": None}, "no tensor 'fc.weight'"),
        ({"layers.0.self_attn.v_proj.weight": None}, "q_proj, k_proj in layers.0.self_attn"),
        ({"layers.0.self_attn.q_proj.weight": ()}, "q_proj.weight has the shape"),
        ({"layers.0.self_attn.qkv_proj.weight": (128, HIDDEN)}, "qkv_proj"),
        ({"embed_tokens.weight": (VOCAB - 1, HIDDEN)}, "embed_tokens.weight has the shape"),
        ({"lm_head.weight": (VOCAB, HIDDEN + 1)}, "lm_head.weight has the shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    found: dict[str, tuple[int, ...] | None], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(found=shapes(**found))
