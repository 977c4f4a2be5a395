"""Prompts with images, over toys of Qwen2.5-VL and Qwen3-VL: logits, aux hidden states and first
trees against transformers and an independent draft. Rows of images come from transformers' encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.backends.ort.options import WeightFormat
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.engine import PLAIN, Engine
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.runtime.vision.encoder import VisionEncoder
from tests import image_reference, made, reference, toys
from tests.image_reference import Part, Picture

TOLERANCE = 5e-4  # largest difference of a logit or a hidden state, of values of about 2.5
AUX_LAYERS = (2, 4, 5)
PLAN = DraftPlan(3, 4, 16)
LIMITS = Limits(max_input_len=96, max_kv_cache_capacity=128, max_verify_tree_size=16)
SMALL, LARGE = Picture.random(1, 4, 6), Picture.random(2, 6, 10)
PROMPTS: dict[str, list[Part]] = {
    "between": [[5, 6, 7], SMALL, [8, 9, 10]],
    "first": [SMALL, [11]],
    "several": [[3], SMALL, [9, 9, 7], LARGE, [30, 31], SMALL, [40, 41]],
}
SECTIONED = {"type": "mrope", "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
TOYS: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl": (toys.make_qwen2_5_vl, {}, SECTIONED),
    "qwen2.5-vl-nested": (toys.make_qwen2_5_vl, {"form": "nested", "tied": True}, SECTIONED),
    "qwen3-vl": (toys.make_qwen3_vl, {"deepstack": (0, 1, 2)}, INTERLEAVED),
}


@dataclass
class Pair:
    """The same weights twice: transformers' model and the engines of base and draft."""

    model: Any
    ref: reference.Eagle3Reference
    engine: Engine

    @property
    def drafter(self) -> TreeDrafter:
        assert isinstance(self.engine.drafter, TreeDrafter)
        return self.engine.drafter

    def features(self, prompt: PromptValue) -> np.ndarray:
        """[n, k*H], what the base emits for a prompt."""
        self.engine.base.reset(0)
        part = self.engine.base.part(0, prompt, 0, len(prompt))
        (result,) = self.engine.base.extend([part])
        assert result.hidden_states is not None
        return result.hidden_states.numpy().copy()


@pytest.fixture(scope="module", params=TOYS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    make, options, rope = TOYS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    base = make(root / "base", layers=8, **options)
    draft = toys.make_draft(root / "draft", base, "specforge", rope=rope, rope_theta=1e6)
    engine_dir = made.built(
        LIMITS,
        made.exported(base, ExportOptions(base_for="eagle3")) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / "llm",
    )
    ref = reference.Eagle3Reference(draft, base)
    with Engine(engine_dir, spec_decode=True) as engine:
        yield Pair(toys.load_vl(base), ref, engine)


@pytest.fixture(params=PROMPTS)
def parts(request: pytest.FixtureRequest) -> list[Part]:
    return PROMPTS[request.param]


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE  # a NaN is not within any tolerance


def test_the_last_logits_are_those_of_transformers(pair: Pair, parts: list[Part]) -> None:
    found = pair.engine.next_logits(image_reference.prompt_of(pair.model, parts))
    assert_close(found, image_reference.logits_of(pair.model, parts)[-1])


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks_may_end_within_an_image(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, parts: list[Part], chunk: int
) -> None:
    monkeypatch.setattr(pair.engine.base.runner, "prefill_chunk", chunk)
    found = pair.engine.next_logits(image_reference.prompt_of(pair.model, parts))
    assert_close(found, image_reference.logits_of(pair.model, parts)[-1])


def test_the_base_emits_the_stream_before_its_aux_layers(pair: Pair, parts: list[Part]) -> None:
    """With the rows of images that joined it behind the layer before."""
    found = pair.features(image_reference.prompt_of(pair.model, parts))
    assert_close(found, image_reference.inputs_of_layers(pair.model, parts, AUX_LAYERS))


@pytest.mark.parametrize("image_rows", [False, True])
@pytest.mark.parametrize("pieces", [1, 4])
def test_the_first_tree_is_that_of_a_draft_with_the_base_s_positions(
    pair: Pair, parts: list[Part], image_rows: bool, pieces: int
) -> None:
    prompt, pending = image_reference.prompt_of(pair.model, parts), 77
    features, drafter = pair.features(prompt), pair.drafter
    following = [*prompt[1:], pending]
    drafter.reset(0)
    drafter.image_rows = image_rows
    images = prompt.images_of(1, len(prompt))
    assert prompt.positions is not None
    whole = Observation(0, HostStates(features), np.array(following), prompt.positions, images)
    for piece in whole.pieces(-(-len(prompt) // pieces)):
        drafter.observe([piece])
    (tree,) = drafter.propose([DraftRequest(0, pending, PLAN)])
    embeds = pair.ref.embed_tokens[torch.tensor(following)].clone()
    if image_rows:
        for image in images:
            embeds[image.start : image.end] = torch.from_numpy(image.rows.embeds)
    with torch.no_grad():
        tokens, parents, _ = reference.draft_tree(
            pair.ref,
            pair.ref.embed_tokens,
            torch.from_numpy(features),
            following,
            PLAN.top_k,
            PLAN.steps,
            PLAN.verify_size,
            torch.from_numpy(prompt.positions),
            embeds,
        )
    assert tree.tokens.tolist() == tokens
    assert tree.parents.tolist() == parents


def test_hybrid_bases_take_images_too(tmp_path: Path) -> None:
    """Qwen3.5, part of whose heads turns, with its MTP head and its own encoder's rows."""
    base = toys.make_qwen3_5(tmp_path / "base", images=True)
    model = toys.load_vl(base)
    exported = made.exported(base, ExportOptions(base_for="mtp"))
    engine_dir = made.built(LIMITS, exported / "llm", exported / "mtp_draft")
    build(exported / "visual", tmp_path / "engines", Limits())
    sampling = SamplingParams(temperature=0, max_generate_length=16)
    with (
        Engine(engine_dir, spec_decode=True) as engine,
        VisionEncoder.open(tmp_path / "engines") as encoder,
    ):
        engine.stop_ids = frozenset()
        for parts in PROMPTS.values():
            wanted = image_reference.greedy(model, parts, 16)
            for rows in (encoder.encode, lambda picture: image_reference.rows_of(model, picture)):
                prompt = image_reference.prompt_with(rows, parts)
                for plan in (PLAIN, engine.plan()):
                    assert engine.generate(prompt, sampling, plan).token_ids == wanted


def test_low_bit_engines_take_images_too(tmp_path: Path) -> None:
    """Qwen3-VL's deepstack passes the fusions of int8 graphs."""
    base = toys.make_qwen3_vl(tmp_path / "base", layers=4, hidden=64)
    parts = PROMPTS["several"]
    model = toys.load_vl(base)
    engine_dir = made.built(LIMITS, made.exported(base) / "llm", options=WeightFormat("int8"))
    with Engine(engine_dir) as engine:
        found = engine.next_logits(image_reference.prompt_of(model, parts))
    wanted = image_reference.logits_of(model, parts)[-1]
    cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert cosine > 0.99
