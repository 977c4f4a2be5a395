"""From MODEL and options to a request: what each checkpoint is, and whether they belong together.

Each checkpoint is opened and detected once. Knows what is refused, and no method.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.checkpoint.detect import detect, draft_beside
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.origin import origin_of
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.export import sidecars
from edgespec.export.options import ExportOptions
from edgespec.export.request import ExportBase, ExportDraft, ExportRequest
from edgespec.export.table import COMPONENTS
from edgespec.methods import METHODS, BaseSide, DraftSide, mismatches, whole_model_method
from edgespec.methods.aux_layers import REMEDY as AUX_LAYERS_REMEDY

_OTHER_BASE = (
    "Pass the base that this draft was trained for (`base_model_dir` where MODEL is the draft), or"
    " the draft of this base."
)


def resolve(model: str, options: ExportOptions) -> ExportRequest:
    """The export request for a checkpoint directory or hub id.

    Raises CheckpointError, UnsupportedModel, and PairingError for options that contradict each
    other or the checkpoints, and for a base and a draft that are no pair.
    """
    if options.draft_for is not None:
        return _draft_by_option(model, options)
    checkpoint = open_checkpoint(model, allow_pickle=options.allow_pickle)
    if options.base_for is not None:
        COMPONENTS[options.base_for].check_base(checkpoint)
    config = detect(checkpoint)
    if options.as_draft is not None:
        config = _as_draft(checkpoint, config, options)
    if isinstance(config, DraftConfig):
        return _draft_request(ExportDraft(checkpoint, config), options)
    return _base_request(checkpoint, config, options)


# A base


def _base_request(
    checkpoint: Checkpoint, config: ModelConfig, options: ExportOptions
) -> ExportRequest:
    _refuse_beside_base(checkpoint, options)
    method, draft = options.base_for, None
    if method is not None and COMPONENTS[method].base_needs_draft:
        draft = _named_draft(method, options)
        _check_pair(checkpoint, config, draft.config, options)
    elif method is not None and (beside := draft_beside(checkpoint, config, method)) is not None:
        draft = ExportDraft(checkpoint, beside)
        _check_pair(checkpoint, config, draft.config, options)
    base = ExportBase(checkpoint, config, origin_of(checkpoint))
    return ExportRequest(
        options=options,
        method=method,
        writes_base=True,
        base=base,
        draft=draft,
        texts=sidecars.text_identity(checkpoint),
    )


def _refuse_beside_base(checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Options that mean nothing where a base is exported."""
    if options.base_model_dir:
        wanted = METHODS[options.base_for].export_param if options.base_for else None
        beside = f", and means nothing with `{wanted}`" if wanted else ""
        message = (
            f"{checkpoint.place} is a base model; `base_model_dir` belongs to the export of a draft"
            f"{beside}"
        )
        remedy = (
            f"Leave `base_model_dir` out, or give the draft's directory as MODEL{_as_a_draft()}."
        )
        raise PairingError(message, remedy)
    if not options.aux_layers:
        return
    if options.base_for is None:
        rows = [m for m in METHODS.values() if m.takes_aux_layers and m.export_param]
        message = f"`aux_layers` needs {' or '.join(f'`{row.export_param}`' for row in rows)}"
        raise PairingError(message, "Without it the graph emits no hidden states.")
    method = METHODS[options.base_for]
    if not method.takes_aux_layers:
        message = f"`aux_layers` means nothing with `{method.export_param}`"
        raise PairingError(message, "Leave `aux_layers` out: the draft decides what it reads.")


def _as_a_draft() -> str:
    """How MODEL itself can be a draft, for the end of a remedy."""
    whole = whole_model_method()
    return f"; `{whole.draft_param}` makes MODEL itself the draft" if whole else ""


def _named_draft(method: str, options: ExportOptions) -> ExportDraft:
    """The draft of `draft_dir`, which must be one of the method."""
    if options.draft_dir is None:
        message = (
            f"the base of {METHODS[method].draft_title} is exported by the draft, and none was"
        )
        raise PairingError(f"{message} given", "Pass the draft's directory or hub id as well.")
    checkpoint = open_checkpoint(options.draft_dir, allow_pickle=options.allow_pickle)
    config = detect(checkpoint)
    if not isinstance(config, DraftConfig) or config.method != method:
        message = f"{checkpoint.place} is not {METHODS[method].draft_title}"
        raise PairingError(message, "Give the directory of the draft; the base is MODEL.")
    return ExportDraft(checkpoint, config)


