"""The lm_head of a pair, its largest weight, in memory once: a draft that has its base's reads it
from the base's file.

Knows hashes and files, and how a session is given a weight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.base import PairDevice
from edgespec.backends.engine_config import BUILD_AGAIN, LargestWeight
from edgespec.errors import BundleError

Shared = dict[str, ort.OrtValue]  # by initializer; the session reads this memory


class PairWeights(PairDevice):
    """The largest weights of the engines that are open, mapped, by hash and shape."""

    def __init__(self) -> None:
        self.mapped: dict[tuple[str, tuple[int, ...]], NDArray[np.uint8]] = {}

    def array(self, engine: Path, largest: LargestWeight) -> NDArray[np.uint8]:
        """The largest weight of an engine; mapped from the file of the first engine that has it.
        BundleError where that file is too short."""
        key = largest.sha256, largest.shape
        if key not in self.mapped:
            file = file_of(engine, largest)
            try:
                array = np.memmap(file, np.uint8, "r", largest.offset, largest.shape)
            except (OSError, ValueError) as error:
                raise BundleError(f"{file} cannot be mapped: {error}.", BUILD_AGAIN) from error
            self.mapped[key] = array
        return self.mapped[key]

    def shared(self, engine: Path, largest: LargestWeight | None) -> Shared:
        """The same as the session of that engine is given it; nothing where no kernel of our own
        reads it."""
        if largest is None:
            return {}
        return {largest.name: ort.OrtValue.ortvalue_from_numpy(self.array(engine, largest))}


def data_of(engine: Path) -> Path:
    """The file with the weights of an engine."""
    return engine.with_name(f"{engine.name}.data")


def file_of(engine: Path, largest: LargestWeight) -> Path:
    """The file with the largest weight of an engine."""
    return data_of(engine) if largest.file is None else engine.with_name(largest.file)
