"""The lossless check: where a run with drafts left the plain one, and whether rounding explains
it.

Knows two responses to one request, and the base that made them. Kernels for one row and for many
round differently, so that two candidates that are close may change places. How much they do is
measured at the very position: the tokens before it are computed again in calls of one row, in calls
of as many rows as the speculative run verified, in the places that they had there, and where this
does not explain it in calls of other sizes, as rounding comes and goes by chance. In all of them a
token sees just the text before it: no tree, accept rule or drafter takes part, so that a fault of
those explains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import LimitError
from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.loop.generation import Response, end_ids
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.sampling.sampler import Sampler, largest
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
NUM_CANDIDATES = 32  # most probable tokens whose distances are compared
OTHER_SIZES = (2, 3, 5, 7)  # rows of a call
REGROUPED = 64  # tokens before a position that are computed in calls of other sizes
MARGINS = 2.0  # a long text may round further than the short prompt on which build measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which a speculative run left the plain one; None where a run had ended.

    Distances are in nats of the engine's logits. `apart` is how far the two candidates are from
    each other in calls of one row, with the noise of a sampled request; infinite where a run had
    ended. `rounding` is by how much calls of one row and of many change such a distance there.
    `bound` is what the engine's kernels may do at most: rounding beyond it is a fault.
    """

    index: int
    plain: int | None
    speculative: int | None
    apart: float
    rounding: float
    bound: float
    texts: tuple[str, str] = ("", "")  # of the two tokens
    reproduced: bool = False  # one row chose the one token, and many rows the other

    @property
    def explained(self) -> bool:
        """Whether the rounding of kernels explains it, by what was measured."""
        return self.is_near and self.rounding <= self.bound

    @property
    def is_near(self) -> bool:
        """Whether the candidates are closer than other calls move them."""
        return self.reproduced or self.apart <= self.rounding

    def to_dict(self) -> dict[str, Any]:
        """What output.json and the summary say of it; distances in nats, None where a run had
        ended."""
        ended = self.apart == float("inf")
        return {
            "explained": self.explained,
            "token_index": self.index,
            "plain_token": self.plain,
            "speculative_token": self.speculative,
            "candidates_apart_nats": None if ended else self.apart,
            "rounding_nats": None if ended else self.rounding,
            "rounding_bound_nats": None if ended else self.bound,
            "reproduced": self.reproduced,
        }

    @property
    def words(self) -> str:
        """The difference in one line, with its figures."""
        if self.plain is None or self.speculative is None:
            ended = "plain decoding" if self.plain is None else "the speculative run"
            return f"{ended} ended after {self.index} tokens, the other went on: NOT explained"
        words = (
            f"differs at token {self.index} ({self.texts[0]} / {self.texts[1]}), candidates"
            f" {self.apart:.2g} nats apart; one row and many rows differ by {self.rounding:.2g}"
            " there"
        )
        if self.explained:
            return f"{words}: explained"
        beyond = f", beyond the {self.bound:.2g} of this engine" * (self.rounding > self.bound)
        return f"{words}{beyond}: NOT explained"


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """One call of a replay: so many rows, in which the next tokens stand at `path`, ascending; the
    first `kept` of them are committed. `verifies`: all rows go through lm_head."""

    rows: int
    kept: int
    path: Sequence[int]
    verifies: bool = False

    @classmethod
    def reading(cls, rows: int) -> CheckedCall:
        """One that commits all of its rows."""
        return cls(rows, rows, range(rows))


def first_difference(
    engine: Engine,
    plain: Response,
    speculative: Response,
    sampling: SamplingParams,
    batch_size: int = 1,
) -> Difference | None:
    """Where two runs of a request part, with what was measured there; None if they are equal.

    `batch_size` is how many sequences ran at a time. Raises LimitError where a lane of the engine
    is taken.
    """
    pairs = zip_longest(plain.token_ids, speculative.token_ids)
    index, a, b = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), (None, None, None))
    if index is None:
        return None
    if a is None or b is None:
        return Difference(
            index=index, plain=a, speculative=b, apart=float("inf"), rounding=0.0, bound=0.0
        )
    ends = end_ids(sampling, engine.stop_ids)
    guide = engine.guide(sampling, speculative.prompt_ids) if sampling.guided else None
    seeded = replace(sampling, seed=plain.seed)
    sampler = Sampler.of(seeded, len(plain.prompt_ids), ends, guide)
    with engine.driver.paused():  # the lanes are needed
        # Of engines for several capacities the one that answered
        engine.base.reserve(0, len(speculative.prompt_ids) + sampling.max_generate_length)
        return measured(engine, Replay.of(engine, speculative, index, batch_size), sampler, a, b)


