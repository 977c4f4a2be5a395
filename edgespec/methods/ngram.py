"""N-gram drafts (prompt lookup): what followed the same tokens before.

Knows the method's row. It needs no draft and no engine.
"""

from __future__ import annotations

from edgespec.methods.base import Method

NAME = "ngram"

METHOD = Method(
    name=NAME,
    title="n-gram lookup",
    draft_title="n-grams",
    aliases=("n-gram", "prompt_lookup"),
    weights_in="nowhere",
    proposes="chain",
    needs_engine=False,
)
