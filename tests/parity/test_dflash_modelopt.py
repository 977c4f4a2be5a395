"""The references that DFlash and DSpark engines are held against, held against ModelOpt's own
modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.modelopt_drafts import BLOCK, CONTEXT, PENDING
from tests.parity.dflash_reference import DFlashReference
from tests.parity.dspark_reference import DSparkReference


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


@pytest.mark.parametrize("name", ["dspark", "dspark-rnn"])
def test_dspark_s_heads_walk_as_modelopt_s_do(name: str, modelopt_drafts: Path) -> None:
    theirs = load_file(modelopt_drafts / name / "reference.safetensors")
    ours = DSparkReference(modelopt_drafts / name, modelopt_drafts / "base")
    found = ours.draft(theirs["features"], PENDING, BLOCK)
    assert found.tokens == theirs["tokens"].tolist()
    largest = float(theirs["logits"].abs().max())
    assert float((torch.stack(found.logits) - theirs["logits"]).abs().max()) < 1e-4 * largest
    if name == "dspark-rnn":
        assert found.confidences == pytest.approx(theirs["confidences"].tolist(), abs=1e-5)
