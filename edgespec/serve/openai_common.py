"""What chat and completions of OpenAI have in common: fields, usage, finish reasons, ids.

The defaults are OpenAI's and not those of SamplingParams: temperature 1, nothing cut off. Knows the
fields of OpenAI and those that vLLM added. Fields that this version does not have are refused with
the values that ask for nothing; one becomes a row of SAMPLING when there is such a parameter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from edgespec import __version__
from edgespec.errors import RequestError
from edgespec.prompts import SamplingParams, checks
from edgespec.prompts.places import JsonPlace, show
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.sequence import Candidates
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.serve import structured
from edgespec.serve.errors import Refusal, prompt_too_long
from edgespec.serve.fields import (
    BOOLEAN,
    INTEGER,
    INTEGERS,
    NUMBER,
    OBJECT,
    STRING,
    STRINGS,
    Field,
    Fields,
    Values,
    harmless,
    refused,
    stream_options,
    taken,
)
from edgespec.serve.metrics import FINISH_REASONS
from edgespec.serve.service import Service

MAX_CHOICES = 128  # OpenAI's limit of `n`; the server's own is in its limits
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not
FINGERPRINT = f"edgespec-{__version__}"
NO_MEANING = "it means nothing on a server of your own"
SUPPORTED_STOP = {"anyOf": [STRING, STRINGS]}


def top_k(value: object, here: JsonPlace) -> object:
    """Returns top_k; vLLM's -1 is off, as 0."""
    return (
        0 if value == -1 and not isinstance(value, bool) else checks.SAMPLING["top_k"](value, here)
    )


def any_of(name: str, schema: Any) -> Field:
    """A field that is a sampling parameter under its own name."""
    return taken(checks.SAMPLING[name], schema)


# Field -> how it is taken; those that are names of SamplingParams become them
SAMPLING: Fields = {
    "temperature": any_of("temperature", NUMBER),
    "top_p": any_of("top_p", NUMBER),
    "top_k": taken(top_k, INTEGER),
    "min_p": any_of("min_p", NUMBER),
    "repetition_penalty": any_of("repetition_penalty", NUMBER),
    "seed": any_of("seed", INTEGER),
    "stop": any_of("stop", SUPPORTED_STOP),
    "logit_bias": any_of("logit_bias", OBJECT),
    "presence_penalty": any_of("presence_penalty", NUMBER),
    "frequency_penalty": any_of("frequency_penalty", NUMBER),
    "min_tokens": any_of("min_tokens", INTEGER),
    "ignore_eos": any_of("ignore_eos", BOOLEAN),
    "stop_token_ids": any_of("stop_token_ids", INTEGERS),
}
COMMON: Fields = {
    **SAMPLING,
    **structured.FIELDS,
    "model": taken(checks.text, STRING),
    "n": taken(checks.integer(1, MAX_CHOICES), INTEGER),
    "stream": taken(checks.flag, BOOLEAN),
    "stream_options": taken(stream_options, OBJECT),
    "return_token_ids": taken(checks.flag, BOOLEAN),
    "disable_spec_decode": taken(checks.flag, BOOLEAN),
    "priority": taken(checks.integer(-checks.MAX_COUNT, checks.MAX_COUNT), INTEGER),
    "cache_salt": taken(checks.text, STRING),
    "user": harmless(NO_MEANING, STRING),
    "request_id": harmless(NO_MEANING, STRING),
    "prompt_logprobs": refused("completions with `echo` and `logprobs` have them"),
    "best_of": refused("answers are not ranked; `n` gives several", 1),
    "use_beam_search": refused("there is no beam search", False),
    "length_penalty": refused("there is no beam search", 1, 1.0),
    "skip_special_tokens": refused("special tokens are no text here", True),
    "spaces_between_special_tokens": refused("special tokens are no text here", True),
    "include_stop_str_in_output": refused("an answer ends before its stop string", False),
    "truncate_prompt_tokens": refused("prompts are never cut"),
    "allowed_token_ids": refused("`logit_bias` forbids tokens"),
    "bad_words": refused("`logit_bias` forbids tokens", []),
    "logits_processors": refused("no code of a request is run", []),
}


