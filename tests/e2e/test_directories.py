"""What lies on disk stays true: when inputs change, when runs are killed, when two builds meet in
one directory."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from edgespec.artifacts import file_names, json_files
from edgespec.backends import engine_dir as engines
from edgespec.backends.build import build
from edgespec.backends.manifest import EngineManifest
from edgespec.cli.main import run
from edgespec.contract import Limits, Role
from edgespec.errors import BundleError, PairingError
from edgespec.export.components import ExportOptions, export
from edgespec.runtime.requests import answers as answers_module
from tests import toys
from tests.lossless.pairs import shared_pair

LIMITS = Limits(max_input_len=48, max_kv_cache_capacity=64)


@pytest.fixture(scope="module")
def shop() -> Path:
    """A pair as checkpoints and as exports."""
    return shared_pair("llama", "eagle")


def test_same_export_again_writes_nothing(shop: Path) -> None:
    model = shop / "onnx_base" / "llm" / file_names.MODEL
    before = model.stat()
    again = export(str(shop / "base"), shop / "onnx_base", ExportOptions(base_for="eagle3"))
    assert "already there and unchanged" in again.notes[0]
    assert (model.stat().st_ino, model.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_export_of_a_checkpoint_whose_texts_changed_is_not_the_same(
    shop: Path, tmp_path: Path, name: str
) -> None:
    base = Path(shutil.copytree(shop / "base", tmp_path / "base"))
    options = ExportOptions(base_for="eagle3", golden=False)
    export(str(base), tmp_path / "onnx", options)
    path = base / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"changed": True}))
    with pytest.raises(BundleError, match="the checkpoint has changed since"):
        export(str(base), tmp_path / "onnx", options)


def test_leftover_of_a_killed_run_with_this_process_id_is_no_obstacle(
    shop: Path, tmp_path: Path
) -> None:
    """In a container every run may have the same process id."""
    for parent, name in ((tmp_path / "onnx", "llm"), (tmp_path / "engines", "base")):
        (parent / f".{name}.tmp-{os.getpid()}").mkdir(parents=True)
    export(str(shop / "base"), tmp_path / "onnx", ExportOptions(base_for="eagle3", golden=False))
    build(tmp_path / "onnx" / "llm", tmp_path / "engines", LIMITS)
    assert not list(tmp_path.rglob(".*tmp*"))


def test_base_and_draft_built_at_the_same_time_are_both_there(shop: Path, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=build, args=(shop / f"onnx_{role}" / "llm", tmp_path, LIMITS))
        for role in ("base", "draft")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(EngineManifest.read(tmp_path).engines) == {"base", "draft"}


def test_two_models_do_not_share_a_directory(shop: Path, tmp_path: Path) -> None:
    other = toys.make_base(tmp_path / "other", "llama", layers=8, seed=5)
    export(str(other), tmp_path / "onnx", ExportOptions(golden=False))
    build(shop / "onnx_base" / "llm", tmp_path / "engines", LIMITS)
    with pytest.raises(BundleError, match="another model"):
        build(tmp_path / "onnx" / "llm", tmp_path / "engines", LIMITS)
    assert set(EngineManifest.read(tmp_path / "engines").engines) == {"base"}


def test_leftover_config_of_an_engine_that_is_not_there_pairs_with_nothing(
    shop: Path, tmp_path: Path
) -> None:
    tmp_path.joinpath(engines.CONFIGS[Role.BASE]).write_text("{}")
    build(shop / "onnx_draft" / "llm", tmp_path, LIMITS)
    assert set(EngineManifest.read(tmp_path).engines) == {"draft"}


def test_taps_in_another_number_than_the_draft_reads_are_refused(
    shop: Path, tmp_path: Path
) -> None:
    with pytest.raises(PairingError, match="reads 3 aux layers"):
        export(str(shop / "draft"), tmp_path / "d", ExportOptions(aux_layers=(2, 4), golden=False))
    export(
        str(shop / "base"),
        tmp_path / "b",
        ExportOptions(base_for="eagle3", aux_layers=(2, 4), golden=False),
    )
    build(shop / "onnx_draft" / "llm", tmp_path / "engines", LIMITS)
    with pytest.raises(PairingError, match=r"the base emits hidden_states \[2, 4\]"):
        build(tmp_path / "b" / "llm", tmp_path / "engines", LIMITS)


def test_install_that_fails_leaves_no_file_behind(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EngineManifest, "write", full)
    with pytest.raises(Exception, match="No space left"):
        build(shop / "onnx_base" / "llm", tmp_path / "engines", LIMITS)
    assert not (tmp_path / "engines").exists()


def test_fault_in_one_request_keeps_the_answers_before_it(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("onnx_base", "onnx_draft"):
        build(shop / name / "llm", tmp_path / "engines", LIMITS)
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    messages = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "b", "c")]
    source.write_text(
        json.dumps({"temperature": 0, "max_generate_length": 4, "requests": messages})
    )
    answered, seen = answers_module.answered, []

    def faulty(answer: object, event: object) -> object:
        seen.append(answer)
        if len(seen) == 2:
            raise ZeroDivisionError("planted")
        return answered(answer, event)

    monkeypatch.setattr(answers_module, "answered", faulty)
    args = [
        "--engine-dir",
        str(tmp_path / "engines"),
        "--input-file",
        str(source),
        "--output-file",
        str(target),
    ]
    assert run(["infer", *args, "--spec-decode"]) == 1
    reasons = [r["finish_reason"] for r in json.loads(target.read_text())["responses"]]
    assert reasons == ["max-length", "cancelled", "cancelled"]
    said = capfd.readouterr().err
    assert "planted" in said
    assert "Traceback" not in said


def test_requests_are_not_overwritten_by_their_answers(
    shop: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.json"
    source.write_text(json.dumps({"requests": [{"messages": [{"role": "user", "content": "a"}]}]}))
    before = source.read_text()
    args = [
        "--engine-dir",
        str(tmp_path),
        "--input-file",
        str(source),
        "--output-file",
        str(source),
    ]
    assert run(["infer", *args]) == 3
    assert source.read_text() == before
    assert "is an input of this command" in capfd.readouterr().err


@pytest.mark.parametrize("own_head", [True, False])
def test_base_that_the_draft_records_is_taken_where_it_is_a_directory(
    tmp_path: Path, own_head: bool
) -> None:
    base = toys.make_base(tmp_path / "base", "llama", layers=8)
    draft = toys.make_draft(
        tmp_path / "draft", base, "speculators", own_head=own_head, draft_vocab=None
    )
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(base)
    (draft / "config.json").write_text(json.dumps(config))
    export(str(draft), tmp_path / "onnx", ExportOptions(golden=False))
    export(str(base), tmp_path / "onnx_base", ExportOptions(base_for="eagle3", golden=False))
    pair = json_files.read_json(tmp_path / "onnx" / "llm" / file_names.CONFIG)["pair"]
    assert (
        pair["base_identity"]
        == json_files.read_json(tmp_path / "onnx_base" / "llm" / file_names.CONFIG)["identity"]
    )


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_hub_name_in_a_draft_is_told_and_not_followed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked")
    )
    base = toys.make_base(tmp_path / "base", "llama", layers=8)
    if kind == "eagle3":
        draft = toys.make_draft(
            tmp_path / "draft", base, "speculators", own_head=False, draft_vocab=None
        )
    else:
        draft = toys.make_dflash(tmp_path / "draft", base, "speculators")
        tensors = load_file(draft / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "somebody/a-large-model"
    (draft / "config.json").write_text(json.dumps(config))
    assert run(["export", str(draft), str(tmp_path / "out")]) == 3
    told = capfd.readouterr().err
    assert "its base is 'somebody/a-large-model' by its config.json" in told
    assert "--base-model-dir" in told
    assert not (tmp_path / "out").exists()
