"""Toy tokenizers: a byte-level BPE as tokenizer.json, and SentencePiece as tokenizer.model.

Trains them on a page of text. Knows nothing of models.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

from tests.toys.files import write_json

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
ENDOFTEXT, IM_START, IM_END = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = """\
The small boat left the harbour before the sun was up, and nobody on the shore saw where it went.
A draft model proposes several words; the larger model reads them all at once and keeps what it would have said.
If the first word is wrong, then the second word does not matter. If the first word is right, go on to the next.
We count the words that stand: one, two, three, four, five, six, seven, eight, nine, ten.
Question: what is 12 + 30? Answer: 42. Question: what is 7 * 8? Answer: 56.
def add(left, right):
    return left + right
In the morning the children walked to school along the river; in the evening they walked home over the hill.
Rain fell on the roof, on the road and on the fields, and the water ran down to the valley where the mill stands.
Every tree has a root, every branch has a parent, and every leaf has a path that leads back to the ground.
She asked whether the machine could think. It answered that it could count, and that counting was enough for today.
"""


def make_sentencepiece(
    path: str | Path, *, vocab: int = 400, tokenizer_config: bool = False
) -> Path:
    """Give `path` a SentencePiece `tokenizer.model` (BPE, byte fallback) and nothing else that is a
    tokenizer.

    Files of a fast tokenizer that are there already are removed. Ids: <unk> 0, <s> 1, </s> 2, then
    the 256 bytes; the trained vocabulary has at most `vocab` pieces. With `tokenizer_config`, a
    LlamaTokenizer config is written too.
    """
    import sentencepiece

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (path / name).unlink(missing_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=3,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    if tokenizer_config:
        write_json(
            path / "tokenizer_config.json",
            {
                "add_bos_token": True,
                "add_eos_token": False,
                "bos_token": "<s>",
                "eos_token": "</s>",
                "legacy": False,
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
            },
        )
    return path


def write_tokenizer(path: Path, vocab: int, max_position: int) -> None:
    (path / "tokenizer.json").write_text(_train_bpe(vocab), encoding="utf-8")
    added = {
        str(i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    write_json(
        path / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": max_position,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


@cache
def _train_bpe(vocab: int) -> str:
    """A byte-level BPE of at most `vocab` ids. Below 300 only ASCII is in the alphabet: 256 bytes
    would not fit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 110:
        raise ValueError(
            f"a vocabulary of {vocab} cannot hold ASCII and {len(SPECIAL_TOKENS)} special tokens"
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < 300:
        ascii_text = "".join(map(chr, range(32, 127))) + "\n\t"
        alphabet = sorted(
            {char for piece, _ in byte_level.pre_tokenize_str(ascii_text) for char in piece}
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() <= vocab
    return tokenizer.to_str(pretty=False)
