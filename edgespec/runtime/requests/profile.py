"""A run as a whole: its summary in the words of the field, and profile.json in the keys of
TensorRT Edge-LLM.

Knows answers and the seconds of the passes behind them. Prints and writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from edgespec.methods.names import ADAPTIVE
from edgespec.methods.specdec_bench import acceptance_rate
from edgespec.prompts import CANCELLED, ERROR
from edgespec.runtime.lanes import stages
from edgespec.runtime.loop.metrics import Pooled, RequestMetrics, ratio
from edgespec.runtime.measuring.cost_description import Prediction
from edgespec.runtime.measuring.random_baseline import NoBetterThanChance
from edgespec.runtime.measuring.speedup import Speedup, StepCost
from edgespec.runtime.requests.answers import Answer
from edgespec.runtime.requests.memory import peak_bytes
from edgespec.runtime.requests.quality import pooled
from edgespec.runtime.vision.image_stats import ImageStats

NOTES = (
    (
        "Times are wall times of calls on a CPU, host work included; keys that say gpu keep"
        " TensorRT Edge-LLM's names."
    ),
    (
        "A run in stages is one pass of an engine, which a batch shares; elsewhere it is an"
        " answered request."
    ),
    (
        "total_iterations sums the verify steps of the sequences; generated tokens leave out the"
        " one that prefill draws."
    ),
    (
        "average_acceptance_rate is a length, as there: tokens a verify step, bonus included. See"
        " edgespec for the rate."
    ),
    (
        "The averages of prefill are over computed tokens alone: TensorRT Edge-LLM counts"
        " reused ones too."
    ),
    (
        "The speed of eagle_generation pays for commit and the draft's replay too, which"
        " TensorRT Edge-LLM does not time."
    ),
    "Passes of requests that failed later are in the times.",
)
SHARED = (
    "Requests with drafts and without shared passes: generation has no times of its own, and those"
    " of eagle_generation hold the rows of the plain requests beside them."
)
OF_IMAGES = (
    "multimodal has all images of prompts; edgespec says how many of them were encoded: the others"
    " had been before."
)
SPECULATION = (
    stages.DRAFT_PREFILL,
    stages.DRAFT_PROPOSAL,
    stages.VERIFICATION,
    stages.DRAFT_REPLAY,
)


@dataclass(frozen=True)
class RunStats:
    """A run over a file's requests. `passes` are those of its StageLog, `wall_s` the time from
    first to last of it.

    Answers with `plain` are of a check of losslessness, which `wall_s` and `passes` leave out; it
    took `check_wall_s`. The peak of memory is taken when this is made: before the check, or it is
    that of both.
    """

    answers: Sequence[Answer]
    wall_s: float
    passes: Mapping[str, Sequence[float]]
    batch_size: int = 1
    spec_decode: bool = False
    check_wall_s: float | None = None
    peak_cpu_memory_bytes: int = field(default_factory=peak_bytes)
    drafting_stopped: str | None = None  # why nothing was drafted from some answer on
    plain_step: StepCost | None = None  # timed at the end, where no request was decoded plainly
    has_trained_draft: bool = False  # an engine drafted, that belongs to the base
    prediction: Prediction | None = None  # of its speed, by the costs that are stored
    images: ImageStats = field(default_factory=ImageStats)  # what was done with those of prompts

    @property
    def pool(self) -> Pooled:
        """The metrics of all responses together."""
        return Pooled([a.response.metrics for a in self.answers if a.response])

    @property
    def drafted(self) -> list[RequestMetrics]:
        """The metrics of the responses made with drafts."""
        return [a.response.metrics for a in self.answers if a.response and a.speculative]

    @property
    def emitted(self) -> dict[tuple[int, int], list[int]]:
        """The tokens that each verify step with drafts came to, the bonus counted in all of them,
        by request and turn."""
        made = {a.key: a.response.metrics for a in self.answers if a.response and a.speculative}
        return {
            key: [accepted + 1 for accepted in metrics.per_step_accepted]
            for key, metrics in made.items()
            if metrics.per_step_accepted
        }

    @property
    def chance(self) -> NoBetterThanChance | None:
        """Whether a trained draft was accepted no more often than one guess without it."""
        if not self.has_trained_draft:
            return None
        tokens = [a.response.token_ids for a in self.answers if a.response and a.speculative]
        return NoBetterThanChance.of(self.drafted, tokens)

    @property
    def undrafted(self) -> list[RequestMetrics]:
        """The metrics of the responses made without drafts."""
        return [a.response.metrics for a in self.answers if a.response and not a.speculative]

    @property
    def memory(self) -> dict[str, float]:
        """Peak memory of the process in bytes and MiB, under TensorRT Edge-LLM's keys."""
        size = self.peak_cpu_memory_bytes
        return {"peak_cpu_memory_bytes": size, "peak_cpu_memory_mb": size / 2**20}

    def seconds(self, *stage_ids: str) -> float:
        """Seconds in all passes of some stages."""
        return sum(sum(self.passes.get(stage, ())) for stage in stage_ids)

    def commit_s(self, requests: Sequence[RequestMetrics]) -> float:
        """Seconds of committing for `requests`; in a batch it cannot be divided."""
        return (
            sum(r.stages.commit for r in requests)
            if self.batch_size == 1
            else self.seconds(stages.COMMIT)
        )


