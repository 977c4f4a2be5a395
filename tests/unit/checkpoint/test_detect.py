"""Claims about checkpoint/detect.py, held against toy checkpoints in the published formats."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.detect import check_tensors, detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.quantization import Quantization
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from edgespec.methods.aux_layers import resolve_aux_layers
from edgespec.methods.eagle3 import Eagle3Config
from tests.toys import DraftLayout, Family, make_base, make_draft

LAYOUTS: list[DraftLayout] = ["eagle", "specforge", "modelopt", "speculators"]
VOCAB, DRAFT_VOCAB = 256, 96


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), layers=8, dtype="bfloat16", tokenizer=False)


def write(
    path: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None = None
) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: torch.zeros(shape) for name, shape in (tensors or {}).items()},
        path / "model.safetensors",
    )
    return open_checkpoint(path)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> Checkpoint:
    file = path / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return open_checkpoint(path)


# Kinds


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_base_of_each_family_is_recognised(family: Family, tmp_path: Path) -> None:
    found = detect(open_checkpoint(make_base(tmp_path, family, layers=2, tokenizer=False)))
    assert isinstance(found, ModelConfig)
    assert found.architecture.lower() == f"{family}forcausallm"


def test_dtype_is_that_of_the_tensors_not_of_the_config(base: Path, tmp_path: Path) -> None:
    found = detect(open_checkpoint(base))
    assert isinstance(found, ModelConfig)
    assert found.dtype == "bfloat16"
    other = make_base(tmp_path, layers=1, dtype="float16", tokenizer=False)
    edit_config(other, torch_dtype="float32")
    found = detect(open_checkpoint(other))
    assert isinstance(found, ModelConfig)
    assert found.dtype == "float16"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_of_each_layout_is_recognised(
    layout: DraftLayout, base: Path, tmp_path: Path
) -> None:
    aux_layers = None if layout == "eagle" else (1, 3, 6)
    found = detect(open_checkpoint(make_draft(tmp_path, base, layout, aux_layers=aux_layers)))
    assert isinstance(found, Eagle3Config)
    assert found.layout == {"specforge": "eagle"}.get(layout, layout)
    assert (found.vocab_size, found.draft_vocab_size, found.num_aux_layers) == (
        VOCAB,
        DRAFT_VOCAB,
        3,
    )
    assert resolve_aux_layers(found, 8) == (aux_layers or (2, 4, 5))


def test_drafts_options_are_seen_in_every_layout(base: Path, tmp_path: Path) -> None:
    for layout in LAYOUTS:
        path = make_draft(
            tmp_path / layout,
            base,
            layout,
            layers=2,
            hidden=32,
            heads=2,
            kv_heads=1,
            own_embedding=True,
            qk_norm=True,
            fc_norm=True,
            rope_theta=5e5,
        )
        found = detect(open_checkpoint(path))
        assert isinstance(found, Eagle3Config)
        assert (found.decoder.num_layers, found.decoder.hidden_size, found.target_hidden_size) == (
            2,
            32,
            64,
        )
        assert found.decoder.rope.theta == 5e5
        assert (found.own_embedding, found.decoder.attention.qk_norm, found.fc_norm) == (
            True,
            True,
            True,
        )


def test_pickled_draft_is_recognised_when_allowed(base: Path, tmp_path: Path) -> None:
    path = make_draft(tmp_path, base, "eagle", pickle=True)
    checkpoint = open_checkpoint(path, allow_pickle=True)
    found = detect(checkpoint)
    assert isinstance(found, Eagle3Config)
    assert read_d2t(checkpoint, found) is not None


def test_draft_that_copied_its_base_s_mtp_keys_is_still_a_draft(base: Path, tmp_path: Path) -> None:
    path = make_draft(tmp_path, base, "specforge")
    edit_config(path, num_nextn_predict_layers=1, mtp_num_hidden_layers=1)
    assert isinstance(detect(open_checkpoint(path)), Eagle3Config)


OTHERS: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    ("'mlp'", {"speculators_model_type": "mlp"}, {}),
    ("Gemma4DSparkModel", {"architectures": ["Gemma4DSparkModel"]}, {}),
    ("P-EAGLE", {"speculators_model_type": "peagle"}, {}),
    (
        "DFlash2",
        {"dflash_config": {"mask_token_id": 1, "selector_rank": 8}},
        {"fc.weight": (8, 40)},
    ),
    (
        r"\(MTP\) head, and not Qwen3.5",
        {"text_config": {"mtp_num_hidden_layers": 1}, "vision_config": {}},
        {},
    ),
    (
        r"\(MTP\) head, and not Qwen3.5",
        {"architectures": ["LlamaForCausalLM"]},
        {"mtp.fc.weight": (8, 16)},
    ),
    (
        "Qwen3-Next",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "mtp_num_hidden_layers": 1,
        },
        {},
    ),
    (
        r"DeepSeek.*\(MTP\)",
        {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1},
        {"model.layers.4.eh_proj.weight": (8, 16)},
    ),
    (
        "DeepseekV3ForCausalLM",
        {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1},
        {},
    ),
    (
        "vision-language",
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 2}},
        {},
    ),
    ("MixtralForCausalLM", {"architectures": ["MixtralForCausalLM"]}, {}),
]


@pytest.mark.parametrize(("name", "config", "tensors"), OTHERS)
def test_other_kinds_are_refused_by_name(
    name: str, config: dict[str, Any], tensors: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        detect(write(tmp_path, config, tensors))


def test_pickled_medusa_heads_want_a_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    torch.save({"0.0.linear.weight": torch.zeros(4, 4)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="`allow_pickle`") as caught:
        detect(open_checkpoint(tmp_path))
    assert "medusa_lm_head.pt" in caught.value.what


def test_quantisation_settings_beside_the_config_are_seen(base: Path, tmp_path: Path) -> None:
    path = make_draft(tmp_path, base, "modelopt")
    settings = tmp_path / "hf_quant_config.json"
    settings.write_text('{"quantization": {"quant_algo": null}}')
    assert isinstance(detect(open_checkpoint(path)), Eagle3Config)
    settings.write_text('{"quantization": {"quant_algo": "NVFP4_AWQ"}}')
    with pytest.raises(
        UnsupportedModel, match=r"hf_quant_config\.json.*: quantized with 'NVFP4_AWQ'"
    ):
        detect(open_checkpoint(path))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "awq", "bits": 3}, "'bits' is 3"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP4"}, "MXFP4"),
    ],
)
def test_a_quantisation_that_is_not_read_is_refused_by_name(
    base: Path, tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    for path in (
        make_base(tmp_path / "base", layers=2, tokenizer=False),
        make_draft(tmp_path / "draft", base, "eagle"),
    ):
        edit_config(path, quantization_config=settings)
        with pytest.raises(UnsupportedModel, match=name):
            detect(open_checkpoint(path))


def test_scales_do_not_count_for_the_type_of_the_weights(tmp_path: Path) -> None:
    path = make_base(tmp_path, layers=2, dtype="bfloat16", tokenizer=False)
    found = detect(
        edit_tensors(path, **{"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(10**6)})
    )
    assert isinstance(found, ModelConfig)
    assert found.dtype == "bfloat16"


# Tensors of quantised checkpoints

UP = "model.layers.0.mlp.up_proj"
EXPECTED = {f"{UP}.weight": (8, 64), "model.norm.weight": (64,)}
INT8 = {"quant_method": "modelopt", "quant_algo": "W8A16"}


def quantised(path: Path, **changes: torch.Tensor | None) -> tuple[Checkpoint, Quantization | None]:
    """One INT8 Linear of ModelOpt's layout and a norm."""
    checkpoint = write(path, {"quantization_config": INT8}, {"model.norm.weight": (64,)})
    values = {
        f"{UP}.weight": torch.ones(8, 64, dtype=torch.int8),
        f"{UP}.weight_scale": torch.ones(8),
    }
    checkpoint = edit_tensors(path, **values | changes)
    return checkpoint, read_quantization(checkpoint)


