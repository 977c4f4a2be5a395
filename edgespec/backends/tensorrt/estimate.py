"""What a build would make, and what it would take: the text of --dry-run, and what has no room.

Knows sizes. Estimates are bounds from the contract and the weights; what a compiler makes of them
is known after the build.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.capacity import gigabytes
from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.machine import machine_bytes, swap_bytes
from edgespec.backends.tensorrt.devices import COMPUTE_SCHEMES, device_here, memory_of, title_of
from edgespec.backends.tensorrt.lowered_files import weight_bytes
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.target import Compute
from edgespec.contract import ITEM_BYTES, GraphContract, TensorSpec
from edgespec.errors import EnvironmentProblem, LimitError
from edgespec.quantization.schemes import SCHEMES

if TYPE_CHECKING:
    from edgespec.backends.tensorrt.staging import BuildPlan

# Hidden rows of a layer that may be alive at once, beside its products and its scores
LIVE_HIDDEN = 4
# Of the weights: what the compiler was seen to have in memory beside itself
BUILD_FACTOR = 4
SMALLER_WEIGHTS = "quantize the checkpoint (edgespec quantize)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device: weights, caches and states of all lanes, inputs and outputs of the
    largest call, and activations of the largest call at most. `least_weights`: no engine has
    fewer."""

    weights: int
    cache: int
    io: int
    activations: int
    least_weights: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.io + self.activations

    @property
    def least(self) -> int:
        """What any engine takes: its weights and its caches."""
        return self.least_weights + self.cache


def is_memory(spec: TensorSpec) -> bool:
    """Whether an input keeps something from call to call."""
    return spec.name.startswith(("past_", "conv_state_", "recurrent_state_"))


def estimate(component: ComponentConfig, plan: BuildPlan) -> MemoryEstimate:
    """The memory of an engine of this plan's graph and weights, which are a decoder's."""
    contract, profiles, compute = plan.contract, plan.profiles, plan.target.compute
    assert isinstance(contract, GraphContract)
    lanes = plan.limits.max_batch_size
    return MemoryEstimate(
        weights=weight_bytes(plan.model, compute),
        least_weights=weight_bytes(plan.model, compute, least=True),
        cache=sum(spec.num_bytes(B=lanes) for spec in contract.inputs if is_memory(spec)),
        io=max(io_bytes(contract, profile) for profile in profiles),
        activations=max(activation_bytes(component, contract, row) for row in profiles),
    )


def sizes_of(contract: GraphContract, profile: Profile) -> dict[str, int]:
    """The largest size of each symbol in a profile; R, the rows that a block draft writes, is what
    L and S are together."""
    sizes: dict[str, int] = {}
    for spec in contract.inputs:
        for i, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                sizes[dim] = profile.most(spec.name, i)
    sizes["R"] = sizes.get("L", 0) + sizes.get("S", 0)
    return sizes


def io_bytes(contract: GraphContract, profile: Profile) -> int:
    """Bytes of the inputs and outputs of the largest call, without what keeps something."""
    sizes = sizes_of(contract, profile)
    inputs = [spec for spec in contract.inputs if not is_memory(spec)]
    outputs = [spec for spec in contract.outputs if not in_place(spec, contract)]
    return sum(spec.num_bytes(**sizes) for spec in (*inputs, *outputs))


def in_place(spec: TensorSpec, contract: GraphContract) -> bool:
    """Whether an output is the cache, or a state's second half, which counts as the first does."""
    past = {item.name: item for item in contract.inputs}.get(spec.name.replace("present_", "past_"))
    return past is not None and past.shape == spec.shape


def activation_bytes(component: ComponentConfig, contract: GraphContract, profile: Profile) -> int:
    """Bytes that a layer of the largest call may have alive at once, if nothing is fused: its
    hidden rows, the products of its MLP, and the scores of its attention."""
    sizes = sizes_of(contract, profile)
    item = ITEM_BYTES[contract.inputs[0].dtype]
    rows = sizes["B"] * max(sizes.get("S", 1), sizes["R"])
    hidden = LIVE_HIDDEN * max(component.hidden_size, contract.shape.base_features)
    widest = max(hidden + 3 * component.intermediate_size, contract.shape.logits_width)
    slots = next((s.shape[2] for s in contract.inputs if s.name.startswith("past_key")), 0)
    assert isinstance(slots, int)
    scores = 2 * component.num_heads * slots  # before and after the softmax
    return rows * (widest + scores) * item


