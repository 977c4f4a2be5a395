"""`edgespec build` with NVIDIA's own compiler: engines for cards that are not here, and what
becomes of builds that are refused, cancelled or killed.

Nothing is run on a GPU: that an engine is compiled says nothing about what it computes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.base import Listeners
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.onnx_dir import open_onnx_dir
from edgespec.backends.tensorrt import lowered_files, process, staging, timing_cache
from edgespec.backends.tensorrt.build_job import BuildJob
from edgespec.backends.tensorrt.options import TensorRTOptions
from edgespec.backends.tensorrt.process import COMMAND, BuildRefused
from edgespec.backends.tensorrt.target import Compute
from edgespec.backends.tensorrt.versions import RTX, capabilities_of
from edgespec.cli.main import run
from edgespec.contract import Limits
from tests import toys
from tests.e2e.workshop import HAPPENING, Cli, cli
from tests.tensorrt import rtx

__all__ = ["cli"]

pytestmark = pytest.mark.tensorrt
RECIPE = Path(__file__).parents[2] / "recipes" / "demo"
LIMITS = Limits(max_input_len=64, max_kv_cache_capacity=192, max_verify_tree_size=16)
SIZES = ["--max-input-len", "64", "--max-kv-cache-capacity", "192", "--max-verify-tree-size", "16"]
WAIT_MS = 60_000


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Skips all tests where the compiler is not installed."""
    rtx.bindings()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's base and draft."""
    path = tmp_path_factory.mktemp("demo")
    base, draft = str(RECIPE / "base"), str(RECIPE / "draft")
    assert run(["export", base, str(path / "base"), "--eagle-base"]) == 0
    assert run(["export", draft, str(path / "draft"), "--base-model-dir", base]) == 0
    return {role: path / role / "llm" for role in ("base", "draft")}


def build_args(export: Path, engines: Path, *more: str) -> list[str]:
    files = ["--onnx-dir", str(export), "--engine-dir", str(engines)]
    return ["build", *files, "--backend", "tensorrt-rtx", *SIZES, *more]


def job_of(export: Path, directory: Path, compute: Compute = "bfloat16") -> BuildJob:
    """The job of an export's engine for SM120, its graph in `directory`."""
    onnx = open_onnx_dir(export)
    options = TensorRTOptions(sm=120, compute=compute)
    plan = staging.plan_of(RTX, onnx, LIMITS, options, rtx.bindings().__version__)
    directory.mkdir()
    model = lowered_files.lowered_model(onnx, plan.target, plan.model)
    graph = lowered_files.write(model, onnx.path, directory)
    return staging.job_of(plan, options, graph, directory / "x.engine")


@pytest.mark.parametrize("sm", [89, 120])
def test_the_demo_pair_compiles_for_cards_that_are_not_here(
    exports: dict[str, Path], tmp_path: Path, cli: Cli, sm: int
) -> None:
    engines = tmp_path / "engines"
    for export in exports.values():
        target = ["--compute-capability", f"SM{sm}"]
        done = cli(*build_args(export, engines, *target))
        assert done.code == 0, done.err
        assert "not compared with the golden outputs" in done.out
    for name in ("spec_base.engine", "spec_draft.engine"):
        assert (engines / name).stat().st_size > 1_000_000
    shown = json.loads(cli("inspect", engines, "--json").out)
    assert not list(engines.glob("lowered-*"))
    for engine in shown["engines"].values():
        assert engine["fingerprint"]["compute_capability"] == sm
        assert engine["fingerprint"]["version"] == rtx.bindings().__version__
        assert engine["runs_here"]["answer"] is False
        settings = engine["config"]["backend_config"]
        assert (settings["dialect"], settings["compute"]) == ("native", "bfloat16")
        assert [profile["name"] for profile in settings["profiles"]] == ["prefill", "generation"]
    assert shown["pairing"]["fits"]


