"""The heads of a DSpark draft in torch are those that an engine computes in numpy, many blocks at
once."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from edgespec.methods.dspark import DSparkConfig, Heads, MarkovKind
from edgespec.methods.dspark_heads import DSparkHeads
from edgespec.modules.dspark import DSpark
from tests.unit.modules.test_many_at_once import HIDDEN, decoder, random_module, shared

BLOCKS, SLOTS, RANK, VOCAB = 3, 4, 5, 50


@pytest.mark.parametrize("rank", [RANK, 0])
@pytest.mark.parametrize("kind", get_args(MarkovKind))
@torch.no_grad()
def test_heads_are_those_of_an_engine(kind: MarkovKind, rank: int) -> None:
    heads = Heads(
        markov_rank=rank, markov_kind=kind, confidence=True, confidence_reads_markov=rank > 0,
        first_slot=0,
    )  # fmt: skip
    config = DSparkConfig(
        **shared("dspark", decoder(1, qk_norm=True)), aux_layer_ids=(1, 3), block_size=SLOTS,
        mask_token_id=3, windows=(None,), causal=(False,), heads=heads,
    )  # fmt: skip
    draft = random_module(DSpark(config))
    assert isinstance(draft, DSpark)
    states, anchors = 0.2 * torch.randn(BLOCKS, SLOTS, HIDDEN), torch.tensor([7, 40, 7])
    found = draft.walk(states, anchors)
    arrays = {name: draft.state_dict()[name].numpy() for name in config.head_shapes}
    engine = DSparkHeads(heads, arrays, np.arange(VOCAB))
    logits = draft.lm_head(states)
    before, embeds = torch.cat([anchors[:, None], found[:, :-1]], dim=1), None
    if draft.markov_head is not None:
        embeds = draft.markov_head.markov_w1(before)
        read = draft.markov_head.read(embeds, states)
        logits = logits + draft.markov_head.markov_w2(read)
        assert (found != draft.lm_head(states).argmax(-1)).any()
    assert draft.confidence_head is not None
    confidences = draft.confidence_head(states, embeds).sigmoid()
    for block in range(BLOCKS):
        plain = draft.lm_head(states[block]).numpy()
        walk = engine.walk(int(anchors[block]), plain, states[block].numpy())
        assert found[block].tolist() == walk.ids.tolist()
        np.testing.assert_allclose(logits[block], walk.logits, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(confidences[block], walk.confidences, rtol=1e-4, atol=1e-5)
