"""The Python API: an open engine directory that turns prompts into text.

Knows what stands in an engine directory and puts the runtime together from it. The loop is
`session`, the search is in `drafters`.
"""

from __future__ import annotations

import operator
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgespec import bundle
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import Runner, Table
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.pair_check import check_pairing
from edgespec.backends.registry import open_runner
from edgespec.component import ComponentConfig
from edgespec.contract import Role
from edgespec.errors import EdgeSpecError, EnvironmentProblem, LimitError, RequestError
from edgespec.methods.dflash import THINKING, DFlashSpec
from edgespec.prompts import CANCELLED, Message, SamplingParams
from edgespec.rope import RopeTable
from edgespec.runtime.block import BlockDecoder, MaskSpec
from edgespec.runtime.decoder import CachedDecoder
from edgespec.runtime.drafters.dflash import DFlashDrafter
from edgespec.runtime.drafters.eagle import EagleDrafter
from edgespec.runtime.embedding import EmbeddingTable
from edgespec.runtime.jobs import Answering, Chunk, Job, Response
from edgespec.runtime.plans import BlockLimits, PlanLimits
from edgespec.runtime.prefix import PrefixCache
from edgespec.runtime.sampling import NEAR_TIE
from edgespec.runtime.session import Running, Session, Step
from edgespec.runtime.tokenizer import Tokenizer
from edgespec.runtime.tree import DraftPlan

SEED_BITS = 63
EXACT_ROWS = 2  # from here on kernels give a row the same bits whatever their number
THINKING_UNKNOWN = (
    "drafts for this base are trained with thinking, and its chat template has no such mode: {} "
    "Export the base again with the chat template of the original download."
)
PREFIX_CACHE_BYTES = 256 * 2**20
Event = Chunk | Response | EdgeSpecError
FAULTS = (EdgeSpecError, MemoryError)  # what ends a request, or a batch, and not the run


class Queue(Protocol):
    """Jobs that wait, such as a deque; it may still grow while it is emptied."""

    def __len__(self) -> int: ...

    def popleft(self) -> Job: ...


