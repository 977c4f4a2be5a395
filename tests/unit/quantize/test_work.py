"""Claims about quantize/work.py and resuming: a stopped run goes on where it was, and gives the
same bytes."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.artifacts import file_names, json_files, work_lock
from edgespec.artifacts.manifest import QuantizeManifest
from edgespec.errors import BuildError, OutputError
from edgespec.quantization.schemes import SCHEMES
from edgespec.quantize import layerwise, llm, modelopt, work
from edgespec.quantize.llm import Options, Quantized, quantize_llm
from tests import toys
from tests.unit.quantize import whole_model
from tests.unit.quantize.test_llm import Told

pytestmark = pytest.mark.usefixtures("needs_modelopt")

LAYERS = 3
OPTIONS: dict[str, Any] = {"num_samples": 2, "calib_seq_len": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work") / "base"
    sizes: dict[str, Any] = {"layers": LAYERS, "hidden": 128, "intermediate": 256, "vocab": 320}
    return toys.make_base(path, "qwen3", dtype="bfloat16", **sizes)


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nobody stopped gives."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantized(base, out, "int8_sq")
    return out


class Stopping(Told):
    """Interrupts after some steps of a stage."""

    def __init__(self, stage: str, after: int) -> None:
        super().__init__()
        self.stage, self.after = stage, after

    def advance(self, amount: int) -> None:
        super().advance(amount)
        if (
            next(reversed(self.stages)).startswith(self.stage)
            and next(reversed(self.stages.values()))[1] > self.after
        ):
            raise KeyboardInterrupt


def quantized(
    base: Path, out: Path, name: str = "int8_sq", told: Told | None = None, **more: Any
) -> Quantized:
    return quantize_llm(
        str(base), out, Options(name, **(OPTIONS | more)), told or Told(), modelopt.Log()
    )


def stopped(
    base: Path, out: Path, name: str = "int8_sq", after: int = 2, stage: str = "calibrate"
) -> Path:
    """A run that was interrupted while it worked on layer `after`; returns its work directory."""
    with pytest.raises(KeyboardInterrupt):
        quantized(base, out, name, Stopping(stage, after))
    assert not out.exists()
    return work.directory_of(out)


@pytest.fixture(scope="module")
def halfway(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What such a run left: two layers of three."""
    return stopped(base, tmp_path_factory.mktemp("halfway") / "out")


def left_halfway(halfway: Path, out: Path) -> Path:
    """As if it had been stopped on the way to `out`."""
    return Path(shutil.copytree(halfway, work.directory_of(out)))


def same_files(ours: Path, theirs: Path) -> bool:
    names = [{path.name for path in side.iterdir()} for side in (ours, theirs)]
    alike = (names[0] | names[1]) - {file_names.MANIFEST}
    return names[0] == names[1] and all(
        (ours / name).read_bytes() == (theirs / name).read_bytes() for name in alike
    )


