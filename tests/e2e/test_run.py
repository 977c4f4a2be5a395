"""`edgespec run`, as a stranger types it: the first start makes engines, the second one does not,
and what goes wrong leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.chat.loop import Chat
from edgespec.pipeline.cache import Cache
from tests import gguf_files, shared, toys
from tests.e2e.workshop import Cli, Outcome, cli, small_disk

__all__ = ["cli", "small_disk"]  # fixtures

SMALL = ("--max-input-len", 48, "--max-kv-cache-capacity", 64, "--max-generate-length", 8)
GREEDY = ("--temperature", 0, *SMALL)


def make_checkpoints(path: Path) -> None:
    base = toys.make_base(path / "base", "llama", layers=8)
    toys.make_draft(path / "eagle", base, "eagle")
    toys.make_dflash(path / "block", base, "z-lab")
    other = toys.make_base(path / "other", "llama", layers=8, hidden=128)
    toys.make_draft(path / "foreign", other, "eagle")
    toys.make_base(path / "small", "llama", layers=1, seed=1)
    toys.make_base(path / "other tokens", "llama", layers=1, vocab=300)


@pytest.fixture(scope="module")
def checkpoints() -> Path:
    return shared.made_once("checkpoints of edgespec run", make_checkpoints)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """The cache, which is empty; files that were made just now are taken for old ones."""
    monkeypatch.setattr("edgespec.pipeline.prepare.SETTLED_S", -1.0)
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is exported and built, as it happens."""
    calls: list[str] = []
    for name in ("export.components.export", "backends.build.build"):
        module, _, function = f"edgespec.{name}".rpartition(".")
        real = getattr(__import__(module, fromlist=[function]), function)

        def counted(*args: Any, real: Any = real, what: str = function, **options: Any) -> Any:
            calls.append(what)
            return real(*args, **options)

        monkeypatch.setattr(f"{module}.{function}", counted)
    return calls


def run_pair(checkpoints: Path, draft: str = "eagle") -> tuple[object, ...]:
    return ("run", checkpoints / "base", "--draft", checkpoints / draft, "--prompt", "a", *GREEDY)


def test_second_start_neither_exports_nor_builds_nor_reads_weights(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cli(*run_pair(checkpoints))
    assert first.code == 0, first.err
    assert made == ["export", "build", "export", "build"]
    assert "drafting a chain" in first.err
    monkeypatch.setattr(
        "edgespec.checkpoint.files.Checkpoint.identity", lambda *_: pytest.fail("read again")
    )
    second = cli(*run_pair(checkpoints))
    assert (second.code, second.out) == (0, first.out)
    assert len(made) == 4
    assert "export" not in second.err
    (entry,) = kept.entries()
    assert entry.about["method"] == "eagle3"
    assert not (entry.path / "export").exists()


def test_copy_of_a_checkpoint_is_the_same_engine_and_another_byte_is_not(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], tmp_path: Path
) -> None:
    assert cli("run", checkpoints / "base", "--prompt", "a", *GREEDY).code == 0
    copy = shutil.copytree(checkpoints / "base", tmp_path / "copy")
    assert cli("run", copy, "--prompt", "a", *GREEDY).code == 0
    assert made == ["export", "build"]
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert cli("run", copy, "--prompt", "a", *GREEDY).code == 0
    assert made == ["export", "build"] * 2
    assert len(kept.entries()) == 2


def test_each_kind_of_target_runs(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], tmp_path: Path
) -> None:
    """A block draft, a plain model, a head in the base's checkpoint, and finished engines."""
    block = cli(*run_pair(checkpoints, "block"))
    plain = cli("run", checkpoints / "base", "--prompt", "a", *GREEDY)
    assert (block.code, plain.code) == (0, 0), block.err + plain.err
    assert block.out == plain.out
    assert "no draft was given, and the model brings none" in plain.err
    assert "drafting a tree of earlier text" in plain.err
    undrafted = cli("run", checkpoints / "base", "--no-spec-decode", "--prompt", "a", *GREEDY)
    assert (undrafted.out, "drafting" in undrafted.err) == (plain.out, False)
    named = cli("run", checkpoints / "base", "--drafter", "ngram", "--prompt", "a", *GREEDY)
    assert (named.out, "drafting a chain of n-gram matches" in named.err) == (plain.out, True)
    assert "no draft was given" not in named.err
    made.clear()
    head = toys.make_qwen3_5(tmp_path / "head", layers=4)
    drafted = cli("run", head, "--prompt", "a", *GREEDY)
    assert drafted.code == 0, drafted.err
    assert made == ["export", "build", "build"]
    assert "drafting a chain" in drafted.err
    undrafted = cli("run", head, "--no-spec-decode", "--prompt", "a", *GREEDY)
    assert (undrafted.code, len(made)) == (0, 3)
    assert "drafting" not in undrafted.err
    engine_dir = kept.entries()[0].path / "engine"
    again = cli("run", engine_dir, "--prompt", "a", "--temperature", 0, "--max-generate-length", 8)
    assert (again.code, again.out, len(made)) == (0, drafted.out, 3)
    refused = cli("run", engine_dir, "--weights", "int4", "--prompt", "a")
    assert refused.code == 2
    assert "--weights means nothing here" in refused.err


