"""Claims about quantize/check.py: the vocabulary in blocks gives what whole logits give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgespec.artifacts.manifest import QuantizeCheck
from edgespec.quantize import check, modelopt
from edgespec.quantize.llm import Options, quantize_llm
from tests import toys
from tests.unit.quantize.test_llm import Told

pytestmark = pytest.mark.usefixtures("needs_modelopt")


@pytest.mark.parametrize("width", [7, 64, 1000])
def test_blocks_of_the_vocabulary_add_up(width: int) -> None:
    """Against torch's own softmax over the whole of it, with logits that a plain sum of
    exponentials cannot hold."""
    generator = torch.Generator().manual_seed(0)
    before = 60 * torch.randn(9, 300, generator=generator)
    after = before + torch.randn(9, 300, generator=generator)
    targets = torch.tensor([4, 299, 0, -1, 17, 7, 6, -1, 150])
    rows = check.LogitComparison(targets)
    for low in range(0, 300, width):
        rows.add(low, before[:, low : low + width], after[:, low : low + width])
    sums = check.Sums()
    sums.add_rows(rows)
    found = sums.report({})
    p, q, known = before.double().log_softmax(-1), after.double().log_softmax(-1), targets >= 0
    assert found.logits_kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
    assert found.logits_cosine == pytest.approx(float(cosine.mean()), rel=1e-6)
    assert found.top1_agreement == float((before.argmax(-1) == after.argmax(-1)).double().mean())
    for mine, log in ((found.perplexity_before, p), (found.perplexity_after, q)):
        loss = -log[known].gather(1, targets[known][:, None]).mean()
        assert mine == pytest.approx(float(loss.exp()), rel=1e-4)


def test_equal_logits_choose_the_first_as_argmax_does() -> None:
    rows = check.LogitComparison(torch.tensor([-1]))
    rows.add(0, torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, 1.0]]))
    rows.add(2, torch.tensor([[3.0, 2.0]]), torch.tensor([[3.0, 2.0]]))
    assert (int(rows.before.choice), int(rows.after.choice)) == (1, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_not_hidden(bad: float) -> None:
    rows = check.LogitComparison(torch.tensor([1, 2]))
    spoilt = torch.zeros(2, 4)
    spoilt[0, 3] = bad
    rows.add(0, torch.zeros(2, 4), torch.zeros(2, 4))
    rows.add(4, torch.zeros(2, 4), spoilt)
    sums = check.Sums()
    sums.add_rows(rows)
    found = sums.report({})
    assert not all(torch.isfinite(torch.tensor([found.logits_kl, found.logits_cosine])))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["mxfp8", "int4_awq"])
def test_quantized_head_is_checked_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, name: str
) -> None:
    base = toys.make_base(
        tmp_path / "base", "qwen3", layers=1, hidden=128, intermediate=256, vocab=320, tied=tied
    )
    found: list[QuantizeCheck] = []
    for rows in (1000, 96):
        monkeypatch.setattr(check, "HEAD_ROWS", rows)
        asked = Options(name, lm_head_quantization=name, num_samples=2, calib_seq_len=32)
        told = Told()
        result = quantize_llm(str(base), tmp_path / f"out{rows}", asked, told, modelopt.Log())
        found.append(result.manifest.check)
        assert told.stages["check"][0] == told.stages["check"][1]
    for key in ("logits_cosine", "logits_kl", "perplexity_before", "perplexity_after"):
        assert getattr(found[0], key) == pytest.approx(getattr(found[1], key), rel=1e-4)
    assert found[0].weight_errors["lm_head"] == pytest.approx(
        found[1].weight_errors["lm_head"], rel=1e-5
    )
    assert 0.02 < found[0].weight_errors["lm_head"] < 0.2
