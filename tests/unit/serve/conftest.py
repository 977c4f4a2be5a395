from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgespec
from edgespec.runtime.engine import Engine
from tests.lossless.engines import api_engines
from tests.unit.serve.serving import Running, served


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    """Four lanes and an EAGLE-3 draft; prompts of 48 tokens, 64 in all."""
    with edgespec.load(api_engines() / "four", spec_decode=True) as engine:
        yield engine


@pytest.fixture(scope="package")
def server(engine: Engine) -> Iterator[Running]:
    with served(engine) as running:
        yield running
