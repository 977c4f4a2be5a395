"""Claims about schemes.py: the table is whole, and what it refuses, it refuses by name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edgespec.errors import UnsupportedModel
from edgespec.quantization.schemes import (
    MADE,
    SCHEMES,
    TARGETS,
    check_shape,
    check_target,
    scheme,
    scheme_of_algo,
    scheme_to_make,
)


def test_what_is_made_is_what_the_mirrored_tool_makes() -> None:
    assert MADE == ("fp8", "int4_awq", "int8_sq", "nvfp4", "mxfp8")


def test_every_row_is_whole() -> None:
    for name, row in SCHEMES.items():
        assert row.name == name
        assert np.dtype(getattr(ml_dtypes, row.weight, row.weight)).name == row.weight
        assert (row.block > 1) == (row.scaling in ("block", "square"))
        assert (
            row.quantized == (0.8 <= row.min_logits_cosine < 1) == (0 < row.max_weight_error < 0.25)
        )
        assert row.quantized or not row.algos
        assert not row.made or (row.preset and row.algos)
    algos = [algo.lower() for row in SCHEMES.values() for algo in row.algos]
    assert len(algos) == len(set(algos))


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        ("FP8", "fp8"),
        ("W4A16_AWQ", "int4_awq"),
        ("W8A8_SQ_PER_CHANNEL", "int8_sq"),
        ("NVFP4", "nvfp4"),
        ("MXFP8", "mxfp8"),
        ("fp8_pb_wo", "fp8_block"),
        ("FP8_PB_WO", "fp8_block"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_algo_is_found_in_either_case(algo: str, name: str) -> None:
    assert scheme_of_algo(algo, "config.json") is SCHEMES[name]


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnsupportedModel, match="Did you mean int4_awq"):
        scheme("int4-awg")
    with pytest.raises(
        UnsupportedModel, match=r"layer 7: quantized with 'NVFP4_AWQ'.*\n.*Did you mean NVFP4"
    ):
        scheme_of_algo("NVFP4_AWQ", "layer 7")
    with pytest.raises(UnsupportedModel, match="'int8_wo' is read but not made here"):
        scheme_to_make("int8_wo")
    with pytest.raises(UnsupportedModel, match="not a quantization scheme"):
        scheme_to_make("zzz")
    assert scheme_to_make("nvfp4") is scheme("nvfp4")


def test_a_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"model\.x has 192 inputs; int4_awq needs a multiple of 128"
    ):
        check_shape(scheme("int4_awq"), (64, 192), "model.x")
    with pytest.raises(UnsupportedModel, match="has 63 outputs; int4_awq needs a multiple of 2"):
        check_shape(scheme("int4_awq"), (63, 128), "model.x")
    with pytest.raises(UnsupportedModel, match="needs a multiple of 32"):
        check_shape(scheme("mxfp8"), (64, 48), "model.x")
    check_shape(scheme("nvfp4"), (63, 48), "model.x")
    check_shape(scheme("fp8_block"), (63, 47), "model.x")
    check_shape(scheme("int8_sq"), (63, 47), "model.x")


def test_targets_run_what_their_tensor_cores_have() -> None:
    runs = {target: [name for name in MADE if scheme(name).runs_on(target)] for target in TARGETS}
    assert runs == {"orin": ["int4_awq", "int8_sq"], "thor": list(MADE), "spark": list(MADE)}
    with pytest.raises(
        UnsupportedModel, match=r"nvfp4 needs compute capability 10.0; orin has 8.7.*\n.*int8_sq"
    ):
        check_target(scheme("nvfp4"), "orin")
    with pytest.raises(UnsupportedModel, match="Did you mean thor"):
        check_target(scheme("fp8"), "thr")
    check_target(scheme("fp8"), "thor")


@pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="ModelOpt is an extra; test_layouts insists",
)
def test_presets_are_modelopts() -> None:
    spec = importlib.util.find_spec("modelopt")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = spec.submodule_search_locations[0]
    with open(f"{root}/torch/quantization/config.py", encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    missing = [row.preset for row in SCHEMES.values() if row.preset and row.preset not in text]
    assert missing == []


def test_the_page_for_users_names_every_format_and_the_devices_that_run_it() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "quantization.md").read_text(
        encoding="utf-8"
    )
    head, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if "|" in line
    ]
    columns = [head.index(target.capitalize()) for target in TARGETS]
    said = {
        name: [row[i] for i in columns] for name in MADE for row in rows if row[0] == f"`{name}`"
    }
    runs = {
        name: ["yes" if SCHEMES[name].runs_on(target) else "no" for target in TARGETS]
        for name in MADE
    }
    assert said == runs


def test_every_flag_that_the_page_names_is_there() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    known = set(re.findall(r"--[a-z][a-z-]+", (docs / "cli.md").read_text(encoding="utf-8")))
    named = set(
        re.findall(r"(?<!-)--[a-z][a-z-]+", (docs / "quantization.md").read_text(encoding="utf-8"))
    )
    assert {"--calib-data", "--exclude"} <= named <= known | {"--out"}  # the last is a script's
