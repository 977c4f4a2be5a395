"""The steps of a build that each role of encoders has of its own. What all engines have in common,
and what decoders have, stands in `build`. Knows no graph and no engine library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from edgespec.backends.base import Backend, Progress, Staged
from edgespec.backends.engine_config import BuiltConfig, EngineWeights
from edgespec.backends.golden import Agreement
from edgespec.backends.onnx_dir import ExportDir
from edgespec.contract import Limits

Onnx = TypeVar("Onnx", bound=ExportDir[Any])


class EncoderSteps(ABC, Generic[Onnx]):
    """What a build asks of an encoder's role."""

    @abstractmethod
    def check_limits(self, limits: Limits) -> None:
        """LimitError for limits of this role that no engine can have."""

    @abstractmethod
    def check_graph(self, onnx: Onnx) -> None:
        """BundleError where the graph is not one that export writes."""

    @abstractmethod
    def prove(
        self, backend: Backend, onnx: Onnx, staged: Staged, progress: Progress
    ) -> Agreement | None:
        """How a staged engine agrees with the golden outputs; None where there are none, or where
        it cannot be run. BuildError where it computes something else."""

    @abstractmethod
    def config(self, onnx: Onnx, limits: Limits, staged: Staged) -> BuiltConfig[Any, Any]:
        """The config of a staged engine."""

    @abstractmethod
    def plan_lines(self, backend: Backend, onnx: Onnx, limits: Limits) -> Iterator[str]:
        """What would be built, before what the backend says of it."""

    @abstractmethod
    def notes(self, onnx: Onnx, weights: EngineWeights) -> Iterator[str]:
        """What the user should know about a built engine."""
