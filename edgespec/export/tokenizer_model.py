"""A SentencePiece `tokenizer.model`, as Llama-2 and Vicuna publish it, as a tokenizer.json with the
same ids.

Knows SentencePiece's model file and the tokenizers library. What comes out is compared with the
model itself, text by text, before it is written: one that cuts otherwise is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.artifacts import file_names
from edgespec.checkpoint.gguf.tokenizer import MAX_PIECES_WORK, ranked_merges
from edgespec.checkpoint.source import read_json
from edgespec.errors import CheckpointError, MissingDependency, UnsupportedModel
from edgespec.safe_read.regular import read_regular
from edgespec.safe_read.tokenizer import MAX_GROWTH, MAX_TOKEN_CHARS, charsmap_growth, oversized

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

MODEL = "tokenizer.model"
REMEDY = "Put the model's tokenizer.json beside its weights, or download tokenizer.model again."
SPACE = "\u2581"  # what SentencePiece writes for a space
BPE = 2  # of its kinds of models the one that is converted
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # and of pieces
PIECES_A_TEXT = 64
# Texts in which tokenizers differ: spaces at both ends, bytes, what looks like a piece
TEXTS = (
    *("", " ", "a", " a", "  a", "a ", "a  b", "\n", " \n\n ", "a\tb\r\n", "don't", "e\u0301"),
    *("12 + 30 = 42", "na\u00efve caf\u00e9", "\u65e5\u672c\u8a9e", "\U0001f680\U0001f680"),
    *("\u00a0", "\u200b", "\ufb01", "\x00\x7f", SPACE, f"a{SPACE} {SPACE}b", "<0x0A>", "x" * 70),
)


def convert(source: Path, directory: Path) -> None:
    """Write tokenizer.json for the tokenizer.model of `source`, and where it has no
    tokenizer_config.json, one with its special tokens.

    A prompt begins with the token that begins a text unless the config says otherwise. Raises
    CheckpointError for a damaged model or one whose ids cannot be had, UnsupportedModel for other
    kinds than BPE, MissingDependency without sentencepiece.
    """
    processor, model = opened(source / MODEL)
    settings = read_optional(source / "tokenizer_config.json")
    tokenizer = converted(source, model, settings)
    compare(source / MODEL, processor, model, tokenizer)
    tokenizer.save(str(directory / file_names.TOKENIZER))
    if not (source / "tokenizer_config.json").is_file():
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(special_tokens(model), indent=2) + "\n", encoding="utf-8")


def opened(path: Path) -> tuple[Any, Any]:
    """SentencePiece's own processor of a file, and the file as its protobuf message."""
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        message = f"{path.parent} has only {MODEL}; converting it needs the package {error.name}"
        raise MissingDependency(
            message, "pip install 'edgespec[convert]', or add the model's tokenizer.json."
        ) from error
    try:
        data = read_regular(path)
        messages: Any = sentencepiece_model_pb2  # generated: it has no types
        model = messages.ModelProto.FromString(data)
        refuse_sizes(path, model)
        return sentencepiece.SentencePieceProcessor(model_proto=data), model
    except CheckpointError:
        raise
    except Exception as error:  # what the two libraries raise for any damage
        message = f"{path} is no SentencePiece model: {str(error).partition(chr(10))[0]:.200}"
        raise CheckpointError(message, REMEDY) from error


def refuse_sizes(path: Path, model: Any) -> None:
    """Raise CheckpointError for pieces that are longer than any in use, and for a table of
    characters that makes texts many times longer."""
    pieces = [piece.piece for piece in model.pieces]
    longest = max(map(len, pieces), default=0)
    if longest > MAX_TOKEN_CHARS:
        message = f"{path}: a piece has {longest} characters, and {MAX_TOKEN_CHARS} is the limit"
        raise CheckpointError(message, REMEDY)
    if sum(len(piece) ** 2 for piece in pieces) > MAX_PIECES_WORK:
        message = f"{path}: its {len(pieces)} pieces are long, up to {longest} characters"
        raise CheckpointError(message, REMEDY)
    if charsmap_growth(model.normalizer_spec.precompiled_charsmap) > MAX_GROWTH:
        message = f"{path}: normalizer_spec makes a text more than {MAX_GROWTH} times as long"
        raise CheckpointError(message, REMEDY)