def lines(plan: BuildPlan, memory: MemoryEstimate | None) -> Iterator[str]:
    """What would be built, for whom, and a decoder's memory, a line each."""
    target = plan.target
    form = f"{target.dialect.value} graph, {target.compute}"
    slots = "" if memory is None else f", {target.capacity} cache slots"
    yield f"{plan.library.title} {plan.version} for {title_of(plan.sm)}: {form}{slots}"
    yield from profile_lines(plan.profiles)
    if memory is None:
        return
    yield (
        f"memory on the device: about {gigabytes(memory.total)} at most (weights"
        f" {gigabytes(memory.weights)}, cache {gigabytes(memory.cache)}, inputs and outputs"
        f" {gigabytes(memory.io)}, activations if nothing is fused"
        f" {gigabytes(memory.activations)})"
    )
    yield f"memory of the build: about {gigabytes(BUILD_FACTOR * memory.weights)} and the library"


def profile_lines(profiles: tuple[Profile, ...]) -> Iterator[str]:
    """The shapes of the inputs of each profile, but for those of caches and states."""
    for profile in profiles:
        parts = [
            f"{key} {'|'.join('x'.join(map(str, dims)) for dims in shapes)}"
            for key, shapes in profile.shapes.items()
            if not key.startswith(("past_", "conv_state_", "recurrent_state_", "committed_"))
        ]
        yield f"profile {profile.name}: {', '.join(parts)}"


def together(memories: Sequence[MemoryEstimate]) -> Iterator[str]:
    """What engines for several capacities take at once: they share the memory that they work in."""
    if len(memories) < 2:
        return
    held = sum(row.weights + row.cache for row in memories)
    work = max(row.io + row.activations for row in memories)
    yield (
        f"all {len(memories)} engines at once: about {gigabytes(held + work)} at most; each is"
        " opened when a request needs it, and one that is idle is closed where memory is short"
    )


# ---- what has no room, and what is slow


def check_device(memory: MemoryEstimate, limits: EngineLimits, sm: int) -> Iterator[str]:
    """A warning where an engine may not fit into the memory of its device. LimitError where it
    cannot."""
    size = memory_of(sm)
    if size is None:
        return
    device, here = title_of(sm), device_here()
    has = "has" if here is not None and here.sm == sm else "has at most"
    if memory.least > size:
        message = (
            f"weights of {gigabytes(memory.least_weights)} and caches of"
            f" {gigabytes(memory.cache)} do not fit: {device} {has} {gigabytes(size)}"
        )
        raise LimitError(message, remedy(memory, limits, size))
    if memory.total > size:
        yield (
            f"about {gigabytes(memory.total)} may be needed on the device, and {device} {has}"
            f" {gigabytes(size)}: {smaller_flags(limits)}, or {SMALLER_WEIGHTS}"
        )


def remedy(memory: MemoryEstimate, limits: EngineLimits, size: int) -> str:
    """What makes an engine fit into so many bytes."""
    left = size - memory.least_weights
    tokens = limits.max_kv_cache_capacity * max(left, 0) // max(memory.cache, 1)
    if not tokens:
        return f"{SMALLER_WEIGHTS[0].upper()}{SMALLER_WEIGHTS[1:]}, or take a smaller model."
    fewer = ", or lower `max_batch_size`" if limits.max_batch_size > 1 else ""
    return f"Build with `max_kv_cache_capacity` {tokens} or less{fewer}, or {SMALLER_WEIGHTS}."


def smaller_flags(limits: EngineLimits) -> str:
    """The flags whose smaller values make calls and caches smaller, as the start of a sentence's
    end."""
    tree = "`max_draft_tree_size`" if limits.max_draft_tree_size else "`max_verify_tree_size`"
    flags = ["`max_kv_cache_capacity`", "`max_input_len`", tree]
    flags += ["`max_batch_size`"] if limits.max_batch_size > 1 else []
    return f"lower {', '.join(flags[:-1])} or {flags[-1]}"


def check_host(memory: MemoryEstimate) -> Iterator[str]:
    """A warning where a build on this machine may not fit into its memory. EnvironmentProblem where
    it cannot: the compiler has the whole engine in memory."""
    here = machine_bytes()
    if here is None:
        return
    size = here + swap_bytes()
    if memory.least_weights > size:
        message = (
            f"the compiler has the engine in memory, {gigabytes(memory.least_weights)} at least,"
            f" and this machine has {gigabytes(size)}"
        )
        raise EnvironmentProblem(message, f"Build on a larger machine, or {SMALLER_WEIGHTS}.")
    if BUILD_FACTOR * memory.weights > size:
        yield (
            f"the build may take {gigabytes(BUILD_FACTOR * memory.weights)}, and this machine has"
            f" {gigabytes(size)}: if it is killed, add swap, or {SMALLER_WEIGHTS}"
        )


def slow_attention(compute: Compute, sm: int) -> Iterator[str]:
    """A warning where attention has no fused kernel for the type in which it is computed."""
    if compute != "float32":
        return
    has_bf16 = sm >= SCHEMES[COMPUTE_SCHEMES["bfloat16"]].min_sm
    flags = "`compute` bf16 or fp16" if has_bf16 else "`compute` fp16"
    yield f"attention in float32 has no fused kernel and is slow: build with {flags}"
