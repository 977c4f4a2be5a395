"""What a lowered graph takes and gives, for whoever lowers it, and for whoever runs it.

Knows names and shapes. Imports no ONNX: running an engine needs none.
"""

from __future__ import annotations

from edgespec.contract import GraphContract, TensorSpec


def lowered_contract(canonical: GraphContract, batched: bool = False) -> GraphContract:
    """The contract of a lowered graph; `batched` is the form for more than one sequence.

    For one sequence masks are T = written slots wide instead of C, and this call's rows land in the
    last S of them, so that `write_indices` falls away. Batched, it is the canonical contract: the
    runner keeps C near T. So it is for drafts that make blocks: the other form's kernel lets no row
    see a later slot. Heads have no cache, and one form.
    """
    if batched or canonical.shape.block or canonical.shape.heads:
        return canonical
    inputs = []
    for spec in canonical.inputs:
        if spec.name in ("attention_mask", "sliding_attention_mask"):
            inputs.append(TensorSpec(spec.name, spec.dtype, (1, 1, "S", "T")))
        elif spec.name != "write_indices":
            inputs.append(spec)
    return GraphContract(canonical.shape, tuple(inputs), canonical.outputs)
