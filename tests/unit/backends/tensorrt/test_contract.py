"""What a lowered graph reads and gives, beside what the canonical one does."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.contract import GraphShape, RecurrentShape, Role, TensorSpec, canonical_contract

DRAFT = GraphShape(Role.DRAFT, 64, 1, 2, 16, 16, 96, features=64, base_features=192)
BLOCK = GraphShape(Role.DRAFT, 64, 1, 2, 16, 16, 96, base_features=192, block=True, sliding=True)
HYBRID = GraphShape(
    Role.BASE,
    64,
    2,
    2,
    16,
    8,
    256,
    features=64,
    local_rotary_dim=8,
    recurrent=RecurrentShape((0,), 2, 4, 16, 24, 4),
)


def lowered(shape: GraphShape, dialect: Dialect = Dialect.NATIVE) -> dict[str, TensorSpec]:
    target = Target(dialect=dialect, compute="bfloat16", capacity=384, max_rows=8)
    contract = lowered_contract(canonical_contract(shape), target)
    return {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}


def of_type(specs: dict[str, TensorSpec], dtype: str) -> set[str]:
    return {name for name, spec in specs.items() if spec.dtype == dtype}


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("shape", [DRAFT, BLOCK, HYBRID])
def test_names_and_their_order_are_those_of_the_canonical_contract(
    shape: GraphShape, dialect: Dialect
) -> None:
    canonical = canonical_contract(shape)
    names = [spec.name for spec in (*canonical.inputs, *canonical.outputs)]
    assert list(lowered(shape, dialect)) == names


def test_rotations_logits_and_states_are_float32_and_all_else_is_the_compute_type() -> None:
    rotations = {"rope_cos", "rope_sin"}
    assert of_type(lowered(DRAFT), "float32") == rotations | {"logits"}
    context = {"context_cos", "context_sin"}
    assert of_type(lowered(BLOCK), "float32") == rotations | context | {"logits"}
    local = {"local_rope_cos", "local_rope_sin"}
    states = {f"{name}_0" for name in ("conv_state", "conv_rows", "recurrent_state")}
    states |= {f"{name}_0" for name in ("present_recurrent_state", "committed_rows", "delta_rows")}
    assert of_type(lowered(HYBRID), "float32") == rotations | local | states | {"logits"}
    keys = {"past_key_1", "past_value_1", "present_key_1", "present_value_1"}
    assert of_type(lowered(HYBRID), "bfloat16") == keys | {"inputs_embeds", "hidden_states"}


@pytest.mark.parametrize("shape", [DRAFT, BLOCK, HYBRID])
def test_the_cache_has_a_fixed_length_in_every_input(shape: GraphShape) -> None:
    specs = lowered(shape)
    assert not [spec for spec in specs.values() if "C" in spec.shape]
    assert specs["attention_mask"].shape == ("B", 1, "S", 384)
    assert specs[f"past_key_{shape.num_layers - 1}"].shape == ("B", 2, 384, 16)


def test_both_hidden_inputs_of_a_draft_have_the_rows_of_the_call() -> None:
    specs = lowered(DRAFT)
    assert specs["base_hidden"].shape == ("B", "S", 192)
    assert specs["draft_hidden"].shape == ("B", "S", 64)


@pytest.mark.parametrize(("shape", "rows"), [(DRAFT, "S"), (BLOCK, "R")])
def test_the_portable_dialect_gives_new_rows_alone(shape: GraphShape, rows: str) -> None:
    def dims(name: str, dialect: Dialect) -> Any:
        return lowered(shape, dialect)[name].shape

    assert dims("present_key_0", Dialect.PORTABLE) == ("B", 2, rows, 16)
    assert dims("past_key_0", Dialect.PORTABLE) == ("B", 2, 384, 16)
    assert dims("present_key_0", Dialect.NATIVE) == ("B", 2, 384, 16)
