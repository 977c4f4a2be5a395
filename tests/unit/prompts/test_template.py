"""Templates say what transformers makes them say, the flattened ones what their file says, and
hostile ones nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from edgespec.errors import BundleError, RequestError
from edgespec.prompts import Message
from edgespec.prompts.rendering import Rendering
from edgespec.prompts.template import read_template
from edgespec.runtime.text.prompt import read_messages
from tests import toys

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

# As the large templates of today are written: macros, slices, namespaces, methods of texts.
MODERN = """\
{%- macro show(content, prefix='') %}{{ prefix ~ content | string | trim }}{%- endmacro %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role in ['user', 'assistant', 'system'] %}
    {%- set ns.seen = ns.seen + [message.role] %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n').replace('é', 'e') %}
    {{- '%s|%02d' % (message.role, loop.index) ~ '{:>4}|'.format(loop.length) ~ '-' * 3 }}
    {%- set shown %}{{ show(content, prefix='> ') }}{% endset %}
    {{- shown | indent(2) }}{{ {'k': [content, loop.first], 'n': none} | tojson(indent=2) }}
    {%- if loop.index0 == ns.last %}{{ ' last' | upper }}{% endif %}
{% endfor %}
{{- ns.seen | join(', ') }} {{ messages | map(attribute='role') | unique | list }} {{ (2 ** 10 / 3) | round(2) }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ ns.seen[1:] }}{{ 'x'.center(5) }}
{%- if add_generation_prompt %}<go>{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}
"""

CONVERSATION = [
    Message("system", " Be brief. "),
    Message("user", "Is 3 < 4 & \"é\" > 'e'?\n"),
    Message("assistant", " Yes 😀 "),
    Message("user", "Why?"),
]


def save(directory: Path, config: dict[str, object]) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def render(
    directory: Path,
    messages: list[Message] = CONVERSATION,
    **asked: Any,
) -> str:
    return read_template(directory).render(messages, Rendering(**asked))


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "enable_thinking"),
    [(CHATML, False), (CHATML, True), (INSTRUCT, False), (MODERN, False), (MODERN, True)],
    ids=["chatml", "chatml-thinking", "instruct", "modern", "modern-thinking"],
)
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:2]])
def test_render_says_what_transformers_says(
    tmp_path: Path,
    template: str,
    messages: list[Message],
    add_generation_prompt: bool,
    enable_thinking: bool,
) -> None:
    bos = {"__type": "AddedToken", "content": "<s>", "special": True}
    save(
        tmp_path,
        {"bos_token": bos, "eos_token": "</s>", "unk_token": None, "chat_template": template},
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    expected = theirs.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )
    rendered = render(
        tmp_path,
        messages,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )
    assert rendered == expected
    assert "Why?" in rendered or "Is 3 < 4" in rendered


TOOLS = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{% for message in messages %}
<{{ message.role }}>{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{ message.content }}{% for call in message.tool_calls %}
[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }} {{ call.function.arguments.text }}]
{% endfor %}{% if message.role == 'tool' %}{{ message.tool_call_id }} {{ message.name }}{% endif %}
{% endfor %}{{ reasoning_effort }}{% if enable_thinking %}<think>{% endif %}
"""
WEATHER = {
    "type": "function",
    "function": {"name": "say", "parameters": {"type": "object", "properties": {"text": {}}}},
}
AGENT = [
    {"role": "user", "content": "Say é."},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "Hm.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "say", "arguments": '{"text": "é", "n": 1}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "say",
        "content": [{"type": "text", "text": "said"}],
    },
]


