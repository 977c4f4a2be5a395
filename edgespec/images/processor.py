"""An image processor of the Qwen2-VL line as values, from `preprocessor_config.json`.

Knows the keys of transformers' file and their defaults, and refuses by name what it cannot do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.config.fields import Fields, is_int
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.safe_read.regular import read_regular

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # newer: that of images is one of its sections
SECTION = "image_processor"
MAX_CONFIG_BYTES = 2**20
DOWNLOAD_AGAIN = "Copy it again from the model's checkpoint."

# Names of one and the same processor; Fast and Pil say how transformers computes it
TYPES = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
ENDINGS = ("", "Fast", "Pil")
DONE = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
FILTERS = range(6)  # Pillow's numbers: nearest, Lanczos, bilinear, bicubic, box, Hamming
BICUBIC = 3
MAX_PATCH_SIZE = 256
MAX_PIXELS = 2**26

# transformers' defaults
MIN_PIXELS_DEFAULT, MAX_PIXELS_DEFAULT = 56 * 56, 28 * 28 * 1280
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """How an image becomes patches. Sizes in pixels: an image is resized to between `min_pixels`
    and `max_pixels`, in steps of `factor`. `max_tokens` is the most that an engine takes of one
    image; None: no limit."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = MIN_PIXELS_DEFAULT
    max_pixels: int = MAX_PIXELS_DEFAULT
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    rescale_factor: float = 1 / 255
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    max_tokens: int | None = None

    @property
    def factor(self) -> int:
        """The side in pixels of what becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def patch_width(self) -> int:
        """Values of a patch: all channels of its pixels, `temporal_patch_size` times over."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def limited(self, max_tokens: int) -> ImageProcessor:
        """The processor for an engine that takes `max_tokens` of an image: larger images are
        resized to fit, as transformers does with that many pixels as its max_pixels."""
        most = min(self.max_pixels, max_tokens * self.factor**2)
        least = min(self.min_pixels, most)
        return replace(self, min_pixels=least, max_pixels=most, max_tokens=max_tokens)


def read_processor(directory: Path) -> ImageProcessor:
    """The image processor of a directory, from `preprocessor_config.json` or from the section of
    `processor_config.json`. Raises CheckpointError for a missing or damaged file, UnsupportedModel
    for another processor."""
    for name in (PREPROCESSOR, PROCESSOR):
        path = directory / name
        raw = _read(path)
        if raw is not None:
            fields = Fields(raw, str(path))
            fields = fields.section(SECTION) if name == PROCESSOR else fields
            return parse_processor(fields.raw, fields.source)
    message = f"{directory} has no {PREPROCESSOR}, which says how images are read."
    raise CheckpointError(message, DOWNLOAD_AGAIN)


def parse_processor(raw: Mapping[str, Any], source: str) -> ImageProcessor:
    """The image processor of a parsed file; `source` is its name in messages.

    Raises CheckpointError for a wrong value, UnsupportedModel for what cannot be done.
    """
    fields = Fields(raw, source)
    _check_type(fields)
    _check_steps(fields)
    least, most = _pixels(fields)
    resample = fields.get("resample")
    if resample is not None and (not is_int(resample) or resample not in FILTERS):
        raise fields.wrong("resample", "a filter of Pillow from 0 to 5")
    return ImageProcessor(
        patch_size=_size(fields, "patch_size", 14, MAX_PATCH_SIZE),
        temporal_patch_size=_size(fields, "temporal_patch_size", 2, 8),
        merge_size=_size(fields, "merge_size", 2, 8),
        min_pixels=least,
        max_pixels=most,
        image_mean=_of_channels(fields, "image_mean", CLIP_MEAN),
        image_std=_of_channels(fields, "image_std", CLIP_STD, zero=False),
        rescale_factor=fields.number("rescale_factor", 1 / 255),
        resample=BICUBIC if resample is None else resample,
        do_resize=fields.flag("do_resize", True),
        do_rescale=fields.flag("do_rescale", True),
        do_normalize=fields.flag("do_normalize", True),
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        settings = json.loads(read_regular(path, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}.", DOWNLOAD_AGAIN
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON.", DOWNLOAD_AGAIN) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is not a JSON object.", DOWNLOAD_AGAIN)
    return settings


def _check_type(fields: Fields) -> None:
    name = fields.text("image_processor_type") or fields.text("feature_extractor_type")
    if name is None:
        raise fields.missing("image_processor_type")
    if name not in {f"{kind}{ending}" for kind in TYPES for ending in ENDINGS}:
        raise UnsupportedModel(
            f"{fields.source}: the image processor {name!r:.80}; this version has that of Qwen2-VL,"
            " Qwen2.5-VL and Qwen3-VL."
        )


def _check_steps(fields: Fields) -> None:
    """Raises UnsupportedModel for a step that is asked for and not known."""
    steps = [key for key in fields.raw if key.startswith("do_")]
    for key in steps:
        is_wanted = fields.flag(key, False)
        if key not in DONE and is_wanted:
            raise UnsupportedModel(
                f"{fields.source}: '{key}' is true; this version has no such step."
            )
    if not fields.flag("do_convert_rgb", True):
        raise UnsupportedModel(
            f"{fields.source}: 'do_convert_rgb' is false; this version reads images in RGB alone."
        )


def _pixels(fields: Fields) -> tuple[int, int]:
    """The least and the most pixels: of the keys of older files, else of newer ones' `size`."""
    size = fields.optional_section("size")
    least = size.get("shortest_edge") if fields.get("min_pixels") is None else 1
    most = size.get("longest_edge") if fields.get("max_pixels") is None else 1
    if size.raw and (least is None or most is None):
        raise size.missing("shortest_edge" if least is None else "longest_edge")
    least = _size(size, "shortest_edge", MIN_PIXELS_DEFAULT, MAX_PIXELS)
    most = _size(size, "longest_edge", MAX_PIXELS_DEFAULT, MAX_PIXELS)
    least = _size(fields, "min_pixels", least, MAX_PIXELS)
    most = _size(fields, "max_pixels", most, MAX_PIXELS)
    if least > most:
        raise CheckpointError(
            f"{fields.source}: images have at least {least} pixels and at most {most}.",
            DOWNLOAD_AGAIN,
        )
    return least, most


def _size(fields: Fields, key: str, default: int, most: int) -> int:
    value = fields.get(key)
    if value is None:
        return default
    if not is_int(value) or not 1 <= value <= most:
        raise fields.wrong(key, f"a whole number from 1 to {most}")
    return int(value)


def _of_channels(
    fields: Fields, key: str, default: tuple[float, float, float], *, zero: bool = True
) -> tuple[float, float, float]:
    """A number for each of the three channels; one alone is that of all."""
    value = fields.get(key)
    if value is None:
        return default
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(_is_number(v) and (zero or v != 0) for v in values):
        raise fields.wrong(key, "three numbers" if zero else "three numbers other than 0")
    red, green, blue = map(float, values)
    return red, green, blue


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6
