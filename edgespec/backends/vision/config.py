"""The config.json of a built image encoder as one frozen value: its component, limits and weights.

Knows the keys on disk, which are TensorRT Edge-LLM's where it has them, and writes what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgespec.artifacts import json_files
from edgespec.backends.engine_config import (
    MAX_CAPACITY,
    SETTINGS,
    EngineFields,
    EngineWeights,
    read_weights,
)
from edgespec.errors import LimitError
from edgespec.safe_read.fields import BundleFields
from edgespec.vision.component import VisionComponentConfig
from edgespec.vision.contract import ImageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEngineConfig:
    """A built image encoder. `settings` is what its backend has to know of it, as JSON."""

    component: VisionComponentConfig
    limits: ImageLimits
    weights: EngineWeights
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> VisionEngineConfig:
        """From an engine's config.json. BundleError names a wrong key."""
        raw, source = json_files.read_json(path), str(path)
        fields = EngineFields(raw, source)
        component = VisionComponentConfig.from_dict(raw, source, EngineFields)
        return cls(
            component=component,
            limits=read_limits(fields.section("builder_config")),
            weights=read_weights(fields),
            settings=fields.optional_section(SETTINGS).raw,
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json, in the order in which they are written."""
        keys = self.component.to_dict() | {
            "builder_config": asdict(self.limits),
            "weights": self.weights.to_dict(),
        }
        return keys | ({SETTINGS: dict(self.settings)} if self.settings else {})


def read_limits(fields: BundleFields) -> ImageLimits:
    """The limits of `builder_config`. BundleError names a key whose value no build writes."""
    limits = ImageLimits(
        min_image_tokens=fields.size("min_image_tokens"),
        max_image_tokens=fields.size("max_image_tokens"),
        max_image_tokens_per_image=fields.size("max_image_tokens_per_image"),
    )
    try:
        check_image_limits(limits)
    except LimitError as error:
        raise fields.refused(error.what) from error
    return limits


def check_image_limits(limits: ImageLimits) -> None:
    """LimitError that names the flags unless minimum <= per image <= maximum."""
    for name, value in asdict(limits).items():
        if not 1 <= value <= MAX_CAPACITY:
            flag = f"--{name.replace('_', '-')}"
            raise LimitError(f"{flag} is {value}", f"It must be from 1 to {MAX_CAPACITY}.")
    least, most = limits.min_image_tokens, limits.max_image_tokens
    one = limits.max_image_tokens_per_image
    if least > one:
        what = f"--min-image-tokens {least} exceeds --max-image-tokens-per-image {one}"
        raise LimitError(what, "Lower the one or raise the other.")
    if one > most:
        what = f"--max-image-tokens-per-image {one} exceeds --max-image-tokens {most}"
        raise LimitError(what, "Lower the one or raise the other.")