def converted(source: Path, model: Any, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model, with what the settings add to it."""
    from tokenizers import Tokenizer, normalizers

    tokenizer = Tokenizer(rules(source / MODEL, model))
    steps = [*cleaned(model), normalizers.Replace(" ", SPACE)]
    if model.normalizer_spec.add_dummy_prefix:
        steps.insert(-1, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoder(model)
    own = [piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([added(token, special=True) for token in own])
    symbols = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    tokenizer.add_tokens([added(token) for token in symbols])
    add_others(source, tokenizer, settings)
    add_ends(tokenizer, model, settings)
    return tokenizer


def added(token: str, *, special: bool = False) -> AddedToken:
    """A token that is found in a text as it is."""
    from tokenizers import AddedToken

    return AddedToken(token, special=special, normalized=False)


def rules(path: Path, model: Any) -> Any:
    """How texts are cut into pieces."""
    from tokenizers import models

    spec, pieces = model.trainer_spec, model.pieces
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    if unknown is None:
        raise CheckpointError(f"{path} has no piece for what is unknown", REMEDY)
    if spec.model_type != BPE:
        message = f"{path} is a SentencePiece model of another kind than BPE"
        raise UnsupportedModel(message, "Put the model's tokenizer.json beside its weights.")
    return models.BPE(
        {piece.piece: i for i, piece in enumerate(pieces)},
        merges(pieces),
        unk_token=pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
    )


def merges(pieces: Any) -> list[tuple[str, str]]:
    """The pairs that become one piece, in the order in which they are joined."""
    others = (UNKNOWN, CONTROL, USER_DEFINED)
    scores = {piece.piece: piece.score for piece in pieces if piece.type not in others}
    return list(ranked_merges(scores, {piece.piece: i for i, piece in enumerate(pieces)}))


def cleaned(model: Any) -> list[Any]:
    """The steps before spaces are replaced: the model's own table of characters, and spaces that it
    drops."""
    from tokenizers import Regex, normalizers

    spec, steps = model.normalizer_spec, []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(pattern), text)
            for pattern, text in (("^ +", ""), (" +$", ""), (" {2,}", " "))
        ]
    return steps


def decoder(model: Any) -> Any:
    """How pieces become a text again."""
    from tokenizers import decoders

    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


# ---- what stands beside the model


def read_optional(path: Path) -> dict[str, Any]:
    """The JSON object of a file; nothing where there is none. Raises CheckpointError."""
    return read_json(path) if path.is_file() else {}


def add_others(source: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens that the checkpoint has beyond its model, each at the id that it says. Raises
    CheckpointError where there is no such id."""
    tokens: dict[int, AddedToken] = {}
    for text, number in read_optional(source / "added_tokens.json").items():
        tokens[number] = added(text)
    listed = settings.get("added_tokens_decoder")
    for key, entry in (listed if isinstance(listed, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isdigit():
            tokens[int(key)] = added(entry["content"], special=bool(entry.get("special")))
    contents = [{"content": token.content} for token in tokens.values()]
    if problem := oversized({"added_tokens": contents}):
        raise CheckpointError(f"{source}: {problem}", REMEDY)
    for number, token in sorted(tokens.items()):
        if tokenizer.id_to_token(number) == token.content:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != number:
            message = f"{source}: the added token {token.content!r:.60} cannot have the id {number}"
            raise CheckpointError(message, REMEDY)


def special_tokens(model: Any) -> dict[str, Any]:
    """The keys of a tokenizer_config.json that follow from a model alone."""
    spec, pieces = model.trainer_spec, {piece.piece for piece in model.pieces}
    roles = {"bos_token": spec.bos_piece, "eos_token": spec.eos_piece, "unk_token": spec.unk_piece}
    return {key: token for key, token in roles.items() if token in pieces}


def add_ends(tokenizer: Tokenizer, model: Any, settings: Mapping[str, Any]) -> None:
    """Let plain texts begin with the token that begins one, as LlamaTokenizer does by default, and
    end with one where the settings say so."""
    from tokenizers import processors

    known, parts, ids = special_tokens(model), ["$A"], {}
    for key, by_default, place in (("bos", True, 0), ("eos", False, 2)):
        token = settings.get(f"{key}_token", known.get(f"{key}_token"))
        token = token.get("content") if isinstance(token, dict) else token
        wanted = settings.get(f"add_{key}_token", by_default)
        if wanted and isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            parts.insert(place, token)
            ids[token] = tokenizer.token_to_id(token)
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=list(ids.items())
        )


# ---- the proof


def compare(path: Path, processor: Any, model: Any, tokenizer: Tokenizer) -> None:
    """CheckpointError with the first text that is cut otherwise than by the model itself."""
    special = [piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL)]
    for text in texts(model):
        if any(token in text for token in special):
            continue
        wanted, ours = processor.encode(text), tokenizer.encode(text, add_special_tokens=False).ids
        if wanted != ours:
            message = (
                f"{path} cannot be converted: {text[:40]!r} is {wanted[:8]} by the model and"
                f" {ours[:8]} by a tokenizer.json"
            )
            raise CheckpointError(message, REMEDY)


def texts(model: Any) -> Iterator[str]:
    """Texts that use every piece, and those in which tokenizers differ."""
    yield from TEXTS
    pieces = [piece.piece.replace(SPACE, " ") for piece in model.pieces]
    for start in range(0, len(pieces), PIECES_A_TEXT):
        some = pieces[start : start + PIECES_A_TEXT]
        yield "".join(some)
        yield " ".join(some)
