"""Text survives the way to ids and back, each token has its bytes, and stops are told from special
tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgespec.errors import BundleError, RequestError
from edgespec.prompts.tokenizer_file import FREE_CHARS
from edgespec.runtime.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't lazy,  it rests!",
    "Grüße aus Köln: naïve café, 12.5 €",
    "日本語のテキスト。中文也可以。",
    "def f(x):\n    return x + 1\n",
]
HARD_TEXTS = [
    "😀",
    "a😀b👩‍👩‍👧‍👦 c",
    "  two  spaces, é and 日本 and 𓀀𓂀𓃠 ",
    "👍🏽👍🏽 fox\n\n\tjumps�over",
    "",
]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 has it: a leading space is added on the way in and dropped on the way out."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 120,
        show_progress=False,
        special_tokens=["<unk>", *byte_tokens],
        limit_alphabet=60,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    return as_plain_vocabulary(tokenizer, byte_tokens)


def metaspace() -> tokenizers.Tokenizer:
    """As sentencepiece's unigram models are converted."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = sorted({char for text in HARD_TEXTS for char in text if not char.isspace()})
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        show_progress=False,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_plain_vocabulary(tokenizer: tokenizers.Tokenizer, names: list[str]) -> tokenizers.Tokenizer:
    """The trainer knows its byte tokens as special ones only; in real files they are ordinary
    entries."""
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in names]
    found: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    return found


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
}
BUILT = {name: Tokenizer(build()) for name, build in BUILDERS.items()}


def save(directory: Path, tokenizer: tokenizers.Tokenizer) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_survives_ids(name: str, text: str) -> None:
    assert BUILT[name].decode(BUILT[name].encode(text)) == text


def test_special_tokens_are_added_only_on_request_and_skipped_in_text(tmp_path: Path) -> None:
    raw = byte_level()
    start = raw.token_to_id("<|im_start|>")
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    tokenizer = Tokenizer.open(save(tmp_path, raw))
    assert tokenizer.encode("fox", add_special_tokens=True) == [start, *tokenizer.encode("fox")]
    assert tokenizer.is_special(start)
    ids = tokenizer.encode("<|im_start|>fox<think>")
    assert ids[0] == start
    assert tokenizer.decode(ids) == "fox<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>fox<think>"
    assert (tokenizer.token(start), tokenizer.token_id("absent"), tokenizer.token(10**6)) == (
        "<|im_start|>",
        None,
        None,
    )


def test_one_id_has_the_same_text_each_time_with_special_tokens_and_without(
    tmp_path: Path,
) -> None:
    """It is decoded once: the text of the first time is kept."""
    save(tmp_path, byte_level())
    tokenizer = Tokenizer.open(tmp_path)
    stored = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        for token_id in range(tokenizer.vocab_size + 2):  # two that there are not
            for skip in (True, False):
                wanted = stored.decode([token_id], skip_special_tokens=skip)
                assert tokenizer.decode([token_id], skip_special_tokens=skip) == wanted
            assert tokenizer.token(token_id) == stored.id_to_token(token_id)


def test_truncation_and_padding_of_the_file_do_not_touch_a_prompt(tmp_path: Path) -> None:
    raw = byte_level()
    whole = raw.encode(CORPUS[0]).ids
    raw.enable_truncation(4)
    raw.enable_padding(length=500)
    assert Tokenizer.open(save(tmp_path, raw)).encode(CORPUS[0]) == whole


def test_missing_or_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is damaged"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(BundleError, match="cannot be read"):
        Tokenizer.open(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_of_tokens_are_the_text_of_the_whole(data: st.DataObject) -> None:
    """Any ids: halves of characters, invalid bytes, special and added tokens."""
    tokenizer = BUILT["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    whole = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert whole.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_bytes_of_tokens_are_the_bytes_of_the_text(name: str, text: str) -> None:
    tokenizer = BUILT[name]
    whole = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    in_front = b" " if name == "byte_fallback" and text else b""  # that the normalizer puts there
    assert whole == in_front + text.encode()


def test_metaspace_token_stands_for_its_space() -> None:
    tokenizer = BUILT["metaspace"]
    ids = tokenizer.encode("fox jumps")
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == b" fox jumps"
    assert tokenizer.token_bytes(tokenizer.token_id("</s>") or 0) == b"</s>"


def tokenizer_of(tokens: list[str], decoder: object) -> Tokenizer:
    raw = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    if decoder is not None:
        raw.decoder = decoder
    return Tokenizer(raw)


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.ByteLevel(), [b"<0x41>", b" a", "▁b".encode()]),
        (
            decoders.Sequence([decoders.Sequence([decoders.ByteFallback()])]),
            [b"A", "Ġa".encode(), "▁b".encode()],
        ),
        (decoders.Metaspace(), [b"<0x41>", "Ġa".encode(), b" b"]),
        (decoders.WordPiece(), [b" <0x41>", " Ġa".encode(), " ▁b".encode()]),
        (None, [b"<0x41>", "Ġa".encode(), "▁b".encode()]),
    ],
)
def test_decoder_and_not_the_looks_of_a_token_says_its_bytes(
    decoder: object, expected: list[bytes]
) -> None:
    tokenizer = tokenizer_of(["<0x41>", "Ġa", "▁b"], decoder)
    assert [tokenizer.token_bytes(token_id) for token_id in range(3)] == expected


