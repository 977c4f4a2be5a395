"""The loop: draft, verify, commit, for all running sequences at once.

Knows sequences: each is n committed tokens and exactly one pending token, which the base has drawn
and not yet read, in a lane of its own. A step is one base pass for all of them; to each it gives
its accepted drafts and one token more. Knows nothing of text, files or what kind of drafter it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.contract import RECURRENT_CHUNK
from edgespec.errors import EdgeSpecError, LimitError
from edgespec.prompts import END_OF_SEQUENCE, ERROR, MAX_LENGTH
from edgespec.runtime import stages
from edgespec.runtime.decoder import PREFILL_CHUNK, CachedDecoder, LaneResult, Rows
from edgespec.runtime.drafters.base import Drafter, DraftRequest, Observation
from edgespec.runtime.prefix import Prefix, PrefixCache
from edgespec.runtime.sampling import Sampler, top_log_probs
from edgespec.runtime.stages import StageLog, StageTimes
from edgespec.runtime.tree import DraftPlan, DraftTree
from edgespec.runtime.verify import AcceptResult, walk

Candidates = list[tuple[int, float]]  # ids with their log-probabilities, descending


def watch_nothing(token: int) -> str | None:
    return None


@dataclass(frozen=True)
class Task:
    """What one sequence is to do: continue `prompt` until an id of `stop_ids`, or until `max_new`
    tokens.

    `watch` is told each emitted token once, in order, and may end the sequence there with a finish
    reason. The KV rows of the prompt's first `keep` tokens are kept for later prompts; with
    `keep_all` those of all tokens at the end.
    """

    prompt: Sequence[int]
    sampler: Sampler
    max_new: int
    stop_ids: frozenset[int] = frozenset()
    plan: DraftPlan | None = None
    watch: Callable[[int], str | None] = watch_nothing
    num_logprobs: int = 0
    keep: int = 0
    keep_all: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave a sequence. `drafted` counts nodes beside the root; prefill is the step
    with `verified` False.

    `logprobs` are the most probable tokens where each one was drawn, by the model's own logits at
    temperature 1.
    """

    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    verified: bool = True
    finish_reason: str | None = None
    logprobs: list[Candidates] = field(default_factory=list)
    error: EdgeSpecError | None = None


@dataclass(eq=False)
class Running:
    """A sequence on its way. `tokens` are the prompt's and all emitted ones, the pending one
    last."""

    task: Task
    lane: int
    tokens: list[int]
    slot: int = 0  # the lane that it began in
    reused: int = 0  # tokens of the prompt whose rows were there already
    feature: NDArray[np.float32] | None = (
        None  # of the last committed position, where a state is to be kept with it
    )
    times: StageTimes = field(default_factory=StageTimes)  # of the passes that it took part in

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.task.prompt)

    @property
    def pending(self) -> int:
        return self.tokens[-1]


