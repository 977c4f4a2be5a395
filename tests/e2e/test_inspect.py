"""`edgespec inspect`: what it says of each kind of directory, and of what is damaged, half-written
or unknown."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from edgespec.artifacts import atomic, file_names, hashes
from edgespec.backends.registry import BACKENDS
from edgespec.cli.main import run
from tests import toys
from tests.e2e.workshop import ENVIRON, Cli, cli
from tests.lossless.pairs import shared_pair

__all__ = ["cli"]


@pytest.fixture(scope="module")
def shop() -> Path:
    """A toy pair: base, draft, onnx_base, onnx_draft and engines."""
    return shared_pair("llama", "specforge")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base_fp8` (cache scales too), `base_int4_awq` without down_proj, and `draft_fp8`."""
    if importlib.util.find_spec("modelopt") is None:
        if os.environ.get("CI"):
            pytest.fail("nvidia-modelopt is not installed (the extra [quantize])")
        pytest.skip("nvidia-modelopt is not installed (the extra [quantize])")
    path = tmp_path_factory.mktemp("quantised")
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 2, "head_dim": 64}
    base = toys.make_base(
        path / "base", "qwen3", layers=4, kv_heads=1, vocab=320, dtype="bfloat16", **sizes
    )
    draft = toys.make_draft(
        path / "draft", base, "specforge", aux_layers=(1, 2, 3), dtype="bfloat16"
    )
    few = ["--num-samples", "2", "--calib-seq-len", "32", "--quantization"]
    llm = ["quantize", "llm", "--model-dir", base, *few]
    lines = [
        [*llm, "fp8", "--kv-cache-quantization", "fp8", "--output-dir", path / "base_fp8"],
        [*llm, "int4_awq", "--exclude", "*.down_proj", "--output-dir", path / "base_int4_awq"],
        [
            "quantize",
            "draft",
            "--base-model-dir",
            base,
            "--draft-model-dir",
            draft,
            *few,
            "fp8",
            "--output-dir",
            path / "draft_fp8",
        ],
    ]
    for line in lines:
        assert run([str(arg) for arg in line]) == 0
    return path


@pytest.fixture
def look(cli: Cli) -> Callable[..., dict[str, Any]]:
    """The facts as JSON; nothing may be wrong, unless `code` says so."""

    def call(path: Path, *flags: str, code: int = 0) -> dict[str, Any]:
        done = cli("inspect", path, "--json", *flags)
        assert done.code == code, done.err
        found: dict[str, Any] = json.loads(done.out)
        assert bool(found["problems"]) == bool(code)
        return found

    return call


Look = Callable[..., dict[str, Any]]


def copied(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / path.name))


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def torn(path: Path, num_bytes: int = 1) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# Checkpoints


def test_parameters_of_a_base_are_those_that_torch_counts(shop: Path, look: Look) -> None:
    found = look(shop / "base")
    model = toys.load_base(shop / "base")
    kinds = {
        "norms": "norm",
        "embedding": "embed_tokens",
        "lm_head": "lm_head",
        "attention": "_attn.",
        "mlp": ".mlp.",
    }
    counted = {
        kind: sum(tensor.numel() for name, tensor in model.named_parameters() if part in name)
        for kind, part in kinds.items()
    }
    assert found["parameters"] == counted | {
        "total": sum(tensor.numel() for tensor in model.parameters())
    }
    assert (found["role"], found["quantization"], found["quantized"]) == ("base", None, None)
    assert found["config"]["decoder"]["num_layers"] == model.config.num_hidden_layers
    assert found["types"]["float32"]["tensors"] == len(model.state_dict())


def test_a_draft_is_told_with_its_taps_and_what_it_borrows(shop: Path, cli: Cli) -> None:
    done = cli("inspect", shop / "draft")
    assert done.code == 0
    assert "EAGLE-3 draft (eagle layout)" in done.out
    assert "96 of 256; embedding of the base, lm_head of its own" in done.out


