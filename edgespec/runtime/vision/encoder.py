"""An open image encoder: from the patches of an image to rows of the language model.

Knows limits and names of arrays. Knows no engine library, no image file and no prompt.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgespec.backends.base import EncoderRunner
from edgespec.backends.engine_dir import STEMS, find_encoder, missing_remedy, open_vision
from edgespec.backends.manifest import FileEntry
from edgespec.backends.registry import get_backend
from edgespec.backends.vision.config import VisionEngineConfig
from edgespec.contract import Role
from edgespec.errors import BundleError, EngineClosed, LimitError, RequestError
from edgespec.vision.contract import EMBEDS, PIXELS
from edgespec.vision.grid import encoder_inputs, num_patches, num_tokens
from edgespec.vision.rows import Floats, ImageRows

if TYPE_CHECKING:
    from edgespec.images.preprocess import PreparedImage


@dataclass(slots=True)
class VisionEncoder:
    """An open image encoder. `engine_s` are the seconds inside its engine so far."""

    directory: Path
    config: VisionEngineConfig
    version: str  # of the engine's files, by their hashes
    runner: EncoderRunner | None
    engine_s: float = 0.0

    @classmethod
    def open(cls, directory: Path) -> Self:
        """The encoder in a directory, or in `visual` below it.

        Raises BundleError for a directory without one and for damaged files, EngineMismatch for one
        of another machine, EnvironmentProblem where it cannot be opened.
        """
        encoder_dir = find_encoder(directory, Role.VISUAL)
        config, entry = open_vision(encoder_dir)
        name = f"the image encoder in {encoder_dir}"
        backend = get_backend(entry.backend, name)
        backend.check_fingerprint(entry.fingerprint, name)
        path = backend.engine_path(encoder_dir, Role.VISUAL)
        if path.name not in entry.files:
            message = f"{encoder_dir} lists no engine of an image encoder"
            raise BundleError(message, missing_remedy(Role.VISUAL))
        runner = backend.open_encoder(path, config.component.vision, config.settings)
        return cls(encoder_dir, config, version_of(entry.files), runner)

    def encode(self, image: PreparedImage) -> ImageRows:
        """The rows of one image, whatever other images there are.

        Raises LimitError beyond the limits of the engine, RequestError for several frames,
        BundleError for patches of another form than the encoder's, EnvironmentProblem where the
        engine fails, EngineClosed after `close`.
        """
        if self.runner is None:
            raise EngineClosed("the image encoder was closed", "Open it again.")
        vision = self.config.component.vision
        self.check_form(image)
        self.check_limits(image)
        began = time.perf_counter()
        feeds = {PIXELS: image.pixel_values, **encoder_inputs(vision, image.grid)}
        outputs = self.runner.run(feeds)
        self.engine_s += time.perf_counter() - began
        embeds: Floats = outputs.pop(EMBEDS)
        assert len(embeds) == num_tokens(vision, image.grid)
        key = hashlib.sha256(f"{self.version}:{image.key}".encode()).hexdigest()
        return ImageRows(embeds, outputs, image.grid, key)

    def check_form(self, image: PreparedImage) -> None:
        """Raises RequestError for several frames, BundleError for patches of another form."""
        vision, (frames, height, width) = self.config.component.vision, image.grid
        if frames != 1:
            message = f"{image.source} has {frames} frames, and an image has one"
            raise RequestError(message, "Give its frames as images.")
        wanted = (num_patches(image.grid), vision.patch_width)
        side = vision.merge_size
        if image.pixel_values.shape != wanted or height % side or width % side:
            shape = f"{list(image.pixel_values.shape)} values for {height} x {width} patches"
            message = (
                f"{image.source} was prepared as {shape}; {self.directory} reads {list(wanted)}"
            )
            raise BundleError(
                f"{message} in blocks of {side} x {side}",
                "Its preprocessor_config.json is of another model: remove visual/ of the export,"
                " then export and build again.",
            )

    def check_limits(self, image: PreparedImage) -> None:
        """Raises LimitError for an image of fewer or more tokens than the engine takes."""
        tokens, limits = num_tokens(self.config.component.vision, image.grid), self.config.limits
        message = f"{image.source} has {tokens} tokens"
        if tokens > limits.max_image_tokens_per_image:
            raise LimitError(
                f"{message}, the image encoder takes {limits.max_image_tokens_per_image}",
                "Give a smaller image, or build with a larger `max_image_tokens_per_image`.",
            )
        if tokens < limits.min_image_tokens:
            raise LimitError(
                f"{message}, the image encoder takes {limits.min_image_tokens} or more",
                "Give a larger image, or build with a smaller `min_image_tokens`.",
            )

    def close(self) -> None:
        """Release the engine; closing twice is harmless."""
        if self.runner is not None:
            self.runner.close()
        self.runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def version_of(files: Mapping[str, FileEntry]) -> str:
    """One hash of an engine's own files."""
    listed = sorted((name, entry.sha256) for name, entry in files.items())
    stem = f"{STEMS[Role.VISUAL]}."
    own = [f"{name}:{sha256}" for name, sha256 in listed if name.startswith(stem)]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()
