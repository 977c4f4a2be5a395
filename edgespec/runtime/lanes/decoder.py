"""A decoder with memory: an engine, its embedding and rotary tables, and how much of each lane is
committed.

Knows lanes, slots and positions: a lane is the KV cache of one sequence; its committed slot i holds
position i, and behind the committed slots stand scratch rows that are kept or dropped.
Positions count tokens, and masks and windows go by them. Rope positions, by which rows are rotated,
are the same but for prompts with images and what follows them. Knows nothing of how tokens are
chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.base import Runner, Table
from edgespec.backends.call import (
    Attention,
    Call,
    Floats,
    HiddenStates,
    Ids,
    LaneAttention,
    Mask,
    Result,
    Value,
)
from edgespec.backends.host import stacked
from edgespec.contract import Kind, graph_inputs, image_widths
from edgespec.errors import LimitError
from edgespec.rope import RopeTable, rotations
from edgespec.runtime.lanes.base import Lane, LaneDecoder, adjacent
from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue, on_all_axes
from edgespec.vision.rows import widths_text

NO_ROWS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class DecoderRows:
    """One lane's part of a call: S tokens at their positions, into its next scratch rows.

    `visible` says which uncommitted rows, earlier scratch first, each token sees; committed rows
    are all seen, and a sliding window hides what is behind it of both. `gather` are the rows that
    go through the lm_head. Without `rope_positions` the positions are moved by the lane's offset.
    `images` replace embeddings of these tokens.
    """

    lane: int
    tokens: Ids  # [S]
    positions: Ids  # [S]
    visible: Mask  # [S, scratch + S]
    gather: Ids  # [G]
    base_hidden: HiddenStates | None = None  # drafts: exactly one of the two, of S rows
    draft_hidden: HiddenStates | None = None
    rope_positions: Ids | None = None  # [S], or [S, 3]: time, height, width
    images: Sequence[ImageSlots] = ()


@dataclass
class ScratchLane(Lane):
    """`scratch` are the positions of the uncommitted rows behind the committed ones, slot by
    slot."""

    scratch: Ids = field(default_factory=lambda: NO_ROWS)

    @property
    def end(self) -> int:
        """The next slot to be written."""
        return self.length + len(self.scratch)


class CachedDecoder(LaneDecoder[ScratchLane]):
    """As many sequences in one engine as it has lanes.

    `sliding_window` is that of the layers that have one: all of them, or where the engine has a
    second mask, those that read it. `local_rope` is the second rotary table, where there is one.

    A call has `min_rows` rows at least: kernels for one row alone round otherwise than those for
    many.
    """

    def __init__(
        self,
        runner: Runner,
        embedding: Table,
        rope: RopeTable,
        sliding_window: int | None = None,
        min_rows: int = 1,
        local_rope: RopeTable | None = None,
    ) -> None:
        super().__init__(runner, embedding, rope, ScratchLane)
        self.min_rows, shape = min_rows, runner.contract.shape
        self.ropes = [table for table in (rope, local_rope) if table is not None]
        self.inputs = graph_inputs(shape)
        windows = (None, sliding_window) if shape.sliding else (sliding_window,)
        names = (row.name for row in graph_inputs(shape, Kind.MASK))
        self.windows = dict(zip(names, windows, strict=True))

    @classmethod
    def of(
        cls, runner: Runner, embedding: Table, config: ComponentConfig, min_rows: int = 1
    ) -> CachedDecoder:
        """The decoder of an open engine, by what its config says of positions."""
        local = config.local_rope
        assert config.rope is not None
        return cls(
            runner,
            embedding,
            RopeTable.of(config.rope, runner.capacity),
            config.sliding_window,
            min_rows,
            local_rope=RopeTable.of(local, runner.capacity) if local else None,
        )

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state, which holds all that is committed."""
        return self.runner.contract.shape.recurrent is not None

    @property
    def croppable(self) -> bool:
        """Whether what a lane holds can be cut to a shorter prefix: rows can, a recurrent state
        cannot."""
        return not self.recurrent

    def run(self, parts: Sequence[DecoderRows]) -> list[Result]:
        """One call over the lanes of `parts`, whose rows become scratch.

        Lanes with fewer rows than others are filled up, and lanes between them that take no part
        run one row: what that writes lies behind their scratch rows and is not visible.
        """
        assert all(len(part.tokens) <= self.room(part.lane) for part in parts)
        whole = adjacent(parts, lambda lane: self.idle(lane, like=parts[0]))
        first = whole[0].lane
        call = self.call(whole, first)
        results = self.runner.run(call)
        for part in parts:
            here, state = call.attention.lanes[part.lane - first], self.lanes[part.lane]
            state.scratch = here.positions
            if part.rope_positions is not None:  # of a prompt: the last one is the largest
                state.offset = int(part.rope_positions[-1].max() - part.positions[-1])
        return [results[part.lane - first] for part in parts]

    def call(self, parts: Sequence[DecoderRows], first_lane: int) -> Call:
        """The parts of adjacent lanes as one call, filled up to the longest."""
        positions = stacked(self.rope_positions(parts), self.min_rows)
        attended = [self.attended(part) for part in parts]
        values: dict[str, Value] = {
            **self.embedded(parts),
            **rotations(self.inputs, self.ropes, {"S": positions}),
            **{name: Attention(attended, window) for name, window in self.windows.items()},
            **of_lanes("base_hidden", [part.base_hidden for part in parts]),
            **of_lanes("draft_hidden", [part.draft_hidden for part in parts]),
        }
        starts = np.array([self.lanes[part.lane].end for part in parts], np.int64)
        return Call.of(values, starts, [part.gather for part in parts], first_lane)

    def embedded(self, parts: Sequence[DecoderRows]) -> dict[str, Floats]:
        """The embeddings [B, S, H], in their places rows of images, and by input what the graph
        reads of images beside these."""
        embeds = self.embedding.rows(stacked([part.tokens for part in parts], self.min_rows))
        feeds = {"inputs_embeds": embeds}
        if not any(part.images for part in parts):
            return feeds
        for name, width in image_widths(self.runner.contract.shape).items():
            feeds[name] = np.zeros((*embeds.shape[:2], width), np.float32)
        for lane, part in enumerate(parts):
            for image in part.images:
                embeds[lane, image.start : image.end] = image.rows.embeds
                for name in feeds.keys() & image.rows.extras.keys():
                    feeds[name][lane, image.start : image.end] = image.rows.extras[name]
        return feeds

    def check_images(self, prompt: PromptValue) -> None:
        """Raises LimitError where rows of a prompt's images are not as wide as this engine's."""
        shape = self.runner.contract.shape
        wanted = {"inputs_embeds": shape.hidden_size} | image_widths(shape)
        for image in prompt.images:
            own = {"inputs_embeds": image.rows.embeds.shape[1]} | image.rows.widths
            if own != wanted:
                message = f"rows of an image have {widths_text(own)}"
                message += f", the base reads {widths_text(wanted)}"
                raise LimitError(message, "Build base and image encoder from one checkpoint.")

    def rope_positions(self, parts: Sequence[DecoderRows]) -> list[Ids]:
        """The rope positions of each part: all with one axis [S], or all with three [S, 3]."""
        positions, axes = list[Ids](), 1
        for part in parts:
            own = part.rope_positions
            if own is None:
                offset = self.lanes[part.lane].offset
                own = part.positions + offset if offset else part.positions
            axes = max(axes, own.ndim)
            positions.append(own)
        return positions if axes == 1 else [on_all_axes(own) for own in positions]

    def attended(self, part: DecoderRows) -> LaneAttention:
        """What a lane's rows see: all that is committed, and of the rest what they say. Recurrent
        layers continue what is committed."""
        state = self.lanes[part.lane]
        assert not (self.recurrent and len(state.scratch))
        positions = part.positions
        if len(state.scratch):
            positions = np.concatenate([state.scratch, positions])
        return LaneAttention(state.length, part.visible, positions)

    def idle(self, lane: int, like: DecoderRows) -> DecoderRows:
        """One padding row for a lane that takes no part in a call."""
        none = np.zeros(1, np.int64)
        visible = np.zeros((1, len(self.lanes[lane].scratch) + 1), bool)
        visible[0, -1] = True
        base, own = (
            None if states is None else states.take(NO_ROWS)
            for states in (like.base_hidden, like.draft_hidden)
        )
        return DecoderRows(lane, none, none, visible, none, base, own, rope_positions=none)

    def causal(
        self,
        lane: int,
        tokens: Ids,
        gather: Ids,
        base_hidden: HiddenStates | None = None,
        rope_positions: Ids | None = None,
        images: Sequence[ImageSlots] = (),
    ) -> DecoderRows:
        """Tokens [S] behind the committed ones in a row; the lane must have no scratch rows.
        `rope_positions` [S, 3] and `images` are those of a prompt that has images."""
        order = np.arange(len(tokens))
        return DecoderRows(
            lane,
            tokens,
            self.lanes[lane].length + order,
            order[:, None] >= order,
            gather,
            base_hidden,
            rope_positions=rope_positions,
            images=images,
        )

    def extend(self, parts: Sequence[DecoderRows]) -> list[Result]:
        """Run `causal` parts and commit all their rows."""
        results = self.run(parts)
        for part in parts:
            self.commit(part.lane, np.arange(len(part.tokens)))
        return results

    def read(self, lane: int, tokens: Sequence[int] | Ids) -> Result:
        """Commit tokens, or a prompt with its images, in calls of a bounded size; the result is
        that of the last token."""
        prompt = PromptValue.of(tokens)
        for start in range(0, len(prompt), self.prefill_chunk):
            end = min(start + self.prefill_chunk, len(prompt))
            (result,) = self.extend([self.part(lane, prompt, start, end)])
        return result

    def part(
        self, lane: int, prompt: PromptValue, start: int, end: int, *, all_logits: bool = False
    ) -> DecoderRows:
        """Slots `start` to `end` of a prompt, of which a lane has those before; the last of them
        goes through the lm_head, or with `all_logits` all, at most the runner's `max_rows`."""
        return self.causal(
            lane,
            np.array(prompt[start:end], np.int64),
            np.arange(0 if all_logits else end - start - 1, end - start),
            rope_positions=prompt.positions_of(start, end),
            images=prompt.images_of(start, end),
        )

    def commit(self, lane: int, path: Ids) -> None:
        """Keep the scratch rows `path` (ascending, counted from the first scratch row) and drop the
        others."""
        state = self.lanes[lane]
        self.runner.keep_rows(lane, state.length + path, state.length)
        state.length += len(path)
        self.drop_scratch(lane)

    def drop_scratch(self, lane: int) -> None:
        """Forget the uncommitted rows of a lane; the next call overwrites them."""
        self.lanes[lane].scratch = NO_ROWS


def of_lanes(name: str, states: Sequence[HiddenStates | None]) -> dict[str, list[HiddenStates]]:
    """The lanes' hidden states by their input; nothing where no lane has any."""
    given = [lane for lane in states if lane is not None]
    assert len(given) in (0, len(states))
    return {name: given} if given else {}
