"""What the probe makes a draft say first, at every position, against the slow references of each
method.

The base's features come from transformers, and are given in the reading that the draft states and
in those beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import EMBEDDING
from edgespec.config import ModelConfig
from edgespec.export.stepwise import causal_feeds, run_stepwise
from edgespec.graphs import decoder
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.pairing import block_draft as block_pairs
from edgespec.pairing.forcing import EmbeddingRows
from edgespec.pairing.pair import Pair
from edgespec.pairing.probe import hidden_states
from edgespec.pairing.probe_text import ProbeText
from edgespec.pairing.table import PAIRINGS
from tests import reference, toys
from tests.parity.dflash_reference import DFlashReference
from tests.parity.dspark_reference import DSparkReference
from tests.reference_mtp import PRE_NORM, MtpReference

TOKENS = np.random.default_rng(3).integers(3, 256, 70)

First = Callable[[int], int]  # position -> the base's id of the draft's first token


@dataclass(frozen=True)
class Made:
    base: Path
    draft: Path | None


@dataclass(frozen=True)
class Row:
    """A pair on disk, and how the reference says its first tokens from transformers' hidden
    states."""

    make: Callable[[Path], Made]
    first: Callable[[Made, Any, tuple[torch.Tensor, ...], tuple[int, ...]], First]


def make_eagle(
    layout: toys.DraftLayout, family: toys.Family = "llama", **keys: Any
) -> Callable[[Path], Made]:
    def make(path: Path) -> Made:
        window = 9 if family == "mistral" else None
        base = toys.make_base(path / "base", family, layers=8, sliding_window=window)
        return Made(base, toys.make_draft(path / "draft", base, layout, **keys))

    return make


def make_dflash(hybrid: bool = False, **keys: Any) -> Callable[[Path], Made]:
    def make(path: Path) -> Made:
        base = (
            toys.make_qwen3_5(path / "base", layers=8)
            if hybrid
            else toys.make_base(path / "base", "qwen3", layers=8)
        )
        return Made(
            base, toys.make_dflash(path / "draft", base, aux_layers=[2, 6], mask_token=255, **keys)
        )

    return make


def make_block(make: Callable[..., Path], **keys: Any) -> Callable[[Path], Made]:
    def made(path: Path) -> Made:
        base = toys.make_base(path / "base", "qwen3", layers=8)
        return Made(base, make(path / "draft", base, aux_layers=(2, 6), mask_token=255, **keys))

    return made


def make_head(path: Path) -> Made:
    return Made(toys.make_qwen3_5(path / "base"), None)


def eagle_first(
    made: Made, model: Any, hidden: tuple[torch.Tensor, ...], aux_layers: tuple[int, ...]
) -> First:
    assert made.draft is not None
    ref = reference.Eagle3Reference(made.draft, made.base)
    n = len(TOKENS) - 1
    fused = ref.fuse(reference.gather_aux_hidden_states(hidden, aux_layers)[:, :-1])
    embeds = ref.embed_tokens[torch.from_numpy(TOKENS[1:])][None]
    causal = torch.ones(1, n, n, dtype=torch.bool).tril()
    logits, _, _ = ref.forward(embeds, fused, torch.arange(n)[None], causal)
    ids = ref.d2t[logits[0].argmax(-1).numpy()]
    return lambda position: int(ids[position - 1])


def dflash_first(
    made: Made, model: Any, hidden: tuple[torch.Tensor, ...], aux_layers: tuple[int, ...]
) -> First:
    assert made.draft is not None
    ref, given = (
        DFlashReference(made.draft, made.base),
        reference.gather_aux_hidden_states(hidden, aux_layers)[0],
    )

    def first(position: int) -> int:
        logits = ref.block(given[:position], int(TOKENS[position]), ref.block_size)
        return int(ref.d2t[int(logits[1].argmax())])

    return first


def dspark_first(
    made: Made, model: Any, hidden: tuple[torch.Tensor, ...], aux_layers: tuple[int, ...]
) -> First:
    assert made.draft is not None
    ref = DSparkReference(made.draft, made.base)
    given = reference.gather_aux_hidden_states(hidden, aux_layers)[0]

    def first(position: int) -> int:
        drafts = ref.block_size - ref.first_slot
        return ref.draft(given[:position], int(TOKENS[position]), drafts).tokens[0]

    return first


def mtp_first(
    made: Made, model: Any, hidden: tuple[torch.Tensor, ...], aux_layers: tuple[int, ...]
) -> First:
    ref = MtpReference(made.base, model, PRE_NORM if aux_layers else None)
    tokens = torch.from_numpy(TOKENS)
    logits, _ = ref.forward(tokens[1:], ref.base_states(tokens)[:-1])
    ids = logits.argmax(-1)
    return lambda position: int(ids[position - 1])


SLIDES = ["sliding_attention", "full_attention"]
ROWS = {
    "eagle": Row(make_eagle("eagle"), eagle_first),
    "eagle-of-its-own-embedding": Row(
        make_eagle("speculators", own_embedding=True, aux_layers=(2, 3, 5, 7)), eagle_first
    ),
    "eagle-borrowed-head": Row(
        make_eagle("modelopt", draft_vocab=None, own_head=False), eagle_first
    ),
    "eagle-narrow-on-a-window": Row(
        make_eagle("eagle", "mistral", hidden=48, heads=3, kv_heads=3, own_embedding=True),
        eagle_first,
    ),
    "dflash": Row(make_dflash(), dflash_first),
    "dflash-windows": Row(
        make_dflash(
            layer_types=["sliding_attention", "full_attention"],
            window=5,
            draft_vocab=96,
            layout="speculators",
        ),
        dflash_first,
    ),
    "dflash-causal-on-a-hybrid": Row(
        make_dflash(hybrid=True, causal=True, own_embedding=True), dflash_first
    ),
    "jetspec": Row(make_block(toys.make_jetspec), dflash_first),
    "dspark": Row(make_block(toys.make_dspark), dspark_first),
    "dspark-gated": Row(
        make_block(toys.make_dspark, layout="specforge", kind="gated"), dspark_first
    ),
    "dspark-of-its-own-vocabulary": Row(
        make_block(
            toys.make_dspark, layout="speculators", draft_vocab=96, kind="rnn", from_anchor=False
        ),
        dspark_first,
    ),
    "mtp": Row(make_head, mtp_first),
}


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


def opened(made: Made) -> Pair:
    base = open_checkpoint(str(made.base))
    model = detect(base)
    assert isinstance(model, ModelConfig)
    draft = open_checkpoint(str(made.draft)) if made.draft else None
    config = detect(draft) if draft else None
    assert config is None or isinstance(config, Eagle3Config | BlockDraftConfig)
    method = config.method if config is not None else "mtp"
    return Pair(method, base, model, draft, config)


def test_first_tokens_in_every_reading(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks come in several passes."""
    monkeypatch.setattr(block_pairs, "BLOCK_ROWS", 24)
    made = row.make(tmp_path)
    pair, model = opened(made), toys.load_base(made.base)
    logits, hidden = reference.base_hidden_states(model, torch.from_numpy(TOKENS)[None])
    base = decoder.Decoder.open(pair.base, pair.model, emits_final=pair.draft is None)
    pairing = PAIRINGS[pair.method]
    draft, readings = pairing.force(pair, base, ProbeText(TOKENS)), pairing.readings(pair)
    rows = EmbeddingRows.read(base.table.source(EMBEDDING), TOKENS).of(TOKENS)
    keep = {layer for reading in readings for layer in reading.aux_layers}
    (truth,) = run_stepwise(base, [causal_feeds(rows, pair.model.decoder)], keep)
    assert truth.best.tolist() == logits[0].argmax(-1).tolist()
    assert all(owns_its_memory(stream) for stream in truth.streams.values())
    assert len(readings) == (2 if pair.draft is None else 3)

    said = []
    for reading in readings:
        passes = draft.passes(hidden_states(reading, truth), reading)
        outputs = run_stepwise(draft.graph, passes, correct=draft.correct)
        found = np.concatenate([passed.best for passed in outputs])
        with torch.no_grad():
            first = row.first(made, model, hidden, reading.aux_layers)
        assert draft.ids[found].tolist() == [first(int(position)) for position in draft.positions()]
        said.append(tuple(found))
    assert len(set(said)) == len(readings)  # so that another reading would have been seen
    assert len(draft.positions()) > 50


def owns_its_memory(array: np.ndarray) -> bool:
    """A session's output does not: as long as it lives, so does all that the session took."""
    return array.flags.owndata or (
        isinstance(array.base, np.ndarray) and owns_its_memory(array.base)
    )
