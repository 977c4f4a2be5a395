"""What `export` asks of a drafting method: the columns of COMPONENTS. Knows no method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.artifacts.component import NO_SPEC
from edgespec.checkpoint.files import Checkpoint
from edgespec.export.component import Component
from edgespec.export.request import ExportRequest
from edgespec.methods import SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What the graph of a base emits for drafts: the residual stream at `aux_layers`
    (hidden_states indices), or with `final` the state after its last norm.

    `spec` is what its config.json keeps of the method, `note` says the same to the user.
    """

    aux_layers: tuple[int, ...] = ()
    final: bool = False
    spec: SpecConfig = NO_SPEC
    note: str


def asked_for(name: str, key: str) -> Callable[[ExportRequest], dict[str, Any]]:
    """The `recorded` of a method of which the manifest keeps `key` where its base was asked for."""
    return lambda request: {key: True} if request.options.base_for == name else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRow:
    """What `export` knows of a method.

    `emits` is asked when a base is exported for it, and `draft` makes the component of its draft.
    `base_needs_draft`: the base is exported by a draft, which declares what it reads.
    `check_base` is asked before a base is detected, and raises for forms of other families.
    `recorded` are the options that a manifest keeps of the method.
    """

    emits: Callable[[ExportRequest], Emitted]
    draft: Callable[[ExportRequest], Component]
    base_needs_draft: bool = False
    check_base: Callable[[Checkpoint], None] = lambda checkpoint: None
    recorded: Callable[[ExportRequest], dict[str, Any]] = lambda request: {}