# ---- summary


def summary(run: RunStats) -> dict[str, Any]:
    """What `infer --json` prints. A turn counts as a request.

    `output_tokens_per_s` is the throughput of the run: all completion tokens over its wall time,
    prefill included; `tokens_per_s` is what one user sees while decoding. Speculative values are
    over the requests that drafted, plain ones over those decoded plainly; with --check-lossless
    both, and what was saved, are over the requests that ran both ways. `acceptance` has a row for
    each accept rule of the requests that drafted, `spec_policy` counts those by their policy.
    """
    checked = [a for a in run.answers if a.plain]
    drafted = [a.response.metrics for a in checked if a.response] or run.drafted
    plainly = [a.plain.metrics for a in checked if a.plain] or run.undrafted
    disabled = sum(a.request.disable_spec_decode for a in run.answers)
    out: dict[str, Any] = {
        "requests": len(run.answers),
        "failed": sum(a.error is not None for a in run.answers),
        "cancelled": sum(a.cancelled for a in run.answers),
        "without_drafts": disabled if run.spec_decode else len(run.answers),
        "finish_reasons": dict(sorted(Counter(finish_reason(a) for a in run.answers).items())),
        "batch_size": run.batch_size,
        "wall_s": run.wall_s,
        "completion_tokens": run.pool.completion_tokens,
        "output_tokens_per_s": ratio(run.pool.completion_tokens, run.wall_s),
        "reused_tokens": run.pool.reused_tokens,
        "computed_tokens": run.pool.computed_tokens,
        **run.memory,
    }
    if run.images.images:
        out["images"] = asdict(run.images)
    if plainly:
        out["plain"] = Pooled(plainly).to_dict(speculative=False)
    if drafted:
        out["speculative"] = Pooled(drafted).to_dict(speculative=True)
        out["acceptance"] = acceptance(run.drafted or drafted)
        out["specdec_bench"] = acceptance_rate(run.emitted)
    if lost := lost_drafts(run.drafted):
        out["lost_drafts"] = lost
    if held_back := Pooled(run.drafted).steps_without_drafts:
        out["steps_without_drafts"] = held_back
    if run.drafted:
        out["spec_policy"] = dict(sorted(Counter(r.spec_policy for r in run.drafted).items()))
    if any(r.spec_policy == ADAPTIVE for r in run.drafted):
        out["steps_paused"] = Pooled(run.drafted).steps_paused
    if run.chance is not None:
        out["no_better_than_chance"] = run.chance.to_dict()
    if run.drafting_stopped is not None:
        out["drafting_stopped"] = run.drafting_stopped
    if (estimate := speedup(run)) is not None:
        out["speedup"] = estimate.to_dict()
        if run.prediction is not None:
            out["speedup"] |= run.prediction.to_dict()
    if checked:
        out["base_passes_saved"] = saved(Pooled(drafted), Pooled(plainly))
    if qualities := [a.quality for a in checked if a.quality]:
        out["quality"] = pooled(qualities)
    elif checked:
        out["lossless"] = lossless_text(checked)
        out["lossless_check"] = lossless_check(checked)
    if checked and run.check_wall_s is not None:
        out["check_wall_s"] = run.check_wall_s
        out["check_output_tokens_per_s"] = ratio(
            Pooled(plainly).completion_tokens, run.check_wall_s
        )
    return out


