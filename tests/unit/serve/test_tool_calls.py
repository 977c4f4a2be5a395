"""Calls of tools: every form apart from the answer however its text is cut, and over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from edgespec.prompts.template import JinjaTemplate
from edgespec.runtime.engine import Engine
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.serve.reasoning import Marks, ThoughtSplitter
from edgespec.serve.tool_calls import AnswerSplitter, CallSplitter, ToolCall, form_of
from tests.unit.serve.serving import MODEL, TEMPLATE, Running

PARAMETERS = {"city": {"type": "string"}, "days": {"anyOf": [{"type": "integer"}]}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": PARAMETERS}},
}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<start_function_call>", "<end_function_call>", "<escape>")
ARGUMENTS = {"city": "Köln", "days": 3}
JSON = json.dumps(ARGUMENTS)
OBJECT = f'{{"name": "weather", "arguments": {JSON}}}'
BARE = f'{{"name": "weather", "parameters": {JSON}}}'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
TAGGED = f"<tool_call>\n{OBJECT}\n</tool_call>"
ESCAPED = "<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>"
MARK = json.dumps({"name": "weather", "arguments": {"city": "</tool_call>"}})
NO = f"<tool_call>{OBJECT[:-1]}</tool_call>"
TAGS, LIST, ESCAPE, PYTHON = (
    "<tool_call>",
    "[TOOL_CALLS]",
    "<start_function_call>",
    "<|python_tag|>",
)
ONE: list[Any] = [("weather", ARGUMENTS)]
# What a chat template says, an answer, and what it is as texts and calls
ANSWERS: list[tuple[str, str, list[Any]]] = [
    (TAGS, f"Let me see.\n\n{TAGGED}\n{TAGGED}\n", ["Let me see.", *ONE, *ONE]),
    ("<function=", f"{XML} Done.", [*ONE, " Done."]),
    (TAGS, f"<tool_call> begins a call: {TAGGED}", ["<tool_call> begins a call:", *ONE]),
    (TAGS, f"<tool_call>{MARK}</tool_call>", [("weather", {"city": "</tool_call>"})]),
    (TAGS, f"{NO} and {TAGGED}", [f"{NO} and", *ONE]),
    (TAGS, TAGGED.removesuffix("</tool_call>"), ONE),  # whole, without its end
    (TAGS, f"a < b <tool_call>{OBJECT[:-2]}\n\n", [f"a < b <tool_call>{OBJECT[:-2]}\n\n"]),
    (TAGS, f" {OBJECT} <tool_", [f" {OBJECT} <tool_"]),
    (
        TAGS,
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        ['<tool_call>{"name": "\\ud800"}</tool_call>'],
    ),
    (LIST, f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]", [*ONE, *ONE]),
    (LIST, f"So:[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]weather{JSON}", ["So:", *ONE, *ONE]),
    (LIST, f"[TOOL_CALLS]weather[ARGS]{JSON[:-1]}", [f"weather{JSON[:-1]}"]),
    (ESCAPE, f"{ESCAPED}{ESCAPED}", [*ONE, *ONE]),
    (PYTHON, f"\n{BARE}; {BARE}", [*ONE, *ONE]),
    (PYTHON, f"<|python_tag|>{BARE}", ONE),
    (PYTHON, '{"name": "Faust", "parameters": {}}', ['{"name": "Faust", "parameters": {}}']),
    (PYTHON, f"See {BARE}", [f"See {BARE}"]),
]


def tokenizer_of(source: str, special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """One whose special tokens are the marks of some forms; `source` is its chat template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.add_special_tokens([*special])
    return Tokenizer(made, JinjaTemplate(source, {}))


def pieces_of(text: str, tokenizer: Tokenizer, size: int) -> Iterator[tuple[int, str]]:
    """A text cut into tokens of so many characters; special tokens have no text."""
    while text:
        mark = next((mark for mark in SPECIAL if text.startswith(mark)), None)
        if mark is not None:
            token, text = tokenizer.token_id(mark), text.removeprefix(mark)
            assert token is not None
            yield token, ""
            continue
        ahead = [text.find(mark) for mark in SPECIAL if mark in text]
        upto = min([size, *ahead])
        yield 99, text[:upto]
        text = text[upto:]


@pytest.mark.parametrize(("source", "text", "expected"), ANSWERS)
def test_calls_are_found_however_the_text_is_cut(
    source: str, text: str, expected: list[Any]
) -> None:
    tokenizer = tokenizer_of(source)
    form = form_of(tokenizer)
    assert form is not None
    for size in range(1, len(text) + 1):
        thoughts = ThoughtSplitter(Marks("<think>", "</think>"), tokenizer, [])
        splitter = AnswerSplitter(thoughts, CallSplitter(form, tokenizer, [WEATHER]))
        tokens = [*pieces_of(f"<think>{TAGGED}</think>{text}", tokenizer, size)]
        parts = [splitter.push([token], [piece]) for token, piece in tokens]
        parts.append(splitter.flush())
        found: list[Any] = []
        for item in (item for _, items in parts for item in items):
            if isinstance(item, ToolCall):
                found.append((item.name, json.loads(item.arguments)))
            elif found and isinstance(found[-1], str):
                found[-1] += item
            else:
                found.append(item)
        assert found == expected, size
        assert "".join(thought for thought, _ in parts) == TAGGED


def test_the_form_follows_from_the_template_or_else_from_the_vocabulary() -> None:
    assert form_of(tokenizer_of("", ())) is None
    by_token = form_of(tokenizer_of("", (PYTHON,)))
    assert by_token is not None
    assert (by_token.begin, by_token.bare) == (PYTHON, True)


