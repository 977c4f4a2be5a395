"""A drafting method that test code alone brings along goes the whole way of a user, on a model that
was exported and built for no drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edgespec.artifacts import file_names, hashes
from edgespec.backends.engine_dir import CONFIGS
from edgespec.cli.main import run
from edgespec.contract import Role
from edgespec.errors import BundleError, LimitError
from edgespec.methods import METHODS
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.registry import DRAFTERS, engineless_methods
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.session import Session
from tests import toys
from tests.e2e.repeating_drafter import METHOD, NAME, ROW, Repeating
from tests.e2e.workshop import Cli, asked, cli

__all__ = ["cli"]
GREEDY = SamplingParams(temperature=0, max_generate_length=20)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the methods that this package brings and that need no engine."""
    for name in engineless_methods():
        monkeypatch.delitem(DRAFTERS, name)


@pytest.fixture
def registered(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, NAME, METHOD)
    monkeypatch.setitem(DRAFTERS, NAME, ROW)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of a plain export, by the commands that a user would give."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        toys.make_base(path / "base", "llama", layers=2)
    else:
        toys.make_qwen3_5(path / "base", layers=4)
    build = ["build", "--onnx-dir", path / "onnx" / "llm", "--engine-dir", path / "engines"]
    build += ["--max-batch-size", 3, "--max-input-len", 96, "--max-kv-cache-capacity", 128]
    build += ["--max-verify-tree-size", 12]
    for words in (["export", path / "base", path / "onnx"], build):
        assert run([str(word) for word in words]) == 0
    return path / "engines"


@pytest.fixture
def engine(registered: None, engines: Path) -> Iterator[Engine]:
    with Engine(engines, drafter=NAME) as opened:
        opened.stop_ids = frozenset()
        yield opened


def input_file(tmp_path: Path) -> Path:
    """Requests that repeat themselves, more of them than lanes."""
    requests = [asked("one two one two one two " * 2 + "x" * i) for i in range(5)]
    content = {"temperature": 0, "max_generate_length": 24, "batch_size": 3, "requests": requests}
    path = tmp_path / "input.json"
    path.write_text(json.dumps(content | {"logit_bias": {"0": -100, "2": -100}}))
    return path


def test_infer_takes_the_method_that_needs_no_engine_and_says_so_once(
    registered: None, cli: Cli, engines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = ["--engine-dir", engines, "--input-file", input_file(tmp_path), "--output-file", out]
    done = cli("infer", *words, "--spec-decode", "--check-lossless", "--json")
    assert done.code == 0, done.err
    assert done.err.count("drafting by repetition, which needs none") == 1
    assert "drafting a chain of what was said before: top-k 1, step 3" in done.err
    summary = json.loads(done.out)
    assert summary["lossless"].startswith("yes")
    responses = json.loads(out.read_text())["responses"]
    assert all(response["lossless"]["equal"] for response in responses)
    blocks = [response["metrics"]["speculative_decoding"] for response in responses]
    assert sum(block["num_draft_tokens"] for block in blocks) > 0


def test_infer_without_such_a_method_says_what_is_missing(
    alone: None, cli: Cli, engines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = ["--engine-dir", engines, "--input-file", input_file(tmp_path), "--output-file", out]
    done = cli("infer", *words, "--spec-decode")
    assert (done.code, "has no draft engine" in done.err) == (3, True)
    assert not out.exists()


def test_chat_drafts_with_it_too(registered: None, engines: Path, cli: Cli) -> None:
    words = ["chat", "--engine-dir", engines, "--temperature", "0", "--max-generate-length", "12"]
    said = "one two one two one two\n"
    plain = cli(*words, "--no-spec-decode", stdin=said)
    drafted = cli(*words, "--spec-decode", "--show-speculation", stdin=said)
    assert plain.code == drafted.code == 0
    assert drafted.out == plain.out
    assert "repetition" in drafted.err
    assert "acceptance length" in drafted.err


def test_by_name_by_alias_and_as_an_object_of_one_s_own(
    registered: None, engines: Path, engine: Engine
) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5]
    plain = engine.plainly(prompt, GREEDY).token_ids
    plan = engine.plan(1, 5, 6)
    assert engine.generate(prompt, GREEDY, plan).token_ids == plain
    own = Repeating()
    for drafter in ("ECHO", own):
        with Engine(engines, drafter=drafter) as opened:
            opened.stop_ids = frozenset()
            assert opened.generate(prompt, GREEDY).token_ids == plain
    assert own.num_proposed > 0
    assert own.closed


def test_streams_side_by_side_share_the_lanes(engine: Engine) -> None:
    prompts = [[5, 6, 5, 6, 5], [9, 8, 9, 8, 9]]
    expected = [engine.plainly(prompt, GREEDY).token_ids for prompt in prompts]
    batches = []
    real = Session.step

    def step(self: Session) -> Any:
        batches.append(len(self.running))
        return real(self)

    with mock.patch.object(Session, "step", step):
        streams = [engine.stream(prompt, GREEDY) for prompt in prompts]
        assert [stream.result().token_ids for stream in streams] == expected
    assert max(batches) == 2


@pytest.mark.parametrize(
    ("name", "said"), [("eagle3", "an engine of its own"), ("suffixes", "no drafting method")]
)
def test_names_of_other_methods_are_refused(
    registered: None, engines: Path, name: str, said: str
) -> None:
    with pytest.raises(LimitError, match=said) as error:
        Engine(engines, drafter=name)
    assert NAME in error.value.remedy


def test_drafter_that_needs_hidden_states_asks_for_an_engine_that_has_them(engines: Path) -> None:
    class Demanding(Repeating):
        needs_hidden_states = True

    with pytest.raises(BundleError, match="no base engine"):
        Engine(engines, drafter=Demanding())


def test_plain_engine_that_was_built_without_a_verify_size_says_build_again(
    registered: None, engines: Path, tmp_path: Path
) -> None:
    """As the version before built them."""
    old = shutil.copytree(engines, tmp_path / "old")
    path = old / CONFIGS[Role.LLM]
    config = json.loads(path.read_text())
    del config["builder_config"]["max_verify_tree_size"]
    path.write_text(json.dumps(config))
    manifest = json.loads((old / file_names.MANIFEST).read_text())
    files = manifest["engines"]["llm"]["files"]
    stat = path.stat()
    files[path.name] = {
        "bytes": stat.st_size,
        "sha256": hashes.sha256_file(path),
        "mtime_ns": stat.st_mtime_ns,
    }
    (old / file_names.MANIFEST).write_text(json.dumps(manifest))
    with Engine(old) as plain:
        assert len(plain.plainly([5, 6, 7], GREEDY).token_ids) > 0
    with pytest.raises(LimitError, match="built to verify no drafts") as error:
        Engine(old, spec_decode=True)
    assert "Build it again" in error.value.remedy
