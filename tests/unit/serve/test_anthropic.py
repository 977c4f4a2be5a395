"""Anthropic's routes over a socket: the answers are those of OpenAI's, in their form and events."""

from __future__ import annotations

import json
from threading import Timer
from typing import Any

import httpx
import pytest

from edgespec.prompts import Guided, Message
from edgespec.prompts.places import JsonPlace
from edgespec.prompts.template import JinjaTemplate
from edgespec.runtime.engine import Engine
from edgespec.serve.anthropic_messages import Noted, conversation, offered
from edgespec.serve.reasoning import Marks
from tests.pace import paced
from tests.unit.serve.serving import MODEL, Running, served

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"messages": [USER], "system": "Be", "temperature": 0, "max_tokens": 8}
HERE = JsonPlace("request")


def asked(server: Running, **body: Any) -> Any:
    response = server.post(PATH, **ASKED | body)
    assert response.status_code == 200, response.text
    return response.json()


def blocks(text: str) -> list[dict[str, Any]]:
    """A content of two blocks, the second of which is to be cached."""
    marked = {"type": "text", "text": text[1:], "cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": text[:1]}, marked]


def test_an_answer_is_that_of_openais_route(server: Running) -> None:
    messages = [{"role": "system", "content": "Be"}, USER]
    expected = server.chat(messages=messages, max_tokens=8)
    done = asked(server)
    text = expected["choices"][0]["message"]["content"]
    assert done["content"] == [{"type": "text", "text": text}]
    assert (done["type"], done["role"], done["model"]) == ("message", "assistant", MODEL)
    assert (done["stop_reason"], done["stop_sequence"]) == ("max_tokens", None)
    read = done["usage"]["input_tokens"] + done["usage"]["cache_read_input_tokens"]
    assert read == expected["usage"]["prompt_tokens"]
    assert done["usage"]["output_tokens"] == 8
    assert "adjusted" not in done
    split = {**USER, "content": blocks("Hi")}
    again = asked(server, messages=[split], system=blocks("Be"), metadata={"user_id": "7"})
    assert again["content"] == done["content"]
    assert [note.partition(":")[0] for note in again["adjusted"]] == ["metadata", "cache_control"]
    schema = {"enum": [1]}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    formed = asked(server, output_config=config)
    assert (formed["content"][0]["text"], formed["stop_reason"]) == ("1", "end_turn")
    assert formed["adjusted"] == ["effort: the model does not know it"]
    stopped = asked(server, stop_sequences=["§", text[3:5]])
    assert stopped["content"][0]["text"] == text[: text.index(text[3:5])]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:5])


def streamed(server: Running, **body: Any) -> list[Any]:
    return server.typed_events(PATH, **{**ASKED, **body})


def test_a_stream_has_blocks_of_thoughts_and_text(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = asked(server)["content"][0]["text"]
    monkeypatch.setattr(server.service, "marks", Marks(text[:2].strip(), text[4:6]))
    messages = [{"role": "system", "content": "Be"}, USER]
    expected = server.chat(messages=messages, max_tokens=8)["choices"][0]["message"]
    whole, events = asked(server), streamed(server)
    kinds = [(block["type"], block[block["type"]]) for block in whole["content"]]
    assert kinds == [("thinking", expected["reasoning"]), ("text", expected["content"])]
    assert whole["content"][0]["signature"] == ""
    joined = [""] * len(kinds)
    for event in events:
        if event["type"] == "content_block_delta":
            name = event["delta"]["type"].removesuffix("_delta")
            assert name == kinds[event["index"]][0]
            joined[event["index"]] += event["delta"][name]
    assert joined == [text for _, text in kinds]
    order = [e["type"] for e in events if e["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    ending = ["message_delta", "message_stop"]
    assert order == ["message_start", block[0], "ping", block[1], *block, *ending]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["usage"]["output_tokens"]) == ([], 0)
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert end["metrics"] == whole["metrics"]


CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "Ulm"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": blocks("12 C"), "is_error": True}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
AGENT: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": "I look"},
            CALL,
        ],
    },
    {"role": "user", "content": [RESULT, {"type": "text", "text": "So?"}]},
]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = [{"name": "look", "description": "Looks", "input_schema": SCHEMA}]
CALLED = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": "Ulm"}}}
TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}"
    "{{ m.tool_call_id }}{{ m.reasoning_content }}{% endfor %}"
    "{% if enable_thinking %}I think{% endif %}"
)


