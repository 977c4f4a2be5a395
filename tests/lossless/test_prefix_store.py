"""An answer after a restart, with what earlier engines stored of its prompt, is the one without:
greedy and sampled, plain and with drafts of each kind that remembers a prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import edgespec
from edgespec.backends.ort.options import WeightFormat
from edgespec.export.components import ExportOptions, export
from tests import made, shared, toys
from tests.lossless import draft_models
from tests.lossless.answers import prompt_of
from tests.lossless.engines import api_engines, make_engines
from tests.lossless.pairs import LIMITS
from tests.lossless.test_drafts import engines_of


def dflash() -> Path:
    def make(path: Path) -> None:
        base = toys.make_base(path / "base", "qwen3", layers=8, vocab=256)
        draft = toys.make_dflash(path / "draft", base, block_size=8)
        export(str(base), path, ExportOptions(base_for="dflash", draft_dir=str(draft)))
        export(str(draft), path, ExportOptions(base_model_dir=str(base)))

    path = shared.made_once("stored dflash", make)
    return made.built(LIMITS, path / "llm", path / "dflash_draft")


def draft_model(kind: draft_models.Kind) -> Path:
    path = draft_models.models(kind)
    return draft_models.engines(path / "base", path / "draft")


def int4() -> Path:
    def make(path: Path) -> None:
        make_engines(path, eos=[0], options=WeightFormat("int4", 32))

    return shared.made_once("stored int4", make) / "one"


ENGINES: dict[str, Callable[[], Path]] = {
    "eagle3": lambda: api_engines() / "one",
    "eagle3, int4": int4,
    "medusa": lambda: engines_of("medusa") / "one",
    "mtp, hybrid base": lambda: engines_of("mtp") / "one",
    "dflash": dflash,
    "hybrid draft model": lambda: draft_model("hybrid-draft"),
}
GREEDY = edgespec.SamplingParams(temperature=0, max_generate_length=7, ignore_eos=True)
SAMPLED = edgespec.SamplingParams(
    temperature=1, top_p=0.9, seed=3, max_generate_length=9, ignore_eos=True
)


@pytest.mark.parametrize("name", ENGINES)
def test_an_answer_after_a_restart_is_the_one_without_it(name: str, tmp_path: Path) -> None:
    path, prompt = ENGINES[name](), prompt_of(30)
    ways = [(sampling, plan) for sampling in (GREEDY, SAMPLED) for plan in (None, edgespec.PLAIN)]
    with edgespec.load(path, prefix_cache_dir=tmp_path) as before:
        prompt += [*before.generate(prompt, GREEDY, keep=True).token_ids, 5, 6]
        assert list(tmp_path.iterdir()) == []
    with edgespec.load(path, prefix_cache_bytes=0) as never:
        wanted = [never.generate(prompt, *way) for way in ways]
    for way, answer in zip(ways, wanted, strict=True):
        with edgespec.load(path, prefix_cache_dir=tmp_path) as after:
            found = after.generate(prompt, *way)
        assert found.metrics.reused_tokens >= 30
        assert found.token_ids == answer.token_ids
        # What the drafter remembered is there too: it drafts as it did
        assert found.metrics.per_step_drafted == answer.metrics.per_step_drafted
        assert found.metrics.per_step_accepted == answer.metrics.per_step_accepted
        if way[1] is None:
            assert sum(found.metrics.per_step_drafted) > 0


def test_another_engine_of_the_same_model_finds_nothing_and_what_is_forgotten_is_gone(
    tmp_path: Path,
) -> None:
    for name, reused in (("eagle3", 0), ("eagle3, int4", 0), ("eagle3", 29)):
        with edgespec.load(ENGINES[name](), prefix_cache_dir=tmp_path) as engine:
            found = engine.generate(prompt_of(30), GREEDY)
            assert found.metrics.reused_tokens == reused
    with edgespec.load(ENGINES["eagle3"](), prefix_cache_dir=tmp_path) as engine:
        engine.forget_prefixes()
        assert engine.generate(prompt_of(30), GREEDY).metrics.reused_tokens == 0
