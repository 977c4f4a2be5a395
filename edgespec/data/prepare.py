"""Conversations of published data sets as JSONL: prompts that a base is to answer, or whole
conversations; duplicates and prompts of benchmarks left out, and everything shuffled.

Knows what is left out and why. Where data sets come from stands in `records` and `sources`.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from edgespec.artifacts import atomic
from edgespec.data.benchmarks import Benchmarks
from edgespec.data.records import records_of
from edgespec.data.sources.row import Messages, Part
from edgespec.data.sources.table import SOURCES
from edgespec.data.variants import Variant
from edgespec.errors import RequestError
from edgespec.progress import Progress
from edgespec.prompts.chats import Chat, identity

SEED = 0  # of the order
DUPLICATE, BENCHMARK = "duplicates", "prompts of benchmarks"
NO_TURNS, NO_ANSWERS, TOOLS = "without a turn of a user", "without answers", "with tools"


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is to be prepared: sources by name, each with the path of a local copy, or None for the
    hub. `splits` stand in place of those of the table, `cap` is the most records of a split."""

    sources: Mapping[str, Path | None]
    full_conversations: bool = False
    splits: tuple[str, ...] = ()
    cap: int | None = None
    benchmarks: Sequence[Path] = ()
    variants: Sequence[Variant] = ()

    def parts(self) -> Iterator[tuple[str, Part, Path | None]]:
        """Each part with the name of its source and its local copy; a local file is one part."""
        for name, local in self.sources.items():
            parts = SOURCES[name].parts
            if local is not None and local.is_file():
                parts = parts[:1]
            elif self.splits:
                parts = parts_with(parts, self.splits)
            yield from ((name, part, local) for part in parts)


def parts_with(parts: Sequence[Part], splits: Sequence[str]) -> tuple[Part, ...]:
    """The parts that have these splits; those that none of them names are the first one's."""
    named = [tuple(name for name in splits if name in part.splits) for part in parts]
    named[0] += tuple(name for name in splits if not any(name in part.splits for part in parts))
    chosen = zip(parts, named, strict=True)
    return tuple(replace(part, splits=own) for part, own in chosen if own)


@dataclass(slots=True)
class Prepared:
    """What came of it: how many conversations each source gave, how many are `variants`, and how
    many were left out for what reason."""

    written: Counter[str] = field(default_factory=Counter)
    variants: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        counts = {"written": dict(self.written), "left_out": dict(self.left_out)}
        return {**counts, "variants": self.variants}


def prepare(asked: Preparation, out: Path, progress: Progress) -> Prepared:
    """Writes the file, whole or not at all. Raises RequestError, also where nothing is left,
    MissingDependency, EnvironmentProblem and OutputError."""
    for name, local in asked.sources.items():
        if local is not None and not local.exists():
            raise RequestError(f"{local} does not exist.", f"Name the local copy of {name}.")
    benchmarks, prepared = Benchmarks(asked.benchmarks), Prepared()
    atomic.refuse_occupied(out)
    with atomic.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent) as lines:
            ends = [lines.tell()]
            for line in chosen(asked, benchmarks, prepared, progress):
                lines.write(line.encode("utf-8", "replace"))
                ends.append(lines.tell())
            if len(ends) == 1:
                reasons = ", ".join(f"{n} {why}" for why, n in prepared.left_out.items())
                message = f"no conversation is left: {reasons or 'there are no records'}."
                raise RequestError(message, "Give other sources, or fewer conditions.")
            write_shuffled(lines, ends, out)
    return prepared


def write_shuffled(lines: IO[bytes], ends: Sequence[int], out: Path) -> None:
    """The lines in another order, which is the same for the same lines."""
    order = [*range(len(ends) - 1)]
    random.Random(SEED).shuffle(order)
    staged = out.parent / atomic.temporary_name(out.name)
    try:
        with staged.open("xb") as file:
            for index in order:
                lines.seek(ends[index])
                file.write(lines.read(ends[index + 1] - ends[index]))
        staged.replace(out)
    finally:
        staged.unlink(missing_ok=True)


def chosen(
    asked: Preparation, benchmarks: Benchmarks, prepared: Prepared, progress: Progress
) -> Iterator[str]:
    """The lines of all that is kept."""
    seen = set[str]()
    for name, part, local in asked.parts():
        progress.start(part.repository, part.cap or 0)
        for record in records_of(part, local, asked.cap):
            progress.advance(1)
            messages = SOURCES[name].read(record)
            if (why := left_out(messages, benchmarks, full=asked.full_conversations)) is not None:
                prepared.left_out[why] += 1
                continue
            kept = messages if asked.full_conversations else prompts_of(messages)
            tools = record.get("tools")
            offered = tuple(tools) if isinstance(tools, list) else ()
            varied = variant_for(asked, part, sum(prepared.written.values()), kept)
            for variant, turns in enumerate((kept, varied)):
                key = identity(turns)
                if turns and key in seen:
                    prepared.left_out[DUPLICATE] += not variant
                elif turns:
                    seen.add(key)
                    prepared.variants += variant
                    prepared.written[name] += not variant
                    yield Chat("", f"{name}-{key}", turns, offered).line()


def left_out(messages: Messages, benchmarks: Benchmarks, *, full: bool) -> str | None:
    """Why a conversation is left out; None where it is kept. What follows a tool's turn cannot be
    asked, so that prompts have none."""
    roles = {m["role"] for m in messages if m["content"].strip() or m.get("tool_calls")}
    if "user" not in roles:
        return NO_TURNS
    if full and "assistant" not in roles:
        return NO_ANSWERS
    if not full and "tool" in roles:
        return TOOLS
    return BENCHMARK if benchmarks.has(messages) else None


def prompts_of(messages: Messages) -> Messages:
    """A conversation without its answers."""
    return tuple(m for m in messages if m["role"] != "assistant")


def variant_for(asked: Preparation, part: Part, number: int, messages: Messages) -> Messages:
    """The variant of a conversation, each in turn; none of whole conversations."""
    if not asked.variants or asked.full_conversations or not part.augmented:
        return ()
    return asked.variants[number % len(asked.variants)].of(messages)