def test_what_agents_send_back_renders_as_transformers_renders_it(tmp_path: Path) -> None:
    """Whose callers give arguments as objects, no null, and a text for each content."""
    save(tmp_path, {"chat_template": TOOLS})
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=TOOLS
    )
    arguments = {"name": "say", "arguments": {"text": "é", "n": 1}}
    conversation = [
        AGENT[0],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "say", "content": "said"},
    ]
    expected = theirs.apply_chat_template(
        conversation, tools=[WEATHER], tokenize=False, reasoning_effort="low", enable_thinking=True
    )
    kwargs = {"reasoning_effort": "low", "enable_thinking": True}
    messages = read_messages(AGENT)
    found = render(tmp_path, messages, tools=[WEATHER], chat_template_kwargs=kwargs)
    assert found == expected
    assert read_messages([message.to_dict() for message in messages]) == messages


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tools": [WEATHER]}, "knows no tools"),
        ({"messages": AGENT}, "knows no tools"),
        ({"chat_template_kwargs": {"add_generation": 1}}, "reads no variable 'add_generation'"),
        ({"chat_template_kwargs": {"messages": []}}, "reads no variable 'messages'"),
        ({"chat_template_kwargs": {"range": 1}}, "reads no variable 'range'"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "not true or false"),
        ({"tools": [{"name": "say"}]}, "not a named function"),
        ({"tools": [WEATHER] * 129}, "129 functions, and 128 is the limit"),
        ({"tools": [{"function": {"name": "say", "x": float("nan")}}]}, "is no JSON"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    said_template = "{{ range(2) }}{{ messages[0].content }}{{ enable_thinking }}"
    save(tmp_path, {"chat_template": said_template})
    with pytest.raises(RequestError, match=said):
        render(tmp_path, read_messages(asked.pop("messages", AGENT[:1])), **asked)


@pytest.mark.parametrize("arguments", ["{", "[]", 5])
def test_arguments_of_calls_are_objects(arguments: object) -> None:
    call = {"function": {"name": "say", "arguments": arguments}}
    with pytest.raises(RequestError, match=r"tool_calls\[0\].function.arguments is") as refused:
        read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert "Write an object" in refused.value.remedy


def test_template_file_wins_over_the_config_and_a_list_gives_its_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "from the list"}]
    save(tmp_path, {"chat_template": named})
    assert render(tmp_path) == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render(tmp_path) == "from the file"


def test_missing_template_is_refused_only_when_wanted(tmp_path: Path) -> None:
    template = read_template(tmp_path)
    with pytest.raises(RequestError, match="no chat template") as caught:
        template.render(CONVERSATION)
    assert '"apply_chat_template": false' in caught.value.remedy


def test_damaged_config_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": 3})
    with pytest.raises(BundleError, match="chat_template is neither"):
        read_template(tmp_path)
    for damaged in ("[", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(BundleError, match="tokenizer_config"):
            read_template(tmp_path)


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
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{# " + "x" * 2**16 + " #}", "65536 is the limit"),
    ],
)
def test_template_that_fails_or_reaches_out_of_its_sandbox_is_refused(
    tmp_path: Path, template: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        render(save(tmp_path, {"chat_template": template}))
    assert said in caught.value.what
    assert '"apply_chat_template": false' in caught.value.remedy


# --- thinking


@pytest.mark.parametrize(
    "template",
    [
        toys.CHAT_TEMPLATE,
        "{# enable_thinking #}{{ 'enable_thinking' }}",
        "{% set enable_thinking = true %}{% if enable_thinking %}<think>{% endif %}",
    ],
)
def test_thinking_is_refused_where_the_template_never_asks_for_it(
    tmp_path: Path, template: str
) -> None:
    save(tmp_path, {"chat_template": template})
    render(tmp_path, enable_thinking=False)
    assert not read_template(tmp_path).knows_thinking()
    with pytest.raises(RequestError, match="no thinking mode") as caught:
        render(tmp_path, enable_thinking=True)
    assert caught.value.remedy == 'Remove "enable_thinking" or set it false.'


@pytest.mark.parametrize(
    "template",
    [
        (
            "{% if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif %}{{"
            " enable_thinking }}"
        ),
        "{% set enable_thinking = enable_thinking | default(false) %}{{ enable_thinking }}",
        "{% macro m() %}{{ enable_thinking }}{% endmacro %}{{ m() }}",
    ],
)
def test_thinking_reaches_a_template_that_asks_for_it(tmp_path: Path, template: str) -> None:
    save(tmp_path, {"chat_template": template})
    assert [render(tmp_path, enable_thinking=flag) for flag in (True, False)] == ["True", "False"]
    assert read_template(tmp_path).knows_thinking()


# --- the flattened template

FLAT: dict[str, Any] = {
    "model_path": "/models/toy",
    "roles": {
        "system": {"prefix": "<sys>", "suffix": "</sys>"},
        "user": {"prefix": "<u>", "suffix": "</u>"},
        "assistant": {"prefix": "<a>", "suffix": "</a>"},
    },
    "content_types": {"image": {"format": "<img>"}},
    "generation_prompt": "<a>",
    "generation_prompt_thinking": "<a><think>",
    "default_system_prompt": "Be good.",
    "a_later_key": 1,
}
USER = [Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "He")]
SAID = "<u>Hi</u><a>Ho</a><u>He</u>"


