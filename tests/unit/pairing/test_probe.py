"""Claims about the probe: a draft that knows its base is told from one that was tapped in another
place.

The drafts are made, not trained: their one projection is the least-squares answer to what their
base says on a text, for the features of a reading. With about as many tokens as features they know
the text by heart in that reading alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.cli.check import summary
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, RequestError, UnsupportedModel
from edgespec.pairing import probe, probe_text
from edgespec.pairing.check import check
from edgespec.pairing.check_result import CheckResult, PairReport, Probed, Share
from edgespec.pairing.probe_text import ProbeText
from edgespec.pairing.readings import AS_STATED
from edgespec.pairing.table import PAIRINGS
from tests import reference, toys
from tests.reference_mtp import PRE_NORM, MtpReference
from tests.toys.vision import IMAGE_TOKENS, write_vlm

TEXT, SHORT = (
    probe_text.read_text(None)[:count] for count in (330, 125)
)  # for 192 features, and for 64


def answer(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[out, in], what makes `wanted` [n, out] of `inputs` [n, in] as nearly as can be."""
    return torch.linalg.lstsq(inputs.double(), wanted.double()).solution.T.float()


def only_projecting(tensors: dict[str, torch.Tensor]) -> None:
    """Layers that add nothing, and a last norm that scales nothing."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()


def changed(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def knowing_draft(path: Path, base: Path, aux_layers: tuple[int, ...], **keys: Any) -> Path:
    """An EAGLE-3 draft that knows TEXT by heart where it is given these taps."""
    draft = toys.make_draft(path, base, "modelopt", draft_vocab=None, **keys)
    tokens = torch.from_numpy(probe_text.tokens_of(open_checkpoint(str(base)), TEXT))
    logits, hidden = reference.base_hidden_states(toys.load_base(base), tokens[None])
    given = reference.gather_aux_hidden_states(hidden, aux_layers)[0, :-1]

    def learn(tensors: dict[str, torch.Tensor]) -> None:
        only_projecting(tensors)
        tensors["norm.weight"].fill_(1)
        tensors["fc.weight"] = answer(given, tensors["lm_head.weight"][logits[0, 1:].argmax(-1)])

    changed(draft / "model.safetensors", learn)
    return draft


def knowing_head(path: Path, mistake: str | None) -> Path:
    """A hybrid base whose head knows SHORT by heart from the states of one reading."""
    base = toys.make_qwen3_5(path)
    changed(base / "model.safetensors", spread_last_norm)
    model = toys.load_base(base)
    tokens = torch.from_numpy(probe_text.tokens_of(open_checkpoint(str(base)), SHORT))
    ref = MtpReference(base, model, mistake)
    with torch.no_grad():
        given = ref.norms["pre_fc_norm_hidden"](ref.base_states(tokens)[:-1])
        best = model(tokens[None]).logits[0, 1:].argmax(-1)

    def learn(tensors: dict[str, torch.Tensor]) -> None:
        only_projecting(
            {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        )
        tensors["mtp.norm.weight"].zero_()
        half = answer(given, tensors["lm_head.weight"][best])
        tensors["mtp.fc.weight"] = torch.cat([torch.zeros_like(half), half], 1)

    changed(base / "model.safetensors", learn)
    return base


def spread_last_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] *= 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("base") / "base", layers=8)


def probed(base: Path, draft: Path | None = None, **keys: Any) -> tuple[CheckResult, PairReport]:
    report = check(
        str(base), str(draft) if draft else None, probe_text=TEXT if draft else SHORT, **keys
    )
    (result,) = [result for result in report.results if result.topic == "probe"]
    return result, report


def shares(report: PairReport) -> dict[tuple[int, ...], float]:
    assert report.probe is not None
    return {share.aux_layers: share.share for share in report.probe.shares}


def test_draft_on_the_taps_that_it_knows_is_ok(base: Path, tmp_path: Path) -> None:
    result, report = probed(base, knowing_draft(tmp_path / "draft", base, (2, 4, 5)))
    assert result.level == "ok", result
    assert shares(report)[2, 4, 5] > 0.9
    assert set(shares(report)) == {(2, 4, 5), (1, 3, 4), (3, 5, 6)}
    assert max(shares(report)[1, 3, 4], shares(report)[3, 5, 6]) < 0.5
    assert report.probe is not None
    assert report.probe.positions == len(probe_text.tokens_of(open_checkpoint(str(base)), TEXT)) - 1


@pytest.mark.parametrize(("aux_layers", "flag"), [((3, 5, 6), "3,5,6"), ((1, 3, 4), "1,3,4")])
def test_draft_that_states_other_taps_than_it_knows_is_found_out(
    base: Path, tmp_path: Path, aux_layers: tuple[int, ...], flag: str
) -> None:
    draft = knowing_draft(tmp_path / "draft", base, aux_layers)
    result, report = probed(base, draft)
    assert result.level == "warning"
    assert "it was trained on what it reads with aux layers one" in result.what
    assert f"`aux_layers` {flag}" in result.remedy
    assert report.count("refused") == 0
    mended, report = probed(base, draft, aux_layers=aux_layers)
    assert mended.level == "ok"
    assert next(iter(shares(report))) == aux_layers


def test_padding_of_the_file_does_not_touch_the_text(base: Path, tmp_path: Path) -> None:
    padded = shutil.copytree(base, tmp_path / "padded")
    raw = tokenizers.Tokenizer.from_file(str(padded / "tokenizer.json"))
    raw.enable_padding(length=500)
    raw.save(str(padded / "tokenizer.json"))
    found = [probe_text.tokens_of(open_checkpoint(str(path)), SHORT) for path in (base, padded)]
    assert np.array_equal(*found)


def test_draft_that_knows_nothing_of_its_base_is_told(base: Path, tmp_path: Path) -> None:
    result, report = probed(base, toys.make_draft(tmp_path / "draft", base, "eagle"))
    assert (result.level, "was not made for this base" in result.what) == ("refused", True)
    assert "`probe_text`" in result.remedy
    assert report.probe is not None
    assert report.probe.unrelated
    assert summary(report) == ("EAGLE-3: shapes fit, but the draft was not made for this base")


def test_one_weight_that_is_not_finite_is_refused_by_its_name(base: Path, tmp_path: Path) -> None:
    """Before anything is run: no share is reported."""
    draft = knowing_draft(tmp_path / "draft", base, (2, 4, 5))
    name = "fc.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 5] = float("nan")

    changed(draft / "model.safetensors", spoil)
    result, report = probed(base, draft)
    assert (result.level, report.probe) == ("refused", None)
    assert f"NaN or Inf: {name}" in result.what


def test_logits_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    """Were the argmax of NaN taken for a token, base and draft would agree everywhere."""
    draft = knowing_draft(tmp_path / "draft", base, (2, 4, 5))
    for path, at in ((base / "model.safetensors", "base"), (draft / "model.safetensors", "draft")):
        kept = path.read_bytes()
        changed(path, overflow)
        result, report = probed(base, draft)
        path.write_bytes(kept)
        assert (result.level, report.probe) == ("refused", None), at
        assert f"the {at} computes NaN or Inf" in result.what


def overflow(tensors: dict[str, torch.Tensor]) -> None:
    """Finite weights whose products are not: logits far beyond float32."""
    for name in ("model.norm.weight", "norm.weight"):
        if name in tensors:
            tensors[name].fill_(1e38)
    tensors["lm_head.weight"] *= 1e4


@pytest.mark.parametrize(
    ("said", "wanted", "chance"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 1 / 1000),  # nothing in common: one token of the vocabulary
        ([1, 1, 1, 1], [1, 1, 2, 3], 0.5),  # always the same, as often as it is right
        ([1, 2, 1, 2], [1, 2, 1, 2], 0.5),
        ([1, 2, 3, 4], [4, 3, 2, 1], 0.25),
    ],
)
def test_chance_is_what_shuffled_guesses_would_get(
    said: list[int], wanted: list[int], chance: float
) -> None:
    ids = np.array(said), np.array(wanted)
    assert probe.chance_level(*ids, 1000) == chance
    rng = np.random.default_rng(0)
    shuffled = [(rng.permutation(ids[0]) == ids[1]).mean() for _ in range(2000)]
    assert np.mean(shuffled) == pytest.approx(chance, abs=0.03)


def test_bounds_of_chance_are_those_of_the_distributions() -> None:
    """By drawing: one agreement of 475 is chance, ten are not; none of 475 is below any use, none
    of 15 may be bad luck."""
    rng = np.random.default_rng(1)
    for agreed, positions, chance in ((1, 475, 0.002), (4, 475, 0.002), (10, 475, 0.01)):
        drawn = (rng.poisson(chance * positions, 100_000) >= agreed).mean()
        assert probe.is_beyond_chance(agreed, chance, positions) == (drawn < probe.ALPHA)
    for agreed, positions in ((0, 475), (0, 15), (40, 475), (0, 40), (1, 64)):
        drawn = (rng.binomial(positions, probe.MIN_SHARE, 100_000) <= agreed).mean()
        if abs(drawn - probe.ALPHA) > 0.002:
            assert probe.is_below_usable(agreed, positions) == (drawn < probe.ALPHA)
    assert not probe.is_beyond_chance(0, 0.002, 475)
    assert probe.is_beyond_chance(40, 0.02, 475)


@pytest.mark.parametrize(("mistake", "level"), [(None, "ok"), (PRE_NORM, "warning")])
def test_head_is_asked_for_the_state_before_the_norm_too(
    tmp_path: Path, mistake: str | None, level: str
) -> None:
    result, report = probed(knowing_head(tmp_path / "base", mistake))
    assert result.level == level, result
    after, before = shares(report)[()], shares(report)[4,]
    assert (max if mistake is None else min)(after, before) == after
    assert max(after, before) > 0.9
    assert min(after, before) < 0.6


def test_pair_that_does_not_fit_is_not_run(base: Path, tmp_path: Path) -> None:
    other = toys.make_base(tmp_path / "other", layers=8, vocab=300)
    report = check(
        str(other), str(toys.make_draft(tmp_path / "draft", base, "eagle")), probe_text=TEXT
    )
    assert report.count("refused") > 0
    assert report.probe is None


def test_progress_is_told_piece_by_piece(base: Path, tmp_path: Path) -> None:
    class Told:
        total = done = 0

        def start(self, stage: str, total: int) -> None:
            self.total += total

        def advance(self, amount: int) -> None:
            self.done += amount

    told = Told()
    probed(base, toys.make_draft(tmp_path / "draft", base, "eagle"), progress=told)
    paths = (base, tmp_path / "draft")
    infos = [info for path in paths for info in open_checkpoint(str(path)).tensors.values()]
    num_bytes = sum(info.num_bytes for info in infos)
    checks = len(PAIRINGS["eagle3"].checks)
    assert told.done == told.total == checks + num_bytes + 8 + 1 + 4


def test_nothing_is_left_on_disk(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    probed(base, toys.make_draft(tmp_path / "draft", base, "eagle"))
    assert not any(place.iterdir())


# The text


def test_shipped_text_is_long_enough_and_short() -> None:
    assert 150 <= len(probe_text.read_text(None).split()) <= 250


def test_text_that_cannot_be_used_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("Straße".encode("latin1"))
    (tmp_path / "large").write_text("größer\r\n" * 40_000)
    head = probe_text.read_text(tmp_path / "large")
    assert len(head) == 2**16  # more than is used, whatever the size of the file
    assert head.startswith("größer\ngrößer")
    with pytest.raises(RequestError, match="not UTF-8"):
        probe_text.read_text(tmp_path / "latin")
    with pytest.raises(RequestError, match="No such file"):
        probe_text.read_text(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="at least 16"):
        probe_text.tokens_of(open_checkpoint(str(base)), "one")


def test_long_text_is_cut(base: Path) -> None:
    ids = probe_text.tokens_of(open_checkpoint(str(base)), TEXT * 100)
    assert len(ids) == probe_text.MAX_TOKENS
    assert np.array_equal(ids[:20], probe_text.tokens_of(open_checkpoint(str(base)), TEXT)[:20])


def test_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    path = toys.make_base(tmp_path / "base")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        probe_text.tokens_of(open_checkpoint(str(path)), TEXT)


@pytest.mark.parametrize(
    ("gained", "lost", "positions", "better"),
    [
        (60, 20, 300, True),
        (12, 0, 300, True),
        (60, 40, 300, False),
        (9, 0, 100, False),
        (70, 10, 4000, False),
    ],
)
def test_other_reading_is_told_where_it_is_better_beyond_chance_and_by_enough(
    gained: int, lost: int, positions: int, better: bool
) -> None:
    stated = Share("as stated", (2, 4, 5), 0.5)
    other = Share(
        "with aux layers one higher", (3, 5, 6), 0.5 + (gained - lost) / positions, gained, lost
    )
    assert probe.is_clearly_better(other, stated) == better


# ---- images


def with_images(share: float, without: float, positions: int = 400) -> Probed:
    stated = Share(AS_STATED, (2, 4, 5), share)
    return Probed(positions, (stated,), 0.01, images=1, without_images=without)


@pytest.mark.parametrize(
    ("share", "without", "positions", "loses"),
    [
        (0.3, 0.5, 400, True),
        (0.44, 0.5, 4000, False),  # certain, and little
        (0.3, 0.5, 30, False),  # much, and by chance
        (0.6, 0.5, 400, False),
    ],
)
def test_a_draft_that_agrees_less_behind_images_is_told(
    share: float, without: float, positions: int, loses: bool
) -> None:
    assert probe.loses_by_images(with_images(share, without, positions)) == loses
    assert not probe.loses_by_images(replace(with_images(share, without), without_images=None))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vlm") / "base"
    write_vlm(path, "qwen2_5_vl")
    tokenizer, id_ = path / "tokenizer.json", IMAGE_TOKENS["image_token_id"]
    raw = json.loads(tokenizer.read_text())
    mark = raw["added_tokens"][0] | {"id": id_, "content": "<|image_pad|>", "special": True}
    raw["added_tokens"].append(mark)
    raw["model"]["vocab"]["<|image_pad|>"] = id_
    tokenizer.write_text(json.dumps(raw))
    return path


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (90, 60), "red").save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def text_with(base: Path, text: str, *images: Path) -> ProbeText:
    checkpoint = open_checkpoint(str(base))
    model = detect(checkpoint)
    assert isinstance(model, ModelConfig)
    return probe_text.text_of(checkpoint, model, text, images)


def test_images_stand_where_the_text_marks_them_and_else_before_it(
    seeing: Path, photo: Path
) -> None:
    before = text_with(seeing, SHORT, photo, photo)
    inside = text_with(seeing, f"{SHORT}<|image_pad|>{SHORT}", photo)
    rows, own = len(before.images[0]), len(text_with(seeing, SHORT))
    assert before.starts == (1, rows + 3)
    assert inside.starts == (own,)
    assert len(before) == own + 2 * (rows + 2)
    assert len(inside) == 2 * own + rows
    assert np.array_equal(before.images[0].embeds, inside.images[0].embeds)


def test_marks_and_images_must_be_as_many(seeing: Path, photo: Path) -> None:
    with pytest.raises(RequestError, match="1 mark of images, and `probe_image` gives 2"):
        text_with(seeing, f"{SHORT}<|image_pad|>", photo, photo)


def test_a_base_that_reads_text_alone_has_no_use_for_images(base: Path, photo: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no image encoder"):
        text_with(base, TEXT, photo)


def test_an_image_that_cannot_be_read_is_named(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for name in ("cut.png", "nowhere.png"):
        with pytest.raises(RequestError, match=name):
            text_with(seeing, SHORT, tmp_path / name)
