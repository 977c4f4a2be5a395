"""What a pass reads and multiplies, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.config import ModelConfig
from edgespec.config.model_cost import ExpertsWork, PassWork
from edgespec.methods import as_draft
from edgespec.pairing.draft_work import work_of
from edgespec.pairing.pair import Pair
from tests import toys


def base_of(path: Path) -> ModelConfig:
    found = detect(open_checkpoint(path))
    assert isinstance(found, ModelConfig)
    return found


def test_a_decoder_reads_its_matrices(tmp_path: Path) -> None:
    model = base_of(toys.make_base(tmp_path / "base", "llama", layers=2))
    decoder, hidden = model.decoder, model.decoder.hidden_size
    queries, keys = (
        decoder.num_heads * decoder.head_dim,
        decoder.num_kv_heads * decoder.head_dim,
    )
    layer = hidden * (2 * queries + 2 * keys + 3 * decoder.intermediate_size)
    work = PassWork.of(decoder, 1000)
    assert (work.dense, work.head, work.experts) == (2 * layer, 1000, ())
    assert work.weights(1) == work.weights(60) == work.products() == 2 * layer + 1000
    assert work.cached(10) == 2 * 2 * keys * 10
    assert work.scores == decoder.num_heads / decoder.num_kv_heads


def test_a_window_bounds_what_is_read_of_a_context(tmp_path: Path) -> None:
    model = base_of(toys.make_base(tmp_path / "base", "mistral", layers=2, sliding_window=5))
    work = PassWork.of(model.decoder, 0)
    assert work.cache == 0
    assert work.cached(3) * 5 == work.cached(100) * 3


def test_rows_share_experts() -> None:
    """Of 4 experts one row reads 2, two rows 3 on average: each expert is missed by a quarter."""
    experts = ExpertsWork(4, 2, 100, layers=3)
    assert experts.distinct(1) == pytest.approx(2)
    assert experts.distinct(2) == pytest.approx(3)
    assert experts.distinct(200) == pytest.approx(4)
    work = PassWork(1000, 10, (experts,))
    assert work.weights(2) == pytest.approx(1010 + 3 * 100 * 3)
    assert work.products() == 1010 + 2 * 100 * 3


def test_a_mixture_of_experts_is_found_in_its_layers(tmp_path: Path) -> None:
    model = base_of(toys.make_base(tmp_path / "base", "qwen3", layers=2))
    layers = model.decoder.layers
    from edgespec.config import ExpertsSpec

    mixed = replace(layers[0], mlp=replace(layers[0].mlp, experts=ExpertsSpec(8, 2)))
    decoder = replace(model.decoder, layers=(mixed, mixed, layers[1]))
    work = PassWork.of(decoder, 0)
    size = 3 * decoder.hidden_size * layers[0].mlp.intermediate_size
    assert work.experts == (ExpertsWork(8, 2, size, layers=2),)
    dense = PassWork.of(replace(decoder, layers=(layers[1],)), 0).dense
    assert work.dense == 3 * dense - 2 * size + 2 * 8 * decoder.hidden_size


def test_a_draft_reads_its_own_matrices_and_a_borrowed_head(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", "llama", layers=8)
    draft = toys.make_draft(tmp_path / "draft", base, "eagle")
    first, second = open_checkpoint(base), open_checkpoint(draft)
    config = as_draft(detect(second))
    work = work_of(Pair("eagle3", first, base_of(base), second, config))
    size = sum(
        tensor.shape[0] * tensor.shape[1]
        for name, tensor in second.tensors.items()
        if len(tensor.shape) == 2 and "embed" not in name
    )
    assert (work.drafting, work.levels) == ("levels", None)
    assert (work.draft.dense, work.draft.head) == (size, 0)
    without = replace(config, own_head=False)
    names = [name for name in second.tensors if "lm_head" in name]
    for name in names:
        del second.tensors[name]
    borrowed = work_of(Pair("eagle3", first, base_of(base), second, without)).draft
    assert borrowed.head == config.draft_vocab_size * base_of(base).decoder.hidden_size


def test_a_whole_model_drafts_by_passes_of_its_own(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", "llama", layers=4)
    small = toys.make_base(tmp_path / "small", "llama", layers=2)
    first, second = open_checkpoint(base), open_checkpoint(small)
    model = base_of(small)
    work = work_of(Pair("draft_model", first, base_of(base), second, as_draft(model)))
    assert work.drafting == "model"
    wanted = PassWork.of(model.decoder, model.vocab_size * model.decoder.hidden_size)
    assert work.draft.weights(1) == wanted.weights(1)
    assert work.draft.cached(7) == wanted.cached(7)


def test_a_head_beside_its_base_is_told_from_it(tmp_path: Path) -> None:
    base = toys.make_qwen3_5(tmp_path / "base", layers=4)
    opened = open_checkpoint(base)
    work = work_of(Pair("mtp", opened, base_of(base), None, None))
    size = sum(
        tensor.shape[0] * tensor.shape[1]
        for name, tensor in opened.tensors.items()
        if len(tensor.shape) == 2 and name.removeprefix("model.").startswith("mtp.")
    )
    model = base_of(base)
    assert work.draft.dense == size
    assert work.draft.head == model.vocab_size * model.decoder.hidden_size