def measured(engine: Engine, replay: Replay, sampler: Sampler, a: int, b: int) -> Difference:
    """The difference at a replay's position, where plain decoding chose `a` and the speculative run
    `b`."""
    before, many = replay.before, replay.logits()
    one = next(many)
    difference = Difference(
        index=replay.num_read,
        plain=a,
        speculative=b,
        apart=sampler.margin(one, before, a, b),
        rounding=0.0,
        bound=bound_of(engine, one),
        texts=(spelt(engine.tokenizer, a), spelt(engine.tokenizer, b)),
    )
    for other in many:
        rounding = max(difference.rounding, changed_distance(one, other, (a, b)))
        reproduced = sampler.pick(one, before) == a and sampler.pick(other, before) == b
        difference = replace(difference, rounding=rounding, reproduced=reproduced)
        if difference.is_near:
            break
    return difference


def changed_distance(one: Floats, other: Floats, tokens: Sequence[int]) -> float:
    """The most by which two rows of logits [V] differ in the distance of two candidates: of the
    most probable ones and `tokens`."""
    likely = largest(one.astype(np.float64), min(NUM_CANDIDATES, len(one)))
    candidates = [*likely, *tokens]
    change = other[candidates].astype(np.float64) - one[candidates]
    return float(change.max() - change.min())


def bound_of(engine: Engine, logits: Floats) -> float:
    """How far the engine's kernels may round apart, in nats, by what build measured, or for float32
    by its backend's tolerance; 0 for an exact engine, and one that was proven bitwise."""
    if engine.exact or engine.config.weights.is_bitwise:
        return 0.0
    return max(MARGINS * engine.rounding, engine.tolerance * float(np.abs(logits).max()))


def spelt(tokenizer: Tokenizer, token: int) -> str:
    """A token's text in quotes, in one line."""
    text = tokenizer.token_bytes(token).decode("utf-8", "replace")
    return json.dumps(text, ensure_ascii=False)


# ---- the same tokens in other calls


