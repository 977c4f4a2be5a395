"""The table of sources: a new one is a row here and a file beside it."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.data.sources import daring_anteater, magpie, mt_bench, nemotron, sharegpt, ultrachat
from edgespec.data.sources.row import Source

SOURCES: Mapping[str, Source] = {
    "ultrachat": ultrachat.SOURCE,
    "sharegpt": sharegpt.SOURCE,
    "magpie-1m": magpie.MAGPIE_1M,
    "magpie-500k": magpie.MAGPIE_500K,
    "magpie-300k": magpie.MAGPIE_300K,
    "daring-anteater": daring_anteater.SOURCE,
    "mt-bench": mt_bench.SOURCE,
    "nemotron-v2": nemotron.NEMOTRON_V2,
    "nemotron-v3": nemotron.NEMOTRON_V3,
}
