"""Rules of operators: which there are, their types, attributes, outputs and constants."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto
from onnx.defs import OpSchema

from edgespec.backends.tensorrt.checks.graph import (
    DEFAULT_DOMAINS,
    Scope,
    View,
    attribute_of,
    integer,
    is_known,
    name_of,
    type_name,
)
from edgespec.backends.tensorrt.parser_operators import (
    CAST_TYPES,
    CONSTANT_INPUT,
    CUSTOM_ATTRIBUTES,
    CUSTOM_DOMAIN,
    CUSTOM_OPERATORS,
    ONE_OUTPUT,
    OPERATORS,
    PRIVATE_ATTRIBUTES,
    Imported,
)
from edgespec.backends.tensorrt.rules import MAX_TOPK, OPSETS

QUANTIZING = ("QuantizeLinear", "DequantizeLinear")  # how their names end
# Operators whose axis is another one than of their first input, or may be one behind the last
NEW_AXIS = ("DequantizeLinear", "Flatten", "LayerNormalization", "OneHot", "QuantizeLinear")

Problems = Iterator[tuple[str, str]]  # a node, and what was found at it


def opset(view: View) -> Problems:
    """The opset of the default domain."""
    for each in view.model.opset_import:
        if each.domain in DEFAULT_DOMAINS and not OPSETS[0] <= each.version <= OPSETS[1]:
            yield "the model", f"opset {each.version}"


def domain(view: View) -> Problems:
    """Nodes of other domains than ONNX's own and TensorRT's."""
    for _, node in view.nodes():
        if not is_known(node):
            yield name_of(node), f"domain {node.domain}"


def node_form(view: View) -> Problems:
    """Nodes without what their operator needs, which no other rule looks at."""
    for _, node in view.nodes():
        if problem := view.form_problem(node):
            yield name_of(node), problem


def operator(view: View) -> Problems:
    """Nodes whose operator the release does not import."""
    for _, node in view.nodes():
        if not is_known(node):
            continue
        row = row_of(node)
        if row is None:
            yield name_of(node), f"{node.op_type} is not imported"
        elif row.since > view.version.line:
            major, minor = row.since
            yield name_of(node), f"{node.op_type} is imported from {major}.{minor} on"


def row_of(node: NodeProto) -> Imported | None:
    """The row of a node's operator."""
    table = CUSTOM_OPERATORS if node.domain == CUSTOM_DOMAIN else OPERATORS
    return table.get(node.op_type)


def operator_type(view: View) -> Problems:
    """Data of a type that the operator does not take; quantized values have rules of their own."""
    for scope, node in view.nodes():
        row = row_of(node)
        if row is None or not row.types or node.op_type == "DequantizeLinear":
            continue
        if len(node.input) <= row.data or not is_known(node):
            continue
        dtype = scope.tensor(node.input[row.data]).dtype
        if dtype is not None and dtype not in row.types:
            yield name_of(node), f"{node.op_type} of {dtype}"


def mixed_types(view: View) -> Problems:
    """Inputs of different types where the operator's definition has one type for them."""
    for scope, node in view.nodes():
        schema = view.schema(node)
        if schema is None:
            continue
        seen: dict[str, str] = {}
        for name, variable in zip(node.input, variables(schema, len(node.input)), strict=False):
            dtype = scope.tensor(name).dtype if name else None
            if dtype is None or variable is None:
                continue
            first = seen.setdefault(variable, dtype)
            if first != dtype:
                yield name_of(node), f"{first} and {dtype}"
                break


def variables(schema: OpSchema, count: int) -> list[str | None]:
    """For each of `count` inputs the type variable of the operator's definition."""
    names = {each.type_param_str for each in schema.type_constraints}
    out: list[str | None] = []
    for each in schema.inputs:
        variable = each.type_str if each.type_str in names else None
        if each.option == OpSchema.FormalParameterOption.Variadic:
            return out + [variable if each.is_homogeneous else None] * (count - len(out))
        out.append(variable)
    return out


def types_and_shapes(view: View) -> Problems:
    """The first contradiction that ONNX finds."""
    if view.contradiction is not None:
        yield view.contradiction