@dataclass(frozen=True)
class Replay:
    """The tokens before a position, computed again in calls of one row and of many.

    `tokens` are the prompt's and those of the speculative run; those from the position on only
    fill calls up.
    """

    decoder: CachedDecoder
    tokens: PromptValue
    num_prompt: int
    num_read: int  # of the answer, before the position
    metrics: RequestMetrics  # of the speculative run: its steps
    num_lanes: int

    @classmethod
    def of(cls, engine: Engine, speculative: Response, index: int, batch_size: int) -> Replay:
        """That of a speculative response up to its token `index`. Raises LimitError where a lane
        is taken."""
        lanes = engine.base.lanes
        if engine.session.num_free_lanes < len(lanes):
            raise LimitError("a lane of the engine is taken", "Finish all streams first.")
        prompt = PromptValue.of(speculative.prompt_ids)
        return cls(
            engine.base,
            prompt.then(speculative.token_ids),
            len(prompt),
            index,
            speculative.metrics,
            min(batch_size, len(lanes)),
        )

    @property
    def before(self) -> list[int]:
        """All tokens before the position."""
        return [*self.tokens[: self.num_prompt + self.num_read]]

    def logits(self) -> Iterator[Floats]:
        """[V] each, at the position: first with one row a call; then with as many as were
        verified, both again in as many lanes as ran at a time, and last in calls of other sizes."""
        for num_lanes in sorted({1, self.num_lanes}):
            yield self.computed(self.chunks(self.num_prompt), self.one_by_one(), num_lanes)
            yield self.computed(self.reread_prompt(), self.as_verified(), num_lanes)
        count = self.num_prompt + self.num_read
        head = max(0, count - REGROUPED)
        for size in OTHER_SIZES:
            yield self.computed(self.chunks(head), grouped(count - head, size), 1)

    def one_by_one(self) -> list[CheckedCall]:
        """The generated tokens as plain decoding reads them."""
        return [CheckedCall.reading(1)] * self.num_read

    def as_verified(self) -> list[CheckedCall]:
        """The generated tokens in calls of the sizes in which the speculative run verified them, in
        the places of its accepted nodes: attention sums its rows in their order."""
        calls, left = list[CheckedCall](), self.num_read
        steps = zip(self.metrics.per_step_path, self.metrics.per_step_drafted, strict=True)
        for path, drafted in steps:
            if left <= 0:
                break
            calls.append(CheckedCall(drafted + 1, min(len(path), left), path, verifies=True))
            left -= len(path)
        return calls + [CheckedCall.reading(1)] * left

    def reread_prompt(self) -> list[CheckedCall]:
        """The prompt, with what the prefix cache had of it in calls as large as the largest
        verification: its rows may come from an earlier answer."""
        reused, most = self.metrics.reused_tokens, 1 + max(self.metrics.per_step_drafted, default=0)
        return grouped(reused, most) + self.chunks(self.num_prompt - reused)

    def chunks(self, count: int) -> list[CheckedCall]:
        """So many tokens in calls as a prompt is read."""
        return grouped(count, self.decoder.prefill_chunk)

    def computed(
        self, first: Sequence[CheckedCall], then: Sequence[CheckedCall], num_lanes: int
    ) -> Floats:
        """[V], the logits at the position. The first calls are those of one lane; then `num_lanes`
        of them go on alike."""
        lanes = range(num_lanes)
        try:
            for lane in lanes:
                self.decoder.reset(lane)
            logits = self.through(first, lanes[:1])
            for lane in lanes[1:]:
                self.decoder.restore(lane, self.decoder.snapshot(0, self.num_prompt))
            return self.through(then, lanes) if then else logits
        finally:
            for lane in lanes:
                self.decoder.reset(lane)

    def through(self, calls: Sequence[CheckedCall], lanes: Sequence[int]) -> Floats:
        """[V], the logits behind the last token that these calls commit in each of `lanes`; empty
        without a call."""
        row = np.empty(0, np.float32)
        for number, call in enumerate(calls, start=1):
            is_last = number == len(calls)
            parts = [self.rows(lane, call, is_last=is_last) for lane in lanes]
            logits = self.decoder.run(parts)[0].logits
            if is_last:
                row = logits.row(call.path[call.kept - 1] if call.verifies else 0).copy()
            for lane in lanes:
                self.decoder.commit(lane, np.array(call.path[: call.kept], np.int64))
        return row

    def rows(self, lane: int, call: CheckedCall, *, is_last: bool) -> DecoderRows:
        """The rows of a call behind those committed in a lane. Each token sees those before it;
        rows off the path see themselves alone, and no token sees them."""
        start, path = self.decoder.lanes[lane].length, np.array(call.path, np.int64)
        path = path[: len(self.tokens) - start]
        end = start + len(path)
        tokens = np.full(call.rows, self.tokens[-1], np.int64)
        positions = np.full(call.rows, start, np.int64)
        visible = np.eye(call.rows, dtype=bool)
        tokens[path] = self.tokens[start:end]
        positions[path] += np.arange(len(path))
        visible[np.ix_(path, path)] = np.tri(len(path), dtype=bool)
        heads = np.arange(call.rows) if call.verifies and is_last else path[call.kept - 1 :][:1]
        rope_positions, own = None, self.tokens.positions_of(start, end)
        if own is not None:
            rope_positions = np.zeros((call.rows, own.shape[1]), np.int64)
            rope_positions[path] = own
        return DecoderRows(
            lane,
            tokens,
            positions,
            visible,
            heads,
            rope_positions=rope_positions,
            images=self.tokens.images_of(start, end),  # a prompt's path is all rows
        )


def grouped(count: int, size: int) -> list[CheckedCall]:
    """So many tokens in calls of a size, the last one of what is left."""
    sizes = [min(size, count - start) for start in range(0, count, size)]
    return [CheckedCall.reading(rows) for rows in sizes]
