"""Drafts over many positions at once compute what they compute one position after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from edgespec.config import DecoderConfig, RopeConfig
from edgespec.config.values import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.eagle1 import Eagle1Config
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.modules.block_draft import BlockDraftModule
from edgespec.modules.eagle1 import Eagle1
from edgespec.modules.eagle3 import Eagle3
from edgespec.modules.layers import rope_rows
from edgespec.modules.unrolled import Unrolled

HIDDEN, STEPS, WIDTH = 32, 4, 9


def decoder(layers: int, window: int | None = None, **more: Any) -> DecoderConfig:
    attention = AttentionSpec(4, 2, 8, RopeConfig(1e4, 8), 8**-0.5, window=window, **more)
    layer = LayerSpec(attention, MlpSpec(48), NormSpec(1e-6))
    return DecoderConfig(HIDDEN, (layer,) * layers, layer.norm)


def shared(method: str, layers: DecoderConfig) -> dict[str, Any]:
    return {
        "method": method, "layout": "modelopt", "decoder": layers, "vocab_size": 50,
        "draft_vocab_size": 50, "target_hidden_size": HIDDEN, "num_aux_layers": 2,
        "own_embedding": False, "own_head": True,
    }  # fmt: skip


def random_module(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return module.eval()


@pytest.mark.parametrize(
    ("layers", "window", "switches"),
    [
        (1, None, {}),
        (1, None, {"norm_before_residual": True, "norm_output": True}),
        (3, None, {"fc_norm": True, "norm_output": True}),
        (2, 2, {"norm_before_fc": True}),
    ],
)
def test_unrolled_chains_are_those_of_a_decode_one_by_one(
    layers: int, window: int | None, switches: dict[str, bool]
) -> None:
    config = Eagle3Config(
        **shared("eagle3", decoder(layers, window)), aux_layer_ids=(1, 3), **switches
    )
    check_chains(random_module(Eagle3(config)), 2 * HIDDEN)


@pytest.mark.parametrize(
    ("layers", "last_norm", "norm_output"), [(1, False, False), (2, True, False), (1, True, True)]
)
def test_chains_over_states_of_the_base_s_kind_are_too(
    layers: int, last_norm: bool, norm_output: bool
) -> None:
    config = Eagle1Config(
        **{**shared("eagle1", decoder(layers)), "num_aux_layers": 1}, aux_layer_ids=None,
        fc_bias=True, last_norm=last_norm, norm_output=norm_output,
    )  # fmt: skip
    check_chains(random_module(Eagle1(config)), HIDDEN)


@torch.no_grad()
def check_chains(draft: Any, width: int) -> None:
    rope = draft.draft_config.decoder.rope
    read, tokens = torch.randn(2, WIDTH, width), torch.randn(2, WIDTH + STEPS, HIDDEN)
    unrolled = Unrolled(draft, read)
    found = [unrolled.step(tokens[:, k : k + WIDTH - k]) for k in range(STEPS)]
    fused = draft.fuse(read)
    for chain in range(WIDTH - STEPS + 1):
        states = fused[:, : chain + 1]  # true ones, then those that the chain drafted
        for step in range(STEPS):
            rows = chain + 1 + step
            cos, sin = rope_rows(rope, rows, read)
            once, ahead = draft.run(
                tokens[:, :rows], states, lambda i, attention, x, c=cos, s=sin: attention(x, c, s)
            )
            torch.testing.assert_close(found[step][:, chain], once[:, -1], rtol=1e-4, atol=1e-5)
            states = torch.cat([states, ahead[:, -1:]], dim=1)


@pytest.mark.parametrize(
    ("windows", "causal"), [((None, None), (False, False)), ((4, None), (True, False))]
)
@torch.no_grad()
def test_many_blocks_are_each_what_one_is(
    windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    config = BlockDraftConfig(
        **shared("dflash", decoder(2, qk_norm=True)),
        aux_layer_ids=(1, 3), block_size=5, mask_token_id=3, windows=windows, causal=causal,
    )  # fmt: skip
    draft = random_module(BlockDraftModule(config))
    assert isinstance(draft, BlockDraftModule)
    aux, anchors = torch.randn(2, 12, 2 * HIDDEN), torch.tensor([[1, 7, 11], [5, 2, 12]])
    embeds = torch.randn(2, 3, 5, HIDDEN)
    found = draft.lm_head(draft.blocks(aux, embeds, anchors))
    for row in range(2):
        for block in range(3):
            one = draft(aux[row, : anchors[row, block]], embeds[row, block])
            torch.testing.assert_close(found[row, block], one, rtol=1e-4, atol=1e-4)
    other = random_module(BlockDraftModule(replace(config, windows=(2, 2), causal=(False, True))))
    assert not torch.allclose(found, other.lm_head(other.blocks(aux, embeds, anchors)), atol=1e-2)
