"""Checks one finished engine on its device, as `edgespec verify` does: golden outputs, its memory,
its kernels, and times.

Knows the order of the work and what may be compared with what. Knows no tokens and no drafts; what
only an engine library knows is asked of the backend.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.base import Backend, Runner
from edgespec.backends.build import with_own_embedding
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.engine_dir import golden_name, open_engine
from edgespec.backends.findings import Finding, judged, measured, not_run, passed
from edgespec.backends.golden import check_golden
from edgespec.backends.golden_file import Golden, read_golden, slots_of
from edgespec.backends.made_calls import made_call
from edgespec.backends.manifest import EngineEntry
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.registry import backend_of, open_runner
from edgespec.contract import Role
from edgespec.errors import LimitError, counted

GOLDEN, KERNELS, TIMES = "golden outputs", "kernels", "times"
RUNS = 5  # of which the median is told
PROMPT_ROWS = 128  # of the prompt that is timed, at most
MAX_NAMED = 4  # kernels that a line names


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """What was found of an engine: its checks, and what describes it in a report, as JSON."""

    role: Role
    findings: Sequence[Finding]
    description: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The keys of an engine in verify.json."""
        return self.description | {"checks": [finding.to_dict() for finding in self.findings]}


def check_engine(engine_dir: Path, role: Role, exports: Sequence[OnnxDir]) -> EngineCheck:
    """All checks of one engine, with the golden outputs of its export where that is among
    `exports`.

    Raises BundleError, EngineMismatch or EnvironmentProblem where the engine cannot be opened.
    """
    config, entry = open_engine(engine_dir, role)
    backend = backend_of(engine_dir, role)
    capacities = config.limits.capacities
    findings, memory = list[Finding](), dict[str, int]()
    for capacity in capacities:
        own, sizes = check_capacity(engine_dir, config.at(capacity), entry, exports)
        several = len(capacities) > 1
        findings += [of_capacity(row, capacity) for row in own] if several else own
        memory |= {f"{name}_{capacity}" if several else name: n for name, n in sizes.items()}
    return EngineCheck(
        role=role, findings=findings, description=described(backend, config, entry, memory)
    )


def check_capacity(
    engine_dir: Path, config: EngineConfig, entry: EngineEntry, exports: Sequence[OnnxDir]
) -> tuple[list[Finding], dict[str, int]]:
    """The checks of the engine of one capacity, and the bytes that it takes where it runs."""
    backend, role = backend_of(engine_dir, config.role), config.role
    began = time.perf_counter()
    runner, _ = open_runner(engine_dir, role, capacity=config.limits.max_kv_cache_capacity)
    load_s = time.perf_counter() - began
    try:
        findings = [
            judged(
                GOLDEN, lambda: golden_outputs(engine_dir, runner, backend, config, entry, exports)
            ),
            *backend.self_test(runner),
            kernels(backend.kernels(engine_dir, config, runner)),
            judged(TIMES, lambda: times(runner, config, load_s)),
        ]
        return findings, backend.device_memory(runner)
    finally:
        runner.close()


def of_capacity(finding: Finding, capacity: int) -> Finding:
    """A finding of one of several engines, by its capacity."""
    return replace(finding, check=f"{finding.check}, {capacity} tokens")


def described(
    backend: Backend, config: EngineConfig, entry: EngineEntry, memory: dict[str, int]
) -> dict[str, Any]:
    """What an engine is and where it runs, as JSON; no paths."""
    return {
        "backend": backend.name,
        "device": backend.device(),
        "built_for": dict(entry.fingerprint),
        "weights": config.weights.to_dict(),
        "limits": config.limits.to_dict(config.role),
        "settings": dict(config.settings),
        "smaller_settings": {str(c): dict(row) for c, row in config.variants.items()},
        "notes": list(backend.notes(config)),
        "memory_bytes": {"files": entry.size_bytes, **memory},
        "files": {
            name: {"bytes": file.size_bytes, "sha256": file.sha256}
            for name, file in entry.files.items()
        },
    }


# ---- golden outputs


