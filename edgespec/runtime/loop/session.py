"""The loop: draft, verify, commit, for all running sequences at once.

Knows sequences: each is n committed tokens and exactly one pending token, which the base has drawn
and not yet read, in a lane of its own. A step is one base pass for all of them; to each it gives
its accepted drafts and one token more. Each has a drafter, or none; those that share one draft
together. Beside them prompts are being read, a chunk of one of them at a time. Knows nothing of
text, files or what kinds of drafters there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from edgespec.backends.call import HiddenStates, Ids, Result
from edgespec.errors import EdgeSpecError, LimitError, RequestError
from edgespec.prompts import ERROR
from edgespec.runtime.acceptance.verify import ACCEPT_RULES, AcceptResult
from edgespec.runtime.drafters.base import (
    Continuing,
    Drafter,
    DraftRequest,
    EndObserver,
    Observation,
    PromptReader,
    Reserving,
)
from edgespec.runtime.faults import as_error
from edgespec.runtime.lanes import stages
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.lanes.stages import StageLog, StageTimes
from edgespec.runtime.loop.prefix import MIN_NEW, Prefix, PrefixCache, common_length
from edgespec.runtime.loop.sequence import SequenceState, StepOutput, StepSize, rest
from edgespec.runtime.loop.step_values import (
    Committed,
    Draft,
    Verified,
    accept,
    committed_path,
    last_of,
    logprobs_of,
)
from edgespec.runtime.plans.draft_budget import Budgeted
from edgespec.runtime.plans.policy import AdaptivePolicy, Asking, Decision
from edgespec.runtime.plans.schedules import NO_LIMIT
from edgespec.runtime.sampling.draft_sampler import DraftSampler
from edgespec.runtime.trees.tree import ROOT, DraftTree

MAX_UNOBSERVED = 256  # tokens that wait for a drafter: what it reads of the base takes memory


class Session:
    """The sequences of one base, each with a drafter or without.

    Those running fill the first lanes, so that a step has no row for a lane without one; those
    whose prompts are being read have lanes behind them, in any order. Only where all lanes are
    taken may one that is read stand between: its lane has idle rows in each step. `drafter` is that
    of sequences that have a plan and name none; `policy` adapts the plans of those that have an
    AdaptiveState. `max_rows` are those that a pass verifies of a sequence: forced tokens need no
    drafter.
    """

    def __init__(
        self,
        base: CachedDecoder,
        drafter: Drafter | None = None,
        prefixes: PrefixCache | None = None,
        policy: AdaptivePolicy | None = None,
        max_rows: int = 1,
    ) -> None:
        self.base, self.drafter, self.policy = base, drafter, policy
        self.max_rows = max_rows
        self.prefixes = prefixes or PrefixCache(0)
        self.running: list[SequenceState] = []
        self.reading: list[SequenceState] = []
        self.drafters: list[Drafter] = []  # of the sequences that have a lane, each once
        self.groups: list[tuple[Drafter, list[SequenceState]]] = []  # those running, by drafter
        self.kept: dict[SequenceState, Prefix] = {}  # of prompts that are being read
        self.log = StageLog(self.engine_s)

    @property
    def sequences(self) -> list[SequenceState]:
        """Those that have a lane."""
        return [*self.running, *self.reading]

    @property
    def num_free_lanes(self) -> int:
        """How many lanes of the base hold no sequence."""
        return len(self.free_lanes)

    @property
    def free_lanes(self) -> list[int]:
        """Lanes of the base that hold no sequence, ascending."""
        taken = {seq.lane for seq in self.sequences}
        return [lane for lane in range(len(self.base.lanes)) if lane not in taken]

    def restart(self) -> None:
        """Forget all sequences, whatever they were in the middle of."""
        self.running, self.reading, self.kept = [], [], {}
        self.drafters, self.groups = [], []

    def engine_s(self) -> float:
        """Seconds spent so far inside the engines of the base and of `drafters`."""
        seconds = self.base.engine_s
        for drafter in self.drafters:
            seconds += drafter.engine_s
        return seconds

    # ---- prefill

    def admit(self, seq: SequenceState) -> None:
        """Give a sequence the first free lane, with what is kept of its prompt; `prefill` reads the
        rest. LimitError if the prompt does not fit."""
        self.check(seq)
        if not self.sequences:
            for lane in range(len(self.base.lanes)):  # whatever the last ones left there
                self.base.reset(lane)
        seq.lane = seq.slot = self.free_lanes[0]
        self.reading.append(seq)
        self.reset(seq.lane)
        self.give_drafter(seq)
        self.base.reserve(seq.lane, len(seq.prompt) + seq.max_new_tokens)
        self.reuse(seq)
        seq.follows = self.leader(seq)

    def reuse(self, seq: SequenceState) -> None:
        """Begin the lane of a sequence, which was reset, with what is kept of its prompt: nothing
        where all of it is to be scored."""
        if seq.prompt_logprobs is None:
            seq.num_reused = seq.num_read = self.prefixes.restore(seq, self.base)
        if isinstance(seq.drafter, Reserving):
            seq.drafter.reserve(seq.lane, len(seq.prompt) + seq.max_new_tokens)
        if seq.drafter is not None:
            seq.drafter.begin(seq.lane, seq.prompt, seq.num_reused)

    def leader(self, seq: SequenceState) -> SequenceState | None:
        """The sequence that is read no later than this one and begins like it, so that more of its
        prompt will be kept then than is now; None where there is none."""
        best, leader = seq.num_reused + MIN_NEW - 1, None
        if not self.prefixes.budget_bytes or seq.prompt_logprobs is not None:
            return None
        own = np.asarray(seq.prompt.cache_key, np.int64)
        for other in self.reading:
            if other is seq or other.cache_salt != seq.cache_salt:
                continue
            if other.priority > seq.priority or rest(other) > rest(seq):
                continue
            common = common_length(np.asarray(other.prompt.cache_key, np.int64), own)
            if not self.base.croppable:
                common = other.keep if other.keep <= common else 0
            if common > best and (other.keep or self.prefixes.keeps(other)):
                best, leader = common, other
        return leader

    def give_drafter(self, seq: SequenceState) -> None:
        """Let a sequence have its drafter: its own or the session's, and none without a plan. One
        that had no sequence before begins with all lanes empty."""
        drafter = seq.drafter if seq.drafter is not None else self.drafter
        seq.drafter = drafter = None if seq.plan is None else drafter
        if drafter is None or any(known is drafter for known in self.drafters):
            return
        lanes = len(self.base.lanes) if drafter.num_lanes is None else drafter.num_lanes
        for lane in range(lanes):
            drafter.reset(lane)
        self.drafters.append(drafter)

    def check(self, seq: SequenceState) -> None:
        """Raises LimitError for an empty prompt, one longer than the KV cache, or one with images
        of another model."""
        assert self.free_lanes
        if not len(seq.prompt):
            raise LimitError("the prompt is empty", "Give at least one token.")
        if len(seq.prompt) > self.base.capacity:
            message = (
                f"the prompt has {len(seq.prompt)} tokens, the engine's KV cache holds"
                f" {self.base.capacity}"
            )
            raise LimitError(
                message, "Shorten the prompt, or build with a larger `max_kv_cache_capacity`."
            )
        self.base.check_images(seq.prompt)

    def chunk_end(self, seq: SequenceState, rows: int | None) -> int:
        """Where the next call over a prompt ends. What cannot be cut to a shorter prefix can be
        kept only as it is at the end of a call."""
        rows = rows or self.base.prefill_chunk
        if seq.prompt_logprobs is not None:
            rows = min(rows, self.base.runner.max_rows)
        end = min(seq.num_read + rows, len(seq.prompt))
        if not self.base.croppable and seq.num_read < seq.keep < end:
            return seq.keep
        return end

    def prefill(self, seq: SequenceState, rows: int | None = None) -> StepOutput | None:
        """Read the next chunk of a prompt, of at most so many rows; None: as many as a call takes.
        The step of its first token where that was the last chunk: from then on the sequence
        runs."""
        assert seq in self.reading
        if seq.follows is not None:
            seq.follows = None
            if self.prefixes.reusable(seq) > seq.num_reused:
                self.reset(seq.lane)
                self.reuse(seq)
        start, end = seq.num_read, self.chunk_end(seq, rows)
        is_last, keeps = end == len(seq.prompt), self.prefixes.keeps(seq)
        if is_last and keeps and not self.base.croppable and seq not in self.kept:
            self.keep_at(seq, start)  # as a whole, which an equal prompt can go on from
        output, hidden_states = self.read(seq, start, end)
        self.observe_prompt(seq, start, end, hidden_states, output)
        seq.num_read = end
        if is_last and keeps and self.base.croppable:
            self.keep_at(seq, end)
        elif start < seq.keep <= end:
            self.keep_at(seq, seq.keep)
        return None if output is None else self.begin_decoding(seq, output)

    def keep_at(self, seq: SequenceState, count: int) -> None:
        """Take the first tokens of a prompt, to be kept once all of it was read."""
        kept = self.prefixes.take(seq, count, self.base)
        if kept is not None:
            self.kept[seq] = kept

    def read(
        self, seq: SequenceState, start: int, end: int
    ) -> tuple[StepOutput | None, HiddenStates | None]:
        """Commit the prompt's tokens `start` to `end`; with the last of them, draw the first token.

        Returns its step, and the hidden states, of end - start rows, of a base that has them.
        """
        with self.log.timed(stages.PREFILL, seq.times):
            scored = seq.prompt_logprobs is not None
            part = self.base.part(seq.lane, seq.prompt, start, end, all_logits=scored)
            (result,) = self.base.extend([part])
            if scored:
                seq.score_prompt(result.logits, start, end)
                last = np.array([end - start - 1])
                result = replace(result, logits=result.logits.take(last))
            if end < len(seq.prompt):
                return None, result.hidden_states
            if not seq.max_new_tokens:
                return StepOutput([], verified=False), result.hidden_states
            accepted = accept(Draft(seq, DraftTree.root_only(seq.pending)), result)
            if isinstance(accepted, EdgeSpecError):
                raise accepted
            first = accepted.emitted[0]
            logprobs = logprobs_of(seq, result, [0], [first])
            return StepOutput([first], verified=False, logprobs=logprobs), result.hidden_states

    def observe_prompt(
        self,
        seq: SequenceState,
        start: int,
        end: int,
        hidden_states: HiddenStates | None,
        output: StepOutput | None,
    ) -> None:
        """Show a chunk to its drafter, each position with the token after it: for the last of all
        the token drawn. A drafter that needs no hidden states has the prompt already; one that
        reads prompts by itself goes on with it."""
        drafter, first = seq.drafter, [] if output is None else output.tokens
        if drafter is None:
            return
        if isinstance(drafter, PromptReader):
            with self.log.timed(stages.DRAFT_PREFILL, seq.times):
                drafter.read_prompt(seq.lane, end)
        if drafter.needs_hidden_states:
            assert hidden_states is not None
            observation = seq.prompt_observation(start, end, hidden_states, first)
            seq.hidden_state = last_of(hidden_states)
        elif first:
            observation = Observation(seq.lane, None, np.array(first, np.int64))
        else:
            return
        with self.log.timed(stages.DRAFT_PREFILL, seq.times):
            drafter.observe([observation])

    def begin_decoding(self, seq: SequenceState, output: StepOutput) -> StepOutput:
        """The first token's step: the sequence joins the running ones, or ends at once."""
        self.reading.remove(seq)
        self.running.append(seq)
        self.settle()
        seq.slot = seq.lane
        self.groups = by_drafter(self.running)
        if (kept := self.kept.pop(seq, None)) is not None:
            self.prefixes.keep(kept)
        output = seq.take(output, self.base.room(seq.lane))
        if output.finish_reason is not None:
            self.end(seq)
        return output

    # ---- a step

    def step(self) -> list[tuple[SequenceState, StepOutput]]:
        """One step of all running sequences; those that it ends leave their lanes."""
        spent = StageTimes()
        drafts = self.draft(spent)
        verified = self.verify(drafts, spent)
        committed = self.commit(verified, spent)
        self.observe(committed, spent)
        for seq in self.running:
            seq.times += spent
        for item in committed:
            if item.output.finish_reason is not None:
                self.end(item.seq)
        return [(item.seq, item.output) for item in committed]

    def draft(self, spent: StageTimes) -> list[Draft]:
        """A tree for each sequence, that can neither overrun the length nor the cache."""
        trees = {seq.lane: DraftTree.root_only(seq.pending) for seq in self.running}
        decisions = self.decide()
        forced = self.forced_tokens(decisions)
        if self.groups:
            for drafter, seqs in self.groups:
                asking = [seq for seq in seqs if self.drafts(seq, decisions, forced)]
                if not asking:
                    continue
                self.show(drafter, asking, spent)
                with self.log.timed(stages.DRAFT_PROPOSAL, spent):
                    asked = [
                        self.draft_request(seq, decisions.get(seq.lane), forced.get(seq.lane, ()))
                        for seq in asking
                    ]
                    proposed = drafter.propose(asked)
                trees |= {seq.lane: tree for seq, tree in zip(asking, proposed, strict=True)}
        for seq in self.running:
            trees[seq.lane] = self.guided(seq, trees[seq.lane], forced.get(seq.lane, ()))
        return [
            Draft(seq, trees[seq.lane], self.is_held_back(seq), decisions.get(seq.lane))
            for seq in self.running
        ]

    def forced_tokens(self, decisions: dict[int, Decision]) -> dict[int, list[int]]:
        """What its grammar leaves no choice, for each lane where that is something. A drafter that
        would reach no further is not asked: then there is no decision to learn from."""
        forced = {}
        for seq in self.running:
            if seq.guide is None or not seq.takes_forced:
                continue
            most = min(self.num_rows(seq), seq.max_new_tokens - seq.num_emitted) - 1
            try:
                forced[seq.lane] = seq.guide.forced(seq.tokens, most)
            except RequestError:  # its accept rule meets it too, and it alone ends
                forced[seq.lane] = []
            if not reaches_behind(seq, forced[seq.lane]):
                decisions.pop(seq.lane, None)
        return forced

    def num_rows(self, seq: SequenceState) -> int:
        """Rows that a pass can have in a lane."""
        return min(self.base.room(seq.lane), self.max_rows)

    def guided(self, seq: SequenceState, tree: DraftTree, forced: Sequence[int]) -> DraftTree:
        """A tree as its grammar wants it: what is forced first, and nothing that breaks it. What
        was drawn by chance stays: leaving it out because of what it is would change what it was
        drawn from (see `acceptance.rejection`)."""
        if seq.guide is None:
            return tree
        if forced:
            tree = tree.behind(forced, self.num_rows(seq))
        if self.draft_sampler(seq):
            return tree
        try:
            return seq.guide.cut(tree, seq.tokens)
        except RequestError:  # as above
            return DraftTree.root_only(seq.pending)

    def decide(self) -> dict[int, Decision]:
        """The policy's decision for each lane whose sequence has a plan that it adapts."""
        if self.policy is None:
            return {}
        seqs, asking = list[SequenceState](), list[Asking]()
        for seq in self.running:
            if seq.adaptive is None or seq.plan is None or seq.drafter is None:
                continue
            levels = min(seq.max_new_tokens - seq.num_emitted - 1, self.levels(seq))
            levels = max(0, min(levels, seq.plan.steps))
            budgeted = isinstance(seq.drafter, Budgeted)
            context = self.base.lanes[seq.lane].length
            seqs.append(seq)
            asking.append(Asking(seq.adaptive, seq.plan, context, levels, budgeted))
        decisions = self.policy.decide(asking, len(self.running))
        return {seq.lane: decision for seq, decision in zip(seqs, decisions, strict=True)}

    def drafts(
        self,
        seq: SequenceState,
        decisions: Mapping[int, Decision],
        forced: Mapping[int, Sequence[int]],
    ) -> bool:
        """Whether a sequence's drafter is asked in this step."""
        if not reaches_behind(seq, forced.get(seq.lane, ())):
            return False
        decision = decisions.get(seq.lane)
        return bool(self.levels(seq) if decision is None else decision.levels)

    def levels(self, seq: SequenceState) -> int:
        """Levels that its gates let a sequence draft while so many run; 0 is no draft."""
        return NO_LIMIT if seq.gates is None else seq.gates.levels(len(self.running))

    def is_held_back(self, seq: SequenceState) -> bool:
        """Whether a sequence would draft, but for how many run."""
        if seq.drafter is None or seq.gates is None or seq.gates.stopped:
            return False
        return not self.levels(seq)

    def draft_request(
        self, seq: SequenceState, decision: Decision | None, forced: Sequence[int] = ()
    ) -> DraftRequest:
        """What a drafter is asked for: a plan that fits the answer's length and the KV cache."""
        assert seq.plan is not None
        remaining = seq.max_new_tokens - seq.num_emitted - len(forced)
        levels = min(remaining - 1, self.levels(seq) if decision is None else decision.levels)
        plan = seq.plan.within(levels=levels, nodes=self.base.room(seq.lane))
        budget = None if decision is None else decision.budget
        return DraftRequest(seq.lane, seq.pending, plan, self.draft_sampler(seq), budget, forced)

    def draft_sampler(self, seq: SequenceState) -> DraftSampler | None:
        """What draws a sequence's drafts, where its accept rule compares them with what they were
        drawn from."""
        if not ACCEPT_RULES[seq.accept_options.rule].draws_drafts or not seq.sampler.temperature:
            return None
        vocab_size = self.base.runner.contract.shape.vocab_size
        return DraftSampler(seq.sampler, seq.tokens, vocab_size)

    def verify(self, drafts: Sequence[Draft], spent: StageTimes) -> list[Verified]:
        """One base pass over all trees, and the accept rule on each."""
        drafting = any(draft.seq.drafter is not None for draft in drafts)
        with self.log.timed(stages.VERIFICATION if drafting else stages.GENERATION, spent):
            results = self.base.run([self.tree_rows(draft) for draft in drafts])
            return [
                Verified(draft, result, accept(draft, result))
                for draft, result in zip(drafts, results, strict=True)
            ]

    def tree_rows(self, draft: Draft) -> DecoderRows:
        """A tree as a call's rows: its depths as positions, its mask, logits of every node."""
        lane, tree = draft.seq.lane, draft.tree
        positions = self.base.lanes[lane].length + tree.depths
        gather = ROOT if len(tree) == 1 else np.arange(len(tree))
        return DecoderRows(lane, tree.tokens, positions, tree.mask, gather)

    def commit(self, verified: Sequence[Verified], spent: StageTimes) -> list[Committed]:
        """Keep the rows of what was accepted and drop the others."""
        with self.log.timed(stages.COMMIT, spent):
            return [self.commit_lane(item) for item in verified]

    def commit_lane(self, item: Verified) -> Committed:
        """Commits one lane's accepted rows. Where that, or its accept rule, failed its rows are
        zeroed, and its step carries the error."""
        try:
            error = item.accepted
            if not isinstance(error, EdgeSpecError):
                return self.commit_accepted(item, error)
        except Exception as raised:  # of whatever kind, it is this sequence's own
            error = as_error(raised)
        seq, num_drafts = item.draft.seq, len(item.draft.tree) - 1
        self.base.zero(seq.lane)
        return Committed(seq, StepOutput([], num_drafts, finish_reason=ERROR, error=error))

    def commit_accepted(self, item: Verified, accepted: AcceptResult) -> Committed:
        """Commits the rows that a lane's accept rule chose."""
        seq, decision, tree = item.draft.seq, item.draft.decision, item.draft.tree
        seq.last_step = StepSize(len(tree), tree.drafted_levels, len(accepted.path))
        path = committed_path(seq, accepted)
        self.base.commit(seq.lane, path)
        logprobs = logprobs_of(seq, item.result, accepted.path, accepted.emitted)
        output = StepOutput(
            accepted.emitted,
            len(item.draft.tree) - 1,
            len(accepted.path) - 1,
            logprobs=logprobs,
            tree=item.draft.tree,
            path=accepted.path,
            held_back=item.draft.held_back,
            paused=decision is not None and decision.pauses,
        )
        if decision is not None:
            assert self.policy is not None
            assert seq.adaptive is not None
            self.policy.learn(seq.adaptive, decision, item.draft.tree, accepted.path)
        output = seq.take(output, self.base.room(seq.lane))
        return Committed(seq, output, self.observation(seq, output, path, item.result))

    def observation(
        self, seq: SequenceState, output: StepOutput, path: Ids, result: Result
    ) -> Observation | None:
        """What its drafter observes of a step: nothing where the sequence ends, unless it is kept
        up to its last row, the drafter's memory with it, or the drafter observes all steps."""
        drafter = seq.drafter
        if drafter is None:
            return None
        hidden_states = None
        if drafter.needs_hidden_states:
            assert result.hidden_states is not None
            hidden_states = result.hidden_states.take(path)
            seq.hidden_state = hidden_states if len(path) == 1 else last_of(hidden_states)
        is_kept_whole = seq.keep_all and len(output.tokens) == len(path)
        observes = is_kept_whole or isinstance(drafter, EndObserver)
        if output.finish_reason is not None and not observes:
            return None
        return Observation(seq.lane, hidden_states, np.array(output.tokens, np.int64))

    def observe(self, committed: Sequence[Committed], spent: StageTimes) -> None:
        """Show each drafter what was committed, with the tokens that came after. What the drafter
        of an adaptive sequence reads of the base waits until it is to draft."""
        observed = [item for item in committed if item.observation is not None]
        waiting = [item for item in observed if item.seq.waits]
        for item in waiting:
            assert item.observation is not None
            item.seq.unobserved.append(item.observation)
            item.seq.num_unobserved += len(item.observation.tokens)
        if full := [item.seq for item in waiting if item.seq.num_unobserved >= MAX_UNOBSERVED]:
            for drafter, seqs in by_drafter(full):
                self.show(drafter, seqs, spent)
        observed = [item for item in observed if not item.seq.waits]
        if not observed:
            return
        with self.log.timed(stages.DRAFT_REPLAY, spent):
            for drafter, _ in self.groups:
                own = [item.observation for item in observed if item.seq.drafter is drafter]
                if own:
                    drafter.observe([item for item in own if item is not None])

    def show(self, drafter: Drafter, seqs: Sequence[SequenceState], spent: StageTimes) -> None:
        """Show a drafter what these sequences have committed since it last drafted for them."""
        observations = [joined(seq.unobserved) for seq in seqs if seq.unobserved]
        for seq in seqs:
            seq.unobserved, seq.num_unobserved = [], 0
        if observations:
            with self.log.timed(stages.DRAFT_REPLAY, spent):
                drafter.observe(observations)

    # ---- lanes

    def end(self, seq: SequenceState) -> None:
        """Free a sequence's lane; one that runs may move into it."""
        if seq in self.reading:
            return self.free_reading(seq)
        if seq.keep_all:
            if seq.drafter is not None:
                self.show(seq.drafter, [seq], seq.times)
            prefix = self.prefixes.take(seq, len(seq.tokens), self.base)
            if prefix is not None:
                self.prefixes.keep(prefix)
        self.running.remove(seq)
        self.free(seq.lane)
        self.settle()
        self.drop_drafters()

    def free_reading(self, seq: SequenceState, *, zero: bool = False) -> None:
        """Free the lane of a prompt that is being read; with `zero` its rows may hold NaN or Inf.
        Nothing where it is not."""
        if seq not in self.reading:
            return
        self.reading.remove(seq)
        self.kept.pop(seq, None)
        if zero:
            self.base.zero(seq.lane)
        self.free(seq.lane)
        self.settle()
        self.drop_drafters()

    def settle(self) -> None:
        """Let those that run have the first lanes; what is being read there moves behind them, as
        far as lanes are free."""
        for lane in range(len(self.running)):
            holder = next((seq for seq in self.sequences if seq.lane == lane), None)
            if holder is not None and holder not in self.reading:
                continue
            if holder is not None:
                behind = [free for free in self.free_lanes if free > lane]
                if not behind:
                    continue
                self.move(holder, behind[-1])
            self.move(max(self.running, key=lambda seq: seq.lane), lane)
        self.running.sort(key=lambda seq: seq.lane)

    def drop_drafters(self) -> None:
        """Forget the drafters that have no sequence any more."""
        self.drafters = [drafter for drafter, _ in by_drafter(self.sequences)]
        self.groups = by_drafter(self.running)

    def fail(self, seq: SequenceState) -> None:
        """Free the lane of a sequence that failed by itself; its rows may hold NaN or Inf."""
        if seq in self.reading:
            self.free_reading(seq, zero=True)
        elif seq in self.running:
            self.base.zero(seq.lane)
            self.end(seq)

    def reset(self, lane: int) -> None:
        """Free a lane of the base and of all drafters."""
        self.base.reset(lane)
        for drafter in self.drafters:
            drafter.reset(lane)

    def free(self, lane: int) -> None:
        """Free the lane of a sequence that has ended. The rows of the base stay where no other
        sequence would pay for them; drafters learn at once that it has ended."""
        if self.sequences:
            self.base.reset(lane)
        for drafter in self.drafters:
            drafter.reset(lane)

    def move(self, seq: SequenceState, lane: int) -> None:
        """A sequence goes on in another lane, which is free."""
        self.base.move(seq.lane, lane)
        for drafter in self.drafters:
            if drafter is seq.drafter:
                drafter.move(seq.lane, lane)
        seq.lane = lane
        seq.unobserved = [replace(item, lane=lane) for item in seq.unobserved]


def reaches_behind(seq: SequenceState, forced: Sequence[int]) -> bool:
    """Whether a sequence's drafter drafts behind what is forced: one that begins at the pending
    token only where its plan is longer."""
    plan = seq.plan
    return isinstance(seq.drafter, Continuing) or plan is None or len(forced) < max(1, plan.steps)


def joined(observations: Sequence[Observation]) -> Observation:
    """Observations of one lane that follow each other, as one."""
    first, *others = observations
    if not others:
        return first
    tokens, states = np.concatenate([item.tokens for item in observations]), first.hidden_states
    if states is not None:
        more = [item.hidden_states for item in others if item.hidden_states is not None]
        states = states.joined(more)
    return Observation(first.lane, states, tokens)


def by_drafter(seqs: Iterable[SequenceState]) -> list[tuple[Drafter, list[SequenceState]]]:
    """The sequences that have a drafter, grouped by it; in their order, as are the groups."""
    groups: list[tuple[Drafter, list[SequenceState]]] = []
    for seq in seqs:
        if seq.drafter is None:
            continue
        for drafter, group in groups:
            if drafter is seq.drafter:
                group.append(seq)
                break
        else:
            groups.append((seq.drafter, [seq]))
    return groups