def test_a_checkpoint_from_quantize_is_told_with_its_check(
    quantised: Path, look: Look, cli: Cli
) -> None:
    found, manifest = (
        look(quantised / "base_fp8"),
        json.loads((quantised / "base_fp8" / "manifest.json").read_text()),
    )
    assert found["quantization"]["schemes"]["fp8"]["linears"] == 4 * 7
    assert found["quantization"]["kept"] == ["lm_head"]
    assert found["quantization"]["kv_cache"] == {"type": "fp8", "scales": 2 * 4}
    assert found["parameters"] == look(quantised / "base")["parameters"]
    assert found["quantized"]["check"] == manifest["check"]
    said = cli("inspect", quantised / "base_fp8").out
    errors = sorted(manifest["check"]["weight_errors"].items(), key=lambda item: -item[1])
    assert f"cosine {manifest['check']['logits_cosine']:.4f}" in said
    assert f"{manifest['check']['perplexity_after']:.3f} after" in said
    assert "2 samples, 64 tokens of the shipped text" in said
    assert "nvidia-modelopt 0.47" in said
    assert [name for name, _ in errors if name in said] == [name for name, _ in errors[:3]]
    every = cli("inspect", quantised / "base_fp8", "--layers").out
    assert all(f"{error:.4f} {name}" in every for name, error in errors)


def test_what_quantize_left_out_is_told_folded_and_by_name(
    quantised: Path, look: Look, cli: Cli
) -> None:
    found = look(quantised / "base_int4_awq")["quantization"]
    assert found["schemes"]["int4_awq"]["blocks"] == [128]
    assert [name for name in found["kept"] if name != "lm_head"] == [
        f"model.layers.{i}.mlp.down_proj" for i in range(4)
    ]
    assert (
        "kept        lm_head, model.layers.0-3.mlp.down_proj"
        in cli("inspect", quantised / "base_int4_awq").out
    )


def test_hashes_are_as_recorded_only_where_some_are(shop: Path, quantised: Path, cli: Cli) -> None:
    for path in (shop / "base", shop / "base" / "model.safetensors"):
        assert "as far as its headers say" in cli("inspect", path, "--verify").out
    for path in (shop / "onnx_base" / "llm", quantised / "base_fp8"):
        assert "sizes are as recorded; --verify compares hashes" in cli("inspect", path).out
        assert "sizes and hashes are as recorded" in cli("inspect", path, "--verify").out


def test_a_quantised_draft_keeps_fc_and_names_its_base(quantised: Path, look: Look) -> None:
    found = look(quantised / "draft_fp8")
    assert "fc" in found["quantization"]["kept"]
    assert found["config"]["base_name"] == str(quantised / "base")
    assert found["quantized"]["base"]["taps"] == [1, 2, 3]


@pytest.mark.slow
def test_every_layout_of_modelopt_is_told_apart(modelopt_exports: Path, look: Look) -> None:
    schemes = {
        "fp8": "fp8",
        "llama_int4_awq": "int4_awq",
        "llama_int8_sq": "int8_sq",
        "nvfp4": "nvfp4",
        "mxfp8": "mxfp8",
        "fp8_block": "fp8_block",
        "int8_wo": "int8_wo",
    }
    for name, scheme in schemes.items():
        found = look(modelopt_exports / name)
        assert set(found["quantization"]["schemes"]) == {scheme}
        source = "qwen3" if name in ("fp8", "nvfp4", "mxfp8") else "llama"
        assert (
            found["parameters"]["total"]
            == look(modelopt_exports / f"source_{source}")["parameters"]["total"]
        )
    assert set(look(modelopt_exports / "mixed")["quantization"]["schemes"]) == {"fp8", "nvfp4"}


