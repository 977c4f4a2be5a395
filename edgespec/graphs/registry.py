"""The table of graph families: one row, one supported architecture."""

from __future__ import annotations

from edgespec.graphs.decoder import Decoder

BASES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "Qwen3_5ForCausalLM": Decoder,
    "Qwen3_5ForConditionalGeneration": Decoder,
}
