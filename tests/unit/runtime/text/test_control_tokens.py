"""A control token that a user spells is text, for every kind of tokenizer; the template's own are
what they were."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from edgespec.errors import RequestError
from edgespec.prompts import Message
from edgespec.prompts.rendering import Rendering
from edgespec.prompts.template import JinjaTemplate
from edgespec.runtime.limits import RequestLimits
from edgespec.runtime.text.prompt_encoder import PromptEncoder
from edgespec.runtime.text.tokenizer import Tokenizer
from tests.unit.runtime.text.test_tokenizer import BUILDERS

CHAT = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content | trim }}{% for call in message.tool_calls %}{{ call | tojson }}{% endfor -%}
<|im_end|>
{% endfor %}<|im_start|>"""
AS_TEXT = Rendering(allow_control_tokens=False)


class NoLimits(RequestLimits):
    def check_text(self, text: str, chars_per_token: object) -> None:
        pass


def encoder(name: str, template: str = CHAT) -> PromptEncoder:
    raw = BUILDERS[name]()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(t, raw.token_to_id(t)) for t in ("<|im_start|>", "<|im_end|>")],
    )
    return PromptEncoder(Tokenizer(raw, JinjaTemplate(template, {})), NoLimits({}, 1))


ENCODERS = {name: encoder(name) for name in BUILDERS}


def text_only(raw: tokenizers.Tokenizer, text: str) -> list[int]:
    """As the library itself encodes special tokens as text."""
    raw.encode_special_tokens = True
    try:
        return list(raw.encode(text, add_special_tokens=False).ids)
    finally:
        raw.encode_special_tokens = False


PIECES = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "a", " ", "\n", "é"])
TEXTS = st.lists(PIECES, max_size=6).map("".join)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(first=TEXTS, second=TEXTS)
def test_ids_are_those_of_an_encoding_without_control_tokens_in_the_texts(
    name: str, first: str, second: str
) -> None:
    """The reference encodes what stands between two of the template's tokens by itself."""
    prompts, raw = ENCODERS[name], ENCODERS[name].tokenizer._tokenizer
    start, end = (raw.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    wanted = []
    for text in (first, second):
        wanted += [start, *text_only(raw, f"user\n{text.strip()}"), end, *text_only(raw, "\n")]
    messages = [Message("user", first), Message("user", second)]
    found = prompts.encode(messages, AS_TEXT)
    assert list(found) == [*wanted, start]
    assert prompts.tokenizer.decode(found, skip_special_tokens=False) == prompts.render(
        messages
    ) or (
        name == "byte_fallback"  # its decoder drops spaces
    )


@pytest.mark.parametrize("name", BUILDERS)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1\ufdd2"), max_size=40)
)
def test_other_texts_have_the_ids_that_they_have_anyway(name: str, text: str) -> None:
    prompts = ENCODERS[name]
    messages = [Message("user", text + "<")]  # which might become a token, and is marked
    assert prompts.encode(messages, AS_TEXT) == prompts.encode(messages)
    assert prompts.encode(text + "<", AS_TEXT) == prompts.encode(text + "<")


def test_a_token_may_not_be_made_of_two_texts() -> None:
    template = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
    prompts = encoder("byte_level", template)
    halves = [Message("user", "a<|im_ "), Message("user", "end|>")]
    end = prompts.tokenizer.token_id("<|im_end|>")
    assert end in prompts.encode(halves)
    assert end not in prompts.encode(halves, AS_TEXT)


def test_calls_and_thoughts_are_texts_too() -> None:
    prompts = ENCODERS["byte_level"]
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>"]}}}
    message = Message("assistant", "", tool_calls=[call], reasoning_content="<|im_end|>")
    found = prompts.encode([message], AS_TEXT)
    for token, times in (("<|im_start|>", 2), ("<|im_end|>", 1)):
        assert list(found).count(prompts.tokenizer.token_id(token) or -1) == times
    assert prompts.tokenizer.decode(found, skip_special_tokens=False) == prompts.render([message])


@pytest.mark.parametrize(
    ("name", "template", "text", "said"),
    [
        ("byte_level", CHAT, "\ufdd0<|im_end|>", "U\\+FDD0"),
        ("byte_level", "{{ '<|im_end|>' in messages[0].content }}", "<|im_end|>", "does not take"),
        ("metaspace", CHAT, "</s>", "makes a control token"),
    ],
)
def test_what_cannot_stay_text_is_refused(name: str, template: str, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        encoder(name, template).encode([Message("user", text)], AS_TEXT)
