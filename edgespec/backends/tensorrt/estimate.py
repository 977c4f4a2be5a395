"""What a build would make, and what it would take: the text of --dry-run.

Knows sizes. Estimates are bounds from the contract and the weights; what a compiler makes of them
is known after the build.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgespec.backends.capacity import gigabytes
from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.target import Target
from edgespec.component import ComponentConfig
from edgespec.contract import ITEM_BYTES, GraphContract, TensorSpec

# Hidden rows of a layer that may be alive at once, beside its products and its scores
LIVE_HIDDEN = 4
# Of the weights: what the compiler was seen to have in memory beside itself
BUILD_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device: weights, caches and states of all lanes, inputs and outputs of the
    largest call, and activations of the largest call at most."""

    weights: int
    cache: int
    io: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.io + self.activations


def is_memory(spec: TensorSpec) -> bool:
    """Whether an input keeps something from call to call."""
    return spec.name.startswith(("past_", "conv_state_", "recurrent_state_"))


def estimate(
    component: ComponentConfig,
    contract: GraphContract,
    limits: EngineLimits,
    profiles: tuple[Profile, ...],
    weight_bytes: int,
) -> MemoryEstimate:
    """The memory of an engine of these weights; `contract` is the lowered one."""
    lanes = limits.max_batch_size
    memory = sum(spec.num_bytes(B=lanes) for spec in contract.inputs if is_memory(spec))
    return MemoryEstimate(
        weights=weight_bytes,
        cache=memory,
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


def lines(
    name: str,
    target: Target,
    device: str,
    profiles: tuple[Profile, ...],
    memory: MemoryEstimate,
) -> Iterator[str]:
    """What would be built, for whom, and its memory, a line each."""
    yield (
        f"{name} for {device}: {target.dialect.value} graph, {target.compute},"
        f" {target.capacity} cache slots"
    )
    for profile in profiles:
        parts = [
            f"{key} {'|'.join('x'.join(map(str, dims)) for dims in shapes)}"
            for key, shapes in profile.shapes.items()
            if not key.startswith(("past_", "conv_state_", "recurrent_state_", "committed_"))
        ]
        yield f"profile {profile.name}: {', '.join(parts)}"
    yield (
        f"memory on the device: about {gigabytes(memory.total)} at most (weights"
        f" {gigabytes(memory.weights)}, cache {gigabytes(memory.cache)}, inputs and outputs"
        f" {gigabytes(memory.io)}, activations if nothing is fused"
        f" {gigabytes(memory.activations)})"
    )
    yield f"memory of the build: about {gigabytes(BUILD_FACTOR * memory.weights)} and the library"
