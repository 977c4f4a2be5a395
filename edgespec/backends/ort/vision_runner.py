"""Image encoders on ONNX Runtime: an engine's files, and a runner of them.

Knows the order of the work. The rewrites stand in `vision_lowering`, what becomes of weights in
`weights`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from edgespec.backends.ort.native.library import kernels
from edgespec.backends.ort.options import NATIVE
from edgespec.backends.ort.runner import check_signature, open_session
from edgespec.backends.ort.settings import EngineSettings
from edgespec.config import VisionConfig
from edgespec.errors import EnvironmentProblem
from edgespec.vision.contract import vision_contract
from edgespec.vision.grid import Arrays


class OrtEncoder:
    """An open image encoder."""

    def __init__(self, path: Path, config: VisionConfig, settings: EngineSettings) -> None:
        self.contract = vision_contract(config)
        if settings.kernels == NATIVE:
            kernels()  # or the reason why there are none
        self.session: ort.InferenceSession | None = open_session(path)
        check_signature(self.session, self.contract, path)

    def run(self, feeds: Arrays) -> Arrays:
        """The outputs of the contract by name, for its inputs by name. EnvironmentProblem where
        ONNX Runtime fails."""
        assert self.session is not None
        names = [spec.name for spec in self.contract.outputs]
        given = {
            spec.name: np.ascontiguousarray(feeds[spec.name], spec.dtype)
            for spec in self.contract.inputs
        }
        try:
            outputs = self.session.run(names, given)
        except Exception as error:  # ONNX Runtime raises its own untyped family; the cause is kept
            patches = len(given[self.contract.inputs[0].name])
            reason = " ".join(str(error).split())
            message = f"ONNX Runtime failed in the encoding of {patches} patches: {reason}"
            remedy = "If memory ran out, close other programs or give a smaller image."
            raise EnvironmentProblem(message, remedy) from error
        return dict(zip(names, outputs, strict=True))

    def close(self) -> None:
        """Release the engine; closing twice is harmless."""
        self.session = None