def test_the_tensors_of_a_quantised_linear_stand_for_its_weight(tmp_path: Path) -> None:
    checkpoint, settings = quantised(tmp_path)
    check_tensors(EXPECTED, checkpoint, (), settings)
    with pytest.raises(
        CheckpointError, match=rf"not part of this model .*{UP}\.weight_scale.*int8"
    ):
        check_tensors(EXPECTED, checkpoint)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model.layers.9.mlp.up_proj.weight_scale": torch.ones(8)},
            r"not part of this model \(1\): model\.layers\.9",
        ),
        ({f"{UP}.k_scale": torch.ones(())}, r"not part of this model \(1\): .*k_scale"),
        ({"model.norm.weight": None}, r"missing \(1\): model\.norm"),
        (
            {f"{UP}.weight": torch.ones(8, 32, dtype=torch.int8)},
            r"up_proj\.weight \[8, 32\] instead of \[8, 64\]",
        ),
        ({f"{UP}.weight": None}, r"no tensor '.*up_proj\.weight'"),
        ({f"{UP}.weight": None, f"{UP}.weight_scale": None}, r"no tensor '.*up_proj\.weight'"),
        (
            {f"{UP}.weight": torch.ones(8, 64), f"{UP}.weight_scale": None},
            "declares .*up_proj as int8_wo",
        ),
    ],
)
def test_what_is_wrong_with_quantised_tensors_is_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        check_tensors(EXPECTED, *quantised_and_ignorable(tmp_path, changes))


