"""A lowered graph becomes an engine: parsed, given its profiles, built.

Runs in a process of its own (`build_process`): a library that has built once in a process may end
it at the second build. Knows the builder's API; every answer of it is looked at, as most of its
calls report failure by what they return.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.backends.tensorrt import timing_cache
from edgespec.backends.tensorrt.bindings import Trt, TrtBindings
from edgespec.backends.tensorrt.build_job import BuildJob, BuildReport
from edgespec.backends.tensorrt.logger import Errors, cleaned, lines_to, recorder_of
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.progress_monitor import BuildProgress, monitor_of
from edgespec.errors import OutputError

Say = Callable[[str, str], None]  # severity and line


class Cancelled(Exception):
    """The build was cancelled through its progress."""


class Refused(Exception):
    """The library refused something: `message`, its own words, and the ONNX node where it names
    one."""

    def __init__(self, message: str, lines: tuple[str, ...] = (), node: str = "") -> None:
        super().__init__(message)
        self.message, self.lines, self.node = message, lines, node


def build(bindings: TrtBindings, job: BuildJob, progress: BuildProgress, say: Say) -> BuildReport:
    """Build the engine of a job and write it to its path. Refused where the library refuses the
    graph or cannot build it, Cancelled where `progress` cancels, OutputError where the path cannot
    be written."""
    trt, errors = bindings.trt, Errors()

    def sink(severity: str, text: str) -> None:
        errors.log(severity, text)
        say(severity, text)

    with lines_to(trt, sink) as logger:
        try:
            made = Build(trt, job, progress, errors, logger)
            logger.kept.append(made)
            return made.run()
        except Refused as refused:
            without_device = job.compute_capability is not None
            lines = cleaned([*refused.lines, *errors.lines], without_device=without_device)
            raise Refused(refused.message, tuple(lines), refused.node) from None


class Build:
    """One build. It holds the recorder and the monitor, which the library's objects need to their
    very end."""

    def __init__(
        self, trt: Trt, job: BuildJob, progress: BuildProgress, errors: Errors, logger: Any
    ) -> None:
        self.trt, self.job, self.progress = trt, job, progress
        self.logger = logger
        try:
            self.builder = self.trt.Builder(logger)
        except (TypeError, RuntimeError) as error:  # its factory gave nothing
            raise Refused(f"the builder cannot be made: {error}") from error
        self.recorder = recorder_of(self.trt, errors)
        self.builder.error_recorder = self.recorder
        flag = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = required(self.builder.create_network(flag), "no network can be made")
        self.monitor = monitor_of(self.trt, progress)

    def run(self) -> BuildReport:
        """Parse, configure, build, write."""
        began = time.monotonic()
        self.parse()
        if self.job.decompose_attention:
            self.decompose_attention()
        config = self.config()
        parsed = time.monotonic()
        engine = self.builder.build_serialized_network(self.network, config)
        if self.progress.failure is not None:
            raise self.progress.failure
        if self.progress.cancelled.is_set():
            raise Cancelled
        engine = required(engine, "the engine cannot be built")
        data = memoryview(engine)
        path = Path(self.job.engine)
        with atomic.writing(Path(path.name)), path.open("xb") as file:
            file.write(data)
        built = time.monotonic()
        if self.job.timing_cache is not None:
            self.keep_times(config, Path(self.job.timing_cache))
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        layers = self.network.num_layers
        return BuildReport(data.nbytes, layers, parsed - began, built - parsed, peak_bytes)

    def keep_times(self, config: Any, path: Path) -> None:
        """Store what was measured. The engine is there: that this cannot be written is no error."""
        try:
            timing_cache.store(config, path)
        except OutputError as error:
            self.logger.sink("WARNING", f"the timing cache is not kept: {error.what}")

    def parse(self) -> None:
        """Read the graph from its file, beside which its weights lie."""
        parser = self.trt.OnnxParser(self.network, self.logger)
        if parser.parse_from_file(self.job.model):
            return
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        nodes = [error.node_name() for error in errors if error.node_name()]
        types = [error.node_operator() for error in errors if error.node_operator()]
        node = f"{nodes[0]} ({types[0]})" if nodes and types else ""
        lines = tuple(line for error in errors for line in error.desc().splitlines())
        raise Refused("the parser refuses the graph", lines, node)

    def decompose_attention(self) -> None:
        """Let attention that has no fused kernel be built of basic operators."""
        for i in range(self.network.num_layers):
            layer = self.network.get_layer(i)
            if layer.type == self.trt.LayerType.ATTENTION_INPUT:
                if not isinstance(layer, self.trt.IAttentionInputLayer):
                    layer.__class__ = self.trt.IAttentionInputLayer
                layer.attention.decomposable = True

    def config(self) -> Any:
        """The builder's config of the job."""
        trt, job = self.trt, self.job
        config = required(self.builder.create_builder_config(), "no config can be made")
        config.progress_monitor = self.monitor
        if job.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace_bytes)
        if job.optimization_level is not None:
            config.builder_optimization_level = job.optimization_level
        if job.compute_capability is not None:
            target = getattr(trt.ComputeCapability, f"SM{job.compute_capability}")
            config.num_compute_capabilities = 1
            if not config.set_compute_capability(target, 0):
                raise Refused(f"it does not compile for SM{job.compute_capability}")
        for profile in job.profiles:
            self.add_profile(config, profile)
        if job.timing_cache is not None:
            timing_cache.attach(config, Path(job.timing_cache))
        return config

    def add_profile(self, config: Any, profile: Profile) -> None:
        """Add a profile in which each input of varying shape has a range, and no other."""
        network = self.network
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        varying = {tensor.name for tensor in inputs if -1 in tuple(tensor.shape)}
        if varying != set(profile.shapes):
            names = ", ".join(sorted(varying ^ set(profile.shapes)))
            raise Refused(f"the profile {profile.name} and the graph differ in: {names}")
        made = self.builder.create_optimization_profile()
        for name, (least, often, most) in profile.shapes.items():
            made.set_shape(name, least, often, most)
        if config.add_optimization_profile(made) < 0:
            raise Refused(f"the profile {profile.name} is refused")


def required(value: Any, failure: str) -> Any:
    """The value itself; Refused where the library gave none."""
    if value is None:
        raise Refused(failure)
    return value
