"""What goes in and what comes out: `input.json` and prompt sets to requests, responses to
`output.json`.

Knows the keys, their defaults and their limits, and refuses what this version does not support.
Knows nothing of tokens, templates or engines.
"""

from __future__ import annotations

from edgespec.prompts.checks import MAX_BATCH_SIZE, MAX_LOGPROBS, LogitBias
from edgespec.prompts.guided import Guided
from edgespec.prompts.image_item import MAX_IMAGES, ImageItem
from edgespec.prompts.output import Journal, NoJournal, check_writable, write_output
from edgespec.prompts.parse import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGES,
    MAX_REQUEST_BYTES,
    parse_requests,
    read_requests,
)
from edgespec.prompts.sets import parse_prompt_set, read_prompt_set
from edgespec.prompts.source import MAX_FILE_BYTES, parse_json
from edgespec.prompts.stream_output import OutputStream, StreamOutput, stream_of
from edgespec.prompts.texts import read_stdin, text_requests
from edgespec.prompts.types import (
    CANCELLED,
    CAPACITY,
    END_OF_SEQUENCE,
    ERROR,
    MAX_LENGTH,
    STOP_WORDS,
    TIMEOUT,
    Message,
    Overrides,
    Request,
    RequestFile,
    SamplingParams,
)

__all__ = [
    "CANCELLED",
    "CAPACITY",
    "END_OF_SEQUENCE",
    "ERROR",
    "MAX_BATCH_SIZE",
    "MAX_FILE_BYTES",
    "MAX_IMAGES",
    "MAX_LENGTH",
    "MAX_LOGPROBS",
    "MAX_MESSAGES",
    "MAX_MESSAGE_BYTES",
    "MAX_REQUEST_BYTES",
    "STOP_WORDS",
    "TIMEOUT",
    "Guided",
    "ImageItem",
    "Journal",
    "LogitBias",
    "Message",
    "NoJournal",
    "OutputStream",
    "Overrides",
    "Request",
    "RequestFile",
    "SamplingParams",
    "StreamOutput",
    "check_writable",
    "parse_json",
    "parse_prompt_set",
    "parse_requests",
    "read_prompt_set",
    "read_requests",
    "read_stdin",
    "stream_of",
    "text_requests",
    "write_output",
]