def quantised_and_ignorable(
    path: Path, changes: dict[str, torch.Tensor | None]
) -> tuple[Checkpoint, tuple[str, ...], Quantization | None]:
    checkpoint, settings = quantised(path, **changes)
    return checkpoint, (), settings


def test_settings_without_one_quantised_tensor_are_refused(tmp_path: Path) -> None:
    checkpoint = write(
        tmp_path, {"quantization_config": {"quant_method": "awq", "bits": 4}}, EXPECTED
    )
    with pytest.raises(CheckpointError, match=r"quantized \(awq\); none of"):
        check_tensors(EXPECTED, checkpoint, (), read_quantization(checkpoint))


def test_errors_name_the_directory_s_own_config(base: Path, tmp_path: Path) -> None:
    path = make_draft(tmp_path, base, "eagle")
    edit_config(path, intermediate_size=None)
    with pytest.raises(
        CheckpointError, match=f"{tmp_path}/config.json: 'intermediate_size' is missing"
    ):
        detect(open_checkpoint(path))


# Tensors


def test_tensors_as_expected_pass(tmp_path: Path) -> None:
    check_tensors({"a": (2, 3)}, write(tmp_path, {}, {"a": (2, 3), "b": (1,)}), {"b", "not there"})


def test_all_complaints_come_in_one_error(tmp_path: Path) -> None:
    write(tmp_path, {}, {"shaped": (2, 3), "fine": (2,), **{f"extra{i}": (1,) for i in range(7)}})
    checkpoint = edit_tensors(
        tmp_path, integer=torch.zeros(2, dtype=torch.int8), double=torch.zeros(2).double()
    )
    expected = {"shaped": (3, 2), "fine": (2,), "absent": (1,), "integer": (2,), "double": (2,)}
    with pytest.raises(CheckpointError) as error:
        check_tensors(expected, checkpoint)
    for part in (
        "missing (1): absent",
        "(7): extra0, extra1, extra2, extra3, extra4 and 2 more",
        "shaped [2, 3] instead of [3, 2]",
        "integer int8",
        "double float64",
    ):
        assert part in error.value.what
    assert "fine" not in error.value.what


# The draft's vocabulary


def draft_with(
    path: Path, base: Path, **tensors: torch.Tensor | None
) -> tuple[Checkpoint, Eagle3Config]:
    """A draft with 96 tokens of 256 whose d2t and t2d are `tensors`; None for a table it lacks."""
    checkpoint = edit_tensors(
        make_draft(path, base, "eagle"), **({"d2t": None, "t2d": None} | tensors)
    )
    config = detect(checkpoint)
    assert isinstance(config, Eagle3Config)
    return checkpoint, config


def mask(used: torch.Tensor) -> torch.Tensor:
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, used, True)


USED = torch.cat(
    [torch.arange(80), torch.arange(100, 116)]
)  # 96 ids; the run at the start is as real tables have it
OFFSETS = USED - torch.arange(DRAFT_VOCAB)


