"""Text leaves a stream as early as it is certain, and ends before a stop string, wherever the
tokens' borders are."""

from __future__ import annotations

import random
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from edgespec.runtime.text.detokenizer import TextStream
from edgespec.runtime.text.tokenizer import Tokenizer
from tests.unit.runtime.text.test_tokenizer import BUILT, HARD_TEXTS, byte_fallback


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    text_stream = TextStream(tokenizer)
    return [*(text_stream.push(token_id) for token_id in ids), text_stream.flush()]


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_survives_ids_and_stream(name: str, text: str) -> None:
    assert "".join(stream(BUILT[name], BUILT[name].encode(text))) == text


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_delta_ends_inside_a_character(name: str) -> None:
    tokenizer = BUILT[name]
    ids = tokenizer.encode("fox 😀 日本 𓀀 dog")
    assert len(ids) > len("fox 😀 日本 𓀀 dog") - 4  # the characters really are in pieces
    assert not any("\ufffd" in delta for delta in stream(tokenizer, ids))


def test_text_comes_out_with_the_token_that_completes_it() -> None:
    tokenizer = BUILT["byte_level"]
    text_stream = TextStream(tokenizer)
    deltas = [text_stream.push(token_id) for token_id in tokenizer.encode("a😀b")]
    assert "".join(deltas) == "a😀b"  # with nothing left for flush
    assert deltas[0] == "a"
    assert deltas[-2:] == ["😀", "b"]


