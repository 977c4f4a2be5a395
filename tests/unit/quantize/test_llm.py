"""Claims about quantize/llm.py: each format in ModelOpt's layout, checked against the original; and
every refusal."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.artifacts import json_files, provenance
from edgespec.artifacts.manifest import QuantizeCheck
from edgespec.checkpoint.files import Checkpoint
from edgespec.errors import (
    BuildError,
    CheckpointError,
    EdgeSpecError,
    EnvironmentProblem,
    MissingDependency,
    OutputError,
    RequestError,
    UnsupportedModel,
)
from edgespec.quantization.schemes import MADE
from edgespec.quantize import calibration, check, llm, modelopt, plan
from edgespec.quantize.base import base_of
from edgespec.quantize.llm import Options, Quantized, quantize_llm
from tests import toys

HIDDEN, INNER, VOCAB = 128, 256, 320


class Told:
    """Progress that remembers its stages, and may interrupt one of them."""

    def __init__(self, interrupt: str | None = None) -> None:
        self.stages: dict[str, list[int]] = {}
        self.interrupt = interrupt

    def start(self, stage: str, total: int) -> None:
        self.stages[stage] = [total, 0]

    def advance(self, amount: int) -> None:
        last = next(reversed(self.stages))
        self.stages[last][1] += amount
        if last == self.interrupt:
            raise KeyboardInterrupt


pytestmark = pytest.mark.usefixtures("needs_modelopt")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    sizes: dict[str, Any] = {"layers": 2, "hidden": HIDDEN, "intermediate": INNER, "vocab": VOCAB}
    return {
        "qwen3": toys.make_base(root / "qwen3", "qwen3", dtype="bfloat16", tied=True, **sizes),
        "llama": toys.make_base(root / "llama", "llama", **sizes),
    }


def options(quantization: str, **more: Any) -> Options:
    return Options(quantization, num_samples=2, calib_seq_len=32, **more)


def spoil_written(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: float, row: int | None = None
) -> None:
    """Multiply a tensor, or a row of it, before the result is checked."""
    write = llm.write_sidecars

    def spoil(checkpoint: Checkpoint, staging: Path, *settings: Any) -> None:
        tensors = load_file(staging / "model.safetensors")
        tensors[name][slice(None) if row is None else row] *= factor
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        write(checkpoint, staging, *settings)

    monkeypatch.setattr(llm, "write_sidecars", spoil)


def quantized(
    base: Path, out: Path, quantization: str, told: Told | None = None, **more: Any
) -> Quantized:
    return quantize_llm(
        str(base), out, options(quantization, **more), told or Told(), modelopt.Log()
    )


@pytest.fixture(scope="module")
def made(
    bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Quantized]:
    root = tmp_path_factory.mktemp("made")
    return {
        (family, name): quantized(base, root / f"{family}_{name}", name)
        for family, base in bases.items()
        for name in MADE
    }


def table(name: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors beside a Linear [out, in]: section 2.2 of what was found out about ModelOpt 0.47."""
    number: tuple[str, tuple[int, ...]] = ("F32", ())
    return {
        "fp8": {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": number,
            "input_scale": number,
        },
        "int4_awq": {
            "weight": ("U8", (rows // 2, columns)),
            "weight_scale": ("F32", (rows, columns // 128)),
            "pre_quant_scale": ("?", (columns,)),
        },
        "int8_sq": {
            "weight": ("I8", (rows, columns)),
            "weight_scale": ("F32", (rows,)),
            "input_scale": number,
            "pre_quant_scale": ("?", (columns,)),
        },
        "nvfp4": {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // 16)),
            "weight_scale_2": number,
            "input_scale": number,
        },
        "mxfp8": {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": ("U8", (rows, columns // 32)),
        },
    }[name]


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    data = (path / "model.safetensors").read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entries.pop("__metadata__")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_tensors_are_those_of_the_format_and_nothing_else(
    made: dict[tuple[str, str], Quantized], bases: dict[str, Path], family: str, name: str
) -> None:
    plain = {"qwen3": "BF16", "llama": "F32"}[family]
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor, entry in header(bases[family]).items():
        module = tensor.removesuffix(".weight")
        if not module.endswith("_proj"):
            expected[tensor] = entry
            continue
        for part, (dtype, shape) in table(name, *entry[1]).items():
            expected[f"{module}.{part}"] = (plain if dtype == "?" else dtype, shape)
    assert header(made[family, name].directory) == expected


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_figures_of_the_written_bytes_are_in_the_manifest(
    made: dict[tuple[str, str], Quantized], family: str, name: str
) -> None:
    """Random weights are known: section 2.2, within a fifth. INT8's is that of the rounding
    alone."""
    found = json_files.read_manifest(made[family, name].directory)["check"]
    typical = {"fp8": 0.026, "int4_awq": 0.118, "int8_sq": 0.0085, "nvfp4": 0.095, "mxfp8": 0.027}[
        name
    ]
    errors = list(found["weight_errors"].values())
    assert len(errors) == 14
    assert np.mean(errors) == pytest.approx(typical, rel=0.2)
    assert 0.9 < found["logits_cosine"] < 1
    assert found["logits_kl"] > 0
    assert found["perplexity_before"] != found["perplexity_after"]
    assert found["num_tokens"] == calibration.MAX_HELD_OUT


def test_figures_before_are_those_of_transformers(
    bases: dict[str, Path], made: dict[Any, Quantized]
) -> None:
    """The layer by layer run, against one ordinary forward of the whole model."""
    manifest = made["llama", "fp8"].manifest
    tokenizer = llm.tokenizer_of(Checkpoint(bases["llama"]), modelopt.Log())
    windows = calibration.cut(calibration.read_texts(None, 1), tokenizer, 2, 32)
    model = toys.load_base(bases["llama"])
    loss, count = 0.0, 0
    for window in windows.held_out:
        ids = torch.tensor([window])
        with torch.no_grad():
            loss += float(model(ids, labels=ids).loss) * (len(window) - 1)
        count += len(window) - 1
    assert manifest.check.perplexity_before == pytest.approx(np.exp(loss / count), rel=1e-4)


def test_settings_tokenizer_and_config_travel(
    made: dict[Any, Quantized], bases: dict[str, Path]
) -> None:
    there = made["qwen3", "int4_awq"].directory
    source = json.loads((bases["qwen3"] / "config.json").read_text())
    config = json.loads((there / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == source
    assert settings["quant_method"] == "modelopt"
    assert (
        json.loads((there / "hf_quant_config.json").read_text())["quantization"]["group_size"]
        == 128
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (there / name).read_bytes() == (bases["qwen3"] / name).read_bytes()


def test_streaming_loads_neither_modelopt_nor_the_model(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.modelopt, "start", lambda log: pytest.fail("ModelOpt was imported"))
    monkeypatch.setattr(llm, "calibrate", lambda *args: pytest.fail("layers were calibrated"))
    told = Told()
    quantized(bases["llama"], tmp_path / "out", "mxfp8", told, lm_head_quantization="mxfp8")
    assert [s for s in told.stages if s != "hash"] == ["weights", "import", "export", "check"]
    assert all(done == total for stage, (total, done) in told.stages.items() if stage != "export")
    assert header(tmp_path / "out")["lm_head.weight_scale"] == ("U8", (VOCAB, HIDDEN // 32))


def test_head_of_a_tied_model_is_quantized_beside_its_embedding(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    result = quantized(bases["qwen3"], tmp_path / "out", "mxfp8", lm_head_quantization="mxfp8")
    names = header(tmp_path / "out")
    assert names["model.embed_tokens.weight"] == ("BF16", (VOCAB, HIDDEN))
    assert names["lm_head.weight"] == ("F8_E4M3", (VOCAB, HIDDEN))
    assert 0 < result.manifest.check.weight_errors["lm_head"] < 0.04


@pytest.mark.parametrize(
    ("body", "head", "dtype"),
    [
        ("fp8", "int4_awq", "U8"),
        ("fp8", "nvfp4", "U8"),
        ("fp8", "mxfp8", "F8_E4M3"),
        ("nvfp4", "mxfp8", "F8_E4M3"),
        ("nvfp4", "fp8", "F8_E4M3"),
        ("nvfp4", "int4_awq", "U8"),
        ("int4_awq", "int4_awq", "U8"),
    ],
)
def test_head_in_another_format(
    bases: dict[str, Path], tmp_path: Path, body: str, head: str, dtype: str
) -> None:
    result = quantized(bases["llama"], tmp_path / "out", body, lm_head_quantization=head)
    assert header(tmp_path / "out")["lm_head.weight"][0] == dtype
    assert len(result.manifest.check.weight_errors) == 15


def test_head_cache_and_what_is_left_out(bases: dict[str, Path], tmp_path: Path) -> None:
    result = quantized(
        bases["llama"],
        tmp_path / "out",
        "fp8",
        lm_head_quantization="fp8",
        fp8_cache=True,
        exclude=("*.1.*.down_proj",),
    )
    names = header(tmp_path / "out")
    assert names["lm_head.weight"][0] == "F8_E4M3"
    assert names["model.layers.0.self_attn.k_proj.k_scale"] == ("F32", ())
    assert names["model.layers.1.mlp.down_proj.weight"] == ("F32", (HIDDEN, INNER))
    assert "model.layers.1.mlp.down_proj" not in result.manifest.check.weight_errors


def test_tensors_that_transformers_drops_are_carried_over(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases["llama"], base)
    tensors = load_file(base / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.arange(6.0).reshape(2, 3)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    for name in ("fp8", "mxfp8"):
        quantized(base, tmp_path / name, name)
        assert torch.equal(
            load_file(tmp_path / name / "model.safetensors")["mtp.fc.weight"],
            tensors["mtp.fc.weight"],
        )
    settings = json.loads((tmp_path / "fp8" / "hf_quant_config.json").read_text())["quantization"]
    assert "mtp*" in settings["exclude_modules"]


def test_the_same_request_is_not_worked_on_twice(
    made: dict[Any, Quantized], bases: dict[str, Path]
) -> None:
    done = made["llama", "fp8"]
    told = Told()
    again = quantized(bases["llama"], done.directory, "fp8", told)
    assert set(told.stages) <= {"hash"}
    assert again.manifest == done.manifest
    with pytest.raises(OutputError, match="already exists"):
        quantized(bases["llama"], done.directory, "nvfp4")


def test_norm_that_was_changed_is_refused(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What folding smoothing into norms would do."""
    spoil_written(monkeypatch, "model.layers.1.input_layernorm.weight", 1.5)
    with pytest.raises(BuildError, match=r"layernorm\.weight is not quantized but was changed"):
        quantized(bases["llama"], tmp_path / "out", "int4_awq")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_table_that_was_changed_is_refused(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Even in one row that no token of the text reads."""
    spoil_written(monkeypatch, name, 1.5, row=VOCAB - 1)
    with pytest.raises(BuildError, match=rf"{name} is not quantized but was changed"):
        quantized(bases["llama"], tmp_path / "out", "mxfp8")


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_a_result_that_cannot_be_read_back_is_our_fault(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = llm.write_sidecars

    def spoil(checkpoint: Checkpoint, staging: Path, *settings: Any) -> None:
        tensors = load_file(staging / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight_scale"]
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        write(checkpoint, staging, *settings)

    monkeypatch.setattr(llm, "write_sidecars", spoil)
    with pytest.raises(BuildError, match="the written checkpoint cannot be read back"):
        quantized(bases["llama"], tmp_path / "out", name)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_cannot_be_read_back_are_our_fault(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = llm.write_sidecars

    def spoil(checkpoint: Checkpoint, staging: Path, *settings: Any) -> None:
        write(checkpoint, staging, *settings)
        json_files.write_json(staging / "hf_quant_config.json", {"quantization": 1})

    monkeypatch.setattr(llm, "write_sidecars", spoil)
    with pytest.raises(BuildError, match="the written checkpoint cannot be read back"):
        quantized(bases["llama"], tmp_path / "out", "fp8")


def test_a_linear_of_the_plan_that_was_not_checked_is_told(
    made: dict[Any, Quantized], bases: dict[str, Path]
) -> None:
    base = base_of(Checkpoint(bases["llama"]))
    asked = plan.plan_base(base, "fp8", None, (), False)
    more = replace(asked, layers={**asked.layers, "model.layers.2.mlp.up_proj": asked.body})
    written = Checkpoint(made["llama", "fp8"].directory)
    check.compare(base, written, asked, [[3, 4, 5]], lambda _: None)
    with pytest.raises(BuildError, match=r"not checked: model\.layers\.2\.mlp\.up_proj"):
        check.compare(base, written, more, [[3, 4, 5]], lambda _: None)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_a_tied_head_that_is_stored_too_is_written_once(
    bases: dict[str, Path], tmp_path: Path, name: str
) -> None:
    stored = Path(shutil.copytree(bases["qwen3"], tmp_path / "stored"))
    tensors = load_file(stored / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    quantized(stored, tmp_path / "ours", name, lm_head_quantization=name)
    quantized(bases["qwen3"], tmp_path / "theirs", name, lm_head_quantization=name)
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[key].view(-1).view(torch.uint8), theirs[key].view(-1).view(torch.uint8))
        for key in ours
    )


@pytest.mark.parametrize("stage", ["calibrate", "check"])
def test_run_interrupted_before_its_first_layer_leaves_nothing(
    bases: dict[str, Path], tmp_path: Path, stage: str
) -> None:
    told = Told(interrupt=stage)
    with pytest.raises(KeyboardInterrupt):
        quantized(
            bases["llama"],
            tmp_path / "new" / "out",
            {"calibrate": "int4_awq", "check": "mxfp8"}[stage],
            told,
        )
    assert told.stages[stage][1] > 0
    assert list(tmp_path.iterdir()) == []


def test_broken_result_is_refused_and_removed(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smoothing vector that is lost on its way to the file: what a wrong fold does."""
    spoil_written(monkeypatch, "model.layers.0.mlp.down_proj.pre_quant_scale", 1.5)
    with pytest.raises(
        BuildError,
        match=r"model.layers.0.mlp.down_proj: the relative error of",
    ):
        quantized(bases["llama"], tmp_path / "out", "int4_awq")
    assert list(tmp_path.iterdir()) == []


def test_logits_below_the_threshold_are_refused() -> None:
    scheme = plan.scheme_to_make("int8_sq")
    job = plan.QuantizationPlan({"a": scheme}, (), scheme, None)
    good = QuantizeCheck(0.99, 0.01, 3.0, 3.1, 1.0, 10, {"a": 0.01})
    check.refuse_broken(good, job)
    with pytest.raises(BuildError, match=r"cosine of 0\.9700"):
        check.refuse_broken(QuantizeCheck(0.97, 0.01, 3.0, 3.1, 1.0, 10, {"a": 0.01}), job)
    with pytest.raises(BuildError, match="not finite"):
        check.refuse_broken(QuantizeCheck(float("nan"), 0.01, 3.0, 3.1, 1.0, 10, {"a": 0.01}), job)


# Refusals before any work


def refused(
    kind: type[EdgeSpecError], said: str, base: Path, out: Path, quantization: str, **more: Any
) -> None:
    told = Told()
    with pytest.raises(kind, match=said):
        quantized(base, out, quantization, told, **more)
    assert set(told.stages) <= {"hash", "weights", "import"}
    assert not out.exists()


def test_width_that_the_block_does_not_divide_is_refused_by_the_layers_name(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", "llama", layers=1, hidden=128, intermediate=192)
    refused(
        UnsupportedModel,
        r"model\.layers\.0\.mlp\.down_proj has 192 inputs.*128",
        base,
        tmp_path / "o",
        "int4_awq",
    )
    with pytest.raises(UnsupportedModel) as caught:
        quantized(base, tmp_path / "o", "int4_awq")
    assert "`exclude` '*down_proj'" in caught.value.remedy
    quantized(base, tmp_path / "o", "int4_awq", exclude=("*down_proj",))


def test_what_no_format_can_do_is_refused(
    bases: dict[str, Path], made: dict[Any, Quantized], tmp_path: Path
) -> None:
    base, out = bases["llama"], tmp_path / "o"
    refused(UnsupportedModel, "quantized already", made["llama", "fp8"].directory, out, "fp8")
    refused(
        UnsupportedModel,
        "lm_head cannot be int8_sq",
        base,
        out,
        "fp8",
        lm_head_quantization="int8_sq",
    )
    for head in ("fp8", "nvfp4", "mxfp8"):
        what = f"{head} with int4_awq"
        refused(UnsupportedModel, what, base, out, "int4_awq", lm_head_quantization=head)
    refused(UnsupportedModel, "fp8 with int8_sq", base, out, "int8_sq", lm_head_quantization="fp8")
    refused(UnsupportedModel, "fp8 with mxfp8", base, out, "mxfp8", lm_head_quantization="fp8")
    refused(UnsupportedModel, "names no Linear", base, out, "fp8", exclude=("*.up",))
    refused(UnsupportedModel, "no Linear is left", base, out, "fp8", exclude=("*",))
    refused(UnsupportedModel, "not a quantization scheme", base, out, "fp7")
    draft = toys.make_draft(
        tmp_path / "draft", toys.make_base(tmp_path / "deep", layers=7), "eagle"
    )
    refused(UnsupportedModel, "is an EAGLE-3 draft", draft, out, "fp8")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(
    bases: dict[str, Path], tmp_path: Path, value: float
) -> None:
    for family, base in bases.items():
        copy = tmp_path / family
        shutil.copytree(base, copy)
        tensors = load_file(copy / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        refused(
            CheckpointError,
            r"NaN or Inf.*model\.layers\.1\.mlp\.up_proj\.weight",
            copy,
            tmp_path / "o",
            "fp8",
        )


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\n", "is empty"),
        ("a.txt", b"good\nbad \xff\xfe", r"not UTF-8 \(line 2\)"),
        ("a.txt", b"short", "at least 64"),
        ("a.jsonl", b'{"text": "one"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is not an object"),
        ("a.jsonl", b'{"prompt": "x"}\n', "line 1 has none of messages"),
    ],
)
def test_calibration_files_that_cannot_be_used_are_refused(
    bases: dict[str, Path], tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    refused(RequestError, said, bases["llama"], tmp_path / "o", "mxfp8", calib_data=str(path))


def test_calibration_file_that_is_not_there_is_refused(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    refused(
        RequestError,
        "no calibration file 'lost.txt'",
        bases["llama"],
        tmp_path / "o",
        "fp8",
        calib_data="lost.txt",
    )


def test_dataset_of_the_hub_is_refused_where_it_cannot_be_had(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    if importlib.util.find_spec("datasets") is None:
        refused(
            MissingDependency,
            r"pip install 'edgespec\[datasets\]'",
            bases["llama"],
            tmp_path / "o",
            "fp8",
            calib_data="wikitext",
        )


def test_records_become_one_stream_and_no_held_out_token_is_calibrated_with(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"text": "alpha " * 40}, {"turns": ["beta " * 40, "gamma " * 40]}]
    lines.append({"messages": [{"role": "user", "content": "delta " * 40}]})  # type: ignore[list-item]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    tokenizer = llm.tokenizer_of(Checkpoint(bases["llama"]), modelopt.Log())
    windows = calibration.cut(calibration.read_texts(str(path), 9), tokenizer, 100, 16)
    used = [token for window in windows.calibration for token in window]
    held = [token for window in windows.held_out for token in window]
    said = tokenizer.decode(used + held)
    assert "<|im_start|>user" in said
    assert said.index("alpha") < said.index("beta") < said.index("gamma") < said.index("delta")
    assert 0 <= len(held) - len(used + held) // 5 < 16  # a last short window is not calibrated with


def lines_of(path: Path, count: int) -> str:
    path.write_text("\n".join(json.dumps({"text": "alpha beta gamma " * 12}) for _ in range(count)))
    return str(path)


def test_fewer_samples_than_asked_for_are_refused_with_what_there_is(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    text = lines_of(tmp_path / "four.jsonl", 4)
    few = Options("fp8", num_samples=64, calib_seq_len=32, calib_data=text)
    said = r"four.jsonl makes \d+ samples? of 32 tokens"
    with pytest.raises(RequestError, match=said) as refusal:
        quantize_llm(str(bases["llama"]), tmp_path / "o", few, Told(), modelopt.Log())
    number = re.search(r"`num_samples` (\d+)", refusal.value.remedy)
    assert number is not None
    assert not (tmp_path / "o").exists()
    enough = Options("fp8", num_samples=int(number[1]), calib_seq_len=32, calib_data=text)
    made = quantize_llm(str(bases["llama"]), tmp_path / "o", enough, Told(), modelopt.Log())
    assert made.manifest.calibrated.num_samples == int(number[1])
    assert made.notes[0].startswith(f"calibrated with {number[1]} samples, ")


def test_default_that_the_text_cannot_fill_is_told_with_the_right_hint(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    text = lines_of(tmp_path / "four.jsonl", 4)
    asked = Options("fp8", calib_data=text)
    made = quantize_llm(str(bases["llama"]), tmp_path / "o", asked, Told(), modelopt.Log())
    used = made.manifest.calibrated.num_samples
    assert used < 16
    assert made.notes[0].startswith(f"calibrated with {used} sample")
    assert f"{used} sample{'s' * (used > 1)} of 16, " in made.notes[0]
    assert made.notes[1].startswith("four.jsonl makes no more samples of ")
    assert not any("CPU default" in note for note in made.notes)


def test_room_on_the_disk_is_asked_for_the_samples_that_there_are(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for those that were asked for: 16 of 2048 tokens would take 50 times as much."""
    asked: list[int] = []
    monkeypatch.setattr(llm, "refuse_full_disk", lambda path, needed: asked.append(needed))
    text = lines_of(tmp_path / "four.jsonl", 4)
    wide = Options("fp8", calib_data=text, calib_seq_len=2048)
    quantize_llm(str(bases["llama"]), tmp_path / "o", wide, Told(), modelopt.Log())
    (needed,) = asked
    assert needed < 2 * 4 * HIDDEN * 16 * 2048


def test_as_much_of_a_dataset_is_read_as_the_samples_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ({"text": text} for text in ["", "x" * 100, " ", *["y" * 100] * 1000])
    fake = types.SimpleNamespace(load_dataset=lambda *args, **options: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    texts = calibration.read_texts("wikitext", 100)
    assert [len(str(text)) for text in texts.records] == [100] * 8
    assert len(list(rows)) == 1003 - 10


def test_full_disk_is_foreseen(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10**5)
    )  # type: ignore[attr-defined]
    refused(
        OutputError,
        r"0\.1 MB free; about .* MB are needed, .* MB more",
        bases["llama"],
        tmp_path / "o",
        "fp8",
    )


def test_predicted_size_is_near_what_is_written(
    made: dict[Any, Quantized], bases: dict[str, Path]
) -> None:
    for (family, name), result in made.items():
        checkpoint = Checkpoint(bases[family])
        job = plan.plan_base(base_of(checkpoint), name, None, (), False)
        written = result.manifest.files["model.safetensors"]["bytes"]
        assert plan.size_bytes(checkpoint, job) == pytest.approx(written, rel=0.15)


def test_missing_and_foreign_packages_are_refused(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: dict[str, str | None] = {"nvidia-modelopt": None}
    real = provenance.installed_version
    monkeypatch.setattr(
        provenance, "installed_version", lambda name: versions.get(name, real(name))
    )
    refused(MissingDependency, "nvidia-modelopt", bases["llama"], tmp_path / "o", "fp8")
    versions["nvidia-modelopt"] = "0.48.0"
    refused(EnvironmentProblem, r"0\.48\.0", bases["llama"], tmp_path / "o", "fp8")
    versions.clear()
    if not torch.cuda.is_available():
        refused(
            EnvironmentProblem,
            "no CUDA device",
            bases["llama"],
            tmp_path / "o",
            "fp8",
            device="cuda",
        )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"quantization": "nvfp4"}, "nvfp4"),
        ({"quantization": "int4_awq", "lm_head_quantization": "mxfp8"}, "mxfp8"),
        ({"quantization": "int8_sq", "fp8_cache": True}, "fp8"),
    ],
)
def test_what_the_target_cannot_run_is_refused_at_once(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"^{named} needs compute capability .*; orin has 8.7"
    ):
        Options(**flags, target="orin")
    Options(**flags, target="thor")
    Options(**flags)
