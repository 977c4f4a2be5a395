"""Conversations as token ids, and which of them a draft learns to predict. Knows chat templates and
the tokenizer of transformers, which is an argument. Knows no models.

Prompt and answer are tokenized apart, as in generation: together, the last newline of a prompt
would merge with the first letters of an answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import RequestError
from edgespec.prompts.conversations import Messages, numbered_records
from edgespec.prompts.sets import read_prompt_set
from edgespec.training.pictures import Picture, Pictures

WANTED = (
    'Each line is an object with "messages", a list of {"role": ..., "content": ...} that'
    " alternate between user and assistant."
)
NO_ANSWERS = (
    "A draft learns what its base answers: let the base answer the prompts, for example with"
    " edgespec infer, and write its answers as turns of the role assistant."
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
SORTED_OVER = 64  # batches among which rows of like length are put together
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


Items = tuple[tuple[str, Messages], ...]  # where each conversation stands, and what it says


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations of a file."""

    items: Items
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation. `predicts[t]` says whether what follows token t is learned; `number` is its
    place in a dump."""

    ids: Ids  # [S]
    predicts: Mask  # [S]
    pictures: tuple[Picture, ...] = ()
    number: int = -1


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to measure with: its ids and messages, and what the user asks behind the answer."""

    ids: tuple[int, ...]
    messages: Messages
    later: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """What is trained on, and how many conversations were cut or left out for their length."""

    rows: tuple[Row, ...]
    num_cut: int
    num_dropped: int

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return sum(len(row.ids) for row in self.rows)

    @property
    def num_predicted(self) -> int:
        """Those that are learned."""
        return sum(int(row.predicts.sum()) for row in self.rows)


def read_conversations(path: Path, sample_size: int = -1) -> Conversations:
    """The conversations of a JSONL file, or the first `sample_size`. Raises RequestError that names
    the line, and for a file of prompts without answers."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RequestError(f"{path} is not UTF-8 (line {line}).", WANTED) from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", WANTED) from error
    items: list[tuple[str, Messages]] = []
    for where, record in numbered_records(text, path, WANTED, parts=True):
        if isinstance(record, str):
            raise RequestError(f"{where} is a text, not a conversation.", WANTED)
        items.append((where, record))
    if not items or sample_size == 0:
        raise RequestError(f"{path} has no conversations.", WANTED)
    if sample_size > 0:
        items = items[:sample_size]
    return Conversations(tuple(items), path, hashlib.sha256(data).hexdigest())


# Where a prompt stands, its messages up to the first answer, and the user's later turns
Asked = tuple[str, Messages, tuple[str, ...]]


def read_questions(path: Path) -> list[Asked]:
    """The prompts of a file to measure with: conversations, or a prompt set of MT-Bench's form,
    whose `turns` are all the user's. Raises RequestError that names the line."""
    try:
        with path.open("rb") as file:
            begin = file.read(1 << 16)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", WANTED) from error
    if re.search(rb'"(messages|conversations)"\s*:', begin.partition(b"\n")[0]):
        return [(where, messages, ()) for where, messages in read_conversations(path).items]
    return [
        (f"{path}, prompt {i}", [{"role": "user", "content": str(request.messages[0].content)}],
         request.turns)
        for i, request in enumerate(read_prompt_set(path).requests, 1)
    ]  # fmt: skip


def refuse_unanswered(conversations: Conversations) -> None:
    """Raises RequestError where a conversation has nothing that the base answered."""
    for where, messages in conversations.items:
        if not any(m["role"] == "assistant" and text_of(m).strip() for m in messages):
            raise RequestError(f"{where} has no assistant turn.", NO_ANSWERS)


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says in words; \"\" where it is in parts."""
    content = message["content"]
    return content if isinstance(content, str) else ""


