"""DSpark (arXiv 2607.05147) on its way out: the heads stand beside the graph, in the types of the
checkpoint."""

from __future__ import annotations

from edgespec.checkpoint.block_draft import named_as_ours
from edgespec.checkpoint.layouts import is_quantized
from edgespec.errors import UnsupportedModel
from edgespec.export.block_draft import component_row, config_of
from edgespec.export.component import Heads
from edgespec.export.request import ExportRequest
from edgespec.methods.dspark import NAME, DSparkConfig, spec_of

__all__ = ["COMPONENTS", "NAME"]


def heads(request: ExportRequest) -> Heads:
    """The arrays of the draft's heads by their own names. UnsupportedModel for quantized ones."""
    config, checkpoint = config_of(request), request.drafted().checkpoint
    assert isinstance(config, DSparkConfig)
    named, arrays = named_as_ours(checkpoint, config), {}
    for name in config.head_shapes:
        if is_quantized(named, name.rpartition(".")[0]):
            message = (
                f"{checkpoint.place}: {name} is quantized, and the heads are computed in float32"
            )
            raise UnsupportedModel(f"{message}.", "Give a draft whose heads are not quantized.")
        arrays[name] = named.read(name)
    return arrays


COMPONENTS = component_row(NAME, spec_of, heads)