def acceptance(requests: Sequence[RequestMetrics]) -> list[dict[str, Any]]:
    """The accept rules of requests that drafted, each with what it guarantees, its options, and how
    many requests had it."""
    rows: dict[str, dict[str, Any]] = {}
    for request in requests:
        options = request.acceptance_options
        row = {"rule": request.acceptance, "lossless": request.lossless, "options": options}
        rows.setdefault(repr(row), row | {"requests": 0})["requests"] += 1
    return [*rows.values()]


def lost_drafts(requests: Sequence[RequestMetrics]) -> dict[str, int]:
    """How often a drafter failed to make drafts, by the reason; empty where none did."""
    lost: Counter[str] = Counter()
    for request in requests:
        lost.update(request.lost_drafts)
    return dict(sorted(lost.items()))


def speedup(run: RunStats) -> Speedup | None:
    """What drafts cost and saved, beside plain steps: of requests where the run had some by
    themselves, else of a few at its end."""
    checked = [a for a in run.answers if a.plain]
    if checked:
        drafted = [a.response.metrics for a in checked if a.response]
        return Speedup.of(drafted, [a.plain.metrics for a in checked if a.plain], run.batch_size)
    plainly = run.undrafted if run.batch_size == 1 else []
    return Speedup.of(run.drafted, plainly, run.batch_size, run.plain_step)


def finish_reason(answer: Answer) -> str:
    """The response's reason; without a response `cancelled` or `error`."""
    if answer.response is not None:
        return answer.response.finish_reason
    return CANCELLED if answer.cancelled else ERROR


def saved(done: Pooled, plain: Pooled) -> float | None:
    """Share of the plain run's base passes that speculation did without, a token: a lossy rule's
    answers may have other lengths than the exact ones. None where no token was decoded."""
    own, other = ratio(done.steps, done.decode_tokens), ratio(plain.steps, plain.decode_tokens)
    return None if own is None or not other else 1 - own / other


def lossless_text(checked: Sequence[Answer]) -> str:
    """The line of a lossless check: yes where every answer is equal, else how many differ and
    whether rounding explains it."""
    differing = [a.difference for a in checked if a.difference]
    if not differing:
        return "yes"
    same, unexplained = len(checked) - len(differing), sum(not d.explained for d in differing)
    others = f"{len(differing)} {'differs' if len(differing) == 1 else 'differ'}"
    text = f"{same} of {len(checked)} identical; {others}"
    if not unexplained:
        return f"{text}, explained by rounding"
    beyond = f" {unexplained}" if unexplained < len(differing) else ""
    return f"NO: {text},{beyond} NOT explained by rounding"


def lossless_check(checked: Sequence[Answer]) -> dict[str, Any]:
    """The same as numbers, with the place of each difference."""
    differing = [(a, a.difference) for a in checked if a.difference]
    explained = sum(d.explained for _, d in differing)
    return {
        "compared": len(checked),
        "identical": len(checked) - len(differing),
        "explained": explained,
        "unexplained": len(differing) - explained,
        "differences": [
            {"request_idx": a.request.index, "turn_idx": a.turn, **d.to_dict()}
            for a, d in differing
        ],
    }


# ---- profile.json


