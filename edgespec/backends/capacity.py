"""Refuses an engine whose cache, or whose largest pass, this machine cannot hold.

An engine is bound to the machine that builds it, so its memory is known. Knows sizes and flags;
knows no engine library.
"""

from __future__ import annotations

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.base import EngineMemory
from edgespec.backends.engine_config import EngineLimits
from edgespec.contract import Limits
from edgespec.errors import LimitError

FLOAT_BYTES = 4


def check_capacity(
    component: ComponentConfig, limits: EngineLimits, memory: EngineMemory, total: int | None
) -> None:
    """LimitError, with the flag and what fits, where the engine cannot run on `total` bytes;
    None: nobody knows."""
    check_tree(limits)
    if total is None:
        return
    lanes, capacity = limits.max_batch_size, limits.max_kv_cache_capacity
    left = total - lanes * memory.state_bytes
    per_token = lanes * memory.kv_bytes_per_token
    if per_token * capacity > left:
        room = max(left // max(per_token, 1), 0)
        sequences = f"{lanes} sequences of " if lanes > 1 else ""
        message = (
            f"`max_kv_cache_capacity` {capacity}: a KV cache for {sequences}{capacity} tokens takes"
            f" {gigabytes(per_token * capacity)}, and this machine has {gigabytes(total)}"
        )
        fewer = ", or lower `max_batch_size`" if lanes > 1 else ""
        raise LimitError(message, f"Build with {room} or less{fewer}.")
    flag, nodes = tree_of(limits)
    needed = lanes * nodes * (component.graph.vocab_size + capacity) * FLOAT_BYTES
    if needed > total:
        message = (
            f"{flag} {nodes}: logits and masks of such a pass take {gigabytes(needed)}, and this"
            f" machine has {gigabytes(total)}"
        )
        raise LimitError(message, f"Build with a smaller {flag}.")


def check_tree(limits: EngineLimits) -> None:
    """LimitError where a tree has more nodes than the cache has slots. The default is exempt: a
    small cache makes trees smaller."""
    flag, nodes = tree_of(limits)
    if nodes > max(limits.max_kv_cache_capacity, Limits().max_verify_tree_size):
        message = (
            f"{flag} {nodes} exceeds `max_kv_cache_capacity` {limits.max_kv_cache_capacity}: each"
            " node takes a slot of the cache"
        )
        raise LimitError(message, f"Lower {flag}, or raise the capacity.")


def tree_of(limits: EngineLimits) -> tuple[str, int]:
    """The flag and the size of the tree that the engine's role verifies or makes."""
    if limits.max_draft_tree_size is not None:
        return "`max_draft_tree_size`", limits.max_draft_tree_size
    return "`max_verify_tree_size`", limits.verify_tree_size


def gigabytes(size: int) -> str:
    """Bytes in GB (1e9), small ones in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"
