"""JetSpec and DSpark pairs as a user types them: the guide's commands, others on the same
directories, and what is said of input that cannot be right.

A toy pair of each is exported and built once; whoever changes one takes a copy.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts import file_names
from edgespec.cli.main import run
from tests import toys
from tests.e2e.workshop import Cli, asked, check_rejection, check_tuning, cli, infer

__all__ = ["cli"]  # a fixture

REFUSED = 3
SIZES = ["--maxBatchSize", 1, "--maxInputLen", 64, "--maxKVCacheCapacity", 128]
MAKERS: dict[str, Callable[..., Path]] = {"jetspec": toys.make_jetspec, "dspark": toys.make_dspark}
TITLES = {"jetspec": "JetSpec", "dspark": "DSpark"}


@dataclass(frozen=True)
class Shop:
    root: Path
    method: str

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def component(self) -> Path:
        return self.root / "draft_export" / f"{self.method}_draft"

    @property
    def engines(self) -> Path:
        return self.root / "engines"

    @property
    def draft_dir(self) -> list[object]:
        return [f"--{self.method}-draft-dir", self.draft]


def call(*args: object) -> None:
    assert run([str(arg) for arg in args]) == 0


@pytest.fixture(scope="module", params=MAKERS)
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Everything up to the engines, in the order and the spelling of TensorRT Edge-LLM's guide."""
    shop = Shop(tmp_path_factory.mktemp("shop"), request.param)
    toys.make_base(shop.base, "qwen3", layers=8)
    MAKERS[shop.method](shop.draft, shop.base, block_size=7)
    base = "--jetspec-tree-base" if shop.method == "jetspec" else "--dspark-base"
    call("export", shop.base, shop.root / "base_export", base, *shop.draft_dir)
    flags = [f"--{shop.method}-draft", *shop.draft_dir]
    call("export", shop.base, shop.root / "draft_export", *flags)
    made = ["--engineDir", shop.engines, *SIZES]
    onnx = shop.root / "base_export" / "llm"
    call("build", "--onnxDir", onnx, *made, "--maxVerifyTreeSize", 32, "--specBase")
    call("build", "--onnxDir", shop.component, *made, "--maxDraftTreeSize", 7, "--specDraft")
    return shop


def test_rejection_draws_drafts_and_keeps_the_distribution(
    shop: Shop, tmp_path: Path, cli: Cli
) -> None:
    check_rejection(cli, shop.engines, tmp_path)


