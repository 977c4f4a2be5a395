"""A prompt set in the forms of other benchmarks, and the command line by which each reads it.

Knows their keys. Knows nothing of tokens, and runs nothing.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from edgespec.errors import RequestError
from edgespec.prompts.types import Request, RequestFile

SETS: Mapping[str, int] = {"humaneval": 1, "mt_bench": 2}  # turns of each prompt
MULTI_TURN = "sharegpt or aiperf"  # the forms for several turns


@dataclass(frozen=True, slots=True)
class Form:
    """A form: what it makes of prompts, and how its program is called, up to the file."""

    write: Callable[[Iterable[Request]], Iterator[str]]
    program: str


def converted(requests: RequestFile, name: str, form: str) -> str:
    """The text of the file of a form, of the set `name`. Raises RequestError for a set of another
    name, and for several turns where the form has but one."""
    for request in requests.requests:
        if len(turns(request)) != SETS[name]:
            message = f"{requests.path}: prompt {request.name or request.index} has"
            message = f"{message} {len(turns(request))} turns, those of {name} have {SETS[name]}"
            raise RequestError(message, "Name the set that it is, or another file.")
    return "".join(FORMS[form].write(requests.requests))


def command_line(form: str, file: str, model: str = "MODEL", url: str = "localhost:8000") -> str:
    """What to type to send a converted file to an OpenAI-compatible server."""
    words = (part.format(model=model, url=url) for part in FORMS[form].program.split())
    return shlex.join((*words, file))


def turns(request: Request) -> tuple[str, ...]:
    """What the user says, in turn."""
    return (*(message.content for message in request.messages), *request.turns)


def genai_perf(requests: Iterable[Request]) -> Iterator[str]:
    """A line with `text` each. Raises RequestError for several turns, which it does not have."""
    for request in requests:
        if len(turns(request)) > 1:
            message = f"prompt {request.name or request.index} has {len(turns(request))} turns"
            raise RequestError(
                f"{message}, and genai-perf sends one", f"Convert to {MULTI_TURN} instead."
            )
        yield line({"text": turns(request)[0]})


def aiperf(requests: Iterable[Request]) -> Iterator[str]:
    """A session each, of one turn or several."""
    for request in requests:
        session = request.name or str(request.index)
        yield line({"session_id": session, "turns": [{"text": text} for text in turns(request)]})


def sharegpt(requests: Iterable[Request]) -> Iterator[str]:
    """A conversation each. What the model is to answer is empty: a prompt set has no answers."""
    conversations = [
        {
            "id": request.name or str(request.index),
            "conversations": [
                {"from": who, "value": value}
                for text in turns(request)
                for who, value in (("human", text), ("gpt", ""))
            ],
        }
        for request in requests
    ]
    yield json.dumps(conversations, ensure_ascii=False, indent=1) + "\n"


def line(value: Mapping[str, object]) -> str:
    """A line of JSONL."""
    return json.dumps(value, ensure_ascii=False) + "\n"


CHAT = "--model {model} --tokenizer TOKENIZER_DIR --url {url} --endpoint-type chat --streaming"
VLLM = (
    "--backend openai-chat --endpoint /v1/chat/completions --model {model} --base-url http://{url}"
)
FORMS: Mapping[str, Form] = {
    "genai-perf": Form(genai_perf, f"genai-perf profile {CHAT} --concurrency 1 --input-file"),
    "aiperf": Form(
        aiperf,
        f"aiperf profile {CHAT} --concurrency 1 --custom-dataset-type multi_turn --input-file",
    ),
    "sharegpt": Form(
        sharegpt,
        f"vllm bench serve {VLLM} --dataset-name sharegpt --sharegpt-output-len 128 --dataset-path",
    ),
}
