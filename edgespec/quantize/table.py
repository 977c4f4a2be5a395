"""The table of methods whose drafts `quantize draft` takes, by the name of the row in METHODS."""

from __future__ import annotations

from edgespec.methods import dflash, dspark, jetspec
from edgespec.quantize import block_draft, eagle1, eagle3
from edgespec.quantize.row import QuantizeRow

QUANTIZABLE: dict[str, QuantizeRow] = {
    eagle1.NAME: eagle1.QUANTIZE,
    eagle3.NAME: eagle3.QUANTIZE,
    dflash.NAME: block_draft.QUANTIZE,
    jetspec.NAME: block_draft.QUANTIZE,
    dspark.NAME: block_draft.QUANTIZE,  # without its heads, which are computed in float32
}
