"""What engines say of their kernels, and what `build` makes of the flags."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.backends.ort import options
from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.options import WeightFormat, parse_options
from edgespec.backends.ort.settings import EngineSettings
from edgespec.contract import GraphShape, Role, canonical_contract
from edgespec.errors import BundleError, EnvironmentProblem, OptionError

SHAPE = GraphShape(Role.LLM, 64, 4, 8, 32, 32, vocab_size=5)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_settings_come_back_as_they_were_written(dtype: str) -> None:
    asked = WeightFormat(kernels="native", kv_cache_dtype=dtype)
    written = EngineSettings.of(asked, cached=True)
    assert written.to_dict() == {"kernels": "native", "kv_cache_dtype": dtype}
    assert EngineSettings.read(written.to_dict(), "config.json") == written


FORM = {"scales": "super", "super_block": 16, "global_scale": 0.5}
HEAD = {"bits": 6, "block": 16, **FORM, "in_features": 64, "out_features": 5}
PLAIN = {"bits": 4, "block": 128, "in_features": 64, "out_features": 5}


@pytest.mark.parametrize("head", [HEAD, PLAIN])
def test_the_form_of_a_head_comes_back_as_it_was_written(head: dict[str, Any]) -> None:
    """Without further keys it is that of older engines."""
    raw = {"kernels": "native", "kv_cache_dtype": "fp32", "head": head}
    assert EngineSettings.read(raw, "config.json").to_dict() == raw


def test_an_engine_that_says_nothing_has_the_kernels_of_onnx_runtime() -> None:
    assert EngineSettings.read({}, "config.json") == EngineSettings.of(WeightFormat(), cached=True)
    assert EngineSettings.of(WeightFormat(), cached=True).to_dict() == {}


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ({"kernels": "cuda", "kv_cache_dtype": "fp32"}, "one of native, onnxruntime"),
        ({"kernels": "native", "kv_cache_dtype": "fp8"}, "one of fp32, fp16, int8"),
        ({"kernels": "native", "speed": 1}, "one of kernels, kv_cache_dtype"),
        ({"kv_cache_dtype": "fp16"}, "kernels"),
        *(
            ({"kernels": "native", "head": HEAD | wrong}, next(iter(wrong)))
            for wrong in (
                {"bits": 5},
                {"block": 48},
                {"scales": "float8"},
                {"super_block": 2, "scales": "float16"},
                {"codebook": "iq4_nl"},
                {"global_scale": "x"},
            )
        ),
    ],
)
def test_wrong_keys_are_refused_by_their_name(raw: dict[str, Any], what: str) -> None:
    with pytest.raises(BundleError, match=what):
        EngineSettings.read(raw, "config.json")


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("int8", 1)])
def test_a_rounded_cache_takes_the_bytes_of_its_type(dtype: Any, size: int) -> None:
    """With int8 the four of a row's scale as well."""
    contract = lowered_contract(canonical_contract(SHAPE), tree_cache=dtype)
    row = 32 * size + (4 if dtype == "int8" else 0)
    assert contract.kv_bytes_per_token == 2 * 4 * 8 * row


def test_our_own_kernels_are_the_default_where_they_were_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "why_missing", lambda: None)
    assert parse_options({}).kernels == "native"
    assert parse_options({"kernels": "onnxruntime"}).kernels == "onnxruntime"
    assert parse_options({"kv_cache_dtype": "int8"}).kv_cache_dtype == "int8"
    monkeypatch.setattr(options, "why_missing", lambda: "there is no compiler")
    assert parse_options({}).kernels == "onnxruntime"


def test_kernels_that_were_not_compiled_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "why_missing", lambda: "there is no compiler")
    with pytest.raises(EnvironmentProblem, match="there is no compiler") as found:
        parse_options({"kernels": "native"})
    assert "leave `kernels` native out" in found.value.remedy
    with pytest.raises(OptionError, match="fp16 is for `kernels` native, and there is no compiler"):
        parse_options({"kv_cache_dtype": "fp16"})


def test_a_rounded_cache_is_refused_on_the_kernels_of_onnx_runtime() -> None:
    with pytest.raises(OptionError, match="`kv_cache_dtype` int8 is for `kernels` native"):
        parse_options({"kernels": "onnxruntime", "kv_cache_dtype": "int8"})