@pytest.mark.parametrize("name", BUILT)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stream_of_any_ids_is_decode_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer = BUILT[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


def test_invalid_bytes_after_valid_ones_do_not_break_the_stream() -> None:
    """The case in which tokenizers' own DecodeStream raises."""
    tokenizer = BUILT["byte_fallback"]
    ids = [*tokenizer.encode("fox 😀"), tokenizer.token_id("<0xFF>") or 0, *tokenizer.encode("dog")]
    assert "\ufffd" in tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_token_without_text_does_not_cost_the_next_one_its_space() -> None:
    raw = tokenizers.Tokenizer(models.BPE(vocab={"": 0, "▁a": 1, "▁b": 2}, merges=[]))
    raw.decoder = byte_fallback().decoder
    tokenizer = Tokenizer(raw)
    assert stream(tokenizer, [1, 0, 2]) == ["a", "", " b", ""]


def test_half_a_character_at_the_end_is_flushed() -> None:
    tokenizer = BUILT["byte_level"]
    half = tokenizer.encode("fox😀")[:-1]
    assert stream(tokenizer, half)[-1] == "\ufffd"
    assert "".join(stream(tokenizer, half)) == tokenizer.decode(half)


def test_long_stream_is_decode_of_all_ids() -> None:
    for tokenizer in BUILT.values():
        ids = random.Random(0).choices(range(tokenizer.vocab_size), k=2000)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_token_that_looks_like_a_byte_waits_only_where_the_decoder_reads_it_as_one() -> None:
    raw = tokenizers.Tokenizer(models.BPE(vocab={"<0x41>": 0}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    assert stream(Tokenizer(raw), [0]) == ["<0x41>", ""]
    raw.decoder = decoders.ByteFallback()
    assert stream(Tokenizer(raw), [0]) == ["", "A"]


# --- stop strings


def letters() -> Tokenizer:
    """One token a letter, the whole words of the examples, and a special token."""
    words = [*"abcdefghijklmnopqrstuvwxyz .", "abc", "bcd", "abcd", "aab"]
    raw = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    )
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<|end|>"])
    return Tokenizer(raw)


LETTERS = letters()


def told(tokens: list[str], stop: list[str]) -> tuple[list[str], bool]:
    """The deltas of tokens, that of flush last, and whether the stream stopped."""
    text_stream = TextStream(LETTERS, stop=stop)
    deltas = [text_stream.push(LETTERS.token_id(token) or 0) for token in tokens]
    return [*deltas, text_stream.flush()], text_stream.stopped


@pytest.mark.parametrize(
    ("tokens", "stop", "deltas", "stopped"),
    [
        ([*"xaaaby"], ["aab"], ["x", "", "", "a", "", "", ""], True),
        (["x", "aab", "y"], ["aab"], ["x", "", "", ""], True),
        (["abcd", "e"], ["bc"], ["a", "", ""], True),
        ([*"abcx"], ["abd"], ["", "", "abc", "x", ""], False),
        ([*"xab"], ["abc"], ["x", "", "", "ab"], False),
        (["abcd"], ["cd", "bc"], ["a", ""], True),  # that which begins first
        (["abcd"], ["bc", "abcd"], ["", ""], True),  # even where another ends before it
        # unless it was complete a token before
        (["abc", "d"], ["bc", "abcd"], ["a", "", ""], True),
        ([*"abcabx"], ["abcabd", "bx"], ["", "", "", "", "", "abca", ""], True),
        (["a", "<|end|>", "b", "c"], ["ab"], ["", "", "", "", ""], True),
        (["a"], [], ["a", ""], False),
    ],
)
def test_stop_string_ends_the_text_before_it(
    tokens: list[str], stop: list[str], deltas: list[str], stopped: bool
) -> None:
    assert told(tokens, stop) == (deltas, stopped)


def test_stop_that_only_flushing_completes_is_trimmed_too() -> None:
    tokenizer = BUILT["byte_fallback"]
    a, b = (tokenizer.token_id(token) or 0 for token in ("<0x61>", "<0x62>"))
    text_stream = TextStream(tokenizer, stop=["b"])
    assert [text_stream.push(a), text_stream.push(b), text_stream.stopped] == ["", "", False]
    assert (text_stream.flush(), text_stream.stopped) == ("a", True)


def longest_beginning(text: str, stop: list[str]) -> int:
    """Characters at the end of `text` with which a stop string begins, as the definition says
    it."""
    return max(
        (n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0
    )


@pytest.mark.parametrize("name", BUILT)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_stops_keep_to_their_definition(name: str, data: st.DataObject) -> None:
    tokenizer = BUILT[name]
    some = st.sampled_from(
        [*(tokenizer.encode("a😀b é fox 日本 aab")), *range(0, tokenizer.vocab_size, 7)]
    )
    ids = data.draw(st.lists(some, min_size=1, max_size=25))
    whole = tokenizer.decode(ids)
    stop = data.draw(st.lists(stops_in(whole), min_size=1, max_size=4))

    deltas, plain = [], stream(tokenizer, ids)
    text_stream = TextStream(tokenizer, stop=stop)
    for n in range(len(plain)):
        deltas.append(text_stream.push(ids[n]) if n < len(ids) else text_stream.flush())
        certain = "".join(plain[: n + 1])
        found = [certain.index(word) for word in stop if word in certain]
        assert text_stream.stopped == bool(found)
        held = 0 if n == len(ids) else longest_beginning(certain, stop)
        assert "".join(deltas) == certain[: min(found) if found else len(certain) - held]
        if found:
            break
    assert text_stream.push(ids[0]) == "" if text_stream.stopped else "".join(deltas) == whole
    assert text_stream.flush() == "" or not text_stream.stopped


def stops_in(text: str) -> st.SearchStrategy[str]:
    """Pieces of a text, whole, twice over, or with an end that does not fit."""
    borders = st.tuples(st.integers(0, len(text)), st.integers(1, 9))
    pieces = borders.map(lambda border: text[border[0] : border[0] + border[1]] or "a")
    return st.one_of(
        pieces, pieces.map(lambda piece: piece * 2), pieces.map(lambda piece: f"{piece}\x00")
    )


def test_long_stops_on_the_worst_of_texts_cost_a_constant_per_token() -> None:
    """Each `a` may begin a stop that never comes: searching again from each would be a
    thousandfold."""
    stops = ["a" * 1023 + chr(ord("b") + i) for i in range(16)]
    text_stream, a = TextStream(LETTERS, stop=stops), LETTERS.token_id("a") or 0
    began = time.process_time()
    num_out = sum(len(text_stream.push(a)) for _ in range(20_000))
    assert time.process_time() - began < 2
    assert num_out == 20_000 - 1023
    assert text_stream.flush() == "a" * 1023
