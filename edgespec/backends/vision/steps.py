"""The steps of a build that are an image encoder's own: what its limits are, which graph is
canonical, how it is proven on the golden image, and what is said of it.

Knows the contract of image encoders. The order of the work stands in `build`.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.artifacts import file_names
from edgespec.backends.base import Backend, Listeners, Staged
from edgespec.backends.engine_config import FLOAT32, EngineWeights
from edgespec.backends.golden import Agreement
from edgespec.backends.onnx_dir import VisionOnnxDir
from edgespec.backends.vision.config import ImageLimits, VisionEngineConfig
from edgespec.backends.vision.golden import check_golden, read_golden
from edgespec.contract import Limits
from edgespec.vision.contract import vision_contract


class VisionSteps:
    """What a build asks of this role."""

    def check_limits(self, limits: Limits) -> None:
        """LimitError unless minimum <= per image <= maximum."""
        ImageLimits.of(limits).check()

    def check_graph(self, onnx: VisionOnnxDir) -> None:
        """BundleError where the graph is not one that export writes."""
        from edgespec.backends.canonical_graph import check_graph

        check_graph(onnx.model, vision_contract(onnx.config.vision), onnx.manifest.files)

    def prove(
        self, backend: Backend, onnx: VisionOnnxDir, staged: Staged, progress: Listeners
    ) -> Agreement | None:
        """How a staged engine agrees with the golden image; None where there is none, or where it
        cannot be run. BuildError where it computes something else."""
        if onnx.golden is None or staged.unproven:
            return None
        vision = onnx.config.vision
        golden = read_golden(onnx.golden, vision)
        progress.prove(1)
        runner = backend.open_encoder(staged.engine, vision, staged.settings)
        try:
            agreement = check_golden(runner, vision, golden, staged.accuracy, backend.remedies)
        finally:
            runner.close()
        progress.advance(1)
        return agreement

    def config(self, onnx: VisionOnnxDir, limits: Limits, staged: Staged) -> VisionEngineConfig:
        """The config of a staged engine."""
        return VisionEngineConfig(
            component=onnx.config,
            limits=ImageLimits.of(limits),
            weights=staged.weights,
            settings=staged.settings,
        )

    def plan_lines(self, backend: Backend, onnx: VisionOnnxDir, limits: Limits) -> Iterator[str]:
        """Its layers, its limits, and what it lacks, before what the backend says of it."""
        one = f"{limits.min_image_tokens} to {limits.max_image_tokens_per_image}"
        yield f"an image encoder of {onnx.config.vision.num_layers} layers on {backend.title}"
        yield f"images of {one} tokens, {limits.max_image_tokens} in a request"
        yield from without_processor(onnx)

    def notes(self, onnx: VisionOnnxDir, weights: EngineWeights) -> Iterator[str]:
        """What becomes of images, and what is lacking to prepare them."""
        if weights.scheme != FLOAT32:
            yield f"{weights.products_text}; images look a little different to the model"
        yield from without_processor(onnx)


def without_processor(onnx: VisionOnnxDir) -> Iterator[str]:
    """A note where an export does not say how its images are prepared."""
    if not any(name in onnx.manifest.files for name in file_names.PROCESSOR_FILES):
        yield (
            f"{onnx.path} has no {file_names.PROCESSOR_FILES[0]}, and no image can be prepared: put"
            " it beside the checkpoint's config.json, remove this directory, then export and build"
            " again"
        )