def test_it_is_tuned(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    found = check_tuning(cli, shop.engines, tmp_path, "--temperature", 0.7)
    assert {*found["acceptance"]} == {"0", "0.7"}
    tried = {row["words"] for row in found["ranked"] if "confidence_threshold" in row["words"]}
    assert bool(tried) == (shop.method == "dspark")


def answers(path: Path) -> list[dict[str, Any]]:
    responses: list[dict[str, Any]] = json.loads((path / "output.json").read_text())["responses"]
    return responses


def test_the_guides_infer_is_lossless(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    requests = [asked("one two"), asked("three", temperature=1.0, seed=4)]
    line = infer(shop.engines, tmp_path, *requests, max_generate_length=20)
    sizes = {"jetspec": (7, 1, 32, "--jetspecBlockSize", 0), "dspark": (1, 1, 8)}[shop.method]
    flags = ["--specDraftTopK", "--specDraftStep", "--specVerifySize"]
    given = [part for pair in zip(flags, sizes, strict=False) for part in pair] + [*sizes[3:]]
    done = cli(*line, "--specDecode", *given, "--check-lossless")
    assert done.code == 0, done.err
    kind = "a tree: top-k 7" if shop.method == "jetspec" else "a chain: top-k 1"
    assert f"drafting {kind}, blocks of 7, verify size {sizes[2]}" in done.err
    assert [len(answer["output_ids"]) for answer in answers(tmp_path)] == [20, 20]
    assert ["lossless", "yes"] in [line.split() for line in done.out.splitlines()]


def test_the_default_is_a_chain_of_a_whole_block(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    line = infer(shop.engines, tmp_path, max_generate_length=12)
    done = cli(*line, "--spec-decode", "--check-lossless", "--json")
    assert done.code == 0, done.err
    drafts = 6 if shop.method == "jetspec" else 7
    assert f"a chain: top-k 1, blocks of 7, verify size {drafts + 1}" in done.err
    assert f'"num_spec_tokens": {drafts}' in json.dumps(answers(tmp_path))


def test_a_draft_is_recognised_by_itself(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", shop.draft, tmp_path, "--base-model-dir", shop.base)
    assert done.code == 0
    layout = "deepspec" if shop.method == "dspark" else "jetspec"
    assert f"{TITLES[shop.method]} draft, {layout} layout: blocks of 7" in done.out
    found = tmp_path / shop.component.name / "config.json"
    assert found.read_text() == (shop.component / "config.json").read_text()


def test_configs_have_the_mirrored_tools_keys(shop: Shop) -> None:
    base, draft = (
        json.loads((path / "config.json").read_text())
        for path in (shop.root / "base_export" / "llm", shop.component)
    )
    section = f"{shop.method}_config"
    assert (base["spec_decode_type"], draft["spec_decode_type"]) == (shop.method, shop.method)
    assert base[section].items() >= {"block_size": 7, "mask_token_id": 255}.items()
    if shop.method == "jetspec":
        assert base[section]["causal_head"] is draft[section]["causal_head"] is True
        assert not (shop.engines / file_names.HEADS).exists()
    else:
        keys = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
        assert draft[section].items() >= keys.items()
        assert (shop.engines / file_names.HEADS).read_bytes() == (
            shop.component / file_names.HEADS
        ).read_bytes()


def test_inspect_shows_every_stage(shop: Shop, cli: Cli) -> None:
    behind = "7 tokens, mask token 255, behind the outputs of layers 1, 5"
    for path, words in (
        (shop.draft, [TITLES[shop.method], "7 tokens, the anchor included"]),
        (shop.component, [behind]),
        (shop.root / "base_export" / "llm", [behind]),
        (shop.engines, ["pairing"]),
    ):
        done = cli("inspect", path)
        assert done.code == 0, done.err
        heads = shop.method == "dspark" and path != shop.engines
        for word in [*words, *(["Markov (vanilla, rank 8) and confidence"] if heads else [])]:
            assert word in done.out


def test_check_takes_the_pair_and_its_probe(shop: Shop, cli: Cli) -> None:
    done = cli("check", shop.base, shop.draft)
    assert done.code == 0, done.out + done.err
    drafts = 6 if shop.method == "jetspec" else 7
    assert f"7 tokens, of which one pass drafts {drafts}" in done.out
    done = cli("check", shop.base, shop.draft, "--probe")
    assert "the draft's first token is the base's next one at" in done.out


def test_run_makes_the_engines_and_answers(
    shop: Shop, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    done = cli(
        *("run", shop.base, "--draft", shop.draft, "--prompt", "one two"),
        *("--max-generate-length", 4, "--max-kv-cache-capacity", 64, "--max-input-len", 32),
    )
    assert done.code == 0, done.err
    assert "drafting a chain: top-k 1, blocks of 7" in done.err


def test_chat_drafts_and_says_the_same(
    shop: Shop, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["chat", "--engine-dir", shop.engines, "--max-generate-length", 10, "--temperature", 0]
    said = []
    for flags in (["--no-spec-decode"], ["--spec-decode", "--show-speculation"]):
        text = io.BytesIO(b"one two\nthree\n")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(text))
        done = cli(*words, *flags)
        assert done.code == 0, done.err
        said.append(done.out)
    assert said[0] == said[1]
    assert "acceptance length" in done.err


def test_a_draft_of_the_other_method_is_refused_by_name(
    shop: Shop, tmp_path: Path, cli: Cli
) -> None:
    other = next(name for name in MAKERS if name != shop.method)
    args = [f"--{other}-base", f"--{other}-draft-dir", shop.draft]
    done = cli("export", shop.base, tmp_path / "out", *args)
    assert done.code == REFUSED
    assert f"is not a {TITLES[other]} draft" in done.err
    both = [*args, f"--{shop.method}-base", *shop.draft_dir]
    done = cli("export", shop.base, tmp_path / "out", *both)
    assert done.code == REFUSED
    assert "exclude each other" in done.err


def test_a_base_for_another_method_joins_no_draft(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    dflash = toys.make_dflash(tmp_path / "dflash", shop.base, aux_layers=(2, 6))
    out = ["--dflash-base", "--dflash-draft-dir", dflash]
    assert cli("export", shop.base, tmp_path, *out).code == 0
    engines = ["--engine-dir", tmp_path / "engines", *SIZES]
    assert cli("build", "--onnx-dir", tmp_path / "llm", *engines).code == 0
    done = cli("build", "--onnx-dir", shop.component, *engines)
    assert done.code == REFUSED
    assert f"the draft is a {TITLES[shop.method]} draft, the base was exported for" in done.err
    assert f"--{shop.method}-base --{shop.method}-draft-dir" in done.err


def test_heads_of_an_engine_that_changed_are_refused(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    engines = Path(shutil.copytree(shop.engines, tmp_path / "engines"))
    heads = engines / file_names.HEADS
    line = infer(engines, tmp_path, max_generate_length=4)
    if shop.method == "jetspec":  # it has none: one that lies there is not its own
        shutil.copy(engines / "draft_config.json", heads)
    else:
        data = heads.read_bytes()
        heads.write_bytes(data[:-4] + b"\0\0\xc0\x7f")
    done = cli(*line, "--spec-decode")
    assert done.code == REFUSED
    assert file_names.HEADS in done.err


def test_a_quantized_draft_goes_the_same_way(shop: Shop, tmp_path: Path, cli: Cli) -> None:
    pair = ["--base-model-dir", shop.base, "--draft-model-dir", shop.draft]
    line = ["quantize", "draft", *pair, "--output-dir", tmp_path / "q", "--quantization", "mxfp8"]
    done = cli(*line, "--num-samples", 1, "--calib-seq-len", 32)
    assert done.code == 0, done.err
    assert cli("export", tmp_path / "q", tmp_path, "--base-model-dir", shop.base).code == 0
    engines = Path(shutil.copytree(shop.engines, tmp_path / "engines"))
    made = ["--onnx-dir", tmp_path / f"{shop.method}_draft", "--engine-dir", engines, *SIZES]
    assert cli("build", *made).code == 0
    done = cli(
        *infer(engines, tmp_path, max_generate_length=8), "--spec-decode", "--check-lossless"
    )
    assert done.code == 0, done.err