class Template:
    """A tokenizer's chat template, or another in its place, and the ids that end an answer.
    `pictures` reads images, where there are any."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[int],
        text: str | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self.tokenizer, self.stops, self.pictures = tokenizer, frozenset(stops), pictures
        if text is not None:
            tokenizer.chat_template = text
        if not tokenizer.chat_template:
            raise RequestError(
                "the base has no chat template.", "Give the file of one as data.chat_template."
            )
        self.marked = GENERATION.search(str(tokenizer.chat_template)) is not None

    def rendered(self, messages: Messages, where: str, **more: Any) -> Any:
        """What the template makes of messages. Raises RequestError where it refuses them."""
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(messages, **{"tokenize": False} | more)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"{where}: the chat template rejects the messages: {error}", WANTED
            ) from error

    def encoded(self, text: str) -> list[int]:
        """The ids of a piece of rendered text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, messages: Messages, where: str) -> Row:
        """What comes before the first answer."""
        turns = [m["role"] for m in messages]
        asked = messages[: turns.index("assistant")] if "assistant" in turns else messages
        ids = np.asarray(
            self.encoded(self.rendered(asked, where, add_generation_prompt=True)), np.int64
        )
        return self.with_pictures(ids, np.zeros(len(ids), np.bool_), asked, where)

    def with_pictures(self, ids: Ids, marked: Mask, messages: Messages, where: str) -> Row:
        """Ids with room for the images of messages, and what is marked of them."""
        if self.pictures is None:
            return Row(ids, marked)
        pictures = self.pictures.of(messages, where)
        return Row(*self.pictures.expanded(ids, marked, pictures, where), pictures)

    def question(self, messages: Messages, later: Sequence[str], where: str) -> Question:
        """A prompt, and the user's turns behind its answer."""
        return self.asked(self.prompt(messages, where), messages, later)

    @staticmethod
    def asked(prompt: Row, messages: Messages, later: Sequence[str]) -> Question:
        """A prompt as a question."""
        return Question((*prompt.ids.tolist(),), messages, (*later,), prompt.pictures)

    def followed(self, question: Question, answer: Sequence[int]) -> Question:
        """The next turn of a question that was answered so."""
        ids = [token for token in answer if token not in self.stops]
        text = str(self.tokenizer.decode(ids))
        turns = (
            {"role": "assistant", "content": text},
            {"role": "user", "content": question.later[0]},
        )
        messages = [*question.messages, *turns]
        encoded = self.encoded(self.rendered(messages, "a question", add_generation_prompt=True))
        prompt = np.asarray(encoded, np.int64)
        unmarked = np.zeros(len(prompt), np.bool_)
        row = self.with_pictures(prompt, unmarked, messages, "a question")
        return self.asked(row, messages, question.later[1:])

    def row(self, messages: Messages, where: str, *, answers_only: bool) -> Row:
        """The ids of a conversation; learned is all of it, or the answers with the token that ends
        each. Raises RequestError for a template under which answers cannot be found."""
        if self.marked:
            ids, answered = self.by_marks(messages, where)
        else:
            ids, answered = self.by_prefixes(messages, where)
        row = self.with_pictures(ids, answered, messages, where)
        marked = np.append(row.predicts[1:], False)
        predicts = marked if answers_only else np.ones(len(row.ids), np.bool_)
        if self.pictures is not None:  # what a base says in the slots of an image means nothing
            image = row.ids == self.pictures.tokens.image
            predicts = predicts & ~image & ~np.append(image[1:], False)
        return replace(row, predicts=predicts)

    def by_marks(self, messages: Messages, where: str) -> tuple[Ids, Mask]:
        """Ids, and which are of answers: what stands between the template's own marks, and the stop
        token behind."""
        made = self.rendered(
            messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = np.asarray(made["input_ids"], np.int64)
        answered = np.asarray(made["assistant_masks"], np.bool_)
        ends = np.append(False, answered[:-1] & ~answered[1:]) & np.isin(ids, [*self.stops])
        return ids, answered | ends

    def by_prefixes(self, messages: Messages, where: str) -> tuple[Ids, Mask]:
        """The same by where an answer stands behind what comes before it."""
        ids, answered = list[int](), list[bool]()
        for text, of_answer in self.pieces(messages, where):
            new = self.encoded(text)
            ids += new
            answered += [of_answer] * len(new)
        return np.asarray(ids, np.int64), np.asarray(answered, np.bool_)

    def pieces(self, messages: Messages, where: str) -> Iterator[tuple[str, bool]]:
        """The rendered conversation in pieces, and which are answers. What a template puts before
        an answer, as empty think tags, is none of it; the stop token behind it is."""
        whole, end = self.rendered(messages, where), 0
        for turn, message in enumerate(messages):
            content = text_of(message)
            if message["role"] != "assistant" or not content.strip():
                continue
            before = self.rendered(messages[:turn], where, add_generation_prompt=True)
            begin = whole.find(content, max(end, len(before)))
            if begin < 0:  # some templates strip it
                content = content.strip()
                begin = whole.find(content, max(end, len(before)))
            if not whole.startswith(before) or begin < 0:
                raise RequestError(
                    f"{where}: the chat template rewrites turns before, or in, answer {turn}, so"
                    " that it cannot be found.",
                    "Give a template with {% generation %} around answers as data.chat_template,"
                    " or one turn a conversation.",
                )
            yield whole[end:begin], False
            behind = whole[begin + len(content) :]
            stop = max((word for word in self.stop_words if behind.startswith(word)), default="")
            end = begin + len(content) + len(stop)
            yield whole[begin:end], True
        yield whole[end:], False

    def cut(self, row: Row, seq_len: int) -> Row:
        """At most the first `seq_len` tokens, and no part of an image."""
        end = min(seq_len, len(row.ids))
        pictures = row.pictures
        if self.pictures is not None and end < len(row.ids):
            image = row.ids == self.pictures.tokens.image
            if image[end - 1] and image[end]:
                end = int(np.flatnonzero(~image[:end])[-1]) + 1
            begins = image[:end] & ~np.append(False, image[: end - 1])
            pictures = pictures[: int(begins.sum())]
        return Row(row.ids[:end], row.predicts[:end], pictures)

    @property
    def stop_words(self) -> list[str]:
        """The stop tokens as text."""
        return [str(word) for word in self.tokenizer.convert_ids_to_tokens(sorted(self.stops))]


def learned_parts(template: Template, messages: Messages, where: str) -> Iterator[tuple[str, bool]]:
    """A conversation in pieces of text, and which a draft learns to predict of the answers."""
    row = template.row(messages, where, answers_only=True)
    learned = np.append(False, row.predicts[:-1])
    starts = [0, *(np.flatnonzero(learned[1:] != learned[:-1]) + 1).tolist()]
    for begin, end in zip(starts, [*starts[1:], len(row.ids)], strict=True):
        text = template.tokenizer.decode(row.ids[begin:end], clean_up_tokenization_spaces=False)
        yield str(text), bool(learned[begin])


def rows_of(
    conversations: Conversations, template: Template, seq_len: int, *, answers_only: bool
) -> Rows:
    """The conversations as rows of at most `seq_len` tokens. Raises RequestError where nothing is
    left to learn."""
    rows, num_cut, num_dropped = list[Row](), 0, 0
    for where, messages in conversations.items:
        row = template.row(messages, where, answers_only=answers_only)
        num_cut += len(row.ids) > seq_len
        row = template.cut(row, seq_len)
        if len(row.ids) >= 3 and row.predicts[1:-1].any():
            rows.append(row)
        else:
            num_dropped += 1
    if not rows:
        raise RequestError(
            f"{conversations.path}: no conversation has an answer within {seq_len} tokens.",
            "Raise training.training_seq_len.",
        )
    return Rows(tuple(rows), num_cut, num_dropped)


More = Callable[[np.random.Generator, Sequence[Row]], Mapping[str, Any]]  # arrays
States = Callable[[Sequence[Row], int], Mapping[str, Any]]  # tensors of rows, padded to a width


class Batches:
    """Batches by number, each a pure function of number and seed: what a run has not seen yet needs
    no memory of what it saw. An epoch has each row once, rows of like length together. Items are
    batches, or of each its `parts` one after the other, which so many processes train on."""

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        seed: int,
        count: int,
        more: More | None = None,
        parts: int = 1,
        pictures: Pictures | None = None,
        states: States | None = None,
    ) -> None:
        """`more` draws what a method adds to a batch, `pictures` reads images, and `states` are
        read of the rows of a part."""
        self.rows, self.batch_size, self.seed, self.count = rows, batch_size, seed, count
        self.more, self.parts, self.pictures, self.states = more, parts, pictures, states
        self.groups = lru_cache(maxsize=2)(self.groups_of)

    def __len__(self) -> int:
        return self.count * self.parts

    @property
    def per_epoch(self) -> int:
        """Batches that see each row once."""
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The rows of one part. One for which there are none has a row of which nothing is
        learned."""
        number, part = divmod(item, self.parts)
        batch, rows = self.batch(number), self.rows_of(number)
        if self.parts == 1 and self.states is None:
            return batch
        some = part < len(rows)
        chosen = slice(part, None, self.parts) if some else slice(1)
        batch = {name: values[chosen] for name, values in batch.items()}
        if self.states is not None:
            batch |= self.states(rows[chosen], batch["ids"].shape[1])
        return batch if some else batch | {"predicts": batch["predicts"] & False}

    def batch(self, number: int) -> dict[str, Any]:
        """`ids` [B, S], padded behind with 0, their `lengths` [B] and `predicts` [B, S]; where the
        data has images, what `Pictures.inputs` gives."""
        import torch

        rows = self.rows_of(number)
        width = max(len(row.ids) for row in rows)
        padded = [(0, width - len(row.ids)) for row in rows]
        batch = {
            "ids": np.stack([np.pad(r.ids, p) for r, p in zip(rows, padded, strict=True)]),
            "predicts": np.stack(
                [np.pad(r.predicts, p) for r, p in zip(rows, padded, strict=True)]
            ),
            "lengths": np.array([len(row.ids) for row in rows]),
        }
        if self.pictures is not None:
            batch |= self.pictures.inputs([(row.ids, row.pictures) for row in rows], width)
        if self.more is not None:
            batch |= self.more(np.random.default_rng([self.seed, 1, number]), rows)
        return {name: torch.as_tensor(values) for name, values in batch.items()}

    def rows_of(self, number: int) -> list[Row]:
        """The rows of a batch."""
        epoch, place = divmod(number, self.per_epoch)
        return [self.rows[i] for i in self.groups(epoch)[place]]

    def groups_of(self, epoch: int) -> list[NDArray[np.intp]]:
        """The rows of each batch of an epoch."""
        rng = np.random.default_rng([self.seed, 0, epoch])
        order = rng.permutation(len(self.rows))
        lengths = np.array([len(row.ids) for row in self.rows])
        span, groups = self.batch_size * SORTED_OVER, list[NDArray[np.intp]]()
        for begin in range(0, len(order), span):
            part = order[begin : begin + span]
            part = part[np.argsort(lengths[part], kind="stable")]
            groups += [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
        return [groups[i] for i in rng.permutation(len(groups))]
