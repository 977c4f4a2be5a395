"""TensorRT's backend over a simulated library takes prompts with images: greedy tokens are those of
transformers, in batches of text and images, plainly and with drafts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.build import build
from edgespec.backends.tensorrt.backend import BACKEND
from edgespec.export.components import ExportOptions
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response
from tests import image_reference, made, toys
from tests.lossless.engines import LANES
from tests.lossless.test_images import CHAIN, COUNT, GREEDY, INTERLEAVED, LIMITS, PROMPTS, TREE
from tests.tensorrt_simulator.installed import install


@pytest.mark.parametrize(
    "version", [pytest.param("10.13.3.9", marks=pytest.mark.deep), "10.16.2.10"]
)
def test_a_device_takes_rows_of_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    """Qwen3-VL's deepstack, for which text and decoding have zeros."""
    install(monkeypatch, version)
    base = toys.make_qwen3_vl(tmp_path / "base", layers=4, deepstack=(0, 1), seed=8)
    draft = toys.make_draft(tmp_path / "draft", base, "specforge", rope=INTERLEAVED, rope_theta=1e6)
    options = BACKEND.parse_options({"compute": "fp32", "timing_cache": "none"})
    for exported in (
        made.exported(base, ExportOptions(base_for="eagle3", aux_layers=(1, 2, 3))),
        made.exported(draft, ExportOptions(base_model_dir=str(base), aux_layers=(1, 2, 3))),
    ):
        limits = replace(LIMITS, max_batch_size=LANES)
        build(exported / "llm", tmp_path / "engines", limits, backend=BACKEND.name, options=options)
    model = toys.load_vl(base)
    with Engine(tmp_path / "engines", spec_decode=True) as engine:
        engine.stop_ids = frozenset()
        jobs = {
            name: GenerationRequest(image_reference.prompt_of(model, parts), GREEDY, plan)
            for (name, parts), plan in zip(
                PROMPTS.items(), (None, CHAIN, TREE, None, TREE), strict=True
            )
        }
        found = {
            one: event
            for one, event in engine.run_queue(deque(jobs.values()), LANES)
            if not isinstance(event, Chunk)
        }
    for name, job in jobs.items():
        response = found[job]
        assert isinstance(response, Response), response
        assert response.token_ids == image_reference.greedy(model, PROMPTS[name], COUNT)
