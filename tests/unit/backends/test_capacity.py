"""An engine that this machine could not run is refused before it is built, with what would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.base import EngineMemory
from edgespec.backends.build import build
from edgespec.backends.capacity import check_capacity
from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.engine_dir import read_config
from edgespec.backends.machine import machine_bytes
from edgespec.contract import Limits, Role
from edgespec.errors import LimitError
from tests.small_pair import LIMITS, small_pair

MEMORY = EngineMemory(kv_bytes_per_token=1000, state_bytes=10_000)
GIB = 2**30


def limits(capacity: int, lanes: int = 1, nodes: int = 64, role: Role = Role.BASE) -> EngineLimits:
    asked = Limits(lanes, 16, capacity, max_verify_tree_size=nodes, max_draft_tree_size=nodes)
    return EngineLimits.of(asked, role)


def check(asked: EngineLimits, total: int | None, memory: EngineMemory = MEMORY) -> None:
    pair = small_pair()
    component = read_config(pair.engine, Role.BASE).component
    check_capacity(component, asked, memory, total)


@pytest.mark.parametrize("lanes", [1, 4])
def test_largest_capacity_that_fits_is_named_and_taken(lanes: int) -> None:
    with pytest.raises(LimitError) as refusal:
        check(limits(10**9, lanes), GIB)
    room = re.search(r"Build with (\d+) or less", refusal.value.remedy)
    assert room is not None
    assert ("`max_batch_size`" in refusal.value.remedy) == (lanes > 1)
    check(limits(int(room[1]), lanes, nodes=1), GIB)
    with pytest.raises(LimitError, match="`max_kv_cache_capacity`"):
        check(limits(int(room[1]) + 1, lanes, nodes=1), GIB)


@pytest.mark.parametrize("role", [Role.BASE, Role.DRAFT, Role.LLM])
def test_tree_with_more_nodes_than_slots_is_refused_by_its_flag(role: Role) -> None:
    flag = "`max_draft_tree_size`" if role is Role.DRAFT else "`max_verify_tree_size`"
    with pytest.raises(LimitError, match=f"{flag} 100000 exceeds `max_kv_cache_capacity` 4096"):
        check(limits(4096, nodes=100_000, role=role), None)
    check(limits(4096, nodes=4096, role=role), None)


def test_default_tree_goes_with_a_small_cache() -> None:
    """Trees shrink where there is less room: nobody asked for one of 64."""
    check(limits(32, nodes=64), GIB)
    with pytest.raises(LimitError, match="65 exceeds"):
        check(limits(32, nodes=65), GIB)


def test_pass_that_takes_more_than_all_memory_is_refused() -> None:
    with pytest.raises(LimitError, match="logits and masks of such a pass"):
        check(limits(20_000, nodes=20_000), GIB)


def test_nothing_is_said_of_memory_that_is_not_known() -> None:
    check(limits(10**12), None)


def test_states_that_fill_the_memory_leave_no_room() -> None:
    """Layers without keys and values: no division by zero."""
    with pytest.raises(LimitError, match="Build with 0 or less"):
        check(limits(64), GIB, EngineMemory(kv_bytes_per_token=0, state_bytes=2 * GIB))


def test_build_asks_before_it_writes(tmp_path: Path) -> None:
    huge = replace(LIMITS, max_kv_cache_capacity=2**40)
    for onnx in (small_pair().base_onnx, small_pair().draft_onnx):
        with pytest.raises(LimitError, match="this machine has"):
            build(onnx, tmp_path / "engine", huge)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(("text", "found"), [("1048576\n", 2**20), ("max\n", None), ("", None)])
def test_limit_of_a_container_counts(text: str, found: int | None, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(text)
    whole = machine_bytes([])
    assert whole is not None
    assert whole > 2**28
    assert machine_bytes([tmp_path / "memory.max", tmp_path / "nowhere"]) == (found or whole)
