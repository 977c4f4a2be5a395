"""Suffix drafts: what followed the longest end of the text that occurred before.

Knows the method's row. It needs no draft and no engine.
"""

from __future__ import annotations

from edgespec.methods.base import Method

NAME = "suffix"

METHOD = Method(
    name=NAME,
    title="suffix decoding",
    draft_title="suffixes",
    aliases=("suffix_decoding",),
    weights_in="nowhere",
    proposes="tree",
    needs_engine=False,
)
