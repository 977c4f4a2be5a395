"""Chat templates of vision-language models say what transformers makes them say of images, and
those of other models nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from edgespec.errors import BundleError, RequestError
from edgespec.prompts import ImageItem, Message
from edgespec.prompts.named_templates import NAMED_TEMPLATES
from edgespec.prompts.template import RawTemplate, named_template, read_template

# As published, without the parts for tools
QWEN2_5_VL = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_VL = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].content is string %}
        {{- messages[0].content }}
    {%- else %}
        {%- for content in messages[0].content %}
            {%- if 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set image_count = namespace(value=0) %}
{%- set video_count = namespace(value=0) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content in message.content %}
                {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                    {%- set image_count.value = image_count.value + 1 %}
                    {%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif content.type == 'video' or 'video' in content %}
                    {%- set video_count.value = video_count.value + 1 %}
                    {%- if add_vision_id %}Video {{ video_count.value }}: {% endif -%}
                    <|vision_start|><|video_pad|><|vision_end|>
                {%- elif 'text' in content %}
                    {{- content.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content_item in message.content %}
                {%- if 'text' in content_item %}
                    {{- content_item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
A, B = ImageItem("a.png"), ImageItem("b.png")
CONVERSATIONS = [
    [Message.of("user", [A, "What is it?"])],
    [Message.of("user", ["First ", A, " then ", B, "?"])],
    [
        Message("system", "Be brief."),
        Message.of("user", [A]),
        Message("assistant", "A ship."),
        Message("user", "Which colour?"),
        Message("assistant", "Red."),
        Message.of("user", [B, A, "And these?"]),
    ],
]


def saved(directory: Path, template: str) -> Path:
    raw = json.dumps({"chat_template": template})
    (directory / "tokenizer_config.json").write_text(raw)
    return directory


def render(directory: Path, messages: list[Message]) -> str:
    return read_template(directory).render(messages)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "two", "turns"])
@pytest.mark.parametrize("template", [QWEN2_5_VL, QWEN3_VL], ids=["qwen2.5-vl", "qwen3-vl"])
def test_images_are_rendered_as_transformers_renders_them(
    tmp_path: Path, template: str, messages: list[Message]
) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template
    )
    conversation = [message.to_dict() for message in messages]
    expected = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    found = render(saved(tmp_path, template), messages)
    assert found == expected
    assert found.count(MARK) == sum(len(message.images) for message in messages)


def test_a_text_alone_stays_a_text_for_the_template(tmp_path: Path) -> None:
    saved(tmp_path, "{{ messages[0].content is string }}{{ 'image' in 'x' }}")
    assert render(tmp_path, [Message("user", "Hi")]) == "TrueFalse"
    assert render(tmp_path, [Message.of("user", ["Hi", A])]) == "FalseFalse"


@pytest.mark.parametrize(
    "template",
    [
        NAMED_TEMPLATES["chatml"],
        NAMED_TEMPLATES["llama-3"],  # it would print the list of items
        "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}",
        "{# image #}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_without_images_is_refused_where_there_is_one(
    tmp_path: Path, template: str
) -> None:
    saved(tmp_path, template)
    with pytest.raises(RequestError, match="chat template knows no images") as caught:
        render(tmp_path, [Message.of("user", [A, "What is it?"])])
    assert "vision-language model" in caught.value.remedy


def test_templates_that_are_none_refuse_images(tmp_path: Path) -> None:
    messages = [Message.of("user", [A, "What is it?"])]
    with pytest.raises(RequestError, match="knows no images"):
        RawTemplate().render(messages)
    with pytest.raises(RequestError, match="knows no images"):
        named_template("chatml", tmp_path).render(messages)


def flat(directory: Path, content_types: Any) -> Path:
    roles = {"user": {"prefix": "<u>", "suffix": "</u>"}}
    raw = {"roles": roles, "content_types": content_types, "generation_prompt": "<a>"}
    (directory / "processed_chat_template.json").write_text(json.dumps(raw))
    return directory


def test_a_flattened_template_has_its_own_mark_of_an_image(tmp_path: Path) -> None:
    flat(tmp_path, {"image": {"format": MARK}, "video": {"format": "<v>"}})
    found = render(tmp_path, [Message.of("user", ["See ", A, B, "!"])])
    assert found == f"<u>See {MARK}{MARK}!</u><a>"


@pytest.mark.parametrize("content_types", [None, {}, {"image": None}, {"image": {"format": None}}])
def test_a_flattened_template_without_images_refuses_them(
    tmp_path: Path, content_types: object
) -> None:
    with pytest.raises(RequestError, match="knows no images"):
        render(flat(tmp_path, content_types), [Message.of("user", [A])])
    assert render(tmp_path, [Message("user", "Hi")]) == "<u>Hi</u><a>"


@pytest.mark.parametrize("content_types", [3, {"image": "x"}, {"image": {"format": 3}}])
def test_a_flattened_template_with_a_damaged_mark_is_refused(
    tmp_path: Path, content_types: object
) -> None:
    with pytest.raises(BundleError, match="content_types"):
        read_template(flat(tmp_path, content_types))


def test_the_template_of_an_older_processor_wins_over_that_of_its_tokenizer(
    tmp_path: Path,
) -> None:
    saved(tmp_path, "of the tokenizer")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": QWEN2_5_VL}))
    assert MARK in render(tmp_path, CONVERSATIONS[0])
    (tmp_path / "chat_template.json").write_text("{}")
    assert render(tmp_path, [Message("user", "Hi")]) == "of the tokenizer"
    (tmp_path / "chat_template.json").write_text('{"chat_template": 3}')
    with pytest.raises(BundleError, match=r"chat_template.json: chat_template is neither"):
        read_template(tmp_path)
