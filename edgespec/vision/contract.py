"""The contract of image encoders: names, dtypes and symbolic shapes of inputs and outputs.

Symbols: P patches of one image, W windows, T rows for the language model. Knows no ONNX and no
engine.
"""

from __future__ import annotations

from edgespec.config import VisionConfig
from edgespec.contract import COMPUTE, Contract, TensorSpec

PIXELS = "pixel_values"
EMBEDS, DEEPSTACK = "image_embeds", "deepstack_embeds"
CORNERS = 4  # of the grid of learned positions, around a patch


def vision_contract(config: VisionConfig) -> Contract:
    """The contract of an encoder's exported graph, which reads one image a call.

    `pixel_values` are patches in the processor's order: those that are merged stand together.
    `rope_cos` and `rope_sin` turn the pairs of a head, by the row of a patch and then by its
    column. Where layers have windows, `window_index` is the patch at each place of each window and
    `window_mask` says whether there is one; what stands at other places is never read.
    `window_place` is where each patch stands among the W * N places. Learned positions are the sum
    of four rows of their table, `position_index`, times `position_weight`.

    `image_embeds` are the rows of the language model, row by row of the image;
    `deepstack_embeds` those that are added behind its first layers, side by side.
    """
    half = config.head_dim // 2
    inputs = [
        TensorSpec(PIXELS, COMPUTE, ("P", config.patch_width)),
        TensorSpec("rope_cos", COMPUTE, ("P", half)),
        TensorSpec("rope_sin", COMPUTE, ("P", half)),
    ]
    if config.has_windows:
        places = config.window_side**2
        inputs += [
            TensorSpec("window_index", "int64", ("W", places)),
            TensorSpec("window_mask", "bool", ("W", places)),
            TensorSpec("window_place", "int64", ("P",)),
        ]
    if config.position_grid:
        inputs += [
            TensorSpec("position_index", "int64", (CORNERS, "P")),
            TensorSpec("position_weight", COMPUTE, (CORNERS, "P")),
        ]
    outputs = [TensorSpec(EMBEDS, COMPUTE, ("T", config.out_hidden_size))]
    outputs += [TensorSpec(name, COMPUTE, ("T", n)) for name, n in extra_widths(config).items()]
    return Contract(tuple(inputs), tuple(outputs))


def extra_widths(config: VisionConfig) -> dict[str, int]:
    """What a base reads of an image beside `image_embeds`, by its input -> width."""
    width = len(config.deepstack_layers) * config.out_hidden_size
    return {DEEPSTACK: width} if width else {}
