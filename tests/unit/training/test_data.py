"""Which tokens of a conversation a draft learns: the answers and what ends them, by hand for each
kind of chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from edgespec.errors import RequestError
from edgespec.training.data import (
    Batches,
    Row,
    Template,
    read_conversations,
    refuse_unanswered,
    rows_of,
)
from tests.toys.tokenizer import write_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}",
)
# As Llama 3's: a header a turn, and trimmed content
HEADERS = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{{ '[' + m.role + ']\n\n' + m.content | trim"
    " + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
# As Qwen3's: empty think tags before the last answer alone
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and"
    " loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWRITES = CHATML.replace("m.content +", "(m.content if loop.last else '...') +")
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "  Yes, you."},
    {"role": "user", "content": "Yes"},
    {"role": "assistant", "content": "Yes"},
]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 256, 512)
    return path


def template(path: Path, text: str) -> Template:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    return Template(tokenizer, [tokenizer.convert_tokens_to_ids(END)], text)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (CHATML, [f"  Yes, you.{END}", f"Yes{END}"]),
        (MARKED, [f"  Yes, you.{END}", f"Yes{END}"]),
        (HEADERS, [f"Yes, you.{END}", f"Yes{END}"]),
        (THINKING, [f"  Yes, you.{END}", f"Yes{END}"]),
    ],
)
def test_answers_and_what_ends_them_are_learned(
    tokenizer_dir: Path, text: str, answers: list[str]
) -> None:
    made = template(tokenizer_dir, text)
    row = made.row(CHAT, "chat", answers_only=True)
    parts: list[list[int]] = [[]]
    for token, learned in zip(row.ids[1:], row.predicts[:-1], strict=True):
        if learned:
            parts[-1].append(int(token))
        elif parts[-1]:
            parts.append([])
    assert [made.tokenizer.decode(part) for part in parts if part] == answers
    assert made.tokenizer.decode(row.ids) == made.tokenizer.apply_chat_template(
        CHAT, tokenize=False
    )
    assert not row.predicts[-1]
    assert made.row(CHAT, "chat", answers_only=False).predicts.all()


def test_an_answer_is_tokenized_apart_from_its_prompt(tokenizer_dir: Path) -> None:
    made = template(tokenizer_dir, CHATML)
    row = made.row(CHAT[:2], "chat", answers_only=True)
    prompt = made.prompt(CHAT, "chat")
    assert row.ids[: len(prompt)].tolist() == prompt
    assert np.flatnonzero(row.predicts)[0] == len(prompt) - 1


def test_a_template_that_rewrites_turns_is_refused(tokenizer_dir: Path) -> None:
    with pytest.raises(RequestError, match="line 7: the chat template rewrites turns"):
        template(tokenizer_dir, REWRITES).row(CHAT, "line 7", answers_only=True)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "has no conversations"),
        ('{"messages": [}', "line 1 is not JSON"),
        ('\n{"messages": []}', "line 2 has none of messages"),
        ('{"text": "a page"}', "line 1 is a text, not a conversation"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "line 1 has no assistant turn"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(lines)
    with pytest.raises(RequestError, match=said):
        refuse_unanswered(read_conversations(path))


def test_calls_of_tools_reach_the_template(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *CHAT[1:]]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    ((_, messages),) = read_conversations(tmp_path / "chats.jsonl").items
    assert messages == chat


def test_long_conversations_are_cut_and_counted(tokenizer_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    long = [{"role": "user", "content": "Hi " * 40}, CHAT[1]]
    path.write_text("\n".join(json.dumps({"messages": m}) for m in (CHAT, long)))
    made, chats = template(tokenizer_dir, CHATML), read_conversations(path)
    whole = rows_of(chats, made, 500, answers_only=True)
    assert (len(whole.rows), whole.num_cut, whole.num_dropped) == (2, 0, 0)
    length = len(made.row(CHAT, "", answers_only=True).ids) - 4
    some = rows_of(chats, made, length, answers_only=True)
    assert (len(some.rows), some.num_cut, some.num_dropped) == (1, 2, 1)
    assert len(some.rows[0].ids) == length


def rows(*lengths: int) -> list[Row]:
    return [Row(np.full(n, i + 1), np.ones(n, np.bool_)) for i, n in enumerate(lengths)]


def test_an_epoch_has_each_row_once_and_batches_are_a_matter_of_their_number() -> None:
    def batches() -> Batches:
        return Batches(rows(3, 9, 4, 8, 5, 7, 6), 2, seed=5, count=12)

    seen: list[Any] = [batches()[number] for number in range(8)]  # others than the ones below
    for epoch in range(2):
        part = seen[4 * epoch : 4 * epoch + 4]
        assert sorted(int(row[0]) for batch in part for row in batch["ids"]) == [*range(1, 8)]
    assert [b["lengths"].tolist() for b in seen[:4]] != [b["lengths"].tolist() for b in seen[4:]]
    for batch in seen:
        assert abs(int(batch["lengths"].max()) - int(batch["lengths"].min())) <= 1
        assert (batch["predicts"].sum(1) == batch["lengths"]).all()