def cast_type(view: View) -> Problems:
    """Casts to types that only quantization makes, or that the parser has not."""
    for _, node in view.nodes("Cast"):
        made = type_name(integer(node, "to", TensorProto.FLOAT))
        if made not in CAST_TYPES:
            yield name_of(node), f"Cast to {made}"


def attribute(view: View) -> Problems:
    """Attributes that the operator's definition has not, nor the parser beside it."""
    for _, node in view.nodes():
        known: set[str] = set(PRIVATE_ATTRIBUTES.get(node.op_type, ()))
        if node.domain == CUSTOM_DOMAIN:
            if node.op_type not in CUSTOM_ATTRIBUTES:
                continue
            known |= CUSTOM_ATTRIBUTES[node.op_type]
        else:
            schema = view.schema(node)
            if schema is None:
                continue
            known |= set(schema.attributes)
        for each in node.attribute:
            if each.name not in known:
                yield name_of(node), f"attribute {each.name}"


def output_count(view: View) -> Problems:
    """Second outputs where only the first is imported."""
    for _, node in view.nodes(*ONE_OUTPUT):
        if any(node.output[1:]):
            yield name_of(node), f"{sum(map(bool, node.output))} outputs"


def constant_input(view: View) -> Problems:
    """Inputs that are computed at run time where the parser wants constants."""
    for scope, node in view.nodes(*CONSTANT_INPUT):
        name = node.input[1] if len(node.input) > 1 else ""
        if name and not scope.is_constant(name):
            yield name_of(node), f"{name} is not a constant"


def axis(view: View) -> Problems:
    """Axes that the data does not have; what ONNX infers does not look at all of them."""
    for scope, node in view.nodes():
        number = attribute_of(node, "axis")
        dims = scope.tensor(node.input[0]).dims if node.input and node.input[0] else None
        if not isinstance(number, int) or dims is None or node.op_type in NEW_AXIS:
            continue
        if is_known(node) and not -len(dims) <= number < max(len(dims), 1):
            yield name_of(node), f"axis {number} of {shown(dims)}"


def eyelike_static(view: View) -> Problems:
    """EyeLike of a shape that is not known."""
    for scope, node in view.nodes("EyeLike"):
        dims = scope.tensor(node.input[0]).dims
        if dims is None or any(not isinstance(dim, int) for dim in dims):
            yield name_of(node), f"{node.input[0]} has the shape {shown(dims)}"


def layer_name(view: View) -> Problems:
    """Names twice, where the parser minds: it names layers after nodes and after the constants that
    nodes read, and a name twice fails at these nodes alone."""
    taken: set[str] = set()
    for scope, node in view.nodes():
        taken |= {name for name in node.input if name in scope.stored}
        if node.op_type.endswith(QUANTIZING) and node.name in taken:
            yield name_of(node), f"the name {node.name} twice"
        if node.name:
            taken.add(node.name)


def topk_count(view: View) -> Problems:
    """Constant numbers of TopK that are too large."""
    for scope, node in view.nodes("TopK"):
        count = scope.array(node.input[1]) if len(node.input) > 1 else None
        if count is not None and int(count.reshape(-1)[0]) >= MAX_TOPK:
            yield name_of(node), f"K = {int(count.reshape(-1)[0])}"


def topk_sorted(view: View) -> Problems:
    """TopK without order."""
    for _, node in view.nodes("TopK"):
        if integer(node, "sorted", 1) != 1:
            yield name_of(node), "sorted = 0"


def scatter_reduction(view: View) -> Problems:
    """ScatterND that adds, multiplies or compares."""
    for _, node in view.nodes("ScatterND"):
        reduction = attribute_of(node, "reduction")
        if reduction not in (None, b"none"):
            text = reduction.decode() if isinstance(reduction, bytes) else str(reduction)
            yield name_of(node), f"reduction {text}"


def shown(dims: tuple[object, ...] | None) -> str:
    """Dimensions in a sentence."""
    if dims is None:
        return "unknown"
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def static(scope: Scope, name: str, axis: int) -> int | None:
    """The size of a value along an axis; None where it is not known."""
    dims = scope.tensor(name).dims
    if dims is None or not -len(dims) <= axis < len(dims):
        return None
    dim = dims[axis]
    return dim if isinstance(dim, int) else None
