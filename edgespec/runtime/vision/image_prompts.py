"""The images of an engine's prompts: read, encoded once each, and put in their places.

Knows the order of the work: reading stands in `edgespec.images`, encoding in `encoder`. Knows no
chat template.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.engine_dir import find_encoder, holds_encoder, open_vision
from edgespec.backends.vision.config import VisionEngineConfig
from edgespec.config.values import ImageTokens
from edgespec.contract import Role, image_widths
from edgespec.errors import EngineClosed, EnvironmentProblem, LimitError, PairingError
from edgespec.images import ImageReader, ImageRules, PreparedImage, read_processor
from edgespec.prompts import ImageItem
from edgespec.runtime.lanes import stages
from edgespec.runtime.lanes.stages import StageLog
from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.runtime.vision.encoder import VisionEncoder
from edgespec.runtime.vision.image_stats import ImageStats
from edgespec.vision.contract import extra_widths
from edgespec.vision.grid import num_tokens
from edgespec.vision.placeholders import expand
from edgespec.vision.rows import ImageRows, widths_text

CACHE_BYTES = 256 * 2**20  # of encoded images that are kept for later prompts


class RunStopped(Exception):
    """The run was to stop while the images of a prompt were read or encoded."""


def nothing(tokens: Sequence[int]) -> None:
    """The check of a prompt that nothing is wrong with."""


def never() -> bool:
    """The `stopping` of what nothing stops: False."""
    return False


@dataclass
class ImagePrompts:
    """Prompts with images, for one base. The encoder is opened with the first image, and each image
    is encoded once while it is among the `cache_bytes` that were used last. Any thread may ask;
    one image is encoded at a time, as the engine has all processors."""

    directory: Path
    config: VisionEngineConfig
    reader: ImageReader
    cache_bytes: int = CACHE_BYTES
    stats: ImageStats = field(default_factory=ImageStats)
    kept: OrderedDict[str, ImageRows] = field(default_factory=OrderedDict)
    encoder: VisionEncoder | None = None
    closed: bool = False
    log: StageLog | None = None  # of the engine, where one is kept
    lock: Lock = field(default_factory=Lock)  # of all that changes

    @classmethod
    def open(
        cls, directory: Path, base: ComponentConfig, rules: ImageRules | None = None
    ) -> ImagePrompts:
        """Those of the encoder at a path, or in `visual` below it.

        Raises BundleError for a directory without one and for damaged files, PairingError for the
        encoder of another model than `base`.
        """
        encoder_dir = find_encoder(directory, Role.VISUAL)
        config, _ = open_vision(encoder_dir)
        check_pair(encoder_dir, config, base)
        limits = config.limits
        processor = read_processor(encoder_dir).limited(limits.max_image_tokens_per_image)
        return cls(encoder_dir, config, ImageReader(rules or ImageRules(), processor))

    @property
    def tokens(self) -> ImageTokens:
        """The model's own marks of images and videos."""
        return self.config.component.tokens

    def prompt(
        self,
        ids: Sequence[int],
        items: Sequence[ImageItem],
        *,
        check: Callable[[Sequence[int]], None] = nothing,
        stopping: Callable[[], bool] = never,
    ) -> PromptValue:
        """The prompt of a rendered text's ids, in which the image token stands once for each item.

        No image is encoded before all are read and the tokens of the whole prompt have passed
        `check`. `stopping` is asked before each is read and encoded.

        Raises RequestError for an image that cannot be read, and where ids and items do not agree;
        LimitError for images beyond the limits of the encoder; what `check`, opening and running
        the encoder raise; Stopped.
        """
        with enough_memory():
            images = self.read(items, stopping)
            counts = self.check_total(images)
            whole = expand(ids, self.tokens, counts)
            check(whole.tokens)
            rows = [self.rows(image, stopping) for image in images]
        slots = [ImageSlots(start, one) for start, one in zip(whole.starts, rows, strict=True)]
        return PromptValue.with_images(whole.tokens, slots, self.config.component.vision.merge_size)

    def typed(self, path: Path) -> tuple[ImageItem, int]:
        """An image that the user named by hand, which is read whatever the rules allow: with its
        bytes, so that it stays what it is, and its number of tokens. It is encoded at once. Raises
        what `prompt` does."""
        rules = self.reader.rules
        rules = replace(rules, directory=None, roots=(*rules.roots, path))
        trusting = replace(self.reader, rules=rules)
        with enough_memory():
            item = trusting.embedded(ImageItem(str(path)))
            (image,) = self.read([item])
            self.check_total([image])
            return item, len(self.rows(image))

    def taken(self, items: Sequence[ImageItem], directory: Path) -> list[ImageItem]:
        """The images of a conversation that was kept in a file of `directory`, which may be read,
        with their bytes. They are not encoded yet. Raises what `prompt` does of reading."""
        rules = replace(self.reader.rules, directory=directory, also_working_directory=False)
        trusting = replace(self.reader, rules=rules)
        with enough_memory():
            embedded = trusting.embedded_all(items)
            self.check_total(self.read(embedded))
        return embedded

    def check_total(self, images: Sequence[PreparedImage]) -> list[int]:
        """The tokens of each image of a prompt. Raises LimitError for more than the encoder takes
        together."""
        counts = [num_tokens(self.config.component.vision, image.grid) for image in images]
        total, most = sum(counts), self.config.limits.max_image_tokens
        if total > most:
            message = (
                f"the images of the prompt have {total} tokens, the image encoder takes {most}"
            )
            raise LimitError(
                message, "Send fewer or smaller images, or build with a larger `max_image_tokens`."
            )
        return counts

    def read(
        self, items: Sequence[ImageItem], stopping: Callable[[], bool] = never
    ) -> list[PreparedImage]:
        """The patches of the images of one prompt."""
        prepared = list[PreparedImage]()
        images = self.reader.read_all(items)
        for _ in items:
            go_on_unless(stopping)
            began = time.perf_counter()
            prepared.append(image := next(images))
            tokens = num_tokens(self.config.component.vision, image.grid)
            spent = time.perf_counter() - began
            with self.lock:
                self.count(ImageStats(1, tokens, spent), stages.MULTIMODAL, spent)
        return prepared

    def count(self, done: ImageStats, stage: str, seconds: float) -> None:
        """Add what one pass of a stage has done; the lock is held."""
        self.stats += done
        if self.log is not None:
            self.log.note(stage, seconds)

    def rows(self, image: PreparedImage, stopping: Callable[[], bool] = never) -> ImageRows:
        """The rows of one image, encoded unless they are kept. Raises EngineClosed after `close`,
        and what opening and running the encoder raise."""
        with self.lock:
            go_on_unless(stopping)
            if self.closed:
                raise EngineClosed("the image encoder was closed")
            rows = self.kept.get(image.key)
            if rows is None:
                rows = self.kept[image.key] = self.encoded(image)
            self.kept.move_to_end(image.key)
            while len(self.kept) > 1 and self.size_bytes > self.cache_bytes:
                self.kept.popitem(last=False)
        return rows

    def encoded(self, image: PreparedImage) -> ImageRows:
        """An image through the encoder; the lock is held."""
        if self.encoder is None:
            self.encoder = VisionEncoder.open(self.directory)
        began = time.perf_counter()
        rows = self.encoder.encode(image)
        spent = time.perf_counter() - began
        done = ImageStats(encoded=1, encoded_tokens=len(rows), encode_s=spent)
        self.count(done, stages.VISION_ENCODER, spent)
        return rows

    @property
    def size_bytes(self) -> int:
        """Bytes of the images that are kept."""
        return sum(rows.nbytes for rows in self.kept.values())

    def close(self) -> None:
        """Free the encoder, once it has encoded the image that it is at; closing twice is
        harmless."""
        with self.lock:
            self.closed = True
            self.kept.clear()
            if self.encoder is not None:
                self.encoder.close()


