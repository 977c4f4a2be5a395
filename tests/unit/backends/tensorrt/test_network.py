"""A build in this process, over the simulated library: what is refused, at which step, in whose
words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from edgespec.backends.tensorrt import network
from edgespec.backends.tensorrt.bindings import TrtBindings
from edgespec.backends.tensorrt.build_job import BuildJob, BuildReport
from edgespec.backends.tensorrt.network import Cancelled, Refused
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.progress_monitor import BuildProgress
from edgespec.backends.tensorrt.versions import RTX, TENSORRT, Library, capabilities_of
from tests.tensorrt_simulator.library import Simulator
from tests.tensorrt_simulator.small_graph import MOST, SLOTS, small_graph

VERSION, RTX_VERSION = "10.16.2.10", "1.7.1.116"
ROWS = ((1, 1, 1, 2), (1, 1, MOST, 2), (1, 1, MOST, 2))
SHAPES = {"rows": ROWS, "write_indices": ((1,),) * 3, "past_key_0": ((1, 1, SLOTS, 2),) * 3}


class Bench:
    """A build with a library of its own; `said` has the lines of its log."""

    def __init__(self, path: Path, version: str = VERSION, library: Library = TENSORRT) -> None:
        self.path, self.said = path, []  # type: ignore[var-annotated]
        self.trt = Simulator(version, library)
        self.bindings = TrtBindings(library, self.trt, version, capabilities_of(library, version))
        self.progress = BuildProgress(lambda share, phase: None)

    def build(self, model: onnx.ModelProto | None = None, **more: Any) -> BuildReport:
        onnx.save(small_graph() if model is None else model, self.path / "model.onnx")
        given = {"profiles": (Profile("all", SHAPES),)} | more
        job = BuildJob(
            backend=self.bindings.library.backend,
            model=str(self.path / "model.onnx"),
            engine=str(self.path / "x.engine"),
            **given,
        )
        return network.build(
            self.bindings, job, self.progress, lambda severity, text: self.said.append(text)
        )

    def engine(self) -> Any:
        data = (self.path / "x.engine").read_bytes()
        return self.trt.Runtime(logger_of(self.trt)).deserialize_cuda_engine(data)


def logger_of(trt: Simulator) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc,name-defined]
        def log(self, severity: Any, msg: str) -> None:
            """Nobody reads it here."""

    return Log()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_engine_is_written_with_its_profiles(bench: Bench) -> None:
    short = SHAPES | {"rows": ((1, 1, 1, 2),) * 3}
    report = bench.build(profiles=(Profile("prefill", SHAPES), Profile("generation", short)))
    engine = bench.engine()
    assert report.engine_bytes == (bench.path / "x.engine").stat().st_size
    assert report.layers == 2
    assert engine.get_tensor_profile_shape("rows", 0) == [*ROWS]
    assert engine.get_tensor_profile_shape("rows", 1) == [(1, 1, 1, 2)] * 3


Change = Callable[[Bench], Any]


def without_input(bench: Bench) -> Any:
    shapes = {name: SHAPES[name] for name in ("rows", "past_key_0")}
    return bench.build(profiles=(Profile("short", shapes),))


def inverted(bench: Bench) -> Any:
    shapes = SHAPES | {"rows": ((1, 1, MOST, 2), (1, 1, 1, 2), (1, 1, MOST, 2))}
    return bench.build(profiles=(Profile("inverted", shapes),))


def other_size(bench: Bench) -> Any:
    shapes = SHAPES | {"past_key_0": ((1, 1, SLOTS + 1, 2),) * 3}
    return bench.build(profiles=(Profile("larger", shapes),))


def failing(call: str) -> Change:
    def build(bench: Bench) -> Any:
        bench.trt.faults.after[call] = 0
        return bench.build()

    return build


REFUSALS: dict[str, tuple[Change, str, str]] = {
    "by the parser": (
        lambda bench: bench.build(small_graph(slots="C")),
        "the parser refuses the graph",
        "the length of a cache is static",
    ),
    "a profile without an input": (without_input, "differ in: write_indices", ""),
    "a profile that is inverted": (inverted, "the profile inverted is refused", "MIN<=OPT<=MAX"),
    "a profile of another size": (other_size, "cannot be built", "Dimension mismatch"),
    "no engine": (failing("build_serialized_network"), "cannot be built", "OutOfMemory"),
    "no config": (failing("create_builder_config"), "no config can be made", ""),
    "no kernel": (
        lambda bench: bench.build(small_graph(attention="additive"), profiles=(ATTENDING,)),
        "cannot be built",
        "not supported by a dedicated kernel",
    ),
}
MASK = ((1, 1, 1, SLOTS), (1, 1, MOST, SLOTS), (1, 1, MOST, SLOTS))
ATTENDING = Profile("attending", SHAPES | {"mask": MASK})


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_library_refuses_is_refused_in_its_words(bench: Bench, name: str) -> None:
    build, what, line = REFUSALS[name]
    with pytest.raises(Refused, match=what) as error:
        build(bench)
    assert line in " ".join(error.value.lines)
    assert not (bench.path / "x.engine").exists()


def test_the_node_that_is_refused_is_named(bench: Bench) -> None:
    with pytest.raises(Refused) as error:
        bench.build(small_graph(slots="C"))
    assert error.value.node == "scatter (TensorScatter)"


@pytest.mark.parametrize(("decompose", "dtype"), [(True, "FLOAT"), (False, "FLOAT16")])
def test_attention_is_built_decomposed_or_fused(bench: Bench, decompose: bool, dtype: str) -> None:
    model = small_graph(attention="additive", dtype=TensorProto.DataType.Value(dtype))
    report = bench.build(model, profiles=(ATTENDING,), decompose_attention=decompose)
    assert report.engine_bytes > 0


def test_a_cancelled_build_is_no_refusal(bench: Bench) -> None:
    bench.progress.cancel()
    with pytest.raises(Cancelled):
        bench.build()
    assert not (bench.path / "x.engine").exists()


def test_what_a_listener_raises_comes_out_of_the_build(bench: Bench) -> None:
    def listener(share: float, phase: str) -> None:
        if share > 0:
            raise KeyError(phase)

    bench.progress = BuildProgress(listener)
    with pytest.raises(KeyError):
        bench.build()


def test_times_are_kept_for_the_next_build(bench: Bench) -> None:
    path = bench.path / "times"
    bench.build(timing_cache=str(path))
    stored = path.read_bytes()
    assert VERSION.encode() in stored
    (bench.path / "x.engine").unlink()
    bench.build(timing_cache=str(path))
    assert path.read_bytes() == stored


def test_times_of_another_version_are_begun_anew(bench: Bench) -> None:
    path = bench.path / "times"
    path.write_bytes(b"times of another version")
    bench.build(timing_cache=str(path))
    assert VERSION.encode() in path.read_bytes()


def test_a_compute_capability_is_that_of_the_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RTX_VERSION, RTX)
    assert bench.build(compute_capability=120).engine_bytes > 0
    with pytest.raises(AttributeError, match="SM87"):
        bench.build(compute_capability=87)