def test_a_gguf_file_answers_as_the_checkpoint_that_it_was_made_from(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "base.gguf"
    gguf_files.write(checkpoints / "base", file)
    wanted = cli("run", checkpoints / "base", "--prompt", "a", *GREEDY)
    asked = ("run", file, "--draft", checkpoints / "eagle", "--prompt", "a", *GREEDY)
    first, second = cli(*asked), cli(*asked)
    assert (first.code, first.out) == (0, wanted.out), first.err
    assert (second.code, second.out) == (0, wanted.out), second.err
    assert made == ["export", "build"] * 3
    about = next(e.about for e in kept.entries() if e.about["method"] == "eagle3")
    assert about["target"] == str(file)
    shown = cli("inspect", file)
    assert shown.code == 0
    assert f"LlamaForCausalLM: {file}" in shown.out
    assert cli("check", file, checkpoints / "eagle").code == 0


def test_drafts_in_gguf_leave_the_answer_as_it_is(
    checkpoints: Path, cli: Cli, kept: Cache, tmp_path: Path
) -> None:
    base = checkpoints / "base"
    gguf_files.write(base, tmp_path / "base.gguf")
    gguf_files.write_eagle3(checkpoints / "eagle", tmp_path / "eagle.gguf", [2, 4, 5])
    block = toys.make_dflash(tmp_path / "block", base, "z-lab", aux_layers=(2, 6))
    gguf_files.write_dflash(block, tmp_path / "block.gguf", "Q8_0")
    hybrid = toys.make_qwen3_5(tmp_path / "hybrid", layers=4)
    gguf_files.write(hybrid, tmp_path / "hybrid.gguf", mtp=True)
    asked = ("--prompt", "a", *GREEDY)
    plain = cli("run", base, *asked).out
    gguf_base = tmp_path / "base.gguf"
    for target, draft in ((base, "eagle"), (gguf_base, "eagle"), (base, "block")):
        drafted = cli("run", target, "--draft", tmp_path / f"{draft}.gguf", *asked)
        assert (drafted.code, drafted.out) == (0, plain), drafted.err
    own = cli("run", tmp_path / "hybrid.gguf", *asked)
    assert (own.code, own.out) == (0, cli("run", hybrid, *asked).out), own.err
    methods = [entry.about.get("method") for entry in kept.entries()]
    assert {method: methods.count(method) for method in ("eagle3", "dflash", "mtp")} == {
        "eagle3": 2,
        "dflash": 1,
        "mtp": 2,
    }


def test_smaller_model_drafts_for_a_plain_engine(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str]
) -> None:
    plain = cli("run", checkpoints / "base", "--prompt", "a", *GREEDY)
    made.clear()
    drafted = cli(*run_pair(checkpoints, "small"))
    assert (drafted.code, drafted.out) == (0, plain.out), drafted.err
    assert made == ["export", "build", "export", "build"]
    assert "drafting a chain with the draft model" in drafted.err
    assert "warning: size: the draft has" not in drafted.err
    entry = next(entry for entry in kept.entries() if entry.about["method"] == "draft_model")
    assert {path.name for path in (entry.path / "engine").glob("*.onnx")} == {
        "llm.onnx",
        "spec_draft.onnx",
    }
    itself = cli(*run_pair(checkpoints, "base"))
    assert (itself.code, itself.out) == (0, plain.out)
    assert "the draft is as large as its base" in itself.err