def flat(directory: Path, **changes: object) -> Path:
    raw = {key: value for key, value in (FLAT | changes).items() if value is not ...}
    (directory / "processed_chat_template.json").write_text(json.dumps(raw), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("messages", "flags", "expected"),
    [
        (USER, {}, f"<sys>Be good.</sys>{SAID}<a>"),
        (USER, {"enable_thinking": True}, f"<sys>Be good.</sys>{SAID}<a><think>"),
        (USER, {"add_generation_prompt": False}, f"<sys>Be good.</sys>{SAID}"),
        ([Message("system", "Be bad."), *USER], {}, f"<sys>Be bad.</sys>{SAID}<a>"),
        ([Message("system", ""), *USER], {}, f"<sys></sys>{SAID}<a>"),
    ],
)
def test_flattened_template_says_what_its_file_says(
    tmp_path: Path, messages: list[Message], flags: dict[str, bool], expected: str
) -> None:
    assert render(flat(tmp_path), messages, **flags) == expected
    assert read_template(tmp_path).knows_thinking()
    assert not read_template(flat(tmp_path, generation_prompt_thinking=...)).knows_thinking()


@pytest.mark.parametrize("default", ["", None, ...])
def test_flattened_template_without_default_puts_nothing_in_front(
    tmp_path: Path, default: object
) -> None:
    assert render(flat(tmp_path, default_system_prompt=default), USER) == f"{SAID}<a>"


def test_jinja_wins_over_the_flattened_template_that_was_made_of_it(tmp_path: Path) -> None:
    flat(tmp_path)
    assert render(save(tmp_path, {}), USER).startswith("<sys>")
    assert render(save(tmp_path, {"chat_template": "from the config"}), USER) == "from the config"


@pytest.mark.parametrize(
    ("changes", "message", "flags", "what", "remedy"),
    [
        ({}, Message("tool", "42"), {}, "no role 'tool'", "system, user, assistant."),
        ({"roles": {}}, Message("user", "Hi"), {}, "no role", "none."),
        (
            {"generation_prompt_thinking": ...},
            USER[0],
            {"enable_thinking": True},
            "no thinking mode",
            "set it false",
        ),
        (
            {"generation_prompt": ...},
            USER[0],
            {},
            "no generation_prompt",
            '"add_generation_prompt": false',
        ),
    ],
)
def test_flattened_template_refuses_what_it_lacks(
    tmp_path: Path,
    changes: dict[str, object],
    message: Message,
    flags: dict[str, bool],
    what: str,
    remedy: str,
) -> None:
    with pytest.raises(RequestError) as caught:
        render(flat(tmp_path, default_system_prompt="", **changes), [message], **flags)
    assert what in caught.value.what
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"roles": ...}, "has no roles"),
        ({"roles": []}, r"\[\] is not an object"),
        ({"roles": {"user": "<u>"}}, r"roles\.user: '<u>' is not an object"),
        ({"roles": {"user": {"prefix": 3}}}, r"roles\.user: prefix is 3, not a string"),
        ({"generation_prompt": ["<a>"]}, "generation_prompt is"),
        ({"generation_prompt_thinking": True}, "generation_prompt_thinking is True"),
        ({"default_system_prompt": 0}, "default_system_prompt is 0"),
        ({"default_system_prompt": "x" * 2**17}, "default_system_prompt is 131072 bytes"),
        ({"roles": {"user": {"prefix": "x" * 2**17}}}, r"roles\.user: prefix is 131072 bytes"),
    ],
)
def test_damaged_flattened_template_is_refused_when_opened(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(BundleError, match=said) as caught:
        read_template(flat(tmp_path, **changes))
    assert "processed_chat_template.json" in caught.value.what
    assert "Copy it again" in caught.value.remedy


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_flattened_template_that_is_no_json_object_is_refused(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "processed_chat_template.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"processed_chat_template\.json"):
        read_template(tmp_path)


# --- hostile templates


def test_a_prompt_without_end_is_refused(tmp_path: Path) -> None:
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}words{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="a prompt of more than"):
        render(save(tmp_path, {"chat_template": nested}))


def test_an_error_that_a_template_makes_long_is_cut(tmp_path: Path) -> None:
    for template in ("{{ raise_exception('a' * 400000) }}", "{{ {}['a' * 400000].b }}"):
        with pytest.raises(RequestError, match="aaa") as refused:
            render(save(tmp_path, {"chat_template": template}))
        assert len(refused.value.what) < 600


@pytest.mark.parametrize(
    "template", [toys.CHAT_TEMPLATE, CHATML, INSTRUCT], ids=["toys", "chatml", "instruct"]
)
def test_long_conversations_are_rendered(tmp_path: Path, template: str) -> None:
    """Twice what a request may hold: 4 MiB."""
    content = "日本" * (2**17 // 6)
    messages = [Message(("user", "assistant")[i % 2], f"{i}{content}") for i in range(64)]
    rendered = render(save(tmp_path, {"chat_template": template, "eos_token": "</s>"}), messages)
    assert rendered.count(content) == 64