class Stream:
    """A request as it is answered: iterate over its Chunks and, last, its Response."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.job, self.events = job, engine.serve(deque([job]))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk | Response:
        _, event = next(self.events)
        if isinstance(event, EdgeSpecError):
            raise event
        return event

    def cancel(self) -> None:
        """Stop after the step that is under way; the Response still comes, and its finish reason
        says so."""
        self.job.cancel()


class Engine:
    """An open engine directory; use it in a `with` block.

    `spec_decode` opens base and draft; without it a plain engine is opened where there is one, else
    the base alone. With `exact` drafts leave every bit as it is: for float32, int4 in blocks of 32
    and products of integers, one sequence, chains only. `prefix_cache_bytes` bounds the KV rows
    that are kept for later prompts with the same head; 0 keeps none. Raises BundleError,
    PairingError, EngineMismatch, EnvironmentProblem or, for what cannot be exact, LimitError, with
    the remedy.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        spec_decode: bool | None = None,
        exact: bool = False,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        path = Path(engine_dir)
        there = EngineManifest.read(path).engines if path.is_dir() else {}
        self.spec_decode = Role.DRAFT in there if spec_decode is None else spec_decode
        if self.spec_decode and Role.DRAFT not in there:
            engines.open_engine(
                path, Role.DRAFT
            )  # says what is missing before a large base is loaded
        plain = Role.LLM in there and not self.spec_decode
        role = Role.LLM if plain or (not there and not self.spec_decode) else Role.BASE
        runner, self.config = open_runner(path, role)
        self.exact = exact
        if exact:
            check_exact(path, self.config)
        self.tokenizer = Tokenizer.open(path)
        table = runner.table or EmbeddingTable(path / bundle.EMBEDDING)
        self.base = CachedDecoder(
            runner,
            table,
            RopeTable.of(self.config.component.rope, runner.capacity),
            self.config.component.sliding_window,
            min_rows=EXACT_ROWS if exact else 1,
            local_rope=local_rope_table(self.config.component, runner.capacity),
        )
        self.drafter: EagleDrafter | DFlashDrafter | None = None
        self.draft_config: EngineConfig | None = None
        if self.spec_decode:
            self.drafter, self.draft_config = self.open_draft(path, table)
        self.session = Session(self.base, self.drafter, PrefixCache(prefix_cache_bytes))
        self.stop_ids = frozenset(self.config.component.eos_token_ids)
        self.notes = self.remarks()

    def open_draft(
        self, path: Path, shared: Table
    ) -> tuple[EagleDrafter | DFlashDrafter, EngineConfig]:
        runner, config = open_runner(path, Role.DRAFT)
        draft = config.component
        check_pairing(self.config.component, draft)
        own = path / engines.DRAFT_EMBEDDING
        assert draft.pair is not None
        table: Table = EmbeddingTable(own) if draft.pair.own_embedding else shared
        rope = RopeTable.of(draft.rope, runner.capacity)
        if draft.graph.block:
            return block_drafter(runner, table, rope, draft, path), config
        d2t = vocabulary_offsets(path, draft)
        decoder = CachedDecoder(
            runner,
            table,
            rope,
            draft.sliding_window,
            local_rope=local_rope_table(draft, runner.capacity),
        )
        return EagleDrafter(decoder, d2t), config

    @property
    def rounding(self) -> float:
        """How far apart, in nats, two candidates may be where a run with drafts takes the other
        one."""
        return 0.0 if self.exact else self.config.rounding(NEAR_TIE)

    def remarks(self) -> tuple[str, ...]:
        """What a user should know about this pair of engines."""
        notes = []
        if self.drafter is not None and self.drafter.decoder.capacity < self.base.capacity:
            mine, theirs = self.base.capacity, self.drafter.decoder.capacity
            notes.append(
                f"the draft's KV cache holds {theirs} tokens, the base's {mine}: beyond {theirs}"
                " nothing is drafted"
            )
        weights = self.config.weights
        if weights.emulated:
            notes.append(f"weights in {weights.scheme}: {weights.emulated}")
        if self.rounding > NEAR_TIE and self.drafter is not None:
            notes.append(
                f"{weights.rounded_by}: lossless up to kernel rounding (margin {self.rounding:.2g}"
                " nats)"
            )
        return tuple(notes)

    def thinking_note(self, asked: Sequence[bool], *, by_flag: bool = False) -> str | None:
        """A warning where requests, by their `enable_thinking`, are not in the mode that the draft
        was trained in.

        With `by_flag` the mode is that of a chat, set by --enable-thinking.
        """
        expected = self.trained_with_thinking()
        strange = sum(one is not expected for one in asked)
        if expected is None or not strange:
            return None
        costs = "fewer of them will be accepted, the answers are the same."
        if not self.tokenizer.knows_thinking():
            return (
                THINKING_UNKNOWN.format(costs) if expected else None
            )  # a request for it is refused by itself
        mode, other = ("on", "off") if expected else ("off", "on")
        who = (
            "--enable-thinking is"
            if by_flag
            else f"{strange} of {len(asked)} requests have enable_thinking"
        )
        remedies = {
            (True, True): "Give --enable-thinking.",
            (True, False): "Leave --enable-thinking out.",
            (False, True): 'Set "enable_thinking": true.',
            (False, False): 'Leave "enable_thinking" out.',
        }
        told = f"{who} {other}, and drafts for this base are trained with it {mode}"
        return f"{told}: {costs} {remedies[by_flag, expected]}"

    def trained_with_thinking(self) -> bool | None:
        """The mode of a block draft: as its export says, or, without a base then, by the base that
        is here now."""
        draft = self.draft_config.component if self.draft_config else None
        if draft is None or draft.pair is None or not draft.graph.block:
            return None
        trained = draft.pair.enable_thinking
        return THINKING.get(self.config.component.model) if trained is None else trained

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.base.runner.close()
        if self.drafter is not None:
            self.drafter.decoder.runner.close()

    # ---- what to draft

    def plan(
        self, top_k: int | None = None, steps: int | None = None, verify_size: int | None = None
    ) -> DraftPlan:
        """The drafting plan: the values given, the others chosen to go with them; LimitError where
        it cannot be.

        With no value a short chain, the choice for a CPU. A value left open follows from the
        others: top_k 1, steps 3 (verify_size - 1 for a chain), and verify_size the smallest of 60,
        the nodes that can exist and what the base was built for. Only values that were not given
        shrink to what the engines were built for. With a DFlash draft `steps` is 1 or left open:
        see `BlockLimits.plan`.
        """
        plan = self.plan_limits().plan(top_k, steps, verify_size)
        self.check_chain(plan)
        return plan

    def check_chain(self, plan: DraftPlan) -> None:
        if self.exact and plan.top_k != 1:
            what = f"--spec-draft-top-k {plan.top_k} drafts trees, and only chains are exact"
            raise LimitError(what, "Set it to 1, or leave --exact out.")

    def plan_limits(self) -> PlanLimits | BlockLimits:
        if self.draft_config is None:
            what = "a drafting plan was asked for, and this engine was opened without its draft"
            raise LimitError(what, "Open it with spec_decode=True, or decode without a plan.")
        makes_blocks = self.draft_config.component.graph.block
        return (BlockLimits if makes_blocks else PlanLimits).of(self.config, self.draft_config)

    @property
    def max_batch_size(self) -> int:
        """Sequences that run at a time, as both engines were built."""
        return min(len(d.lanes) for d in (self.base, self.drafter and self.drafter.decoder) if d)

    def check_batch_size(self, count: int) -> None:
        """LimitError where an engine was built for smaller batches."""
        configs = {"base": self.config} | (
            {"draft": self.draft_config} if self.draft_config else {}
        )
        for role, config in configs.items():
            most = config.limits.max_batch_size
            if count > most:
                what = f"batch_size {count}; the {role} engine was built for {most}"
                raise LimitError(
                    what,
                    f"Set batch_size to {most}, or build the {role} with --max-batch-size {count}.",
                )

    # ---- generation

    def render(
        self,
        messages: Sequence[Message],
        *,
        apply_chat_template: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """The text of messages: by the model's chat template, or simply joined."""
        if not apply_chat_template:
            if enable_thinking or not add_generation_prompt:
                flag = "enable_thinking" if enable_thinking else "add_generation_prompt"
                what = f"{flag} is a matter of the chat template, and apply_chat_template is false"
                raise RequestError(what, f"Remove {flag}, or let the template be applied.")
            return "".join(m.content for m in messages)
        return self.tokenizer.render(
            messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def encode(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """Token ids of a text, of messages (through the chat template), or of ids given as such."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Message) for item in items):
            return self.tokenizer.encode(self.render(items))
        try:
            return [operator.index(item) for item in items]
        except TypeError:
            what = "a prompt is a text, a list of edgespec.Message or a list of token ids"
            raise RequestError(what, "Give one of the three, not a mixture.") from None

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """LimitError or RequestError for a prompt that these engines cannot take."""
        count = len(prompt_ids)
        configs = {"base": self.config} | (
            {"draft": self.draft_config} if self.draft_config else {}
        )
        for role, config in configs.items():
            limits = config.limits
            most = limits.max_input_len
            if count > most:
                flags = f"--max-input-len {count}"
                if count > limits.max_kv_cache_capacity:
                    flags += f" --max-kv-cache-capacity {count}"
                what = f"the prompt has {count} tokens, the {role} engine was built for {most}"
                raise LimitError(what, f"Shorten it, or build the {role} with {flags} or more.")
        rows = self.config.component.vocab_size
        if strange := [token for token in prompt_ids if not 0 <= token < rows]:
            what = (
                f"the prompt holds the token id {strange[0]}, the model's vocabulary ends at"
                f" {rows - 1}"
            )
            raise RequestError(what, "The tokenizer does not fit the model, or the ids are wrong.")

    def check(self, job: Job) -> None:
        """LimitError or RequestError for a job that these engines cannot do."""
        self.check_prompt(job.prompt_ids)
        if job.plan is not None:
            self.plan_limits().check(job.plan)
            self.check_chain(job.plan)
        rows = self.config.component.vocab_size
        if strange := [token for token in job.sampling.logit_bias if token >= rows]:
            what = (
                f"logit_bias names the token id {strange[0]}, the model's vocabulary ends at"
                f" {rows - 1}"
            )
            raise RequestError(what, "Remove it.")

    def serve(self, queue: Queue, batch_size: int = 1) -> Iterator[tuple[Job, Event]]:
        """Answer the jobs of `queue`, `batch_size` at a time; while this runs more may be put into
        it.

        Yields each job's Chunks and at last its Response, or the error that it met. A job that ends
        makes room for the next one; none waits for its batch mates. LimitError if the engines were
        built for smaller batches.
        """
        self.check_batch_size(batch_size)
        epoch = self.session.restart()
        active: dict[Running, Answering] = {}
        while queue or active:
            while queue and len(active) < batch_size:
                yield from self.admit(queue.popleft(), active)
                self.check_epoch(epoch)
            yield from self.cancel(active, epoch)
            self.check_epoch(epoch)
            yield from self.advance(active)
            self.check_epoch(epoch)

    def admit(self, job: Job, active: dict[Running, Answering]) -> Iterator[tuple[Job, Event]]:
        job.sampling = with_seed(job.sampling)
        try:
            self.check(job)
            answering = Answering(job, self.tokenizer, self.stop_ids)
            running, step = self.session.begin(answering.task())
        except FAULTS as error:
            yield job, told_as(error)
            return
        active[running] = answering
        yield from self.told(active, running, step)

    def advance(self, active: dict[Running, Answering]) -> Iterator[tuple[Job, Event]]:
        """One step of all that are running. Where the engine itself fails all of them have
        failed."""
        try:
            steps = self.session.step() if active else []
        except FAULTS as error:
            failed = [*active.values()]
            active.clear()
            self.session.running.clear()
            for answering in failed:
                yield answering.job, told_as(error)
            return
        for running, step in steps:
            yield from self.told(active, running, step)

    def told(
        self, active: dict[Running, Answering], running: Running, step: Step
    ) -> Iterator[tuple[Job, Event]]:
        answering = active[running]
        if step.finish_reason is not None:
            del active[running]
        if step.error is not None:
            yield answering.job, step.error
            return
        yield answering.job, answering.chunk(step)
        if step.finish_reason is not None:
            yield answering.job, answering.response(step.finish_reason, running)

    def cancel(self, active: dict[Running, Answering], epoch: int) -> Iterator[tuple[Job, Event]]:
        for running, answering in [*active.items()]:
            if answering.job.cancelled:
                self.check_epoch(epoch)
                self.session.end(running)
                del active[running]
                yield answering.job, answering.chunk(Step([], finish_reason=CANCELLED))
                yield answering.job, answering.response(CANCELLED, running)

    def check_epoch(self, epoch: int) -> None:
        if self.session.epoch != epoch:
            raise LimitError(
                "another request was begun on this engine", "Finish one stream before the next."
            )

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        plan: DraftPlan | None = None,
        *,
        keep: bool = False,
    ) -> Stream:
        """Yield a Chunk a step and, last, the Response. `plan` None decodes plainly.

        With `keep` the KV rows of prompt and answer are kept for a later prompt that begins with
        them.
        """
        return Stream(self, Job(prompt_ids, sampling, plan, keep_all=keep))

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        sampling: SamplingParams | None = None,
        plan: DraftPlan | None = None,
    ) -> Response:
        """The whole answer. Without a plan an engine with a draft takes `plan()`; see `stream` for
        plain decoding."""
        if plan is None and self.spec_decode:
            plan = self.plan()
        return self.finish(self.encode(prompt), sampling or SamplingParams(), plan)

    def plainly(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Response:
        """The same request without drafts: the reference that speculation must equal."""
        return self.finish(prompt_ids, sampling, None)

    def finish(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, plan: DraftPlan | None
    ) -> Response:
        *_, last = self.stream(prompt_ids, sampling, plan)
        assert isinstance(last, Response)
        return last

    def next_logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """The base's logits [V] after `prefix`, computed as a prompt; ends whatever was running."""
        self.session.restart()
        self.base.reset(0)
        logits: NDArray[np.float32] = self.base.read(0, np.array(prefix, np.int64)).logits[0]
        return logits


def local_rope_table(component: ComponentConfig, capacity: int) -> RopeTable | None:
    """The second rotary table of an engine, where its layers have two."""
    local = component.local_rope
    return RopeTable.of(local, capacity) if local else None


def vocabulary_offsets(engine_dir: Path, draft: ComponentConfig) -> NDArray[np.int64]:
    """[Vd], what is added to a draft's id to have the base's; an MTP head has the base's own
    ids."""
    if draft.method == "mtp":
        assert draft.draft_vocab_size is not None
        return np.zeros(draft.draft_vocab_size, np.int64)
    offsets: NDArray[np.int64] = load_file(engine_dir / bundle.D2T)["d2t"].astype(np.int64)
    return offsets


def block_drafter(
    runner: Runner, table: Table, rope: RopeTable, draft: ComponentConfig, path: Path
) -> DFlashDrafter:
    """The drafter of a DFlash engine."""
    block, vocabulary = draft.spec, path / bundle.D2T
    assert isinstance(block, DFlashSpec)
    d2t = load_file(vocabulary)["d2t"].astype(np.int64) if vocabulary.is_file() else None
    mask_specs = {MaskSpec(*pair) for pair in zip(block.windows, block.causal, strict=True)}
    ordered = sorted(
        mask_specs, key=lambda spec: spec.window is not None
    )  # the mask for layers without a window first
    return DFlashDrafter(
        BlockDecoder(runner, table, rope, ordered), block.mask_token_id, block.block_size, d2t
    )


def check_exact(engine_dir: Path, config: EngineConfig) -> None:
    """LimitError where passes of one and of many rows give other bits."""
    if why := config.why_not_exact:
        what = f"the engine in {engine_dir} cannot be exact: {why}"
        if config.component.graph.recurrent:
            raise LimitError(what, "Leave --exact out: no engine of such a base is.")
        known = "--weights fp32, int4 --weight-block 32 or int8 --weight-block 0"
        quantized = "of quantized exports int8_sq, int8_token and int4 in blocks of 32 are exact"
        raise LimitError(what, f"Build it for one sequence, with {known}; {quantized}.")


def told_as(error: EdgeSpecError | MemoryError) -> EdgeSpecError:
    if isinstance(error, EdgeSpecError):
        return error
    return EnvironmentProblem(
        "not enough memory for this request", "Close other programs, or lower the batch size."
    )


def with_seed(sampling: SamplingParams) -> SamplingParams:
    """A seed drawn once where none was given, so that a run can be repeated from its output."""
    return (
        sampling
        if sampling.seed is not None
        else replace(sampling, seed=secrets.randbits(SEED_BITS))
    )
