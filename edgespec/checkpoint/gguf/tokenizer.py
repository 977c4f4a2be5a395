"""tokenizer.json of a GGUF file's `tokenizer.ggml.*`: byte-level BPE by the name of its
pre-tokenizer, and SentencePiece's pieces with their scores.

Knows what tokenizer.json says. A file names its splits and normalizer alone; what they are stands
in `_ROWS`, as the models' own tokenizer.json and llama.cpp's `llm_tokenizer_bpe` have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.checkpoint.gguf.header import Metadata
from edgespec.errors import CheckpointError, UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # of tokenizer.ggml.token_type
KINDS = ("bos", "eos", "unk", "pad", "eot", "eom")
_SPACE = "\u2581"  # SentencePiece writes a space as this
MAX_PIECES_WORK = 2**30  # of cutting pieces in two: 256,000 of 16 characters have 2**26
# Ids of SentencePiece's files that do not say them
_LLAMA_IDS = {"unk": 0, "bos": 1, "eos": 2}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(letters: str, digits: str) -> str:
    """GPT-4's split: contractions, words with the mark before them, digits, marks, spaces."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(tail: str, digits: str) -> str:
    """GPT-4o's split, which also begins a word at a capital."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{_UPPER}]*[{_LOWER}]+{tail}|{before}[{_UPPER}]+[{_LOWER}]*{tail}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _bytes(own_split: bool) -> dict[str, Any]:
    """ByteLevel; `own_split` at GPT-2's words."""
    steps = {"add_prefix_space": False, "trim_offsets": True, "use_regex": own_split}
    return {"type": "ByteLevel", **steps}


def _points(ranges: str) -> str:
    """Code points and ranges of them, in hexadecimal, as a class of an expression."""
    return re.sub(r"[0-9a-f]+", r"\\x{\g<0>}", ranges).replace(" ", "")


