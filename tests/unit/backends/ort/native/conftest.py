"""What the tests of all kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.backends.ort.native.library import kernels
from tests.unit.backends.ort.native.sessions import levels


@pytest.fixture(params=levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of instructions that this machine has, in use for a test."""
    kernels().use_level(request.param)
    yield request.param
    kernels().use_level(kernels().levels[0])
