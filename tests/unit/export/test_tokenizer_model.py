"""tokenizer.model as tokenizer.json: the ids of the SentencePiece model itself, or a refusal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from edgespec.checkpoint.files import Checkpoint
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.export import tokenizer_model
from edgespec.export.sidecars import copy_tokenizer
from edgespec.runtime.text.tokenizer import Tokenizer
from tests import shared, toys
from tests.toys.tokenizer import _TEXT

BOS, EOS, FIRST_BYTE = 1, 2, 3
VICUNA = {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>"}
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "digits-together": {"split_digits": False},
    "no-dummy-prefix": {"add_dummy_prefix": False},
    "no-bytes": {"byte_fallback": False},
    "symbols": {"user_defined_symbols": ["<foo>"], "add_dummy_prefix": False},
}


def make_model(path: Path, **keys: Any) -> Path:
    """A tokenizer.model of another form than Llama's."""
    path.mkdir(exist_ok=True)
    model, form = io.BytesIO(), {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.splitlines()),
        model_writer=model,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=3,
        **form | {"normalization_rule_name": "identity", "remove_extra_whitespaces": False} | keys,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return path


def made(form: str) -> tuple[sentencepiece.SentencePieceProcessor, tokenizers.Tokenizer]:
    def make(path: Path) -> None:
        tokenizer_model.convert(make_model(path, **FORMS[form]), path)

    path = shared.made_once(("a converted tokenizer", form), make)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    return processor, tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))


WORDS = st.sampled_from(["the ", " boat", "42", "\n\n", "▁", "é", "日本", "🚀", "\x00", "def add("])
SOME_TEXT = st.lists(WORDS | st.text(max_size=6), max_size=8).map("".join)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(text=SOME_TEXT)
def test_ids_and_texts_are_the_models_own(form: str, text: str) -> None:
    processor, tokenizer = made(form)
    text = text.replace("<", "")  # what spells a special token is one, as everywhere
    ids = processor.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.encode(text).ids == [BOS, *ids]
    if form != "no-bytes":  # what is unknown has no text
        assert tokenizer.decode(ids) == processor.decode(ids)


@pytest.mark.parametrize("text", [" a", "  a", " \n ", "a "])
def test_spaces_at_both_ends_are_kept(text: str) -> None:
    """The text gets its dummy prefix even where it begins with a space."""
    processor, tokenizer = made("llama")
    assert tokenizer.encode(text, add_special_tokens=False).ids == processor.encode(text)


def test_bytes_stand_for_what_has_no_piece() -> None:
    _, tokenizer = made("llama")
    ids = tokenizer.encode("🚀", add_special_tokens=False).ids
    assert ids[-4:] == [FIRST_BYTE + byte for byte in "🚀".encode()]


def test_special_tokens_in_a_text_are_tokens_and_what_follows_is_cut_as_a_text() -> None:
    processor, tokenizer = made("llama")
    ids = tokenizer.encode("yes</s>USER: no", add_special_tokens=False).ids
    assert ids == [*processor.encode("yes"), EOS, *processor.encode("USER: no")]


@pytest.mark.parametrize(
    ("settings_", "begins", "ends"),
    [
        (None, [BOS], []),
        (VICUNA, [BOS], []),
        (VICUNA | {"add_bos_token": False}, [], []),
        (VICUNA | {"add_eos_token": True, "eos_token": {"content": "</s>"}}, [BOS], [EOS]),
    ],
)
def test_a_text_begins_and_ends_as_the_config_says(
    tmp_path: Path, settings_: dict[str, Any] | None, begins: list[int], ends: list[int]
) -> None:
    toys.make_sentencepiece(tmp_path)
    if settings_ is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    (tmp_path / "out").mkdir()
    tokenizer_model.convert(tmp_path, tmp_path / "out")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    inner = tokenizer.encode("one two", add_special_tokens=False).ids
    assert tokenizer.encode("one two").ids == [*begins, *inner, *ends]


def test_without_a_config_the_special_tokens_are_written(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", layers=1, vocab=512)
    toys.make_sentencepiece(base)
    out = tmp_path / "out"
    out.mkdir()
    copy_tokenizer(Checkpoint(base), out)
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (out / "tokenizer.model").is_file()
    tokenizer = Tokenizer.open(out)
    assert tokenizer.is_special(EOS)
    assert tokenizer.encode("a", add_special_tokens=True)[0] == BOS


def test_tokens_beyond_the_model_keep_their_ids(tmp_path: Path) -> None:
    toys.make_sentencepiece(tmp_path)
    size = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model")).vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size, "<x>": size + 1}))
    listed = {str(size): {"content": "<pad>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    (tmp_path / "out").mkdir()
    tokenizer_model.convert(tmp_path, tmp_path / "out")
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert (found.token_to_id("<pad>"), found.token_to_id("<x>")) == (size, size + 1)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 5}))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=f"cannot have the id {size + 5}"):
        tokenizer_model.convert(tmp_path, tmp_path / "out")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unigram": ({"model_type": "unigram", "vocab_size": 340}, UnsupportedModel, "than BPE"),
    "words": ({"model_type": "word", "vocab_size": 60}, UnsupportedModel, "than BPE"),
    "characters that are replaced": (
        {"normalization_rule_name": "nmt_nfkc"},
        CheckpointError,
        "cannot be converted",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_cut_otherwise_is_refused(tmp_path: Path, case: str) -> None:
    keys, error, words = REFUSED[case]
    keys = keys if keys.get("model_type") != "word" else keys | {"byte_fallback": False}
    with pytest.raises(error, match=words):
        tokenizer_model.convert(make_model(tmp_path, **keys), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("data", [b"", b"\0" * 40, b"not a model"])
def test_a_damaged_model_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        tokenizer_model.convert(tmp_path, tmp_path)


def longer_piece(model: Any) -> None:
    model.pieces.add(piece="q" * 10_000, score=-900.0)


def long_pieces(model: Any) -> None:
    for index in range(20):
        model.pieces.add(piece=f"{index:02}" * 4000, score=-900.0 - index)


def growing_table(model: Any) -> None:
    table = (4).to_bytes(4, "little") + b"trie" + b"x" * 500 + b"\0"
    model.normalizer_spec.precompiled_charsmap = table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (longer_piece, "a piece has 10000 characters, and 8192 is the limit"),
        (long_pieces, "420 pieces are long, up to 8000 characters"),
        (growing_table, "normalizer_spec makes a text more than 128 times as long"),
    ],
)
def test_pieces_and_tables_beyond_any_in_use_are_refused(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    path = toys.make_sentencepiece(tmp_path) / "tokenizer.model"
    model.ParseFromString(path.read_bytes())
    del model.pieces[400:]
    change(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=words) as refused:
        tokenizer_model.convert(tmp_path, tmp_path)
    assert str(path) in refused.value.what


def test_an_added_token_beyond_any_in_use_is_refused(tmp_path: Path) -> None:
    toys.make_sentencepiece(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"x" * 10_000: 1000}))
    with pytest.raises(CheckpointError, match=r"added_tokens\.content has 10000 characters"):
        tokenizer_model.convert(tmp_path, tmp_path)


def test_a_wrong_merge_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares with the model, whatever the conversion made."""
    right = tokenizer_model.merges
    monkeypatch.setattr(tokenizer_model, "merges", lambda pieces: right(pieces)[::-1])
    with pytest.raises(CheckpointError, match="cannot be converted"):
        tokenizer_model.convert(toys.make_sentencepiece(tmp_path), tmp_path)
