"""Answers a request file with an engine: one response a request, each with its metrics, none harmed by another.

Knows requests and responses. How tokens come about stands in `engine` and below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import EdgeSpecError, RequestError
from edgespec.prompts import CANCELLED, ERROR, Request
from edgespec.runtime.engine import Chunk, Difference, Engine, Response, with_seed
from edgespec.runtime.tree import DraftPlan

Observer = Callable[[Chunk], None]


@dataclass(frozen=True)
class Answer:
    """A request and what came of it: a response, or the error that this request alone met."""

    request: Request
    prompt: str = ""  # the text that was tokenised
    system_prompt: str = ""
    response: Response | None = None
    speculative: bool = False
    plain: Response | None = None  # with check_lossless: the same request without drafts
    difference: Difference | None = None
    error: EdgeSpecError | None = None
    cancelled: bool = False


def answer(
    engine: Engine, request: Request, plan: DraftPlan | None, *, check_lossless: bool = False,
    observe: Observer = lambda chunk: None,
) -> Answer:  # fmt: skip
    """Answer one request; an error of the request is part of the answer, not an exception."""
    try:
        return attempt(engine, request, plan, check_lossless, observe)
    except EdgeSpecError as error:
        return Answer(request, error=error)


def attempt(
    engine: Engine, request: Request, plan: DraftPlan | None, check_lossless: bool, observe: Observer
) -> Answer:
    prompt = engine.render(
        request.messages, apply_chat_template=request.apply_chat_template,
        add_generation_prompt=request.add_generation_prompt, enable_thinking=request.enable_thinking,
    )  # fmt: skip
    system_prompt = rendered_system(engine, request)
    ids = engine.tokenizer.encode(prompt, add_special_tokens=not request.apply_chat_template)
    # Both runs of a check draw from one seed.
    sampling = with_seed(request.sampling)
    plan = None if request.disable_spec_decode else plan
    response = None
    for item in engine.stream(ids, sampling, plan):
        if isinstance(item, Response):
            response = item
        else:
            observe(item)
    assert response is not None
    found = Answer(request, prompt, system_prompt, response, speculative=plan is not None)
    if not check_lossless or plan is None:
        return found
    plain = engine.plainly(ids, sampling)
    return replace(found, plain=plain, difference=engine.first_difference(plain, response, sampling))


def rendered_system(engine: Engine, request: Request) -> str:
    """The text of the system messages alone; empty where there are none or the template cannot do without a user."""
    system = [m for m in request.messages if m.role == "system"]
    if not system or not request.apply_chat_template:
        return ""
    try:
        return engine.render(system, add_generation_prompt=False, enable_thinking=request.enable_thinking)
    except RequestError:
        return ""


def to_dict(found: Answer) -> dict[str, object]:
    """One entry of output.json's `responses`."""
    request = found.request
    out: dict[str, object] = {
        "request_idx": request.index,
        "batch_idx": 0,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
    }
    if found.response is None:
        reason = CANCELLED if found.cancelled else ERROR
        text = "" if found.error is None else f"{found.error.what} {found.error.remedy}".strip()
        return {"output_text": "", "finish_reason": reason, "error": text} | out
    response = found.response
    text_part: dict[str, object] = {
        "output_text": response.text,
        "output_ids": response.token_ids,
        "finish_reason": response.finish_reason,
    }
    out |= {
        "formatted_system_prompt": found.system_prompt,
        "formatted_complete_request": found.prompt,
        "seed": response.seed,
        "metrics": response.metrics.to_dict(speculative=found.speculative),
    }
    return text_part | out | ({"lossless": lossless(found)} if found.plain is not None else {})


def lossless(found: Answer) -> dict[str, Any]:
    """The report of one check: equal, or the first difference with its margin."""
    if found.difference is None:
        return {"equal": True}
    difference = found.difference
    return {
        "equal": False,
        "near_tie": difference.near_tie,
        "token_index": difference.index,
        "plain_token": difference.plain,
        "speculative_token": difference.speculative,
        "margin": difference.margin if difference.margin < float("inf") else None,
    }