# ---- over a socket

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}


@pytest.mark.parametrize("mark", [TAGS, f"{TAGS}<function=", LIST, PYTHON])
def test_a_forced_call_is_sent_whole_and_as_a_stream(
    caller: Running, tool_engine: Engine, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    template = JinjaTemplate(TEMPLATE.replace(TAGS, mark), {})
    monkeypatch.setattr(tool_engine.tokenizer, "template", template)
    named = {"type": "function", "function": {"name": "now"}}
    for choice in ("required", named):
        asked = {**ASK, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
        answer = caller.chat(**asked)["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        assert (call["type"], call["function"]["name"]) == ("function", "now")
        assert json.loads(call["function"]["arguments"]).keys() == {"on"}
        events = [event["choices"][0] for event in caller.events(PATH, **asked)]
        first, *rest = [d for e in events for d in e["delta"].get("tool_calls", [])]
        assert first == {**call, "index": 0, "id": first["id"]} | {
            "function": {"name": "now", "arguments": ""}
        }
        arguments = {"arguments": call["function"]["arguments"]}
        assert rest == [{"index": 0, "function": arguments}]
        assert events[-1]["finish_reason"] == "tool_calls"
        assert not any(event["delta"].get("content") for event in events)


def test_text_and_several_calls_that_the_model_chooses(caller: Running) -> None:
    call = '<tool_call>{"name": "now", "arguments": {"on": true}}</tool_call>'
    asked: dict[str, Any] = {**ASK, "guided_choice": [f"So:\n{call}\n{call}"], "n": 2}
    function = {"name": "now", "arguments": '{"on": true}'}
    for number, more in ((2, {}), (1, {"parallel_tool_calls": False})):
        events = [e["choices"][0] for e in caller.events(PATH, **asked, **more)]
        for choice in caller.chat(**asked, **more)["choices"]:
            message, calls = choice["message"], choice["message"]["tool_calls"]
            assert (message["content"], choice["finish_reason"]) == ("So:", "tool_calls")
            assert [made["function"] for made in calls] == [function] * number
            own = [e["delta"] for e in events if e["index"] == choice["index"]]
            assert "".join(delta.get("content", "") for delta in own) == "So:"
            sent = [made for delta in own for made in delta.get("tool_calls", [])]
            assert [made["index"] for made in sent] == [0, 0, 1, 1][: 2 * number]
            assert ["id" in made for made in sent] == [True, False] * number
        assert len({made["id"] for made in calls}) == number
    back = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "noon"}
    assert caller.chat(**{**ASK, "messages": [*ASK["messages"], message, back]}, max_tokens=1)
    cut = caller.chat(**{**asked, "n": 1, "max_tokens": 12})["choices"][0]
    assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)
    assert cut["message"]["content"].startswith("So:\n<tool")


def test_a_request_without_tools_has_the_same_text_as_content(
    caller: Running, tool_engine: Engine
) -> None:
    answer = caller.chat(tools=[TOOL], tool_choice="none", max_tokens=9)["choices"][0]["message"]
    assert answer == caller.chat(max_tokens=9)["choices"][0]["message"]
    assert "tool_calls" not in answer
    assert tool_engine.encode(ASK["messages"], tools=[TOOL]) != tool_engine.encode(ASK["messages"])


@pytest.mark.parametrize("choice", ["required", "any", {"function": {"name": "later"}}, {}])
def test_a_choice_that_cannot_be_is_refused(caller: Running, choice: object) -> None:
    tools = None if choice == "required" else [TOOL]
    response = caller.post(PATH, **{**ASK, "tools": tools, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "said"), [({"not": {}}, "has not, which"), ({"title": "x" * 70_000}, "limit")]
)
def test_a_schema_that_no_call_can_be_held_to_is_said_of_tools(
    caller: Running, schema: dict[str, Any], said: str, stream: bool
) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    body: dict[str, Any] = {**ASK, "tools": [tool], "tool_choice": "required", "stream": stream}
    error = caller.post(PATH, **body).json()["error"]
    assert error["param"] == "tools"
    assert said in error["message"]
    assert "tool_choice" in error["message"]
    assert "guided" not in error["message"].lower()


def test_of_an_unknown_form_calls_stay_text_and_none_can_be_forced(
    caller: Running, tool_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = JinjaTemplate("{% if tools %}A{% endif %}Hi", {})
    monkeypatch.setattr(tool_engine.tokenizer, "template", template)
    answer = caller.chat(tools=[TOOL], max_tokens=1)
    assert [line.partition(":")[0] for line in answer["adjusted"]] == ["tools"]
    tokens = caller.post("/tokenize", **ASK).json()["tokens"]
    assert len(tokens) == answer["usage"]["prompt_tokens"]
    assert tokens == list(tool_engine.encode("AHi"))
    response = caller.post(PATH, **ASK, tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.clients
def test_langchain_reads_calls_and_knows_a_long_prompt(caller: Running) -> None:
    langchain = pytest.importorskip("langchain_openai.chat_models.base")
    url, one = f"http://127.0.0.1:{caller.port}/v1", {"parallel_tool_calls": False, "seed": 3}
    answer = caller.chat(**ASK, tool_choice="required", **one)["choices"][0]["message"]
    arguments = json.loads(answer["tool_calls"][0]["function"]["arguments"])
    chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0)
    forced = chat.bind_tools([TOOL], tool_choice="required", **one)
    first, *rest = forced.stream("Hi")
    for message in (forced.invoke("Hi"), sum(rest, first)):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("now", arguments)
    with pytest.raises(langchain.ContextOverflowError):
        chat.invoke("a " * 999)
    chat.root_client.close()
