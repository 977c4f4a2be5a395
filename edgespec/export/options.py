"""What `edgespec export` can be asked for, as one value. Knows no checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How MODEL is exported. Methods are keys of METHODS.

    `base_for` is the method whose base is exported. Some methods
    need `draft_dir` for that, the draft that declares what it reads. `draft_for` is the method
    whose draft in `draft_dir` is exported, with MODEL as its base. With neither, MODEL decides: a
    draft is exported for `base_model_dir`, a base as a plain decoder. With `as_draft`, a method
    that takes whole models for drafts, a base is exported as such a draft for `base_model_dir`.
    `aux_layers` are hidden_states indices.
    `skip_visual` leaves the image encoder of MODEL out.
    """

    base_for: str | None = None
    draft_for: str | None = None
    as_draft: str | None = None
    draft_dir: str | None = None
    base_model_dir: str | None = None
    aux_layers: tuple[int, ...] | None = None
    allow_pickle: bool = False
    golden: bool = True
    skip_visual: bool = False
