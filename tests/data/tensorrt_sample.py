"""Right and wrong uses of TensorRT's API, for the test that finds them; nobody runs this.

A line that is wrong in some versions says in which, or "all".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def required(value: Any) -> Any:
    if value is None:
        raise ValueError
    return value


@dataclass
class Job:
    trt: Any
    config: Any
    capabilities: Any


def build(trt: Any, logger: Any, capabilities: Any) -> None:
    builder = trt.Builder(logger)
    trt.Builder()  # wrong: all
    trt.Bilder(logger)  # wrong: all
    network = required(builder.create_network(0))
    builder.create_network(flag=0)  # wrong: all
    builder.create_network(0, 1)  # wrong: all
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.set_flag(trt.BuilderFlag.FP16)  # wrong: 11.4 rtx-1.5 rtx-1.6 rtx-1.7
    config.progress_monitor = None
    config.num_optimization_profiles = 2  # wrong: all
    pool = trt.MemoryPoolType.WORKSPACE
    config.set_memory_pool_limit(pool, pool_size=1)
    config.set_memory_pool_limit(pool, size=1)  # wrong: all
    work(Job(trt, config, capabilities))
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for tensor in inputs:
        tensor.name = tensor.name.upper()
        tensor.dynamic_range = (0.0, 1.0)  # wrong: 11.4 rtx-1.4 rtx-1.5 rtx-1.6 rtx-1.7
        print(tensor.nmae)  # wrong: all
    parser = trt.OnnxParser(network, logger)
    parser.parse_from_file("model.onnx")
    parser.get_error(0).desc()
    parser.get_error(0).description()  # wrong: all
    if capabilities.typed_by_flag:
        parser.supports_model(b"")  # wrong: rtx-1.4
    if not capabilities.compiles_for:
        return
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)


def work(job: Job) -> None:
    cache = job.config.create_timing_cache(b"")
    job.config.set_timing_cache(cache, ignore_missmatch=False)  # wrong: all
    if job.capabilities.compiles_for:
        job.config.num_compute_capabilities = 1
        only_rtx(job.config)
    job.config.num_compute_capabilities = 1  # wrong: 10.13 10.15 10.16 11.4


def capabilities_of_rtx(trt: Any) -> None:
    trt.ComputeCapability.SM75.name  # wrong: 10.13 10.15 10.16 11.4
    trt.ComputeCapability.SM80.name  # wrong: 10.13 10.15 10.16 11.4
    trt.ComputeCapability.SM86.name  # wrong: 10.13 10.15 10.16 11.4
    trt.ComputeCapability.SM89.name  # wrong: 10.13 10.15 10.16 11.4
    trt.ComputeCapability.SM120.name  # wrong: 10.13 10.15 10.16 11.4
    trt.ComputeCapability.SM121.name  # wrong: 10.13 10.15 10.16 11.4 rtx-1.4
    trt.ComputeCapability.SM110.name  # wrong: all


def only_rtx(config: Any) -> None:
    config.set_compute_capability(None, 0)


def run(trt: Any, runtime: Any, stream: int) -> None:
    engine = trt.Runtime(runtime).deserialize_cuda_engine(b"")
    engine.get_aliased_input_tensor("present")  # wrong: 10.13
    getattr(engine, "get_aliased_input_tensor", None)("present")  # wrong: 10.13
    getattr(engine, "get_aliased_tensor", None)  # wrong: all
    ask = getattr(engine, "get_aliased_input_tensor", None)
    if ask is not None:
        ask("present")
    ask("present")  # wrong: 10.13
    getattr(engine, "get_aliased_input_tensor")  # noqa: B009  # wrong: 10.13
    engine.device_memory_size_v2 = 1  # wrong: all
    context = engine.create_execution_context()
    context.execute_async_v3(stream_handle=stream)
    context.execute_async_v3(stream=stream)  # wrong: all
    layer = trt.INetworkDefinition.add_attention  # wrong: 10.13
    del layer


class Monitor:
    """Made where the module is known."""

    @staticmethod
    def of(trt: Any) -> Any:
        class Own(trt.IProgressMonitor):  # type: ignore[misc]
            def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None: ...

            def step_complete(self, phase_name: str) -> bool:  # wrong: all
                return True

        return Own()
