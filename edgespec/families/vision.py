"""What families with an image encoder share: sizes, lists of layers, and token ids.

Defaults are those of transformers 5.14. Knows configurations as `Fields`. Knows no family by name.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from edgespec.config.fields import Fields, is_int, token_ids
from edgespec.config.layers import check_divides
from edgespec.config.values import ImageTokens, VisionActivation, VisionConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families.base import Family

SECTION = "vision_config"
NORM_EPS = 1e-6  # no file says it
_ACTIVATIONS: dict[str, VisionActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def vision_of(top: Fields, family: Family, hidden_size: int) -> VisionConfig | None:
    """The image encoder of a config.json; None where the family has none, and where the file has no
    section of one: that of a text model. Raises CheckpointError where its rows are not as wide as
    the language model's, `hidden_size`."""
    if family.vision is None or top.get(SECTION) is None:
        return None
    fields = top.optional_section(SECTION)
    vision = family.vision(fields)
    if vision.out_hidden_size != hidden_size:
        raise CheckpointError(
            f"{fields.source}: out_hidden_size is {vision.out_hidden_size}, and the language model"
            f" has rows of {hidden_size}.",
            "Correct the file, or download the checkpoint again.",
        )
    return vision


def image_tokens(top: Fields, family: Family) -> ImageTokens:
    """The token ids around and inside an image. Raises CheckpointError for anything but ids, and
    for a missing one that the family does not know."""
    names = ("image", "video", "vision_start", "vision_end")
    usual = {} if family.image_tokens is None else asdict(family.image_tokens)
    return ImageTokens(**{n: _one_id(top, f"{n}_token_id", usual.get(n)) for n in names})


def _one_id(top: Fields, key: str, usual: int | None) -> int:
    ids = token_ids(top, key) or ((usual,) if usual is not None else ())
    if len(ids) != 1:
        raise top.wrong(key, "one token id")
    return ids[0]


def vision_activation(fields: Fields, default: str) -> VisionActivation:
    """The activation of the MLPs. Raises UnsupportedModel for one that is not known."""
    name = fields.text("hidden_act") or default
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{fields.source}: hidden_act {name!r}; this version knows {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def layer_indices(
    fields: Fields, key: str, default: tuple[int, ...], num_layers: int
) -> tuple[int, ...]:
    """The layers that a key names, ascending. Raises CheckpointError for anything else."""
    value = fields.get(key)
    if value is None:
        value = [i for i in default if i < num_layers]
    if (
        not isinstance(value, list | tuple)
        or not all(is_int(i) and 0 <= i < num_layers for i in value)
        or sorted(set(value)) != list(value)
    ):
        raise fields.wrong(key, f"a list of layers from 0 to {num_layers - 1}, ascending")
    return tuple(value)


def vision_heads(fields: Fields, hidden_size: int) -> int:
    """The number of heads, whose width is rotated in two axes. Raises CheckpointError where the
    width does not divide so."""
    num_heads = fields.size("num_heads", 16)
    check_divides(fields, "num_heads", num_heads, "hidden_size", hidden_size)
    if hidden_size // num_heads % 4:
        raise CheckpointError(
            f"{fields.source}: heads of {hidden_size // num_heads} elements; both axes of a"
            " position rotate pairs, so that it must be a multiple of 4."
        )
    return num_heads


def square_side(fields: Fields, key: str, default: int) -> int:
    """The side of a square of positions. Raises CheckpointError where it is none."""
    count = fields.size(key, default)
    side = math.isqrt(count)
    if side * side != count:
        raise fields.wrong(key, "a square number")
    return side
