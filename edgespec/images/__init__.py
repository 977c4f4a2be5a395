"""Images of requests: what may be read, decoded within limits, as the patches that an encoder
takes.

Everything here comes from strangers: names, bytes and sizes are checked before a library sees them.
Knows nothing of tokens, templates or engines.
"""

from __future__ import annotations

from edgespec.images.preprocess import PreparedImage
from edgespec.images.processor import ImageProcessor, read_processor
from edgespec.images.reader import ImageReader
from edgespec.images.source import ImageRules

__all__ = ["ImageProcessor", "ImageReader", "ImageRules", "PreparedImage", "read_processor"]
