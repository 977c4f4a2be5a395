"""What the command line does with damaged, mismatched and impossible input: an exit code, two
lines, and nothing left.

The commands run in this process on a toy pair that is exported and built once; whoever tampers
takes a copy.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec import bundle
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.ort import staging
from edgespec.backends.ort.backend import OrtBackend
from edgespec.cli.main import run
from edgespec.export import writer
from tests import toys
from tests.e2e.workshop import Cli, Outcome, cli

__all__ = ["cli"]  # a fixture

OURS, USAGE, REFUSED, ENVIRONMENT, SOME_FAILED, INTERRUPTED = 1, 2, 3, 4, 5, 130
CAPACITY = 64
LIMITS = [
    "--max-input-len",
    "48",
    "--max-kv-cache-capacity",
    CAPACITY,
    "--max-verify-tree-size",
    16,
]
LIMITS += ["--max-draft-tree-size", 12]


@dataclass(frozen=True)
class Shop:
    """A toy pair at each stage: checkpoints, exported directories, an engine directory. Not to be
    tampered with."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def base_onnx(self) -> Path:
        return self.root / "onnx-base" / "llm"

    @property
    def draft_onnx(self) -> Path:
        return self.root / "onnx-draft" / "llm"

    @property
    def engine(self) -> Path:
        return self.root / "engine"


Refused = Callable[..., Outcome]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = Shop(tmp_path_factory.mktemp("shop"))
    toys.make_base(shop.base, layers=8, hidden=32, heads=2, kv_heads=1, shards=2)
    toys.make_draft(shop.draft, shop.base, "modelopt")
    for args in (
        ["export", shop.base, shop.base_onnx.parent, "--eagle-base"],
        ["export", shop.draft, shop.draft_onnx.parent, "--base-model-dir", shop.base],
        ["build", "--onnx-dir", shop.base_onnx, "--engine-dir", shop.engine, *LIMITS],
        ["build", "--onnx-dir", shop.draft_onnx, "--engine-dir", shop.engine, *LIMITS],
    ):
        assert run([str(arg) for arg in args]) == 0
    return shop


@pytest.fixture
def refused(cli: Cli, tmp_path: Path) -> Refused:
    """Run one command line that must fail: with this code, one line that has these words, one
    remedy, no traces."""

    def call(code: int, words: list[object], *args: object) -> Outcome:
        before = snapshot(tmp_path)
        found = cli(*args)
        assert found.code == code, found.err
        lines = [line for line in found.err.splitlines() if not line.startswith("drafting a ")]
        assert len(lines) == 2, found.err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("  ")
        assert len(lines[1]) > 10
        for word in words:
            assert str(word) in found.err
        assert found.out == ""
        assert snapshot(tmp_path) == before
        return found

    return call


