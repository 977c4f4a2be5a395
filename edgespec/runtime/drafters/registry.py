"""The table of drafters: the name of a method in METHODS -> what it is at run time.

Adding a method is a row here and a file beside this one. Test code and users may add rows of their
own; a method that needs no engine then serves `--spec-decode` on any engine.
"""

from __future__ import annotations

from edgespec.methods import METHODS
from edgespec.runtime.drafters import (
    dflash,
    draft_model,
    dspark,
    eagle1,
    eagle3,
    jetspec,
    medusa,
    mtp,
    ngram,
    suffix,
)
from edgespec.runtime.drafters.row import DrafterRow

DRAFTERS: dict[str, DrafterRow] = {
    eagle1.NAME: eagle1.ROW,
    eagle3.NAME: eagle3.ROW,
    mtp.NAME: mtp.ROW,
    dflash.NAME: dflash.ROW,
    jetspec.NAME: jetspec.ROW,
    dspark.NAME: dspark.ROW,
    medusa.NAME: medusa.ROW,
    draft_model.NAME: draft_model.ROW,
    suffix.NAME: suffix.ROW,  # the first without an engine: what drafts where none is named
    ngram.NAME: ngram.ROW,
}


def engineless_methods() -> list[str]:
    """The methods that draft without an engine, in the order in which they were registered."""
    return [name for name in DRAFTERS if name in METHODS and not METHODS[name].needs_engine]