def test_a_pair_compiles_for_two_lengths_of_its_cache(
    exports: dict[str, Path], tmp_path: Path, cli: Cli
) -> None:
    engines = tmp_path / "engines"
    for export in exports.values():
        more = ["--max-kv-cache-capacity", "96,192", "--compute-capability", "SM120"]
        done = cli(*build_args(export, engines, *more))
        assert done.code == 0, done.err
        assert "engines for 96 and 192 tokens" in done.out
    for name in ("base", "draft"):
        config = EngineConfig.read(engines / f"{name}_config.json")
        slots = [config.at(capacity).settings["cache_slots"] for capacity in (96, 192)]
        assert slots[0] < slots[1]
        own, smaller = engines / f"spec_{name}.engine", engines / f"spec_{name}.96.engine"
        assert own.read_bytes() != smaller.read_bytes()
        assert min(own.stat().st_size, smaller.stat().st_size) > 1_000_000
    listed = json.loads((engines / "manifest.json").read_text())["engines"]["draft"]["files"]
    assert {"spec_draft.engine", "spec_draft.96.engine"} < set(listed)


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX:DeprecationWarning")
def test_what_was_timed_is_taken_back_by_the_library(tmp_path: Path) -> None:
    """The calls are TensorRT's own. TensorRT-RTX times nothing, and takes any bytes."""
    path = tmp_path / "times"
    config = rtx.builder().create_builder_config()
    assert timing_cache.attach(config, path) is False
    timing_cache.store(config, path)
    stored = path.read_bytes()
    assert stored
    again = rtx.builder().create_builder_config()
    assert timing_cache.attach(again, path) is True
    timing_cache.store(again, path)
    assert path.read_bytes() == stored
    assert [*tmp_path.iterdir()] == [path]