@pytest.fixture
def misused(cli: Cli, tmp_path: Path) -> Refused:
    """Run one command line that cannot be understood: exit 2, the words, and where help is."""

    def call(words: list[object], *args: object) -> Outcome:
        before = snapshot(tmp_path)
        found = cli(*args)
        assert found.code == USAGE, found.err
        for word in ("--help", "Error: ", *words):
            assert str(word) in found.err
        assert snapshot(tmp_path) == before
        return found

    return call


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """All files below a directory, and all directories but empty ones."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() or path.name.startswith(".")
    }


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def flip_byte(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def rewrite_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Load a one-file checkpoint, change its tensors, store it again."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_input(path: Path, *texts: str, **settings: object) -> Path:
    requests = [{"messages": [{"role": "user", "content": text}]} for text in texts or ("one two",)]
    path.write_text(
        json.dumps({"temperature": 0.0, "max_generate_length": 6, "requests": requests, **settings})
    )
    return path


def infer_args(engine: Path, tmp_path: Path, *texts: str) -> list[object]:
    source = write_input(tmp_path / "input.json", *texts)
    return [
        "infer",
        "--engine-dir",
        engine,
        "--input-file",
        source,
        "--output-file",
        tmp_path / "output.json",
    ]


# Damaged checkpoints


@pytest.fixture
def broken_base(shop: Shop, tmp_path: Path) -> Path:
    return copied(shop.base, tmp_path / "base")


@pytest.fixture
def broken_draft(shop: Shop, tmp_path: Path) -> Path:
    return copied(shop.draft, tmp_path / "draft")


def test_missing_shard(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    (broken_base / "model-00002-of-00002.safetensors").unlink()
    refused(
        REFUSED,
        ["model-00002-of-00002.safetensors", "Download"],
        "export",
        broken_base,
        tmp_path / "out",
    )


@pytest.mark.parametrize("kept", [5, -1])
def test_truncated_shard(broken_base: Path, tmp_path: Path, refused: Refused, kept: int) -> None:
    shard = broken_base / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    refused(
        REFUSED, [shard, "truncated", "Download it again"], "export", broken_base, tmp_path / "out"
    )


def test_shard_with_a_senseless_header(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    shard = broken_base / "model-00001-of-00002.safetensors"
    shard.write_bytes(struct.pack("<Q", 1 << 60) + shard.read_bytes()[8:])
    refused(REFUSED, [shard], "export", broken_base, tmp_path / "out")


def test_checkpoint_without_config(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    (broken_base / "config.json").unlink()
    refused(REFUSED, [broken_base, "config.json"], "export", broken_base, tmp_path / "out")


def test_config_that_is_no_json(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    (broken_base / "config.json").write_text('{"hidden_size": 32,')
    refused(
        REFUSED, [broken_base / "config.json", "not JSON"], "export", broken_base, tmp_path / "out"
    )


def test_config_without_a_needed_key(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    edit_json(broken_base / "config.json", lambda config: config.pop("hidden_size"))
    refused(
        REFUSED,
        [broken_base / "config.json", "'hidden_size' is missing"],
        "export",
        broken_base,
        tmp_path / "out",
    )


def test_directory_that_is_not_there(tmp_path: Path, refused: Refused) -> None:
    refused(REFUSED, [tmp_path / "nowhere"], "export", tmp_path / "nowhere", tmp_path / "out")


def test_base_without_a_tokenizer(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    (broken_base / "tokenizer.json").unlink()
    refused(REFUSED, [broken_base, "tokenizer.json"], "export", broken_base, tmp_path / "out")


# What else can be wrong with tensors: tests/unit/checkpoint/test_detect.py.
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_with_a_syntax_error(
    broken_base: Path, tmp_path: Path, refused: Refused, place: str
) -> None:
    """Found by export: behind it only a hash check would see that somebody fixed the file."""
    source = "{% for m in messages %}\n{{ m['content'] }\n{% endfor %}"
    (broken_base / "chat_template.jinja").unlink(missing_ok=True)
    if place.endswith(".json"):
        edit_json(broken_base / place, lambda config: config.update(chat_template=source))
    else:
        (broken_base / place).write_text(source)
    words = [f"the chat template in {broken_base}/{place} cannot be read", "(line 2)", "Fix it"]
    refused(REFUSED, words, "export", broken_base, tmp_path / "onnx", "--no-golden")


def test_chat_template_that_is_no_text(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    (broken_base / "chat_template.jinja").write_bytes(b"\xff\xfe")
    words = [broken_base / "chat_template.jinja", "cannot be read"]
    refused(REFUSED, words, "export", broken_base, tmp_path / "onnx", "--no-golden")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("base", "model.layers.3.mlp.up_proj.weight"),
        ("base", "model.embed_tokens.weight"),
        ("draft", "layers.0.self_attn.q_proj.weight"),
    ],
)
def test_weight_that_is_not_finite_is_refused_by_its_name(
    shop: Shop, tmp_path: Path, refused: Refused, which: str, name: str, value: float
) -> None:
    path = copied(getattr(shop, which), tmp_path / which)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][-1, -1] = value
            save_file(tensors, file, metadata={"format": "pt"})
    words = [name, "NaN or Inf", "Download it again"]
    refused(REFUSED, words, "export", path, tmp_path / "onnx", "--no-golden")


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], list[str]]] = {
    "missing-fc": (lambda t: t.pop("fc.weight"), ["'fc.weight'"]),
    "wrong-fc": (
        lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].contiguous()}),
        ["fc.weight", "[32, 95]"],
    ),
    "misshapen": (
        lambda t: t.update({"norm.weight": t["norm.weight"][:5].contiguous()}),
        ["norm.weight [5] instead of [32]"],
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_draft_whose_tensors_are_not_those_of_its_config(
    shop: Shop, broken_draft: Path, tmp_path: Path, refused: Refused, case: str
) -> None:
    change, words = WRONG_TENSORS[case]
    rewrite_tensors(broken_draft, change)
    refused(
        REFUSED, [*words], "export", broken_draft, tmp_path / "out", "--base-model-dir", shop.base
    )


def test_base_whose_tensors_are_not_those_of_its_config(tmp_path: Path, refused: Refused) -> None:
    base = toys.make_base(tmp_path / "base", layers=8, hidden=32, heads=2, kv_heads=1)
    name = "model.layers.3.mlp.up_proj.weight"
    rewrite_tensors(base, lambda t: t.pop(name))
    refused(REFUSED, [name], "export", base, tmp_path / "out", "--eagle-base")


def test_broken_vocabulary_map(
    shop: Shop, broken_draft: Path, tmp_path: Path, refused: Refused
) -> None:
    """Other ways to break one: tests/unit/checkpoint/test_detect.py."""
    rewrite_tensors(broken_draft, lambda t: t["d2t"].index_fill_(0, torch.tensor([95]), 5000))
    words = ["d2t", "outside 0..255"]
    refused(
        REFUSED, [*words], "export", broken_draft, tmp_path / "out", "--base-model-dir", shop.base
    )


def test_reduced_vocabulary_without_a_map(
    shop: Shop, broken_draft: Path, tmp_path: Path, refused: Refused
) -> None:
    rewrite_tensors(broken_draft, lambda t: t.pop("d2t"))
    words = ["96 draft tokens of 256", "neither d2t nor t2d"]
    refused(
        REFUSED, [*words], "export", broken_draft, tmp_path / "out", "--base-model-dir", shop.base
    )


def test_pickled_weights_need_consent(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    draft = toys.make_draft(tmp_path / "draft", shop.base, "modelopt", pickle=True)
    args = ["export", draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(REFUSED, [draft, "pytorch_model.bin", "--allow-pickle"], *args)
    assert cli(*args, "--allow-pickle").code == 0


def test_pickle_that_would_run_code(
    shop: Shop, broken_draft: Path, tmp_path: Path, refused: Refused
) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "bombed"),)

    (broken_draft / "model.safetensors").unlink()
    (broken_draft / "pytorch_model.bin").write_bytes(
        pickle.dumps({"fc.weight": Bomb()}, protocol=2)
    )
    args = [
        "export",
        broken_draft,
        tmp_path / "out",
        "--base-model-dir",
        shop.base,
        "--allow-pickle",
    ]
    refused(REFUSED, ["pytorch_model.bin"], *args)
    assert not (tmp_path / "bombed").exists()


@pytest.mark.parametrize("which", ["base", "draft"])
def test_quantised_checkpoint(shop: Shop, tmp_path: Path, refused: Refused, which: str) -> None:
    checkpoint = copied(shop.root / which, tmp_path / which)
    edit_json(
        checkpoint / "config.json",
        lambda c: c.update(quantization_config={"quant_method": "awq", "bits": 4}),
    )
    refused(REFUSED, ["awq", checkpoint, "original"], "export", checkpoint, tmp_path / "out")


def test_unsupported_architecture_by_its_name(
    broken_base: Path, tmp_path: Path, refused: Refused
) -> None:
    names = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    edit_json(broken_base / "config.json", lambda config: config.update(names))
    refused(
        REFUSED, ["GemmaForCausalLM", "LlamaForCausalLM"], "export", broken_base, tmp_path / "out"
    )


# Flags of export that do not fit the checkpoint


def test_eagle_base_on_a_draft(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    refused(
        REFUSED,
        [shop.draft, "--eagle-base"],
        "export",
        shop.draft,
        tmp_path / "out",
        "--eagle-base",
    )


def test_base_model_dir_on_a_base(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = ["export", shop.base, tmp_path / "out", "--base-model-dir", shop.base]
    refused(REFUSED, [shop.base, "--base-model-dir"], *args)


def test_draft_as_its_own_base(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.draft]
    refused(REFUSED, [shop.draft, "itself a draft"], *args)


def test_borrowed_head_without_the_base(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    draft = toys.make_draft(
        tmp_path / "draft", shop.base, "eagle", draft_vocab=None, own_head=False
    )
    refused(REFUSED, ["lm_head", "--base-model-dir"], "export", draft, tmp_path / "out")


@pytest.mark.parametrize("layers", ["2,4,9", "4,2,5"])
def test_taps_that_the_base_does_not_have(
    shop: Shop, tmp_path: Path, refused: Refused, layers: str
) -> None:
    args = ["export", shop.base, tmp_path / "out", "--eagle-base", "--aux-layers", layers]
    refused(REFUSED, [layers.replace(",", ", "), "8 layers", "--aux-layers"], *args)


def test_taps_for_a_plain_decoder(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = ["export", shop.base, tmp_path / "out", "--aux-layers", "2,4,5"]
    refused(REFUSED, ["--aux-layers", "--eagle-base"], *args)


def test_taps_that_are_no_numbers(shop: Shop, tmp_path: Path, misused: Refused) -> None:
    misused(
        ["two,4"], "export", shop.base, tmp_path / "out", "--eagle-base", "--aux-layers", "two,4"
    )


# A draft for another base

OTHER_BASES: dict[str, tuple[dict[str, Any], list[object]]] = {
    "vocabulary": ({"vocab": 300}, [256, 300]),
    "hidden-size": ({"hidden": 48, "heads": 3, "kv_heads": 1}, [32, 48]),
}
SIZES = {"layers": 8, "hidden": 32, "heads": 2, "kv_heads": 1}


@pytest.fixture
def other_base(tmp_path: Path) -> Callable[..., Path]:
    return lambda **keys: toys.make_base(tmp_path / "other", **(SIZES | keys))


@pytest.mark.parametrize("what", OTHER_BASES)
def test_draft_for_another_base_is_refused_at_export(
    shop: Shop, tmp_path: Path, refused: Refused, other_base: Callable[..., Path], what: str
) -> None:
    keys, words = OTHER_BASES[what]
    base = other_base(**keys)
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", base]
    refused(REFUSED, [base, *words, "--base-model-dir"], *args)


def test_draft_whose_taps_lie_beyond_the_base_is_refused_at_export(
    shop: Shop, tmp_path: Path, refused: Refused, other_base: Callable[..., Path]
) -> None:
    draft = toys.make_draft(tmp_path / "draft", shop.base, "modelopt", aux_layers=(2, 4, 7))
    args = ["export", draft, tmp_path / "out", "--base-model-dir", other_base(layers=6)]
    refused(REFUSED, ["2, 4, 7", "6 layers", "--aux-layers"], *args)


@pytest.mark.parametrize("first", ["base", "draft"])
@pytest.mark.parametrize("what", ["identity", *OTHER_BASES, "taps"])
def test_draft_for_another_base_is_refused_at_build(
    shop: Shop,
    tmp_path: Path,
    refused: Refused,
    cli: Cli,
    other_base: Callable[..., Path],
    what: str,
    first: str,
) -> None:
    """Whichever of the two is built first; without --base-model-dir the draft knows its base by
    shapes alone."""
    draft, words = shop.draft_onnx, ["another base checkpoint"]
    flags: list[object] = ["--eagle-base"]
    keys: dict[str, Any] = {"seed": 7} if what == "identity" else {}
    if what in OTHER_BASES:
        keys, numbers = OTHER_BASES[what]
        words = [*map(str, numbers)]
    if what == "taps":
        flags, words = (
            ["--eagle-base", "--aux-layers", "2,4,6"],
            ["[2, 4, 6]", "[2, 4, 5]", "--aux-layers 2,4,5"],
        )
    if what != "identity":
        assert cli("export", shop.draft, tmp_path / "draft").code == 0
        draft = tmp_path / "draft" / "llm"
    base = shop.base if what == "taps" else other_base(**keys)
    assert cli("export", base, tmp_path / "base", *flags).code == 0
    order = [tmp_path / "base" / "llm", draft]
    one, two = order if first == "base" else order[::-1]
    assert cli("build", "--onnx-dir", one, "--engine-dir", tmp_path / "engine", *LIMITS).code == 0
    refused(
        REFUSED, [*words], "build", "--onnx-dir", two, "--engine-dir", tmp_path / "engine", *LIMITS
    )


# Damaged exports


def build_args(onnx: Path, engine: Path) -> list[object]:
    return ["build", "--onnx-dir", onnx, "--engine-dir", engine, *LIMITS]


@pytest.mark.parametrize(
    "name", ["model.onnx", "model.onnx.data", "config.json", "d2t.safetensors"]
)
def test_exported_file_with_a_flipped_byte(
    shop: Shop, tmp_path: Path, refused: Refused, name: str
) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    flip_byte(onnx / name, -40 if name == "config.json" else -1)
    refused(REFUSED, [onnx / name], *build_args(onnx, tmp_path / "engine"))


def test_exported_file_that_is_missing(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    (onnx / "model.onnx.data").unlink()
    refused(REFUSED, [onnx / "model.onnx.data", "missing"], *build_args(onnx, tmp_path / "engine"))


def test_exported_file_that_is_truncated(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    os.truncate(onnx / "model.onnx.data", 1000)
    refused(
        REFUSED, [onnx / "model.onnx.data", "1000 bytes"], *build_args(onnx, tmp_path / "engine")
    )


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_onnx_dir_without_one_of_its_records(
    shop: Shop, tmp_path: Path, refused: Refused, name: str
) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    (onnx / name).unlink()
    refused(REFUSED, [onnx / name, "does not exist"], *build_args(onnx, tmp_path / "engine"))


def test_onnx_dir_one_level_too_high(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = build_args(shop.draft_onnx.parent, tmp_path / "engine")
    refused(REFUSED, [f"--onnx-dir {shop.draft_onnx}"], *args)


def test_onnx_dir_that_is_not_there(tmp_path: Path, refused: Refused) -> None:
    refused(REFUSED, [tmp_path / "nowhere"], *build_args(tmp_path / "nowhere", tmp_path / "engine"))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "sub/../model.onnx", ""])
def test_export_manifest_that_leads_out_of_its_directory(
    shop: Shop, tmp_path: Path, refused: Refused, name: str
) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    (tmp_path / "outside").write_text("x")
    edit_json(
        onnx / "manifest.json", lambda m: m["files"].update({name: {"bytes": 1, "sha256": "0"}})
    )
    refused(REFUSED, [onnx / "manifest.json", repr(name)], *build_args(onnx, tmp_path / "engine"))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.update(files=[]),
        lambda m: m["files"]["model.onnx"].pop("sha256"),
        lambda m: m.update(files={"model.onnx": 7}),
        lambda m: m.update(format=99),
        lambda m: m.pop("format"),
    ],
    ids=["no-files", "files-a-list", "no-hash", "entry-a-number", "format-99", "no-format"],
)
def test_export_manifest_that_is_not_one(
    shop: Shop, tmp_path: Path, refused: Refused, change: Callable[[Any], object]
) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    edit_json(onnx / "manifest.json", change)
    refused(REFUSED, [onnx / "manifest.json"], *build_args(onnx, tmp_path / "engine"))


# Flags of build that do not fit


@pytest.mark.parametrize(
    ("flag", "onnx"), [("--spec-base", "draft_onnx"), ("--spec-draft", "base_onnx")]
)
def test_flag_for_the_other_one_of_the_pair(
    shop: Shop, tmp_path: Path, refused: Refused, flag: str, onnx: str
) -> None:
    path = getattr(shop, onnx)
    refused(REFUSED, [path, "exported as"], *build_args(path, tmp_path / "engine"), flag)


def test_both_flags(shop: Shop, tmp_path: Path, misused: Refused) -> None:
    args = [*build_args(shop.base_onnx, tmp_path / "engine"), "--spec-base", "--spec-draft"]
    misused(["--spec-base", "--spec-draft"], *args)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-input-len", 0, ["--max-input-len is 0"]),
        ("--max-input-len", CAPACITY + 1, [CAPACITY + 1, CAPACITY]),
        ("--max-kv-cache-capacity", -3, ["--max-kv-cache-capacity is -3"]),
        ("--max-batch-size", 17, ["--max-batch-size 17"]),
        ("--max-verify-tree-size", 0, ["--max-verify-tree-size is 0"]),
    ],
)
def test_limits_that_cannot_be(
    shop: Shop, tmp_path: Path, refused: Refused, flag: str, value: int, words: list[object]
) -> None:
    refused(REFUSED, words, *build_args(shop.base_onnx, tmp_path / "engine"), flag, value)


@pytest.mark.parametrize(
    ("onnx", "flag", "value", "words"),
    [
        ("base_onnx", "--max-kv-cache-capacity", 2**40, ["a KV cache for", "this machine has"]),
        ("draft_onnx", "--max-kv-cache-capacity", 2**40, ["a KV cache for", "this machine has"]),
        ("base_onnx", "--max-verify-tree-size", 100000, [f"--max-kv-cache-capacity {CAPACITY}"]),
        ("draft_onnx", "--max-draft-tree-size", 100000, [f"--max-kv-cache-capacity {CAPACITY}"]),
    ],
)
def test_engine_that_could_not_run_is_not_built(
    shop: Shop,
    tmp_path: Path,
    refused: Refused,
    onnx: str,
    flag: str,
    value: int,
    words: list[object],
) -> None:
    args = build_args(getattr(shop, onnx), tmp_path / "engine")
    refused(REFUSED, [f"{flag} {value}", *words], *args, flag, value)


def test_cache_larger_than_any_memory(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the memory of the machine is unknown, running says which flag to lower."""
    monkeypatch.setattr(OrtBackend, "total_memory_bytes", lambda self: None)
    engine = tmp_path / "engine"
    args = [*build_args(shop.base_onnx, engine), "--max-kv-cache-capacity", 2**40]
    assert cli(*args).code == 0
    refused(ENVIRONMENT, ["KV cache", "--max-kv-cache-capacity"], *infer_args(engine, tmp_path))


