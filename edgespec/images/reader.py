"""From an image as a request names it to its patches: read, decoded, resized, checked on the way.

Knows the order of the steps; each stands in a file of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edgespec.images import data_url
from edgespec.images.decode import MAX_IMAGE_BYTES, check_size, decode
from edgespec.images.preprocess import PreparedImage, prepare, resized
from edgespec.images.processor import ImageProcessor
from edgespec.images.source import ImageRules, read_bytes
from edgespec.prompts import ImageItem


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of requests by the rules of a run, for one model."""

    rules: ImageRules
    processor: ImageProcessor

    def read_all(self, items: Iterable[ImageItem]) -> Iterator[PreparedImage]:
        """The patches of each image of one request. Their URLs have the time of the rules all
        together. Raises what `read` does."""
        deadline = time.monotonic() + self.rules.timeout_s
        for item in items:
            yield self.read(item, deadline)

    def read(self, item: ImageItem, deadline: float | None = None) -> PreparedImage:
        """The patches of an image; `deadline` is that of `read_bytes`.

        Raises RequestError for an image that may not be read, cannot be decoded or is too large;
        no message has text of a library or of a server. Raises MissingDependency without Pillow.
        """
        source = read_bytes(item, self.rules, MAX_IMAGE_BYTES, deadline)
        header = check_size(source.data, item.shown)
        # Of the size that it declares: what is too long is refused before it is decoded
        resized(header.width, header.height, self.processor, item.shown)
        image = decode(source.data, header, item.shown, source.claimed)
        return prepare(image, self.processor, item.shown)

    def embedded_all(self, items: Iterable[ImageItem]) -> list[ImageItem]:
        """`embedded` of each, whose URLs have the time of the rules all together."""
        deadline = time.monotonic() + self.rules.timeout_s
        return [self.embedded(item, deadline) for item in items]

    def embedded(self, item: ImageItem, deadline: float | None = None) -> ImageItem:
        """The same image with its bytes in it, so that it stays what it is; `deadline` is that of
        `read_bytes`. Raises RequestError for one that may not be read, or is too large."""
        if item.kind == "data":
            return item
        source = read_bytes(item, self.rules, MAX_IMAGE_BYTES, deadline)
        header = check_size(source.data, item.shown)
        return ImageItem(data_url.encode(header.format.lower(), source.data), item.echo)