def go_on_unless(stopping: Callable[[], bool]) -> None:
    """Raises Stopped where a run is to stop."""
    if stopping():
        raise RunStopped


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises EnvironmentProblem where memory ends inside."""
    try:
        yield
    except MemoryError as error:
        message = "not enough memory for the images of the prompt"
        raise EnvironmentProblem(
            message, "Close other programs, or give smaller images."
        ) from error


def beside(engine_dir: Path) -> Path | None:
    """The image encoder that stands in `visual` of an engine directory; None where there is
    none."""
    encoder_dir = engine_dir / Role.VISUAL.value
    return encoder_dir if holds_encoder(encoder_dir, Role.VISUAL) else None


def check_pair(directory: Path, config: VisionEngineConfig, base: ComponentConfig) -> None:
    """Raises PairingError where an encoder is not that of a base."""
    own, vision = config.component, config.component.vision
    extras, read = extra_widths(vision), image_widths(base.graph)
    wrong = None
    if own.origin != base.origin and own.identity != base.identity:
        wrong = f"is that of another checkpoint ({own.model}) than the base ({base.model})"
    elif vision.out_hidden_size != base.hidden_size:
        wrong = f"gives rows of {vision.out_hidden_size}, the base reads {base.hidden_size}"
    elif extras != read:
        wrong = f"gives {widths_text(extras)} beside them, the base reads {widths_text(read)}"
    elif base.rope is None or not base.rope.mrope_section:
        wrong = "goes with positions of three axes, and the base was exported without them"
    if wrong is not None:
        message = f"the image encoder in {directory} {wrong}"
        raise PairingError(message, "Export both from one checkpoint, and build them again.")
