"""`edgespec serve` as a process: what it says, answers and refuses, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from edgespec.cli.main import run
from edgespec.errors import RequestError
from edgespec.pipeline.prepare import RunRequest
from tests.lossless.engines import api_engines
from tests.small_pair import small_pair


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address, and what it said until it served."""
    line = [sys.executable, "-m", "edgespec", "serve", *words, "--port", "0"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        while (found := re.search(r"serving \S+ at (\S+)/v1\n", said)) is None:
            text = process.stderr.readline()
            assert text, said
            said += text
        yield process, found[1], said
    finally:
        process.kill()
        process.communicate()


def test_a_model_is_prepared_for_several_requests_and_sigterm_ends_it() -> None:
    pair, sizes = small_pair(), ["--max-input-len", "48", "--max-kv-cache-capacity", "64"]
    model = [str(pair.base), "--draft", str(pair.draft), *sizes, "--no-measure-costs"]
    with serving(*model, "--served-model-name", "toy", "--max-queue", "3") as (process, url, said):
        assert "lanes 16, context 64 tokens" in said
        assert "max_queue 3:" in said
        asked = {"model": "toy", "prompt": "Hi", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["text"]
        assert "speculative_decoding" in answer["metrics"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_model_is_prepared_for_prompts_as_long_as_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = []

    def prepared(request: RunRequest) -> None:
        lengths.append(request.limits.max_input_len)
        raise RequestError("enough was seen")

    monkeypatch.setattr("edgespec.cli.run.prepared_with_steps", prepared)
    for words in ([], ["--max-input-len", "48"]):
        run(["serve", str(small_pair().base), "--max-batch-size", "4", *words])
    assert lengths == [4096, 48]


def test_an_engine_with_one_lane_says_so_and_takes_no_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines = str(api_engines() / "one")
    with serving(engines, "--no-spec-decode") as (process, url, said):
        assert "the engine has one lane" in said
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "one"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    for words in (
        ["--max-batch-size", "4"],
        ["--host", "0.0.0.0"],
        ["--tls-key", engines],
        ["--served-model-name", ""],
    ):
        assert run(["serve", engines, *words]) == 2
        assert words[0] in capsys.readouterr().err


def test_a_prompt_is_there_after_a_restart(tmp_path: Path) -> None:
    asked = {"prompt": "A prompt of some length, that is read.", "max_tokens": 1, "temperature": 0}
    told = [str(api_engines() / "one"), "--prefix-cache-dir", str(tmp_path)]
    cached = []
    for _ in range(2):
        with serving(*told) as (process, url, said):
            assert f"prefix cache 256 MiB; on disk 4096 MiB, {tmp_path}" in said
            usage = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert cached == [0, usage["prompt_tokens"] - 1]


def test_tls_is_served(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    try:
        subprocess.run(
            [*made, "-keyout", key, "-out", certificate], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    words = ["--tls-certificate", certificate, "--tls-key", key]
    with serving(str(api_engines() / "one"), *words) as (_, url, _):
        assert url.startswith("https://")
        assert httpx.get(f"{url}/health", verify=False).json()["status"] == "ok"
