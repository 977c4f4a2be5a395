"""vLLM's `POST /tokenize` and `/detokenize`: texts or messages to token ids, and back."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from edgespec.errors import RequestError
from edgespec.prompts import checks
from edgespec.prompts.tools import tools
from edgespec.serve.errors import Refusal
from edgespec.serve.fields import BOOLEAN, INTEGERS, OBJECT, STRING, Fields, refused, taken
from edgespec.serve.fields import token_ids as ids_check
from edgespec.serve.openai_chat import server_messages
from edgespec.serve.openai_common import template_kwargs, thinking_of
from edgespec.serve.service import Call

TOKENIZE: Fields = {
    "model": taken(checks.text, STRING),
    "prompt": taken(checks.text, STRING),
    "messages": taken(server_messages, {"type": "array", "items": OBJECT}),
    "add_special_tokens": taken(checks.flag, BOOLEAN),
    "return_token_strs": taken(checks.flag, BOOLEAN),
    "chat_template_kwargs": taken(template_kwargs, OBJECT),
    "add_generation_prompt": refused("an answer begins a message of its own", True),
    "continue_final_message": refused("an answer begins a message of its own", False),
    "chat_template": refused("no template of a request is run"),
    "tools": taken(tools, {"type": "array", "items": OBJECT}),
}
DETOKENIZE: Fields = {
    "model": taken(checks.text, STRING),
    "tokens": taken(ids_check, INTEGERS, required=True),
}


async def tokenize(call: Call) -> ASGIApp:
    """The ids of a text, or of messages as the chat template renders them. Raises RequestError."""
    values, service = call.values, call.service
    engine = service.engine
    if ("prompt" in values) == ("messages" in values):
        raise RequestError("request: give one of prompt and messages.", param="prompt")
    if "messages" in values:
        thinking = thinking_of(values, service)
        ids = await asyncio.to_thread(
            engine.encode,
            values["messages"],
            enable_thinking=thinking,
            tools=values.get("tools"),
            allow_control_tokens=service.allow_control_tokens,
        )
    elif values.get("add_special_tokens", True):
        ids = await asyncio.to_thread(engine.encode, values["prompt"])
    else:
        ids = await asyncio.to_thread(engine.tokenizer.encode, values["prompt"])
    names = [engine.tokenizer.token(i) or "" for i in ids] if "return_token_strs" in values else []
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": service.max_model_len,
            "tokens": [*ids],
            "token_strs": names if values.get("return_token_strs") else None,
        }
    )


async def detokenize(call: Call) -> ASGIApp:
    """The text of ids, special tokens among them. Raises Refusal for an id that there is not."""
    tokenizer, ids = call.service.engine.tokenizer, call.values["tokens"]
    if unknown := [i for i in ids if tokenizer.token(i) is None]:
        raise Refusal(400, f"There is no token {unknown[0]}.", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)
    return JSONResponse({"prompt": text})
