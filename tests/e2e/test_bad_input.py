"""What the command line does with damaged, mismatched and impossible input: an exit code, two
lines, and nothing left.

One row for each class of error and each place where a command could leave something half-written.
Which values are refused, and with which words, is claimed of the parsers: tests/unit/export,
tests/unit/backends, tests/unit/checkpoint, tests/unit/prompts, tests/unit/cli and test_atomic.

The commands run in this process on a toy pair that is exported and built once; whoever tampers
takes a copy.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edgespec.artifacts import atomic, json_files
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.ort import staging
from edgespec.backends.ort.backend import OrtBackend
from edgespec.cli.main import run
from edgespec.export import writer
from tests import toys
from tests.e2e.workshop import Cli, Outcome, cli, ended, halted, process, small_disk
from tests.small_pair import LIMITS as SMALL
from tests.small_pair import SIZES, SmallPair, copied, edit_json, flip_byte, small_pair

__all__ = ["cli", "small_disk"]  # fixtures

OURS, REFUSED, ENVIRONMENT, SOME_FAILED, INTERRUPTED = 1, 3, 4, 5, 130
CAPACITY = SMALL.max_kv_cache_capacity
LIMITS = [
    "--max-input-len",
    SMALL.max_input_len,
    "--max-kv-cache-capacity",
    CAPACITY,
    "--max-verify-tree-size",
    SMALL.max_verify_tree_size,
    "--max-draft-tree-size",
    SMALL.max_draft_tree_size,
]
Refused = Callable[..., Outcome]


@pytest.fixture(scope="module")
def shop() -> SmallPair:
    """Not to be tampered with."""
    return small_pair()


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


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """All files below a directory, and all directories but empty ones."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() or path.name.startswith(".")
    }


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
def broken_base(shop: SmallPair, tmp_path: Path) -> Path:
    return copied(shop.base, tmp_path / "base")


def test_missing_shard(broken_base: Path, tmp_path: Path, refused: Refused) -> None:
    (broken_base / "model-00002-of-00002.safetensors").unlink()
    refused(
        REFUSED,
        ["model-00002-of-00002.safetensors", "Download"],
        "export",
        broken_base,
        tmp_path / "out",
    )


def test_pickled_weights_need_consent(
    shop: SmallPair, tmp_path: Path, refused: Refused, cli: Cli
) -> None:
    draft = toys.make_draft(tmp_path / "draft", shop.base, "modelopt", pickle=True)
    args = ["export", draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(REFUSED, [draft, "pytorch_model.bin", "--allow-pickle"], *args)
    assert cli(*args, "--allow-pickle").code == 0


def test_unsupported_architecture_by_its_name(
    broken_base: Path, tmp_path: Path, refused: Refused
) -> None:
    names = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    edit_json(broken_base / "config.json", lambda config: config.update(names))
    refused(
        REFUSED, ["GemmaForCausalLM", "LlamaForCausalLM"], "export", broken_base, tmp_path / "out"
    )


# A draft for another base


@pytest.fixture
def other_base(tmp_path: Path) -> Callable[..., Path]:
    return lambda **keys: toys.make_base(tmp_path / "other", **(SIZES | keys))


def test_draft_for_another_base_is_refused_at_export(
    shop: SmallPair, tmp_path: Path, refused: Refused, other_base: Callable[..., Path]
) -> None:
    base = other_base(vocab=300)
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", base]
    refused(REFUSED, [base, 256, 300, "--base-model-dir"], *args)


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ("base", {"seed": 7}, ["another base checkpoint"]),
        ("draft", {"vocab": 300}, [256, 300]),
    ],
)
def test_draft_for_another_base_is_refused_at_build(
    shop: SmallPair,
    tmp_path: Path,
    refused: Refused,
    cli: Cli,
    other_base: Callable[..., Path],
    first: str,
    other: dict[str, Any],
    words: list[object],
) -> None:
    """Whichever of the two is built first; without --base-model-dir the draft knows its base by
    shapes alone. Other mismatches: tests/unit/backends/test_pair_check.py."""
    draft, engine = shop.draft_onnx, tmp_path / "engine"
    if first == "draft":
        assert cli("export", shop.draft, tmp_path / "draft").code == 0
        draft = tmp_path / "draft" / "llm"
    assert cli("export", other_base(**other), tmp_path / "base", "--eagle-base").code == 0
    order = [tmp_path / "base" / "llm", draft]
    one, two = order if first == "base" else order[::-1]
    assert cli(*build_args(one, engine)).code == 0
    refused(REFUSED, words, *build_args(two, engine))


# Damaged exports


