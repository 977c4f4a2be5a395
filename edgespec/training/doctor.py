"""What spoils a training, said before it, and what its figures say behind it: a finding is a row.

Knows facts about data, base and curve, which are measured elsewhere. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.errors import RequestError
from edgespec.prompts.conversations import Messages
from edgespec.training.data import Conversations, Row, Rows, Template

SAMPLE = 16  # conversations whose answers the base is asked about
FLAT_FROM = 6  # measurements
SHOW, GOOD = 5_000, 500_000  # conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known so far; None: not yet."""

    num_conversations: int | None = None
    learned: float | None = None  # share of tokens
    answers_only: bool = False
    dropped: float | None = None  # share of conversations without an answer in reach
    coverage: float | None = None  # share of tokens that the draft's vocabulary has
    other_template: bool | None = None
    surprise: tuple[float, float] | None = None  # nats a token: of the answers, of the base's own
    lengths: Sequence[float] = ()  # acceptance, measurement by measurement
    engine: tuple[float, float] | None = None  # acceptance lengths: in torch, of an engine


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found: a row's id, the value, why it matters and what to do."""

    id: str
    value: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.id}: {self.value}. {self.why} {self.remedy}"


@dataclass(frozen=True, slots=True)
class Check:
    """`value` of facts, None where there is nothing to say; else why it is said, and a remedy."""

    id: str
    value: Callable[[Facts], str | None]
    why: str
    remedy: str


def few(facts: Facts) -> str | None:
    """Conversations, where drafts that are published have seen more."""
    count = facts.num_conversations
    return f"{count} conversations" if count is not None and count < GOOD else None


def all_learned(facts: Facts) -> str | None:
    """The learned share, where prompts should not be in it."""
    share = facts.learned
    return f"{share:.0%} of the tokens" if facts.answers_only and share and share > 0.98 else None


def little_learned(facts: Facts) -> str | None:
    """The learned share, where it is next to nothing."""
    share = facts.learned
    return f"{share:.1%} of the tokens" if share is not None and share < 0.05 else None


def much_dropped(facts: Facts) -> str | None:
    """The share of conversations without an answer in reach, where it is large."""
    share = facts.dropped
    return f"{share:.0%} of the conversations" if share is not None and share > 0.1 else None


def uncovered(facts: Facts) -> str | None:
    """What the draft's vocabulary has of the text, where it lacks much."""
    share = facts.coverage
    return f"{share:.1%} of the tokens" if share is not None and share < 0.97 else None


def foreign(facts: Facts) -> str | None:
    """The base's probability of the answers and of what it would say itself, where they differ by
    more than half a nat a token. Of own answers the mean is the entropy, or less where greedy."""
    if facts.surprise is None or facts.surprise[0] - facts.surprise[1] < 0.5:
        return None
    theirs, own = (2.718281828**-nats for nats in facts.surprise)
    return f"the base gives their tokens {theirs:.2g}, and its own {own:.2g}"


def flat(facts: Facts) -> str | None:
    """The best of the last third against the best before, where it is no better."""
    lengths = facts.lengths
    before, behind = lengths[: -(len(lengths) // 3)], lengths[-(len(lengths) // 3) :]
    if len(lengths) < FLAT_FROM or max(behind) > 1.01 * max(before):
        return None
    return f"{max(before):.3f} before, {max(behind):.3f} in the last third"


def apart(facts: Facts) -> str | None:
    """Acceptance in torch and of an engine, where they are more than a twentieth apart."""
    if facts.engine is None or abs(facts.engine[1] / facts.engine[0] - 1) < 0.05:
        return None
    return f"{facts.engine[0]:.3f} in torch, {facts.engine[1]:.3f} of the engine"


CHECKS = (
    Check(
        "too-little-data", few, f"{SHOW} show that it works; good drafts have seen {GOOD}.",
        "Let the base answer more prompts.",
    ),
    Check(
        "mask-of-all", all_learned, "Prompts are learned too, though only answers should be.",
        "Give a template with {% generation %} around answers as data.chat_template.",
    ),
    Check(
        "mask-of-nothing", little_learned, "So little is learned of what is read.",
        "See whether answers are cut off: raise training.training_seq_len.",
    ),
    Check(
        "no-answer-in-reach", much_dropped, "They are read for nothing.",
        "Raise training.training_seq_len.",
    ),
    Check(
        "coverage", uncovered, "A draft never proposes a token beyond its vocabulary.",
        "Raise draft_vocab_size.",
    ),
    Check(
        "other-template", lambda f: "another text" if f.other_template else None,
        "The base's own template, which engines serve with, renders the first conversation"
        " otherwise.",
        "Put the same template into the base's tokenizer files.",
    ),
    Check(
        "foreign-answers", foreign, "A draft of them learns what the base would not say.",
        "Let the base itself answer the prompts.",
    ),
    Check(
        "plateau", flat, "More steps on this data add nothing.",
        "Give more conversations, a larger draft, or a smaller training.learning_rate.",
    ),
    Check(
        "engine-disagrees", apart, "The same prompts should be accepted alike.",
        "Build the engine anew from this draft, and compare the base's quantization.",
    ),
)  # fmt: skip


def findings(facts: Facts) -> list[Finding]:
    """What the rows find in facts."""
    found = ((row, row.value(facts)) for row in CHECKS)
    return [Finding(row.id, value, row.why, row.remedy) for row, value in found if value]


# What is measured without the base's weights


def data_facts(
    rows: Rows, answers_only: bool, coverage: float | None, other_template: bool | None
) -> Facts:
    """What the rows say that are trained on."""
    total = len(rows.rows) + rows.num_dropped
    return Facts(
        num_conversations=len(rows.rows),
        learned=rows.num_predicted / rows.num_tokens,
        answers_only=answers_only,
        dropped=rows.num_dropped / total,
        coverage=coverage,
        other_template=other_template,
    )


def renders_otherwise(template: Template, serving: str | None, first: Messages) -> bool:
    """Whether the base's own template makes another text of a conversation than the recipe's."""
    if not serving or serving == template.tokenizer.chat_template:
        return False
    ours = template.rendered(first, "the first conversation")
    try:
        return bool(template.rendered(first, "the same", chat_template=serving) != ours)
    except RequestError:  # it rejects them
        return True


def answers_in(conversations: Conversations, template: Template, seq_len: int) -> list[Row]:
    """Some conversations with what the base should have answered; none where a template hides
    where answers stand, which only a training on answers alone needs to know."""
    items = conversations.items[:: max(1, len(conversations.items) // SAMPLE)][:SAMPLE]
    try:
        rows = [template.row(messages, where, answers_only=True) for where, messages in items]
    except RequestError:
        return []
    return [Row(row.ids[:seq_len], row.predicts[:seq_len]) for row in rows]
