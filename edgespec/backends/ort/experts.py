"""Experts, our own kernel for mixtures of experts: which nodes of a canonical graph are one, the
layout of its weights, and its node.

A canonical graph computes all experts for all rows; the kernel reads those that a row chose. A row
has the same bits in every call. Knows nodes and bytes; `weights` knows where weights come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx_ir as ir

from edgespec.backends.ort.low_bit_matmul import RowRounding
from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import DOMAIN
from edgespec.backends.rewriting import replace_value, required

Part = Literal["gate", "up", "down"]
PARTS: tuple[Part, ...] = ("gate", "up", "down")
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # as norm_gate.h counts them


@dataclass(frozen=True, slots=True)
class Expert:
    """The nodes of one expert, and what its rows are multiplied by before them."""

    activation: str
    gate: ir.Node
    up: ir.Node
    down: ir.Node
    x: ir.Value
    x_scale: ir.Value | None  # [hidden]
    inner_scale: ir.Value | None  # [inner]

    @property
    def products(self) -> tuple[ir.Node, ir.Node, ir.Node]:
        """The nodes by the order of PARTS."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Mixture:
    """The nodes of one mixture: the sum of all experts, and what the kernel reads."""

    total: ir.Node
    x: ir.Value  # [B, S, hidden]
    ids: ir.Value  # int64 [B, S, k]
    weights: ir.Value  # [B, S, k]
    normalized: bool  # whether the weights are divided by their sum afterwards
    experts: tuple[Expert, ...]

    @property
    def activation(self) -> str:
        """The activation of all experts."""
        return self.experts[0].activation


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """The experts of a layer in one tensor: of each the panels of gate and up in turn, and then
    those of down (experts.h has the same in C++).

    `global_scales` are those of each expert's PARTS, or one for all: `up` and `down` have none.
    """

    count: int
    up: WeightLayout  # of gate as well
    down: WeightLayout
    global_scales: tuple[float, ...] = (1.0,)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of a node that say sizes and forms."""
        up, (one, *others) = self.up, self.global_scales
        sizes = {"experts": self.count, "hidden": up.in_features, "inner": up.out_features}
        alike = replace(self.down, in_features=up.in_features, out_features=up.out_features) == up
        if alike and not others:
            return sizes | replace(up, global_scale=one).attributes
        both: dict[str, Any] = {"layout_version": 2, "global_scales": list(self.global_scales)}
        for prefix, layout in (("", up), ("down_", self.down)):
            both |= {f"{prefix}bits": layout.bits, f"{prefix}block_size": layout.block}
            both |= {f"{prefix}scales": layout.scales, f"{prefix}codebook": layout.codebook}
            both |= {f"{prefix}super_block": layout.super_block}
        return sizes | both

    @property
    def expert_bytes(self) -> int:
        """The size of one expert."""
        return 2 * self.up.num_bytes + self.down.num_bytes

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the tensor in bytes: [experts, bytes of one]."""
        return self.count, self.expert_bytes

    def layout(self, part: Part, expert: int = 0) -> WeightLayout:
        """How one weight is packed."""
        place = len(PARTS) * expert + PARTS.index(part) if len(self.global_scales) > 1 else 0
        form = self.down if part == "down" else self.up
        return replace(form, global_scale=self.global_scales[place])

    def panel_bytes(self, part: Part) -> int:
        """The size of a panel of one weight."""
        layout = self.layout(part)
        return layout.num_bytes // layout.num_panels

    def place(self, expert: int, part: Part) -> tuple[int, int]:
        """Where in the tensor a weight's first panel begins, and the distance of its panels."""
        panel, start = self.panel_bytes(part), expert * self.expert_bytes
        if part == "down":
            return start + 2 * self.up.num_bytes, panel
        return start + (panel if part == "up" else 0), 2 * panel


def layout_of_experts(
    layouts: list[tuple[WeightLayout, WeightLayout, WeightLayout]],
) -> ExpertsLayout | None:
    """The layout of experts whose gate, up and down are packed so; None where all gates and ups, or
    all downs, have no form in common."""
    up = common_form([one for gate, up, _ in layouts for one in (gate, up)])
    down = common_form([down for *_, down in layouts])
    if up is None or down is None:
        return None
    assert (down.in_features, down.out_features) == (up.out_features, up.in_features)
    scales = tuple(
        1.0 if form.scales == "float32" else one.global_scale
        for expert in layouts
        for form, one in zip((up, up, down), expert, strict=True)
    )
    return ExpertsLayout(len(layouts), up, down, scales[:1] if len(set(scales)) == 1 else scales)


def common_form(layouts: list[WeightLayout]) -> WeightLayout | None:
    """The form that holds all weights, without a global scale; None where there is none. Scales of
    float16 are float32 beside weights whose own do not fit."""
    forms = {replace(layout, global_scale=1.0) for layout in layouts}
    if {form.scales for form in forms} == {"float32", "float16"}:
        forms = {replace(form, scales="float32") for form in forms}
    return forms.pop() if len(forms) == 1 else None


def mixtures(graph: ir.Graph) -> Iterator[Mixture]:
    """The mixtures of experts in a canonical graph whose rows no node rounds."""
    for node in graph:
        if node.op_type == "Sum" and node.domain == "":
            mixture = mixture_of(node)
            if mixture is not None:
                yield mixture


