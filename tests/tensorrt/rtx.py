"""NVIDIA's parser and builder in the form of TensorRT-RTX, asked about one graph at a time.

Both run without a GPU. Nothing here says that an engine computes the right thing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.tensorrt.versions import RELEASES, Capabilities
from tests.tensorrt import matrix

ROWS = (1, 8, 64)  # least, most frequent and most of a dimension that varies


@dataclass
class Answer:
    """What was said: `step` is what refused the graph, parse or build; empty: it was taken."""

    step: str = ""
    lines: list[str] = field(default_factory=list)
    engine_bytes: int = 0


def bindings() -> Any:
    """The module; the test is skipped where it is not installed."""
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")


def version() -> Capabilities:
    """The rules of the installed release."""
    major, minor = bindings().__version__.split(".")[:2]
    return RELEASES[f"rtx-{major}.{minor}"]


@cache
def logger() -> Any:
    """The logger of this process: the library keeps the first that it is given."""
    trt = bindings()

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.lines.append(msg)

    return Logger()


@cache
def builder() -> Any:
    return bindings().Builder(logger())


def ask(model: bytes | Path, *, build: bool, sm: int = 120) -> Answer:
    """Parse a model, and build it for a compute capability where `build` says so. Both stand in the
    table at the end of a run."""
    answer = asked(model, build=build, sm=sm)
    matrix.note(model, version(), answer.step, build=build)
    return answer


def asked(model: bytes | Path, *, build: bool, sm: int) -> Answer:
    trt, log = bindings(), logger()
    log.lines.clear()
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder().create_network(typed)
    parser = trt.OnnxParser(network, log)
    taken = parser.parse(model) if isinstance(model, bytes) else parser.parse_from_file(str(model))
    if not taken:
        return Answer("parse", [parser.get_error(i).desc() for i in range(parser.num_errors)])
    if not build:
        return Answer()
    engine = builder().build_serialized_network(network, config(network, sm))
    if engine is None:
        return Answer("build", list(log.lines))
    return Answer(engine_bytes=engine.nbytes)


def config(network: Any, sm: int) -> Any:
    """A config with one profile, for a compute capability."""
    trt = bindings()
    made, profile = builder().create_builder_config(), builder().create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = tuple(tensor.shape)
        if -1 in shape:
            sizes = [tuple(n if dim == -1 else dim for dim in shape) for n in ROWS]
            profile.set_shape(tensor.name, *sizes)
    made.add_optimization_profile(profile)
    made.num_compute_capabilities = 1
    made.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    return made


def builds() -> bool:
    """Whether the installed release compiles without a GPU whatever the graph has."""
    return version().line >= (11, 0)


def needs_builds() -> None:
    """Skip the test where it does not."""
    if not builds():
        pytest.skip(f"{version().name} does not compile without a driver")
