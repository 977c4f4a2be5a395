"""Measures what quantized weights cost: a finished engine, as it runs, beside the canonical graph
that it was built from, in float32, both on text that no calibration has seen.

Knows the text, and how distributions are compared. The graph is run by `backends.ort.layerwise`.
Drafts are not measured: they change no answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import SILENT, Listeners
from edgespec.backends.call import Floats, Ids
from edgespec.backends.divergence import Divergence, log_softmax
from edgespec.backends.engine_config import FLOAT32, EngineConfig
from edgespec.backends.onnx_dir import OnnxDir, open_onnx_dir
from edgespec.backends.registry import backend_of, open_runner
from edgespec.contract import Role
from edgespec.errors import LimitError
from edgespec.prompts.shipped_text import held_out_text
from edgespec.runtime.faults import as_error
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from edgespec.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
# Tokens that are compared: fewer of a large model, for which each takes long
MIN_TOKENS, MAX_TOKENS = 256, 1024
BUDGET = 2.5e11  # multiplications of a pass over them: seconds at 0.6B
MAX_WINDOW = 512
MIN_WINDOW = 8  # tokens; shorter ones say little
LAYER = 2  # pieces: attention and MLP. The first layer takes longer, by what first calls prepare
LONG_S = 20.0  # work of which it is said before how long it will take
CHUNK_BYTES = 1 << 27  # of logits that are made at a time
TALLY_ROWS = 32  # of them that are compared at a time


def measure_loss(
    onnx_dir: Path,
    engine_dir: Path,
    role: Role,
    *,
    progress: Listeners = SILENT,
) -> Divergence:
    """Compare the engine `role` of a directory with the export that it was built from, and keep the
    figures in its manifest. Work that will take long is announced by `progress.warn`, by what the
    second layer took.

    Raises LimitError for an engine or a vocabulary too small for the text, and what opening and
    running raise.
    """
    from edgespec.backends.ort.layerwise import LayerwiseGraph, causal_feeds

    onnx = open_onnx_dir(onnx_dir)
    config, _ = engines.open_engine(engine_dir, role)
    graph = LayerwiseGraph.open(onnx)
    most = int(min(max(BUDGET / graph.num_weights, MIN_TOKENS), MAX_TOKENS))
    windows = held_out_windows(Tokenizer.open(onnx.path), onnx, config, most)
    count, rows = windows.shape
    feeds = causal_feeds(onnx.config, count, rows, config.limits.max_kv_cache_capacity)
    x = EmbeddingTable(onnx.path / file_names.EMBEDDING, onnx.config).rows(windows)
    progress.start(2 * windows.size * (len(graph.pieces) + 1))
    began = time.monotonic()
    for number, piece in enumerate(graph.pieces):
        if number == LAYER:
            began = time.monotonic()
        x = piece.run(x, feeds)
        if number == 2 * LAYER - 1:
            second = sum(one.num_weights for one in graph.pieces[LAYER : 2 * LAYER])
            seconds = 2 * graph.num_weights / second * (time.monotonic() - began)
            if seconds > LONG_S:
                what = f"measuring what {config.weights.scheme} changes"
                progress.warn(f"{what}: about {seconds:.0f} s")
        progress.advance(windows.size)
    stream = graph.head.rows(x, feeds).reshape(count, rows, -1)
    tally = Tally()
    for window, low, logits in engine_logits(engine_dir, role, windows):
        high = low + len(logits)
        exported = graph.head.logits(np.ascontiguousarray(stream[window, low:high]))
        for first in range(0, len(logits), TALLY_ROWS):
            rows = slice(first, first + TALLY_ROWS)
            tally.add(exported[rows], logits[rows], windows[window, low + 1 : high + 1][rows])
        progress.advance(len(logits) * (len(graph.pieces) + 2))
    divergence = tally.divergence()
    if divergence.is_finite:  # a manifest has numbers alone
        engines.record_divergence(engine_dir, role, divergence)
    return divergence


def held_out_windows(tokenizer: Tokenizer, onnx: OnnxDir, config: EngineConfig, tokens: int) -> Ids:
    """Up to so many tokens of the text [windows, tokens], each window as a text of its own.
    LimitError where there is no window of use."""
    text = held_out_text()
    ids = tokenizer.encode(text)
    whole = tokenizer.encode(text, add_special_tokens=True)
    first = whole[: whole.index(ids[0])] if ids else []
    ids = [i for i in ids if i < onnx.config.vocab_size][:tokens]
    room = config.limits.max_kv_cache_capacity
    most = min(MAX_WINDOW, room, onnx.config.max_position or room) - len(first)
    rows = min(most, len(ids))
    if rows < MIN_WINDOW:
        message = f"there is room for {rows} tokens of text"
        raise LimitError(message, "Build with a larger `max_kv_cache_capacity`.")
    count = len(ids) // rows
    windows = np.array(ids[: count * rows], np.int64).reshape(count, rows)
    return np.concatenate([np.tile(np.array(first, np.int64), (count, 1)), windows], 1)


def engine_logits(engine_dir: Path, role: Role, windows: Ids) -> Iterator[tuple[int, int, Floats]]:
    """Yields the engine's logits [N, V] of parts of windows: the window, the number of the first
    token, and the logits; without those of the last token, which is followed by none."""
    runner, config = open_runner(engine_dir, role)
    try:
        table = runner.table or EmbeddingTable(engine_dir / file_names.EMBEDDING, config.component)
        decoder = CachedDecoder.of(runner, table, config.component)
        most = max(1, CHUNK_BYTES // (4 * config.component.vocab_size))
        step = min(decoder.prefill_chunk, runner.max_rows, most)
        for number, tokens in enumerate(windows):
            decoder.reset(0)
            decoder.reserve(0, len(tokens))
            made, begin = list[Floats](), 0
            for low in range(0, len(tokens) - 1, step):
                part = tokens[low : min(low + step, len(tokens) - 1)]
                (result,) = decoder.extend([decoder.causal(0, part, np.arange(len(part)))])
                made.append(result.logits.rows().copy())
                end = low + len(part)
                if end + step - begin > most or end == len(tokens) - 1:
                    yield number, begin, np.concatenate(made)
                    made, begin = [], end
    finally:
        runner.close()


@dataclass(slots=True)
class Tally:
    """What was found of each token: negative log-likelihoods, divergences, and whether the most
    likely one is the same."""

    exported: list[Floats] = field(default_factory=list)
    own: list[Floats] = field(default_factory=list)
    kl: list[NDArray[np.float64]] = field(default_factory=list)
    same: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, exported: Floats, own: Floats, following: Ids) -> None:
        """Logits [N, V] of both, and the tokens [N] that follow."""
        rows = np.arange(len(following))
        before, after = log_softmax(exported), log_softmax(own)
        self.exported.append(-before[rows, following])
        self.own.append(-after[rows, following])
        self.kl.append((np.exp(before) * (before - after)).sum(-1, dtype=np.float64))
        self.same.append(before.argmax(-1) == after.argmax(-1))

    def divergence(self) -> Divergence:
        """The means over all tokens."""
        kl = np.concatenate(self.kl)
        return Divergence(
            tokens=len(kl),
            perplexity=perplexity(self.own),
            exported_perplexity=perplexity(self.exported),
            kl=float(np.maximum(kl.mean(), 0.0)),  # NaN stays
            kl_error=float(kl.std() / np.sqrt(len(kl))),
            top1=float(np.concatenate(self.same).mean()),
        )


def perplexity(losses: list[Floats]) -> float:
    """exp of the mean negative log-likelihood of a token."""
    return float(np.exp(np.concatenate(losses).mean(dtype=np.float64)))


# ---- after a build


def after_build(
    onnx_dir: Path,
    engine_dir: Path,
    role: Role,
    *,
    measure: bool,
    unproven: str | None = None,
    progress: Listeners = SILENT,
) -> LossReport | None:
    """What the weights of a new engine cost; None where nothing is to be measured: of a draft, of
    float32, of an engine that cannot run here. It raises nothing: the engine is built."""
    if not measure or role is Role.DRAFT or unproven is not None:
        return None
    try:
        weights = engines.open_engine(engine_dir, role)[0].weights
        if weights.scheme == FLOAT32:
            return None
        began = time.monotonic()
        divergence = measure_loss(onnx_dir, engine_dir, role, progress=progress)
        better = backend_of(engine_dir, role).better_weights(weights)
    except Exception as raised:  # of whatever kind: the engine is as good as before
        logger.warning("what quantized weights change was not measured", exc_info=raised)
        why = as_error(raised).what
        return LossReport(None, f"what quantized weights change was not measured: {why}")
    seconds = time.monotonic() - began
    line = f"{divergence.text(weights.scheme)} ({divergence.tokens} tokens, {seconds:.1f} s)"
    return LossReport(divergence, line, tuple(divergence.warnings(weights.scheme, better)))


@dataclass(frozen=True, slots=True)
class LossReport:
    """What was measured of an engine, None where it failed, and what is said of it."""

    divergence: Divergence | None
    line: str
    warnings: tuple[str, ...] = ()
