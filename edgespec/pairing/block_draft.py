"""Pairs with a block draft: their checks, and the draft under teacher forcing, block by block.

Knows what all of them share; each method's row has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import read_json
from edgespec.config import DraftConfig
from edgespec.contract import INPUTS, MAX_BLOCK_NODES, Kind, Limits, inputs_named
from edgespec.methods import METHODS
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.pairing import tokens
from edgespec.pairing.acceptance_warnings import draft_quantization, schemes_of
from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.common import common_checks
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import listed
from edgespec.pairing.row import Force, PairingRow
from edgespec.rope import RopeTable, rotations

if TYPE_CHECKING:
    from edgespec.export.stepwise import Correct, Feeds
    from edgespec.graphs.assembly import DecoderGraph
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Array, EmbeddingRows, Ids
    from edgespec.pairing.probe_text import ProbeText
    from edgespec.pairing.readings import Reading

BLOCK_POSITIONS = 64  # at which a block is drafted: each costs as many rows as the block is long
BLOCK_ROWS = 256  # a pass
FIRST_BLOCK = 8  # tokens before the first block
FC = ("fc", "context_proj")


def stated_layers(config: DraftConfig) -> tuple[int, ...] | None:
    """The aux layers in the numbering of the draft's file: layer outputs, but in speculators."""
    ids = config.aux_layer_ids
    if ids is None or config.layout == "speculators":
        return ids
    return tuple(i - 1 for i in ids)


def quantization(pair: Pair) -> Iterator[CheckResult]:
    """Yields refused for a quantized fc, whose inputs have outliers; else what quantizing the draft
    costs."""
    draft, _ = pair.drafted()
    linears = {module for modules in schemes_of(draft).values() for module in modules}
    if any(module.removeprefix("model.") in FC for module in linears):
        message = (
            "the draft's fc is quantized, and its inputs have outliers that no low-bit format holds"
        )
        remedy = "Quantize the draft again without fc."
        yield CheckResult("refused", "quantization", message, remedy)
        return
    yield from draft_quantization(pair)


def block(pair: Pair) -> Iterator[CheckResult]:
    """Whether engines verify as much as a pass drafts."""
    _, config = pair.drafted()
    assert isinstance(config, BlockDraftConfig)
    size, limit = config.num_drafts + 1, Limits().max_verify_tree_size
    message = f"{config.block_size} tokens, of which one pass drafts {config.num_drafts}"
    if size > limit:
        wanted = min(size, MAX_BLOCK_NODES)
        remedy = (
            f"Build with `max_verify_tree_size` {wanted}, or draft less with `spec_verify_size`."
        )
        beyond = f", and at most {MAX_BLOCK_NODES}" if size > wanted else ""
        message = f"{message}; engines verify {limit} by default{beyond}"
        yield CheckResult("warning", "block", message, remedy)
        return
    yield CheckResult(
        "ok", "block", f"{message}; `spec_verify_size` is at most {size}, fewer are drafted as well"
    )


def thinking(pair: Pair) -> Iterator[CheckResult]:
    """Drafts are trained on the answers of one mode; in the other few tokens are accepted."""
    wanted = METHODS[pair.method].thinking.get(pair.model.architecture)
    if wanted is None:
        yield CheckResult(
            "ok", "thinking", "it is not known in which mode drafts of this family were trained"
        )
        return
    family = "Qwen3.5" if wanted else "Qwen3"
    if not wanted:
        message = (
            f"drafts for {family} were trained without thinking, which is the default of a request"
        )
        yield CheckResult(
            "ok", "thinking", f'{message}; "enable_thinking": true costs most of the acceptance'
        )
    elif _has_thinking_switch(pair.base):
        message = (
            f"drafts for {family} were trained with thinking; without it few tokens are accepted"
        )
        yield CheckResult(
            "warning", "thinking", message, 'Set "enable_thinking": true in the requests.'
        )
    else:
        message = (
            f"drafts for {family} were trained with thinking, and the base's chat template has no"
            " such switch"
        )
        yield CheckResult(
            "warning", "thinking", message, "Use the chat template of the original download."
        )


def _has_thinking_switch(base: Checkpoint) -> bool:
    """Whether the chat template asks for enable_thinking."""
    path = base.path / "chat_template.jinja"
    if path.is_file():
        return "enable_thinking" in path.read_text(encoding="utf-8", errors="replace")
    settings = base.path / "tokenizer_config.json"
    return settings.is_file() and "enable_thinking" in str(read_json(settings).get("chat_template"))


