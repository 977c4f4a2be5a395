"""The golden image of an export, put to an engine: how close its rows come.

Knows what export writes of it. Knows no engine library: how close an engine has to come is asked of
the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import AccuracySpec, EncoderRunner, Remedies
from edgespec.backends.golden import Agreement, Tolerance, check_direction, compared
from edgespec.backends.golden_file import check_form, read_arrays, refused
from edgespec.config import VisionConfig
from edgespec.safe_read.tensors import StoredTensor, read_array
from edgespec.vision.contract import PIXELS, vision_contract
from edgespec.vision.grid import Arrays, Grid, encoder_inputs, num_patches, num_tokens

GRID = "grid"  # the name of its array
MAX_PATCHES = 4096  # of a golden image


def read_golden(path: Path, config: VisionConfig) -> tuple[Grid, Arrays]:
    """The grid and the arrays of a golden file: pixels, and the outputs by name.

    Raises BundleError where one is missing or unknown, of another type or shape than the encoder's,
    or holds NaN or Inf.
    """
    outputs = vision_contract(config).outputs

    def check(tensors: Mapping[str, StoredTensor]) -> None:
        if tensors.keys() != (names := {PIXELS, GRID, *(spec.name for spec in outputs)}):
            raise refused(path, f"it holds other arrays than {', '.join(sorted(names))}")
        check_form(path, tensors[GRID], "int64", (3,))
        grid = grid_of(read_array(path, tensors[GRID]), config)
        if grid is None:
            raise refused(path, f"{GRID!r} is none of this encoder")
        tokens = num_tokens(config, grid)
        check_form(path, tensors[PIXELS], "float32", (num_patches(grid), config.patch_width))
        for spec in outputs:
            check_form(path, tensors[spec.name], "float32", (tokens, int(spec.shape[1])))

    arrays = read_arrays(path, check)
    grid = grid_of(arrays.pop(GRID), config)
    assert grid is not None
    return grid, arrays


def grid_of(stored: NDArray[np.int64], config: VisionConfig) -> Grid | None:
    """The grid of a small image of this encoder; None for other numbers."""
    frames, height, width = (int(size) for size in stored)
    fits = frames == 1 and all(
        0 < size <= MAX_PATCHES and size % config.merge_size == 0 for size in (height, width)
    )
    return (1, height, width) if fits and height * width <= MAX_PATCHES else None


def check_golden(
    runner: EncoderRunner,
    config: VisionConfig,
    golden: tuple[Grid, Arrays],
    spec: AccuracySpec,
    remedies: Remedies,
) -> Agreement:
    """How an engine's rows agree with the golden ones; GoldenMismatch where they do not."""
    grid, arrays = golden
    computed = runner.run({PIXELS: arrays[PIXELS], **encoder_inputs(config, grid)})
    wanted = {name: arrays[name] for name in computed}
    if spec.min_cosine is None:
        return compared(computed, wanted, "image", Tolerance(spec.tolerance, remedies.mismatch))
    agreement = compared(computed, wanted, "image")
    # how far sizes may be was measured on decoders alone
    check_direction("image", agreement, replace(spec, max_scale=None), remedies)
    return agreement
