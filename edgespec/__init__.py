"""Lossless speculative decoding for edge devices.

import edgespec

with edgespec.load("engines") as engine:
    response = engine.generate("def fibonacci(n):", edgespec.SamplingParams(temperature=0))
    print(response.text, response.metrics.speculative_decoding())
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edgespec.errors import (
        BuildError,
        BundleError,
        CheckpointError,
        ContractError,
        EdgeSpecError,
        EngineClosed,
        EngineMismatch,
        EnvironmentProblem,
        InternalError,
        LimitError,
        MissingDependency,
        OptionError,
        OutputError,
        PairingError,
        RequestError,
        UnsupportedModel,
    )
    from edgespec.prompts import Message, SamplingParams
    from edgespec.runtime.drafters.base import Drafter
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.generation import Chunk, Response
    from edgespec.runtime.metrics import RequestMetrics
    from edgespec.runtime.streams import AsyncStream, Stream
    from edgespec.runtime.tree import PLAIN, DraftPlan

__all__ = [
    "PLAIN",
    "AsyncStream",
    "BuildError",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "ContractError",
    "DraftPlan",
    "EdgeSpecError",
    "Engine",
    "EngineClosed",
    "EngineMismatch",
    "EnvironmentProblem",
    "InternalError",
    "LimitError",
    "Message",
    "MissingDependency",
    "OptionError",
    "OutputError",
    "PairingError",
    "RequestError",
    "RequestMetrics",
    "Response",
    "SamplingParams",
    "Stream",
    "UnsupportedModel",
    "load",
]

# Where the public names stand; all others are internal. They load when they are first used.
HOMES = {
    "PLAIN": "edgespec.runtime.tree",
    "AsyncStream": "edgespec.runtime.streams",
    "Chunk": "edgespec.runtime.generation",
    "DraftPlan": "edgespec.runtime.tree",
    "Engine": "edgespec.runtime.engine",
    "Message": "edgespec.prompts",
    "RequestMetrics": "edgespec.runtime.metrics",
    "Response": "edgespec.runtime.generation",
    "SamplingParams": "edgespec.prompts",
    "Stream": "edgespec.runtime.streams",
}

# What the library has to say goes where the application's logging sends it, else nowhere
logging.getLogger("edgespec").addHandler(logging.NullHandler())


def load(
    engine_dir: str | Path,
    *,
    spec_decode: bool | None = None,
    drafter: str | Drafter | None = None,
    exact: bool = False,
) -> Engine:
    """Opens an engine directory and returns the engine.

    `spec_decode` None enables speculative decoding if the directory has a draft engine. `drafter`
    is the name of a method that needs no engine, or a Drafter of your own. `exact` is that of
    `infer --exact`. Raises BundleError, PairingError, EngineMismatch, LimitError or
    EnvironmentProblem.
    """
    from edgespec.runtime.engine import Engine

    return Engine(engine_dir, spec_decode=spec_decode, drafter=drafter, exact=exact)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(import_module(HOMES.get(name, "edgespec.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
