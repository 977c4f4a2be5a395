"""Images inside `data:` URLs (RFC 2397), in base64. Knows text and bytes."""

from __future__ import annotations

import binascii
import re

from edgespec.errors import RequestError

HEAD = re.compile(r"data:(?P<type>[^;,]*)(?P<parameters>(?:;[^;,]*)*),", re.IGNORECASE)
MAX_HEAD_CHARS = 256
FORM = "Write data:image/png;base64,... with the bytes of the file in base64."
BLANKS = str.maketrans("", "", " \t\r\n")


def encode(format: str, data: bytes) -> str:
    """The `data:` URL of an image's bytes, of a format such as png."""
    return f"data:image/{format};base64,{binascii.b2a_base64(data, newline=False).decode()}"


def decode(url: str, shown: str, max_bytes: int) -> tuple[str, bytes]:
    """The format that a `data:` URL claims, such as png, and its bytes, one more than `max_bytes`
    at most. `shown` is its name in messages.

    Raises RequestError for a URL of no image, or in another coding than base64.
    """
    head = HEAD.match(url, 0, MAX_HEAD_CHARS)
    if head is None:
        raise RequestError(f"image {shown} is a data: URL without a comma.", FORM)
    kind, _, claimed = head["type"].strip().lower().partition("/")
    if kind not in ("", "image"):
        raise RequestError(f"image {shown} is a data: URL of another type than image.", FORM)
    if not head["parameters"].lower().endswith(";base64"):
        raise RequestError(f"image {shown} is a data: URL that is not in base64.", FORM)
    # Four characters make three bytes; what is longer is cut, and then too large by a byte or more
    text = url[head.end() :].translate(BLANKS)[: 4 * (max_bytes // 3 + 1)]
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"image {shown} is a data: URL whose base64 is damaged.", FORM
        ) from error
    if not data:
        raise RequestError(f"image {shown} is a data: URL without data.", FORM)
    return claimed, data
