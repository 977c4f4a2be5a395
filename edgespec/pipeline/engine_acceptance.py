"""What an engine accepts of a draft, beside what torch measured when it was trained: the same
prompts, held out of the data, and as many drafts a step.

Knows the report beside a trained draft, and engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.artifacts.json_files import read_json
from edgespec.errors import RequestError
from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.training.acceptance import answers_of
from edgespec.training.data import Question
from edgespec.training.job import measured_questions
from edgespec.training.recipe import REPORT, TrainRecipe


def accepted_lengths(recipe: TrainRecipe, engine_dir: Path) -> tuple[float, float]:
    """Tokens a verify step in torch, and of the engines. Raises RequestError where data or recipe
    are not those that the draft was trained with."""
    report = read_json(Path(str(recipe["training.output_dir"])) / REPORT)
    questions, template, sha256 = measured_questions(recipe)
    theirs, ours = report["recipe"] | report["data"], recipe.shaping() | {"sha256": sha256}
    for key in ("sha256", "training.seed", "data.sample_size", "validation.num_prompts"):
        if theirs[key] != ours[key]:
            raise RequestError(
                f"the draft was trained with another {key}: {theirs[key]!r}, not {ours[key]!r}.",
                "Repeat the command that trained it.",
            )
    sampling = SamplingParams(
        temperature=0, max_generate_length=recipe["validation.max_new_tokens"]
    )
    num_tokens, num_steps = 0, 0
    with Engine(engine_dir, spec_policy="fixed", tuned=False) as engine:
        plan = engine.plan(1, verify_size=report["acceptance"]["draft_len"] + 1)

        def answering(prompts: Sequence[Question]) -> list[list[int]]:
            nonlocal num_tokens, num_steps
            answers = []
            for prompt in prompts:
                response = engine.generate([*prompt.ids], sampling, plan)
                num_tokens += response.metrics.completion_tokens - 1
                num_steps += len(response.metrics.per_step_accepted)
                answers.append([*response.token_ids])
            return answers

        answers_of(questions, template, answering)
    return report["acceptance"]["length"], num_tokens / max(1, num_steps)
