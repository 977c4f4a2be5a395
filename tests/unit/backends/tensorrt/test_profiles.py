"""Profiles of lowered graphs: which sizes they allow for each kind of graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.tensorrt.build_job import BuildJob
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.profiles import Profile, max_rows, profiles_of, slots_of
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.contract import (
    GraphContract,
    GraphShape,
    Limits,
    RecurrentShape,
    Role,
    TensorSpec,
    canonical_contract,
)
from edgespec.errors import ContractError

LIMITS = Limits(
    max_batch_size=2,
    max_input_len=512,
    max_kv_cache_capacity=1000,
    max_verify_tree_size=32,
    max_draft_tree_size=20,
)
BASE = GraphShape(
    role=Role.BASE,
    hidden_size=64,
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    vocab_size=100,
    features=192,
)
DRAFT = replace(BASE, role=Role.DRAFT, num_layers=1, features=64, base_features=192)
BLOCK = replace(DRAFT, block=True, features=0)
HEADS = replace(DRAFT, num_layers=0, base_features=64, features=0, heads=3)
HYBRID = replace(
    BASE,
    recurrent=RecurrentShape((0,), 2, 2, 16, 16, 4),
)


def profiles(shape: GraphShape, limits: Limits = LIMITS) -> dict[str, Profile]:
    own = EngineLimits.of(limits, shape.role)
    target = Target(
        dialect=Dialect.NATIVE,
        compute="float16",
        capacity=slots_of(own),
        max_rows=max_rows(shape, own),
    )
    contract = lowered_contract(canonical_contract(shape), target)
    return {profile.name: profile for profile in profiles_of(contract, own)}


def test_a_base_reads_prompts_in_one_profile_and_verifies_trees_in_the_other() -> None:
    found = profiles(BASE)
    assert found["prefill"].shapes["inputs_embeds"] == ((1, 1, 64), (1, 512, 64), (2, 512, 64))
    assert found["prefill"].shapes["gather_idx"] == ((1, 1), (1, 1), (2, 32))
    assert found["generation"].shapes["inputs_embeds"] == ((1, 1, 64), (2, 32, 64), (2, 32, 64))
    slots = 1088  # 1000 tokens and a tree of 32, in multiples of 64
    assert found["generation"].shapes["attention_mask"][2] == (2, 1, 32, slots)
    assert found["generation"].shapes["past_key_1"][2] == (2, 2, slots, 16)


def test_a_prompt_is_read_in_bounded_chunks() -> None:
    long = replace(LIMITS, max_input_len=100_000, max_kv_cache_capacity=100_000)
    assert profiles(BASE, long)["prefill"].most("inputs_embeds", 1) == 1024
    assert profiles(HYBRID, long)["prefill"].most("inputs_embeds", 1) == 64


def test_a_draft_makes_a_level_most_often() -> None:
    found = profiles(DRAFT)["generation"]
    assert found.shapes["base_hidden"] == ((1, 1, 192), (2, 8, 192), (2, 20, 192))
    assert found.shapes["draft_hidden"] == ((1, 1, 64), (2, 8, 64), (2, 20, 64))
    assert "use_base_hidden" not in found.shapes  # its shape does not vary


def test_a_block_draft_reads_a_prompt_as_context() -> None:
    found = profiles(BLOCK)
    assert found["prefill"].shapes["target_hidden"] == ((1, 1, 192), (1, 512, 192), (2, 512, 192))
    assert found["prefill"].shapes["inputs_embeds"] == ((1, 1, 64), (1, 1, 64), (2, 20, 64))
    assert found["generation"].shapes["inputs_embeds"][1] == (2, 20, 64)
    assert found["generation"].most("target_hidden", 1) == 20


def test_recurrent_layers_take_in_what_a_chunk_left() -> None:
    found = profiles(HYBRID)
    assert found["generation"].most("committed_rows_0", 1) == 64
    assert found["generation"].shapes["tree_mask"][2] == (2, 32, 32)
    assert found["prefill"].shapes["recurrent_state_0"] == ((1, 2, 16, 16),) * 2 + ((2, 2, 16, 16),)


def test_heads_over_a_state_read_no_prompt() -> None:
    found = profiles(HEADS)
    assert list(found) == ["generation"]
    assert found["generation"].most("base_hidden", 1) == 20


def test_rows_are_the_most_of_all_profiles() -> None:
    def rows(limits: Limits) -> int:
        return max_rows(BASE, EngineLimits.of(limits, Role.BASE))

    assert (rows(LIMITS), rows(replace(LIMITS, max_input_len=8))) == (512, 32)


def test_every_least_size_is_at_most_the_frequent_one_and_that_the_largest() -> None:
    tiny = Limits(1, 1, 1, 1, 1)
    for shape in (BASE, DRAFT, BLOCK, HYBRID, HEADS):
        for limits in (LIMITS, tiny):
            for profile in profiles(shape, limits).values():
                for least, often, most in profile.shapes.values():
                    sizes = zip(least, often, most, strict=True)
                    assert all(1 <= a <= b <= c for a, b, c in sizes)


def test_a_dimension_without_a_range_is_a_fault_of_the_contract() -> None:
    odd = GraphContract((TensorSpec("odd", "float32", ("B", "Z")),), (), BASE)
    with pytest.raises(ContractError, match="odd: its dimension Z"):
        profiles_of(odd, EngineLimits.of(LIMITS, Role.BASE))


def test_a_job_is_the_same_after_its_way_through_json() -> None:
    job = BuildJob(
        backend="tensorrt",
        model="/a/model.onnx",
        engine="/a/x.engine",
        profiles=tuple(profiles(BASE).values()),
        compute_capability=120,
        timing_cache="/c/times",
    )
    assert "\n" not in job.to_json()
    assert BuildJob.from_json(job.to_json()) == job
