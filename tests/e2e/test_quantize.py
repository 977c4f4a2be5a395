"""`edgespec quantize` as users type it, in this process."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edgespec.cli.main import run
from edgespec.quantize.work import CalibrationWork
from tests import toys
from tests.toys.vision import write_vlm

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="needs nvidia-modelopt"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "base"
    return toys.make_base(
        path, "qwen3", layers=2, hidden=128, intermediate=256, vocab=320, dtype="bfloat16"
    )


SIZES = ["--num_samples", "2", "--calib_seq_len", "32"]


@needs_modelopt
@pytest.mark.slow
def test_the_guides_command_writes_a_checked_directory_and_is_quiet(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fp8"
    line = ["quantize", "llm", "--model_dir", str(base), "--quantization", "fp8"]
    line += ["--output_dir", str(out), *SIZES]
    assert run(line) == 0
    out_of_it, told = capfd.readouterr()
    assert told == ""
    first, logits, perplexity, weights, *notes = out_of_it.splitlines()
    assert first.startswith(f"fp8: {out} (")
    assert "cosine 0.99" in logits
    assert "before" in perplexity
    assert "relative error at most 0.02" in weights
    assert any("weights only" in note for note in notes)
    assert run(line) == 0
    assert "nothing was written" in capfd.readouterr().out


@needs_modelopt
@pytest.mark.slow
def test_int4_awq_as_json_with_what_modelopt_said_under_debug(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"turns": [f"Count to {i}.", "One, two, three. " * 9]}) + "\n"
            for i in range(9)
        )
    )
    line = ["quantize", "llm", "--modelDir", str(base), "--quantization", "int4_awq"]
    line += ["--outputDir", str(tmp_path / "o"), "--numSamples", "2", "--calibSeqLen", "32"]
    assert run([*line, "--textDataset", str(data), "--json", "--debug"]) == 0
    out, err = capsys.readouterr()
    manifest = json.loads(out)["manifest"]
    assert manifest["options"]["calib_data"]["name"] == "prompts.jsonl"
    assert manifest["check"]["logits_cosine"] > 0.9
    assert "awq_lite" in err


@needs_modelopt
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_finished_layers_and_the_same_command_goes_on(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    """The signal comes when the first layer has just been written."""
    out, kept = tmp_path / "out", tmp_path / ".out.quantize"
    line = ["quantize", "llm", "--model-dir", str(base), "--quantization", "int8_sq"]
    line += ["--output-dir", str(out), *SIZES]
    keep_part = CalibrationWork.keep_part

    def keep_part_and_stop(self: CalibrationWork, number_of_part: int, tensors: Any) -> None:
        keep_part(self, number_of_part, tensors)
        if number_of_part == 0:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(CalibrationWork, "keep_part", keep_part_and_stop)
        assert run(line) == code
    assert f"kept in {kept}: the same command resumes from there" in capsys.readouterr().err
    assert (kept / "part-00000.safetensors").exists()
    assert not out.exists()
    assert run(line) == 0
    assert "resumed at layer 2 of 2" in capsys.readouterr().out
    assert not kept.exists()


def test_an_image_encoder_alone_is_quantized_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, images, out = tmp_path / "base", tmp_path / "images", tmp_path / "out"
    write_vlm(base, "qwen2_5_vl")
    images.mkdir()
    Image.new("RGB", (99, 61), "teal").save(images / "a.png")
    line = ["quantize", "llm", "--modelDir", str(base), "--outputDir", str(out)]
    capsys.readouterr()
    assert run([*line, "--visualQuantization", "fp8", "--image_dataset", str(images)]) == 0
    said = capsys.readouterr().out
    assert "fp8 encoder, 1 image: cosine 0.99" in said
    assert "calibrated with 1 image from the folder images" in said
    assert run(["inspect", str(out)]) == 0
    said = capsys.readouterr().out
    assert "22 Linears, activations static tensor" in said
    assert "1 image calibrated it: cosine 0.99" in said
    assert "perplexity" not in said


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
    assert "has no image encoder" in capsys.readouterr().err
    assert run([*line, "fp8", "--visual-quantization", "int8"]) == 2
    assert "'int8' is not 'fp8'" in capsys.readouterr().err
    assert run([*line[:-1]]) == 3
    assert "Give --quantization, --visual-quantization fp8, or both" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    assert run([*line, "fp8"]) == 4
    assert "already exists" in capsys.readouterr().err
