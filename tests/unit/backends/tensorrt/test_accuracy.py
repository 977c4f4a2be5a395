"""The bounds that an engine of TensorRT must keep, by what it computes in and what it rounds."""

from __future__ import annotations

import pytest

from edgespec.backends.tensorrt.accuracy import (
    ACTIVATIONS,
    MIN_COSINE,
    ROUNDED,
    accuracy_of,
    schemes_in,
)
from edgespec.quantization.schemes import SCHEMES


def test_float32_is_compared_by_value() -> None:
    for schemes in ([], ["int4_awq"], ["fp8_token"]):
        spec = accuracy_of(schemes, "float32", recurrent=False)
        assert (spec.tolerance, spec.min_cosine, spec.max_scale) == (1e-2, None, None)
    assert accuracy_of(["fp8"], "float32", recurrent=False).min_cosine is not None


@pytest.mark.parametrize("compute", ROUNDED)
def test_half_types_show_a_size_that_is_off_by_one_hundredth(compute: str) -> None:
    spec = accuracy_of([], compute, recurrent=False)  # type: ignore[arg-type]
    assert spec.max_scale is not None
    assert spec.min_cosine is not None
    assert 2 * ROUNDED[compute].scale <= spec.max_scale < 0.01  # type: ignore[index]
    assert spec.min_cosine > 0.99


def test_weights_alone_are_no_reason_for_another_bound() -> None:
    plain = accuracy_of([], "float16", recurrent=False)
    for name in ("int4_awq", "int8_wo", "w4a16_nvfp4", "fp8_block", "int8_token"):
        assert accuracy_of([name], "float16", recurrent=False) == plain


def test_the_coarsest_scheme_says_what_may_be() -> None:
    fp8, nvfp4, both = (
        accuracy_of(names, "bfloat16", recurrent=False)
        for names in (["fp8"], ["nvfp4"], ["fp8", "nvfp4", "int4_awq"])
    )
    assert fp8 != nvfp4 == both
    assert nvfp4.min_cosine == MIN_COSINE


def test_recurrent_layers_pass_on_what_is_lost() -> None:
    for compute in ROUNDED:
        one, other = (accuracy_of([], compute, recurrent=r) for r in (True, False))
        assert one.min_cosine is not None
        assert other.min_cosine is not None
        assert MIN_COSINE < one.min_cosine < other.min_cosine
    mixed = accuracy_of(["fp8"], "float16", recurrent=True)
    assert (mixed.min_cosine, mixed.max_scale) == (MIN_COSINE, None)


def test_a_scheme_that_rounds_activations_was_measured_or_is_not_rounded_here() -> None:
    """Those for which TensorRT has no product are lowered with activations as they are."""
    rounds = {row.name for row in SCHEMES.values() if row.activations != "none"}
    assert rounds - ACTIVATIONS.keys() == {"fp8_token", "int8_token"}


def test_the_unquantized_formats_are_no_schemes() -> None:
    assert schemes_in("bf16") == []
    assert schemes_in("fp16, fp8, nvfp4") == ["fp8", "nvfp4"]