def remedy(better: Share) -> str:
    """The draft's own config.json decides its aux layers."""
    layers = listed(better.aux_layers, ",")
    return f"Correct the layers in the draft's config.json: they are hidden_states {layers}."


# Teacher forcing


def force(pair: Pair, base: Decoder, text: ProbeText) -> BlockForcing:
    """The draft over a text, a block at each of some positions."""
    from edgespec.pairing.forcing import EmbeddingRows, embedding_of, open_pair

    _, config = pair.drafted()
    assert isinstance(config, BlockDraftConfig)
    graph, ids = open_pair(pair, base)
    rows = EmbeddingRows.read(embedding_of(graph, base), [*text.tokens, config.mask_token_id])
    return BlockForcing(graph, ids, config, text, rows)


@dataclass(frozen=True)
class BlockForcing:
    """At each position a block behind the context up to it, several blocks side by side in
    a pass."""

    graph: DecoderGraph
    ids: Ids
    config: BlockDraftConfig
    text: ProbeText
    rows: EmbeddingRows
    correct: Correct | None = None

    def positions(self) -> Ids:
        """Up to BLOCK_POSITIONS, evenly spread."""
        first, last = min(FIRST_BLOCK, len(self.text) // 2), len(self.text) - 1
        return np.unique(np.linspace(first, last, BLOCK_POSITIONS).astype(np.int64))

    def passes(self, hidden_states: Array, reading: Reading) -> list[Feeds]:
        """Passes over blocks behind the hidden states [T, k*H]."""
        del reading
        return [self.side_by_side(hidden_states, part) for part in self.positions_by_pass()]

    def positions_by_pass(self) -> list[Ids]:
        """The positions, as many at a time as a pass has blocks for."""
        positions, count = self.positions(), max(1, BLOCK_ROWS // self.config.block_size)
        return [positions[i : i + count] for i in range(0, len(positions), count)]

    def side_by_side(self, hidden_states: Array, positions: Ids) -> Feeds:
        """One pass: a block behind each of the positions."""
        size, context = self.config.block_size, int(positions[-1])
        tokens = np.full((len(positions), size), self.config.mask_token_id)
        tokens[:, 0] = self.text.tokens[positions]
        places = (positions[:, None] + np.arange(size)).ravel()
        table = RopeTable.of(self.config.decoder.rope, context + size)
        rope_positions = {
            "S": self.rope_positions(positions)[None],
            "L": self.text.positions[None, :context],
        }
        masks = zip(inputs_named(Kind.MASK), self.mask_specs(), strict=False)
        return {
            "inputs_embeds": self.rows.of(tokens.ravel())[None],
            **rotations(INPUTS.values(), [table], rope_positions),
            **{name: self.mask(positions, places, *spec) for name, spec in masks},
            "write_indices": np.zeros(1, np.int64),
            "gather_idx": (np.arange(len(positions)) * size + self.config.first_slot)[None],
            "target_hidden": hidden_states[None, :context],
        }

    def rope_positions(self, positions: Ids) -> Ids:
        """[S] or [S, 3], those of blocks behind some positions: text goes on there."""
        first, order = self.text.positions[positions], np.arange(self.config.block_size)
        if first.ndim == 1:
            return (first[:, None] + order).ravel()
        return (first[:, None] + order[:, None]).reshape(-1, first.shape[-1])

    def mask_specs(self) -> list[tuple[int | None, bool]]:
        """What rows see in each kind of layer: those without a window first, as the graph names its
        masks."""
        kinds = set(zip(self.config.windows, self.config.causal, strict=True))
        return sorted(kinds, key=lambda kind: kind[0] is not None)

    def mask(
        self, positions: Ids, places: Ids, window: int | None, causal: bool
    ) -> NDArray[np.bool_]:
        """[1, 1, S, L + S]: the context before the own block, and of the blocks the own one."""
        size = self.config.block_size
        starts, context = np.repeat(positions, size)[:, None], np.arange(positions[-1])
        before = context < starts
        if window is not None:
            before &= places[:, None] - context < window
        block, row = np.divmod(np.arange(len(places)), size)
        own = block[:, None] == block
        if causal:
            own &= row[:, None] >= row
        return np.concatenate([before, own], 1)[None, None]


def pairing_row(force: Force = force) -> PairingRow:
    """The row of a method of block drafts."""
    return PairingRow(
        checks=(
            *common_checks(stated_layers, quantization),
            ("block", block),
            ("mask token", tokens.mask_token),
            ("thinking", thinking),
        ),
        force=force,
        remedy=remedy,
    )
