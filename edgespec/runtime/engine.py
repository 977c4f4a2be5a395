"""The Python API: an open engine directory that turns prompts into text.

Knows what stands in an engine directory and puts the runtime together from it. The loop is `session`, the search is in
`drafters`.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from edgespec import bundle
from edgespec.backends import engine_dir as engines
from edgespec.backends.engine_dir import rope_of
from edgespec.backends.loader import open_runner
from edgespec.contract import Role, tree_pool_size
from edgespec.errors import LimitError, RequestError
from edgespec.prompts import Message, SamplingParams
from edgespec.rope import RopeTable
from edgespec.runtime.decoder import CachedDecoder
from edgespec.runtime.drafters.eagle import EagleDrafter
from edgespec.runtime.embedding import EmbeddingTable
from edgespec.runtime.metrics import RequestMetrics
from edgespec.runtime.sampling import NEAR_TIE, Sampler
from edgespec.runtime.session import Session
from edgespec.runtime.tokenizer import TextStream, Tokenizer
from edgespec.runtime.tree import DraftPlan

CPU_PLAN = DraftPlan(top_k=1, steps=3, verify_size=4)  # more rows cost more than they bring on a CPU
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: the ids and the text of one step. Text waits for whole UTF-8 characters."""

    token_ids: list[int]
    text: str
    accepted: int
    finish_reason: str | None


