"""Keeps what base and drafter remember of prompts' prefixes, so that the next prompt with the same
prefix need not compute it again.

Knows keys of prompts, rows and a memory budget; what can be cut to a shorter prefix is asked of the
decoder. Knows nothing of how rows are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.backends.call import HiddenStates
from edgespec.errors import OptionError
from edgespec.runtime.drafters.base import Drafter, Snapshot
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.sequence import SequenceState

PREFIX_CACHE_BYTES = 256 * 2**20
MAX_ENTRIES = 256  # each is compared with each prompt: in 1 ms, all of them
MIN_NEW = 16  # tokens of a prompt that were read, from which it is kept
# ... or this share of it: all of it is copied, and reading a token takes many times as long
NEW_SHARE = 1 / 32
NO_DRAFT = -1


@dataclass(frozen=True, slots=True)
class Prefix:
    """`base` rows hold as many positions as the key, a `Prompt.cache_key`. A drafter's snapshot
    pairs a position with the token after it, so it has at least one fewer; `draft` is that of
    `drafter`, and None where the request did not draft or its drafter keeps no state.

    A prefix that is not `croppable` is reused whole or not at all. `hidden_state` is that of the
    last position, for the pair that the snapshot lacks.
    """

    cache_key: NDArray[np.int64]
    base: LaneRows
    draft: Snapshot | None = None
    hidden_state: HiddenStates | None = None  # of one row
    croppable: bool = True
    drafter: Drafter | None = None
    salt: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows of base and draft."""
        return self.base.nbytes + (0 if self.draft is None else self.draft.nbytes)

    def draft_of(self, drafter: Drafter | None) -> Snapshot | None:
        """What a drafter itself kept here; None for another's."""
        return self.draft if drafter is self.drafter else None

    def reusable(self, prompt: NDArray[np.int64], drafter: Drafter | None) -> int:
        """Positions that a prompt, by its key, need not compute; its last token always is, for its
        logits.

        With a `drafter` its snapshot has to be there as well.
        """
        pairs = None
        if drafter is not None:
            draft = self.draft_of(drafter)
            pairs = NO_DRAFT if draft is None else len(draft)
        has_state = self.hidden_state is not None
        return reusable_length(self.cache_key, prompt, self.croppable, pairs, has_state=has_state)


@dataclass
class PrefixCache:
    """The most recently used prefixes that fit into `budget_bytes`; 0 keeps none. Any thread may
    keep and find. `evicted` is told of each entry that goes for want of room."""

    budget_bytes: int
    entries: list[Prefix] = field(default_factory=list)  # the least recently used first
    evicted: Callable[[Prefix], object] = field(default=lambda prefix: None)
    lock: RLock = field(default_factory=RLock)

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.size_bytes for entry in self.entries)

    def clear(self) -> None:
        """Drop all entries."""
        with self.lock:
            self.entries = []

    def find(
        self, cache_key: Sequence[int], drafter: Drafter | None, salt: str = ""
    ) -> tuple[Prefix, int] | None:
        """The entry of this salt with the longest prefix of a prompt, by its key, that is reusable,
        with a `drafter` for it too, and that length."""
        with self.lock:
            lengths = self.lengths(cache_key, drafter, salt)
            if not any(lengths):
                return None
            best = int(np.argmax(lengths))
            entry = self.entries.pop(best)
            self.entries.append(entry)
        return entry, lengths[best]

    def lengths(self, cache_key: Sequence[int], drafter: Drafter | None, salt: str) -> list[int]:
        """What is reusable of each entry."""
        wanted = np.asarray(cache_key, np.int64)
        with self.lock:
            entries = [*self.entries]
        return [entry.reusable(wanted, drafter) if entry.salt == salt else 0 for entry in entries]

    def reusable(self, seq: SequenceState) -> int:
        """Tokens of a sequence's prompt that `restore` would find."""
        lengths = self.lengths(seq.prompt.cache_key, reader(seq.drafter), seq.cache_salt)
        return max(lengths, default=0)

    def keeps(self, seq: SequenceState) -> bool:
        """Whether a prompt is worth its copy, by how much of it had to be read."""
        count = len(seq.prompt)
        return bool(self.budget_bytes) and count - seq.num_reused >= max(MIN_NEW, NEW_SHARE * count)

    def holds(self, cache_key: Sequence[int], drafter: Drafter | None, salt: str = "") -> bool:
        """Whether all that has this key is there already, with a `drafter` for it too."""
        wanted = np.asarray(cache_key, np.int64)
        return any(
            entry.salt == salt
            and serves(entry, wanted)
            and (drafter is None or entry.draft_of(drafter) is not None)
            for entry in self.entries
        )

    def keep(self, new: Prefix) -> None:
        """Add a prefix; what it covers goes, and the least recently used go until it fits."""
        if new.size_bytes > self.budget_bytes:
            return
        most = self.budget_bytes - new.size_bytes
        with self.lock:
            self.entries = [old for old in self.entries if not covers(new, old)]
            while self.size_bytes > most or len(self.entries) >= MAX_ENTRIES:
                self.evicted(self.entries.pop(0))
            self.entries.append(new)

    # ---- a sequence's lane

    def restore(self, seq: SequenceState, base: CachedDecoder) -> int:
        """Begin a sequence's lane, of base and drafter, with the longest prefix of its prompt that
        is there; returns the number of its tokens."""
        drafter = seq.drafter
        match = self.find(seq.prompt.cache_key, reader(drafter), seq.cache_salt)
        if match is None:
            return 0
        prefix, count = match
        base.restore(seq.lane, prefix.base.prefix(count))
        draft = prefix.draft_of(drafter)
        if drafter is not None and draft is not None:
            covered = min(count, len(draft))
            drafter.restore(seq.lane, draft.prefix(covered))
            if drafter.needs_hidden_states and covered < count:
                assert prefix.hidden_state is not None
                state = prefix.hidden_state
                drafter.observe([seq.prompt_observation(count - 1, count, state)])
        return count

    def take(self, seq: SequenceState, count: int, base: CachedDecoder) -> Prefix | None:
        """A copy of the first `count` committed tokens of a sequence, or of as many as the budget
        holds; None where there is nothing to keep, or it is there already.

        No request fails for it: where memory is short all that was kept goes.
        """
        length = base.lanes[seq.lane].length
        if not length:
            return None
        try:
            if base.croppable:
                count = min(count, length, self.affordable(seq, base))
            elif count < length:
                return None  # it ended within what was accepted, and a state has it all
            else:
                count = length
            return self.copy(seq, count, base)
        except MemoryError:
            self.clear()
            return None

    def affordable(self, seq: SequenceState, base: CachedDecoder) -> int:
        """Tokens that the budget holds."""
        if not self.budget_bytes:
            return 0
        draft = None if seq.drafter is None else seq.drafter.snapshot(seq.lane, 1)
        per_token = base.snapshot(seq.lane, 1).nbytes + (0 if draft is None else draft.nbytes)
        return self.budget_bytes // per_token

    def copy(self, seq: SequenceState, count: int, base: CachedDecoder) -> Prefix | None:
        """A copy of a lane's first `count` positions; None where there are none, or where an entry
        serves them already. Raises MemoryError."""
        drafter, cache_key = seq.drafter, seq.cache_key[:count]
        if not cache_key or self.holds(cache_key, reader(drafter), seq.cache_salt):
            return None
        draft = None if drafter is None else drafter.snapshot(seq.lane, count - 1)
        if not base.croppable and draft is not None and len(draft) < count - 1:
            draft = None  # it never saw the last positions: of use for plain requests alone
        return Prefix(
            np.array(cache_key, np.int64),
            base.snapshot(seq.lane, count),
            draft,
            seq.hidden_state if count == base.lanes[seq.lane].length else None,
            base.croppable,
            None if draft is None else drafter,
            seq.cache_salt,
        )


