"""KServe's protocol as Triton speaks it: the tutorial's line word for word, tensors in JSON and
binary, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from edgespec.prompts import SamplingParams
from tests.unit.serve.serving import MODEL, Running

PATH = f"/v2/models/{MODEL}"
TUTORIAL = (
    b'{"text_input": "What is ML?", "max_tokens": 50, "bad_words": "", "stop_words": "",'
    b' "pad_id": 2, "end_id": 2}'
)


def generated(server: Running, **body: Any) -> Any:
    return server.post(f"{PATH}/generate", text_input="Hi", max_tokens=8, **body)


def text_of(server: Running, text: str, max_tokens: int = 8) -> str:
    sampling = SamplingParams(temperature=0, max_generate_length=max_tokens)
    return server.service.engine.generate(text, sampling).text


def test_the_tutorials_line_is_answered(server: Running) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl -d without a header
    done = server.client.post("/v2/models/ensemble/generate", content=TUTORIAL, headers=form)
    assert done.json() == {
        "model_name": "ensemble",
        "model_version": "1",
        "sequence_end": False,
        "sequence_id": 0,
        "sequence_start": False,
        "text_output": "What is ML?" + text_of(server, "What is ML?", 50),
        "adjusted": ["pad_id: nothing is padded"],
    }


def test_parameters_have_the_names_of_both_backends(server: Running) -> None:
    plain = generated(server, exclude_input_in_output=True).json()["text_output"]
    assert plain == text_of(server, "Hi")
    other = {"sampling_param_exclude_input_from_output": True, "sampling_param_max_tokens": 8}
    asked = {"text_input": "Hi", "parameters": other, "sampling_param_temperature": 0}
    assert server.post(f"{PATH}/generate", **asked).json()["text_output"] == plain
    told = ("return_finish_reason", "return_cumulative_logprob", "return_perf_metrics")
    done = generated(server, **dict.fromkeys(told, True), disable_spec_decode=True).json()
    assert (done["finish_reason"], done["acceptance_rate"]) == ("length", 0.0)
    assert done["cumulative_logprob"] < 0
    times = ("arrival", "first_scheduled", "first_token", "last_token")
    assert sorted(done[f"{name}_time_ns"] for name in times) == [
        done[f"{name}_time_ns"] for name in times
    ]
    read = done["kv_cache_reused_block"] + done["kv_cache_missed_block"]
    assert read == len(server.service.engine.encode("Hi"))


def test_an_end_of_ones_own_ends_the_answer(server: Running) -> None:
    greedy = SamplingParams(temperature=0, max_generate_length=8)
    ids = server.service.engine.generate("Hi", greedy).token_ids
    end = next(i for i in range(1, len(ids)) if ids[i] not in ids[:i])
    done = generated(server, end_id=ids[end], return_finish_reason=True).json()
    assert done["text_output"] == "Hi" + server.service.engine.decode(ids[:end])
    assert (done["finish_reason"], "adjusted" in done) == ("stop", False)
    inputs = [tensor("text_input", "BYTES", "Hi"), tensor("pad_id", "INT32", 0)]
    told = server.post(f"{PATH}/infer", inputs=inputs).json()["parameters"]
    assert told == {"adjusted": "pad_id: nothing is padded"}


def test_a_stream_joined_is_the_answer(server: Running) -> None:
    asked = {"text_input": "Hi", "max_tokens": 8, "return_finish_reason": True}
    with server.client.stream("POST", f"{PATH}/generate_stream", json=asked) as response:
        lines = [line for line in response.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["text_output"] for event in events) == text_of(server, "Hi")
    assert [event.get("finish_reason") for event in events[-2:]] == [None, "length"]


def tensor(name: str, datatype: str, *data: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data), 1], "data": [*data], **more}


def test_tensors_of_several_prompts_in_json(server: Running) -> None:
    inputs = [
        tensor("text_input", "BYTES", "Hi", "Ho"),
        tensor("max_tokens", "INT32", 8),
        tensor("return_finish_reason", "BOOL", True, False),
    ]
    refused = server.post(f"{PATH}/infer", inputs=inputs, outputs=[{"name": "stop_reason"}])
    assert refused.status_code == 400
    assert "stop_reason" in refused.json()["error"]
    done = server.post(f"{PATH}/infer", inputs=inputs, outputs=[{"name": "text_output"}], id="7")
    assert done.json() == {
        "id": "7",
        "model_name": MODEL,
        "model_version": "1",
        "outputs": [
            {
                "name": "text_output",
                "datatype": "BYTES",
                "shape": [2],
                "data": [text + text_of(server, text) for text in ("Hi", "Ho")],
            }
        ],
    }


def test_binary_tensors(server: Running) -> None:
    raw = [b"\2\0\0\0Hi", np.array([8], "<i4").tobytes()]
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1], "parameters": {"binary_data_size": size}}
        for name, datatype, size in (("text_input", "BYTES", 6), ("max_tokens", "INT32", 4))
    ]
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    whole = head + b"".join(raw)
    done = server.client.post(f"{PATH}/infer", content=whole, headers=headers)
    end = int(done.headers["inference-header-content-length"])
    told, rest = json.loads(done.content[:end])["outputs"][0], done.content[end:]
    assert told["parameters"] == {"binary_data_size": len(rest)}
    assert int.from_bytes(rest[:4], "little") == len(rest) - 4
    assert rest[4:].decode() == "Hi" + text_of(server, "Hi")
    for torn in (whole[:-1], whole + b"0", whole.replace(b"\2\0\0\0", b"\3\0\0\0")):
        refused = server.client.post(f"{PATH}/infer", content=torn, headers=headers)
        assert refused.status_code == 400
        assert isinstance(refused.json()["error"], str)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": {}}, "inputs"),
        ({"inputs": [tensor("text_input", "BYTES", "a") | {"shape": [2]}]}, "text_input"),
        ({"inputs": [tensor("max_tokens", "INT32", 1)]}, "text_input"),
        ({"inputs": [tensor("text_input", "BYTES", "a", "b", "c"), *[]], "more": 1}, "more"),
        (
            {
                "inputs": [
                    tensor("text_input", "BYTES", "a", "b", "c"),
                    tensor("max_tokens", "INT32", 1, 2),
                ]
            },
            "max_tokens",
        ),
    ],
)
def test_tensors_that_do_not_go_together(server: Running, body: Any, words: str) -> None:
    refused = server.post(f"{PATH}/infer", **body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]


def test_what_is_refused_says_why(server: Running) -> None:
    for body, words in (({"lora_task_id": 1}, "adapters"), ({"beam_width": 2}, "beam")):
        refused = generated(server, **body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]
    assert server.client.get("/v2/models/other/ready").status_code == 404
    assert server.client.get(f"{PATH}/versions/2/ready").status_code == 404


def test_health_and_metadata(server: Running) -> None:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        f"{PATH}/ready",
        f"{PATH}/versions/1/ready",
    ):
        assert server.client.get(path).status_code == 200
    assert "binary_tensor_data" in server.client.get("/v2").json()["extensions"]
    about = server.client.get(PATH).json()
    names = {row["name"]: row["datatype"] for row in about["inputs"]}
    assert (names["text_input"], names["max_tokens"], names["temperature"]) == (
        "BYTES",
        "INT32",
        "FP32",
    )
    config = server.client.get(f"{PATH}/config").json()
    assert {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]} in config["output"]


@pytest.mark.clients
def test_tritonclient_asks_in_tensors(server: Running) -> None:
    http = pytest.importorskip("tritonclient.http")
    client = http.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_model_ready(MODEL)
    assert client.get_model_metadata(MODEL)["name"] == MODEL
    text = http.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["Hi"]], object))
    tokens = http.InferInput("max_tokens", [1, 1], "INT32")
    tokens.set_data_from_numpy(np.array([[8]], np.int32))
    done = client.infer(MODEL, [text, tokens])
    assert done.as_numpy("text_output")[0].decode() == "Hi" + text_of(server, "Hi")
    with pytest.raises(Exception, match="no model"):
        client.infer("other", [text, tokens])
