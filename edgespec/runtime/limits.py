"""What open engines take: how long a prompt, which token ids, how many sequences.

Knows the configs of the engines. What they draft, and how much, is in `planner`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import LimitError, RequestError
from edgespec.prompts import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`configs` are those of the engines that are open, by role; `max_batch_size` counts the
    sequences that run at a time."""

    configs: Mapping[str, EngineConfig]
    max_batch_size: int

    def check_batch_size(self, count: int) -> None:
        """LimitError where an engine was built for smaller batches, or the drafter holds fewer
        sequences."""
        for role, config in self.configs.items():
            most = config.limits.max_batch_size
            if count > most:
                message = f"batch_size {count}; the {role} engine was built for {most}"
                raise LimitError(
                    message,
                    f"Set batch_size to {most}, or build the {role} with `max_batch_size` {count}.",
                    param="batch_size",
                )
        if count > self.max_batch_size:
            message = f"batch_size {count}; the drafter holds {self.max_batch_size} sequences"
            raise LimitError(message, f"Set batch_size to {self.max_batch_size}.", "batch_size")

    def check_prompt(self, prompt_ids: Sequence[int], *, drafts: bool) -> None:
        """Raises LimitError or RequestError for a prompt that these engines cannot take; `drafts`
        says whether the draft engine is to draft for it."""
        count = len(prompt_ids)
        if not count:
            raise LimitError("the prompt is empty", "Give at least one token.", "prompt")
        for role, config in self.configs.items():
            if role == "draft" and not (drafts and takes_whole_prompts(config)):
                continue
            limits = config.limits
            most = limits.max_input_len
            if count > most:
                flags = f"`max_input_len` {count}"
                if count > limits.max_kv_cache_capacity:
                    flags += f" `max_kv_cache_capacity` {count}"
                message = f"the prompt has {count} tokens, the {role} engine was built for {most}"
                remedy = f"Shorten it, or build the {role} with {flags} or more."
                raise LimitError(message, remedy, "prompt")
        remedy = "The tokenizer does not fit the model, or the ids are wrong."
        self.check_ids("prompt", "the prompt holds", prompt_ids, remedy)

    def check_text(self, text: str, chars_per_token: Callable[[], float]) -> None:
        """LimitError for a text that is too long for the base however it is tokenised; asked before
        that is done, and of the tokenizer only for a text that may be."""
        most = self.configs["base"].limits.max_input_len
        if len(text) > most and len(text) > most * (per_token := chars_per_token()):
            message = f"the prompt has {len(text)} characters, the base engine was built for"
            message += f" {most} tokens, which are at most {most * per_token:.0f} characters"
            count = math.ceil(len(text) / per_token)
            remedy = f"Shorten it, or build the base with `max_input_len` {count} or more."
            raise LimitError(message, remedy, "prompt")

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises RequestError for a token that the model does not have."""
        for name in ("logit_bias", "stop_token_ids"):
            self.check_ids(name, f"{name} names", getattr(sampling, name), "Remove it.")

    def check_ids(self, param: str, where: str, token_ids: Iterable[int], remedy: str) -> None:
        """Raises RequestError for an id outside the base's vocabulary."""
        rows = self.configs["base"].component.vocab_size
        invalid = next((token for token in token_ids if not 0 <= token < rows), None)
        if invalid is not None:
            message = f"{where} the token id {invalid}, the model's vocabulary ends at {rows - 1}"
            raise RequestError(message, remedy, param)


def takes_whole_prompts(draft: EngineConfig) -> bool:
    """Whether a draft's cache has to hold the prompt. A draft model follows as far as it can, and
    heads without layers keep nothing."""
    return draft.component.reads_base and bool(draft.component.ropes)