def test_draft_beside_a_plain_engine_is_refused(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    """Whichever is built first; a plain engine emits no hidden states for the draft."""
    plain, first, second = tmp_path / "plain", tmp_path / "first", tmp_path / "second"
    assert cli("export", shop.base, plain).code == 0
    assert cli(*build_args(plain / "llm", first)).code == 0
    words = ["EAGLE-3 draft", "emits no hidden states", "--eagle-base"]
    refused(REFUSED, words, *build_args(shop.draft_onnx, first))
    assert cli(*build_args(shop.draft_onnx, second)).code == 0
    refused(REFUSED, words, *build_args(plain / "llm", second))
    both = copied(shop.engine, tmp_path / "both")
    assert cli(*build_args(plain / "llm", both)).code == 0  # all three go together
    without_base(both)
    found = cli("inspect", both)
    assert found.code == REFUSED
    assert "has no base in this engine directory, only a plain decoder" in found.err


def without_base(engine: Path) -> None:
    """The directory as an earlier version built it: a plain engine and a draft."""
    manifest = json.loads((engine / "manifest.json").read_text())
    files = set(manifest["engines"].pop("base")["files"])
    kept = {name for entry in manifest["engines"].values() for name in entry["files"]}
    for name in files - kept:
        (engine / name).unlink()
    (engine / "manifest.json").write_text(json.dumps(manifest))


def test_engine_dir_that_is_an_export(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    onnx = copied(shop.base_onnx, tmp_path / "llm")
    refused(REFUSED, [onnx, "--engine-dir"], *build_args(shop.draft_onnx, onnx))


# Damaged engines


@pytest.fixture
def engine(shop: Shop, tmp_path: Path) -> Path:
    return copied(shop.engine, tmp_path / "engine")


@pytest.mark.parametrize(
    "name",
    [
        "spec_base.onnx",
        "spec_base.onnx.data",
        "spec_draft.onnx.data",
        "embedding.safetensors",
        "d2t.safetensors",
    ],
)
def test_engine_file_with_a_flipped_byte(
    engine: Path, tmp_path: Path, refused: Refused, name: str
) -> None:
    flip_byte(engine / name)
    refused(REFUSED, [engine / name, "hash"], *infer_args(engine, tmp_path), "--spec-decode")


@pytest.mark.parametrize("name", ["base_config.json", "draft_config.json", "tokenizer.json"])
def test_engine_file_that_is_missing(
    engine: Path, tmp_path: Path, refused: Refused, name: str
) -> None:
    (engine / name).unlink()
    refused(REFUSED, [engine / name, "missing"], *infer_args(engine, tmp_path), "--spec-decode")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_engine_manifest_that_leads_out_of_its_directory(
    engine: Path, tmp_path: Path, refused: Refused, name: str
) -> None:
    (tmp_path / "outside").write_text("x")
    entry = {"bytes": 1, "sha256": "0", "mtime_ns": 0}
    edit_json(
        engine / "manifest.json", lambda m: m["engines"]["base"]["files"].update({name: entry})
    )
    refused(REFUSED, [engine / "manifest.json", repr(name)], *infer_args(engine, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("engines"),
        lambda m: m.update(engines=["base"]),
        lambda m: m["engines"].update(base=7),
        lambda m: m["engines"]["base"].pop("files"),
        lambda m: m["engines"]["base"].pop("fingerprint"),
        lambda m: m.update(kind="export"),
        lambda m: m.update(format=2),
    ],
    ids=[
        "no-engines",
        "engines-a-list",
        "entry-a-number",
        "no-files",
        "no-fingerprint",
        "kind-export",
        "format-2",
    ],
)
def test_engine_manifest_that_is_not_one(
    engine: Path, tmp_path: Path, refused: Refused, change: Callable[[Any], object]
) -> None:
    edit_json(engine / "manifest.json", change)
    refused(REFUSED, [engine], *infer_args(engine, tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("onnxruntime", "1.0.0", ["ONNX Runtime 1.0.0"]),
        ("machine", "riscv64", ["riscv64"]),
        ("cpu_features", ["avx9000"], ["avx9000", "another CPU"]),
    ],
)
def test_engine_of_another_machine(
    engine: Path, tmp_path: Path, refused: Refused, key: str, value: object, words: list[object]
) -> None:
    edit_json(
        engine / "manifest.json", lambda m: m["engines"]["base"]["fingerprint"].update({key: value})
    )
    refused(ENVIRONMENT, [engine, *words, "edgespec build again"], *infer_args(engine, tmp_path))


def test_engine_dir_that_is_not_there(tmp_path: Path, refused: Refused) -> None:
    refused(
        REFUSED,
        [tmp_path / "nowhere", "edgespec build"],
        *infer_args(tmp_path / "nowhere", tmp_path),
    )


def test_spec_decode_without_a_draft(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    engine = tmp_path / "engine"
    assert cli(*build_args(shop.base_onnx, engine)).code == 0
    refused(REFUSED, [engine, "no draft engine"], *infer_args(engine, tmp_path), "--spec-decode")


# Trees that cannot be


@pytest.mark.parametrize(
    ("top_k", "step", "size", "words"),
    [
        (
            4,
            3,
            17,
            ["--spec-verify-size 17", "16", "--max-verify-tree-size 17"],
        ),  # beyond the base engine
        (2, 2, 8, ["--spec-verify-size 8", "7 nodes", "1 + K + (S-1)*K*K"]),  # beyond the pool
        (1, 3, 5, ["--spec-verify-size 5", "4 nodes"]),
        (
            4,
            4,
            12,
            ["--spec-draft-top-k 4", "--spec-draft-step 4", "12", "--max-draft-tree-size 16"],
        ),
    ],
)
def test_tree_beyond_what_can_be(
    shop: Shop,
    tmp_path: Path,
    refused: Refused,
    top_k: int,
    step: int,
    size: int,
    words: list[object],
) -> None:
    sizes = ["--spec-draft-top-k", top_k, "--spec-draft-step", step, "--spec-verify-size", size]
    refused(REFUSED, words, *infer_args(shop.engine, tmp_path), "--spec-decode", *sizes)


def test_wider_than_the_drafts_vocabulary(
    shop: Shop, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    engine = tmp_path / "engine"
    for onnx in (shop.base_onnx, shop.draft_onnx):
        assert (
            cli(
                *build_args(onnx, engine),
                "--max-draft-tree-size",
                200,
                "--max-kv-cache-capacity",
                256,
            ).code
            == 0
        )
    sizes = ["--spec-draft-top-k", 97, "--spec-draft-step", 1, "--spec-verify-size", 4]
    refused(
        REFUSED, ["--spec-draft-top-k 97"], *infer_args(engine, tmp_path), "--spec-decode", *sizes
    )


@pytest.mark.parametrize("sizes", [(4, 3, 16), (4, 3, 12), (2, 2, 7), (12, 1, 13), (1, 12, 13)])
def test_tree_at_its_limit_is_taken(
    shop: Shop, tmp_path: Path, cli: Cli, sizes: tuple[int, int, int]
) -> None:
    flags = [
        "--spec-draft-top-k",
        sizes[0],
        "--spec-draft-step",
        sizes[1],
        "--spec-verify-size",
        sizes[2],
    ]
    assert (
        cli(*infer_args(shop.engine, tmp_path), "--spec-decode", *flags, "--check-lossless").code
        == 0
    )


# Requests


@pytest.mark.parametrize("spec", [[], ["--spec-decode"]])
@pytest.mark.parametrize("words", [30, 400])
def test_prompt_beyond_the_engine_harms_no_other_request(
    shop: Shop, tmp_path: Path, cli: Cli, words: int, spec: list[str]
) -> None:
    """30 words are beyond --max-input-len 48 tokens, 400 beyond the cache as well."""
    assert cli(*infer_args(shop.engine, tmp_path, "one", "two"), *spec).code == 0
    alone = json.loads((tmp_path / "output.json").read_text())["responses"]
    found = cli(*infer_args(shop.engine, tmp_path, "one", "boat " * words, "two"), *spec)
    assert found.code == SOME_FAILED
    assert "request 1: the prompt has" in found.err
    assert "--max-input-len" in found.err
    first, failed, last = json.loads((tmp_path / "output.json").read_text())["responses"]
    assert failed["finish_reason"] == "error"
    assert failed["output_text"] == ""
    assert "--max-input-len" in failed["error"]
    assert [first["output_ids"], last["output_ids"]] == [
        response["output_ids"] for response in alone
    ]


def test_prompt_that_fills_the_cache(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    """An engine for prompts as long as its cache: the longest one gets one token, a longer one an
    error."""
    engine = tmp_path / "engine"
    for onnx in (shop.base_onnx, shop.draft_onnx):
        assert (
            cli(
                *build_args(onnx, engine), "--max-input-len", 20, "--max-kv-cache-capacity", 20
            ).code
            == 0
        )
    letters = "abcdefghijklmnopqrstuvwxyz"
    settings = {"apply_chat_template": False}
    args = infer_args(engine, tmp_path)
    outputs = []
    for length in range(10, 27):
        write_input(tmp_path / "input.json", letters[:length], **settings)
        code = cli(*args, "--spec-decode", "--check-lossless").code
        response = json.loads((tmp_path / "output.json").read_text())["responses"][0]
        outputs.append((code, response))
    refused_ones = [response for code, response in outputs if code == SOME_FAILED]
    assert refused_ones
    assert all("--max-input-len" in response["error"] for response in refused_ones)
    done = [response for code, response in outputs if code == 0]
    assert len(done) + len(refused_ones) == len(outputs)
    full = [r for r in done if r["metrics"]["prompt_tokens"] == 20]
    assert full
    assert all(len(r["output_ids"]) == 1 and r["finish_reason"] == "max-length" for r in full)


# Other values: tests/unit/prompts; other files: test_robustness.py.
MALFORMED = {
    "no-json": ('{"requests": [', "is not JSON"),
    "unknown-key": ('{"temprature": 1, "requests": []}', '"temperature"'),
    "role": (
        '{"requests": [{"messages": [{"role": "usr", "content": "x"}]}]}',
        "requests[0].messages[0].role",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_input_file(shop: Shop, tmp_path: Path, refused: Refused, case: str) -> None:
    text, words = MALFORMED[case]
    args = infer_args(shop.engine, tmp_path)
    (tmp_path / "input.json").write_text(text)
    refused(REFUSED, [tmp_path / "input.json", words], *args)


def test_input_file_that_is_not_there(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = infer_args(shop.engine, tmp_path)
    (tmp_path / "input.json").unlink()
    refused(REFUSED, [tmp_path / "input.json"], *args)


def test_input_file_that_is_a_directory(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    args = infer_args(shop.engine, tmp_path)
    (tmp_path / "input.json").unlink()
    (tmp_path / "input.json").mkdir()
    refused(REFUSED, [tmp_path / "input.json", "directory"], *args)


# Places that cannot be written


def unwritable(tmp_path: Path, kind: str) -> Path:
    """A path below which nothing can be made; tests may run as root, whom permissions do not
    bind."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    return {
        "a-file": tmp_path / "file",
        "below-a-file": tmp_path / "file" / "sub",
        "dangling": tmp_path / "dangling",
    }[kind]


@pytest.mark.parametrize("kind", ["a-file", "below-a-file", "dangling"])
def test_export_to_where_nothing_can_be_written(
    shop: Shop, tmp_path: Path, refused: Refused, kind: str
) -> None:
    out = unwritable(tmp_path, kind)
    refused(ENVIRONMENT, [out], "export", shop.draft, out, "--base-model-dir", shop.base)


@pytest.mark.parametrize("kind", ["a-file", "below-a-file", "dangling"])
def test_build_to_where_nothing_can_be_written(
    shop: Shop, tmp_path: Path, refused: Refused, kind: str
) -> None:
    out = unwritable(tmp_path, kind)
    refused(ENVIRONMENT, [out], *build_args(shop.draft_onnx, out))


def test_name_that_no_file_system_takes(shop: Shop, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / ("x" * 300)
    refused(
        ENVIRONMENT, [out, "too long"], "export", shop.draft, out, "--base-model-dir", shop.base
    )
    refused(ENVIRONMENT, [out, "too long"], *build_args(shop.draft_onnx, out))


@pytest.mark.parametrize("kind", ["a-directory", "below-a-file", "no-parent"])
def test_output_file_that_cannot_be_written(
    shop: Shop, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Found out before any work: no engine is opened."""
    monkeypatch.setattr("edgespec.runtime.engine.Engine.__init__", unreachable)
    (tmp_path / "file").write_text("x")
    (tmp_path / "directory").mkdir()
    places = {
        "a-directory": "directory",
        "below-a-file": "file/output.json",
        "no-parent": "absent/output.json",
    }
    args = infer_args(shop.engine, tmp_path)
    args[-1] = tmp_path / places[kind]
    refused(ENVIRONMENT, [tmp_path / places[kind]], *args)


def unreachable(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("this must not be reached")


def test_output_file_that_is_there_is_kept_when_the_run_fails(
    engine: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "output.json").write_text("of yesterday")
    flip_byte(engine / "spec_base.onnx.data")
    refused(REFUSED, ["hash"], *infer_args(engine, tmp_path))


@pytest.mark.parametrize("kind", ["other-export", "file"])
def test_export_to_where_something_else_is(
    shop: Shop, tmp_path: Path, refused: Refused, kind: str
) -> None:
    llm = tmp_path / "out" / "llm"
    llm.parent.mkdir()
    if kind == "file":
        llm.write_text("x")
    else:
        copied(shop.base_onnx, llm)
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(ENVIRONMENT, [llm, "already exists"], *args)


def test_same_export_again_finds_its_work_done_unless_it_is_damaged(
    shop: Shop, tmp_path: Path, cli: Cli, refused: Refused
) -> None:
    llm = copied(shop.draft_onnx, tmp_path / "out" / "llm")
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    before = snapshot(tmp_path)
    assert cli(*args).code == 0
    assert snapshot(tmp_path) == before
    refused(ENVIRONMENT, [llm, "already exists"], *args, "--no-golden")
    flip_byte(llm / "model.onnx.data")
    refused(REFUSED, [llm / "model.onnx.data", "hash"], *args)


# A disk that is full


class FullAfter:
    """Writes of one file fail once `room_bytes` are used up."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def take(self, size_bytes: int) -> None:
        self.room_bytes -= size_bytes
        if self.room_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room_bytes", [0, 10_000])
def test_disk_full_while_exporting_weights(
    shop: Shop, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    disk, write = FullAfter(room_bytes), writer.HashingFile.write

    def limited(self: writer.HashingFile, data: bytes | memoryview) -> int:
        disk.take(len(data))
        return write(self, data)

    monkeypatch.setattr(writer.HashingFile, "write", limited)
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(ENVIRONMENT, [tmp_path / "out" / "llm", "No space left", "disk is full"], *args)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_disk_full_while_exporting_the_records(
    shop: Shop, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fill_disk_at(monkeypatch, name)
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(ENVIRONMENT, [name, "No space left", "disk is full"], *args)


@pytest.mark.parametrize("name", ["draft_config.json", "spec_draft.onnx.data"])
def test_disk_full_while_building(
    shop: Shop,
    tmp_path: Path,
    refused: Refused,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The base that is there stays as it was, and stays usable."""
    engine = tmp_path / "engine"
    assert cli(*build_args(shop.base_onnx, engine)).code == 0
    with monkeypatch.context() as patch:
        if name.endswith("json"):
            fill_disk_at(patch, name)
        else:
            patch.setattr(staging, "write_data", no_space)
        refused(
            ENVIRONMENT,
            [engine, "No space left", "disk is full"],
            *build_args(shop.draft_onnx, engine),
        )
    assert list(EngineManifest.read(engine).engines) == ["base"]
    assert cli(*infer_args(engine, tmp_path)).code == 0


def test_disk_full_at_the_manifest_of_an_engine(
    shop: Shop, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of a build: the manifest does not list what it could not say."""
    engine = tmp_path / "engine"
    assert cli(*build_args(shop.base_onnx, engine)).code == 0
    with monkeypatch.context() as patch:
        fill_disk_at(patch, "manifest.json")
        found = cli(*build_args(shop.draft_onnx, engine))
    assert found.code == ENVIRONMENT
    assert "disk is full" in found.err
    assert list(EngineManifest.read(engine).engines) == ["base"]
    assert not leftovers(tmp_path)
    assert cli(*build_args(shop.draft_onnx, engine)).code == 0
    assert sorted(EngineManifest.read(engine).engines) == ["base", "draft"]


def fill_disk_at(patch: pytest.MonkeyPatch, name: str) -> None:
    write = bundle.write_json

    def limited(path: Path, value: object) -> None:
        with bundle.writing(path):
            if path.name == name:
                no_space()
        write(path, value)

    patch.setattr(bundle, "write_json", limited)


def no_space(*args: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def leftovers(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*") if ".tmp" in path.name]


def test_batch_beyond_the_engine_is_refused_with_both_ways_out(
    shop: Shop, tmp_path: Path, cli: Cli
) -> None:
    found = cli(*infer_args(shop.engine, tmp_path), "--batch-size", 2)
    assert found.code == REFUSED
    assert "batch_size 2; the base engine was built for 1" in found.err
    assert "--max-batch-size 2" in found.err


def test_disk_full_while_writing_the_output(
    shop: Shop, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sibling was written before, and is left with what is finished."""
    monkeypatch.setattr("os.fsync", no_space)
    found = cli(*infer_args(shop.engine, tmp_path))
    assert found.code == ENVIRONMENT
    assert str(tmp_path / "output.json") in found.err
    assert "No space left" in found.err
    kept = tmp_path / "output.json.partial.jsonl"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.json", kept.name]
    assert str(kept) in found.err
    assert [json.loads(line)["finish_reason"] for line in kept.read_text().splitlines()] == [
        "end-of-sequence"
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A real file system of so many bytes; skipped where one may not be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def mount(size_bytes: int) -> Path:
        nonlocal mounted
        if mounted:
            subprocess.run(["umount", place], check=True)
            mounted = False
        if shutil.which("mount") is None:
            pytest.skip("there is no mount")
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
        mounted = True
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", place], check=True)


def pages(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) for path in directory.rglob("*") if path.is_file())


def test_every_size_of_a_full_disk_is_refused_alike_by_export(
    shop: Shop, small_disk: Callable[[int], Path], cli: Cli
) -> None:
    """From the first byte to the last file but one: weights, graph, config, golden outputs,
    manifest."""
    need = pages(shop.draft_onnx)
    for size in [2, need // 2, *range(need - 10, need)]:
        disk = small_disk(size * 4096)
        found = cli("export", shop.draft, disk / "out", "--base-model-dir", shop.base)
        assert found.code == ENVIRONMENT, (size, need, found.err)
        assert "disk is full" in found.err
        assert [path for path in disk.rglob("*") if path != disk / "out"] == []
    assert (
        cli("export", shop.draft, small_disk((need + 8) * 4096), "--base-model-dir", shop.base).code
        == 0
    )


def test_every_size_of_a_full_disk_is_refused_alike_by_build(
    shop: Shop, tmp_path: Path, small_disk: Callable[[int], Path], cli: Cli
) -> None:
    assert cli(*build_args(shop.draft_onnx, tmp_path / "engine")).code == 0
    need = pages(tmp_path / "engine")
    for size in [2, need // 2, *range(need - 8, need)]:
        disk = small_disk(size * 4096)
        found = cli(*build_args(shop.draft_onnx, disk / "engine"))
        assert found.code == ENVIRONMENT, (size, need, found.err)
        assert "disk is full" in found.err
        assert EngineManifest.read(disk / "engine").engines == {}
        assert leftovers(disk) == []
    assert cli(*build_args(shop.draft_onnx, small_disk((need + 8) * 4096) / "engine")).code == 0


# Usage


def test_unknown_flag(shop: Shop, tmp_path: Path, misused: Refused) -> None:
    misused(["--eagle-bass"], "export", shop.base, tmp_path / "out", "--eagle-bass")


def test_unknown_command(misused: Refused) -> None:
    misused(["exprot"], "exprot")


def test_missing_argument(shop: Shop, misused: Refused) -> None:
    misused(["OUT"], "export", shop.base)


@pytest.mark.parametrize(
    "flags",
    [
        ["--check-lossless"],
        ["--spec-draft-top-k", 2],
        ["--spec-draft-step", 2],
        ["--spec-verify-size", 2],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_of_drafting_without_spec_decode(
    shop: Shop, tmp_path: Path, misused: Refused, flags: list[object]
) -> None:
    misused(["--spec-decode"], *infer_args(shop.engine, tmp_path), *flags)


def test_number_that_is_none(shop: Shop, tmp_path: Path, misused: Refused) -> None:
    misused(
        ["many"], *infer_args(shop.engine, tmp_path), "--spec-decode", "--spec-draft-step", "many"
    )


# The same from outside: exit codes and streams of a process of its own

ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def process(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgespec.cli.main", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, env=ENVIRON, timeout=120, check=False
    )


def test_refusal_of_a_process(shop: Shop, tmp_path: Path) -> None:
    found = process("export", shop.draft, tmp_path / "out", "--eagle-base")
    assert (found.returncode, found.stdout) == (REFUSED, "")
    assert [line[:7] for line in found.stderr.splitlines()] == ["error: ", "  Leave"]


def test_usage_error_of_a_process(tmp_path: Path) -> None:
    found = process("build", "--no-such-flag", tmp_path)
    assert (found.returncode, found.stdout) == (USAGE, "")
    assert "--no-such-flag" in found.stderr
    assert "Traceback" not in found.stderr


def test_debug_adds_the_traceback(shop: Shop, tmp_path: Path) -> None:
    found = process("export", shop.draft, tmp_path / "out", "--eagle-base", "--debug")
    assert found.returncode == OURS
    assert "Traceback" in found.stderr
    assert "UnsupportedModel" in found.stderr


# Ctrl-C

SLOWED = """
import pkgutil, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
place, name, calls = sys.argv[1].rsplit(".", 1) + [int(sys.argv[2])]
module = pkgutil.resolve_name(place)
real = getattr(module, name)
def slowed(*args, **kwargs):
    global calls
    calls -= 1
    if calls < 0:
        print("at it", flush=True)
        time.sleep(float(sys.argv[3]))
    return real(*args, **kwargs)
setattr(module, name, slowed)
from edgespec.cli.main import main
main(sys.argv[4:])
"""


def stopped(
    signal_number: int, place: str, calls: int, *args: object, halt_s: float = 60
) -> tuple[int, str]:
    """Run a command that halts at `place` after so many calls of it, and send the signal there:
    (code, stderr)."""
    command = [sys.executable, "-c", SLOWED, place, str(calls), str(halt_s), *map(str, args)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "at it\n", child.communicate()
        child.send_signal(signal_number)
        _, err = child.communicate(timeout=60)
        return child.returncode, err


STOPPED = {
    signal.SIGINT: (INTERRUPTED, "interrupted: no partial output is left"),
    signal.SIGTERM: (128 + signal.SIGTERM, "stopped by SIGTERM: no partial output is left"),
}


@pytest.mark.parametrize("number", STOPPED)
def test_a_signal_during_export_leaves_nothing(
    shop: Shop, tmp_path: Path, number: signal.Signals
) -> None:
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    code, err = stopped(number, "edgespec.export.component.make_golden", 0, *args)
    assert (code, err.splitlines()[-1]) == STOPPED[number]
    assert "Traceback" not in err
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("number", STOPPED)
def test_a_signal_that_an_import_hides_is_still_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """ONNX Runtime says that numpy cannot be imported where the signal came meanwhile."""

    def importing(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException:
            hidden = ImportError("import numpy failed")
        raise hidden

    monkeypatch.setattr("edgespec.export.components.export", importing)
    found = cli("export", tmp_path, tmp_path / "out")
    assert (found.code, found.err.strip()) == STOPPED[number]
    monkeypatch.setattr(
        "edgespec.export.components.export", lambda *_: __import__("no_such_module")
    )
    assert "bug in edgespec" in cli("export", tmp_path, tmp_path / "out").err


@pytest.mark.parametrize("number", STOPPED)
def test_a_signal_during_build_leaves_the_engines_that_were_there(
    shop: Shop, tmp_path: Path, cli: Cli, number: signal.Signals
) -> None:
    engine = tmp_path / "engine"
    assert cli(*build_args(shop.base_onnx, engine)).code == 0
    before = snapshot(tmp_path)
    args = build_args(shop.draft_onnx, engine)
    code, err = stopped(number, "edgespec.backends.build.check_golden", 0, *args)
    assert (code, err.splitlines()[-1]) == STOPPED[number]
    assert "Traceback" not in err
    assert snapshot(tmp_path) == before


def test_ctrl_c_during_infer_keeps_what_is_finished(shop: Shop, tmp_path: Path) -> None:
    args = infer_args(shop.engine, tmp_path, "one", "two", "three")
    # Five steps a request after prefill: the eighth is the third of the second one, and it is
    # finished.
    code, err = stopped(signal.SIGINT, "edgespec.runtime.session.accept", 7, *args, halt_s=1.5)
    assert code == INTERRUPTED
    assert "stopping after this step" in err
    assert err.splitlines()[-1] == f"what was finished is in {tmp_path / 'output.json'}"
    assert "Traceback" not in err
    responses = json.loads((tmp_path / "output.json").read_text())["responses"]
    assert [response["finish_reason"] for response in responses] == [
        "max-length",
        "cancelled",
        "cancelled",
    ]
    assert [len(response.get("output_ids", [])) for response in responses] == [6, 4, 0]
    assert leftovers(tmp_path) == []


def test_ctrl_c_while_an_engine_loads_writes_no_output(shop: Shop, tmp_path: Path) -> None:
    args = infer_args(shop.engine, tmp_path)
    code, err = stopped(signal.SIGINT, "edgespec.runtime.opening.open_runner", 0, *args)
    assert code == INTERRUPTED
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


def test_killed_export_leaves_nothing_that_looks_finished(
    shop: Shop, tmp_path: Path, cli: Cli
) -> None:
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    code, _ = stopped(signal.SIGKILL, "edgespec.export.component.make_golden", 0, *args)
    assert code == -signal.SIGKILL
    assert not (tmp_path / "out" / "llm").exists()
    assert cli(*args).code == 0


def test_killed_build_leaves_nothing_that_looks_finished(
    shop: Shop, tmp_path: Path, cli: Cli
) -> None:
    args = build_args(shop.draft_onnx, tmp_path / "engine")
    code, _ = stopped(signal.SIGKILL, "edgespec.backends.manifest.EngineManifest.write", 0, *args)
    assert code == -signal.SIGKILL
    assert EngineManifest.read(tmp_path / "engine").engines == {}
    assert cli(*args).code == 0
