"""An engine accepts as many drafts of a newly trained draft as torch measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.backends.build import build
from edgespec.export.components import ExportOptions, export
from edgespec.methods import METHODS
from edgespec.prompts import SamplingParams
from edgespec.training.table import TRAINABLE
from edgespec.training.train import train
from tests.lossless.pairs import LIMITS
from tests.unit.training.test_train import USUAL, job_of, unstopped

OWN_KEYS = USUAL | {"medusa": ("training.loss=kl",)}
PLANS = {  # as many drafts as torch measures
    "dflash": (1, 1, 4), "jetspec": (1, 1, 4), "dspark": (1, 1, 5), "medusa": (1, 4, 5),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"dspark": {"confidence_threshold": 0.0}}  # whole blocks


OF_ANY_BASE = [n for n in TRAINABLE if METHODS[n].weights_in != "base_checkpoint"]  # a draft apart


@pytest.mark.parametrize("method", OF_ANY_BASE)
def test_an_engine_counts_what_torch_measured(
    method: str, base: Path, chats: Path, tmp_path: Path
) -> None:
    keys = (
        "training.max_steps=40", "validation.max_new_tokens=24", "validation.num_prompts=8",
        f"validation.data_path={chats}", *OWN_KEYS.get(method, ()),
    )  # fmt: skip
    job = job_of(base, chats, tmp_path / "draft", method, *keys)
    found = train(job, unstopped).acceptance
    assert found is not None
    plan = PLANS.get(method, (1, 3, 4))
    draft_dir = str(job.out) if plan[1] == 1 else None  # of a draft of blocks
    exports = (
        (base, ExportOptions(base_for=method, draft_dir=draft_dir), "llm"),
        (job.out, ExportOptions(base_model_dir=str(base)), METHODS[method].component),
    )
    for number, (model, options, component) in enumerate(exports):
        export(str(model), tmp_path / f"onnx{number}", options)
        build(tmp_path / f"onnx{number}" / str(component), tmp_path / "engines", LIMITS)
    steps = tokens = 0
    drafting = {"spec_decode": True, "drafter_options": OPTIONS.get(method)}
    with edgespec.load(tmp_path / "engines", **drafting) as engine:
        for question in job.questions:
            sampling = SamplingParams(temperature=0.0, max_generate_length=24)
            metrics = engine.generate([*question.ids], sampling, engine.plan(*plan)).metrics
            steps, tokens = steps + metrics.steps, tokens + metrics.decode_tokens
    assert (tokens, steps) == (found.num_tokens, found.num_steps)
    assert tokens > steps, found  # some are accepted