@pytest.mark.parametrize(
    "tables",
    [
        {"d2t": OFFSETS, "t2d": mask(USED)},
        {"d2t": OFFSETS},
        {"d2t": OFFSETS.to(torch.int32)},
        {"d2t": USED, "t2d": mask(USED)},
        {"t2d": mask(USED)},
        {"t2d": mask(USED).to(torch.uint8)},
    ],
    ids=["offsets", "offsets alone", "int32", "absolute", "mask alone", "mask of bytes"],
)
def test_every_form_of_the_map_gives_the_same_offsets(
    tables: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    offsets = read_d2t(*draft_with(tmp_path, base, **tables))
    assert offsets is not None
    assert offsets.dtype == np.int64
    assert np.array_equal(offsets, OFFSETS.numpy())


@pytest.mark.parametrize("form", ["offset", "absolute"])
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_random_vocabularies_agree_with_their_mask(
    layout: DraftLayout, form: Any, base: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(make_draft(tmp_path, base, layout, d2t=form))
    config = detect(checkpoint)
    assert isinstance(config, Eagle3Config)
    offsets = read_d2t(checkpoint, config)
    assert offsets is not None
    assert np.array_equal(np.arange(DRAFT_VOCAB) + offsets, np.flatnonzero(checkpoint.read("t2d")))


def test_offsets_in_order_of_frequency_may_be_negative(base: Path, tmp_path: Path) -> None:
    offsets = USED.flip(0) - torch.arange(DRAFT_VOCAB)
    assert int(offsets.min()) < 0
    read = read_d2t(*draft_with(tmp_path, base, d2t=offsets))
    assert read is not None
    assert np.array_equal(read, offsets.numpy())


def test_table_that_can_be_read_two_ways_is_refused_until_a_mask_decides(
    base: Path, tmp_path: Path
) -> None:
    table = torch.arange(1, DRAFT_VOCAB + 1)  # as offsets 1, 3, 5, ...; as ids 1, 2, 3, ...
    with pytest.raises(CheckpointError, match="as offsets and as ids"):
        read_d2t(*draft_with(tmp_path / "alone", base, d2t=table))
    for name, used in {"offsets": 2 * table - 1, "ids": table}.items():
        read = read_d2t(*draft_with(tmp_path / name, base, d2t=table, t2d=mask(used)))
        assert read is not None
        assert np.array_equal(np.arange(DRAFT_VOCAB) + read, used.numpy())


def changed(table: torch.Tensor, index: int, value: int) -> torch.Tensor:
    table = table.clone()
    table[index] = value
    return table


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"d2t": changed(OFFSETS, 7, 250)}, "entry 7 leads to token 257, outside 0..255"),
        ({"d2t": changed(OFFSETS, 7, -8)}, "entry 7 leads to token -1, outside"),
        ({"d2t": changed(OFFSETS, 7, 2**63 - 1)}, "entry 7 leads to token"),
        ({"d2t": changed(OFFSETS, 7, 1)}, "entries 7 and 8 both lead to token 8"),
        (
            {"d2t": OFFSETS, "t2d": mask(USED + 1)},
            "entry 0 leads to token 0, which t2d does not mark",
        ),
        ({"d2t": OFFSETS, "t2d": mask(USED[:-1])}, "t2d of .* marks 95 tokens"),
        ({"t2d": mask(USED[:-1])}, "t2d of .* marks 95 tokens"),
        ({"d2t": OFFSETS[:-1]}, r"d2t of .* is int64 \[95\]; expected int64 \[96\]"),
        ({"d2t": OFFSETS.float()}, r"d2t of .* is float32"),
        (
            {"d2t": OFFSETS, "t2d": mask(USED)[:-1]},
            r"t2d of .* is bool \[255\]; expected bool \[256\]",
        ),
        ({}, "neither d2t nor t2d"),
    ],
)
def test_broken_map_is_refused_at_its_first_fault(
    tables: dict[str, torch.Tensor], complaint: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        read_d2t(*draft_with(tmp_path, base, **tables))


def test_draft_with_the_whole_vocabulary_needs_no_map(base: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        make_draft(tmp_path, base, "modelopt", draft_vocab=None, own_head=False)
    )
    config = detect(checkpoint)
    assert isinstance(config, Eagle3Config)
    assert read_d2t(checkpoint, config) is None


NONSENSE: list[Any] = [None, -1, 0, 7, "x", [], {}, [{}], [[]], {"a": {"b": []}}, float("inf")]


@pytest.mark.parametrize("kind", ["base", "modelopt", "speculators"])
def test_nonsense_in_any_key_never_ends_in_a_traceback(
    kind: Any, base: Path, tmp_path: Path
) -> None:
    if kind == "base":
        make_base(tmp_path, "qwen2", layers=2, tokenizer=False)
    else:
        make_draft(tmp_path, base, kind, aux_layers=(1, 2, 3))
    whole = json.loads((tmp_path / "config.json").read_text())
    keys = {
        *whole,
        "rope_scaling",
        "rope_parameters",
        "head_dim",
        "layer_types",
        "quantization_config",
    }
    layer = whole.get("transformer_layer_config", {})
    accepted = 0
    for nonsense in NONSENSE:
        for change in [{key: nonsense} for key in keys] + [
            {"transformer_layer_config": layer | {key: nonsense}} for key in layer
        ]:
            (tmp_path / "config.json").write_text(json.dumps(whole | change))
            with suppress(EdgeSpecError):
                detect(open_checkpoint(tmp_path))
                accepted += 1
    assert 0 < accepted < len(NONSENSE) * (len(keys) + len(layer))


def test_a_base_ends_at_the_ids_of_both_configs(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3")
    assert json.loads((base / "config.json").read_text())["eos_token_id"] == 2
    assert json.loads((base / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    model = detect(open_checkpoint(base))
    assert isinstance(model, ModelConfig)
    assert model.eos_token_ids == (2, 0)
