"""What a tuning came to: as JSON, as the plan that is kept beside the engines, and as YAML.

Knows a finished search. Files are written by whoever asks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.artifacts.provenance import installed_version
from edgespec.benchmark.environment import engines_of, environment
from edgespec.benchmark.prompts import digest
from edgespec.benchmark.statistics import Figure, as_dict
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
from edgespec.tuning.candidates import Candidate
from edgespec.tuning.contest import Measured
from edgespec.tuning.ranking import Ranked
from edgespec.tuning.tuner import TuneOptions, Tuner

FORMAT = 1
SHOWN = 60  # ranked candidates of each method that a report has
NOT_PAYING = "drafts do not pay here: none was faster than plain decoding beyond noise"
LEAVE_OUT = "Leave `output` out: the plan is kept beside the engines."
CHOICES = "_choices"  # what the key of a static tree ends in, with the method before it


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What a search came to, in the order of its keys. `kept` is where its plan is."""

    of_what: Mapping[str, Any]  # engine, environment, options and prompts
    acceptance: Mapping[str, Sequence[Sequence[float]]]
    ranked: Sequence[Ranked]
    candidates: int
    plain: Figure | None
    measured: Sequence[Measured]
    winner: Measured | None
    line: str
    seconds: float
    kept: Path | None = None

    @classmethod
    def of(cls, tuner: Tuner, engine_dir: Path, seconds: float) -> TuneReport:
        """The report of a finished search."""
        return cls(
            of_what={
                "engine": engines_of(tuner.engine, engine_dir),
                "environment": environment(),
                "options": asdict(tuner.options),
                "prompts": {
                    "files": str(tuner.requests.path.name),
                    "sha256": digest(tuner.requests.requests),
                    "turns": len(tuner.prompts),
                },
            },
            acceptance={f"{t:g}": tuner.acceptance(t) for t in tuner.samples},
            ranked=[*shown(tuner.ranked)],
            candidates=len(tuner.ranked),
            plain=tuner.speeds.tokens_per_s(contest.PLAIN),
            measured=tuner.measured,
            winner=tuner.winner,
            line=line(tuner.winner, tuner.measured),
            seconds=round(seconds, 1),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "format": FORMAT,
            "kind": "tune",
            **self.of_what,
            "acceptance": self.acceptance,
            "ranked": [row.to_dict() for row in self.ranked],
            "candidates": self.candidates,
            "plain": as_dict(self.plain),
            "measured": [row.to_dict() for row in self.measured],
            "winner": None if self.winner is None else self.winner.row.to_dict(),
            "line": self.line,
            "seconds": self.seconds,
            **({} if self.kept is None else {"kept": str(self.kept)}),
        }


@dataclass(frozen=True)
class FormatSearch:
    """The search with a draft in one format of weights: the plan of its own drafts that is fastest,
    in words, and its speed over plain decoding; 1 where none was measured."""

    weights: str
    over_plain: float
    plan: str
    report: TuneReport

    @classmethod
    def of(cls, weights: str, report: TuneReport) -> FormatSearch:
        """By the report of the search."""
        own = [one for one in report.measured if one.row.candidate.own]
        speeds = [(one.speed or 1.0, one.row.candidate.words) for one in own]
        return cls(weights, *max(speeds, default=(1.0, "none")), report)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        own = {"weights": self.weights, "over_plain": self.over_plain, "plan": self.plan}
        return own | self.report.to_dict()


@dataclass(frozen=True)
class FormatsReport:
    """The searches with a draft in several formats of weights, the fastest first."""

    formats: Sequence[FormatSearch]
    installed: bool

    @property
    def line(self) -> str:
        """What they came to, in a sentence."""
        best = self.formats[0]
        return f"fastest draft: {best.weights}, {best.plan}, {best.over_plain:.2f} x plain"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows = [row.to_dict() for row in self.formats]
        return {
            "kind": "tune formats",
            "formats": rows,
            "line": self.line,
            "installed": self.installed,
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
        "options": asdict(options),
        "edgespec": installed_version("edgespec"),
    }


def line(winner: Measured | None, measured: Sequence[Measured]) -> str:
    """What a search came to, in a sentence."""
    if winner is None:
        return NOT_PAYING
    words = f"{winner.row.candidate.words}, {winner.speed:.2f} x plain"
    best = max(measured, key=lambda one: one.speed)
    if best.speed <= winner.speed:
        return f"fastest: {words}"
    other = f"{best.row.candidate.words}, {best.speed:.2f} x"
    return f"chosen: {words}; {other}, is no faster beyond noise"


def tuned_plan(tuner: Tuner, engine_dir: Path) -> TunedPlan:
    """What is kept beside the engines."""
    role, winner = tuner.engine.config.role, tuner.winner
    acceptance = tuner.acceptance(tuner.options.temperature)
    rates = tuple(tuple(round(rate, 4) for rate in depth) for depth in acceptance)
    if winner is None:
        with_draft = tuner.engine.draft_config is not None
        bound = belonging(engine_dir, role, with_draft=with_draft)
        words = "none, as drafts did not pay"
        return TunedPlan(role=role, method=None, plan=None, acceptance=rates, words=words, **bound)
    candidate = winner.row.candidate
    with_draft = METHODS[candidate.method].needs_engine
    return TunedPlan(
        role=role,
        method=candidate.method,
        plan=candidate.plan,
        options=dict(candidate.options),
        over_plain=winner.speed,
        acceptance=rates,
        prior=tuple(round(rate, 4) for rate in winner.row.prior) if with_draft else (),
        words=candidate.words,
        **belonging(engine_dir, role, with_draft=with_draft),
    )


# ---- YAML


def config_of(candidate: Candidate) -> dict[str, Any]:
    """A file for --config: the speculative_config of a candidate, and whether it adapts. Raises
    OptionError for a plan that the keys of its decoding type cannot say."""
    kind = class_of_method(candidate.method)
    keys = dict(sizes_of(candidate, {*fields_of(kind)})) | dict(candidate.options)
    if unknown := keys.keys() - fields_of(kind).keys():
        message = f"{candidate.words}: decoding_type {kind.decoding_type} has no {min(unknown)}"
        raise OptionError(message, LEAVE_OUT)
    block = {"decoding_type": kind.decoding_type, **keys}
    policy = (
        {"spec_policy": "adaptive" if candidate.plan.adaptive else "fixed"} if candidate.own else {}
    )
    return {"speculative_config": block, **policy}


def sizes_of(candidate: Candidate, known: set[str]) -> Iterator[tuple[str, Any]]:
    """The keys that say how much is drafted."""
    plan, method = candidate.plan, candidate.method
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
                message = f"{candidate.words}: a tree of {METHODS[method].title} has no keys"
                raise OptionError(message, LEAVE_OUT)
            yield "use_dynamic_tree", True
            yield "max_draft_len", plan.steps
        yield "dynamic_tree_max_topK", plan.top_k
        yield "max_total_draft_tokens", plan.verify_size - 1
