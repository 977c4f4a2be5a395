"""The golden image of an export, put to an engine: how close its rows come.

Knows what export writes of it. Knows no engine library: how close an engine has to come is asked of
the backend.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import AccuracySpec, EncoderRunner, Remedies
from edgespec.backends.golden import CHANGED, Agreement, cosine
from edgespec.config import VisionConfig
from edgespec.errors import BundleError, GoldenMismatch
from edgespec.safe_read.fields import EXPORT_AGAIN
from edgespec.safe_read.tensors import read_array, read_tensors
from edgespec.vision.contract import PIXELS, vision_contract
from edgespec.vision.grid import Arrays, Grid, encoder_inputs, num_patches, num_tokens

MAX_PATCHES = 4096  # of a golden image


def read_golden(path: Path, config: VisionConfig) -> tuple[Grid, Arrays]:
    """The grid and the arrays of a golden file: pixels, and the outputs by name.

    Raises BundleError where one is missing or unknown, of another type or shape than the encoder's,
    or holds NaN or Inf.
    """

    def refused(what: str) -> BundleError:
        return BundleError(f"{path}: {what}.", EXPORT_AGAIN)

    outputs = vision_contract(config).outputs
    names = {PIXELS, "grid", *(spec.name for spec in outputs)}
    try:
        tensors = read_tensors(path, lambda how: refused(f"not valid safetensors: {how}"))
        if tensors.keys() != names:
            raise refused(f"it holds other arrays than {', '.join(sorted(names))}")
        if tensors["grid"].dtype != "int64" or tensors["grid"].shape != (3,):
            raise refused("'grid' is no int64 [3]")
        grid = grid_of(read_array(path, tensors["grid"]), config)
        if grid is None:
            raise refused("'grid' is none of this encoder")
        rows = {PIXELS: (num_patches(grid), config.patch_width)}
        tokens = num_tokens(config, grid)
        rows |= {spec.name: (tokens, int(spec.shape[1])) for spec in outputs}
        for name, shape in rows.items():
            tensor = tensors[name]
            if tensor.dtype != "float32" or tensor.shape != shape:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise refused(f"{name!r} is {found}, not float32 {list(shape)}")
        arrays: Arrays = {name: read_array(path, tensors[name]) for name in rows}
    except OSError as error:
        raise refused(f"it cannot be read ({error.strerror or error})") from error
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise refused(f"{name!r} holds NaN or Inf")
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
    found = runner.run({PIXELS: arrays[PIXELS], **encoder_inputs(config, grid)})
    worst = Agreement()
    for name, rows in found.items():
        wanted = arrays[name]
        difference = float(np.abs(rows - wanted).max()) / max(float(np.abs(wanted).max()), 1e-6)
        worst |= Agreement(difference, cosine(rows, wanted))
        # a NaN is not within any bound
        if spec.min_cosine is not None and not worst.cosine >= spec.min_cosine:
            what = f"with what it rounds the engine's {name} have a cosine of {worst.cosine:.4f}"
            remedy = f"At least {spec.min_cosine} is asked for. {remedies.too_coarse}"
            raise GoldenMismatch(what, remedy)
        if spec.min_cosine is None and not difference <= spec.tolerance:
            what = f"the engine's {name} differ by {difference:.1e} of their largest value"
            raise GoldenMismatch(
                what, f"Allowed is {spec.tolerance:.0e}. {remedies.mismatch} {CHANGED}"
            )
    return worst
