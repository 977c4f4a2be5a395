"""Exports of every kind of graph that is lowered for TensorRT, by name.

Knows which toys make them. Knows no dialect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.tensorrt.lowering import lower
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import GraphContract, canonical_contract
from edgespec.export.components import ExportOptions
from tests import made, shared, toys

CAPACITY, MAX_ROWS = 40, 16
WINDOW = 4  # of the layers that have one


@dataclass(frozen=True)
class Row:
    """A base, and the draft for it where the row is a draft; `base_for` is the method for which a
    base is exported."""

    make_base: Callable[..., Path] = toys.make_base
    base_keys: dict[str, Any] = field(default_factory=lambda: {"layers": 7})
    base_for: str | None = None
    make_draft: Callable[..., Path] | None = None
    draft_keys: dict[str, Any] = field(default_factory=dict)
    as_draft: str | None = None
    component: str = "llm"


BASES = {
    "llama-biases": Row(
        base_keys={"layers": 3, "dtype": "bfloat16", "attention_bias": True, "mlp_bias": True},
        base_for="eagle3",
    ),
    "qwen2": Row(base_keys={"family": "qwen2", "layers": 2, "dtype": "float16"}),
    "qwen3-tied": Row(
        base_keys={
            "family": "qwen3",
            "head_dim": 32,
            "tied": True,
            "dtype": "bfloat16",
            "layers": 2,
        },
        base_for="eagle1",
    ),
    "mistral-window": Row(base_keys={"family": "mistral", "layers": 2, "sliding_window": WINDOW}),
    "gemma3": Row(
        toys.make_gemma3, {"layers": 3, "sliding_window": WINDOW, "dtype": "bfloat16"}, "eagle3"
    ),
    "phi3": Row(
        toys.make_phi3, {"layers": 3, "partial_rotary": 0.5, "dtype": "bfloat16"}, "eagle3"
    ),
    "qwen3-vl": Row(
        toys.make_qwen3_vl, {"layers": 3, "dtype": "bfloat16", "deepstack": (0, 1, 2)}, "eagle3"
    ),
    # All of them are chosen: where two are as good as equal, halves choose the other one
    "experts": Row(
        toys.make_qwen3_moe, {"dtype": "bfloat16", "layers": 2, "experts": 3, "per_token": 3}
    ),
}
DRAFTS: dict[str, Row] = {
    "eagle3": Row(make_draft=toys.make_draft, draft_keys={"layout": "eagle", "dtype": "bfloat16"}),
    "eagle3-fc-norm": Row(
        make_draft=toys.make_draft,
        draft_keys={"layout": "specforge", "fc_norm": True, "dtype": "float16"},
    ),
    "eagle3-two-layers": Row(
        make_draft=toys.make_draft, draft_keys={"layout": "modelopt", "layers": 2}
    ),
    "eagle3-norms": Row(
        make_draft=toys.make_draft,
        draft_keys={
            "layout": "speculators",
            "norm_before_fc": True,
            "norm_before_residual": True,
            "qk_norm": True,
            "norm_output": True,
        },
    ),
    "eagle1": Row(make_draft=toys.make_eagle1, draft_keys={"dtype": "bfloat16", "fc_bias": True}),
    "mtp": Row(toys.make_qwen3_5, {"dtype": "bfloat16"}, base_for="mtp", component="mtp_draft"),
    "dflash": Row(
        make_draft=toys.make_dflash, draft_keys={"dtype": "bfloat16"}, component="dflash_draft"
    ),
    "dflash-windows": Row(
        make_draft=toys.make_dflash,
        draft_keys={
            "layout": "edgellm",
            "layer_types": ["sliding_attention", "full_attention"],
            "window": WINDOW,
        },
        component="dflash_draft",
    ),
    "jetspec": Row(
        make_draft=toys.make_jetspec, draft_keys={"block_size": 6}, component="jetspec_draft"
    ),
    "dspark": Row(
        make_draft=toys.make_dspark, draft_keys={"dtype": "bfloat16"}, component="dspark_draft"
    ),
    "medusa": Row(
        make_draft=toys.make_medusa, draft_keys={"dtype": "bfloat16"}, component="medusa_draft"
    ),
}
DRAFTS["draft-model"] = Row(
    make_draft=lambda path, base, **keys: toys.make_base(path, **keys),
    draft_keys={"family": "qwen3", "layers": 2},
    as_draft="draft_model",
    component="draft_model",
)
HYBRIDS = {
    "qwen3_5": Row(toys.make_qwen3_5, {"dtype": "bfloat16"}),
    "qwen3_5-repeated-keys": Row(
        toys.make_qwen3_5, {"key_heads": 1, "value_heads": 4}, base_for="mtp"
    ),
}
ROWS = BASES | DRAFTS | HYBRIDS
# Each type of each operator is in one of them
KINDS = ("llama-biases", "gemma3", "experts", "eagle3", "dflash", "medusa", *HYBRIDS)
KINDS_AND_DEEP = [
    name if name in KINDS else pytest.param(name, marks=pytest.mark.deep) for name in ROWS
]  # in the order of ROWS, as fixtures are shared by place
# Lowered graphs by export, dialect, compute type and capacity, each with a hash of what it was
Kept = tuple[ir.Model, bytes]
_kept: dict[tuple[Path, Dialect, Compute, int], Kept] = {}


@dataclass(frozen=True)
class Canonical:
    """An exported graph and its contract."""

    onnx_dir: Path
    contract: GraphContract = field(hash=False)

    @property
    def path(self) -> Path:
        return self.onnx_dir / file_names.MODEL

    def model(self) -> ir.Model:
        return ir.load(self.path)

    def lowered(self, dialect: Dialect, compute: Compute, *, capacity: int = CAPACITY) -> ir.Model:
        """The lowered graph, made once a session and only read: who changes it clones it."""
        key = (self.onnx_dir, dialect, compute, capacity)
        if key not in _kept:
            target = Target(dialect=dialect, compute=compute, capacity=capacity, max_rows=MAX_ROWS)
            model = lower(self.model(), self.contract, target)
            _kept[key] = (model, content_of(model))
        return _kept[key][0]


def content_of(model: ir.Model) -> bytes:
    """A hash of the nodes, of what they read and of the types of inputs and outputs."""
    seen = hashlib.sha256()
    for node in model.graph.all_nodes():
        attributes = [(name, a.type, a.value) for name, a in node.attributes.items()]
        said = [a if a[1] != ir.AttributeType.GRAPH else a[:2] for a in attributes]
        names = [[v and v.name for v in values] for values in (node.inputs, node.outputs)]
        seen.update(repr((node.op_type, node.name, names, said)).encode())
    for value in (*model.graph.inputs, *model.graph.outputs):
        seen.update(repr((value.name, value.type, value.shape)).encode())
    seen.update(repr(sorted(model.graph.initializers)).encode())
    return seen.digest()


def changed() -> list[str]:
    """Lowered graphs that are not as they were when they were made."""
    return [str(key) for key, (model, was) in _kept.items() if content_of(model) != was]


def canonical(name: str, *, golden: bool = False) -> Canonical:
    """The exported graph of a row, made once a run; with golden outputs where they are asked."""
    row = ROWS[name]
    base = (
        shared.made_once(
            ("tensorrt base", row.make_base.__name__, row.base_keys),
            lambda out: row.make_base(out / "base", **row.base_keys),
        )
        / "base"
    )
    taps = (1, 2, 3) if row.base_for == "eagle3" else None  # of bases of three layers
    options = ExportOptions(base_for=row.base_for, aux_layers=taps, golden=golden)
    model = base
    if row.make_draft is not None:
        make = row.make_draft
        model = (
            shared.made_once(
                (
                    "tensorrt draft",
                    make.__name__,
                    row.draft_keys,
                    row.make_base.__name__,
                    row.base_keys,
                ),
                lambda out: make(out / "draft", base, **row.draft_keys),
            )
            / "draft"
        )
        options = ExportOptions(base_model_dir=str(base), as_draft=row.as_draft, golden=golden)
    onnx_dir = made.exported(model, options) / row.component
    config = ComponentConfig.read(onnx_dir / file_names.CONFIG)
    return Canonical(onnx_dir, canonical_contract(config.graph))
