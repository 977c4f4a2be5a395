"""What `chat`, `run` and `infer` say of one answer in a line. Knows metrics, and no screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import counted

if TYPE_CHECKING:
    from edgespec.runtime.loop.metrics import RequestMetrics


def stats(metrics: RequestMetrics, *, drafted: bool) -> str:
    """The statistics of one answer in one line, without those that are undefined."""
    guarantee = metrics.guarantee if drafted and metrics.lossless != "tokens" else None
    lost = sum(metrics.lost_drafts.values()) or None
    shown = [
        (counted(metrics.completion_tokens, "token"), "{}"),
        (counted(metrics.steps, "base pass", "es"), "{} after prefill"),
        (metrics.acceptance_length if drafted else None, "acceptance length {:.2f}"),
        (guarantee, "{}"),
        (lost and counted(lost, "step"), "drafts lost in {}"),
        (metrics.tokens_per_s, "{:.1f} tokens/s"),
        (metrics.time_to_first_token, "time to first token {:.3f} s"),
        (metrics.reused_tokens, f"{{}} of {metrics.prompt_tokens} prompt tokens reused"),
    ]
    return f"[{', '.join(form.format(value) for value, form in shown if value is not None)}]"
