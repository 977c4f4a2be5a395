"""KServe's protocol V2 as Triton Inference Server speaks it for TensorRT-LLM: health, metadata,
`generate`, `generate_stream` and `infer`.

Inputs and outputs have the names of TensorRT-LLM's config.pbtxt, those of its inflight batcher and
those of its LLM API (`sampling_param_*`). The prompt stands before the answer unless it is left
out. A block of the KV cache is one token here. Tensors stand in `kserve_tensors`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from edgespec import __version__
from edgespec.prompts import checks
from edgespec.prompts.places import JsonPlace
from edgespec.runtime.loop.generation import Response as Answer
from edgespec.serve import kserve_tensors as tensors
from edgespec.serve.answering import Answers, Ask
from edgespec.serve.errors import Refusal
from edgespec.serve.fields import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    Field,
    Fields,
    Values,
    harmless,
    read,
    refused,
    taken,
)
from edgespec.serve.openai_common import (
    SUPPORTED_STOP,
    finish_reason,
    own_logprob,
    room_of,
    samplings,
    with_adjusted,
)
from edgespec.serve.responding import respond
from edgespec.serve.service import Call, Ticket

VERSION = "1"  # of the model: it has no other
# The names that NVIDIA's examples call a model by
EXAMPLES = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
MAX_TOKENS = 16  # TensorRT-LLM's default, of both backends
EXTENSIONS = ("binary_tensor_data", "generate")
LLMAPI = "sampling_param_"  # how the LLM API's backend calls a parameter
NO_BEAMS = "there is no beam search"
NO_LORA = "adapters are not served"
NO_IMAGES = "images go to /v1/chat/completions"


def stops(value: object, here: JsonPlace) -> object:
    """Returns stop strings; an empty one is none."""
    listed = value if isinstance(value, list) else [value]
    return checks.SAMPLING["stop"]([text for text in listed if text != ""], here)


def both(name: str, row: Field) -> Fields:
    """A parameter under the names of both backends."""
    return {name: row, f"{LLMAPI}{name}": row}


SAMPLING: Fields = {
    **both("temperature", taken(checks.SAMPLING["temperature"], NUMBER)),
    **both("top_k", taken(checks.SAMPLING["top_k"], INTEGER)),
    **both("top_p", taken(checks.SAMPLING["top_p"], NUMBER)),
    **both("seed", taken(checks.SAMPLING["seed"], INTEGER)),
    **both("max_tokens", taken(checks.integer(1, checks.MAX_COUNT), INTEGER)),
    **both("stop", taken(stops, SUPPORTED_STOP)),
    **both("presence_penalty", taken(checks.SAMPLING["presence_penalty"], NUMBER)),
    **both("frequency_penalty", taken(checks.SAMPLING["frequency_penalty"], NUMBER)),
    **both("best_of", refused("answers are not ranked", 1)),
    **both("logits_post_processor_name", refused("no code of a request is run", "")),
    "repetition_penalty": taken(checks.SAMPLING["repetition_penalty"], NUMBER),
}
# Name -> the parameter that it is here
ALIASES = {
    "random_seed": "seed",
    "min_length": "min_tokens",
    "stop_words": "stop",
    "exclude_input_in_output": f"{LLMAPI}exclude_input_from_output",
    "exclude_input_from_output": f"{LLMAPI}exclude_input_from_output",
    "return_perf_metrics": f"{LLMAPI}return_perf_metrics",
    "streaming": "stream",
    "return_log_probs": "return_cumulative_logprob",
}
FLAGS = (
    "stream",
    "return_finish_reason",
    "return_stop_reason",
    "return_cumulative_logprob",
    "disable_spec_decode",
    f"{LLMAPI}exclude_input_from_output",
    f"{LLMAPI}return_perf_metrics",
)
OWN: Fields = {
    "text_input": taken(checks.text, STRING, required=True),
    **SAMPLING,
    **{name: taken(checks.flag, BOOLEAN) for name in FLAGS},
    "id": taken(checks.text, STRING),
    "end_id": taken(checks.integer(0, checks.MAX_COUNT), INTEGER),  # beside the model's own ends
    "pad_id": harmless("nothing is padded", INTEGER),
    "bad_words": refused("`logit_bias` of /v1/completions forbids tokens", "", []),
    "beam_width": refused(NO_BEAMS, 1),
    "length_penalty": refused(NO_BEAMS, 1, 1.0),
    "early_stopping": refused(NO_BEAMS, 0, False),
    "min_tokens": taken(checks.SAMPLING["min_tokens"], INTEGER),
    "image_url": refused(NO_IMAGES, ""),
    **{f"lora_{name}": refused(NO_LORA) for name in ("id", "name", "path", "ckpt_source")},
    **{f"lora_{name}": refused(NO_LORA) for name in ("task_id", "weights", "config")},
}
FIELDS: Fields = {**OWN, **{name: OWN[known] for name, known in ALIASES.items()}}
# Outputs beside text_output -> their type
OUTPUTS = {
    "finish_reason": "BYTES",
    "stop_reason": "BYTES",
    "cumulative_logprob": "FP32",
    **dict.fromkeys(
        (
            "kv_cache_reused_block",
            "kv_cache_missed_block",
            "kv_cache_alloc_new_blocks",
            "kv_cache_alloc_total_blocks",
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
            "total_accepted_draft_tokens",
            "total_draft_tokens",
        ),
        "INT64",
    ),
    "kv_cache_hit_rate": "FP32",
    "acceptance_rate": "FP32",
}


# ---- what is there


async def live(call: Call) -> ASGIApp:
    """Whether the server lives."""
    return Response()


async def ready(call: Call) -> ASGIApp:
    """Whether it takes requests; of a model, whether it is there."""
    if "model" in call.request.path_params:
        model_of(call)
    return Response(status_code=503 if call.service.draining else 200)


async def server(call: Call) -> ASGIApp:
    """The server's metadata."""
    return JSONResponse({"name": "edgespec", "version": __version__, "extensions": [*EXTENSIONS]})


