"""What does not break a pair and costs acceptance: RoPE, rounding, thinking, the size of a block.

The output is the base's own in each case; how much is drafted in vain is what changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.checkpoint.facts import quantization_facts
from edgespec.checkpoint.files import Checkpoint, read_json
from edgespec.checkpoint.layouts import logical_shapes, read_quantization
from edgespec.checkpoint.mtp import ROOT
from edgespec.config import RopeConfig
from edgespec.contract import MAX_BLOCK_NODES, Limits
from edgespec.methods.dflash import THINKING, DFlashConfig
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair
from edgespec.schemes import SCHEMES

_FAR = 2.0  # a ratio of two thetas from which on positions mean something else


def rope(pair: Pair) -> Iterator[CheckResult]:
    """A draft rotates by its own numbers; published ones differ from their bases only where they
    were trained so."""
    _, config = pair.drafted()
    ours, theirs = config.decoder.rope, pair.model.decoder.rope
    told = (
        f"theta {ours.theta:g} and {_scaling(ours)}; the base has {theirs.theta:g} and"
        f" {_scaling(theirs)}"
    )
    remedy = (
        "Compare the draft's config.json with the published one; if it is the same, it was"
        " trained so."
    )
    if max(ours.theta, theirs.theta) / min(ours.theta, theirs.theta) >= _FAR:
        yield CheckResult("warning", "RoPE", f"the draft has {told}: thetas far apart", remedy)
    elif (ours.kind, ours.factor) != (theirs.kind, theirs.factor):
        yield CheckResult(
            "warning", "RoPE", f"the draft has {told}: long prompts may cost acceptance", remedy
        )
    else:
        yield CheckResult("ok", "RoPE", f"theta {ours.theta:g} and {_scaling(ours)} in both")


def _scaling(rope: RopeConfig) -> str:
    return "no scaling" if rope.kind == "default" else f"{rope.kind} scaling by {rope.factor:g}"


def quantisation(pair: Pair) -> Iterator[CheckResult]:
    base = _schemes(pair.base)
    if not base:
        yield CheckResult("ok", "quantisation", "the base is not quantised")
    elif min(SCHEMES[name].bits for name in base) <= 4:
        what = (
            f"the base is {', '.join(base)}: the draft was trained on states that were not rounded"
            " to 4 bits"
        )
        yield CheckResult(
            "warning", "quantisation", what, "Measure acceptance with infer, beside an 8-bit base."
        )
    else:
        yield CheckResult(
            "ok", "quantisation", f"the base is {', '.join(base)}, which costs little acceptance"
        )
    if pair.draft is None:
        if not any(name.startswith(ROOT) for name in pair.base.tensors):
            return
        heads = [
            name
            for name, modules in base.items()
            if any(module.startswith(ROOT) for module in modules)
        ]
        told = (
            f"is {', '.join(heads)}: a little less acceptance, the same output"
            if heads
            else "is not quantised"
        )
        yield CheckResult("ok", "quantisation", f"the MTP head {told}")
        return
    rounded = _schemes(pair.draft)
    if "fc" in {module for modules in rounded.values() for module in modules} and isinstance(
        pair.config, DFlashConfig
    ):
        what = (
            "the draft's fc is quantised, and its inputs have outliers that no format of few bits"
            " holds"
        )
        yield CheckResult("refused", "quantisation", what, "Quantise the draft again without fc.")
    elif rounded:
        what = (
            f"the draft is {', '.join(rounded)}: faster drafts, a little less acceptance, the same"
            " output"
        )
        yield CheckResult("ok", "quantisation", what)
    else:
        yield CheckResult("ok", "quantisation", "the draft is not quantised")


def _schemes(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Scheme -> the Linears that have it; empty where nothing is quantised."""
    found = read_quantization(checkpoint)
    if found is None:
        return {}
    facts = quantization_facts(checkpoint, found, logical_shapes(checkpoint, found))
    return {
        name: [_bare(module) for module in row["modules"]] for name, row in facts["schemes"].items()
    }


def _bare(module: str) -> str:
    return "fc" if module.removeprefix("model.") in ("fc", "context_proj") else module


def block(pair: Pair) -> Iterator[CheckResult]:
    _, config = pair.drafted()
    assert isinstance(config, DFlashConfig)
    size, limit = config.block_size, Limits().max_verify_tree_size
    what = f"{size} tokens, of which one pass drafts {size - 1}"
    if size > limit:
        most = min(size, MAX_BLOCK_NODES)
        remedy = f"Build with --max-verify-tree-size {most}, or draft less with --spec-verify-size."
        beyond = f", and {MAX_BLOCK_NODES} at most" if size > most else ""
        told = f"{what}; engines are built to verify {limit} unless told otherwise{beyond}"
        yield CheckResult("warning", "block", told, remedy)
        return
    yield CheckResult(
        "ok", "block", f"{what}; --spec-verify-size is at most {size}, fewer are drafted as well"
    )


def thinking(pair: Pair) -> Iterator[CheckResult]:
    """DFlash drafts know the answers of one mode; in the other one few of their tokens stand."""
    wanted = THINKING.get(pair.model.architecture)
    if wanted is None:
        yield CheckResult(
            "ok", "thinking", "nothing is known of a mode that drafts of this family want"
        )
        return
    family = "Qwen3.5" if wanted else "Qwen3"
    if not wanted:
        what = (
            f"drafts for {family} were trained without thinking, which is the default of a request"
        )
        yield CheckResult(
            "ok", "thinking", f'{what}; "enable_thinking": true costs most of the acceptance'
        )
    elif _knows_thinking(pair.base):
        what = (
            f"drafts for {family} were trained with thinking; without it few of their tokens stand"
        )
        yield CheckResult(
            "warning", "thinking", what, 'Set "enable_thinking": true in the requests.'
        )
    else:
        what = (
            f"drafts for {family} were trained with thinking, and the base's chat template knows no"
            " such switch"
        )
        yield CheckResult(
            "warning", "thinking", what, "Use the chat template of the original download."
        )


def _knows_thinking(base: Checkpoint) -> bool:
    """Whether the chat template asks for enable_thinking."""
    path = base.path / "chat_template.jinja"
    if path.is_file():
        return "enable_thinking" in path.read_text(encoding="utf-8", errors="replace")
    settings = base.path / "tokenizer_config.json"
    return settings.is_file() and "enable_thinking" in str(read_json(settings).get("chat_template"))