def test_a_block_draft_is_told_with_its_block_and_attention(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    path = toys.make_dflash(
        tmp_path / "draft", shop / "base", layer_types=kinds, window=20, fused=True
    )
    done = cli("inspect", path)
    assert done.code == 0
    assert "DFlash draft (z-lab layout)" in done.out
    assert "4 tokens, the anchor included; mask token 255" in done.out
    assert (
        "1 of 2 layers: a window of 20, causal inside the block; 1 of 2 layers: all of the context,"
        " both ways" in done.out
    )
    left = load_file(path / "model.safetensors")
    del left["layers.1.mlp.down_proj.weight"]
    save_file(left, path / "model.safetensors")
    done = cli("inspect", path)
    assert done.code == 3
    assert "missing (1): layers.1.mlp.down_proj.weight" in done.err


@pytest.mark.parametrize("images", [False, True])
def test_a_hybrid_base_is_told_with_its_layers_and_its_head(
    images: bool, tmp_path: Path, cli: Cli
) -> None:
    done = cli("inspect", toys.make_qwen3_5(tmp_path / "base", images=images))
    assert done.code == 0
    assert "3 layers are gated delta nets" in done.out
    assert "theta 1e+07, 8 of 32 elements" in done.out
    assert "MTP head    1 layer, by config.json" in done.out
    assert "mtp.*" not in done.out


def test_the_axes_of_positions_are_told_of_a_base_that_takes_images(
    tmp_path: Path, cli: Cli
) -> None:
    done = cli("inspect", toys.make_qwen3_vl(tmp_path / "base"))
    assert done.code == 0
    assert "theta 5e+06, interleaved M-RoPE of 6+5+5 pairs" in done.out


def test_experts_are_counted_and_so_are_the_layers_that_have_them(tmp_path: Path, cli: Cli) -> None:
    path = toys.make_qwen3_moe(tmp_path / "base", fused=True, dense_layers=(1,))
    done = cli("inspect", path)
    assert done.code == 0
    assert "6 experts of 48, 2 a token, in 3 layers" in " ".join(done.out.split())
    found = json.loads(cli("inspect", path, "--json").out)["config"]["decoder"]["experts"]
    assert (found["count"], found["per_token"], found["layers"]) == (6, 2, [0, 2, 3])


def test_a_lost_head_is_a_note_and_a_damaged_one_a_fault(tmp_path: Path, cli: Cli) -> None:
    path = toys.make_qwen3_5(tmp_path / "base")
    whole = load_file(path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in whole.items() if not name.startswith("mtp.")},
        path / "model.safetensors",
    )
    lost = cli("inspect", path)
    assert lost.code == 0
    assert "but there are no mtp.* tensors" in lost.out
    damaged = {
        "lacks mtp.fc.weight": {
            name: tensor for name, tensor in whole.items() if name != "mtp.fc.weight"
        },
        "of another shape (1): mtp.norm.weight": (
            whole | {"mtp.norm.weight": whole["mtp.norm.weight"][1:].clone()}
        ),
    }
    for said, tensors in damaged.items():
        save_file(tensors, path / "model.safetensors")
        done = cli("inspect", path)
        assert done.code == 3
        assert said in done.err


def test_pickled_weights_are_not_looked_into(tmp_path: Path, cli: Cli) -> None:
    toys.write_pickle(toys.make_base(tmp_path / "base", layers=1))
    done = cli("inspect", tmp_path / "base")
    assert done.code == 0
    assert "LlamaForCausalLM" in done.out
    assert "pytorch_model.bin: pickled weights are not looked into" in done.out


