"""What a tuning came to: as JSON, as the plan that is kept beside the engines, and as YAML.

Knows a finished search. Files are written by whoever asks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgespec.artifacts.provenance import installed_version
from edgespec.benchmark.environment import engines_of, environment
from edgespec.benchmark.prompts import digest
from edgespec.compat.speculative_config import class_of_method
from edgespec.errors import OptionError
from edgespec.methods import METHODS
from edgespec.prompts import RequestFile
from edgespec.runtime.drafters.options import fields_of
from edgespec.runtime.engine import Engine
from edgespec.runtime.opening.tuned_plan import TunedPlan, belonging
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan
from edgespec.tuning import contest
from edgespec.tuning.ranking import Ranked
from edgespec.tuning.tuner import TuneOptions, Tuner

FORMAT = 1
SHOWN = 60  # ranked candidates of each method that a report has
NOT_PAYING = "drafts do not pay here: none was faster than plain decoding beyond noise"
CHOICES = "_choices"  # what the key of a static tree ends in, with the method before it


def report(tuner: Tuner, engine_dir: Path) -> dict[str, Any]:
    """All of it as JSON."""
    plain = tuner.speeds.tokens_per_s(contest.PLAIN)
    return {
        "format": FORMAT,
        "kind": "tune",
        "engine": engines_of(tuner.engine, engine_dir),
        "environment": environment(),
        "options": tuner.options.to_dict(),
        "prompts": {
            "files": str(tuner.requests.path.name),
            "sha256": digest(tuner.requests.requests),
            "turns": len(tuner.prompts),
        },
        "acceptance": {f"{t:g}": tuner.acceptance(t) for t in tuner.samples},
        "ranked": [row.to_dict() for row in shown(tuner.ranked)],
        "candidates": len(tuner.ranked),
        "plain": None if plain is None else plain.to_dict(),
        "measured": [contest.row_dict(row, tuner.speeds) for row in tuner.measured],
        "winner": None if tuner.winner is None else tuner.winner.to_dict(),
        "line": line(tuner),
    }


def shown(ranked: Sequence[Ranked]) -> Iterator[Ranked]:
    """The best of each method."""
    count = Counter[str]()
    for row in ranked:
        count[row.candidate.method] += 1
        if count[row.candidate.method] <= SHOWN:
            yield row


def bound_to(
    engine: Engine, engine_dir: Path, requests: RequestFile, options: TuneOptions
) -> dict[str, Any]:
    """What a journal is bound to: engines, device, costs, prompts and options. Raises
    BundleError."""
    role, costs = engine.config.role, engine.costs
    assert costs is not None
    kept = json.dumps(costs.profile.to_dict(), sort_keys=True).encode()
    return {
        **belonging(engine_dir, role, with_draft=engine.draft_config is not None),
        "costs": hashlib.sha256(kept).hexdigest(),
        "prompts": digest(requests.requests),
        "options": options.to_dict(),
        "edgespec": installed_version("edgespec"),
    }


def speed_of(tuner: Tuner, row: Ranked) -> float | None:
    """The measured speed of a candidate over plain decoding."""
    over = tuner.speeds.over(row.candidate.key)
    return None if over is None else over.median


def best_own(tuner: Tuner) -> tuple[float, str]:
    """The measured speed over plain decoding of the best plan of the engine's own drafter, and the
    plan in words; 1 where none was measured."""
    speeds = [
        (speed_of(tuner, row) or 1.0, row.candidate.words)
        for row in tuner.measured
        if row.candidate.own
    ]
    return max(speeds, default=(1.0, "none"))


def line(tuner: Tuner) -> str:
    """What the search came to, in a sentence."""
    if tuner.winner is None:
        return NOT_PAYING
    speed = speed_of(tuner, tuner.winner)
    assert speed is not None
    words = f"{tuner.winner.candidate.words}, {speed:.2f} x plain"
    best = max(tuner.measured, key=lambda row: speed_of(tuner, row) or 0.0)
    most = speed_of(tuner, best) or 0.0
    if most <= speed:
        return f"fastest: {words}"
    return f"chosen: {words}; {best.candidate.words}, {most:.2f} x, is no faster beyond noise"


def tuned_plan(tuner: Tuner, engine_dir: Path) -> TunedPlan:
    """What is kept beside the engines."""
    role, row = tuner.engine.config.role, tuner.winner
    acceptance = tuner.acceptance(tuner.options.temperature)
    rates = tuple(tuple(round(rate, 4) for rate in depth) for depth in acceptance)
    if row is None:
        with_draft = tuner.engine.draft_config is not None
        bound = belonging(engine_dir, role, with_draft=with_draft)
        words = "none, as drafts did not pay"
        return TunedPlan(role=role, method=None, plan=None, acceptance=rates, words=words, **bound)
    candidate = row.candidate
    with_draft = METHODS[candidate.method].needs_engine
    return TunedPlan(
        role=role,
        method=candidate.method,
        plan=candidate.plan,
        options=dict(candidate.options),
        over_plain=speed_of(tuner, row),
        acceptance=rates,
        prior=tuple(round(rate, 4) for rate in row.prior) if with_draft else (),
        words=candidate.words,
        **belonging(engine_dir, role, with_draft=with_draft),
    )


# ---- YAML


def config_of(row: Ranked) -> dict[str, Any]:
    """A file for --config: the speculative_config of a candidate, and whether it adapts. Raises
    OptionError for a plan that the keys of its decoding type cannot say."""
    candidate, plan = row.candidate, row.candidate.plan
    kind = class_of_method(candidate.method)
    keys = dict(sizes_of(row, {*fields_of(kind)})) | dict(candidate.options)
    if unknown := keys.keys() - fields_of(kind).keys():
        message = f"{candidate.words}: decoding_type {kind.decoding_type} has no {min(unknown)}"
        remedy = "Leave `output` out: the plan is kept beside the engines."
        raise OptionError(message, remedy)
    block = {"decoding_type": kind.decoding_type, **keys}
    policy = {"spec_policy": "adaptive" if plan.adaptive else "fixed"} if candidate.own else {}
    return {"speculative_config": block, **policy}


def sizes_of(row: Ranked, known: set[str]) -> Iterator[tuple[str, Any]]:
    """The keys that say how much is drafted."""
    plan, method = row.candidate.plan, row.candidate.method
    if isinstance(plan, StaticPlan):
        key = next(name for name in known if name.endswith(CHOICES))
        yield key, [[*path] for path in plan.choices]
    elif not METHODS[method].needs_engine:
        if "max_draft_len" in known and plan.top_k == 1:
            yield "max_draft_len", plan.steps
    elif plan.top_k == 1:
        yield "max_draft_len", min(plan.steps, plan.verify_size - 1)
    else:
        if not isinstance(plan, BlockPlan):
            if "use_dynamic_tree" not in known:
                message = f"{row.candidate.words}: a tree of {METHODS[method].title} has no keys"
                raise OptionError(
                    message, "Leave `output` out: the plan is kept beside the engines."
                )
            yield "use_dynamic_tree", True
            yield "max_draft_len", plan.steps
        yield "dynamic_tree_max_topK", plan.top_k
        yield "max_total_draft_tokens", plan.verify_size - 1