@pytest.mark.deep
def test_killed_run_goes_on_and_gives_the_same_bytes(
    base: Path, whole: Path, tmp_path: Path
) -> None:
    """SIGKILL in the middle of the third layer, in a process of its own."""
    out = tmp_path / "out"
    code = (
        "import os, signal, sys\n"
        "from tests.unit.quantize.test_work import Stopping, quantized\n"
        "from pathlib import Path\n"
        "class Killing(Stopping):\n"
        "    def advance(self, amount):\n"
        "        try:\n"
        "            super().advance(amount)\n"
        "        except KeyboardInterrupt:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "quantized(Path(sys.argv[1]), Path(sys.argv[2]), told=Killing('calibrate', 2))\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, base, out], cwd=root, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not out.exists()
    told = Told()
    result = quantized(base, out, told=told)
    assert f"resumed at layer 3 of {LAYERS}" in result.notes
    assert told.stages[f"calibrate (resumed at layer 3 of {LAYERS})"] == [LAYERS, LAYERS]
    assert same_files(out, whole)
    assert result.manifest.check == QuantizeManifest.read(whole).check
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("name", ["int4_awq", pytest.param("fp8", marks=pytest.mark.deep)])
def test_interrupted_run_goes_on_too(base: Path, tmp_path: Path, name: str) -> None:
    there = stopped(base, tmp_path / "out", name, after=sum(SCHEMES[name].passes))
    assert "1 finished layer is kept" in work.resume_hint(tmp_path / "out")
    assert str(there) in work.resume_hint(tmp_path / "out")
    assert any("resumed at layer" in note for note in quantized(base, tmp_path / "out", name).notes)
    quantized(base, tmp_path / "whole", name)
    assert same_files(tmp_path / "out", tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("stage", ["export", pytest.param("check", marks=pytest.mark.deep)])
def test_run_stopped_after_its_last_layer_calibrates_nothing_again(
    base: Path, whole: Path, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(base, tmp_path / "out", stage=stage, after=0)
    monkeypatch.setattr(
        modelopt, "calibrate", lambda *args: pytest.fail("a layer was calibrated again")
    )
    assert "resumed at the last step" in quantized(base, tmp_path / "out").notes
    assert same_files(tmp_path / "out", whole)


@pytest.mark.parametrize(
    ("victim", "damage"),
    [
        ("part-00000", "remove"),
        pytest.param("part-00000", "cut", marks=pytest.mark.deep),
        ("part-00001", "flip"),
        ("states-00002", "flip"),
        pytest.param("states-00002", "remove", marks=pytest.mark.deep),
    ],
)
def test_damaged_file_is_made_again(
    base: Path, halfway: Path, whole: Path, tmp_path: Path, victim: str, damage: str
) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    path = there / f"{victim}.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data)
    calibrated: list[int] = []
    layer = layerwise.Calibration.layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layerwise.Calibration, "layer", lambda self, i: calibrated.append(i) or layer(self, i)
        )
        quantized(base, tmp_path / "out")
    assert calibrated == {"part-00000": [0, 2], "part-00001": [1, 2], "states-00002": [2]}[victim]
    assert same_files(tmp_path / "out", whole)


def test_another_request_is_refused_with_what_differs(
    base: Path, halfway: Path, tmp_path: Path
) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    with pytest.raises(OutputError) as refused:
        quantized(base, tmp_path / "out", "fp8", num_samples=1)
    assert (
        "quantization 'int8_sq' instead of 'fp8'; num_samples 2 instead of 1" in refused.value.what
    )
    assert f"rm -r {there}" in refused.value.remedy
    assert work.CalibrationWork(there).parts == {0, 1}
    quantized(base, tmp_path / "elsewhere", "fp8")


def test_run_of_another_version_is_stale(base: Path, halfway: Path, tmp_path: Path) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    request = json_files.read_json(there / work.REQUEST)
    request["versions"]["torch"] = "1.0"
    json_files.write_json(there / work.REQUEST, request)
    notes = quantized(base, tmp_path / "out").notes
    assert "an unfinished run of other versions was removed" in notes
    assert not any("resumed" in note for note in notes)


@pytest.mark.parametrize("what", ["weights", "texts"])
def test_layers_of_another_checkpoint_are_refused_and_kept(
    base: Path, halfway: Path, tmp_path: Path, what: str
) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    other = Path(shutil.copytree(base, tmp_path / "other"))
    if what == "weights":
        scaled(other, "model.norm.weight", slice(None))
    else:
        (other / "notes.txt").write_text("mine")
    with pytest.raises(OutputError) as refused:
        quantized(other, tmp_path / "out")
    assert "is of base (weights " in refused.value.what
    assert "this one of other (weights " in refused.value.what
    assert f"choose another `output_dir`, or start over: rm -r {there}" in refused.value.remedy
    assert work.CalibrationWork(there).parts == {0, 1}


@pytest.mark.parametrize("how", ["dot", pytest.param("link", marks=pytest.mark.deep), "copy"])
def test_a_checkpoint_under_another_name_is_the_same(
    base: Path,
    halfway: Path,
    whole: Path,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_halfway(halfway, tmp_path / "out")
    again = tmp_path / "again"
    if how == "dot":
        monkeypatch.chdir(base)
        again = Path()
    elif how == "link":
        again.symlink_to(base)
    else:
        shutil.copytree(base, again)
    result = quantized(again, tmp_path / "out")
    assert f"resumed at layer 3 of {LAYERS}" in result.notes
    assert result.manifest.request.source.name == ("again" if how == "copy" else "base")
    assert same_files(tmp_path / "out", whole)
    assert "already up to date: nothing was written" in quantized(base, tmp_path / "out").notes


def scaled(path: Path, name: str, rows: slice) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[name][rows] *= 1.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_changed_past_the_first_bytes_are_noticed(base: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other"))
    there = stopped(other, tmp_path / "out")
    scaled(other, "model.layers.0.mlp.up_proj.weight", slice(100, None))
    with pytest.raises(OutputError, match=r"an unfinished run to .* is of other") as refused:
        quantized(other, tmp_path / "out")
    assert refused.value.remedy.startswith("Run its command again")
    assert refused.value.remedy.endswith(f"rm -r {there}")
    assert work.CalibrationWork(there).parts == {0, 1}
    quantized(other, tmp_path / "elsewhere")
    scaled(other, "model.layers.0.mlp.up_proj.weight", slice(100, None))
    with pytest.raises(OutputError, match="elsewhere already exists"):
        quantized(other, tmp_path / "elsewhere")


def test_work_that_keeps_no_layers_leaves_those_of_another_request(
    base: Path, halfway: Path, tmp_path: Path
) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    with pytest.raises(OutputError, match="quantization 'int8_sq' instead of 'mxfp8'"):
        quantized(base, tmp_path / "out", "mxfp8")
    aside = there.rename(tmp_path / "aside")
    quantized(base, tmp_path / "out", "mxfp8")
    aside.rename(there)
    assert (
        "already up to date: nothing was written"
        in quantized(base, tmp_path / "out", "mxfp8").notes
    )
    assert work.CalibrationWork(there).parts == {0, 1}


def test_a_directory_that_a_run_took_away_is_not_locked_by_its_old_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends between our opening of the lock and our lock, and a third one that begins
    there."""
    there, real, calls = work.directory_of(tmp_path / "out"), work_lock.lock_or_refuse, []

    def late(lock: Any, directory: Path) -> None:
        calls.append(directory)
        if len(calls) < 3:
            work.finish(directory)
        if len(calls) == 2:
            directory.mkdir()
            (directory / work_lock.LOCK).touch()
        real(lock, directory)

    monkeypatch.setattr(work_lock, "lock_or_refuse", late)
    with work_lock.locked(there):
        assert len(calls) == 3
        with pytest.raises(OutputError, match="another run works on"), work_lock.locked(there):
            pass


def test_later_states_outlive_an_earlier_layer_made_again(
    base: Path, halfway: Path, tmp_path: Path
) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    kept = work.CalibrationWork(there)
    (there / "states-00001.safetensors").write_bytes(b"of a run killed before it could remove them")
    kept.keep_states(0, [torch.zeros(2)])
    assert sorted(kept.numbers("states")) == [0, 2]
    assert {path.name for path in there.glob("states-*")} == {
        "states-00000.safetensors",
        "states-00002.safetensors",
    }
    kept.keep_states(2, [torch.zeros(2)])
    assert [path.name for path in there.glob("states-*")] == ["states-00002.safetensors"]


def test_a_dead_merge_is_gone_before_room_is_asked_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / ".out.tmp-999999999"
    for name in ("mxfp8", "fp8"):
        dead.mkdir()
        seen: list[bool] = []
        with monkeypatch.context() as patch:
            patch.setattr(llm, "refuse_full_disk", lambda *_, seen=seen: seen.append(dead.exists()))
            quantized(base, tmp_path / "out", name)
        assert seen == [False]
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"part-00000.safetensors": {}}', '{"../../x": {"bytes": 1, "sha256": ""}}']
)
def test_progress_that_cannot_be_read_is_no_progress(
    halfway: Path, tmp_path: Path, text: str
) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    (there / work.PROGRESS).write_text(text)
    kept = work.CalibrationWork(there)
    assert (kept.parts, kept.states(2)) == (set(), None)


def test_a_run_without_progress_begins_anew(
    base: Path, halfway: Path, whole: Path, tmp_path: Path
) -> None:
    (left_halfway(halfway, tmp_path / "out") / work.PROGRESS).write_text("[]")
    assert not any("resumed" in note for note in quantized(base, tmp_path / "out").notes)
    assert same_files(tmp_path / "out", whole)


def test_two_runs_do_not_share_a_directory(base: Path, halfway: Path, tmp_path: Path) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    with (there / work_lock.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run works on"):
            quantized(base, tmp_path / "out")
    assert work.CalibrationWork(there).parts == {0, 1}


def test_full_disk_is_told_and_keeps_what_is_finished(
    base: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = work.write_safetensors

    def full(path: Path, *args: Any) -> None:
        if path.name == "part-00002.tmp":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(work, "write_safetensors", full)
        with pytest.raises(OutputError, match="No space left") as told:
            quantized(base, tmp_path / "out")
    assert "2 finished layers are kept in" in told.value.remedy
    assert not (tmp_path / "out").exists()
    assert f"resumed at layer 3 of {LAYERS}" in quantized(base, tmp_path / "out").notes
    assert same_files(tmp_path / "out", whole)


def test_broken_result_takes_its_layers_with_it(
    base: Path, halfway: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would give the same again."""
    there = left_halfway(halfway, tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors = whole_model.tensors_of_file(there / "part-00000.safetensors")
    tensors[name] = tensors[name] * 2
    kept = work.CalibrationWork(there)
    kept.keep_part(0, tensors)
    with pytest.raises(BuildError, match="relative error of the written weight is"):
        quantized(base, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_finished_run_leaves_no_work_behind(base: Path, halfway: Path, tmp_path: Path) -> None:
    """Even where it was killed between its last two steps."""
    there = left_halfway(halfway, tmp_path / "out")
    kept = {path.name: path.read_bytes() for path in there.iterdir()}
    quantized(base, tmp_path / "out")
    there.mkdir()
    for name, data in kept.items():
        (there / name).write_bytes(data)
    assert "already up to date: nothing was written" in quantized(base, tmp_path / "out").notes
    assert not there.exists()


def test_room_for_the_layers_is_asked_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(llm, "refuse_full_disk", lambda path, needed: asked.append(needed))
    there = stopped(base, tmp_path / "out")
    quantized(base, tmp_path / "out")
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert asked[0] > 1.2 * written
    assert asked[1] < asked[0]
    assert not there.exists()


def test_states_are_kept_once(base: Path, halfway: Path, tmp_path: Path) -> None:
    there = left_halfway(halfway, tmp_path / "out")
    names = {path.name for path in there.iterdir()}
    assert names == {
        "part-00000.safetensors",
        "part-00001.safetensors",
        "states-00002.safetensors",
        work.REQUEST,
        work.PROGRESS,
        work_lock.LOCK,
    }
    listed = json.loads((there / work.PROGRESS).read_text())
    assert set(listed) == {name for name in names if name.endswith(".safetensors")}
    found = work.CalibrationWork(there).states(3)
    assert found is not None
    assert found[0] == 2
    assert found[1][0].dtype == torch.bfloat16
