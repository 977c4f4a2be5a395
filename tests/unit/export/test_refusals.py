"""What `export` refuses before it writes: checkpoints that are damaged or not read, options that do
not go with them, and a base and a draft that are no pair.

What a checkpoint's files, config and tensors are refused for one by one: tests/unit/checkpoint and
tests/unit/config.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.errors import CheckpointError, EdgeSpecError, PairingError, UnsupportedModel
from edgespec.export.components import ExportOptions, export
from tests import toys
from tests.small_pair import SIZES, SmallPair, copied, edit_json, small_pair


@pytest.fixture(scope="module")
def pair() -> SmallPair:
    return small_pair()


def refusal(model: Path, out: Path, kind: type[EdgeSpecError], **options: Any) -> str:
    """What is said, remedy included; nothing is written."""
    with pytest.raises(kind) as caught:
        export(str(model), out, ExportOptions(**options))
    assert type(caught.value) is kind
    assert len(caught.value.remedy) > 10
    assert not out.exists()
    return f"{caught.value.what}\n{caught.value.remedy}"


def assert_named(words: list[object], said: str) -> None:
    for word in words:
        assert str(word) in said


# Checkpoints


def test_base_without_a_tokenizer(pair: SmallPair, tmp_path: Path) -> None:
    base = copied(pair.base, tmp_path / "base")
    (base / "tokenizer.json").unlink()
    assert_named([base, "tokenizer.json"], refusal(base, tmp_path / "out", CheckpointError))


def test_base_whose_tokenizer_never_comes_to_an_end(pair: SmallPair, tmp_path: Path) -> None:
    """No engine would open it, and the path that is named is one that can be repaired."""
    base = copied(pair.base, tmp_path / "base")
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    pattern = {"pattern": {"Regex": "(a+)+$"}}
    edit_json(base / "tokenizer.json", lambda raw: raw.update(pre_tokenizer=split | pattern))
    said = refusal(base, tmp_path / "out", CheckpointError, golden=False)
    assert_named([base / "tokenizer.json", "pre_tokenizer", "Repair the regular expression"], said)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_with_a_syntax_error(pair: SmallPair, tmp_path: Path, place: str) -> None:
    """Behind export only a hash check would see that somebody fixed the file."""
    base = copied(pair.base, tmp_path / "base")
    source = "{% for m in messages %}\n{{ m['content'] }\n{% endfor %}"
    (base / "chat_template.jinja").unlink(missing_ok=True)
    if place.endswith(".json"):
        edit_json(base / place, lambda config: config.update(chat_template=source))
    else:
        (base / place).write_text(source)
    said = refusal(base, tmp_path / "out", CheckpointError, golden=False)
    assert_named([f"the chat template in {base}/{place} cannot be read", "(line 2)", "Fix"], said)


def test_chat_template_that_is_no_text(pair: SmallPair, tmp_path: Path) -> None:
    base = copied(pair.base, tmp_path / "base")
    (base / "chat_template.jinja").write_bytes(b"\xff\xfe")
    said = refusal(base, tmp_path / "out", CheckpointError, golden=False)
    assert_named([base / "chat_template.jinja", "cannot be read"], said)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("base", "model.layers.3.mlp.up_proj.weight"),
        ("base", "model.embed_tokens.weight"),
        ("draft", "fc.weight"),
    ],
)
def test_weight_that_is_not_finite(
    pair: SmallPair, tmp_path: Path, which: str, name: str, value: float
) -> None:
    path = copied(getattr(pair, which), tmp_path / which)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][-1, -1] = value
            save_file(tensors, file, metadata={"format": "pt"})
    said = refusal(path, tmp_path / "out", CheckpointError, golden=False)
    assert_named([path, name, "NaN or Inf"], said)


def rewritten(
    source: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    """A copy of a one-file checkpoint with other tensors."""
    file = copied(source, path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], list[object]]] = {
    "no fc": (lambda t: t.pop("fc.weight"), ["'fc.weight'"]),
    "narrow fc": (
        lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].contiguous()}),
        ["fc.weight", "[32, 95]"],
    ),
    "short norm": (
        lambda t: t.update({"norm.weight": t["norm.weight"][:5].contiguous()}),
        ["norm.weight [5] instead of [32]"],
    ),
    "map beyond the vocabulary": (
        lambda t: t["d2t"].index_fill_(0, torch.tensor([95]), 5000),
        ["d2t", "outside 0..255"],
    ),
    "no map": (lambda t: t.pop("d2t"), ["96 draft tokens of 256", "neither d2t nor t2d"]),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_draft_whose_tensors_are_not_those_of_its_config(
    pair: SmallPair, tmp_path: Path, case: str
) -> None:
    change, words = WRONG_TENSORS[case]
    draft = rewritten(pair.draft, tmp_path / "draft", change)
    said = refusal(draft, tmp_path / "out", CheckpointError, base_model_dir=str(pair.base))
    assert_named(words, said)


def test_base_whose_tensors_are_not_those_of_its_config(tmp_path: Path) -> None:
    whole = toys.make_base(tmp_path / "whole", **SIZES)
    name = "model.layers.3.mlp.up_proj.weight"
    base = rewritten(whole, tmp_path / "base", lambda t: t.pop(name))
    assert name in refusal(base, tmp_path / "out", CheckpointError, base_for="eagle3")


@pytest.mark.parametrize("which", ["base", "draft"])
def test_settings_of_a_quantization_that_no_tensor_shows(
    pair: SmallPair, tmp_path: Path, which: str
) -> None:
    checkpoint = copied(pair.root / which, tmp_path / which)
    settings = {"quant_method": "awq", "bits": 4}
    edit_json(checkpoint / "config.json", lambda c: c.update(quantization_config=settings))
    said = refusal(checkpoint, tmp_path / "out", CheckpointError)
    assert_named(["awq", checkpoint, "original"], said)


# Options


def test_flag_of_a_base_with_a_draft(pair: SmallPair, tmp_path: Path) -> None:
    said = refusal(pair.draft, tmp_path / "out", UnsupportedModel, base_for="eagle3")
    assert_named([pair.draft, "`eagle_base`"], said)


def test_base_of_a_base(pair: SmallPair, tmp_path: Path) -> None:
    named = {"base_model_dir": str(pair.base)}
    said = refusal(pair.base, tmp_path / "out", PairingError, **named)
    assert_named([pair.base, "`base_model_dir`"], said)


def test_draft_as_its_own_base(pair: SmallPair, tmp_path: Path) -> None:
    named = {"base_model_dir": str(pair.draft)}
    said = refusal(pair.draft, tmp_path / "out", PairingError, **named)
    assert_named([pair.draft, "itself a draft"], said)


def test_shared_head_without_the_base(pair: SmallPair, tmp_path: Path) -> None:
    draft = toys.make_draft(
        tmp_path / "draft", pair.base, "eagle", draft_vocab=None, own_head=False
    )
    said = refusal(draft, tmp_path / "out", PairingError)
    assert_named(["lm_head", "`base_model_dir`"], said)


@pytest.mark.parametrize("layers", [(2, 4, 9), (4, 2, 5)])
def test_aux_layers_that_the_base_does_not_have(
    pair: SmallPair, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    asked = {"base_for": "eagle3", "aux_layers": layers}
    said = refusal(pair.base, tmp_path / "out", PairingError, **asked)
    assert_named([", ".join(map(str, layers)), "8 layers", "`aux_layers`"], said)


def test_aux_layers_of_a_plain_decoder(pair: SmallPair, tmp_path: Path) -> None:
    said = refusal(pair.base, tmp_path / "out", PairingError, aux_layers=(2, 4, 5))
    assert_named(["`aux_layers`", "`eagle_base`"], said)


# A draft for another base


def test_base_of_another_hidden_size(pair: SmallPair, tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", **SIZES | {"hidden": 48, "heads": 3})
    said = refusal(pair.draft, tmp_path / "out", PairingError, base_model_dir=str(base))
    assert_named([base, 32, 48, "`base_model_dir`"], said)


def test_aux_layers_beyond_the_base(pair: SmallPair, tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", **SIZES | {"layers": 6})
    draft = toys.make_draft(tmp_path / "draft", pair.base, "modelopt", aux_layers=(2, 4, 7))
    said = refusal(draft, tmp_path / "out", PairingError, base_model_dir=str(base))
    assert_named(["2, 4, 7", "6 layers", "`aux_layers`"], said)


# Places


def test_place_that_is_a_file(pair: SmallPair, tmp_path: Path) -> None:
    (tmp_path / "llm").write_text("x")
    options = ExportOptions(base_model_dir=str(pair.base))
    with pytest.raises(EdgeSpecError, match="llm already exists") as caught:
        export(str(pair.draft), tmp_path, options)
    assert caught.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["llm"]