KINDS = {
    "hybrid": "hybrid/llm",
    "head": "hybrid/mtp_draft",
    "windows": "windows/llm",
    "block": "block/dflash_draft",
    "block with heads": "heads/dspark_draft",
    "heads": "medusa/medusa_draft",
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of small checkpoints: one of each kind of graph that the demo has not."""
    rtx.bindings()
    path = tmp_path_factory.mktemp("kinds")
    base, out = toys.make_base(path / "base", "qwen3", layers=7), path / "onnx"
    to_base = ["--base-model-dir", str(base)]
    hybrid, windows = toys.make_qwen3_5(path / "hybrid"), toys.make_gemma3(path / "windows")
    drafts = {
        "block": toys.make_dflash(path / "block", base),
        "heads": toys.make_dspark(path / "heads", base),
        "medusa": toys.make_medusa(path / "medusa", base),
    }
    assert run(["export", str(hybrid), str(out / "hybrid"), "--mtp"]) == 0
    assert run(["export", str(windows), str(out / "windows")]) == 0
    for name, draft in drafts.items():
        assert run(["export", str(draft), str(out / name), *to_base]) == 0
    return out


@pytest.mark.parametrize("sm", ["SM89", "SM120"])
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_graph_compiles(
    kinds: Path, tmp_path: Path, cli: Cli, kind: str, compute: str, sm: str
) -> None:
    more = ["--compute-capability", sm, "--compute", compute, "--max-draft-tree-size", "16"]
    done = cli(*build_args(kinds / KINDS[kind], tmp_path / "engines", *more))
    assert done.code == 0, done.err
    (engine,) = (tmp_path / "engines").glob("*.engine")
    assert engine.stat().st_size > 100_000


@pytest.mark.parametrize("scheme", ["fp8", "int4_awq", "int8_sq", "nvfp4", "mxfp8"])
def test_each_scheme_compiles_for_a_card_that_has_it(
    modelopt_exports: Path, tmp_path: Path, cli: Cli, scheme: str
) -> None:
    checkpoint = shutil.copytree(modelopt_exports / scheme, tmp_path / scheme)
    base = toys.make_base(tmp_path / "tokenizer", "qwen3", layers=2)
    shutil.copy(base / "tokenizer.json", checkpoint)
    assert run(["export", str(checkpoint), str(tmp_path / "onnx")]) == 0
    sizes = ["--max-input-len", "32", "--max-kv-cache-capacity", "48"]
    export, target = tmp_path / "onnx" / "llm", ["--compute-capability", "SM120"]
    done = cli(*build_args(export, tmp_path / "engines", *target, *sizes))
    if not rtx.builds():
        assert done.code == 4, done.err
        assert "compiles no quantized weights where no CUDA device is" in done.err
        return
    assert done.code == 0, done.err
    assert f"the weights of its matrix products are {scheme}, as exported" in done.out
    older = cli(*build_args(export, tmp_path / "older", "--compute-capability", "SM86", *sizes))
    assert older.code == (0 if scheme.startswith("int") else 3), older.err


def test_an_fp8_cache_is_kept_in_the_compute_type_and_that_is_said(
    modelopt_exports: Path, tmp_path: Path, cli: Cli
) -> None:
    checkpoint = shutil.copytree(modelopt_exports / "llama_fp8", tmp_path / "llama_fp8")
    base = toys.make_base(tmp_path / "tokenizer", "llama", layers=2)
    shutil.copy(base / "tokenizer.json", checkpoint)
    assert run(["export", str(checkpoint), str(tmp_path / "onnx")]) == 0
    sizes = ["--max-input-len", "32", "--max-kv-cache-capacity", "48", "--compute", "fp16"]
    more = ["--compute-capability", "SM120", *sizes]
    done = cli(*build_args(tmp_path / "onnx" / "llm", tmp_path / "engines", *more))
    if not rtx.builds():
        assert done.code == 4, done.err
        return
    assert done.code == 0, done.err
    assert "fp8 KV cache are not applied: the cache is float16" in done.out


def test_attention_in_float32_is_built_of_basic_operators(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    """The compiler refuses it otherwise, and then it is built once more."""
    job = job_of(exports["draft"], tmp_path / "work", "float32")
    assert job.decompose_attention
    fused = replace(job, decompose_attention=False)
    with pytest.raises(BuildRefused) as error:
        process.run(fused, lambda share: None, os.environ)
    assert error.value.lacks_kernel
    assert staging.run(fused, Listeners(), dict(os.environ)) is True
    assert Path(job.engine).stat().st_size > 1_000_000


def test_an_emitted_graph_compiles_without_anything_else(
    exports: dict[str, Path], tmp_path: Path, cli: Cli
) -> None:
    """In float32, whose attention has no fused kernel: the graph itself lets it be decomposed."""
    job, out = job_of(exports["draft"], tmp_path / "work", "float32"), tmp_path / "out"
    target = ["--compute-capability", "SM120", "--compute", "fp32", "--emit-onnx", str(out)]
    done = cli(*build_args(exports["draft"], tmp_path / "engines", *target))
    assert done.code == 0, done.err
    emitted = replace(job, model=str(out / "model.onnx"), decompose_attention=False)
    assert process.run(emitted, lambda share: None, os.environ).engine_bytes > 1_000_000


def test_a_graph_that_the_parser_refuses_is_told_in_its_words(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    """The canonical graph, whose cache has no fixed length; nothing about a missing driver."""
    job = job_of(exports["base"], tmp_path / "work")
    canonical = exports["base"] / "model.onnx"
    with pytest.raises(BuildRefused) as error:
        process.run(replace(job, model=str(canonical)), lambda share: None, os.environ)
    assert "must have a static sequence length" in error.value.what
    assert "layers.0/attn/k/cache (TensorScatter)" in error.value.what
    assert "cudaError 35" not in error.value.what
    assert not Path(job.engine).exists()


def test_missing_weights_are_told_by_the_log(exports: dict[str, Path], tmp_path: Path) -> None:
    """The parser's own error names the tensor alone, the log names the file."""
    job = job_of(exports["draft"], tmp_path / "work")
    (tmp_path / "work" / "model.onnx.data").unlink()
    with pytest.raises(BuildRefused, match=r"model\.onnx\.data"):
        process.run(job, lambda share: None, os.environ)


def test_a_profile_that_does_not_fit_the_graph_is_refused(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    job = job_of(exports["draft"], tmp_path / "work")
    prefill, generation = job.profiles
    shapes = {name: dims for name, dims in prefill.shapes.items() if name != "rope_cos"}
    short = replace(job, profiles=(replace(prefill, shapes=shapes), generation))
    with pytest.raises(BuildRefused, match="prefill and the graph differ in: rope_cos"):
        process.run(short, lambda share: None, os.environ)


# ---- cancelled and killed


def say(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()


def messages(child: subprocess.Popen[str]) -> Iterator[process.Message]:
    assert child.stdout is not None
    for line in child.stdout:
        message = process.message_of(line)
        assert message is not None, line  # the library prints nothing between them
        yield message


def test_a_build_is_cancelled_at_its_next_step(exports: dict[str, Path], tmp_path: Path) -> None:
    job = job_of(exports["draft"], tmp_path / "work")
    kinds = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(COMMAND, text=True, **pipes) as child:
        say(child, job.to_json())
        for message in messages(child):
            kinds.append(message["kind"])
            if kinds.count("progress") == 1 and message["kind"] == "progress":
                assert child.stdin is not None
                child.stdin.close()
    assert child.returncode == 130
    assert kinds[-1] == "cancelled"
    assert not Path(job.engine).exists()


def test_progress_grows_to_the_whole(exports: dict[str, Path], tmp_path: Path) -> None:
    job = job_of(exports["draft"], tmp_path / "work")
    shares: list[float] = []
    report = process.run(job, shares.append, os.environ)
    assert shares == sorted(shares)
    assert len(shares) > 20
    assert (shares[0] < 0.1, shares[-1]) == (True, 1.0)
    assert Path(job.engine).stat().st_size == report.engine_bytes
    assert report.layers > 50
    assert report.peak_bytes > report.engine_bytes


def interrupted(export: Path, engines: Path, code: str) -> subprocess.CompletedProcess[str]:
    """`edgespec build`, in which `code` runs at its 20th message: in the middle of the build."""
    place = "edgespec.backends.tensorrt.process:message_of"
    command = build_args(export, engines, "--compute-capability", "SM120")
    return subprocess.run(
        [sys.executable, "-c", HAPPENING, place, "20", code, *command],
        capture_output=True,
        text=True,
        check=False,
    )


CHILDREN = "open(f'/proc/self/task/{os.getpid()}/children').read()"


def test_ctrl_c_leaves_nothing(exports: dict[str, Path], tmp_path: Path) -> None:
    code = f"print({CHILDREN}, flush=True); os.kill(os.getpid(), signal.SIGINT)"
    done = interrupted(exports["draft"], tmp_path / "engines", code)
    assert done.returncode == 130, done.stderr
    assert not (tmp_path / "engines").exists()
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_a_killed_command_ends_its_compiler_and_leaves_nothing_that_looks_finished(
    exports: dict[str, Path], tmp_path: Path, cli: Cli
) -> None:
    engines = tmp_path / "engines"
    code = f"print({CHILDREN}, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    done = interrupted(exports["draft"], engines, code)
    assert done.returncode == -9
    wait_for(int(done.stdout))
    assert all(path.name.startswith(".draft.tmp-") for path in engines.iterdir())
    assert cli("inspect", engines).code != 0
    again = cli(*build_args(exports["draft"], engines, "--compute-capability", "SM120"))
    assert again.code == 0, again.err
    assert not [path for path in engines.iterdir() if path.name.startswith(".")]


def wait_for(pid: int) -> None:
    """Wait until a process that is not a child of ours has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(WAIT_MS), "the compiler goes on without its command"
    os.close(handle)


def test_a_compiler_that_is_killed_is_told_of(exports: dict[str, Path], tmp_path: Path) -> None:
    code = f"os.kill(int({CHILDREN}), signal.SIGKILL)"
    done = interrupted(exports["draft"], tmp_path / "engines", code)
    assert done.returncode == 4
    assert "was killed, as Linux does where memory runs out" in done.stderr
    assert not (tmp_path / "engines").exists()


# ---- what the library does, on which this code relies

PROBE = """
import json, sys, warnings
import tensorrt_rtx as trt
warnings.simplefilter("ignore")
answer = {"None": None, "False": False, "True": True}[sys.argv[1]]
class Log(trt.ILogger):
    def __init__(self): super().__init__(); self.lines = []
    def log(self, severity, msg): self.lines.append([severity.name, msg])
class Monitor(trt.IProgressMonitor):
    def __init__(self): super().__init__()
    def phase_start(self, phase_name, parent_phase, num_steps): pass
    def step_complete(self, phase_name, step): return answer
    def phase_finish(self, phase_name): pass
log, other, monitor = Log(), Log(), Monitor()
builder = trt.Builder(log)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
x = network.add_input("x", trt.float16, (4, 8))
y = network.add_elementwise(x, x, trt.ElementWiseOperation.SUM).get_output(0)
network.mark_output(y)
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM120, 0)
config.progress_monitor = monitor
engine = builder.build_serialized_network(network, config)
lines = len(log.lines)
second = trt.Builder(other)
second.create_network(0).add_input("x", trt.float16, (-2,))
from edgespec.backends.tensorrt import timing_cache
from pathlib import Path
path = Path(sys.argv[2])
found = [timing_cache.attach(config, path)]
timing_cache.store(config, path)
found.append(timing_cache.attach(config, path))
own = len(log.lines) > lines
print(json.dumps({"built": engine is not None, "attached": found, "own": own}), flush=True)
import os; os._exit(0)
"""


def probe(answer: str, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, answer, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("answer", "built"), [("True", True), ("False", False), ("None", False)])
def test_a_monitor_that_answers_nothing_cancels(
    exports: dict[str, Path], tmp_path: Path, answer: str, built: bool
) -> None:
    assert probe(answer, tmp_path / "times")["built"] is built


def test_the_first_logger_of_a_process_gets_lines_of_later_builders(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    """So there is one for all, with a sink that changes."""
    found = probe("True", tmp_path / "times")
    assert found["own"]


def test_a_timing_cache_is_stored_and_taken_again_and_means_nothing_here(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    """Its calls work; this library calls them deprecated, and the table says that it has none."""
    found = probe("True", tmp_path / "times")
    assert found["attached"] == [False, True]
    assert (tmp_path / "times").stat().st_size > 0
    assert not capabilities_of(RTX, rtx.bindings().__version__).timing_cache
