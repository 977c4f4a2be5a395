"""Claims about the pair check: what fits is ok, and each verdict has a pair that it warns about or
refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.artifacts import file_names, hashes
from edgespec.checkpoint.files import Checkpoint
from edgespec.pairing.check import check
from edgespec.pairing.check_result import CheckResult, PairReport
from edgespec.pairing.table import PAIRINGS
from tests import toys


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that fit: base with eagle and dflash, hybrid with its head and hybrid_dflash."""
    path = tmp_path_factory.mktemp("pairs")
    base = toys.make_base(path / "base", "qwen3", layers=8, vocab=300)
    hybrid = toys.make_qwen3_5(path / "hybrid", layers=8, vocab=300)
    toys.make_draft(path / "eagle", base, "modelopt", aux_layers=(2, 4, 5), rope_theta=1e6)
    toys.make_dflash(path / "dflash", base, aux_layers=[2, 6], mask_token=299)
    toys.make_dflash(
        path / "hybrid_dflash",
        hybrid,
        "speculators",
        aux_layers=[2, 5],
        mask_token=299,
        draft_vocab=96,
    )
    for name in ("base", "hybrid"):
        knows_thinking(path / name)
        tokenizer_changed(path / name, lambda raw: forget_last(raw))
    return path


def knows_thinking(path: Path) -> None:
    changed(
        path / "tokenizer_config.json", chat_template="{% if enable_thinking %}<think>{% endif %}"
    )


