"""Claims about other weights of a base: what they cost a draft is what two probes apart would say,
with the confidence that drawing shows; what is no such base is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edgespec.cli.check import command
from edgespec.pairing import against
from edgespec.pairing.check import check
from tests import toys
from tests.unit.pairing.test_probe import TEXT, changed, knowing_draft, shares


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    room = tmp_path_factory.mktemp("pair")
    base = toys.make_base(room / "base", layers=8)
    return base, knowing_draft(room / "draft", base, (2, 4, 5))


def coarser(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensor.copy_((tensor * 8 / tensor.abs().max()).round() * tensor.abs().max() / 8)


def test_the_loss_is_what_two_probes_apart_say(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, draft = pair
    other = toys.make_base(tmp_path / "other", layers=8)
    changed(other / "model.safetensors", coarser)
    text = tmp_path / "text"
    text.write_text(TEXT)
    flags = ["--probe", "--probe-text", str(text), "--against", str(other), "--json"]
    done = CliRunner().invoke(command, [str(base), str(draft), *flags])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    found, n = said["probe"]["against"], said["probe"]["positions"]
    apart = [
        shares(check(str(model), str(draft), probe_text=TEXT))[2, 4, 5] for model in (base, other)
    ]
    assert [said["probe"]["shares"][0]["share"], found["share"]] == apart
    assert found["difference"] == pytest.approx(apart[1] - apart[0])
    assert (found["gained"] - found["lost"]) / n == pytest.approx(found["difference"])
    assert found["lost"] > 0
    (line,) = [result for result in said["results"] if result["topic"] == "against"]
    assert f"on {other}: {apart[1]:.1%} of the {n} positions" in line["what"]


@pytest.mark.parametrize(("gain", "loss"), [(0.05, 0.05), (0.02, 0.08), (0.0, 0.05)])
def test_the_interval_holds_the_difference_as_often_as_it_says(gain: float, loss: float) -> None:
    rng = np.random.default_rng(3)
    held = []
    for _ in range(1500):
        drawn = rng.random(300)
        stated = drawn < 0.4 + loss  # gained positions are behind these
        right = (drawn >= loss) & (drawn < 0.4 + loss + gain)
        found = against.compared("it", right, stated)
        held.append(abs(found.difference - (gain - loss)) <= found.margin)
    assert 0.93 < np.mean(held) < 0.98


def test_another_model_is_refused_and_nothing_is_run(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, draft = pair
    renamed = toys.make_base(tmp_path / "renamed", layers=8)
    tokens = json.loads((renamed / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    (first, a), (second, b) = list(vocab.items())[40:42]
    vocab[first], vocab[second] = b, a
    (renamed / "tokenizer.json").write_text(json.dumps(tokens))
    others = {
        toys.make_base(tmp_path / "short", layers=4): "with 4 layers",
        renamed: f"2 ids of {renamed} mean other tokens, the first of them {min(a, b)}",
        draft: "is a draft, not a base",
    }
    for other, said in others.items():
        report = check(str(base), str(draft), probe_text=TEXT, against=str(other))
        (refused,) = [result for result in report.results if result.level == "refused"]
        assert refused.topic == "against"
        assert said in refused.what
        assert report.probe is None
