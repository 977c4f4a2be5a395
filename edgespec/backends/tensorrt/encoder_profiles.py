"""The optimization profile of an image encoder: which sizes of images its engine reads.

Knows images and limits. Knows no library.
"""

from __future__ import annotations

from edgespec.backends.onnx_dir import VisionOnnxDir
from edgespec.backends.tensorrt.profiles import Profile, Range, made
from edgespec.backends.vision.golden import read_golden
from edgespec.contract import Contract, Limits
from edgespec.vision.grid import num_tokens


def encoder_profiles(
    contract: Contract, onnx: VisionOnnxDir, limits: Limits
) -> tuple[Profile, ...]:
    """The one profile of an encoder: images within the limits and the golden one, most often half
    as large as the largest. Raises BundleError for a damaged golden image."""
    config = onnx.config.vision
    sizes = [limits.min_image_tokens, limits.max_image_tokens_per_image]
    if onnx.golden is not None:
        sizes.append(num_tokens(config, read_golden(onnx.golden, config)[0]))
    block = config.merge_size**2
    least, most = min(sizes) * block, max(sizes) * block
    often = max(least, most // 2 // block * block)
    ranges: dict[str, Range] = {"P": (least, often, most)}
    if config.has_windows:
        side = config.window_side
        # the most windows has an image of one row of tokens
        many = -(-most // (config.merge_size * side))
        ranges["W"] = (1, min(many, -(-often // side**2)), many)
    return (made("image", contract, ranges),)
