"""Templates say what transformers makes them say, the flattened ones what their file says, and
hostile ones nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from edgespec.errors import BundleError, RequestError
from edgespec.prompts import Message, sandbox
from edgespec.prompts.template import read_template
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
    *,
    add_generation_prompt: bool = True,
    enable_thinking: bool = False,
) -> str:
    return read_template(directory).render(
        messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
    )


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


def test_template_file_wins_over_the_config_and_a_list_gives_its_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "from the list"}]
    save(tmp_path, {"chat_template": named})
    assert render(tmp_path) == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render(tmp_path) == "from the file"


def test_missing_template_is_refused_only_when_wanted(tmp_path: Path) -> None:
    template = read_template(tmp_path)
    with pytest.raises(RequestError, match="no chat template") as caught:
        template.render(CONVERSATION, add_generation_prompt=True, enable_thinking=False)
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
        ("{{ (5).to_bytes(9, 'big') }}", "'to_bytes' is not available"),
        ("{{ 'a'.encode('utf-32') }}", "'encode' is not available"),
        ("{{ 'a'.translate({97: 'b'}) }}", "'translate' is not available"),
        ("{{ 'a' | urlize }}", "No filter named 'urlize'"),
        ("{{ lipsum(3) }}", "'lipsum' is undefined"),
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

BIG = "{% set b = 'a' * 400000 %}{% set c = 'b' * 400000 ~ 'a' %}"
LOOP = "{% for i in range(99999) %}"
FEW = "{% for i in range(999) %}"
GROWING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = "
SIZE, TIME = "of more than 1052", "of CPU time"

HOSTILE: dict[str, tuple[str, str]] = {
    # time
    "nested loops": (f"{LOOP}{LOOP}{LOOP}" + "{% endfor %}" * 3, TIME),
    "loops that call nothing": (
        "{% set a = range(9999) | list %}" + "{% for i in a %}" * 3 + "{% endfor %}" * 3,
        TIME,
    ),
    "loops that pick nothing": (
        "{% set b = 'a' * 400000 %}{% set c = b[1:] ~ 'b' %}"
        + LOOP[:-3]
        + " if b == c"
        + " or b == c" * 9
        + " %}{% endfor %}",
        TIME,
    ),
    "macros that call twice": (
        (
            "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{%"
            " endmacro %}{{ f(60) }}"
        ),
        TIME,
    ),
    "comparisons": (
        f"{LOOP}{LOOP}{{% if 'a' * 200000 == 'a' * 200000 ~ 'b' %}}{{% endif %}}"
        + "{% endfor %}" * 2,
        "",
    ),
    "filters over filters": (
        LOOP + "{{ range(9999) | map('string') | map('int') | list | length }}{% endfor %}",
        "",
    ),
    "tests that fail": (
        "{% set a = range(9999) | list %}{{ range(99999) | select('in', a) | list }}",
        "",
    ),
    "strip": (BIG + "{{ b.strip(c) }}", SIZE),
    "trim": (BIG + "{{ b | trim(c) }}", SIZE),
    # size of one operation
    "text times number": ("{{ 'a' * 10**9 }}", SIZE),
    "number times text": ("{{ 10**9 * messages[0].content }}", SIZE),
    "safe text times number": ("{{ ('a' | safe) * 10**9 }}", SIZE),
    "list times number": ("{{ ([1] * 10**9) | length }}", SIZE),
    "power": ("{{ 10 ** 1000000000 }}", SIZE),
    "squares": (GROWING.replace("'a'", "3") + "ns.x * ns.x %}{% endfor %}", "more than 1024 bits"),
    "round": ("{{ 5 | round(-1000000000) }}", SIZE),
    "round up": ("{{ 5 | round(precision=1000000000, method='ceil') }}", SIZE),
    "width": ("{{ '%1000000000d' % 1 }}", SIZE),
    "precision": ("{{ '%.1000000000f' % 1 }}", SIZE),
    "width as argument": ("{{ '%*d' % (10**9, 1) }}", SIZE),
    "width of a key": ("{{ '%(a)1000000000d' % {'a': 1} }}", SIZE),
    "format filter": ("{{ '%1000000000d' | format(1) }}", SIZE),
    "str.format": ("{{ '{:>1000000000}'.format(1) }}", SIZE),
    "str.format in parts": ("{% set f = '{:>1000000000}'.format %}{{ f(1) }}", SIZE),
    "str.format by attr": ("{{ ('{:>1000000000}' | attr('format'))(1) }}", SIZE),
    "str.format_map": ("{{ '{a:>1000000000}'.format_map({'a': 1}) }}", SIZE),
    "width as field": ("{{ '{:>{}}'.format(1, 10**9) }}", "is a field itself"),
    "center filter": ("{{ 'a' | center(1000000000) }}", ""),
    "center by name": ("{{ 'a' | center(width=10**9) }}", SIZE),
    "center through map": ("{{ ['a'] | map('center', 10**9) | list }}", SIZE),
    "center": ("{{ 'a'.center(1000000000) }}", SIZE),
    "ljust": ("{{ 'a'.ljust(1000000000) }}", SIZE),
    "zfill": ("{{ 'a'.zfill(1000000000) }}", SIZE),
    "expandtabs": ("{{ '\t'.expandtabs(1000000000) }}", SIZE),
    "indent": ("{{ 'a\nb' | indent(10**9) }}", SIZE),
    "indent by text": ("{% set b = 'a\n' * 40000 %}{{ b | indent(b) }}", SIZE),
    "tojson": ("{{ {'a': [1]} | tojson(indent=10**9) }}", SIZE),
    "replace": (BIG + "{{ b.replace('a', b) }}", SIZE),
    "replace filter": (BIG + "{{ b | replace('', b) }}", SIZE),
    "replace filter by name": (BIG + "{{ b | replace(new=b, old='') }}", SIZE),
    "replace block by name": (
        "{% filter replace(new='y' * 100000, old='x') %}" + "x" * 20000 + "{% endfilter %}",
        SIZE,
    ),
    "join": (BIG + "{{ b.join(b) }}", SIZE),
    "join filter": (BIG + "{{ range(99999) | join(b) }}", SIZE),
    "join of a generator": (BIG + "{{ range(999) | map('string') | join(b) }}", SIZE),
    "batch": ("{{ [1] | batch(10**9, 0) | list }}", SIZE),
    "slice": ("{{ [1] | slice(10**9) | list }}", SIZE),
    "date": ("{% set f = '%c' * 260000 %}{{ strftime_now(f) }}", "more than 256 characters"),
    # what is in Jinja's own objects
    "cycler in a format": (BIG + "{{ ('{0.items}' * 2000).format(cycler(b)) }}", SIZE),
    "joiner in a format": (BIG + "{{ ('{0.sep}' * 4000).format(joiner(b)) }}", SIZE),
    "joiners joined": (BIG + "{{ ([joiner(b)] * 8000) | join('', 'sep') }}", SIZE),
    "cyclers joined": (BIG + "{{ ([cycler(b)] * 4000) | join(attribute='items.0') }}", SIZE),
    "cyclers sorted": (BIG + "{{ ([cycler(b)] * 4000) | sort(attribute='items.0') }}", SIZE),
    "cyclers summed": (
        "{{ ([cycler([1] * 1000)] * 9000) | sum('items.0', []) | length }}",
        SIZE,
    ),
    "loops joined": (
        BIG + "{% for x in [b, b] %}{{ ([loop] * 4000) | join('', 'nextitem') }}{% endfor %}",
        SIZE,
    ),
    "macros joined": (
        "{% macro " + "m" * 30000 + "() %}{% endmacro %}{{ ([" + "m" * 30000 + "] * 9000)"
        " | join('', 'name') }}",
        SIZE,
    ),
    # searches from the end
    "rfind": (BIG + "{{ b.rfind('ab' ~ b[:200000]) }}", SIZE),
    "rindex": (BIG + "{{ b.rindex('ab' ~ b[:200000]) }}", SIZE),
    "rsplit": (BIG + "{{ b.rsplit('ab' ~ b[:200000]) }}", SIZE),
    "rpartition": (BIG + "{{ b.rpartition('ab' ~ b[:200000]) }}", SIZE),
    "range to list": ("{{ range(99999) | list | length }}", SIZE),
    # size by repetition
    "output": (LOOP + "x" * 1000 + "{% endfor %}", SIZE),
    "captured output": ("{% set x %}" + FEW + "x" * 30000 + "{% endfor %}{% endset %}", SIZE),
    "captured numbers": (
        "{% set x %}" + f"{LOOP}{LOOP}{{{{ i }}}}" + "{% endfor %}" * 2 + "{% endset %}",
        "",
    ),
    "macro's output": (
        "{% macro m() %}" + FEW + "x" * 30000 + "{% endfor %}{% endmacro %}{{ m() | length }}",
        SIZE,
    ),
    "doubling by ~": (GROWING + "ns.x ~ ns.x %}{% endfor %}", SIZE),
    "doubling by +": (GROWING + "ns.x + ns.x %}{% endfor %}", SIZE),
    "lists in lists": (GROWING + "[ns.x, ns.x] %}{% endfor %}{{ ns.x }}", SIZE),
    "hash of tuples": (GROWING + "(ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}", SIZE),
    "namespaces": (GROWING + "namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}", SIZE),
    "namespaces set one by one": (
        "{% set n0 = namespace() %}"
        + "".join(
            f"{{% set n{i} = namespace() %}}{{% set n{i}.a = n{i - 1} %}}{{% set n{i}.b ="
            f" n{i - 1} %}}"
            for i in range(1, 24)
        )
        + "{{ n23 }}",
        SIZE,
    ),
    "deep tuples": (
        GROWING.replace("60", "99999") + "(ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        "nests lists",
    ),
    "many lists": ("".join(f"{{% set v{i} = range(20000) | list %}}" for i in range(1500)), ""),
    "many slices": (
        "{% set a = range(20000) | list %}"
        + "".join(f"{{% set v{i} = a[:] %}}" for i in range(2500)),
        "",
    ),
    # recursion
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "loop": ("{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "recursion"),
    "block": ("{% block b %}{{ self.b() }}{% endblock %}", "recursion"),
    "attributes": ("{{ messages" + ".a" * 30000 + " }}", "recursion"),
    "parentheses": ("{{ " + "(" * 60000 + " }}", "recursion"),
    # reading it
    "much to compile": ("{{ a }}" * 9000 + "{{ 1 / 0 }}", "division"),
    "constants": ("{{ 'a' | center(900000) }}" * 2500, ""),
}

# One process for all of them: what leaks here would otherwise take the tests along.
CHILD = """
import json, resource, sys, time
from edgespec.errors import RequestError
from edgespec.prompts import Message
from edgespec.prompts import sandbox, template
from edgespec.runtime.requests.memory import peak_bytes

resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
sandbox.MAX_SECONDS = 0.1
for name, source in json.load(sys.stdin).items():
    began = time.process_time()
    try:
        chat, messages = template.JinjaTemplate(source, {}), [Message("user", "Hi")]
        said = "rendered " + chat.render(messages, add_generation_prompt=True, enable_thinking=False)[:99]
    except RequestError as error:
        said = error.what
    peak = peak_bytes()
    print(json.dumps([name, said, time.process_time() - began, peak]), flush=True)
"""


@cache
def hostile_results() -> dict[str, tuple[str, float, int]]:
    sources = json.dumps({name: source for name, (source, _) in HOSTILE.items()})
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True)
    try:
        out, _ = child.communicate(sources, timeout=120)
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
    lines = [json.loads(line) for line in out.splitlines()]
    return {name: (said, seconds, peak_bytes) for name, said, seconds, peak_bytes in lines}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_refused_in_little_time_and_memory(name: str) -> None:
    assert name in hostile_results(), "this template, or one before it, hung or killed its process"
    said, seconds, peak_bytes = hostile_results()[name]
    assert said.startswith("The chat template ")
    assert HOSTILE[name][1] in said
    assert "MemoryError" not in said  # the sandbox refuses it, and not this test's limit
    # The limit is 1.0 s of CPU time; a busy machine takes longer for the operation that ends beyond it
    assert seconds < 2
    assert peak_bytes < 300e6


def test_endless_template_is_refused_within_two_seconds(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": HOSTILE["nested loops"][0]})
    began = time.process_time()
    with pytest.raises(RequestError, match="more than 1 s of CPU time"):
        render(tmp_path)
    assert time.process_time() - began < 2


def test_all_values_of_a_rendering_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MADE_PER_VALUE", 4)
    save(
        tmp_path,
        {
            "chat_template": (
                "{% for i in range(messages[0].content | int) %}{{ ('a' * 400000)[:1] }}{%"
                " endfor %}"
            )
        },
    )
    assert render(tmp_path, [Message("user", "9")]) == "aaaaaaaaa"
    with pytest.raises(RequestError, match="of more than 42"):
        render(tmp_path, [Message("user", "11")])


@pytest.mark.parametrize("name", ["list", "sort"])
def test_a_text_is_not_taken_apart_before_its_size_is_known(name: str) -> None:
    sandbox.Meter([]).allow(name, ("a" * 10_000,), {})
    sandbox.Meter([]).allow(name, (range(20_000),), {})
    with pytest.raises(jinja2.TemplateRuntimeError, match="more than 10"):
        sandbox.Meter([]).allow(name, ("a" * 100_000,), {})


def test_an_error_that_a_template_makes_long_is_cut(tmp_path: Path) -> None:
    for template in ("{{ raise_exception('a' * 400000) }}", "{{ {}['a' * 400000].b }}"):
        with pytest.raises(RequestError, match="aaa") as refused:
            render(save(tmp_path, {"chat_template": template}))
        assert len(refused.value.what) < 600


def test_searches_from_the_end_and_replacements_of_use_are_no_attack(tmp_path: Path) -> None:
    template = (
        "{% set c = messages[0].content %}{{ c.rsplit('</think>', 1)[-1] ~ c.rfind('<tool_call>') }}"
        "{{ c | replace(new='', old='a long text that is taken out of the answer: ') }}"
        "{% for m in messages %}{{ loop | string | length }}{{ loop.nextitem }}{% endfor %}"
    )
    content = "x" * 100_000 + "</think>end"
    rendered = render(save(tmp_path, {"chat_template": template}), [Message("user", content)])
    assert rendered.startswith(f"end-1{content}")


def test_template_stays_usable_after_a_refusal(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": "{{ 'a' * messages[0].content | int }}"})
    template = read_template(tmp_path)
    with pytest.raises(RequestError, match="bytes"):
        template.render(
            [Message("user", "9999999")], add_generation_prompt=True, enable_thinking=False
        )
    assert (
        template.render([Message("user", "3")], add_generation_prompt=True, enable_thinking=False)
        == "aaa"
    )


@pytest.mark.parametrize(
    "template", [toys.CHAT_TEMPLATE, CHATML, INSTRUCT], ids=["toys", "chatml", "instruct"]
)
def test_long_conversations_are_no_attack(tmp_path: Path, template: str) -> None:
    """The most that an input file may hold: 64 messages of 128 KiB."""
    content = "日本" * (2**17 // 6)
    messages = [Message(("user", "assistant")[i % 2], f"{i}{content}") for i in range(64)]
    rendered = render(save(tmp_path, {"chat_template": template, "eos_token": "</s>"}), messages)
    assert rendered.count(content) == 64


@pytest.mark.parametrize(
    "template", [toys.CHAT_TEMPLATE, CHATML, MODERN], ids=["toys", "chatml", "modern"]
)
def test_rendering_64_messages_takes_a_fifth_of_the_limit_at_most(
    tmp_path: Path, template: str
) -> None:
    messages = [Message(("user", "assistant")[i % 2], f"{i} words " * 50) for i in range(64)]
    chat = read_template(save(tmp_path, {"chat_template": template}))
    chat.render(messages, add_generation_prompt=True, enable_thinking=False)
    began = time.process_time()
    chat.render(messages, add_generation_prompt=True, enable_thinking=False)
    assert time.process_time() - began < 0.2