def test_what_this_version_does_not_read_is_named_and_told_all_the_same(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    path = copied(shop / "base", tmp_path)
    changed(path / "config.json", model_type="qwen3_next")
    done = cli("inspect", path)
    assert done.code == 3
    assert "is a Qwen3-Next model, which this version does not do" in done.err
    assert "parameters" in done.out


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights torn": (lambda path: torn(path / "model.safetensors"), "is truncated"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "config of another model": (
        lambda path: changed(path / "config.json", intermediate_size=97),
        "of another shape",
    ),
    "a layer too many": (
        lambda path: changed(path / "config.json", num_hidden_layers=9),
        "missing",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
    "config torn": (lambda path: torn(path / "config.json", 9), "is not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_told_with_the_remedy(
    shop: Path, tmp_path: Path, cli: Cli, name: str
) -> None:
    path = copied(shop / "base", tmp_path)
    change, said = BROKEN[name]
    change(path)
    done = cli("inspect", path)
    assert done.code == 3
    assert said in done.err
    assert "whole" not in done.out
    assert len(done.err.splitlines()) >= 2  # the remedy


def test_shards_that_are_missing_are_named(tmp_path: Path, cli: Cli) -> None:
    base = toys.make_base(tmp_path / "base", layers=2, shards=3)
    (base / "model-00002-of-00003.safetensors").unlink()
    done = cli("inspect", base)
    assert done.code == 3
    assert "model-00002-of-00003.safetensors" in done.err


def test_weights_changed_behind_the_manifest_need_verify_and_their_size_does_not(
    quantised: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(quantised / "base_fp8", tmp_path)
    flipped(path / "model.safetensors")
    monkeypatch.setattr("edgespec.pipeline.inspection.SMALL_BYTES", 1000)
    assert cli("inspect", path).code == 0
    done = cli("inspect", path, "--verify")
    assert done.code == 3
    assert "does not have the hash" in done.err
    with (path / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    assert "tokenizer_config.json has" in cli("inspect", path).err


def test_edited_weights_of_an_engine_are_not_believed(shop: Path, tmp_path: Path, cli: Cli) -> None:
    """A config whose hash was edited as well: `infer` refuses what `inspect` must not praise."""
    path = copied(shop / "engines", tmp_path)
    config, manifest = path / "base_config.json", path / file_names.MANIFEST
    raw = json.loads(config.read_text())
    raw["weights"] = {"scheme": "int8", "block": 128, "method": "rounded", "rounding": 0.5}
    config.write_text(json.dumps(raw))
    entry = json.loads(manifest.read_text())
    entry["engines"]["base"]["files"][config.name].update(
        sha256=hashes.sha256_file(config), bytes=config.stat().st_size
    )
    manifest.write_text(json.dumps(entry))
    done = cli("inspect", path)
    assert (done.code, "its 'weights' are not those of manifest.json" in done.err) == (3, True)


@pytest.mark.parametrize("key", ["check", "source", "options", "calibrated", "packages"])
def test_an_edited_record_is_told_and_not_shown(
    quantised: Path, tmp_path: Path, cli: Cli, key: str
) -> None:
    path = copied(quantised / "base_fp8", tmp_path)
    changed(path / "manifest.json", **{key: {} if key == "check" else 7})
    done = cli("inspect", path)
    assert done.code == 3
    assert ("(check)" if key == "check" else f"'{key}'") in done.err
    assert "made from" not in done.out


# Exports and engines


@pytest.mark.parametrize("component", ["onnx_base", "onnx_draft"])
def test_an_export_is_told_as_its_config_has_it(shop: Path, look: Look, component: str) -> None:
    path = shop / component / "llm"
    found = look(path, "--verify")
    assert found["config"] == json.loads((path / "config.json").read_text())
    assert found["golden"] is True
    assert set(found["files"]) == {file.name for file in path.iterdir()} - {"manifest.json"}
    assert found["bytes"] == sum(
        file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"
    )
    layers, heads, size = (8, 2, 16) if component == "onnx_base" else (1, 2, 16)
    assert found["cache_bytes_per_token"] == 2 * layers * heads * size * 4


def test_engines_are_told_with_their_pairing_and_whether_this_machine_runs_them(
    shop: Path, look: Look
) -> None:
    found = look(shop / "engines", "--verify")
    assert set(found["engines"]) == {"base", "draft"}
    assert found["pairing"] == {"fits": True, "by": "identity"}
    assert found["engines"]["base"]["exact"] is None
    assert found["engines"]["base"]["runs_here"] == {"answer": True, "why": None}


def test_engines_of_another_machine_are_whole_and_do_not_run_here(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    path = copied(shop / "engines", tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["engines"]["base"]["fingerprint"]["machine"] = "riscv64"
    manifest["engines"]["draft"]["backend"] = "trt"
    (path / "manifest.json").write_text(json.dumps(manifest))
    done = cli("inspect", path)
    assert done.code == 0
    assert "does not run here: the base engine was built on riscv64" in done.out
    assert f"does not run here: this version runs {', '.join(BACKENDS)}, not 'trt'" in done.out


def test_a_pair_that_does_not_fit_is_told(shop: Path, tmp_path: Path, cli: Cli) -> None:
    path = copied(shop / "engines", tmp_path)
    config = path / "draft_config.json"
    pair = json.loads(config.read_text())["pair"]
    changed(config, pair=pair | {"base_identity": "another"})
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"bytes": config.stat().st_size, "sha256": hashes.sha256_file(config)}
    manifest["engines"]["draft"]["files"]["draft_config.json"] = entry
    (path / "manifest.json").write_text(json.dumps(manifest))
    done = cli("inspect", path)
    assert done.code == 3
    assert "base and draft do not belong together" in done.out
    assert "another base checkpoint" in done.err


DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "export without manifest": (
        "onnx_base/llm",
        lambda p: (p / "manifest.json").unlink(),
        "half-written",
    ),
    "export with a torn graph": (
        "onnx_base/llm",
        lambda p: torn(p / "model.onnx"),
        "model.onnx has",
    ),
    "export without weights": (
        "onnx_base/llm",
        lambda p: (p / "model.onnx.data").unlink(),
        "is missing",
    ),
    "export with edited config": (
        "onnx_base/llm",
        lambda p: flipped(p / "config.json"),
        "config.json does not have the hash",
    ),
    "manifest torn": ("onnx_base/llm", lambda p: torn(p / "manifest.json", 9), "cannot be read"),
    "manifest of another version": (
        "onnx_base/llm",
        lambda p: changed(p / "manifest.json", format=9),
        "has format 9",
    ),
    "engines without manifest": (
        "engines",
        lambda p: (p / "manifest.json").unlink(),
        "half-written",
    ),
    "engine torn": (
        "engines",
        lambda p: torn(p / "spec_base.onnx.data"),
        "spec_base.onnx.data has",
    ),
    "engine gone from the manifest": (
        "engines",
        lambda p: changed(p / "manifest.json", engines={}),
        "no finished engine for spec_base.onnx",
    ),
    "manifest with a strange engine": (
        "engines",
        lambda p: changed(p / "manifest.json", engines={"x": {"files": {}, "fingerprint": {}}}),
        "names an engine 'x'",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_told_by_name_with_the_remedy(
    shop: Path, tmp_path: Path, cli: Cli, name: str
) -> None:
    place, change, said = DAMAGED[name]
    path = copied(shop / place, tmp_path)
    change(path)
    done = cli("inspect", path)
    assert done.code == 3
    assert said in done.err
    assert done.err.splitlines()[-1].startswith("  ")
    assert "whole" not in done.out


def test_what_a_killed_run_left_is_told(shop: Path, tmp_path: Path, cli: Cli) -> None:
    path = copied(shop / "engines", tmp_path)
    (path / ".base.tmp-999999999").mkdir()
    (path / "notes.txt").write_text("mine")
    done = cli("inspect", path)
    assert done.code == 0
    assert ".base.tmp-999999999 is of a run that was killed" in done.out
    assert "not in the manifest: notes.txt" in done.out
    staged = path / ".base.tmp-999999999"
    assert "left unfinished" in cli("inspect", staged).err
    unfinished = tmp_path / ".out.quantize"
    unfinished.mkdir()
    (unfinished / "progress.json").write_text("{}")
    (unfinished / "part-00000.safetensors").touch()
    told = cli("inspect", unfinished)
    assert told.code == 3
    assert "is an unfinished run of edgespec quantize" in told.err
    assert "Run its command again" in told.err
    with atomic.staging_in(path, "draft") as living:
        assert f"is being written by process {os.getpid()}" in cli("inspect", living).err


def places(value: object, at: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Where something stands in a JSON value; of a list, of files and of layers the first one."""
    yield at
    items = list(
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    alike = isinstance(value, list) or (at and at[-1] in ("files", "weight_errors", "packages"))
    for key, item in items[:1] if alike else items:
        yield from places(item, (*at, key))


def with_another(value: Any, at: tuple[Any, ...], item: object) -> Any:
    if not at:
        return item
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = with_another(value[at[0]], at[1:], item)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("place", ["onnx_draft/llm", "engines", "base_fp8"])
def test_no_value_in_a_manifest_is_a_fault_of_ours(
    shop: Path, request: pytest.FixtureRequest, tmp_path: Path, place: str, cli: Cli
) -> None:
    """Manifests are edited by hand and by other tools, and no hash stands over them."""
    source = (request.getfixturevalue("quantised") if place == "base_fp8" else shop) / place
    path = copied(source, tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    for at in places(manifest):
        for item in (None, "x", {"x": None}):
            (path / "manifest.json").write_text(json.dumps(with_another(manifest, at, item)))
            done = cli("inspect", path)
            assert done.code in (0, 3), (at, item, done.err)
            assert done.code == 0 or done.err.startswith("error: ")


# Files, and what is nothing known


def test_one_file_is_told_by_its_header(shop: Path, look: Look, cli: Cli, tmp_path: Path) -> None:
    file = shop / "base" / "model.safetensors"
    found = look(file)
    assert found["tensors"]["lm_head.weight"] == {
        "dtype": "float32",
        "shape": [256, 64],
        "bytes": 256 * 64 * 4,
    }
    assert "float32 [64, 96] model.layers.0-7.mlp.down_proj.weight" in cli("inspect", file).out
    assert "model.layers.5.mlp.down_proj.weight" in cli("inspect", file, "--layers").out
    torn(Path(shutil.copy(file, tmp_path)))
    assert cli("inspect", tmp_path / "model.safetensors").code == 3


def test_what_is_nothing_known_is_refused_with_where_to_look(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    refused = {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "empty": "is empty",
        tmp_path / "other": "holds nothing known: notes.txt",
        shop / "base" / "config.json": f"Give its directory: {shop / 'base'}",
        shop / "onnx_base": f"Look at one of these: {shop / 'onnx_base' / 'llm'}",
    }
    for path, said in refused.items():
        done = cli("inspect", path)
        assert (done.code, done.out) == (3, "")
        assert said in done.err


def test_a_manifest_of_somebody_else_is_no_obstacle(shop: Path, tmp_path: Path, look: Look) -> None:
    path = copied(shop / "base", tmp_path)
    (path / "manifest.json").write_text('{"kind": "theirs"}')
    assert look(path)["role"] == "base"


def test_the_weights_of_llama_8b_are_told_from_their_headers_at_once(tmp_path: Path) -> None:
    """A real configuration and real names over 16 GB that are nowhere on the disk."""
    path = toys.make_base(tmp_path / "base", layers=1)
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    changed(path / "config.json", **sizes)
    layer = {
        "self_attn.q_proj": [4096, 4096],
        "self_attn.k_proj": [1024, 4096],
        "self_attn.v_proj": [1024, 4096],
        "self_attn.o_proj": [4096, 4096],
        "mlp.gate_proj": [14336, 4096],
        "mlp.up_proj": [14336, 4096],
        "mlp.down_proj": [4096, 14336],
        "input_layernorm": [4096],
        "post_attention_layernorm": [4096],
    }
    shapes = {
        "model.embed_tokens.weight": [128256, 4096],
        "lm_head.weight": [128256, 4096],
        "model.norm.weight": [4096],
    }
    shapes |= {
        f"model.layers.{i}.{name}.weight": shape for i in range(32) for name, shape in layer.items()
    }
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    code = (
        "import sys; from edgespec.cli.main import run; code = run(sys.argv[1:]); print(code,"
        " *sys.modules)"
    )
    line = [sys.executable, "-c", code, "inspect", str(path), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRON, check=True, timeout=60)
    said, _, modules = done.stdout.rstrip().rpartition("\n")
    assert json.loads(said)["parameters"]["total"] == 8_030_261_248
    assert modules.split()[0] == "0"
    assert not {"torch", "onnxruntime", "transformers"} & set(modules.split())
