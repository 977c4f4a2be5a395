"""The reference that DFlash engines are held against, held against ModelOpt's own module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.modelopt_drafts import BLOCK, CONTEXT, PENDING
from tests.parity.dflash_reference import DFlashReference


def test_a_block_has_the_logits_that_modelopt_gives_it(modelopt_drafts: Path) -> None:
    theirs = load_file(modelopt_drafts / "plain" / "reference.safetensors")
    assert theirs["features"].shape == (CONTEXT, 2 * 64)
    ours = DFlashReference(modelopt_drafts / "plain", modelopt_drafts / "base")
    logits = ours.block(theirs["features"], PENDING, BLOCK)
    assert float((logits - theirs["logits"]).abs().max()) < 1e-4 * float(
        theirs["logits"].abs().max()
    )


@pytest.mark.parametrize(
    "change",
    [{"causal": [True] * 2}, {"windows": [5] * 2}, {"norms_context": False}, {"theta": 1e4}],
)
def test_another_reading_would_be_seen(change: dict[str, object], modelopt_drafts: Path) -> None:
    theirs = load_file(modelopt_drafts / "plain" / "reference.safetensors")
    ours = DFlashReference(modelopt_drafts / "plain", modelopt_drafts / "base")
    for name, value in change.items():
        setattr(ours, name, value)
    logits: torch.Tensor = ours.block(theirs["features"], PENDING, BLOCK)
    assert float((logits - theirs["logits"]).abs().max()) > 1e-3 * float(
        theirs["logits"].abs().max()
    )