async def metadata(call: Call) -> ASGIApp:
    """The model's metadata: its inputs and outputs."""
    inputs, outputs = tensors.declared(OWN, "shape"), tensors.outputs(OUTPUTS, "shape")
    about = {"name": model_of(call), "versions": [VERSION], "platform": "edgespec"}
    return JSONResponse({**about, "inputs": inputs, "outputs": outputs})


async def config(call: Call) -> ASGIApp:
    """The model's configuration, as far as there is one."""
    return JSONResponse(
        {
            "name": model_of(call),
            "platform": "edgespec",
            "backend": "edgespec",
            "max_batch_size": 0,
            "input": tensors.declared(OWN, "dims"),
            "output": tensors.outputs(OUTPUTS, "dims"),
            "model_transaction_policy": {"decoupled": True},
        }
    )


def model_of(call: Call) -> str:
    """The model that a path names. Raises Refusal for one that is not served."""
    params = call.request.path_params
    name, version = params["model"], params.get("version", VERSION)
    if name not in EXAMPLES:
        call.service.check_model(name)
    if version != VERSION:
        raise Refusal(404, f"{name[:200]} has version {VERSION} alone.", param="version")
    return str(name)


# ---- answers


async def generate(call: Call) -> ASGIApp:
    """The response to `generate`: one JSON object."""
    return await respond(call, request_of(call, stream=False), 1)


async def generate_stream(call: Call) -> ASGIApp:
    """The response to `generate_stream`: an event for each step that made text."""
    return await respond(call, request_of(call, stream=True), 1)


async def infer(call: Call) -> ASGIApp:
    """The response to `infer`, whose inputs are tensors."""
    name, asked = model_of(call), tensors.request_of(call)
    here = []
    for inputs in asked.inputs:
        values, adjusted = read(inputs, FIELDS)
        here.append(values)
        call.adjusted.extend(text for text in adjusted if text not in call.adjusted)
    if any(values.get("stream") or values.get("streaming") for values in here):
        message = "infer does not stream; generate_stream does."
        raise Refusal(400, message, code="invalid_value", param="stream")
    calls = [Call(call.service, call.request, call.form, values, call.adjusted) for values in here]
    work = InferRequest([GenerateRequest(one, name) for one in calls])
    call.values["stream"] = False
    outputs = set(OUTPUTS) | {"text_output"}
    made = partial(asked.response, name, known=outputs, adjusted=call.adjusted)
    return await respond(call, work, len(calls), made=made)


