"""`edgespec quantize` as users type it, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgespec.cli.main import run
from tests import toys

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="needs nvidia-modelopt"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "base"
    return toys.make_base(
        path, "qwen3", layers=2, hidden=128, intermediate=256, vocab=320, dtype="bfloat16"
    )


def edgespec(*args: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "edgespec.cli.main", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


@needs_modelopt
@pytest.mark.slow
def test_the_guides_command_writes_a_checked_directory_and_is_quiet(
    base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "fp8"
    sizes = ["--num_samples", "2", "--calib_seq_len", "32"]
    line = [
        "quantize",
        "llm",
        "--model_dir",
        base,
        "--quantization",
        "fp8",
        "--output_dir",
        out,
        *sizes,
    ]
    done = edgespec(*line)
    assert (done.returncode, done.stderr) == (0, "")
    first, logits, perplexity, weights, *notes = done.stdout.splitlines()
    assert first.startswith(f"fp8: {out} (")
    assert "cosine 0.99" in logits
    assert "before" in perplexity
    assert "off by at most 0.02" in weights
    assert any("weights only" in note for note in notes)
    again = edgespec(*line)
    assert again.returncode == 0
    assert "nothing was written" in again.stdout


@needs_modelopt
@pytest.mark.slow
def test_int4_awq_as_json_with_what_modelopt_said_under_debug(base: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"turns": [f"Count to {i}.", "One, two, three. " * 9]}) + "\n"
            for i in range(9)
        )
    )
    sizes = ["--numSamples", "2", "--calibSeqLen", "32", "--textDataset", data]
    done = edgespec(
        "quantize",
        "llm",
        "--modelDir",
        base,
        "--quantization",
        "int4_awq",
        "--outputDir",
        tmp_path / "o",
        *sizes,
        "--json",
        "--debug",
    )
    assert done.returncode == 0
    manifest = json.loads(done.stdout)["manifest"]
    assert manifest["options"]["calib_data"]["name"] == "prompts.jsonl"
    assert manifest["check"]["logits_cosine"] > 0.9
    assert "awq_lite" in done.stderr


@needs_modelopt
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_finished_layers_and_the_same_command_goes_on(
    tmp_path: Path, number: int, code: int
) -> None:
    base = toys.make_base(
        tmp_path / "base", "llama", layers=24, hidden=256, intermediate=512, vocab=320
    )
    out, kept = tmp_path / "out", tmp_path / ".out.quantize"
    line = [
        "quantize",
        "llm",
        "--model-dir",
        base,
        "--quantization",
        "int8_sq",
        "--output-dir",
        out,
    ]
    command = [sys.executable, "-m", "edgespec.cli.main", *map(str, line)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while (
        not (kept / "part-00001.safetensors").exists()
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"kept in {kept}: the same command resumes from there" in said
    assert not out.exists()
    again = edgespec(*line)
    assert again.returncode == 0
    assert "resumed at layer" in again.stdout
    assert not kept.exists()


def test_refusals_have_their_exit_codes(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, out = tmp_path / "empty.txt", str(tmp_path / "out")
    empty.touch()
    line = ["quantize", "llm", "--model-dir", str(base), "--output-dir", out, "--quantization"]
    assert run([*line, "fp7"]) == 2
    assert run([*line, "fp8", "--calib-data", str(empty)]) == 3
    assert "is empty" in capsys.readouterr().err
    assert run([*line, "fp8", "--visual-quantization", "fp8"]) == 3
    assert "quantizes no vision tower" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    assert run([*line, "fp8"]) == 4
    assert "already exists" in capsys.readouterr().err
