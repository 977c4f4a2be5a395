"""OpenAI's own client asks the server, and schemathesis all that the OpenAPI document has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.serve.serving import MODEL, Running

ASK = [{"role": "user", "content": "Hi"}]
FORM = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"enum": [17]}}}


@pytest.mark.clients
def test_openais_client_reads_answers_streams_forms_and_errors(server: Running) -> None:
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{server.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert client.models.list().data[0].id == MODEL
    create = client.chat.completions.create
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0}
    (own,) = server.chat("Hi", max_tokens=12)["choices"]
    text = own["message"]["content"]
    assert create(**asked).choices[0].message.content == text
    parts = create(**asked, stream=True)
    deltas = [choice.delta.content or "" for part in parts for choice in part.choices]
    assert "".join(deltas) == text
    assert create(**asked, response_format=FORM).choices[0].message.content == "17"
    scored = client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=0, echo=True, logprobs=1
    )
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    with pytest.raises(openai.NotFoundError):
        create(**{**asked, "model": "other"})
    with pytest.raises(openai.BadRequestError) as caught:
        create(**{**asked, "messages": [{**ASK[0], "content": "a " * 99}]})
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.clients
def test_no_request_that_schemathesis_makes_is_answered_otherwise_than_the_document_says(
    server: Running, tmp_path: Path
) -> None:
    """Bodies that its schemas take may be refused: what messages may be is not in them."""
    pytest.importorskip("schemathesis")
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    command = ["run", url, "--exclude-checks=positive_data_acceptance", "--phases=fuzzing"]
    ran = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *command, "--max-examples=10", "--seed=1"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
