"""NVIDIA's tool over the simulator: reads the flags that a build.sh gives, and builds the engine.

Called as `python -m tests.tensorrt_simulator.trtexec VERSION FLAGS`; `install` puts it into a PATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgespec.backends.tensorrt import network
from edgespec.backends.tensorrt.bindings import TrtBindings
from edgespec.backends.tensorrt.build_job import BuildJob
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.progress_monitor import BuildProgress
from edgespec.backends.tensorrt.versions import TENSORRT, capabilities_of
from tests.tensorrt_simulator.library import simulator

ROOT = Path(__file__).parents[2]
SHAPES = ("--minShapes", "--optShapes", "--maxShapes")


def install(directory: Path, version: str) -> Path:
    """Write a `trtexec` of this version to a directory, for PATH."""
    directory.mkdir()
    tool = directory / "trtexec"
    call = f"{sys.executable} -m tests.tensorrt_simulator.trtexec {version}"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {call} "$@"\n')
    tool.chmod(0o755)
    return directory


def job_of(flags: list[str]) -> BuildJob:
    """What the flags ask for; ValueError for one that the tool does not have."""
    given, rows = {}, []
    for flag in flags:
        name, _, value = flag.partition("=")
        if name == "--profile":
            rows.append({})
        elif name in SHAPES:
            for part in value.split(","):
                tensor, _, dims = part.partition(":")
                shape = tuple(map(int, dims.split("x")))
                rows[-1].setdefault(tensor, []).append(shape)
        elif name in ("--onnx", "--saveEngine", "--stronglyTyped", "--skipInference"):
            given[name] = value
        else:
            raise ValueError(f"unknown flag {flag}")
    assert {"--stronglyTyped", "--skipInference"} <= given.keys()
    profiles = [
        Profile(str(i), {k: tuple(v) for k, v in row.items()}) for i, row in enumerate(rows)
    ]
    return BuildJob(
        backend="tensorrt",
        model=given["--onnx"],
        engine=given["--saveEngine"],
        profiles=tuple(profiles),
    )


if __name__ == "__main__":
    version, *flags = sys.argv[1:]
    found = TrtBindings(TENSORRT, simulator(version), version, capabilities_of(TENSORRT, version))
    job = job_of(flags)
    Path(job.engine).unlink(missing_ok=True)
    network.build(found, job, BuildProgress(lambda share, phase: None), lambda severity, text: None)
