"""An image as a request names it: a path, a `data:` URL, or an http(s) URL.

Knows names alone. What may be read, how, and what becomes of it stands in `edgespec.images`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from edgespec.prompts import checks
from edgespec.prompts.places import JsonPlace, show

MAX_IMAGES = 8  # of a request
MAX_NAME_CHARS = 4096  # of a path or a URL; a data: URL is as long as its image
MAX_ECHO_CHARS = 48  # of a data: URL in output.json and in messages
MAX_PATH_CHARS = 160  # of a path in messages

Kind = Literal["path", "data", "url"]

SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
URL_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True, repr=False)
class ImageItem:
    """One image of a message, by its `source`. `name` is what a `data:` URL is called instead.
    Raises RequestError for what is none of the three kinds, such as a file: URL."""

    source: str
    name: str = ""

    def __post_init__(self) -> None:
        check_source(self.source, JsonPlace("ImageItem").key("source"))

    def __repr__(self) -> str:
        return f"ImageItem({self.echo!r})"

    @property
    def kind(self) -> Kind:
        """What the source is."""
        return kind_of(self.source)

    @property
    def echo(self) -> str:
        """The source as output.json repeats it: a `data:` URL is shortened, or has its name."""
        if self.name:
            return self.name
        if self.kind != "data" or len(self.source) <= MAX_ECHO_CHARS:
            return self.source
        return f"{self.source[:MAX_ECHO_CHARS]}... ({len(self.source)} characters)"

    @property
    def shown(self) -> str:
        """The source as messages show it: of a long path the end, which names the file."""
        if self.name:
            return show(self.name)
        if self.kind == "data":
            return show(f"{self.source[:MAX_ECHO_CHARS].partition(',')[0]},...")
        if self.kind == "path" and len(self.source) > MAX_PATH_CHARS:
            return json.dumps(f"...{self.source[-MAX_PATH_CHARS:]}")
        return json.dumps(self.source) if self.kind == "path" else show(self.source)


def check_source(value: object, here: JsonPlace) -> str:
    """Returns the source of an image. Raises RequestError with the place for another value."""
    if not isinstance(value, str):
        here.refuse(f"is {show(value)}, not a string", "Write the path of an image.")
    if not value:
        here.refuse("is empty", "Write the path of an image.")
    checks.text_size(value, here)
    match = SCHEME.match(value)
    scheme = match[1].lower() if match else ""
    if scheme == "data":
        return value
    if "\0" in value:
        here.refuse("has a null character", "Write the path of an image.")
    remedy = "Write the path of an image, or data:image/png;base64,... with its bytes."
    here.at_most(MAX_NAME_CHARS, len(value), "characters", remedy)
    if scheme == "file":
        here.refuse(f"is {show(value)}, a file: URL", "Write the path alone.")
    if match and value.startswith("//", match.end()) and scheme not in URL_SCHEMES:
        here.refuse(
            f"is {show(value)}, a URL that begins with {show(scheme)}",
            "Write a path, a data: URL, or a URL that begins with https.",
        )
    return value


def kind_of(source: str) -> Kind:
    """What a source is that was checked."""
    match = SCHEME.match(source)
    scheme = match[1].lower() if match else ""
    if scheme == "data":
        return "data"
    return "url" if scheme in URL_SCHEMES and source.startswith("//", len(scheme) + 1) else "path"