def reader(drafter: Drafter | None) -> Drafter | None:
    """A drafter that cannot go on without its snapshot of a prefix, as it reads the hidden states
    of a prompt; None for others."""
    return drafter if drafter is not None and drafter.needs_hidden_states else None


def reusable_length(
    cache_key: NDArray[np.int64],
    prompt: NDArray[np.int64],
    croppable: bool,
    pairs: int | None,
    *,
    has_state: bool,
) -> int:
    """Positions of a prefix that a prompt need not compute. `pairs` are those that a drafter has of
    it, or NO_DRAFT; None where no drafter needs them. `has_state`: whether its last hidden state is
    there, without which a whole prefix is of no use to a drafter."""
    common = common_length(cache_key, prompt)
    if not croppable:
        whole = len(cache_key) == common < len(prompt)
        return common if whole and (pairs is None or (has_state and pairs == common - 1)) else 0
    if pairs is not None:
        common = min(common - 1, pairs)
    return max(0, min(common, len(prompt) - 1))


def covers(new: Prefix, old: Prefix) -> bool:
    """Whether `new` serves every prompt that `old` serves, with and without drafts."""
    return (
        new.salt == old.salt
        and serves(new, old.cache_key)
        and (old.draft is None or new.draft_of(old.drafter) is not None)
    )


def serves(entry: Prefix, cache_key: NDArray[np.int64]) -> bool:
    """Whether all that has this key can be taken from an entry."""
    whole = entry.croppable or len(entry.cache_key) == len(cache_key)
    return whole and common_length(entry.cache_key, cache_key) == len(cache_key)


def common_length(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Positions with which two sequences begin alike, by their keys."""
    count = min(len(first), len(second))
    differing = np.flatnonzero(first[:count] != second[:count])
    return int(differing[0]) if len(differing) else count


def check_bytes(prefix_cache_bytes: object) -> None:
    """Raises OptionError for a size in bytes that is not a whole number of 0 or more, or None."""
    if isinstance(prefix_cache_bytes, bool) or not (
        prefix_cache_bytes is None
        or (isinstance(prefix_cache_bytes, int) and prefix_cache_bytes >= 0)
    ):
        message = f"prefix_cache_bytes is {prefix_cache_bytes!r:.60}"
        raise OptionError(message, "Give a number of bytes; 0 keeps nothing.")
