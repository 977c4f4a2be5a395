"""A lowered graph for a device that has TensorRT and no Python: a directory that needs nothing
else, and the command that builds the engine there.

Knows the flags of NVIDIA's command-line tools.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import onnx_ir as ir

from edgespec.artifacts import file_names
from edgespec.backends.emitted import SCRIPT
from edgespec.backends.tensorrt.options import MIB, TensorRTOptions
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.staging import BuildPlan
from edgespec.backends.tensorrt.versions import TENSORRT

JETPACK = "/usr/src/tensorrt/bin"  # where trtexec stands there, which no PATH names
DECOMPOSABLE = "TRT_decomposable"


def command_of(plan: BuildPlan, options: TensorRTOptions, engine: str) -> list[str]:
    """The words of the command that builds the file `engine` from the graph beside it."""
    capabilities = plan.capabilities
    words = [plan.library.tool, f"--onnx={file_names.MODEL}", f"--saveEngine={engine}"]
    if capabilities.typed_by_flag and not capabilities.compiles_for:
        words.append("--stronglyTyped")
    if capabilities.compiles_for:
        words.append(f"--computeCapabilities={plan.sm}")
    for i, profile in enumerate(plan.profiles):
        words += [f"--profile={i}", *shape_flags(profile)]
    if options.workspace_bytes is not None:
        words.append(f"--memPoolSize=workspace:{options.workspace_bytes // MIB}")
    if options.optimization_level is not None:
        words.append(f"--builderOptimizationLevel={options.optimization_level}")
    if capabilities.timing_cache and options.timing_cache is not None:
        words.append(f"--timingCacheFile={options.timing_cache}")
    return [*words, "--skipInference"]


def shape_flags(profile: Profile) -> list[str]:
    """The three flags of a profile's shapes."""
    flags = []
    for i, flag in enumerate(("--minShapes", "--optShapes", "--maxShapes")):
        shapes = [f"{name}:{'x'.join(map(str, dims[i]))}" for name, dims in profile.shapes.items()]
        flags.append(f"{flag}={','.join(shapes)}")
    return flags


def let_decompose(model: ir.Model) -> None:
    """Let the attention of a graph be built of basic operators, by an attribute that NVIDIA's
    parser reads: the tools have no flag for it."""
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes[DECOMPOSABLE] = ir.AttrInt64(DECOMPOSABLE, 1)


def script_of(words: list[str], variables: dict[str, str]) -> str:
    """The command as a shell script that is run in its own directory."""
    lines = ["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"']
    lines += [f'PATH="$PATH:{JETPACK}"'] if words[0] == TENSORRT.tool else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    command = " \\\n  ".join(map(shlex.quote, words))
    return "\n".join([*lines, command, ""])


def write_script(directory: Path, text: str) -> None:
    """Write the script beside the graph. Raises OSError."""
    path = directory / SCRIPT
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
