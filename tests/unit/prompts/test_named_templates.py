"""Chat templates by name, as the families' papers and model cards write their prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import RequestError
from edgespec.prompts import Message
from edgespec.prompts.named_templates import NAMED_TEMPLATES
from edgespec.prompts.rendering import Rendering
from edgespec.prompts.template import RawTemplate, named_template

TALK = [
    Message("system", "Be brief."),
    Message("user", "Hi"),
    Message("assistant", "Yes?"),
    Message("user", "Go"),
]
PROMPTS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nGo<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
    "<start_of_turn>model\nYes?<end_of_turn>\n<start_of_turn>user\nGo<end_of_turn>\n"
    "<start_of_turn>model\n",
    "phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes?<|end|>\n"
    "<|user|>\nGo<|end|>\n<|assistant|>\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nYes?</s>\n"
    "<|user|>\nGo</s>\n<|assistant|>\n",
    "vicuna": "<s>Be brief. USER: Hi ASSISTANT: Yes?</s>USER: Go ASSISTANT:",
    "llama-2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes? </s><s>[INST] Go [/INST]",
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYes?\n\n"
    "### Instruction:\nGo\n\n### Response:\n",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_named_template_writes_the_published_form(name: str, model: Path) -> None:
    template = named_template(name, model)
    prompt = template.render(TALK)
    assert prompt == PROMPTS[name]
    assert not template.knows_thinking()


def test_vicuna_has_a_system_prompt_of_its_own(model: Path) -> None:
    template = named_template("vicuna", model)
    prompt = template.render(TALK[1:2])
    assert prompt == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant"
        " gives helpful, detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:"
    )


def test_llama_2_without_a_system_prompt(model: Path) -> None:
    template = named_template("llama-2", model)
    prompt = template.render(TALK[1:2])
    assert prompt == "<s>[INST] Hi [/INST]"


def test_template_may_be_a_file(model: Path) -> None:
    (model / "mine.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    template = named_template(str(model / "mine.jinja"), model)
    rendered = template.render(TALK)
    assert rendered == "Be brief.</s>"


def test_neither_name_nor_file_is_refused(model: Path) -> None:
    with pytest.raises(RequestError, match="no chat template 'chatlm'") as refused:
        named_template("chatlm", model)
    assert "chatml" in refused.value.remedy


def test_raw_messages_are_joined_and_want_the_tokens_that_begin_a_text() -> None:
    template = RawTemplate()
    assert template.render(TALK[1:3]) == ("Hi\nYes?")
    assert not template.has_special_tokens
    with pytest.raises(RequestError, match="no thinking mode"):
        template.render(TALK, Rendering(enable_thinking=True))