_DIGIT = {"type": "Digits", "individual_digits": True}
_CJK, _KANA = (
    r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+",
)
# Letters that have a case, as DeepSeek's tokenizer.json lists them: code points and ranges
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f "
    "386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943 "
)
_MARKS = r"!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """What a name in tokenizer.ggml.pre stands for."""

    names: tuple[str, ...]
    splits: tuple[str | dict[str, Any], ...]  # an expression, or a step of tokenizer.json
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is not merged
    add_bos: bool = False  # where the file does not say it


_ROWS = (
    _Pre(("gpt-2", "phi-2"), (_bytes(True),)),
    _Pre(("smollm", "starcoder", "refact"), (_DIGIT, _bytes(True))),
    _Pre(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"),
        (_words(r"\p{L}", r"\p{N}{1,3}"),),
        whole_words=True,
        add_bos=True,
    ),
    _Pre(("dbrx", "smaug-bpe"), (_words(r"\p{L}", r"\p{N}{1,3}"),)),
    _Pre(("qwen2", "deepseek-r1-qwen"), (_words(r"\p{L}", r"\p{N}"),), nfc=True),
    _Pre(("qwen35",), (_words(r"\p{L}\p{M}", r"\p{N}"),), nfc=True),
    _Pre(("tekken",), (_cased_words("", r"\p{N}"),), whole_words=True, add_bos=True),
    _Pre(("gpt-4o",), (_cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
    _Pre(
        ("deepseek-llm",),
        (
            *("[\r\n]", rf"\s?[{_points(_CASED)}]+", rf"\s?[{_MARKS}]+", r"\s+$", _CJK),
            _DIGIT,
        ),
    ),
    _Pre(("deepseek-coder",), ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    _Pre(("deepseek-v3",), (r"\p{N}{1,3}", _KANA, _DEEPSEEK_V3)),
)
_PRES = {name: row for row in _ROWS for name in row.names}
# Phi-3's marks of turns take the spaces behind them along; its other control tokens do not
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file by id, their types, and the ids of those with a role."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: Mapping[str, int]  # of KINDS
    add_bos: bool
    add_eos: bool


def refusal(metadata: Metadata) -> UnsupportedModel | None:
    """The error for a tokenizer of a kind that this version does not know; None for others."""
    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model == "llama" or (model == "gpt2" and pre in _PRES):
        return None
    known = f"gpt2 with {', '.join(_PRES)}, and llama"
    return UnsupportedModel(
        f"tokenizer.ggml.model is {model!r:.40} and tokenizer.ggml.pre {pre!r:.40}, which this"
        f" version does not read; it reads {known}.",
        "Put the original model's tokenizer.json beside the GGUF file, where it is taken instead.",
    )


def vocabulary_of(metadata: Metadata) -> Vocabulary:
    """The tokens. Raises CheckpointError for lists and ids that do not fit."""
    tokens, types = _list(metadata, "tokens", str), _list(metadata, "token_type", int)
    if not tokens or len(types) != len(tokens):
        raise _misfit(f"{len(tokens)} tokens and {len(types)} token_type")
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    if spm:  # the converter wrote a space where the vocabulary has its mark
        tokens = [
            token.replace(" ", _SPACE) if kind == USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        ]
    first: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if first.setdefault(token, i) != i:
            raise _misfit(f"token {token!r:.80} as {first[token]} and as {i}")
    ids = {kind: i for kind, i in _LLAMA_IDS.items() if spm and i < len(tokens)}
    for kind in KINDS:
        value = metadata.get(key := f"tokenizer.ggml.{kind}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
            raise _misfit(f"{key} {value!r:.80} of {len(tokens)} tokens")
        ids |= {} if value is None else {kind: value}
    row = _PRES.get(str(metadata.get("tokenizer.ggml.pre")))
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", spm or bool(row and row.add_bos))
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return Vocabulary(tuple(tokens), tuple(types), ids, bool(add_bos), bool(add_eos))


def tokenizer_json(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The tokenizer.json. Raises CheckpointError for merges and scores that do not fit."""
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    steps = _pieces(metadata, vocabulary) if spm else _byte_level(metadata, vocabulary)
    return {
        "version": "1.0",
        "added_tokens": list(_added(metadata, vocabulary)),
        **steps,
        "post_processor": _around(vocabulary),
    }


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The steps of BPE over bytes."""
    row = _PRES[metadata["tokenizer.ggml.pre"]]
    merges = [merge.partition(" ") for merge in _list(metadata, "merges", str)]
    if wrong := next((merge for merge in merges if not merge[1]), None):
        raise _misfit(f"the merge {wrong[0]!r:.80}, which is not two tokens")
    steps: list[dict[str, Any]] = [
        step
        if isinstance(step, dict)
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in row.splits
    ]
    if steps[-1]["type"] != "ByteLevel":
        steps.append(_bytes(False))
    # Rows that only fill the embedding up are no tokens
    vocab = {
        token: i
        for i, token in enumerate(vocabulary.tokens)
        if vocabulary.types[i] != UNUSED or token != f"[PAD{i}]"
    }
    return {
        "normalizer": {"type": "NFC"} if row.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _bytes(True),
        "model": {
            "type": "BPE",
            "ignore_merges": row.whole_words,
            "vocab": vocab,
            "merges": [[left, right] for left, _, right in merges],
        },
    }


def _pieces(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """The steps of SentencePiece's BPE, whose merges are all pairs that make a piece, by its
    score."""
    scores = _list(metadata, "scores", float)
    if len(scores) != len(vocabulary.tokens) or not np.isfinite(scores).all():
        raise _misfit(f"{len(vocabulary.tokens)} tokens and {len(scores)} finite scores")
    if sum(len(token) ** 2 for token in vocabulary.tokens) > MAX_PIECES_WORK:
        raise _misfit(f"long pieces, up to {max(map(len, vocabulary.tokens))} characters")
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    pieces = {token: i for token, i in vocab.items() if kinds[token] in (NORMAL, USER_DEFINED)}
    ranks = {  # a piece of the user's own is joined before all others: its score means nothing
        token: math.inf if kinds[token] == USER_DEFINED else scores[i]
        for token, i in pieces.items()
    }
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.tokens[vocabulary.ids["unk"]],
            "fuse_unk": True,
            "byte_fallback": BYTE in vocabulary.types,
            "vocab": vocab,
            "merges": list(ranked_merges(ranks, pieces)),
        },
    }


def ranked_merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Both halves of every piece, however it may be cut, in the order in which they are joined: the
    best score first. SentencePiece keeps scores of pieces and no pairs."""
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        yield from sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _added(metadata: Metadata, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """Tokens that are found in a text before it is split."""
    name = str(metadata.get("general.name", "")).lower()
    spm_phi3 = "unk" in vocabulary.ids and ("phi-3" in name or "phi3" in name)
    for i, kind in enumerate(vocabulary.types):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            content = vocabulary.tokens[i]
            special = kind != USER_DEFINED
            yield {
                "id": i,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": spm_phi3 and special and content not in _KEEPS_SPACES,
                "normalized": False,
                "special": special,
            }


def _around(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """What is put before and behind a text."""
    wanted = (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos))
    ends = {kind: vocabulary.ids[kind] for kind, add in wanted if add and kind in vocabulary.ids}
    if not ends:
        return None

    def item(kind: str, type_id: int) -> list[dict[str, Any]]:
        token = {"id": vocabulary.tokens[ends[kind]], "type_id": type_id} if kind in ends else None
        return [{"SpecialToken": token}] if token else []

    def text(name: str, type_id: int) -> list[dict[str, Any]]:
        middle = [{"Sequence": {"id": name, "type_id": type_id}}]
        return item("bos", type_id) + middle + item("eos", type_id)

    tokens = {vocabulary.tokens[i]: i for i in ends.values()}
    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": text("A", 0) + text("B", 1),
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in tokens.items()},
    }


def _misfit(what: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.ggml has {what}.", "Download it again.")


def _list(metadata: Metadata, key: str, kind: type) -> list[Any]:
    """An array of metadata as a list of values of one type."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise CheckpointError(
            f"tokenizer.ggml.{key} is missing, or no array of {kind.__name__}.",
            "Download it again.",
        )
    return value
