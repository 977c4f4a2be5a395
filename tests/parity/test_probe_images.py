"""What a probe with images makes base and draft say, against transformers and an independent draft.

Rows of images come from transformers' encoder, and in one test from the encoder in the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.config import ModelConfig
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.pairing import probe
from edgespec.pairing.forcing import EmbeddingRows
from edgespec.pairing.pair import Pair
from edgespec.pairing.probe_text import ProbeText
from edgespec.pairing.readings import AS_STATED, WITH_IMAGE_ROWS, Reading
from edgespec.progress import Silent
from edgespec.rope import RopeTable
from tests import image_reference, reference, toys
from tests.parity.test_vl import AUX_LAYERS, LARGE, PROMPTS, SMALL, TOYS
from tests.toys.vl import MERGE

PARTS = [*PROMPTS["several"], [17, 5, 60, 23], SMALL, [80, 81, 82, 12, 13]]


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(str(path))


def text_of(model: object) -> ProbeText:
    prompt = image_reference.prompt_of(model, PARTS)
    starts = tuple(image.start for image in prompt.images)
    rows = tuple(image.rows for image in prompt.images)
    return ProbeText(np.array(prompt.tokens), rows, starts, MERGE)


def pair_of(base: Path, draft: Path) -> Pair:
    model, config = detect(opened(base)), detect(opened(draft))
    assert isinstance(model, ModelConfig)
    assert isinstance(config, Eagle3Config | BlockDraftConfig)
    return Pair(config.method, opened(base), model, opened(draft), config)


@pytest.mark.parametrize("name", TOYS)
def test_base_and_draft_say_what_the_references_say(name: str, tmp_path: Path) -> None:
    make, options, rope = TOYS[name]
    base = make(tmp_path / "base", layers=8, **options)
    draft = toys.make_draft(tmp_path / "draft", base, "specforge", rope=rope, rope_theta=1e6)
    model, pair = toys.load_vl(base), pair_of(base, draft)
    text, ref = text_of(model), reference.Eagle3Reference(draft, base)
    readings = [
        Reading(AS_STATED, AUX_LAYERS),
        Reading(WITH_IMAGE_ROWS, AUX_LAYERS, image_rows=True),
    ]
    graph = probe.Decoder.open(pair.base, pair.model)
    asked = probe.ask(pair, graph, text, readings, Silent())

    kept = np.flatnonzero(text.is_text[1:]) + 1
    assert (
        asked.wanted.tolist() == image_reference.logits_of(model, PARTS).argmax(-1)[kept].tolist()
    )
    features = torch.from_numpy(image_reference.inputs_of_layers(model, PARTS, AUX_LAYERS))
    count = len(text) - 1
    causal = torch.ones(count, count, dtype=torch.bool).tril()[None]
    embeds = ref.embed_tokens[torch.from_numpy(text.tokens)]
    for said, rows in zip(
        asked.said, (embeds, torch.from_numpy(text.placed(embeds.numpy()))), strict=True
    ):
        with torch.no_grad():
            positions = torch.from_numpy(text.positions[None, :-1])
            logits, _, _ = ref.forward(
                rows[None, 1:], ref.fuse(features[None, :-1]), positions, causal
            )
        firsts = logits[0].argmax(-1).numpy()
        wanted = ref.d2t[firsts]
        assert said.tolist() == wanted[kept - 1].tolist()
    assert asked.said[0].tolist() != asked.said[1].tolist()


def test_blocks_stand_at_the_positions_behind_images(tmp_path: Path) -> None:
    base = TOYS["qwen3-vl"][0](tmp_path / "base", layers=8)
    draft = toys.make_dflash(tmp_path / "draft", base, aux_layers=[2, 6], mask_token=255)
    pair, text = pair_of(base, draft), text_of(toys.load_vl(base))
    graph = probe.Decoder.open(pair.base, pair.model)
    forced = probe.PAIRINGS[pair.method].force(pair, graph, text)
    hidden = np.zeros((len(text), 2 * pair.model.decoder.hidden_size), np.float32)
    (reading, *_) = probe.PAIRINGS[pair.method].readings(pair)
    last = int(forced.positions()[-1])
    assert last == len(text) - 1
    feeds = forced.passes(hidden, reading)[-1]
    assert isinstance(pair.config, BlockDraftConfig)
    table, size = RopeTable.of(pair.config.decoder.rope, 128), pair.config.block_size
    offset = int(text.positions[-1].max()) - last
    assert offset < 0  # an image takes fewer positions than slots
    cos, _ = table.rows(last + offset + np.arange(size)[None])
    assert np.array_equal(feeds["rope_cos"][:, -size:], cos)
    context, _ = table.rows(text.positions[None, :last])
    assert np.array_equal(feeds["context_cos"], context)


def test_text_alone_has_the_positions_of_slots(tmp_path: Path) -> None:
    """And the same rows: nothing of an image is left in it."""
    make, options, _ = TOYS["qwen2.5-vl"]
    base = make(tmp_path / "base", layers=3, **options)
    text = text_of(toys.load_vl(base))
    alone = text.without_images()
    assert alone.positions.tolist() == list(range(len(alone)))
    assert len(alone) == len(text) - 3 * SMALL.num_rows - LARGE.num_rows
    rows = EmbeddingRows(np.arange(256), np.random.default_rng(0).normal(size=(256, 4))).of(
        alone.tokens
    )
    assert np.array_equal(alone.placed(rows), rows)
    assert alone.extras({"deepstack_embeds": 8}) == {}
