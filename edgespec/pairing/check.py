"""Whether base and draft belong together, from JSON and the headers of their weights: a table of
checks per method.

Knows the order of the work. What each check looks at stands in `tokens`, `fit`,
`acceptance_warnings` and the methods' files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.checkpoint.detect import detect, draft_beside
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import (
    CheckpointError,
    EdgeSpecError,
    PairingError,
    UnsupportedModel,
    counted,
)
from edgespec.methods import METHODS, as_draft
from edgespec.pairing.check_result import CheckResult, PairReport
from edgespec.pairing.draft_work import work_of
from edgespec.pairing.pair import Pair
from edgespec.pairing.row import Check
from edgespec.pairing.table import PAIRINGS
from edgespec.progress import Progress, Silent

if TYPE_CHECKING:
    from edgespec.pairing.against import Other


def check(
    base: str,
    draft: str | None,
    *,
    aux_layers: tuple[int, ...] | None = None,
    allow_pickle: bool = False,
    probe_text: str | None = None,
    probe_images: Sequence[Path] = (),
    against: str | None = None,
    progress: Progress | None = None,
) -> PairReport:
    """Look at a base and a draft; without a draft, at the one in the base's own checkpoint.

    With a `probe_text` what fits is also run on it and on `probe_images`; then once more with the
    weights of `against`, another quantization of the base. What is wrong stands in
    the report. Raises CheckpointError only where a directory cannot be opened, and RequestError for
    a text that is too short and an image that cannot be read.
    """
    first = open_checkpoint(base, allow_pickle=allow_pickle)
    second = open_checkpoint(draft, allow_pickle=allow_pickle) if draft is not None else None
    results: list[CheckResult] = []
    model = _base(first, results)
    config = _draft(second, results) if second is not None else None
    method = config.method if config is not None else None
    if second is None:
        method = method_in_base(first, model)
    if model is None or method is None:
        return PairReport(method or "", tuple(results))
    pair = _pair(method, first, model, second, config, aux_layers)
    checks, progress = PAIRINGS[method].checks, progress or Silent()
    progress.start("checks", len(checks))
    for topic, look in checks:
        results += _results(topic, look, pair)
        progress.advance(1)
    report = PairReport(method, tuple(results))
    if not report.count("refused"):
        report = replace(report, work=work_of(pair))
    if probe_text is None:
        return report
    other = None
    if against is not None:
        source = open_checkpoint(against, allow_pickle=allow_pickle)
        other, refused = _other(pair, source, against)
        report = replace(report, results=(*report.results, *refused))
    return _probed(pair, report, probe_text, probe_images, progress, other)


def _pair(
    method: str,
    base: Checkpoint,
    model: ModelConfig,
    draft: Checkpoint | None,
    config: DraftConfig | None,
    aux_layers: tuple[int, ...] | None,
) -> Pair:
    """The pair; of a draft in the base's own checkpoint, by the configuration beside it."""
    if draft is None and (config := draft_beside(base, model, method)) is not None:
        draft = base
    return Pair(method, base, model, draft, config, aux_layers)


def _other(pair: Pair, source: Checkpoint, name: str) -> tuple[Other | None, list[CheckResult]]:
    """The pair with the weights of another base, and why they are not those of the same model; a
    draft in the base's own checkpoint is the one that stands there."""
    from edgespec.pairing.against import Other, refusals

    results: list[CheckResult] = []
    model = _base(source, results)
    if model is None:
        return None, [replace(result, topic="against") for result in results]
    inside = pair.draft is None or pair.draft is pair.base
    draft, config = (None, None) if inside else (pair.draft, pair.config)
    other = Other(name, _pair(pair.method, source, model, draft, config, pair.aux_layers))
    return other, list(refusals(pair, other))


def method_in_base(checkpoint: Checkpoint, model: ModelConfig | None) -> str:
    """The method whose draft the base's checkpoint holds; where it holds none, the first that could
    be in one."""
    from edgespec.graphs.registry import DRAFTS

    methods = {name: row.in_base for name, row in DRAFTS.items() if row.in_base is not None}
    for method, in_base in methods.items():
        if model is not None and in_base(checkpoint, model):
            return method
    return next(m.name for m in METHODS.values() if m.weights_in == "base_checkpoint")


def _probed(
    pair: Pair,
    report: PairReport,
    text: str,
    images: Sequence[Path],
    progress: Progress,
    other: Other | None,
) -> PairReport:
    """The report with a probe's result and shares; what does not fit is not run."""
    from edgespec.pairing.against import compared_result
    from edgespec.pairing.probe import probe, probe_result
    from edgespec.pairing.probe_text import text_of

    if report.count("refused"):
        return report
    try:
        probed = probe(pair, text_of(pair.base, pair.model, text, images), progress, other)
    except (CheckpointError, PairingError, UnsupportedModel) as error:
        refused = CheckResult("refused", "probe", error.what, error.remedy)
        return replace(report, results=(*report.results, refused))
    results = [probe_result(probed, pair)]
    if probed.against is not None:
        results.append(compared_result(probed.against, probed.positions))
    return replace(report, results=(*report.results, *results), probe=probed)


def _base(checkpoint: Checkpoint, results: list[CheckResult]) -> ModelConfig | None:
    config = _detected("base", checkpoint, results)
    if isinstance(config, ModelConfig):
        layer = config.decoder
        layers = counted(layer.num_layers, "layer")
        message = f"{config.architecture}: {layers}, hidden {layer.hidden_size}"
        results.append(CheckResult("ok", "base", message))
        return config
    if config is not None:
        message = f"{checkpoint.place} is a draft, not a base"
        results.append(
            CheckResult("refused", "base", message, "Give the base first, then the draft.")
        )
    return None


def _draft(checkpoint: Checkpoint, results: list[CheckResult]) -> DraftConfig | None:
    """What a draft is by itself, or as a whole model that drafts."""
    detected = _detected("draft", checkpoint, results)
    config = None if detected is None else as_draft(detected)
    if config is not None:
        message = (
            f"{METHODS[config.method].title}, {config.layout} layout:"
            f" {counted(config.decoder.num_layers, 'layer')}, hidden {config.decoder.hidden_size}"
        )
        results.append(CheckResult("ok", "draft", message))
    return config


def _detected(
    topic: str, checkpoint: Checkpoint, results: list[CheckResult]
) -> ModelConfig | DraftConfig | None:
    try:
        return detect(checkpoint)
    except EdgeSpecError as error:
        results.append(CheckResult("refused", topic, error.what, error.remedy))
        return None


def _results(topic: str, look: Check, pair: Pair) -> Iterator[CheckResult]:
    """The results of one check; an error is one of them."""
    try:
        yield from look(pair)
    except EdgeSpecError as error:
        yield CheckResult("refused", topic, error.what, error.remedy)