def profile(run: RunStats) -> dict[str, Any]:
    """profile.json: TensorRT Edge-LLM's keys, 0 where there is nothing to divide as there; ours
    under `edgespec`."""
    shared = run.batch_size > 1 and bool(run.drafted) and bool(run.undrafted)
    out: dict[str, Any] = {"device": "cpu", "notes": [*NOTES, *([SHARED] if shared else [])]}
    if run.images.images:
        out["notes"].append(OF_IMAGES)
        out["multimodal"] = multimodal(run)
    if run.pool.requests:
        out["prefill"] = prefill(run)
    if run.undrafted:
        out["generation"] = generation(run, None if shared else run.seconds(stages.GENERATION))
    if run.drafted:
        out["eagle_generation"] = eagle_generation(run)
    ids = [stage for stage in stages.STAGES if run.passes.get(stage)]
    out["stages"] = [stage_times(stage, run.passes[stage]) for stage in ids]
    return out | run.memory | {"edgespec": summary(run)}


def multimodal(run: RunStats) -> dict[str, float]:
    """The `multimodal` section of profile.json, by TensorRT Edge-LLM's kind of keys."""
    done = run.images
    seconds = done.read_s + done.encode_s
    return {
        "total_images": done.images,
        "total_image_tokens": done.tokens,
        "average_tokens_per_image": done.tokens / done.images,
        "tokens_per_second": or_zero(done.tokens, seconds),
        "average_time_per_token_ms": or_zero(1000 * seconds, done.tokens),
    }


def prefill(run: RunStats) -> dict[str, float]:
    """The `prefill` section of profile.json, by TensorRT Edge-LLM's keys."""
    runs, tokens, seconds = (
        len(run.pool.requests),
        run.pool.computed_tokens,
        run.seconds(stages.PREFILL),
    )
    return {
        "total_runs": runs,
        "reused_tokens": run.pool.reused_tokens,
        "computed_tokens": tokens,
        "average_tokens_per_run": tokens / runs,
        "average_time_per_run_ms": 1000 * seconds / runs,
        "tokens_per_second": or_zero(tokens, seconds),
        "average_time_per_token_ms": or_zero(1000 * seconds, tokens),
    }


def generation(run: RunStats, pass_s: float | None) -> dict[str, float | None]:
    """Plain decoding. `pass_s` are the seconds of its base passes, None where they cannot be
    divided."""
    runs, tokens = len(run.undrafted), Pooled(run.undrafted).decode_tokens
    seconds = None if pass_s is None else pass_s + run.commit_s(run.undrafted)
    return {
        "total_runs": runs,
        "generated_tokens": tokens,
        "average_tokens_per_run": tokens / runs,
        "tokens_per_second": None if seconds is None else or_zero(tokens, seconds),
        "average_time_per_token_ms": None if seconds is None else or_zero(1000 * seconds, tokens),
    }


def eagle_generation(run: RunStats) -> dict[str, float]:
    """The `eagle_generation` section of profile.json, by TensorRT Edge-LLM's keys; tokens per
    second without the prefill."""
    pool = Pooled(run.drafted)
    seconds = run.seconds(*SPECULATION) + run.commit_s(run.drafted)
    return {
        "total_runs": len(pool.requests),
        "total_iterations": pool.steps,
        "total_generated_tokens": pool.decode_tokens,
        "average_tokens_per_run": pool.decode_tokens / len(pool.requests),
        "average_acceptance_rate": pool.acceptance_length or 0.0,
        "overall_tokens_per_second_excluding_base_prefill": or_zero(pool.decode_tokens, seconds),
    }


def stage_times(stage: str, seconds: Sequence[float]) -> dict[str, Any]:
    """One of `stages`; percentiles lie between two values in proportion, the deviation is that of
    all passes."""
    times = 1000 * np.array(seconds)
    median, p95, p99 = np.percentile(times, (50, 95, 99))
    stats = {
        "min_ms": times.min(),
        "max_ms": times.max(),
        "mean_ms": times.mean(),
        "median_ms": median,
        "p95_ms": p95,
        "p99_ms": p99,
        "stddev_ms": times.std(),
    }
    return {
        "stage_id": stage,
        "total_runs": len(times),
        "total_gpu_time_ms": float(times.sum()),
        "average_time_per_run_ms": float(times.mean()),
        "gpu_time_stats": (
            {"count": len(times)} | {name: float(value) for name, value in stats.items()}
        ),
    }


def or_zero(part: float, whole: float) -> float:
    """The quotient; 0 where the denominator is, since these keys hold numbers alone."""
    return part / whole if whole else 0.0