def test_id_outside_the_vocabulary_has_no_bytes() -> None:
    assert BUILT["byte_level"].token_bytes(10**6) == b""


def test_stop_that_is_a_special_token_becomes_its_id() -> None:
    tokenizer = BUILT["byte_level"]
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.split_stops(["\n\n", "<|im_end|>", "</think>", "\n\n"]) == (
        {end},
        ("\n\n", "</think>"),
    )
    assert tokenizer.split_stops([]) == (frozenset(), ())


@pytest.mark.parametrize("stop", ["<|im_end|>\n", "so<|im_end|>", "<|im_end|><|im_start|>"])
def test_stop_that_holds_a_special_token_is_refused(stop: str) -> None:
    with pytest.raises(RequestError, match="contains the special token") as caught:
        BUILT["byte_level"].split_stops(["fine", stop])
    assert repr(stop) in caught.value.what
    assert 'Stop at the token itself: "stop": ["<|im_' in caught.value.remedy


def catastrophic(path: Path) -> Path:
    raw = byte_level()
    path.mkdir()
    raw.save(str(path / "tokenizer.json"))
    document = json.loads((path / "tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = split
    (path / "tokenizer.json").write_text(json.dumps(document))
    return path


def test_expression_that_never_ends_is_refused(tmp_path: Path) -> None:
    model = catastrophic(tmp_path / "model")
    with pytest.raises(BundleError, match="regular expression of the pre_tokenizer") as refused:
        Tokenizer.open(model)
    assert str(model / "tokenizer.json") in refused.value.what
    assert "Copy it again" not in refused.value.remedy
    assert "Repair the regular expression" in refused.value.remedy


def test_text_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(catastrophic(tmp_path / "model") / "tokenizer.json"))
    with pytest.raises(RequestError, match="cannot split this text"):
        Tokenizer(raw).encode("so " + "a" * 40 + "!")


def test_a_text_that_the_normalizer_makes_many_times_as_long_is_refused() -> None:
    raw = byte_level()
    raw.normalizer = normalizers.Replace("a", "b" * 100)
    tokenizer = Tokenizer(raw)
    assert tokenizer.encode("a") == tokenizer.encode("b" * 100)
    with pytest.raises(RequestError, match="makes more than 1448576 characters") as refused:
        tokenizer.encode("a" * 100_000)
    assert "tokenizer.json" in refused.value.what
    assert "Shorten the text" in refused.value.remedy


def test_long_texts_of_ordinary_characters_are_encoded() -> None:
    raw = byte_level()
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")])
    text = "\u00e9\ufb01 nal " * 20_000
    assert len(text) * 18 > FREE_CHARS  # long enough to be tried
    assert Tokenizer(raw).encode(text) == raw.encode(text).ids


def composing(raw: tokenizers.Tokenizer) -> Tokenizer:
    raw.normalizer = normalizers.Sequence([normalizers.NFC(), *filter(None, [raw.normalizer])])
    return Tokenizer(raw)


COMPOSING = {name: composing(build()) for name, build in BUILDERS.items()}
DENSE = st.sampled_from([" " * 500, "e\u0301" * 99, "<|im_end|>" * 50, *CORPUS])


@pytest.mark.parametrize("name", BUILDERS)
@given(text=st.text() | DENSE)
def test_no_text_has_fewer_tokens_than_its_characters_allow(name: str, text: str) -> None:
    tokenizer = COMPOSING[name]
    assert len(tokenizer.encode(text)) >= len(text) / tokenizer.chars_per_token
    assert math.isfinite(tokenizer.chars_per_token) == (name != "metaspace")


def test_text_above_a_mebi_of_characters_needs_no_normalizer() -> None:
    assert len(BUILT["byte_level"].encode("<|im_end|>" * 2**17)) == 2**17