def mixture_of(total: ir.Node) -> Mixture | None:
    """The mixture that a Sum adds up; None where it is of another form."""
    scaled = [made_by(value, "Mul") for value in total.inputs]
    shares = [made_by(mul.inputs[1], "Gather") if mul else None for mul in scaled]
    sources = {share.inputs[0] for share in shares if share}
    if None in shares or len(sources) != 1:
        return None
    chosen = chosen_by(sources.pop())
    experts = [expert_of(mul.inputs[0]) for mul in scaled if mul]
    numbers = [index_of(share) for share in shares if share]
    if chosen is None or None in experts or numbers != list(range(len(numbers))):
        return None
    present = tuple(expert for expert in experts if expert is not None)
    first = present[0]
    for one in present[1:]:
        scales = (one.x_scale is None, one.inner_scale is None)
        if one.activation != first.activation or one.x is not first.x:
            return None
        if scales != (first.x_scale is None, first.inner_scale is None):
            return None
    return Mixture(total, first.x, *chosen, present)


def expert_of(value: ir.Value | None) -> Expert | None:
    """The expert that gives a value."""
    down = made_by(value, "MatMul")
    if down is None:
        return None
    rows, inner_scale = scaled_rows(down.inputs[0])
    inner = made_by(rows, "Mul")
    up = made_by(inner.inputs[1], "MatMul") if inner else None
    activated = activated_by(inner.inputs[0]) if inner else None
    if up is None or activated is None:
        return None
    activation, gate = activated
    if gate.inputs[0] is not up.inputs[0]:
        return None
    x, x_scale = scaled_rows(up.inputs[0])
    return Expert(activation, gate, up, down, required(x), x_scale, inner_scale)


def activated_by(value: ir.Value | None) -> tuple[str, ir.Node] | None:
    """The activation that gives a value, and the product that it reads."""
    gelu, silu = made_by(value, "Gelu"), made_by(value, "Mul")
    if gelu is not None:
        gate = made_by(gelu.inputs[0], "MatMul")
        return None if gate is None else ("gelu_tanh", gate)
    gate = made_by(silu.inputs[0], "MatMul") if silu else None
    sigmoid = made_by(silu.inputs[1], "Sigmoid") if silu else None
    if gate is None or sigmoid is None or sigmoid.inputs[0] is not gate.outputs[0]:
        return None
    return "silu", gate


def scaled_rows(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """The rows that are multiplied by a stored vector to give a value, and that vector; the value
    itself and None where they are not."""
    scaled = made_by(value, "Mul")
    scale = scaled.inputs[1] if scaled else None
    stored = scale is not None and isinstance(scale.const_value, ir.ExternalTensor)
    is_vector = stored and scale is not None and scale.dtype == ir.DataType.FLOAT
    if scaled is None or not is_vector:
        return value, None
    return scaled.inputs[0], scale


def chosen_by(shares: ir.Value | None) -> tuple[ir.Value, ir.Value, bool] | None:
    """Numbers and weights of each row's experts, as TopK gives them, and whether the weights are
    divided by their sum; of shares [B, S, experts] that are 0 elsewhere."""
    product = up_from(shares, "Squeeze", "MatMul")
    if product is None:
        return None
    weights = up_from(product.inputs[0], "Unsqueeze")
    ids = up_from(product.inputs[1], "Cast", "Equal", "Unsqueeze", "Cast")
    if weights is None or ids is None:
        return None
    values, numbers = weights.inputs[0], ids.inputs[0]
    divide = made_by(values, "Div")
    if divide is not None:
        values = divide.inputs[0]
        total = made_by(divide.inputs[1], "ReduceSum")
        if total is None or total.inputs[0] is not values:
            return None
    top = made_by(values, "TopK")
    if top is None or list(top.outputs) != [values, numbers]:
        return None
    return required(numbers), required(values), divide is not None


def index_of(share: ir.Node) -> int | None:
    """The number of the expert whose share a Gather reads."""
    tensor = share.inputs[1].const_value if share.inputs[1] is not None else None
    array = tensor.numpy() if tensor is not None else None
    return int(array[0]) if array is not None and array.shape == (1,) else None


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of ONNX's operator `op_type`."""
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def up_from(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The last of the nodes that make a value, one behind the first input of the other."""
    node = None
    for op_type in op_types:
        node = made_by(value, op_type)
        if node is None:
            return None
        value = node.inputs[0]
    return node


def replace_mixture(
    mixture: Mixture,
    layout: ExpertsLayout,
    rounding: RowRounding,
    weights: ir.Value,
    scales: tuple[ir.Value | None, ir.Value | None],
) -> None:
    """Replace the sum of a mixture by one Experts; what it was made of is left without a reader.
    `scales` are what rows are multiplied by: [experts, hidden] and [experts, inner]."""
    attributes: dict[str, Any] = {
        **layout.attributes,
        "activation": ACTIVATIONS[mixture.activation],
        "normalized": int(mixture.normalized),
        **rounding.attributes,
    }
    total = mixture.total
    inputs = [mixture.x, mixture.ids, mixture.weights, weights, *scales]
    while inputs[-1] is None:
        inputs.pop()
    fused = ir.node("Experts", inputs, attributes, domain=DOMAIN, name=total.name)
    assert isinstance(total.graph, ir.Graph)
    total.graph.insert_before(total, fused)
    replace_value(fused.outputs[0], total.outputs[0])
    total.graph.remove(total, safe=True)
