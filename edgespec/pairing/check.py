"""Whether base and draft belong together, from JSON and the headers of their weights: a table of checks per method.

Knows the order of the checks. What each looks at stands in `tokens`, `fit` and `habits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.config import DFlashConfig, DraftConfig, DraftKind, ModelConfig
from edgespec.errors import CheckpointError, EdgeSpecError, PairingError, UnsupportedModel
from edgespec.pairing import fit, habits, tokens
from edgespec.pairing.pair import Pair
from edgespec.pairing.verdicts import Report, Verdict

Check = Callable[[Pair], Iterator[Verdict]]


class Progress(Protocol):
    """Told how far a probe is: `start` names it and how many pieces of graphs it runs."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


class Silent:
    def start(self, stage: str, total: int) -> None:
        del stage, total

    def advance(self, amount: int) -> None:
        del amount


_COMMON: tuple[tuple[str, Check], ...] = (
    ("whole", fit.whole),
    ("origin", fit.origin),
    ("made for", fit.made_for),
    ("tokenizer", tokens.tokenizer),
    ("vocabulary", fit.vocabulary),
    ("hidden size", fit.hidden_size),
    ("taps", fit.taps),
    ("embedding", fit.embedding),
    ("head", fit.head),
    ("d2t", tokens.coverage),
    ("RoPE", habits.rope),
    ("quantisation", habits.quantisation),
)
# What is looked at, in this order
CHECKS: dict[DraftKind, tuple[tuple[str, Check], ...]] = {
    DraftKind.EAGLE3: _COMMON,
    DraftKind.DFLASH: (
        *_COMMON,
        ("block", habits.block),
        ("mask token", tokens.mask_token),
        ("thinking", habits.thinking),
    ),
    DraftKind.MTP: (
        ("whole", fit.whole),
        ("head", fit.mtp),
        ("tokenizer", tokens.tokenizer),
        ("quantisation", habits.quantisation),
    ),
}


def check(
    base: str, draft: str | None, *, aux_layers: tuple[int, ...] | None = None, allow_pickle: bool = False,
    probe_text: str | None = None, progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Look at a base and a draft; without a draft, at the base's own MTP head.

    With a `probe_text` what fits is also run on it. What is wrong is told in the report. Raises CheckpointError only
    where a directory cannot be opened, and RequestError for a text that is too short.
    """
    first = open_checkpoint(base, allow_pickle=allow_pickle)
    second = open_checkpoint(draft, allow_pickle=allow_pickle) if draft is not None else None
    verdicts: list[Verdict] = []
    model = _base(first, verdicts)
    config = _draft(second, verdicts) if second is not None else None
    kind = DraftKind.MTP if second is None else config.kind if config is not None else None
    if model is not None and kind is not None:
        pair = Pair(first, model, second, config, aux_layers)
        for topic, look in CHECKS[kind]:
            verdicts += _told(topic, look, pair)
        report = Report(kind, tuple(verdicts))
        return report if probe_text is None else _probed(pair, report, probe_text, progress or Silent())
    return Report(kind or "", tuple(verdicts))


def _probed(pair: Pair, report: Report, text: str, progress: Progress) -> Report:
    """The report with a probe's verdict and figures; what does not fit is not run."""
    from edgespec.pairing.probe import probe, told

    if report.count("refused"):
        return report
    try:
        found = probe(pair, text, progress)
    except (CheckpointError, PairingError, UnsupportedModel) as error:
        refused = Verdict("refused", "probe", error.what, error.remedy)
        return replace(report, verdicts=(*report.verdicts, refused))
    return replace(report, verdicts=(*report.verdicts, told(found, pair)), probe=found)


def _base(checkpoint: Checkpoint, verdicts: list[Verdict]) -> ModelConfig | None:
    found = _recognised("base", checkpoint, verdicts)
    if isinstance(found, ModelConfig):
        layer = found.decoder
        what = f"{found.architecture}: {layer.num_layers} layers, hidden {layer.hidden_size}"
        verdicts.append(Verdict("ok", "base", what))
        return found
    if found is not None:
        what = f"{checkpoint.path} is a draft, not a base"
        verdicts.append(Verdict("refused", "base", what, "Give the base first, then the draft."))
    return None


def _draft(checkpoint: Checkpoint, verdicts: list[Verdict]) -> DraftConfig | DFlashConfig | None:
    found = _recognised("draft", checkpoint, verdicts)
    if isinstance(found, ModelConfig):
        what = f"{checkpoint.path} is a base, not a draft"
        remedy = "Give the base first, then the draft; a base's own MTP head needs no second directory."
        verdicts.append(Verdict("refused", "draft", what, remedy))
        return None
    if found is not None:
        name = {DraftKind.EAGLE3: "EAGLE-3", DraftKind.DFLASH: "DFlash"}[found.kind]
        what = f"{name}, {found.flavour} layout: {found.decoder.num_layers} layers, hidden {found.decoder.hidden_size}"
        verdicts.append(Verdict("ok", "draft", what))
    return found


def _recognised(
    topic: str, checkpoint: Checkpoint, verdicts: list[Verdict]
) -> ModelConfig | DraftConfig | DFlashConfig | None:
    try:
        return detect(checkpoint)
    except EdgeSpecError as error:
        verdicts.append(Verdict("refused", topic, error.what, error.remedy))
        return None


def _told(topic: str, look: Check, pair: Pair) -> Iterator[Verdict]:
    """The verdicts of one check; an error is one of them."""
    try:
        yield from look(pair)
    except EdgeSpecError as error:
        yield Verdict("refused", topic, error.what, error.remedy)