@dataclass(frozen=True)
class Response:
    """A finished request. `seed` is the one that was used, drawn where none was given."""

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics
    seed: int | None
    prompt_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a speculative run left the plain one; `margin` is how near the two candidates were."""

    index: int
    plain: int | None
    speculative: int | None
    margin: float

    @property
    def near_tie(self) -> bool:
        return self.margin <= NEAR_TIE


class Engine:
    """An open engine directory; use it in a `with` block.

    `spec_decode` opens base and draft; without it a plain engine is opened where there is one, else the base alone.
    Raises BundleError, PairingError, EngineMismatch or EnvironmentProblem with the remedy.
    """

    def __init__(self, engine_dir: str | Path, *, spec_decode: bool | None = None) -> None:
        path = Path(engine_dir)
        there = engines.read_engines(path) if path.is_dir() else {}
        self.spec_decode = Role.DRAFT.value in there if spec_decode is None else spec_decode
        if self.spec_decode and Role.DRAFT.value not in there:
            engines.open_engine(path, Role.DRAFT)  # says what is missing before a large base is loaded
        plain = Role.LLM.value in there and not self.spec_decode
        role = Role.LLM if plain or (not there and not self.spec_decode) else Role.BASE
        runner, self.config = open_runner(path, role)
        self.tokenizer = Tokenizer.open(path)
        table = EmbeddingTable(path / bundle.EMBEDDING)
        self.base = CachedDecoder(
            runner, table, RopeTable.of(rope_of(self.config), runner.capacity), self.config["sliding_window"]
        )
        self.drafter: EagleDrafter | None = None
        self.draft_config: dict[str, Any] | None = None
        if self.spec_decode:
            self.drafter, self.draft_config = self.open_draft(path, table)
        self.session = Session(self.base, self.drafter)
        self.stop_ids = frozenset(self.config["eos_token_id"])
        self.notes = self.remarks()

    def open_draft(self, path: Path, shared: EmbeddingTable) -> tuple[EagleDrafter, dict[str, Any]]:
        runner, config = open_runner(path, Role.DRAFT)
        engines.check_pairing(self.config, config)
        own = path / engines.DRAFT_EMBEDDING
        table = EmbeddingTable(own) if config["pair"]["own_embedding"] else shared
        rope = RopeTable.of(rope_of(config), runner.capacity)
        d2t = load_file(path / bundle.D2T)["d2t"].astype(np.int64)
        decoder = CachedDecoder(runner, table, rope, config["sliding_window"])
        return EagleDrafter(decoder, d2t), config

    def remarks(self) -> tuple[str, ...]:
        """What a user should know about this pair of engines."""
        if self.drafter is None or self.drafter.decoder.capacity >= self.base.capacity:
            return ()
        mine, theirs = self.base.capacity, self.drafter.decoder.capacity
        return (f"the draft's KV cache holds {theirs} tokens, the base's {mine}: beyond {theirs} nothing is drafted",)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.base.runner.close()
        if self.drafter is not None:
            self.drafter.decoder.runner.close()

    # ---- what to draft -----------------------------------------------------------------------------------------

    def plan(self, top_k: int | None = None, steps: int | None = None, verify_size: int | None = None) -> DraftPlan:
        """The drafting plan: the values given, the others chosen to go with them; LimitError where it cannot be.

        With no value a short chain, the choice for a CPU. A value left open follows from the others: top_k 1, steps 3
        (verify_size - 1 for a chain), and verify_size the smallest of 60, the nodes that can exist and what the base
        was built for. Only values that were not given shrink to what the engines were built for.
        """
        if self.draft_config is None:
            what = "this engine was opened without its draft"
            raise LimitError(what, "Open it with spec_decode=True, or decode without a plan.")
        base_most = int(self.config["builder_config"]["max_verify_tree_size"])
        draft_most = int(self.draft_config["builder_config"]["max_draft_tree_size"])
        k = CPU_PLAN.top_k if top_k is None else top_k
        if steps is None:
            chain = k == 1 and verify_size is not None and verify_size > 1
            steps = verify_size - 1 if chain and verify_size else max(1, min(CPU_PLAN.steps, draft_most // max(k, 1)))
        if verify_size is None:
            verify_size = min(60, base_most, tree_pool_size(k, steps))
        plan = DraftPlan(k, steps, verify_size)
        self.check_plan(plan)
        return plan

    def check_plan(self, plan: DraftPlan) -> None:
        if self.draft_config is None:
            what = "a drafting plan was given, and this engine was opened without its draft"
            raise LimitError(what, "Open it with spec_decode=True, or pass no plan.")
        k, s, n = plan.top_k, plan.steps, plan.verify_size
        if min(k, s, n) < 1:
            raise LimitError(f"draft top-k {k}, step {s} and verify size {n} must be at least 1", "Raise it.")
        if n > tree_pool_size(k, s):
            what = f"--spec-verify-size {n}: with top-k {k} and step {s} only {tree_pool_size(k, s)} nodes can exist"
            raise LimitError(what, "That is 1 + K + (S-1)*K*K. Lower the verify size, or raise top-k or step.")
        most = self.config["builder_config"]["max_verify_tree_size"]
        if n > most:
            what = f"--spec-verify-size {n} exceeds the {most} that the base engine was built for"
            raise LimitError(what, f"Lower it, or build the base with --max-verify-tree-size {n}.")
        most = self.draft_config["builder_config"]["max_draft_tree_size"]
        if k * s > most:
            what = f"--spec-draft-top-k {k} times --spec-draft-step {s} exceeds the {most} of the draft engine"
            raise LimitError(what, f"Lower them, or build the draft with --max-draft-tree-size {k * s}.")
        if k > self.draft_config["draft_vocab_size"]:
            raise LimitError(f"--spec-draft-top-k {k} exceeds the draft's vocabulary", "Lower it.")

    # ---- generation --------------------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[Message], *, apply_chat_template: bool = True, add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:  # fmt: skip
        """The text of messages: by the model's chat template, or simply joined."""
        if not apply_chat_template:
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
        configs = {"base": self.config} | ({"draft": self.draft_config} if self.draft_config else {})
        for role, config in configs.items():
            limits = config["builder_config"]
            most = limits["max_input_len"]
            if count > most:
                flags = f"--max-input-len {count}"
                if count > limits["max_kv_cache_capacity"]:
                    flags += f" --max-kv-cache-capacity {count}"
                what = f"the prompt has {count} tokens, the {role} engine was built for {most}"
                raise LimitError(what, f"Shorten it, or build the {role} with {flags} or more.")
        rows = self.config["vocab_size"]
        if strange := [token for token in prompt_ids if not 0 <= token < rows]:
            what = f"the prompt holds the token id {strange[0]}, the model's vocabulary ends at {rows - 1}"
            raise RequestError(what, "The tokenizer does not fit the model, or the ids are wrong.")

    def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, plan: DraftPlan | None = None
    ) -> Iterator[Chunk | Response]:
        """Yield a Chunk a step and, last, the Response. `plan` None decodes plainly."""
        self.check_prompt(prompt_ids)
        if plan is not None:
            self.check_plan(plan)
        sampling = with_seed(sampling)
        steps = self.session.generate(
            prompt_ids, sampler_of(sampling), sampling.max_generate_length, self.stop_ids, plan
        )
        text, ids, pieces = TextStream(self.tokenizer), [], []
        metrics, began = RequestMetrics(len(prompt_ids), plan.steps if plan else 0), time.perf_counter()
        for step in steps:
            metrics.add(step, time.perf_counter() - began)
            ids += step.tokens
            delta = "".join(text.push(token) for token in step.tokens)
            if step.finish_reason:
                delta += text.flush()
            pieces.append(delta)
            yield Chunk(step.tokens, delta, step.accepted, step.finish_reason)
            if step.finish_reason:
                metrics.stages = self.session.times
                seed = sampling.seed if sampling.temperature else None
                yield Response("".join(pieces), ids, step.finish_reason, metrics, seed, list(prompt_ids))

    def generate(
        self, prompt: str | Sequence[Message] | Sequence[int], sampling: SamplingParams | None = None,
        plan: DraftPlan | None = None,
    ) -> Response:  # fmt: skip
        """The whole answer. Without a plan an engine with a draft takes `plan()`; see `stream` for plain decoding."""
        ids = self.encode(prompt)
        if plan is None and self.spec_decode:
            plan = self.plan()
        return self.finish(ids, sampling or SamplingParams(), plan)

    def plainly(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Response:
        """The same request without drafts: the reference that speculation must equal."""
        return self.finish(prompt_ids, sampling, None)

    def finish(self, prompt_ids: Sequence[int], sampling: SamplingParams, plan: DraftPlan | None) -> Response:
        *_, last = self.stream(prompt_ids, sampling, plan)
        assert isinstance(last, Response)
        return last

    def first_difference(self, plain: Response, speculative: Response, sampling: SamplingParams) -> Difference | None:
        """Where two runs of a request part, with the margin between the two candidates there; None if equal."""
        one, other = plain.token_ids, speculative.token_ids
        if one == other:
            return None
        index = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        a, b = (ids[index] if index < len(ids) else None for ids in (one, other))
        margin = float("inf")
        if a is not None and b is not None:
            prefix = np.array([*plain.prompt_ids, *one[:index]], np.int64)
            self.base.reset()
            logits = self.base.causal(prefix, np.array([len(prefix) - 1])).logits[0, 0]
            seeded = replace(sampling, seed=plain.seed)
            margin = sampler_of(with_seed(seeded)).margin(logits, len(prefix), a, b)
        return Difference(index, a, b, margin)


def with_seed(sampling: SamplingParams) -> SamplingParams:
    """A seed drawn once where none was given, so that a run can be repeated from its output."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(SEED_BITS))


def sampler_of(sampling: SamplingParams) -> Sampler:
    assert sampling.seed is not None
    return Sampler(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