def test_hub_name_is_downloaded_once(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(name: str, **_: object) -> Path:
        asked.append(name)
        return checkpoints / name.rpartition("/")[2]

    monkeypatch.setattr("edgespec.pipeline.prepare.download", download)
    command = ("run", "org/base", "--draft", "org/eagle", "--prompt", "a", *GREEDY)
    first, second = cli(*command), cli(*command)
    assert (first.code, second.out) == (0, first.out), first.err
    assert asked == ["org/base", "org/eagle"]
    assert "download org/base" in first.err
    assert cli(*command, "--update").code == 0
    assert asked == ["org/base", "org/eagle"] * 2
    assert made == ["export", "build", "export", "build"]
    assert "org/base with org/eagle" in cli("cache", "list").out


def test_without_a_prompt_it_chats(
    checkpoints: Path, cli: Cli, kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def talk(self: Chat, read: object) -> int:
        asked.update(temperature=self.settings.sampling.temperature, drafts=self.settings.drafts)
        return 7

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(Chat, "run", talk)
    words = [word for word in run_pair(checkpoints) if word not in ("--prompt", "a")]
    assert cli(*words, "--no-history").code == 7
    assert asked == {"temperature": 0.0, "drafts": True}
    assert cli(*words, "--no-chat-template", "--chat-template", "chatml").code == 2
    assert cli(*words, "--no-history", "--prompt", "a").code == 2


def test_stdin_is_the_prompt_where_it_is_no_terminal(
    checkpoints: Path, cli: Cli, kept: Cache
) -> None:
    def piped(text: bytes, *more: object) -> Outcome:
        return cli("run", checkpoints / "base", *GREEDY, *more, stdin=text)

    empty, broken = piped(b"\n"), piped(b"\xff")
    assert (empty.code, "give --prompt" in empty.err) == (2, True)
    assert (broken.code, "not UTF-8" in broken.err) == (3, True)
    assert not kept.root.exists()
    said, given = piped(b"a\n"), piped(b"another", "--prompt", "a")
    assert (said.code, given.out) == (0, said.out)
    assert piped(b"another").out != said.out
    assert piped(b"a", "--no-chat-template").out != said.out
    assert "\r" not in said.err  # no bars


# ---- what goes wrong


def test_no_pair_and_no_model_are_refused_and_leave_nothing(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], tmp_path: Path
) -> None:
    base, eagle = checkpoints / "base", checkpoints / "eagle"
    truncated = shutil.copytree(base, tmp_path / "truncated")
    os.truncate(truncated / "model.safetensors", 50_000)
    for words, said in (
        ((base, "--draft", checkpoints / "foreign"), "are no pair"),
        ((base, "--draft", checkpoints / "other tokens"), "ids mean other tokens"),
        ((base, "--draft", base, "--aux-layers", "1,2,3"), "--aux-layers is for a draft"),
        ((eagle,), f"edgespec run BASE --draft {eagle}"),
        ((truncated,), "is truncated"),
        ((base, "--draft", eagle, "--aux-layers", "1,2"), "aux layers"),
        ((base, "--aux-layers", "1,2,3"), "--aux-layers is for a draft"),
    ):
        refused = cli("run", *words, "--prompt", "a")
        assert refused.code in (2, 3), refused.err
        assert said in refused.err
    assert made == []
    assert kept.entries() == []


PLACES = {
    "check": "edgespec.pairing.check.check",
    "identify": "edgespec.checkpoint.files.Checkpoint.identity",
    "export": "edgespec.export.component.write_graph",
    "golden outputs": "edgespec.export.component.write_golden",
    "build": "edgespec.backends.ort.staging.write_data",
    "proof": "edgespec.backends.build.check_golden",
    "the draft": "edgespec.export.eagle3.draft",
}


@pytest.mark.parametrize("place", PLACES)
def test_interrupt_at_each_stage_leaves_nothing(
    checkpoints: Path, cli: Cli, kept: Cache, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PLACES[place], interrupted)
    if place == "the draft":  # the table holds the function itself
        from dataclasses import replace

        from edgespec.export.table import COMPONENTS

        monkeypatch.setitem(COMPONENTS, "eagle3", replace(COMPONENTS["eagle3"], draft=interrupted))
    stopped = cli(*run_pair(checkpoints))
    assert stopped.code == 130
    assert "no partial output is left" in stopped.err
    assert [path.name for path in kept.entries_dir.iterdir()] == []
    assert not kept.starts_dir.exists()


def test_damaged_entry_is_made_again(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str]
) -> None:
    command = ("run", checkpoints / "base", "--prompt", "a", *GREEDY)
    first = cli(*command)
    (entry,) = kept.entries()
    os.truncate(entry.path / "engine" / "llm.onnx", 10)
    again = cli(*command)
    assert (again.code, again.out) == (0, first.out)
    assert made == ["export", "build"] * 2


