"""Lossless speculative decoding for edge devices.

import edgespec

with edgespec.load("engines") as engine:
    response = engine.generate("def fibonacci(n):", edgespec.SamplingParams(temperature=0))
    print(response.text, response.metrics.speculative_decoding())
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "DraftPlan",
    "Engine",
    "Message",
    "Response",
    "SamplingParams",
    "Stream",
    "load",
]

if TYPE_CHECKING:
    from edgespec.prompts import Message, SamplingParams
    from edgespec.runtime.drafters.base import Drafter
    from edgespec.runtime.engine import Engine, Stream
    from edgespec.runtime.generation import Chunk, Response
    from edgespec.runtime.tree import DraftPlan

HOMES = {
    "Chunk": "edgespec.runtime.generation",
    "DraftPlan": "edgespec.runtime.tree",
    "Engine": "edgespec.runtime.engine",
    "Message": "edgespec.prompts",
    "Response": "edgespec.runtime.generation",
    "SamplingParams": "edgespec.prompts",
    "Stream": "edgespec.runtime.engine",
}


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
    if name not in HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)
