"""The bytes of an image that a request names, where the rules of this run allow to read it.

Tells files, `data:` URLs and URLs apart. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import RequestError
from edgespec.images import data_url, files, urls
from edgespec.prompts import ImageItem

TIMEOUT_S = 20.0  # of all that the URLs of a request take, names and redirects included


@dataclass(frozen=True, slots=True)
class ImageRules:
    """What may be read. Relative paths begin at `directory`, and files in it may be read; None is
    the working directory. So may files in `roots`. With `also_working_directory` a relative path
    that is not there begins at the working directory instead, whose files may then be read. URLs
    are fetched only with `allow_urls`, those of a request within `timeout_s` seconds."""

    directory: Path | None = None
    roots: tuple[Path, ...] = ()
    allow_urls: bool = False
    timeout_s: float = TIMEOUT_S
    also_working_directory: bool = False


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """The bytes of an image file, and the format that its name claims, such as jpg; "" is none."""

    data: bytes
    claimed: str = ""


def read_bytes(
    item: ImageItem, rules: ImageRules, max_bytes: int, deadline: float | None = None
) -> ImageBytes:
    """The bytes of an image, one more than `max_bytes` at most. A URL must answer until `deadline`,
    by `time.monotonic`; None: within the rules' time. Raises RequestError for what the rules
    forbid, and for what cannot be read."""
    if item.kind == "data":
        claimed, data = data_url.decode(item.source, item.shown, max_bytes)
        return ImageBytes(data, claimed)
    if item.kind == "url":
        if not rules.allow_urls:
            message = f"image {item.shown} is a URL, and URLs are not fetched."
            remedy = "Save the image in `image_root`, or allow it: `allow_image_urls`."
            raise RequestError(message, remedy)
        left_s = rules.timeout_s if deadline is None else deadline - time.monotonic()
        return ImageBytes(urls.fetch(item.source, item.shown, max_bytes, left_s))
    data = files.read(
        item.source,
        item.shown,
        rules.directory,
        rules.roots,
        max_bytes,
        also_working_directory=rules.also_working_directory,
    )
    return ImageBytes(data, Path(item.source).suffix.removeprefix("."))