def build_args(onnx: Path, engine: Path) -> list[object]:
    return ["build", "--onnx-dir", onnx, "--engine-dir", engine, *LIMITS]


def test_exported_file_with_a_flipped_byte(
    shop: SmallPair, tmp_path: Path, refused: Refused
) -> None:
    onnx = copied(shop.draft_onnx, tmp_path / "llm")
    flip_byte(onnx / "model.onnx.data")
    words = [onnx / "model.onnx.data", "hash"]
    refused(REFUSED, words, *build_args(onnx, tmp_path / "engine"))


# Flags of build that do not fit


def test_limit_that_cannot_be(shop: SmallPair, tmp_path: Path, refused: Refused) -> None:
    args = [*build_args(shop.base_onnx, tmp_path / "engine"), "--max-input-len", CAPACITY + 1]
    refused(REFUSED, [CAPACITY + 1, CAPACITY], *args)


def test_cache_larger_than_any_memory(
    shop: SmallPair, tmp_path: Path, refused: Refused, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by build; where the memory is not known, running says which flag to lower."""
    engine = tmp_path / "engine"
    args = [*build_args(shop.base_onnx, engine), "--max-kv-cache-capacity", 2**31 - 1]
    refused(REFUSED, [f"--max-kv-cache-capacity {2**31 - 1}", "this machine has"], *args)
    monkeypatch.setattr(OrtBackend, "total_memory_bytes", lambda self: None)
    assert cli(*args).code == 0
    refused(ENVIRONMENT, ["KV cache", "--max-kv-cache-capacity"], *infer_args(engine, tmp_path))


# Damaged engines


@pytest.fixture
def engine(shop: SmallPair, tmp_path: Path) -> Path:
    return copied(shop.engine, tmp_path / "engine")


def test_engine_file_with_a_flipped_byte(engine: Path, tmp_path: Path, refused: Refused) -> None:
    name = "spec_draft.onnx.data"
    flip_byte(engine / name)
    refused(REFUSED, [engine / name, "hash"], *infer_args(engine, tmp_path), "--spec-decode")


def test_engine_of_another_machine(engine: Path, tmp_path: Path, refused: Refused) -> None:
    edit_json(
        engine / "manifest.json",
        lambda m: m["engines"]["base"]["fingerprint"].update(onnxruntime="1.0.0"),
    )
    words = [engine, "ONNX Runtime 1.0.0", "edgespec build again"]
    refused(ENVIRONMENT, words, *infer_args(engine, tmp_path))


# Trees that cannot be


def test_tree_beyond_what_can_be(shop: SmallPair, tmp_path: Path, refused: Refused) -> None:
    sizes = ["--spec-draft-top-k", 4, "--spec-draft-step", 3, "--spec-verify-size", 17]
    words = ["--spec-verify-size 17", "16", "--max-verify-tree-size 17"]
    refused(REFUSED, words, *infer_args(shop.engine, tmp_path), "--spec-decode", *sizes)


@pytest.mark.parametrize("sizes", [(4, 3, 16), (1, 12, 13)])
def test_tree_at_its_limit_is_taken(
    shop: SmallPair, tmp_path: Path, cli: Cli, sizes: tuple[int, int, int]
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


@pytest.mark.parametrize(("words", "spec"), [(30, ["--spec-decode"]), (400, [])])
def test_prompt_beyond_the_engine_harms_no_other_request(
    shop: SmallPair, tmp_path: Path, cli: Cli, words: int, spec: list[str]
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
    assert "`max_input_len`" in failed["error"]
    assert [first["output_ids"], last["output_ids"]] == [
        response["output_ids"] for response in alone
    ]


def test_prompt_that_fills_the_cache(shop: SmallPair, tmp_path: Path, cli: Cli) -> None:
    """An engine for prompts as long as its cache: the longest one gets one token, a longer one an
    error."""
    engine = tmp_path / "engine"
    sizes = ["--max-input-len", 20, "--max-kv-cache-capacity", 20]
    for onnx in (shop.base_onnx, shop.draft_onnx):
        assert cli(*build_args(onnx, engine), *sizes).code == 0
    letters = "abcdefghijklmnopqrstuvwxyz"
    args = [*infer_args(engine, tmp_path), "--spec-decode", "--check-lossless"]

    def answers(*lengths: int) -> tuple[int, list[dict[str, Any]]]:
        texts = [letters[:length] for length in lengths]
        write_input(tmp_path / "input.json", *texts, apply_chat_template=False)
        code = cli(*args).code
        return code, json.loads((tmp_path / "output.json").read_text())["responses"]

    code, found = answers(*range(10, 27))
    assert code == SOME_FAILED
    refused = [
        n for n, r in zip(range(10, 27), found, strict=True) if r["finish_reason"] == "error"
    ]
    assert refused
    assert refused == list(range(refused[0], 27))
    assert all("`max_input_len`" in r["error"] for r in found[refused[0] - 10 :])
    code, done = answers(*range(10, refused[0]))
    assert code == 0
    assert [r["output_ids"] for r in done] == [r["output_ids"] for r in found[: len(done)]]
    full = [r for r in done if r["metrics"]["prompt_tokens"] == 20]
    assert full
    assert all(len(r["output_ids"]) == 1 and r["finish_reason"] == "capacity" for r in full)


# Other values: tests/unit/prompts; other files: test_robustness.py.
def test_malformed_input_file(shop: SmallPair, tmp_path: Path, refused: Refused) -> None:
    args = infer_args(shop.engine, tmp_path)
    (tmp_path / "input.json").write_text('{"temprature": 1, "requests": []}')
    refused(REFUSED, [tmp_path / "input.json", '"temperature"'], *args)


# Places that cannot be written; others: unit/artifacts/test_atomic.py, unit/prompts/test_output.py


def test_export_to_where_nothing_can_be_written(
    shop: SmallPair, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" / "sub"
    refused(ENVIRONMENT, [out], "export", shop.draft, out, "--base-model-dir", shop.base)


def test_build_to_where_nothing_can_be_written(
    shop: SmallPair, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" / "sub"
    refused(ENVIRONMENT, [out], *build_args(shop.draft_onnx, out))


def test_name_that_no_file_system_takes(shop: SmallPair, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / ("x" * 300)
    refused(
        ENVIRONMENT, [out, "too long"], "export", shop.draft, out, "--base-model-dir", shop.base
    )
    refused(ENVIRONMENT, [out, "too long"], *build_args(shop.draft_onnx, out))


def test_output_file_that_cannot_be_written(
    shop: SmallPair, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out before any work: no engine is opened."""
    monkeypatch.setattr("edgespec.runtime.engine.Engine.__init__", unreachable)
    (tmp_path / "directory").mkdir()
    args = infer_args(shop.engine, tmp_path)
    args[-1] = tmp_path / "directory"
    refused(ENVIRONMENT, [tmp_path / "directory"], *args)


def unreachable(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("this must not be reached")


def test_output_file_that_is_there_is_kept_when_the_run_fails(
    engine: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "output.json").write_text("of yesterday")
    flip_byte(engine / "spec_base.onnx.data")
    refused(REFUSED, ["hash"], *infer_args(engine, tmp_path))


def test_export_to_where_something_else_is(
    shop: SmallPair, tmp_path: Path, refused: Refused
) -> None:
    llm = copied(shop.base_onnx, tmp_path / "out" / "llm")
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(ENVIRONMENT, [llm, "already exists"], *args)


def test_same_export_again_finds_its_work_done_unless_it_is_damaged(
    shop: SmallPair, tmp_path: Path, cli: Cli, refused: Refused
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
    shop: SmallPair,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    room_bytes: int,
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
    shop: SmallPair, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fill_disk_at(monkeypatch, name)
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    refused(ENVIRONMENT, [name, "No space left", "disk is full"], *args)


@pytest.mark.parametrize("name", ["draft_config.json", "spec_draft.onnx.data"])
def test_disk_full_while_building(
    shop: SmallPair,
    tmp_path: Path,
    refused: Refused,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The base that is there stays as it was, and stays usable."""
    engine = copied(shop.base_engine, tmp_path / "engine")
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
    shop: SmallPair, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of a build: the manifest does not list what it could not say."""
    engine = copied(shop.base_engine, tmp_path / "engine")
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
    write = json_files.write_json

    def limited(path: Path, value: object) -> None:
        with atomic.writing(path):
            if path.name == name:
                no_space()
        write(path, value)

    patch.setattr(json_files, "write_json", limited)


def no_space(*args: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def leftovers(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*") if ".tmp" in path.name]


def test_batch_beyond_the_engine_runs_in_smaller_ones_and_says_so(
    shop: SmallPair, tmp_path: Path, cli: Cli
) -> None:
    args = infer_args(shop.engine, tmp_path, "one", "two", "three")
    alone = cli(*args, "--batch-size", 1)
    answers = (tmp_path / "output.json").read_text()
    found = cli(*args, "--batch-size", 2, "--json")
    assert found.code == alone.code == 0
    assert "batch_size 2: these engines were built for 1 at a time" in found.err
    assert "--max-batch-size 2" in found.err
    assert "built for 1 at a time" not in alone.err
    assert json.loads(found.out)["batch_size"] == 1
    texts = [
        [response["output_ids"] for response in json.loads(said)["responses"]]
        for said in (answers, (tmp_path / "output.json").read_text())
    ]
    assert texts[0] == texts[1]


def test_disk_full_while_writing_the_output(
    shop: SmallPair, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
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


def pages(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) for path in directory.rglob("*") if path.is_file())


def test_every_size_of_a_full_disk_is_refused_alike_by_export(
    shop: SmallPair, small_disk: Callable[[int], Path], cli: Cli
) -> None:
    """From the first byte to the last file but one: weights, graph, config, golden outputs,
    manifest."""
    need = pages(shop.draft_onnx)
    for size in [2, need // 2, *range(need - 10, need)]:
        disk = small_disk(size)
        found = cli("export", shop.draft, disk / "out", "--base-model-dir", shop.base)
        assert found.code == ENVIRONMENT, (size, need, found.err)
        assert "disk is full" in found.err
        assert [path for path in disk.rglob("*") if path != disk / "out"] == []
    assert cli("export", shop.draft, small_disk(need + 8), "--base-model-dir", shop.base).code == 0


def test_every_size_of_a_full_disk_is_refused_alike_by_build(
    shop: SmallPair, tmp_path: Path, small_disk: Callable[[int], Path], cli: Cli
) -> None:
    assert cli(*build_args(shop.draft_onnx, tmp_path / "engine")).code == 0
    need = pages(tmp_path / "engine")
    for size in [2, need // 2, *range(need - 8, need)]:
        disk = small_disk(size)
        found = cli(*build_args(shop.draft_onnx, disk / "engine"))
        assert found.code == ENVIRONMENT, (size, need, found.err)
        assert "disk is full" in found.err
        assert EngineManifest.read(disk / "engine").engines == {}
        assert leftovers(disk) == []
    assert cli(*build_args(shop.draft_onnx, small_disk(need + 8) / "engine")).code == 0


# The same from outside: exit codes and streams of a process of its own


def test_refusal_of_a_process(shop: SmallPair, tmp_path: Path) -> None:
    found = process("export", shop.draft, tmp_path / "out", "--eagle-base")
    assert (found.code, found.out) == (REFUSED, "")
    assert [line[:7] for line in found.err.splitlines()] == ["error: ", "  Leave"]


def test_debug_adds_the_traceback_and_nothing_else(
    shop: SmallPair, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["export", str(shop.draft), str(tmp_path / "out"), "--eagle-base"]
    assert (run(args), usual := capfd.readouterr().err)[0] == REFUSED
    assert run([*args, "--debug"]) == REFUSED
    told = capfd.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith(usual)


# Ctrl-C

GOLDEN = "edgespec.export.component:make_golden"


def stopped(number: int, place: str, *args: object) -> Outcome:
    """Run a command that halts at a call of `place`, and send the signal there."""
    with halted(place, 1, *args) as child:
        child.send_signal(number)
        return ended(child)


STOPPED = {
    signal.SIGINT: (INTERRUPTED, "interrupted: no partial output is left"),
    signal.SIGTERM: (128 + signal.SIGTERM, "stopped by SIGTERM: no partial output is left"),
}


def test_a_signal_during_export_leaves_nothing(shop: SmallPair, tmp_path: Path) -> None:
    number = signal.SIGTERM
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    found = stopped(number, GOLDEN, *args)
    assert (found.code, found.err.splitlines()[-1]) == STOPPED[number]
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


def test_a_signal_during_build_leaves_the_engines_that_were_there(
    shop: SmallPair, tmp_path: Path
) -> None:
    engine, number = copied(shop.base_engine, tmp_path / "engine"), signal.SIGINT
    before = snapshot(tmp_path)
    args = build_args(shop.draft_onnx, engine)
    found = stopped(number, "edgespec.backends.build:check_golden", *args)
    assert (found.code, found.err.splitlines()[-1]) == STOPPED[number]
    assert snapshot(tmp_path) == before


def test_ctrl_c_while_an_engine_loads_writes_no_output(shop: SmallPair, tmp_path: Path) -> None:
    args = infer_args(shop.engine, tmp_path)
    found = stopped(signal.SIGINT, "edgespec.runtime.opening.open_engine:open_runner", *args)
    assert found.code == INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


def test_killed_export_leaves_nothing_that_looks_finished(
    shop: SmallPair, tmp_path: Path, cli: Cli
) -> None:
    args = ["export", shop.draft, tmp_path / "out", "--base-model-dir", shop.base]
    found = stopped(signal.SIGKILL, GOLDEN, *args)
    assert found.code == -signal.SIGKILL
    assert not (tmp_path / "out" / "llm").exists()
    assert cli(*args).code == 0