def forget_last(raw: dict[str, Any]) -> None:
    """Leaves the last row of the embedding without a token, as published vocabularies do."""
    vocab = raw["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    if vocab[last] == 299:
        raw["model"]["merges"] = [
            merge for merge in raw["model"]["merges"] if "".join(merge) != last
        ]
        del vocab[last]


def changed(file: Path, **values: Any) -> None:
    """A JSON file with other values; `...` removes a key."""
    raw = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def tokenizer_changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "tokenizer.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def tensors_changed(path: Path, **tensors: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    kept: dict[str, torch.Tensor | None] = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


@pytest.fixture
def copied(shop: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(shop / name, tmp_path / name))


def about(topic: str, report: PairReport) -> list[CheckResult]:
    return [result for result in report.results if result.topic == topic]


def one(topic: str, base: Path, draft: Path | None = None, **more: Any) -> CheckResult:
    """The worst verdict of a topic."""
    found = about(topic, check(str(base), str(draft) if draft else None, **more))
    return max(found, key=lambda result: ("ok", "warning", "refused").index(result.level))


# Pairs that fit


@pytest.mark.parametrize(
    ("base", "draft", "method"),
    [
        ("base", "eagle", "eagle3"),
        ("base", "dflash", "dflash"),
        ("hybrid", "hybrid_dflash", "dflash"),
        ("hybrid", None, "mtp"),
    ],
)
def test_a_pair_that_fits_is_ok_in_every_line(
    shop: Path, base: str, draft: str | None, method: str
) -> None:
    report = check(str(shop / base), str(shop / draft) if draft else None)
    assert report.method == method
    said = [result for result in report.results if result.level != "ok"]
    assert [result.topic for result in said] == (["thinking"] if draft == "hybrid_dflash" else [])
    looked_at = {topic for topic, _ in PAIRINGS[method].checks}
    assert {result.topic for result in report.results} == {
        "base",
        *(["draft"] if draft else []),
        *looked_at,
    }


def test_numbers_of_taps_are_told_as_they_were_read(shop: Path) -> None:
    assert (
        one("aux layers", shop / "base", shop / "eagle").what
        == "hidden_states 2, 4, 5, which the draft names as layer outputs 1, 3, 4"
    )
    assert (
        one("aux layers", shop / "base", shop / "dflash").what
        == "hidden_states 2, 6, which the draft names as layer outputs 1, 5"
    )
    assert (
        one("aux layers", shop / "hybrid", shop / "hybrid_dflash").what
        == "hidden_states 2, 5, as the draft names them"
    )
    given = one("aux layers", shop / "base", shop / "eagle", aux_layers=(1, 2, 3))
    assert given.what == "hidden_states 1, 2, 3, as `aux_layers` says"


def test_a_draft_that_names_no_taps_has_eagle3_s(shop: Path, tmp_path: Path) -> None:
    draft = toys.make_draft(tmp_path / "draft", shop / "base", "eagle")
    assert one("aux layers", shop / "base", draft).what.startswith(
        "hidden_states 2, 4, 5, the default"
    )


def test_no_weights_are_read(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name: read(self, name) if name in ("d2t", "t2d") else 1 / 0
    )
    for draft in ("eagle", "dflash"):
        assert check(str(shop / "base"), str(shop / draft)).count("refused") == 0


# Pairs that do not


def test_base_and_draft_the_other_way_round_are_told(shop: Path) -> None:
    report = check(str(shop / "eagle"), str(shop / "base"))
    assert [result.level for result in report.results] == ["refused", "ok"]
    assert "is a draft, not a base" in report.results[0].what
    assert "Give the base first" in report.results[0].remedy


def test_a_relative_is_refused_by_its_name(shop: Path, copied: Callable[[str], Path]) -> None:
    draft = copied("dflash")
    changed(draft / "config.json", dflash_config={"mask_token_id": 1, "gru_hidden_dim": 4})
    assert "Domino" in one("draft", shop / "base", draft).what


@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_a_cut_draft_is_refused(shop: Path, copied: Callable[[str], Path], name: str) -> None:
    draft = copied(name)
    tensors_changed(draft, **{"layers.0.mlp.down_proj.weight": None})
    told = one("tensors", shop / "base", draft)
    assert told.level == "refused"
    assert "missing (1): layers.0.mlp.down_proj.weight" in told.what
    (draft / "model.safetensors").unlink()
    assert one("draft", shop / "base", draft).level == "refused"


def test_a_cut_base_is_refused_too(copied: Callable[[str], Path]) -> None:
    base = copied("hybrid")
    tensors_changed(base, **{"model.layers.0.linear_attn.A_log": None})
    assert "A_log" in one("tensors", base).what


def test_a_draft_quantised_with_another_base_is_a_warning(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    def told(identity: str) -> CheckResult:
        (draft / file_names.MANIFEST).unlink(missing_ok=True)
        files = hashes.file_entries(draft)
        base = {"name": "other", "identity": identity}
        value = {
            "format": 1,
            "kind": "quantize",
            "source": {"identity": "cd"},
            "base": base,
            "files": files,
        }
        (draft / file_names.MANIFEST).write_text(json.dumps(value))
        return one("origin", shop / "base", draft)

    draft = copied("eagle")
    assert (
        told(Checkpoint(shop / "base").identity()).what
        == "the draft was quantized with this very base"
    )
    assert (told("ab" * 32).level, told("ab" * 32).what) == (
        "warning",
        "the draft was quantized with another base (other) than this one",
    )


def test_a_base_that_changed_in_its_last_byte_is_another_one(
    copied: Callable[[str], Path],
) -> None:
    base, draft = copied("base"), copied("eagle")
    recorded = {"name": "base", "identity": Checkpoint(base).identity()}
    value = {"format": 1, "kind": "quantize", "source": {"identity": "cd"}, "base": recorded}
    text = json.dumps(value | {"files": hashes.file_entries(draft)})
    (draft / file_names.MANIFEST).write_text(text)
    assert one("origin", base, draft).level == "ok"
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert one("origin", base, draft).level == "warning"


def test_another_name_is_a_warning_and_another_depth_a_refusal(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    draft = copied("eagle")
    changed(draft / "config.json", base_model_name_or_path="Qwen/Qwen3-8B")
    told = one("made for", shop / "base", draft)
    assert told.level == "warning"
    assert "made for Qwen/Qwen3-8B; this base is called base" in told.what
    changed(draft / "config.json", base_model_name_or_path="org/Base/")
    assert one("made for", shop / "base", draft).level == "ok"
    other = copied("dflash")
    changed(other / "config.json", num_target_layers=9)
    assert "for a base of 9 layers, the base has 8" in one("made for", shop / "base", other).what


def test_the_hub_s_cache_knows_the_name_of_a_base(
    shop: Path, tmp_path: Path, copied: Callable[[str], Path]
) -> None:
    base = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0a1b"
    shutil.copytree(shop / "base", base)
    draft = copied("eagle")
    changed(draft / "config.json", base_model_name_or_path="Qwen/Qwen3-8B")
    assert one("made for", base, draft).level == "ok"


def test_other_tokens_under_the_same_ids_are_refused(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    draft = copied("dflash")
    shutil.copy(shop / "base" / "tokenizer.json", draft)
    assert one("tokenizer", shop / "base", draft).what == "the same in both, 299 ids compared"

    def swap(raw: dict[str, Any]) -> None:
        vocab = raw["model"]["vocab"]
        low, high = sorted(vocab, key=vocab.__getitem__)[10:12]
        vocab[low], vocab[high] = vocab[high], vocab[low]

    tokenizer_changed(draft, swap)
    told = one("tokenizer", shop / "base", draft)
    assert told.level == "refused"
    assert told.what.startswith("2 of 299 ids mean other tokens, the first of them 10: ")


def test_another_way_of_cutting_text_is_a_warning(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    draft = copied("dflash")
    shutil.copy(shop / "base" / "tokenizer.json", draft)
    tokenizer_changed(draft, lambda raw: raw.update(normalizer={"type": "NFC"}))
    assert one("tokenizer", shop / "base", draft).level == "warning"


def test_spellings_of_merges_do_not_count(shop: Path, copied: Callable[[str], Path]) -> None:
    draft = copied("dflash")
    shutil.copy(shop / "base" / "tokenizer.json", draft)
    tokenizer_changed(
        draft, lambda raw: raw["model"].update(merges=[" ".join(m) for m in raw["model"]["merges"]])
    )
    assert one("tokenizer", shop / "base", draft).level == "ok"


def test_a_tokenizer_beyond_the_embedding_is_refused(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    base = copied("base")
    tokenizer_changed(
        base, lambda raw: raw["added_tokens"].append({"id": 300, "content": "<x>", "special": True})
    )
    assert "ids up to 300, its embedding 300 rows" in one("tokenizer", base, shop / "eagle").what
    tokenizer_changed(base, lambda raw: raw.update(model={"vocab": 3}))
    assert "is not a tokenizer" in one("tokenizer", base, shop / "eagle").what
    (base / "tokenizer.json").unlink()
    assert one("tokenizer", base, shop / "eagle").level == "warning"


def test_a_draft_of_another_vocabulary_or_width_is_refused(shop: Path, tmp_path: Path) -> None:
    wide = toys.make_base(
        tmp_path / "wide", "qwen3", layers=8, hidden=96, vocab=300, tokenizer=False
    )
    assert one("hidden size", wide, shop / "dflash").what.startswith(
        "the draft reads hidden states of width 64, the hidden"
    )
    assert one("embedding", wide, shop / "eagle").level == "refused"
    assert one("head", wide, shop / "dflash").level == "refused"
    assert one("head", wide, shop / "eagle").level == "ok"  # it has one of its own
    other = toys.make_base(tmp_path / "other", "qwen3", layers=8, vocab=280, tokenizer=False)
    told = one("vocabulary", other, shop / "dflash")
    assert (told.level, told.what) == (
        "refused",
        "the draft's vocabulary has 300 tokens, that of the base has 280",
    )
    mask = one("mask token", other, shop / "dflash")
    assert (mask.level, mask.what) == (
        "refused",
        "the draft's mask token is 299, the vocabulary of the base has 280 tokens",
    )


def test_taps_beyond_the_base_are_refused_and_the_last_one_is_a_warning(
    shop: Path, tmp_path: Path
) -> None:
    flat = toys.make_base(tmp_path / "flat", "qwen3", layers=5, vocab=300, tokenizer=False)
    told = one("aux layers", flat, shop / "dflash")
    assert (told.level, told.what) == (
        "refused",
        "the draft reads hidden_states 2, 6, the base has 5 layers",
    )
    assert (
        "the base has 5 layers"
        in one("aux layers", flat, shop / "eagle", aux_layers=(1, 2, 6)).what
    )
    last = toys.make_dflash(tmp_path / "last", shop / "base", aux_layers=[2, 8])
    told = one("aux layers", shop / "base", last)
    assert told.level == "warning"
    assert "read before the base's final norm" in told.what


def test_a_dflash_draft_takes_no_other_taps(shop: Path) -> None:
    told = one("aux layers", shop / "base", shop / "dflash", aux_layers=(2, 6))
    assert (told.level, told.remedy) == ("refused", "Leave `aux_layers` out.")


def test_masks_that_no_graph_has_are_refused(
    shop: Path, tmp_path: Path, copied: Callable[[str], Path]
) -> None:
    draft = toys.make_dflash(tmp_path / "draft", shop / "base", aux_layers=[2, 6], mask_token=299)
    changed(
        draft / "config.json", layer_types=["sliding_attention", "full_attention"], sliding_window=9
    )
    assert one("tensors", shop / "base", draft).level == "ok"
    changed(
        draft / "config.json",
        dflash_config={"mask_token_id": 299, "use_swa": True, "swa_window_size": 9},
    )
    told = one("tensors", shop / "base", draft)
    assert told.level == "refused"
    assert "layer 0: window 9, causal True; layer 1" in told.what.replace(", layer 1", "; layer 1")


def test_taps_that_can_be_read_two_ways_are_refused_with_both(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    draft = copied("eagle")
    changed(draft / "config.json", eagle_config=..., eagle_aux_hidden_state_layer_ids=[1, 2, 6])
    told = one("aux layers", shop / "base", draft)
    assert told.level == "refused"
    assert "as hidden_states indices they are [1, 2, 6], as layer outputs [2, 3, 7]" in told.what
    assert "`aux_layers`" in told.remedy
    assert one("aux layers", shop / "base", draft, aux_layers=(2, 3, 7)).level == "ok"


def test_a_rounded_head_that_is_lent_is_a_warning(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    base = copied("base")
    tensors_changed(base, **{"lm_head.weight_scale": torch.ones(1)})
    assert one("head", base, shop / "dflash").level == "warning"
    assert one("head", base, shop / "eagle").level == "ok"


def test_a_map_without_the_end_of_an_answer_is_a_warning_and_a_broken_one_refused(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    draft = copied("eagle")
    assert (
        "96 of 300 tokens (32%), the ends of an answer among them"
        in one("d2t", shop / "base", draft).what
    )
    tensors_changed(draft, d2t=torch.full((96,), 100))
    told = one("d2t", shop / "base", draft)
    assert told.level == "warning"
    assert "never the end of an answer: 2, 0" in told.what
    tensors_changed(draft, d2t=torch.full((96,), 299))
    assert one("d2t", shop / "base", draft).level == "refused"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope_theta": 10000.0}, "thetas far apart"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "linear scaling by 4; the base has 1e+06 and no",
        ),
    ],
)
def test_another_rotation_is_a_warning(
    shop: Path, copied: Callable[[str], Path], keys: dict[str, Any], said: str
) -> None:
    draft = copied("dflash")
    changed(draft / "config.json", **keys)
    told = one("RoPE", shop / "base", draft)
    assert told.level == "warning"
    assert said in told.what


def test_a_draft_that_turns_by_other_axes_than_a_base_of_images_is_a_warning(
    tmp_path: Path,
) -> None:
    base = toys.make_qwen2_5_vl(tmp_path / "base", layers=8)
    mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    for name, rope, level in (("one", None, "warning"), ("three", mrope, "ok")):
        draft = toys.make_draft(tmp_path / name, base, "specforge", rope=rope, rope_theta=1e6)
        told = one("RoPE", base, draft)
        assert told.level == level
        assert ("rotates by one axis" in told.what) == (level == "warning")


@pytest.mark.parametrize(
    ("make", "architecture", "rope", "theta"),
    [
        (
            toys.make_qwen2_5_vl,
            "Eagle3Qwen2_5vlForCausalLM",
            {"type": "mrope", "mrope_section": [2, 3, 3]},
            1e6,
        ),
        (
            toys.make_qwen3_vl,
            "Eagle3Qwen3vlForCausalLM",
            {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
            5e6,
        ),
    ],
)
def test_drafts_for_bases_of_images_as_vllm_names_them_fit(
    tmp_path: Path, make: Callable[..., Path], architecture: str, rope: Any, theta: float
) -> None:
    base = make(tmp_path / "base", layers=8)
    draft = toys.make_draft(tmp_path / "draft", base, "specforge", rope=rope, rope_theta=theta)
    changed(draft / "config.json", architectures=[architecture])
    report = check(str(base), str(draft))
    assert [result.what for result in report.results if result.level != "ok"] == []


def test_a_block_beyond_what_engines_verify_is_a_warning(shop: Path, tmp_path: Path) -> None:
    draft = toys.make_dflash(tmp_path / "draft", shop / "base", aux_layers=[2, 6], block_size=96)
    told = one("block", shop / "base", draft)
    assert told.level == "warning"
    assert "`max_verify_tree_size` 96" in told.remedy
    changed(draft / "config.json", block_size=256)
    told = one("block", shop / "base", draft)
    assert "at most 128" in told.what
    assert "`max_verify_tree_size` 128," in told.remedy


def test_a_mask_that_text_is_made_of_is_a_warning(shop: Path, tmp_path: Path) -> None:
    def told(mask: int) -> CheckResult:
        return one(
            "mask token",
            shop / "base",
            toys.make_dflash(tmp_path / f"{mask}", shop / "base", mask_token=mask),
        )

    assert (told(20).level, told(1).level, told(299).level) == ("warning", "ok", "ok")
    assert told(1).what == "1, the special token <|im_start|>"
    assert told(299).what == "299, a row of the embedding that no text uses"


def test_thinking_is_told_by_the_family_of_the_base(
    shop: Path, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    off, on = (
        one("thinking", shop / "base", shop / "dflash"),
        one("thinking", shop / "hybrid", shop / "hybrid_dflash"),
    )
    assert (off.level, on.level) == ("ok", "warning")
    assert on.remedy == 'Set "enable_thinking": true in the requests.'
    base = copied("hybrid")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    assert "has no such switch" in one("thinking", base, shop / "hybrid_dflash").what
    llama = toys.make_base(tmp_path / "llama", layers=8, vocab=300, tokenizer=False)
    assert one("thinking", llama, shop / "dflash").what.startswith("it is not known")


# Quantised ones, by their settings and the names of their scales


def as_fp8(path: Path, *modules: str, algo: str = "FP8") -> None:
    """Linears as ModelOpt writes them in FP8, the others left out of the settings."""
    tensors = load_file(path / "model.safetensors")
    others = {
        name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.ndim == 2
    } - set(modules)
    for module in modules:
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].to(torch.float8_e4m3fn)
        tensors |= {
            f"{module}.weight_scale": torch.ones(()),
            f"{module}.input_scale": torch.ones(()),
        }
    save_file(tensors, path / "model.safetensors")
    settings = {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": sorted(others)}
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
    )


def test_quantisation_is_told_with_what_it_costs(shop: Path, copied: Callable[[str], Path]) -> None:
    base, draft, cut = copied("base"), copied("eagle"), copied("dflash")
    as_fp8(base, "model.layers.1.mlp.up_proj")
    as_fp8(draft, "layers.0.mlp.up_proj")
    found = about("quantization", check(str(base), str(draft)))
    assert [result.what.partition(",")[0] for result in found] == [
        "the base is fp8",
        "the draft is fp8: faster drafts",
    ]
    assert {result.level for result in found} == {"ok"}
    as_fp8(cut, "fc")
    told = one("quantization", shop / "base", cut)
    assert told.level == "refused"
    assert "the draft's fc is quantized" in told.what


def test_a_base_of_four_bits_is_a_warning(shop: Path, copied: Callable[[str], Path]) -> None:
    base = copied("base")
    module = "model.layers.1.mlp.up_proj"
    packed = {
        "weight": torch.zeros(96, 32, dtype=torch.uint8),
        "weight_scale": torch.ones(96, 4).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
        "input_scale": torch.ones(()),
    }
    tensors_changed(base, **{f"{module}.{name}": tensor for name, tensor in packed.items()})
    others = [
        name.removesuffix(".weight")
        for name, tensor in load_file(base / "model.safetensors").items()
        if tensor.ndim == 2 and not name.startswith(module)
    ]
    settings = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": others,
    }
    (base / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
    )
    told = one("quantization", base, shop / "eagle")
    assert told.level == "warning"
    assert "trained on hidden states that were not quantized to 4 bits" in told.what


def test_a_rounded_mtp_head_is_told(copied: Callable[[str], Path]) -> None:
    base = copied("hybrid")
    assert about("quantization", check(str(base), None))[1].what == "the MTP head is not quantized"
    as_fp8(base, "mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.down_proj")
    assert about("quantization", check(str(base), None))[1].what.startswith("the MTP head is fp8")


# MTP


def test_a_head_that_is_missing_or_lost_is_refused_with_the_remedy(
    shop: Path, copied: Callable[[str], Path]
) -> None:
    told = one("head", shop / "base")
    assert (told.level, told.remedy) == (
        "refused",
        (
            "Use a draft with a checkpoint of its own for this base; without `mtp` the head is"
            " left out."
        ),
    )
    assert (
        len(about("quantization", check(str(shop / "base"), None))) == 1
    )  # none is told of a head that is not there
    base = copied("hybrid")
    names = [name for name in load_file(base / "model.safetensors") if name.startswith("mtp.")]
    tensors_changed(base, **dict.fromkeys(names))
    assert "transformers leaves mtp.* out" in one("head", base).remedy


def test_a_misshapen_head_does_not_fit(copied: Callable[[str], Path]) -> None:
    base = copied("hybrid")
    fc = load_file(base / "model.safetensors")["mtp.fc.weight"]
    tensors_changed(base, **{"mtp.fc.weight": fc[:, : fc.shape[1] // 2].contiguous()})
    told = one("head", base)
    assert told.level == "refused"
    assert "mtp.fc.weight" in told.what