def golden_outputs(
    engine_dir: Path,
    runner: Runner,
    backend: Backend,
    config: EngineConfig,
    entry: EngineEntry,
    exports: Sequence[OnnxDir],
) -> Finding:
    """Whether an engine computes what its export did. GoldenMismatch where it does not, LimitError
    where it has no room for it."""
    component = config.component
    path = golden_path(engine_dir, config, entry, exports)
    if path is None:
        return not_run(GOLDEN, "give the export that it was built from, if it has any: `onnx_dir`")
    spec = backend.accuracy(config)
    if spec is None:
        reason = f"{backend.title} does not say how close {config.weights.scheme} must come"
        return not_run(GOLDEN, reason)
    golden = read_golden(path, component.graph, component.vocab_size)
    check_room(runner, golden)
    agreement = check_golden(
        runner, with_own_embedding(golden, runner), component.ropes, spec, backend.remedies
    )
    figures = {
        "difference": agreement.difference,
        "cosine": agreement.cosine,
        "scale": agreement.scale,
    }
    if spec.min_cosine is not None:
        text = f"cosine {agreement.cosine:.6f}, at least {spec.min_cosine} is asked for"
        at_build = entry.golden_cosine
        when = "" if at_build is None else f"; {at_build:.6f} when it was built"
        if spec.max_scale is not None:
            when += f"; size by {agreement.scale:.1e}, allowed is {spec.max_scale:.1e}"
    else:
        text = f"differ by {agreement.difference:.1e}, allowed is {spec.tolerance:.0e}"
        at_build = entry.golden_difference
        when = "" if at_build is None else f"; {at_build:.1e} when it was built"
    return passed(GOLDEN, text + when, **figures, when_built=at_build)


def golden_path(
    engine_dir: Path, config: EngineConfig, entry: EngineEntry, exports: Sequence[OnnxDir]
) -> Path | None:
    """The golden outputs of an engine: those beside it, where it was built without a proof, or
    those of its export; None where neither has any."""
    beside = golden_name(config.role)
    if beside in entry.files:
        return engine_dir / beside
    paths = [onnx.golden for onnx in exports if onnx.config == config.component]
    return paths[0] if paths else None


def check_room(runner: Runner, golden: Golden) -> None:
    """LimitError where the golden calls have more tokens than a lane has slots."""
    slots = slots_of(golden)
    if slots > runner.capacity:
        message = f"the golden calls need {slots} slots, and the engine has {runner.capacity}"
        raise LimitError(message, "Build with a larger `max_kv_cache_capacity`.")


# ---- kernels


def kernels(count: dict[str, int]) -> Finding:
    """What an engine runs, where its backend can tell."""
    if not count:
        return not_run(KERNELS, "the backend cannot tell")
    most = sorted(count, key=lambda name: -count[name])
    named = ", ".join(f"{count[name]} {name}" for name in most[:MAX_NAMED])
    more = ", ..." if len(most) > MAX_NAMED else ""
    return measured(KERNELS, f"{sum(count.values())}: {named}{more}", count=count)


# ---- times


def times(runner: Runner, config: EngineConfig, load_s: float) -> Finding:
    """How long an engine takes alone: to load, for a prompt, for a step of one row and of as many
    as it was built for. LimitError where it takes none of these calls."""
    shape, limits = runner.contract.shape, config.limits
    many = limits.max_draft_tree_size if shape.role is Role.DRAFT else limits.verify_tree_size
    rows = max(1, min(many or 1, runner.max_rows))
    room = runner.capacity - rows - 1  # a block draft's has a row of context before it
    seconds: dict[str, float | None] = {"load_s": load_s}
    start = 0
    if not shape.heads:
        if room < 1:
            needed = (
                f"a call of {rows} rows behind a prompt needs more than {runner.capacity} slots"
            )
            raise LimitError(needed, "Build with a larger `max_kv_cache_capacity`.")
        start = min(PROMPT_ROWS, runner.prefill_chunk, limits.max_input_len, room)
        seconds[f"prefill_{start}_s"] = median(lambda: read_prompt(runner, start))
        read_prompt(runner, start)
    for count in sorted({1, rows}):
        call = made_call(runner.contract, 0, start, count, heads=count)
        seconds[f"step_{count}_s"] = median(partial(runner.run, call))
    runner.zero(0)
    known = {name: value for name, value in seconds.items() if value is not None}
    words = ", ".join(
        f"{name.removesuffix('_s')} {1e3 * value:.2f}" for name, value in known.items()
    )
    circumstances = f"ms, median of {counted(RUNS, 'run')}, behind {counted(start, 'token')}"
    return measured(TIMES, f"{words} {circumstances}", **known, runs=RUNS, behind_tokens=start)


def read_prompt(runner: Runner, count: int) -> None:
    """Read so many rows into the first lane, and commit them."""
    runner.free(0)
    if runner.contract.shape.block:
        runner.run(made_call(runner.contract, 0, 0, 1, context=count))
        return
    runner.run(made_call(runner.contract, 0, 0, count))
    runner.keep_rows(0, np.arange(count), 0)


def median(run: Callable[[], object]) -> float | None:
    """The median time of a call in seconds, after one that is not counted; None where the engine
    was not built for it."""
    try:
        run()
    except LimitError:
        return None
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
