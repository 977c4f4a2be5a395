from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import edgespec
from edgespec.runtime.engine import Engine
from tests.lossless.engines import LIMITS, api_engines, make_engines
from tests.unit.serve.serving import TEMPLATE, Running, served


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    """Four lanes and an EAGLE-3 draft; prompts of 48 tokens, 64 in all."""
    with edgespec.load(api_engines() / "four", spec_decode=True) as engine:
        yield engine


@pytest.fixture(scope="package")
def server(engine: Engine) -> Iterator[Running]:
    with served(engine) as running:
        yield running


@pytest.fixture(scope="package")
def tool_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same with a template of tools; prompts of 64 tokens, 256 in all."""
    path, limits = tmp_path_factory.mktemp("tools"), replace(LIMITS, max_input_len=64)
    limits = replace(limits, max_kv_cache_capacity=256)
    made = make_engines(path, chat_template=TEMPLATE, eos=[0], limits=limits)
    with edgespec.load(made / "four", spec_decode=True) as engine:
        yield engine


@pytest.fixture(scope="package")
def caller(tool_engine: Engine) -> Iterator[Running]:
    with served(tool_engine) as running:
        yield running
