"""The head as a torch module against transformers' own layer, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgespec.checkpoint.files import open_checkpoint
from edgespec.families import parse_model_config
from edgespec.modules.base_model import load_base
from edgespec.modules.unrolled import Unrolled
from edgespec.training.files import load, tensor_of
from edgespec.training.row import row_of
from tests import toys
from tests.reference_mtp import READINGS, MtpReference

STEPS, CHAIN = 3, 4


@pytest.mark.parametrize("experts", [0, 4])
@torch.no_grad()
def test_unrolled_chains_are_those_of_transformers_layer(experts: int, tmp_path: Path) -> None:
    path = toys.make_qwen3_5(tmp_path / "base", experts=experts)
    checkpoint, row = open_checkpoint(path), row_of("mtp")
    assert parse_model_config(checkpoint.config, "base").mtp_layers == 1
    assert row.parse is not None
    config = row.parse(checkpoint.config, {}, "base")
    _, names = row.names(checkpoint, config)
    head = row.module(config)
    load(head, {own: tensor_of(checkpoint, name) for own, name in names.items()})
    base = load_base(path, "cpu", torch.float32)
    reference, ids = MtpReference(path, base), torch.arange(3, 15)
    states, table = reference.base_states(ids), base.get_input_embeddings().weight
    unrolled, embeds = Unrolled(head, states[None, :-1]), table[ids][None]
    rows = len(ids) - 1
    said = [
        base.lm_head(unrolled.step(embeds[:, 1 + k : 1 + rows]))[0, CHAIN] for k in range(STEPS)
    ]
    tokens, first = ids[1 : CHAIN + 2], states[: CHAIN + 1]
    drafts = ids[CHAIN + 2 : CHAIN + 1 + STEPS].tolist()
    logits, _ = reference.chain(tokens, first, drafts)
    torch.testing.assert_close(torch.stack(said), logits, rtol=1e-4, atol=1e-5)
    for mistake in READINGS:
        other, _ = MtpReference(path, base, mistake).chain(
            tokens, MtpReference(path, base, mistake).base_states(ids)[: CHAIN + 1], drafts
        )
        assert not torch.allclose(torch.stack(said), other, atol=1e-4), mistake
