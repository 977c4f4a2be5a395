"""Text survives the way to ids and back, in a stream as at once, and templates say what transformers makes them say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from edgespec.errors import BundleError, RequestError
from edgespec.prompts import Message
from edgespec.runtime.tokenizer import TextStream, Tokenizer

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

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

INSTRUCT = """\
{{ bos_token }}
{% set ns = namespace(system='') %}
{% for message in messages if message['role'] == 'system' %}
{% set ns.system = message['content'] | trim %}
{% endfor %}
{% for message in messages %}
    {% if message['role'] == 'user' %}
[INST] {{ ns.system }}{{ unk_token }}{{ {'said': message['content']} | tojson }} [/INST]
    {% elif message['role'] == 'assistant' %}
 {{ message['content'] | trim }}{{ eos_token }}
    {% elif message['role'] == 'tool' %}
        {{ raise_exception('Roles must alternate between user and assistant.') }}
    {% endif %}
{% endfor %}
"""

CONVERSATION = [
    Message("system", " Be brief. "),
    Message("user", "Is 3 < 4 & \"é\" > 'e'?\n"),
    Message("assistant", " Yes 😀 "),
    Message("user", "Why?"),
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
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 120, show_progress=False, special_tokens=["<unk>", *byte_tokens], limit_alphabet=60
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
        vocab_size=200, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>",
        initial_alphabet=alphabet,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_plain_vocabulary(tokenizer: tokenizers.Tokenizer, names: list[str]) -> tokenizers.Tokenizer:
    """The trainer knows its byte tokens as special ones only; in real files they are ordinary entries."""
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in names]
    found: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    return found


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
}
BUILT = {name: Tokenizer(build(), chat_template=None, special_tokens={}) for name, build in BUILDERS.items()}


def save(directory: Path, config: dict[str, object], tokenizer: tokenizers.Tokenizer | None = None) -> Path:
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    text_stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(text_stream.push(token_id) for token_id in ids), text_stream.flush()]


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_survives_ids_and_stream(name: str, text: str) -> None:
    tokenizer = BUILT[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)) == text


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


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", BUILT)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_of_any_ids_is_decode_of_all_ids(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    tokenizer = BUILT[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    deltas = stream(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_invalid_bytes_after_valid_ones_do_not_break_the_stream() -> None:
    """The case in which tokenizers' own DecodeStream raises."""
    tokenizer = BUILT["byte_fallback"]
    ids = [*tokenizer.encode("fox 😀"), tokenizer.token_id("<0xFF>") or 0, *tokenizer.encode("dog")]
    assert "\ufffd" in tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_token_without_text_does_not_cost_the_next_one_its_space() -> None:
    raw = tokenizers.Tokenizer(models.BPE(vocab={"": 0, "▁a": 1, "▁b": 2}, merges=[]))
    raw.decoder = byte_fallback().decoder
    tokenizer = Tokenizer(raw, chat_template=None, special_tokens={})
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


def test_special_tokens_are_added_only_on_request_and_skipped_in_text(tmp_path: Path) -> None:
    raw = byte_level()
    start = raw.token_to_id("<|im_start|>")
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    tokenizer = Tokenizer.open(save(tmp_path, {}, raw))
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


def test_truncation_and_padding_of_the_file_do_not_touch_a_prompt(tmp_path: Path) -> None:
    raw = byte_level()
    whole = raw.encode(CORPUS[0]).ids
    raw.enable_truncation(4)
    raw.enable_padding(length=500)
    assert Tokenizer.open(save(tmp_path, {}, raw)).encode(CORPUS[0]) == whole


@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, INSTRUCT])
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:2]])
def test_render_says_what_transformers_says(
    tmp_path: Path, template: str, messages: list[Message], add_generation_prompt: bool, enable_thinking: bool
) -> None:
    bos = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    config = {"bos_token": bos, "eos_token": "<|im_end|>", "unk_token": None, "chat_template": template}
    ours = Tokenizer.open(save(tmp_path, config))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=template
    )
    expected = theirs.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )
    rendered = ours.render(messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking)
    assert rendered == expected
    assert messages[-1].content in rendered or json.dumps(messages[-1].content, ensure_ascii=False) in rendered


def render(directory: Path) -> str:
    return Tokenizer.open(directory).render(CONVERSATION, add_generation_prompt=True, enable_thinking=False)


def test_template_file_wins_over_the_config_and_a_list_gives_its_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "from the list"}]
    save(tmp_path, {"chat_template": named})
    assert render(tmp_path) == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render(tmp_path) == "from the file"


def test_missing_template_is_refused_only_when_wanted(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(save(tmp_path, {}))
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.render(CONVERSATION, add_generation_prompt=True, enable_thinking=False)
    assert '"apply_chat_template": false' in caught.value.remedy


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Only one turn.') }}", "Only one turn"),
        ("{{ messages[0].content + 3 }}", "can only concatenate"),
        ("{{ messages[99].content.x }}", "has no element 99"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in messages %}", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for i in range(10000000) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{# " + "x" * 2**20 + " #}", "is the limit"),
    ],
)
def test_template_that_fails_or_reaches_out_of_its_sandbox_is_refused(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(save(tmp_path, {"chat_template": template}))
    assert said in caught.value.what
    assert '"apply_chat_template": false' in caught.value.remedy


def test_missing_or_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is damaged"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(BundleError, match="cannot be read"):
        Tokenizer.open(tmp_path)
    save(tmp_path, {"chat_template": 3})
    with pytest.raises(BundleError, match="chat_template is neither"):
        Tokenizer.open(tmp_path)
    for damaged in ("[", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(BundleError, match="tokenizer_config"):
            Tokenizer.open(tmp_path)
