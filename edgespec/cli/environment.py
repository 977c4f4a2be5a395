"""The environment variables that edgespec reads: those of flags, and a warning for mistyped ones.

Knows names. The flags read their variables themselves, and say so in --help.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

PREFIX = "EDGESPEC_"
DEBUG = f"{PREFIX}DEBUG"
VERBOSE = f"{PREFIX}VERBOSE"
ENGINE_DIR = f"{PREFIX}ENGINE_DIR"
PREFIX_CACHE_MB = f"{PREFIX}PREFIX_CACHE_MB"
CALIB_DATA = f"{PREFIX}CALIB_DATA"
DEVICE = f"{PREFIX}DEVICE"
TARGET = f"{PREFIX}TARGET"
CACHE = f"{PREFIX}CACHE"
KERNEL_LEVEL = f"{PREFIX}KERNEL_LEVEL"
MEASURE_COSTS = f"{PREFIX}MEASURE_COSTS"
SPEC_POLICY = f"{PREFIX}SPEC_POLICY"
COMPLETING = "_EDGESPEC_COMPLETE"  # set by the completion scripts of `edgespec completion`

# Variable -> what it is the default of; those of NO_FLAGS are no flag's
VARIABLES = {
    CACHE: "the directory of kept engines (`run`, `serve`) and of hashes of weights",
    ENGINE_DIR: "`--engine-dir` of `build`, `infer`, `chat` and `bench`",
    PREFIX_CACHE_MB: "`--prefix-cache-mb` of `infer`, `chat` and `serve`",
    SPEC_POLICY: "`--spec-policy` of `infer`, `chat`, `run`, `serve`, `eval` and `bench`",
    CALIB_DATA: "`--calib-data` of `quantize`",
    DEVICE: "`--device` of `quantize`",
    TARGET: "`--target` of `quantize`",
    MEASURE_COSTS: "`--measure-costs` of `build`, `import`, `run` and `serve`, off with the value 0; then "
    "`infer` and `chat` do not measure again either",
    KERNEL_LEVEL: "the instructions that edgespec's own kernels use, such as `portable`",
    VERBOSE: "`--verbose`, with the value 1",
    DEBUG: "`--debug`, with the value 1",
}
NO_FLAGS = (CACHE, KERNEL_LEVEL)
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch is set by its variable."""
    return environ.get(name, "").lower() in ON


def is_off(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch that is on by default is unset by its variable."""
    return environ.get(name, "").lower() in OFF


def mistyped(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that is none of ours but for a letter or two."""
    unknown = [name for name in environ if name.startswith(PREFIX) and name not in VARIABLES]
    lines = []
    for name in sorted(unknown):
        if nearest := difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.9):
            lines.append(f"{name} is not a variable of edgespec; did you mean {nearest[0]}?")
    return lines
