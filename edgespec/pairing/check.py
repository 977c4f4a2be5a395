"""Whether base and draft belong together, from JSON and the headers of their weights: a table of
checks per method.

Knows the order of the checks. What each looks at stands in `tokens`, `fit` and
`acceptance_warnings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, EdgeSpecError, PairingError, UnsupportedModel
from edgespec.methods import dflash, eagle3, mtp
from edgespec.methods.dflash import DFlashConfig
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import CheckResult, Report
from edgespec.pairing.pair import Pair

Check = Callable[[Pair], Iterator[CheckResult]]


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
    ("taps", fit.aux_layers),
    ("embedding", fit.embedding),
    ("head", fit.head),
    ("d2t", tokens.coverage),
    ("RoPE", acceptance_warnings.rope),
    ("quantisation", acceptance_warnings.quantisation),
)
# What is looked at, in this order
CHECKS: dict[str, tuple[tuple[str, Check], ...]] = {
    eagle3.NAME: _COMMON,
    dflash.NAME: (
        *_COMMON,
        ("block", acceptance_warnings.block),
        ("mask token", tokens.mask_token),
        ("thinking", acceptance_warnings.thinking),
    ),
    mtp.NAME: (
        ("whole", fit.whole),
        ("head", fit.mtp),
        ("tokenizer", tokens.tokenizer),
        ("quantisation", acceptance_warnings.quantisation),
    ),
}


def check(
    base: str,
    draft: str | None,
    *,
    aux_layers: tuple[int, ...] | None = None,
    allow_pickle: bool = False,
    probe_text: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Look at a base and a draft; without a draft, at the base's own MTP head.

    With a `probe_text` what fits is also run on it. What is wrong is told in the report. Raises
    CheckpointError only where a directory cannot be opened, and RequestError for a text that is too
    short.
    """
    first = open_checkpoint(base, allow_pickle=allow_pickle)
    second = open_checkpoint(draft, allow_pickle=allow_pickle) if draft is not None else None
    results: list[CheckResult] = []
    model = _base(first, results)
    config = _draft(second, results) if second is not None else None
    kind = mtp.NAME if second is None else config.method if config is not None else None
    if model is not None and kind is not None:
        pair = Pair(first, model, second, config, aux_layers)
        for topic, look in CHECKS[kind]:
            results += _told(topic, look, pair)
        report = Report(kind, tuple(results))
        return (
            report
            if probe_text is None
            else _probed(pair, report, probe_text, progress or Silent())
        )
    return Report(kind or "", tuple(results))


def _probed(pair: Pair, report: Report, text: str, progress: Progress) -> Report:
    """The report with a probe's verdict and figures; what does not fit is not run."""
    from edgespec.pairing.probe import probe, told

    if report.count("refused"):
        return report
    try:
        found = probe(pair, text, progress)
    except (CheckpointError, PairingError, UnsupportedModel) as error:
        refused = CheckResult("refused", "probe", error.what, error.remedy)
        return replace(report, results=(*report.results, refused))
    return replace(report, results=(*report.results, told(found, pair)), probe=found)


def _base(checkpoint: Checkpoint, results: list[CheckResult]) -> ModelConfig | None:
    found = _recognised("base", checkpoint, results)
    if isinstance(found, ModelConfig):
        layer = found.decoder
        what = f"{found.architecture}: {layer.num_layers} layers, hidden {layer.hidden_size}"
        results.append(CheckResult("ok", "base", what))
        return found
    if found is not None:
        what = f"{checkpoint.path} is a draft, not a base"
        results.append(CheckResult("refused", "base", what, "Give the base first, then the draft."))
    return None


def _draft(
    checkpoint: Checkpoint, results: list[CheckResult]
) -> Eagle3Config | DFlashConfig | None:
    found = _recognised("draft", checkpoint, results)
    if isinstance(found, ModelConfig):
        what = f"{checkpoint.path} is a base, not a draft"
        remedy = (
            "Give the base first, then the draft; a base's own MTP head needs no second directory."
        )
        results.append(CheckResult("refused", "draft", what, remedy))
        return None
    if found is not None:
        name = {eagle3.NAME: "EAGLE-3", dflash.NAME: "DFlash"}[found.method]
        what = (
            f"{name}, {found.layout} layout: {found.decoder.num_layers} layers, hidden"
            f" {found.decoder.hidden_size}"
        )
        results.append(CheckResult("ok", "draft", what))
    return found


def _recognised(
    topic: str, checkpoint: Checkpoint, results: list[CheckResult]
) -> ModelConfig | Eagle3Config | DFlashConfig | None:
    try:
        return detect(checkpoint)
    except EdgeSpecError as error:
        results.append(CheckResult("refused", topic, error.what, error.remedy))
        return None


def _told(topic: str, look: Check, pair: Pair) -> Iterator[CheckResult]:
    """The verdicts of one check; an error is one of them."""
    try:
        yield from look(pair)
    except EdgeSpecError as error:
        yield CheckResult("refused", topic, error.what, error.remedy)