def turn_of(values: Values) -> dict[str, Any]:
    """How a request is to be run, as fields of an Ask."""
    turn = {name: values[name] for name in values.keys() & {"priority", "cache_salt"}}
    form = structured.field_of(values)
    return turn | {"drafts": not values.get("disable_spec_decode", False), "form": form}


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer to a client begin with. `object` is what is sent."""

    object: str
    id: str
    model: str
    created: int

    @classmethod
    def new(cls, kind: str, prefix: str, model: str) -> Head:
        """That of a new answer."""
        return cls(kind, f"{prefix}-{uuid4().hex}", model, int(time.time()))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def samplings(
    values: Values, max_tokens: int, num_logprobs: int, prompt_logprobs: int | None = None
) -> list[SamplingParams]:
    """The sampling of each of `n` choices: the first with the seed as it is, the others with seeds
    that follow from it."""
    given = {name: values[name] for name in SAMPLING if name in values}
    seed = given.pop("seed", None)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **given}
    return [
        SamplingParams(
            **params,
            seed=derived(seed, index),
            max_generate_length=max_tokens,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
            guided=values.get(structured.field_of(values)),
        )
        for index in range(values.get("n", 1))
    ]


def derived(seed: int | None, index: int) -> int | None:
    """The seed of a further choice."""
    if seed is None or not index:
        return seed
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def room_of(
    service: Service,
    num_prompt: int,
    asked: int | None,
    adjusted: list[str],
    field: str = "max_tokens",
) -> int:
    """How many tokens an answer may have: as many as were asked for by a field, else all that fit.
    Raises Refusal for a prompt that leaves none."""
    most = service.max_model_len - num_prompt
    if not num_prompt:
        raise Refusal(400, "The prompt has no tokens.", code="invalid_value", param="prompt")
    if most < 1:
        raise prompt_too_long(service.max_model_len, f"it has {num_prompt}.")
    if asked is not None and asked > most:
        adjusted.append(f"{field}: {most} of {asked}, which is what the context has left")
    return most if asked is None else min(asked, most)


def finish_reason(response: Response) -> str:
    """Why an answer ended, as OpenAI's clients know it."""
    return FINISH_REASONS[response.finish_reason]


def usage_of(
    num_prompt: int, responses: Sequence[Response], num_thoughts: int | None = None
) -> dict[str, Any]:
    """What was read and written. `num_prompt` are the tokens of all prompts, each counted once."""
    completion = sum(response.metrics.completion_tokens for response in responses)
    details: dict[str, int] = {
        "accepted_prediction_tokens": sum(r.metrics.num_accepted for r in responses)
    }
    if num_thoughts is not None:
        details["reasoning_tokens"] = num_thoughts
    cached = max((response.metrics.reused_tokens for response in responses), default=0)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": completion,
        "total_tokens": num_prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
    }


def speculation_of(response: Response) -> dict[str, Any]:
    """`metrics` as vLLM sends them; nothing where nothing was to be drafted."""
    if not response.metrics.num_spec_tokens:
        return {}
    return {"metrics": {"speculative_decoding": response.metrics.speculative_decoding()}}


def with_adjusted(answer: dict[str, Any], adjusted: Sequence[str]) -> dict[str, Any]:
    """An answer that names what of its request was taken otherwise."""
    return {**answer, "adjusted": [*adjusted]} if adjusted else answer


def logprob_of(value: float) -> float:
    """A log-probability that JSON can hold."""
    return max(value, LEAST_LOGPROB)


def token_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    """A token with its text, its bytes and its log-probability."""
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": logprob_of(logprob),
        "bytes": [*raw],
    }


def own_logprob(step: Candidates, token_id: int) -> float:
    """That of the token which was drawn: it is always among the candidates."""
    return dict(step)[token_id]


def data_images_only(sources: Sequence[str], here: JsonPlace) -> None:
    """Raises RequestError for an image that is not in the request: a server opens no path and no
    URL that a client names."""
    for source in sources:
        if not source.startswith("data:"):
            remedy = 'Send it as "data:image/png;base64,...".'
            here.refuse(f"has an image {show(source)}, and only data: URLs are taken", remedy)


def thinking_of(values: Values, service: Service) -> bool:
    """Whether the model is to think, by reasoning_effort and chat_template_kwargs. Raises
    RequestError where they differ, or where the model has no such mode."""
    effort, kwargs = values.get("reasoning_effort"), values.get("chat_template_kwargs", {})
    by_effort = None if effort is None else effort != "none"
    asked = kwargs.get("enable_thinking", by_effort)
    if by_effort is not None and asked is not by_effort:
        message = "request: reasoning_effort and chat_template_kwargs.enable_thinking differ."
        raise RequestError(message, "Leave one of the two out.", param="reasoning_effort")
    if asked and not service.engine.tokenizer.knows_thinking():
        message = "request: the model's chat template has no thinking mode."
        raise RequestError(message, "Leave reasoning_effort out.", param="reasoning_effort")
    return bool(asked)


def template_kwargs(value: object, here: JsonPlace) -> Values:
    """Returns the variables of the chat template that a request may set."""
    if not isinstance(value, dict):
        here.refuse(f"is {show(value)}, not an object", 'Write {"enable_thinking": true}.')
    for name in value:
        if name != "enable_thinking":
            here.key(name).refuse("is not one that may be set", "Set enable_thinking alone.")
    return {name: checks.flag(item, here.key(name)) for name, item in value.items()}
