"""The images of an engine's prompts: read, encoded once each, and put in their places.

Knows the order of the work: reading stands in `edgespec.images`, encoding in `encoder`. Knows no
chat template.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from edgespec.backends.visual.config import VisualEngineConfig
from edgespec.backends.visual.engine_dir import (
    NAME,
    find_visual_dir,
    is_visual_engine,
    open_visual_dir,
)
from edgespec.component import ComponentConfig
from edgespec.errors import LimitError, PairingError, counted
from edgespec.images import ImageReader, ImageRules, PreparedImage, read_processor
from edgespec.prompts import ImageItem
from edgespec.runtime.prompt_value import ImageSlots, Prompt
from edgespec.runtime.vision.encoder import VisionEncoder
from edgespec.vision.placeholders import expand
from edgespec.vision.rows import ImageRows

CACHE_BYTES = 256 * 2**20  # of encoded images that are kept for later prompts


@dataclass
class ImageStats:
    """What was done so far: images that prompts had, and of those that were encoded the tokens and
    the seconds."""

    images: int = 0
    encoded: int = 0
    tokens: int = 0
    read_s: float = 0.0  # reading, decoding, resizing
    encode_s: float = 0.0


@dataclass
class ImagePrompts:
    """Prompts with images, for one base. The encoder is opened with the first image, and each image
    is encoded once while it is among the `cache_bytes` that were used last."""

    directory: Path
    config: VisualEngineConfig
    reader: ImageReader
    cache_bytes: int = CACHE_BYTES
    stats: ImageStats = field(default_factory=ImageStats)
    kept: OrderedDict[str, ImageRows] = field(default_factory=OrderedDict)
    encoder: VisionEncoder | None = None
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def open(
        cls, directory: Path, base: ComponentConfig, rules: ImageRules | None = None
    ) -> ImagePrompts:
        """Those of the encoder at a path, or in `visual` below it.

        Raises BundleError for a directory without one and for damaged files, PairingError for the
        encoder of another model than `base`.
        """
        found = find_visual_dir(directory)
        config, _ = open_visual_dir(found)
        check_pair(found, config, base)
        limits = config.limits
        processor = read_processor(found).limited(limits.max_image_tokens_per_image)
        return cls(found, config, ImageReader(rules or ImageRules(), processor))

    def prompt(self, ids: Sequence[int], items: Sequence[ImageItem]) -> Prompt:
        """The prompt of a rendered text's ids, in which the image token stands once for each item.

        Raises RequestError for an image that cannot be read, and where ids and items do not agree;
        LimitError for images beyond the limits of the encoder; what opening and running it raise.
        """
        rows = [self.rows(item) for item in items]
        total, most = sum(map(len, rows)), self.config.limits.max_image_tokens
        if total > most:
            what = f"the images of the prompt have {total} tokens, the image encoder takes {most}"
            raise LimitError(
                what, "Send fewer or smaller images, or build with a larger --max-image-tokens."
            )
        whole = expand(ids, self.config.component.tokens, [len(one) for one in rows])
        slots = [ImageSlots(start, one) for start, one in zip(whole.starts, rows, strict=True)]
        return Prompt.with_images(whole.tokens, slots, self.config.component.vision.merge_size)

    def typed(self, path: Path) -> ImageRows:
        """The rows of an image that the user named by hand: this file may be read from now on.
        Raises what `prompt` does."""
        rules = self.reader.rules
        self.reader = replace(self.reader, rules=replace(rules, roots=(*rules.roots, path)))
        return self.rows(ImageItem(str(path)))

    def rows(self, item: ImageItem) -> ImageRows:
        """The rows of one image, encoded unless they are kept."""
        began = time.perf_counter()
        prepared = self.reader.read(item)
        with self.lock:  # one image at a time: the engine has all processors
            self.stats.images += 1
            self.stats.read_s += time.perf_counter() - began
            found = self.kept.get(prepared.key)
            if found is None:
                found = self.kept[prepared.key] = self.encoded(prepared)
            self.kept.move_to_end(prepared.key)
            while len(self.kept) > 1 and self.size_bytes > self.cache_bytes:
                self.kept.popitem(last=False)
        return found

    def encoded(self, prepared: PreparedImage) -> ImageRows:
        """An image through the encoder."""
        if self.encoder is None:
            self.encoder = VisionEncoder.open(self.directory)
        began = time.perf_counter()
        rows = self.encoder.encode(prepared)
        self.stats.encode_s += time.perf_counter() - began
        self.stats.encoded += 1
        self.stats.tokens += len(rows)
        return rows

    @property
    def size_bytes(self) -> int:
        """Bytes of the images that are kept."""
        return sum(rows.nbytes for rows in self.kept.values())

    def close(self) -> None:
        """Free the encoder; closing twice is harmless."""
        if self.encoder is not None:
            self.encoder.close()


def beside(engine_dir: Path) -> Path | None:
    """The image encoder that stands in `visual` of an engine directory; None where there is
    none."""
    found = engine_dir / NAME
    return found if is_visual_engine(found) else None


def check_pair(directory: Path, config: VisualEngineConfig, base: ComponentConfig) -> None:
    """Raises PairingError where an encoder is not that of a base."""
    own, vision = config.component, config.component.vision
    levels = len(vision.deepstack_layers)
    wrong = None
    if own.origin != base.origin and own.identity != base.identity:
        wrong = f"is that of another checkpoint ({own.model}) than the base ({base.model})"
    elif vision.out_hidden_size != base.hidden_size:
        wrong = f"gives rows of {vision.out_hidden_size}, the base reads {base.hidden_size}"
    elif levels != base.graph.deepstack:
        given = counted(levels, "deepstack level")
        wrong = f"gives {given}, and the base reads {base.graph.deepstack}"
    elif base.rope is None or not base.rope.mrope_section:
        wrong = "goes with positions of three axes, and the base was exported without them"
    if wrong is not None:
        what = f"the image encoder in {directory} {wrong}"
        raise PairingError(what, "Export both from one checkpoint, and build them again.")
