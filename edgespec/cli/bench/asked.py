"""What a command line of `bench` asks for: the engine, prompts, plans, and what is measured.

Knows flags, and checks them against what open engines take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.benchmark.modes import MODES, PREFILL, SPECULATIVE, VERIFY
from edgespec.cli.draft_flags import plan_of
from edgespec.cli.terminal import ours
from edgespec.errors import EdgeSpecError, LimitError

if TYPE_CHECKING:
    from edgespec.benchmark.cases import DecodingVariant
    from edgespec.benchmark.measure import BenchPlan
    from edgespec.benchmark.synthetic import Dial
    from edgespec.methods.names import SpecPolicy
    from edgespec.prompts import RequestFile
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.trees.tree import DraftPlan

ROWS = (1, 2, 4, 8, 16, 32, 60)
TOKENS = 128  # of prompts and of answers, where nothing else is said and as many fit


def engine_of(ctx: click.Context, engine_dir: Path | None, flag: Path | None) -> Path:
    """The engine directory, by the argument or by the flag. A first argument that is a key of a
    file leaves the flag."""
    if engine_dir is None and flag is None:
        raise click.UsageError("Missing argument 'ENGINE_DIR'", ctx)
    if engine_dir is not None and ctx.get_parameter_source("engine_flag") is not None:
        from click.core import ParameterSource

        if (
            flag is not None
            and ctx.get_parameter_source("engine_flag") is ParameterSource.COMMANDLINE
        ):
            raise click.UsageError("ENGINE_DIR and --engine-dir exclude each other", ctx)
    directory = engine_dir or flag
    assert directory is not None
    return directory


def drafts_by(modes: Sequence[str] | None, *, wanted: bool) -> Any:
    """Whether the engine is opened with its draft, as Engine takes it."""
    if wanted or (modes is not None and SPECULATIVE in modes):
        return True
    return "auto" if modes is None or PREFILL in modes else False


def requests_of(
    prompts: Path | None,
    input_file: Path | None,
    categories: tuple[str, ...],
    temperature: float | None,
    seed: int,
) -> RequestFile | None:
    """The requests of a file; None for random prompts. Raises RequestError."""
    from edgespec.benchmark.prompts import refuse_own_drafts
    from edgespec.prompts import read_prompt_set, read_requests

    if prompts is not None:
        given = 0.0 if temperature is None else temperature
        return read_prompt_set(prompts, categories=categories, temperature=given, seed=seed)
    if input_file is None:
        return None
    requests = read_requests(input_file, temperature=temperature, seed=seed)
    refuse_own_drafts(requests)
    return requests


def sampling_of(temperature: float | None, seed: int) -> Any:
    """How answers to random prompts are sampled."""
    from edgespec.prompts import SamplingParams

    return SamplingParams(temperature=temperature or 0.0, seed=seed)


def plans_of(
    engine: Engine,
    sizes: Sequence[tuple[int, ...] | None],
    tree: Any,
    policies: Sequence[SpecPolicy] | None,
) -> tuple[list[DraftPlan], list[str]]:
    """The plans of all combinations of sizes and policies, each once, and a line for each that
    cannot be. Raises LimitError where none can, and for a policy that this engine does not have."""
    if not engine.spec_decode:
        return [], []
    plans, errors = list[Any](), list[EdgeSpecError]()
    for policy in policies or (None,):
        engine.planner.check_adaptive(policy)
        for one in product(*(size or (None,) for size in sizes)):
            try:
                plans.append(plan_of(engine, one, tree, spec_policy=policy))
            except LimitError as error:
                errors.append(error)
    if not plans:
        raise errors[0]
    return list(dict.fromkeys(plans)), [ours(f"left out: {error.what}") for error in errors]


def variants_of(
    engine: Engine, plans: Sequence[DraftPlan], dials: Sequence[Dial]
) -> list[DecodingVariant]:
    """The ways of drafting. Raises LimitError for dialled acceptance by another accept rule than
    the exact one."""
    from edgespec.benchmark.cases import variants
    from edgespec.runtime.acceptance.verify import EXACT

    if dials and engine.acceptance.rule != EXACT:
        message = (
            f"--synthetic-acceptance is for the exact rule, and this is {engine.acceptance.rule}"
        )
        raise LimitError(message, "Leave one of the two out.")
    return variants(plans, [*dials] or [None])


def measured(
    engine: Engine,
    *,
    modes: Sequence[str] | None,
    source: Any,
    input_tokens: Sequence[int] | None,
    output_tokens: Sequence[int] | None,
    batch_sizes: Sequence[int],
    rows: Sequence[int] | None,
    variants: list[DecodingVariant],
    repeats: int,
    warmup: int,
) -> BenchPlan:
    """What to measure, checked against what the engines take. Raises LimitError."""
    from edgespec.benchmark.measure import BenchPlan
    from edgespec.benchmark.passes import check_rows, fitting_rows
    from edgespec.benchmark.prompts import check_sizes

    capacity = engine.base.capacity
    usual = min(TOKENS, capacity // 2, *(c.limits.max_input_len for c in engine.configs.values()))
    contexts = tuple(input_tokens or (usual,))
    asked = tuple(modes or (MODES if variants else MODES[:-1]))
    if rows is None:
        rows = fitting_rows(engine, ROWS, contexts)
    elif VERIFY in asked:
        check_rows(engine, rows, contexts)
    plan = BenchPlan(
        modes=asked,
        source=source,
        input_tokens=contexts if source.requests is None else (None,),
        contexts=contexts,
        output_tokens=tuple(output_tokens or (min(TOKENS, capacity - usual),)),
        batch_sizes=batch_sizes,
        rows=rows,
        variants=variants,
        prefill_plan=variants[0].plan if variants else None,
        repeats=repeats,
        warmup=warmup,
    )
    check_sizes(engine, [*plan.prefill_cells, *plan.cells])
    for _, batch_size in plan.pass_sizes:
        engine.limits.check_batch_size(batch_size)
    return plan
