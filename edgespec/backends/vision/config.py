"""The config.json of a built image encoder as one frozen value: its component, limits and weights.

Knows the keys on disk, which are TensorRT Edge-LLM's where it has them, and writes what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from edgespec.backends.engine_config import (
    MAX_CAPACITY,
    SETTINGS,
    BuiltConfig,
    EngineFields,
    read_weights,
)
from edgespec.contract import Limits, Role
from edgespec.errors import LimitError
from edgespec.safe_read.fields import BundleFields
from edgespec.vision.component import VisionComponentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What an image encoder was built for, in rows of the language model. `max_image_tokens` is for
    all images of a request together."""

    min_image_tokens: int
    max_image_tokens: int
    max_image_tokens_per_image: int

    @classmethod
    def of(cls, limits: Limits) -> ImageLimits:
        """The limits that apply to image encoders, out of those that the flags give."""
        return cls(**{name: getattr(limits, name) for name in cls.__slots__})

    @classmethod
    def read(cls, fields: BundleFields) -> ImageLimits:
        """Those of `builder_config`. BundleError names a key whose value no build writes."""
        limits = cls(**{name: fields.size(name) for name in cls.__slots__})
        try:
            limits.check()
        except LimitError as error:
            raise fields.refused(error.what) from error
        return limits

    def check(self) -> None:
        """LimitError that names the flags unless minimum <= per image <= maximum."""
        for name, value in asdict(self).items():
            if not 1 <= value <= MAX_CAPACITY:
                flag = f"`{name}`"
                raise LimitError(f"{flag} is {value}", f"It must be from 1 to {MAX_CAPACITY}.")
        least, most = self.min_image_tokens, self.max_image_tokens
        one = self.max_image_tokens_per_image
        if least > one:
            message = f"`min_image_tokens` {least} exceeds `max_image_tokens_per_image` {one}"
            raise LimitError(message, "Lower the one or raise the other.")
        if one > most:
            message = f"`max_image_tokens_per_image` {one} exceeds `max_image_tokens` {most}"
            raise LimitError(message, "Lower the one or raise the other.")

    def to_dict(self, role: Role) -> dict[str, Any]:
        """The keys of `builder_config`."""
        del role
        return asdict(self)


class VisionEngineConfig(BuiltConfig[VisionComponentConfig, ImageLimits]):
    """A built image encoder."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> Self:
        """From the keys of config.json. BundleError names a wrong key of the file `source`."""
        fields = EngineFields(raw, source)
        return cls(
            component=VisionComponentConfig.from_dict(raw, source, EngineFields),
            limits=ImageLimits.read(fields.section("builder_config")),
            weights=read_weights(fields),
            settings=fields.optional_section(SETTINGS).raw,
        )
