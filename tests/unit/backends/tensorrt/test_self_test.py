"""What the inspector tells of an engine's layers, with their names alone and in detail."""

from __future__ import annotations

import json

import pytest

from edgespec.backends.tensorrt.self_test import counted_layers


def test_layers_with_names_alone_are_fused_or_single() -> None:
    told = {"Layers": ["/mlp/up + /mlp/act", "/head", "Reformat", "a + b + c"], "Bindings": ["x"]}
    assert counted_layers(json.dumps(told)) == {"fused": 2, "single": 2}


def test_layers_in_detail_are_counted_by_type() -> None:
    layers = [{"Name": "a", "LayerType": "gemm"}, {"Name": "b", "LayerType": "kgen"}]
    told = {"Layers": [*layers, {"Name": "c", "LayerType": "gemm"}]}
    assert counted_layers(json.dumps(told)) == {"gemm": 2, "kgen": 1}


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}"])
def test_nothing_is_made_up_where_the_inspector_tells_nothing(text: str) -> None:
    assert counted_layers(text) == {}