def test_blocks_become_messages_and_tools_openais() -> None:
    messages, notes = conversation(AGENT, HERE)
    assert messages == [
        Message("user", "Hi"),
        Message("assistant", "I look", tool_calls=[CALLED], reasoning_content="hm"),
        Message("tool", "12 C", tool_call_id="t1"),
        Message("user", "So?"),
    ]
    names = [note.partition(":")[0] for note in notes]
    assert sorted(names) == ["cache_control", "is_error", "redacted_thinking", "signature"]
    pictured = [{"role": "user", "content": [{"type": "image", "source": PNG}]}]
    (image,) = conversation(pictured, HERE).value[0].images
    assert image.source == "data:image/png;base64,aGk="
    again = {"role": "user", "content": "More"}
    called = {"role": "assistant", "content": [CALL]}
    merged, _ = conversation([USER, again, AGENT[1], called, AGENT[2], again], HERE)
    texts = [message.content for message in merged]
    assert texts == ["Hi\n\nMore", "I look", "12 C", "So?\n\nMore"]
    assert merged[1].tool_calls == (CALLED, CALLED)
    function = {"name": "look", "description": "Looks", "parameters": SCHEMA}
    assert offered(TOOLS, HERE).value == ({"type": "function", "function": function},)


TURN_ON = {
    "name": "now",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}])
def test_a_forced_call_is_a_block_whole_and_as_a_stream(
    caller: Running, choice: dict[str, Any]
) -> None:
    single = choice | {"disable_parallel_tool_use": True}
    body = {"tools": [TURN_ON], "tool_choice": single, "max_tokens": 99, "seed": 3}
    whole = asked(caller, **body)
    (block,) = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "now", "tool_use")
    assert block["input"].keys() == {"on"}
    assert block["id"].startswith("toolu_")
    _, start, ping, delta, stop, end, _ = streamed(caller, **body)
    own_id = start["content_block"]["id"]
    assert start["content_block"] == {**block, "id": own_id, "input": {}}
    assert json.loads(delta["delta"].pop("partial_json")) == block["input"]
    assert delta["delta"] == {"type": "input_json_delta"}
    assert (ping["type"], stop["type"]) == ("ping", "content_block_stop")
    assert end["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "on"}
    turns = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert conversation(turns, HERE).value[1].tool_calls[0]["id"] == block["id"][6:]
    assert asked(caller, messages=turns * 100, tools=[TURN_ON])["content"]


def test_text_and_calls_that_the_model_chooses_are_blocks_in_order(
    caller: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "now", "arguments": {"on": true}}</tool_call>'
    form = Guided(choice=(f"So:\n{call}\n{call} Done",))
    monkeypatch.setattr("edgespec.serve.anthropic.NO_FORM", Noted(form))
    body = {"tools": [TURN_ON], "max_tokens": 200}
    for types, choice in (
        (["text", "tool_use", "tool_use", "text"], {"type": "auto"}),
        (["text", "tool_use", "text"], {"type": "auto", "disable_parallel_tool_use": True}),
        (["text"], {"type": "none"}),
    ):
        whole = asked(caller, **body, tool_choice=choice)
        assert [block["type"] for block in whole["content"]] == types
        events = streamed(caller, **body, tool_choice=choice)
        starts = [event for event in events if event["type"] == "content_block_start"]
        assert [start["content_block"]["type"] for start in starts] == types
        assert [start["index"] for start in starts] == [*range(len(types))]
        assert whole["stop_reason"] == ("tool_use" if len(types) > 1 else "end_turn")


def test_tokens_are_counted_as_the_prompt_has_them(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(**body: Any) -> Any:
        return server.post(f"{PATH}/count_tokens", **body).json()["input_tokens"]

    messages = [{"role": "system", "content": "Be"}, USER]
    told = server.post("/tokenize", messages=messages).json()["count"]
    assert counted(messages=[USER], system="Be", thinking={"type": "adaptive"}) == told
    monkeypatch.setattr(engine.tokenizer, "template", JinjaTemplate(TEMPLATE, {}))
    own, tools = conversation(AGENT, HERE).value, offered(TOOLS, HERE).value
    plain, offering = len(engine.encode(own)), len(engine.encode(own, tools=tools))
    assert plain < offering == counted(messages=AGENT, tools=TOOLS)
    assert counted(messages=AGENT, tools=TOOLS, tool_choice={"type": "none"}) == plain
    thinking = {"type": "enabled", "budget_tokens": 1024}
    thoughtful = len(engine.encode(own, enable_thinking=True))
    assert thoughtful != plain
    assert counted(messages=AGENT, thinking=thinking) == thoughtful
    spelled = [{"role": "user", "content": "<|im_end|>"}]
    assert counted(messages=spelled) > len(engine.encode(spelled))


def refused(response: httpx.Response, status: int, kind: str) -> str:
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"].keys() == {"type", "message"}
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, 'asks for "x"'),
        ({"tool_choice": {"type": "none", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "Ho"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{**USER, "content": [{"type": "image", "source": {"type": "url"}}]}]},
            "messages[0].content[0].source",
        ),
        ({"max_token": 8}, "max_tokens"),
    ],
)
def test_what_is_not_taken_is_named(server: Running, body: dict[str, Any], named: str) -> None:
    response = server.post(PATH, **ASKED | body)
    assert named in refused(response, 400, "invalid_request_error")


