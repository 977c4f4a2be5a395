"""The loop with prompts that have images, over a model whose logits are a hash of what each row
sees: its rope position on three axes, and its embedding.

So a row of an image in the wrong slot, a position that forgets the images before it, or a prefix of
another image changes all that comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from edgespec.backends.call import Call
from edgespec.backends.host import HostStates
from edgespec.errors import LimitError
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockTreeDrafter
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.loop.sequence import SequenceState
from edgespec.runtime.loop.session import Session
from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue, on_all_axes
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan
from edgespec.vision.rows import ImageRows
from tests.lossless.drafters import ScriptedDrafter
from tests.unit.runtime.hash_drafts import WIDTH as DRAFT_WIDTH
from tests.unit.runtime.hash_drafts import blocks_of
from tests.unit.runtime.hash_model import (
    CONTRACT,
    GREEDY,
    VOCAB,
    HashRunner,
    TokenRows,
    begin,
    logits_after,
)

IMAGE = 8
PLAN = DraftPlan(2, 3, 6)
COUNT = 12


class AxisRows:
    """Stands for the rotary table: one number for the three axes of a position."""

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        three = positions if positions.ndim == 3 else np.repeat(positions[..., None], 3, 2)
        assert (three >= 0).all()
        row = (three @ [1, 100, 10000]).astype(np.float32)[..., None]
        return row, row


def image(seed: int, height: int = 4, width: int = 6) -> ImageRows:
    """Embeddings that no token has."""
    count = height * width // 4
    values = 100 * seed + np.arange(count, dtype=np.float32)[:, None]
    return ImageRows(values, {}, (1, height, width), f"image {seed}")


def prompt_of(*parts: Sequence[int] | ImageRows) -> PromptValue:
    tokens, images = list[int](), list[ImageSlots]()
    for part in parts:
        if isinstance(part, ImageRows):
            images.append(ImageSlots(len(tokens), part))
            tokens += [IMAGE] * len(part)
        else:
            tokens += part
    return PromptValue.with_images(tokens, images, 2)


def decoder_of(lanes: int = 1) -> CachedDecoder:
    return CachedDecoder(HashRunner(96, lanes, CONTRACT), TokenRows(), AxisRows())


def plainly(prompt: PromptValue, count: int = COUNT) -> list[int]:
    """What is right, without a cache, a mask or a session."""
    embeds = list(map(float, prompt))
    for slots in prompt.images:
        embeds[slots.start : slots.end] = slots.rows.embeds[:, 0].tolist()
    path = list[int]()
    for _ in range(count):
        whole = prompt.then(path)
        positions = whole.positions
        if positions is None:
            positions = on_all_axes(np.arange(len(whole)))
        codes = (positions @ [1, 100, 10000]).tolist()
        seen = list(zip(codes, map(int, [*embeds, *path]), strict=True))
        path.append(int(logits_after(seen).argmax()))
    return path


def answers(session: Session, *seqs: SequenceState) -> list[list[int]]:
    for seq in seqs:
        begin(session, seq)
    while session.running:
        session.step()
    return [seq.tokens[len(seq.prompt) :] for seq in seqs]


PROMPTS = {
    "between": prompt_of([1, 2, 3], image(1), [4, 5]),
    "first": prompt_of(image(2), [4]),
    "last": prompt_of([6], image(3)),
    "several": prompt_of([1], image(1), [2, 2], image(2, 6, 10), image(1), [7, 3]),
    "text": PromptValue.of([1, 2, 3, 4]),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("chunk", [256, 5, 1])
@pytest.mark.parametrize("right", [None, 0.7, 1])
def test_answers_are_right_in_chunks_of_any_size_and_with_drafts(
    monkeypatch: pytest.MonkeyPatch, prompt: PromptValue, chunk: int, right: float | None
) -> None:
    """A chunk may end within an image."""
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", chunk)
    truth = plainly(prompt)
    drafter = None if right is None else ScriptedDrafter([(prompt, truth)], VOCAB, right)
    session = Session(decoder_of(), drafter)
    seq = SequenceState(prompt, GREEDY, COUNT, plan=None if right is None else PLAN)
    assert answers(session, seq) == [truth]


@pytest.mark.parametrize("right", [None, 0.7])
def test_batches_mix_text_and_images_and_lanes_keep_their_offsets_when_they_move(
    right: float | None,
) -> None:
    prompts = list(PROMPTS.values())
    truths = [plainly(prompt) for prompt in prompts]
    told = list(zip(prompts, truths, strict=True))
    drafter = None if right is None else ScriptedDrafter(told, VOCAB, right)
    session = Session(decoder_of(len(prompts)), drafter)
    lengths = [3, 12, 5, 12, 8]  # the first to end has its lane taken by the last
    seqs = [
        SequenceState(prompt, GREEDY, length, plan=None if right is None else PLAN)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    found = answers(session, *seqs)
    assert found == [truth[:length] for truth, length in zip(truths, lengths, strict=True)]
    assert any(seq.slot != seq.lane for seq in seqs)


# Prefixes


def turn(session: Session, prompt: PromptValue, **more: int) -> tuple[list[int], int]:
    seq = SequenceState(prompt, GREEDY, COUNT, **more)
    (found,) = answers(session, seq)
    return found, seq.num_reused


def test_a_prefix_with_the_same_image_is_reused_and_one_with_another_is_not() -> None:
    session = Session(decoder_of(), prefixes=PrefixCache(10**6))
    first = prompt_of([1, 2], image(1), [3])
    turn(session, first, keep=len(first))
    same, other = prompt_of([1, 2], image(1), [3, 7]), prompt_of([1, 2], image(2), [3, 7])
    assert turn(session, same) == (plainly(same), len(first))
    assert turn(session, other) == (plainly(other), 2)
    rows = ImageRows(image(1).embeds, {}, (1, 2, 12), "image 1, wide")
    wide = prompt_of([1, 2], rows, [3, 7])
    assert wide.tokens == same.tokens
    assert turn(session, wide) == (plainly(wide), 2)


def test_a_prefix_that_ends_within_an_image_goes_on_at_its_own_positions() -> None:
    session = Session(decoder_of(), prefixes=PrefixCache(10**6))
    prompt = prompt_of([1], image(1), [2, 3])
    turn(session, prompt, keep=4)
    assert turn(session, prompt) == (plainly(prompt), 4)


def test_the_next_turn_reuses_the_answer_behind_an_image() -> None:
    session = Session(decoder_of(), prefixes=PrefixCache(10**6))
    first = prompt_of([1, 2], image(1), [3])
    seq = SequenceState(first, GREEDY, COUNT, keep_all=True)
    (answer,) = answers(session, seq)
    second = first.then([*answer, 5, 6])
    assert turn(session, second) == (plainly(second), len(first) + COUNT - 1)


# What drafters are told


def test_observations_have_positions_and_images_of_prompts_alone() -> None:
    prompt, told = prompt_of([1, 2, 3], image(1), [4]), list[Observation]()
    real = ScriptedDrafter.observe

    def observe(self: ScriptedDrafter, observations: Sequence[Observation]) -> None:
        told.extend(observations)
        real(self, observations)

    truth = plainly(prompt)
    session = Session(decoder_of(), ScriptedDrafter([(prompt, truth)], VOCAB, 1))
    with (
        mock.patch.object(ScriptedDrafter, "observe", observe),
        mock.patch.object(CachedDecoder, "prefill_chunk", 4),
    ):
        answers(session, SequenceState(prompt, GREEDY, COUNT, plan=PLAN))
    chunks, steps = told[:3], told[3:]
    assert prompt.positions is not None
    found = np.concatenate(
        [item.rope_positions for item in chunks if item.rope_positions is not None]
    )
    np.testing.assert_array_equal(found, prompt.positions)
    assert [(i.start, i.end) for i in chunks[0].images] == [(2, 4)]  # the tokens are one ahead
    assert [(i.start, i.end) for i in chunks[1].images] == [(0, 4)]
    assert chunks[2].images == ()
    assert steps
    assert all(item.rope_positions is None and not item.images for item in steps)


def test_pieces_of_an_observation_keep_what_belongs_to_them() -> None:
    prompt = prompt_of([1, 2, 3], image(1), [4])
    assert prompt.positions is not None
    tokens = np.array(prompt.tokens)
    whole = Observation(0, None, tokens, prompt.positions, prompt.images)
    first, second, third = whole.pieces(4)
    np.testing.assert_array_equal(second.rope_positions, prompt.positions[4:8])
    assert [(i.start, i.end) for i in first.images] == [(3, 4)]
    (inner,) = second.images
    assert (inner.start, inner.rows.embeds[:, 0].tolist()) == (0, [101.0, 102.0, 103.0, 104.0])
    assert third.images[0].rows.embeds[:, 0].tolist() == [105.0]


@pytest.mark.parametrize(
    ("widths", "message"), [({}, "have inputs_embeds 2,"), ({"more": 4}, "1, more 4, the base")]
)
def test_images_of_another_model_are_refused(widths: dict[str, int], message: str) -> None:
    session, rows = Session(decoder_of()), image(1)
    extras = {name: np.zeros((len(rows), width), np.float32) for name, width in widths.items()}
    embeds = np.zeros((len(rows), 1 if widths else 2), np.float32)
    wide = ImageRows(embeds, extras, rows.grid, "wide")
    with pytest.raises(LimitError, match=message):
        session.admit(SequenceState(prompt_of([1], wide), GREEDY, COUNT))
    assert session.reading == []


def test_rows_of_an_image_outside_a_chunk_are_not_read() -> None:
    """They may be NaN; so may the embedding of the image token."""
    runner = HashRunner(96, 1, CONTRACT)
    calls, run = list[Call](), runner.run
    runner.run = lambda call: (calls.append(call), run(call))[1]  # type: ignore[method-assign]

    class Table(TokenRows):
        def rows(self, tokens: np.ndarray) -> np.ndarray:
            found = super().rows(tokens)
            found[tokens == IMAGE] = np.nan
            return found

    decoder = CachedDecoder(runner, Table(), AxisRows())
    rows = image(1)
    rows.embeds[4:] = np.nan
    prompt = prompt_of([1, 2], rows, [3])
    decoder.extend([decoder.part(0, prompt, 0, 6)])
    assert np.isfinite(calls[0].inputs_embeds).all()


# Block drafts


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("flushed", [False, True])
def test_blocks_stand_behind_the_images_of_their_context(pieces: int, flushed: bool) -> None:
    """Whether the context waits for the block or was read before it."""
    prompt = prompt_of([1, 2], image(1, 6, 10), [4])
    assert prompt.positions is not None
    decoder, calls = blocks_of(64, 2), list[Call]()
    decoder.rope, run = AxisRows(), decoder.runner.run
    decoder.runner.run = lambda call: (calls.append(call), run(call))[1]
    drafter = BlockTreeDrafter(decoder, 6, 4, None)
    states = HostStates(np.ones((len(prompt), DRAFT_WIDTH), np.float32))
    whole = Observation(1, states, np.zeros(len(prompt), np.int64), prompt.positions)
    for piece in whole.pieces(-(-len(prompt) // pieces)):
        drafter.observe([piece])
    drafter.observe([Observation(0, states.take(np.arange(3)), np.zeros(3, np.int64))])
    if flushed:
        drafter.flush(1)
    plan = BlockPlan(1, 3, 4)
    after = int(prompt.positions.max()) + 1
    drafter.propose([DraftRequest(lane, 5, plan) for lane in range(2)])
    assert blocks(calls[-1], 0) == [10101 * (3 + i) for i in range(4)]
    assert blocks(calls[-1], 1) == [10101 * (after + i) for i in range(4)]
    read = np.concatenate([context_of(call, 1) for call in calls])
    np.testing.assert_array_equal(read, prompt.positions @ [1, 100, 10000])
    drafter.observe([Observation(1, states.take(np.arange(2)), np.zeros(2, np.int64))])
    drafter.propose([DraftRequest(1, 5, plan)])
    assert context_of(calls[-1], 1).tolist() == [10101 * after, 10101 * (after + 1)]
    assert blocks(calls[-1], 1) == [10101 * (after + 2 + i) for i in range(4)]


def blocks(call: Call, lane: int) -> list[int]:
    """The codes of the positions of a lane's block."""
    found: list[int] = call.rope_cos[lane - call.first_lane, :, 0].astype(int).tolist()
    return found


def context_of(call: Call, lane: int) -> np.ndarray:
    """Those of its context, without rows that fill up."""
    if not call.first_lane <= lane < call.first_lane + len(call.write_indices):
        return np.empty(0, int)
    cos, states = call.array("context_cos"), call.states("target_hidden")
    assert cos is not None
    assert states is not None
    own = lane - call.first_lane
    found: np.ndarray = cos[own, : len(states[own]), 0].astype(int)
    return found
