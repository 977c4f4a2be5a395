"""Checks that the toys are what they claim: transformers reads them, and the references agree with
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import reference, toys

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYOUTS: tuple[toys.DraftLayout, ...] = ("eagle", "specforge", "modelopt", "speculators")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return toys.make_base(tmp_path / "base", layers=7)


def some_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 256, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def logits_of(path: Path, num_tokens: int = 24) -> torch.Tensor:
    return reference.base_hidden_states(toys.load_base(path), some_ids(num_tokens))[0]


# Bases


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_transformers_loads_every_weight_of_each_family(
    tmp_path: Path, family: toys.Family, spelling: toys.RopeSpelling
) -> None:
    path = toys.make_base(tmp_path, family, rope={"rope_theta": 12345.0}, rope_spelling=spelling)
    loaded = toys.load_base(path).state_dict()
    stored = load_file(path / "model.safetensors")
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert toys.load_base(path).config.rope_parameters["rope_theta"] == 12345.0
    assert any(name.endswith("q_proj.bias") for name in stored) == (family == "qwen2")
    assert any(name.endswith("q_norm.weight") for name in stored) == (family == "qwen3")


def test_both_rope_spellings_are_one_model_and_scaling_matters(tmp_path: Path) -> None:
    old = toys.make_base(tmp_path / "old", rope=LLAMA3)
    new = toys.make_base(tmp_path / "new", rope=LLAMA3, rope_spelling="new")
    plain = toys.make_base(tmp_path / "plain", rope={"rope_theta": 500000.0})
    assert "rope_parameters" not in json.loads((old / "config.json").read_text())
    assert torch.equal(logits_of(old), logits_of(new))
    assert not torch.allclose(logits_of(old), logits_of(plain), atol=1e-3)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_window_hides_old_tokens(tmp_path: Path, family: toys.Family) -> None:
    whole = logits_of(toys.make_base(tmp_path / "whole", family))
    window = logits_of(toys.make_base(tmp_path / "window", family, sliding_window=8))
    assert torch.allclose(whole[:, :8], window[:, :8], atol=1e-5)
    assert not torch.allclose(whole[:, 8:], window[:, 8:], atol=1e-2)


def test_shards_and_pickle_hold_the_same_model(tmp_path: Path) -> None:
    one = logits_of(toys.make_base(tmp_path / "one", tied=True))
    three = toys.make_base(tmp_path / "three", tied=True, shards=3)
    assert len(list(three.glob("model-*.safetensors"))) == 3
    assert torch.equal(logits_of(three), one)
    toys.write_pickle(three)
    assert not list(three.glob("*safetensors*"))
    assert torch.equal(logits_of(three), one)


def test_a_tied_base_stores_no_head(tmp_path: Path) -> None:
    assert "lm_head.weight" not in load_file(
        toys.make_base(tmp_path, tied=True) / "model.safetensors"
    )


def test_logits_have_spread(base: Path) -> None:
    assert logits_of(base).std() > 1


# Tokenizers


@pytest.mark.parametrize("vocab", [256, 512])
def test_tokenizer_returns_its_text(tmp_path: Path, vocab: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(toys.make_base(tmp_path, vocab=vocab))
    text = "Hello, world!\n\tx = 42; {a: [b]}" + (" é 漢字 🙂" if vocab >= 300 else "")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(tokenizer.get_vocab().values()) < vocab
    assert tokenizer.convert_tokens_to_ids(list(toys.SPECIAL_TOKENS)) == [0, 1, 2]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_sentencepiece_stands_alone_and_falls_back_to_bytes(base: Path) -> None:
    import sentencepiece

    toys.make_sentencepiece(base)
    assert [file.name for file in base.glob("tokenizer*")] == ["tokenizer.model"]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(base / "tokenizer.model"))
    assert processor.decode(processor.encode("the small boat 漢")) == "the small boat 漢"
    assert processor.is_byte(processor.encode("漢")[-1])
    assert processor.vocab_size() > 256 + 3 + 50


# Hidden states


def test_last_hidden_state_is_the_one_before_the_final_norm(base: Path) -> None:
    model = toys.load_base(base)
    logits, hidden_states = reference.base_hidden_states(model, some_ids(9))
    assert len(hidden_states) == 8
    assert torch.allclose(model.lm_head(model.model.norm(hidden_states[7])), logits, atol=1e-5)
    assert torch.equal(
        model.model.layers[6](hidden_states[6], **layer_inputs(model, 9)), hidden_states[7]
    )


def layer_inputs(model: torch.nn.Module, num_tokens: int) -> dict[str, object]:
    positions = torch.arange(num_tokens)[None]
    mask = torch.full((1, 1, num_tokens, num_tokens), torch.finfo(torch.float32).min).triu(1)
    return {
        "attention_mask": mask,
        "position_embeddings": model.model.rotary_emb(torch.zeros(1), positions),
    }


def test_tree_mask_evaluates_each_branch_as_if_it_were_alone(base: Path) -> None:
    model, prefix = toys.load_base(base), some_ids(5)
    nodes = torch.tensor([[10, 11, 12, 13]])  # 10 -> 11, 10 -> 12 -> 13
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[7, 6] = mask[8, 6] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 7]])
    tree, _ = reference.base_hidden_states(
        model, torch.cat([prefix, nodes], 1), mask[None, None], positions
    )
    alone, _ = reference.base_hidden_states(model, torch.cat([prefix, nodes[:, [0, 2, 3]]], 1))
    assert torch.allclose(tree[0, [5, 7, 8]], alone[0, 5:], atol=1e-5)


# Drafts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_holds_the_same_draft(
    tmp_path: Path, base: Path, layout: toys.DraftLayout
) -> None:
    first = toys.make_draft(tmp_path / "first", base, "eagle", layers=2, rope_theta=7777.0)
    second = toys.make_draft(
        tmp_path / "second", base, layout, layers=2, rope_theta=7777.0, pickle=True
    )
    a, b = reference.Eagle3Reference(first, base), reference.Eagle3Reference(second, base)
    embeds, fused, positions, mask = draft_inputs(a, 6)
    assert torch.equal(
        a.forward(embeds, fused, positions, mask)[0], b.forward(embeds, fused, positions, mask)[0]
    )
    assert np.array_equal(a.d2t, b.d2t)
    assert a.aux_layer_ids(7) == b.aux_layer_ids(7) == (2, 3, 4)


@pytest.mark.parametrize("layout", ["specforge", "modelopt", "speculators"])
def test_named_taps_come_back_as_hidden_states_indices(
    tmp_path: Path, base: Path, layout: toys.DraftLayout
) -> None:
    draft = toys.make_draft(tmp_path / "draft", base, layout, aux_layers=(1, 4, 6, 7))
    ref = reference.Eagle3Reference(draft, base)
    assert ref.aux_layer_ids(7) == (1, 4, 6, 7)
    assert ref.num_aux_layers == 4


def draft_inputs(ref: reference.Eagle3Reference, num_tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(
        1, num_tokens, ref.num_aux_layers * ref.target_hidden_size, generator=generator
    )
    positions = torch.arange(num_tokens)[None]
    mask = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool).tril()
    return ref.embed_tokens[some_ids(num_tokens)], ref.fuse(features), positions, mask


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_reference_agrees_with_layers_put_together_from_transformers(
    tmp_path: Path, base: Path, norm_before_residual: bool, qk_norm: bool
) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as hf

    path = toys.make_draft(
        tmp_path / "draft",
        base,
        "speculators",
        layers=2,
        head_dim=24,
        rope_theta=500.0,
        qk_norm=qk_norm,
        norm_before_residual=norm_before_residual,
    )
    ref = reference.Eagle3Reference(path, base)
    embeds, fused, positions, mask = draft_inputs(ref, 11)
    expected_hidden = hf_draft(
        hf, path, embeds, fused, positions, mask, norm_before_residual, qk_norm
    )
    logits, hidden, _ = ref.forward(embeds, fused, positions, mask)
    assert torch.allclose(hidden, expected_hidden, atol=2e-5)

    tensors = load_file(path / "model.safetensors")
    norm = hf.Qwen3RMSNorm(64, eps=1e-5)
    norm.load_state_dict({"weight": tensors["norm.weight"]})
    assert torch.allclose(logits, norm(expected_hidden) @ tensors["lm_head.weight"].T, atol=2e-5)


@torch.no_grad()
def hf_draft(
    hf: Any,
    path: Path,
    embeds: torch.Tensor,
    fused: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    norm_before_residual: bool,
    qk_norm: bool,
) -> torch.Tensor:
    config = hf.Qwen3Config(
        **json.loads((path / "config.json").read_text())["transformer_layer_config"]
    )
    config._attn_implementation = "eager"
    cos_sin = hf.Qwen3RotaryEmbedding(config)(embeds, positions)
    additive = torch.zeros(mask.shape).masked_fill(~mask, -1e30)[:, None]
    stream = fused
    for i in range(2):
        layer = hf.Qwen3DecoderLayer(config, 0)
        layer.hidden_norm = hf.Qwen3RMSNorm(64, eps=1e-5)
        if i == 0:
            for name, rows in (("q_proj", 96), ("k_proj", 48), ("v_proj", 48)):
                setattr(layer.self_attn, name, torch.nn.Linear(128, rows, bias=False))
        if not qk_norm:
            layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
        tensors = load_file(path / "model.safetensors")
        own = {
            n.removeprefix(f"layers.{i}."): t
            for n, t in tensors.items()
            if n.startswith(f"layers.{i}.")
        }
        layer.load_state_dict(own, strict=i == 0)
        if i == 1:
            stream = layer(stream, attention_mask=additive, position_embeddings=cos_sin)
            continue
        normed = layer.hidden_norm(fused)
        x = torch.cat([layer.input_layernorm(embeds), normed], -1)
        attended, _ = layer.self_attn(x, attention_mask=additive, position_embeddings=cos_sin)
        stream = (normed if norm_before_residual else fused) + attended
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
    return stream


def test_cached_steps_equal_one_long_step(tmp_path: Path, base: Path) -> None:
    ref = reference.Eagle3Reference(
        toys.make_draft(tmp_path / "draft", base, "modelopt", layers=2), base
    )
    embeds, fused, positions, mask = draft_inputs(ref, 9)
    whole, _, _ = ref.forward(embeds, fused, positions, mask)
    _, _, cache = ref.forward(embeds[:, :4], fused[:, :4], positions[:, :4], mask[:, :4, :4])
    rest, _, cache = ref.forward(embeds[:, 4:], fused[:, 4:], positions[:, 4:], mask[:, 4:], cache)
    assert torch.allclose(rest, whole[:, 4:], atol=1e-5)
    assert len(cache) == 2
    assert cache[0][0].shape == (1, 2, 9, 16)


def test_recycled_state_is_normed_only_with_norm_output(tmp_path: Path, base: Path) -> None:
    pre = reference.Eagle3Reference(toys.make_draft(tmp_path / "pre", base, "speculators"), base)
    post = reference.Eagle3Reference(
        toys.make_draft(tmp_path / "post", base, "speculators", norm_output=True), base
    )
    inputs = draft_inputs(pre, 5)
    (logits, hidden, _), (same_logits, normed, _) = pre.forward(*inputs), post.forward(*inputs)
    assert torch.equal(logits, same_logits)
    assert torch.allclose(normed @ post.lm_head.T, logits, atol=1e-6)
    assert not torch.allclose(hidden, normed, atol=0.1)


def test_norms_before_fc_see_the_taps(tmp_path: Path, base: Path) -> None:
    plain, whole, per_tap = (
        reference.Eagle3Reference(
            toys.make_draft(tmp_path / name, base, "speculators", **options), base
        )
        for name, options in (("a", {}), ("b", {"norm_before_fc": True}), ("c", {"fc_norm": True}))
    )
    features = torch.randn(1, 3, 192, generator=torch.Generator().manual_seed(2)) + 1
    scaled = features * torch.tensor([4.0, 1.0, 1.0]).repeat_interleave(64)
    assert torch.allclose(per_tap.fuse(features), per_tap.fuse(scaled), atol=1e-3)
    assert torch.allclose(whole.fuse(features), whole.fuse(features * 5), atol=1e-3)
    assert not torch.allclose(whole.fuse(features), whole.fuse(scaled), atol=1e-2)
    assert torch.allclose(plain.fuse(features) * 5, plain.fuse(features * 5), atol=1e-3)


def test_a_narrow_draft_brings_its_embedding_and_a_whole_vocabulary_borrows_the_head(
    tmp_path: Path, base: Path
) -> None:
    narrow = toys.make_draft(tmp_path / "narrow", base, "eagle", hidden=32, own_embedding=True)
    ref = reference.Eagle3Reference(narrow, base)
    assert json.loads((narrow / "config.json").read_text())["target_hidden_size"] == 64
    assert ref.embed_tokens.shape == (256, 32)
    assert ref.forward(*draft_inputs(ref, 3))[1].shape == (1, 3, 32)

    whole = toys.make_draft(tmp_path / "whole", base, "eagle", draft_vocab=None, own_head=False)
    assert not {"lm_head.weight", "d2t", "t2d"} & load_file(whole / "model.safetensors").keys()
    ref = reference.Eagle3Reference(whole, base)
    assert torch.equal(ref.lm_head, load_file(base / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("t2d", [True, False])
def test_offset_and_absolute_tables_say_the_same(tmp_path: Path, base: Path, t2d: bool) -> None:
    offset = toys.make_draft(tmp_path / "offset", base, "eagle", t2d=t2d)
    absolute = toys.make_draft(tmp_path / "absolute", base, "eagle", t2d=t2d, d2t="absolute")
    stored = load_file(offset / "model.safetensors")["d2t"].numpy()
    table = reference.d2t_table(offset)
    assert np.array_equal(table, reference.d2t_table(absolute))
    assert np.array_equal(table, np.arange(96) + stored)
    assert {0, 2} <= set(table.tolist())
    with pytest.raises(ValueError, match="no d2t"):
        reference.d2t_table(toys.make_draft(tmp_path / "none", base, "eagle", d2t=None))


# Trees


def tree_of(
    tmp_path: Path, base: Path, top_k: int, steps: int, size: int, seed: int = 1
) -> tuple[list[int], list[int], list[int]]:
    draft = toys.make_draft(tmp_path / "draft", base, "eagle", seed=seed, rope_theta=10.0)
    ref = reference.Eagle3Reference(draft, base)
    ids = some_ids(6)
    _, hidden_states = reference.base_hidden_states(toys.load_base(base), ids)
    features = reference.gather_aux_hidden_states(hidden_states, ref.aux_layer_ids(7))[0, :5]
    return reference.draft_tree(
        ref, ref.embed_tokens, features, ids[0, 1:].tolist(), top_k, steps, size
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_of_width_one_is_the_greedy_chain(tmp_path: Path, base: Path, seed: int) -> None:
    tokens, parents, depths = tree_of(tmp_path, base, top_k=1, steps=8, size=60, seed=seed)
    assert parents == list(range(-1, 8))
    assert depths == list(range(9))

    ref = reference.Eagle3Reference(tmp_path / "draft", base)
    ids = some_ids(6)
    features = reference.gather_aux_hidden_states(
        reference.base_hidden_states(toys.load_base(base), ids)[1], (2, 3, 4)
    )[:, :5]
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    chain, cache = [int(ids[0, -1])], None
    embeds, hidden, positions = (
        ref.embed_tokens[ids[:, 1:]],
        ref.fuse(features),
        torch.arange(5)[None],
    )
    for step in range(8):
        logits, hidden, cache = ref.forward(embeds, hidden, positions, mask, cache)
        chain.append(int(ref.d2t[logits[0, -1].argmax()]))
        embeds, hidden = ref.embed_tokens[chain[-1:]][None], hidden[:, -1:]
        positions, mask = torch.tensor([[5 + step]]), torch.ones(1, 1, 6 + step, dtype=torch.bool)
    assert tokens == chain


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_holds_the_best_of_its_pool_by_joint_probability(
    tmp_path: Path, base: Path, seed: int
) -> None:
    tokens, parents, _ = tree_of(tmp_path, base, top_k=5, steps=2, size=12, seed=seed)

    ref = reference.Eagle3Reference(tmp_path / "draft", base)
    ids = some_ids(6)
    features = reference.gather_aux_hidden_states(
        reference.base_hidden_states(toys.load_base(base), ids)[1], (2, 3, 4)
    )[:, :5]
    causal = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    embeds = ref.embed_tokens[ids[:, 1:]]
    logits, hidden, cache = ref.forward(embeds, ref.fuse(features), torch.arange(5)[None], causal)
    first = logits[0, -1].softmax(-1).topk(5)
    level = torch.from_numpy(ref.d2t)[first.indices]
    siblings = torch.cat([torch.ones(5, 5), torch.eye(5)], 1).bool()[None]
    logits, _, _ = ref.forward(
        ref.embed_tokens[level][None],
        hidden[:, -1:].expand(1, 5, -1),
        torch.full((1, 5), 5),
        siblings,
        cache,
    )
    second = logits[0].softmax(-1).topk(5)
    joint = {(int(token),): float(p) for token, p in zip(level, first.values, strict=True)}
    for i, token in enumerate(level):
        for child, p in zip(second.indices[i], second.values[i], strict=True):
            joint[(int(token), int(ref.d2t[child]))] = float(first.values[i] * p)
    best = sorted(joint, key=lambda path: -joint[path])[:11]

    grown = {
        (tokens[i],) if parents[i] == 0 else (tokens[parents[i]], tokens[i]) for i in range(1, 12)
    }
    assert grown == set(best)


def test_tree_is_closed_in_level_order_and_without_twins(tmp_path: Path, base: Path) -> None:
    tokens, parents, depths = tree_of(tmp_path, base, top_k=4, steps=3, size=20)
    assert len(tokens) == len(parents) == len(depths) == 20
    assert all(
        0 <= parent < i and depths[i] == depths[parent] + 1 for i, parent in enumerate(parents) if i
    )
    assert depths == sorted(depths)
    assert len({(parent, token) for parent, token in zip(parents, tokens, strict=True)}) == 20
    assert max(depths) > 1


def test_the_pool_bounds_the_tree(tmp_path: Path, base: Path) -> None:
    tokens, _, depths = tree_of(tmp_path, base, top_k=3, steps=2, size=100)
    assert len(tokens) == 1 + 3 + 9
    assert depths == [0] + 3 * [1] + 9 * [2]
