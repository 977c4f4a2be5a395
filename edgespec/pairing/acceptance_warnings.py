"""What does not break a pair and costs acceptance: RoPE and quantization.

The output is the base's own in each case; only how much of a draft is accepted changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import logical_shapes, read_quantization
from edgespec.checkpoint.summary import summarize_quantization
from edgespec.config import RopeConfig
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair
from edgespec.quantization.schemes import SCHEMES

_FAR = 2.0  # a ratio of two thetas from which on positions mean something else


def rope(pair: Pair) -> Iterator[CheckResult]:
    """A draft rotates by its own numbers; published ones differ from their bases only where they
    were trained so."""
    _, config = pair.drafted()
    ours, theirs = config.decoder.rope, pair.model.decoder.rope
    ours_axes, theirs_axes = ((one.mrope_section, one.mrope_interleaved) for one in (ours, theirs))
    thetas = (
        f"theta {ours.theta:g} and {_scaling(ours)}; the base has {theirs.theta:g} and"
        f" {_scaling(theirs)}"
    )
    remedy = (
        "Compare the draft's config.json with the published one; if it is the same, it was"
        " trained so."
    )
    if max(ours.theta, theirs.theta) / min(ours.theta, theirs.theta) >= _FAR:
        yield CheckResult("warning", "RoPE", f"the draft has {thetas}: thetas far apart", remedy)
    elif (ours.kind, ours.factor) != (theirs.kind, theirs.factor):
        yield CheckResult(
            "warning", "RoPE", f"the draft has {thetas}: long prompts may cost acceptance", remedy
        )
    elif pair.model.vision is not None and ours_axes != theirs_axes:
        message = (
            f"the draft rotates by {_axes(ours)}, the base by {_axes(theirs)}: drafts behind images"
            " may seldom be accepted"
        )
        yield CheckResult("warning", "RoPE", message, remedy)
    else:
        yield CheckResult("ok", "RoPE", f"theta {ours.theta:g} and {_scaling(ours)} in both")


def _axes(rope: RopeConfig) -> str:
    if not rope.mrope_section:
        return "one axis"
    how = "interleaved" if rope.mrope_interleaved else "separate"
    return f"{how} axes of {', '.join(map(str, rope.mrope_section))} pairs"


def _scaling(rope: RopeConfig) -> str:
    return "no scaling" if rope.kind == "default" else f"{rope.kind} scaling by {rope.factor:g}"


def base_quantization(pair: Pair) -> Iterator[CheckResult]:
    """What quantizing the base costs the draft, which was trained on its hidden states."""
    base = schemes_of(pair.base)
    if not base:
        yield CheckResult("ok", "quantization", "the base is not quantized")
    elif min(SCHEMES[name].bits for name in base) <= 4:
        message = (
            f"the base is {', '.join(base)}: the draft was trained on hidden states that were not"
            " quantized to 4 bits"
        )
        remedy = "Measure acceptance with infer, beside an 8-bit base."
        yield CheckResult("warning", "quantization", message, remedy)
    else:
        message = f"the base is {', '.join(base)}, which costs little acceptance"
        yield CheckResult("ok", "quantization", message)


def draft_quantization(pair: Pair) -> Iterator[CheckResult]:
    """What quantizing the draft costs."""
    draft, _ = pair.drafted()
    schemes = schemes_of(draft)
    if schemes:
        message = (
            f"the draft is {', '.join(schemes)}: faster drafts, a little less acceptance, the same"
            " output"
        )
        yield CheckResult("ok", "quantization", message)
    else:
        yield CheckResult("ok", "quantization", "the draft is not quantized")


def schemes_of(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Scheme -> the Linears that have it; empty where nothing is quantized."""
    quantization = read_quantization(checkpoint)
    if quantization is None:
        return {}
    summary = summarize_quantization(
        checkpoint, quantization, logical_shapes(checkpoint, quantization)
    )
    return {name: list(row.modules) for name, row in summary.schemes.items()}
