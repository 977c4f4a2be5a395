"""OpenAI's routes over a socket: what is answered is what the Python API answers, in their form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk
from edgespec.serve import sse
from edgespec.serve.answering import Ask
from edgespec.serve.app import App
from edgespec.serve.metrics import ServeMetrics
from edgespec.serve.openai_chat import FIELDS as CHAT
from edgespec.serve.openai_common import derived, samplings
from edgespec.serve.reasoning import Marks, ThoughtSplitter
from tests.pace import paced
from tests.unit.serve.serving import MODEL, Running, until

ASK = [{"role": "user", "content": "Hi"}]
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
WHOLE = SamplingParams(temperature=1, top_p=1, top_k=0, max_generate_length=12)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "stop": ["a"]},
    {"seed": 5, "repetition_penalty": 1.2, "logit_bias": {"42": 3}},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 3},
]
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [17]}}}},
    {"structured_outputs": {"regex": "17"}},
    {"guided_choice": ["17"]},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_is_the_python_api_s(
    server: Running, engine: Engine, sampling: dict[str, Any]
) -> None:
    expected = engine.generate(ASK, replace(WHOLE, **sampling))
    answer = server.chat("Hi", **{"temperature": 1, "max_tokens": 12, **sampling})
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
    ended = {"max-length": "length", "stop-words": "stop", "end-of-sequence": "stop"}
    assert answer["choices"][0]["finish_reason"] == ended[expected.finish_reason]
    steps = answer["metrics"]["speculative_decoding"]
    assert steps == expected.metrics.speculative_decoding()


def test_what_is_not_given_has_openai_s_default() -> None:
    assert samplings({}, 9, 0) == [SamplingParams(1, 1, 0, max_generate_length=9)]


def test_several_choices_begin_with_the_seed_itself(server: Running, engine: Engine) -> None:
    seeds = [derived(3, index) for index in range(3)]
    assert len({*seeds}) == 3
    assert seeds[0] == 3
    texts = [engine.generate(ASK, replace(WHOLE, seed=seed)).text for seed in seeds]
    answer = server.chat("Hi", temperature=1, seed=3, n=3, max_tokens=12)
    assert [choice["message"]["content"] for choice in answer["choices"]] == texts
    assert ["metrics" in part for part in (answer, answer["choices"][2])] == [False, True]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joined_is_the_whole_answer(server: Running, n: int) -> None:
    asked: dict[str, Any] = {
        "seed": 11,
        "n": n,
        "max_tokens": 14,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    whole = server.chat("Hi", **asked)
    events = server.events(CHAT_PATH, messages=ASK, stream_options={"include_usage": True}, **asked)
    first, last = events[:n], events[-1]
    assert all(e["choices"][0]["delta"] == {"role": "assistant", "content": ""} for e in first)
    assert (last["choices"], last["usage"].keys()) == ([], whole["usage"].keys())
    assert all(event["usage"] is None for event in events[:-1])
    assert ("metrics" in last) == (n == 1)
    for index, choice in enumerate(whole["choices"]):
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        text = "".join(part["delta"].get("content", "") for part in own)
        assert text == choice["message"]["content"]
        logprobs = [entry for p in own if p["logprobs"] for entry in p["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [i for p in own for i in p.get("token_ids", [])] == choice["token_ids"]
        reasons = [p["finish_reason"] for p in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]


def test_usage_comes_only_if_it_is_asked_for(server: Running) -> None:
    asked = {"messages": ASK, "max_tokens": 4}
    plain = server.events(CHAT_PATH, **asked)
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in plain)
    assert "metrics" in plain[-1]
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = server.events(CHAT_PATH, stream_options=options, **asked)
    counts = [event["usage"]["completion_tokens"] for event in running]
    assert (counts[0], counts[-1], counts) == (0, 4, sorted(counts))


def test_log_probabilities_are_those_of_the_engine(server: Running, engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_generate_length=5, num_logprobs=3)
    expected = engine.generate(ASK, params)
    content = server.chat(max_tokens=5, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]
    for entry, step in zip(content["content"], expected.logprobs, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == [p for _, p in step[:3]]
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_completions_take_texts_and_ids_several_at_a_time(server: Running, engine: Engine) -> None:
    ids = list(engine.encode("The small boat"))
    greedy = SamplingParams(temperature=0, max_generate_length=16)
    expected = [engine.generate(prompt, greedy) for prompt in ("Every tree", "The small boat")]
    asked = {"temperature": 0, "n": 2, "echo": True}
    for prompts in (["Every tree", "The small boat"], ["Every tree", ids]):
        answer = server.post(TEXT_PATH, prompt=prompts, **asked).json()
        texts = [choice["text"] for choice in answer["choices"]]
        one, two = f"Every tree{expected[0].text}", f"The small boat{expected[1].text}"
        assert texts == [one, one, two, two]
    assert answer["usage"]["prompt_tokens"] == sum(len(e.prompt_ids) for e in expected)
    events = server.events(TEXT_PATH, prompt=ids, echo=True, stream_options={"include_usage": True})
    assert "".join(c["text"] for e in events for c in e["choices"]) == two
    assert events[-1]["usage"]["completion_tokens"] == 16


def test_a_prompt_is_scored_without_an_answer(server: Running, engine: Engine) -> None:
    asked = {"prompt": "Every tree", "echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0}
    choice = server.post(TEXT_PATH, **asked).json()["choices"][0]
    scored = SamplingParams(temperature=0, max_generate_length=0, prompt_logprobs=2)
    expected = engine.generate("Every tree", scored)
    ids = [int(i) for i in expected.prompt_ids]
    own = [
        None if step is None else dict(step)[i]
        for i, step in zip(ids, expected.prompt_logprobs, strict=True)
    ]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("Every tree", own)
    assert choice["logprobs"]["top_logprobs"][0] is own[0] is None
    followed = server.post(TEXT_PATH, **{**asked, "max_tokens": 2}).json()["choices"][0]
    assert followed["logprobs"]["token_logprobs"][:-2] == own
    refused = server.post(TEXT_PATH, **asked, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_has_the_form_that_is_asked_for(server: Running, form: dict[str, Any]) -> None:
    choice = server.chat("Hi", max_tokens=12, **form)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("17", "stop")


def test_forms_that_cannot_be_are_refused_by_name(server: Running) -> None:
    for form, param in (
        ({**FORMS[1], **FORMS[2]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"guided_json": {"type": "object", "unevaluatedProperties": False}}, "guided_json has"),
    ):
        refused = server.post(CHAT_PATH, messages=ASK, **form)
        assert refused.status_code == 400
        assert param in refused.json()["error"]["message"]


def test_completions_give_log_probabilities_by_token(server: Running) -> None:
    answer = server.post(TEXT_PATH, prompt="Every tree", temperature=0, logprobs=2, max_tokens=6)
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 6
    offsets = [sum(map(len, logprobs["tokens"][:i])) for i in range(6)]
    assert logprobs["text_offset"] == offsets
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert (len(top), max(top, key=lambda name: top[name])) == (2, token)


def test_thoughts_are_sent_apart_however_the_text_is_cut(engine: Engine) -> None:
    marks, text = Marks("<think>", "</think>"), " \n<think>a < b</thin</think>\n\nyes</think>"
    for size in range(1, len(text)):
        splitter = ThoughtSplitter(marks, engine.tokenizer, [])
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = [*(splitter.push([5], [piece]) for piece in pieces), splitter.flush()]
        assert "".join(thoughts for thoughts, _ in parts) == "a < b</thin"
        assert "".join(answer for _, answer in parts) == "\n\nyes</think>"
    unended = ThoughtSplitter(marks, engine.tokenizer, [])
    assert [unended.push([5], ["<think>so</t"]), unended.flush()] == [("so", ""), ("</t", "")]
    other = ThoughtSplitter(marks, engine.tokenizer, [])
    assert [other.push([5], ["<thin"]), other.flush()] == [("", ""), ("", "<thin")]
    by_id = ThoughtSplitter(Marks("[T]", "[/T]", 1, 2), engine.tokenizer, [])
    assert by_id.push([1, 7, 2, 8], ["", "so", "", "yes"]) == ("so", "yes")
    assert by_id.num_thoughts == 2


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT_PATH, "temperature", -1),
        (CHAT_PATH, "temperature", "0.5"),
        (CHAT_PATH, "n", 0),
        (CHAT_PATH, "n", 100),
        (CHAT_PATH, "seed", 1.5),
        (CHAT_PATH, "top_logprobs", 3),  # without logprobs
        (CHAT_PATH, "max_completion_tokens", 0),
        (CHAT_PATH, "tools", [{"type": "function"}]),
        (CHAT_PATH, "response_format", {"type": "xml"}),
        (CHAT_PATH, "chat_template", "{{ x }}"),
        (CHAT_PATH, "chat_template_kwargs", {"messages": 1}),
        (CHAT_PATH, "reasoning_effort", "high"),  # the toy has no such mode
        (CHAT_PATH, "stream_options", {"usage": True}),
        (CHAT_PATH, "messages", []),
        (CHAT_PATH, "messages", [{"role": "king", "content": ""}]),
        (CHAT_PATH, "temprature", 1),
        (TEXT_PATH, "best_of", 4),
        (TEXT_PATH, "best_of", True),
        (TEXT_PATH, "suffix", "end"),
        (TEXT_PATH, "prompt", [1, "a"]),
        (TEXT_PATH, "prompt", [[10**9]]),
        (TEXT_PATH, "logprobs", -1),
        ("/tokenize", "add_special_tokens", 1),
        ("/detokenize", "tokens", [10**6]),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(
    server: Running, path: str, name: str, value: object
) -> None:
    least: dict[str, dict[str, Any]] = {
        CHAT_PATH: {"messages": ASK},
        TEXT_PATH: {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {},
    }
    response = server.post(path, **{**least[path], name: value})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"].partition("[")[0].partition(".")[0] == name
    assert error["type"] == "invalid_request_error"
    assert "x-should-retry" not in response.headers


def test_what_changes_nothing_is_named_and_what_asks_for_nothing_is_not(server: Running) -> None:
    answer = server.chat(
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        max_tokens=1000,
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        presence_penalty=0,
        best_of=1,
    )
    named = [line.partition(":")[0] for line in answer["adjusted"]]
    assert named == ["user", "store", "metadata", "service_tier", "max_tokens"]
    assert "adjusted" not in server.chat(max_tokens=1)
    events = server.events(CHAT_PATH, messages=ASK, max_tokens=1, user="me")
    assert ["adjusted" in event for event in events] == [True] + [False] * (len(events) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_context_error(server: Running, stream: bool) -> None:
    for length in (50, 70):
        response = server.post(TEXT_PATH, prompt=[5] * length, stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 64 tokens" in error["message"]
        assert "prompt is too long" in error["message"]  # what langchain looks for
    assert server.chat(max_tokens=None)["usage"]["total_tokens"] == 64


def test_prefixes_are_shared_among_requests_of_one_salt(server: Running) -> None:
    def cached(salt: str) -> int:
        usage = server.chat("Rain fell on the roof", cache_salt=salt, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0
    assert cached("one") > 0


def test_plain_decoding_may_be_asked_for(server: Running) -> None:
    drafted, plain = server.chat(max_tokens=9), server.chat(max_tokens=9, disable_spec_decode=True)
    assert plain["choices"][0]["message"] == drafted["choices"][0]["message"]
    assert ["metrics" in answer for answer in (drafted, plain)] == [True, False]


def test_texts_become_ids_and_ids_texts(server: Running, engine: Engine) -> None:
    made = server.post("/tokenize", prompt="The boat", return_token_strs=True).json()
    assert made["tokens"] == list(engine.encode("The boat"))
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert server.post("/tokenize", messages=ASK).json()["tokens"] == list(engine.encode(ASK))
    assert server.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": "The boat"}
    assert server.post("/tokenize", prompt="a", messages=ASK).status_code == 400


def test_the_model_is_known_by_its_name(server: Running) -> None:
    (entry,) = server.client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (MODEL, 64)
    assert server.client.get(f"/v1/models/{MODEL}").json() == entry
    for response in (
        server.client.get("/v1/models/gpt/4"),
        server.post(CHAT_PATH, model="gpt-4", messages=ASK),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_metrics_add_up_to_what_answers_said(server: Running) -> None:
    before = metrics_of(server)
    answers = [server.chat(text, max_tokens=9) for text in ("Hi", "Rain fell", "one, two")]
    after = metrics_of(server)

    def grown(name: str, *more: str) -> float:
        key = f"vllm:{name}{{{','.join(sorted((*LABELS, *more)))}}}"
        return after.get(key, 0) - before.get(key, 0)

    steps = [answer["metrics"]["speculative_decoding"] for answer in answers]
    drafts = sum(sum(d > 0 for d in step["per_step_drafted"]) for step in steps)
    accepted = sum(step["num_accepted_draft_tokens"] for step in steps)
    assert grown("spec_decode_num_drafts_total") == drafts > 0
    drafted = sum(step["num_draft_tokens"] for step in steps)
    assert grown("spec_decode_num_draft_tokens_total") == drafted
    assert grown("spec_decode_num_accepted_tokens_total") == accepted
    assert grown("generation_tokens_total") == 27
    first = sum(sum(count > 0 for count in step["per_step_accepted"]) for step in steps)
    assert grown("spec_decode_num_accepted_tokens_per_pos_total", 'position="0"') == first
    computed = sum(a["usage"]["prompt_tokens"] for a in answers) - grown("prefix_cache_hits_total")
    assert grown("iteration_tokens_total_sum") == computed + 27
    assert 6 <= grown("iteration_tokens_total_count") <= 27
    assert grown("inter_token_latency_seconds_count") == 24
    assert grown("request_success_total", 'finished_reason="length"') == 3
    assert grown("time_to_first_token_seconds_count") == 3
    assert after[f"vllm:num_requests_running{{{','.join(LABELS)}}}"] == 0


LABELS = ('engine="0"', f'model_name="{MODEL}"')


def metrics_of(server: Running) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    return {n: float(v) for n, v in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


def test_metrics_count_the_steps_of_requests_that_run(server: Running) -> None:
    labels = f"{{{','.join(LABELS)}}}"
    drafts = f"vllm:spec_decode_num_drafts_total{labels}"
    tokens = f"vllm:generation_tokens_total{labels}"
    before = metrics_of(server)
    with paced() as allow, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.chat, "Rain fell", max_tokens=20)
        allow(4)
        until(lambda: metrics_of(server)[drafts] > before[drafts])
        now = metrics_of(server)
        assert not asked.done()
        assert now[tokens] > before[tokens]
        assert now[f"vllm:num_requests_running{labels}"] == 1
        assert 0 < now[f"vllm:kv_cache_usage_perc{labels}"] < 1
        allow(1000)


def test_a_steps_latency_is_that_of_each_of_its_tokens(engine: Engine) -> None:
    metrics = ServeMetrics(engine, MODEL)
    watch = metrics.watch(Ask([1], SamplingParams()))
    for count in (1, 3, 0, 2):
        watch.step(Chunk([5] * count, [], 0, None))
    assert b'inter_token_latency_seconds_count{engine="0",model_name="toy"} 5.0' in (
        metrics.exposition()
    )


def test_a_request_runs_as_it_asks(server: Running, engine: Engine) -> None:
    more = {"priority": 7, "cache_salt": "salt", "disable_spec_decode": True, "max_tokens": 1}
    with paced() as allow, ThreadPoolExecutor(1) as pool:
        pool.submit(server.chat, **more)
        until(lambda: engine.driver.pending)
        (handle,) = engine.driver.pending
        allow(100)
    assert (handle.priority, handle.cache_salt, handle.plan) == (7, "salt", None)


def test_openapi_lists_every_route_and_field(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    routes = {(p.replace(":path}", "}"), r.method) for p, r in of_app(server)}
    told = {(p, m.upper()) for p, methods in document["paths"].items() for m in methods}
    assert told == routes
    versioned = document["paths"]["/v2/models/{model}/versions/{version}/infer"]["post"]
    assert [part["name"] for part in versioned["parameters"]] == ["model", "version"]
    assert {"429", "504"} <= versioned["responses"].keys()
    anthropics = document["paths"]["/v1/messages"]["post"]["responses"]
    assert "529" in anthropics
    assert not {"429", "503"} & anthropics.keys()
    body = document["paths"][CHAT_PATH]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"].keys() == CHAT.keys() > {"messages", "tools"}
    assert body["schema"]["required"] == ["messages"]


def of_app(server: Running) -> list[tuple[str, Any]]:
    return [(route.path, route) for _, route in App(server.service).routes]


def test_event_of_a_text_is_that_of_its_value() -> None:
    def value(text: str) -> dict[str, object]:
        return {"id": "a", "choices": [{"delta": {"content": text}, "index": 0}], "usage": None}

    for text in ('say "no"\n', "\x00\u2028é\U0001f600", "\\u0000"):
        assert sse.TextEvent(value).of(text) == sse.event(value(text))