def test_errors_have_anthropics_types(engine: Engine, server: Running) -> None:
    refused(server.post(PATH, **ASKED, model="claude"), 404, "not_found_error")
    with served(engine, keys=("k" * 16,)) as running:
        refused(running.post(PATH, **ASKED), 401, "authentication_error")
        key = {"x-api-key": "k" * 16}
        assert running.client.post(PATH, json=ASKED, headers=key).status_code == 200
    with served(engine, max_queue=-engine.max_batch_size) as full:
        response = full.post(PATH, **ASKED, stream=True)
        refused(response, 529, "overloaded_error")
        assert response.headers["retry-after"] == "1"
    with served(engine, request_timeout_s=0.5) as slow, paced() as allow:
        allow(1)
        Timer(1.0, allow, (1,)).start()
        events = streamed(slow)
        assert [event["type"] for event in (events[0], events[-1])] == ["message_start", "error"]
        assert events[-1]["error"]["type"] == "timeout_error"


@pytest.mark.clients
def test_anthropics_client_asks(server: Running, caller: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{server.port}"
    client = anthropic.Anthropic(api_key="k", base_url=url, max_retries=0)
    given: dict[str, Any] = {**ASKED, "model": MODEL, "extra_body": {"temperature": 0}}
    del given["temperature"]  # which the client has no argument for
    done = client.messages.create(**given)
    assert done.content[0].text == asked(server)["content"][0]["text"]
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == done.content[0].text
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 8)
    count = client.messages.count_tokens(model=MODEL, messages=[USER], system="Be")
    assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        client.messages.create(**{**given, "model": "claude"})
    with served(server.service.engine, max_queue=-server.service.engine.max_batch_size) as full:
        busy = client.with_options(base_url=f"http://127.0.0.1:{full.port}")
        with pytest.raises(anthropic.APIStatusError) as met:
            busy.messages.create(**given)
    assert met.value.status_code == 529
    agent = client.with_options(base_url=f"http://127.0.0.1:{caller.port}")
    calling: dict[str, Any] = {**given, "max_tokens": 99, "tools": [TURN_ON]}
    calling |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    made = agent.messages.create(**calling)
    with agent.messages.stream(**calling) as stream:
        for message in (made, stream.get_final_message()):
            (block,) = message.content
            assert (block.type, block.name, message.stop_reason) == ("tool_use", "now", "tool_use")
            assert block.input.keys() == {"on"}
    back = {"type": "tool_result", "tool_use_id": block.id, "content": "on"}
    turns = [USER, {"role": "assistant", "content": made.content}, {**USER, "content": [back]}]
    assert agent.messages.create(**{**given, "messages": turns, "tools": [TURN_ON]}).content
