"""From an image as a request names it to its patches: read, decoded, resized, checked on the way.

Knows the order of the steps; each stands in a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def read(self, item: ImageItem) -> PreparedImage:
        """The patches of an image.

        Raises RequestError for an image that may not be read, cannot be decoded or is too large;
        no message has text of a library or of a server. Raises MissingDependency without Pillow.
        """
        found = read_bytes(item, self.rules, MAX_IMAGE_BYTES)
        header = check_size(found.data, item.shown)
        # Of the size that it declares: what is too long is refused before it is decoded
        resized(header.width, header.height, self.processor, item.shown)
        image = decode(found.data, header, item.shown, found.claimed)
        return prepare(image, self.processor, item.shown)
