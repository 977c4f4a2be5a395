"""What one request's grammar means for its tokens: the mask behind a path, drafts that break it,
and tokens that it leaves no choice.

Knows paths: all tokens from the prompt on. Whatever was asked before, the same path gets the same
answer: a matcher goes forwards and back as it has to. Knows no logits and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import RequestError
from edgespec.runtime.text.thinking import Thoughts
from edgespec.runtime.trees.tree import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """The grammar of one answer. It begins behind the prompt, or behind the answer's `thoughts`,
    and ends with one of `end_ids`, behind which only they may come.

    `matcher` is at its beginning, and this one's own.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        end_ids: Sequence[int],
        num_prompt: int,
        thoughts: Thoughts | None = None,
    ) -> None:
        self.matcher, self.vocab_size, self.end_ids = matcher, vocab_size, end_ids
        self.num_prompt, self.thoughts = num_prompt, thoughts
        self.read: list[int] = []  # by the matcher

    # ---- the mask

    def allowed(self, before: Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens [V] that may come after `before`; None: all. Raises RequestError where the
        grammar has become too large, and for a path that breaks it."""
        text = self.text(before)
        if text is None:
            return None
        if text and text[-1] in self.end_ids:
            mask = np.zeros(self.vocab_size, bool)
            mask[[*self.end_ids]] = True
            return mask
        if not self.move(text):
            raise RequestError("these tokens break the grammar of the answer", param="guided")
        packed = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self.check()
        bits = np.unpackbits(packed, count=self.vocab_size, bitorder="little")
        mask = bits.view(bool)
        if self.may_think(before):
            assert self.thoughts is not None
            mask[self.thoughts.begin] = True
        return mask

    def text(self, before: Sequence[int]) -> Sequence[int] | None:
        """The part of a path that the grammar is about; None where it has not begun."""
        start = self.num_prompt
        if self.thoughts is not None:
            begun = self.thoughts.begun_in(before, start)
            if begun is None:
                return None
            start = begun
        return before[start:]

    def may_think(self, before: Sequence[int]) -> bool:
        """Whether the answer may begin with thoughts here."""
        thoughts = self.thoughts
        return thoughts is not None and not thoughts.open and len(before) == self.num_prompt

    def move(self, text: Sequence[int]) -> bool:
        """Let the matcher have read `text` and nothing else; False where it does not allow that: it
        has read the part that it allows."""
        self.check()
        same = min(len(self.read), len(text))
        while self.read[:same] != text[:same]:
            same -= 1
        back, on = len(self.read) - same, [*text[same:]]
        if back:
            self.matcher.rollback(back)
        taken = self.matcher.try_consume_tokens(on) if on else 0
        if back or on:
            self.read = [*text[: same + taken]]
        self.check()
        return taken == len(on)

    def check(self) -> None:
        """Raises RequestError where the matcher gave up."""
        if self.matcher.is_error():
            why = " ".join(self.matcher.get_error().split())[:200]
            message = f"the grammar of the answer cannot go on: {why}"
            raise RequestError(message, "Simplify it.", param="guided")

    # ---- drafts

    def takes(self, before: Sequence[int], token: int) -> bool:
        """Whether `token` may come after `before`."""
        text = self.text(before)
        if text is None:
            return True
        if text and text[-1] in self.end_ids:
            return False
        self.move(text)
        if token in self.end_ids:
            return bool(self.matcher.is_accepting())
        if self.may_think(before) and self.thoughts is not None and token == self.thoughts.begin:
            return True
        return self.matcher.validate_tokens([token]) == 1

    def forced(self, before: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens with which the only text that may follow is written; behind the last
        of a grammar the end token."""
        text = self.text(before)
        if (
            text is None
            or most < 1
            or self.may_think(before)
            or (text and text[-1] in self.end_ids)
        ):
            return []
        self.move(text)
        tokens = self.matcher.compute_ff_tokens()[:most]
        if len(tokens) < most:
            self.move([*text, *tokens])
            if self.matcher.is_stopped():
                tokens.append(self.end_ids[0])
        return tokens

    def cut(self, tree: DraftTree, before: Sequence[int]) -> DraftTree:
        """The tree without nodes that break the grammar, nor what descends from them; `levels` are
        still those that were drafted. `before` are all tokens up to the root, which is included."""
        if len(tree) == 1:
            return tree
        children: list[list[int]] = [[] for _ in range(len(tree))]
        for node, parent in enumerate(tree.parents.tolist()):
            if parent >= 0:
                children[parent].append(node)
        tokens, kept = tree.tokens.tolist(), [0]

        def visit(node: int, path: list[int]) -> None:
            for child in children[node]:
                if child <= tree.num_forced or self.takes(path, tokens[child]):
                    kept.append(child)
                    path.append(tokens[child])
                    visit(child, path)
                    path.pop()

        visit(0, [*before])
        if len(kept) == len(tree):
            return tree
        return replace(tree.only(sorted(kept)), levels=tree.drafted_levels)