def test_checkpoint_that_changes_on_the_way_is_not_kept(
    checkpoints: Path, cli: Cli, kept: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.backends import build as building

    copy, real = shutil.copytree(checkpoints / "base", tmp_path / "copy"), building.build

    def meanwhile(*args: Any, **options: Any) -> Any:
        os.utime(copy / "config.json")
        return real(*args, **options)

    monkeypatch.setattr(building, "build", meanwhile)
    refused = cli("run", copy, "--prompt", "a", *GREEDY)
    assert (refused.code, "changed while it was read" in refused.err) == (3, True)
    assert kept.entries() == []


def test_full_disk_is_a_clear_error(
    checkpoints: Path,
    cli: Cli,
    small_disk: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = checkpoints / "base" / "model.safetensors"
    for pages in (20, weights.stat().st_size // 4096 + 20):  # refused at once, and on the way
        place = small_disk(pages)
        monkeypatch.setenv("EDGESPEC_CACHE", str(place / "cache"))
        full = cli("run", checkpoints / "base", "--prompt", "a", *GREEDY)
        assert full.code == 4, full.err
        assert "EDGESPEC_CACHE names another directory" in full.err
        assert Cache(place / "cache").entries() == []


def test_two_runs_at_once_make_one_entry(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first builds: it waits until that is done, and not until the
    first one's chat is over."""
    from edgespec.backends import build as building
    from edgespec.pipeline.prepare import RunRequest, prepared
    from tests.unit.pipeline.test_prepare import Report

    request, report = RunRequest(target=str(checkpoints / "base")), Report()
    waits, found, real = threading.Event(), [], building.build

    class Second(Report):
        def note(self, text: str) -> None:
            super().note(text)
            waits.set()

    second = Second()

    def begin() -> None:
        with prepared(request, Cache(kept.root), second) as engine_dir:
            found.append(engine_dir)

    thread = threading.Thread(target=begin)

    def meanwhile(*args: Any, **options: Any) -> Any:
        thread.start()
        assert waits.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(building, "build", meanwhile)
    with prepared(request, kept, report) as engine_dir:
        thread.join(30)
    assert found == [engine_dir]
    assert "waiting for it" in second.notes[0]
    assert made.count("export") == 1


# ---- edgespec cache


def test_cache_lists_and_prunes(
    checkpoints: Path, cli: Cli, kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "0.0 MB in 0 entries" in cli("cache", "list").out
    assert cli("run", checkpoints / "base", "--prompt", "a", *GREEDY).code == 0
    assert cli("run", checkpoints / "base", "--weights", "int4", "--prompt", "a", *GREEDY).code == 0
    listed = cli("cache", "list")
    assert "in 2 entries" in listed.out
    assert "int4" in listed.out
    shown = json.loads(cli("cache", "list", "--json").out)
    assert {entry["target"] for entry in shown["entries"]} == {str(checkpoints / "base")}
    assert sum(entry["bytes"] for entry in shown["entries"]) > 100_000
    assert "nothing to remove" in cli("cache", "prune", "--yes").out
    assert "nothing to remove" in cli("cache", "prune", "--older-than", 1, "--yes").out
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.pipeline.prepare.__version__", "99")
        assert "in 2 entries" in cli("cache", "prune", "--dry-run").out
    old = kept.entries()[1].path / "entry.json"
    os.utime(old, (1e9, 1e9))
    assert "would remove" in cli("cache", "prune", "--older-than", 1, "--dry-run").out
    assert len(kept.entries()) == 2
    assert "in 1 entry" in cli("cache", "prune", "--older-than", 1, "--yes").out
    assert not old.exists()
    unasked = cli("cache", "prune", "--all")
    assert (unasked.code, "--yes" in unasked.err) == (2, True)
    with kept.locked(kept.entries()[0].key, shared=True):
        assert "in use, kept" in cli("cache", "prune", "--all", "--yes").err
    os.truncate(kept.engine_dir(kept.entries()[0].key) / "manifest.json", 10)
    assert "removed" in cli("cache", "prune", "--yes").out  # what cannot be used any more
    assert kept.entries() == []
    with kept.locked("00"), kept.fill("00", {"target": "org/model"}):
        pass
    (kept.root / "digests").mkdir(exist_ok=True)
    assert "removed" in cli("cache", "prune", "--all", "--yes").out
    assert sorted(path.name for path in kept.root.rglob("*") if path.is_file()) == ["CACHEDIR.TAG"]


def test_asked_before_anything_is_removed(
    checkpoints: Path, cli: Cli, kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept.locked("00"), kept.fill("00", {"target": "org/model"}):
        pass
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter([False, True])
    monkeypatch.setattr("click.confirm", lambda question: next(answers))
    assert "nothing was removed" in cli("cache", "prune", "--all").out
    assert len(kept.entries()) == 1
    assert "removed" in cli("cache", "prune", "--all").out
    assert kept.entries() == []