def request_of(call: Call, *, stream: bool) -> GenerateRequest:
    """A request of `generate`; the path says whether it streams."""
    call.values["stream"] = stream
    return GenerateRequest(call, model_of(call))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request as it was read."""

    call: Call
    model: str
    arrival_ns: int = field(default_factory=time.perf_counter_ns)

    @property
    def values(self) -> Values:
        """Its parameters, each under one name."""
        given = {ALIASES.get(name, name): value for name, value in self.call.values.items()}
        return {name.removeprefix(LLMAPI): value for name, value in given.items()}

    async def ask(self) -> Ask:
        """What the engine is asked, once the text is encoded."""
        service, values = self.call.service, self.values
        ids = await asyncio.to_thread(service.engine.encode, values["text_input"])
        room = room_of(service, len(ids), values.get("max_tokens", MAX_TOKENS), self.call.adjusted)
        if not {"temperature", "top_k", "top_p"} & values.keys():
            values["temperature"] = 0.0  # as TensorRT-LLM does
        if "end_id" in values:
            values["stop_token_ids"] = (values["end_id"],)
        (sampling,) = samplings(values, room, int(values.get("return_cumulative_logprob", False)))
        return Ask(ids, sampling, not values.get("disable_spec_decode", False))

    async def answers(self, ticket: Ticket) -> Answers:
        """The answer, which the engine has begun."""
        return Answers(self.call.service, [await self.ask()], ticket)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The answer as one JSON object."""
        (response,) = await answers.ended()
        return with_adjusted({**self.head, **self.outputs(response)}, self.call.adjusted)

    async def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """An object for each step that made text; the last has the outputs beside it."""
        async for _, event in answers.events():
            if isinstance(event, Answer):
                last = {**self.head, **self.outputs(event), "text_output": ""}
                yield with_adjusted(last, self.call.adjusted)
            elif event.text:
                yield {**self.head, "text_output": event.text}

    @property
    def head(self) -> dict[str, Any]:
        """What all objects begin with; of sequences, as Triton's ensembles do."""
        own = {"id": self.values["id"]} if "id" in self.values else {}
        sequence = {"sequence_end": False, "sequence_id": 0, "sequence_start": False}
        return {**own, "model_name": self.model, "model_version": VERSION, **sequence}

    def outputs(self, response: Answer) -> dict[str, Any]:
        """The outputs that are asked for, by name."""
        values = self.values
        prompt = "" if values.get("exclude_input_from_output") else values["text_input"]
        made: dict[str, Any] = {"text_output": prompt + response.text}
        if values.get("return_finish_reason"):
            made["finish_reason"] = finish_reason(response)
        if values.get("return_stop_reason"):
            made["stop_reason"] = response.finish_reason
        if values.get("return_cumulative_logprob"):
            pairs = zip(response.logprobs, response.token_ids, strict=True)
            made["cumulative_logprob"] = sum(own_logprob(step, token) for step, token in pairs)
        return made | (self.performance(response) if values.get("return_perf_metrics") else {})

    def performance(self, response: Answer) -> dict[str, Any]:
        """Times in nanoseconds of a clock that only their differences mean something of, tokens
        of the KV cache, and drafts."""
        of, since = response.metrics, self.arrival_ns
        drafted, accepted = sum(of.per_step_drafted), of.num_accepted
        read_now = of.prompt_tokens - of.reused_tokens
        return {
            "kv_cache_reused_block": of.reused_tokens,
            "kv_cache_missed_block": read_now,
            "kv_cache_alloc_new_blocks": read_now + of.completion_tokens,
            "kv_cache_alloc_total_blocks": of.prompt_tokens + of.completion_tokens,
            "kv_cache_hit_rate": of.reused_tokens / max(1, of.prompt_tokens),
            "arrival_time_ns": since,
            "first_scheduled_time_ns": since + round(1e9 * of.queue_time),
            "first_token_time_ns": since + round(1e9 * of.time_to_first_token),
            "last_token_time_ns": since + round(1e9 * of.request_latency),
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "total_accepted_draft_tokens": accepted,
            "total_draft_tokens": drafted,
        }


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Several requests that are answered together."""

    requests: list[GenerateRequest]

    async def answers(self, ticket: Ticket) -> Answers:
        """All answers, which the engine has begun."""
        asks = [await request.ask() for request in self.requests]
        return Answers(self.requests[0].call.service, asks, ticket)

    async def whole(self, answers: Answers) -> Any:
        """The outputs of each."""
        pairs = zip(self.requests, await answers.ended(), strict=True)
        return [request.outputs(response) for request, response in pairs]

    def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """`infer` does not stream."""
        raise NotImplementedError
