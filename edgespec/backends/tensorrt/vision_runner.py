"""Runs an engine of an image encoder on a CUDA device: one image a call.

Knows names, types and addresses. Knows no image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.cuda.bound import Bound
from edgespec.backends.cuda.states import DTYPES
from edgespec.backends.cuda.workspace import Workspace, attempt
from edgespec.backends.tensorrt.bindings import TrtBindings
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.execution import OpenEngine, opening
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.config import VisionConfig
from edgespec.contract import Contract, TensorSpec
from edgespec.errors import LimitError
from edgespec.vision.contract import PIXELS, vision_contract
from edgespec.vision.grid import Arrays

LESS_MEMORY = (
    "Close other programs, or build the image encoder with a smaller `max_image_tokens_per_image`."
)


def open_encoder(
    bindings: TrtBindings,
    path: Path,
    config: VisionConfig,
    settings: EngineSettings,
    workspace: Workspace,
) -> TensorRTEncoder:
    """The runner of an engine file. BundleError where the file is not what its settings say,
    EnvironmentProblem where memory does not do."""
    contract, profiles = lowered_contract(vision_contract(config), settings), settings.profiles
    with opening(bindings, path, contract, profiles, workspace, LESS_MEMORY) as engine:
        return TensorRTEncoder(engine, contract, config, settings)


class TensorRTEncoder:
    """An open image encoder. What it reads and gives stands in memory for the largest image."""

    def __init__(
        self, engine: OpenEngine, contract: Contract, config: VisionConfig, settings: EngineSettings
    ) -> None:
        self.engine, self.contract, self.path = engine, contract, engine.path
        self.workspace, self.block, self.closed = engine.workspace, config.merge_size**2, False
        (self.profile,), (self.context,) = settings.profiles, engine.contexts
        patches = self.profile.most(PIXELS, 0)
        windows = self.profile.most("window_index", 0) if config.has_windows else 0
        sizes = {"P": patches, "W": windows, "T": patches // self.block}
        specs = (*contract.inputs, *contract.outputs)
        self.memory = {spec.name: self.workspace.alloc(spec.num_bytes(**sizes)) for spec in specs}

    def run(self, feeds: Arrays) -> Arrays:
        """The outputs by name in float32, for the inputs by name. LimitError for an image that the
        profile does not hold, EnvironmentProblem where device or library fails."""
        assert not self.closed
        with self.workspace.working():
            bound = [self.given(spec, feeds[spec.name]) for spec in self.contract.inputs]
            outputs = self.contract.outputs
            self.context.bind(
                [*bound, *(Bound(spec.name, self.memory[spec.name]) for spec in outputs)]
            )
            self.context.enqueue()
            self.workspace.synchronize()
            tokens = len(feeds[PIXELS]) // self.block
            return {spec.name: self.taken(spec, tokens) for spec in outputs}

    def given(self, spec: TensorSpec, array: NDArray[np.generic]) -> Bound:
        """An input on the device."""
        shapes = self.profile.shapes.get(spec.name)
        if shapes is not None and not all(
            least <= size <= most
            for least, size, most in zip(shapes[0], array.shape, shapes[2], strict=True)
        ):
            message = f"{self.path}: {spec.name} {list(array.shape)} is beyond {shapes[2]}"
            raise LimitError(message, "Build with a larger `max_image_tokens_per_image`.")
        self.workspace.put(
            self.memory[spec.name], np.ascontiguousarray(array.astype(DTYPES[spec.dtype]))
        )
        return Bound(spec.name, self.memory[spec.name], None if shapes is None else array.shape)

    def taken(self, spec: TensorSpec, tokens: int) -> NDArray[np.float32]:
        """An output [tokens, width] of the device."""
        data = self.workspace.down(self.memory[spec.name], spec.num_bytes(T=tokens))
        return data.view(DTYPES[spec.dtype]).reshape(tokens, -1).astype(np.float32)

    def close(self) -> None:
        """Release the engine and its memory; closing twice is harmless."""
        if self.closed:
            return
        self.closed = True
        with self.workspace.lock:
            attempt(self.workspace.device.activate, self.workspace.settle, self.engine.close)
        self.workspace.leave()
