"""What a grammar means behind a path, by llguidance on a small byte-level tokenizer: whatever was
asked before, and whatever ends, thinks or is too dear."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from edgespec.errors import EdgeSpecError, LimitError, RequestError
from edgespec.prompts import Guided
from edgespec.runtime.grammar.grammars import Grammars
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.trees.tree import DraftTree

ENDS = (0, 1)
THINK = ("<think>", "</think>")
PADDED = 16  # ids that the tokenizer has not


def tokenizer_of(*added: str) -> Tokenizer:
    tokens = ["<end>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("a", "a"), ("a", "b"), ("{", '"'), ('"', ":"), ("t", "r"), ("tr", "u"), ("tru", "e")]
    tokens += [left + right for left, right in merges]
    ids = {token: i for i, token in enumerate(tokens)}
    made = HfTokenizer(models.BPE(vocab=ids, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*tokens[:2]])
    made.add_tokens([*added])
    return Tokenizer(made)


PLAIN, THINKING = tokenizer_of(), tokenizer_of(*THINK)
BEGIN, END = (THINKING.token_id(mark) for mark in THINK)


def grammars_of(tokenizer: Tokenizer = PLAIN) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + PADDED, ENDS)


GRAMMARS = grammars_of()


def ids_of(text: str) -> list[int]:
    return PLAIN.encode(text)


def guide_of(prompt: list[int] | None = None, **form: Any) -> Guide:
    return GRAMMARS.guide(Guided(**form), prompt or [])


def texts(guide: Guide, before: list[int], tokenizer: Tokenizer = PLAIN) -> set[str]:
    """What is allowed behind a path; all ends as one."""
    mask = guide.allowed(before)
    assert mask is not None
    assert len(mask) == tokenizer.vocab_size + PADDED
    allowed = mask.nonzero()[0].tolist()
    return {"END" if i in ENDS else tokenizer.decode([i]) for i in allowed}


# ---- the mask


def test_a_mask_is_that_of_its_path_whatever_was_asked_before() -> None:
    whole = ids_of('{"a": [1, true], "b": "aab"}')
    asked, fresh = guide_of(json_object=True), guide_of(json_object=True)
    places = [*range(len(whole) + 1)] * 3
    random.Random(0).shuffle(places)
    for place in places:
        asked.takes(whole[:place], random.choice(whole))
        alone = guide_of(json_object=True).allowed(whole[:place])
        assert np.array_equal(asked.allowed(whole[:place]), alone)
    for place in range(len(whole) + 1):  # as plain decoding goes
        assert np.array_equal(fresh.allowed(whole[:place]), asked.allowed(whole[:place]))


def test_only_ends_come_behind_the_end_and_padding_never() -> None:
    guide = guide_of(regex="ab?")
    assert texts(guide, []) == {"a", "ab"}
    assert texts(guide, ids_of("a")) == {"b", "END"}
    for done in (ids_of("ab"), [*ids_of("a"), ENDS[1]], [*ids_of("ab"), *ENDS]):
        assert texts(guide, done) == {"END"}
    mask = guide.allowed(ids_of("a"))
    assert mask is not None
    assert mask[[*ENDS]].all()
    assert not mask[-PADDED:].any()


def test_a_path_that_breaks_the_grammar_is_an_error_and_leaves_the_guide_as_it_was() -> None:
    guide = guide_of(regex="abc")
    with pytest.raises(RequestError, match="break the grammar"):
        guide.allowed(ids_of("ax"))
    assert texts(guide, ids_of("a")) == {"b"}


def test_the_grammar_begins_behind_thoughts() -> None:
    grammars, form = grammars_of(THINKING), Guided(regex="ab")
    assert (BEGIN, END) != (None, None)
    opened = grammars.guide(form, [5, BEGIN, 6])
    assert opened.allowed([5, BEGIN, 6]) is None
    assert opened.forced([5, BEGIN, 6, 9], 9) == []
    assert texts(opened, [5, BEGIN, 6, 9, END], THINKING) == {"ab"}
    free = grammars.guide(form, [5, 6])  # the answer may think first, or not
    assert texts(free, [5, 6], THINKING) == {"ab", "<think>"}
    assert free.takes([5, 6], BEGIN)
    assert free.allowed([5, 6, BEGIN, 7]) is None
    assert texts(free, [5, 6, BEGIN, END], THINKING) == {"ab"}
    closed = grammars.guide(form, [5, BEGIN, 6, END, 9])
    assert texts(closed, [5, BEGIN, 6, END, 9], THINKING) == {"ab"}


# ---- drafts


def test_nodes_that_break_the_grammar_go_with_what_descends_from_them() -> None:
    a, b, c = (ids_of(letter)[0] for letter in "abc")
    #     root -> a -> b -> end -> a,  root -> a -> c,  root -> c -> b
    tree = DraftTree(np.array([9, a, c, b, c, b, ENDS[0], a]), np.array([-1, 0, 0, 1, 1, 2, 3, 6]))
    cut = guide_of([9], regex="ab*").cut(tree, [9])
    assert cut.tokens.tolist() == [9, a, b, ENDS[0]]
    assert cut.parents.tolist() == [-1, 0, 1, 2]
    assert cut.drafted_levels == 4  # all were paid for
    sooner = guide_of([9], regex="abb+").cut(tree, [9])
    assert sooner.tokens.tolist() == [9, a, b]  # too early for an end
    assert guide_of([9], regex="c").cut(tree, [9]).tokens.tolist() == [9, c]


def test_forced_tokens_are_the_only_text_and_go_up_to_the_end() -> None:
    guide = guide_of(choice=("aabba!", "aabbc!"))
    forced = guide.forced([], 9)
    assert PLAIN.decode(forced) == "aabb"
    assert guide.forced([], 2) == forced[:2]
    assert guide.forced([*forced, *ids_of("c")], 9) == [*ids_of("!"), ENDS[0]]
    assert guide.forced([*forced, *ids_of("c!"), ENDS[1]], 9) == []


# ---- grammars


@pytest.mark.parametrize(
    ("form", "error", "said"),
    [
        ({"json_schema": {"not": {}}}, RequestError, "has not, which"),
        ({"json_schema": {"items": {"uniqueItems": True}}}, RequestError, "uniqueItems"),
        ({"json_schema": {"oneOf": [{"minLength": 1}, {"minLength": 2}]}}, RequestError, "oneOf"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}, RequestError, "x-guidance"),
        ({"json_schema": {"$ref": "http://localhost/x"}}, RequestError, "localhost/x"),
        ({"regex": "(?=a)b"}, RequestError, "look-around"),
        ({"grammar": "begin: /a/"}, RequestError, "`guided` cannot be"),
        ({"regex": "^(a{1000}){1000}$"}, LimitError, "1000002 long"),
        ({"json_schema": {"properties": {"a": {"pattern": "(a{999}){99}"}}}}, LimitError, "long"),
        ({"json_schema": {"patternProperties": {"(a{200}){200}": {}}}}, LimitError, "long"),
        ({"regex": "a{200}{200}"}, LimitError, "long"),
        ({"grammar": 'start: A{1000}\nA: B{1000}\nB: "a"'}, LimitError, "long"),
        ({"json_schema": {"multipleOf": 1000003, "type": "integer"}}, LimitError, "multipleOf"),
        ({"grammar": 'start: %json{"multipleOf": 1000003}'}, LimitError, "multipleOf"),
        ({"grammar": 'start: "a" | %json {"minItem": 1, "not": {}} | "b"'}, RequestError, "not"),
        ({"grammar": 'start: %json\n {"pattern": "(a\\u007b999}){99}"}'}, LimitError, "long"),
        ({"grammar": 'start: a{200}\na: %json {"pattern": "b{200}"}'}, LimitError, "long"),
    ],
)  # fmt: skip
def test_what_cannot_be_or_would_hold_up_others_is_refused_at_once(
    form: dict[str, Any], error: type[EdgeSpecError], said: str
) -> None:
    began_s = time.thread_time()
    with pytest.raises(error, match=said) as raised:
        guide_of(**form)
    assert raised.value.remedy
    assert time.thread_time() - began_s < 1


def test_a_grammar_whose_first_token_is_dear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.runtime.grammar.grammars.MAX_COMPILE_S", 0.0)
    with pytest.raises(LimitError, match="its first token takes"):
        guide_of(regex="never asked before")


@pytest.mark.parametrize(
    "pattern", [r"\d{4}-\d{2}-\d{2}", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[a-z]{12}"]
)
def test_usual_repetitions_are_no_weight(pattern: str) -> None:
    guide_of(json_schema={"type": "string", "pattern": pattern})
    guide_of(regex=pattern)
    guide_of(grammar=f'start: "a" %json {json.dumps({"pattern": pattern, "a": "%json"})} "b"')


def test_a_grammar_is_compiled_once_and_each_request_has_its_own_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, compiled = grammars_of(), list[Guided]()
    real: Callable[[Guided], Any] = grammars.compiled
    monkeypatch.setattr(grammars, "compiled", lambda form: compiled.append(form) or real(form))
    one, other = (grammars.guide(Guided(json_schema={"const": 7}), []) for _ in range(2))
    assert len(compiled) == 1
    assert texts(one, ids_of("7")) == {"END"}
    assert texts(other, []) == {"7"}


def test_json_is_written_as_json_dumps_writes_it() -> None:
    value = {"a": [1, 2], "b": {"c": "x y"}}
    guide = guide_of(json_object=True)
    path: list[int] = []
    for token in ids_of(json.dumps(value)):
        assert guide.takes(path, token)
        path.append(token)
    assert not guide.takes(ids_of('{"a"'), ids_of(" ")[0])