class Session:
    """The sequences of one base, with a drafter or without. Those running fill the first lanes
    without a gap."""

    def __init__(
        self,
        base: CachedDecoder,
        drafter: Drafter | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.base, self.drafter = base, drafter
        self.prefixes = prefixes or PrefixCache(0)
        self.running: list[Running] = []
        self.log = StageLog(self.engine_s)
        self.epoch = 0  # counts the runs begun: lanes remember one run at a time

    def restart(self) -> int:
        """Forget all sequences; returns the new epoch, by which a run can tell that it is not the
        last one begun."""
        self.running, self.log = [], StageLog(self.engine_s)
        self.epoch += 1
        return self.epoch

    def begin(self, task: Task) -> tuple[Running, Step]:
        """Commit the prompt in a free lane and draw the first token. LimitError if it does not
        fit."""
        self.check(task)
        lane = len(self.running)
        one = Running(task, lane, [*task.prompt], lane)
        self.base.reset(one.lane)
        if self.drafter is not None:
            self.drafter.reset(one.lane)
        self.reuse(one)
        try:
            step = self.ended(one, self.prefill(one))
        except EdgeSpecError:
            self.base.zero(one.lane)
            raise
        if task.keep and not self.base.recurrent:
            self.remember(one, task.keep)
        self.running.append(one)
        self.leave([(one, step)])
        return one, step

    def check(self, task: Task) -> None:
        assert len(self.running) < len(self.base.lanes)
        if not task.prompt:
            raise LimitError("the prompt is empty", "Give at least one token.")
        if len(task.prompt) > self.base.capacity:
            what = (
                f"the prompt has {len(task.prompt)} tokens, the engine's KV cache holds"
                f" {self.base.capacity}"
            )
            raise LimitError(
                what, "Shorten the prompt, or build with a larger --max-kv-cache-capacity."
            )

    def step(self) -> list[tuple[Running, Step]]:
        """One step of all running sequences; those that it ends leave their lanes."""
        spent = StageTimes()
        trees = self.draft(spent)
        verified = self.verify(trees, spent)
        steps = [
            (one, self.ended(one, step))
            for one, (step, _) in zip(self.running, verified, strict=True)
        ]
        going = [
            Observation(one.lane, features, np.array(step.tokens, np.int64))
            for (one, step), (_, features) in zip(steps, verified, strict=True)
            if features is not None
            and (step.finish_reason is None or self.is_kept_whole(one, step, features))
        ]
        self.replay(going, spent)
        for one in self.running:
            one.times += spent
        self.leave(steps)
        return steps

    # ---- prefill

    def prefill(self, one: Running) -> Step:
        """Commit what of the prompt is not there yet, in chunks, and draw the first token.

        The drafter pairs each feature with the token after it, so the last feature of a chunk goes
        with the next chunk's first token, and the last one of all with the token drawn.
        """
        prompt = np.array(one.task.prompt, np.int64)
        step = Step([], verified=False)
        for start, end in self.chunks(one):
            chunk = prompt[start:end]
            with self.log.timed(stages.PREFILL, one.times):
                rows = self.base.causal(one.lane, chunk, np.array([len(chunk) - 1]))
                (result,) = self.base.extend([rows])
                following = prompt[start + 1 : end + 1]
                if end == len(prompt):
                    first = one.task.sampler.pick(result.logits[0], one.tokens)
                    step = Step(
                        [first], verified=False, logprobs=self.logprobs(one, result, [0], [first])
                    )
                    following = np.append(following, first)
            if drafter := self.drafter_of(one):
                assert result.hidden_states is not None
                with self.log.timed(stages.DRAFT_PREFILL, one.times):
                    drafter.observe([Observation(one.lane, result.hidden_states, following)])
                    self.keep_feature(one, result.hidden_states[-1])
            if end == one.task.keep and self.base.recurrent:
                self.remember(one, end)
        return step

    def chunks(self, one: Running) -> Iterator[tuple[int, int]]:
        """Where each call over the prompt begins and ends. A state can be kept only as it is at the
        end of a call."""
        size = min(PREFILL_CHUNK, RECURRENT_CHUNK) if self.base.recurrent else PREFILL_CHUNK
        start, total = one.reused, len(one.task.prompt)
        while start < total:
            end = min(start + size, total)
            if self.base.recurrent and start < one.task.keep < end:
                end = one.task.keep
            yield start, end
            start = end

    def keep_feature(self, one: Running, feature: NDArray[np.float32]) -> None:
        if self.base.recurrent:
            one.feature = feature.copy()

    def reuse(self, one: Running) -> None:
        """Begin with the longest head of the prompt whose rows were kept."""
        drafter = self.drafter_of(one)
        found = self.prefixes.find(one.task.prompt, drafting=drafter is not None)
        if found is None:
            return
        prefix, one.reused = found
        self.base.restore(one.lane, prefix.base.prefix(one.reused))
        if drafter is None:
            return
        assert prefix.draft is not None
        drafter.restore(one.lane, prefix.draft.prefix(min(one.reused, len(prefix.draft))))
        if len(prefix.draft) < one.reused:
            assert prefix.feature is not None
            following = np.array(one.task.prompt[one.reused : one.reused + 1], np.int64)
            drafter.observe([Observation(one.lane, prefix.feature[None], following)])

    def remember(self, one: Running, count: int) -> None:
        """Keep the rows of a sequence's first `count` tokens, or of as many as the budget holds.

        No request fails for it: where memory is short all that was kept goes.
        """
        drafter, length = self.drafter_of(one), self.base.lanes[one.lane].length
        if self.base.recurrent:
            most = length
        else:
            most = min(count, length, self.prefixes.budget_bytes // self.bytes_of_token(one))
        tokens = one.tokens[:most]
        if not tokens or self.prefixes.holds(tokens, drafting=drafter is not None):
            return
        if (
            self.base.recurrent and len(tokens) < length
        ):  # it ended within what was accepted, and a state has it all
            return
        try:
            draft = None if drafter is None else drafter.snapshot(one.lane, len(tokens) - 1)
            if self.base.recurrent and draft is not None and len(draft) < len(tokens) - 1:
                draft = None  # it never saw the last features: of use for plain requests alone
            kept = self.base.snapshot(one.lane, len(tokens))
            self.prefixes.keep(Prefix(np.array(tokens, np.int64), kept, draft, one.feature))
        except MemoryError:
            self.prefixes.clear()

    def bytes_of_token(self, one: Running) -> int:
        """What keeping one token costs."""
        drafter = self.drafter_of(one)
        own = 0 if drafter is None else drafter.snapshot(one.lane, 1).nbytes
        return self.base.snapshot(one.lane, 1).nbytes + own

    # ---- a step

    def draft(self, spent: StageTimes) -> list[DraftTree]:
        """A tree a sequence, that can neither overrun the length nor the cache: with no room to
        draft, the root."""
        requests = []
        for one in self.running:
            if one.task.plan is not None and self.drafter is not None:
                remaining = one.task.max_new - one.emitted
                plan = one.task.plan.within(levels=remaining - 1, nodes=self.base.room(one.lane))
                requests.append(DraftRequest(one.lane, one.pending, plan))
        trees = {one.lane: DraftTree.root_only(one.pending) for one in self.running}
        if requests and self.drafter is not None:
            with self.log.timed(stages.DRAFT_PROPOSAL, spent):
                proposed = self.drafter.propose(requests)
            trees |= {request.lane: tree for request, tree in zip(requests, proposed, strict=True)}
        return [trees[one.lane] for one in self.running]

    def verify(
        self, trees: Sequence[DraftTree], spent: StageTimes
    ) -> list[tuple[Step, NDArray[np.float32] | None]]:
        """One base pass over all trees, a walk down each, and the commit of what stands.

        Returns each one's step, and the features of what stands for the sequences that draft.
        """
        drafting = any(self.drafter_of(one) for one in self.running)
        with self.log.timed(stages.VERIFICATION if drafting else stages.GENERATION, spent):
            results = self.base.run(
                [self.tree_rows(one, t) for one, t in zip(self.running, trees, strict=True)]
            )
            accepted = [
                self.accept(one, tree, result)
                for one, tree, result in zip(self.running, trees, results, strict=True)
            ]
        with self.log.timed(stages.COMMIT, spent):
            return [
                self.commit(one, tree, result, accept)
                for one, tree, result, accept in zip(
                    self.running, trees, results, accepted, strict=True
                )
            ]

    def accept(
        self, one: Running, tree: DraftTree, result: LaneResult
    ) -> AcceptResult | EdgeSpecError:
        try:
            return walk(tree, result.logits, one.task.sampler, one.tokens)
        except EdgeSpecError as error:  # this sequence's own; its batch mates go on
            return error

    def commit(
        self,
        one: Running,
        tree: DraftTree,
        result: LaneResult,
        accept: AcceptResult | EdgeSpecError,
    ) -> tuple[Step, NDArray[np.float32] | None]:
        if isinstance(accept, EdgeSpecError):
            self.base.zero(one.lane)
            return Step([], len(tree) - 1, finish_reason=ERROR, error=accept), None
        stop = next(
            (i for i, token in enumerate(accept.emitted) if token in one.task.stop_ids),
            len(accept.path),
        )
        path = np.array(
            accept.path[: stop + 1], np.int64
        )  # what comes after the end is no part of the text
        self.base.commit(one.lane, path)
        logprobs = self.logprobs(one, result, accept.path, accept.emitted)
        step = Step(accept.emitted, len(tree) - 1, len(accept.path) - 1, logprobs=logprobs)
        hidden = result.hidden_states if self.drafter_of(one) else None
        if hidden is None:
            return step, None
        self.keep_feature(one, hidden[path[-1]])
        return step, hidden[path]

    def tree_rows(self, one: Running, tree: DraftTree) -> Rows:
        positions = self.base.lanes[one.lane].length + tree.depths
        return Rows(one.lane, tree.tokens, positions, tree.mask, np.arange(len(tree)))

    def is_kept_whole(self, one: Running, step: Step, features: NDArray[np.float32]) -> bool:
        """Whether a sequence that ends is kept up to its last row; the draft's rows are to be there
        as well."""
        return one.task.keep_all and len(step.tokens) == len(features)

    def logprobs(
        self, one: Running, result: LaneResult, rows: Sequence[int], tokens: Sequence[int]
    ) -> list[Candidates]:
        """For each token the candidates of the row that it was drawn from."""
        count = one.task.num_logprobs
        pairs = zip(rows, tokens, strict=True) if count else ()
        return [top_log_probs(result.logits[row], count, token) for row, token in pairs]

    def replay(self, going: Sequence[Observation], spent: StageTimes) -> None:
        """Tell the drafter the true features of what was committed, with the tokens that came
        after."""
        if going and self.drafter is not None:
            with self.log.timed(stages.DRAFT_REPLAY, spent):
                self.drafter.observe(going)

    def ended(self, one: Running, step: Step) -> Step:
        """Take a step's tokens up to where the sequence ends, and say why if it does.

        The pending token needs a row of its own in the next pass, so the cache is full when no row
        is left.
        """
        for count, token in enumerate(step.tokens, start=1):
            one.tokens.append(token)
            reason = one.task.watch(token)
            if token in one.task.stop_ids:
                reason = END_OF_SEQUENCE
            if reason is not None:
                tokens, logprobs = step.tokens[:count], step.logprobs[:count]
                accepted = min(step.accepted, count)
                return replace(
                    step, tokens=tokens, accepted=accepted, finish_reason=reason, logprobs=logprobs
                )
        if step.error is not None:
            return step
        assert one.emitted <= one.task.max_new
        full = one.emitted == one.task.max_new or self.base.room(one.lane) == 0
        return replace(step, finish_reason=MAX_LENGTH) if full else step

    # ---- lanes

    def leave(self, steps: Sequence[tuple[Running, Step]]) -> None:
        for one, step in steps:
            if step.finish_reason is not None:
                self.end(one)

    def end(self, one: Running) -> None:
        """Free a sequence's lane; the last one running moves into it, so that no gap is left."""
        if one.task.keep_all:
            self.remember(one, len(one.tokens))
        last = self.running.pop()
        for holder in (self.base, self.drafter):
            if holder is not None and last is not one:
                holder.move(last.lane, one.lane)
            elif holder is not None and self.running:
                holder.reset(one.lane)  # those that go on would pay for its rows
        if last is not one:
            self.running[one.lane], last.lane = last, one.lane

    def drafter_of(self, one: Running) -> Drafter | None:
        return self.drafter if one.task.plan is not None else None

    def engine_s(self) -> float:
        return self.base.engine_s + (self.drafter.engine_s if self.drafter is not None else 0.0)
