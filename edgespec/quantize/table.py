"""The table of methods whose drafts `quantize draft` takes, by the name of the row in METHODS."""

from __future__ import annotations

from edgespec.quantize import dflash, dspark, eagle1, eagle3, jetspec
from edgespec.quantize.row import QuantizeRow

QUANTIZABLE: dict[str, QuantizeRow] = {
    eagle1.NAME: eagle1.QUANTIZE,
    eagle3.NAME: eagle3.QUANTIZE,
    dflash.NAME: dflash.QUANTIZE,
    jetspec.NAME: jetspec.QUANTIZE,
    dspark.NAME: dspark.QUANTIZE,
}