# A draft


def _as_draft(
    checkpoint: Checkpoint, config: ModelConfig | DraftConfig, options: ExportOptions
) -> DraftConfig:
    """A whole model as a draft for the base of `base_model_dir`, which must be given. Raises
    PairingError, also for what is a draft by itself."""
    method = METHODS[options.as_draft or ""]
    assert method.of_model is not None
    if isinstance(config, DraftConfig):
        title = METHODS[config.method].draft_title
        message = f"{checkpoint.place} is {title} by itself, and no whole model"
        raise PairingError(message, f"Leave `{method.draft_param}` out.")
    if options.base_model_dir is None:
        message = (
            f"`{method.draft_param}` needs `base_model_dir`: the tokens of draft and base are"
            " compared"
        )
        raise PairingError(message, "Pass the directory or hub id of the model that it drafts for.")
    return method.of_model(config)


def _draft_by_option(model: str, options: ExportOptions) -> ExportRequest:
    """The draft of `draft_dir` as what is exported, and MODEL as its base."""
    assert options.draft_for is not None
    draft = _named_draft(options.draft_for, options)
    return _draft_request(draft, replace(options, base_model_dir=model))


def _draft_request(draft: ExportDraft, options: ExportOptions) -> ExportRequest:
    _refuse_beside_draft(draft, options)
    named = options.base_model_dir or recorded_base(draft.config)
    base = None
    if named is None:
        _refuse_headless(draft.config)
    else:
        base = _base_of_draft(named, draft, options)
    return ExportRequest(
        options=options,
        method=draft.config.method,
        writes_base=False,
        base=base,
        draft=draft,
        texts=sidecars.text_identity(draft.checkpoint),
    )


def _refuse_beside_draft(draft: ExportDraft, options: ExportOptions) -> None:
    """Options that mean nothing where a draft is exported."""
    method = METHODS[draft.config.method]
    if options.base_for is not None:
        flag = f"`{METHODS[options.base_for].export_param}`"
        message = f"{draft.checkpoint.place} is {method.draft_title}; {flag} belongs to a base"
        raise UnsupportedModel(message, f"Leave {flag} out: a draft is detected automatically.")
    if options.aux_layers and not method.takes_aux_layers:
        layers = "names the layers it reads" if method.reads_base else "reads no layers of its base"
        message = f"{draft.checkpoint.place} is {method.draft_title}, and {layers}"
        raise UnsupportedModel(message, "Leave `aux_layers` out.")


def recorded_base(config: DraftConfig) -> str | None:
    """The base that the draft's own config names, where it is a directory here.

    A name of the hub is not followed: it would fetch a whole model that nobody asked for.
    """
    name = config.base_name
    return name if name and Path(name).is_dir() else None


def _refuse_headless(config: DraftConfig) -> None:
    """A draft without an lm_head of its own cannot be exported alone."""
    if config.own_head:
        return
    name = config.base_name
    named = f"; its base is {name!r} by its config.json, and no directory here" if name else ""
    message = f"this draft has no lm_head of its own and shares its base's{named}"
    remedy = (
        "Pass `base_model_dir` with the directory or hub id of the base that it was trained for."
    )
    raise PairingError(message, remedy)


def _base_of_draft(named: str, draft: ExportDraft, options: ExportOptions) -> ExportBase:
    """The base that a draft is exported for; it must be one that the draft can be trained for."""
    checkpoint = open_checkpoint(named, allow_pickle=options.allow_pickle)
    config = detect(checkpoint)
    if not isinstance(config, ModelConfig):
        message = f"`base_model_dir` {checkpoint.place} is itself a draft"
        raise PairingError(message, "Name the base model's directory.")
    _check_pair(checkpoint, config, draft.config, options)
    return ExportBase(checkpoint, config, origin_of(checkpoint))


def _check_pair(
    base: Checkpoint, model: ModelConfig, draft: DraftConfig, options: ExportOptions
) -> None:
    """Every mismatch of the two is an error."""
    sides = (
        BaseSide.of_checkpoint(model, str(base.place)),
        DraftSide.of_checkpoint(draft, options.aux_layers),
    )
    for mismatch in mismatches(*sides):
        flag = mismatch.topic == "aux layers" and METHODS[draft.method].takes_aux_layers
        usual = AUX_LAYERS_REMEDY if flag else _OTHER_BASE
        raise PairingError(mismatch.what, mismatch.remedy or usual)
