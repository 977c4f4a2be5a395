"""OpenAI's Responses over a socket: the answers are those of chat, as items and typed events."""

from __future__ import annotations

import json
from threading import Timer
from typing import Any

import pytest

from edgespec.prompts import Guided, Message
from edgespec.prompts.places import JsonPlace
from edgespec.runtime.engine import Engine
from edgespec.serve.openai_responses_items import conversation
from edgespec.serve.reasoning import Marks
from tests.pace import paced
from tests.unit.serve.serving import MODEL, Running, served

PATH = "/v1/responses"
HERE = JsonPlace("request").key("input")
ASKED: dict[str, Any] = {"input": "Hi", "instructions": "Be", "temperature": 0}
CHAT = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
TURN_ON = {
    "type": "function",
    "name": "now",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


def asked(server: Running, **body: Any) -> Any:
    response = server.post(PATH, **ASKED | body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: Running, **body: Any) -> list[Any]:
    """The events of a stream, which are numbered."""
    events = server.typed_events(PATH, **{**ASKED, **body})
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def kinds(events: list[Any]) -> list[str]:
    """The types of events, deltas of one text as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    pairs = zip(["", *names], names, strict=False)
    return [name for last, name in pairs if name != last or not name.endswith("delta")]


def without_ids(response: Any) -> Any:
    """An answer but for ids and times."""
    output = [
        {name: own for name, own in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    dropped = ("id", "created_at", "completed_at", "metrics", "usage")
    return {name: own for name, own in response.items() if name not in dropped} | {"output": output}


def items_of(kind: str) -> list[str]:
    """The events of an item that is a text."""
    part = ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
    return ["output_item.added", *part, "output_item.done"]


def test_an_answer_is_that_of_chat(server: Running) -> None:
    expected = server.chat(messages=CHAT, max_tokens=8)
    done = asked(server, max_output_tokens=8, store=True, metadata={"a": "b"}, user="me")
    (item,) = done["output"]
    (part,) = item["content"]
    assert (part["type"], part["annotations"]) == ("output_text", [])
    assert part["text"] == expected["choices"][0]["message"]["content"]
    assert (item["role"], item["status"]) == ("assistant", "incomplete")
    assert (done["object"], done["model"], done["error"]) == ("response", MODEL, None)
    assert (done["status"], done["store"], done["metadata"]) == ("incomplete", False, {"a": "b"})
    assert done["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [note.partition(":")[0] for note in done["adjusted"]] == ["store", "user"]
    usage = done["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        expected["usage"]["prompt_tokens"],
        8,
    )
    assert usage["total_tokens"] == usage["input_tokens"] + 8
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    again = asked(server, input=turns, max_output_tokens=8, store=False)
    assert again["output"][0]["content"] == item["content"]
    assert "adjusted" not in again


def test_an_answer_has_the_form_that_is_asked_for(server: Running) -> None:
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": {"enum": [17]}}
    done = asked(server, text={"format": form, "verbosity": "low"})
    assert (done["output"][0]["content"][0]["text"], done["status"]) == ("17", "completed")
    assert done["text"] == {"format": form}
    assert done["adjusted"] == ["text.verbosity: the model does not know it"]
    wrong = {"type": "json_schema", "schema": {"not": {}}}
    error = server.post(PATH, **ASKED, text={"format": wrong}).json()["error"]
    assert error["param"] == "text.format"
    assert "text.format has not, which" in error["message"]


def test_a_stream_has_items_of_thoughts_and_text(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = asked(server, max_output_tokens=8)["output"][0]["content"][0]["text"]
    monkeypatch.setattr(server.service, "marks", Marks(text[:2].strip(), text[10:12]))
    chat = server.chat(messages=CHAT, max_tokens=8)
    expected, usage = chat["choices"][0]["message"], chat["usage"]["completion_tokens_details"]
    whole, events = (ask(server, max_output_tokens=8) for ask in (asked, streamed))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    texts = [item["content"][0]["text"] for item in whole["output"]]
    assert texts == [expected["reasoning"], expected["content"]]
    num_thoughts = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert num_thoughts == usage["reasoning_tokens"] > 0
    assert kinds(events) == [
        *("created", "in_progress"),
        *items_of("reasoning_text"),
        *items_of("output_text"),
        "incomplete",
    ]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    drafted = events[-1]["response"]["metrics"]["speculative_decoding"]
    assert drafted["num_draft_tokens"] > 0
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress"
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        deltas = [event["delta"] for event in own if event["type"].endswith("delta")]
        assert "".join(deltas) == item["content"][0]["text"] == texts[index]
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        assert own[0]["item"] == {**item, "status": "in_progress", "content": []}
        assert own[-1]["item"] == item


CALL = '<tool_call>{"name": "now", "arguments": {"on": true}}</tool_call>'


def test_calls_that_are_forced_or_chosen_are_items(
    caller: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in ("required", {"type": "function", "name": "now"}):
        body = {"tools": [TURN_ON], "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
        whole, events = (ask(caller, **body) for ask in (asked, streamed))
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        (item,) = whole["output"]
        assert (item["type"], item["name"], whole["status"]) == (
            "function_call",
            "now",
            "completed",
        )
        assert json.loads(item["arguments"]).keys() == {"on"}
        assert (whole["tools"], whole["tool_choice"]) == ([TURN_ON], choice)
        call = [f"function_call_arguments.{end}" for end in ("delta", "done")]
        of_item = ["output_item.added", *call, "output_item.done"]
        assert kinds(events) == ["created", "in_progress", *of_item, "completed"]
        assert events[2]["item"]["arguments"] == ""
        assert [event.get("delta", event.get("arguments")) for event in events[3:5]] == [
            item["arguments"]
        ] * 2
    back = {"type": "function_call_output", "call_id": item["call_id"], "output": "on"}
    turns = [{"role": "user", "content": "Hi"}, *whole["output"], back]
    assert asked(caller, input=turns * 100, tools=[TURN_ON], max_output_tokens=3)["output"]
    form = Guided(choice=(f"So: {CALL}{CALL} Done",))
    name = "edgespec.serve.openai_responses_items.text_format"
    monkeypatch.setattr(name, lambda value, here: form)
    told = {"format": {"type": "text"}}
    chosen = asked(caller, tools=[TURN_ON], text=told)["output"]
    assert [item["type"] for item in chosen] == ["message", *["function_call"] * 2, "message"]
    assert len({item["id"] for item in chosen}) == 4
    assert [item["type"] for item in asked(caller, text=told)["output"]] == ["message"]


CALLED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": 1}'}
URL = {"type": "input_image", "detail": "auto", "image_url": "http://localhost/a.png"}


def test_items_become_messages() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": None,
    }
    said = {"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
    image = {**URL, "image_url": "data:image/png;base64,aGk="}
    items = [
        {"role": "developer", "content": "Be"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, image]},
        reasoning,
        {**message, "content": [said]},
        CALLED,
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": "So"},
        {**message, "content": [{"type": "refusal", "refusal": "No"}]},
        {"role": "user", "content": "Oh"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "?"},
    ]
    made = conversation(items, HERE)
    function = {"name": "look", "arguments": {"at": 1}}
    calls = [{"id": "c", "type": "function", "function": function}]
    first, second, *rest = made.value
    assert first == Message("developer", "Be")
    assert (second.content, second.images[0].source) == ("Hi", image["image_url"])
    assert rest == [
        Message("assistant", "I look", tool_calls=calls, reasoning_content="hm"),
        Message("tool", "2", tool_call_id="c"),
        Message("assistant", "So\n\nNo"),
        Message("user", "Oh"),
    ]
    assert [note.partition(":")[0] for note in made.notes] == ["encrypted_content"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [CALLED | {"arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [URL]}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tools": [TURN_ON], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"max_tokens": 8}, "max_tokens"),
    ],
)
def test_what_is_not_taken_is_named(server: Running, body: dict[str, Any], named: str) -> None:
    response = server.post(PATH, **ASKED | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, named)


def test_an_error_in_a_stream_is_the_event_of_a_failed_answer(engine: Engine) -> None:
    with served(engine, request_timeout_s=0.5) as slow, paced() as allow:
        allow(1)
        Timer(1.0, allow, (1,)).start()
        last = streamed(slow)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    (item,) = last["response"]["output"]
    assert (item["status"], len(item["content"])) == ("incomplete", 1)


@pytest.mark.clients
def test_openais_client_reads_responses(server: Running, caller: Running) -> None:
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    url = f"http://127.0.0.1:{server.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    given: dict[str, Any] = {**ASKED, "model": MODEL, "max_output_tokens": 8}
    done = client.responses.create(**given)
    assert done.output_text == asked(server, max_output_tokens=8)["output"][0]["content"][0]["text"]
    assert (done.status, done.usage.output_tokens) == ("incomplete", 8)
    deltas = [e.delta for e in client.responses.create(**given, stream=True) if "delta" in e.type]
    assert "".join(deltas) == done.output_text
    number = pydantic.create_model("Number", seventeen=(bool, ...))
    del given["max_output_tokens"]
    parsed = client.responses.parse(**given, text_format=number)
    assert isinstance(parsed.output_parsed, number)
    with client.responses.stream(**given, text_format=number) as stream:
        ended = [event for event in stream if event.type == "response.completed"]
        assert isinstance(stream.get_final_response().output_parsed, number)
    assert isinstance(ended[0].response.output_parsed, number)
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        client.responses.create(**given, previous_response_id=done.id)
    agent = client.with_options(base_url=f"http://127.0.0.1:{caller.port}/v1")
    calling = {"tools": [TURN_ON], "tool_choice": "required", "parallel_tool_calls": False}
    with agent.responses.stream(**given, **calling) as stream:
        called = stream.get_final_response()
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "now")
    assert json.loads(call.arguments).keys() == {"on"}
    back = {"type": "function_call_output", "call_id": call.call_id, "output": "on"}
    turns = [{"role": "user", "content": "Hi"}, *called.output, back]
    again = agent.responses.create(**{**given, "input": turns, "max_output_tokens": 3})
    assert again.status == "incomplete"
